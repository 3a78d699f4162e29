"""Figure steering: control against perplexity of every way to steer, and differences from LaPA2 at
equal perplexity."""

import numpy as np
import pandas as pd
from house import METRIC_LABELS, legend_below, render
from matplotlib.axes import Axes

from lapa2_interp.paper.equal_perplexity import telling
from lapa2_interp.plots import COLOURS, Drawing, new_figure, plain_axes

REFERENCE, BASELINE = "lapa2", "baseline"
SHOWN = ("acc", "acc (linear)", "acc masked", "acc masked (linear)")
MARKERS = "os^Dv"


def draw(table: pd.DataFrame, curves: pd.DataFrame, equal: pd.DataFrame) -> Drawing:
    """Figure steering: one row per task (and variant, where there are several). Left: accuracy
    against perplexity, a curve per way to steer, from the baseline through its strengths; dotted:
    the perplexities at which they are compared. Right: differences from LaPA2 there, with 95 %
    intervals; open where Holm's p is 0.05 or more.

    Args:
        table: tables/steering.csv, which is not drawn.
        curves: tables/steering.curves.csv.
        equal: tables/steering.equal.csv.
    """
    curves, equal = (
        each.assign(variant=each["variant"].astype(object).fillna("")) for each in (curves, equal)
    )
    keys = telling(curves, ["task", "words", "model", "method", "variant"])
    names = [REFERENCE, *(name for name in dict.fromkeys(equal["family"]) if name != REFERENCE)]
    looks = {name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)])
             for i, name in enumerate(names)}  # fmt: skip
    groups = list(curves.groupby(keys, sort=False))
    differences = equal.groupby(keys, sort=False)
    figure = new_figure(7.2, 2.6 * len(groups) + 0.3)
    panels = figure.subplots(len(groups), 2, squeeze=False, width_ratios=(1, 1.25))
    for (values, part), (left, right) in zip(groups, panels, strict=True):
        same = differences.get_group(values)
        title = ", ".join(str(value) for value in values if value)
        _curves(left, part, same, looks, title)
        _differences(right, same, looks)
    legend_below(figure, [("", panel, curves) for panel in panels[:, 0]], 4)
    return figure


def _curves(
    axes: Axes,
    curves: pd.DataFrame,
    equal: pd.DataFrame,
    looks: dict[str, tuple[str, str]],
    title: str,
) -> None:
    rows = curves[curves["metric"] == SHOWN[0]]
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
    x, y = rows["perplexity"], rows["mean"]
    axes.errorbar(
        x,
        y,
        xerr=[x - rows["perplexity_low"], rows["perplexity_high"] - x],
        yerr=[y - rows["low"], rows["high"] - y],
        ls="",
        ms=4,
        lw=0.7,
        **look,
    )


def _differences(axes: Axes, equal: pd.DataFrame, looks: dict[str, tuple[str, str]]) -> None:
    others = [name for name in looks if name != REFERENCE]
    ratios = list(dict.fromkeys(equal["ratio"]))
    metrics = [name for name in SHOWN if name in set(equal["metric"])]
    rows = equal.set_index(["metric", "ratio", "family"])
    height = 0
    ticks = []
    for metric in metrics:
        for ratio in ratios:
            first = height
            for name in others:
                if (metric, ratio, name) in rows.index:
                    row, (colour, marker) = rows.loc[(metric, ratio, name)], looks[name]
                    x = row["difference"]
                    if np.isnan(x):
                        axes.text(0.99, height, "not comparable", color=colour, fontsize=5,
                                  ha="right", va="center",
                                  transform=axes.get_yaxis_transform())  # fmt: skip
                    else:
                        away = [[x - row["difference_low"]], [row["difference_high"] - x]]
                        face = colour if row["p_holm"] < 0.05 else "white"
                        axes.errorbar(x, height, xerr=away, color=colour, marker=marker, ms=3.5,
                                      mfc=face, lw=0.9)  # fmt: skip
                height += 1
            ticks.append(((first + height - 1) / 2, f"{metric}, {ratio:g} x"))
            height += 1
    axes.axvline(0, color="#999999", lw=0.8, zorder=0)
    if equal["difference"].isna().all():
        axes.set_xlim(-1, 1)
    axes.set_yticks([place for place, _ in ticks], [label for _, label in ticks], fontsize=6)
    axes.set_ylim(height - 1, -1)
    plain_axes(axes, f"difference from {REFERENCE}, points (full: Holm's p < 0.05)", "")


if __name__ == "__main__":
    render("steering", draw, "curves", "equal")
