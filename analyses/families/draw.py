"""Figure families: accuracy of every arm in every model (figures/families/arms.csv)."""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analyses.families.analyse import METRICS
from analyses.families.grids import GEMMA, LARGE_QWEN, OUT, QWEN, SMOLLM2
from analyses.lab.scripts import ScriptOptions
from analyses.lab.style import legend_below
from lapa2_interp.plots import COLOURS, new_figure, plain_axes

NAMES = {
    SMOLLM2: "SmolLM2-135M",
    GEMMA: "Gemma 3 270M",
    QWEN: "Qwen2.5-Coder-0.5B",
    LARGE_QWEN: "Qwen2.5-Coder-1.5B",
}
JUDGES = dict(zip(METRICS, ("by adapter", "by linear", "by the reader"), strict=True))


def draw(arms: pd.DataFrame) -> Figure:
    """A panel for each model and a row for each arm, with its cost: accuracy by each judge with
    95 % intervals. Dotted: no bias."""
    arms = arms[arms["stage"] == "test"]
    models = [name for name in NAMES if name in set(arms["model"])]
    columns = min(2, len(models))
    rows = -(-len(models) // columns)
    figure = new_figure(1 + 4 * columns, 2.7 * rows + 0.4)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
    for axes in panels[len(models) :]:
        axes.set_visible(False)
    for axes, model in zip(panels, models, strict=False):
        of_model = arms[arms["model"] == model]
        names = list(dict.fromkeys(of_model["arm"]))
        for i, (metric, words) in enumerate(JUDGES.items()):
            own = of_model[of_model["metric"] == metric].set_index("arm")
            there = [name for name in names if name in own.index]
            if not there:
                continue
            own = own.loc[there]
            at = [names.index(name) + 0.22 * (i - 1) for name in there]
            axes.errorbar(
                own["mean"], at, xerr=[own["mean"] - own["low"], own["high"] - own["mean"]],
                fmt="osD"[i], ms=3.5, lw=1, color=COLOURS[i], label=words,
            )  # fmt: skip
            axes.axvline(own.loc["no bias", "mean"], color=COLOURS[i], ls=":", lw=0.8)
        cost = of_model.drop_duplicates("arm").set_index("arm")["cost"]
        axes.set_yticks(range(len(names)), [f"{name} ({cost[name]:.2f})" for name in names])
        axes.invert_yaxis()
        axes.tick_params(labelbottom=True)  # also where no panel stands below
        plain_axes(axes, "texts that have their attribute, %", "")
        axes.set_title(f"{NAMES[model]}: arm (cost)", size=9, loc="left")
    legend_below(figure, [("", axes, arms) for axes in panels[: len(models)]], 3)
    return figure


if __name__ == "__main__":
    parser = ScriptOptions("Figure families")
    parser.add_argument("folder", type=Path, nargs="?", default=OUT)
    folder = parser.parse_args().folder
    draw(pd.read_csv(folder / "arms.csv")).savefig(folder / "families.png", dpi=200)
