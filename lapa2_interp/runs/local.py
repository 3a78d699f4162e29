"""Cells made on this machine: in this process, or in several.

Engines move jobs to workers and outcomes back, and give a job of a worker that died to another one.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from tqdm import tqdm

from lapa2_interp._util.errors import RunError
from lapa2_interp.models.machine import AUTO_DTYPE, default_device, n_cores
from lapa2_interp.runs.jobs import (
    ATTEMPTS,
    Engine,
    Failed,
    Job,
    Outcome,
    Progress,
    ignore_progress,
    worker_lost,
)
from lapa2_interp.runs.worker import Worker


class InProcess:
    """An engine in this process.

    Args:
        worker: Does the jobs, and keeps its model; by default one that is made for them.
    """

    slots = 1

    def __init__(
        self,
        device: str | None = None,
        threads: int = 1,
        worker: Worker | None = None,
        pack: str = "auto",
    ) -> None:
        self._settings, self._given = (device, threads, pack), worker
        self._worker: Worker | None = None
        self._jobs: list[Job] = []

    def __enter__(self) -> InProcess:
        import torch

        self._before = torch.get_num_threads()
        self._worker = self._given or Worker(*self._settings)
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        torch.set_num_threads(self._before)
        self._worker = None

    def submit(self, job: Job) -> None:
        self._jobs.append(job)

    def wait(self, told: Progress = ignore_progress) -> Iterator[tuple[Job, Outcome]]:
        assert self._worker is not None
        job = self._jobs.pop(0)
        yield job, self._worker.do(job, partial(told, job))


LOOK = 1.0
"""Seconds after which the coordinator looks again how far its workers are."""

_worker: Worker | None = None
_share: Any = None
"""A number that the coordinator reads: the share of this worker's job that is done."""


def _begin(share: Any, device: str | None, threads: int, pack: str, workers: int) -> None:
    """Start a process of `Processes`: make its worker, and ignore Ctrl-C, which the coordinator
    answers."""
    import signal
    import threading

    global _worker, _share
    _share = share
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore that a killed process leaves behind
    threading.Thread(target=_end_with_coordinator, daemon=True).start()
    _worker = Worker(device, threads, pack, workers)


def _end_with_coordinator() -> None:
    """End a worker whose coordinator was killed: it would wait for ever, with its model in
    memory."""
    import multiprocessing

    coordinator = multiprocessing.parent_process()
    assert coordinator is not None
    coordinator.join()
    os._exit(1)


def _do(job: Job) -> Outcome:
    assert _worker is not None
    return _worker.do(job, partial(setattr, _share, "value"))


class Processes:
    """An engine in several processes on this machine; with GPUs, process i has the i-th GPU.

    Each process is a separate pool, so that a killed one ends no job of another.
    """

    def __init__(
        self, workers: int, device: str | None = None, threads: int = 1, pack: str = "auto"
    ) -> None:
        self.slots = workers
        self._device, self._threads, self._pack = device, threads, pack
        self._pools: list[Any] = []
        self._shares: list[Any] = []
        self._running: dict[Any, tuple[int, Job, int]] = {}
        self._latest: dict[int, str] = {}

    def __enter__(self) -> Processes:
        import multiprocessing

        spawn = multiprocessing.get_context("spawn")
        self._shares = [spawn.Value("d", lock=False) for _ in range(self.slots)]
        self._pools = [self._new(i) for i in range(self.slots)]
        return self

    def _new(self, number: int) -> Any:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        import torch

        device = self._device
        if device in (None, "cuda") and torch.cuda.is_available():
            device = f"cuda:{number % torch.cuda.device_count()}"
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(
            1,
            mp_context=context,
            initializer=_begin,
            initargs=(self._shares[number], device, self._threads, self._pack, self.slots),
        )

    def __exit__(self, *_: object) -> None:
        _close(self._pools)

    def submit(self, job: Job, attempt: int = 1) -> None:
        from concurrent.futures.process import BrokenProcessPool

        busy = {number for number, _, _ in self._running.values()}
        # The worker that has this cell's plan, if it is free.
        free = [number for number in range(self.slots) if number not in busy]
        mine = [number for number in free if self._latest.get(number) == job.cell.key]
        number = (mine or free)[0]
        self._latest[number] = job.cell.key
        try:
            future = self._start(number, job)
        except BrokenProcessPool:  # it died with nothing to do
            self._renew(number)
            future = self._start(number, job)
        self._running[future] = (number, job, attempt)

    def _start(self, number: int, job: Job) -> Any:
        self._shares[number].value = 0.0
        with _sigint_blocked():
            return self._pools[number].submit(_do, job)

    def _renew(self, number: int) -> None:
        _close([self._pools[number]])
        self._pools[number] = self._new(number)

    def wait(self, told: Progress = ignore_progress) -> Iterator[tuple[Job, Outcome]]:
        from concurrent.futures import FIRST_COMPLETED, wait
        from concurrent.futures.process import BrokenProcessPool

        while not (done := wait(self._running, LOOK, return_when=FIRST_COMPLETED).done):
            for number, job, _ in self._running.values():
                told(job, self._shares[number].value)
        for future in done:
            number, job, attempt = self._running.pop(future)
            error = future.exception()
            if error is None:
                yield job, future.result()
            elif not isinstance(error, BrokenProcessPool):
                yield job, Failed("".join(traceback.format_exception(error)))
            else:
                self._renew(number)
                if attempt == ATTEMPTS:
                    yield job, worker_lost(attempt)
                else:
                    self.submit(job, attempt + 1)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Processes started in the block ignore Ctrl-C, which would also reach them while they
    import."""
    import signal
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _close(pools: Sequence[Any]) -> None:
    """End pools at once: what their workers have finished is with the coordinator, and one that has
    had no job yet may still be importing."""
    for pool in pools:
        for process in list((pool._processes or {}).values()):
            with suppress(Exception):
                process.kill()
    for pool in pools:
        pool.shutdown(wait=True, cancel_futures=True)


def local_engine(
    workers: int | None, device: str | None, threads: int, pack: str = "auto"
) -> Engine:
    """An engine on this machine.

    Args:
        workers: By default one for each GPU, or for each CPU core where the device is the CPU.

    Raises:
        RunError: Less than one worker.
    """
    import torch

    if workers is None:
        named = torch.device(default_device() if device in (None, AUTO_DTYPE) else str(device))
        one = device == AUTO_DTYPE or named.index is not None  # a model over all GPUs, or on one
        on_gpus = 1 if one else torch.cuda.device_count()
        workers = on_gpus if named.type == "cuda" else max(1, n_cores() // threads)
    if workers < 1:
        raise RunError(f"--workers must be at least 1, found {workers}")
    if workers == 1:
        return InProcess(device, threads, pack=pack)
    return Processes(workers, device, threads, pack)
