# %% [markdown]
# # Table prefix-preadd-components: Pre-Aug and Pro-Aug on GPT-2+Prefix and PREADD
#
# The paper: Pro-Aug slightly hurts GPT-2+Prefix and ruins PREADD. GPT-2+Prefix has no raw branch
# for Pro-Aug to act on, and the paper does not say what its third row is, so that row is not made
# here.
#
#     python analyses/paper/prefix_preadd_components.py results/quick

# %%
from itertools import pairwise

from analyses.lab.items import open_item
from analyses.lab.reported import paper_number
from analyses.lab.tables import drop_parameter

item = open_item(
    "prefix_preadd_components", "Pre-Aug and Pro-Aug on Prefix and PREADD", "components"
)
cells = item.cells
cells = item.require_cells(cells[cells["method"].isin(["prefix", "preadd"])], "prefix or preadd")
on = {key: bool(cell.parameters.get("pro_aug", False)) for key, cell in item.run.by_key.items()}
names = [
    "baseline" if not a else "pre+pro" if on[key] else "pre"
    for key, a in zip(cells["key"], cells["alpha"], strict=True)
]
rows = cells.assign(
    variant=[drop_parameter(variant, "pro_aug") for variant in cells["variant"]], arm=names
)
scores = item.data.scores(cells)
for name in ("variant", "arm"):
    scores[name] = scores["cell"].map(rows.set_index("key")[name])
table = item.table(scores, rows, {"baseline": "none", "pre": "pre", "pre+pro": "pre+pro"})

# %%
STEPS = {"prefix": ("none", "pre"), "preadd": ("none", "pre", "pre+pro")}
for where, words, _ in item.data.groups(rows):
    metric = "tox" if where["task"] == "detox" else "acc"
    at = {"table": "components", "task": where["task"], "method": where["method"], "metric": metric}
    for one, two in pairwise(STEPS[where["method"]]):
        known = [paper_number(**at, variant=variant) for variant in (one, two)]
        sides = [where | {"arm": variant.replace("none", "baseline")} for variant in (one, two)]
        item.add_reported_claim(
            f"{two} has {{more}} {metric} than {one}: {words}", scores, *sides, metric, known
        )

# %%
item.write(table, ["Prefix with Pro-Aug is not defined: the method has no raw branch."])
