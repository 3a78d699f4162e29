# %% [markdown]
# # Attention steering in one frame: control against perplexity
#
# LaPA2 with all laws and both profiles, InstABoost, PASTA, Spotlight, split-softmax, a set-point,
# and LaPA2 on chosen tokens and heads (`lapa2 recipes`), each at its own defaults. It describes:
# the defaults are not equally strong, heads and tokens were chosen on the same prompts, and nothing
# is judged.
#
#     lapa2 sweep analyses/frontier/frontier.toml --out results/quick
#     python analyses/frontier/analyse.py results/quick

# %%
import numpy as np
import pandas as pd

from analyses.lab.items import open_item, prefix_step_table
from analyses.lab.style import METRIC_LABELS, WAYS, name_ends
from analyses.lab.tables import format_step_curves, rows_of_all_attributes
from lapa2_interp.bias.recipes import RECIPES, recipe_name
from lapa2_interp.plots import COLOURS, Drawing, crosses, new_figure, plain_axes

SHOWN = WAYS | {"spotlight": ("Spotlight", COLOURS[4], "P")}
"""Name, colour and marker of the recipes that the figure names; the others are grey."""


def draw(table: pd.DataFrame, steps: pd.DataFrame) -> Drawing:
    """Figure frontier: above, accuracy against perplexity with 95 % intervals, better to the upper
    left; below, attention on the prefix against step. One column per task.

    Args:
        table: tables/frontier.csv: columns task, arm, metric, attribute, mean, low, high.
        steps: tables/frontier.steps.csv: columns task, arm, step, mean.
    """
    shown = rows_of_all_attributes(table[table["mean"].notna()])
    arms = sorted(dict.fromkeys(shown["arm"]), key=lambda arm: arm in SHOWN)
    tasks = list(dict.fromkeys(shown["task"]))
    figure = new_figure(3.9 * max(1, len(tasks)), 5.2)
    figure.suptitle(
        "At default strengths the ways with most accuracy on sentiment cost most perplexity",
        fontsize=9, x=0.02, ha="left",
    )  # fmt: skip
    panels = figure.subplots(2, max(1, len(tasks)), squeeze=False)
    for task, (above, below) in zip(tasks, panels.T, strict=False):
        of_task = shown[shown["task"] == task]
        by_arm = {
            metric: part.set_index("arm")[["mean", "low", "high"]]
            for metric, part in of_task.groupby("metric")
            if metric in ("acc", "ppl")
        }
        ends = {}
        for arm in arms:
            name, colour, marker = SHOWN.get(arm, ("", "0.78", "o"))
            if all(arm in part.index for part in by_arm.values()) and len(by_arm) == 2:
                x, y = by_arm["ppl"].loc[[arm]], by_arm["acc"].loc[[arm]]
                size = 5 if name else 3
                crosses(above, x, y, color=colour, marker=marker, ms=size, lw=0.8, ls="")
            line = steps[(steps["task"] == task) & (steps["arm"] == arm)]
            below.plot(line["step"], line["mean"], color=colour, lw=1.4 if name else 0.8)
            if name and len(line):
                ends[name] = (*line[["step", "mean"]].iloc[-1], colour)
        above.set_xscale("log")
        ticks = np.unique(np.round(np.geomspace(*above.get_xlim(), 6)[1:-1]))
        above.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        above.minorticks_off()
        below.set_yscale("log")
        below.set_xticks(range(0, int(steps["step"].max()) + 1, 40))
        below.set_xlim(right=1.55 * steps["step"].max())
        above.set_title(task, fontsize=9)
        plain_axes(above, METRIC_LABELS["ppl"], METRIC_LABELS["acc"])
        plain_axes(below, "step", "attention on the prefix")
        name_ends(below, ends, 0.72, 0.08)
    return figure


# %%
item = open_item(
    "frontier",
    "Attention steering in one frame: recipes at their defaults",
    draw=draw,
    further_tables=("steps",),
)
cells = item.cells


# %%
def shown(key):
    """An arm by its recipe."""
    rules = item.run.by_key[key].active_augmentations
    if not rules:
        return "baseline"
    name = recipe_name(rules)
    if name is None:
        return item.run.by_key[key].arm
    chosen = rules[0].heads != "all" and not RECIPES[name].required
    return f"{name}, chosen heads" if chosen else name


names = dict(zip(cells["arm"], map(shown, cells["key"]), strict=True))
scores = item.data.scores(cells)
scores["arm"], cells["arm"] = scores["arm"].map(names), cells["arm"].map(names)
table = item.table(scores, cells)


# %% [markdown]
# Attention on the prefix, the mean over layers and heads, against step.


# %%

steps = item.data.step_curves(cells, prefix_step_table)
note = (
    "Every recipe at its own defaults. Heads and tokens were chosen by knock-outs on the same"
    " prompts, so what they add is no held-out result."
)
item.write(table, [note])
steps.to_csv(item.out / "tables" / "frontier.steps.csv", index=False, float_format="%.6g")
print(format_step_curves(steps).to_string(index=False))
item.draw()
