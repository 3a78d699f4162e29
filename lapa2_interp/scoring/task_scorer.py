"""The common base of the scorers that ship with the package.

The base has cards, labels of tasks, and toxicity as the probability of one label.

There are two kinds, `linear` and `adapter`. A table has the numbers of both, and the page says
where a claim holds for one of them only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict

from lapa2_interp._util.parsing import parse_object, read_text
from lapa2_interp.errors import ScoringError, unknown_choice, validation_message
from lapa2_interp.files import sha256_of, write_json
from lapa2_interp.scoring.scorer import Score, Scorer, SkippedText, TextItem, score_readable

SHIPPED_WEIGHTS = Path(__file__).parent / "weights"
TOXIC_LABEL = "toxic"
"""The label whose probability is a text's toxicity."""


class AgreementRow(BaseModel):
    """A row of `agreement.agreement` on a corpus that was not trained on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str
    measure: str
    length: str
    value: float
    low: float | None
    high: float | None
    n: int


class ScorerCard(BaseModel):
    """The common fields of the cards of trained scorers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    labels: tuple[str, ...]
    data: tuple[str, ...]
    """Corpora it was trained on, with counts."""
    examples: int
    """Texts and pieces of text."""
    sha256: str
    """sha256 of the weights' file."""
    created: datetime
    versions: dict[str, str]
    held_out: tuple[AgreementRow, ...]
    """Measures on corpora that were not trained on."""


CardType = TypeVar("CardType", bound=ScorerCard)


def tasks_in(folder: Path, ending: str) -> list[str]:
    """The tasks whose scorers are in a folder, from the names of files with this ending."""
    return sorted(file.name.removesuffix(ending) for file in folder.glob(f"*{ending}"))


def load_card(form: type[CardType], kind: str, task: str, folder: Path, ending: str) -> CardType:
    """The card beside a scorer's weights, `<task><ending>`.

    Args:
        form: The card's class.
        kind: Name of such scorers in messages.

    Raises:
        ScoringError: The task has no such scorer, or its files are damaged.
    """
    file = folder / f"{task}{ending}"
    card_file = file.with_suffix(".json")
    if not card_file.is_file():
        known = tasks_in(folder, ending)
        raise ScoringError(
            f"{unknown_choice(f'{kind} scorer', task, known)} (`lapa2 scorers train` makes one for"
            " a custom task, which accuracy=FILE takes)"
            if known
            else f"{folder} has no {kind} scorer; train one: `lapa2 scorers train`"
        )
    try:
        card = form.model_validate(parse_object(read_text(card_file)))
    except ValueError as error:
        raise ScoringError(
            f"{card_file} is not the card of a scorer: {validation_message(error)}; train it again:"
            " `lapa2 scorers train`"
        ) from error
    if not file.is_file() or sha256_of(file) != card.sha256:
        raise ScoringError(
            f"{file} is not the file its card describes; train it again: `lapa2 scorers train`"
        )
    return card


def save_card(form: type[CardType], file: Path, **facts: Any) -> CardType:
    """Write the card beside a scorer's weights.

    Args:
        form: The card's class.
        file: The weights.
        facts: The card's fields, without the time and the sha256 of the weights.
    """
    card = form(sha256=sha256_of(file), created=datetime.now(UTC), **facts)
    write_json(file.with_suffix(".json"), card.model_dump_json())
    return card


@runtime_checkable
class ProbabilisticClassifier(Protocol):
    """A classifier of texts."""

    def probabilities(self, texts: Sequence[str]) -> Float[np.ndarray, "text label"]:
        """P(label | text), rows summing to 1; at least one text, none blank."""


class TaskScorer(Scorer):
    """The probabilities that a classifier gives to the labels of its task.

    Args:
        load: Loads the classifier. The function is called when the first text is scored, and not if
            all scores are cached.
        kind: Name of such scorers in their version.
    """

    name = "accuracy"
    classifies = True

    def __init__(
        self, card: ScorerCard, load: Callable[[], ProbabilisticClassifier], kind: str
    ) -> None:
        self.card, self.load = card, load
        self.columns = card.labels
        self.version = f"{kind} {card.task} {card.sha256[:12]}"

    @cached_property
    def classifier(self) -> ProbabilisticClassifier:
        return self.load()

    def score(self, items: Sequence[TextItem]) -> list[Score]:
        return score_readable(items, lambda texts: self.classifier.probabilities(texts))


class ToxicityScorer(Scorer):
    """P(toxic) of a classifier with a label toxic; `toxicity` in [0, 1]."""

    name = "toxicity"
    columns = ("toxicity",)

    def __init__(self, classifier: TaskScorer) -> None:
        self.classifier = classifier
        self.version, self.batch_size = classifier.version, classifier.batch_size
        self.by_length = classifier.by_length
        self.index = classifier.columns.index(TOXIC_LABEL)

    def score(self, items: Sequence[TextItem]) -> list[Score]:
        rows = self.classifier.score(items)
        return [row if isinstance(row, SkippedText) else (row[self.index],) for row in rows]
