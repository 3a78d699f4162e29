"""Figure equal attention: accuracy of sets of heads with equal attention on the prefix (arms.csv of
analyses/heads/equal_attention.py)."""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analyses.lab import FIGURES
from analyses.lab.scripts import ScriptOptions
from analyses.lab.style import legend_below
from lapa2_interp.plots import COLOURS, new_figure, plain_axes

SCORERS = {"acc hidden": "by adapter, words hidden", "acc (linear)": "by linear"}
WORDS = {
    "24 heads": "24 chosen heads",
    "random": "24 random heads",
    "random, no opposers": "24 random heads, none that opposes",
    "24 heads, opposing down": "24 chosen heads, opposing ones down",
}
"""Of sets that the figure calls otherwise."""


def draw(arms: pd.DataFrame) -> Figure:
    """A row for each set, with the attention that it gives: accuracy by both scorers with 95 %
    intervals. Dotted: no bias."""
    figure = new_figure(6.2, 2.9)
    axes = figure.subplots()
    sets = list(dict.fromkeys(arms["arm"]))
    attention = arms[arms["measure"] == "attention"].set_index("arm")["mean"]
    for i, (measure, words) in enumerate(SCORERS.items()):
        own = arms[arms["measure"] == measure].set_index("arm").loc[sets]
        at = [row + 0.22 * (i - 0.5) for row in range(len(sets))]
        axes.errorbar(
            own["mean"], at, xerr=[own["mean"] - own["low"], own["high"] - own["mean"]],
            fmt="os"[i], ms=4, lw=1, color=COLOURS[i], label=words,
        )  # fmt: skip
        axes.axvline(own.loc["no bias", "mean"], color=COLOURS[i], ls=":", lw=0.8)
    names = [f"{WORDS.get(name, name)} ({100 * attention[name]:.1f} %)" for name in sets]
    axes.set_yticks(range(len(sets)), names)
    axes.invert_yaxis()
    plain_axes(axes, "texts that have their attribute, %", "")
    axes.set_title("set of heads (attention on the prefix)", size=9, loc="left")
    legend_below(figure, [("", axes, arms)], 2)
    return figure


if __name__ == "__main__":
    parser = ScriptOptions("Figure equal attention")
    parser.add_argument("folder", type=Path, nargs="?", default=FIGURES / "heads")
    folder = parser.parse_args().folder
    draw(pd.read_csv(folder / "arms.csv")).savefig(folder / "heads.png", dpi=200)
