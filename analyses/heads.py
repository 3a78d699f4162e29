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
# # Head scope: must every head be augmented?
#
# Not in the paper, which augments all heads of all layers. InProcess all of them, the quarter with
# most attention on the prefix in the baseline, all the others, and a random quarter (the grid
# quick/heads names them).
#
#     python analyses/heads.py results/quick

# %%
import sys

from lapa2_interp.paper.bench import open_bench
from lapa2_interp.paper.reported import paper_number
from lapa2_interp.paper.scripts import in_one_line

sys.excepthook = in_one_line
bench = open_bench(
    "heads", "Head scope: the heads with most attention on the prefix, the others, a random quarter"
)
cells = bench.cells
WORDS = (
    "all heads",
    "quarter with most prefix attention",
    "the other three quarters",
    "random quarter",
)
augmented = list(dict.fromkeys(cells["arm"][cells["arm"] != "baseline"]))
words = {"baseline": "baseline"} | dict(zip(augmented, WORDS, strict=True))
scores = bench.scores(cells)
scores["arm"], cells["arm"] = scores["arm"].map(words), cells["arm"].map(words)
table = bench.table(scores, cells)

# %%
known = [
    paper_number("layers", method="prefix", variant=which, metric="acc")
    for which in ("none", "all")
]
arms = ({"arm": "baseline"}, {"arm": WORDS[0]})
bench.claim(
    "all heads control better than none: prefix", scores, *arms, "acc", "more", known[1] - known[0]
)

# %%
bench.write(table)
