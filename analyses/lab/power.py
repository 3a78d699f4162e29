"""The power of a grid: the smallest difference that each claim can show with its prompts and texts.

The spread of a claim's difference comes from an earlier run or a pilot (its ITEM.claims.csv). With
the error e of P prompts and s texts of each, of whose square the texts make the share v, a plan of
P' prompts and s' texts has

    e' = e sqrt(P / P' (1 - v + v s / s'))

A difference of (t + t.8) e' is found with 80 % power, t being the quantile of the test's
level and t.8 that of the power, of Student's t with P' - 1 degrees of freedom. A true difference
of 0 is shown to be smaller than a margin m in

    2 Phi(m / e' - t1) - 1

of runs (two one-sided tests). With k claims of the paper (or k of ours) in an item, and k1 of them
with a margin, the levels are 0.05 / k and 0.05 / k1: the first step of Holm's correction, so this
is cautious. The permutation test of a sign gives few prompts no p below a level (`stats.least_p`):
5 prompts never find one.

With more prompts, a difference of any size is either found or shown to be small. The true
difference that needs most prompts lies between 0 and the margin; `required_prompts` gives the
number of prompts that decides it in 80 % of runs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analyses.lab.estimates import PERPLEXITY_TEXTS, cells_by_arm, perplexity_texts
from lapa2_interp.errors import DataError, pluralize
from lapa2_interp.runs.grid import Grid
from lapa2_interp.stats import LEVEL, error_at, least_p

POWER = 0.8
SPREADS = {"acc": 49.0, "tox": 11.0}
"""Standard deviation of one text's number: of an accuracy of 60 %, and of the toxicity that SmolLM2
has on the task detox."""


class SamplePlan(NamedTuple):
    """Number of prompts of an arm, and of texts of each prompt, over all attributes."""

    prompts: int
    texts: float


def sample_plans(grid: Grid, task: str = "", method: str = "") -> list[SamplePlan]:
    """The plans of a grid's arms, the smallest first.

    Args:
        task, method: Only arms of these; "" allows any.
    """
    plans = {
        SamplePlan(
            len(first.prompts), sum(cell.n_texts for cell in (first, *rest)) / len(first.prompts)
        )
        for first, *rest in cells_by_arm(grid.cells)
        if task in ("", first.task.name) and method in ("", first.method)
    }
    return sorted(plans, key=lambda plan: (plan.prompts * plan.texts, plan))


def measured_plan(plan: SamplePlan, metric: str, attributes: int, perplexity: int) -> SamplePlan:
    """The texts of a plan on which a metric is measured: perplexity on the first few of each
    prompt, about `perplexity` texts of an arm."""
    if metric != "ppl":
        return plan
    texts = perplexity_texts(plan.prompts * attributes, plan.prompts * plan.texts, perplexity)
    return SamplePlan(plan.prompts, texts / plan.prompts)


def power_table(
    grid: Grid, claims: pd.DataFrame, perplexity: int = PERPLEXITY_TEXTS
) -> pd.DataFrame:
    """The power of each claim with a grid's prompts and texts.

    Args:
        claims: Tables of claims of an earlier run (`claims.read_claims`), of any items.
        perplexity: Texts of an arm whose perplexity will be measured, approximately.

    Returns:
        One row per claim of the grid's items that has a number: item, claim, metric, prompts, texts
        (of each prompt), detectable, corrected (detectable at the corrected level), margin, if_zero
        (share of runs in which a true 0 is shown to be within the margin; NaN without a margin),
        decided (share of runs that decide the claim, with the true difference distributed as the
        earlier run estimates it), required_prompts (see the function, with the plan's texts of each
        prompt). Claims whose prompts all differed by the same amount have no spread and are left
        out; attrs["alike"] counts them.

    Raises:
        DataError: No claim of these tables belongs to the grid.
    """
    own = grid.name.rpartition("/")[2]
    of_grid = np.array([own in str(names).split() for names in claims["grids"]], dtype=bool)
    rows, alike = [], 0
    for (item, _), part in claims[of_grid].groupby(["item", "whose"], sort=False):
        once, tests = _comparisons(part)
        for row in once[once["error"].notna()].to_dict("records"):
            chosen = sample_plans(grid, row["task"], row["method"])
            if chosen and row["error"] == 0:
                alike += 1
            elif chosen:
                rows.append(_power_row(row, chosen[0], grid, perplexity, tests) | {"item": item})
    if not rows:
        raise DataError(
            f"no claim of an item of {grid.name} has a number in these tables"
            + f" ({pluralize(alike, 'claim')} without spread)" * bool(alike)
            + "; give the folder of an earlier run of it: its tables/ has ITEM.claims.csv"
        )
    names = ["item", "claim", "metric", "prompts", "texts", "detectable", "corrected", "margin"]
    forecast = pd.DataFrame(rows)[[*names, "if_zero", "decided", "required_prompts"]].astype(
        {"required_prompts": "Int64"}
    )
    forecast.attrs["alike"] = alike
    return forecast


def required_prompts(claims: pd.DataFrame) -> pd.Series:
    """The number of prompts, with as many texts of each, that decides a claim in 80 % of runs.

    That number does so for any true difference; for claims of "same", for a true difference of 0.
    NaN if no number does: without a margin, without a spread, or above 1,000 times the prompts.

    Args:
        claims: Whole tables of claims (`claims.read_claims`), of any items, since an item's other
            claims determine the correction.

    Returns:
        One number per row of `claims`.
    """
    required = pd.Series(np.nan, index=claims.index)
    for _, part in claims.groupby(["item", "whose"], sort=False):
        _, tests = _comparisons(part)
        for index, row in zip(part.index, part.to_dict("records"), strict=True):
            if row["error"] > 0:
                required[index] = _ClaimTests.from_row(row, *tests).required_prompts(
                    row["error"], row["prompts"]
                )
    return required


def _comparisons(part: pd.DataFrame) -> tuple[pd.DataFrame, tuple[int, int]]:
    """The comparisons of an item's claims of one `whose`, each once; their number, and the number
    with a margin."""
    once = part[~part["compared"].duplicated() | (part["compared"] == "")]
    return once, (len(once), int((once["margin"] > 0).sum()))


def _t_quantile(level: float, prompts: int) -> float:
    from scipy.stats import t

    return float(t.isf(level, prompts - 1)) if prompts > 1 else np.inf


class _ClaimTests(NamedTuple):
    """The two tests of a claim: that there is a difference, and that it is small.

    Attributes:
        same: True if the claim is of no difference: the first test then asks for a difference
            beyond the margin.
        margin: Differences that do not matter.
        there, small: Levels of the two tests.
    """

    same: bool
    margin: float
    there: float
    small: float

    @classmethod
    def from_row(cls, row: Mapping[Hashable, Any], claims: int, with_margin: int) -> _ClaimTests:
        """The tests of a row of claims, corrected for the numbers of claims of its item."""
        levels = LEVEL / claims, LEVEL / max(1, with_margin)
        return cls(row["expected"] == "same", float(row["margin"]), *levels)

    def least_found(self, error: float, prompts: int, level: float | None = None) -> float:
        """The least estimate that the first test finds different from 0 (same: from the margin)."""
        level = self.there if level is None else level
        least = 0.0 if self.same else least_p(prompts)
        return _t_quantile(level / 2, prompts) * error if least < level else np.inf

    def greatest_small(self, error: float, prompts: int) -> float:
        """The greatest estimate that the second test shows to be small; below 0: none."""
        return self.margin - _t_quantile(self.small, prompts) * error

    def decided(self, truth: float, spread: float, error: float, prompts: int) -> float:
        """The probability that one of the tests decides, for estimates with the standard deviation
        `spread` around `truth`."""
        from scipy.stats import norm

        def between(low: float, high: float) -> float:
            return float(norm.cdf(high, truth, spread) - norm.cdf(low, truth, spread))

        outer = self.least_found(error, prompts) + self.margin * self.same
        room = min(outer, max(0.0, self.greatest_small(error, prompts)))
        return 1 - between(-outer, outer) + between(-room, room)

    def required_prompts(self, error: float, prompts: int) -> float:
        """The number of prompts that decides the claim, if `prompts` gave the error `error`; NaN if
        no number does (`required_prompts`)."""
        truths = [0.0] if self.same else np.linspace(0, self.margin, 41)

        def decides(many: int) -> bool:
            new = error * np.sqrt(prompts / many)
            return all(self.decided(truth, new, new, many) >= POWER for truth in truths)

        low, high = 1, 1000 * prompts
        if not self.margin or not decides(high):
            return float("nan")
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if decides(middle) else (middle, high)
        return float(high)


def _power_row(
    row: Mapping[Hashable, Any],
    plan: SamplePlan,
    grid: Grid,
    perplexity: int,
    families: tuple[int, int],
) -> dict[str, Any]:
    from scipy.stats import norm

    attributes = len({cell.attribute for cell in grid.cells if row["task"] in ("", cell.task.name)})
    plan = measured_plan(plan, str(row["metric"]), attributes, perplexity)
    error, here, noise, texts = (float(row[name]) for name in ("error", "here", "noise", "texts"))
    new = error_at(error, int(row["prompts"]), texts, noise, *plan)

    tests = _ClaimTests.from_row(row, *families)
    # The next estimate has the uncertainty of the earlier one and its own.
    decided = tests.decided(here, float(np.hypot(error, new)), new, plan.prompts)
    small = tests.greatest_small(new, plan.prompts)
    ready = _t_quantile(1 - POWER, plan.prompts) * new
    return {
        "claim": row["claim"],
        "metric": row["metric"],
        "prompts": plan.prompts,
        "texts": plan.texts,
        "detectable": tests.least_found(new, plan.prompts, LEVEL) + ready,
        "corrected": tests.least_found(new, plan.prompts) + ready,
        "margin": tests.margin,
        "if_zero": max(0.0, 2 * norm.cdf(small / new) - 1) if tests.margin else float("nan"),
        "decided": decided,
        "required_prompts": tests.required_prompts(new, plan.prompts),
    }


def detectable_differences(grid: Grid) -> str:
    """The smallest differences that a grid's arms can show, as text; "" for custom tasks.

    Two arms of n texts: 2.80 s sqrt(2 / n), with the spread s of one text (`SPREADS`) and texts
    that are independent; no earlier run is needed.
    """
    parts = []
    for tasks, metric in ((("sentiment", "topic"), "acc"), (("detox",), "tox")):
        plans = [plan for task in tasks for plan in sample_plans(grid, task)]
        if plans:
            fewest = min(plan.prompts * plan.texts for plan in plans)
            parts.append(f"{metric} {2.80 * SPREADS[metric] * np.sqrt(2 / fewest):.1f}")
    return ", ".join(parts)


def summarize_power(table: pd.DataFrame) -> str:
    """A sentence on the number of claims that a plan is expected to decide, and of claims without
    spread."""
    share = table["decided"].sum() / len(table)
    medians = table["corrected"].groupby(table["metric"]).median()
    differences = ", ".join(f"{value:.1f} ({metric})" for metric, value in medians.items())
    return (
        f"of {len(table)} claims about {table['decided'].sum():.0f} will be decided ({share:.0%});"
        f" the median smallest difference, corrected, is {differences}"
    ) + (
        f"; left out: {pluralize(alike, 'claim')} whose prompts all differed by the same, which"
        " tells no spread"
        if (alike := table.attrs.get("alike", 0))
        else ""
    )
