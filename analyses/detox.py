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
# # Table detox: detoxification by negative and contrastive prompts
#
# NegPrompt, PREADD and Palette with and without LaPA2, and DATG. The paper: LaPA2 lowers toxicity everywhere, and
# PREADD's perplexity too.
#
#     python analyses/detox.py results/quick

# %%
from lapa2_interp.experiments.items import PAPER_MODELS, open_bench, paper_number

bench = open_bench("detox", "Detoxification: base methods, LaPA2 and DATG")
cells = bench.cells
longest = int(cells["max_length"].max())
lengths = bench.lengths(cells) if longest > 128 else (longest // 2, longest)
scores = bench.scores(cells, lengths)
table = bench.table(scores, cells)

# %%
for (model, method), group in cells[cells["alpha"] > 0].groupby(["model", "method"], sort=False):
    arms = [
        {"model": model, "method": method, "arm": arm, "length": longest} for arm in ("baseline", group["arm"].iloc[0])
    ]
    theirs = PAPER_MODELS.get(model, "llama-2-7b")
    for metric, words in (("tox", "toxicity"), ("ppl", "perplexity")):
        known = [
            paper_number("detox", model=theirs, method=method, lapa2=lapa2, length=512, metric=metric)
            for lapa2 in (False, True)
        ]
        direction = "more" if known[1] > known[0] else "less"
        text = f"LaPA2 {'raises' if direction == 'more' else 'lowers'} {words}: {method} (paper: {theirs}, 512)"
        bench.claim(text, scores, *arms, metric, direction, known[1] - known[0])

# %%
bench.write(table)
