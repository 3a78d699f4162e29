"""A cell resolved before anything runs, and divided into batches.

The plan has layouts, augmentations, steps, and which samples share a batch.

Axes: branch = one model call of the method; a batch's rows are branch x sample, stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from lapa2_interp._util.errors import MethodError, ModelError
from lapa2_interp._util.progress import progress_bar
from lapa2_interp.attention.cache import check_packing, rows_in_memory
from lapa2_interp.attention.trace import TracedTexts
from lapa2_interp.bias.augmentation import Augmentation, active_augmentations
from lapa2_interp.bias.layout import Layout, left_pad
from lapa2_interp.bias.text_start import AUTO_START, start_setting
from lapa2_interp.generation.arrange import Arrangement, arrange, chat_stream
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.freectrl import decode_freectrl
from lapa2_interp.generation.loop import decode_samples
from lapa2_interp.generation.sampling import uniforms
from lapa2_interp.generation.turns import decode_turns
from lapa2_interp.methods.base import Method, MethodContext, Prepared, SoftPrefixKey
from lapa2_interp.methods.freectrl import FreeCtrl
from lapa2_interp.models.card import Model, ModelCard, model_card, smallest_window
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.prefixes.soft_prefix import SoftPrefix, SoftPrefixName, find_prefix

MAX_ROWS = 120
"""Rows of a batch, at most; fewer where they would exceed `cache.CACHE_BYTES`."""


@dataclass(frozen=True)
class Batch:
    """Samples that are decoded together.

    Attributes:
        pairs: (prompt number, sample number) of each sample.
        layouts: Left-padded, branch by branch one per prompt used.
        prefixes: The soft prefix of each layout, or None.
        owner: Which of the batch's prompts each sample continues.
        steps: New tokens of each sample.
        uniform: The random numbers that tokens are drawn with, [sample, step].
        prepared: What the method worked out about each of the batch's prompts.
    """

    pairs: tuple[tuple[int, int], ...]
    layouts: tuple[Layout, ...]
    prefixes: tuple[SoftPrefix | None, ...]
    owner: tuple[int, ...]
    steps: tuple[int, ...]
    uniform: Float[np.ndarray, "sample step"]
    prepared: tuple[Prepared, ...]

    @property
    def n_prompts(self) -> int:
        return max(self.owner) + 1

    @cached_property
    def expansion(self) -> list[int]:
        """By row of the expanded batch (branch x sample), the row of the prompt pass it copies
        (branch x prompt)."""
        return [
            first_of_branch + prompt
            for first_of_branch in range(0, len(self.layouts), self.n_prompts)
            for prompt in self.owner
        ]

    @cached_property
    def sample_layouts(self) -> list[Layout]:
        """The layouts of the expanded rows."""
        return [self.layouts[row] for row in self.expansion]

    @property
    def capacity(self) -> int:
        """Keys of a row once its last token but one is read, those of reminders included."""
        steps, reminder = max(self.steps), self.prepared[0].reminder
        return len(self.layouts[0]) + steps - 1 + (reminder.n_keys(steps) if reminder else 0)


Driver = Callable[[Model, "BatchPlan", Batch, tqdm], TracedTexts]
"""Decodes a batch, and advances a bar by tokens."""


@dataclass(frozen=True)
class BatchPlan:
    """A cell ready to be generated: every branch's layout per prompt, and who shares a batch.

    Attributes:
        card: The model's, as it was planned.
        driver: What decodes a batch: the loop alone (`loop.decode_samples`), or what wraps it.
        branches: Names of the branches.
        arrangement: Its layouts, augmentations and steps.
        prefixes: By branch, the soft prefix or None.
        prepared: What the method worked out about each prompt.
        batches: The (prompt number, sample number) pairs of each batch.
    """

    cell: Cell
    card: ModelCard
    driver: Driver = field(repr=False)
    branches: tuple[str, ...]
    arrangement: Arrangement
    prefixes: tuple[SoftPrefix | None, ...]
    prepared: tuple[Prepared, ...] = field(repr=False)
    batches: tuple[tuple[tuple[int, int], ...], ...] = field(repr=False)

    @property
    def method(self) -> Method:
        """The method with its parameters."""
        return self.cell.decoding_method

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts that are continued."""
        return self.cell.prompts

    def assemble_batch(self, pairs: Sequence[tuple[int, int]], trial: int = 0) -> Batch:
        """The batch that decodes these samples, for the first time or again."""
        used = sorted({prompt for prompt, _ in pairs})
        return Batch(
            pairs=tuple(pairs),
            layouts=tuple(
                left_pad(
                    [by_prompt[prompt] for by_prompt in self.arrangement.layouts for prompt in used]
                )
            ),
            prefixes=tuple(prefix for prefix in self.prefixes for _ in used),
            owner=tuple(used.index(prompt) for prompt, _ in pairs),
            steps=tuple(self.arrangement.steps[prompt] for prompt, _ in pairs),
            uniform=self._uniform(
                pairs, [self.arrangement.streams[prompt] for prompt, _ in pairs], trial
            ),
            prepared=tuple(self.prepared[prompt] for prompt in used),
        )

    def assemble_turn(self, pairs: Sequence[tuple[int, int]], layouts: Sequence[Layout]) -> Batch:
        """The batch that decodes a later turn of chats, each in the layout of its own, which is
        that of all branches."""
        rows = [layout for _ in self.branches for layout in layouts]
        return Batch(
            pairs=tuple(pairs),
            layouts=tuple(left_pad(rows)),
            prefixes=(None,) * len(rows),
            owner=tuple(range(len(pairs))),
            steps=tuple(self.arrangement.steps[prompt] for prompt, _ in pairs),
            uniform=self._uniform(pairs, list(map(chat_stream, layouts))),
            prepared=tuple(self.prepared[prompt] for prompt, _ in pairs),
        )

    def _uniform(
        self, pairs: Sequence[tuple[int, int]], streams: Sequence[str], trial: int = 0
    ) -> Float[np.ndarray, "sample step"]:
        steps = [self.arrangement.steps[prompt] for prompt, _ in pairs]
        uniform = np.zeros((len(pairs), max(steps)))
        for numbers, (_, sample), stream, n in zip(uniform, pairs, streams, steps, strict=True):
            numbers[:n] = uniforms(self.cell.seed, stream, sample, n, trial)
        return uniform

    @property
    def rules(self) -> list[Augmentation]:
        """The augmentations of all branches that act."""
        return [
            rule
            for branch in self.arrangement.augmentations
            for rule in active_augmentations(branch)
        ]

    @property
    def prefix_names(self) -> dict[str, str | SoftPrefixName | None]:
        """Prefix of the prompt, by branch: a text, a soft prefix, or nothing."""
        by_branch: dict[str, str | SoftPrefixName | None] = {}
        for branch, prefix in zip(self.cell.branches, self.prefixes, strict=True):
            by_branch[branch.name] = prefix.card.name if prefix is not None else branch.prefix  # type: ignore[assignment]
        return by_branch

    @property
    def new_tokens(self) -> int:
        steps = sum(self.arrangement.steps[prompt] for batch in self.batches for prompt, _ in batch)
        return self.cell.n_turns * steps

    @property
    def summaries(self) -> dict[str, dict[str, Any]]:
        """Preparation of the method, by prompt; under "all prompts" if it is the same for all;
        empty if nothing."""
        summaries = [dict(prepared.summary) for prepared in self.prepared]
        first = summaries[0]
        if all(summary == first for summary in summaries):
            return {"all prompts": first} if first else {}
        return dict(zip(self.prompts, summaries, strict=True))

    @property
    def rows(self) -> int:
        """Number of texts of all branches."""
        return len(self.branches) * self.cell.n_texts

    @property
    def merged(self) -> list[str]:
        """Tokens that span the boundary of a prefix and a prompt, in words."""
        return [
            f"in branch {name!r} of {prompt!r} the token {layout.merged!r} spans the boundary of"
            " prefix and prompt and counts as prefix"
            for name, by_prompt in zip(self.branches, self.arrangement.layouts, strict=True)
            for prompt, layout in zip(self.prompts, by_prompt, strict=True)
            if layout.merged is not None
        ]


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
    card, method = model_card(model), cell.decoding_method
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
                f"{method.name} prepares for its prompts; give plan_batches or make_cells a context"
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
            alike=bool(slots) and smallest_window(model) is not None,
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
        short: As `models.card.short_context`: a batch lies on one side of it, with the steps that
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
