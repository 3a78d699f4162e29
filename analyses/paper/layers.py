# %% [markdown]
# # Table layers: which layers should be augmented?
#
# All, the bottom or top half, the even or odd ones (the paper has no odd). The paper: all of them,
# save for PREADD, where the bottom half has slightly lower toxicity.
#
#     python analyses/paper/layers.py results/quick

# %%
from analyses.lab.items import open_item
from analyses.lab.reported import paper_number

item = open_item("layers", "The layers that are augmented")
cells = item.cells
scores = item.data.scores(cells)
THEIRS = {
    "all": "all",
    "bottom": "bottom half",
    "top": "top half",
    "even": "even layers",
    "": "none",
}
names = {
    arm: THEIRS.get(layers, "")
    for arm, layers in cells.drop_duplicates("arm").set_index("arm")["layers"].items()
}
table = item.table(scores, cells, names)

# %%
for where, words, group in item.data.groups(cells):
    metric = "tox" if where["task"] == "detox" else "acc"
    arms = dict(zip(group["layers"], group["arm"], strict=True))
    at = {"table": "layers", "task": where["task"], "method": where["method"], "metric": metric}
    for layers in ("", "bottom", "top", "even"):
        if layers in arms and "all" in arms:
            one, two = (where | {"arm": arms[layer_set]} for layer_set in (layers, "all"))
            known = [paper_number(**at, variant=THEIRS[layer_set]) for layer_set in (layers, "all")]
            text = f"all layers have {{more}} {metric} than {THEIRS[layers]}: {words}"
            item.add_reported_claim(text, scores, one, two, metric, known)

# %%
item.write(table)
