# %% [markdown]
# # Which heads keep the prefix in 8,000 tokens?
#
# The paper derives that attention on the prefix decays as 1/l, and as l^(alpha-1) under LaPA2, for
# scores that do not change. In a real model scores change. Texts of 8,000 tokens, written without
# LaPA2, are read twice: without it and with it. On the same text, and with the same scores, LaPA2
# multiplies the odds of the prefix by exactly (l/n)^alpha. Where the odds grow by less, later
# layers have taken a part back: what they read has changed.
#
#     lapa2 sweep analyses/long/deep.toml --out results/quick
#     python analyses/long/deep.py results/quick

# %%
from itertools import pairwise

import numpy as np
import pandas as pd

from analyses.lab.items import open_item
from analyses.lab.style import name_ends
from lapa2_interp import Augmentation, Layout, load_model
from lapa2_interp.errors import RunError
from lapa2_interp.files import write_text
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.plots import COLOURS, Drawing, band, new_figure, plain_axes
from lapa2_interp.progress import progress_bar
from lapa2_interp.runs.run import finished_cell
from lapa2_interp.stats import mean_interval, paired_difference
from lapa2_interp.table_formats import format_interval


def draw(table: pd.DataFrame, heads: pd.DataFrame) -> Drawing:
    """Figure deep: left, attention on the prefix against l, with the power laws of the paper;
    middle, by layer, which part of the law is left in three windows of l; right, the eight heads
    with most attention on the prefix in the last window, without LaPA2.

    Args:
        table: tables/deep.csv: columns quantity, l, upto, alpha, layer, mean, low, high.
        heads: tables/deep.heads.csv: columns l, alpha, layer, head, share.
    """
    figure = new_figure(7.6, 3.1)
    figure.suptitle(
        "In long texts attention on the prefix falls faster than derived", fontsize=9, x=0.02,
        ha="left",
    )  # fmt: skip
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.35, 1.25, 0.75))
    shares = table[table["quantity"] == "share"]
    shares = shares.assign(middle=np.sqrt(shares["l_kv"] * shares["upto"]))
    ends = {}
    for colour, (alpha, part) in zip(
        (COLOURS[0], COLOURS[2]), shares.groupby("alpha"), strict=False
    ):
        band(left, part, "middle", colour, lw=1.4, marker="o", ms=3)
        first, last = part.iloc[0], part.iloc[-1]
        law = first["mean"] * (part["middle"] / first["middle"]) ** (alpha - 1)
        left.plot(part["middle"], law, color=colour, lw=0.8, ls=":")
        name = f"LaPA²,\nalpha {alpha:g}" if alpha else "no bias"
        ends[name] = (last["middle"], last["mean"], colour)
        ends[f"derived{' ' * bool(alpha)}"] = (last["middle"], law.iloc[-1], colour)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlim(right=6 * shares["middle"].max())
    plain_axes(left, "number of keys", "attention on the prefix")
    name_ends(left, ends, 0.76, 0.07)
    left_law = table[table["quantity"] == "part of the law that is left"]
    starts, ends = sorted(set(left_law["l_kv"])), {}
    for number, l in enumerate(dict.fromkeys((starts[0], starts[len(starts) // 2], starts[-1]))):
        colour, part = COLOURS[(1, 3, 4)[number]], left_law[left_law["l_kv"] == l]
        band(middle, part, "layer", colour, lw=1.2)
        ends[f"from {l:,}\nkeys"] = (*part[["layer", "mean"]].iloc[-1], colour)
    middle.axhline(1, color="#999999", lw=0.8, zorder=0)
    middle.set_xlim(right=1.5 * left_law["layer"].max())
    middle.set_xticks(range(0, int(left_law["layer"].max()) + 1, 10))
    middle.set_ylim(top=middle.get_ylim()[1] + 0.015)
    plain_axes(middle, "layer", "part of LaPA²'s bias that is left")
    name_ends(middle, ends, 0.74, 0.12)
    most = heads[(heads["l_kv"] == heads["l_kv"].max()) & (heads["alpha"] == 0)]
    most = most.nlargest(8, "share")
    names = [f"{row.layer:g}.{row.head:g}" for row in most.itertuples()]
    right.barh(names, most["share"], color="0.6")
    right.invert_yaxis()
    right.locator_params(axis="x", nbins=2)
    plain_axes(right, f"attention from\n{most['l_kv'].iloc[0]:,} keys, no bias", "layer.head")
    return figure


# %%
ALPHA = 0.5
item = open_item(
    "deep",
    "Attention on the prefix in texts of 8,000 tokens, head by head",
    draw=draw,
    further_tables=("heads",),
)
cells = item.cells
finished = cells[cells["state"] == "finished"]
if not len(finished):
    raise RunError(
        f"{item.run.name} has no finished cell of deep.toml; {item.run.cells_from} says why"
    )

# %% [markdown]
# Teacher-forced passes in float32. Stored are means over windows of l, each twice as long as the
# one before.
#
# - `share`: attention on the prefix.
# - `log_odds`: ln(share / (1 - share)).
# - `law`: alpha ln(l/n), what LaPA2 adds to them while scores do not change.
# - `at`: the harmonic mean of the number of keys, at which a share that is c/l has its mean.


# %%
def windows(longest):
    """The least l of each window, and one past the end; short test texts begin at 8."""
    edges = [64 if longest >= 192 else 8]
    while 3 * edges[-1] < longest:
        edges.append(2 * edges[-1])
    return [*edges, longest + 1]


def read(model, layout, text, edges, bar):
    """One row per alpha, window, layer and head."""
    rows = []
    for alpha in (0.0, ALPHA):
        rule = Augmentation(alpha=alpha)
        trace = teacher_forced(model, layout, [text], rule, progress=bar)
        share = trace["prefix"][0, 0].to_numpy().astype(np.float64)  # step layer head
        keys = trace["l_kv"][0, 0].to_numpy()
        law = layout.bias(rule, len(layout) - 1 + np.arange(len(share)))
        with np.errstate(divide="ignore"):
            odds = np.log(share) - np.log1p(-share)
        for low, high in pairwise(edges):
            inside = (keys >= low) & (keys < high)
            if inside.any():
                means = [values[inside].mean(axis=0) for values in (share, odds)]
                rows += [
                    {"alpha": alpha, "l_kv": low, "layer": layer, "head": head}
                    | {"share": means[0][layer, head], "log_odds": means[1][layer, head]}
                    | {"law": law[inside].mean(), "at": 1 / (1 / keys[inside]).mean()}
                    for layer, head in np.ndindex(*means[0].shape)
                ]
    return rows


(name,) = finished["model"].unique()
model = load_model(name, dtype=item.data.dtype, device=item.data.device)
texts = [
    (key, Layout.of(model.tokenizer, cell.task.prefix(cell.attribute), made.prompt), made)
    for key, cell in zip(finished["key"], map(item.run.by_key.get, finished["key"]), strict=True)
    for made in finished_cell(item.run, key).texts.itertuples()
]
edges = windows(max(layout.n_live + len(made.tokens) - 1 for _, layout, made in texts))
rows = []
n_steps = 2 * sum(len(made.tokens) - 1 for _, _, made in texts)
with progress_bar(n_steps, "reading", "step") as bar:
    for key, layout, made in texts:
        steps = read(model, layout, made.tokens, edges, bar)
        own = {"text": f"{key} {made.prompt} {made.sample}", "prompt": made.prompt}
        rows += [own | row for row in steps]
heads = pd.DataFrame(rows)
means = heads.groupby(["l_kv", "alpha", "layer", "head"], as_index=False)[
    ["share", "log_odds", "law"]
]
means = means.mean()
write_text(item.out / "tables" / "deep.heads.csv", means.to_csv(index=False, float_format="%.6g"))

# %% [markdown]
# By window: the mean share over layers and heads; its slope from the window before, where -1 is
# 1/l; and which part of the law is left in the odds, layer by layer.

# %%
ends = dict(pairwise(edges))
prompt_of = heads.drop_duplicates("text").set_index("text")["prompt"]
lengths = heads.groupby(["text", "l_kv"])["at"].first()
by_text = heads.groupby(["text", "l_kv", "alpha"])["share"].mean().unstack("alpha")
each_head = ["text", "l_kv", "layer", "head"]
odds = heads.pivot_table(index=each_head, columns="alpha", values="log_odds")
law = heads[heads["alpha"] == ALPHA].set_index(each_head)["law"]
left = ((odds[ALPHA] - odds[0.0]) / law).groupby(["text", "l_kv", "layer"]).mean().rename("left")


def prompts(values):
    """The prompts of texts, which intervals resample."""
    return prompt_of[values.index.get_level_values("text")].to_numpy()


def slope(shares, least, most):
    """Slope of ln share against ln l, from one window to another, text by text."""
    one, two = (lengths.xs(l, level="l_kv") for l in (least, most))
    return np.log(shares[most] / shares[least]) / np.log(two / one)


def row(quantity, l, values, **more):
    interval = mean_interval(values.to_numpy(), prompts(values))
    where = {"quantity": quantity, "l_kv": l, "upto": ends[l] - 1, **more}
    return where | interval.columns | {"n": interval.n}


table = []
for l, part in by_text.groupby("l_kv"):
    for alpha in (0.0, ALPHA):
        table.append(row("share", l, part[alpha], alpha=alpha))
        if l > edges[0]:
            slopes = slope(by_text[alpha].unstack("l_kv"), l // 2, l).dropna()
            table.append(row("slope", l, slopes, alpha=alpha))
for (l, layer), part in left.groupby(["l_kv", "layer"]):
    table.append(row("part of the law that is left", l, part, layer=layer))
table = pd.DataFrame(table)
table[["model", "task", "method", "arm"]] = [name, "sentiment", "prefix", "baseline"]

# %% [markdown]
# The claims: what the paper derives for fixed scores; and ours, where a model departs from it.

# %%
starts = edges[:-1]
first, last = starts[0], starts[-1]


def add_claim(text, quantity, expected, values, against, margin=0.0, whose="ours"):
    """Add a claim on a number of every text, against another or against one number."""
    values = values.dropna()
    names = prompts(values)
    reference = np.broadcast_to(against, len(values))
    difference = paired_difference(reference, names, values.to_numpy(), names)
    item.add_difference(text, quantity, expected, difference, margin=margin, whose=whose)


for alpha, words in ((0.0, "without LaPA2"), (ALPHA, f"with LaPA2, alpha {ALPHA:g}")):
    shares = by_text[alpha].unstack("l_kv")
    for least, most in pairwise(dict.fromkeys((first, starts[len(starts) // 2], last))):
        text = f"from l = {least} to {most} attention falls as l^{alpha - 1:g}: {words}"
        slopes = slope(shares, least, most)
        add_claim(text, "slope", "same", slopes, alpha - 1, margin=0.1, whose="paper")
in_first = left.xs(0, level="layer").groupby("text").mean()
later = left[left.index.get_level_values("layer") > 0].groupby("text").mean()
add_claim("in layer 0 the law holds to 1 %", "part of the law", "same", in_first, 1.0, margin=0.01)
add_claim("later layers take a part of the law back", "part of the law", "less", later, 1.0)

# %%
bands = np.minimum(left.index.get_level_values("layer") * 3 // model.cfg.n_layers, 2)
names = ["layer 0", *(f"{where} third" for where in ("lower", "middle", "upper"))]
where = np.where(left.index.get_level_values("layer") == 0, 0, bands + 1)
wide = left.groupby([left.index.get_level_values("l_kv"), where]).mean().unstack()
wide.columns = [f"law left, {names[i]}" for i in wide.columns]
shown = pd.DataFrame({"l_kv": [f"{low}-{ends[low] - 1}" for low in wide.index]})
for quantity in ("share", "slope"):
    for alpha in (0.0, ALPHA):
        part = table[(table["quantity"] == quantity) & (table["alpha"] == alpha)].set_index("l_kv")
        shown[f"{quantity}, alpha {alpha:g}"] = [
            format_interval(*part.loc[l, ["mean", "low", "high"]], ".2g") if l in part.index else ""
            for l in wide.index
        ]
shown = shown.join(wide.round(2).reset_index(drop=True))
at_end = means[(means["l_kv"] == last) & (means["alpha"] == 0)].nlargest(8, "share")
best = ", ".join(f"{int(x.layer)}.{int(x.head)} {x.share:.3f}" for x in at_end.itertuples())
notes = [
    f"{len(texts)} texts, read in {item.data.dtype}. Slope: of ln share against ln l, from the"
    " window before; -1 is 1/l. Law left: what LaPA2 adds to the log odds of the prefix, as a part"
    f" of alpha ln(l/n), alpha {ALPHA:g}.",
    f"The heads with most attention on the prefix at l = {last} and more: {best}.",
]
item.write(table.assign(metric=table["quantity"]), notes, formatted=shown)
item.draw()
