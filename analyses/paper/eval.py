# %% [markdown]
# # Figure eval: what people and a judge model say
#
# Ratings from 1 to 5 on relevance, fluency and topicality. They are read from the run's folder,
# where there are any:
#
#     lapa2 score results/quick --scorers judge=MODEL --out results/quick/judge
#     lapa2 scorers sheets results/quick --out results/quick/sheets    # for people
#     lapa2 scorers answers RATER.csv --key results/quick/sheets/key.csv --out results/quick/human
#     python analyses/paper/eval.py results/quick
#
# Without them the table is empty, says "no judge", and has no figure. The paper (numbers only for
# relevance): +.22 on sentiment (GPT-2+Prefix), +.24 on topic (Air-Decoding). Judged are relevance
# and fluency; topicality is in the table alone.

# %%
from functools import partial

import numpy as np
import pandas as pd

from analyses.lab.items import claim_for_arm, open_item
from analyses.lab.ratings import stored_ratings
from analyses.lab.style import COLUMN
from lapa2_interp.plots import COLOURS, Drawing, error_bars, new_figure, plain_axes
from lapa2_interp.scoring.equal_perplexity import distinguishing_columns
from lapa2_interp.scoring.tables import interval_in_range
from lapa2_interp.stats import mean_interval
from lapa2_interp.table_formats import interval_cells


def draw(table: pd.DataFrame) -> Drawing:
    """Figure eval: mean ratings (1 to 5) by base method and criterion, without and with LaPA2.

    Args:
        table: tables/eval.csv: columns rater, model, task, method, variant, length, arm, criterion,
            mean, low, high.
    """
    raters = list(dict.fromkeys(table["rater"]))
    figure = new_figure(COLUMN * len(raters), 2.5)
    panels = np.atleast_1d(figure.subplots(1, len(raters)))
    for panel, rater in zip(panels, raters, strict=True):
        part = table[table["rater"] == rater]
        part = part.assign(variant=part["variant"].astype(object).fillna(""))
        keys = [
            *distinguishing_columns(part, ["method", "task", "variant", "length", "model"]),
            "criterion",
        ]
        kinds = pd.MultiIndex.from_frame(part[keys].drop_duplicates())
        arms = list(dict.fromkeys(part["arm"]))
        for i, arm in enumerate(arms):
            own = part[part["arm"] == arm].set_index(keys).reindex(kinds)
            width = 0.8 / len(arms)
            x = np.arange(len(kinds)) + (i - (len(arms) - 1) / 2) * width
            look = {"color": COLOURS[i % len(COLOURS)], "error_kw": {"lw": 0.8}}
            panel.bar(x, own["mean"], width, yerr=error_bars(own), label=arm, **look)
        names = ["\n".join(str(word) for word in kind if word) for kind in kinds]
        panel.set_xticks(range(len(kinds)), names, fontsize=6)
        panel.set_ylim(1, 5)
        panel.set_title(rater, fontsize=9)
        panel.legend(frameon=False, fontsize=7)
        plain_axes(panel, "", "mean rating")
    return figure


# %%
item = open_item("eval", "Ratings by people and by a judge model", draw=draw)
ratings = stored_ratings(item.run.folder)
places = ["rater", "model", "task", "method", "variant", "length"]
columns = [*places, "arm", "criterion", "mean", "low", "high", "n", "prompts"]
rows = []
for values, part in ratings.groupby(columns[:8], sort=False):
    interval = mean_interval(part["value"].to_numpy(float), part["prompt"].to_numpy())
    rows.append(
        [
            *values,
            interval.mean,
            *interval_in_range(values[-1], interval),
            interval.n,
            interval.clusters,
        ]
    )
table = pd.DataFrame(rows, columns=columns)

# %%
MARGIN = 0.25  # "comparable" as a number: a quarter of a point
PAPER = {("people", "sentiment", "prefix"): 0.22, ("people", "topic", "air-decoding"): 0.24}
for values, part in ratings.groupby(places, sort=False):
    where = dict(zip(places, values, strict=True))
    words = ", ".join(
        str(where[name]) for name in ("method", "task", "variant", "length", "model") if where[name]
    )
    for arm in dict.fromkeys(part["arm"][part["arm"] != "baseline"]):
        arms = ({"arm": "baseline"}, {"arm": arm})
        named = partial(claim_for_arm, arm=arm, arms=part["arm"])
        known = PAPER.get((where["rater"], where["task"], where["method"]), float("nan"))
        for criterion in ("relevance", "fluency"):
            scores = part[part["criterion"] == criterion].assign(metric=criterion)
            if criterion == "relevance":
                text = f"relevance is higher with LaPA2: {words} ({where['rater']})"
                item.add_claim(named(text), scores, *arms, criterion, "more", known)
            else:
                text = (
                    f"fluency is the same within {MARGIN:g} with LaPA2: {words} ({where['rater']})"
                )
                item.add_claim(named(text), scores, *arms, criterion, "same", margin=MARGIN)

# %%
shown = table[columns[:8]].assign(rating=interval_cells(table, ".2f"), n=table["n"])
item.write(table, ["no judge: this run has no stored ratings."] if table.empty else [], shown)
item.draw()
