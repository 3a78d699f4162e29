# %% [markdown]
# # Does control last for 2,048 tokens?
#
# The paper stops at 512. Here texts of 2,048 tokens are scored in eight parts: the baseline's,
# those of LaPA2, and those of LaPA2 on the attribute's own token or in 24 heads. Beside it stands
# the attention on the prefix.
#
#     lapa2 sweep quick/long --out results/quick
#     python analyses/long.py results/quick && python figures/long.py results/quick

# %%
from lapa2_interp.bias.recipes import name_families
from analyses.lab.items import open_item, prefix_step_table
from analyses.lab.tables import format_step_curves
from lapa2_interp.table_formats import interval_cells

PARTS = 8
METRICS = ("accuracy", "masked", "echo", "repetition")
item = open_item("long", "Control and attention on the prefix in long texts", scorers=METRICS)
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
    " perplexity: it describes what each does at the strength of quick/steering."
)
item.write(table, [note], formatted=shown.reset_index().fillna(""))
steps.to_csv(item.out / "tables" / "long.steps.csv", index=False, float_format="%.6g")
print(format_step_curves(steps).to_string(index=False))
