"""Linear classifiers on hashed n-grams, the fast scorers of the package.

There is one for sentiment, one for topic and one for toxicity.

1. A text becomes counts of its words and word pairs and of its character 2- to 5-grams within
   words, each set hashed to 2^18 columns. The counts are damped (log(1 + count)), weighted by how
   rare a column is among the training texts (inverse document frequency), and scaled to length 1:
   texts of 20 and of 500 words have the same weight.
2. Logistic regression (scikit-learn) gives a probability per label.

They see words and almost no order: "This is positive." counts as the word "positive" does in
reviews. Their cards (`scoring/weights/*.json`) have their measures on held-out text, and their
version has the sha256 of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from lapa2_interp._util.unpacking import check_archive
from lapa2_interp._util.version import __version__
from lapa2_interp.errors import ScoringError
from lapa2_interp.files import atomic_write
from lapa2_interp.scoring.task_scorer import (
    SHIPPED_WEIGHTS,
    ScorerCard,
    TaskScorer,
    load_card,
    save_card,
)

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

LINEAR_ENDING = ".npz"
"""End of the name of a linear classifier's file, after the task."""
COLUMNS = 2**18
"""Hashed columns of each of the two sets of n-grams."""


class LinearCard(ScorerCard):
    """The card of a linear scorer."""

    c: float
    """Inverse strength of the L2 penalty."""


def damped_counts(texts: Sequence[str]) -> tuple[csr_matrix, csr_matrix]:
    """log(1 + count) of hashed words and word pairs, and of hashed characters, each [text,
    COLUMNS]."""
    from sklearn.feature_extraction.text import HashingVectorizer

    shared: dict[str, Any] = {"n_features": COLUMNS, "norm": None, "alternate_sign": False}
    words, characters = (
        vectorizer.transform(texts)
        for vectorizer in (
            HashingVectorizer(ngram_range=(1, 2), token_pattern=r"\w+|[^\w\s]", **shared),
            HashingVectorizer(analyzer="char_wb", ngram_range=(2, 5), **shared),
        )
    )
    words.data, characters.data = np.log1p(words.data), np.log1p(characters.data)
    return words, characters


def inverse_document_frequency(parts: Sequence[csr_matrix]) -> Float[np.ndarray, " feature"]:
    """Inverse document frequency of every column, log((1 + n) / (1 + texts that have it)) + 1."""
    n = parts[0].shape[0]
    rarity = [
        np.log((1 + n) / (1 + np.bincount(part.indices, minlength=COLUMNS))) + 1 for part in parts
    ]
    # In the precision of the file, so that a loaded classifier equals the fitted one.
    return np.concatenate(rarity).astype(np.float16).astype(np.float32)


def weighted_counts(
    parts: Sequence[csr_matrix], rarity: Float[np.ndarray, " feature"]
) -> csr_matrix:
    """Counts weighted by rarity, each part scaled to length 1: [text, 2 * COLUMNS]."""
    from scipy.sparse import hstack
    from sklearn.preprocessing import normalize

    weighted = []
    for number, part in enumerate(parts):
        part = part.copy()
        part.data = part.data * rarity[part.indices + number * COLUMNS]
        weighted.append(normalize(part, copy=False))
    return hstack(weighted, format="csr")


@dataclass(frozen=True)
class LinearClassifier:
    """A linear classifier.

    Attributes:
        weights, bias: float32 (on disk the weights are float16). One column per label, or one for
            the first of two labels.
        rarity: Rarity of every feature among the training texts.
    """

    labels: tuple[str, ...]
    weights: Float[np.ndarray, "feature column"]
    bias: Float[np.ndarray, " column"]
    rarity: Float[np.ndarray, " feature"]

    def probabilities(self, texts: Sequence[str]) -> Float[np.ndarray, "text label"]:
        """P(label | text), rows summing to 1."""
        from scipy.special import softmax

        logits = weighted_counts(damped_counts(texts), self.rarity) @ self.weights + self.bias
        if logits.shape[1] == 1:
            first = 1 / (1 + np.exp(-logits[:, 0]))
            return np.stack([first, 1 - first], axis=1)
        return softmax(logits, axis=1)


class LinearScorer(TaskScorer):
    """A linear classifier that ships with the package.

    Args:
        task: sentiment, topic or detox.
        folder: Folder of its weights.

    Raises:
        ScoringError: The task has no linear classifier, or its files are damaged.
    """

    batch_size = 2048

    def __init__(self, task: str, folder: Path = SHIPPED_WEIGHTS) -> None:
        linear, card = load_linear(task, folder)
        super().__init__(card, lambda: linear, "linear")


def train_linear(
    texts: Sequence[str],
    shares: Float[np.ndarray, "text label"],
    labels: Sequence[str],
    c: float,
    weight: Sequence[float] | None = None,
) -> LinearClassifier:
    """Fit a classifier.

    Args:
        shares: Share of each label in each text, rows summing to 1: 1 and 0 for plain labels,
            Perspective's score and 1 minus it for graded texts.
        c: Inverse strength of the L2 penalty.
        weight: Weight of each text; 1 by default.
    """
    from scipy.sparse import vstack
    from sklearn.linear_model import LogisticRegression

    parts = damped_counts(texts)
    rarity = inverse_document_frequency(parts)
    all_rows = weighted_counts(parts, rarity)
    sample_weight = np.ones(len(texts)) if weight is None else np.asarray(weight, dtype=float)
    rows, label, weights = [], [], []
    for number in range(len(labels)):
        has = np.flatnonzero(shares[:, number] > 0)
        rows.append(all_rows[has])
        label.append(np.full(len(has), number))
        weights.append(sample_weight[has] * shares[has, number])
    model = LogisticRegression(C=c, max_iter=400, tol=1e-5)
    model.fit(vstack(rows), np.concatenate(label), sample_weight=np.concatenate(weights))
    sign = -1.0 if len(labels) == 2 else 1.0  # scikit-learn's one column is the second label's
    fitted, bias = (sign * array.astype(np.float32) for array in (model.coef_.T, model.intercept_))
    return LinearClassifier(tuple(labels), fitted, bias, rarity)


def save_linear(linear: LinearClassifier, folder: Path, task: str, **facts: Any) -> LinearCard:
    """Write `<task>.npz` (float16 weights) and its card."""
    import sklearn

    file = folder / f"{task}{LINEAR_ENDING}"
    weights, rarity = linear.weights.astype(np.float16), linear.rarity.astype(np.float16)
    with atomic_write(file) as fresh:
        np.savez_compressed(fresh, weights=weights, rarity=rarity, bias=linear.bias)
    versions = {"lapa2_interp": __version__, "scikit-learn": sklearn.__version__}
    facts |= {"labels": linear.labels, "versions": versions}
    return save_card(LinearCard, file, task=task, **facts)


def load_linear(task: str, folder: Path = SHIPPED_WEIGHTS) -> tuple[LinearClassifier, LinearCard]:
    """A classifier and its card.

    Raises:
        ScoringError: The task has no linear classifier, or its files are damaged.
    """
    card = load_card(LinearCard, "linear", task, folder, LINEAR_ENDING)
    file = folder / f"{task}{LINEAR_ENDING}"
    try:
        check_archive(file)
        with np.load(file, allow_pickle=False) as stored:
            wide = {name: stored[name].astype(np.float32) for name in ("weights", "bias", "rarity")}
    except (OSError, ValueError, KeyError) as error:
        raise ScoringError(
            f"cannot read {file} ({' '.join(str(error).split())[:160]}); train it again: `lapa2"
            " scorers train`"
        ) from error
    return LinearClassifier(card.labels, **wide), card
