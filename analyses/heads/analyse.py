# %% [markdown]
# # Head scope at equal attention
#
# Not in the paper, which augments all heads of all layers, or a half of the layers. Here 24 heads
# by knock-out, by attention, at random or of lowest effect are augmented, and the paper's layer
# scopes. Every arm has the alpha that gives the prefix the same mean attention, so that only its
# place differs (`python analyses/heads/make_grid.py` made the grid).
#
#     lapa2 sweep analyses/heads/heads.toml --out results/quick
#     python analyses/heads/analyse.py results/quick

# %%
from analyses.heads.make_grid import CHOSEN, named_sets, scope
from analyses.lab.items import open_item

item = open_item("heads", "Head scope at equal attention on the prefix")
cells = item.cells
known = named_sets()
scopes = {key: scope(item.run.by_key[key], known) for key in cells["key"]}
arms = dict(zip(cells["arm"], map(scopes.get, cells["key"]), strict=True))
scores = item.data.scores(cells)
scores["arm"], cells["arm"] = scores["arm"].map(arms), cells["arm"].map(arms)
table, shown = item.table_with_attention(cells, scores, {"prefix": "attention on prefix"})

# %% [markdown]
# The draws at random are one arm in the claims.

# %%
drawn = scores["arm"].str.contains("at random")
pooled_scores = scores.assign(arm=scores["arm"].mask(drawn, "at random"))
OTHERS = (
    "baseline",
    "all heads",
    "24 heads by attention",
    "at random",
    "24 heads of lowest effect",
)
there = set(pooled_scores["arm"])
for opponent in OTHERS:
    if {opponent, CHOSEN} <= there:
        text = f"{CHOSEN} control better than {opponent}: prefix"
        sides = ({"arm": opponent}, {"arm": CHOSEN})
        item.add_claim(text, pooled_scores, *sides, "acc", "more", whose="ours")

# %%
note = (
    "Ours, not the paper's. Every arm has the alpha at which teacher-forced texts of the baseline"
    " give the prefix the same mean attention; what its own texts give stands in the table. Heads"
    " by knock-out and those of lowest effect were chosen on the same prompts, so what they gain is"
    " no held-out result."
)
item.write(table, [note], shown)
