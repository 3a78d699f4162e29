"""Rows without a cache: every step reads the whole text again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Float, Int
from torch import Tensor

from lapa2_interp.attention.cache import Rows, new_rows
from lapa2_interp.bias.layout import Layout
from lapa2_interp.models.facts import Model
from lapa2_interp.prefixes.soft_prefix import SoftPrefix


class RecomputedRows(Rows):
    """Rows without a cache.

    Every step reads the whole text, for interventions that change earlier tokens' activations.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def prompt_pass(
        self,
        layouts: Sequence[Layout],
        prefixes: Sequence[SoftPrefix | None] | None = None,
        keep: int = 1,
    ) -> Float[Tensor, "row query vocab"]:
        self.layouts = list(layouts)
        self.prefixes = list(prefixes or [None] * len(layouts))
        return self._read(keep)

    def expand(self, index: Int[Tensor, " expanded"], capacity: int) -> None:
        rows = index.tolist()
        self.layouts = [self.layouts[row] for row in rows]
        self.prefixes = [self.prefixes[row] for row in rows]

    def read_tokens(
        self, tokens: Int[Tensor, "row query"], keep: int = 1
    ) -> Float[Tensor, "row last vocab"]:
        self.layouts = [
            replace(layout, ids=layout.ids + tuple(more))
            for layout, more in zip(self.layouts, tokens.tolist(), strict=True)
        ]
        return self._read(keep)

    def _read(self, keep: int) -> Float[Tensor, "row query vocab"]:
        """The pass of every step."""
        return new_rows(self.model).prompt_pass(self.layouts, self.prefixes, keep)
