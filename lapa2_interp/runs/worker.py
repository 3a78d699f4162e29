"""Batches of cells, made on a loaded model: `make_batch`, and the worker that keeps a model.

A batch is never split: which samples share one is part of the cell. So any number of workers on
any number of machines of one kind makes the same bytes.
"""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from time import perf_counter

from tqdm import tqdm

from lapa2_interp._util.terminal import caused_by_stop
from lapa2_interp.errors import RunError, parameter
from lapa2_interp.generation.batch import BatchPlan
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.loop import decode_batch
from lapa2_interp.generation.plan import plan_batches
from lapa2_interp.generation.resolve import digests
from lapa2_interp.methods.registry import find_class
from lapa2_interp.models.facts import Model
from lapa2_interp.models.fingerprint import weights_read_once
from lapa2_interp.models.load import load_model
from lapa2_interp.models.machine import default_device, is_out_of_memory, torch_threads
from lapa2_interp.models.prepacked import Prepacking
from lapa2_interp.prefixes.soft_prefix import SoftPrefixName
from lapa2_interp.runs.manifest import BatchRecord
from lapa2_interp.runs.method_context import ModelContext
from lapa2_interp.runs.store import Failure, FinishedBatch

PLANS = 8
"""Plans a worker keeps: batches of several cells may alternate."""


def make_batch(
    model: Model,
    plan: BatchPlan,
    number: int,
    progress: tqdm | None = None,
    seconds: float = 0.0,
) -> FinishedBatch:
    """Decode one batch of a plan.

    Texts that ran out of tokens are kept, with `finish` "empty", and named in the record's
    `problems`.

    Args:
        number: Which of the plan's batches.
        progress: A bar to advance by tokens; by default none.
        seconds: What preparing took, which counts in the record's.

    Raises:
        RunError: As `check_files`.
        Lapa2Error: As `decode_batch`.
    """
    check_files(plan)
    began = perf_counter()
    made = decode_batch(model, plan, plan.batches[number], progress)
    record = BatchRecord.of(model, plan, made.texts, seconds + perf_counter() - began)
    return FinishedBatch(made.texts, made.trace, record)


class Worker:
    """Keeps the last model and the last plans, and makes batches, one at a time.

    Args:
        device: cpu, cuda, ...; CUDA when there is one, by default.
        threads: Threads of a worker on the CPU. Another number may change the last bits of a logit.
        pack, workers, attn: As in `load_model`.
    """

    def __init__(
        self,
        device: str | None = None,
        threads: int = 1,
        pack: str = "auto",
        workers: int = 1,
        attn: str = "auto",
    ) -> None:
        self.device = device or default_device()
        self.threads, self.pack, self.workers, self.attn = threads, pack, workers, attn
        self._model: tuple[tuple[str, ...], Model, ModelContext] | None = None
        self._plans: dict[str, BatchPlan] = {}

    @weights_read_once()
    def make_batch(
        self,
        cell: Cell,
        number: int,
        prepacking: Prepacking | None = None,
        progress: tqdm | None = None,
    ) -> FinishedBatch:
        """Make one batch of a cell.

        Args:
            prepacking: Layers with prepacked weights (`ModelCard.prepacking`), those of the cell's
                other batches; by default as the model was loaded.
            progress: As for the function `make_batch`.
        """
        on_cpu = self.device.partition(":")[0] == "cpu"
        with torch_threads(self.threads) if on_cpu else nullcontext():
            began = perf_counter()
            model, plan = self.model(cell), self.plan(cell)
            if prepacking is not None:
                card = plan.card.model_copy(update={"prepacking": prepacking})
                plan = replace(plan, card=card)
            return make_batch(model, plan, number, progress, perf_counter() - began)

    def try_batch(
        self,
        cell: Cell,
        number: int,
        prepacking: Prepacking | None = None,
        progress: tqdm | None = None,
    ) -> FinishedBatch | Failure:
        """`make_batch`; every error becomes a `Failure`."""
        try:
            return self.make_batch(cell, number, prepacking, progress)
        except Exception as error:
            if caused_by_stop(error):
                raise KeyboardInterrupt from error
            fewer = f"; fewer rows share a batch with {parameter('max_rows', 'N', 'set')}"
            note = fewer if is_out_of_memory(error) else ""
            return Failure(when=datetime.now(UTC), traceback=traceback.format_exc().rstrip() + note)

    def model(self, cell: Cell) -> Model:
        """The cell's model; the one before it is let go first."""
        return self._loaded(cell)[0]

    def _loaded(self, cell: Cell) -> tuple[Model, ModelContext]:
        settings = (cell.model, cell.dtype, cell.model_class, cell.start)
        if self._model is None or self._model[0] != settings:
            self._model = None
            self._plans.clear()
            loaded = load_model(
                cell.model,
                cell.dtype,
                self.device,
                cell.model_class,
                pack=self.pack,
                workers=self.workers,
                attn=self.attn,
                start=cell.start,
            )
            self._model = (settings, loaded, ModelContext(loaded))
        return self._model[1:]

    def plan(self, cell: Cell) -> BatchPlan:
        """The cell's plan; plans of one model share what their methods have prepared."""
        model, context = self._loaded(cell)
        if cell.key not in self._plans:
            # Who sweeps has allowed the method's code, or nobody would ask for it.
            find_class(cell.method, allow_code=True)
            made = plan_batches(model, cell, context)
            while len(self._plans) >= PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[cell.key] = made
        return self._plans[cell.key]


def check_files(plan: BatchPlan) -> None:
    """Refuse a file that differs from the one the grid was resolved with: its texts would be other
    ones.

    Raises:
        RunError: A soft prefix, a word list, a scorer or a method's code has another sha256 than
            the cell says.
    """
    cell = plan.cell
    here = {
        branch: name.sha256
        for branch, name in plan.prefix_names.items()
        if isinstance(name, SoftPrefixName)
    }
    here |= digests(cell.decoding_method)
    for name, sha256 in here.items():
        if sha256 != cell.files.get(name, sha256):
            raise RunError(
                f"the file behind {name!r} has sha256 {sha256[:16]} here, and had"
                f" {cell.files[name][:16]} when the grid was resolved; the same command resolves it"
                " again, and gives what it makes keys of its own"
            )
