"""Messages between sweeps and workers: a job, its outcome, and the engine that carries both.

A job is a cell to open, or one group of its rows (`plan.BatchPlan.batches`) to generate. A group is
never split: which samples share a batch is part of the cell, so any number of workers on any number
of machines of one kind makes the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lapa2_interp.generation.cell import Cell
from lapa2_interp.models.prepacked import Prepacking

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


ATTEMPTS = 3
"""Number of times a job is tried if its workers die."""


@dataclass(frozen=True)
class Job:
    """A cell to open (group None), or one group of its rows to generate.

    Attributes:
        packing: What the model packs, as it was when the cell was opened; None when it is.
    """

    cell: Cell
    group: int | None = None
    packing: Prepacking | None = None


@dataclass(frozen=True)
class Opened:
    """A cell's plan, as far as the coordinator must know it.

    Attributes:
        groups: Samples of each group.
        facts: Fields of the manifest that only the worker knows.
        maker: The package's version and the kind of processor. Groups of another maker are not
            mixed with this one's.
        seconds: Seconds of loading, preparing and planning.
    """

    groups: tuple[int, ...]
    facts: dict[str, Any]
    maker: dict[str, str]
    seconds: float


@dataclass(frozen=True)
class Part:
    """The texts and the trace of one group.

    Attributes:
        weights: sha256 or name of the weights that made them (`ModelCard.weights`).
        memory: The most bytes that the worker has had so far: of its GPU, or of its process.
    """

    samples: pd.DataFrame
    trace: xr.Dataset | None
    problems: tuple[str, ...]
    seconds: float
    weights: str = ""
    memory: int = 0


@dataclass(frozen=True)
class Failed:
    """Why a job has no outcome: a traceback, or that its worker died."""

    traceback: str


Outcome = Opened | Part | Failed
Progress = Callable[[Job, float], None]
"""Told of a job under way, and of the share of it that is done."""


def ignore_progress(job: Job, share: float) -> None:
    """A `Progress` that does nothing."""


@runtime_checkable
class Engine(Protocol):
    """Something that does jobs.

    Attributes:
        slots: Jobs it can do at once.
    """

    slots: int

    def submit(self, job: Job) -> None:
        """Take a job; at most `slots` are under way at once."""

    def wait(self, told: Progress = ignore_progress) -> Iterator[tuple[Job, Outcome]]:
        """Outcomes of jobs that have ended, at least one.

        Args:
            told: Told of jobs under way while it waits, if the engine knows how far they are.
        """

    def __enter__(self) -> Engine: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def worker_lost(attempts: int) -> Failed:
    """The outcome of a job whose workers were killed."""
    return Failed(
        f"the worker died {attempts} times at this job, which an operating system does to a process"
        " that wants more memory than there is; fewer rows share a batch with --set max_rows=N"
    )
