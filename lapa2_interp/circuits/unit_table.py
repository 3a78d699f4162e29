"""Values of units by text: their table, map, drawing and order, for every way to measure them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from matplotlib.axes import Axes

from lapa2_interp._util.values import numbers_checked
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.statistics import max_t, ranks, share_interval, split_half
from lapa2_interp.circuits.units import Location, PatchUnit, Unit
from lapa2_interp.errors import CircuitError, pluralize, unknown_choice
from lapa2_interp.plots import Drawing, layer_map, new_figure, plain_axes
from lapa2_interp.stats import FEW, bounds
from lapa2_interp.table_formats import number_formatter

COLUMNS = ("head", "kv_head", "slots")
"""Labels that can be the columns of a map, whose rows are layers."""
SHOWN = 10
"""Units in the representation for notebooks."""
MOST_INTERVALS = 40
"""Units whose intervals are drawn, the largest first."""


@dataclass(frozen=True, repr=False)
class UnitTable:
    """A value of every unit in every text.

    Attributes:
        contrast_set: The texts.
        units: The units, such as heads.
        values: By example and unit.
        total: By example, the quantity of which values are shares; None where they are none.
        noise: Values up to this size are rounding; None where that was not measured.
        name: The name of the value, a column of `frame`.
        label: The label of its axis, with the unit of measurement.
        as_shares: Order, map and drawing are of shares of the total.

    Example:
        >>> from lapa2_interp import circuits, load_model
        >>> table = circuits.knock_out(load_model("planted"), "sentiment")
        >>> table.values.shape == (len(table.contrast_set.examples), len(table.units))
        True
    """

    contrast_set: ContrastSet
    units: tuple[Unit | PatchUnit, ...]
    values: Float[np.ndarray, "example unit"]
    total: Float[np.ndarray, " example"] | None = None
    noise: float | None = None
    name: str = "effect"
    label: str = "effect"
    as_shares: bool = False

    @cached_property
    def by_prompt(self) -> Float[np.ndarray, "prompt unit"]:
        """Means over the examples of each prompt."""
        return self.contrast_set.by_prompt(self.values)

    @property
    def means(self) -> Float[np.ndarray, " unit"]:
        """Means over prompts."""
        return self.by_prompt.mean(0)

    @property
    def shares(self) -> Float[np.ndarray, " unit"]:
        """Means over prompts as shares of the total's."""
        assert self.total is not None
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.means / self.contrast_set.by_prompt(self.total).mean()

    @property
    def split_half(self) -> float:
        """Spearman correlation of the units' order between halves of the prompts."""
        return split_half(self.by_prompt)

    @property
    def _sign(self) -> float:
        """-1 where the largest share is the lowest value."""
        if not self.as_shares or self.total is None:
            return 1.0
        return float(np.sign(self.contrast_set.by_prompt(self.total).sum())) or 1.0

    def frame(self) -> pd.DataFrame:
        """A row for every unit, the largest first.

        Columns: the unit's labels; the value (effect, or `name`) with its 95 % interval over
        prompts, low and high; its share of the total, with an interval; t, p, p_max (corrected for
        the number of units) and q; rank with its interval; the noise, and below_noise. With fewer
        than 8 prompts there are no p-values: numbers, no claims.

        Example:
            >>> from lapa2_interp import circuits, load_model
            >>> table = circuits.knock_out(load_model("planted"), "sentiment")
            >>> table.frame()[["layer", "head", "rank"]].head(1).to_numpy().tolist()
            [[1, 2, 1]]
        """
        values = self.by_prompt
        low, high = bounds(values)
        columns: dict[str, Any] = {self.name: self.means, "low": low, "high": high}
        if self.total is not None:
            with np.errstate(divide="ignore", invalid="ignore"):
                shares = share_interval(values, self.contrast_set.by_prompt(self.total))
            columns |= dict(zip(("share", "share_low", "share_high"), shares, strict=True))
        tests, order = max_t(values), ranks(values * self._sign)
        few = len(values) < FEW
        columns |= {"t": tests.t}
        columns |= {name: np.nan if few else getattr(tests, name) for name in ("p", "p_max", "q")}
        columns |= {"rank": order.rank, "rank_low": order.low, "rank_high": order.high}
        if self.noise is not None:
            columns |= {"noise": self.noise, "below_noise": np.abs(self.means) <= self.noise}
        table = pd.DataFrame([dict(unit.labels) for unit in self.units])
        return table.assign(**columns).sort_values("rank", ignore_index=True)

    def interval(self) -> pd.DataFrame:
        """The value of each unit, or its share, with its 95 % interval over prompts, largest first.

        Example:
            >>> from lapa2_interp import circuits, load_model
            >>> table = circuits.knock_out(load_model("planted"), "sentiment")
            >>> list(table.interval())
            ['layer', 'head', 'effect', 'low', 'high']
        """
        names = ["share", "share_low", "share_high"]
        shown = names if self.as_shares else [self.name, "low", "high"]
        return self.frame()[[*self.units[0].labels, *shown]]

    @numbers_checked
    def carriers(self, level: float = 0.05) -> pd.DataFrame:
        """Units that carry control: a positive value above the noise, family-wise p below `level`.

        Raises:
            CircuitError: Fewer than 8 prompts.
        """
        if (n := self.contrast_set.n_prompts) < FEW:
            raise CircuitError(f"{n} prompts are too few for a claim; give at least {FEW}")
        table = self.frame()
        above = table[self.name] > (self.noise or 0)
        return table[(table["p_max"] < level) & above]

    @numbers_checked
    def order(self, absolute: bool = False) -> Int[np.ndarray, " unit"]:
        """Numbers of the units, the largest first, by value or by its size."""
        means = np.abs(self.means) if absolute else self.means * self._sign
        return np.argsort(-means, kind="stable")

    @numbers_checked
    def best(self, n: int, absolute: bool = False) -> tuple[Location, ...]:
        """The heads (or other locations) of the n largest units, by value or by its size.

        Example:
            >>> from lapa2_interp import circuits, load_model
            >>> table = circuits.knock_out(load_model("planted"), "sentiment")
            >>> table.best(1)
            ((1, 2),)
        """
        chosen = self.order(absolute)[:n]
        return tuple(dict.fromkeys(pair for i in chosen for pair in self.units[i].heads))

    def map(self, part: str | None = None) -> Float[np.ndarray, "layer column"]:
        """Values, or shares, as a grid of layers and heads, KV heads, or slots in their order.

        Args:
            part: "k", "v" or "kv", where units are of several parts of the cache.

        Raises:
            CircuitError: Other units have no map; or there are several parts, and none was named.

        Example:
            >>> from lapa2_interp import circuits, load_model
            >>> table = circuits.knock_out(load_model("planted"), "sentiment")
            >>> table.map().shape
            (2, 4)
        """
        if not (kind := self._column):
            raise CircuitError("only heads, KV heads and slots have a map; see frame()")
        parts = self._parts
        if part is None and len(parts) > 1:
            raise CircuitError(f"there is a map for each of {', '.join(parts)}; name one: part=")
        if part is not None and part not in parts:
            raise CircuitError(unknown_choice("part", part, parts))
        columns = self._columns
        n_layers = 1 + max(unit.labels["layer"] for unit in self.units)
        grid = np.full((n_layers, len(columns)), np.nan)
        shown = self.shares if self.as_shares else self.means
        for unit, value in zip(self.units, shown, strict=True):
            if part is None or unit.labels["part"] == part:
                grid[unit.labels["layer"], columns.index(unit.labels[kind])] = value
        return grid

    def __repr__(self) -> str:
        name, units = type(self).__name__, pluralize(len(self.units), "unit")
        return f"<{name}: {self.label}, of {units} in {self.contrast_set!r}>"

    def _repr_html_(self) -> str:
        """The largest units, for notebooks."""
        columns = [*self.units[0].labels, self.name, "low", "high", "share", "p_max", "rank"]
        shown = self.frame().head(SHOWN).filter(columns)
        table = shown.to_html(index=False, border=0, float_format=number_formatter(".3g"))
        note = f"the largest {SHOWN} of {len(self.units)}: " if len(self.units) > SHOWN else ""
        return f"<p>{note}{escape(self.label)}, with 95 % intervals over prompts</p>{table}"

    def plot(self) -> Drawing:
        """Maps, or values with their intervals where units have no map.

        Example:
            >>> from lapa2_interp import circuits, load_model
            >>> table = circuits.knock_out(load_model("planted"), "sentiment")
            >>> drawing = table.plot()
        """
        return draw_tables({"": self})

    def plot_against(self, x: Float[np.ndarray, " unit"], xlabel: str, named: int = 8) -> Drawing:
        """Values against another number of each unit, with the names of the largest above the
        noise."""
        means, figure = self.means, new_figure(3.3, 2.8)
        axes = figure.subplots()
        axes.axhline(0, color="0.7", lw=0.6)
        axes.scatter(x, means, s=9, color="#0072B2", lw=0)
        for i in self.order(absolute=True)[:named]:
            if abs(means[i]) > (self.noise or 0):
                label = ".".join(map(str, self.units[i].labels.values()))
                axes.annotate(label, (x[i], means[i]), fontsize=7, xytext=(3, 2),
                              textcoords="offset points")  # fmt: skip
        plain_axes(axes, xlabel, self.label)
        return figure

    @property
    def _column(self) -> str:
        """The label that a map has as columns; "" where there is no map."""
        names = [name for name in self.units[0].labels if name != "part"]
        return names[1] if names[0] == "layer" and names[1:] in [[c] for c in COLUMNS] else ""

    @property
    def _columns(self) -> list[Any]:
        """Columns of a map: every number of a head, or the slots in their order."""
        columns = list(dict.fromkeys(unit.labels[self._column] for unit in self.units))
        return columns if isinstance(columns[0], str) else list(range(max(columns) + 1))

    @property
    def _parts(self) -> list[str]:
        """Parts of the cache that the units have."""
        labels = [unit.labels for unit in self.units]
        return list(dict.fromkeys(str(names["part"]) for names in labels if "part" in names))

    def _draw_intervals(self, axes: Axes) -> None:
        """Values or shares with their intervals; layers and positions in order, others by value."""
        names = list(self.units[0].labels)
        table = self.interval().head(MOST_INTERVALS)
        if names in (["layer"], ["position"]):
            table = table.sort_values(names)
        mean, low, high = (table[name] for name in list(table)[-3:])
        at = np.arange(len(table))[::-1]
        axes.errorbar(mean, at, xerr=[mean - low, high - mean], fmt="o", ms=3, lw=0.8,
                      color="#0072B2")  # fmt: skip
        axes.axvline(0, color="0.6", lw=0.6)
        axes.set_yticks(at, [".".join(map(str, row)) for row in table[names].to_numpy().tolist()])
        plain_axes(axes, self.label, " x ".join(names))


def draw_tables(tables: Mapping[str, UnitTable]) -> Drawing:
    """Tables of the same units side by side: a map of each part of the cache, or intervals. Maps
    with the same label have the same scale."""
    first = next(iter(tables.values()))
    if not first._column:
        n = min(len(first.units), MOST_INTERVALS)
        figure = new_figure(3.3 * len(tables), 0.7 + 0.16 * n)
        for axes, (title, table) in zip(
            np.atleast_1d(figure.subplots(1, len(tables))), tables.items(), strict=True
        ):
            table._draw_intervals(axes)
            axes.set_title(title, fontsize=8)
        return figure
    maps = [
        (f"{title} {part}".strip(), table, table.map(part or None))
        for title, table in tables.items()
        for part in table._parts or [""]
    ]
    tops: dict[str, float] = {}
    for _, table, grid in maps:
        largest = np.abs(grid[np.isfinite(grid)]).max(initial=0.0)
        tops[table.label] = max(tops.get(table.label, 0.0), float(largest))
    n_layers, n_columns = maps[0][2].shape
    figure = new_figure(
        max(3.2, 1.3 + 0.22 * n_columns) * len(maps), max(2.0, 1.0 + 0.13 * n_layers)
    )
    for axes, (title, table, grid) in zip(
        np.atleast_1d(figure.subplots(1, len(maps))), maps, strict=True
    ):
        top = tops[table.label] or 1.0
        by, columns = table._column.replace("_", " "), list(map(str, table._columns))
        drawn = layer_map(axes, grid, columns, by, cmap="RdBu_r", vmin=-top, vmax=top)
        bar = figure.colorbar(drawn, ax=axes)
        bar.set_label(table.label, fontsize=7)
        bar.ax.tick_params(labelsize=7)
        axes.set_title(title, fontsize=8)
    return figure
