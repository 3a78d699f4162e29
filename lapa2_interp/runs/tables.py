"""Tables of a run that draw themselves."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from lapa2_interp._util import plots
from lapa2_interp._util.errors import TraceError

ALIKE = ("model", "task", "method", "variant", "max_length", "dtype")
"""Columns in which arms that are shown side by side are equal."""
SHOWN = 20
"""Rows of a run that a notebook shows."""


def one_kind(table: pd.DataFrame) -> pd.DataFrame:
    """A table of `Run`, of cells that can be drawn together.

    Raises:
        TraceError: They are of several models, tasks, methods, ...
    """
    mixed = [name for name in ALIKE if table[name].nunique() > 1]
    if mixed:
        there = "; ".join(f"{name}: {', '.join(map(str, table[name].unique()))}" for name in mixed)
        raise TraceError(
            f"cells of several kinds ({there}) make no one picture; choose one, such as"
            f" {mixed[0]}={table[mixed[0]].iloc[0]!r}"
        )
    return table


@dataclass(frozen=True)
class HeadAttention:
    """Attention of every head.

    Attributes:
        frame: One row for each arm, layer and head; columns as `head_table` after those of
            `Run.steps`.
    """

    frame: pd.DataFrame

    def plot(self, name: str = "prefix") -> plots.Drawing:
        """Layer x head maps: the first arm as it is, the others as differences from it.

        Args:
            name: Part of the context that is attended to, such as "prefix" or "bos".

        Raises:
            TraceError: Cells of several models, tasks, methods, ...
        """
        return plots.head_maps(one_kind(self.frame), name)

    def best(self, n: int, name: str = "prefix") -> pd.DataFrame:
        """The n heads of each arm with most attention on a part of the context."""
        return self.frame.sort_values(name, ascending=False).groupby("arm", sort=False).head(n)

    def _repr_html_(self) -> str:
        return self.frame.to_html(index=False, border=0, max_rows=SHOWN)
