"""The driver of chats of several turns around the decode loop (`generation.loop`): the user's later
messages are given, the model writes the answers.

For each turn the loop writes an answer in every chat, as after a prompt: `Layout` has the whole
chat up to there, so that l counts all of it, and a query is a step where it predicts a token of an
answer. Between two turns

- turns that are *read again* are text: the template writes the messages and the answers so far, and
  new rows read them from the first token;
- turns that are *kept* stay in the cache, with the keys and values under which they were written:

  1. pack the rows, which ended at unequal slots: each keeps its chat without the tokens that follow
     an ended answer, and all end at one slot;
  2. read what follows the answer: the last token drawn, which nothing has read, and what the
     template writes up to the next answer, but for its last token (in rows that read fewer tokens
     than others, the last one stands several times);
  3. pack again, without these repetitions. The loop's prompt pass reads the last token.

So no row has a hole, and a query's slot gives its l. An end token that was drawn is replaced by
what the template writes there; the template closes an answer that was cut. What it writes has the
tokens that it has in the whole chat (`KeptChat`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from lapa2_interp.attention.cache import CachedRows, RereadRows, WrappedRows, new_rows
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.attention.trace import TracedTexts, concat_traces, join_traces
from lapa2_interp.bias.augmentation import (
    AugmentationLike,
    Augmentations,
    active_augmentations,
)
from lapa2_interp.bias.chat_template import check_text_of_answers
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.tokens import decode_tokens, tokens_from
from lapa2_interp.errors import LayoutError, parameter
from lapa2_interp.generation.arrange import chat_layout, pieces_of_chat
from lapa2_interp.generation.batch import Batch, BatchPlan
from lapa2_interp.generation.loop import decode_samples
from lapa2_interp.models.facts import Model
from lapa2_interp.prefixes.soft_prefix import SoftPrefix
from lapa2_interp.tasks.task import ChatForm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def decode_turns(model: Model, plan: BatchPlan, batch: Batch, bar: tqdm) -> TracedTexts:
    """All answers of a batch of chats, one row each: the turns of a chat follow each other.

    Beside the usual columns there are turn (1 is the first answer), message (the user's, which is
    answered) and context (the ids of all keys before the answer's first token).

    Args:
        batch: Their first turns.

    Raises:
        LayoutError: A chat has more tokens than the context has left, or cannot go on from what the
            cache holds.
    """
    form, pairs = plan.cell.branches[0].chat, batch.pairs
    assert form is not None
    chats = [form.filled(prompt=plan.prompts[prompt]) for prompt, _ in pairs]
    layouts = [plan.arrangement.layouts[0][prompt] for prompt, _ in pairs]
    rows, kept_chats = None, []
    if plan.cell.keeps_turns:
        rows = KeptRows(model, plan.arrangement.augmentations)
        kept_chats = [KeptChat(chat, pieces_of_chat(model.tokenizer, chat)) for chat in chats]
    tables: list[pd.DataFrame] = []
    traces = []
    for turn in range(plan.cell.n_turns):
        if turn:
            if rows is None:
                layouts = _read_again(model, chats, tables)
            else:
                layouts = rows.go_on(_next_turns(model, kept_chats, layouts, tables[-1]))
            _check_fits(model, plan, turn, layouts)
            batch = plan.assemble_turn(pairs, layouts)
        decoded = decode_samples(model, plan, batch, bar, rows)
        columns: dict[str, Any] = {
            "turn": turn + 1,
            "message": [_message(chat, turn) for chat in chats],
            "context": [list(layout.ids) for layout in layouts],
        }
        tables.append(decoded.texts.assign(**columns))
        if decoded.trace is not None:
            traces.append(decoded.trace)
    by_chat = np.arange(len(tables) * len(pairs)).reshape(len(tables), -1).T.ravel()
    table = pd.concat(tables, ignore_index=True).iloc[by_chat].reset_index(drop=True)
    if not traces:
        return TracedTexts(table, None)
    return TracedTexts(table, join_traces([concat_traces(traces).isel(sample=by_chat)], table))


def _message(chat: ChatForm, turn: int) -> str:
    """The user's message that a turn answers."""
    return chat.later[turn - 1] if turn else str(chat.messages[-1].get("content") or "")


def _read_again(
    model: Model, chats: Sequence[ChatForm], tables: Sequence[pd.DataFrame]
) -> list[Layout]:
    """The layouts of the next turn of chats whose answers are read as texts."""
    layouts = []
    for i, chat in enumerate(chats):
        answers = [str(table["continuation"].iloc[i]) for table in tables]
        layouts.append(chat_layout(model.tokenizer, chat, answers))
    return layouts


def _check_fits(model: Model, plan: BatchPlan, turn: int, layouts: Sequence[Layout]) -> None:
    """Refuse a next turn that the context has no room for."""
    longest = max(map(len, layouts))
    if longest + plan.cell.length > model.cfg.n_ctx:
        raise LayoutError(
            f"turn {turn + 1} begins after {longest} tokens, and with {plan.cell.length} new ones"
            f" exceeds the context of {model.cfg.n_ctx}, since the texts of answers may have more"
            f" tokens in the chat than were drawn; give a shorter {parameter('length')}"
        )


class NextTurn(NamedTuple):
    """How a chat goes on: its layout up to the next answer, and the number of its first tokens that
    are in the cache."""

    layout: Layout
    n_cached: int


@dataclass
class KeptChat:
    """A chat whose turns stay in the cache.

    Attributes:
        form: The chat.
        pieces: As of `pieces_of_chat`.
        answers: The texts of its answers so far.
    """

    form: ChatForm
    pieces: Sequence[str]
    answers: list[str] = field(default_factory=list)

    def next_turn(
        self, tokenizer: PreTrainedTokenizerBase, layout: Layout, tokens: Sequence[int], ended: bool
    ) -> NextTurn:
        """The turn after an answer, which stays as the tokens that were drawn. What the template
        writes behind it has the tokens that the tokenizer gives it in the whole chat, from the
        first of its letters on. If this token also has the answer's last letters, it stands in
        place of the answer's tokens with these letters.

        Args:
            layout: The chat up to the answer.
            ended: The last of the answer's tokens is an end token.

        Raises:
            LayoutError: The template changes the answer; or a token has a part of the last token
                that the chat can keep.
        """
        answered = layout.followed_by(tokenizer, tokens[:-1] if ended else tokens)
        self.answers.append("".join(answered.tokens[len(layout.ids) :]))
        written = "".join(map("".join, zip(self.pieces, self.answers, strict=False)))
        text = written + self.pieces[len(self.answers)]
        messages = self.form.messages_after(self.answers)
        check_text_of_answers(tokenizer, messages, self.form.template, text)
        ids, shared = tokens_from(tokenizer, text, len(written))
        # The answer's tokens that have the shared letters, and no others.
        cached_text = "".join(answered.tokens)
        n_kept = next(
            (
                n
                for n in range(len(answered.ids), len(answered.ids) - answered.l_pro, -1)
                if decode_tokens(tokenizer, answered.ids[:n]) + shared == cached_text
            ),
            None,
        )
        if n_kept is None:
            raise LayoutError(
                f"in the whole chat the token {decode_tokens(tokenizer, ids[:1])!r} has the end of"
                f" the answer {self.answers[-1][-40:]!r} and what follows it, and the answer in the"
                " cache cannot be cut there; leave out"
                f" {parameter('keep_turns', 'true', 'set')}"
            )
        # The last token that was drawn has not been read.
        n_cached = min(len(layout.ids) + max(len(tokens) - 1, 0), n_kept)
        longer = answered.followed_by(tokenizer, ids, len(answered.ids) - n_kept)
        return NextTurn(longer, n_cached)


def _next_turns(
    model: Model, chats: Sequence[KeptChat], layouts: Sequence[Layout], answers: pd.DataFrame
) -> list[NextTurn]:
    """The next turn of chats that stay in the cache, after these answers."""
    rows = zip(chats, layouts, answers["tokens"], answers["finish"], strict=True)
    return [
        chat.next_turn(model.tokenizer, layout, tokens, finish == "end")
        for chat, layout, tokens, finish in rows
    ]


def slots_to_read(layouts: Sequence[Layout], n_cached: Sequence[int]) -> int:
    """The slots that `read_behind` fills."""
    n_new = (len(one.ids) - 1 - n for one, n in zip(layouts, n_cached, strict=True))
    return max(n_cached) + max(n_new)


def read_behind(
    model: Model,
    rows: CachedRows | RereadRows,
    rules: Sequence[AugmentationLike],
    layouts: Sequence[Layout],
    n_cached: Sequence[int],
) -> None:
    """Read what follows the cached tokens of each text, but for its last token (steps 2 and 3 of
    the module). All rows then end at one slot.

    Args:
        rows: Left-padded, with room for `slots_to_read`.
        rules: The augmentations of each row.
        layouts: The text of each row.
        n_cached: The number of its first tokens that are in the cache.
    """
    width, n_new = max(n_cached), slots_to_read(layouts, n_cached) - max(n_cached)
    if n_new:
        # Rows that read fewer tokens repeat their last one.
        tokens = [
            [*one.ids[n:-1], *[one.ids[-1]] * (n_new - (len(one.ids) - 1 - n))]
            for one, n in zip(layouts, n_cached, strict=True)
        ]
        begun = [replace(one, pad=width - n) for one, n in zip(layouts, n_cached, strict=True)]
        with augmented(model, list(rules), begun):
            rows.read_tokens(torch.tensor(tokens, device=model.cfg.device))
    rows.pack([one.ids[:-1] for one in layouts], max(len(one.ids) for one in layouts))


class KeptRows(WrappedRows):
    """Rows whose texts go on after their last step; row = branch x chat.

    Args:
        augmentations: By branch.
    """

    rows: CachedRows | RereadRows

    def __init__(self, model: Model, augmentations: Sequence[Augmentations]) -> None:
        super().__init__(
            new_rows(model, [r for of in augmentations for r in active_augmentations(of)])
        )
        self.model, self.augmentations, self.has_read = model, augmentations, False

    def go_on(self, chats: Sequence[NextTurn]) -> list[Layout]:
        """Read all of the next turns but the last token, which the prompt pass reads.

        Args:
            chats: The next turn of each chat, equal in all branches.

        Returns:
            The layouts of the turns.
        """
        turns = [turn for _ in self.augmentations for turn in chats]
        rules = [of for of in self.augmentations for _ in chats]
        layouts = [turn.layout for turn in turns]
        n_cached = [turn.n_cached for turn in turns]
        n_slots = slots_to_read(layouts, n_cached)
        if n_slots > self.model.cfg.n_ctx:
            raise LayoutError(
                f"a batch of chats reads up to {n_slots} tokens, more than the context of"
                f" {self.model.cfg.n_ctx}; give a smaller {parameter('max_rows')}"
            )
        self.rows.pack([turn.layout.ids[: turn.n_cached] for turn in turns], n_slots)
        read_behind(self.model, self.rows, rules, layouts, n_cached)
        self.has_read = True
        return [turn.layout for turn in chats]

    def prompt_pass(
        self,
        layouts: Sequence[Layout],
        prefixes: Sequence[SoftPrefix | None] | None = None,
        keep: int = 1,
    ) -> Float[Tensor, "row query vocab"]:
        if not self.has_read:
            return super().prompt_pass(layouts, prefixes, keep)
        last = [[layout.ids[-1]] for layout in layouts]
        return self.rows.read_tokens(torch.tensor(last, device=self.model.cfg.device), keep)
