"""Statistics of a map of heads: family-wise tests, ranks with intervals, agreement of halves.

The unit of independence is the prompt. All tests flip the signs of whole prompts, the same flips
for all units, so that correlation between heads is kept. `lapa2_interp.stats` has the intervals and
tests of one number at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from lapa2_interp.stats import FEW, bounds, check_finite, resampled_means, tails

ALL_SIGNS = 16
"""Up to this number of prompts every assignment of signs is used."""
FLIPS = 100_000
"""Random assignments beyond."""
CHUNK = 2**14
"""Assignments that are in memory at once."""
SPLITS = 200
"""Random halves of the prompts."""


@dataclass(frozen=True)
class MaxT:
    """Sign-flip tests of many units at once.

    Attributes:
        t: Student's t of each unit over prompts.
        p: Two-sided p-value of each by itself.
        p_max: p corrected for the number of units: the probability that the largest |t| of all
            units is as large by chance.
        q: Benjamini and Hochberg's q of p.
    """

    t: Float[np.ndarray, " unit"]
    p: Float[np.ndarray, " unit"]
    p_max: Float[np.ndarray, " unit"]
    q: Float[np.ndarray, " unit"]


def max_t(values: Float[np.ndarray, "prompt unit"]) -> MaxT:
    """Sign-flip tests of the units' means over prompts, studentised (Westfall and Young's max T).

    A unit that is 0 in every prompt has t 0 and p 1.

    Args:
        values: The mean of each unit in each prompt.

    Raises:
        StatisticsError: A value is not finite.
    """
    from scipy.stats import false_discovery_control

    check_finite(values)
    n, n_units = values.shape
    if n < 2:
        nothing = np.full(n_units, np.nan)
        return MaxT(nothing, nothing, nothing, nothing)
    squares = (values**2).sum(0)

    def t_of(means: Float[np.ndarray, "flip unit"]) -> Float[np.ndarray, "flip unit"]:
        variance = np.maximum(squares - n * means**2, 1e-12 * squares) / (n - 1) / n
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(variance > 0, means / np.sqrt(variance), 0.0)

    t = t_of(values.mean(0)[None])[0]
    observed = np.abs(t)
    alone, largest, flips = np.zeros(n_units), np.zeros(n_units), 0
    for signs in _sign_flips(n):
        flipped = np.abs(t_of(signs @ values / n))
        alone += (flipped >= observed * (1 - 1e-9)).sum(0)
        top = np.sort(flipped.max(1))
        largest += len(top) - np.searchsorted(top, observed * (1 - 1e-9))
        flips += len(signs)
    if n > ALL_SIGNS:  # the observed signs are one of the possible ones
        alone, largest, flips = alone + 1, largest + 1, flips + 1
    p = alone / flips
    return MaxT(t, p, largest / flips, np.asarray(false_discovery_control(p)))


def _sign_flips(n: int) -> Iterator[Float[np.ndarray, "flip prompt"]]:
    if n <= ALL_SIGNS:
        for first in range(0, 2**n, CHUNK):
            numbers = np.arange(first, min(2**n, first + CHUNK))[:, None]
            yield 1.0 - 2.0 * ((numbers >> np.arange(n)) & 1)
        return
    rng = np.random.default_rng(0)
    for first in range(0, FLIPS, CHUNK):
        yield rng.choice([-1.0, 1.0], size=(min(CHUNK, FLIPS - first), n))


@dataclass(frozen=True)
class Ranks:
    """Ranks of units by effect, 1 the largest, with 95 % intervals over prompts. Equal effects have
    the same rank, the smallest of theirs."""

    rank: Int[np.ndarray, " unit"]
    low: Float[np.ndarray, " unit"]
    high: Float[np.ndarray, " unit"]


def ranks(values: Float[np.ndarray, "prompt unit"]) -> Ranks:
    """Ranks of the units' means; intervals from resampled prompts (NaN below `stats.FEW`).

    Raises:
        StatisticsError: A value is not finite.
    """
    from scipy.stats import rankdata

    check_finite(values)
    rank = rankdata(-values.mean(0), method="min").astype(int)
    n = len(values)
    if n < FEW:
        nothing = np.full(values.shape[1], np.nan)
        return Ranks(rank, nothing, nothing)
    drawn = resampled_means(values, np.arange(n))  # resample unit
    low, high = np.percentile(rankdata(-drawn, axis=1, method="min"), tails(n), axis=0)
    return Ranks(rank, np.asarray(low), np.asarray(high))


def spearman(one: Float[np.ndarray, " unit"], reference: Float[np.ndarray, " unit"]) -> float:
    """Rank correlation; NaN where all numbers of one are equal."""
    from scipy.stats import rankdata

    both = [rankdata(values) for values in (one, reference)]
    if len(one) < 2 or min(order.std() for order in both) == 0:
        return float("nan")
    return float(np.corrcoef(*both)[0, 1])


def split_half(values: Float[np.ndarray, "prompt unit"]) -> float:
    """Mean Spearman correlation of the units' means between random halves of the prompts; NaN below
    4 prompts."""
    n = len(values)
    if n < 4 or values.shape[1] < 3:
        return float("nan")
    rng, correlations = np.random.default_rng(0), []
    for _ in range(SPLITS):
        order = rng.permutation(n)
        halves = (order[: n // 2], order[n // 2 :])
        correlations.append(spearman(*(values[half].mean(0) for half in halves)))
    return float(np.mean(correlations))


def share_interval(
    part: Float[np.ndarray, "prompt unit"], total: Float[np.ndarray, " prompt"]
) -> tuple[Float[np.ndarray, " unit"], Float[np.ndarray, " unit"], Float[np.ndarray, " unit"]]:
    """Sum of a part over the sum of the total, with its 95 % interval over prompts: a ratio of
    sums, never a mean of ratios. Below `stats.FEW` prompts the interval is Student's, on how far
    each prompt's part is from its share. NaN where the total is 0 in every prompt."""
    if not total.any():
        nothing = np.full(part.shape[1], np.nan)
        return nothing, nothing.copy(), nothing.copy()
    share = part.sum(0) / total.sum()
    n = len(total)
    if n < FEW:
        low, high = bounds((part - share * total[:, None]) / total.mean())
        return share, share + low, share + high
    both = np.concatenate([part, total[:, None]], axis=1)
    drawn = resampled_means(both, np.arange(n))
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = np.nanpercentile(drawn[:, :-1] / drawn[:, -1:], tails(n), axis=0)
    return share, np.asarray(low), np.asarray(high)
