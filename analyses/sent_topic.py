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
# # Table sent_topic: sentiment and topic control at five lengths
#
# Every base method with and without LaPA2, and FreeCtrl. A text of 64 tokens is the beginning of the longer one, so one
# run serves all lengths. The paper: LaPA2 raises accuracy for nearly every method and length, more at greater lengths,
# at some cost in perplexity.
#
#     python analyses/sent_topic.py results/quick

# %%
from lapa2_interp.experiments.items import open_bench, paper_number

bench = open_bench("sent_topic", "Sentiment and topic control: base methods, LaPA2 and FreeCtrl at several lengths")
cells = bench.cells
lengths = bench.lengths(cells)
scores = bench.scores(cells, lengths)
table = bench.table(scores, cells)

# %% [markdown]
# ## What the paper says of it, at the longest length of each task

# %%
for (task, method), group in cells[cells["alpha"] > 0].groupby(["task", "method"], sort=False):
    longest = int(group["max_length"].max())
    arms = [
        {"task": task, "method": method, "arm": arm, "length": longest} for arm in ("baseline", group["arm"].iloc[0])
    ]
    for metric, words in (("acc", "accuracy"), ("ppl", "perplexity")):
        known = [
            paper_number("sent_topic", task=task, method=method, lapa2=lapa2, length=512, metric=metric)
            for lapa2 in (False, True)
        ]
        expected = "more" if known[1] > known[0] else "less"
        text = f"LaPA2 {'raises' if expected == 'more' else 'lowers'} {words}: {method}, {task}, {longest} tokens (paper: 512)"
        bench.claim(text, scores, *arms, metric, expected, known[1] - known[0])

# %%
bench.write(table)
