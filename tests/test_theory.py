"""Closed forms against brute-force softmax, limits, and the decay fit."""

import numpy as np
import pytest

from lapa2_interp.theory import augmented_share, fit_decay, prefix_share, shifted_share


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@pytest.mark.parametrize(("l_pre", "l"), [(3, 4), (3, 64), (20, 512), (1, 2), (7, 7)])
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0, 2.0])
def test_propositions_against_softmax(l_pre, l, alpha):
    scores = np.full(l, 0.3)
    assert prefix_share(l, l_pre) == pytest.approx(softmax(scores)[:l_pre].sum(), abs=1e-14)
    scores[:l_pre] += alpha * np.log(l / l_pre)
    assert augmented_share(l, l_pre, alpha) == pytest.approx(softmax(scores)[:l_pre].sum(), abs=1e-14)


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


def test_too_few_steps():
    with pytest.raises(ValueError, match="at least 3 steps, found 2"):
        fit_decay(np.arange(2), np.array([0.2, 0.1]))
