"""Scorers: texts -> numbers, one row per text, under a name and a version that every table prints.

A scorer sees `ScorerInput`s and gives each a tuple of numbers, or a `SkippedText` with the reason.
`run_scorer` feeds it in batches, asks only for what the cache on disk does not know, and keeps what
was scored when it fails half-way.

    scorer = Perplexity(model)
    table = run_scorer(scorer, items, Cache(folder))     # one row per item: the scorer's columns, and `skipped`
"""  # noqa: E501

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapa2_interp._util.errors import ScoringError, pluralize, unknown_choice
from lapa2_interp._util.parsing import check_regular_file, parse_json
from lapa2_interp._util.progress import progress_bar

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ScorerInput:
    """A text and what else a scorer may need; empty where it is not known.

    Attributes:
        text: As it is scored.
        prompt: What it continues.
        attribute: What it was steered towards.
    """

    text: str
    prompt: str = ""
    attribute: str = ""


@dataclass(frozen=True)
class SkippedText:
    """Why a text has no number.

    Attributes:
        reason: The same words for the same cause: tables count them.
        final: Asking again cannot help (the text is too short); such answers are cached like
            numbers.
    """

    reason: str
    final: bool = True


SURROGATE = re.compile("[\\ud800-\\udfff]")
"""Half a character of UTF-16 by itself, which UTF-8 does not have."""


def unreadable_reason(text: str) -> str:
    """Why no model can read a text, or ""."""
    if not text.strip():
        return "empty text"
    return "text not valid Unicode" if SURROGATE.search(text) else ""


SCORERS = {
    "accuracy": (
        "share of texts whose attribute a classifier recognises: adapter and linear, or =MODEL (hub"
        " id, folder, or a file of `lapa2 scorers train`)"
    ),
    "masked": (
        "accuracy, where the words of all prefixes are hidden from the classifier; =MODEL as for"
        " accuracy"
    ),
    "echo": "share of texts that say a word of their own prefix",
    "repetition": "share of a text's 4-grams of words that it had before",
    "perplexity": "under a causal model: smollm2-135m, or =MODEL (the paper: gpt2-large)",
    "distinct": (
        "distinct-1, -2, -3 of each set of texts: words, or =TOKENIZER (the paper: roberta-large)"
    ),
    "toxicity": (
        "mean P(toxic): adapter and linear; =perspective (PERSPECTIVE_API_KEY); or =MODEL:LABEL, a"
        " classifier and its label of toxic text"
    ),
    "judge": (
        "an LLM under the paper's prompt, =MODEL, through any OpenAI-compatible endpoint"
        " (OPENAI_API_KEY, --judge-url)"
    ),
}
"""Scorers by name, and the models or services each takes."""

CLASSIFIERS = ("adapter", "linear")
"""The classifiers that ship with the package, the more accurate one first. They are of different
make and err differently, so tables have the numbers of both."""
CLASSIFIER_CHOICES = {"adapter": ("adapter",), "linear": ("linear",), "both": CLASSIFIERS}
"""Words that stand among scorers and say which classifiers give accuracy and toxicity."""


def parse_scorer(asked: str) -> tuple[str, str, str]:
    """Task, name and model of a scorer that is asked for: [TASK:]NAME[=MODEL]; "" where not given.
    With a task it scores texts of that task alone."""
    place, _, model = asked.partition("=")
    task, _, name = place.rpartition(":")
    return task, name, model


def expand_scorers(asked: Sequence[str], usual: Sequence[str]) -> tuple[str, ...]:
    """The scorers that run, each as `parse_scorer` reads it, none twice.

    A plain accuracy or toxicity becomes one for each classifier, and a plain masked is by the first
    of them. The classifiers are both, or what a word of `CLASSIFIER_CHOICES` among those asked for
    says.

    Args:
        asked: Names of `SCORERS`, each plain or as [TASK:]NAME[=MODEL], and words of
            `CLASSIFIER_CHOICES`.
        usual: The names where only such a word is asked for.

    Raises:
        ScoringError: An unknown name, or = without a model.
    """
    words = [each for each in asked if each in CLASSIFIER_CHOICES]
    names = [each for each in asked if each not in CLASSIFIER_CHOICES] or list(usual)
    of_words = [parse_scorer(each)[1] for each in names if not parse_scorer(each)[2]]
    if words and not {"accuracy", "toxicity", "masked"} & set(of_words):
        raise ScoringError(
            f"{words[0]} says which classifier judges accuracy, toxicity or masked; ask for one of"
            " them, too, such as accuracy"
        )
    by = list(
        dict.fromkeys(each for word in words or ["both"] for each in CLASSIFIER_CHOICES[word])
    )
    found: list[str] = []
    for each in names:
        _, name, model = parse_scorer(each)
        if name not in SCORERS:
            raise ScoringError(unknown_choice("scorer", name, [*SCORERS, *CLASSIFIER_CHOICES]))
        if each.endswith("=") and not model:
            raise ScoringError(f"{each} names no model; give one, or leave = out")
        if name in ("accuracy", "toxicity") and not model:
            found += [f"{each}={one}" for one in by]
        else:
            found.append(f"{each}={by[0]}" if name == "masked" and not model else each)
    return tuple(dict.fromkeys(found))


Score = tuple[float, ...] | SkippedText


class Scorer(ABC):
    """A scorer of texts.

    Attributes:
        name: accuracy, perplexity, toxicity, judge, ...
        version: What else decides its numbers: model and weights, service, prompt. Numbers of two
            versions never share a table.
        columns: Names of its numbers.
        classifies: Its columns are labels, and the largest number is its answer.
        needs: Fields of an item that enter the score besides the text.
        batch_size: Items given at once.
        by_length: Items given at once have texts of similar length; else, texts that begin alike.
    """

    name: str
    version: str
    columns: tuple[str, ...]
    classifies: bool = False
    needs: tuple[str, ...] = ()
    batch_size: int = 32
    by_length: bool = True

    @abstractmethod
    def score(self, items: Sequence[ScorerInput]) -> list[Score]:
        """One score per item, in order.

        Raises:
            ScoringError: Nothing more can be scored now: no key, no server, a quota that is used
                up.
        """

    def scores_in_pieces(self, items: Sequence[ScorerInput]) -> Iterator[dict[int, Score]]:
        """Scores by the place of their items, in pieces: each as soon as it is made, so that it can
        be kept at once.

        Raises:
            ScoringError: As `score`, after the pieces that are made.
        """
        yield dict(enumerate(self.score(items)))

    def close(self) -> None:  # noqa: B027 - most scorers hold nothing
        """Close connections, if there are any."""

    def key(self, item: ScorerInput) -> str:
        """The key of an item's score in the cache: a hash of scorer, version and everything that
        enters the score."""
        parts = [
            self.name,
            self.version,
            item.text,
            *(str(getattr(item, field)) for field in self.needs),
        ]
        return hashlib.sha256(
            json.dumps(parts, ensure_ascii=False).encode("utf-8", "surrogatepass")
        ).hexdigest()


class ScoringStoppedError(ScoringError):
    """A scorer stopped half-way; what it had scored is in the cache, and the same command asks only
    for the rest."""


class ScoreCache:
    """Scores on disk, one SQLite file per folder. Values are numbers or reasons, never texts.

    Each is stored with a hash of key and value. A score without it, or with another, is asked for
    again.

    Args:
        folder: Made when missing; None keeps scores in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        if folder is None:
            self._open = sqlite3.connect(":memory:")
        else:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                place = folder / "scores.sqlite"
                if place.is_symlink():
                    raise ValueError(f"{place.name} is a link, which is not followed")
                if place.exists():
                    check_regular_file(place)
                self._open = sqlite3.connect(place, timeout=60)
            except (OSError, ValueError, sqlite3.Error) as error:
                raise ScoringError(
                    f"cannot keep scores in {folder}: {error}; give another --cache"
                ) from error
        self.file = "memory" if folder is None else f"{folder}/scores.sqlite"
        with self._told():
            self._open.execute(
                "CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, value TEXT NOT NULL)"
            )

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise ScoringError(
                f"cannot use the scores in {self.file} ({error}); move it away, or give another"
                " --cache, and score again"
            ) from error

    def close(self) -> None:
        """Close the file; the scores stay."""
        self._open.close()

    def __enter__(self) -> ScoreCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, keys: Sequence[str]) -> dict[str, Score]:
        """The scores of those keys that are known."""
        scores: dict[str, Score] = {}
        damaged = 0
        with self._told(), closing(self._open.cursor()) as cursor:
            for part in _chunks(list(dict.fromkeys(keys)), 500):
                marks = ",".join("?" * len(part))
                cursor.execute(f"SELECT key, value FROM scores WHERE key IN ({marks})", part)
                for key, value in cursor:
                    try:
                        stored = _decode_value(key, str(value))
                    except ValueError:
                        damaged += 1
                        continue
                    scores[key] = SkippedText(stored) if isinstance(stored, str) else tuple(stored)
        if damaged:
            print(
                f"{pluralize(damaged, 'score')} in {self.file} damaged; asking for them again",
                file=sys.stderr,
            )
        return scores

    def put(self, scores: Iterable[tuple[str, Score]]) -> None:
        """Keep scores; skipped ones whose reason is not final are left out."""
        rows = []
        for key, score in scores:
            if not (isinstance(score, SkippedText) and not score.final):
                text = json.dumps(score.reason if isinstance(score, SkippedText) else score)
                rows.append((key, f"{text} {_value_digest(key, text)}"))
        with self._told(), self._open:
            self._open.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?)", rows)


def _decode_value(key: str, value: str) -> Any:
    """What a row of the cache says; raises ValueError where it is not what was written."""
    text, _, digest = value.rpartition(" ")
    if digest != _value_digest(key, text):
        raise ValueError(value)
    return parse_json(text)


def _value_digest(key: str, text: str) -> str:
    return hashlib.sha256(f"{key} {text}".encode()).hexdigest()[:16]


def _chunks(values: Sequence, size: int) -> Iterator[Sequence]:
    for first in range(0, len(values), size):
        yield values[first : first + size]


def run_scorer(
    scorer: Scorer, items: Sequence[ScorerInput], cache: ScoreCache | None = None
) -> pd.DataFrame:
    """Score items, each distinct one once.

    Returns:
        One row per item, in order: the scorer's columns (NaN where skipped) and `skipped` (the
        reason, or "").

    Raises:
        ScoringStoppedError: The scorer stopped half-way; the message says how much is kept and why.
    """
    import pandas as pd

    cache = cache or ScoreCache(None)
    keys = [scorer.key(item) for item in items]
    known = cache.get(keys)
    waiting = {key: item for key, item in zip(keys, items, strict=True) if key not in known}
    # Texts of similar length together: models pad a batch to its longest. Texts that begin alike
    # together: a causal model reads the beginning once.
    texts = {key: item.text for key, item in waiting.items()}
    order = sorted(texts, key=lambda key: len(texts[key]) if scorer.by_length else texts[key])
    with progress_bar(len(order), scorer.name, "text") as bar:
        for part in _chunks(order, scorer.batch_size):
            try:
                for piece in scorer.scores_in_pieces([waiting[key] for key in part]):
                    scores = [(part[place], score) for place, score in piece.items()]
                    cache.put(scores)
                    known.update(scores)
                    bar.update(len(scores))
            except ScoringError as error:
                kept = {
                    key
                    for key, score in known.items()
                    if not isinstance(score, SkippedText) or score.final
                }
                done = sum(key in kept for key in keys)
                raise ScoringStoppedError(
                    f"{scorer.name} stopped after {done} of {len(items)} texts, which are kept:"
                    f" {error}"
                ) from error
    nothing = (float("nan"),) * len(scorer.columns)
    rows = [known[key] for key in keys]
    table = pd.DataFrame(
        [nothing if isinstance(row, SkippedText) else row for row in rows],
        columns=list(scorer.columns),
    )
    return table.assign(
        skipped=[row.reason if isinstance(row, SkippedText) else "" for row in rows]
    )
