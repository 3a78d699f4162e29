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
        mean, low, high: The estimate and its 95 % interval; NaN bounds where there is one cluster, which tells no spread.
        n: Values. `clusters`: independent groups among them.
    """

    mean: float
    low: float
    high: float
    n: int
    clusters: int


def resampled_means(
    values: Float[np.ndarray, "n *rest"], clusters: Labels, resamples: int = 2000, seed: int = 0
) -> Float[np.ndarray, "resample *rest"]:
    """Means of the values over bootstrap resamples of whole clusters; columns are resampled together."""
    codes, names = pd.factorize(np.asarray(clusters))
    sums = np.zeros((len(names), *values.shape[1:]))
    np.add.at(sums, codes, values)
    sizes = np.bincount(codes)
    picks = np.random.default_rng(seed).multinomial(len(names), np.full(len(names), 1 / len(names)), size=resamples)
    return np.tensordot(picks, sums, axes=1) / (picks @ sizes).reshape(-1, *[1] * (values.ndim - 1))


def bounds(
    values: Float[np.ndarray, "n *rest"], clusters: Labels, resamples: int = 2000, seed: int = 0
) -> tuple[Float[np.ndarray, "*rest"], Float[np.ndarray, "*rest"]]:
    """Low and high end of the mean's 95 % percentile interval; NaN where there is one cluster."""
    if len(pd.unique(np.asarray(clusters))) < 2:
        nothing = np.full(values.shape[1:], np.nan)
        return nothing, nothing
    low, high = np.percentile(resampled_means(values, clusters, resamples, seed), [2.5, 97.5], axis=0)
    return np.asarray(low), np.asarray(high)


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
    if not len(found) or len(clusters) != len(found):
        raise ValueError(f"need one cluster label per value and at least one; found {len(found)} and {len(clusters)}")
    low, high = bounds(found, clusters, resamples, seed)
    return Interval(float(found.mean()), float(low), float(high), len(found), len(pd.unique(np.asarray(clusters))))
