# %% [markdown]
# # Does the bias in chosen heads improve other methods?
#
# Not in the paper. Methods without a bias, with LaPA2 in all heads, in chosen heads, and in random
# heads. The grid has three parts: (a) sentiment, (b) further methods on sentiment, (c) topic. Arms,
# prompts and tests were written down before the run (analyses/bases/README.md). A part that is not
# finished has no tests.
#
#     make steering-prompts DATA=FOLDER
#     lapa2 sweep analyses/bases/bases.toml --out results/bases
#     python analyses/bases/analyse.py results/bases

# %%
from collections import Counter

import numpy as np
import pandas as pd

from analyses.lab.items import open_item
from analyses.lab.scripts import DEFAULT_SCORERS
from analyses.lab.style import METRIC_LABELS, display_name, legend_below, style_of
from analyses.lab.tables import format_item_table, rows_of_all_attributes
from lapa2_interp.errors import RunError
from lapa2_interp.files import write_text
from lapa2_interp.plots import Drawing, crosses, new_figure, plain_axes
from lapa2_interp.scoring.equal_perplexity import SteeringCurves
from lapa2_interp.scoring.tables import paired_change
from lapa2_interp.stats import holm, mean_interval
from lapa2_interp.table_formats import as_csv, as_markdown, as_text, interval_cells

LOOKS = {"baseline": "o", "all heads": "s", "chosen heads": "^", "random heads": "D"}
NAMES = {"baseline": "no bias"}
SCORER = "acc (linear)"


def draw(table: pd.DataFrame) -> Drawing:
    """Figure bases: a panel for each part of the grid. A colour is a method, a marker a place of
    the bias. Solid lines join the strengths of the bias in chosen heads, dotted ones those of
    Air-Decoding's omega; 95 % intervals.

    Args:
        table: tables/bases.csv.
    """
    rows = rows_of_all_attributes(table[table["mean"].notna()])
    rows = rows[~rows["variant"].str.contains("eos block")]
    arms = rows.groupby(rows["variant"].str[:3])["arm"].nunique()
    parts = sorted(arms.index[arms > 1])  # a part of one arm has nothing to compare
    figure = new_figure(3.6 * max(1, len(parts)), 3.4)
    panels = figure.subplots(1, max(1, len(parts)), squeeze=False)[0]
    for part, panel in zip(parts, panels, strict=False):
        own = rows[rows["variant"].str.startswith(part)]
        y, x = (own[own["metric"] == metric] for metric in (SCORER, "ppl"))
        points = y.merge(x, on=["method", "variant", "arm"], suffixes=("", "_ppl"))
        points["place"] = points["arm"].str.replace(r" [\d.]+$", "", regex=True)
        points["strength"] = points["arm"].str.extract(r"([\d.]+)$", expand=False).astype(float)
        points["omega"] = (
            points["variant"].str.extract(r"omega ([\d.]+)", expand=False).astype(float)
        )
        for method, of_method in points.groupby("method", sort=False):
            colour, _ = style_of(str(method))
            usual = of_method.loc[of_method["place"] != "baseline", "variant"]
            here = of_method[of_method["variant"].isin(usual)].fillna({"strength": 0.0})
            curves = {
                "-": here[here["place"].isin(["baseline", "chosen heads"])].sort_values("strength"),
                ":": of_method[of_method["place"] == "baseline"].sort_values("omega"),
            }
            for style, curve in curves.items():
                panel.plot(curve["mean_ppl"], curve["mean"], color=colour, ls=style, lw=0.9)
            panel.plot([], [], color=colour, label=display_name(str(method)))
            for label, of_place in of_method.groupby("place", sort=False):
                x = of_place[["mean_ppl", "low_ppl", "high_ppl"]]
                look = {"color": colour, "marker": LOOKS[str(label)], "ms": 5, "lw": 0.7, "ls": ""}
                crosses(panel, x.rename(columns=lambda name: name[:-4]), of_place, **look)
        panel.set_title(f"{part} {own['task'].iloc[0]}", fontsize=9)
        plain_axes(panel, METRIC_LABELS["ppl"], f"{METRIC_LABELS['acc']}, by linear")
    for label in points["place"].unique() if parts else ():
        look = {"marker": LOOKS[label], "ms": 5, "color": "0.4", "ls": ""}
        panels[-1].plot([], [], **look, label=NAMES.get(label, label))
    legend_below(figure, [("", panel, rows) for panel in panels], 5)
    return figure


# %%
item = open_item(
    "bases",
    "LaPA2 in chosen heads under several methods",
    scorers=(*DEFAULT_SCORERS, "sentiment:accuracy=vader", "repetition"),
    draw=draw,
)
cells = item.cells
cell_of = item.run.by_key
DECIDES = "acc (linear)"
"""The metric of the tests: its scorer shares no weights with the model."""
CHAT_TAG = "<|im_"

# %% [markdown]
# An arm is a place of the bias and its strength; the sets of random heads are one arm. Part (a) has
# the prompts of Air-Decoding on sentiment.

# %%
biases = {key: next(iter(cell_of[key].active_augmentations), None) for key in cells["key"]}
counts: dict[str, Counter] = {}
for key, bias in biases.items():
    if bias is not None and bias.heads != "all":
        counts.setdefault(cell_of[key].task.name, Counter())[bias.heads] += 1
chosen = {task: count.most_common(1)[0][0] for task, count in counts.items()}
of_air_decoding = {
    prompt
    for key in cells["key"]
    if cell_of[key].method == "air-decoding" and cell_of[key].task.name == "sentiment"
    for prompt in cell_of[key].prompts
}


def arm(key: str) -> str:
    """The arm of a cell."""
    if (bias := biases[key]) is None:
        return "baseline"
    if bias.heads == "all":
        return f"all heads {bias.alpha:g}"
    kind = "chosen" if bias.heads == chosen[cell_of[key].task.name] else "random"
    return f"{kind} heads {bias.alpha:g}"


def variant(key: str) -> str:
    """The part of a cell, and its settings."""
    cell = cell_of[key]
    shared = of_air_decoding.issuperset(cell.prompts)
    part = "(c)" if cell.task.name == "topic" else "(a)" if shared else "(b)"
    omega = f"omega {cell.parameters['omega']:g}" if cell.method == "air-decoding" else ""
    return ", ".join(filter(None, [part, omega, "eos block" * (cell.eos == "block")]))


arms, variants = ({key: make(key) for key in cells["key"]} for make in (arm, variant))
# Parts share arms, so they are complete or not by the names given here.
finished = cells["key"].map(item.run.state) == "finished"
complete = finished.groupby(
    [cells["method"], cells["key"].map(variants), cells["key"].map(arms)]
).transform("all")
cells.loc[finished, "state"] = np.where(complete[finished], "finished", "incomplete")
scores = item.data.scores(cells)
# Of one scorer of accuracy alone the column has no name.
by_linear = (scores["metric"] == "acc") & scores["scorer"].str.contains("(linear", regex=False)
scores.loc[by_linear, "metric"] = DECIDES
if DECIDES not in set(scores["metric"]):
    raise RunError("the tests are by linear; give --scorers accuracy=linear, or accuracy")
for table in (cells, scores):
    key = table["key" if "key" in table else "cell"]
    table["arm"], table["variant"] = key.map(arms), key.map(variants)
means = item.table(scores, cells)

# %% [markdown]
# Texts with a chat tag.

# %%
ARM = ["task", "method", "variant", "arm"]
answers = item.run.texts(list(cells["key"][cells["state"] == "finished"]))
tagged = 100.0 * answers["text"].str.contains(CHAT_TAG, regex=False)
rows = []
for where, part in answers.assign(
    tag=tagged, arm=answers["cell"].map(arms), variant=answers["cell"].map(variants)
).groupby(ARM, sort=False):
    interval = mean_interval(part["tag"].to_numpy(), part["prompt"].to_numpy())
    rows.append(dict(zip(ARM, where, strict=True)) | interval.columns)
tags = pd.DataFrame(rows)
formatted = format_item_table(means)
shown = (
    tags[ARM]
    .rename(columns={"arm": "augmentation"})
    .assign(**{"chat tag %": interval_cells(tags, ".1f")})
)
formatted = formatted.merge(shown, how="left").fillna("")
note = (
    "Ours, not the paper's. Texts of (a) and of random heads are paired on the prompts that both"
    " have. chat tag: texts with a tag of the model's chat format."
)
item.write(means, [note], formatted)

# %% [markdown]
# The tests of each part, by linear, with Holm's correction over the part; beside them every other
# measure and attribute.

# %%
AGAINST = ("baseline", "all heads 0.5")
TESTS = {
    "(a)": [
        ("sentiment", "air-decoding", "(a), omega 140", "chosen heads 0.8", against)
        for against in (*AGAINST, "random heads 0.8")
    ],
    "(b)": [
        ("sentiment", method, "(b)", "chosen heads 0.8", "baseline")
        for method in ("prefix", "gedi", "dexperts", "arithmetic")
    ],
    "(c)": [
        ("topic", method, label, "chosen heads 1", against)
        for method, label in (("prefix", "(c)"), ("air-decoding", "(c), omega 60"))
        for against in (*AGAINST, "random heads 1")
    ],
}
tests, notes = [], []
for part, planned in TESTS.items():
    of_part = cells[cells["variant"].str.startswith(part)]
    missing = int((of_part["state"] != "finished").sum())
    if not len(of_part):
        continue
    if missing:
        notes.append(f"{part} has no tests: {missing} of {len(of_part)} cells are missing.")
        continue
    rows = []
    for task, method, label, after, before in planned:
        group = scores[(scores["task"] == task) & (scores["method"] == method)]
        group = group[group["variant"] == label]
        for metric, of_metric in group.groupby("metric", sort=False):
            for attribute in ["all", *dict.fromkeys(of_metric["attribute"])]:
                texts = of_metric[(of_metric["attribute"] == attribute) | (attribute == "all")]
                comparison = paired_change(*(texts[texts["arm"] == arm] for arm in (before, after)))
                if comparison is not None:
                    where = {"part": part, "task": task, "method": method, "arm": after}
                    change = {
                        "difference": comparison.mean,
                        "low": comparison.low,
                        "high": comparison.high,
                    }
                    rows.append(
                        {**where, "against": before, "metric": metric, "attribute": attribute}
                        | {**change, "p": comparison.p, "detectable": comparison.detectable}
                        | {"prompts": comparison.clusters}
                    )
    table = pd.DataFrame(rows)
    decisive = (table["metric"] == DECIDES) & (table["attribute"] == "all")
    table.loc[decisive, "p_holm"] = holm(table.loc[decisive, "p"])
    tests.append(table)

# %% [markdown]
# The curve of chosen heads and the way from the usual omega to another one, at equal perplexity:
# three quarters of this way, in ln perplexity. A curve that does not reach it is not comparable.

# %%
folder = item.out / "tables"
WAY = 0.75
OMEGAS = {"(a)": (140, (70, 280)), "(c)": (60, (30, 120))}
wide = scores.pivot(
    index=["cell", "prompt", "attribute", "sample", "variant", "arm"],
    columns="metric",
    values="value",
).reset_index()
compared = []
for part, (usual, others) in OMEGAS.items() if "ppl" in wide else ():
    own = wide[wide["variant"] == f"{part}, omega {usual}"]
    steered = own[own["arm"].str.match("baseline|chosen")]
    for omega in others:
        further = wide[wide["variant"] == f"{part}, omega {omega}"]
        if not len(steered) or not len(further):
            continue
        texts = pd.concat(
            [
                steered.assign(
                    family=steered["arm"].str.replace(r" [\d.]+$", "", regex=True),
                    strength=steered["arm"].str.extract(r"([\d.]+)$")[0].astype(float).fillna(0.0),
                ),
                further.assign(family=f"omega {omega}", strength=1.0),
            ]
        )
        texts["nll"] = np.log(texts["ppl"])
        metrics = [name for name in dict.fromkeys(scores["metric"]) if texts[name].notna().any()]
        metrics.remove("ppl")
        curves = SteeringCurves(texts, metrics)
        first, last = curves.curve(f"omega {omega}")[0, :, 0]
        comparison = curves.compare(f"omega {omega}", [float(np.exp(WAY * (last - first)))])
        compared.append(
            comparison[comparison["family"] != f"omega {omega}"].assign(part=part, omega=omega)
        )
if compared:
    write_text(folder / "bases.equal.csv", as_csv(pd.concat(compared, ignore_index=True), 6))

# %%
if tests:
    title = "Tests of chosen heads"
    every = pd.concat(tests, ignore_index=True)
    write_text(folder / "bases.tests.csv", as_csv(every, 6))
    decisive = every[every["p_holm"].notna()].drop(columns=["metric", "attribute", "p"])
    notes.append(f"Differences of {DECIDES} in points, paired on prompts; p_holm: over a part.")
    write_text(folder / "bases.tests.md", as_markdown(title, decisive.round(4), notes))
    print(f"\n{title}\n\n{as_text(decisive, '.4f')}")
print("\n".join(notes))
item.draw()
