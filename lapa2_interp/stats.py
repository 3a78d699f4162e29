"""Intervals that respect how texts are made: texts of one prompt are not independent, so prompts
are resampled.

From 8 prompts on, intervals come from the expanded percentile bootstrap (`tails`; the plain one
covers 92 % at 15 prompts for a nominal 95). Fewer prompts cannot be resampled honestly (5 would
cover 82 %): then the interval is Student's, on the prompts' means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

Labels = Sequence[Any] | np.ndarray | pd.Series
FEW = 8
"""From this number of clusters on, clusters are resampled."""
CHUNK = 2**22
"""Draws held at once."""
KEPT = 2**19
"""Up to this number, draws are kept for the next number: 4 MiB."""


@dataclass(frozen=True)
class Interval:
    """A mean with its bootstrap interval.

    Attributes:
        mean, low, high: The estimate and its 95 % interval; NaN bounds where there is one cluster,
            which tells no spread.
        n: Number of values. `clusters`: number of independent groups among them.
    """

    mean: float
    low: float
    high: float
    n: int
    clusters: int


def resampled_means(
    values: Float[np.ndarray, "n *rest"], clusters: Labels, resamples: int = 2000, seed: int = 0
) -> Float[np.ndarray, "resample *rest"]:
    """Means of the values over bootstrap resamples of whole clusters; columns are resampled
    together."""
    codes, names = pd.factorize(np.asarray(clusters))
    sums = np.zeros((len(names), *values.shape[1:]))
    np.add.at(sums, codes, values)
    sizes, n = np.bincount(codes), len(names)
    means = [
        np.tensordot(picks, sums, axes=1) / (picks @ sizes).reshape(-1, *[1] * (values.ndim - 1))
        for picks in resampled(n, resamples, seed)
    ]
    return np.concatenate(means)


def resampled(n: int, resamples: int, seed: int) -> Iterator[Int[np.ndarray, "draw n"]]:
    """How often each of n things is in each bootstrap resample, a chunk of resamples at a time."""
    if n * resamples <= KEPT:
        yield _drawn_once(n, resamples, seed)
        return
    rng = np.random.default_rng(seed)
    for first in range(0, resamples, size := max(1, CHUNK // n)):
        yield _drawn(n, min(size, resamples - first), rng)


def _drawn(n: int, count: int, rng: np.random.Generator) -> Int[np.ndarray, "draw n"]:
    drawn = rng.integers(0, n, (count, n)) + n * np.arange(count)[:, None]
    return np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n)


@lru_cache(16)
def _drawn_once(n: int, resamples: int, seed: int) -> Int[np.ndarray, "draw n"]:
    """A table asks for the same draws at every number."""
    picks = _drawn(n, resamples, np.random.default_rng(seed))
    picks.flags.writeable = False
    return picks


def tails(clusters: int) -> list[float]:
    """The percentiles of a 95 % interval from resampling so many clusters.

    They are 2.5 and 97.5, moved outwards because Student's t is wider than the normal and because
    resampled means vary too little (Hesterberg 2015).
    """
    from scipy.stats import norm, t

    low = 100 * float(norm.cdf(-t.ppf(0.975, clusters - 1) * math.sqrt(clusters / (clusters - 1))))
    return [low, 100 - low]


def resampled_p(
    values: Float[np.ndarray, "resample *rest"], clusters: int
) -> Float[np.ndarray, "*rest"]:
    """Two-sided p of "the true value is 0", from the values that resampling so many clusters gave.

    It is below 0.05 where the 95 % interval of `tails` excludes 0. The share of values on the rarer
    side of 0, with one more counted on it, is moved as `tails` moves percentiles; so p is never 0.
    NaN values are left out; p is NaN where nothing else is there.
    """
    from scipy.stats import norm, t

    n = (~np.isnan(values)).sum(axis=0)
    rarer = np.minimum((values <= 0).sum(axis=0), (values >= 0).sum(axis=0))
    share = np.minimum((rarer + 1) / (n + 1), 0.5)
    p = 2 * t.cdf(norm.ppf(share) * math.sqrt((clusters - 1) / clusters), clusters - 1)
    return np.asarray(np.where(n > 0, p, np.nan))


def holm(p: Sequence[float] | np.ndarray) -> Float[np.ndarray, " test"]:
    """Holm's p-values of one family of tests: below 0.05 none of them errs in 95 % of families.

    Args:
        p: One p per test, in [0, 1]. NaN is a test that could not be made: it counts as 1, so that
            the others are corrected for it too, and stays NaN.
    """
    raw = np.asarray(p, dtype=np.float64)
    known = np.where(np.isnan(raw), 1.0, raw)
    order = np.argsort(known, kind="stable")
    stepped = np.maximum.accumulate((len(raw) - np.arange(len(raw))) * known[order])
    found = np.empty(len(raw))
    found[order] = np.minimum(stepped, 1.0)
    return np.where(np.isnan(raw), np.nan, found)


def bounds(
    values: Float[np.ndarray, "n *rest"], clusters: Labels, resamples: int = 2000, seed: int = 0
) -> tuple[Float[np.ndarray, "*rest"], Float[np.ndarray, "*rest"]]:
    """Low and high end of the mean's 95 % interval; NaN where there is one cluster."""
    codes, names = pd.factorize(np.asarray(clusters))
    if len(names) < 2:
        nothing = np.full(values.shape[1:], np.nan)
        return nothing, nothing
    if len(names) >= FEW:
        low, high = np.percentile(
            resampled_means(values, clusters, resamples, seed), tails(len(names)), axis=0
        )
        return np.asarray(low), np.asarray(high)
    from scipy.stats import t

    # The mean is a ratio of sums over clusters, so its error comes from how far each cluster is
    # from its share of it.
    mean = values.mean(axis=0)
    rests = np.zeros((len(names), *values.shape[1:]))
    np.add.at(rests, codes, values - mean)
    error = np.sqrt(len(names) / (len(names) - 1) * (rests**2).sum(axis=0)) / len(values)
    half = float(t.ppf(0.975, len(names) - 1)) * error
    return np.asarray(mean - half), np.asarray(mean + half)


def mean_interval(
    values: Sequence[float] | np.ndarray | pd.Series,
    clusters: Labels,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Mean of values with its 95 % interval over clusters.

    Args:
        values: One number per text.
        clusters: The text's prompt, or another label that dependent texts share.

    Raises:
        ValueError: No values, or not one cluster label per value.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers) or len(clusters) != len(numbers):
        raise ValueError(
            f"need one cluster label per value and at least one; found {len(numbers)} and"
            f" {len(clusters)}"
        )
    low, high = bounds(numbers, clusters, resamples, seed)
    return Interval(
        float(numbers.mean()),
        float(low),
        float(high),
        len(numbers),
        len(pd.unique(np.asarray(clusters))),
    )


@dataclass(frozen=True)
class Difference:
    """A paired difference of means over the clusters two conditions share.

    Attributes:
        mean, low, high: The difference and its 95 % interval over clusters; NaN bounds where there
            is one.
        p: p-value of a sign-flip permutation test over clusters: how often chance alone gives a
            difference as large.
        error: Standard error; NaN where there is one cluster.
        clusters: Number of clusters that both conditions share.
        texts: Values of a cluster in each condition; the harmonic mean.
        noise: Share of the squared error that more values of each cluster would lower, in [0, 1];
            NaN where no cluster has two values that tell.
    """

    mean: float
    low: float
    high: float
    p: float
    error: float
    clusters: int
    texts: float = math.nan
    noise: float = math.nan

    @property
    def detectable(self) -> float:
        """The smallest true difference that as many clusters of this spread would show in 80 % of
        repetitions (two-sided, 5 %), 2.80 standard errors."""
        return 2.80 * self.error

    def p_within(self, margin: float) -> float:
        """p of "the true difference is as large as the margin, or larger": Student's two one-sided
        tests of equivalence."""
        return self._tail(margin - abs(self.mean))

    def p_beyond(self, margin: float) -> float:
        """p of "the true difference is no larger than the margin"; two-sided."""
        return min(1.0, 2 * self._tail(abs(self.mean) - margin))

    def _tail(self, distance: float) -> float:
        """NaN where there is one cluster, or where all are alike: then nothing tells the spread."""
        from scipy.stats import t as student

        if self.clusters < 2 or self.error == 0:
            return math.nan
        return float(student.sf(distance / self.error, self.clusters - 1))


def error_at(
    error: float, clusters: int, texts: float, noise: float, new_clusters: int, new_texts: float
) -> float:
    """The standard error that other numbers of clusters and texts would give.

    Args:
        error, clusters, texts, noise: Of a `Difference`. Where noise is NaN, the unfavourable case:
            fewer texts of a cluster make it larger, and more do not make it smaller.
        new_clusters, new_texts: Clusters, and values of each in each condition.
    """
    fewer = texts / new_texts
    share = max(1.0, fewer) if math.isnan(noise) else 1 - noise + noise * fewer
    return error * math.sqrt(clusters / new_clusters * share)


def paired_difference(
    before: Sequence[float] | np.ndarray | pd.Series,
    before_clusters: Labels,
    after: Sequence[float] | np.ndarray | pd.Series,
    after_clusters: Labels,
    resamples: int = 4000,
    seed: int = 0,
    kinds: tuple[Labels, Labels] | None = None,
) -> Difference:
    """after - before, cluster by cluster: each shared cluster counts once.

    Args:
        kinds: Labels of the values of both conditions, by default one. A cluster's difference is
            the mean of its kinds' differences, over the kinds that both have of it.

    Raises:
        ValueError: The two share no cluster.
    """
    values = np.concatenate([np.asarray(each, dtype=np.float64) for each in (before, after)])
    clusters, names = pd.factorize(
        np.concatenate([np.asarray(each) for each in (before_clusters, after_clusters)]), sort=True
    )
    kind, n_kinds = np.zeros(len(values), int), 1
    if kinds is not None:
        kind, found = pd.factorize(np.concatenate([np.asarray(each) for each in kinds]), sort=True)
        n_kinds = len(found)
    cells = clusters * n_kinds + kind
    kept, later = ~np.isnan(values), np.arange(len(values)) >= len(before)
    means, sizes, of_texts = [], [], []
    for side in (kept & ~later, kept & later):
        numbers, part = values[side], cells[side]
        of_texts.append(_variance_inside(numbers, part))
        sizes.append(np.bincount(part, minlength=len(names) * n_kinds))
        totals = np.bincount(part, numbers, len(names) * n_kinds)
        means.append(totals / np.maximum(sizes[-1], 1))
    both = (sizes[0] > 0) & (sizes[1] > 0)
    in_both = both.reshape(-1, n_kinds)
    shared = in_both.any(1)

    def by_cluster(of_cells: np.ndarray) -> np.ndarray:
        return np.where(both, of_cells, 0.0).reshape(-1, n_kinds).sum(1)[shared]

    count = in_both.sum(1)[shared]
    gaps = by_cluster(means[1] - means[0]) / count
    shares = [
        float((by_cluster(1 / np.maximum(each, 1)) / count**2).mean()) if len(gaps) else math.nan
        for each in sizes
    ]
    n = len(gaps)
    if n == 0:
        raise ValueError("the two conditions share no cluster, so nothing can be paired")
    texts = 2 / sum(shares)
    if n == 1:
        return Difference(float(gaps[0]), math.nan, math.nan, math.nan, math.nan, 1, texts)
    low, high = bounds(gaps, np.arange(n), resamples, seed)
    flipped = np.concatenate([np.abs(signs @ gaps) for signs in _signs(n, resamples, seed)])
    # The observed signs are one of the possible ones, so p is never 0.
    extreme = int((flipped >= abs(gaps.sum()) * (1 - 1e-12)).sum())
    tried = len(flipped)
    p = extreme / tried if tried == 2**n else (extreme + 1) / (tried + 1)
    variance = float(gaps.var(ddof=1))
    expected = of_texts[0] * shares[0] + of_texts[1] * shares[1]
    noise = float(np.minimum(1.0, expected / variance)) if variance > 0 else math.nan
    error = math.sqrt(variance / n)
    return Difference(float(gaps.mean()), float(low), float(high), p, error, n, texts, noise)


def _variance_inside(values: Float[np.ndarray, " n"], cells: Int[np.ndarray, " n"]) -> float:
    """Variance of the values inside their cells, pooled; NaN where no cell has two."""
    _, cells = np.unique(cells, return_inverse=True)
    sizes = np.bincount(cells)
    free = len(values) - len(sizes)
    rest = values - (np.bincount(cells, values) / sizes)[cells]
    return float(rest @ rest) / free if free else math.nan


def _signs(n: int, resamples: int, seed: int) -> Iterator[Float[np.ndarray, "flip cluster"]]:
    """Every assignment of signs where there are few, else random ones, a chunk at a time."""
    if 2**n <= resamples or n * resamples <= KEPT:
        yield _signs_once(n, resamples, seed)
        return
    rng = np.random.default_rng(seed)
    for first in range(0, resamples, size := max(1, CHUNK // n)):
        yield rng.choice([-1.0, 1.0], size=(min(size, resamples - first), n))


@lru_cache(16)
def _signs_once(n: int, resamples: int, seed: int) -> Float[np.ndarray, "flip cluster"]:
    if 2**n <= resamples:
        return 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    return np.random.default_rng(seed).choice([-1.0, 1.0], size=(resamples, n))
