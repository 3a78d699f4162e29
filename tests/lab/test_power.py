"""What a grid can show, foretold from an earlier run."""

import numpy as np
import pandas as pd
import pytest
from conftest import script
from scipy.stats import t as student

from analyses.lab.claims import ItemClaims
from analyses.lab.power import (
    detectable_differences,
    power_table,
    required_prompts,
    sample_plans,
    summarize_power,
)
from lapa2_interp.errors import DataError, RunError
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.stats import Difference

GRID = """
model = "tiny-gpt2"
trace = "pooled"
augmentation = "none"
dtype = "float32"
length = 32
[[block]]
task = "sentiment"
prompts = 10
samples = 3
method = ["none", "prefix"]
[[block]]
task = "topic"
prompts = 12
samples = 1
method = "prefix"
[[block]]
task = "detox"
attribute = "nontoxic"
prompts = 5
samples = 4
method = "preadd"
"""


@pytest.fixture
def grid(tmp_path):
    (tmp_path / "mine.toml").write_text(GRID)
    return load_grid(str(tmp_path / "mine.toml"), check=False)


def claims(*results, margin=5.0, expected="more", metric="acc", task="sentiment"):
    """An item's claims, as an earlier run of 20 prompts with 4 texts gave them."""
    made = ItemClaims("item", ("mine", "other"))
    for number, (mean, error, noise) in enumerate(results):
        of = Difference(mean, mean - 2 * error, mean + 2 * error, 0.5, error, 20, 4.0, noise)
        made.add_difference(
            f"claim {number}", metric, expected, of, margin=margin, task=task, method="prefix"
        )
    return made.frame()


def detected(level, prompts=10):
    """In standard errors: a difference that a test of this level finds with 80 % power."""
    return student.isf(level / 2, prompts - 1) + student.isf(0.2, prompts - 1)


def test_plans_are_prompts_and_texts_of_an_arm(grid):
    assert sample_plans(grid, "sentiment") == [(10, 6)]
    assert sample_plans(grid, "topic") == [(12, 4)]
    assert sample_plans(grid) == [(5, 4), (12, 4), (10, 6)]
    assert sample_plans(grid, "topic", "none") == []


@pytest.mark.parametrize("expected", ["more", "same"])
def test_shares_are_those_of_simulated_runs(grid, expected):
    """Two claims, at 0.05 / 2 each: draws of the truth, and of the estimate around it."""
    table = power_table(grid, claims((3.0, 1.5, 0.6), (-0.5, 1.0, 0.2), expected=expected))
    rng = np.random.default_rng(0)
    n = 200_000
    for row, (here, error, noise) in zip(
        table.to_dict("records"), [(3.0, 1.5, 0.6), (-0.5, 1.0, 0.2)], strict=True
    ):
        new = error * np.sqrt(20 / 10 * (1 - noise + noise * 4 / 6))
        assert row["detectable"] == pytest.approx(detected(0.05) * new, rel=1e-4)
        its_own = new * np.sqrt(rng.chisquare(9, n) / 9)
        shown = np.abs(rng.normal(row["corrected"], new, n)) > student.isf(0.0125, 9) * its_own
        assert shown.mean() == pytest.approx(0.8, abs=0.03)
        zero = rng.normal(0, new, n)
        within = np.abs(zero) < 5 - student.isf(0.025, 9) * new
        assert row["if_zero"] == pytest.approx(within.mean(), abs=0.005)
        means = rng.normal(rng.normal(here, error, n), new)
        beyond = student.isf(0.0125, 9) * new + (5 if expected == "same" else 0)
        decided = (np.abs(means) > beyond) | (np.abs(means) < 5 - student.isf(0.025, 9) * new)
        assert row["decided"] == pytest.approx(decided.mean(), abs=0.005)
        assert (row["prompts"], row["texts"], row["margin"]) == (10, 6, 5)


@pytest.mark.parametrize("expected", ["more", "same"])
def test_required_prompts_decide_any_truth_in_simulated_runs(expected):
    """Two claims, at 0.05 / 2 each; the worst true difference of a claim of "same" is its margin,
    which no number of prompts decides, so there 0 counts."""
    asked = claims((3.0, 9.0, 0.6), (-0.5, 6.0, 0.2), expected=expected)
    rng = np.random.default_rng(0)
    n = 50_000
    truths = np.linspace(0, 6, 25) if expected == "more" else [0.0]
    for prompts, earlier in zip(required_prompts(asked), (9.0, 6.0), strict=True):
        shares = {}
        for many in (prompts, round(0.8 * prompts)):
            error = earlier * np.sqrt(20 / many)
            least = []
            for truth in truths:
                sizes = np.abs(rng.normal(truth, error, n))
                beyond = student.isf(0.0125, many - 1) * error + (5 if expected == "same" else 0)
                within = sizes < 5 - student.isf(0.025, many - 1) * error
                least.append(((sizes > beyond) | within).mean())
            shares[many] = min(least)
        assert shares[prompts] == pytest.approx(0.8, abs=0.02)
        assert shares[round(0.8 * prompts)] < 0.7


def test_no_number_of_prompts_decides_without_margin_or_spread(grid):
    assert required_prompts(claims((3.0, 1.5, 0.6), margin=0.0)).isna().all()
    assert required_prompts(claims((0.0, 0.0, np.nan))).isna().all()
    assert power_table(grid, claims((3.0, 1.5, 0.6), margin=0.0))["required_prompts"].isna().all()


def test_required_prompts_are_the_same_whatever_the_plan_has(grid):
    """With as many texts of each prompt as the earlier run, that run and the plan tell one
    number."""
    asked = claims((3.0, 1.5, 0.0), (-0.5, 1.0, 0.0))  # without noise of texts
    assert power_table(grid, asked)["required_prompts"].tolist() == required_prompts(asked).tolist()


def test_five_prompts_decide_no_sign(tmp_path):
    """2 of the 32 assignments of signs are as extreme as all alike: p is never below .0625."""
    for prompts, expected, possible in ((5, "more", False), (6, "more", True), (5, "same", True)):
        (tmp_path / "few.toml").write_text(GRID.replace("prompts = 10", f"prompts = {prompts}"))
        few = load_grid(str(tmp_path / "few.toml"), check=False)
        asked = claims((50.0, 1.5, 0.6), expected=expected)
        (row,) = power_table(few, asked.assign(grids="few")).to_dict("records")
        assert row["prompts"] == prompts
        assert (row["decided"] > 0.99, np.isfinite(row["corrected"])) == (possible, possible)


def test_perplexity_reads_the_first_texts_of_each_prompt(tmp_path):
    (tmp_path / "mine.toml").write_text(GRID)
    many = load_grid(str(tmp_path / "mine.toml"), {"samples": 30}, check=False)
    asked = claims((3.0, 1.5, 0.6), metric="ppl")
    (row,) = power_table(many, asked).to_dict("records")
    # 120 texts of an arm: of 10 prompts with 2 attributes, 6 of 30 samples
    assert (row["prompts"], row["texts"]) == (10, 12)
    (row,) = power_table(many, asked, perplexity=200).to_dict("records")
    assert (row["prompts"], row["texts"]) == (10, 20)


def test_claims_of_other_grids_are_left_out(grid):
    asked = claims((3.0, 1.5, 0.6))
    assert len(power_table(grid, pd.concat([asked, asked.assign(grids="another")]))) == 1


def test_claims_without_spread_are_left_out_and_counted(grid):
    table = power_table(grid, claims((3.0, 1.5, 0.6), (0.0, 0.0, np.nan)))
    assert table["claim"].tolist() == ["claim 0"]
    assert "left out: 1 claim whose prompts all differed by the same" in summarize_power(table)


def test_what_two_items_compare_is_in_both_and_missing_claims_count(grid):
    """The correction of an item is for its distinct comparisons, those without numbers included."""
    of = Difference(3.0, 0.0, 6.0, 0.04, 1.5, 20, 4.0, 0.6)
    frames = []
    for item in ("first", "second"):
        made = ItemClaims(item, ("mine",))
        facts = {"margin": 5.0, "task": "sentiment", "method": "prefix"}
        made.add_difference("shared", "acc", "more", of, compared="a", **facts)
        if item == "second":
            made.add_difference("its own", "acc", "more", of, compared="b", **facts)
            made.add_difference("again", "acc", "more", of, compared="a", **facts)
            made.add_difference("missing", "acc", "more", None, **facts)
        frames.append(made.frame())
    table = power_table(grid, pd.concat(frames))
    assert table["item"].tolist() == ["first", "second", "second"]
    new = table["detectable"].iloc[0] / detected(0.05)
    for row, tests in zip(table.to_dict("records"), (1, 3, 3), strict=True):
        assert row["corrected"] == pytest.approx(detected(0.05 / tests) * new, rel=1e-4)


def test_claims_of_ours_do_not_correct_those_of_the_paper(grid):
    of = Difference(3.0, 0.0, 6.0, 0.04, 1.5, 20, 4.0, 0.6)
    made = ItemClaims("item", ("mine",))
    for name, whose in (("a", "paper"), ("b", "ours"), ("c", "ours")):
        facts = {"margin": 5.0, "task": "sentiment", "method": "prefix", "whose": whose}
        made.add_difference(name, "acc", "more", of, compared=name, **facts)
    table = power_table(grid, made.frame()).set_index("claim")
    new = table["detectable"].iloc[0] / detected(0.05)
    for name, tests in (("a", 1), ("b", 2), ("c", 2)):
        assert table.loc[name, "corrected"] == pytest.approx(detected(0.05 / tests) * new, rel=1e-4)


def test_grids_say_what_they_tell(grid):
    of_acc = 2.8 * 49 * np.sqrt(2 / 48)
    of_tox = 2.8 * 11 * np.sqrt(2 / 20)
    assert detectable_differences(grid) == f"acc {of_acc:.1f}, tox {of_tox:.1f}"


def test_the_script_says_what_will_be_decided(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text(GRID)
    (tmp_path / "tables").mkdir()
    arguments = [tmp_path / "mine.toml", "--claims", tmp_path]
    with pytest.raises(DataError, match="has no ITEM.claims.csv; `python analyses/paper/ITEM.py"):
        script("tools/power", *arguments)
    claims((30.0, 1.5, 0.6), (0.0, 9.0, 0.6)).to_csv(
        tmp_path / "tables" / "item.claims.csv", index=False
    )
    script("tools/power", *arguments, "--out", tmp_path / "power.csv")
    printed = capsys.readouterr().out
    assert "of 2 claims about 1 will be decided" in printed
    older = pd.read_csv(tmp_path / "tables" / "item.claims.csv").drop(columns="raw")
    (tmp_path / "older").mkdir()
    older.to_csv(tmp_path / "older" / "item.claims.csv", index=False)
    with pytest.raises(RunError, match="not a table of claims of this version .no column raw"):
        script("tools/power", *arguments[:-1], tmp_path / "older")
    table = pd.read_csv(tmp_path / "power.csv")
    assert table["decided"].tolist()[0] == pytest.approx(1, abs=1e-6)
    assert set(table["grid"]) == {"mine"}
    capsys.readouterr()
    script("tools/power", *arguments, "--set", "prompts=2")
    assert " 2 " in capsys.readouterr().out.splitlines()[2]
