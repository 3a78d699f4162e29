# %% [markdown]
# # Figure alpha: how strong should the bias be?
#
# Control and perplexity against alpha for a direct, a Bayesian and a contrastive method. The paper
# (a figure without numbers): 1/2 is best for GPT-2+Prefix and Air-Decoding, 2 for PREADD.
#
#     python analyses/alpha.py results/quick && python figures/alpha.py results/quick

# %%
from analyses.lab.items import open_item

item = open_item("alpha", "The strength of the bias")
cells = item.cells
scores = item.data.scores(cells)
table = item.table(
    scores, cells, {"baseline": "none", "alpha 0.5 paper": "log", "alpha 2 paper": "log"}
)
table["alpha"] = table["arm"].map(cells.drop_duplicates("arm").set_index("arm")["alpha"])

# %%
BEST = {"prefix": 0.5, "air-decoding": 0.5, "preadd": 2.0}
for where, words, group in item.data.groups(cells):
    metric, better = ("tox", "less") if where["task"] == "detox" else ("acc", "more")
    arms = group.drop_duplicates("alpha")[["alpha", "arm"]].to_numpy()
    sides = {alpha: where | {"arm": arm} for alpha, arm in arms}
    best = BEST.get(where["method"])
    if best not in sides:
        continue
    # 1/2 is the paper's best trade with perplexity, 2 is PREADD's least toxic.
    for side in sorted({0.0} & set(sides) if best < 2 else set(sides) - {best}):
        text = f"alpha {best:g} controls better than {side:g}: {words}"
        item.add_claim(text, scores, sides[side], sides[best], metric, better)
    if best < 2 and 2.0 in sides:
        text = f"perplexity grows from alpha {best:g} to 2: {words}"
        item.add_claim(text, scores, sides[best], sides[2.0], "ppl", "more")

# %%
item.write(table)
