"""Agreement of a scorer's numbers with labels, or with graded scores from people or Perspective.

Labels: accuracy of the likeliest label, AUC where there are two, and the calibration of the
likeliest label's probability. Graded scores in [0, 1]: Spearman's correlation, AUC for scores above
one half, and the calibration of the number itself.

The calibration error is sum_b (n_b / n) |mean prediction in b - mean truth in b| over ten bins of
equal width. Intervals are 95 % bootstrap intervals over texts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int, Num

from lapa2_interp.errors import ScoringError, unknown_choice
from lapa2_interp.stats import FEW, resampled, tails
from lapa2_interp.tasks.segmentation import word_spans

LENGTH_CLASSES = {
    "1-15": (0, 16),
    "16-39": (16, 40),
    "40-119": (40, 120),
    "120 and more": (120, np.inf),
}
"""Classes of length: the least number of words, and the first number above the class."""
BINS = 10
POSITIVE_ABOVE = 0.5
"""A text with a higher graded score counts as positive for the AUC."""

Measure = Callable[[Num[np.ndarray, "draw text"]], Float[np.ndarray, " draw"]]
"""A function from the counts of each text in each draw to a number per draw; NaN if undefined."""


def agreement(
    numbers: pd.DataFrame,
    truth: Sequence[str] | Sequence[float],
    texts: Sequence[str],
    resamples: int = 1000,
    seed: int = 0,
) -> pd.DataFrame:
    """Compare a scorer's numbers with the truth.

    Args:
        numbers: The scorer's numbers of every text; the columns are labels with their
            probabilities, or for graded scores one column in [0, 1].
        truth: The label of every text, or its graded score in [0, 1].
        texts: The texts, for their number of words.

    Returns:
        One row per measure and class of length: measure (accuracy, AUC, Spearman, calibration
        error), length ("all", and the classes of `LENGTH_CLASSES` that have texts), value, low,
        high (NaN with fewer than 8 texts), n. The value is NaN if a measure is undefined, such as
        an AUC of one label.

    Raises:
        ScoringError: There is no text, a text has no number, or the truth does not fit the columns
            or is out of range.
    """
    graded, true, values = _match_truth(numbers, truth)
    words = np.array([len(word_spans(text)) for text in texts])
    rows = []
    for length, (low, high) in {"all": (0, np.inf), **LENGTH_CLASSES}.items():
        chosen = (words >= low) & (words < high)
        if not (n := int(chosen.sum())):
            continue
        part, part_true = values[chosen], true[chosen]
        if graded:
            measures = {
                "Spearman": _spearman(part[:, 0], part_true),
                "AUC": _auc(part[:, 0], part_true > POSITIVE_ABOVE),
            }
        else:
            measures = {"accuracy": _mean(part.argmax(axis=1) == part_true)}
            if part.shape[1] == 2:
                measures["AUC"] = _auc(part[:, 1], part_true == 1)
        measures["calibration error"] = _calibration_error(
            *_predicted_and_true(graded, part, part_true)
        )
        for measure, compute in measures.items():
            value = float(compute(np.ones((1, n)))[0])
            ends = _bootstrap_interval(
                compute, value, n, resamples, seed, measure == "calibration error"
            )
            rows.append((measure, length, value, *ends, n))
    return pd.DataFrame(rows, columns=["measure", "length", "value", "low", "high", "n"])


def card_rows(table: pd.DataFrame, data: str) -> list[dict[Hashable, Any]]:
    """The rows of a table of `agreement` with a value, in the form of a card."""
    rows = table.dropna(subset="value").assign(data=data).astype(object)
    return rows.where(rows.notna(), None).to_dict("records")


def _match_truth(
    numbers: pd.DataFrame, truth: Sequence[str] | Sequence[float]
) -> tuple[bool, Num[np.ndarray, " text"], Float[np.ndarray, "text column"]]:
    """True if the truth is graded; its scores or numbers of labels; the scorer's numbers."""
    values = numbers.to_numpy(dtype=np.float64)
    columns = [str(name) for name in numbers.columns]
    if not len(values):
        raise ScoringError("there is no text to compare; give a file that has some")
    if len(truth) != len(values):
        raise ScoringError(f"{len(values)} texts have numbers and {len(truth)} have a truth")
    if not np.isfinite(values).all():
        first = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
        raise ScoringError(
            f"text {first + 1} of {len(values)} has no number from the scorer; leave such texts out"
        )
    if all(isinstance(value, str) for value in truth):
        if wrong := [label for label in truth if label not in columns]:
            raise ScoringError(unknown_choice("label", wrong[0], columns))
        return False, np.array([columns.index(str(label)) for label in truth]), values
    if len(columns) != 1:
        raise ScoringError(
            f"graded scores are compared with one number per text; found {', '.join(columns)}: give"
            " a toxicity scorer, or labels"
        )
    scores = np.asarray(truth, dtype=np.float64)
    if not ((scores >= 0) & (scores <= 1)).all():
        wrong_score = scores[~((scores >= 0) & (scores <= 1))][0]
        raise ScoringError(f"graded scores must lie in [0, 1]; found {wrong_score:g}")
    return True, scores, values


def _predicted_and_true(
    graded: bool, values: Float[np.ndarray, "text column"], true: Num[np.ndarray, " text"]
) -> tuple[Float[np.ndarray, " text"], Float[np.ndarray, " text"]]:
    """Prediction and truth for the calibration of every text."""
    if graded:
        return values[:, 0], true
    return values.max(axis=1), (values.argmax(axis=1) == true).astype(np.float64)


def _bootstrap_interval(
    compute: Measure, value: float, n: int, resamples: int, seed: int, distance: bool
) -> tuple[float, float]:
    """The 95 % interval.

    Args:
        distance: True for a measure that is never below 0. It is larger in resamples than in the
            texts, since their noise adds to it; the interval is shifted back by that much.
    """
    if n < FEW or np.isnan(value):
        return np.nan, np.nan
    draws = np.concatenate([compute(picks) for picks in resampled(n, resamples, seed)])
    low, high = np.nanpercentile(draws, tails(n))
    if distance:
        low, high = np.maximum(0.0, np.array([low, high]) - (np.nanmean(draws) - value))
    return float(low), float(high)


# --- measures


def _mean(right: Bool[np.ndarray, " text"]) -> Measure:
    return lambda picks: picks @ right / picks.sum(axis=1)


def _auc(values: Float[np.ndarray, " text"], positive: Bool[np.ndarray, " text"]) -> Measure:
    """P(a positive text has a higher number than a negative one), ties counted one half, from the
    sum of the positive texts' ranks."""

    def compute(picks: Num[np.ndarray, "draw text"]) -> Float[np.ndarray, " draw"]:
        of_positive = picks * positive
        yes = of_positive.sum(axis=1)
        no = picks.sum(axis=1) - yes
        above = (of_positive * _ranks(values, picks)).sum(axis=1) - yes * (yes + 1) / 2
        return _ratio(above, yes * no)

    return compute


def _spearman(one: Float[np.ndarray, " text"], true: Float[np.ndarray, " text"]) -> Measure:
    """The correlation of ranks, ties at their mean rank."""

    def compute(picks: Num[np.ndarray, "draw text"]) -> Float[np.ndarray, " draw"]:
        # The mean rank of n texts is (n + 1) / 2.
        middle = (picks.sum(axis=1, keepdims=True) + 1) / 2
        a, b = (_ranks(numbers, picks) - middle for numbers in (one, true))
        spread = np.sqrt((picks * a * a).sum(axis=1) * (picks * b * b).sum(axis=1))
        return _ratio((picks * a * b).sum(axis=1), spread)

    return compute


def _calibration_error(
    predicted: Float[np.ndarray, " text"], true: Float[np.ndarray, " text"]
) -> Measure:
    in_bin = np.eye(BINS)[_bins(predicted)]  # text bin

    def compute(picks: Num[np.ndarray, "draw text"]) -> Float[np.ndarray, " draw"]:
        # n_b |mean prediction - mean truth| is the absolute value of the sum of their differences.
        gaps = np.abs(picks @ (in_bin * (predicted - true)[:, None]))
        return gaps.sum(axis=1) / picks.sum(axis=1)

    return compute


def _bins(predicted: Float[np.ndarray, " text"]) -> Int[np.ndarray, " text"]:
    return np.minimum((predicted * BINS).astype(int), BINS - 1)


def _ranks(
    values: Float[np.ndarray, " text"], picks: Num[np.ndarray, "draw text"]
) -> Float[np.ndarray, "draw text"]:
    """Rank of every text among the texts of each draw, with repetitions; ties have their mean
    rank."""
    order = np.argsort(values, kind="stable")
    new = np.diff(values[order], prepend=np.nan) != 0
    counts = np.add.reduceat(picks[:, order], np.flatnonzero(new), axis=1)
    ranks = counts.cumsum(axis=1) - (counts - 1) / 2
    by_text = np.empty(picks.shape)
    by_text[:, order] = ranks[:, new.cumsum() - 1]
    return by_text


def _ratio(
    above: Float[np.ndarray, " draw"], below: Num[np.ndarray, " draw"]
) -> Float[np.ndarray, " draw"]:
    """above / below; NaN if the divisor is 0."""
    return np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)
