"""Which key is which: the tokens of a branch, its spans, and the paper's lengths.

A branch is one conditional model call: a soft prefix or BOS and a hard prefix, the prompt, and then
what is generated. `Layout.of` tokenises prefix and prompt *together*, as the model will read them,
and finds the spans from character offsets: a token that starts before the seam belongs to the
prefix, and a token that crosses it is reported. Counting `len(encode(prefix))` instead is how spans
go wrong. `Layout.of_chat` does the same for a message, or a phrase, of a chat.

Slots are key positions in the cache: soft slots (keys without ids), padding, BOS, hard prefix,
prompt, generated. A span is half-open, [start, stop). Slot numbers a user gives (an explicit span)
count live keys: 0 is the first soft slot, or BOS.

Lengths at the query in slot q (methods: l_pre, l_pro, l_gen of the paper):

    kv     l = keys the query can see, its own and BOS included
    paper  l = l_pre + l_pro + (t - T) of Algorithm 1: the same without BOS
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from jinja2 import TemplateError

from lapa2_interp.augmentation import Augmentation, LengthRule, SpanRule
from lapa2_interp.errors import LayoutError, counted

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

CHAT_MARKERS = ("<|im_start|>",)
"""Configured "bos" tokens that open a chat turn; plain text does not start with them."""
PLAIN_START = "<|endoftext|>"
BLOCKED = "blocked"
HOLE = "\ue000"
"""Stands for a message's text, to see where a chat template puts it: a character of private use."""
NO_BOS_FAMILIES = ("GPT2", "GPTNeoX", "Qwen2")
"""Tokenizer classes that do not prepend `PLAIN_START` by themselves; OPT's, of GPT-2's class,
prepends another BOS."""


class Span(NamedTuple):
    """Half-open interval of key slots."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


KeysSeenKind = Literal["full", "sliding", "chunked", "none"]


class KeysSeen(NamedTuple):
    """The keys that the queries of a layer see, up to their own: all ("full"), the last `size`
    ("sliding"), those of their chunk of `size` ("chunked"); "none" in a layer without attention."""

    kind: KeysSeenKind
    size: int = 0

    def first(self, queries: Int[np.ndarray, " query"], pad: int = 0) -> Int[np.ndarray, " query"]:
        """The first slot that each query sees.

        Args:
            queries: Slots.
            pad: Slots of padding, which chunks do not count.
        """
        match self.kind:
            case "sliding":
                return np.maximum(queries - self.size + 1, 0)
            case "chunked":
                return np.maximum(pad + (queries - pad) // self.size * self.size, 0)
        return np.zeros_like(queries)

    def __str__(self) -> str:
        return f"{self.kind} {self.size}" if self.size else self.kind


FULL = KeysSeen("full")


def tokenizer_of(given: Any) -> Any:
    """A tokenizer, or that of a model or processor that has one.

    Raises:
        LayoutError: It is neither.
    """
    found = getattr(given, "tokenizer", given)
    if not hasattr(found, "convert_tokens_to_ids"):
        near = f"load_tokenizer({given!r})" if isinstance(given, str) else "model.tokenizer"
        raise LayoutError(
            f"a tokenizer is needed here, found a {type(given).__name__}; give {near}"
        )
    return found


class TextMarkers(NamedTuple):
    """The token that starts plain text, and those that end one."""

    start: int
    ends: tuple[int, ...]


def text_markers(tokenizer: PreTrainedTokenizerBase) -> TextMarkers:
    """The one place that decides how plain text starts and ends for a tokenizer.

    Start: the configured BOS, or `<|endoftext|>` where that BOS opens a chat turn (SmolLM2), or EOS
        where there is none.
    Ends: EOS, and `<|endoftext|>` where the vocabulary has it; a model's generation config may add
    more
    (`models.ModelCard`).

    Raises:
        LayoutError: It is no tokenizer, or has neither BOS nor EOS.
    """
    tokenizer = tokenizer_of(tokenizer)

    def known(token: str | None) -> int | None:
        """A token's id; tokenizers answer the unknown token for a name they do not have."""
        found = None if token is None else tokenizer.convert_tokens_to_ids(token)
        unknown = found == tokenizer.unk_token_id and token != tokenizer.unk_token
        return None if unknown or not isinstance(found, int) else found

    plain, bos, eos = map(known, (PLAIN_START, tokenizer.bos_token, tokenizer.eos_token))
    start = bos if bos is not None else eos
    if plain is not None and tokenizer.bos_token in (*CHAT_MARKERS, None):
        start = plain
    if start is None:
        raise LayoutError(
            "the tokenizer has neither a BOS nor an EOS token; set bos_token, in Python or in its"
            " tokenizer_config.json"
        )
    ends = {each for each in (eos, plain) if each is not None}
    return TextMarkers(int(start), tuple(sorted(int(end) for end in ends)))


def pieces(tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: Sequence[int]) -> list[str]:
    """The text each token adds; joined, they are the text of the tokens behind the prompt.

    A character whose bytes are spread over several tokens belongs to the last of them; those before
    it add "".

    Args:
        prompt: What the tokens continue.
        tokens: New tokens only.

    Returns:
        As many as tokens.
    """
    tokenizer = tokenizer_of(tokenizer)

    def text(ids: Sequence[int]) -> str:
        return str(
            tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    # Decoding a few tokens at a time, from a border between characters on, gives what decoding all
    # of them would.
    window = list(tokenizer(prompt, add_special_tokens=False)["input_ids"][-4:])
    known, found = len(window), []
    for i, token in enumerate(tokens):
        window.append(token)
        before, after = text(window[:known]), text(window)
        if after.endswith("\ufffd") and i < len(tokens) - 1:
            found.append("")
            continue
        found.append(after[len(before) :])
        window, known = window[known:], len(window) - known
    return found


@dataclass(frozen=True)
class Layout:
    """The keys of one branch up to the end of its prompt.

    Attributes:
        ids: Token ids: BOS, hard prefix, prompt. `tokens` are their texts, as of `pieces`.
        n_bos: BOS tokens in front of the text, 1 (2 in the doubled form of the released LLaMA
            scripts).
        l_pre: Prefix length, soft or hard; 0 on the raw model.
        l_pro: Prompt tokens, >= 1; of a chat those behind the span.
        counted: The released code's span length: soft slots; else what the tokenizer counts for the
            prefix alone (for the prompt on the raw model), its automatic BOS included.
        soft: Soft slots in front of everything.
        merged: The token that crosses the seam between prefix and prompt, if one does. It counts as
            prefix. Of a chat, the text of a span that shares a token with the template.
        pad: Padding slots between the soft slots and BOS.
        n_before: Tokens between BOS and the prefix: what stands before the span of a chat. They
            count as prompt.
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
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        prefix: str | None,
        prompt: str,
        *,
        soft: int = 0,
        doubled_bos: bool = False,
    ) -> Layout:
        """Tokenise one branch and find its spans.

        Args:
            tokenizer: A fast tokenizer (character offsets are needed), or a model that has one.
            prefix: The hard prefix, joined to the prompt exactly as given (put separators into one
                of the two); None for the raw model.
            prompt: The prompt.
            soft: Slots of a soft prefix in front, instead of a hard one.
            doubled_bos: Two BOS tokens, as the released scripts feed LLaMA; only for tokenizers
                that prepend BOS themselves.

        Raises:
            LayoutError: Prefix or prompt tokenise to nothing, or begin with BOS; a soft prefix
                beside a hard one; the tokenizer has no offsets; or a doubled BOS is asked of one
                that adds none.
        """
        tokenizer = tokenizer_of(tokenizer)
        start = text_markers(tokenizer).start
        for name, text in (("prompt", prompt), ("prefix", prefix or "")):
            if not isinstance(text, str):
                raise LayoutError(f"the {name} must be a text, found {text!r}")
            _check_start(tokenizer, start, name, text)
        if soft < 0 or (soft and prefix is not None):
            raise LayoutError(
                f"a branch has one prefix, hard or soft; found soft={soft} beside {prefix!r}"
            )
        if not tokenizer.is_fast:
            raise LayoutError(
                f"{type(tokenizer).__name__} gives no character offsets; load the fast tokenizer"
            )
        # TransformerLens switches BOS on in tokenizers whose own files have it off.
        off = type(tokenizer).__name__.startswith(NO_BOS_FAMILIES)
        adds_bos = tokenizer("a").input_ids[0] == start and not (
            off and tokenizer.convert_ids_to_tokens(start) == PLAIN_START
        )
        if doubled_bos and not adds_bos:
            raise LayoutError(
                "doubled_bos reproduces tokenizers that prepend BOS themselves; this one does not"
            )

        seam = len(prefix or "")
        encoded = tokenizer(
            (prefix or "") + prompt, add_special_tokens=False, return_offsets_mapping=True
        )
        # Tokenizers that trim offsets leave leading white space between two tokens; it belongs to
        # the one that follows.
        stops = [0] + [stop for _, stop in encoded["offset_mapping"]]
        begins = [
            min(begin, stop)
            for (begin, _), stop in zip(encoded["offset_mapping"], stops, strict=False)
        ]
        l_pre = sum(begin < seam for begin in begins)
        l_pro = len(begins) - l_pre
        if prefix is not None and not tokenizer(prefix, add_special_tokens=False).input_ids:
            raise LayoutError(
                f"the prefix {prefix!r} tokenises to nothing; give text, or None for the raw model"
            )
        if not l_pro:
            raise LayoutError(
                f"the prompt {prompt!r} tokenises to nothing of its own; give at least one token of"
                " text"
            )

        alone = prefix if prefix is not None else prompt
        n_bos = 2 if doubled_bos else 1
        ids = (start,) * n_bos + tuple(encoded["input_ids"])
        crosses = l_pre > 0 and stops[l_pre] > seam
        return cls(
            ids=ids,
            tokens=tuple(pieces(tokenizer, "", ids)),
            n_bos=n_bos,
            l_pre=soft or l_pre,
            l_pro=l_pro,
            counted=soft or adds_bos + len(tokenizer(alone, add_special_tokens=False).input_ids),
            soft=soft,
            merged=tokenizer.decode([encoded["input_ids"][l_pre - 1]]) if crosses else None,
        )

    @classmethod
    def of_chat(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Mapping[str, str]],
        *,
        span: str = "system",
        add_generation_prompt: bool = True,
    ) -> Layout:
        """A chat as its template writes it, with one of its texts as the prefix.

        The whole chat is tokenised once, as the template does it, and the span's tokens come from
        character offsets. The first token counts as BOS; all others that are not in the span count
        as prompt, those before it as `n_before` and those behind it as `l_pro`.

        Args:
            tokenizer: A fast tokenizer with a chat template, or a model that has one.
            messages: As the template takes them: each has a "role" and a "content".
            span: What becomes the prefix: "system" (the text of the first message, which has that
                role), "turn:2" (the text of the second message that is not the system's), or
                "phrase:be brief" (a text that occurs once in all messages). White space around it
                that belongs to its first or last token comes with it, and so does a mark of the
                template that shares a token with a whole message (`merged`).
            add_generation_prompt: End with what opens the assistant's next turn.

        Raises:
            LayoutError: The tokenizer has no offsets or no template; the template refuses or
                changes a message; there is no such message or phrase, or several; or the phrase
                begins or ends inside a token.
        """
        tokenizer = tokenizer_of(tokenizer)
        if not tokenizer.is_fast or not tokenizer.chat_template:
            raise LayoutError(
                f"{tokenizer.name_or_path or type(tokenizer).__name__} has no"
                f" {'chat template' if tokenizer.is_fast else 'character offsets'}, which a chat"
                " needs; use an instruct model, or Layout.of with a prefix and a prompt"
            )
        chat = [dict(message) for message in messages]
        if not chat or any(
            not isinstance(each.get(name), str) for each in chat for name in ("role", "content")
        ):
            raise LayoutError(
                'a chat is a list of messages {"role": ..., "content": ...}, both of them text;'
                f" found {messages!r}"
            )
        number, phrase = _marked(chat, span)

        def written(texts: Sequence[Mapping[str, str]], tokenize: bool) -> Any:
            try:
                return tokenizer.apply_chat_template(
                    texts,
                    tokenize=tokenize,
                    add_generation_prompt=add_generation_prompt,
                    return_dict=False,
                )
            except TemplateError as error:
                raise LayoutError(f"the chat template refuses these messages: {error}") from None

        text = written(chat, False)
        # Where the message stands: the template with another text in its place.
        content = chat[number]["content"].strip()
        around = written(
            [each | {"content": HOLE} if i == number else each for i, each in enumerate(chat)],
            False,
        ).split(HOLE)
        first = len(around[0]) + text[len(around[0]) :].find(content)
        if (
            len(around) != 2
            or not text.startswith(around[0])
            or not text.endswith(around[1])
            or text[len(around[0]) : len(text) - len(around[1])].strip() != content
        ):
            raise LayoutError(
                f"the chat template does not write message {number + 1} once and unchanged, so its"
                " tokens cannot be told"
            )
        start = first + content.index(phrase)
        stop = start + len(phrase)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = tuple(encoded["input_ids"])
        if ids != tuple(written(chat, True)):
            raise LayoutError(
                "the tokens of the chat template's text are not those that the template gives"
            )
        inside = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if a < stop and b > start]
        begin, end = inside[0], inside[-1] + 1
        covered = tokenizer.decode(ids[begin:end])
        crosses = covered.strip() != phrase.strip()
        if crosses and phrase != content:
            raise LayoutError(
                f"the tokens of {phrase!r} read {covered!r}: it begins or ends inside a token; mark"
                " whole words"
            )
        if end == len(ids):
            raise LayoutError(
                f"nothing stands behind {phrase!r} in the chat; add_generation_prompt=True opens"
                " the assistant's turn"
            )
        n_bos = min(begin, 1)
        return cls(
            ids=ids,
            tokens=tuple(pieces(tokenizer, "", ids)),
            n_bos=n_bos,
            l_pre=end - begin,
            l_pro=len(ids) - end,
            counted=end - begin,
            merged=covered if crosses else None,
            n_before=begin - n_bos,
        )

    def __len__(self) -> int:
        """Slots up to the end of the prompt, soft ones and padding included."""
        return self.soft + self.pad + len(self.ids)

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
        """What an augmentation strengthens: the prefix, or the prompt on the raw model (Eq. 9)."""
        return self.prefix if self.l_pre else self.prompt

    @property
    def tensor(self) -> Int[Tensor, "row=1 query"]:
        """The ids without padding, as a batch of one row."""
        import torch

        return torch.tensor([self.ids])

    def spans(self, rule: SpanRule) -> tuple[Span, ...]:
        """The key slots a span rule covers, in this row's slots.

        Raises:
            LayoutError: An explicit or released span ends after the prompt, or positions lie
                outside the prefix.
        """
        if not isinstance(rule, str) and rule[0] == "prefix":
            return self._positions(rule[1])
        match rule:
            case "prefix":
                return (self.controlled,)
            case "bos":
                return (self.bos,)
            case "prefix+bos":
                return (self.bos, self.controlled)
            case "input":
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
        """Spans of tokens of the prefix, neighbours joined."""
        if max(positions) >= self.l_pre:
            raise LayoutError(
                f"position {max(positions)} lies outside the prefix, which has"
                f" {counted(self.l_pre, 'token')} here"
                + (
                    f"; give positions up to {self.l_pre - 1}"
                    if self.l_pre
                    else "; a branch without a prefix has no positions, so give another span"
                )
            )
        found: list[Span] = []
        for position in sorted(positions):
            slot = self.prefix.start + position
            if found and found[-1].stop == slot:
                found[-1] = Span(found[-1].start, slot + 1)
            else:
                found.append(Span(slot, slot + 1))
        return tuple(found)

    def n(self, rule: SpanRule) -> int:
        """The n of b(l): the controlled length, the tokenizer's count under "released", the span's
        size if explicit."""
        if rule == "released":
            return self.counted
        if isinstance(rule, str):
            return self.controlled.size
        return sum(span.size for span in self.spans(rule))

    def lengths(
        self, queries: Int[np.ndarray, " query"], rule: LengthRule
    ) -> Int[np.ndarray, " query"]:
        """l at the queries in these slots; <= 0 on padding (and on BOS under "paper")."""
        bos = np.clip(queries + 1 - self.bos.start, 0, self.n_bos) if rule == "paper" else 0
        return queries + 1 - self.pad - bos

    def acts(
        self, augmentation: Augmentation, queries: Int[np.ndarray, " query"]
    ) -> Bool[np.ndarray, " query"]:
        """At which queries an augmentation acts: those of its phase and steps, and under profile
        "released" only where l > n."""
        last_prompt = self.prompt.stop - 1
        spans = self.spans(augmentation.span)
        inside = all(
            self.prefix.start <= span.start and span.stop <= self.prefix.stop for span in spans
        )
        first = {
            "decode": last_prompt + 1,
            "last_query": last_prompt,
            "query": last_prompt,
            "every_query": 0,
            "all_queries": self.prefix.stop if inside else max(span.stop for span in spans),
        }[augmentation.phase]
        start, stop = augmentation.steps or (-math.inf, math.inf)
        step = queries - last_prompt
        acts = (queries >= first) & (step >= start) & (step < stop)
        if augmentation.profile == "released":
            lengths = self.lengths(queries, augmentation.length_rule)
            acts &= lengths > self.n(augmentation.span)
        return acts

    def bias(
        self, augmentation: Augmentation, queries: Int[np.ndarray, " query"]
    ) -> Float[np.ndarray, " query"]:
        """The bias each query adds to every key of the span; 0 for queries outside the
        augmentation's phase and steps.

        Raises:
            AugmentationError: The bias depends on the scores.
        """
        l = np.maximum(self.lengths(queries, augmentation.length_rule), 1)
        b = augmentation.bias(l, self.n(augmentation.span))
        return np.where(self.acts(augmentation, queries), b, 0.0)

    def padded(self, width: int) -> Layout:
        """The same branch, left-padded to `width` slots."""
        return replace(self, pad=width - self.n_live)


def _check_start(tokenizer: Any, start: int, name: str, text: str) -> None:
    """Refuse a text that brings its own first token, beside the BOS that a layout puts in front."""
    for first in (tokenizer.convert_ids_to_tokens(start), *CHAT_MARKERS):
        if text.lstrip().startswith(first) and first in tokenizer.get_vocab():
            raise LayoutError(
                f"the {name} begins with {first!r}, and a layout puts a first token in front"
                " itself, so the second one would count in every l; leave it out, or give a chat's"
                " messages to Layout.of_chat"
            )


def _marked(chat: Sequence[Mapping[str, str]], span: str) -> tuple[int, str]:
    """The number of the message that a span of `Layout.of_chat` names, and its text there."""
    roles = ", ".join(each["role"] for each in chat)
    texts = [each["content"].strip() for each in chat]
    turns = [i for i, each in enumerate(chat) if each["role"] != "system"]
    kind, mark, rest = span.partition(":")
    if span == "system":
        if chat[0]["role"] != "system":
            raise LayoutError(
                f"the chat has no system message in front (its roles: {roles}); give it one, or"
                " mark a turn or a phrase"
            )
        found, phrase = 0, texts[0]
    elif kind == "turn" and rest.isdigit():
        if not 1 <= int(rest) <= len(turns):
            raise LayoutError(
                f"there is no turn {rest}; the chat has turns 1 to {len(turns)} beside its system"
                f" message (roles: {roles})"
            )
        found = turns[int(rest) - 1]
        phrase = texts[found]
    elif kind == "phrase" and mark:
        places = [
            i
            for i, each in enumerate(texts)
            for at in range(len(each))
            if each.startswith(rest, at)
        ]
        if not rest.strip() or len(places) != 1:
            raise LayoutError(
                f"the phrase {rest!r} occurs {len(places) if rest.strip() else 0} times in the"
                " chat's messages; mark one that occurs once"
            )
        found, phrase = places[0], rest
    else:
        raise LayoutError(f"span {span!r} of a chat should be system, turn:NUMBER or phrase:TEXT")
    if not phrase:
        raise LayoutError(f"message {found + 1} of the chat is empty, so it cannot be the span")
    return found, phrase


def left_pad(layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts of a batch, padded so that all end together and no row's tokens stand in
    another's soft slots."""
    width = max(each.soft for each in layouts) + max(len(each.ids) for each in layouts)
    return [each.padded(width) for each in layouts]


def _shown(b: float) -> float | str | None:
    return None if math.isnan(b) else BLOCKED if b == -math.inf else float(b)


def explain(layout: Layout, augmentation: Augmentation | None, steps: int) -> dict[str, Any]:
    """Everything `lapa2 layout` shows, as plain values: every key with its part, the spans, and l
    and bias of every step.

    Step 0 is the last prompt query. Under the phases all_queries and every_query the augmented
    queries before it count down from -1. A bias that depends on the scores is None, one of
    -infinity `BLOCKED`.
    """
    spans = {
        "bos": (layout.bos,),
        "released": layout.spans("released"),
        "prefix": (layout.prefix,) if layout.l_pre else (),
        "prompt": (layout.before, layout.prompt) if layout.n_before else (layout.prompt,),
    }
    spans["boosted"] = layout.spans(augmentation.span) if augmentation else ()
    inside = {
        name: {slot for span in parts for slot in range(*span)} for name, parts in spans.items()
    }
    last = len(layout) - 1
    first = last
    if augmentation is not None and augmentation.phase in ("all_queries", "every_query"):
        early = np.arange(layout.bos.start, last)
        first = min([*early[layout.acts(augmentation, early)].tolist(), last])
    queries = np.arange(first, last + steps)
    lengths = layout.lengths(queries, augmentation.length_rule if augmentation else "paper")
    if augmentation is None:
        bias = np.zeros(len(queries))
    elif augmentation.reads_scores:
        bias = np.where(layout.acts(augmentation, queries), np.nan, 0.0)
    else:
        bias = layout.bias(augmentation, queries)
    keys = [(None, f"soft {i + 1}") for i in range(layout.soft)] + list(
        zip(layout.ids, layout.tokens, strict=True)
    )
    return {
        "l_pre": layout.l_pre,
        "l_pro": layout.l_pro,
        "n_bos": layout.n_bos,
        "n": layout.n(augmentation.span) if augmentation else layout.controlled.size,
        "merged": layout.merged,
        "spans": {name: [list(span) for span in parts] for name, parts in spans.items()},
        "tokens": [
            {
                "slot": slot,
                "id": number,
                "token": token,
                "part": next(name for name in ("bos", "prefix", "prompt") if slot in inside[name]),
                "boosted": slot in inside["boosted"],
            }
            for slot, (number, token) in enumerate(keys)
        ],
        "augmentation": augmentation and augmentation.model_dump(mode="json"),
        "steps": [
            {"step": int(query) - last, "l": int(l), "bias": _shown(b)}
            for query, l, b in zip(queries, lengths, bias, strict=True)
        ],
    }
