"""Intervals and tests for texts of one prompt, which are not independent: prompts are resampled.

From 8 prompts on, intervals come from the expanded percentile bootstrap (`tails`; the plain one
covers 92 % at 15 prompts for a nominal 95). Fewer prompts cannot be resampled honestly (5 would
cover 82 %): their interval is Student's, on the prompts' means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from lapa2_interp._util.values import plain
from lapa2_interp.errors import StatisticsError, first_sentence

Labels = Sequence[Any] | np.ndarray | pd.Series
LEVEL = 0.05
"""Significance level of verdicts."""
FEW = 8
"""From this number of clusters on, clusters are resampled."""
CHUNK = 2**22
"""Draws that are in memory at once."""
CACHED_DRAWS = 2**19
"""Up to this number, draws are cached for the next call: 4 MiB."""


@dataclass(frozen=True)
class Interval:
    """A mean with its bootstrap interval.

    Attributes:
        mean, low, high: The estimate and its 95 % interval; the bounds are NaN for one
            cluster, which shows no spread.
        n: Number of values.
        clusters: Number of independent groups among them.
    """

    mean: float
    low: float
    high: float
    n: int
    clusters: int

    @property
    def columns(self) -> dict[str, float]:
        """Mean, low and high by name, for the row of a table."""
        return {"mean": self.mean, "low": self.low, "high": self.high}


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
        StatisticsError: No values, not one cluster label per value, or a value or a label is
            missing.
    """
    numbers = np.asarray(_unmasked(values), dtype=np.float64)
    if not len(numbers):
        raise StatisticsError("a mean needs one value at least; found none")
    _check_lengths(numbers, clusters)
    check_finite(numbers)
    low, high = bounds(numbers, clusters, resamples, seed)
    return Interval(
        float(numbers.mean()),
        float(low),
        float(high),
        len(numbers),
        len(label_codes(clusters)[1]),
    )


def bounds(
    values: Float[np.ndarray, "n *rest"],
    clusters: Labels | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[Float[np.ndarray, "*rest"], Float[np.ndarray, "*rest"]]:
    """Low and high end of the mean's 95 % interval; NaN where there is one cluster, or a value is
    NaN. Without clusters each value is its own.

    Raises:
        StatisticsError: A cluster's label is missing, or their number is not that of the values.
    """
    values = _unmasked(values)
    clusters = np.arange(len(values)) if clusters is None else clusters
    _check_lengths(values, clusters)
    codes, names = label_codes(clusters)
    method = interval_method(len(names))
    if method == "none":
        nothing = np.full(values.shape[1:], np.nan)
        return nothing, nothing
    if method == "resampled":
        low, high = np.percentile(
            resampled_means(values, clusters, resamples, seed), tails(len(names)), axis=0
        )
        return np.asarray(low), np.asarray(high)
    # The mean is a ratio of sums over clusters, so its error comes from how far each cluster is
    # from its share of it.
    mean = values.mean(axis=0)
    rests = np.zeros((len(names), *values.shape[1:]))
    np.add.at(rests, codes, values - mean)
    error = np.sqrt(len(names) / (len(names) - 1) * (rests**2).sum(axis=0)) / len(values)
    half = student_quantile(0.975, len(names) - 1) * error
    return np.asarray(mean - half), np.asarray(mean + half)


IntervalMethod = Literal["resampled", "student", "none"]


def interval_method(clusters: int) -> IntervalMethod:
    """How `bounds` makes the interval of `clusters` clusters."""
    return "resampled" if clusters >= FEW else "student" if clusters > 1 else "none"


METHOD_WORDS: dict[IntervalMethod, str] = {
    "resampled": "{cluster}s resampled",
    "student": f"Student's t on {{cluster}}s' means, where there are fewer than {FEW} {{cluster}}s",
    "none": "none where there is one {cluster}",
}
"""The methods in words, for notes under tables."""


def describe_intervals(
    clusters: Iterable[int | float], cluster: Literal["prompt", "text"] = "prompt"
) -> str:
    """The methods that made the intervals of numbers with these numbers of clusters, in words.

    Args:
        cluster: What a cluster is.
    """
    methods = {interval_method(int(n)) for n in clusters}
    words = (words for method, words in METHOD_WORDS.items() if method in methods)
    return "; ".join(words).format(cluster=cluster)


def resampled_means(
    values: Float[np.ndarray, "n *rest"], clusters: Labels, resamples: int = 2000, seed: int = 0
) -> Float[np.ndarray, "resample *rest"]:
    """Means of the values over bootstrap resamples of whole clusters; columns are resampled
    together.

    Raises:
        StatisticsError: A cluster's label is missing.
    """
    values = _unmasked(values)
    codes, names = label_codes(clusters)
    sums = np.zeros((len(names), *values.shape[1:]))
    np.add.at(sums, codes, values)
    sizes, n = np.bincount(codes), len(names)
    means = [
        np.tensordot(picks, sums, axes=1) / (picks @ sizes).reshape(-1, *[1] * (values.ndim - 1))
        for picks in resampled(n, resamples, seed)
    ]
    return np.concatenate(means)


def resampled(n: int, resamples: int, seed: int) -> Iterator[Int[np.ndarray, "draw n"]]:
    """Counts of each of n clusters in each bootstrap resample, a chunk of resamples at a time."""
    if n * resamples <= CACHED_DRAWS:
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
    """Draws from a cache, since every number of a table needs the same draws."""
    picks = _drawn(n, resamples, np.random.default_rng(seed))
    picks.flags.writeable = False
    return picks


@cache
def tails(clusters: int) -> tuple[float, float]:
    """The percentiles of a 95 % interval from resampling `clusters` clusters.

    These percentiles are 2.5 and 97.5, moved outwards because Student's t is wider than the normal
    and because resampled means vary too little (Hesterberg 2015).
    """
    from scipy.stats import norm

    wider = math.sqrt(clusters / (clusters - 1))
    low = 100 * float(norm.cdf(-student_quantile(0.975, clusters - 1) * wider))
    return low, 100 - low


@cache
def student_quantile(level: float, df: int) -> float:
    """The quantile of Student's t at a level in (0, 1)."""
    from scipy.stats import t

    return float(t.ppf(level, df))


@dataclass(frozen=True)
class Difference:
    """A paired difference of means over the clusters two conditions share.

    Attributes:
        mean, low, high: The difference and its 95 % interval over clusters; the bounds are NaN
            for one cluster.
        p: p-value of a sign-flip permutation test over clusters: probability that chance alone
            gives a difference as large.
        error: Standard error; NaN where there is one cluster.
        clusters: Number of clusters that both conditions share.
        texts: Members of a cluster in each condition (`paired_difference`); the harmonic mean.
        noise: Share of the squared error that more members of each cluster would lower, in [0,
            1]; NaN where no cluster has two.
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
        """The smallest true difference whose 95 % interval would exclude 0 in 80 % of repetitions,
        with as many clusters of this spread: by Student's t, 2.80 standard errors where they are
        many."""
        df = self.clusters - 1
        return (student_quantile(0.975, df) + student_quantile(0.8, df)) * self.error

    def p_within(self, margin: float) -> float:
        """p of "the true difference is as large as the margin, or larger": Student's two one-sided
        tests of equivalence."""
        return self._tail(margin - abs(self.mean))

    def p_beyond(self, margin: float) -> float:
        """p of "the true difference is no larger than the margin"; two-sided."""
        return min(1.0, 2 * self._tail(abs(self.mean) - margin))

    def _tail(self, distance: float) -> float:
        """Student's upper tail probability; NaN for one cluster or equal ones, which show no
        spread."""
        from scipy.stats import t as student

        if self.clusters < 2 or self.error == 0:
            return math.nan
        return float(student.sf(distance / self.error, self.clusters - 1))


class NothingPairedError(StatisticsError):
    """Two conditions share no cluster."""


def paired_difference(
    before: Sequence[float] | np.ndarray | pd.Series,
    before_clusters: Labels,
    after: Sequence[float] | np.ndarray | pd.Series,
    after_clusters: Labels,
    resamples: int = 4000,
    seed: int = 0,
    kinds: tuple[Labels, Labels] | None = None,
    members: tuple[Labels, Labels] | None = None,
) -> Difference:
    """after - before, cluster by cluster: each shared cluster counts once.

    Args:
        before, after: A number per text; NaN is a text without one, which is left out.
        kinds: Labels of the values of both conditions, by default one. A cluster's difference is
            the mean of its kinds' differences, over the kinds that both have of it.
        members: Labels of the values inside a cluster and kind, such as sample numbers. Values of
            one label depend on each other, in one condition and between the two. By default each
            value is a member of its own. They change `texts` and `noise` only.

    Raises:
        NothingPairedError: The two share no cluster.
        StatisticsError: A value is infinite, a label is missing, or there is not one per value.
    """
    # Numbers of clusters, kinds and strata (cluster x kind) for the values of both conditions.
    values = np.concatenate(
        [np.asarray(_unmasked(side), dtype=np.float64) for side in (before, after)]
    )
    check_finite(values, missing=True)
    for labels in ((before_clusters, after_clusters), kinds, members):
        for side, of_side in zip((before, after), labels or (), strict=False):
            _check_lengths(side, of_side)
    clusters, names = _codes_of_both((before_clusters, after_clusters))
    kind, n_kinds = np.zeros(len(values), int), 1
    if kinds is not None:
        kind, codes = _codes_of_both(kinds)
        n_kinds = len(codes)
    strata, n_strata = clusters * n_kinds + kind, len(names) * n_kinds
    present, later = ~np.isnan(values), np.arange(len(values)) >= len(before)
    # Means of the strata that both conditions have, and from them a difference for each cluster.
    sides = (present & ~later, present & later)
    means, sizes = zip(
        *(_means(values[side], strata[side], n_strata) for side in sides), strict=True
    )
    both = (sizes[0] > 0) & (sizes[1] > 0)
    in_both = both.reshape(len(names), n_kinds)
    shared = in_both.any(1)

    def by_cluster(of_strata: np.ndarray) -> np.ndarray:
        return np.where(in_both, of_strata.reshape(in_both.shape), 0.0).sum(1)[shared]

    count = in_both.sum(1)[shared]
    gaps = by_cluster(means[1] - means[0]) / count
    n = len(gaps)
    if n == 0:
        raise NothingPairedError("the two conditions share no cluster, so nothing can be paired")
    # The variance that texts inside a cluster give its difference.
    label = np.arange(len(values))
    if members is not None:
        label, _ = _codes_of_both(members)

    def share(of_strata: np.ndarray) -> float:
        """The share of a text's variance in the cluster's difference, from the shares in strata'
        means."""
        return float((by_cluster(of_strata) / count**2).mean())

    texts, inside = _inside_clusters(values, strata, n_strata, label, sides, share)
    if n == 1:
        return Difference(float(gaps[0]), math.nan, math.nan, math.nan, math.nan, 1, texts)
    # Interval, and the sign-flip permutation test.
    low, high = bounds(gaps, np.arange(n), resamples, seed)
    flipped = np.concatenate([np.abs(signs @ gaps) for signs in _signs(n, resamples, seed)])
    # The observed signs are one of the possible ones, so p is never 0.
    extreme = int((flipped >= abs(gaps.sum()) * (1 - 1e-12)).sum())
    tried = len(flipped)
    p = extreme / tried if tried == 2**n else (extreme + 1) / (tried + 1)
    variance = float(gaps.var(ddof=1))
    noise = float(np.clip(inside / variance, 0, 1)) if variance > 0 else math.nan
    error = math.sqrt(variance / n)
    return Difference(float(gaps.mean()), float(low), float(high), p, error, n, texts, noise)


def _inside_clusters(
    values: Float[np.ndarray, " n"],
    strata: Int[np.ndarray, " n"],
    n_strata: int,
    labels: Int[np.ndarray, " n"],
    sides: Sequence[Bool[np.ndarray, " n"]],
    share: Callable[[np.ndarray], float],
) -> tuple[float, float]:
    """Members of a cluster in each condition, and the variance that they give its difference.

    Args:
        strata, labels: Of each value. Values of one stratum and label are one member.
        sides: Masks of the values of each condition.
        share: Turns a number of every stratum into its contribution to the difference.
    """
    member, _ = pd.factorize(strata * (labels.max() + 1) + labels)
    stratum_of = np.zeros(member.max() + 1, int)
    stratum_of[member] = strata
    numbers, sizes = zip(
        *(_means(values[side], member[side], len(stratum_of)) for side in sides), strict=True
    )
    before, after = sizes[0] > 0, sizes[1] > 0

    def variance(which: np.ndarray, one: int, two: int) -> float:
        return _covariance(numbers[one][which], numbers[two][which], stratum_of[which])

    n_before, n_after, n_both = (
        np.bincount(stratum_of[which], minlength=n_strata)
        for which in (before, after, before & after)
    )
    shares = [share(1 / np.maximum(counts, 1)) for counts in (n_before, n_after)]
    inside = variance(before, 0, 0) * shares[0] + variance(after, 1, 1) * shares[1]
    if n_both.any():
        both = share(n_both / np.maximum(n_before * n_after, 1))
        inside -= 2 * variance(before & after, 0, 1) * both
    return 2 / sum(shares), inside


def _covariance(
    one: Float[np.ndarray, " n"], two: Float[np.ndarray, " n"], groups: Int[np.ndarray, " n"]
) -> float:
    """Covariance of two numbers inside their groups, pooled; NaN where no group has two of them."""
    _, groups = np.unique(groups, return_inverse=True)
    number = int(groups.max(initial=-1)) + 1
    free = len(one) - number
    rests = [values - _means(values, groups, number)[0][groups] for values in (one, two)]
    return float(rests[0] @ rests[1]) / free if free else math.nan


def _means(
    values: Float[np.ndarray, " n"], groups: Int[np.ndarray, " n"], number: int
) -> tuple[Float[np.ndarray, " group"], Int[np.ndarray, " group"]]:
    """Mean of each group's values (0 of an empty one), and how many they are."""
    sizes = np.bincount(groups, minlength=number)
    return np.bincount(groups, values, number) / np.maximum(sizes, 1), sizes


def _signs(n: int, resamples: int, seed: int) -> Iterator[Float[np.ndarray, "flip cluster"]]:
    """Every assignment of signs where there are few, else random ones, a chunk at a time."""
    if 2**n <= resamples or n * resamples <= CACHED_DRAWS:
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


def resampled_p(
    values: Float[np.ndarray, "resample *rest"], clusters: int
) -> Float[np.ndarray, "*rest"]:
    """Two-sided p of "the true value is 0", from the values that resampling n
    clusters gave.

    The p is below 0.05 where the 95 % interval of `tails` excludes 0. The share of values on the
    rarer side of 0, with one more counted on it, is moved as `tails` moves percentiles; so p is
    never 0. NaN values are left out; p is NaN where nothing else is there.
    """
    from scipy.stats import norm, t

    n = (~np.isnan(values)).sum(axis=0)
    rarer = np.minimum((values <= 0).sum(axis=0), (values >= 0).sum(axis=0))
    share = np.minimum((rarer + 1) / (n + 1), 0.5)
    p = 2 * t.cdf(norm.ppf(share) * math.sqrt((clusters - 1) / clusters), clusters - 1)
    return np.asarray(np.where(n > 0, p, np.nan))


def least_p(clusters: int) -> float:
    """The smallest p that `paired_difference` gives so many clusters, of 4000 resamples."""
    return 2 / 2**clusters if 2**clusters <= 4000 else 1 / 4001


def holm(p: Sequence[float] | np.ndarray) -> Float[np.ndarray, " test"]:
    """Holm's p-values of one family of tests: below 0.05 none of them errs in 95 % of families.

    Args:
        p: One p per test, in [0, 1]. NaN is a test that could not be made: such a test counts as 1,
            so that the others are corrected for it too, and stays NaN.
    """
    raw = np.asarray(p, dtype=np.float64)
    known = np.where(np.isnan(raw), 1.0, raw)
    order = np.argsort(known, kind="stable")
    stepped = np.maximum.accumulate((len(raw) - np.arange(len(raw))) * known[order])
    adjusted = np.empty(len(raw))
    adjusted[order] = np.minimum(stepped, 1.0)
    return np.where(np.isnan(raw), np.nan, adjusted)


def label_codes(labels: Labels, sort: bool = False) -> tuple[Int[np.ndarray, " n"], np.ndarray]:
    """The number of each value's label, and the labels by number: in their order of appearance, or
    sorted. Labels are texts, numbers or tuples of them; 1 and "1" are two labels.

    Raises:
        StatisticsError: A label is missing (None, NaN, masked), so that nobody knows which values
            depend on each other, or cannot be compared.
    """
    read = _read_labels(labels)
    try:
        codes, names = pd.factorize(read)
    except TypeError as error:
        raise StatisticsError(
            f"labels are texts, numbers or tuples of them; found others ({first_sentence(error)})"
        ) from error
    # A part of a tuple may be missing, too.
    lacking = [isinstance(name, tuple) and any(map(pd.isna, name)) for name in names]
    wrong = (codes < 0) | np.array([*lacking, True])[codes]
    if missing := np.flatnonzero(wrong).tolist():
        raise StatisticsError(
            f"{len(missing)} of {len(codes)} labels are missing (NaN or None), the first at"
            f" {missing[0]}; give every value a label (its prompt, its text), or leave it out"
        )
    if sort:
        order = _order(names)
        codes, names = np.argsort(order)[codes], names[order]
    return codes, names


def _codes_of_both(labels: tuple[Labels, Labels]) -> tuple[Int[np.ndarray, " n"], np.ndarray]:
    """`label_codes` of the values of two conditions, one after the other."""
    one, second = map(_read_labels, labels)
    if one.dtype.kind != second.dtype.kind:  # together they would be texts
        one, second = (pd.Series(side, dtype=object).to_numpy() for side in (one, second))
    return label_codes(np.concatenate([one, second]), sort=True)


def _order(names: np.ndarray) -> Int[np.ndarray, " name"]:
    """The order of different labels; by how they are written where their types have no order."""
    try:
        return np.argsort(names, kind="stable")
    except TypeError:
        return np.argsort(np.array([repr(name) for name in names]), kind="stable")


def _read_labels(labels: Labels) -> np.ndarray:
    """Labels as an array of one dimension that keeps their types: numpy would make texts of numbers
    and NaN beside texts, and rows of tuples. Masked ones are None."""
    if isinstance(labels, np.ma.MaskedArray):
        hidden = np.ma.getmaskarray(labels)
        labels = labels.data.astype(object)
        labels[hidden] = None
    if hasattr(labels, "__array__") and (array := np.asarray(labels)).ndim == 1:
        return array
    return np.fromiter(map(plain, labels), object, len(labels))


def _unmasked(values: Any) -> Any:
    """Values whose masked ones are NaN."""
    masked = isinstance(values, np.ma.MaskedArray)
    return values.astype(np.float64).filled(np.nan) if masked else values


def check_finite(values: Float[np.ndarray, "*shape"], missing: bool = False) -> None:
    """Refuse values that no mean can be made of.

    Args:
        missing: Allow NaN, and refuse infinite values alone.

    Raises:
        StatisticsError: A value is infinite, or NaN.
    """
    wrong = values[np.isinf(values) if missing else ~np.isfinite(values)]
    if len(wrong):
        raise StatisticsError(
            f"{len(wrong)} of {values.size} values are not finite, the first is {wrong[0]};"
            " leave them out, with their labels"
        )


def _check_lengths(values: Sequence[float] | np.ndarray | pd.Series, labels: Labels) -> None:
    if len(values) != len(labels):
        raise StatisticsError(
            f"need one cluster label per value; found {len(values)} values and {len(labels)} labels"
        )
