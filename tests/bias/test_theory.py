"""Closed forms against brute-force softmax, limits, and the decay fit."""

import numpy as np
import pytest

from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.theory import (
    augmented_share,
    fit_decay,
    fit_slopes,
    local_exponent,
    log_odds,
    prefix_share,
    ratio_bound,
    shifted_share,
)


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@pytest.mark.parametrize(("l_pre", "l"), [(3, 4), (3, 64), (20, 512), (1, 2), (7, 7)])
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0, 2.0])
def test_propositions_against_softmax(l_pre, l, alpha):
    scores = np.full(l, 0.3)
    assert prefix_share(l, l_pre) == pytest.approx(softmax(scores)[:l_pre].sum(), abs=1e-14)
    scores[:l_pre] += alpha * np.log(l / l_pre)
    assert augmented_share(l, l_pre, alpha) == pytest.approx(
        softmax(scores)[:l_pre].sum(), abs=1e-14
    )


def test_a_few_points_by_hand():
    assert prefix_share(12, 3) == 0.25
    assert augmented_share(12, 3, 1.0) == pytest.approx(4 / 7)  # l / (2l - l_pre) = 12/21
    assert augmented_share(12, 3, 0.5) == pytest.approx(2 / 5)  # r = 4: 2 / (2 + 3)


def test_the_three_regimes():
    far = np.array([1e7, 1e8])
    half = augmented_share(far, 3, 0.5)
    assert np.log(half[1] / half[0]) / np.log(10) == pytest.approx(-0.5, abs=1e-3)
    assert augmented_share(far, 3, 1.0) == pytest.approx(0.5, abs=1e-6)
    assert augmented_share(1e9, 3, 1.5) == pytest.approx(1.0, abs=1e-4)


def test_exact_law_on_any_logits():
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores, b = rng.normal(0, 4, 40), rng.normal(0, 3)
        before = softmax(scores)[5:9].sum()
        scores[5:9] += b
        assert shifted_share(before, b) == pytest.approx(softmax(scores)[5:9].sum(), abs=1e-13)


@pytest.mark.parametrize(("c", "d"), [(1.5, 6.0), (3.0, 40.0), (0.02, 0.5)])
def test_fit_recovers_its_own_curve(c, d):
    t = np.arange(200)
    fit = fit_decay(t, c / (t + d))
    assert (fit.c, fit.d) == (pytest.approx(c, rel=1e-4), pytest.approx(d, rel=1e-4))
    assert fit.r2 == pytest.approx(1.0)


def test_fit_is_the_least_squares_one():
    from scipy.optimize import curve_fit

    t = np.arange(100.0)
    noisy = 2 / (t + 9) + np.random.default_rng(1).normal(0, 0.004, 100)
    (c, d), _ = curve_fit(lambda t, c, d: c / (t + d), t, noisy, p0=(1, 10))
    fit = fit_decay(t, noisy)
    assert (fit.c, fit.d) == (pytest.approx(c, rel=1e-3), pytest.approx(d, rel=1e-3))
    residual = ((noisy - c / (t + d)) ** 2).sum()
    assert fit.r2 == pytest.approx(1 - residual / ((noisy - noisy.mean()) ** 2).sum(), abs=1e-6)


def test_a_flat_or_rising_curve_does_not_converge():
    t = np.arange(50)
    assert np.isnan(fit_decay(t, np.full(50, 0.2)).c)
    assert np.isnan(fit_decay(t, 0.1 + 0.01 * t).c)
    assert np.isnan(fit_decay(t, 0.13 + np.random.default_rng(2).normal(0, 0.01, 50)).c)


# --- finite l, limits and bounds


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("l_pre", [1, 3, 20])
def test_the_exponent_is_the_derivative(alpha, l_pre):
    for l in (l_pre * 1.5, 64.0, 1e4, 1e7):
        h = 1e-5
        both = np.log(augmented_share(np.array([l * (1 - h), l * (1 + h)]), l_pre, alpha))
        assert local_exponent(l, l_pre, alpha) == pytest.approx(
            (both[1] - both[0]) / np.log((1 + h) / (1 - h)), abs=1e-5
        )
    assert local_exponent(float(l_pre), l_pre, alpha) == -1
    assert local_exponent(1e30, l_pre, alpha) == pytest.approx(min(alpha - 1, 0), abs=1e-3)


def test_closed_forms_are_stable_far_out():
    """Against exact rational arithmetic at l = 10^7."""
    from fractions import Fraction

    r = Fraction(10**7, 4)
    for alpha in (0, 1, 2):
        exact = r**alpha / (r**alpha + r - 1)
        assert augmented_share(10**7, 4, float(alpha)) == pytest.approx(float(exact), rel=1e-13)
        assert 1 - exact == pytest.approx(1 - augmented_share(10**7, 4, float(alpha)), abs=1e-15)
    odds = 1e-300 * np.exp(700)
    assert shifted_share(1e-300, 700.0) == pytest.approx(odds / (1 + odds), rel=1e-10)


@pytest.mark.parametrize(("alpha", "limit"), [(0.0, 0), (0.3, 0), (1.0, 0.5), (1.5, 1)])
def test_regimes_have_their_limits(alpha, limit):
    """Dilution, tempered correction, full compensation, over-compensation."""
    assert augmented_share(1e60, 3, alpha) == pytest.approx(limit, abs=1e-9)


def test_the_ratio_and_its_bound_on_random_logits():
    rng = np.random.default_rng(0)
    for _ in range(50):
        z = rng.normal(0, 2, 64)
        weights = softmax(z)
        share, ratio = weights[:5].sum(), np.exp(z[:5]).mean() / np.exp(z[5:]).mean()
        assert ratio_bound(64, 5, ratio) == pytest.approx(share), "tight where the ratio is reached"
        assert ratio_bound(64, 5, ratio * 1.1) > share


@pytest.mark.parametrize("law", ["log", "linear", "sqrt", "constant"])
def test_other_laws_under_uniform_logits(law):
    augmentation = Augmentation(alpha=0.5, law=law, l0=128 if law == "constant" else None)

    def uniform_share(l):
        share = prefix_share(l, 3)
        with np.errstate(divide="ignore"):
            return shifted_share(share, augmentation.shift(log_odds(share), np.asarray(l), 3))

    for l in (4, 30, 300):
        scores = np.zeros(l)
        scores[:3] += {"log": 0.5 * np.log(l / 3), "linear": 0.5 * l / 3, "sqrt": 0.5 * (l / 3) ** 0.5,
                       "constant": 0.5 * np.log(128 / 3)}[law]  # fmt: skip
        assert uniform_share(l) == pytest.approx(softmax(scores)[:3].sum(), abs=1e-14)
    far = uniform_share(np.array([1e5, 1e6]))
    if law == "constant":
        assert far[1] / far[0] == pytest.approx(0.1, rel=1e-3)
    if law in ("linear", "sqrt"):
        assert far == pytest.approx([1, 1])


def test_slopes_by_hand():
    x = np.array([0.0, 1, 2, 3])
    y = np.stack([2 * x + 1, -x, [0, 1, np.inf, 3]])
    assert fit_slopes(x, y) == pytest.approx([2, -1, np.nan], nan_ok=True)
    assert fit_slopes(np.stack([x, 2 * x, x]), y) == pytest.approx([2, -0.5, np.nan], nan_ok=True)


def test_log_odds():
    assert log_odds(np.array([0.5, 0.75, 0.0])) == pytest.approx([0, np.log(3), -np.inf])
