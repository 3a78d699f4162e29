"""VADER: a sentiment scorer of another make, with rules and a lexicon that people have rated.

VADER reads single words with their negations, intensifiers and punctuation, and was trained on no
corpus of this package. A text is positive from a compound score of .05 and negative from -.05, the
limits of its authors, and between them neither. Extra `vader`.

Source: Hutto and Gilbert (2014), the package vaderSentiment.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from lapa2_interp.errors import ScoringError
from lapa2_interp.scoring.scorer import Score, Scorer, SkippedText, TextItem

LIMIT = 0.05
"""The least compound score of a positive text; with a minus, the largest of a negative one."""


class VaderScorer(Scorer):
    """Labels positive, negative and neutral; a neutral text is wrong for either attribute.

    Raises:
        ScoringError: vaderSentiment is not installed.
    """

    name = "accuracy"
    columns = ("positive", "negative", "neutral")
    classifies = True
    batch_size = 512

    def __init__(self) -> None:
        if find_spec("vaderSentiment") is None:
            raise ScoringError(
                'VADER is not installed: pip install "lapa2-interp[vader]", or leave out'
                " accuracy=vader"
            )
        self.version = f"vader {version('vaderSentiment')}"

    @cached_property
    def analyzer(self) -> Any:
        """The rules and the lexicon."""
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

        return SentimentIntensityAnalyzer()

    def score(self, items: Sequence[TextItem]) -> list[Score]:
        return [
            self._label(item.text) if item.text.strip() else SkippedText("empty text")
            for item in items
        ]

    def _label(self, text: str) -> Score:
        compound = self.analyzer.polarity_scores(text)["compound"]
        positive, negative = compound >= LIMIT, compound <= -LIMIT
        return float(positive), float(negative), float(not (positive or negative))
