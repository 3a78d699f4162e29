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
# # Table hard_prefix_robustness: does the wording of the prefix matter?
#
# "Very positive:", "Positive:" and "A positive text:", with and without LaPA2. The paper: LaPA2 helps under each, most
# under the first.
#
#     python analyses/hard_prefix_robustness.py results/quick

# %%
from lapa2_interp.experiments.items import open_bench, paper_number
from lapa2_interp.stats import paired_difference

bench = open_bench("hard_prefix_robustness", "The wording of the hard prefix", "hard_prefix")
cells = bench.cells
scores = bench.scores(cells)
THEIRS = {"": "Very positive:", "prefix {Attribute}:": "Positive:", "prefix A {attribute} text:": "A positive text:"}
table = bench.table(scores, cells, THEIRS)
table["variant"] = table["variant"].map(THEIRS)

# %%
means = {}
for (method, variant), group in cells.groupby(["method", "variant"], sort=False):
    arms = [{"method": method, "variant": variant, "arm": arm} for arm in dict.fromkeys(group["arm"])]
    known = [
        paper_number("hard_prefix", method=method, variant=THEIRS[variant], lapa2=lapa2, metric="acc")
        for lapa2 in (False, True)
    ]
    bench.claim(
        f"LaPA2 raises accuracy under {THEIRS[variant]!r}: {method}", scores, *arms, "acc", "more", known[1] - known[0]
    )
    part = scores[(scores["method"] == method) & (scores["variant"] == variant) & (scores["metric"] == "acc")]
    if part["arm"].nunique() == 2:
        by = part.groupby(["arm", "prompt"])["value"].mean().unstack("arm")
        means[method, variant] = by.drop(columns="baseline").iloc[:, 0] - by["baseline"]
for method in dict.fromkeys(cells["method"]):
    if (method, "") in means and (method, "prefix A {attribute} text:") in means:
        first, last = means[method, ""], means[method, "prefix A {attribute} text:"]
        found = paired_difference(last.to_numpy(), last.index.to_numpy(), first.to_numpy(), first.index.to_numpy())
        text = f"the gain is larger under 'Very positive:' than under 'A positive text:': {method}"
        gains = [
            paper_number("hard_prefix", method=method, variant=each, lapa2=True, metric="acc")
            - paper_number("hard_prefix", method=method, variant=each, lapa2=False, metric="acc")
            for each in ("A positive text:", "Very positive:")
        ]
        bench.note(text, "acc", "more", found, paper=gains[1] - gains[0])

# %%
bench.write(table)
