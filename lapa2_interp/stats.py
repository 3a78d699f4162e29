"""Intervals that respect how texts are made: texts of one prompt are not independent, so prompts are resampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

Labels = Sequence[Any] | np.ndarray | pd.Series


@dataclass(frozen=True)
class Interval:
    """A mean with its bootstrap interval.

    Attributes:
        mean, low, high: The estimate and its 95 % interval.
        n: Values. `clusters`: independent groups among them.
    """

    mean: float
    low: float
    high: float
    n: int
    clusters: int

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


def resampled_means(
    values: Float[np.ndarray, "n *rest"], clusters: Labels, resamples: int = 2000, seed: int = 0
) -> Float[np.ndarray, "resample *rest"]:
    """Means of the values over bootstrap resamples of whole clusters; columns are resampled together.

    Raises:
        ValueError: No values, or not one cluster label per value.
    """
    labels = np.asarray(clusters)
    if not len(values) or len(labels) != len(values):
        raise ValueError(f"need one cluster label per value and at least one; found {len(values)} and {len(labels)}")
    codes, names = pd.factorize(labels)
    sums = np.zeros((len(names), *values.shape[1:]))
    np.add.at(sums, codes, values)
    sizes = np.bincount(codes)
    picks = np.random.default_rng(seed).multinomial(len(names), np.full(len(names), 1 / len(names)), size=resamples)
    return np.tensordot(picks, sums, axes=1) / (picks @ sizes).reshape(-1, *[1] * (values.ndim - 1))


def mean_interval(
    values: Sequence[float] | np.ndarray, clusters: Labels, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Mean of values with a 95 % percentile interval from resampling clusters.

    Args:
        values: One number per text.
        clusters: The text's prompt, or whatever makes texts alike.

    Raises:
        ValueError: No values, or not one cluster label per value.
    """
    found = np.asarray(values, dtype=np.float64)
    low, high = np.percentile(resampled_means(found, clusters, resamples, seed), [2.5, 97.5])
    n_clusters = len(pd.unique(np.asarray(clusters)))
    return Interval(float(found.mean()), float(low), float(high), len(found), n_clusters)
