"""Echo: texts that contain words of their prefix, and classifiers from which these are hidden.

A prefix such as "Very positive:" may make a model write "positive", and a classifier may decide by
this word alone. A table of accuracies therefore has two more columns:

    echo      the share of texts with a word of their own prefix
    masked    accuracy if the words of all prefixes are hidden from the classifier

The words are those of an attribute's hard prefix, and its name, that no other attribute has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lapa2_interp.errors import ScoringError, unknown_choice
from lapa2_interp.scoring.scorer import Score, Scorer, ScorerInPieces, SkippedText, TextItem
from lapa2_interp.tasks.segmentation import COUNT_UNIT, normalize_text, words_pattern
from lapa2_interp.tasks.task import Task

NO_WORDS = "its prefix has no word of its own"
MASK = "..."
"""It replaces a hidden word."""


def prefix_words(task: Task) -> dict[str, tuple[str, ...]]:
    """By attribute, the words in lower case of its prefix and name that no other attribute has."""
    own = {name: task.words(name) for name in task.attributes}
    return {
        name: tuple(
            word
            for word in words
            if not any(word in others for rival, others in own.items() if rival != name)
        )
        for name, words in own.items()
    }


class Echo(Scorer):
    """1 if a text contains a word of its own prefix, else 0.

    Args:
        words: Words by attribute, as from `prefix_words`.
    """

    name = "echo"
    columns = ("echo",)
    item_fields = ("attribute",)
    batch_size = 2048

    def __init__(self, words: Mapping[str, Sequence[str]]) -> None:
        self.words = {name: words_pattern(own) if own else None for name, own in words.items()}
        own = "; ".join(f"{name}: {' '.join(own_words)}" for name, own_words in words.items())
        self.version = f"{own}, {COUNT_UNIT}"

    def score(self, items: Sequence[TextItem]) -> list[Score]:
        return [self._score(item) for item in items]

    def _score(self, item: TextItem) -> Score:
        if not item.text.strip():
            return SkippedText("empty text")
        if item.attribute not in self.words:
            raise ScoringError(unknown_choice("attribute", item.attribute, self.words))
        own = self.words[item.attribute]
        return (
            SkippedText(NO_WORDS)
            if own is None
            else (float(own.search(normalize_text(item.text)) is not None),)
        )


class Masked(ScorerInPieces):
    """A classifier of texts in which `MASK` replaces every word of every prefix.

    Args:
        inner: The classifier.
        words: Words by attribute, as from `prefix_words`.
    """

    name = "masked"

    def __init__(self, inner: Scorer, words: Mapping[str, Sequence[str]]) -> None:
        hidden = sorted({word for own in words.values() for word in own})
        self.inner = inner
        self.hidden = words_pattern(hidden) if hidden else None
        self.columns, self.classifies = inner.columns, inner.classifies
        self.batch_size = inner.batch_size
        self.by_length = inner.by_length
        self.version = f"{inner.version}, without {' '.join(hidden)}"

    def masked(self, item: TextItem) -> TextItem:
        """The item as the classifier sees it."""
        text = normalize_text(item.text)
        if self.hidden is None or not self.hidden.search(text):
            return item
        return replace(item, text=self.hidden.sub(MASK, text))

    def scores_in_pieces(self, items: Sequence[TextItem]) -> Iterator[dict[int, Score]]:
        if self.hidden is None:
            yield dict.fromkeys(range(len(items)), SkippedText(NO_WORDS))
        else:
            yield from self.inner.scores_in_pieces([self.masked(item) for item in items])

    def key(self, item: TextItem) -> str:
        """The classifier's key for the masked text, so that its score of a text without these words
        is reused."""
        return super().key(item) if self.hidden is None else self.inner.key(self.masked(item))

    def close(self) -> None:
        self.inner.close()
