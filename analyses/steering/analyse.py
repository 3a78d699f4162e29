# %% [markdown]
# # Does any steering give more control than LaPA2 at equal perplexity?
#
# LaPA2, LaPA2 on chosen tokens, LaPA2 in chosen heads, and a set-point, each at three strengths.
# They are compared at 1.1 and 1.25 times the baseline's perplexity, on each way's own curve. Texts
# that may not say a word of their prefix are compared separately, and only at 1.25 times: their
# curves have no weak arms.
#
#     make steering-prompts DATA=FOLDER
#     lapa2 sweep analyses/steering/steering.toml --out results/steering
#     python analyses/steering/analyse.py results/steering
#
# `--grids NAME` reads a custom grid with the same, or other, ways to steer. The scores of all texts
# go to tables/steering.texts.parquet, without the texts: a grid that is run in parts, on several
# machines (`lapa2 sweep analyses/steering/steering.toml --only task=topic`), is compared as a whole
# with `--beside` the tables of its other parts.

# %%
from hashlib import sha256
from itertools import product

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analyses.lab.items import open_item
from analyses.lab.output import item_json
from analyses.lab.scripts import DEFAULT_SCORERS
from analyses.lab.style import METRIC_LABELS, WAYS, legend_below
from lapa2_interp.bias.recipes import name_families, strength
from lapa2_interp.errors import RunError, pluralize
from lapa2_interp.files import atomic_write, write_text
from lapa2_interp.plots import COLOURS, Drawing, crosses, new_figure, plain_axes
from lapa2_interp.scoring.equal_perplexity import (
    BASELINE,
    MIN_REACHED,
    RATIOS,
    SETTING_COLUMNS,
    SteeringCurves,
    add_caveats,
    add_verdicts,
    distinguishing_columns,
    format_table,
)
from lapa2_interp.table_formats import as_markdown

REFERENCE = "lapa2"
SHOWN = {
    "acc": "by adapter",
    "acc (linear)": "by linear",
    "acc masked": "words hidden,\nby adapter",
    "acc masked (linear)": "words hidden,\nby linear",
}
WORDS = {name: words for name, (words, _, _) in WAYS.items()} | {
    "all words": "any words",
    "prefix words banned": "prefix's words banned",
}
"""What the figure calls ways and texts."""


def draw(table: pd.DataFrame, curves: pd.DataFrame, equal: pd.DataFrame) -> Drawing:
    """Figure steering: one row per task (and variant, where there are several). Left: accuracy
    against perplexity, a curve per way to steer, from the baseline through its strengths; dotted:
    the perplexities at which they are compared. Right, a panel for each: differences from LaPA2
    there, with 95 % intervals; open where Holm's p is 0.05 or more. All attributes together.

    Args:
        table: tables/steering.csv, which is not drawn.
        curves: tables/steering.curves.csv.
        equal: tables/steering.equal.csv.
    """
    curves, equal = (
        table[table["attribute"] == "all"].assign(
            variant=table["variant"].astype(object).fillna("")
        )
        for table in (curves, equal)
    )
    keys = distinguishing_columns(curves, ["task", "words", "model", "method", "variant"])
    names = [REFERENCE, *(name for name in dict.fromkeys(equal["family"]) if name != REFERENCE)]
    looks = {name: WAYS.get(name, ("", COLOURS[4], "P"))[1:] for name in names}
    groups = list(curves.groupby(keys, sort=False))
    differences = equal.groupby(keys, sort=False)
    ratios = list(dict.fromkeys(equal["ratio"]))
    figure = new_figure(7.2, 2.5 * len(groups) + 0.3)
    panels = figure.subplots(
        len(groups), 1 + len(ratios), squeeze=False, width_ratios=(1.6, *(1 for _ in ratios))
    )
    for (values, part), (left, *right) in zip(groups, panels, strict=True):
        same = differences.get_group(values)
        title = ", ".join(WORDS.get(str(value), str(value)) for value in values if value)
        _curves(left, part, same, looks, title)
        shown = same.loc[same["metric"].isin(list(SHOWN)), ["difference_low", "difference_high"]]
        reach = [-1.0, 1.0, *shown.to_numpy()[shown.notna().to_numpy()]]
        there = list(dict.fromkeys(same["ratio"]))  # banned words are compared at one alone
        for panel, ratio in zip(right, there, strict=False):
            _differences(panel, same[same["ratio"] == ratio], looks)
            panel.set_xlim(min(reach) - 1, max(reach) + 1)
            panel.set_title(f"at {ratio:g} times the perplexity", fontsize=8)
        for panel in right[1:]:
            panel.set_yticklabels([])
        for panel in right[len(there) :]:
            panel.set_visible(False)
    legend_below(figure, [("", panel, curves) for panel in panels[:, 0]], 5)
    return figure


def _curves(
    axes: Axes,
    curves: pd.DataFrame,
    equal: pd.DataFrame,
    looks: dict[str, tuple[str, str]],
    title: str,
) -> None:
    rows = curves[curves["metric"] == "acc"]
    base = rows[rows["family"] == BASELINE]
    for name, (colour, marker) in looks.items():
        own = rows[rows["family"] == name].sort_values("strength")
        if len(own):
            line = pd.concat([base, own])
            axes.plot(line["perplexity"], line["mean"], color=colour, lw=0.9)
            _crosses(axes, own, color=colour, marker=marker, label=WORDS.get(name, name))
    _crosses(axes, base, color="black", marker="*", label=WORDS[BASELINE])
    for perplexity in dict.fromkeys(equal["perplexity"]):
        axes.axvline(perplexity, color="#999999", lw=0.8, ls=":", zorder=0)
    axes.set_xscale("log")
    ticks = np.unique(np.round(np.geomspace(*axes.get_xlim(), 5)[:-1]))
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_title(title, fontsize=9)
    plain_axes(axes, "perplexity", METRIC_LABELS["acc"])


def _crosses(axes: Axes, rows: pd.DataFrame, **look: str) -> None:
    x = rows[["perplexity", "perplexity_low", "perplexity_high"]]
    crosses(axes, x.set_axis(["mean", "low", "high"], axis=1), rows, ls="", ms=4, lw=0.7, **look)


def _differences(axes: Axes, equal: pd.DataFrame, looks: dict[str, tuple[str, str]]) -> None:
    others = [name for name in looks if name != REFERENCE]
    rows = equal.set_index(["metric", "family"])
    metrics = {name: label for name, label in SHOWN.items() if name in set(equal["metric"])}
    between = len(others) + 1
    for i, metric in enumerate(metrics):
        for height, name in enumerate(others, i * between):
            if (metric, name) not in rows.index:
                continue
            row, (colour, marker) = rows.loc[(metric, name)], looks[name]
            x = row["difference"]
            if np.isnan(x):
                axes.text(0.99, height, "not comparable", color=colour, fontsize=5, ha="right",
                          va="center", transform=axes.get_yaxis_transform())  # fmt: skip
                continue
            away = [[x - row["difference_low"]], [row["difference_high"] - x]]
            face = colour if row["p_holm"] < 0.05 else "white"
            axes.errorbar(
                x, height, xerr=away, color=colour, marker=marker, ms=3.5, mfc=face, lw=0.9
            )
    axes.axvline(0, color="#999999", lw=0.8, zorder=0)
    middle = (len(others) - 1) / 2
    axes.set_yticks([i * between + middle for i in range(len(metrics))], list(metrics.values()))
    axes.set_ylim(max(1, len(metrics)) * between - 1, -1)
    plain_axes(axes, "points above all heads\n(full: shown after correction)", "")


# %%
TITLE = "Control at equal perplexity"
REFERENCE, ALL_WORDS = "lapa2", "all words"
TEST = ("family", "ratio", "metric")
item = open_item(
    "steering",
    "Ways to steer attention, at several strengths",
    scorers=(*DEFAULT_SCORERS, "masked=linear", "repetition"),
    files={"beside": "tables/steering.texts.parquet of runs with the grid's other cells"},
    draw=draw,
    further_tables=("curves", "equal"),
)
cells = item.cells

# %% [markdown]
# The family and the strength of an arm are read from its augmentations.

# %%
banned = [item.run.by_key[key].ban_words != "none" for key in cells["key"]]
cells["words"] = np.where(banned, "prefix words banned", ALL_WORDS)
rules = {key: item.run.by_key[key].active_augmentations for key in cells["key"]}
for _, part in cells.groupby([*SETTING_COLUMNS], sort=False):
    names = name_families(rules[key] for key in part["key"])
    cells.loc[part.index, "family"] = [names[rules[key]] for key in part["key"]]
cells["strength"] = [strength(rules[key]) for key in cells["key"]]
arms = cells["family"] + [f" {strength:g}" if strength else "" for strength in cells["strength"]]
known = cells.assign(arm=arms).set_index("key")[["arm", "family", "strength", "words"]]
scores = item.data.scores(cells)
if not len(scores):
    raise RunError(
        f"{item.run.name} has no finished cell of {item.item}; {item.run.cells_from} says why"
    )
scores["arm"], cells["arm"] = scores["cell"].map(known["arm"]), arms
table = item.table(scores, cells)
note = (
    "ppl here is the mean over texts, as in the other tables; steering.equal has exp of the mean"
    " NLL. rep: 4-grams of words that a text had before."
)
item.write(table, [note])

# %% [markdown]
# The curves, and the comparison on them.

# %%
texts = scores.pivot(
    index=[
        *("cell", "prompt", "attribute", "sample"),
        *(name for name in SETTING_COLUMNS if name != "words"),
    ],
    columns="metric",
    values="value",
).reset_index()
texts["nll"] = np.log(texts["ppl"])
texts = texts.join(known[["family", "strength", "words"]], on="cell").drop(columns="ppl")
texts["prompt"] = [sha256(prompt.encode()).hexdigest()[:12] for prompt in texts["prompt"]]
scores_file = item.out / "tables" / "steering.texts.parquet"
with atomic_write(scores_file) as fresh:
    texts.to_parquet(fresh, index=False, compression="zstd")
for file in item.files["beside"]:
    try:
        more = pd.read_parquet(file)
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {file}: {error}; give a steering.texts.parquet") from error
    if set(more) != set(texts) or set(more["cell"]) & set(texts["cell"]):
        raise RunError(f"{file} has other columns, or cells that are there already; give each once")
    texts = pd.concat([texts, more], ignore_index=True)
settings = pd.concat([cells, texts])[[*SETTING_COLUMNS]].drop_duplicates().to_dict("records")
metrics = [name for name in dict.fromkeys(scores["metric"]) if name != "ppl"]
curves, equal, by_attribute, notes, waiting = [], [], [], [], []
for setting in settings:
    group = texts[(texts[[*SETTING_COLUMNS]] == pd.Series(setting)).all(axis=1)]
    ratios = RATIOS if setting["words"] == ALL_WORDS else RATIOS[1:]
    planned = set(cells["family"][(cells[[*SETTING_COLUMNS]] == pd.Series(setting)).all(axis=1)])
    missing = {BASELINE, REFERENCE} - set(group["family"])
    absent = (planned if missing else planned - set(group["family"])) - {BASELINE, REFERENCE}
    tests = product(sorted(absent), ratios, metrics)
    waiting += [setting | dict(zip(TEST, test, strict=True)) for test in tests]
    if missing:
        where = ", ".join(filter(None, setting.values()))
        notes.append(f"No comparison for {where}: no finished {' and '.join(sorted(missing))}.")
        continue
    for attribute in ("all", *sorted(group["attribute"].unique())):
        own = group if attribute == "all" else group[group["attribute"] == attribute]
        made, where = SteeringCurves(own, metrics), setting | {"attribute": attribute}
        curves.append(made.points().assign(**where))
        compared = made.compare(REFERENCE, ratios).assign(**where)
        (equal if attribute == "all" else by_attribute).append(compared)

# %%
folder = item.out / "tables"
if equal:
    # What is planned and has no texts yet counts in the correction as what is not comparable.
    tests = pd.concat([*equal, pd.DataFrame(waiting)], ignore_index=True)
    verdicts = add_verdicts(tests, REFERENCE, ["words", "model", "method"])
    verdicts = add_caveats(
        verdicts[verdicts["perplexity"].notna()], "acc", "acc (linear)", "acc masked"
    )
    elsewhere = cells["key"].isin(texts["cell"])
    if unfinished := int(((cells["state"] != "finished") & ~elsewhere).sum()):
        verdicts["verdict"] = ""
        notes.append(
            f"No verdicts: {pluralize(unfinished, 'cell')} of {len(cells)} are not finished, or of"
            " an arm that is not."
        )
    # Attributes have no tests.
    every = pd.concat([verdicts, *by_attribute], ignore_index=True)
    first = [*SETTING_COLUMNS, "attribute"]
    for name, frame in (("curves", pd.concat(curves)), ("equal", every)):
        ordered = frame[[*first, *(column for column in frame if column not in first)]]
        text = ordered.to_csv(index=False, float_format="%.6g")
        write_text(folder / f"steering.{name}.csv", text)
    wide = format_table(verdicts, SETTING_COLUMNS)
    notes = [
        (
            f"Each cell: the value, and its difference from {REFERENCE} with its 95 % interval over"
            " prompts and Holm's p. One family of tests is a metric with all tasks, perplexities"
            " and ways to steer (of one model and method, texts with banned words apart); what is"
            " not comparable, or not finished, counts in it as p = 1."
        ),
        (
            f"Not comparable: below {MIN_REACHED:.0%} of resamples, the curve of the arm or of"
            f" {REFERENCE} does not reach the perplexity; nothing is extrapolated. reached: the"
            " arm's share."
        ),
        (
            "A verdict by acc is disputed where the second scorer's difference has the other sign,"
            " and echo where the interval of acc masked does not exclude 0."
        ),
        *notes,
    ]
    write_text(folder / "steering.equal.md", as_markdown(TITLE, wide, notes))
    write_text(folder / "steering.equal.json", item_json("steering.equal", TITLE, wide, notes))
    print(f"\n{TITLE}\n\n{wide.to_string(index=False)}\n")
    item.draw()
print("\n".join(notes))
