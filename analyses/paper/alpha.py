# %% [markdown]
# # Figure alpha: how strong should the bias be?
#
# Control and perplexity against alpha for a direct, a Bayesian and a contrastive method. The paper
# (a figure without numbers): 1/2 is best for GPT-2+Prefix and Air-Decoding, 2 for PREADD.
#
#     python analyses/paper/alpha.py results/quick

# %%
import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from analyses.lab.items import open_item
from analyses.lab.style import METRIC_LABELS, display_name, style_of
from analyses.lab.tables import rows_of_all_attributes
from lapa2_interp.plots import Drawing, band, error_bars, new_figure, plain_axes

BEST = {"prefix": 0.5, "air-decoding": 0.5, "preadd": 2.0}
"""The alpha that the paper found best, by method."""


def draw(table: pd.DataFrame) -> Drawing:
    """Figure alpha: control (left axis, colour) and perplexity (right axis, grey) against alpha,
    one panel per method. A star marks the alpha with the best control here, the cross on the axis
    the alpha that the paper found best.

    Args:
        table: tables/alpha.csv: columns task, method, alpha, metric, attribute, mean, low, high.
    """
    shown = rows_of_all_attributes(table[table["mean"].notna()])
    kinds = list(
        shown[["model", "task", "method"]].drop_duplicates().itertuples(index=False, name=None)
    )
    figure = new_figure(2.6 * max(1, len(kinds)), 2.5)
    panels = np.atleast_1d(figure.subplots(1, max(1, len(kinds))))
    for panel, (model, task, method) in zip(panels, kinds, strict=False):
        part = shown[
            (shown["model"] == model) & (shown["task"] == task) & (shown["method"] == method)
        ].sort_values("alpha")
        colour, marker = style_of(method)
        metric = "tox" if task == "detox" else "acc"
        control, fluency = part[part["metric"] == metric], part[part["metric"] == "ppl"]
        band(panel, control, "alpha", colour, marker=marker, ms=4, lw=1.3)
        means = control.reset_index()["mean"]
        best = control.iloc[means.idxmin() if metric == "tox" else means.idxmax()]
        panel.plot(best["alpha"], best["mean"], "*", ms=11, color=colour, clip_on=False)
        if method in BEST:
            axis = panel.get_xaxis_transform()
            panel.plot(BEST[method], 0, "x", ms=6, color="#000000", clip_on=False, transform=axis)
        panel.set_title(f"{display_name(method)}, {task}", fontsize=9)
        plain_axes(panel, "alpha", METRIC_LABELS[metric])
        panel.yaxis.label.set_color(colour)
        right = panel.twinx()
        look = {"color": "#777777", "ls": "--", "lw": 1.0, "marker": ".", "ms": 4}
        right.errorbar(
            fluency["alpha"], fluency["mean"], yerr=error_bars(fluency), elinewidth=0.7, **look
        )
        right.set_ylabel("perplexity", color="#777777", fontsize=8)
        right.set_yscale("log")
        right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        right.yaxis.set_major_formatter(ScalarFormatter())
        right.yaxis.set_minor_locator(NullLocator())
        right.set_ylim(fluency["mean"].min() / 1.6, fluency["mean"].max() * 1.6)
        right.tick_params(which="both", labelsize=7, colors="#777777")
        right.spines["top"].set_visible(False)
    figure.supxlabel("star: best control here; cross: best in the paper", fontsize=7)
    return figure


# %%
item = open_item("alpha", "The strength of the bias", draw=draw)
cells = item.cells
scores = item.data.scores(cells)
table = item.table(
    scores, cells, {"baseline": "none", "alpha 0.5 paper": "log", "alpha 2 paper": "log"}
)
table["alpha"] = table["arm"].map(cells.drop_duplicates("arm").set_index("arm")["alpha"])

# %%
for where, words, group in item.data.groups(cells):
    metric, better = ("tox", "less") if where["task"] == "detox" else ("acc", "more")
    arms = group.drop_duplicates("alpha")[["alpha", "arm"]].to_numpy()
    sides = {alpha: where | {"arm": arm} for alpha, arm in arms}
    best = BEST.get(where["method"])
    if best not in sides:
        continue
    # 1/2 is the paper's best trade with perplexity, 2 is PREADD's least toxic.
    for side in sorted({0.0} & set(sides) if best < 2 else set(sides) - {best}):
        text = f"alpha {best:g} controls better than {side:g}: {words}"
        item.add_claim(text, scores, sides[side], sides[best], metric, better)
    if best < 2 and 2.0 in sides:
        text = f"perplexity grows from alpha {best:g} to 2: {words}"
        item.add_claim(text, scores, sides[best], sides[2.0], "ppl", "more")

# %%
item.write(table)
item.draw()
