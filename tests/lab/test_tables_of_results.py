"""Tables that docs/results.md reads and that are made of other committed tables: they are up to
date."""

from pathlib import Path

import pandas as pd
import pytest

from analyses.heads import draw_where
from analyses.paper import perplexity_ratios
from analyses.scorers import analyse as scorers
from analyses.scorers import second_scorer
from lapa2_interp.table_formats import as_csv

ROOT = Path(__file__).resolve().parents[2]
TABLES = {
    "paper/perplexity.csv": perplexity_ratios.ratios,
    "scorers/second_scorer.csv": second_scorer.agreement,
    "scorers/scorers.csv": scorers.cards,
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_made_of_others_is_up_to_date(name):
    assert as_csv(TABLES[name]()) == (ROOT / "figures" / name).read_text("utf-8")


def test_a_ratio_of_whole_texts_is_the_difference_over_the_mean_without_the_bias():
    ratios = pd.read_csv(ROOT / "figures" / "paper" / "perplexity.csv")
    table = pd.read_csv(ROOT / "figures" / "paper" / "quick" / "tables" / "sent_topic.csv")
    own = "task == 'topic' and method == 'con-prefix'"
    rows = table.query(f"{own} and length == 128 and metric == 'ppl' and attribute == 'all'")
    without, steered = (rows[rows["difference"].isna() == plain].iloc[0] for plain in (True, False))
    ratio = ratios.query(own).iloc[0]
    for end, column in (
        ("ratio", "difference"), ("low", "difference_low"), ("high", "difference_high")
    ):  # fmt: skip
        assert ratio[end] == pytest.approx(1 + steered[column] / without["mean"])
    assert 1 < ratio["low"] < ratio["ratio"] < ratio["high"]


def test_the_figure_where_has_each_attribute_and_each_set_of_heads():
    steering = ROOT / "figures" / "steering"
    curves, equal = (pd.read_csv(steering / f"steering.{name}.csv") for name in ("curves", "equal"))
    bases = pd.read_csv(ROOT / "figures" / "bases" / "bases.csv")
    panels = {
        "prefix": draw_where.prefix_alone(curves, equal),
        "air": draw_where.air_decoding(bases),
    }
    for table in panels.values():
        of_attributes = table[table["attribute"] != "all"]
        assert len(of_attributes) == len(draw_where.CHANCE) * len(draw_where.PLACES)
        assert of_attributes.set_index(["attribute", "heads"]).index.is_unique
        assert (of_attributes["low"] <= of_attributes["mean"]).all()
        assert (of_attributes["mean"] <= of_attributes["high"]).all()
    assert len(draw_where.draw(panels).axes) == 2
