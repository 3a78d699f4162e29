"""Which keys the queries of a layer see: all, those of a sliding window or of a chunk, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int

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


def kinds_of(seen: Sequence[KeysSeen]) -> list[KeysSeen]:
    """The kinds of a model's layers with attention: those that see all keys first."""
    return sorted(set(seen) - {NONE}, key=lambda each: (each != FULL, each))


def layers_in_words(seen: Sequence[KeysSeen]) -> str:
    """Which layers are of which kind: "full: 5 11; sliding 512: 0-4 6-10"."""
    found = []
    for kind in dict.fromkeys([*kinds_of(seen), *seen]):
        layers = [layer for layer, each in enumerate(seen) if each == kind]
        starts = [layer for layer in layers if layer - 1 not in layers]
        stops = [layer for layer in layers if layer + 1 not in layers]
        runs = [f"{a}-{b}" if a < b else str(a) for a, b in zip(starts, stops, strict=True)]
        found.append(f"{kind}: {' '.join(runs)}")
    return "; ".join(found)


FULL, NONE = KeysSeen("full"), KeysSeen("none")
