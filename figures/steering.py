"""Figure steering: control against perplexity of every way to steer, and differences from LaPA2 at
equal perplexity."""

import numpy as np
import pandas as pd
from house import METRIC_LABELS, legend_below, render
from matplotlib.axes import Axes

from lapa2_interp.scoring.equal_perplexity import distinguishing_columns
from lapa2_interp.plots import COLOURS, Drawing, crosses, new_figure, plain_axes

REFERENCE, BASELINE = "lapa2", "baseline"
SHOWN = {
    "acc": "accuracy",
    "acc (linear)": "by linear",
    "acc masked": "words hidden",
    "acc masked (linear)": "words hidden,\nby linear",
}
MARKERS = "os^Dv"


def draw(table: pd.DataFrame, curves: pd.DataFrame, equal: pd.DataFrame) -> Drawing:
    """Figure steering: one row per task (and variant, where there are several). Left: accuracy
    against perplexity, a curve per way to steer, from the baseline through its strengths; dotted:
    the perplexities at which they are compared. Right, a panel for each: differences from LaPA2
    there, with 95 % intervals; open where Holm's p is 0.05 or more. All attributes together.

    Args:
        table: tables/steering.csv, which is not drawn.
        curves: tables/steering.curves.csv.
        equal: tables/steering.equal.csv.
    """
    curves, equal = (
        table[table["attribute"] == "all"].assign(
            variant=table["variant"].astype(object).fillna("")
        )
        for table in (curves, equal)
    )
    keys = distinguishing_columns(curves, ["task", "words", "model", "method", "variant"])
    names = [REFERENCE, *(name for name in dict.fromkeys(equal["family"]) if name != REFERENCE)]
    looks = {name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)])
             for i, name in enumerate(names)}  # fmt: skip
    groups = list(curves.groupby(keys, sort=False))
    differences = equal.groupby(keys, sort=False)
    ratios = list(dict.fromkeys(equal["ratio"]))
    figure = new_figure(7.2, 2.5 * len(groups) + 0.3)
    panels = figure.subplots(
        len(groups), 1 + len(ratios), squeeze=False, width_ratios=(1.6, *(1 for _ in ratios))
    )
    for (values, part), (left, *right) in zip(groups, panels, strict=True):
        same = differences.get_group(values)
        title = ", ".join(str(value) for value in values if value)
        _curves(left, part, same, looks, title)
        shown = same.loc[same["metric"].isin(list(SHOWN)), ["difference_low", "difference_high"]]
        reach = [-1.0, 1.0, *shown.to_numpy()[shown.notna().to_numpy()]]
        there = list(dict.fromkeys(same["ratio"]))  # banned words are compared at one alone
        for panel, ratio in zip(right, there, strict=False):
            _differences(panel, same[same["ratio"] == ratio], looks)
            panel.set_xlim(min(reach) - 1, max(reach) + 1)
            panel.set_title(f"at {ratio:g} times the perplexity", fontsize=8)
        for panel in right[1:]:
            panel.set_yticklabels([])
        for panel in right[len(there) :]:
            panel.set_visible(False)
    legend_below(figure, [("", panel, curves) for panel in panels[:, 0]], 5)
    return figure


def _curves(
    axes: Axes,
    curves: pd.DataFrame,
    equal: pd.DataFrame,
    looks: dict[str, tuple[str, str]],
    title: str,
) -> None:
    rows = curves[curves["metric"] == "acc"]
    base = rows[rows["family"] == BASELINE]
    for name, (colour, marker) in looks.items():
        own = rows[rows["family"] == name].sort_values("strength")
        if len(own):
            line = pd.concat([base, own])
            axes.plot(line["perplexity"], line["mean"], color=colour, lw=0.9)
            _crosses(axes, own, color=colour, marker=marker, label=name)
    _crosses(axes, base, color="black", marker="*", label=BASELINE)
    for perplexity in dict.fromkeys(equal["perplexity"]):
        axes.axvline(perplexity, color="#999999", lw=0.8, ls=":", zorder=0)
    axes.set_xscale("log")
    ticks = np.unique(np.round(np.geomspace(*axes.get_xlim(), 5)[:-1]))
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_title(title, fontsize=9)
    plain_axes(axes, "perplexity, exp of the mean", METRIC_LABELS["acc"])


def _crosses(axes: Axes, rows: pd.DataFrame, **look: str) -> None:
    x = rows[["perplexity", "perplexity_low", "perplexity_high"]]
    crosses(axes, x.set_axis(["mean", "low", "high"], axis=1), rows, ls="", ms=4, lw=0.7, **look)


def _differences(axes: Axes, equal: pd.DataFrame, looks: dict[str, tuple[str, str]]) -> None:
    others = [name for name in looks if name != REFERENCE]
    rows = equal.set_index(["metric", "family"])
    metrics = {name: label for name, label in SHOWN.items() if name in set(equal["metric"])}
    between = len(others) + 1
    for i, metric in enumerate(metrics):
        for height, name in enumerate(others, i * between):
            if (metric, name) not in rows.index:
                continue
            row, (colour, marker) = rows.loc[(metric, name)], looks[name]
            x = row["difference"]
            if np.isnan(x):
                axes.text(0.99, height, "not comparable", color=colour, fontsize=5, ha="right",
                          va="center", transform=axes.get_yaxis_transform())  # fmt: skip
                continue
            away = [[x - row["difference_low"]], [row["difference_high"] - x]]
            face = colour if row["p_holm"] < 0.05 else "white"
            axes.errorbar(
                x, height, xerr=away, color=colour, marker=marker, ms=3.5, mfc=face, lw=0.9
            )
    axes.axvline(0, color="#999999", lw=0.8, zorder=0)
    middle = (len(others) - 1) / 2
    axes.set_yticks([i * between + middle for i in range(len(metrics))], list(metrics.values()))
    axes.set_ylim(max(1, len(metrics)) * between - 1, -1)
    plain_axes(axes, f"points above {REFERENCE}\n(full: Holm's p < 0.05)", "")


if __name__ == "__main__":
    render("steering", draw, "curves", "equal")
