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
# # Figure alpha: how strong should the bias be?
#
# Control and perplexity against alpha for a direct, a Bayesian and a contrastive method. The paper (a figure without
# numbers): 1/2 is best for GPT-2+Prefix and Air-Decoding, 2 for PREADD.
#
#     python analyses/alpha.py results/quick && python figures/alpha.py results/quick

# %%
from lapa2_interp.experiments.items import open_bench

bench = open_bench("alpha", "The strength of the bias")
cells = bench.cells
scores = bench.scores(cells)
table = bench.table(scores, cells)
table["alpha"] = table["arm"].map(cells.drop_duplicates("arm").set_index("arm")["alpha"])

# %%
BEST = {"prefix": 0.5, "air-decoding": 0.5, "preadd": 2.0}
for (task, method), group in cells.groupby(["task", "method"], sort=False):
    metric, better = ("tox", "less") if task == "detox" else ("acc", "more")
    arms = group.drop_duplicates("alpha").set_index("alpha")["arm"].to_dict()
    sides = {alpha: {"task": task, "method": method, "arm": arm} for alpha, arm in arms.items()}
    best = BEST[method]
    bench.claim(f"alpha {best:g} controls better than 0: {method}", scores, sides[0.0], sides[best], metric, better)
    far = best if best < 2 else 0.0
    words = f"perplexity grows from alpha {best:g} to 2" if best < 2 else "perplexity falls up to alpha 2"
    bench.claim(f"{words}: {method}", scores, sides[far], sides[2.0], "ppl", "more" if best < 2 else "less")

# %%
bench.write(table)
