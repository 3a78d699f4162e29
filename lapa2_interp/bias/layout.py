"""The keys of a branch: its tokens, its spans, and the paper's lengths.

A branch is one conditional model call: a soft prefix or BOS and a hard prefix, the prompt, and then
the generated tokens. `Layout.of` tokenises prefix and prompt *together*, as the model will read
them, and finds the spans from character offsets: a token that starts in the prefix belongs to the
prefix, and a token that spans the boundary is reported. A count of `len(encode(prefix))` would give
wrong spans. `Layout.of_chat` does the same for a message, or a phrase, of a chat.

Slots are key positions in the cache: soft slots (keys without ids), padding, BOS, hard prefix,
prompt, generated. A span is half-open, [start, stop). Slot numbers a user gives (an explicit span)
count live keys: 0 is the first soft slot, or BOS.

l is the number of keys that the bias counts at the query in slot q (l_pre, l_pro, l_gen: the
paper's), by default without BOS. Tables and plots that also count BOS call it l_kv.

    paper  l = l_pre + l_pro + (t - T) of Algorithm 1: keys the query can see, its own included,
           without BOS
    kv     l = l_kv, the same with BOS
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from lapa2_interp._util.parsing import check_text_length
from lapa2_interp._util.values import Natural, numbers_checked
from lapa2_interp.bias.augmentation import Augmentation, LengthRule, SpanRule
from lapa2_interp.bias.chat_template import Message, render_chat
from lapa2_interp.bias.layer_types import FULL_ATTENTION, LayerType
from lapa2_interp.bias.text_start import (
    AUTO_START,
    CHAT_MARKERS,
    n_start_tokens,
    prepended_token,
    text_start,
    usual_start,
)
from lapa2_interp.bias.tokens import (
    decode_tokens,
    require_tokenizer,
    token_places,
    token_texts,
)
from lapa2_interp.errors import LayoutError, pluralize

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


class Span(NamedTuple):
    """Half-open interval of key slots."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """The keys of one branch up to the end of its prompt.

    Example:
        >>> from lapa2_interp import Layout, load_model
        >>> layout = Layout.of(load_model("smollm2-135m"), "Very positive:", "The lake")
        >>> layout.l_pre, layout.l_pro, len(layout)  # BOS is neither prefix nor prompt
        (3, 2, 6)
        >>> layout.tokens[3:]  # as in the paper's code, no space is added between them
        (':', 'The', ' lake')

    Attributes:
        ids: Token ids: BOS, hard prefix, prompt. `tokens` are their texts, as of
            `vocabulary_texts`.
        n_bos: Start tokens in front of the text: 1, or 2 in the doubled form of the released LLaMA
            scripts, or 0 where text starts with nothing (`bias.text_start`).
        l_pre: Prefix length, soft or hard; 0 on the raw model.
        l_pro: Prompt tokens, >= 1; of a chat those after the span.
        counted: The released code's span length: soft slots; else what the tokenizer counts for the
            prefix alone (for the prompt on the raw model), its automatic BOS included.
        soft: Soft slots in front of everything.
        merged: The token that spans the boundary of prefix and prompt, if one does. Such a token
            counts as prefix. Of a chat, the text of a span that shares a token with the template.
        pad: Padding slots between the soft slots and BOS.
        n_before: Tokens between BOS and the prefix: those before the span of a chat. They count as
            prompt.
    """

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    n_bos: int
    l_pre: int
    l_pro: int
    counted: int
    soft: int = 0
    merged: str | None = None
    pad: int = 0
    n_before: int = 0

    @classmethod
    @numbers_checked
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        prefix: str | None,
        prompt: str,
        *,
        soft: Natural = 0,
        doubled_bos: bool = False,
        start: str | None = AUTO_START,
    ) -> Layout:
        """Tokenise one branch and find its spans.

        Args:
            tokenizer: A fast tokenizer (character offsets are needed), or a model that has one.
            prefix: The hard prefix, joined to the prompt exactly as given, as in the paper's code;
                None for the raw model. For a space between them, begin the prompt with one: many
                tokenizers make one token of a space and the word after it, and a token that starts
                in the prefix belongs to the prefix.
            prompt: The prompt.
            soft: Slots of a soft prefix in front, instead of a hard one.
            doubled_bos: Two BOS tokens, as the released scripts feed LLaMA; only for tokenizers
                that prepend BOS themselves.
            start: The token in front of the text: "auto" as `bias.text_start.text_start` decides;
                "none" or None for nothing; "usual", the token that the tokenizer names for it; or
                the text of a token.

        Raises:
            LayoutError: Prefix or prompt tokenise to nothing, begin with BOS, or have millions of
                letters; a soft prefix beside a hard one; the tokenizer has no offsets; a doubled
                BOS is asked of one that adds none; or the start token is not in the vocabulary.
        """
        start_id = text_start(tokenizer, start).token
        tokenizer = require_tokenizer(tokenizer)
        for name, text in (("prompt", prompt), ("prefix", prefix or "")):
            if not isinstance(text, str):
                raise LayoutError(f"the {name} must be a text, found {text!r}")
            check_text_length(name, text)
            _check_no_start_token(tokenizer, start_id, name, text)
        if soft and prefix is not None:
            raise LayoutError(
                f"a branch has one prefix, hard or soft; found soft={soft} beside {prefix!r}"
            )
        if not tokenizer.is_fast:
            raise LayoutError(
                f"{type(tokenizer).__name__} gives no character offsets; load the fast tokenizer"
            )
        adds_bos = start_id is not None and prepended_token(tokenizer) == start_id
        if doubled_bos and not adds_bos:
            raise LayoutError(
                "doubled_bos reproduces tokenizers that prepend BOS themselves; this one does not"
            )

        # Tokenise prefix and prompt together, and divide the tokens at the boundary.
        boundary = len(prefix or "")
        encoded = tokenizer(
            (prefix or "") + prompt, add_special_tokens=False, return_offsets_mapping=True
        )
        places = token_places(encoded["offset_mapping"])
        l_pre = sum(begin < boundary for begin, _ in places)
        l_pro = len(places) - l_pre
        if prefix is not None and not tokenizer(prefix, add_special_tokens=False).input_ids:
            raise LayoutError(
                f"the prefix {prefix!r} tokenises to nothing; give text, or None for the raw model"
            )
        if not l_pro:
            raise LayoutError(
                f"the prompt {prompt!r} tokenises to nothing beside the prefix; give at least one"
                " token of text"
            )

        alone = prefix if prefix is not None else prompt
        front = () if start_id is None else (start_id,) * (1 + doubled_bos)
        ids = front + tuple(encoded["input_ids"])
        crosses = l_pre > 0 and places[l_pre - 1][1] > boundary
        return cls(
            ids=ids,
            tokens=tuple(token_texts(tokenizer, "", ids)),
            n_bos=len(front),
            l_pre=soft or l_pre,
            l_pro=l_pro,
            counted=soft or adds_bos + len(tokenizer(alone, add_special_tokens=False).input_ids),
            soft=soft,
            merged=decode_tokens(tokenizer, [encoded["input_ids"][l_pre - 1]]) if crosses else None,
        )

    @classmethod
    def of_chat(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message],
        *,
        span: str = "system",
        add_generation_prompt: bool = True,
        template: Mapping[str, Any] | None = None,
        n_searched: int | None = None,
    ) -> Layout:
        """A chat rendered by its template, with one of its texts as the prefix.

        The whole chat is tokenised once, as the template does it, and the span's tokens come from
        character offsets. The first token counts as BOS if it is a special token; all others that
        are not in the span count as prompt, those before it as `n_before` and those after it as
        `l_pro`.

        Args:
            tokenizer: A fast tokenizer with a chat template, or a model that has one.
            messages: As the template takes them: each has a "role" and a "content" (or tool calls
                in its place), and perhaps a "reasoning_content" (or "thinking").
            span: The text that becomes the prefix: "system" (that of the first message, which has
                that role), "turn:2" (that of the second message that is not the system's),
                "reasoning:2" (that message's reasoning), or "phrase:be brief" (a text that occurs
                once in all messages). The span includes white space that belongs to its first or
                last token, and a mark of the template that shares a token with a whole message
                (`merged`).
            add_generation_prompt: End with the opening of the assistant's next turn.
            template: Arguments of the template, such as {"enable_thinking": False, "tools": [...]}.
            n_searched: The number of first messages that have the span; by default all. Later ones
                may repeat a phrase.

        Raises:
            LayoutError: The tokenizer has no offsets or no template; a message has an image or
                another part that is no text; the template refuses or changes a message, or does not
                read an argument; there is no such message or phrase, or several; or the phrase
                begins or ends inside a token.
        """
        tokenizer = require_tokenizer(tokenizer)
        if not tokenizer.is_fast or not tokenizer.chat_template:
            raise LayoutError(
                f"{tokenizer.name_or_path or type(tokenizer).__name__} has no"
                f" {'chat template' if tokenizer.is_fast else 'character offsets'}, which a chat"
                " needs; use an instruct model, or Layout.of with a prefix and a prompt"
            )
        # Render the chat, and tokenise it.
        rendered = render_chat(
            tokenizer, messages, span, add_generation_prompt, template or {}, n_searched
        )
        encoded = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True)
        ids = tuple(encoded["input_ids"])
        if ids != rendered.ids:
            raise LayoutError(
                "the tokens of the chat template's text are not those that the template gives"
            )
        # The tokens of the span.
        start, stop, phrase = rendered.start, rendered.stop, rendered.span
        inside = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if a < stop and b > start]
        begin, end = inside[0], inside[-1] + 1
        covered = decode_tokens(tokenizer, ids[begin:end])
        crosses = covered.strip() != phrase.strip()
        if crosses and not rendered.whole:
            raise LayoutError(
                f"the tokens of {phrase!r} read {covered!r}: it begins or ends inside a token; mark"
                " whole words"
            )
        if end == len(ids):
            raise LayoutError(
                f"no text follows {phrase!r} in the chat; add_generation_prompt=True opens"
                " the assistant's turn"
            )
        n_bos = min(begin, n_start_tokens(tokenizer, ids))
        return cls(
            ids=ids,
            tokens=tuple(token_texts(tokenizer, "", ids)),
            n_bos=n_bos,
            l_pre=end - begin,
            l_pro=len(ids) - end,
            counted=end - begin,
            merged=covered if crosses else None,
            n_before=begin - n_bos,
        )

    def followed_by(
        self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], in_place_of: int = 0
    ) -> Layout:
        """The layout, without padding, with more tokens, which count as prompt.

        Args:
            in_place_of: The number of its last tokens that these replace.
        """
        longer = self.ids[: len(self.ids) - in_place_of] + tuple(ids)
        return replace(
            self,
            ids=longer,
            tokens=tuple(token_texts(tokenizer, "", longer)),
            l_pro=self.l_pro + len(longer) - len(self.ids),
            pad=0,
        )

    def __len__(self) -> int:
        """Slots up to the end of the prompt, soft ones and padding included."""
        return self.soft + self.pad + len(self.ids)

    def _repr_html_(self) -> str:
        """Its keys by slot, coloured by part, for notebooks."""
        keys = [f"soft {i + 1}" for i in range(self.soft)] + ["pad"] * self.pad + list(self.tokens)
        colours = {"bos": "#9994", "prefix": "#E69F0066", "prompt": "#56B4E966"}
        cells = ""
        for slot, key in enumerate(keys):
            parts = (name for name in ("bos", "prefix") if slot in range(*getattr(self, name)))
            part = next(parts, "prompt")
            cells += (
                f'<span title="slot {slot}, {part}" style="background:{colours[part]};'
                'white-space:pre;padding:0 2px;margin:1px;display:inline-block">'
                f"{escape(repr(key)[1:-1])}</span>"
            )
        return f"<p>l_pre {self.l_pre}, l_pro {self.l_pro}, BOS {self.n_bos}</p><p>{cells}</p>"

    @property
    def n_live(self) -> int:
        """Live keys up to the end of the prompt."""
        return self.soft + len(self.ids)

    @property
    def bos(self) -> Span:
        return Span(self.soft + self.pad, self.soft + self.pad + self.n_bos)

    @property
    def before(self) -> Span:
        """Tokens between BOS and the prefix, of a chat."""
        return Span(self.bos.stop, self.bos.stop + self.n_before)

    @property
    def prefix(self) -> Span:
        first = self.before.stop
        return Span(0, self.soft) if self.soft else Span(first, first + self.l_pre)

    @property
    def prompt(self) -> Span:
        return Span(len(self) - self.l_pro, len(self))

    @property
    def controlled(self) -> Span:
        """The span that an augmentation strengthens: the prefix, or the prompt on the raw model
        (Eq. 15)."""
        return self.prefix if self.l_pre else self.prompt

    @property
    def tensor(self) -> Int[Tensor, "row=1 query"]:
        """The ids without padding, as a batch of one row."""
        import torch

        return torch.tensor([self.ids])

    def spans(self, rule: SpanRule) -> tuple[Span, ...]:
        """The key slots a span rule covers, in this row's slots.

        Raises:
            LayoutError: An explicit or released span ends after the prompt, positions lie outside
                the prefix, or the span has the start token of a text without one.
        """
        if not isinstance(rule, str) and rule[0] == "prefix":
            return self._positions(rule[1])
        match rule:
            case "prefix":
                return (self.controlled,)
            case "bos" | "prefix+bos" if not self.n_bos:
                raise LayoutError(
                    f"span {rule!r} has the start token, and this text starts with none; give"
                    " span 'prefix', or a start token (start='usual')"
                )
            case "bos":
                return (self.bos,)
            case "prefix+bos":
                return (self.bos, self.controlled)
            case "input" | "all":
                slots: tuple[tuple[int, int], ...] = ((0, self.n_live),)
            case "released":
                slots = ((0, self.counted),)
            case _:
                slots = rule
        for start, stop in slots:
            if stop > self.n_live:
                raise LayoutError(
                    f"span [{start}, {stop}) lies outside the sequence of {self.n_live} keys that"
                    " this prefix and prompt have; see `lapa2 layout`"
                )
        # Live keys are the soft slots and then, past the padding, the tokens.
        parts = ((0, self.soft, 0), (self.soft, self.n_live, self.pad))
        return tuple(
            Span(max(start, low) + shift, min(stop, high) + shift)
            for start, stop in slots
            for low, high, shift in parts
            if max(start, low) < min(stop, high)
        )

    def _positions(self, positions: tuple[int, ...]) -> tuple[Span, ...]:
        """Spans of these positions in the prefix; neighbours are joined."""
        if max(positions) >= self.l_pre:
            raise LayoutError(
                f"position {max(positions)} lies outside the prefix, which has"
                f" {pluralize(self.l_pre, 'token')} here"
                + (
                    f"; give positions up to {self.l_pre - 1}"
                    if self.l_pre
                    else "; a branch without a prefix has no positions, so give another span"
                )
            )
        spans: list[Span] = []
        for position in sorted(positions):
            slot = self.prefix.start + position
            if spans and spans[-1].stop == slot:
                spans[-1] = Span(spans[-1].start, slot + 1)
            else:
                spans.append(Span(slot, slot + 1))
        return tuple(spans)

    def n(self, rule: SpanRule) -> int:
        """The n of b(l): the controlled length, the tokenizer's count under "released", the span's
        size if explicit."""
        if rule == "released":
            return self.counted
        spans = (self.controlled,) if isinstance(rule, str) else self.spans(rule)
        return sum(span.size for span in spans)

    def lengths(
        self,
        queries: Int[np.ndarray, " query"],
        rule: LengthRule,
        layer_type: LayerType = FULL_ATTENTION,
    ) -> Int[np.ndarray, " query"]:
        """l at the queries in these slots, in layers of this type; <= 0 on padding (and on BOS
        under "paper")."""
        first = layer_type.first_seen(queries, self.pad)
        bos = np.clip(queries + 1 - self.bos.start, 0, self.n_bos) - _n_hidden((self.bos,), first)
        return queries + 1 - self.pad - self._live_before(first) - (bos if rule == "paper" else 0)

    def _live_before(self, slots: Int[np.ndarray, " slot"]) -> Int[np.ndarray, " slot"]:
        """Number of live keys before these slots."""
        return np.minimum(slots, self.soft) + np.maximum(slots - self.soft - self.pad, 0)

    def acts(
        self,
        augmentation: Augmentation,
        queries: Int[np.ndarray, " query"],
        layer_type: LayerType = FULL_ATTENTION,
    ) -> Bool[np.ndarray, " query"]:
        """The queries at which an augmentation acts: those of its phase and steps that see a key of
        its span; under profile "released" only where l > n.

        Raises:
            LayoutError: The convention of the released code, beyond a sliding window.
        """
        # The queries of the phase and steps.
        last_prompt = self.prompt.stop - 1
        spans = self.spans(augmentation.span)
        inside = augmentation.span == "all" or all(
            self.prefix.start <= span.start and span.stop <= self.prefix.stop for span in spans
        )
        first = {
            "decode": last_prompt + 1,
            "last_query": last_prompt,
            "predicting_only": last_prompt,
            "everywhere": 0,
            "after_span": self.prefix.stop if inside else max(span.stop for span in spans),
        }[augmentation.phase]
        start, stop = augmentation.steps or (-math.inf, math.inf)
        step = queries - last_prompt
        acts = (queries >= first) & (step >= start) & (step < stop)
        # Those that see a key of the span.
        first_seen = layer_type.first_seen(queries, self.pad)
        if (
            augmentation.follows_released_code
            and (acts & (self._live_before(first_seen) > 0)).any()
        ):
            raise LayoutError(
                f"the released code boosts the first slots, and a layer that is {layer_type} lacks"
                " them; use profile 'paper', layers that see all keys, or texts of at most"
                f" {layer_type.size} tokens"
            )
        if augmentation.span != "all":
            acts &= _n_seen(spans, queries, first_seen) > 0
        if augmentation.profile == "released":
            lengths = self.lengths(queries, augmentation.length_rule)
            acts &= lengths > self.n(augmentation.span)
        return acts

    def bias(
        self,
        augmentation: Augmentation,
        queries: Int[np.ndarray, " query"],
        layer_type: LayerType = FULL_ATTENTION,
    ) -> Float[np.ndarray, " query"]:
        """The bias each query adds to every key of the span; 0 for queries outside the
        augmentation's phase and steps.

        In a layer with a sliding window (an extension of ours; the paper has none), l counts the
        keys that a query sees. Where the window hides a part of the span, n is at most the number
        of the span's keys that it sees. A query that sees none of them adds 0.

        Args:
            queries: Slots.
            layer_type: The type of the layer, which decides which keys the queries see.

        Raises:
            AugmentationError: The bias depends on the scores.
            LayoutError: As `acts`.
        """
        l = np.maximum(self.lengths(queries, augmentation.length_rule, layer_type), 1)
        n: Any = self.n(augmentation.span)
        if layer_type.size:
            spans, first = self.spans(augmentation.span), layer_type.first_seen(queries, self.pad)
            seen = np.maximum(_n_seen(spans, queries, first), 1)
            n = np.where(_n_hidden(spans, first) > 0, np.minimum(n, seen), n)
        return np.where(self.acts(augmentation, queries, layer_type), augmentation.bias(l, n), 0.0)

    def in_sight(
        self, queries: Int[np.ndarray, " query"], layer_type: LayerType
    ) -> Int[np.ndarray, " query"]:
        """Number of tokens of the prefix (of the prompt on the raw model) that later queries see in
        layers of this type."""
        n_seen = self.controlled.size - _n_hidden(
            (self.controlled,), layer_type.first_seen(queries, self.pad)
        )
        return n_seen if layer_type.kind != "none" else np.zeros_like(n_seen)

    @numbers_checked
    def padded(self, width: int) -> Layout:
        """A copy, left-padded to `width` slots."""
        return replace(self, pad=width - self.n_live)


def _n_hidden(spans: Sequence[Span], first: Int[np.ndarray, " query"]) -> Int[np.ndarray, " query"]:
    """Number of keys of the spans before the first slot that each query sees."""
    return sum(
        (np.clip(first - span.start, 0, span.size) for span in spans), start=np.zeros_like(first)
    )


def _n_seen(
    spans: Sequence[Span], queries: Int[np.ndarray, " query"], first: Int[np.ndarray, " query"]
) -> Int[np.ndarray, " query"]:
    """Number of keys of the spans from the first slot that each query sees to its own."""
    return sum(
        (
            np.clip(np.minimum(queries + 1, span.stop) - np.maximum(first, span.start), 0, None)
            for span in spans
        ),
        start=np.zeros_like(first),
    )


def _check_no_start_token(tokenizer: Any, start: int | None, name: str, text: str) -> None:
    """Refuse a text with a first token of its own: it would count in every l."""
    usual = usual_start(tokenizer) if start is None else start
    named = () if usual is None else (tokenizer.convert_ids_to_tokens(usual),)
    for first in (*named, *CHAT_MARKERS):
        if text.lstrip().startswith(first) and first in tokenizer.get_vocab():
            reason = "a layout puts a first token in front itself, so the second one"
            remedy = "leave it out"
            if start is None:
                reason = "text starts with nothing here, so it"
                remedy += f", or give start={first!r}"
            raise LayoutError(
                f"the {name} begins with {first!r}, and {reason} would count in every l; {remedy},"
                " or give a chat's messages to Layout.of_chat"
            )


def left_pad(layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts of a batch, padded so that all end at one slot and no row has tokens in the soft
    slots of another; `PaddedRows.of` also gives ids, mask and positions."""
    width = max(layout.soft for layout in layouts) + max(len(layout.ids) for layout in layouts)
    return [layout.padded(width) for layout in layouts]
