"""Figure rivals: accuracy against cost of every way to steer (arms.csv of analyses/rivals.py)."""

from pathlib import Path

import pandas as pd
from house import legend_below
from matplotlib.figure import Figure

from lapa2_interp._util.plots import COLOURS, new_figure, plain_axes
from lapa2_interp.paper.scripts import ScriptOptions

MARKERS = "os^Dv"
NAMES = {
    "lapa2": "LaPA², all heads",
    "head-selective": "24 heads",
    "gate, head-selective": "gate around 24 heads",
    "head-selective, opposing down": "24 heads, opposing down",
    "key-scale": "scores multiplied",
    "caa, layer 20": "activation addition",
    "caa, layer 25": "activation addition, layer 25",
    "reminder": "prefix read again",
    "temperature": "temperature 0.8",
    "temperature 0.8": "24 heads, temperature 0.8",
}
"""Of families that the figure calls otherwise."""
METRICS = {"acc hidden": "accuracy by adapter, words hidden, %", "acc (linear)": "by linear, %"}


def draw(arms: pd.DataFrame) -> Figure:
    """One panel a scorer: a curve for each family, from no bias through its strengths, with 95 %
    intervals; dotted: the costs at which families are compared."""
    figure = new_figure(7.2, 3.6)
    panels = figure.subplots(1, len(METRICS))
    families = [name for name in dict.fromkeys(arms["family"]) if name != "baseline"]
    for axes, (metric, words) in zip(panels, METRICS.items(), strict=True):
        rows = arms[(arms["metric"] == metric) & (arms["attributes"] == "all")]
        base = rows[rows["family"] == "baseline"]
        for i, family in enumerate(families):
            own = rows[rows["family"] == family].sort_values("strength")
            curve = pd.concat([base, own])
            colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i // len(COLOURS)]
            axes.plot(
                curve["cost"], curve["mean"], color=colour, marker=marker, ms=4,
                label=NAMES.get(family, family),
            )  # fmt: skip
            axes.vlines(own["cost"], own["low"], own["high"], color=colour, lw=0.8)
        for cost in (1.1, 1.25):
            axes.axvline(cost, color="grey", ls=":", lw=0.8)
        axes.set_xlim(right=min(2.0, arms["cost"].max() + 0.05))
        plain_axes(axes, "perplexity by Gemma, times that of no bias", words)
    legend_below(figure, [("", panels[0], arms)], 4)
    return figure


if __name__ == "__main__":
    parser = ScriptOptions("Figure rivals")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "rivals")
    folder = parser.parse_args().folder
    draw(pd.read_csv(folder / "arms.csv")).savefig(folder / "rivals.png", dpi=200)
