"""Intervals that resample whole prompts."""

import numpy as np
import pytest

from lapa2_interp.stats import mean_interval


def test_mean_and_counts():
    found = mean_interval([1.0, 2.0, 3.0, 4.0], ["a", "a", "b", "b"])
    assert (found.mean, found.n, found.clusters) == (2.5, 4, 2)
    assert (found.low, found.high) == (1.5, 3.5)


def test_copies_of_a_text_add_no_certainty():
    rng = np.random.default_rng(0)
    values = rng.normal(size=40)
    single = mean_interval(values, np.arange(40))
    copied = mean_interval(np.repeat(values, 25), np.repeat(np.arange(40), 25))
    assert (copied.low, copied.high) == pytest.approx((single.low, single.high))
    naive = mean_interval(np.repeat(values, 25), np.arange(1000))
    assert naive.high - naive.low < 0.4 * (single.high - single.low)


def test_coverage_of_clustered_means():
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        effect = rng.normal(size=40)
        values = (effect[:, None] + rng.normal(0, 0.5, (40, 5))).ravel()
        found = mean_interval(values, np.repeat(np.arange(40), 5), resamples=500, seed=trial)
        hits += found.low <= 0 <= found.high
    assert (
        0.88 <= hits / 200 <= 0.99
    )  # nominal 0.95; two binomial standard errors and the bootstrap's small-sample loss


def test_one_cluster_tells_no_spread():
    found = mean_interval([1.0, 2.0], ["a", "a"])
    assert found.mean == 1.5
    assert np.isnan([found.low, found.high]).all()


def test_missing_labels():
    with pytest.raises(ValueError, match="one cluster label per value"):
        mean_interval([1.0, 2.0], ["a"])
