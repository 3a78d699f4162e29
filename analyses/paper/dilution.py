# %% [markdown]
# # Figure dilution: does attention on the prefix fade as 1/l?
#
# Prefix attention of the base methods, mean over layers and heads, against step, with C/(t + D)
# fitted to each curve. The paper: it decays monotonically and the fit is close (it gives no
# numbers).
#
#     python analyses/paper/dilution.py results/quick

# %%
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from analyses.lab.items import open_item, prefix_step_table
from analyses.lab.style import by_task, display_name, legend_below, style_of
from lapa2_interp.attention.tables import pooled
from lapa2_interp.bias.theory import DecayFit, fit_decay
from lapa2_interp.plots import Drawing, band, plain_axes
from lapa2_interp.stats import paired_difference


def draw(table: pd.DataFrame, fits: pd.DataFrame) -> Drawing:
    """Figure dilution: prefix attention against step, C/(t + D) dotted, one panel per task.

    Args:
        table: tables/dilution.csv: columns task, method, name, step, mean, low, high.
        fits: tables/dilution.fits.csv: columns task, method, C, D, R2.
    """
    figure, panels = by_task(table[table["name"] == "prefix"])
    for task, panel, part in panels:
        for i, (method, line) in enumerate(part.groupby("method", sort=False)):
            colour, _ = style_of(str(method))
            band(panel, line, "step", colour, lw=1.3, label=display_name(str(method)))
            own = (fits["task"] == line["task"].iloc[0]) & (fits["model"] == line["model"].iloc[0])
            c, d, r2 = fits.loc[own & (fits["method"] == method), ["C", "D", "R2"]].iloc[0]
            if not np.isnan(c):
                panel.plot(line["step"], c / (line["step"] + d), color=colour, ls=":", lw=1.6)
                alignment: dict[str, Any] = {
                    "ha": "right",
                    "va": "top",
                    "transform": panel.transAxes,
                }
                panel.text(
                    0.98, 0.98 - 0.09 * i, f"R² {r2:.2f}", color=colour, fontsize=7, **alignment
                )
        panel.set_ylim(bottom=0)
        panel.set_title(task, fontsize=9)
        plain_axes(panel, "generation step t", "attention on the prefix")
    legend_below(figure, panels)
    return figure


# %%
item = open_item(
    "dilution",
    "Attention on the prefix against step, and C/(t + D)",
    "sent_topic",
    draw=draw,
    further_tables=("fits",),
)
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
item.draw()
