"""Engines carry batches to workers: this process, or several processes on this machine.

An engine takes (cell, number of a batch) and gives a future. A future that raises has lost its
worker; the sweep submits the batch again.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from lapa2_interp._util.errors import RunError
from lapa2_interp.generation.cell import Cell
from lapa2_interp.models.machine import AUTO_DTYPE, default_device, n_cores
from lapa2_interp.models.prepacked import Prepacking
from lapa2_interp.runs.store import Failure, FinishedBatch
from lapa2_interp.runs.worker import Worker

Outcome = FinishedBatch | Failure


class Engine(ABC):
    """Workers that make batches. They end with the `with` block, or by `close`.

    Attributes:
        n_workers: Workers that it will have.
    """

    n_workers: int

    @abstractmethod
    def slots(self) -> int:
        """Batches it can make at once; may grow while a sweep runs."""

    @abstractmethod
    def submit(
        self, cell: Cell, number: int, packing: Prepacking | None, progress: tqdm
    ) -> Future[Outcome]:
        """Make a batch; at most `slots()` are under way at once.

        Args:
            packing: As in `Worker.make_batch`.
            progress: A bar to advance by tokens, if the engine can.
        """

    @abstractmethod
    def close(self) -> None:
        """End the workers, if they have not ended before."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class InProcess(Engine):
    """An engine in this process.

    Args:
        worker: Makes the batches, and keeps its model; by default one of the other arguments.
    """

    n_workers = 1

    def __init__(
        self,
        device: str | None = None,
        threads: int = 1,
        worker: Worker | None = None,
        pack: str = "auto",
    ) -> None:
        self._worker = worker or Worker(device, threads, pack)

    def close(self) -> None:
        pass

    def slots(self) -> int:
        return 1

    def submit(
        self, cell: Cell, number: int, packing: Prepacking | None, progress: tqdm
    ) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        future.set_result(self._worker.try_batch(cell, number, packing, progress))
        return future


@dataclass(eq=False)
class Slot:
    """Place of a worker of an engine.

    Attributes:
        worker: A pool of one process, or an actor.
        future: Its last batch.
        cell: Key of the last batch's cell, whose plan the worker keeps.
        note: What a user should know of its machine.
    """

    worker: Any
    future: Future[Outcome] | None = None
    cell: str = ""
    note: str = ""

    @property
    def is_free(self) -> bool:
        return self.future is None or self.future.done()

    @property
    def is_lost(self) -> bool:
        """True if the worker died at its last batch."""
        return self.future is not None and self.future.done() and bool(self.future.exception())


def free_slot(slots: list[Slot], cell: Cell) -> Slot:
    """A free slot; one that has the cell's plan, if there is one."""
    free = [slot for slot in slots if slot.is_free]
    return next((slot for slot in free if slot.cell == cell.key), free[0])


class LocalPool(Engine):
    """An engine of several processes on this machine; with GPUs, process i has the i-th GPU.

    Each slot is a pool of one process, which begins with its first batch. So a killed process loses
    its own batch alone.
    """

    def __init__(
        self, workers: int, device: str | None = None, threads: int = 1, pack: str = "auto"
    ) -> None:
        self.n_workers, self._settings = workers, (workers, device, threads, pack)
        self._slots = [Slot(self._new(number)) for number in range(workers)]

    def close(self) -> None:
        for slot in self._slots:
            _kill(slot.worker)
        self._slots = []

    def slots(self) -> int:
        return len(self._slots)

    def submit(
        self, cell: Cell, number: int, packing: Prepacking | None, progress: tqdm
    ) -> Future[Outcome]:
        from concurrent.futures.process import BrokenProcessPool

        slot = free_slot(self._slots, cell)
        if slot.is_lost:
            self._renew(slot)
        with _sigint_blocked():
            try:
                slot.future = slot.worker.submit(_make_batch, cell, number, packing)
            except BrokenProcessPool:  # it died with nothing to do
                self._renew(slot)
                slot.future = slot.worker.submit(_make_batch, cell, number, packing)
        slot.cell = cell.key
        assert slot.future is not None
        return slot.future

    def _renew(self, slot: Slot) -> None:
        _kill(slot.worker)
        slot.worker = self._new(self._slots.index(slot))

    def _new(self, number: int) -> Any:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        import torch

        workers, device, threads, pack = self._settings
        if device in (None, "cuda") and torch.cuda.is_available():
            device = f"cuda:{number % torch.cuda.device_count()}"
        return ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(device, threads, pack, workers),
        )


_worker: Worker | None = None
"""The worker of a process of `LocalPool`."""


def _begin(device: str | None, threads: int, pack: str, workers: int) -> None:
    """Start a process of `LocalPool`, which ignores Ctrl-C: the sweep answers it."""
    import signal
    import threading

    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore that a killed process leaves behind
    threading.Thread(target=_end_with_sweep, daemon=True).start()
    _worker = Worker(device, threads, pack, workers)


def _end_with_sweep() -> None:
    """End this process when the sweep was killed: it would wait for ever, with its model in
    memory."""
    import multiprocessing

    sweep = multiprocessing.parent_process()
    assert sweep is not None
    sweep.join()
    os._exit(1)


def _make_batch(cell: Cell, number: int, packing: Prepacking | None) -> Outcome:
    assert _worker is not None
    return _worker.try_batch(cell, number, packing)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Processes started in the block ignore Ctrl-C, which would also reach them while they
    import."""
    import signal
    from multiprocessing import resource_tracker

    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(pool: Any) -> None:
    """End a pool at once: what it has finished is with the sweep, and its process may still be
    importing."""
    for process in list((pool._processes or {}).values()):
        with suppress(Exception):
            process.kill()
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
    return LocalPool(workers, device, threads, pack)
