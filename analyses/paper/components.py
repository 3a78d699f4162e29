# %% [markdown]
# # Table components: Pre-Aug and Pro-Aug on Air-Decoding
#
# The bias on the prefix alone (Pre-Aug), and on the prompt of the base branch too (Pro-Aug). The
# paper: Pro-Aug helps on sentiment and topic, and hurts detoxification, whose prompts are toxic.
#
#     python analyses/paper/components.py results/quick

# %%
from analyses.lab.items import open_item
from analyses.lab.reported import paper_number
from analyses.lab.tables import drop_parameter

item = open_item("components", "Pre-Aug and Pro-Aug on Air-Decoding")
cells = item.cells
cells = item.require_cells(cells[cells["method"] == "air-decoding"], "air-decoding")
on = {key: bool(cell.parameters.get("pro_aug", False)) for key, cell in item.run.by_key.items()}
names = [
    "baseline" if not a else "pre+pro" if on[key] else "pre"
    for key, a in zip(cells["key"], cells["alpha"], strict=True)
]
rows = cells.assign(
    variant=[drop_parameter(variant, "pro_aug") for variant in cells["variant"]], arm=names
).sort_values("arm", kind="stable")
scores = item.data.scores(rows)
for name in ("variant", "arm"):
    scores[name] = scores["cell"].map(rows.set_index("key")[name])
table = item.table(scores, rows, {"baseline": "none", "pre": "pre", "pre+pro": "pre+pro"})

# %%
for where, words, _ in item.data.groups(rows):
    metric = "tox" if where["task"] == "detox" else "acc"
    at = {"table": "components", "task": where["task"], "method": where["method"], "metric": metric}
    for one, two in (("none", "pre"), ("pre", "pre+pro")):
        known = [paper_number(**at, variant=variant) for variant in (one, two)]
        sides = [where | {"arm": variant.replace("none", "baseline")} for variant in (one, two)]
        item.add_reported_claim(
            f"{two} has {{more}} {metric} than {one}: {words}", scores, *sides, metric, known
        )

# %%
item.write(table)
