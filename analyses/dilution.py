# %% [markdown]
# # Figure dilution: does attention on the prefix fade as 1/l?
#
# Prefix attention of the base methods, mean over layers and heads, against step, with C/(t + D)
# fitted to each curve. The paper: it decays monotonically and the fit is close (it gives no
# numbers).
#
#     python analyses/dilution.py results/quick && python figures/dilution.py results/quick

# %%
from functools import partial

import numpy as np
import pandas as pd

from lapa2_interp.attention.tables import pooled
from lapa2_interp.bias.theory import DecayFit, fit_decay
from analyses.lab.items import open_item, prefix_step_table
from lapa2_interp.stats import paired_difference

item = open_item("dilution", "Attention on the prefix against step, and C/(t + D)", "sent_topic")
cells = item.cells
cells = cells[(cells["alpha"] == 0) & (cells["method"] != "freectrl")]
table = item.data.step_curves(cells, partial(prefix_step_table, names=["prefix", "bos"]))

# %% [markdown]
# ## The fits, on every step, and is the last step below the first?

# %%
words = {tuple(where.values()): text for where, text, _ in item.data.groups(cells)}
fits = []
for arm, trace, texts in item.data.arm_traces(cells):
    prefix = pooled(trace, "prefix")[0]
    prefix = prefix[:, ~np.isnan(prefix).any(axis=0)]
    mean, last = prefix.mean(axis=0), prefix.shape[1] - 1
    fit = fit_decay(np.arange(last + 1), mean) if last >= 2 else DecayFit(*[np.nan] * 3)
    falls = float((np.diff(mean) < 0).mean())
    setting = {name: arm[name] for name in ("model", "task", "method", "variant")}
    fits.append(
        setting | {"C": fit.c, "D": fit.d, "R2": fit.r2, "steps that fall": falls, "n": len(prefix)}
    )
    difference = paired_difference(prefix[:, 0], texts["prompt"], prefix[:, last], texts["prompt"])
    text = (
        f"attention on the prefix is less at step {last} than at step 0:"
        f" {words[tuple(setting.values())]}"
    )
    item.add_difference(text, "prefix attention", "less", difference)
fits = pd.DataFrame(fits)
if not fits["variant"].any():
    del fits["variant"]

# %%
shown = fits.assign(
    **{
        name: [f"{value:.3f}" for value in fits[name]]
        for name in ("C", "D", "R2", "steps that fall")
    }
)
note = (
    "Mean over layers and heads of the exact prefix span, 95 % bands over prompts; C/(t + D) by"
    " least squares."
)
item.write(table, [note], shown)
fits.to_csv(item.out / "tables" / "dilution.fits.csv", index=False, float_format="%.6g")
