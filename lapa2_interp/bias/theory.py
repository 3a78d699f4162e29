"""Closed forms of the paper's propositions, and the fits of its decay curves.

l is the number of keys, l_pre those of the prefix, r = l / l_pre, A the attention on the prefix and
A' the same with the bias.

The module rests on two facts. For any logits, A / (1 - A) = e_P / (e_R * (r - 1)), where e_P and
e_R are the average exponentiated logits of prefix and other keys: Proposition 1 is the case e_P =
e_R, its generalisation the case e_P <= C * e_R. And a bias b on the prefix adds b to log(A / (1 -
A)), whatever the logits are: Proposition 2 is that with b = alpha * log(r). On log-odds both are
therefore exact at every l, where A itself only approaches its power of l.

Example:
    >>> from lapa2_interp import theory
    >>> float(theory.prefix_share(l=100, l_pre=4))  # equal logits: l_pre / l
    0.04
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Real


def prefix_share(
    l: Real[np.ndarray, "*shape"] | float | int, l_pre: int
) -> Float[np.ndarray, "*shape"]:
    """Proposition 1: A = l_pre / l, O(1/l).

    Args:
        l: Key counts >= l_pre, any shape.
        l_pre: Prefix length, >= 1.
    """
    return np.asarray(l_pre / np.asarray(l, dtype=np.float64))


def augmented_share(
    l: Real[np.ndarray, "*shape"] | float | int, l_pre: int, alpha: float
) -> Float[np.ndarray, "*shape"]:
    """Proposition 2 (Eq. 11): A' = r^alpha / (r^alpha + r - 1) with r = l / l_pre.

    Its limits: Theta(l^(alpha-1)) for 0 < alpha < 1, 1/2 at alpha = 1, 1 for alpha > 1.
    """
    r = np.asarray(l, dtype=np.float64) / l_pre
    return np.asarray(1 / (1 + (r - 1) * r**-alpha))


def local_exponent(
    l: Real[np.ndarray, "*shape"] | float | int, l_pre: int, alpha: float
) -> Float[np.ndarray, "*shape"]:
    """d log A' / d log l under uniform logits at finite l, (1 - A') * (alpha - r / (r - 1)).

    The exponent is the slope of a straight line through log A' against log l, and its limit is
    alpha - 1 (0 from alpha = 1 on).
    """
    r = np.asarray(l, dtype=np.float64) / l_pre
    rest = 1 - augmented_share(l, l_pre, alpha)
    with np.errstate(divide="ignore", invalid="ignore"):
        # At r = 1 the rest is 0 and r / (r - 1) infinite; their product tends to 1.
        return np.asarray(np.where(r > 1, rest * (alpha - r / (r - 1)), -1.0))


def ratio_bound(
    l: Real[np.ndarray, "*#shape"] | float | int,
    l_pre: Real[np.ndarray, "*#shape"] | int,
    ratio: Float[np.ndarray, "*#shape"] | float,
) -> Float[np.ndarray, "*shape"]:
    """The bound on A where e_P / e_R <= ratio (section "Formal Analysis"): C l_pre / (C l_pre + l -
    l_pre)."""
    return np.asarray(ratio * l_pre / (ratio * l_pre + np.asarray(l, dtype=np.float64) - l_pre))


def log_odds(share: Float[np.ndarray, "*shape"] | float) -> Float[np.ndarray, "*shape"]:
    """log(A / (1 - A)); infinite at 0 and 1."""
    from scipy.special import logit

    return np.asarray(logit(np.asarray(share, dtype=np.float64)))


def fit_slopes(
    x: Real[np.ndarray, "*#curve step"], y: Float[np.ndarray, "*curve step"]
) -> Float[np.ndarray, "*curve"]:
    """Least-squares slope of every curve y against its x; NaN where a value is not finite.

    Of log A against log l it is the exponent of a power law; of log(A / (1 - A)) + log(r - 1)
    against log r it is alpha plus the growth exponent of e_P / e_R.

    Raises:
        ValueError: Fewer than 3 steps, or all at one x.
    """
    if x.shape[-1] < 3:
        raise ValueError(f"a slope needs at least 3 steps, found {x.shape[-1]}")
    centred = x - x.mean(-1, keepdims=True)
    spread = (centred**2).sum(-1)
    if (spread == 0).any():
        raise ValueError(f"a slope needs different lengths, found {x.shape[-1]} times {x.flat[0]}")
    with np.errstate(invalid="ignore"):
        slope = np.asarray((y * centred).sum(-1) / spread)
    return np.where(np.isfinite(slope), slope, np.nan)


def shifted_share(
    share: Float[np.ndarray, "*shape"] | float | int,
    bias: Float[np.ndarray, "*#shape"] | float | int,
) -> Float[np.ndarray, "*shape"]:
    """The exact law, for any logits: a bias b on every key of a span gives logit(A') = logit(A) +
    b.

    Args:
        share: Attention on the span without the bias, in [0, 1].
        bias: b, any sign; broadcasts against `share`.
    """
    share = np.asarray(share, dtype=np.float64)
    return np.asarray(share / (share + (1 - share) * np.exp(-np.asarray(bias))))


@dataclass(frozen=True)
class DecayFit:
    """Least squares of C / (t + D) (Figure "dilution").

    Attributes:
        c, d: The parameters, D > 0; NaN where no D up to 100 times the steps fits best, since the
            curve does not decay in this way.
        r2: Share of the variance over steps that the curve explains.
    """

    c: float
    d: float
    r2: float


def fit_decay(t: Real[np.ndarray, " step"], attention: Float[np.ndarray, " step"]) -> DecayFit:
    """Fit C / (t + D) to an attention curve.

    For each D the best C is linear least squares, so only D is searched.

    Args:
        t: Generation steps, at least 3.
        attention: Prefix attention at those steps.

    Raises:
        ValueError: Fewer than 3 steps.
    """
    from scipy.optimize import minimize_scalar

    if len(t) < 3:
        raise ValueError(f"a fit of two parameters needs at least 3 steps, found {len(t)}")

    def best_c(d: float) -> float:
        basis = 1 / (t + d)
        return float(basis @ attention / (basis @ basis))

    def loss(log_d: float) -> float:
        d = np.exp(log_d)
        return float(((attention - best_c(d) / (t + d)) ** 2).sum())

    # Search log D on a grid, then between the neighbours of the best point.
    bounds = (np.log(1e-3), np.log(100 * (1 + t.max())))
    grid = np.linspace(*bounds, 60)
    start = int(np.argmin([loss(x) for x in grid]))
    fit = minimize_scalar(
        loss, bounds=(grid[max(start - 1, 0)], grid[min(start + 1, 59)]), method="bounded"
    )
    if not fit.success or start in (0, 59):
        return DecayFit(np.nan, np.nan, np.nan)
    spread = float(((attention - attention.mean()) ** 2).sum())
    d = float(np.exp(fit.x))
    return DecayFit(best_c(d), d, 1 - float(fit.fun) / spread if spread > 0 else np.nan)
