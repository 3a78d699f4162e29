"""Figure long: control in each eighth of a long text, and attention on the prefix against step."""

import pandas as pd
from house import METRIC_LABELS, legend_below, render

from lapa2_interp.plots import COLOURS, Drawing, band, error_bars, new_figure, plain_axes

MARKERS = "os^Dv"


def draw(table: pd.DataFrame, steps: pd.DataFrame) -> Drawing:
    """Figure long: left, accuracy of the texts' parts with 95 % intervals; right, attention on the
    prefix against step, both on logarithmic axes. One look per arm.

    Args:
        table: tables/long.csv: columns arm, part, metric, attribute, length, mean, low, high.
        steps: tables/long.steps.csv: columns arm, step, mean, low, high.
    """
    rows = table[(table["metric"] == "acc") & (table["attribute"] == "all")]
    rows = rows[rows["mean"].notna()]
    arms = list(dict.fromkeys(rows["arm"]))
    parts = max(1, int(rows["part"].max())) if len(rows) else 1
    figure = new_figure(7.2, 2.9)
    left, right = figure.subplots(1, 2)
    for number, arm in enumerate(arms):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        own = rows[rows["arm"] == arm].sort_values("part")
        middle = (own["part"] - 0.5) * own["length"] / parts
        shift = (number - (len(arms) - 1) / 2) * own["length"] / parts / 12
        look = {"color": colour, "marker": marker, "ms": 4, "lw": 0.9}
        left.errorbar(middle + shift, own["mean"], yerr=error_bars(own), label=arm, **look)
        curve = steps[(steps["arm"] == arm) & (steps["step"] > 0)]
        band(right, curve, "step", colour, lw=1)
    right.set_xscale("log")
    right.set_yscale("log")
    plain_axes(left, "token of the text", METRIC_LABELS["acc"])
    plain_axes(right, "step", "attention on the prefix")
    legend_below(figure, [("", left, rows)], 4)
    return figure


if __name__ == "__main__":
    render("long", draw, "steps")
