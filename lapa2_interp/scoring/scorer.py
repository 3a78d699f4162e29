"""Scorers: numbers of texts, one row per text, with the scorer's name and version for every table.

A scorer gives each `TextItem` a tuple of finite numbers, or a `SkippedText` with the reason.
`run_scorer` calls it in batches, for texts that are not in the cache on disk, and keeps the scores
that are made when it fails.

    scorer = Perplexity(model)
    table = run_scorer(scorer, items, ScoreCache(folder))     # one row per item: the scorer's columns, and `reason`
"""  # noqa: E501

from __future__ import annotations

import hashlib
import json
import math
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lapa2_interp._util.parsing import parse_json
from lapa2_interp._util.paths import check_regular_file
from lapa2_interp.errors import (
    ModelError,
    ScoringError,
    first_sentence,
    parameter,
    pluralize,
    unknown_choice,
)
from lapa2_interp.models.fingerprint import weights_read_once
from lapa2_interp.progress import progress_bar

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TextItem:
    """A text to score, with its prompt and attribute; "" if unknown.

    Attributes:
        text: The text to score.
        prompt: The prompt that it continues, or the message that it answers.
        attribute: The attribute that it was steered towards.
    """

    text: str
    prompt: str = ""
    attribute: str = ""


@dataclass(frozen=True)
class SkippedText:
    """A text without a score, and the reason.

    Attributes:
        reason: A fixed text for each cause, since tables count them.
        final: A second request cannot help (the text is too short). Final reasons are cached like
            numbers.
    """

    reason: str
    final: bool = True


NO_NUMBER = SkippedText("no number", final=False)
"""A score that is NaN or infinite. float16 overflows; another precision may not."""
SURROGATE = re.compile("[\\ud800-\\udfff]")
"""Half a character of UTF-16 by itself, which UTF-8 does not have."""


def unreadable_reason(text: str) -> str:
    """The reason why no model can read a text, or ""."""
    if not text.strip():
        return "empty text"
    return "text not valid Unicode" if SURROGATE.search(text) else ""


SCORERS = {
    "accuracy": (
        "share of texts whose attribute a classifier recognises: adapter and linear, =vader"
        " (sentiment), or =MODEL (hub id, folder, or a file of `lapa2 scorers train`)"
    ),
    "masked": (
        "accuracy, where the words of all prefixes are hidden from the classifier; =MODEL as for"
        " accuracy"
    ),
    "echo": "share of texts that say a word of their own prefix",
    "repetition": "share of a text's 4-grams of words that it had before",
    "perplexity": "under a causal model: smollm2-135m, or =MODEL (the paper: gpt2-large)",
    "conditional-perplexity": "the same, of the tokens after the prompt, given the prompt",
    "distinct": (
        "distinct-1, -2, -3 of each set of texts: words, or =TOKENIZER (the paper: roberta-large)"
    ),
    "toxicity": (
        "mean P(toxic): adapter and linear; or =MODEL:LABEL, a classifier and its label of toxic"
        " text"
    ),
    "judge": (
        "an LLM under the paper's prompt, =MODEL, through any OpenAI-compatible endpoint"
        " (OPENAI_API_KEY, judge_url)"
    ),
}
"""Scorers by name, with the models or services of each."""

CLASSIFIERS = ("adapter", "linear")
"""The classifiers that ship with the package, the more accurate one first. They work differently
and make different errors, so tables have the numbers of both."""
CLASSIFIER_CHOICES = {"adapter": ("adapter",), "linear": ("linear",), "both": CLASSIFIERS}
"""Words in a list of scorers that choose the classifiers of accuracy and toxicity."""


def parse_scorer(asked: str) -> tuple[str, str, str]:
    """Task, name and model of a requested scorer, [TASK:]NAME[=MODEL]; "" if not given. With a task
    it scores texts of that task only."""
    scored, _, model = asked.partition("=")
    task, _, name = scored.rpartition(":")
    return task, name, model


def expand_scorers(asked: Sequence[str], usual: Sequence[str]) -> tuple[str, ...]:
    """The scorers to run, in the form of `parse_scorer`, each once.

    A plain accuracy or toxicity becomes one scorer for each classifier, and a plain masked uses the
    first classifier. A word of `CLASSIFIER_CHOICES` chooses the classifiers; the default is both.

    Args:
        asked: Names of `SCORERS`, plain or as [TASK:]NAME[=MODEL], and words of
            `CLASSIFIER_CHOICES`.
        usual: The names if only such a word is given.

    Raises:
        ScoringError: An unknown name, or = without a model.
    """
    words = [word for word in asked if word in CLASSIFIER_CHOICES]
    names = [word for word in asked if word not in CLASSIFIER_CHOICES] or list(usual)
    of_words = [parse_scorer(request)[1] for request in names if not parse_scorer(request)[2]]
    if words and not {"accuracy", "toxicity", "masked"} & set(of_words):
        raise ScoringError(
            f"{words[0]} says which classifier judges accuracy, toxicity or masked; ask for one of"
            " them, too, such as accuracy"
        )
    by = list(
        dict.fromkeys(kind for word in words or ["both"] for kind in CLASSIFIER_CHOICES[word])
    )
    expanded: list[str] = []
    for request in names:
        _, name, model = parse_scorer(request)
        if name not in SCORERS:
            raise ScoringError(unknown_choice("scorer", name, [*SCORERS, *CLASSIFIER_CHOICES]))
        if request.endswith("=") and not model:
            raise ScoringError(f"{request} names no model; give one, or leave = out")
        if name in ("accuracy", "toxicity") and not model:
            expanded += [f"{request}={one}" for one in by]
        else:
            expanded.append(f"{request}={by[0]}" if name == "masked" and not model else request)
    return tuple(dict.fromkeys(expanded))


Score = tuple[float, ...] | SkippedText


class Scorer(ABC):
    """A scorer of texts.

    Attributes:
        name: accuracy, perplexity, toxicity, judge, ...
        version: Everything else that decides its numbers: model and weights, service, prompt. A
            table never mixes the numbers of two versions.
        columns: Names of its numbers.
        classifies: True if the columns are labels, and the largest number is the answer.
        item_fields: Fields of an item that decide the score besides the text.
        joins_prompt: True if it reads a text and the prompt in front of it as one text.
        batch_size: Number of items in a batch.
        by_length: True: a batch has texts of similar length. False: texts with the same beginning.
    """

    name: str
    version: str
    columns: tuple[str, ...]
    classifies: bool = False
    item_fields: tuple[str, ...] = ()
    joins_prompt: bool = False
    batch_size: int = 32
    by_length: bool = True

    @abstractmethod
    def score(self, items: Sequence[TextItem]) -> list[Score]:
        """One score per item, in order.

        Raises:
            ScoringError: No more texts can be scored now: no key, no server, or a quota that is
                used up.
        """

    def scores_in_pieces(self, items: Sequence[TextItem]) -> Iterator[dict[int, Score]]:
        """Scores by the index of their items, in pieces, each as soon as it is made, so that it can
        be cached at once.

        Raises:
            ScoringError: As `score`, after the pieces that are made.
        """
        yield dict(enumerate(self.score(items)))

    def close(self) -> None:  # noqa: B027 - most scorers have none
        """Close connections, if there are any."""

    def key(self, item: TextItem) -> str:
        """The key of a score in the cache: a hash of scorer, version and everything that decides
        the score."""
        parts = [
            self.name,
            self.version,
            item.text,
            *(str(getattr(item, field)) for field in self.item_fields),
        ]
        return hashlib.sha256(
            json.dumps(parts, ensure_ascii=False).encode("utf-8", "surrogatepass")
        ).hexdigest()


class ScorerInPieces(Scorer):
    """A scorer that makes the scores of a batch in pieces, by `scores_in_pieces`."""

    def score(self, items: Sequence[TextItem]) -> list[Score]:
        scores = {
            index: score for piece in self.scores_in_pieces(items) for index, score in piece.items()
        }
        return [scores[index] for index in range(len(items))]

    @abstractmethod
    def scores_in_pieces(self, items: Sequence[TextItem]) -> Iterator[dict[int, Score]]: ...


def score_readable(
    items: Sequence[TextItem], numbers: Callable[[list[str]], Iterable[Iterable[float]]]
) -> list[Score]:
    """The numbers of each text that a model can read, by a function of all these texts; the others
    are skipped."""
    reasons = [unreadable_reason(item.text) for item in items]
    texts = [item.text for item, why in zip(items, reasons, strict=True) if not why]
    rows = iter(numbers(texts) if texts else ())
    return [SkippedText(why) if why else tuple(map(float, next(rows))) for why in reasons]


class ScoringStoppedError(ScoringError):
    """A scorer stopped before the end. Its scores are in the cache, and the same command scores
    only the rest."""


class ScoreCache:
    """Scores on disk, one SQLite file per folder. Values are numbers or reasons, never texts.

    Args:
        folder: A folder, which is created if missing; None keeps scores in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        if folder is None:
            self._database = sqlite3.connect(":memory:")
        else:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file = folder / "scores.sqlite"
                if file.is_symlink():
                    raise ValueError(f"{file.name} is a link, which is not followed")
                if file.exists():
                    check_regular_file(file)
                self._database = sqlite3.connect(file, timeout=60)
            except (OSError, ValueError, sqlite3.Error) as error:
                raise ScoringError(
                    f"cannot keep scores in {folder}: {error}; give another {parameter('cache')}"
                ) from error
        self.file = "memory" if folder is None else f"{folder}/scores.sqlite"
        with self._database_errors():
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS numbers (key TEXT PRIMARY KEY, value TEXT NOT NULL)"
            )

    @contextmanager
    def _database_errors(self) -> Iterator[None]:
        """A block in which errors of the database become ScoringError."""
        try:
            yield
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            raise ScoringError(
                f"cannot use the scores in {self.file} ({error}); move it away, or give another"
                f" {parameter('cache')}, and score again"
            ) from error

    def close(self) -> None:
        """Close the file; the scores stay."""
        self._database.close()

    def __enter__(self) -> ScoreCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, keys: Sequence[str]) -> dict[str, Score]:
        """The known scores among these keys."""
        scores: dict[str, Score] = {}
        with self._database_errors(), closing(self._database.cursor()) as cursor:
            for part in chunks(list(dict.fromkeys(keys)), 500):
                marks = ",".join("?" * len(part))
                cursor.execute(f"SELECT key, value FROM numbers WHERE key IN ({marks})", part)
                for key, value in cursor:
                    stored = parse_json(str(value))
                    if isinstance(stored, str):
                        scores[key] = SkippedText(stored)
                    elif all(map(math.isfinite, stored)):
                        scores[key] = tuple(stored)
                    else:
                        raise ValueError(f"{value} is no score")
        return scores

    def put(self, scores: Iterable[tuple[str, Score]]) -> None:
        """Store scores. Skipped texts whose reason is not final are left out."""
        rows = []
        for key, score in scores:
            if not (isinstance(score, SkippedText) and not score.final):
                text = json.dumps(score.reason if isinstance(score, SkippedText) else score)
                rows.append((key, text))
        with self._database_errors(), self._database:
            self._database.executemany("INSERT OR REPLACE INTO numbers VALUES (?, ?)", rows)


def chunks(values: Sequence, size: int) -> Iterator[Sequence]:
    """The values in order, `size` at a time."""
    for first in range(0, len(values), size):
        yield values[first : first + size]


class _TextFailedError(Exception):
    """The error of a library at the item of a batch with this index."""

    def __init__(self, index: int, error: Exception) -> None:
        self.index, self.error = index, error


def describe_text_failure(title: str, text: str, error: Exception) -> str:
    """A library's error at a text, in one line with the text's beginning.

    Args:
        title: Which text it is, such as "text 3".
    """
    beginning = f"{text[:40]!r}{'...' * (len(text) > 40)}"
    message = f"{type(error).__name__}: {first_sentence(error)}".removesuffix(": ")
    return f"{title} ({beginning}): {message}; leave the text out, or take another scorer"


def _checked_pieces(scorer: Scorer, items: Sequence[TextItem]) -> Iterator[dict[int, Score]]:
    """The scores of a batch by index, in pieces. After an error of a library, the items that have
    no score yet are scored one by one.

    Raises:
        ScoringError, ModelError: As the scorer, which cannot go on; or it does not give the numbers
            of its columns for each item.
        _TextFailedError: A library fails at one item alone.
    """
    left = dict(enumerate(items))
    try:
        for piece in scorer.scores_in_pieces(items):
            checked = {index: _checked_score(scorer, score) for index, score in piece.items()}
            for index in checked:
                del left[index]
            yield checked
    except (ScoringError, ModelError):
        raise
    except Exception:
        for index, item in left.items():
            try:
                (score,) = scorer.score([item])
                checked = {index: _checked_score(scorer, score)}
            except (ScoringError, ModelError):
                raise
            except Exception as error:
                raise _TextFailedError(index, error) from error
            yield checked
        return
    if left:
        raise ScoringError(
            f"it gives {pluralize(len(items) - len(left), 'score')} for"
            f" {pluralize(len(items), 'text')}; it must give one for each"
        )


def _checked_score(scorer: Scorer, score: Score) -> Score:
    """A score as plain numbers; what is not finite is none."""
    if isinstance(score, SkippedText):
        return score
    numbers = tuple(map(float, score))
    if len(numbers) != len(scorer.columns):
        raise ScoringError(
            f"it gives {pluralize(len(numbers), 'number')} of a text, and its columns are"
            f" {', '.join(scorer.columns)}; it must give one for each"
        )
    return numbers if all(map(math.isfinite, numbers)) else NO_NUMBER


@weights_read_once()
def run_scorer(
    scorer: Scorer, items: Sequence[TextItem], cache: ScoreCache | None = None
) -> pd.DataFrame:
    """Score items, equal ones once.

    Returns:
        One row per item, in order: the scorer's columns (NaN if skipped) and `reason` (why it
        was skipped, or "").

    Raises:
        ScoringStoppedError: The scorer stopped, or a library failed; the message has the number of
            scores kept, and the cause with the number of the text if it is that of one text.
    """
    import pandas as pd

    cache = cache or ScoreCache(None)
    keys = [scorer.key(item) for item in items]
    known = cache.get(keys)
    waiting = {key: item for key, item in zip(keys, items, strict=True) if key not in known}
    # Texts of similar length together, since those of equal length are read in one pass; or texts
    # with the same beginning, which a causal model reads once.
    texts = {key: item.text for key, item in waiting.items()}
    order = sorted(texts, key=lambda key: len(texts[key]) if scorer.by_length else texts[key])
    with progress_bar(len(order), scorer.name, "text") as bar:
        for part in chunks(order, scorer.batch_size):
            try:
                for piece in _checked_pieces(scorer, [waiting[key] for key in part]):
                    scores = [(part[index], score) for index, score in piece.items()]
                    cache.put(scores)
                    known.update(scores)
                    bar.update(len(scores))
            except (ScoringError, ModelError, _TextFailedError) as error:
                cause: object = error
                if isinstance(error, _TextFailedError):
                    key = part[error.index]
                    title = f"text {keys.index(key) + 1}"
                    cause = describe_text_failure(title, texts[key], error.error)
                final = {
                    key
                    for key, score in known.items()
                    if not isinstance(score, SkippedText) or score.final
                }
                done = sum(key in final for key in keys)
                raise ScoringStoppedError(
                    f"{scorer.name} stopped after {done} of {len(items)} texts, which are kept:"
                    f" {cause}"
                ) from error
    nothing = (float("nan"),) * len(scorer.columns)
    rows = [known[key] for key in keys]
    table = pd.DataFrame(
        [nothing if isinstance(row, SkippedText) else row for row in rows],
        columns=list(scorer.columns),
    )
    return table.assign(reason=[row.reason if isinstance(row, SkippedText) else "" for row in rows])
