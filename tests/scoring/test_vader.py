"""VADER as a scorer: labels at its authors' limits."""

import pytest

from lapa2_interp.errors import ScoringError
from lapa2_interp.scoring import vader
from lapa2_interp.scoring.registry import ScorerOptions, make_scorer, score_texts
from lapa2_interp.scoring.scorer import TextItem, run_scorer


def labels(texts):
    scored = run_scorer(vader.VaderScorer(), [TextItem(text) for text in texts])
    return scored[list(vader.VaderScorer.columns)].idxmax(axis=1).tolist()


def test_labels_follow_the_compound_score():
    texts = ["I love it.", "I hate it.", "The lake is blue.", "It is not good.", "It is not bad."]
    assert labels(texts) == ["positive", "negative", "neutral", "negative", "positive"]


@pytest.mark.parametrize(
    ("compound", "label"),
    [
        (0.05, "positive"),
        (0.0499, "neutral"),
        (0, "neutral"),
        (-0.0499, "neutral"),
        (-0.05, "negative"),
    ],
)
def test_limits(monkeypatch, compound, label):
    class Fixed:
        def polarity_scores(self, text):
            return {"compound": compound}

    monkeypatch.setattr(vader.VaderScorer, "analyzer", Fixed())
    assert labels(["a"]) == [label]


def test_it_is_an_accuracy_of_sentiment_and_can_be_masked():
    import pandas as pd

    texts = ["A positive lake.", "I love it.", " ", "The lake"]
    table = pd.DataFrame({"text": texts, "prompt": "The", "attribute": "positive"})
    scores = score_texts(table, ["accuracy=vader", "masked=vader"], ScorerOptions("sentiment"))
    values = scores.groupby("metric", sort=False)["value"].apply(list)
    assert values["accuracy"][:2] == [1.0, 1.0]
    assert values["masked"][:2] == [0.0, 1.0]
    assert values["accuracy"][3] == 0.0
    assert scores["reason"][2] == "empty text"
    with pytest.raises(ScoringError, match="not 'world'"):
        score_texts(table.assign(attribute="world"), ["accuracy=vader"], ScorerOptions("topic"))


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(vader, "find_spec", lambda name: None)
    with pytest.raises(ScoringError, match=r"lapa2-interp\[vader\]"):
        make_scorer("accuracy", "vader", ScorerOptions("sentiment"))
