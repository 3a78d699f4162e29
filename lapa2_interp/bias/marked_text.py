"""Text in which parts are marked with the strength of the attention on them.

    You are a doctor. (Never name a medicine:1.5)

A mark is a text in brackets with a colon and a number at its end. The number is a factor on the
odds of the attention on the marked tokens: the bias log(factor) is added to their scores (law
`scale`). 1 changes nothing, and a factor below 1 weakens. Brackets without a number are brackets,
and a backslash in front of a bracket keeps one that would begin or end a mark. What may be a
mark or something else, such as (9:30) and a bracket that is never closed, is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.errors import LayoutError

NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
MARK = re.compile(rf":\s*({NUMBER})\s*\Z")
OTHER_COLON = re.compile(r"(\d|//\S*):\d+\s*\Z")
"""The end of a time, a ratio or an address, such as (Monday 9:30) and (http://localhost:8000)."""
MOST_FACTOR = 1e6
"""The largest factor, and one over the smallest."""


@dataclass(frozen=True)
class Mark:
    """A marked part of a plain text.

    Attributes:
        start, stop: Its letters in the plain text.
        factor: The odds of the attention on it are multiplied by this number.
    """

    start: int
    stop: int
    factor: float

    @property
    def bias(self) -> float:
        """What is added to the scores of its keys."""
        return math.log(self.factor)


@dataclass(frozen=True)
class MarkedText:
    """A plain text and its marks.

    Attributes:
        text: Without marks and backslashes.
        marks: In the order of the text; they do not overlap.
    """

    text: str
    marks: tuple[Mark, ...]

    @property
    def rules(self) -> tuple[Augmentation, ...]:
        """The bias of each mark, at every query after the last of them."""
        return tuple(
            Augmentation(law="scale", alpha=mark.bias, phase="after_span") for mark in self.marks
        )


def marked(text: str) -> MarkedText:
    """Read the marks of a text.

    Example:
        >>> from lapa2_interp.bias.marked_text import marked
        >>> read = marked("You are a doctor. (Never name a medicine:1.5)")
        >>> read.text
        'You are a doctor. Never name a medicine'
        >>> [(read.text[mark.start : mark.stop], mark.factor) for mark in read.marks]
        [('Never name a medicine', 1.5)]

    Raises:
        LayoutError: A mark is inside another, empty, never closed or perhaps a time, or its factor
            is not a number above 0, at most 1,000,000 and at least one over that; the message shows
            the place.
    """
    plain: list[str] = []
    opened: list[tuple[int, int]] = []  # where open brackets stand: in the plain text, in the text
    has_mark: list[bool] = []  # if there is a mark inside them
    marks: list[Mark] = []
    position = 0
    while position < len(text):
        letter = text[position]
        if letter == "\\" and text[position + 1 : position + 2] in ("(", ")", "\\"):
            plain.append(text[position + 1])
            position += 2
            continue
        position += 1
        if letter == "(":
            opened.append((len(plain), position))
            has_mark.append(False)
            plain.append(letter)
        elif letter == ")" and opened:
            (start, _), inside_mark = opened.pop(), has_mark.pop()
            content = "".join(plain[start + 1 :])
            match = MARK.search(content)
            if match is None:
                plain.append(letter)
                if has_mark:
                    has_mark[-1] |= inside_mark
                continue
            words = content[: match.start()]
            factor = float(match[1])
            if inside_mark:
                raise _problem(
                    text, position, "a mark stands inside a mark; marks cannot be nested"
                )
            if OTHER_COLON.search(content):
                raise _problem(text, position, "is it a mark? Put a blank behind a mark's colon")
            if not words.strip():
                raise _problem(text, position, "a mark has no text in front of its number")
            if not 1 / MOST_FACTOR <= factor <= MOST_FACTOR:
                allowed = f"a number from {1 / MOST_FACTOR:g} to {MOST_FACTOR:,.0f}"
                raise _problem(text, position, f"the factor {match[1]} is not {allowed}")
            plain[start:] = list(words)
            marks.append(Mark(start, start + len(words), factor))
            if has_mark:
                has_mark[-1] = True
        else:
            plain.append(letter)
    for start, position in opened:
        if re.search(rf":\s*{NUMBER}", "".join(plain[start:])):
            raise _problem(text, position, "the mark that begins here is never closed")
    return MarkedText("".join(plain), tuple(marks))


def without_marks(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], MarkedText | None]:
    """The messages of a chat with a plain system message, and what is marked in it; None if there
    is no mark. Only the system message in front is read: a user could mark, too.

    Raises:
        LayoutError: As `marked`.
    """
    plain = [dict(message) for message in messages]
    first = plain[0] if plain else {}
    if first.get("role") != "system" or not isinstance(first.get("content"), str):
        return plain, None
    text = marked(first["content"])
    first["content"] = text.text
    return plain, text if text.marks else None


def problem_of_other_bias(named: Sequence[str], marks: str) -> str:
    """The sentence about a bias that is asked for beside marks.

    Args:
        named: What asks for it, in the words of the user.
        marks: What asks for the marks.
    """
    return (
        "the marks of the system message say what is strengthened and how much; leave out"
        f" {', '.join(named)}, or {marks}"
    )


def _problem(text: str, stop: int, what: str) -> LayoutError:
    begin = max(0, stop - 40)
    return LayoutError(
        f"{what}: {'...' * (begin > 0)}{text[begin:stop]!r} in letter {stop}; write \\( and \\) for"
        " brackets that are no marks"
    )
