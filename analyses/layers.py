# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Table layers: which layers should be augmented?
#
# All, the bottom or top half, the even or odd ones (the paper has no odd). The paper: all of them, save for PREADD,
# where the bottom half has slightly lower toxicity.
#
#     python analyses/layers.py results/quick

# %%
from lapa2_interp.experiments.items import open_bench, paper_number

bench = open_bench("layers", "The layers that are augmented")
cells = bench.cells
scores = bench.scores(cells)
THEIRS = {"all": "all", "bottom": "bottom half", "top": "top half", "even": "even layers", "": "none"}
names = {arm: THEIRS.get(layers, "") for arm, layers in cells.drop_duplicates("arm").set_index("arm")["layers"].items()}
table = bench.table(scores, cells, names)

# %%
for (task, method), group in cells.groupby(["task", "method"], sort=False):
    metric = "tox" if task == "detox" else "acc"
    arms = group.drop_duplicates("layers").set_index("layers")["arm"].to_dict()
    for layers in ("", "bottom", "top", "even"):
        one, two = ({"task": task, "method": method, "arm": arms[each]} for each in (layers, "all"))
        known = [
            paper_number("layers", task=task, method=method, variant=THEIRS[each], metric=metric)
            for each in (layers, "all")
        ]
        direction = "more" if known[1] > known[0] else "less"
        words = THEIRS[layers] if layers else "none"
        bench.claim(
            f"all layers have {direction} {metric} than {words}: {method}",
            scores,
            one,
            two,
            metric,
            direction,
            known[1] - known[0],
        )

# %%
bench.write(table)
