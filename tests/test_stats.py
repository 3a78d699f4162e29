"""Intervals that resample whole prompts."""

import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

from lapa2_interp import stats
from lapa2_interp.circuits.statistics import max_t, ranks
from lapa2_interp.errors import ScoringError, StatisticsError
from lapa2_interp.scoring.agreement import agreement
from lapa2_interp.scoring.distinct import distinct_table
from lapa2_interp.stats import (
    NothingPairedError,
    error_at,
    least_p,
    mean_interval,
    paired_difference,
)


def test_mean_and_counts():
    interval = mean_interval([1.0, 2.0, 3.0, 4.0], ["a", "a", "b", "b"])
    assert (interval.mean, interval.n, interval.clusters) == (2.5, 4, 2)
    # Two clusters a distance 1 from the mean: error sqrt(2 * (2^2 + 2^2)) / 4 = 1, times t(1
    # degree, 97.5 %) = 12.706.
    assert (interval.low, interval.high) == pytest.approx((2.5 - 12.706, 2.5 + 12.706), abs=1e-3)


@pytest.mark.parametrize("n", [3, 5, 7, 8])
def test_few_clusters_cover_too(n):
    rng = np.random.default_rng(n)
    hits = 0
    for _ in range(400):
        values = (rng.normal(size=n)[:, None] + rng.normal(0, 0.5, (n, 4))).ravel()
        interval = mean_interval(values, np.repeat(np.arange(n), 4))
        hits += interval.low <= 0 <= interval.high
    assert 0.92 <= hits / 400 <= 0.98


@pytest.mark.parametrize("n", [8, 15, 40])
def test_percentiles_of_few_clusters_are_moved_outwards(n):
    """By Student's t and by sqrt(n / (n - 1)), as in Hesterberg 2015."""
    values, clusters = np.random.default_rng(n).normal(size=n), np.arange(n)
    outside = scipy.stats.norm.cdf(scipy.stats.t.ppf(0.025, n - 1) * math.sqrt(n / (n - 1)))
    assert outside < 0.025
    means, interval = stats.resampled_means(values, clusters), mean_interval(values, clusters)
    ends = np.percentile(means, [100 * outside, 100 * (1 - outside)])
    assert (interval.low, interval.high) == pytest.approx(tuple(ends))


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
        interval = mean_interval(values, np.repeat(np.arange(40), 5), resamples=500, seed=trial)
        hits += interval.low <= 0 <= interval.high
    assert (
        0.88 <= hits / 200 <= 0.99
    )  # nominal 0.95; two binomial standard errors and the bootstrap's small-sample loss


def test_one_cluster_tells_no_spread():
    interval = mean_interval([1.0, 2.0], ["a", "a"])
    assert interval.mean == 1.5
    assert np.isnan([interval.low, interval.high]).all()


VALUES, CLUSTERS = [0.1 * i for i in range(24)], [str(i // 2) for i in range(24)]


def with_last(missing):
    return pd.Series([*CLUSTERS[:-1], missing], dtype=object)


@pytest.mark.parametrize(
    "labels",
    [
        *map(with_last, [None, np.nan, pd.NA]),
        [*CLUSTERS[:-1], np.nan],
        [*CLUSTERS[:-1], pd.NaT],
        (*CLUSTERS[:-1], None),
        [*((one, 1) for one in CLUSTERS[:-1]), ("a", np.nan)],
        np.ma.masked_array(CLUSTERS, [False] * 23 + [True]),
        np.ma.masked_array(range(24), [False] * 23 + [True]),
    ],
    ids=str,
)
def test_a_missing_label_joins_no_other_cluster(labels):
    values, refused = np.array(VALUES), pytest.raises(StatisticsError, match="[12] of .* labels are missing .* the first at")  # fmt: skip
    for compute in (
        lambda: stats.label_codes(labels),
        lambda: stats.resampled_means(values, labels),
        lambda: stats.bounds(values, labels),
        lambda: stats.bounds(values[-4:], labels[-4:]),
        lambda: mean_interval(values, labels),
        lambda: paired_difference(values, labels, values, CLUSTERS),
        lambda: paired_difference(values, CLUSTERS, values, labels),
        lambda: paired_difference(values, CLUSTERS, values, CLUSTERS, kinds=(labels, labels)),
        lambda: paired_difference(values, CLUSTERS, values, CLUSTERS, members=(labels, labels)),
        lambda: distinct_table(["a b"] * 24, labels),
    ):
        with refused:
            compute()


@pytest.mark.parametrize(
    ("labels", "clusters"),
    [
        ([1, "1", 2, "2"], 4),
        ([("p", "calm"), ("p", "angry"), ["q", "calm"], ("p", "calm")], 3),
        (np.array([[0, 1], [0, 1], [1, 0], [1, 1]]), 3),
        (pd.Series(["a", "b", "a", "b"], dtype="category"), 2),
        (np.array(["2020", "2021", "2020", "2022"], dtype="datetime64[Y]"), 3),
        ([np.int64(1), 1, 2.0, torch.tensor(2)], 2),
    ],
    ids=str,
)
def test_labels_keep_their_types(labels, clusters):
    assert mean_interval(VALUES[:4], labels).clusters == clusters
    assert paired_difference(VALUES[:4], labels, VALUES[4:8], labels).clusters == clusters


def test_labels_of_other_types_are_not_paired():
    with pytest.raises(NothingPairedError):
        paired_difference(VALUES[:2], [1, 2], VALUES[:2], ["1", "2"])
    assert paired_difference(VALUES[:2], [1, 2], VALUES[:2], [2.0, "1"]).clusters == 1


def test_a_masked_value_is_not_there():
    masked = np.ma.masked_array(VALUES, [False] * 23 + [True])
    with pytest.raises(StatisticsError, match="1 of 24 values are not finite"):
        mean_interval(masked, CLUSTERS)
    gap = paired_difference(masked, CLUSTERS, VALUES, CLUSTERS)
    assert gap == paired_difference([*VALUES[:-1], np.nan], CLUSTERS, VALUES, CLUSTERS)
    assert np.isnan(stats.bounds(masked, CLUSTERS)).all()


WRONG = [*VALUES[:-1], np.nan]
REFUSED = {
    "a mean of nan": (lambda: mean_interval(WRONG, CLUSTERS), "1 of 24 values are not finite, the first is nan"),
    "a maximum of nan": (lambda: max_t(np.array(WRONG).reshape(12, 2)), "1 of 24 values"),
    "ranks of nan": (lambda: ranks(np.array(WRONG).reshape(12, 2)), "1 of 24 values"),
    "a difference of inf": (
        lambda: paired_difference([*VALUES[:-1], np.inf], CLUSTERS, VALUES, CLUSTERS), "the first is inf"
    ),
    "agreement on nan": (
        lambda: agreement(pd.DataFrame({"calm": WRONG, "angry": VALUES}), ["calm"] * 24, ["a b"] * 24),
        "text 24 of 24 has no number",
    ),
    **{
        f"a label short {more}": (
            lambda clusters=clusters, more=more: paired_difference(VALUES, CLUSTERS, VALUES, clusters, **more),
            "found 24 values and 23 labels",
        )
        for clusters, more in (
            (CLUSTERS[1:], {}),
            (CLUSTERS, {"kinds": (CLUSTERS, CLUSTERS[1:])}),
            (CLUSTERS, {"members": (CLUSTERS[1:], CLUSTERS)}),
        )
    },
    "fewer labels than values": (lambda: mean_interval([1.0, 2.0], ["a"]), "one cluster label per value"),
    "labels of other kinds": (
        lambda: mean_interval(VALUES[:2], [{"a": 1}, {"a": 2}]), "labels are texts, numbers or tuples of them"
    ),
    "no shared cluster": (lambda: paired_difference([1.0], ["a"], [2.0], ["b"]), "share no cluster"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=[name[:40] for name in REFUSED])
def test_what_the_room_refuses(call, message):
    with pytest.raises((StatisticsError, ScoringError), match=message):
        call()


def test_paired_differences_by_hand():
    """Cluster means 2, 4 against 3, 6; a third cluster is in one condition alone."""
    difference = paired_difference(
        [1.0, 3.0, 4.0, 9.0], ["a", "a", "b", "z"], [3.0, 6.0, 6.0], ["a", "b", "b"]
    )
    assert (difference.mean, difference.clusters) == (1.5, 2)
    assert difference.p == 0.5, "of four sign assignments two are as extreme"
    quantiles = 12.7062 + 1.3764  # of Student's t with one degree of freedom
    assert difference.detectable == pytest.approx(quantiles * 0.5, rel=1e-4)
    one = paired_difference([1.0], ["a"], [2.0], ["a"])
    assert (one.mean, one.clusters) == (1, 1)
    assert np.isnan([one.low, one.p, one.detectable]).all()


def test_the_kinds_of_a_cluster_count_alike_however_many_texts_they_have():
    """Cluster a: x goes 2 -> 4, y goes 10 -> 11.5. Cluster b: x goes 5 -> 7, y is in one alone."""
    nan = float("nan")
    difference = paired_difference(
        [1.0, 2.0, 3.0, 10.0, nan, 5.0],
        list("aaaabb"),
        [4.0, 11.0, 12.0, 9.0, 7.0],
        list("aaabb"),
        kinds=(list("xxxyxx"), list("xyyyx")),
    )
    assert difference.mean == ((2 + 1.5) / 2 + 2) / 2
    assert difference.clusters == 2
    # 1 / texts of each cluster: of a's mean of two kinds and of b's one kind
    before, after = ((1 / 3 + 1) / 4 + 1) / 2, ((1 + 1 / 2) / 4 + 1) / 2
    assert difference.texts == pytest.approx(2 / (before + after))


def test_paired_differences_err_at_their_rate():
    """Under no effect p < 0.05 in about 5 % of experiments; a detectable effect is found in about
    80 %; intervals cover."""
    rng = np.random.default_rng(0)
    n, trials, names = 20, 300, np.arange(20).repeat(3)

    def trial(effect):
        prompts = np.repeat(rng.normal(size=n), 3)
        before, after = (prompts + rng.normal(size=3 * n) + shift for shift in (0.0, effect))
        return paired_difference(before, names, after, names, resamples=400)

    null = [trial(0.0) for _ in range(trials)]
    assert 0.02 < np.mean([difference.p < 0.05 for difference in null]) < 0.09
    assert 0.88 < np.mean([difference.low <= 0 <= difference.high for difference in null]) < 0.98
    effect = 2.80 * np.sqrt(2 / 3) / np.sqrt(n)
    assert 0.7 < np.mean([trial(effect).p < 0.05 for _ in range(trials)]) < 0.88
    assert np.mean([difference.detectable for difference in null]) == pytest.approx(
        effect, rel=0.05
    )


def test_equivalence_errs_at_its_rate():
    """A difference as large as the margin is called smaller in 5 % of experiments, one of 0 nearly
    always where the margin is four errors, and p of being beyond is Student's."""
    rng = np.random.default_rng(3)
    n, trials = 25, 400

    def trial(effect):
        gaps = rng.normal(effect, 1, n)
        return paired_difference(np.zeros(n), np.arange(n), gaps, np.arange(n), resamples=100)

    margin = 4 / np.sqrt(n)
    at_margin = [trial(margin) for _ in range(trials)]
    assert 0.02 < np.mean([difference.p_within(margin) < 0.05 for difference in at_margin]) < 0.09
    assert np.mean([trial(0.0).p_within(margin) < 0.05 for _ in range(trials)]) > 0.9
    one = at_margin[0]
    t = abs(one.mean) / one.error
    assert one.p_beyond(0.0) == pytest.approx(2 * scipy.stats.t.sf(t, n - 1))
    assert one.p_beyond(100.0) == 1
    assert one.p_within(abs(one.mean)) == pytest.approx(0.5)
    for difference in trial(0.0), trial(1.5), trial(3.0):
        half = scipy.stats.t.ppf(0.95, n - 1) * difference.error
        inside = -margin < difference.mean - half and difference.mean + half < margin
        assert (difference.p_within(margin) < 0.05) == inside, "its 90 % interval"


@pytest.mark.parametrize("same_kind", [True, False])
def test_errors_at_other_sizes_are_foretold(same_kind):
    """From 20 prompts with 6 texts of two kinds: the mean squared error at 60 prompts with 2."""
    rng = np.random.default_rng(4)
    kinds_differ = 0.0 if same_kind else 3.0

    def trial(prompts, texts):
        """The kinds' means differ, the prompts answer differently, and texts vary."""
        names, kinds = np.arange(prompts).repeat(texts), np.tile([0, 1], prompts * texts // 2)
        answer = rng.normal(0, 0.7, prompts).repeat(texts)
        sides = [rng.normal(size=prompts * texts) + kinds_differ * kinds for _ in range(2)]
        return paired_difference(
            sides[0], names, sides[1] + answer, names, resamples=10, kinds=(kinds, kinds)
        )

    few = [trial(20, 6) for _ in range(200)]
    assert np.mean([difference.noise for difference in few]) == pytest.approx(
        (2 / 6) / (2 / 6 + 0.7**2), rel=0.08
    )
    foretold = [error_at(e.error, e.clusters, e.texts, e.noise, 60, 2) ** 2 for e in few]
    truth = [trial(60, 2).mean for _ in range(400)]
    assert np.mean(foretold) == pytest.approx(np.var(truth), rel=0.15)
    alone = paired_difference(np.zeros(9), np.arange(9), rng.normal(size=9), np.arange(9))
    assert np.isnan(alone.noise)
    assert error_at(alone.error, 9, 1, alone.noise, 36, 4) == pytest.approx(alone.error / 2)
    assert error_at(alone.error, 9, 4, np.nan, 9, 1) == pytest.approx(alone.error * 2)


def test_units_foretell_the_errors_of_values_that_depend_on_each_other():
    """One text at two lengths, correlated by .7; of the second, three readings of each text."""
    rng = np.random.default_rng(5)

    def trial(prompts, texts):
        names, number = np.arange(prompts).repeat(texts), np.tile(np.arange(texts), prompts)
        one, two = rng.multivariate_normal([0, 0], [[1, 0.7], [0.7, 1]], prompts * texts).T
        two = two + rng.normal(0, 0.5, prompts).repeat(texts)
        order = rng.permutation(3 * prompts * texts)
        sides = one, names, np.tile(two, 3)[order], np.tile(names, 3)[order]
        of_texts = number, np.tile(number, 3)[order]
        return paired_difference(*sides, resamples=10, members=of_texts)

    few = [trial(20, 6) for _ in range(200)]
    assert {round(difference.texts, 9) for difference in few} == {6.0}
    inside = [difference.noise * 20 * difference.error**2 for difference in few]
    assert np.mean(inside) == pytest.approx((1 + 1 - 2 * 0.7) / 6, rel=0.05)
    foretold = [error_at(e.error, e.clusters, e.texts, e.noise, 60, 2) ** 2 for e in few]
    truth = [trial(60, 2).mean for _ in range(400)]
    assert np.mean(foretold) == pytest.approx(np.var(truth), rel=0.15)


def test_members_that_only_one_condition_has():
    """By hand: a cluster's members a, b against b, c; the variance of the difference of the means."""
    before, after = np.array([0.0, 2.0, 5.0, 5.5]), np.array([3.0, 4.0, 9.0, 6.0])
    names = ["x", "x", "y", "y"]
    members = (["a", "b", "a", "b"], ["b", "c", "b", "c"])
    difference = paired_difference(before, names, after, names, members=members)
    assert difference.texts == 2
    inside = (2.0 + 0.125) / 2 / 2 + (0.5 + 4.5) / 2 / 2
    assert np.isnan(
        difference.noise
    )  # one member of a cluster is in both, so nothing tells how alike
    alone = paired_difference(before, names, after, names)
    assert alone.noise == pytest.approx(min(1, inside / np.var([2.5, 2.25], ddof=1)))


@pytest.mark.parametrize("n", [5, 8, 15, 200])
def test_what_is_detectable_is_found_in_80_percent(n):
    """By the interval of Student's t, and by p where so few clusters can have a small one."""
    rng = np.random.default_rng(6)
    quantiles = scipy.stats.t.ppf([0.975, 0.8], n - 1).sum()
    names = np.arange(n)
    one = paired_difference(np.zeros(n), names, rng.normal(size=n), names)
    assert one.detectable == pytest.approx(quantiles * one.error)
    draws = rng.normal(quantiles / np.sqrt(n), 1, (4000, n))
    errors = draws.std(axis=1, ddof=1) / np.sqrt(n)
    shown = draws.mean(axis=1) > scipy.stats.t.ppf(0.975, n - 1) * errors
    assert 0.75 < shown.mean() < 0.85
    large = paired_difference(np.zeros(n), names, rng.normal(100, 1, n), names)
    assert large.p == pytest.approx(least_p(n))


def test_many_clusters_take_little_memory():
    values = np.random.default_rng(0).normal(size=30_000)
    interval = mean_interval(values, np.arange(30_000))
    assert interval.high - interval.low == pytest.approx(2 * 1.96 / np.sqrt(30_000), rel=0.1)


def test_signs_in_chunks_are_those_of_one_draw_and_are_not_kept(monkeypatch):
    rng = np.random.default_rng(0)
    sides = np.zeros(301), np.arange(301), rng.normal(0.05, 1, 301), np.arange(301)
    cached = stats._signs_once.cache_info().currsize
    monkeypatch.setattr(stats, "CHUNK", 301 * 999)
    difference = paired_difference(*sides)
    assert stats._signs_once.cache_info().currsize == cached
    monkeypatch.setattr(stats, "CACHED_DRAWS", 2**22)
    assert paired_difference(*sides).p == difference.p
