"""The style of the figures: a method's name, colour and marker, panels by task, legends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lapa2_interp.methods.registry import known_methods
from lapa2_interp.plots import COLOURS, Drawing, band, new_figure, plain_axes

METHOD_STYLES = {
    "prefix": (COLOURS[1], "o"),
    "con-prefix": (COLOURS[3], "s"),
    "air-decoding": (COLOURS[2], "^"),
    "negprompt": (COLOURS[4], "D"),
    "preadd": (COLOURS[5], "v"),
    "palette": (COLOURS[6], "P"),
    "freectrl": (COLOURS[0], "X"),
    "datg": (COLOURS[0], "X"),
    "gedi": (COLOURS[4], "<"),
    "dexperts": (COLOURS[5], ">"),
    "arithmetic": (COLOURS[6], "*"),
}
"""A method keeps its colour and marker in every figure."""
WAYS = {
    "baseline": ("no bias", COLOURS[0], "o"),
    "lapa2": ("LaPA², all heads", COLOURS[2], "D"),
    "head-selective": ("24 chosen heads", COLOURS[1], "o"),
    "token-selective": ("one token", COLOURS[6], "s"),
    "set-point": ("set-point", COLOURS[3], "^"),
}
"""By family, what figures call a way to raise attention, its colour and its marker."""
METRIC_LABELS = {"acc": "attribute accuracy (%)", "tox": "toxicity (%)", "ppl": "perplexity"}
COLUMN = 3.4
"""Width of a paper's column, inches."""


def display_name(method: str) -> str:
    """A method's name in figures."""
    return known_methods()[method].display_name if method in known_methods() else method


def style_of(method: str) -> tuple[str, str]:
    """A method's colour and marker."""
    return METHOD_STYLES.get(method, ("#777777", "."))


Panels = list[tuple[str, Axes, pd.DataFrame]]
"""Task, axes and rows of each panel."""


def by_task(
    table: pd.DataFrame, width: float = COLUMN, height: float = 2.4
) -> tuple[Drawing, Panels]:
    """One panel per task (and model, where there are several), side by side."""
    several = table["model"].nunique() > 1
    groups = [
        (f"{task}, {str(model).rpartition('/')[2]}" if several else str(task), part)
        for (model, task), part in table.groupby(["model", "task"], sort=False)
    ]
    figure = new_figure(width * max(1, len(groups)), height)
    panels = np.atleast_1d(figure.subplots(1, max(1, len(groups))))
    return figure, [
        (title, panel, part) for panel, (title, part) in zip(panels, groups, strict=False)
    ]


def legend_below(figure: Drawing, panels: Panels, columns: int = 3) -> None:
    """One legend under all panels, in fewer columns where they do not fit."""
    named: dict[str, Any] = {}
    for _, panel, _ in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    for fewer in range(columns, 0, -1):
        legend = figure.legend(
            list(named.values()),
            list(named),
            loc="outside lower center",
            frameon=False,
            fontsize=7,
            ncols=fewer,
        )
        if fewer == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def name_ends(
    axes: Axes, ends: Mapping[str, tuple[float, float, str]], across: float, apart: float
) -> None:
    """Names of curves in a column, in their colours, each with a thin line from the curve's end.

    Args:
        axes: The panel, with its final limits.
        ends: By name, x and y of the end, and the colour.
        across: Where the column begins, as a share of the panel's width.
        apart: Least distance of two names, as a share of the panel's height.
    """
    scale = axes.transScale + axes.transLimits
    points = {name: scale.transform((x, y)) for name, (x, y, _) in ends.items()}
    names = sorted(points, key=lambda name: points[name][1])
    heights = [points[name][1] for name in names]
    for _ in range(200):  # neighbours that touch move apart
        for i in range(len(heights) - 1):
            overlap = apart - (heights[i + 1] - heights[i])
            if overlap > 1e-6:
                heights[i] -= overlap / 2
                heights[i + 1] += overlap / 2
    for name, height in zip(names, heights, strict=True):
        look: dict[str, Any] = {"color": ends[name][2], "transform": axes.transAxes}
        x, y = points[name]
        axes.plot([x + 0.015, across - 0.01], [y, height], lw=0.5, alpha=0.5, **look)
        axes.text(across, height, name, fontsize=7, va="center", **look)


def draw_prefix_attention(table: pd.DataFrame) -> Drawing:
    """Prefix attention against step, solid without and dashed with LaPA2: figures augmentation and
    augmentation_large.

    Args:
        table: Columns task, method, arm, step, mean, low, high.
    """
    figure, panels = by_task(table)
    for task, panel, part in panels:
        for (method, arm), line in part.groupby(["method", "arm"], sort=False):
            colour, marker = style_of(str(method))
            plain = arm == "baseline"
            look: dict[str, Any] = {
                "marker": marker,
                "ms": 4,
                "markevery": max(1, len(line) // 6),
                "mfc": colour if plain else "white",
            }
            name = display_name(str(method)) if plain else None
            band(panel, line, "step", colour, ls="-" if plain else "--", lw=1.2, label=name, **look)
        for name, ls in (("without LaPA2", "-"), ("with LaPA2", "--")):
            panel.plot([], [], color="#777777", ls=ls, lw=1.2, label=name)
        panel.set_ylim(bottom=0)
        panel.set_title(task, fontsize=9)
        plain_axes(panel, "generation step t", "attention on the prefix")
    legend_below(figure, panels, 3)
    return figure
