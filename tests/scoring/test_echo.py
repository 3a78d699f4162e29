"""Echo: which words are a prefix's own, who says them, and what a classifier sees without them."""

import pandas as pd
import pytest

from lapa2_interp.errors import ScoringError
from lapa2_interp.scoring.echo import Echo, Masked, prefix_words
from lapa2_interp.scoring.linear import LinearScorer
from lapa2_interp.scoring.registry import ScorerOptions, make_scorer, score_texts
from lapa2_interp.scoring.scorer import (
    ScoreCache,
    Scorer,
    SkippedText,
    TextItem,
    expand_scorers,
    run_scorer,
)
from lapa2_interp.scoring.tables import cell_table, score_table
from lapa2_interp.tasks.task import read_task

WORDS = {"calm": ("calm",), "angry": ("angry", "furious")}


class Seen(Scorer):
    """Keeps what it is given."""

    name, version, columns, classifies = "accuracy", "seen 1", ("calm", "angry"), True

    def __init__(self):
        self.texts = []

    def score(self, items):
        self.texts += [item.text for item in items]
        return [(0.9, 0.1)] * len(items)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("sentiment", {"positive": ("positive",), "negative": ("negative",)}),
        ("topic", {"world": ("world",), "sports": ("sports",), "business": ("business",)}),
    ],
)
def test_words_are_those_that_no_other_prefix_has(task, expected):
    words = prefix_words(read_task(task))
    assert {name: words[name] for name in expected} == expected


def test_a_word_of_every_prefix_is_no_echo():
    words = prefix_words(read_task("detox"))
    assert "toxic" in words["toxic"]
    assert not set(words["toxic"]) & set(words["nontoxic"])


def test_echo_is_a_whole_word_of_ones_own_prefix():
    items = [
        TextItem("Calm, she said.", attribute="calm"),
        TextItem("She calmly said.", attribute="calm"),
        TextItem("CALM and angry", attribute="angry"),
        TextItem("calm", attribute="angry"),
        TextItem("  ", attribute="angry"),
    ]
    table = run_scorer(Echo(WORDS), items)
    assert table["echo"].tolist()[:4] == [1.0, 0.0, 1.0, 0.0]
    assert table["reason"].tolist()[4] == "empty text"
    with pytest.raises(ScoringError, match="unknown attribute 'clam'; .* did you mean 'calm'"):
        Echo(WORDS).score([TextItem("a", attribute="clam")])


def test_a_masked_classifier_sees_none_of_the_words():
    inner = Seen()
    masked = Masked(inner, WORDS)
    assert masked.score([TextItem("Furious? Calm calmly!")]) == [(0.9, 0.1)]
    assert inner.texts == ["...? ... calmly!"]
    assert masked.version == "seen 1, without angry calm furious"
    frame = pd.DataFrame({"text": ["calm"] * 3, "prompt": ["a", "b", "c"],
                          "attribute": ["calm", "calm", "angry"], "arm": ["x"] * 3})  # fmt: skip
    cells = cell_table(score_table(frame, masked)).set_index("attribute")
    assert set(cells["metric"]) == {"masked"}
    assert cells["mean"].to_dict() == pytest.approx({"calm": 1.0, "angry": 0.0, "all": 2 / 3})


def test_prefixes_without_words_of_their_own():
    """There is nothing to say and nothing to hide: no number, rather than a wrong one."""
    none = {"calm": (), "angry": ()}
    inner = Seen()
    masked = Masked(inner, none)
    items = [TextItem("This film is fine.", attribute="calm")]
    for scorer in (Echo(none), masked):
        assert run_scorer(scorer, items)["reason"].tolist() == ["its prefix has no word of its own"]
    assert inner.texts == []
    assert masked.key(items[0]) != inner.key(items[0])
    assert pd.isna(run_scorer(Echo({"calm": (), "angry": ("angry",)}), items)["echo"][0])


def test_a_text_without_the_words_is_read_once():
    """Its key is the plain classifier's, so that its score is known."""
    inner = Seen()
    masked = Masked(inner, WORDS)
    with ScoreCache(None) as cache:
        plain = run_scorer(inner, [TextItem("a lake"), TextItem("a calm lake")], cache)
        assert run_scorer(masked, [TextItem("a lake"), TextItem("a calm lake")], cache).equals(
            plain
        )
    assert inner.texts == ["a lake", "a calm lake", "a ... lake"]
    assert masked.key(TextItem("a lake")) == inner.key(TextItem("a lake"))
    assert masked.key(TextItem("calm")) != inner.key(TextItem("calm"))


def test_scorers_by_name():
    options = ScorerOptions(task="sentiment")
    echo, masked = make_scorer("echo", "", options), make_scorer("masked", "", options)
    assert isinstance(echo, Echo)
    text = "This is positive. A lovely film with a fine cast."
    own = LinearScorer("sentiment")
    (masked_score,), (plain,) = masked.score([TextItem(text)]), own.score([TextItem(text)])
    hidden = own.score([TextItem(text.replace("positive", "..."))])
    assert [masked_score] == hidden
    assert masked_score != plain
    assert masked.score([TextItem("")]) == [SkippedText("empty text")]
    with pytest.raises(ScoringError, match="give task"):
        make_scorer("echo", "", ScorerOptions())
    with pytest.raises(ScoringError, match="echo takes no model, found echo=gpt2; ask for echo"):
        make_scorer("echo", "gpt2", options)


USUAL = ("accuracy", "perplexity")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("", "accuracy=adapter accuracy=linear perplexity"),
        ("linear", "accuracy=linear perplexity"),
        ("accuracy linear", "accuracy=linear"),
        ("both accuracy", "accuracy=adapter accuracy=linear"),
        ("linear adapter toxicity", "toxicity=linear toxicity=adapter"),
        ("accuracy masked echo", "accuracy=adapter accuracy=linear masked=adapter echo"),
        ("masked linear", "masked=linear"),
        ("accuracy=linear accuracy", "accuracy=linear accuracy=adapter"),
        (
            "accuracy=mine/roberta toxicity=mine/bert:toxic",
            "accuracy=mine/roberta toxicity=mine/bert:toxic",
        ),
        ("distinct=gpt2 judge=m", "distinct=gpt2 judge=m"),
    ],
)
def test_a_plain_name_is_by_both_classifiers(asked, expected):
    assert expand_scorers(asked.split(), USUAL) == tuple(expected.split())


def test_the_second_scorer_of_a_metric_has_its_name_in_parentheses():
    frame = pd.DataFrame({"text": ["a fine film", "a dull film"], "prompt": ["a", "b"],
                          "attribute": ["positive"] * 2, "arm": ["x"] * 2})  # fmt: skip
    asked = expand_scorers(["accuracy", "echo"], ())
    scores = score_texts(frame, asked, ScorerOptions(task="sentiment"))
    assert list(scores["metric"]) == ["accuracy"] * 2 + ["accuracy (linear)"] * 2 + ["echo"] * 2
    assert (
        scores["scorer"].str.startswith(("accuracy (adapter", "accuracy (linear", "echo (")).all()
    )
    (cell,) = cell_table(scores)[lambda t: t["metric"] == "accuracy (linear)"].to_dict("records")
    assert (cell["low"], cell["high"]) == (0.0, 1.0), "an interval stays within the metric's range"
    assert cell["n"] == 2
