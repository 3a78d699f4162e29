"""A worker: holds one model and does jobs, one at a time, on any machine."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from time import perf_counter

from lapa2_interp._util.errors import RunError
from lapa2_interp._util.progress import CountingBar, caused_by_stop
from lapa2_interp._util.version import __version__
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.loop import EmptyGenerationError, decode_batches
from lapa2_interp.generation.plan import BatchPlan, plan_batches
from lapa2_interp.generation.resolve import digests
from lapa2_interp.methods.registry import find_class
from lapa2_interp.models.card import Model, model_card
from lapa2_interp.models.load import load_model
from lapa2_interp.models.machine import (
    default_device,
    is_out_of_memory,
    peak_memory,
    processor_kind,
)
from lapa2_interp.models.prepacked import Prepacking
from lapa2_interp.prefixes.soft_prefix import SoftPrefixName
from lapa2_interp.runs.jobs import Failed, Job, Opened, Outcome, Part
from lapa2_interp.runs.manifest import facts_of
from lapa2_interp.runs.method_context import ModelContext

PLANS = 8
"""Plans a worker keeps: groups of several cells may alternate."""


class Worker:
    """Holds a model and does jobs, one at a time.

    Args:
        device: cpu, cuda, ...; CUDA when there is one, by default.
        threads: Threads of a worker on the CPU. Another number may change the last bits of a logit.
        pack, workers: As in `load_model`.
    """

    def __init__(
        self,
        device: str | None = None,
        threads: int = 1,
        pack: str = "auto",
        workers: int = 1,
    ) -> None:
        import torch

        self.pack: str = pack
        self.workers = workers

        self.device = device or default_device()
        self.on_cpu = self.device.partition(":")[0] == "cpu"
        if self.on_cpu:
            torch.set_num_threads(threads)
        self.threads = threads
        self._model: tuple[tuple[str, ...], Model, ModelContext] | None = None
        self._plans: dict[str, BatchPlan] = {}

    def do(self, job: Job, told: Callable[[float], object] = lambda share: None) -> Outcome:
        """Do a job and return its outcome; every error becomes one.

        Args:
            told: Told after every step which share of a group's tokens is there.
        """
        try:
            return self._open(job.cell) if job.group is None else self._generate(job, told)
        except Exception as error:
            if caused_by_stop(error):
                raise KeyboardInterrupt from error
            fewer = "; fewer rows share a batch with --set max_rows=N"
            note = fewer if is_out_of_memory(error) else ""
            return Failed(traceback.format_exc().rstrip() + note)

    def model(self, cell: Cell) -> Model:
        """The cell's model; the one before it is let go first."""
        return self._model_and_context(cell)[0]

    def _model_and_context(self, cell: Cell) -> tuple[Model, ModelContext]:
        wanted = (cell.model, cell.dtype, cell.model_class)
        if self._model is None or self._model[0] != wanted:
            self._model = None
            self._plans.clear()
            loaded = load_model(
                cell.model,
                cell.dtype,
                self.device,
                cell.model_class,
                pack=self.pack,
                workers=self.workers,
            )
            self._model = (wanted, loaded, ModelContext(loaded))
            self._packing = model_card(loaded).prepacking
        return self._model[1:]

    def plan(self, cell: Cell) -> BatchPlan:
        """The cell's plan; plans of one model share what their methods have prepared."""
        model, context = self._model_and_context(cell)
        if cell.key not in self._plans:
            find_class(
                cell.method, allow_code=True
            )  # as who sweeps allows, or nobody would ask for it
            made = plan_batches(model, cell, context)
            while len(self._plans) >= PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[cell.key] = made
        return self._plans[cell.key]

    def _open(self, cell: Cell) -> Opened:
        began = perf_counter()
        todo = self.plan(cell)
        self._pack(self._packing)
        check_files(cell, todo)
        facts = facts_of(self.model(cell), todo, self.threads if self.on_cpu else None)
        return Opened(
            tuple(map(len, todo.batches)),
            facts,
            {"lapa2_interp": __version__, "processor": processor_kind(facts["model"].device)},
            perf_counter() - began,
        )

    def _pack(self, packing: Prepacking) -> None:
        """Compute with this packing from now on."""
        assert self._model is not None
        model = self._model[1]
        model.lapa2_card = model_card(model).model_copy(update={"prepacking": packing})

    def _generate(self, job: Job, told: Callable[[float], object]) -> Part:
        assert job.group is not None
        model, todo = self.model(job.cell), self.plan(job.cell)
        self._pack(job.packing or self._packing)
        check_files(job.cell, todo)
        began, problems = perf_counter(), []
        group = todo.batches[job.group]
        tokens = sum(todo.steps[prompt] for prompt, _ in group)
        try:
            made = decode_batches(
                model, todo, [group], progress=CountingBar(lambda n: told(n / tokens))
            )
        except EmptyGenerationError as error:
            made = error.generation
            problems.append(str(error))
        seconds = perf_counter() - began
        return Part(
            made.samples,
            made.trace,
            tuple(problems),
            seconds,
            model_card(model).weights,
            peak_memory("cpu" if self.on_cpu else self.device),
        )


def check_files(cell: Cell, todo: BatchPlan) -> None:
    """Refuse a file that differs from the one the grid was resolved with: its texts would be other
    ones.

    Raises:
        RunError: A soft prefix, a word list, a scorer or a method's code has another sha256 than
            the cell says.
    """
    here = {
        branch: name.sha256
        for branch, name in todo.prefix_names.items()
        if isinstance(name, SoftPrefixName)
    }
    here |= digests(cell.decoding_method)
    for name, found in here.items():
        if found != cell.files.get(name, found):
            raise RunError(
                f"the file behind {name!r} has sha256 {found[:16]} here, and had"
                f" {cell.files[name][:16]} when the grid was resolved; the same command resolves it"
                " again, and gives what it makes keys of its own"
            )
