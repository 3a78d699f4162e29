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
# # Which keys does the released code boost, and does it matter?
#
# Not in the paper: its Algorithm 1 boosts the prefix; its released code counts slots from 0, so it
# boosts BOS and misses the last prefix token (profile "released"). The same methods and alphas
# under both, and on BOS alone; attention on prefix and BOS beside control.
#
#     python analyses/placement.py results/quick

# %%
import sys

import numpy as np
import pandas as pd

from lapa2_interp.paper.bench import open_bench
from lapa2_interp.paper.scripts import in_one_line
from lapa2_interp.paper.tables import ARM, wide
from lapa2_interp.stats import mean_interval
from lapa2_interp.trace.tables import pooled

sys.excepthook = in_one_line
bench = open_bench(
    "placement", "The paper's placement of the bias and that of its released code", "profile"
)
cells = bench.cells
scores = bench.scores(cells)
table = bench.table(scores, cells)

# %%
masses = []
for arm, trace, samples in bench.curves(cells):
    for name in ("prefix", "bos"):
        found = mean_interval(
            np.nanmean(pooled(trace, name)[0], axis=1), samples["prompt"].to_numpy()
        )
        masses.append(
            arm
            | {
                "metric": name,
                "mean": found.mean,
                "low": found.low,
                "high": found.high,
                "n": found.n,
            }
        )
masses = pd.DataFrame(masses, columns=[*ARM, "metric", "mean", "low", "high", "n"])

# %% [markdown]
# Ours: does the place matter?

# %%
for where, words, group in bench.groups(cells[cells["state"] == "finished"]):
    metric = "tox" if where["task"] == "detox" else "acc"
    arms = dict.fromkeys(group["arm"])
    for paper in (each for each in arms if each.endswith(" paper")):
        for other, slots in (
            (paper.replace("paper", "released"), "the released slots"),
            (f"{paper}, span bos", "BOS alone"),
        ):
            if other in arms:
                sides = (where | {"arm": paper}, where | {"arm": other})
                text = f"boosting {slots} gives as much {metric} as boosting the prefix: {words}"
                bench.claim(text, scores, *sides, metric, "same")

# %%
text = masses.assign(
    cell=[f"{m:.3f} [{a:.3f}, {b:.3f}]" for m, a, b in masses[["mean", "low", "high"]].to_numpy()]
)
beside = text.pivot_table(
    index=["task", "method", "arm"], columns="metric", values="cell", aggfunc="first", sort=False
)
shown = wide(table).merge(
    beside.reset_index().rename(
        columns={"arm": "augmentation", "prefix": "attention on prefix", "bos": "on BOS"}
    ),
    how="left",
)
bench.write(
    pd.concat([table, masses.assign(attribute="all", state="finished")], ignore_index=True),
    shown=shown.fillna(""),
)
