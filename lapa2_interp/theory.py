"""Closed forms of the paper's propositions, and the fit of its decay curve.

l is the number of keys, l_pre those of the prefix, A the attention on the prefix under uniform logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Real


def prefix_share(l: Real[np.ndarray, "*shape"] | float | int, l_pre: int) -> Float[np.ndarray, "*shape"]:
    """Proposition 1: A = l_pre / l, O(1/l).

    Args:
        l: Key counts >= l_pre, any shape.
        l_pre: Prefix length, >= 1.
    """
    return np.asarray(l_pre / np.asarray(l, dtype=np.float64))


def augmented_share(
    l: Real[np.ndarray, "*shape"] | float | int, l_pre: int, alpha: float
) -> Float[np.ndarray, "*shape"]:
    """Proposition 2 (Eq. 8): A' = r^alpha / (r^alpha + r - 1) with r = l / l_pre.

    Its limits: Theta(l^(alpha-1)) for 0 < alpha < 1, 1/2 at alpha = 1, 1 for alpha > 1.
    """
    r = np.asarray(l, dtype=np.float64) / l_pre
    return np.asarray(1 / (1 + (r - 1) * r**-alpha))


def shifted_share(
    share: Float[np.ndarray, "*shape"] | float | int, bias: Float[np.ndarray, "*#shape"] | float | int
) -> Float[np.ndarray, "*shape"]:
    """The exact law, for any logits: a bias b on every key of a span gives logit(A') = logit(A) + b.

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
        c, d: The parameters, D > 0; NaN where no D up to 100 times the steps fits best: the curve does not decay so.
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

    bounds = (np.log(1e-3), np.log(100 * (1 + t.max())))
    grid = np.linspace(*bounds, 60)
    start = int(np.argmin([loss(x) for x in grid]))
    found = minimize_scalar(loss, bounds=(grid[max(start - 1, 0)], grid[min(start + 1, 59)]), method="bounded")
    if not found.success or start in (0, 59):
        return DecayFit(np.nan, np.nan, np.nan)
    spread = float(((attention - attention.mean()) ** 2).sum())
    d = float(np.exp(found.x))
    return DecayFit(best_c(d), d, 1 - float(found.fun) / spread if spread > 0 else np.nan)
