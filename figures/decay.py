"""Figure decay: accuracy against length, one line per method and one panel per task, 95 % bands."""

import pandas as pd
from house import METRIC_LABELS, by_task, display_name, legend_below, render, style_of

from analyses.lab.tables import rows_of_all_attributes
from lapa2_interp.plots import Drawing, band, plain_axes


def draw(table: pd.DataFrame) -> Drawing:
    """Figure decay: accuracy against length, one line per method and one panel per task, 95 %
    bands.

    Args:
        table: tables/decay.csv: columns task, method, length, metric, attribute, mean, low, high.
    """
    shown = rows_of_all_attributes(table[table["mean"].notna() & (table["metric"] == "acc")])
    figure, panels = by_task(shown)
    for task, panel, part in panels:
        for method, line in part.groupby("method", sort=False):
            colour, marker = style_of(str(method))
            band(
                panel,
                line,
                "length",
                colour,
                marker=marker,
                ms=4,
                lw=1.3,
                label=display_name(str(method)),
            )
        panel.set_xticks(sorted(part["length"].unique()))
        panel.set_title(task, fontsize=9)
        plain_axes(panel, "tokens", METRIC_LABELS[part["metric"].iloc[0]])
    legend_below(figure, panels)
    return figure


if __name__ == "__main__":
    render("decay", draw)
