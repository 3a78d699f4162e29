# %% [markdown]
# # Attention steering in one frame: control against perplexity
#
# LaPA2 with all laws and both profiles, InstABoost, PASTA, Spotlight, split-softmax, a set-point,
# and LaPA2 on chosen tokens and heads (`lapa2 recipes`), each at its own defaults. It describes:
# the defaults are not equally strong, heads and tokens were chosen on the same prompts, and nothing
# is judged.
#
#     lapa2 sweep quick/frontier --out results/quick && python analyses/frontier.py results/quick
#     python figures/frontier.py results/quick

# %%
from lapa2_interp.bias.recipes import RECIPES, recipe_name
from analyses.lab.items import open_item, prefix_step_table
from analyses.lab.tables import format_step_curves

item = open_item("frontier", "Attention steering in one frame: recipes at their defaults")
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
    chosen = rules[0].heads != "all" and not RECIPES[name].needs
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
