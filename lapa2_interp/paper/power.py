"""What a grid can show: the smallest difference of each claim, at the prompts and texts it plans.

The spread of a claim's difference comes from an earlier run or a pilot (its ITEM.claims.csv). With
the error e of P prompts and s texts of each, of whose square the texts make the share v, a plan of
P' prompts and s' texts has

    e' = e sqrt(P / P' (1 - v + v s / s'))

A difference is found with 80 % power where it is (t + t.8) e', t being the quantile of the test's
level and t.8 that of the power, of Student's t with P' - 1 degrees of freedom; and a true
difference of 0 is shown to be smaller than a margin m in

    2 Phi(m / e' - t1) - 1

of runs (two one-sided tests). With k claims of the paper (or k of ours) in an item, and k1 of them
with a margin, the levels are 0.05 / k and 0.05 / k1: the first step of Holm's correction, so this
is cautious. The permutation test of a sign gives few prompts no p below a level (`stats.least_p`):
5 prompts never find one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lapa2_interp.cell import Cell
from lapa2_interp.errors import DataError, counted
from lapa2_interp.paper.claims import SURE
from lapa2_interp.paper.estimates import PERPLEXITY_TEXTS, texts_read
from lapa2_interp.runs.grid import Grid
from lapa2_interp.stats import error_at, least_p

POWER = 0.8
SPREADS = {"acc": 49.0, "tox": 11.0}
"""Standard deviation of one text's number: of an accuracy of 60 %, and of the toxicity that SmolLM2
has on the task detox."""


class Plan(NamedTuple):
    """Prompts of an arm, and texts of each, over all attributes."""

    prompts: int
    texts: float


def plans(grid: Grid, task: str = "", method: str = "") -> list[Plan]:
    """The plans of a grid's arms, the smallest first.

    Args:
        task, method: Of these alone, where they are named.
    """
    arms: dict[tuple[str, ...], list[Cell]] = {}
    for cell in grid.cells:
        if task in ("", cell.task.name) and method in ("", cell.method):
            key = (cell.model, cell.task.name, cell.method, cell.variant, cell.arm)
            arms.setdefault(key, []).append(cell)
    found = {
        Plan(len(cells[0].prompts), sum(cell.n_texts for cell in cells) / len(cells[0].prompts))
        for cells in arms.values()
    }
    return sorted(found, key=lambda plan: (plan.prompts * plan.texts, plan))


def measured(plan: Plan, metric: str, attributes: int, perplexity: int) -> Plan:
    """The texts of a plan that a metric reads: perplexity reads the first few of each prompt, about
    `perplexity` of an arm."""
    if metric != "ppl":
        return plan
    read = texts_read(plan.prompts * attributes, plan.prompts * plan.texts, perplexity)
    return Plan(plan.prompts, read / plan.prompts)


def power(grid: Grid, claims: pd.DataFrame, perplexity: int = PERPLEXITY_TEXTS) -> pd.DataFrame:
    """What each claim could show with a grid's prompts and texts.

    Args:
        claims: Tables of claims of an earlier run (`claims.read_claims`), of any items.
        perplexity: About how many texts of an arm will have their perplexity measured.

    Returns:
        One row per claim of the grid's items that has a number: item, claim, metric, prompts, texts
        (of each prompt), detectable, corrected (the same at the corrected level), margin, if_zero
        (how often a true 0 is shown to be within the margin; NaN without one), decided (how often
        the claim is decided, if the truth is as likely as the earlier run says). Claims whose
        prompts all differed by the same tell no spread and are left out; attrs["alike"] counts
        them.

    Raises:
        DataError: No claim of these tables belongs to the grid.
    """
    own = grid.name.rpartition("/")[2]
    of_grid = np.array([own in str(names).split() for names in claims["grids"]], dtype=bool)
    rows, alike = [], 0
    for (item, _), part in claims[of_grid].groupby(["item", "whose"], sort=False):
        once = part[~part["compared"].duplicated() | (part["compared"] == "")]
        tests = len(once), int((once["margin"] > 0).sum())
        for row in once[once["error"].notna()].to_dict("records"):
            chosen = plans(grid, row["task"], row["method"])
            if chosen and row["error"] == 0:
                alike += 1
            elif chosen:
                rows.append(_row(row, chosen[0], grid, perplexity, *tests) | {"item": item})
    if not rows:
        raise DataError(
            f"no claim of an item of {grid.name} has a number in these tables"
            + f" ({counted(alike, 'claim')} without spread)" * bool(alike)
            + "; give the folder of an earlier run of it: its tables/ has ITEM.claims.csv"
        )
    names = ["item", "claim", "metric", "prompts", "texts", "detectable", "corrected", "margin"]
    found = pd.DataFrame(rows)[[*names, "if_zero", "decided"]]
    found.attrs["alike"] = alike
    return found


def _row(
    row: Mapping[Hashable, Any],
    plan: Plan,
    grid: Grid,
    perplexity: int,
    tests: int,
    with_margin: int,
) -> dict[str, Any]:
    from scipy.stats import norm, t

    attributes = len({cell.attribute for cell in grid.cells if row["task"] in ("", cell.task.name)})
    plan = measured(plan, str(row["metric"]), attributes, perplexity)
    error, here, noise, texts, margin = (
        float(row[name]) for name in ("error", "here", "noise", "texts", "margin")
    )
    new = error_at(error, int(row["prompts"]), texts, noise, *plan)

    def quantile(level: float) -> float:
        return float(t.isf(level, plan.prompts - 1)) if plan.prompts > 1 else np.inf

    def shown(level: float) -> float:
        """How large an estimate is that a test of this level tells from 0."""
        least = 0.0 if row["expected"] == "same" else least_p(plan.prompts)
        return quantile(level / 2) * new if least < level else np.inf

    two = shown(SURE / tests)
    one = quantile(SURE / max(1, with_margin)) * new
    # The next estimate: the truth is uncertain by the earlier error, and ours errs, too.
    spread = np.hypot(error, new)

    def between(low: float, high: float) -> float:
        return float(norm.cdf(high, here, spread) - norm.cdf(low, here, spread))

    room = max(0.0, margin - one)
    outer = margin + two if row["expected"] == "same" else two
    decided = 1 - between(-outer, outer) + (between(-room, room) if room else 0.0)
    if_zero = max(0.0, 2 * norm.cdf((margin - one) / new) - 1)
    ready = quantile(1 - POWER) * new
    return {
        "claim": row["claim"],
        "metric": row["metric"],
        "prompts": plan.prompts,
        "texts": plan.texts,
        "detectable": shown(SURE) + ready,
        "corrected": two + ready,
        "margin": margin,
        "if_zero": if_zero if margin else float("nan"),
        "decided": min(1.0, decided),
    }


def detects(grid: Grid) -> str:
    """The smallest differences that a grid's arms can show, in words; "" for tasks of one's own.

    Two arms of n texts: 2.80 s sqrt(2 / n), with the spread s of one text (`SPREADS`) and texts
    that are independent; no earlier run is needed.
    """
    told = []
    for tasks, metric in ((("sentiment", "topic"), "acc"), (("detox",), "tox")):
        found = [plan for task in tasks for plan in plans(grid, task)]
        if found:
            worst = min(plan.prompts * plan.texts for plan in found)
            told.append(f"{metric} {2.80 * SPREADS[metric] * np.sqrt(2 / worst):.1f}")
    return ", ".join(told)


def summary(table: pd.DataFrame) -> str:
    """How many claims a plan is expected to decide, in words; and how many tell no spread."""
    share = table["decided"].sum() / len(table)
    few = table["corrected"].groupby(table["metric"]).median()
    worst = ", ".join(f"{value:.1f} ({metric})" for metric, value in few.items())
    return (
        f"of {len(table)} claims about {table['decided'].sum():.0f} will be decided ({share:.0%});"
        f" the median smallest difference, corrected, is {worst}"
    ) + (
        f"; left out: {counted(alike, 'claim')} whose prompts all differed by the same, which tells"
        " no spread"
        if (alike := table.attrs.get("alike", 0))
        else ""
    )
