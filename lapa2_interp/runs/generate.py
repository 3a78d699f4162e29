"""One call from settings to texts: `generate` makes a run in memory.

run = generate("smollm2-135m", "The lake", attribute="positive", alpha=0.5)
run.texts()           # one row per text
run.trace()             # the recorded attention
run.save("results/lake")

The way of a call to a token (CONTRIBUTING.md draws it with its files):

1. `generate` -> `resolve.cells_of` (settings to cells) -> `make_cells`;
2. `plan.plan_batches`: layouts (`arrange.arrange`), batches, and the driver of the loop;
3. `worker.make_batch` -> `loop.decode_batch` -> `loop.decode_samples`. The prompt pass
   (`cache.Rows.prompt_pass`) gives the logits of the first token; then, step by step,
   `Method.combine`, `sampling.draw`, and a pass that reads the token (`cache.Rows.read_tokens`);
4. every pass runs inside `attention.hooked.augmented`: `attention.guard` checks it, and a hook on
   the scores calls `batch_bias.BatchBias.add`, which adds `Augmentation.bias` of l (Eq. 9) to the
   scores of the prefix's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lapa2_interp._util.values import Count, Temperature
from lapa2_interp.attention.recorder import trace_bytes
from lapa2_interp.attention.trace import TraceKind
from lapa2_interp.bias.text_start import AUTO_START, describe_start
from lapa2_interp.errors import Lapa2Error, ModelError, parameter
from lapa2_interp.generation.batch import BatchPlan
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.plan import plan_batches
from lapa2_interp.generation.resolve import cells_of
from lapa2_interp.generation.settings import (
    AugmentationSetting,
    BannedWordsPolicy,
    EosPolicy,
    Head,
    PromptFile,
    TorchDtype,
    python_values,
    settings_named,
)
from lapa2_interp.methods.base import Method
from lapa2_interp.models.facts import Model
from lapa2_interp.models.fingerprint import weights_read_once
from lapa2_interp.models.load import accepts_model_name, load_model, resolve_model
from lapa2_interp.models.machine import DtypeOrAuto, ModelClass, is_out_of_memory
from lapa2_interp.progress import progress_bar
from lapa2_interp.runs.estimates import check_affordable, row_tokens_of, stored_bytes
from lapa2_interp.runs.method_context import ModelContext
from lapa2_interp.runs.run import Run
from lapa2_interp.runs.store import FinishedBatch, Listing
from lapa2_interp.runs.worker import make_batch
from lapa2_interp.tasks.task import Prompts, Task

GRID = "generate"
"""The name of the grid of a run that `generate` makes."""


@settings_named
@weights_read_once()
def generate(
    model: str | Path | Model = "smollm2-135m",
    prompts: Count | str | Path | Sequence[str | Path] | PromptFile | Prompts = "task",
    *,
    attribute: str | list[str] = "all",
    method: str | Mapping[str, Any] | Method | list[str | Mapping[str, Any] | Method] = "prefix",
    parameters: Mapping[str, Any] | list[Mapping[str, Any] | None] | None = None,
    task: str | Path | Task | list[str | Path | Task] = "sentiment",
    prefix: str | list[str] = "task",
    alpha: float | list[float | None] | None = None,
    augmentation: AugmentationSetting | list[AugmentationSetting] = None,
    label: str = "",
    length: Count | list[Count] = 128,
    samples: Count | list[Count] = 1,
    seed: int | list[int] = 1,
    top_k: Count | list[Count] = 200,
    temperature: Temperature | list[Temperature] = 1.0,
    eos: EosPolicy | list[EosPolicy] = "keep",
    ban_words: BannedWordsPolicy | list[BannedWordsPolicy] = "none",
    trace: TraceKind | list[TraceKind] = "full",
    patterns: str | Sequence[Head] = (),
    dtype: DtypeOrAuto | TorchDtype = "float32",
    model_class: ModelClass = "TransformerBridge",
    max_rows: Count | list[Count | None] | None = None,
    doubled_bos: bool | list[bool] = False,
    start: str | None = AUTO_START,
    device: str | None = None,
    trust_remote_code: bool = False,
    pack: str = "auto",
    attn: str = "auto",
    announce: Callable[[Model, Sequence[BatchPlan]], None] | None = None,
    yes: bool = False,
) -> Run:
    """Continue prompts with a controlled model, and record where the attention goes.

    A list of values gives a cell for each, and several lists the cells of all combinations: one run
    compares them.

    Example:
        >>> from lapa2_interp import generate
        >>> run = generate(
        ...     "tiny-gpt2", "The lake", prefix="Very formal:", alpha=[0, 0.5], length=20
        ... )
        >>> list(run.texts()["arm"])
        ['baseline', 'alpha 0.5 paper']
        >>> run.steps()[["arm", "step", "name", "mean"]].columns.tolist()
        ['arm', 'step', 'name', 'mean']

    Args:
        model: A model's name or folder, or a loaded model (which decides dtype, model_class and
            start): of `load_model`, a TransformerLens model made elsewhere, or
            TransformersModel(network, tokenizer, name).
        method: A name of `lapa2 methods`, {"name": ..., PARAMETER: VALUE}, or a method of
            `methods.get`.
        task: A name of `lapa2 tasks`, the path of a task file, or a task.
        augmentation: The bias: an `Augmentation`, a tuple of those that act together, recipes such
            as "instaboost:M=5", a dict of fields, of which each may be a list of values, or "none".
        patterns: (layer, head) pairs whose whole attention rows are kept.
        device: Device of a model given by name: cpu, cuda, cuda:1; CUDA when there is one, by
            default.
        trust_remote_code: Run code that comes with a model given by name.
        pack, attn: As in `load_model`, of a model given by name.
        announce: Called with the model and the plans after all checks, before the first token.
        yes: Start also what reads over 10^11 tokens, or needs more memory than there is.

    Returns:
        A run in memory: `texts()`, `trace()`, `steps()`, `heads()`, `plot()`, `save(FOLDER)`.
        `problems` names texts that ended because no token was left to draw (`finish` "empty").

    Raises:
        Lapa2Error: An unknown name, a value out of range, or values that do not fit together.
        RunError: The work reads over 10^11 tokens, or needs more memory than there is.
    """
    fields = python_values(
        {
            "model": model,
            "prompts": prompts,
            "attribute": attribute,
            "method": method,
            "parameters": parameters,
            "task": task,
            "prefix": prefix,
            "alpha": alpha,
            "augmentation": augmentation,
            "label": label,
            "length": length,
            "samples": samples,
            "seed": seed,
            "top_k": top_k,
            "temperature": temperature,
            "eos": eos,
            "ban_words": ban_words,
            "trace": trace,
            "patterns": patterns,
            "dtype": dtype,
            "model_class": model_class,
            "max_rows": max_rows,
            "doubled_bos": doubled_bos,
            "start": start,
        }
    )
    if not isinstance(model, str | Path):
        model = fields["model"] = resolve_model(model)
    for name in ("model", "dtype", "model_class", "start"):
        if isinstance(fields[name], list):
            raise Lapa2Error(
                f"{name} takes one value, found {fields[name]}; `lapa2 sweep` takes several"
            )
    cells = cells_of(fields, device=device)
    if isinstance(model, str | Path):
        first = cells[0]
        model = load_model(
            model,
            first.dtype,
            device,
            first.model_class,
            trust_remote_code,
            pack,
            attn=attn,
            start=first.start,
        )
    # Least time and memory, before the plans, which have an entry for every text: texts and traces
    # are kept in memory.
    row_tokens = sum(map(row_tokens_of, cells))
    size = sum(stored_bytes(cell, model.cfg.n_layers, model.cfg.n_heads) for cell in cells)
    check_affordable(sum(cell.n_texts for cell in cells), row_tokens, size, yes)
    return make_cells(model, cells, announce=announce)


@accepts_model_name
def make_cells(
    model: Model,
    cells: Sequence[Cell],
    *,
    name: str = GRID,
    announce: Callable[[Model, Sequence[BatchPlan]], None] | None = None,
) -> Run:
    """Make cells of one model, in this process and in memory; `sweep` makes many, in a folder.

    Texts that ran out of tokens are kept, with `finish` "empty", and named in their manifest's
    `problems`.

    Args:
        model: The cells' model. Everything is resolved and checked before the first token.
        name: What the run calls the grid of these cells.
        announce: Called with the model and the plans before the first token.

    Raises:
        Lapa2Error: As `plan_batches`.
        ModelError: A block such as `augmented` is open on the model.
    """
    context = ModelContext(model)  # cells share what their methods prepare
    plans = {cell.key: plan_batches(model, cell, context) for cell in cells}
    if announce is not None:
        announce(model, list(plans.values()))
    batches: dict[str, list[FinishedBatch]] = {}
    total = sum(plan.new_tokens for plan in plans.values())
    with progress_bar(total, f"{cells[0].method} {cells[0].task.name}") as bar:
        for key, plan in plans.items():
            try:
                numbers = range(len(plan.batches))
                batches[key] = [make_batch(model, plan, number, bar) for number in numbers]
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                rows = max(map(len, plan.batches)) * len(plan.branches)
                raise ModelError(
                    f"the memory of {plan.card.device} does not hold {rows} rows at once;"
                    f" give fewer texts a batch: {parameter('max_rows', 'N')}, below this number"
                ) from error
    grids = {name: tuple(plans)}
    return Run(None, Listing(grids=grids), {key: plan.cell for key, plan in plans.items()}, batches)


def announcement(model: Model, plans: Sequence[BatchPlan]) -> str:
    """One line about plans: texts, branches, tokens, and the size of the trace."""
    trace, patterns = plans[0].cell.trace, len(plans[0].cell.patterns)
    texts = sum(plan.cell.n_texts for plan in plans)
    line = (
        f"{texts} texts, {sum(plan.new_tokens for plan in plans)} new tokens, branches"
        f" {', '.join(plans[0].branches)}"
    )
    card = plans[0].card
    line += f"; plain text starts with {describe_start(card.start_token, card.start_source)}"
    if trace == "none":
        return line
    size = 0
    for plan in plans:
        arrangement = plan.arrangement
        keys = max(map(sum, zip(arrangement.longest, arrangement.steps, strict=True)))
        layers, heads = model.cfg.n_layers, model.cfg.n_heads
        size += trace_bytes(
            trace, plan.rows, max(plan.arrangement.steps), layers, heads, patterns, keys
        )
    return f"{line}; the trace takes {size / 1e6:.1f} MB"
