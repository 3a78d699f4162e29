"""Figures augmentation and augmentation_large: prefix attention against step, solid without and
dashed with LaPA2."""

from typing import Any

import pandas as pd
from house import by_task, display_name, legend_below, render, style_of

from lapa2_interp.plots import Drawing, band, plain_axes


def draw(table: pd.DataFrame) -> Drawing:
    """Figures augmentation and augmentation_large: prefix attention against step, solid without and
    dashed with LaPA2.

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


if __name__ == "__main__":
    render("augmentation", draw)
