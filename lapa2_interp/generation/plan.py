"""A cell resolved before anything runs, and divided into batches: `plan_batches`.

The plan has layouts, augmentations, steps, which samples share a batch, and what decodes them.
"""

from __future__ import annotations

from collections.abc import Sequence

from lapa2_interp.attention.cache import check_packing, rows_in_memory
from lapa2_interp.bias.text_start import AUTO_START, start_setting
from lapa2_interp.errors import MethodError, ModelError
from lapa2_interp.generation.arrange import arrange
from lapa2_interp.generation.batch import BatchPlan
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.freectrl import decode_freectrl
from lapa2_interp.generation.loop import decode_samples
from lapa2_interp.generation.turns import decode_turns
from lapa2_interp.methods.base import Method, MethodContext, Prepared, SoftPrefixKey
from lapa2_interp.methods.freectrl import FreeCtrl
from lapa2_interp.models.card import identify
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.prefixes.soft_prefix import find_prefix
from lapa2_interp.progress import progress_bar

MAX_ROWS = 120
"""Rows of a batch, at most; fewer where they would exceed `cache.CACHE_BYTES`."""


@accepts_model_name
def plan_batches(model: Model, cell: Cell, context: MethodContext | None = None) -> BatchPlan:
    """Resolve a cell before its first token: checks first, then what the method has to prepare.

    Args:
        model: The cell's, from `load_model`.
        context: What `Method.prepare` is given (`runs.method_context.ModelContext`); plans that
            share one share what it has made. Methods that prepare nothing need none.

    Raises:
        ModelError: The model is not the cell's.
        MethodError: The method cannot prepare for a prompt, needs a context, or does not declare
            that it changes the network.
        LayoutError, AugmentationError: As `arrange`.
        PrefixError: A soft prefix the method names is not there, or belongs to another model.
    """
    card, method = identify(model), cell.decoding_method
    # The model must be the cell's.
    for name, model_fact in (
        ("model", card.name),
        ("dtype", card.dtype),
        ("model_class", card.model_class),
        ("start", start_setting(model, AUTO_START)),
    ):
        if model_fact != getattr(cell, name):
            raise ModelError(
                f"the cell's {name} is {getattr(cell, name)!r}, and the model's {model_fact!r};"
                f" give load_model({cell.model!r}, {cell.dtype!r},"
                f" model_class={cell.model_class!r}, start={cell.start!r})"
            )
    if cell.heads_of and cell.heads_of != card.weights:
        raise ModelError(
            f"the card's heads are those of a model with {cell.heads_of}; found {card.name} with"
            f" {card.weights}: choose again in this model (`lapa2 select`)"
        )
    # Soft prefixes, and a first arrangement: it refuses what cannot run.
    prefixes = tuple(
        (
            find_prefix(model, cell.task.name, branch.prefix.set, branch.prefix.attribute)
            if isinstance(branch.prefix, SoftPrefixKey)
            else None
        )
        for branch in cell.branches
    )
    names = tuple(branch.name for branch in cell.branches)
    slots = {
        name: len(prefix)
        for name, prefix in zip(names, prefixes, strict=True)
        if prefix is not None
    }
    arrangement = arrange(cell, model.tokenizer, card, slots)
    if type(method).intervene is not Method.intervene and not method.changes_network:
        raise MethodError(
            f"{method.name} intervenes, so the network is another while it decodes; declare"
            " changes_network = True in its class"
        )
    if cell.keeps_turns:
        check_packing(model)
    # The method prepares; what it prepared may change the arrangement.
    prepared = (Prepared(),) * len(cell.prompts)
    if method.prepares:
        if context is None:
            raise MethodError(
                f"{method.name} prepares for its prompts; give plan_batches a context"
                " (lapa2_interp.runs.method_context)"
            )
        prepared = _prepare(method, context, cell)
        arrangement = arrange(cell, model.tokenizer, card, slots, prepared)
    # Divide the samples into batches.
    longest, steps = arrangement.longest, arrangement.steps
    if not (rows := cell.max_rows):
        keys = max(map(sum, zip(longest, steps, strict=True)))
        positions = max(arrangement.prompt_tokens) + 1 if method.reads_prompt else 0
        rows = min(MAX_ROWS, rows_in_memory(model, keys, positions))
    pairs = [
        (prompt, sample) for prompt in range(len(cell.prompts)) for sample in range(cell.samples)
    ]
    size = max(1, rows // len(names))
    return BatchPlan(
        cell=cell,
        card=card,
        driver=(
            decode_freectrl
            if isinstance(method, FreeCtrl)
            else decode_turns
            if cell.n_turns > 1
            else decode_samples
        ),
        branches=names,
        arrangement=arrangement,
        prefixes=prefixes,
        prepared=prepared,
        batches=_split_into_batches(
            pairs,
            size,
            longest,
            steps,
            model.cfg.n_ctx,
            card.short_ctx,
            alike=bool(slots) and facts_of(model).window is not None,
        ),
    )


def _prepare(method: Method, context: MethodContext, cell: Cell) -> tuple[Prepared, ...]:
    prepared = []
    with progress_bar(
        len(cell.prompts), f"preparing {method.name} {cell.attribute}", "prompt"
    ) as bar:
        for prompt in cell.prompts:
            prepared.append(method.prepare(context, cell.task, cell.attribute, prompt))
            bar.update()
    return tuple(prepared)


def _split_into_batches(
    pairs: Sequence[tuple[int, int]],
    size: int,
    longest: Sequence[int],
    steps: Sequence[int],
    n_ctx: int,
    short: int | None = None,
    alike: bool = False,
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Batches in order: at most `size` samples each. A batch's longest branch and largest number of
    steps must fit the context together.

    Args:
        short: As `configuration.short_context`: a batch lies on one side of it, with the steps that
            an ended sample's row runs on.
        alike: Prompts of one batch have the same length (`cache.check_window`).
    """
    batches: list[list[tuple[int, int]]] = []
    width = most = 0
    for pair in pairs:
        width, most = max(width, longest[pair[0]]), max(most, steps[pair[0]])
        last = longest[batches[-1][0][0]] if batches else 0
        unlike = alike and last != longest[pair[0]]
        room = n_ctx
        if short is not None:
            unlike |= (last > short) != (longest[pair[0]] > short)
            room = n_ctx if longest[pair[0]] > short else short + 1  # the last token is not read
        if not batches or len(batches[-1]) == size or width + most > room or unlike:
            batches.append([])
            width, most = longest[pair[0]], steps[pair[0]]
        batches[-1].append(pair)
    return tuple(map(tuple, batches))
