"""Figure dilution: prefix attention against step, C/(t + D) dotted, one panel per task."""

from typing import Any

import numpy as np
import pandas as pd
from house import by_task, display_name, legend_below, render, style_of

from lapa2_interp.plots import Drawing, band, plain_axes


def draw(table: pd.DataFrame, fits: pd.DataFrame) -> Drawing:
    """Figure dilution: prefix attention against step, C/(t + D) dotted, one panel per task.

    Args:
        table: tables/dilution.csv: columns task, method, name, step, mean, low, high.
        fits: tables/dilution.fits.csv: columns task, method, C, D, R2.
    """
    figure, panels = by_task(table[table["name"] == "prefix"])
    for task, panel, part in panels:
        for i, (method, line) in enumerate(part.groupby("method", sort=False)):
            colour, _ = style_of(str(method))
            band(panel, line, "step", colour, lw=1.3, label=display_name(str(method)))
            own = (fits["task"] == line["task"].iloc[0]) & (fits["model"] == line["model"].iloc[0])
            c, d, r2 = fits.loc[own & (fits["method"] == method), ["C", "D", "R2"]].iloc[0]
            if not np.isnan(c):
                panel.plot(line["step"], c / (line["step"] + d), color=colour, ls=":", lw=1.6)
                alignment: dict[str, Any] = {
                    "ha": "right",
                    "va": "top",
                    "transform": panel.transAxes,
                }
                panel.text(
                    0.98, 0.98 - 0.09 * i, f"R² {r2:.2f}", color=colour, fontsize=7, **alignment
                )
        panel.set_ylim(bottom=0)
        panel.set_title(task, fontsize=9)
        plain_axes(panel, "generation step t", "attention on the prefix")
    legend_below(figure, panels)
    return figure


if __name__ == "__main__":
    render("dilution", draw, "fits")
