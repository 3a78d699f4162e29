"""What the room refuses: a call, and what its one line says. Calls write and read in an empty
folder. Judges: `test_judge`; answers of people: `test_human`."""

import json
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from test_adapters import BASE
from test_agreement import graded, two
from test_equal_perplexity import LINE
from test_equal_perplexity import made as made_curves
from test_linear import GOOD, toy
from test_scoring import BROKEN_GZIP

from lapa2_interp.errors import DataError, Lapa2Error, ScoringError
from lapa2_interp.runs.score import score
from lapa2_interp.runs.texts import read_texts
from lapa2_interp.scoring.adapter import ADAPTER_ENDING, load_adapter_network
from lapa2_interp.scoring.agreement import agreement
from lapa2_interp.scoring.equal_perplexity import SteeringCurves
from lapa2_interp.scoring.linear import LINEAR_ENDING, load_linear, save_linear
from lapa2_interp.scoring.registry import ScorerOptions, make_scorer
from lapa2_interp.scoring.scorer import ScoreCache, Scorer, expand_scorers
from lapa2_interp.scoring.tables import score_table
from lapa2_interp.scoring.training import read_data, read_graded
from lapa2_interp.scoring.transformer import Classifier

FILES = [
    ("a.jsonl", b"", "has no rows"),
    ("a.csv", b"txt,label\nx,y\n", "has no column 'text'; found txt, label; give column"),
    ("a.csv", "text\nh\u00f6\n".encode("latin-1"), "is not UTF-8"),
    ("a.jsonl", b"not json", "cannot read"),
    *((f"a.csv{ending}", b"PK\3\4 damaged" * 9, "cannot read") for ending in (".gz", ".xz", ".zip")),
    ("b.csv.gz", BROKEN_GZIP, "cannot read"),
    ("a.txt", b"x", "neither a run folder nor a file that ends in .jsonl, .csv, .parquet"),
]  # fmt: skip
"""Texts to score: a file's name and content, and the error."""
GRADED = [
    ({"prompt": {"text": None}, "continuation": {}}, "no attribute 'encode'"),
    ({"prompt": {"text": "a"}, "continuation": "b"}, "no attribute 'get'"),
    (
        {"prompt": {"text": "a", "toxicity": 1.5}, "continuation": {}},
        "toxicity 1.5; allowed: 0 to 1",
    ),
]
"""Rows of RealToxicityPrompts."""
LEARNT = [
    (["warm"], [], "a scorer tells labels apart; found warm alone"),
    (
        ["warm", "cold"],
        ["rtp.jsonl"],
        "one of them 'toxic'; found warm, cold: leave out graded",
    ),
    (["a", "b", "toxic"], ["rtp.jsonl"], "need two labels.* found a, b, toxic"),
]
"""Labels and graded texts of a scorer to be trained."""
COMPARED = [
    (two([0.5]), ["maybe"], "unknown label 'maybe'; allowed: no, yes"),
    (two([0.5]), [0.5], "one number per text; found no, yes"),
    (graded([0.5]), [1.5], r"must lie in \[0, 1\]; found 1.5"),
    (graded([0.5]), [], "1 texts have numbers and 0 have a truth"),
    (graded([]), [], "no text to compare"),
]
"""Numbers of a scorer and the truth."""


def texts_of(name, content):
    Path(name).write_bytes(content)
    return read_texts(Path(name))


def graded_row(row):
    Path("rtp.jsonl").write_text(json.dumps(row))
    return [read_graded(Path("rtp.jsonl"), test) for test in (False, True)]


def learnt(labels, graded_texts):
    Path("texts.csv").write_text("text,label\n" + "".join(f"{text},warm\n" for text in GOOD))
    return read_data(labels, ["texts.csv"], [], graded_texts, Path("out"))


def linear(name="sentiment", **files):
    """A trained scorer, of which files have another content."""
    save_linear(toy(), Path(), "sentiment", data=(), examples=8, c=1.0, held_out=())
    for ending, content in files.items():
        Path(f"sentiment.{ending}").write_bytes(content)
    return load_linear(name, Path())


def cached(name, content):
    Path(name).write_text(content)
    return ScoreCache(Path() if name.endswith("sqlite") else Path(name))


def by_file(name, content=None):
    if content is not None:
        Path(name).write_bytes(content)
    return make_scorer("accuracy", f"./{name}", ScorerOptions())


USUAL = ("accuracy", "perplexity")


class Joining(Scorer):
    name, version, columns, joins_prompt = "joining", "1", ("joining",), True

    def score(self, items):
        return [(1.0,) for _ in items]


CALLS = {
    "answers as continued prompts": (
        lambda: score_table(
            pd.DataFrame({"text": ["Rain."], "prompt": "Why", "attribute": "x", "method": "chat"}),
            Joining(),
        ),
        "joining reads a prompt and a text as one text, and an answer .* ask for perplexity",
    ),
    "an unknown scorer": (
        lambda: expand_scorers(["accuracy", "liner"], USUAL),
        "unknown scorer 'liner'.*did you mean 'linear'",
    ),
    "no model behind =": (
        lambda: expand_scorers(["accuracy="], USUAL),
        "accuracy= names no model",
    ),
    "an unknown linear scorer": (
        lambda: linear("mood"),
        "unknown linear scorer 'mood'; allowed: sentiment",
    ),
    "other weights": (
        lambda: linear(npz=b"other"),
        "not the file its card describes; train it again",
    ),
    "another card": (
        lambda: linear(json=b'{"task": "sentiment"}'),
        "is not the card of a scorer: labels",
    ),
    "a cache that is no database": (
        lambda: cached("scores.sqlite", "this is no database " * 100),
        "cannot use the scores in .*not a database.; move it away, or",
    ),
    "a cache in a file": (
        lambda: cached("file", ""),
        "cannot keep scores in .*give another cache",
    ),
    "no classifier": (lambda: Classifier("./nothing"), "cannot load the classifier"),
    "an adapter of nine layers": (
        lambda: load_adapter_network(BASE, 9, 2),
        "layers must be at most 4, the model's; found 9",
    ),
    "an adapter of a GPT-2": (
        lambda: load_adapter_network("tiny-gpt2", 2, 2),
        "of Llama's make, such as smollm2-135m; found GPT2",
    ),
    # A trained scorer is a file, and never looked for on the hub.
    **{
        f"no file {name}": (
            lambda name=name: by_file(name),
            f"accuracy=./{name}: there is no such file",
        )
        for ending in (LINEAR_ENDING, ADAPTER_ENDING)
        for name in (f"gone{ending}", f"gone{ending.upper()}")
    },
    **{
        f"an ending in capitals {ending}": (
            lambda ending=ending: by_file(f"gone{ending.upper()}", b""),
            f"ends in {ending}, in small letters.*rename both",
        )
        for ending in (LINEAR_ENDING, ADAPTER_ENDING)
    },
}


def curves(*families):
    texts = made_curves({"lapa2": LINE})
    return SteeringCurves(texts[texts["family"].isin(families)], ["acc"], 5)


def rows():
    for name, content, message in FILES:
        call = lambda name=name, content=content: texts_of(name, content)  # noqa: E731
        yield f"{name} of {content[:12]!r}", call, message, ScoringError
    for row, message in GRADED:
        message = f"is not a file of RealToxicityPrompts .*{message}"
        yield f"graded {row}", lambda row=row: graded_row(row), message, DataError
    for labels, texts, message in LEARNT:
        call = lambda labels=labels, texts=texts: learnt(labels, texts)  # noqa: E731
        yield f"labels {labels}", call, message, ScoringError
    for numbers, truth, message in COMPARED:
        call = lambda numbers=numbers, truth=truth: agreement(  # noqa: E731
            numbers, truth, ["a"] * len(numbers)
        )
        yield f"{len(numbers)} numbers and {truth}", call, message, ScoringError
    for name, (call, message) in CALLS.items():
        yield name, call, message, ScoringError
    compared = lambda: curves("baseline", "lapa2").compare("lapa")  # noqa: E731
    yield (
        "an unknown family",
        compared,
        "unknown family 'lapa'; .* did you mean 'lapa2'",
        ScoringError,
    )
    for family in ("baseline", "lapa2"):
        yield (
            f"curves of {family} alone",
            partial(curves, family),
            f"one other arm; found {family}",
            ScoringError,
        )


def test_a_scorer_that_is_missing_is_said_before_others_score(tmp_path):
    (tmp_path / "t.csv").write_text("text,prompt,attribute\nThe lake is calm,The lake,positive\n")
    said = []
    with pytest.raises(Lapa2Error, match="nowhere"):
        score(
            tmp_path / "t.csv",
            scorers=["repetition", "accuracy=linear", "accuracy=nowhere"],
            task="sentiment",
            cache=tmp_path / "scores",
            notify=said.append,
        )
    assert not said


@pytest.mark.parametrize(
    ("call", "message", "error"), [pytest.param(*row, id=name) for name, *row in rows()]
)
def test_what_the_room_refuses(call, message, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lapa2_interp.scoring.linear.COLUMNS", 2**12)  # a fit takes a moment
    with pytest.raises(error, match=message):
        call()
