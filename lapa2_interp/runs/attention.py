"""Attention that a run recorded: curves against step, their decay fits, heads, prefix tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from lapa2_interp import plots
from lapa2_interp.attention.tables import (
    augmented_part,
    fit_table,
    head_table,
    prefix_token_table,
    step_table,
)
from lapa2_interp.errors import TraceError, parameter
from lapa2_interp.files import holds_only, result_folder, write_text
from lapa2_interp.table_formats import as_csv

if TYPE_CHECKING:
    import xarray as xr

ALIKE = ("model", "task", "method", "variant", "max_length", "dtype")
"""Columns in which arms that are shown side by side are equal."""
SHOWN = 20
"""Rows of a run that a notebook shows."""
WRITTEN = ("steps.*", "fits.*", "prefix_tokens.*", "head*.*", "*_attention.png")
"""Names of the tables and figures."""


def one_kind(table: pd.DataFrame) -> pd.DataFrame:
    """A table of cells that can be drawn together.

    Raises:
        TraceError: The cells are of several models, tasks, methods, ...
    """
    mixed = [name for name in _alike(table) if table[name].nunique() > 1]
    if mixed:
        there = "; ".join(f"{name}: {', '.join(map(str, table[name].unique()))}" for name in mixed)
        raise TraceError(
            f"cells of several kinds ({there}) make no one picture; choose one, such as"
            f" {parameter(mixed[0], table[mixed[0]].iloc[0], 'only')}"
        )
    return table


def _alike(table: pd.DataFrame) -> list[str]:
    """The columns in which the cells of a kind are equal, and the turn of chats."""
    return [*ALIKE, *["turn"] * ("turn" in table)]


@dataclass(frozen=True)
class HeadAttention:
    """Attention of every head.

    Attributes:
        rows: The table.
    """

    rows: pd.DataFrame

    def frame(self) -> pd.DataFrame:
        """One row for each arm, layer and head; columns as `head_table` after those of
        `Run.steps`."""
        return self.rows

    def plot(self, name: str = "prefix") -> plots.Drawing:
        """Layer x head maps: the first arm as it is, the others as differences from it.

        Args:
            name: Part of the context that is attended to, such as "prefix" or "bos".

        Raises:
            TraceError: Cells of several models, tasks, methods, ...
        """
        return plots.head_maps(one_kind(self.rows), name)

    def largest(self, n: int, name: str = "prefix") -> pd.DataFrame:
        """Rows of the n heads of each arm with most attention on a part of the context."""
        return self.rows.sort_values(name, ascending=False).groupby("arm", sort=False).head(n)

    def _repr_html_(self) -> str:
        return self.rows.to_html(index=False, border=0, max_rows=SHOWN)


@dataclass(frozen=True)
class Attention:
    """Recorded attention of finished cells. Arms are compared within a kind: cells that are equal
    in the columns `ALIKE`.

    Attributes:
        kinds: Of each kind, its texts (one row each) and their trace (row i is sample i).
        branch: The branch that is read; None for the first of each method with a prefix.
        n_untraced: Texts that are left out, since they ended before a first token.
    """

    kinds: list[tuple[pd.DataFrame, xr.Dataset]]
    branch: str | None
    n_untraced: int

    def steps(self) -> pd.DataFrame:
        """As `Run.steps`."""
        return self._joined(self._curves)

    def fits(self) -> pd.DataFrame:
        """As `Run.fits`."""
        parts = [augmented_part(trace, self.branch) for _, trace in self.kinds]
        return self._joined(list(map(fit_table, self._curves, parts)))

    def prefix_tokens(self) -> pd.DataFrame:
        """As `Run.prefix_tokens`."""
        return self._joined(self._each(prefix_token_table))

    def heads(self) -> HeadAttention:
        """As `Run.heads`."""
        return HeadAttention(self._joined(self._each(head_table)))

    @cached_property
    def _curves(self) -> list[pd.DataFrame]:
        return self._each(step_table)

    def _each(self, table: Callable[..., pd.DataFrame]) -> list[pd.DataFrame]:
        return [table(trace, texts, self.branch) for texts, trace in self.kinds]

    def _joined(self, tables: list[pd.DataFrame]) -> pd.DataFrame:
        """One table of all kinds, with the columns that tell them apart."""
        frames = []
        for (texts, _), table in zip(self.kinds, tables, strict=True):
            first: dict[str, Any] = {name: texts[name].iloc[0] for name in _alike(texts)}
            for column in ("attribute", "cell"):
                of_arm = texts.groupby("arm")[column].agg(_listed)
                first[column] = table["arm"].map(of_arm)
            frames.append(table.assign(**first)[[*first, *table]])
        return pd.concat(frames, ignore_index=True)

    @property
    def part(self) -> str:
        """What the augmentation acts on: "prefix", or "prompt" on the raw model."""
        return augmented_part(self.kinds[0][1], self.branch)

    @property
    def by_head(self) -> bool:
        """True if the trace tells heads apart."""
        return all("head" in trace["prefix"].dims for _, trace in self.kinds)

    def plot(self) -> plots.Drawing:
        """As `Run.plot`, with the fits.

        Raises:
            TraceError: Cells of several kinds.
        """
        return plots.attention_curves(one_kind(self.steps()), self.fits(), self.part)

    def save(self, out: Path, force: bool = False) -> None:
        """Write tables (CSV) and figures (PNG) into a new folder.

        Raises:
            TraceError: Cells of several kinds.
            RunError: As `files.result_folder`.
        """
        tables = {"steps": one_kind(self.steps()), "fits": self.fits()}
        figures = {
            f"{self.part}_attention": plots.attention_curves(
                tables["steps"], tables["fits"], self.part
            )
        }
        if self.part == "prefix":
            tables["prefix_tokens"] = self.prefix_tokens()
            figures["prefix_tokens"] = plots.prefix_token_bars(tables["prefix_tokens"])
        if self.by_head:
            heads = self.heads()
            tables["heads"] = heads.frame()
            figures["head_maps"] = heads.plot(self.part)
        with result_folder(out, force, holds_only("steps.csv", *WRITTEN)) as folder:
            for name, table in tables.items():
                write_text(folder / f"{name}.csv", as_csv(table))
            for name, figure in figures.items():
                figure.savefig(folder / f"{name}.png")


def traced(texts: pd.DataFrame, trace: xr.Dataset) -> list[tuple[pd.DataFrame, xr.Dataset]]:
    """Without the texts that ended before a first token, which have no attention; the turns of
    chats apart, since each begins at other l."""
    has = texts["n_tokens"].to_numpy() > 0
    if "turn" not in texts:
        return [_chosen(texts, trace, has)]
    turns = texts["turn"].fillna(1).to_numpy()
    return [_chosen(texts, trace, has & (turns == turn)) for turn in np.unique(turns)]


def _chosen(
    texts: pd.DataFrame, trace: xr.Dataset, which: np.ndarray
) -> tuple[pd.DataFrame, xr.Dataset]:
    numbers = np.arange(which.sum())
    chosen = texts[which].reset_index(drop=True)
    return chosen, trace.isel(sample=which).assign_coords(sample=numbers)


def _listed(values: pd.Series) -> str:
    return ", ".join(dict.fromkeys(values))
