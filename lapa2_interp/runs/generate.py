"""One call from names to texts: `generate` makes a run of one cell, in memory.

run = generate("smollm2-135m", attribute="positive", prompts=["The lake"], alpha=0.5)
run.samples()           # one row per text
run.trace()             # the recorded attention
run.save("results/lake")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch

from lapa2_interp._util.errors import EmptyDistributionError, Lapa2Error, ModelError, unknown_choice
from lapa2_interp._util.progress import format_duration, progress_bar
from lapa2_interp.attention.recorder import trace_bytes
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.loop import EmptyGenerationError, join_traces, run_plan
from lapa2_interp.generation.plan import Plan, plan
from lapa2_interp.methods.base import MethodContext
from lapa2_interp.models.blocks import check_no_open_block
from lapa2_interp.models.card import Model, model_card
from lapa2_interp.models.load import accepts_model_name, load_model, resolve_model
from lapa2_interp.models.machine import is_out_of_memory
from lapa2_interp.runs.estimates import (
    LONG,
    TEXT_BYTES,
    Estimate,
    Pace,
    check_reason,
    cost,
    pace,
    plan_seconds,
)
from lapa2_interp.runs.manifest import Manifest, facts_of
from lapa2_interp.runs.method_context import ModelContext
from lapa2_interp.runs.store import FinishedCell, Listing, Run

SETTINGS = tuple(
    name for name in signature(Cell.of).parameters if name not in ("model", "device", "needs")
)
GRID = "generate"
"""The name of the grid of a run that `generate` makes."""


def generate(
    model: str | Path | Model,
    cell: Cell | None = None,
    *,
    device: str | None = None,
    trust_remote_code: bool = False,
    pack: str = "auto",
    announce: Callable[[Model, Sequence[Plan]], None] | None = None,
    yes: bool = False,
    **settings: Any,
) -> Run:
    """Continue prompts with a controlled model, and record where the attention went.

    Args:
        model: A model's name or folder, or a loaded model: of `load_model`, a TransformerLens model
            made elsewhere, or TransformersModel(network, tokenizer, name).
        cell: What to generate; or give its settings by name, as `Cell.of` takes them.
        device: Where a model is loaded that is given by name: cpu, cuda, cuda:1; CUDA when there is
            one, by default.
        trust_remote_code: Run code that comes with a model given by name.
        pack: As in `load_model`, of a model given by name.
        announce: Called with the model and the plan after all checks, before the first token.
        yes: Start also what would take a year, or more memory than there is.
        settings: method, parameters, task, attribute, prompts, alpha or augmentation, length,
            samples, seed, top_k, eos, trace, patterns, max_rows, doubled_bos, bar_prefix_words,
            dtype, model_class. length counts the prompt's tokens where the task does (sentiment and
            topic): behind a prompt of two tokens, length=32 makes 30 new ones.

    Returns:
        A run of one cell: `samples()`, `trace()`, `manifest()`, `save(FOLDER)`.

    Raises:
        Lapa2Error: As `Cell.of`, `load_model` and `plan`.
        RunError: It would take a year, or more memory than there is.
        EmptyDistributionError: Texts ended because no token was left to draw; its attribute `run`
            holds them.
    """
    if cell is not None and settings:
        raise Lapa2Error(
            f"give a cell, or settings, not both; found {', '.join(settings)} beside a cell"
        )
    if unknown := [name for name in settings if name not in SETTINGS]:
        raise Lapa2Error(unknown_choice("setting", unknown[0], SETTINGS))
    if not isinstance(model, str | Path):
        model = resolve_model(model)
    if cell is None:
        cell = Cell.of(model, device=device, **settings)
    if isinstance(model, str | Path):
        model = load_model(model, cell.dtype, device, cell.model_class, trust_remote_code, pack)
    check_reason(_estimate(model, cell), yes)
    run = make_cells(model, [cell], announce=announce)
    if problems := run.manifest().problems:
        raise UnfinishedTextsError(problems[0], run)
    return run


class UnfinishedTextsError(EmptyDistributionError):
    """Some texts ended because no token was left to draw.

    `run` holds all texts, the ended ones up to their last token.
    """

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run


@accepts_model_name
def make_cells(
    model: Model,
    cells: Sequence[Cell],
    *,
    name: str = GRID,
    kit: MethodContext | None = None,
    announce: Callable[[Model, Sequence[Plan]], None] | None = None,
) -> Run:
    """Make cells of one model, in this process and in memory; `sweep` makes many, in a folder.

    Texts that ran out of tokens are kept, with `finish` "empty", and named in their manifest's
    `problems`.

    Args:
        model: The cells' model. Everything is resolved and checked before the first token.
        name: What the run calls the grid of these cells.
        kit: What methods prepare with; one of the model by default.
        announce: Called with the model and the plans before the first token.

    Raises:
        Lapa2Error: As `plan`.
        ModelError: A block such as `augmented` is open on the model.
    """
    check_no_open_block(model)
    kit = kit or ModelContext(model)
    plans = {cell.key: plan(model, cell, kit) for cell in cells}
    if announce is not None:
        announce(model, list(plans.values()))
    threads = torch.get_num_threads() if model_card(model).device.startswith("cpu") else None
    held = {}
    total = sum(each.new_tokens for each in plans.values())
    with progress_bar(total, f"{cells[0].method} {cells[0].task.name}") as bar:
        for key, todo in plans.items():
            began, problems = perf_counter(), []
            try:
                made = run_plan(model, todo, progress=bar)
            except EmptyGenerationError as error:
                made = error.generation
                problems.append(str(error))
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                rows = max(map(len, todo.groups)) * len(todo.branches)
                raise ModelError(
                    f"the memory of {model_card(model).device} does not hold {rows} rows at once;"
                    " give fewer texts a batch: --max-rows N, below this number"
                ) from error
            samples = made.samples.assign(arm=todo.cell.arm)
            manifest = Manifest.of(
                todo.cell,
                facts_of(model, todo, threads),
                seconds=perf_counter() - began,
                new_tokens=int(made.samples["n_tokens"].sum()),
                problems=problems,
            )
            trace = None if made.trace is None else join_traces([made.trace], samples)
            held[key] = FinishedCell(manifest, samples, trace)
    return Run(
        None,
        Listing(grids={name: tuple(plans)}),
        {key: each.cell for key, each in plans.items()},
        held,
    )


def announcement(model: Model, plans: Sequence[Plan]) -> str:
    """What these plans will make, in one line: texts, branches, tokens, the size of the trace, and
    the time if it is long."""
    trace, patterns = plans[0].cell.trace, len(plans[0].cell.patterns)
    texts = sum(len(group) for each in plans for group in each.groups)
    line = (
        f"{texts} texts, {sum(each.new_tokens for each in plans)} new tokens, branches"
        f" {', '.join(plans[0].branches)}"
    )
    if plans[0].method.rereads_text:
        cached, read = (sum(each.tokens_read(anew) for each in plans) for anew in (False, True))
        line += (
            f"; every step reads its text anew: {read} tokens through the model, where a cache"
            f" would need {cached}"
        )
    line += _time(model, plans)
    if trace == "none":
        return line
    size = 0
    for each in plans:
        keys = max(
            len(row[i]) + each.steps[i] for row in each.layouts for i in range(len(each.steps))
        )
        layers, heads = model.cfg.n_layers, model.cfg.n_heads
        size += trace_bytes(trace, each.rows, max(each.steps), layers, heads, patterns, keys)  # type: ignore[arg-type]
    return f"{line}; the trace takes {size / 1e6:.1f} MB"


def _time(model: Model, plans: Sequence[Plan]) -> str:
    at = _pace(model, sum(each.tokens_read(each.method.rereads_text) for each in plans))
    told = sum(plan_seconds(each, at) for each in plans)
    return f"; about {format_duration(told)} ({at.basis})" if told > LONG else ""


def _estimate(model: Model, cell: Cell) -> Estimate:
    """What a cell takes at least, without a plan of it, which has an entry for every text: the
    texts and the trace are kept in memory."""
    rows, at = cell.n_texts * len(cell.branches), _pace(model, 0)
    trace = trace_bytes(cell.trace, rows, cell.length, model.cfg.n_layers, model.cfg.n_heads, 0, 0)  # type: ignore[arg-type]
    return Estimate(
        cells=1,
        texts=cell.n_texts,
        row_tokens=cost(cell),
        seconds=cost(cell) * at.row,
        disk=0,
        basis=at.basis,
        needs=trace + cell.n_texts * cell.length * TEXT_BYTES,
        packed=0,
    )


def reading_seconds(model: Model, tokens: int) -> float:
    """About how many seconds it takes to read so many tokens of given texts (`teacher_forced`)."""
    return tokens * _pace(model, tokens).row


def _pace(model: Model, tokens: int) -> Pace:
    """Pace of a loaded model on work of so many tokens."""
    card, network = (
        model_card(model),
        cast(torch.nn.Module, getattr(model, "original_model", model)),
    )
    operations = 2.0 * tokens * sum(each.numel() for each in network.parameters())
    device = card.device.partition(":")[0]
    threads = torch.get_num_threads() if device == "cpu" else 1
    return pace(
        card.name,
        card.dtype,
        device,
        card.model_class,
        threads,
        operations=operations,
        loaded=model,
    )
