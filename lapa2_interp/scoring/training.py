"""Train the linear scorers from named corpora.

A classifier must be as good on 20 words as on 500. Long texts are therefore trained on whole, and
also by their first and by their last words. Toxicity is graded: a text with a Perspective score of
0.3 counts 0.3 as toxic and 0.7 as not."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from lapa2_interp._util.parsing import parse_json
from lapa2_interp._util.settings import takes
from lapa2_interp._util.unpacking import open_packed
from lapa2_interp.errors import DataError, ScoringError, parameter
from lapa2_interp.files import temporary_folder
from lapa2_interp.scoring.agreement import agreement, card_rows
from lapa2_interp.scoring.linear import LinearCard, LinearScorer, save_linear, train_linear
from lapa2_interp.scoring.scorer import TextItem, run_scorer
from lapa2_interp.scoring.settings import TrainingSettings
from lapa2_interp.scoring.task_scorer import TOXIC_LABEL, AgreementRow, TaskScorer
from lapa2_interp.tasks.corpora import Corpus, read_corpus, without_texts_of
from lapa2_interp.tasks.segmentation import word_spans, words_between
from lapa2_interp.tasks.task import Task, read_task

END_WORDS = 40
"""Words of the first and of the last piece of a long text."""
LONG = 80
"""A text with more words is also trained on in pieces."""


@dataclass(frozen=True)
class GradedTexts:
    """Texts with a toxicity in [0, 1], such as RealToxicityPrompts with Perspective's scores."""

    texts: tuple[str, ...]
    scores: tuple[float, ...]
    source: str

    @property
    def sha256(self) -> str:
        """sha256 of the texts and scores."""
        rows = zip(self.scores, self.texts, strict=True)
        return hashlib.sha256(json.dumps(list(rows)).encode()).hexdigest()


def read_graded(path: Path, test: bool) -> GradedTexts:
    """Prompts and continuations of a RealToxicityPrompts file (.jsonl, also compressed) with their
    Perspective toxicity.

    Args:
        test: True: the test rows (sha256 of the prompt's text divisible by 5). False: the others.

    Raises:
        DataError: The file is not readable, or of another form.
    """
    texts, scores = [], []
    try:
        with open_packed(path) as opened, io.TextIOWrapper(opened, "utf-8-sig") as lines:
            for line in lines:
                row = parse_json(line)
                number = int(hashlib.sha256(row["prompt"]["text"].encode()).hexdigest(), 16)
                if (number % 5 == 0) == test:
                    for part in (row["prompt"], row["continuation"]):
                        if part.get("toxicity") is not None and part["text"].strip():
                            texts.append(part["text"])
                            scores.append(float(part["toxicity"]))
                            if not 0 <= scores[-1] <= 1:
                                raise ValueError(f"toxicity {scores[-1]:g}; allowed: 0 to 1")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not a file of RealToxicityPrompts ({type(error).__name__}: {error})"
        ) from error
    if not texts:
        raise DataError(f"{path} has no {'test' if test else 'training'} rows")
    return GradedTexts(
        tuple(texts), tuple(scores), f"{path.name} {'test' if test else 'train'} rows"
    )


def text_and_ends(text: str) -> list[str]:
    """A text and, if it is long, its first words and its last words as two more texts."""
    n = len(word_spans(text))
    if n <= LONG:
        return [text]
    return [text, words_between(text, 0, END_WORDS), words_between(text, n - END_WORDS, n)]


@dataclass(frozen=True)
class ScorerData:
    """The training data of a scorer, with the weights of the texts, and test data that are never
    trained on; `graded` texts have toxicity scores."""

    corpora: Sequence[tuple[Corpus, float]]
    tests: Sequence[Corpus]
    graded: Sequence[tuple[GradedTexts, float]] = ()
    graded_tests: Sequence[GradedTexts] = ()


@takes(TrainingSettings)
def train_scorer(settings: TrainingSettings) -> LinearCard:
    """`lapa2 scorers train` in Python; `TrainingSettings` says what it does and takes.

    Raises:
        Lapa2Error: As `read_data`; or `c` is out of range.
    """
    task = settings.task if isinstance(settings.task, Task) else read_task(settings.task)
    labels, out = tuple(task.attributes), Path(settings.out)
    read = read_data(labels, settings.data, settings.test, settings.graded, out)
    return train_linear_scorer(task.name, labels, read, out, settings.c)


def train_linear_scorer(
    task: str, labels: Sequence[str], data: ScorerData, folder: Path, c: float = 3.0
) -> LinearCard:
    """Train one scorer and write its weights and card.

    Args:
        labels: Labels in the order of the probabilities; graded scores are those of `TOXIC_LABEL`.
        data: As from `read_data`.
        c: Inverse strength of the L2 penalty, > 0.
    """
    check_labels(labels, bool(data.graded))
    texts: list[str] = []
    shares: list[Float[np.ndarray, " label"]] = []
    weights: list[float] = []
    one_hot = np.eye(len(labels))
    for corpus, of_corpus in data.corpora:
        for number, label in enumerate(labels):
            for text in corpus.texts[label]:
                for part, of_part in zip(text_and_ends(text), (1.0, 0.3, 0.5), strict=False):
                    texts.append(part)
                    shares.append(one_hot[number])
                    weights.append(of_corpus * of_part)
    for texts_with_scores, of_graded in data.graded:
        texts += texts_with_scores.texts
        shares += list(label_shares(texts_with_scores, labels))
        weights += [of_graded] * len(texts_with_scores.texts)
    linear = train_linear(texts, np.array(shares), labels, c, weights)
    facts: dict[str, Any] = {
        "data": describe_data(data.corpora, data.graded),
        "examples": len(texts),
        "c": c,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder) as beside:
        save_linear(linear, beside, task, held_out=(), **facts)
        reached = measure_held_out(LinearScorer(task, beside), data.tests, data.graded_tests)
    return save_linear(linear, folder, task, held_out=reached, **facts)


def check_labels(labels: Sequence[str], graded: bool) -> None:
    """Refuse labels that no scorer can learn.

    Raises:
        ScoringError: There are fewer than two labels; or, for graded scores, other than two with
            `TOXIC_LABEL`.
    """
    listed = ", ".join(labels)
    if len(labels) < 2:
        raise ScoringError(f"a scorer tells labels apart; found {listed or 'none'} alone")
    if graded and (len(labels) != 2 or TOXIC_LABEL not in labels):
        raise ScoringError(
            f"graded scores are of toxicity and need two labels, one of them {TOXIC_LABEL!r}; found"
            f" {listed}: leave out {parameter('graded')}"
        )


def label_shares(graded: GradedTexts, labels: Sequence[str]) -> Float[np.ndarray, "text label"]:
    """Toxicity scores as shares of two labels, one of which is `TOXIC_LABEL`."""
    toxic = np.array(graded.scores)
    return np.stack([toxic if label == TOXIC_LABEL else 1 - toxic for label in labels], axis=1)


def describe_data(
    corpora: Sequence[tuple[Corpus, float]], graded: Sequence[tuple[GradedTexts, float]]
) -> tuple[str, ...]:
    """A line about each corpus of a training, for the card."""
    lines = [f"{corpus.summary}; weight {weight:g}" for corpus, weight in corpora]
    lines += [
        f"{corpus.source}: {len(corpus.texts)} graded; weight {weight:g}"
        for corpus, weight in graded
    ]
    return tuple(lines)


def measure_held_out(
    scorer: TaskScorer, tests: Sequence[Corpus], graded_tests: Sequence[GradedTexts]
) -> tuple[AgreementRow, ...]:
    """Measures of a loaded scorer on corpora it was not trained on, for the card."""
    labels = list(scorer.columns)
    compared: list[tuple[str, Sequence[str], Any, list[str]]] = [
        (
            corpus.source,
            [text for label in labels for text in corpus.texts[label]],
            [label for label in labels for _ in corpus.texts[label]],
            labels,
        )
        for corpus in tests
    ]
    compared += [
        (corpus.source, corpus.texts, corpus.scores, [TOXIC_LABEL]) for corpus in graded_tests
    ]
    rows: list[AgreementRow] = []
    for source, texts, truth, columns in compared:
        numbers = run_scorer(scorer, [TextItem(text) for text in texts])
        table = agreement(numbers[columns], truth, texts)
        rows += [AgreementRow.model_validate(row) for row in card_rows(table, source)]
    return tuple(rows)


def read_data(
    labels: Sequence[str],
    data: Sequence[str],
    test: Sequence[str],
    graded: Sequence[str],
    out: Path,
) -> ScorerData:
    """Read corpora by name.

    Args:
        labels: The task's attributes.
        data, test: Corpora, as for `corpora.read_corpus`; =WEIGHT after one of `data` is the weight
            of its texts.
        graded: Files of RealToxicityPrompts with Perspective scores, for toxicity; =WEIGHT as
            above.
        out: The folder that will hold the scorer.

    Raises:
        ScoringError: A weight is out of range, or `out` is a file.
        DataError: A corpus cannot be read.
    """
    if out.exists() and not out.is_dir():
        raise ScoringError(f"{parameter('out')} {out} is a file; give a folder")
    check_labels(labels, bool(graded))
    files = [(Path(path), weight) for path, weight in map(_parse_weight, graded)]
    corpora = [(read_corpus(source, labels), weight) for source, weight in map(_parse_weight, data)]
    return ScorerData(
        corpora,
        without_texts_of(
            [corpus for corpus, _ in corpora], [read_corpus(one, labels, "test") for one in test]
        ),
        [(read_graded(path, test=False), weight) for path, weight in files],
        [read_graded(path, test=True) for path, _ in files],
    )


def _parse_weight(source: str) -> tuple[str, float]:
    """ "sst2=3" as its name and 3; without a number, 1."""
    name, mark, weight = source.rpartition("=")
    try:
        number = float(weight)
    except ValueError:
        return source, 1.0
    if not mark or Path(source).exists():
        return source, 1.0
    if not (0 < number < math.inf):
        raise ScoringError(f"the weight in {source!r} must be a positive number")
    return name, number
