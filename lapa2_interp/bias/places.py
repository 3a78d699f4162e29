"""Layers, heads, their strengths, slots and steps as text.

Places have one form in Python, grid files, recipes and the command line.

    layers  0,5,10-20           numbers, and ranges with both their ends
    heads   3.1,4.0-8,10-20.3   layer.head pairs; a range stands for each of its numbers
    strengths  3.1:0.5,4.0:-2   layer.head:strength
    span    1:4,6:8             slots [1, 4) and [6, 8)
            prefix:0,2-4        tokens of the prefix
    steps   0:16                from the first to before the last

"/" may stand for ",": commas divide the parameters of a recipe. Spaces may stand beside ",", "/"
and ":", and nowhere else: "1 0" is neither 10 nor two layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

from lapa2_interp._util.values import plain
from lapa2_interp.errors import Lapa2Error

RANGE = r"\d{1,6}(?:-\d{1,6})?"
MOST = 1000
"""Numbers in a range, at most: more than any model has layers or heads."""
FORMS = {
    "layers": "numbers from 0, (layer, ...) or a text such as '0,5,10-20'",
    "heads": "pairs of numbers from 0, ((layer, head), ...) or a text such as '3.1,4.0-8'",
    "strengths": "numbers of heads, ((layer, head, strength), ...) or a text such as"
    " '3.1:0.5,4.0:-2'",
    "positions": "positions from 0, (position, ...) or a text such as '0,2-4'",
    "steps": "numbers from 0, (first, stop) with first < stop, or a text such as '0:16'",
}
"""What is allowed, for error messages."""


def read_place(name: str, value: Any) -> Any:
    """The numbers of a text, by the name of what they are; other text as it is, other values
    `plain`."""
    if name not in READERS or not isinstance(value, str):
        return plain(value)
    text = re.sub(" *([,/:]) *", r"\1", value.strip(" "))
    if name == "span" and text.startswith("prefix:"):
        positions = _numbers(text.removeprefix("prefix:"))
        return value if positions is None else ("prefix", positions)
    numbers = READERS[name](text)
    return value if numbers is None else numbers


def head_pairs(name: str, value: Any, error: type[Lapa2Error]) -> tuple[tuple[int, int], ...]:
    """(layer, head) pairs of pairs or of text; whether a model has them is for others to check.

    Args:
        name: What they are called in the message.
        error: The error that is raised.

    Raises:
        Lapa2Error: Something else.
    """
    numbers = read_place("heads", value)
    pairs = numbers if isinstance(numbers, tuple) else (None,)
    if not all(
        isinstance(pair, tuple)
        and len(pair) == 2
        and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in pair)
        for pair in pairs
    ):
        raise error(f"{name}: takes {FORMS['heads']}; found {str(value)[:80]!r}")
    return pairs


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _numbers(text: str) -> tuple[int, ...] | None:
    if not re.fullmatch(rf"{RANGE}([,/]{RANGE})*", text, re.ASCII):
        return None
    ranges = [_range(part) for part in re.split("[,/]", text)]
    if not all(0 < len(span) <= MOST for span in ranges):
        return None
    return tuple(dict.fromkeys(number for span in ranges for number in span))


def _pairs(text: str) -> tuple[tuple[int, int], ...] | None:
    pair = rf"{RANGE}\.{RANGE}"
    if not re.fullmatch(rf"{pair}([,/]{pair})*", text, re.ASCII):
        return None
    ranges = [tuple(map(_range, part.split("."))) for part in re.split("[,/]", text)]
    if not all(0 < len(span) <= MOST for both in ranges for span in both):
        return None
    return tuple(
        dict.fromkeys((i, j) for layers, heads in ranges for i, j in product(layers, heads))
    )


def _strengths(text: str) -> tuple[tuple[int, int, float], ...] | None:
    entry = r"(\d{1,6})\.(\d{1,6}):([+-]?\d*\.?\d+(?:[eE][+-]?\d+)?)"
    if not re.fullmatch(rf"{entry}([,/]{entry})*", text, re.ASCII):
        return None
    return tuple(
        (int(layer), int(head), float(number)) for layer, head, number in re.findall(entry, text)
    )


def _intervals(text: str) -> tuple[tuple[int, int], ...] | None:
    interval = r"\d{1,9}:\d{1,9}"
    if not re.fullmatch(rf"{interval}([,/]{interval})*", text, re.ASCII):
        return None
    parts = [part.split(":") for part in re.split("[,/]", text)]
    return tuple((int(start), int(stop)) for start, stop in parts)


def _one_interval(text: str) -> tuple[int, int] | None:
    intervals = _intervals(text)
    return intervals[0] if intervals is not None and len(intervals) == 1 else None


READERS: dict[str, Callable[[str], Any]] = {
    "layers": _numbers,
    "positions": _numbers,
    "heads": _pairs,
    "strengths": _strengths,
    "span": _intervals,
    "steps": _one_interval,
}
"""Readers of texts; None where a text has another form."""
