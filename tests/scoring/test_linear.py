"""The scorers that ship: the linear classifier by hand, its training, its files, and what the
shipped ones reach."""

import json

import numpy as np
import pytest

from lapa2_interp.errors import DataError
from lapa2_interp.scoring.linear import (
    COLUMNS,
    LINEAR_ENDING,
    LinearClassifier,
    LinearScorer,
    damped_counts,
    inverse_document_frequency,
    load_linear,
    save_linear,
    train_linear,
    weighted_counts,
)
from lapa2_interp.scoring.scorer import TextItem, run_scorer
from lapa2_interp.scoring.task_scorer import SHIPPED_WEIGHTS, ToxicityScorer, tasks_in
from lapa2_interp.scoring.training import (
    GradedTexts,
    ScorerData,
    read_data,
    read_graded,
    text_and_ends,
    train_linear_scorer,
)
from lapa2_interp.tasks.corpora import read_corpus, without_texts_of

GOOD, BAD = (
    ("fine warm film", "a kind story", "warm and kind", "fine"),
    ("cold dull film", "a grim story", "dull and grim", "cold"),
)


def reached(card, data, measure, length="all"):
    """The one row of a card's results."""
    rows = [(row.data, row.measure, row.length) for row in card.held_out]
    return card.held_out[rows.index((data, measure, length))]


def toy(labels=("positive", "negative")):
    return train_linear([*GOOD, *BAD], np.repeat(np.eye(2), 4, axis=0), labels, c=10.0)


@pytest.fixture
def few_columns(monkeypatch):
    """The formulas are the same; a fit takes a moment."""
    monkeypatch.setattr("lapa2_interp.scoring.linear.COLUMNS", 2**12)


def test_features_weigh_short_and_long_texts_alike():
    features = weighted_counts(
        damped_counts(["warm", "warm and kind " * 100, ""]), np.ones(2 * COLUMNS, np.float32)
    )
    assert features.shape == (3, 2 * COLUMNS)
    for columns in (slice(0, COLUMNS), slice(COLUMNS, None)):
        norms = np.sqrt(features[:, columns].multiply(features[:, columns]).sum(axis=1)).A1
        assert norms == pytest.approx([1, 1, 0], abs=1e-6)


def test_rare_words_weigh_more():
    """Against the smoothed inverse document frequency, counted by hand: 3 texts, "the" in all,
    "warm" in one."""
    parts = damped_counts(["the warm", "the cold", "the end"])
    rarity = inverse_document_frequency(parts)
    columns = {word: damped_counts([word])[0].indices[0] for word in ("the", "warm")}
    assert rarity[columns["the"]] == pytest.approx(1.0, abs=1e-3)
    assert rarity[columns["warm"]] == pytest.approx(np.log(4 / 2) + 1, abs=1e-3)
    row = weighted_counts(parts, rarity)[0, :COLUMNS].toarray()[0]
    assert row[columns["warm"]] / row[columns["the"]] == pytest.approx(np.log(2) + 1, abs=1e-3)


@pytest.mark.parametrize("n", [2, 3])
def test_probabilities_are_the_logistic_regressions_own(few_columns, n):
    """Against scikit-learn's predict_proba, order of labels included."""
    from sklearn.linear_model import LogisticRegression

    texts, truth = (
        [*GOOD, *BAD, "x y z", "z y"][: 8 if n == 2 else 10],
        [0] * 4 + [1] * 4 + ([] if n == 2 else [2, 2]),
    )
    labels = ["a", "b", "c"][:n]
    linear = train_linear(texts, np.eye(n)[truth], labels, c=10.0)
    counts = damped_counts(texts)
    reference = LogisticRegression(C=10.0, max_iter=400, tol=1e-6).fit(
        weighted_counts(counts, inverse_document_frequency(counts)), truth
    )
    new = ["a warm day", "grim", "z z"]
    assert (
        np.abs(
            linear.probabilities(new)
            - reference.predict_proba(
                weighted_counts(damped_counts(new), inverse_document_frequency(counts))
            )
        ).max()
        < 2e-3
    )
    assert linear.probabilities(["warm and fine"]).argmax() == 0


def test_graded_texts_count_by_their_share(few_columns):
    """A text that is 0.25 toxic equals a toxic one of weight 1 and three others of the same words."""
    graded = train_linear(
        ["so bad", "so good"],
        np.array([[0.75, 0.25], [1.0, 0.0]]),
        ("no", "yes"),
        c=5.0,
        weight=[4.0, 1.0],
    )
    plain = train_linear(
        ["so bad"] * 4 + ["so good"], np.eye(2)[[0, 0, 0, 1, 0]], ("no", "yes"), c=5.0
    )
    assert np.abs(graded.probabilities(["so bad"]) - plain.probabilities(["so bad"])).max() < 1e-3


def test_a_saved_classifier_reads_back(few_columns, tmp_path):
    linear = toy()
    facts = {"data": ("toy",), "examples": 8, "c": 10.0, "held_out": ()}
    card = save_linear(linear, tmp_path, "sentiment", **facts)
    again, read = load_linear("sentiment", tmp_path)
    assert read == card
    assert np.abs(again.probabilities(GOOD) - linear.probabilities(GOOD)).max() < 1e-3, (
        "float16 weights"
    )
    scorer = LinearScorer("sentiment", tmp_path)
    assert scorer.version == f"linear sentiment {card.sha256[:12]}"
    table = run_scorer(scorer, [TextItem("fine"), TextItem("  "), TextItem("grim")])
    assert table["positive"][0] > 0.5 > table["positive"][2]
    assert table["reason"].tolist() == ["", "empty text", ""]


def test_toxicity_is_the_toxic_labels_probability(few_columns, tmp_path):
    save_linear(
        toy(("nontoxic", "toxic")), tmp_path, "detox", data=(), examples=8, c=1.0, held_out=()
    )
    scorer = ToxicityScorer(LinearScorer("detox", tmp_path))
    toxicity = run_scorer(scorer, [TextItem("warm and kind"), TextItem("grim")])["toxicity"]
    assert toxicity[0] < 0.5 < toxicity[1]


def test_training_from_files(few_columns, tmp_path):
    """Long texts are learned by their pieces too; graded rows are split by their prompts' hash."""
    file = tmp_path / "comments.csv"
    file.write_text(
        "text,label\n"
        + "".join(f"{t},nontoxic\n" for t in GOOD)
        + "".join(f"{t},toxic\n" for t in BAD)
    )
    rows = [
        {
            "prompt": {"text": f"word{i} grim", "toxicity": 0.9},
            "continuation": {"text": f" fine {i}", "toxicity": 0.1},
        }
        for i in range(40)
    ]
    graded = tmp_path / "rtp.jsonl"
    graded.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, test = read_graded(graded, test=False), read_graded(graded, test=True)
    assert len(train.texts) + len(test.texts) == 80
    assert not set(train.texts) & set(test.texts)
    corpus = read_corpus(str(file), ["nontoxic", "toxic"])
    card = train_linear_scorer(
        "detox",
        ("nontoxic", "toxic"),
        ScorerData([(corpus, 2.0)], [corpus], [(train, 0.5)], [test]),
        tmp_path / "out",
    )
    assert card.data == (
        f"{corpus.summary}; weight 2", f"rtp.jsonl train rows: {len(train.texts)} graded; weight 0.5"
    )  # fmt: skip
    assert reached(card, "comments.csv", "accuracy").value == 1.0
    assert reached(card, "comments.csv", "AUC").value == 1.0
    row = reached(card, "rtp.jsonl test rows", "Spearman")
    assert row.low <= row.value <= row.high
    assert row.value > 0.7
    assert row.n == len(test.texts)
    assert card.examples == 8 + len(train.texts)
    words = " ".join(f"w{i}" for i in range(100))
    assert [len(piece.split()) for piece in text_and_ends(words)] == [100, 40, 40]
    assert text_and_ends("short text") == ["short text"]
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match="is not a file of RealToxicityPrompts"):
        read_graded(tmp_path / "bad.jsonl", test=False)


@pytest.mark.parametrize("labels", [("nontoxic", "toxic"), ("toxic", "nontoxic")])
def test_graded_scores_count_for_toxic_wherever_it_stands(few_columns, labels, tmp_path):
    rows = [
        (f"{word} {i}", score) for i in range(30) for word, score in (("grim", 0.9), ("fine", 0.1))
    ]
    graded = GradedTexts(*map(tuple, zip(*rows, strict=True)), "rtp")
    data = ScorerData([], [], [(graded, 1.0)], [graded])
    card = train_linear_scorer("mine", labels, data, tmp_path)
    (grim,), (fine,) = (
        run_scorer(LinearScorer("mine", tmp_path), [TextItem(text)])["toxic"] for text in ("grim 7", "fine 7")
    )  # fmt: skip
    assert grim > 0.7
    assert fine < 0.3
    assert reached(card, "rtp", "Spearman").value > 0.8


def test_held_out_texts_are_not_those_that_are_trained_on(tmp_path):
    def write(name, good, bad):
        rows = [*(f"{t},warm\n" for t in good), *(f"{t},cold\n" for t in bad)]
        (tmp_path / name).write_text("text,label\n" + "".join(rows))
        return str(tmp_path / name)

    data = write("data.csv", GOOD, BAD)
    with pytest.raises(
        DataError, match="all texts of data.csv with the label 'warm' are both trained on"
    ):
        read_data(["warm", "cold"], [data], [data], [], tmp_path / "out")
    test = write("test.csv", [GOOD[0], "a warm tale"], ["a cold tale", "grim"])
    read = read_data(["warm", "cold"], [data], [test], [], tmp_path / "out")
    card = train_linear_scorer("mine", ["warm", "cold"], read, tmp_path / "out", 1.0)
    assert reached(card, "test.csv", "accuracy").n == 3
    corpora = [read_corpus(source, ["warm", "cold"]) for source in (data, test)]
    assert (
        "left out: 1 that another part has" in without_texts_of(corpora[:1], corpora[1:])[0].summary
    )


def test_linear_probabilities_sum_to_one():
    rng = np.random.default_rng(0)
    linear = LinearClassifier(
        ("a", "b", "c"),
        rng.normal(size=(2 * COLUMNS, 3)).astype(np.float32),
        np.zeros(3, np.float32),
        np.ones(2 * COLUMNS, np.float32),
    )
    probabilities = linear.probabilities(["some words here", "others"])
    assert probabilities.sum(axis=1) == pytest.approx([1, 1])
    assert (probabilities > 0).all()


# --- those that ship


def test_shipped_scorers_state_what_they_reach():
    cards = {task: load_linear(task)[1] for task in tasks_in(SHIPPED_WEIGHTS, LINEAR_ENDING)}
    assert set(cards) == {"sentiment", "topic", "detox"}
    for task, file, measure, least in (
        ("sentiment", "imdb_test.jsonl.xz", "accuracy", 0.90),
        ("sentiment", "sst2_valid.jsonl.xz", "accuracy", 0.82),
        ("topic", "agnews_test.jsonl.xz", "accuracy", 0.89),
        ("detox", "jigsaw_test.jsonl.xz", "AUC", 0.94),
        ("detox", "rtp_perspective.jsonl.xz test rows", "Spearman", 0.75),
    ):
        held = reached(cards[task], file, measure)
        assert held.low <= held.value <= held.high
        assert held.value >= least, (task, measure)
        assert {"1-15", "16-39"} <= {row.length for row in cards[task].held_out}
    assert sum(file.stat().st_size for file in SHIPPED_WEIGHTS.glob(f"*{LINEAR_ENDING}")) < 8e6


@pytest.mark.parametrize(
    ("task", "file", "labels"),
    [
        ("sentiment", "sentiment/imdb_test", ("positive", "negative")),
        ("sentiment", "sentiment/sst2_valid", ("positive", "negative")),
        ("topic", "topic/agnews_test", ("world", "sports", "business", "science")),
    ],
)
def test_shipped_results_are_found_again(task, file, labels, data):
    """On the first 400 texts of each class."""
    linear, card = load_linear(task)
    corpus = read_corpus(str(data / f"{file}.jsonl.xz"), labels)
    texts = [
        (text, i) for i, label in enumerate(linear.labels) for text in corpus.texts[label][:400]
    ]
    accuracy = (
        linear.probabilities([text for text, _ in texts]).argmax(axis=1) == [i for _, i in texts]
    ).mean()
    stated = reached(card, f"{file.split('/')[1]}.jsonl.xz", "accuracy").value
    assert abs(accuracy - stated) < 4 * np.sqrt(stated * (1 - stated) / len(texts))


def test_short_and_long_texts_are_both_read():
    scorer = LinearScorer("sentiment")
    short = (
        "What a wonderful, moving and beautifully acted film.",
        "What a boring, stupid and badly acted waste of time.",
    )
    filler = (
        "The story takes place in a small town by the river where two brothers run a shop. " * 25
    )
    texts = [*short, *(f"{text} {filler} {text}" for text in short)]
    assert (run_scorer(scorer, [TextItem(text) for text in texts])["positive"] > 0.5).tolist() == [
        True,
        False,
        True,
        False,
    ]
