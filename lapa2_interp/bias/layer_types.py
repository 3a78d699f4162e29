"""Types of attention layers: their queries see all keys, a sliding window, a chunk, or no keys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int

LayerTypeName = Literal["full", "sliding", "chunked", "none"]


class LayerType(NamedTuple):
    """The keys that a layer's queries see, up to their own.

    Kind "full" is all keys, "sliding" the last `size`, "chunked" those of the query's chunk of
    `size`; "none" is a layer without attention.
    """

    kind: LayerTypeName
    size: int = 0

    def first_seen(
        self, queries: Int[np.ndarray, " query"], pad: int = 0
    ) -> Int[np.ndarray, " query"]:
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


def distinct_types(layer_types: Sequence[LayerType]) -> list[LayerType]:
    """The types of a model's layers with attention, "full" first."""
    return sorted(
        set(layer_types) - {NO_ATTENTION}, key=lambda kind: (kind != FULL_ATTENTION, kind)
    )


def describe_layers(layer_types: Sequence[LayerType]) -> str:
    """The layers of each type in words: "full: 5 11; sliding 512: 0-4 6-10"."""
    lines = []
    for layer_type in dict.fromkeys([*distinct_types(layer_types), *layer_types]):
        layers = [layer for layer, kind in enumerate(layer_types) if kind == layer_type]
        lines.append(f"{layer_type}: {describe_runs(layers)}")
    return "; ".join(lines)


def describe_runs(numbers: Collection[int]) -> str:
    """Ascending numbers in words: "0-4 6 8-10"."""
    starts = [number for number in numbers if number - 1 not in numbers]
    stops = [number for number in numbers if number + 1 not in numbers]
    return " ".join(f"{a}-{b}" if a < b else str(a) for a, b in zip(starts, stops, strict=True))


FULL_ATTENTION, NO_ATTENTION = LayerType("full"), LayerType("none")
