"""Where cells are computed: in this process, in several on this machine, or on a Ray cluster.

A job is a cell to open, or one group of its rows (`plan.Plan.groups`) to generate. A group is never split: who shares a batch
belongs to the cell, so any number of workers on any number of machines of one kind makes the same bytes. A `Worker` holds one
model; engines move jobs to workers and outcomes back, and give a job of a worker that died to another one.
"""

from __future__ import annotations

import hashlib
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tqdm import tqdm

from lapa2_interp.errors import RunError
from lapa2_interp.experiments.grids import Cell
from lapa2_interp.machine import cores
from lapa2_interp.prefixes import SoftName
from lapa2_interp.progress import no_progress

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from lapa2_interp.attention.hooked import Model
    from lapa2_interp.kit import ModelKit
    from lapa2_interp.plan import Plan

ATTEMPTS = 3
"""Times a job is given out when its workers die."""
PLANS = 8
"""Plans a worker keeps: groups of several cells may come in turns."""


@dataclass(frozen=True)
class Job:
    """A cell to open (group None), or one group of its rows to generate."""

    cell: Cell
    group: int | None = None


@dataclass(frozen=True)
class Opened:
    """A cell's plan, as far as the coordinator must know it.

    Attributes:
        groups: Samples of each group.
        facts: Fields of the manifest that only the worker knows.
        seconds: Loading, preparing and planning.
    """

    groups: tuple[int, ...]
    facts: dict[str, Any]
    seconds: float


@dataclass(frozen=True)
class Part:
    """The texts and the trace of one group."""

    samples: pd.DataFrame
    trace: xr.Dataset | None
    problems: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Failed:
    """Why a job has no outcome: a traceback, or that its worker died."""

    traceback: str


Outcome = Opened | Part | Failed


class Worker:
    """Holds a model and does jobs, one at a time.

    Args:
        device: cpu, cuda, ...; CUDA when there is one, by default.
        threads: Of a worker on the CPU. Another number may change the last bits of a logit.
    """

    def __init__(self, device: str | None = None, threads: int = 1) -> None:
        import torch

        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if self.device == "cpu":
            torch.set_num_threads(threads)
        self.threads = threads
        self._model: tuple[tuple[str, ...], Model, ModelKit] | None = None
        self._plans: dict[str, Plan] = {}

    def do(self, job: Job) -> Outcome:
        """A job's outcome; every error is one."""
        try:
            return self._open(job.cell) if job.group is None else self._generate(job.cell, job.group)
        except Exception as error:
            out_of_memory = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
            note = "; fewer rows share a batch with --set max_rows=N" if out_of_memory else ""
            return Failed(traceback.format_exc().rstrip() + note)

    def model(self, cell: Cell) -> Model:
        """The cell's model; the one before it is let go first."""
        return self._model_and_kit(cell)[0]

    def _model_and_kit(self, cell: Cell) -> tuple[Model, ModelKit]:
        from lapa2_interp.kit import ModelKit
        from lapa2_interp.models import load_model

        wanted = (cell.model, cell.dtype, cell.model_class)
        if self._model is None or self._model[0] != wanted:
            self._model = None
            self._plans.clear()
            loaded = load_model(cell.model, cell.dtype, self.device, cell.model_class)
            self._model = (wanted, loaded, ModelKit(loaded))
        return self._model[1:]

    def plan(self, cell: Cell) -> Plan:
        """The cell's plan; plans of one model share what their methods have prepared."""
        from lapa2_interp.plan import plan

        model, kit = self._model_and_kit(cell)
        if cell.key not in self._plans:
            made = plan(
                model, cell.decoder, cell.task, cell.attribute, cell.task.prompts.texts, cell.augmentation, cell.length,
                cell.samples, cell.max_rows, cell.doubled_bos, kit,
            )  # fmt: skip
            while len(self._plans) >= PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[cell.key] = made
        return self._plans[cell.key]

    def _open(self, cell: Cell) -> Opened:
        from lapa2_interp.experiments.store import library_versions, source_commit
        from lapa2_interp.models import model_card

        began = perf_counter()
        todo = self.plan(cell)
        _check_files(cell, todo)
        card = model_card(self.model(cell))
        facts = {
            # Without the number of the GPU: workers with other GPUs make the cell's other groups.
            "model": card.model_copy(update={"device": card.device.partition(":")[0]}),
            "branches": {cell.attribute: todo.prefix_names},
            "prepared": {cell.attribute: todo.summaries} if todo.summaries else {},
            "merged": tuple(todo.merged),
            "versions": library_versions(),
            "commit": source_commit(),
            "threads": self.threads if self.device == "cpu" else None,
        }
        return Opened(tuple(map(len, todo.groups)), facts, perf_counter() - began)

    def _generate(self, cell: Cell, group: int) -> Part:
        from lapa2_interp.decoding import EmptyGenerationError, run_plan

        model, todo = self.model(cell), self.plan(cell)
        began, problems = perf_counter(), []
        try:
            made = run_plan(
                model,
                replace(todo, groups=(todo.groups[group],)),
                seed=cell.seed,
                top_k=cell.top_k,
                eos=cell.eos,  # type: ignore[arg-type]
                trace=cell.trace,  # type: ignore[arg-type]
                progress=no_progress(),
            )
        except EmptyGenerationError as error:
            made = error.generation
            problems.append(str(error))
        return Part(made.samples, made.trace, tuple(problems), perf_counter() - began)


def _check_files(cell: Cell, todo: Plan) -> None:
    """A file that is another one here than where the grid was resolved would make other texts under the cell's key.

    Raises:
        RunError: A soft prefix or a word list has another sha256 than the cell says.
    """
    here = {branch: name.sha256 for branch, name in todo.prefix_names.items() if isinstance(name, SoftName)}
    for parameter in cell.files.keys() & cell.parameters.keys():
        here[parameter] = hashlib.sha256(Path(str(cell.parameters[parameter])).read_bytes()).hexdigest()
    for name, found in here.items():
        if found != cell.files[name]:
            raise RunError(
                f"the file behind {name!r} has sha256 {found[:16]} here, and had {cell.files[name][:16]} when the grid was "
                "resolved; the same command resolves it anew, and gives what it makes keys of its own"
            )


@runtime_checkable
class Engine(Protocol):
    """Does jobs.

    Attributes:
        slots: Jobs it can do at once.
    """

    slots: int

    def submit(self, job: Job) -> None:
        """Take a job; at most `slots` are under way at once."""

    def wait(self) -> Iterator[tuple[Job, Outcome]]:
        """Outcomes of jobs that have ended, at least one."""

    def __enter__(self) -> Engine: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Here:
    """In this process.

    Args:
        worker: Does the jobs, and keeps its model; by default one that is made for them.
    """

    slots = 1

    def __init__(self, device: str | None = None, threads: int = 1, worker: Worker | None = None) -> None:
        self._settings, self._given = (device, threads), worker
        self._worker: Worker | None = None
        self._jobs: list[Job] = []

    def __enter__(self) -> Here:
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

    def wait(self) -> Iterator[tuple[Job, Outcome]]:
        assert self._worker is not None
        job = self._jobs.pop(0)
        yield job, self._worker.do(job)


_worker: Worker | None = None


def _begin(device: str | None, threads: int) -> None:
    """A process of `Processes` starts: its worker, and silence for Ctrl-C, which the coordinator answers."""
    import signal
    import threading

    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore that a killed process leaves behind
    threading.Thread(target=_end_with_coordinator, daemon=True).start()
    _worker = Worker(device, threads)


def _end_with_coordinator() -> None:
    """A worker whose coordinator was killed would wait for jobs, and keep its model in memory, for ever."""
    import multiprocessing

    coordinator = multiprocessing.parent_process()
    assert coordinator is not None
    coordinator.join()
    os._exit(1)


def _do(job: Job) -> Outcome:
    assert _worker is not None
    return _worker.do(job)


class Processes:
    """In several processes on this machine; with GPUs, process i has the i-th.

    Each process is a pool of its own, so that one that is killed takes no other's job with it.
    """

    def __init__(self, workers: int, device: str | None = None, threads: int = 1) -> None:
        self.slots = workers
        self._device, self._threads = device, threads
        self._pools: list[Any] = []
        self._running: dict[Any, tuple[int, Job, int]] = {}
        self._latest: dict[int, str] = {}

    def __enter__(self) -> Processes:
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
        return ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(device, self._threads))

    def __exit__(self, kind: object, *_: object) -> None:
        for pool in self._pools:
            _close(pool, kill=kind is not None)

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
        with _deaf_children():
            return self._pools[number].submit(_do, job)

    def _renew(self, number: int) -> None:
        _close(self._pools[number], kill=True)
        self._pools[number] = self._new(number)

    def wait(self) -> Iterator[tuple[Job, Outcome]]:
        from concurrent.futures import FIRST_COMPLETED, wait
        from concurrent.futures.process import BrokenProcessPool

        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
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
                    yield job, died(attempt)
                else:
                    self.submit(job, attempt + 1)


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes started in the block do not hear Ctrl-C, which would reach them while they import, too."""
    import signal
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _close(pool: Any, kill: bool) -> None:
    if kill:
        for process in list((pool._processes or {}).values()):
            with suppress(Exception):
                process.kill()
    pool.shutdown(wait=True, cancel_futures=True)


def died(attempts: int) -> Failed:
    """The outcome of a job whose workers were killed."""
    return Failed(
        f"the worker died {attempts} times at this job, which an operating system does to a process that wants more memory than "
        "there is; fewer rows share a batch with --set max_rows=N"
    )


def make_engine(
    name: str, workers: int | None, device: str | None, threads: int, address: str | None, gpus_per_worker: float
) -> Engine:
    """The engine of that name, with as many workers as there are GPUs, or CPU cores.

    Raises:
        RunError: Unknown, or Ray is not installed or not reached.
    """
    if name == "ray":
        from lapa2_interp.experiments.cluster import Cluster

        return Cluster(workers, device, threads, address, gpus_per_worker)
    if name != "local":
        raise RunError(f"unknown engine {name!r}; allowed: local, ray")
    import torch

    if workers is None:
        on_gpu = torch.cuda.is_available() and device in (None, "cuda")
        workers = torch.cuda.device_count() if on_gpu else max(1, cores() // threads)
    if workers < 1:
        raise RunError(f"--workers must be at least 1, found {workers}")
    return Here(device, threads) if workers == 1 else Processes(workers, device, threads)


__all__ = ["ATTEMPTS", "Engine", "Failed", "Here", "Job", "Opened", "Outcome", "Part", "Processes", "Worker", "died",
           "make_engine"]  # fmt: skip
