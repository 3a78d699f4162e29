"""Engines carry batches to workers: this process, or several processes on this machine.

An engine takes (cell, number of a batch) and gives a future. A future that raises has lost its
worker (`WorkerLost` tells how); the sweep submits the batch again.

Processes of this machine import the package, and never the script that sweeps: it would sweep
again where it has no `if __name__ == "__main__":`, and has no file where it is standard input.
"""

from __future__ import annotations

import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tqdm import tqdm

from lapa2_interp._util.allocator import keep_freed_memory
from lapa2_interp.errors import RunError, parameter
from lapa2_interp.generation.cell import Cell
from lapa2_interp.models.machine import AUTO_DTYPE, default_device, n_cores
from lapa2_interp.models.prepacked import Prepacking
from lapa2_interp.runs.store import Failure, FinishedBatch
from lapa2_interp.runs.worker import Worker

Outcome = FinishedBatch | Failure


class WorkerLost(Exception):
    """A worker ended before its batch did; the message says how.

    Attributes:
        begun: True if it had begun: then it ended at a batch, else while it started.
    """

    def __init__(self, message: str, begun: bool) -> None:
        super().__init__(message)
        self.begun = begun


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
        self, cell: Cell, number: int, prepacking: Prepacking | None, progress: tqdm
    ) -> Future[Outcome]:
        """Make a batch; at most `slots()` are under way at once.

        Args:
            prepacking: As in `Worker.make_batch`.
            progress: A bar to advance by tokens, if the engine can.

        Raises:
            RunError: No process can be started here.
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
        attn: str = "auto",
    ) -> None:
        self._worker = worker or Worker(device, threads, pack, attn=attn)

    def close(self) -> None:
        pass

    def slots(self) -> int:
        return 1

    def submit(
        self, cell: Cell, number: int, prepacking: Prepacking | None, progress: tqdm
    ) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        future.set_result(self._worker.try_batch(cell, number, prepacking, progress))
        return future


@dataclass(eq=False)
class Slot:
    """Place of a worker of an engine.

    Attributes:
        worker: A process, or an actor; None before the first batch.
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
        self,
        workers: int,
        device: str | None = None,
        threads: int = 1,
        pack: str = "auto",
        attn: str = "auto",
    ) -> None:
        self.n_workers, self._settings = workers, (device, threads, pack, workers, attn)
        self._slots = [Slot(None) for _ in range(workers)]

    def close(self) -> None:
        for slot in self._slots:
            _end(slot)
        self._slots = []

    def slots(self) -> int:
        return len(self._slots)

    def submit(
        self, cell: Cell, number: int, prepacking: Prepacking | None, progress: tqdm
    ) -> Future[Outcome]:
        slot = free_slot(self._slots, cell)
        if slot.worker is None or slot.is_lost or slot.worker.is_over:
            _end(slot)
            slot.worker = self._new(self._slots.index(slot))
        slot.future, slot.cell = slot.worker.submit(cell, number, prepacking), cell.key
        assert slot.future is not None
        return slot.future

    def _new(self, number: int) -> WorkerProcess:
        import torch

        device, *settings = self._settings
        if device in (None, "cuda") and torch.cuda.is_available():
            device = f"cuda:{number % torch.cuda.device_count()}"
        return WorkerProcess(device, *settings)


def _end(slot: Slot) -> None:
    if slot.worker is not None:
        slot.worker.end()


BEGIN = "from lapa2_interp.runs.engines import _begin; _begin(*settings)"
"""The first call of a process. It imports the package, so that what fails there is the call's error
and no traceback in the terminal."""


class WorkerProcess:
    """A process with a `Worker`, which makes one batch at a time.

    Args:
        settings: Arguments of `_begin`.

    Raises:
        RunError: No process can be started.
    """

    def __init__(self, *settings: Any) -> None:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, mp_context=context)
        try:
            with _sigint_blocked(), _script_hidden():
                self._begun = self._pool.submit(exec, BEGIN, {"settings": settings})
        except (OSError, AssertionError, RuntimeError) as error:
            raise RunError(_cannot_start(error)) from error
        (self.process,) = self._pool._processes.values()

    @property
    def is_over(self) -> bool:
        """True if the process has ended."""
        return not self.process.is_alive()

    def submit(self, cell: Cell, number: int, prepacking: Prepacking | None) -> Future[Outcome]:
        """Make a batch once the worker has begun; the future raises `WorkerLost` if it ends."""
        outcome: Future[Outcome] = Future()

        def make(begun: Future[None]) -> None:
            if begun.cancelled():
                outcome.cancel()
                return
            if error := begun.exception():
                outcome.set_exception(self._lost(error, False))
                return
            try:
                made = self._pool.submit(_make_batch, cell, number, prepacking)
            except RuntimeError as error:  # it has ended since, or is being ended
                outcome.set_exception(self._lost(error, True))
            else:
                made.add_done_callback(finish)

        def finish(made: Future[Outcome]) -> None:
            if made.cancelled():
                outcome.cancel()
            elif error := made.exception():
                outcome.set_exception(self._lost(error, True))
            else:
                outcome.set_result(made.result())

        self._begun.add_done_callback(make)
        return outcome

    def _lost(self, error: BaseException, begun: bool) -> WorkerLost:
        from concurrent.futures.process import BrokenProcessPool

        if not isinstance(error, BrokenProcessPool):
            return WorkerLost(f"{type(error).__name__}: {error}", begun)
        if error.__cause__ is not None:  # then the process may live
            reason = str(error.__cause__).strip("'\n ").splitlines()[-1]
            return WorkerLost(f"its answer cannot be read: {reason}", begun)
        self.process.join(timeout=5)
        return WorkerLost(_told_end(self.process.exitcode, begun), begun)

    def end(self) -> None:
        """End the process at once: what it has finished is with the sweep, and it may still be
        importing."""
        with suppress(Exception):
            self.process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)


def _cannot_start(error: Exception) -> str:
    """Why no process can be started here, in a sentence."""
    here = f"{parameter('workers', '1')} makes the cells in this process"
    if "bootstrapping" in str(error):
        return (
            "this process imports the script of the one that started it, and can start no workers"
            ' meanwhile: put what the script does under if __name__ == "__main__":'
        )
    return (
        f"a worker process cannot be started: {getattr(error, 'strerror', None) or error}; {here}"
    )


def _told_end(code: int | None, begun: bool) -> str:
    """How a process ended, by its exit code, in a sentence."""
    when = "at this batch" if begun else "before its first batch"
    if code is None or code >= 0:
        by_itself = "without an exit code" if code is None else f"with exit code {code}"
        return f"its process ended by itself {when}, {by_itself}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name == "SIGKILL":
        less = (
            f"fewer rows share a batch with {parameter('max_rows', 'N', 'set')}"
            if begun
            else f"give fewer {parameter('workers')}"
        )
        return (
            f"its process was killed {when}, which an operating system does to a process that wants"
            f" more memory than there is; {less}"
        )
    fault = name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE")
    return f"its process was ended by {name} {when}{', a fault in a library' * fault}"


_worker: Worker | None = None
"""The worker of a process of `LocalPool`."""


def _begin(device: str | None, threads: int, pack: str, workers: int, attn: str) -> None:
    """Start a process of `LocalPool`, which ignores Ctrl-C: the sweep answers it."""
    import threading

    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()
    tqdm.set_lock(threading.RLock())  # its own is a semaphore that a killed process leaves behind
    threading.Thread(target=_end_with_sweep, daemon=True).start()
    _worker = Worker(device, threads, pack, workers, attn)


def _end_with_sweep() -> None:
    """End this process when the sweep was killed: it would wait for ever, with its model in
    memory."""
    import multiprocessing

    sweep = multiprocessing.parent_process()
    assert sweep is not None
    sweep.join()
    os._exit(1)


def _make_batch(cell: Cell, number: int, prepacking: Prepacking | None) -> Outcome:
    assert _worker is not None
    return _worker.try_batch(cell, number, prepacking)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Processes started in the block ignore Ctrl-C, which would also reach them while they
    import."""
    from multiprocessing import resource_tracker

    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it would unblock the signal
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _script_hidden() -> Iterator[None]:
    """Processes started in the block do not import the script that runs: its module has no name and
    no file to find it by. Other threads see its contents as before."""
    script = sys.modules["__main__"]
    hidden = ModuleType("__main__")
    hidden.__dict__.update(
        {
            name: value
            for name, value in vars(script).items()
            if name not in ("__file__", "__spec__")
        }
    )
    sys.modules["__main__"] = hidden
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def local_engine(
    workers: int | None, device: str | None, threads: int, pack: str = "auto", attn: str = "auto"
) -> Engine:
    """An engine on this machine.

    Args:
        workers: By default one for each GPU, or for each CPU core where the device is the CPU.
    """
    import torch

    if workers is None:
        asked = torch.device(default_device() if device in (None, AUTO_DTYPE) else str(device))
        one = device == AUTO_DTYPE or asked.index is not None  # a model over all GPUs, or on one
        on_gpus = 1 if one else torch.cuda.device_count()
        workers = on_gpus if asked.type == "cuda" else max(1, n_cores() // threads)
    if workers == 1:
        return InProcess(device, threads, pack=pack, attn=attn)
    return LocalPool(workers, device, threads, pack, attn)
