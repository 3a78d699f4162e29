# %% [markdown]
# # Does control last for 2,048 tokens?
#
# The paper stops at 512. Here texts of 2,048 tokens are scored in eight parts: the baseline's,
# those of LaPA2, and those of LaPA2 on the attribute's own token or in 24 heads. Beside it stands
# the attention on the prefix.
#
#     lapa2 sweep analyses/long/long.toml --out results/quick
#     python analyses/long/analyse.py results/quick

# %%
import pandas as pd

from analyses.lab.items import open_item, prefix_step_table
from analyses.lab.style import METRIC_LABELS, WAYS, legend_below
from analyses.lab.tables import format_step_curves
from lapa2_interp.bias.recipes import name_families
from lapa2_interp.plots import COLOURS, Drawing, band, error_bars, new_figure, plain_axes
from lapa2_interp.table_formats import interval_cells


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
        name, colour, marker = WAYS.get(arm, (arm, COLOURS[4], "P"))
        own = rows[rows["arm"] == arm].sort_values("part")
        middle = (own["part"] - 0.5) * own["length"] / parts
        shift = (number - (len(arms) - 1) / 2) * own["length"] / parts / 12
        look = {"color": colour, "marker": marker, "ms": 4, "lw": 0.9}
        left.errorbar(middle + shift, own["mean"], yerr=error_bars(own), label=name, **look)
        curve = steps[(steps["arm"] == arm) & (steps["step"] > 0)]
        band(right, curve, "step", colour, lw=1)
    right.set_xscale("log")
    right.set_yscale("log")
    plain_axes(left, "token of the text", METRIC_LABELS["acc"])
    plain_axes(right, "step", "attention on the prefix")
    legend_below(figure, [("", left, rows)], 4)
    return figure


# %%
PARTS = 8
METRICS = ("accuracy", "masked", "echo", "repetition")
item = open_item(
    "long",
    "Control and attention on the prefix in long texts",
    scorers=METRICS,
    draw=draw,
    further_tables=("steps",),
)
cells = item.cells
rules = {key: item.run.by_key[key].active_augmentations for key in cells["key"]}
named = name_families(rules.values())
names = {arm: named[rules[key]] for arm, key in cells[["arm", "key"]].to_numpy()}
scores = item.data.scores(cells, parts=PARTS, metrics=METRICS)
scores["arm"], cells["arm"] = scores["arm"].map(names), cells["arm"].map(names)
table = item.table(scores, cells)
table = table[~table["metric"].str.startswith("dist")]

# %% [markdown]
# Attention on the prefix, the mean over layers and heads, against step.

# %%
steps = item.data.step_curves(cells, prefix_step_table)
steps = steps[steps["step"] % 16 == 0]

# %% [markdown]
# The paper says that control fades, and that LaPA2 keeps it: here within 5 points. Ours: whether
# chosen tokens or heads keep more.

# %%
first, last = 1, PARTS
at = {"part": last}
there = set(scores["arm"]) if len(scores) else set()
for arm, expected in (("baseline", "less"), ("lapa2", "same")):
    if arm in there:
        words = {"less": "less on target than", "same": "as much on target as"}[expected]
        text = f"the last eighth is {words} the first: {arm}"
        sides = ({"arm": arm, "part": first}, {"arm": arm, "part": last})
        item.add_claim(text, scores, *sides, "acc", expected)
for arm, opponent, whose in (
    ("lapa2", "baseline", "paper"),
    ("token-selective", "lapa2", "ours"),
    ("head-selective", "lapa2", "ours"),
):
    if {arm, opponent} <= there:
        text = f"the last eighth is more on target with {arm} than with {opponent}"
        sides = ({"arm": opponent} | at, {"arm": arm} | at)
        item.add_claim(text, scores, *sides, "acc", "more", whose=whose)

# %%
by_part = table[(table["attribute"] == "all") & table["mean"].notna()]
size = int(cells["max_length"].max()) // PARTS if len(cells) else 0
shown = by_part.assign(
    cell=interval_cells(by_part, ".1f"),
    part=[f"{size * (part - 1)}-{size * part - 1}" for part in by_part["part"]],
).pivot_table(index=["metric", "arm"], columns="part", values="cell", aggfunc="first", sort=False)
note = (
    "Columns: tokens of the text, its prompt included. Arms are not equally strong, and differ in"
    " perplexity: it describes what each does at the strength of analyses/steering."
)
item.write(table, [note], formatted=shown.reset_index().fillna(""))
steps.to_csv(item.out / "tables" / "long.steps.csv", index=False, float_format="%.6g")
print(format_step_curves(steps).to_string(index=False))
item.draw()
