"""A cell laid out for its model: the layout of every branch and prompt, and how many tokens follow.

A cell is refused here if it cannot run and no weights are needed to know that: only a tokenizer,
the model's size and the cards of soft prefixes. A sweep arranges its cells before it begins
(`runs.checks`), `plan.plan_batches` before and after the method has prepared for its prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lapa2_interp.bias.augmentation import Augmentation, Augmentations, active_augmentations
from lapa2_interp.bias.chat_template import PLACEHOLDER, texts_around_answers
from lapa2_interp.bias.layer_types import LayerType, distinct_types
from lapa2_interp.bias.layout import Layout
from lapa2_interp.errors import AugmentationError, LayoutError, MethodError
from lapa2_interp.generation.cell import Cell
from lapa2_interp.methods.base import Prepared
from lapa2_interp.models.card import ModelCard
from lapa2_interp.models.facts import check_rotary_side
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
        later_keys: Keys that the later turns of each prompt's chat add, at most, or a reminder.
    """

    augmentations: tuple[Augmentations, ...]
    layouts: tuple[tuple[Layout, ...], ...]
    steps: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    streams: tuple[str, ...]
    later_keys: tuple[int, ...]

    @property
    def longest(self) -> tuple[int, ...]:
        """Keys of the longest branch but for new tokens, by prompt; of a chat those before its last
        answer."""
        by_prompt = zip(*self.layouts, strict=True)
        return tuple(
            max(map(len, branches)) + later
            for branches, later in zip(by_prompt, self.later_keys, strict=True)
        )


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
        prepared: What the method worked out, by prompt. None lays out the branches of a method that
            prepares as bare prompts, because each prompt may get a different text.
        layout: Called instead of `Layout.of`; it may remember layouts that many cells share.

    Raises:
        LayoutError: A prefix or prompt tokenises to nothing, or a text does not fit the length or
            the model's context, or crosses a switch of its rotary factors.
        AugmentationError: Layers or heads the model does not have.
    """
    method, branches, prompts = cell.decoding_method, cell.branches, cell.prompts
    open_texts = prepared is None and method.prepares
    preparations = [Prepared()] * len(prompts) if prepared is None else prepared
    augmentations = cell.branch_augmentations
    steps, counts = [], []
    for prompt in prompts:
        n = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        counts.append(n)
        steps.append(cell.length - n if cell.task.length_counts_prompt else cell.length)
        if steps[-1] < 1:
            raise LayoutError(
                f"length {cell.length} leaves nothing to generate after the {n} tokens of"
                f" {prompt[:40]!r}, because on task {cell.task.name} it counts them, too; length"
                f" {cell.length + n} makes {cell.length} new tokens"
            )
    if cell.doubled_bos and branches[0].chat is not None:
        raise LayoutError("a chat's template writes its first token; leave doubled_bos out")
    if cell.keeps_turns:
        _check_kept_turns(cell)
    layouts, later_keys = [], [0] * len(prompts)
    for branch, augmentation in zip(branches, augmentations, strict=True):
        reached: list[tuple[Augmentation, list[LayerType]]] = []
        for active in active_augmentations(augmentation):
            layers = np.flatnonzero(active.head_mask(size.n_layers, size.n_heads).any(1))
            reached.append(
                (active, distinct_types([size.layer_types[i] for i in layers if size.layer_types]))
            )
        of_branch = []
        by_prompt = zip(prompts, preparations, steps, strict=True)
        for i, (prompt, prepared_text, new) in enumerate(by_prompt):
            if branch.chat is not None:
                chat = branch.chat.filled(prompt=prompt)
                branch_layout = chat_layout(tokenizer, chat)
                later_keys[i] = _later_keys(tokenizer, chat, branch_layout, cell)
            else:
                text = prepared_text.prefixes.get(branch.name, branch.prefix)
                if open_texts or not isinstance(text, str):
                    text = None  # the prompt alone, or after a soft prefix
                slots = soft_slots.get(branch.name, 0)
                branch_layout = layout(
                    tokenizer,
                    text,
                    branch.join + prompt,
                    soft=slots,
                    doubled_bos=cell.doubled_bos,
                    start=cell.start,
                )
                if prepared_text.reminder is not None:
                    later_keys[i] = prepared_text.reminder.n_keys(new)
            keys = len(branch_layout) + later_keys[i]
            if keys + new > size.n_ctx:
                turns = f" before the last of {cell.n_turns} answers" * (cell.n_turns > 1)
                turns += " and reminders" * (prepared_text.reminder is not None)
                raise LayoutError(
                    f"{keys} tokens of BOS, prefix and prompt ({prompt[:40]!r}){turns} and"
                    f" {new} new ones exceed the context of {size.n_ctx} of {cell.model}; shorten"
                    " the prompt or the length"
                )
            for active, kinds in () if open_texts else reached:
                branch_layout.spans(active.span)
                for kind in kinds:  # refused beyond a window
                    branch_layout.acts(active, np.array([keys + new - 2]), kind)
            of_branch.append(branch_layout)
        layouts.append(tuple(of_branch))
    for prompt, new, later, of_prompt in zip(
        prompts, steps, later_keys, zip(*layouts, strict=True), strict=True
    ):
        if not open_texts:
            read = method.reads_prompt
            if read and any(layout.l_pro == len(layout.ids) for layout in of_prompt):
                raise LayoutError(
                    f"{method.name} reads the probability of the prompt, and in one of its branches"
                    f" nothing stands in front of {prompt[:40]!r}, so its first token has none;"
                    " give a start token (start='usual')"
                )
            # A soft prefix was trained under the factors of short texts.
            firsts = [0 if l.soft else len(l.ids) - l.l_pro * read for l in of_prompt]
            last = max(map(len, of_prompt)) + later + new - 1
            reading = ", which reads the probability of the prompt" * read
            what = f"{prompt[:40]!r} under {method.name}{reading}"
            check_rotary_side(size.short_ctx, min(firsts), last, what)
    streams = prompts
    if branches[0].chat is not None:
        streams = tuple(map(chat_stream, layouts[0]))
    return Arrangement(
        augmentations, tuple(layouts), tuple(steps), tuple(counts), streams, tuple(later_keys)
    )


def chat_stream(layout: Layout) -> str:
    """The name of the random numbers of a chat's next answer."""
    return " ".join(map(str, layout.ids))


def _check_kept_turns(cell: Cell) -> None:
    """Refuse what a chat whose turns stay in the cache cannot have."""
    if cell.samples > 1:
        raise MethodError(
            f"keep_turns goes on from one sample of each prompt, and samples is {cell.samples};"
            " make a cell for each seed, or leave keep_turns out"
        )
    if any(rule.pooled for rule in cell.active_augmentations):
        raise AugmentationError(
            "a pooled law reads all queries of a pass, and the messages of kept turns are read in"
            " passes of their own; leave keep_turns out"
        )


def _later_keys(
    tokenizer: PreTrainedTokenizerBase, chat: ChatForm, first: Layout, cell: Cell
) -> int:
    """Keys that the later turns of a chat add before its last answer: answers of full length, and
    what the template writes around them."""
    if not chat.later:
        return 0
    if cell.keeps_turns:
        pieces_of_chat(tokenizer, chat)  # refused here, before the first token
    last = chat_layout(tokenizer, chat, ["a"] * len(chat.later))
    return len(last) - len(first) + cell.length * len(chat.later)


def chat_layout(
    tokenizer: PreTrainedTokenizerBase, chat: ChatForm, answers: Sequence[str] = ()
) -> Layout:
    """The layout of a chat up to its next answer, after `answers`."""
    return Layout.of_chat(
        tokenizer,
        chat.messages_after(answers),
        span=chat.span,
        template=chat.template,
        n_searched=len(chat.searched),
    )


def pieces_of_chat(tokenizer: PreTrainedTokenizerBase, chat: ChatForm) -> list[str]:
    """The texts of a chat in front of each of its answers, from the answer before it on.

    Raises:
        LayoutError: As `texts_around_answers`.
    """
    turns = [chat.messages_after([PLACEHOLDER] * turn) for turn in range(chat.n_turns)]
    return texts_around_answers(tokenizer, turns, chat.template)
