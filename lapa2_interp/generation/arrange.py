"""A cell laid out for its model: the layout of every branch and prompt, and how many tokens follow.

A cell is refused here if it cannot run and no weights are needed to know that: only a tokenizer,
the model's size and the cards of soft prefixes. A sweep does this before it begins (`runs.checks`),
`plan` before and after the method has prepared for its prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from lapa2_interp._util.errors import LayoutError
from lapa2_interp.bias.augmentation import Augmentation, Augmentations, active_augmentations
from lapa2_interp.bias.layer_types import LayerType, distinct_types
from lapa2_interp.bias.layout import Layout
from lapa2_interp.generation.cell import Cell
from lapa2_interp.methods.base import Branch, Prepared
from lapa2_interp.models.card import ModelCard, check_rotary_side
from lapa2_interp.models.sizes import ModelSize
from lapa2_interp.tasks.task import ChatForm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Arrangement:
    """A cell's branches over its prompts.

    Attributes:
        augmentations: By branch.
        layouts: By branch, then prompt.
        steps: New tokens, by prompt.
        prompt_tokens: Tokens of each prompt by itself.
        streams: What names the random numbers of each prompt: its text, or all tokens of a chat.
    """

    augmentations: tuple[Augmentations, ...]
    layouts: tuple[tuple[Layout, ...], ...]
    steps: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    streams: tuple[str, ...]

    @property
    def longest(self) -> tuple[int, ...]:
        """Keys of the longest branch, by prompt."""
        return tuple(max(map(len, rows)) for rows in zip(*self.layouts, strict=True))


def arrange(
    cell: Cell,
    tokenizer: PreTrainedTokenizerBase,
    size: ModelCard | ModelSize,
    soft_slots: Mapping[str, int],
    prepared: Sequence[Prepared] | None = None,
    layout: Callable[..., Layout] = Layout.of,
) -> Arrangement:
    """Lay out every branch of a cell, or refuse it.

    Args:
        size: The model's card, or its size where the model is not loaded.
        soft_slots: By name, the number of soft slots of branches that have a soft prefix.
        prepared: What the method worked out, by prompt. Without it the branches of a method that
            prepares are laid out as bare prompts, because each prompt may get a different text.
        layout: Called instead of `Layout.of`; it may remember layouts that many cells share.

    Raises:
        LayoutError: A prefix or prompt tokenises to nothing, or a text does not fit the length or
            the model's context, or crosses a switch of its rotary factors.
        AugmentationError: Layers or heads the model does not have.
    """
    method, branches = cell.decoding_method, cell.branches
    open_texts = prepared is None and method.prepares
    preparations = [Prepared()] * len(cell.prompts) if prepared is None else prepared
    augmentations = cell.branch_augmentations
    steps, counts = [], []
    for prompt in cell.prompts:
        n = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        counts.append(n)
        steps.append(cell.length - n if cell.task.length_counts_prompt else cell.length)
        if steps[-1] < 1:
            raise LayoutError(
                f"length {cell.length} leaves nothing to generate after the {n} tokens of"
                f" {prompt[:40]!r}"
            )
    rows = []
    for branch, augmentation in zip(branches, augmentations, strict=True):
        reached: list[tuple[Augmentation, list[LayerType]]] = []
        for active in active_augmentations(augmentation):
            layers = np.flatnonzero(active.head_mask(size.n_layers, size.n_heads).any(1))
            reached.append(
                (active, distinct_types([size.layer_types[i] for i in layers if size.layer_types]))
            )
        of_branch = []
        for prompt, own, new in zip(cell.prompts, preparations, steps, strict=True):
            if branch.chat is not None:
                branch_layout = _chat_layout(tokenizer, branch.chat.filled(prompt=prompt), cell)
            else:
                text = _text(branch, own, open_texts)
                slots = soft_slots.get(branch.name, 0)
                branch_layout = layout(
                    tokenizer, text, branch.join + prompt, soft=slots, doubled_bos=cell.doubled_bos
                )
            if len(branch_layout) + new > size.n_ctx:
                raise LayoutError(
                    f"{len(branch_layout)} tokens of BOS, prefix and prompt ({prompt[:40]!r}) and"
                    f" {new} new ones exceed the context of {size.n_ctx} of {cell.model}; shorten"
                    " the prompt or the length"
                )
            for active, kinds in () if open_texts else reached:
                branch_layout.spans(active.span)
                for kind in kinds:  # refused beyond a window
                    branch_layout.acts(active, np.array([len(branch_layout) + new - 2]), kind)
            of_branch.append(branch_layout)
        rows.append(tuple(of_branch))
    for prompt, new, of_prompt in zip(cell.prompts, steps, zip(*rows, strict=True), strict=True):
        if not open_texts:
            read = method.reads_prompt
            # A soft prefix was trained under the factors of short texts.
            firsts = [0 if l.soft else len(l.ids) - l.l_pro * read for l in of_prompt]
            last = max(map(len, of_prompt)) + new - 1
            reading = ", which reads the probability of the prompt" * read
            what = f"{prompt[:40]!r} under {method.name}{reading}"
            check_rotary_side(size.short_ctx, min(firsts), last, what)
    streams = cell.prompts
    if branches[0].chat is not None:
        streams = tuple(" ".join(map(str, chat.ids)) for chat in rows[0])
    return Arrangement(augmentations, tuple(rows), tuple(steps), tuple(counts), streams)


def _chat_layout(tokenizer: PreTrainedTokenizerBase, chat: ChatForm, cell: Cell) -> Layout:
    if cell.doubled_bos:
        raise LayoutError("a chat's template writes its first token; leave doubled_bos out")
    return Layout.of_chat(tokenizer, chat.messages, span=chat.span, template=chat.template)


def _text(branch: Branch, prepared: Prepared, is_open: bool) -> str | None:
    """The text in front of a prompt: the branch's, or what was prepared for this prompt."""
    if branch.name in prepared.prefixes:
        branch = replace(branch, prefix=prepared.prefixes[branch.name])
    return branch.prefix if isinstance(branch.prefix, str) and not is_open else None
