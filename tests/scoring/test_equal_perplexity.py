"""Control at equal perplexity: curves whose answer is known, intervals that cover, families of
tests that err at their rate."""

import numpy as np
import pandas as pd
import pytest

from lapa2_interp.scoring.equal_perplexity import (
    SteeringCurves,
    add_verdicts,
    interpolate_at_perplexity,
)
from lapa2_interp.stats import holm, mean_interval, resampled_means, resampled_p, tails


def made(families, prompts=40, samples=2, noise=0.0, shared=0.0, seed=0, metrics=("acc",)):
    """Texts of a baseline and families: by strength, (mean NLL, mean metric); the prompts differ by
    `shared` in both, the same in all arms, and the texts by `noise`."""
    rng = np.random.default_rng(seed)
    own = rng.normal(0, 1, (prompts, 2)) * shared
    arms = {("baseline", 0.0): (3.0, 50.0)}
    arms |= {(name, s): point for name, curve in families.items() for s, point in curve.items()}
    frames = []
    for (family, strength), point in arms.items():
        numbers = np.repeat(own, samples, axis=0) + rng.normal(0, 1, (prompts * samples, 2)) * noise
        values = dict.fromkeys(metrics, point[1] + 10 * numbers[:, 1])
        names = [f"p{i}" for i in np.repeat(np.arange(prompts), samples)]
        frames.append(pd.DataFrame({"family": family, "strength": strength, "prompt": names,
                                    "nll": point[0] + 0.1 * numbers[:, 0], **values}))  # fmt: skip
    return pd.concat(frames, ignore_index=True)


LINE = {0.5: (3.1, 60.0), 1.0: (3.3, 70.0)}
STEEP = {0.25: (3.05, 60.0), 0.5: (3.4, 74.0)}


def row(table, family, ratio, metric="acc"):
    rows = table[(table["family"] == family) & (table["metric"] == metric)]
    return rows[np.isclose(rows["ratio"], ratio)].iloc[0]


def test_exact_curves_have_their_closed_form():
    arms = SteeringCurves(made({"lapa2": LINE, "other": STEEP}), ["acc"], resamples=50)
    table = arms.compare("lapa2", [1.1, 1.25])
    for ratio in (1.1, 1.25):
        x = np.log(ratio)
        line = 50 + 10 * x / 0.1 if x <= 0.1 else 60 + 10 * (x - 0.1) / 0.2
        steep = 60 + 14 * (x - 0.05) / 0.35
        for family, expected in (("lapa2", line), ("other", steep)):
            at_ratio = row(table, family, ratio)
            assert at_ratio[["value", "low", "high"]].tolist() == pytest.approx([expected] * 3)
            assert at_ratio["perplexity"] == pytest.approx(ratio * np.exp(3.0))
            assert at_ratio["reached"] == 1
        assert row(table, "other", ratio)["difference"] == pytest.approx(steep - line)
        assert np.isnan(row(table, "lapa2", ratio)["difference"])
    points = arms.points().set_index(["family", "strength"])
    assert points.loc[("other", 0.5), "perplexity"] == pytest.approx(np.exp(3.4))
    assert points.loc[("baseline", 0.0), "mean"] == pytest.approx(50)


def test_the_first_segment_that_reaches_counts():
    """Up, down and up again; a flat beginning; and a curve that goes down at first."""
    target = np.array(0.1)
    values = np.array([[0.0], [10.0], [20.0], [30.0]])
    for curve, expected in (
        ([0.0, 0.2, 0.05, 0.4], 5.0),
        ([0.0, 0.05, 0.04, 0.16], 25.0),
        ([0.0, 0.0, 0.2, 0.3], 15.0),
        ([0.0, -0.1, 0.1, 0.3], 20.0),
        ([0.0, 0.02, 0.04, 0.06], np.nan),
        ([0.0, np.nan, 0.2, 0.0], 25.0),
    ):
        interpolated = interpolate_at_perplexity(np.array(curve), values, target)
        assert interpolated == pytest.approx([expected], nan_ok=True), curve
    assert interpolate_at_perplexity(np.array([0.1, 0.1]), values[:2], target) == pytest.approx(
        [0.0]
    )


def test_what_does_not_reach_is_not_comparable_and_not_extrapolated():
    short = {0.5: (3.02, 55.0), 1.0: (3.08, 58.0)}
    table = SteeringCurves(made({"lapa2": LINE, "short": short}), ["acc"], 400).compare(
        "lapa2", [1.05, 1.1]
    )
    judged = add_verdicts(table, "lapa2")
    assert row(judged, "short", 1.05)["verdict"] == "more"
    far = row(judged, "short", 1.1)
    assert (far["reached"], far["verdict"]) == (0, "not comparable")
    assert far[["value", "difference", "p", "p_holm"]].isna().all()
    turned = add_verdicts(
        SteeringCurves(made({"lapa2": short, "line": LINE}), ["acc"], 50).compare("lapa2"), "lapa2"
    )
    assert set(turned["verdict"]) == {"", "not comparable"}, "nor is anything where LaPA2 is short"
    assert row(turned, "line", 1.1)["value"] > 55


def test_a_curve_that_reaches_in_some_resamples_is_not_comparable():
    edge = {1.0: (3.0 + np.log(1.1), 60.0)}
    texts = made({"lapa2": LINE, "edge": edge}, noise=1.0, seed=3)
    at_edge = row(SteeringCurves(texts, ["acc"], 400).compare("lapa2", [1.1]), "edge", 1.1)
    assert 0.05 < at_edge["reached"] < 0.95
    assert at_edge[["p", "low", "high"]].isna().all(), "no interval of those that reach it alone"


def test_few_prompts_have_no_interval():
    table = add_verdicts(SteeringCurves(made({"lapa2": LINE, "other": STEEP}, prompts=7), ["acc"], 50).compare("lapa2"),
                   "lapa2")  # fmt: skip
    assert table["low"].isna().all()
    assert row(table, "other", 1.1)["verdict"] == "not comparable"
    assert row(table, "other", 1.1)["value"] > 60


def test_rows_and_names_in_another_order_change_nothing():
    texts = made({"lapa2": LINE, "other": STEEP}, noise=1.0, shared=1.0)
    table = SteeringCurves(texts, ["acc"], 200).compare("lapa2")
    mixed = SteeringCurves(texts.sample(frac=1, random_state=1), ["acc"], 200).compare("lapa2")
    pd.testing.assert_frame_equal(mixed, table)
    named = texts.replace({"family": {"other": "a new name"}})
    renamed = SteeringCurves(named, ["acc"], 200).compare("lapa2")
    pd.testing.assert_frame_equal(renamed.replace({"family": {"a new name": "other"}}), table)


def test_pairing_makes_differences_narrow():
    """The same texts, with and without prompts that the arms share."""
    texts = made({"lapa2": LINE, "other": STEEP}, noise=0.3, shared=1.0)
    loose = texts.assign(prompt=texts["prompt"] + texts["family"])
    width = []
    for judged in (texts, loose):
        compared = row(SteeringCurves(judged, ["acc"], 400).compare("lapa2"), "other", 1.1)
        width.append(compared["difference_high"] - compared["difference_low"])
    assert width[0] < 0.7 * width[1]


def test_the_baselines_perplexity_is_resampled():
    """Where prompts move all arms alike, a fixed target would be reached at other strengths."""
    texts = made({"lapa2": LINE}, shared=2.0, metrics=("acc",)).assign(acc=lambda t: t["nll"] * 0)
    texts["acc"] = texts.groupby(["family", "strength"])["nll"].transform("mean")
    compared = row(SteeringCurves(texts, ["acc"], 300).compare("lapa2"), "lapa2", 1.1)
    assert compared["high"] - compared["low"] < 1e-9


def test_texts_without_a_number_are_left_out():
    texts = made({"lapa2": LINE, "other": STEEP}, noise=0.5)
    texts.loc[texts.index % 7 == 0, "nll"] = np.nan
    texts.loc[texts.index % 5 == 0, "acc"] = np.nan
    arms = SteeringCurves(texts, ["acc"], 20)
    points = arms.points().set_index(["family", "strength"])
    for key, part in texts.groupby(["family", "strength"]):
        assert points.loc[key, "mean"] == pytest.approx(part["acc"].mean())
        assert points.loc[key, "perplexity"] == pytest.approx(np.exp(part["nll"].mean()))


@pytest.mark.long
def test_intervals_cover_and_nulls_are_rejected_at_their_rate():
    """200 data sets whose truth is known; the differences are truly 0 in one family of two."""
    trials, x = 200, np.log(1.1)
    hits, wrong, level = 0, 0, 0
    for seed in range(trials):
        families = {"lapa2": LINE, "null": LINE, "other": STEEP}
        texts = made(families, prompts=40, noise=0.5, shared=0.5, seed=seed)
        table = SteeringCurves(texts, ["acc"], 300, seed=seed).compare("lapa2", [1.1])
        truth = 60 + 14 * (x - 0.05) / 0.35 - 50 - 100 * x
        compared, null = row(table, "other", 1.1), row(table, "null", 1.1)
        hits += compared["difference_low"] <= truth <= compared["difference_high"]
        wrong += null["p"] < 0.05
        level += row(table, "lapa2", 1.1)["low"] <= 50 + 100 * x <= row(table, "lapa2", 1.1)["high"]
    # 0.95 and 0.05 of 200, and three binomial standard errors.
    assert 0.90 <= hits / trials <= 0.995
    assert 0.90 <= level / trials <= 0.995
    assert wrong / trials <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / trials)


def test_p_is_below_the_level_where_the_interval_excludes_zero():
    rng = np.random.default_rng(0)
    for shift in (0.0, 0.25, 0.3, 0.35, 0.5, 5.0):
        values = rng.normal(shift, 1, 40)
        drawn = resampled_means(values, np.arange(40), 4000)
        low, high = np.percentile(drawn, tails(40))
        p = float(resampled_p(drawn, 40))
        assert (p < 0.05) == (low > 0 or high < 0) or abs(p - 0.05) < 0.004
        assert 0 < p <= 1
    assert float(resampled_p(np.zeros(100), 40)) == 1
    assert np.isnan(resampled_p(np.full(100, np.nan), 40))
    assert mean_interval(values, np.arange(40)).low > 0


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.02]) == pytest.approx([0.6, 0.04])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([0.02, np.nan, 0.01]) == pytest.approx([0.04, np.nan, 0.03], nan_ok=True)
    assert len(holm([])) == 0


def test_one_family_of_tests_is_a_metric_over_tasks_ratios_and_arms():
    texts = made({"lapa2": LINE, "a": STEEP, "b": LINE}, noise=1.0, metrics=("acc", "echo %"))
    one = SteeringCurves(texts, ["acc", "echo %"], 400).compare("lapa2")
    both = pd.concat([one.assign(task="x"), one.assign(task="y")], ignore_index=True)
    judged = add_verdicts(both, "lapa2")
    others = judged[judged["family"] != "lapa2"]
    for metric, part in others.groupby("metric"):
        assert len(part) == 2 * 2 * 2, metric
        assert part["p_holm"].to_numpy() == pytest.approx(holm(part["p"].to_numpy()))
    apart = add_verdicts(both, "lapa2", ["task"])
    assert (apart["p_holm"].dropna() <= judged["p_holm"].dropna()).all()
    assert set(others["verdict"]) <= {"more", "less", "not decided"}
    assert (judged[judged["family"] == "lapa2"]["verdict"] == "").all()
