# %% [markdown]
# # Table sent_topic: sentiment and topic control at five lengths
#
# Every base method with and without LaPA2, and FreeCtrl. A text of 64 tokens is the beginning of
# the longer one, so one run serves all lengths. The paper: LaPA2 raises accuracy for nearly every
# method and length, more at greater lengths, at some cost in perplexity.
#
#     python analyses/paper/sent_topic.py results/quick

# %%
from analyses.lab.items import claim_for_arm, open_item
from analyses.lab.reported import paper_number

item = open_item(
    "sent_topic", "Sentiment and topic control: base methods, LaPA2 and FreeCtrl at several lengths"
)
cells = item.cells
lengths = item.data.lengths(cells)
scores = item.data.scores(cells, lengths)
table = item.table(scores, cells)

# %% [markdown]
# ## What the paper says of it, at the longest length of each task

# %%
for where, words, group in item.data.groups(cells[cells["alpha"] > 0]):
    longest = int(group["max_length"].max())
    at = {"table": "sent_topic", "task": where["task"], "method": where["method"], "length": 512}
    for arm in dict.fromkeys(group["arm"]):
        sides = [where | {"arm": side, "length": longest} for side in ("baseline", arm)]
        for metric, name in (("acc", "accuracy"), ("ppl", "perplexity")):
            known = [paper_number(**at, lapa2=lapa2, metric=metric) for lapa2 in (False, True)]
            text = f"LaPA2 {{raises}} {name}: {words}, {longest} tokens (paper: 512)"
            item.add_reported_claim(
                claim_for_arm(text, arm, group["arm"]),
                scores,
                *sides,
                metric,
                known,
            )

# %%
item.write(table)
