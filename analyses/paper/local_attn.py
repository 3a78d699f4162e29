# %% [markdown]
# # Figure local_attn: does LaPA2 disturb the attention on near tokens?
#
# The share of the nearest k keys in the attention outside the prefix, against step. The paper: the
# curves nearly overlap. The exact law says they must in the first layer, where a bias on the prefix
# cannot change what the others share; deeper down queries and keys change. Two denominators: 1 -
# prefix (the paper's words), and without BOS, the attention sink, as the released code comes close
# to.
#
#     python analyses/paper/local_attn.py results/quick

# %%
import numpy as np
import pandas as pd

from analyses.lab.items import claim_for_arm, open_item
from analyses.lab.style import by_task, display_name, legend_below
from analyses.lab.tables import format_step_curves
from lapa2_interp.attention.tables import local_ratio_terms
from lapa2_interp.attention.trace import NEAREST
from lapa2_interp.plots import COLOURS, Drawing, band, plain_axes
from lapa2_interp.stats import bounds, paired_difference


def draw(table: pd.DataFrame) -> Drawing:
    """Figure local_attn: share of the nearest k keys outside the prefix against step, solid without
    and dashed with LaPA2.

    Args:
        table: tables/local_attn.csv: columns task, method, arm, k, without_bos, step, mean, low,
            high.
    """
    shown = table[~table["without_bos"].astype(bool)]
    figure, panels = by_task(shown, 2.9, 2.7)
    for task, panel, part in panels:
        for number, (k, line_of_k) in enumerate(part.groupby("k", sort=False), 1):
            for arm, line in line_of_k.groupby("arm", sort=False):
                colour = COLOURS[number]
                plain = arm == "baseline"
                name = f"k = {k}{'' if plain else ', with LaPA2'}"
                band(panel, line, "step", colour, ls="-" if plain else "--", lw=1.1, label=name)
        panel.set_title(f"{task}, {display_name(part['method'].iloc[0])}", fontsize=9)
        panel.set_ylim(0, 1.05)
        plain_axes(panel, "generation step t", "share of the nearest k")
    legend_below(figure, panels, 4)
    return figure


# %%
MARGIN = 0.02  # "nearly overlap" as a number: two points of the share
item = open_item(
    "local_attn",
    "Share of the nearest k keys in the attention outside the prefix",
    "sent_topic",
    "detox",
    draw=draw,
)
cells = item.cells
cells = cells[cells["method"] == cells["task"].map({"detox": "preadd"}).fillna("air-decoding")]


def local_ratio(trace, k, *, without_bos=False):
    """The local ratio of the first branch, [sample step]: means over heads, then the ratio."""
    parts = local_ratio_terms(trace.isel(branch=0), k, without_bos=without_bos)
    heads = [axis for axis in ("layer", "head") if axis in parts[0].dims]
    near, rest = (part.mean(heads, skipna=False) for part in parts)
    return (near / rest).to_numpy()


def ratios(trace, texts):
    """The local ratio of every k against step."""
    frames = []
    for k in NEAREST:
        for without_bos in (False, True):
            ratio = local_ratio(trace, k, without_bos=without_bos)
            ratio = ratio[:, ~np.isnan(ratio).any(axis=0)]
            low, high = bounds(ratio, texts["prompt"])
            columns = {
                "step": np.arange(ratio.shape[1]),
                "mean": ratio.mean(0),
                "low": low,
                "high": high,
            }
            frames.append(pd.DataFrame(columns).assign(k=k, without_bos=without_bos, n=len(ratio)))
    return pd.concat(frames, ignore_index=True)


table = item.data.step_curves(cells, ratios)

# %%
words = {tuple(where.values()): text for where, text, _ in item.data.groups(cells)}
values = {}
for arm, trace, texts in item.data.arm_traces(cells):
    for k in NEAREST:
        ratios = np.nanmean(local_ratio(trace, k), axis=1)
        setting = words[arm["model"], arm["task"], arm["method"], arm["variant"]]
        values.setdefault((setting, k), {})[arm["arm"]] = (ratios, texts["prompt"])
for (setting, k), arms in values.items():
    for after in [name for name in arms if name != "baseline"]:
        if "baseline" in arms:
            difference = paired_difference(*arms["baseline"], *arms[after])
            text = f"the share of the nearest {k} is the same within {MARGIN:g}: {setting}"
            item.add_difference(
                claim_for_arm(text, after, arms), "local ratio", "same", difference, margin=MARGIN
            )

# %%
shown = format_step_curves(table[(table["k"] == 4) & ~table["without_bos"]])
item.write(table, ["k = 4 of the paper's 2, 4, 6, 8, over 1 - prefix; the CSV has all."], shown)
item.draw()
