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
# # Figure augmentation_large: what does LaPA2 do to the attention on the prefix?
#
# NegPrompt and PREADD on detoxification (the paper: LLaMA-2 7B). It decays without LaPA2 and stays higher with it.
#
#     python analyses/augmentation_large.py results/quick && python figures/augmentation_large.py results/quick

# %%
import numpy as np

from lapa2_interp.experiments.items import open_bench
from lapa2_interp.stats import paired_difference
from lapa2_interp.trace import pooled, step_table

bench = open_bench("augmentation_large", "Attention on the prefix with and without LaPA2: detoxification", "detox")
cells = bench.cells
cells = cells[cells["method"].isin(["negprompt", "preadd"])]


def curve(trace, samples):
    """Prefix attention against step."""
    steps = step_table(trace, samples.assign(arm="one"))
    return steps[steps["name"] == "prefix"].drop(columns="arm")


table = bench.steps(cells, curve)

# %% [markdown]
# ## Is it higher at every step, and does it fall more slowly?
#
# Slower: the share of the first step's attention that is left at the last one, per text, is larger.

# %%
kept = {}
for arm, trace, samples in bench.curves(cells):
    prefix = pooled(trace, "prefix")[0]
    prefix = prefix[:, : int((~np.isnan(prefix).any(axis=0)).sum())]
    kept.setdefault((arm["model"], arm["task"], arm["method"]), {})[arm["arm"]] = (prefix, samples["prompt"])
for (_, task, method), arms in kept.items():
    augmented = next((name for name in arms if name != "baseline"), None)
    if augmented is None or "baseline" not in arms:
        continue
    (before, one), (after, two) = arms["baseline"], arms[augmented]
    last = min(before.shape[1], after.shape[1]) - 1
    for words, x, y in (
        ("LaPA2 raises prefix attention, mean over steps", before.mean(1), after.mean(1)),
        (f"with LaPA2 more of it is left at step {last}", before[:, last] / before[:, 0], after[:, last] / after[:, 0]),
    ):
        found = paired_difference(x, one, y, two)
        bench.note(f"{words}: {method}, {task}", "prefix attention", "more", found)

# %%
rows = table[table["step"].isin([0, 16, 64, 120, 248])]
shown = rows.assign(cell=[f"{m:.3f} [{a:.3f}, {b:.3f}]" for m, a, b in rows[["mean", "low", "high"]].to_numpy()])
shown = shown.pivot_table(
    index=["model", "task", "method", "arm"], columns="step", values="cell", aggfunc="first", sort=False
)
shown.columns = [f"step {step}" for step in shown.columns]
bench.write(
    table,
    ["Mean over layers and heads of the exact prefix span; of methods with several prefixes, the target's."],
    shown.reset_index().fillna(""),
)
