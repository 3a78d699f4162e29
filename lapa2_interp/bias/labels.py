"""Values of a bias in the label of an arm: lists are named, or counted where they are long."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

LONGEST_LIST = 24
"""Letters of a list in a label."""


def shorten_value(value: Any, mark: str = ",", *, name: str, to: str = " ") -> str:
    """A field with its value in a label: "layers 0,1,5", and a long list as "layers 0-14" or "24
    heads (#6b2e68)", with a hash that tells it from others as long."""
    if isinstance(value, str | float | int):
        return f"{name}{to}{value:g}" if isinstance(value, float) else f"{name}{to}{value}"
    if name == "strengths":
        parts = [f"{layer}.{head}:{_shortest(strength)}" for layer, head, strength in value]
    else:
        parts = [
            ".".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in value
        ]
    text = mark.join(parts)
    if len(text) <= LONGEST_LIST:
        return f"{name}{to}{text}"
    runs = mark.join(_runs(value)) if all(isinstance(part, int) for part in value) else text
    if len(runs) <= LONGEST_LIST:
        return f"{name}{to}{runs}"
    return f"{len(value)} {name} (#{hashlib.sha256(text.encode()).hexdigest()[:6]})"


def _shortest(number: float) -> str:
    """A number with as few digits as tell it exactly."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _runs(numbers: Sequence[int]) -> list[str]:
    """Numbers in their order, three and more neighbours as "first-last"."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return [
        f"{group[0]}-{group[-1]}" if len(group) > 2 else ",".join(map(str, group))
        for group in groups
    ]
