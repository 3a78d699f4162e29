"""Plots for notebooks, figures and the report.

Each function takes a tidy table and returns a matplotlib figure.

The colours are Okabe and Ito's, which colour-blind readers can distinguish. An arm has the same
colour in all plots.

Example:
    >>> from lapa2_interp import generate, plots
    >>> run = generate("tiny-gpt2", "The lake", prefix="Very formal:", alpha=[0, 0.5], length=24)
    >>> drawing = plots.attention_curves(run.steps(), run.fits())
    >>> drawing.savefig("attention.png")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.")


def styles() -> Iterator[tuple[str, str]]:
    """Colour and dash of each curve in turn, repeated without end."""
    return cycle((colour, dash) for dash in DASHES for colour in COLOURS)


class Drawing(Figure):
    """A figure outside pyplot's global list that notebooks show as a picture and reports embed."""

    def draw(self, renderer: Any) -> None:
        """Draw the figure with dollars in texts as plain characters, since tokens such as "$$" are
        no formulas. Numbers on an axis may be formulas of matplotlib."""
        _keep_dollars(self)
        super().draw(renderer)

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def _keep_dollars(artist: Artist) -> None:
    for text in artist.findobj(Text):
        assert isinstance(text, Text)
        words = text.get_text()
        if "$" in words and not words.startswith("$\\mathdefault{"):
            text.set_parse_math(False)


def new_figure(width: float, height: float) -> Drawing:
    """An empty figure in the package's style; width and height in inches."""
    return Drawing(figsize=(width, height), layout="constrained", dpi=150)


def plain_axes(axes: Axes, xlabel: str, ylabel: str) -> None:
    axes.set_xlabel(xlabel, fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def legend_above(figure: Figure, columns: int, panel: Axes | None = None) -> None:
    """A legend above all panels: of one panel's curves, or of all; in fewer columns where they
    would be wider than the figure, which grows with a legend of more than three lines. Without a
    curve that has a name there is none."""
    named = () if panel is None else panel.get_legend_handles_labels()
    if not any(axes.get_legend_handles_labels()[1] for axes in figure.axes):
        return
    for n in range(columns, 0, -1):
        legend = figure.legend(
            *named, loc="outside upper center", frameon=False, fontsize=7, ncols=n
        )
        _keep_dollars(legend)
        size = legend.get_window_extent()
        if n == 1 or size.width <= figure.bbox.width:
            figure.set_figheight(figure.get_figheight() + max(0.0, size.height / figure.dpi - 0.5))
            return
        legend.remove()


def layer_map(
    axes: Axes,
    values: ArrayLike,
    columns: Sequence[str] | None = None,
    by: str = "head",
    **look: Any,
) -> AxesImage:
    """A map of every layer's heads, or of its slots: layers are rows, heads are columns, in every
    figure.

    Args:
        values: Numbers, or colours, [layer column].
        columns: Names of the columns; by default their numbers.
        by: What a column is.
        look: As `Axes.imshow`.
    """
    drawn = axes.imshow(values, aspect="auto", **look)
    plain_axes(axes, by, "layer")
    if columns is None:
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    else:
        shown = range(0, len(columns), 1 if by == "slots" else max(1, len(columns) // 9))
        axes.set_xticks(shown, [columns[i] for i in shown])
    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    return drawn


def band(axes: Axes, table: pd.DataFrame, x: str, colour: str, **line: Any) -> None:
    """A line of means with its 95 % band.

    Args:
        table: Columns x, mean, low and high.
    """
    axes.plot(table[x], table["mean"], color=colour, **line)
    if table["low"].notna().any():
        axes.fill_between(
            table[x].astype(float), table["low"], table["high"], color=colour, alpha=0.15, lw=0
        )


def crosses(axes: Axes, x: pd.DataFrame, y: pd.DataFrame, **look: Any) -> None:
    """Points with 95 % intervals in both directions; x and y have columns mean, low and high."""
    axes.errorbar(x["mean"], y["mean"], xerr=error_bars(x), yerr=error_bars(y), **look)


def error_bars(table: pd.DataFrame) -> np.ndarray:
    """Distances of the ends of intervals from their means [2 row], for `Axes.errorbar`."""
    return np.abs(table[["low", "high"]].to_numpy(float).T - table["mean"].to_numpy(float))


def attention_curves(
    steps: pd.DataFrame, fits: pd.DataFrame | None = None, name: str = "prefix"
) -> Drawing:
    """Attention against step with 95 % bands, and the fitted C/(t+D) dotted; layers with sliding
    windows have curves of their own.

    Args:
        steps: From `attention.tables.step_table`.
        fits: From `attention.tables.fit_table`; None draws no fits.
        name: Name of the sum.
    """
    figure = new_figure(6.8, 4.0)
    axes = figure.subplots()
    typed = steps["layer_type"].nunique() > 1
    curves = steps[steps["name"] == name].groupby(["arm", "layer_type"], sort=False)
    for (colour, dash), ((arm, layer_type), curve) in zip(styles(), curves, strict=False):
        t = curve["step"].to_numpy()
        label = f"{arm}, {layer_type} layers" if typed else arm
        band(axes, curve, "step", colour, ls=dash, lw=1.4, label=label)
        if fits is None or layer_type != "full":
            continue
        c, d, r2 = fits.loc[fits["arm"] == arm, ["C", "D", "R2"]].iloc[0]
        if np.isnan(c):
            axes.plot([], [], color=colour, lw=1.2, ls=":", label="no C/(t+D) fits")
        else:
            axes.plot(
                t,
                c / (t + d),
                color=colour,
                lw=1.2,
                ls=":",
                label=f"{c:.2f}/(t+{d:.1f}), R² {r2:.2f}",
            )
    mean = f"mean over layers{' of a type' * typed} and heads"
    plain_axes(axes, "generation step t", f"attention on {name.replace('_', ' ')}\n({mean})")
    axes.set_ylim(bottom=0)
    legend_above(figure, 2 if typed else 4)
    return figure


def head_maps(heads: pd.DataFrame, name: str = "prefix") -> Drawing:
    """Layer x head maps of one sum: the first arm as it is, the others as differences from it.

    Args:
        heads: From `attention.tables.head_table`.
        name: Name of the sum.
    """
    maps = {
        str(arm): part.pivot(index="layer", columns="head", values=name).to_numpy()
        for arm, part in heads.groupby("arm", sort=False)
    }
    first = next(iter(maps))
    figure = new_figure(1.0 + 2.1 * len(maps), 5.2)
    panels = np.atleast_1d(figure.subplots(1, len(maps), sharey=True))
    for panel, (arm, values) in zip(panels, maps.items(), strict=True):
        if arm == first:
            drawn = layer_map(panel, values, cmap="Blues", vmin=0)
            panel.set_title(arm, fontsize=8)
        else:
            difference = values - maps[first]
            reach = float(np.abs(difference).max()) or 1.0
            drawn = layer_map(panel, difference, cmap="RdBu_r", vmin=-reach, vmax=reach)
            panel.set_title(f"{arm}\nminus {first}", fontsize=8)
        bar = figure.colorbar(drawn, ax=panel, location="bottom", shrink=0.9)
        bar.ax.tick_params(labelsize=7)
        panel.label_outer()
    figure.suptitle(f"attention on {name} (each map has its own scale)", fontsize=9)
    return figure


def prefix_token_bars(tokens: pd.DataFrame) -> Drawing:
    """Attention on BOS and on every prefix token, by arm, with 95 % intervals.

    Args:
        tokens: From `attention.tables.prefix_token_table`; a column `label` names the keys if there
            is one.
    """
    keys = list(dict.fromkeys(tokens["key"]))
    arms = list(dict.fromkeys(tokens["arm"]))
    figure = new_figure(min(20, max(6.4, 2 + 0.26 * len(keys))), 3.4)
    sink, axes = figure.subplots(1, 2, width_ratios=(1, max(3, len(keys) / 6)))
    names = dict(zip(tokens["key"], tokens.get("label", tokens["key"]), strict=True))
    for i, (arm, (colour, dash)) in enumerate(zip(arms, styles(), strict=False)):
        part = tokens[tokens["arm"] == arm].set_index("key").reindex(keys)
        error = error_bars(part)
        x = np.arange(len(keys)) + (i - (len(arms) - 1) / 2) * 0.8 / len(arms)
        for axis, chosen in ((sink, slice(0, 1)), (axes, slice(1, None))):
            axis.bar(
                x[chosen],
                part["mean"].iloc[chosen],
                0.8 / len(arms),
                yerr=error[:, chosen],
                color=colour,
                hatch=None if dash == "-" else "//" * DASHES.index(dash),
                label=arm,
                ecolor="#777777",
                error_kw={"lw": 0.8},
            )
    shown = range(1, len(keys), max(1, len(keys) // 60))
    sink.set_xticks([0], [names[keys[0]]])
    axes.set_xticks(shown, [names[keys[i]] for i in shown], rotation=90 if len(keys) > 12 else 0)
    plain_axes(sink, "", "mean attention")
    plain_axes(axes, "prefix token", "")
    axes.margins(x=0.02)
    legend_above(figure, 4, axes)
    return figure
