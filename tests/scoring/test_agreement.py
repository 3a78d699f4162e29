"""Agreement of scorers with labels and graded scores: closed forms, scikit-learn, and files whose
numbers are counted by hand."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from conftest import script

from lapa2_interp.errors import Lapa2Error
from lapa2_interp.scoring.agreement import agreement, card_rows
from lapa2_interp.scoring.scorer import Scorer


def two(values, labels=("no", "yes")):
    """Probabilities of two labels from those of the second."""
    values = np.asarray(values, dtype=float)
    return pd.DataFrame({labels[0]: 1 - values, labels[1]: values})


def graded(values):
    return pd.DataFrame({"toxicity": np.asarray(values, dtype=float)})


def value(table, measure, length="all", column="value"):
    rows = table[(table["measure"] == measure) & (table["length"] == length)]
    return rows[column].item()


def test_a_perfect_a_reversed_and_a_constant_scorer():
    truth = ["no", "yes"] * 20
    right = np.array([label == "yes" for label in truth], float)
    texts = ["word"] * 40
    for values, accuracy, auc, error in ((right, 1, 1, 0), (1 - right, 0, 0, 1)):
        table = agreement(two(values), truth, texts)
        assert value(table, "accuracy") == accuracy
        assert value(table, "AUC") == auc
        assert value(table, "calibration error") == error
        assert value(table, "accuracy", column="low") == accuracy
    constant = agreement(two([0.75] * 40), truth, texts)
    assert value(constant, "accuracy") == 0.5
    assert value(constant, "AUC") == 0.5
    assert value(constant, "calibration error") == pytest.approx(0.25)
    scores = np.linspace(0, 1, 40)
    for values, rho, auc in ((scores, 1, 1), (1 - scores, -1, 0)):
        table = agreement(graded(values), scores.tolist(), texts)
        assert value(table, "Spearman") == pytest.approx(rho)
        assert value(table, "AUC") == auc
        assert value(table, "Spearman", column="high") == pytest.approx(rho)
    still = agreement(graded([0.3] * 40), scores.tolist(), texts)
    assert np.isnan(value(still, "Spearman"))
    assert value(still, "AUC") == 0.5
    assert "Spearman" not in {row["measure"] for row in card_rows(still, "x")}


def test_measures_equal_scikit_learns_and_scipys():
    """Ties included; and the resampled values too, by repeating the texts."""
    from scipy.stats import spearmanr
    from sklearn.metrics import roc_auc_score

    from lapa2_interp.scoring.agreement import _auc, _spearman
    from lapa2_interp.stats import resampled

    rng = np.random.default_rng(0)
    numbers, scores = rng.random(200).round(1), rng.random(200).round(1)
    numbers = (numbers + scores).round(1) / 2
    table = agreement(graded(numbers), scores.tolist(), ["a"] * 200)
    assert value(table, "AUC") == pytest.approx(roc_auc_score(scores > 0.5, numbers))
    assert value(table, "Spearman") == pytest.approx(spearmanr(numbers, scores).statistic)
    picks = next(resampled(200, 5, 0))
    for row, auc, rho in zip(
        picks,
        _auc(numbers, scores > 0.5)(picks),
        _spearman(numbers, scores)(picks),
        strict=True,
    ):
        some = np.repeat(np.arange(200), row)
        assert auc == pytest.approx(roc_auc_score(scores[some] > 0.5, numbers[some]))
        assert rho == pytest.approx(spearmanr(numbers[some], scores[some]).statistic)


def test_the_calibration_of_a_known_table():
    """Three texts at .95 of which two are right, and one at .65 that is wrong:
    (3/4) |.95 - 2/3| + (1/4) |.65 - 0|."""
    numbers = two([0.95, 0.95, 0.95, 0.65])
    truth = ["yes", "yes", "no", "no"]
    error = value(agreement(numbers, truth, ["a"] * 4), "calibration error")
    assert error == pytest.approx(0.75 * (0.95 - 2 / 3) + 0.25 * 0.65)


def test_texts_are_compared_by_length():
    texts = ["w " * n for n in (1, 15, 16, 39, 40, 119, 120, 500)]
    truth = ["yes"] * 8
    table = agreement(two([0.9, 0.1] * 4), truth, texts)
    accuracy = table[table["measure"] == "accuracy"].set_index("length")
    assert list(accuracy.index) == ["all", "1-15", "16-39", "40-119", "120 and more"]
    assert accuracy["n"].tolist() == [8, 2, 2, 2, 2]
    assert (accuracy["value"] == 0.5).all()
    assert np.isnan(accuracy.loc["1-15", "low"]), "two texts have no interval"
    assert accuracy.loc["all", "low"] < 0.5 < accuracy.loc["all", "high"]


def test_three_labels_have_no_auc():
    numbers = pd.DataFrame(np.eye(3), columns=["a", "b", "c"])
    table = agreement(numbers, ["a", "b", "a"], ["x"] * 3)
    assert set(table["measure"]) == {"accuracy", "calibration error"}
    assert value(table, "accuracy") == pytest.approx(2 / 3)


def test_intervals_cover():
    """Of 200 sets of 60 texts with accuracy .7, about 95 % have it inside their interval."""
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        right = rng.random(60) < 0.7
        table = agreement(two(np.where(right, 0.9, 0.1)), ["yes"] * 60, ["a"] * 60, resamples=300)
        low, high = (value(table, "accuracy", column=name) for name in ("low", "high"))
        inside += low <= 0.7 <= high
    assert 0.90 <= inside / 200 <= 0.99


def test_the_interval_of_the_calibration_error_has_the_texts_own():
    """Of 100 calibrated classifiers all have an error above 0, by chance; resampled texts have a
    larger one still. The interval has the texts' own error inside."""
    rng = np.random.default_rng(1)
    low, high, own = np.empty((3, 100))
    for i in range(100):
        values = rng.uniform(0.5, 1, 300)
        truth = np.where(rng.random(300) < values, "yes", "no")
        table = agreement(two(values), truth.tolist(), ["a"] * 300, resamples=300)
        rows = table[table["measure"] == "calibration error"].iloc[0]
        low[i], high[i], own[i] = rows["low"], rows["high"], rows["value"]
    assert ((low < own) & (own < high)).all()


# --- analyses/scorers/check.py


class Lengths(Scorer):
    """A stand-in: P(positive), or a toxicity, is a tenth of the words."""

    version = "words"

    def __init__(self, name):
        self.name = name
        self.columns = ("positive", "negative") if name == "accuracy" else ("toxicity",)

    def score(self, items):
        scores = [len(item.text.split()) / 10 for item in items]
        return [(p, 1 - p) if self.name == "accuracy" else (p,) for p in scores]


@pytest.fixture
def words(monkeypatch, own_cache):
    asked = []

    def make(name, model, options):
        asked.append((name, model, options.task))
        return Lengths(name)

    monkeypatch.setattr("lapa2_interp.scoring.registry.make_scorer", make)
    return asked


LINEAR = ("--scorers", "linear")


def check(*line):
    return script("scorers/check", *line)


def test_a_file_of_labels_is_checked(words, tmp_path, capsys):
    """P(positive) .2, .4, .8, .9: one of the four is wrong; three of four pairs are in order. The
    labels chosen have .8, .6, .8, .9: (1/4) (|.6 - 1| + |.9 - 1| + |1.6 - 1|)."""
    file = tmp_path / "texts.csv"
    rows = [(2, "negative"), (4, "negative"), (8, "negative"), (9, "positive"), (3, None)]
    pd.DataFrame([("w " * n, label) for n, label in rows], columns=["body", "mood"]).to_csv(file)
    line = [
        "--column",
        "body",
        "--label",
        "mood",
        "--task",
        "sentiment",
        "--scorers",
        "linear",
        "adapter",
        "--out",
    ]
    check(file, *line, tmp_path / "out")
    assert words == [("accuracy", "linear", "sentiment"), ("accuracy", "adapter", "sentiment")]
    table = pd.read_csv(tmp_path / "out/agreement.csv")
    assert value(table[:6], "accuracy") == 0.75
    assert value(table[:6], "AUC") == 1.0
    # .8 twice, one right: |1.6 - 1| = .6; .6 right: .4; .9 right: .1
    assert value(table[:6], "calibration error") == pytest.approx((0.6 + 0.4 + 0.1) / 4)
    assert value(table[:6], "accuracy", "1-15", "n") == 4
    assert (tmp_path / "out/calibration.png").stat().st_size > 1000
    curve = pd.read_csv(tmp_path / "out/calibration.csv")[:3]
    assert curve["from"].tolist() == [0.6, 0.8, 0.9]
    assert curve["n"].tolist() == [1, 2, 1]
    assert curve["prediction"].tolist() == pytest.approx([0.6, 0.8, 0.9])
    assert curve["truth"].tolist() == [1, 0.5, 1]
    printed = capsys.readouterr().out
    assert "accuracy, all words (n 4)" in printed
    assert printed.count("accuracy (words)") == 2 * 6


def test_graded_scores_and_toxicity_labels_are_checked(words, tmp_path):
    file = tmp_path / "texts.jsonl"
    rows = [(1, 0.1, "nontoxic"), (4, 0.8, "toxic"), (7, 0.6, "toxic")]
    file.write_text(
        "".join(json.dumps({"text": "w " * n, "s": s, "l": k}) + "\n" for n, s, k in rows)
    )
    check(file, "--score", "s", *LINEAR, "--out", tmp_path / "graded")
    table = pd.read_csv(tmp_path / "graded/agreement.csv")
    assert value(table, "Spearman") == pytest.approx(0.5)
    assert value(table, "AUC") == 1.0
    assert value(table, "calibration error") == pytest.approx((0 + 0.4 + 0.1) / 3)
    check(file, "--label", "l", "--scorers", "toxicity", "--out", tmp_path / "labels")
    table = pd.read_csv(tmp_path / "labels/agreement.csv")
    assert value(table, "accuracy") == pytest.approx(2 / 3)


def test_the_first_or_last_tokens_alone_are_checked(words, tmp_path, capsys):
    """The stand-in counts words: of ten, three or two are left. By default both classifiers."""
    file = tmp_path / "texts.csv"
    texts = ["one two three four five six seven eight nine ten"] * 8
    pd.DataFrame({"text": texts, "score": [0.3] * 8}).to_csv(file)
    for option, n in (("--first", 3), ("--last", 2)):
        out = tmp_path / option[2:]
        check(file, "--score", "score", option, n, "--out", out)
        assert words[-2:] == [("toxicity", "adapter", None), ("toxicity", "linear", None)]
        assert pd.read_csv(out / "calibration.csv")["prediction"].tolist() == [n / 10] * 2
    for options in (["--first", 0], ["--scorers"]):
        with pytest.raises(SystemExit, match="2"):
            check(file, "--score", "score", *options)


def test_rows_of_real_toxicity_prompts_are_checked(words, tmp_path):
    """The test rows alone, their prompts and continuations."""
    from lapa2_interp.scoring.training import read_graded

    file = tmp_path / "rtp.jsonl"
    rows = [
        {
            "prompt": {"text": f"word{i} grim", "toxicity": 0.9},
            "continuation": {"text": f"{i}", "toxicity": 0.1},
        }
        for i in range(40)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check(file, "--rtp", *LINEAR, "--out", tmp_path / "out")
    table = pd.read_csv(tmp_path / "out/agreement.csv")
    assert value(table, "Spearman") == pytest.approx(1.0)
    assert value(table, "Spearman", column="n") == len(read_graded(file, test=True).texts)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "say what the texts are compared with, by one of"),
        ("--label l --first 2 --last 2", ", not both"),
        ("--label l --rtp", "say what the texts are compared with, by one of"),
        ("--label m", "unknown column 'm'; allowed: text, l"),
        ("--score l", "'x' is not a number; for labels give"),
        ("--label l", "unknown label 'x'; allowed: positive, negative"),
        ("--rtp", "is not a file of RealToxicityPrompts"),
    ],
)
def test_mistakes_in_checks(words, line, message, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "one two", "l": "x"}\n')
    with pytest.raises(Lapa2Error, match=re.escape(message)):
        check(file, *line.split())
