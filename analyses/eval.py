# %% [markdown]
# # Figure eval: what people and a judge model say
#
# Ratings from 1 to 5 on relevance, fluency and topicality. They are read from the run's folder,
# where there are any:
#
#     lapa2 score results/quick --scorers judge=MODEL --out results/quick/judge
#     lapa2 scorers sheets results/quick --out results/quick/sheets    # for people
#     lapa2 scorers answers RATER.csv --key results/quick/sheets/key.csv --out results/quick/human
#     python analyses/eval.py results/quick && python figures/eval.py results/quick
#
# Without them the table is empty and says "no judge". The paper (numbers only for relevance): +.22
# on sentiment (GPT-2+Prefix), +.24 on topic (Air-Decoding). Judged are relevance and fluency;
# topicality is in the table alone.

# %%
from functools import partial

import pandas as pd

from analyses.lab.items import claim_for_arm, open_item
from analyses.lab.ratings import stored_ratings
from lapa2_interp.scoring.tables import interval_in_range
from lapa2_interp.stats import mean_interval
from lapa2_interp.table_formats import interval_cells

item = open_item("eval", "Ratings by people and by a judge model")
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
