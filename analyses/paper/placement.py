# %% [markdown]
# # Which keys does the released code boost, and does it matter?
#
# Not in the paper: its Algorithm 1 boosts the prefix; its released code counts slots from 0, so it
# boosts BOS and misses the last prefix token (profile "released"). The same methods and alphas
# under both, and on BOS alone; attention on prefix and BOS beside control.
#
#     python analyses/paper/placement.py results/quick

# %%
from analyses.lab.items import open_item

item = open_item(
    "placement", "The paper's placement of the bias and that of its released code", "profile"
)
cells = item.cells
scores = item.data.scores(cells)
table, shown = item.table_with_attention(
    cells, scores, {"prefix": "attention on prefix", "bos": "on BOS"}
)

# %% [markdown]
# Ours: does the place matter?

# %%
for where, words, group in item.data.groups(cells[cells["state"] == "finished"]):
    metric = "tox" if where["task"] == "detox" else "acc"
    arms = dict.fromkeys(group["arm"])
    for paper in (arm for arm in arms if arm.endswith(" paper")):
        for opponent, slots in (
            (paper.replace("paper", "released"), "the released slots"),
            (f"{paper}, span bos", "BOS alone"),
        ):
            if opponent in arms:
                sides = (where | {"arm": paper}, where | {"arm": opponent})
                text = f"boosting {slots} gives as much {metric} as boosting the prefix: {words}"
                item.add_claim(text, scores, *sides, metric, "same", whose="ours")

# %%
item.write(table, formatted=shown)
