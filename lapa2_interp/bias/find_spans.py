"""Spans found by their content in the token ids of a row.

A target is a text, token ids, or a function of the row's ids. A text is found in the row's decoded
text, and its tokens are all that have a character of it: those that it shares with its neighbours,
too. Several targets are one span together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from lapa2_interp.bias.augmentation import Augmentation, active_augmentations
from lapa2_interp.bias.layout import Layout, Span
from lapa2_interp.bias.marked_text import MarkedText
from lapa2_interp.bias.text_start import n_start_tokens
from lapa2_interp.bias.tokens import decode_tokens, require_tokenizer
from lapa2_interp.errors import LayoutError, pluralize, unknown_choice

Ids = tuple[int, ...]
Target = str | Sequence[int] | Callable[[Ids], Any]
"""A function takes a row's ids without padding, and returns (start, stop), several of them, or None
where the row has no span."""
Occurrence = Literal["first", "last", "only"]
Absent = Literal["refuse", "leave"]
SHOWN = 300
"""Letters of a row that an error shows."""


class SpanFinder:
    """Finds the span of each row, and counts rows.

    Args:
        find: A target, or several as a list; a row must have each. Or a marked text.
        occurrence: The occurrence of a text or of ids that counts; "only" refuses rows with more.
        absent: "refuse" rows without a target, or "leave" them without a span.
        tokenizer: The model's; texts need it.

    Attributes:
        rows: The number of rows so far.
        left: The number of those without a target.

    Raises:
        LayoutError: A target is none, or a text has no tokenizer.
    """

    def __init__(
        self,
        find: Target | Sequence[Target] | MarkedText,
        occurrence: Occurrence = "only",
        absent: Absent = "refuse",
        tokenizer: Any = None,
    ) -> None:
        for name, choice, allowed in (
            ("occurrence", occurrence, get_args(Occurrence)),
            ("absent", absent, get_args(Absent)),
        ):
            if choice not in allowed:
                raise LayoutError(unknown_choice(name, choice, allowed))
        self.marked = find if isinstance(find, MarkedText) else None
        if isinstance(find, MarkedText):
            find = find.text
        several = not _is_target(find) and isinstance(find, Sequence)
        self.targets: list[Any] = list(find) if several else [find]  # type: ignore[arg-type]
        if not self.targets or not all(map(_is_target, self.targets)):
            raise LayoutError(
                f"find should be a text, a list of token ids, a function of a row's ids, or a list"
                f" of these, none of them empty; found {find!r}"
            )
        if tokenizer is None and any(isinstance(target, str) for target in self.targets):
            raise LayoutError(
                "a text is found by the model's tokenizer, which this model does not have; give"
                " tokenizer=..., or token ids"
            )
        self.tokenizer = None if tokenizer is None else require_tokenizer(tokenizer)
        self.occurrence, self.absent = occurrence, absent
        self.rows = self.left = 0

    def layout(self, ids: Ids, pad: int = 0, row: int = 0) -> tuple[Layout, tuple[int, ...]]:
        """The layout of a row, and the positions of the span's tokens in its prefix.

        The prefix goes from the first token of the span to the last. The first token of a row
        counts as BOS if it is a special token and not in the span, as in `Layout.of_chat`. A row
        that is left alone has no prefix.

        Args:
            ids: Its tokens without padding.
            pad: The padding in front of them.
            row: Its number, for errors.

        Raises:
            LayoutError: A target is not in the row, or more than once where it should be there
                once; or a function returns no span of the row.
        """
        self.rows += 1
        slots: set[int] = set()
        for target in self.targets:
            spans = self._spans(target, ids, row)
            if not spans and self.absent == "leave":
                self.left += 1
                slots.clear()
                break
            if not spans or (len(spans) > 1 and self.occurrence == "only" and not callable(target)):
                raise LayoutError(self._problem(target, spans, ids, row))
            if not callable(target):
                spans = spans[-1:] if self.occurrence == "last" else spans[:1]
            slots.update(slot for span in spans for slot in range(*span))
        layout = self._layout_of(slots, ids, pad)
        return layout, tuple(slot - min(slots) for slot in sorted(slots))

    def _layout_of(self, slots: set[int], ids: Ids, pad: int) -> Layout:
        """The layout of a row with these tokens in its span."""
        front = n_start_tokens(self.tokenizer, ids)
        start, stop = (min(slots), max(slots) + 1) if slots else (front, front)
        n_bos = min(start, front)
        return Layout(
            ids=ids,
            tokens=(),
            n_bos=n_bos,
            l_pre=stop - start,
            l_pro=max(len(ids) - stop, 0),
            counted=len(slots),
            pad=pad,
            n_before=start - n_bos if slots else 0,
        )

    def marked_layout(
        self, ids: Ids, pad: int = 0, row: int = 0
    ) -> tuple[Layout, tuple[Augmentation, ...]]:
        """The layout of a row with the marked text, and the bias of each mark on its tokens.

        The prefix goes from the first token of the first mark to the last of the last. The bias
        acts at every query after it. Without a mark there is no prefix, and no bias.

        Raises:
            LayoutError: The text is not in the row, or more than once where it should be there
                once.
        """
        text = self.marked
        assert text is not None
        parts = [(mark.start, mark.stop) for mark in text.marks]
        spans = self._spans_of_text(text.text, ids, parts) if parts else []
        n_found = len(spans) // max(1, len(parts))
        if parts and not n_found and self.absent == "leave":
            self.rows, self.left = self.rows + 1, self.left + 1
            parts = []
        if parts and (not n_found or (n_found > 1 and self.occurrence == "only")):
            raise LayoutError(
                self._problem(text.text, self._spans_of_text(text.text, ids), ids, row)
            )
        first = len(spans) - len(parts) if self.occurrence == "last" else 0
        spans = spans[first : first + len(parts)]
        slots = {slot for span in spans for slot in range(*span)}
        layout = self._layout_of(slots, ids, pad)
        start = min(slots, default=0)
        rules = tuple(
            rule.model_copy(
                update={"span": ("prefix", tuple(range(span.start - start, span.stop - start)))}
            )
            for rule, span in zip(text.rules, spans, strict=False)
        )
        return layout, active_augmentations(rules)

    def _spans(self, target: Any, ids: Ids, row: int) -> list[Span]:
        """All occurrences of a target in a row."""
        if isinstance(target, str):
            return self._spans_of_text(target, ids)
        if not callable(target):
            wanted = tuple(target)
            ends = range(len(wanted), len(ids) + 1)
            return [
                Span(end - len(wanted), end)
                for end in ends
                if ids[end - len(wanted) : end] == wanted
            ]
        made = target(ids)
        pairs = [made] if _is_pair(made) else list(made or ())
        for pair in pairs:
            if not _is_pair(pair) or not 0 <= pair[0] < pair[1] <= len(ids):
                raise LayoutError(
                    f"row {row}: the function of find returned {made!r}; it should return (start,"
                    f" stop) with 0 <= start < stop <= {len(ids)}, the row's tokens, several of"
                    " them, or None"
                )
        return [Span(*pair) for pair in pairs]

    def _spans_of_text(
        self, text: str, ids: Ids, parts: Sequence[tuple[int, int]] = ()
    ) -> list[Span]:
        """The tokens of all occurrences of a text, or of parts of it (their letters), one part
        after the other."""
        joined = self._text(ids)

        def ends_after(n: int) -> Callable[[int], bool]:
            """True of a number of first tokens that have more than n letters."""
            return lambda count: len(self._text(ids[:count])) > n

        def has_all(stop: int) -> Callable[[int], bool]:
            """True of a number of first tokens that have all letters before `stop`."""
            return lambda count: self._text(ids[:count])[:stop] == joined[:stop]

        spans, at, counts = [], joined.find(text), range(len(ids) + 1)
        while at >= 0:
            for start, stop in parts or ((0, len(text)),):
                begin = bisect_left(counts, True, key=ends_after(at + start)) - 1
                spans.append(Span(begin, bisect_left(counts, True, key=has_all(at + stop))))
            at = joined.find(text, at + 1)
        return spans

    def _text(self, ids: Ids) -> str:
        return decode_tokens(self.tokenizer, ids)

    def _problem(self, target: Any, spans: list[Span], ids: Ids, row: int) -> str:
        """The sentence about a row in which a target is not once."""
        name = "what the function of find looks for" if callable(target) else repr(target)
        shown = repr(list(ids) if self.tokenizer is None else self._text(ids))
        shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}... ({len(ids)} tokens)"
        if not spans:
            remedy = "give another text, or absent='leave' to leave such rows alone"
            return f"row {row} does not have {name}; {remedy}; it reads {shown}"
        places = ", ".join(f"{span.start}-{span.stop - 1}" for span in spans)
        return (
            f"row {row} has {name} {pluralize(len(spans), 'time')}, in its tokens {places}; give"
            f" occurrence='first' or 'last'; it reads {shown}"
        )


def rules_of_marks(text: MarkedText, layout: Layout, tokenizer: Any) -> tuple[Augmentation, ...]:
    """The bias of each mark of a system message, on its tokens, at every query after the message.

    Args:
        text: What is marked (`marked_text.without_marks`).
        layout: Of the chat without the marks; its prefix is the system message.
        tokenizer: The model's.

    Raises:
        LayoutError: The message does not have the text as it is, or a mark has white space at an
            end of the message, which is no part of the prefix.
    """
    words = text.text.strip()  # white space at the ends is no part of the prefix, if it is read
    shift, (start, stop) = len(text.text) - len(text.text.lstrip()), layout.prefix
    parts = [(mark.start - shift, mark.stop - shift) for mark in text.marks]
    if min(parts)[0] < 0 or max(parts)[1] > len(words):
        raise LayoutError(
            f"a mark of {text.text[:SHOWN]!r} reaches beyond the words of the system message; mark"
            " no white space at its ends"
        )
    spans = SpanFinder(words, tokenizer=tokenizer)._spans_of_text(words, layout.ids, parts)
    # The template may have these words elsewhere, too.
    for first in range(0, len(spans), len(parts)):
        places = spans[first : first + len(parts)]
        if start <= places[0].start and places[-1].stop <= stop:
            break
    else:
        raise LayoutError(f"the chat does not read {words[:SHOWN]!r} as its system message")
    return active_augmentations(
        [
            rule.model_copy(
                update={"span": ("prefix", tuple(range(span.start - start, span.stop - start)))}
            )
            for rule, span in zip(text.rules, places, strict=True)
        ]
    )


def _is_target(value: Any) -> bool:
    return callable(value) or (
        isinstance(value, Sequence)
        and len(value) > 0
        and (isinstance(value, str) or all(isinstance(token, int) for token in value))
    )


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) == 2
        and all(isinstance(slot, int) for slot in value)
    )
