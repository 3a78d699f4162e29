# %% [markdown]
# # Does any steering give more control than LaPA2 at equal perplexity?
#
# LaPA2, LaPA2 on chosen tokens, LaPA2 in chosen heads, and a set-point, each at three strengths.
# They are compared at 1.1 and 1.25 times the baseline's perplexity, on each way's own curve. Texts
# that may not say a word of their prefix are compared separately, and only at 1.25 times: their
# curves have no weak arms.
#
#     make steering-prompts DATA=FOLDER && lapa2 sweep quick/steering --out results/steering
#     python analyses/steering.py results/steering && python figures/steering.py results/steering
#
# `--grids NAME` reads a custom grid with the same, or other, ways to steer. The scores of all
# texts go to tables/steering.texts.parquet, without the texts: a grid that is run in parts, on
# several machines (`lapa2 sweep quick/steering --only task=topic`), is compared as a whole with
# `--beside` the tables of its other parts.

# %%
from hashlib import sha256
from itertools import product

import numpy as np
import pandas as pd

from lapa2_interp.bias.recipes import name_families, strength
from lapa2_interp.errors import RunError, pluralize
from lapa2_interp.files import atomic_write, write_text
from lapa2_interp.scoring.equal_perplexity import (
    BASELINE,
    MIN_REACHED,
    RATIOS,
    SETTING_COLUMNS,
    SteeringCurves,
    add_caveats,
    add_verdicts,
    format_table,
)
from analyses.lab.items import open_item
from analyses.lab.output import item_json
from analyses.lab.scripts import DEFAULT_SCORERS
from lapa2_interp.table_formats import as_markdown

TITLE = "Control at equal perplexity"
REFERENCE, ALL_WORDS = "lapa2", "all words"
TEST = ("family", "ratio", "metric")
item = open_item(
    "steering",
    "Ways to steer attention, at several strengths",
    scorers=(*DEFAULT_SCORERS, "masked=linear", "repetition"),
    files={"beside": "tables/steering.texts.parquet of runs with the grid's other cells"},
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
print("\n".join(notes))
