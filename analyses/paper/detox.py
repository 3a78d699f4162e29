# %% [markdown]
# # Table detox: detoxification by negative and contrastive prompts
#
# NegPrompt, PREADD and Palette with and without LaPA2, and DATG. The paper: LaPA2 lowers toxicity
# everywhere, and PREADD's perplexity too.
#
#     python analyses/paper/detox.py results/quick

# %%
from analyses.lab.items import claim_for_arm, open_item
from analyses.lab.reported import PAPER_MODELS, paper_number

item = open_item("detox", "Detoxification: base methods, LaPA2 and DATG")
cells = item.cells
longest = int(cells["max_length"].max())
lengths = item.data.lengths(cells) if longest > 128 else (longest // 2, longest)
scores = item.data.scores(cells, lengths)
table = item.table(scores, cells)

# %%
for where, words, group in item.data.groups(cells[cells["alpha"] > 0]):
    own = int(group["max_length"].max())
    theirs = PAPER_MODELS.get(where["model"], "llama-2-7b")
    at = {"table": "detox", "model": theirs, "method": where["method"], "length": 512}
    for arm in dict.fromkeys(group["arm"]):
        sides = [where | {"arm": side, "length": own} for side in ("baseline", arm)]
        for metric, name in (("tox", "toxicity"), ("ppl", "perplexity")):
            known = [paper_number(**at, lapa2=lapa2, metric=metric) for lapa2 in (False, True)]
            text = f"LaPA2 {{raises}} {name}: {words} (paper: {theirs}, 512)"
            item.add_reported_claim(
                claim_for_arm(text, arm, group["arm"]),
                scores,
                *sides,
                metric,
                known,
            )

# %%
item.write(table)
