# %% [markdown]
# # Table hard_prefix_robustness: does the wording of the prefix matter?
#
# "Very positive:", "Positive:" and "A positive text:", with and without LaPA2. The paper: LaPA2
# helps under each, most under the first.
#
#     python analyses/paper/hard_prefix_robustness.py results/quick

# %%
import pandas as pd

from analyses.lab.claims import MARGINS
from analyses.lab.items import open_item
from analyses.lab.reported import paper_number
from analyses.lab.tables import split_variant
from lapa2_interp.scoring.tables import metric_name, paired_change, scorer_of_metric

item = open_item("hard_prefix_robustness", "The wording of the hard prefix", "hard_prefix")
cells = item.cells
scores = item.data.scores(cells)
THEIRS = {
    "": "Very positive:",
    "prefix {Attribute}:": "Positive:",
    "prefix A {attribute} text:": "A positive text:",
}
table = item.table(scores, cells, THEIRS)
parts = table["variant"].map(split_variant)
table["variant"] = [
    ", ".join(filter(None, (THEIRS.get(one, one), suffix))) for one, suffix in parts
]
for frame in (cells, scores):  # a wording is no variant here: one is compared with another
    parts = frame["variant"].map(split_variant)
    frame["wording"], frame["variant"] = parts.str[0], parts.str[1]

# %%
WORDINGS = ("prefix A {attribute} text:", "")
gains, reported = {}, {}
for where, words, group in item.data.groups(cells, "wording"):
    wording = where["wording"]
    arms = list(dict.fromkeys(group["arm"]))
    others = [arm for arm in arms if arm != "baseline"]
    if wording not in THEIRS or "baseline" not in arms or not others:
        continue
    sides = [where | {"arm": arm} for arm in ("baseline", others[0])]
    at = {
        "table": "hard_prefix",
        "task": where["task"],
        "method": where["method"],
        "variant": THEIRS[wording],
        "metric": "acc",
    }
    known = [paper_number(**at, lapa2=lapa2) for lapa2 in (False, True)]
    item.add_reported_claim(
        f"LaPA2 {{raises}} accuracy under {at['variant']!r}: {words}", scores, *sides, "acc", known
    )
    part = scores[(scores[list(where)] == pd.Series(where)).all(axis=1)]
    for metric, texts in part[part["metric"].map(metric_name) == "acc"].groupby(
        "metric", sort=False
    ):
        by = texts.groupby(["arm", "prompt", "attribute"])["value"].mean().unstack("arm")
        if {"baseline", others[0]} <= set(by):
            gain = (by[others[0]] - by["baseline"]).dropna().rename("value")
            gains.setdefault((words, wording), {})[metric] = gain.reset_index()
    reported[words, wording] = known[1] - known[0]
for words in dict.fromkeys(name for name, _ in gains):
    if all((words, wording) in gains for wording in WORDINGS):
        spread = {}
        for metric, last in gains[words, WORDINGS[0]].items():
            spread[metric] = paired_change(last, gains[words, WORDINGS[1]][metric])
        others = [
            (scorer_of_metric(metric), numbers)
            for metric, numbers in spread.items()
            if metric != "acc" and numbers is not None
        ]
        text = f"the gain is larger under 'Very positive:' than under 'A positive text:': {words}"
        reported_gain = reported[words, ""] - reported[words, WORDINGS[0]]
        second = others[0] if others else None
        margin = MARGINS["acc"]
        item.add_difference(text, "acc", "more", spread["acc"], reported_gain, margin, second)

# %%
item.write(table)
