"""Claims of the paper and their verdicts.

A claim puts a number in a range. The measured number has a 95 % interval. The verdict says whether
the whole interval lies inside the range, outside it, or neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

from lapa2_interp.stats import Difference, paired_difference

Verdict = Literal["as in the paper", "against the paper", "inconclusive", "missing"]
VERDICTS: tuple[Verdict, ...] = ("as in the paper", "against the paper", "inconclusive", "missing")
Relation = Literal["more", "less", "same"]
NONE = float("nan")


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, and the range it puts a number in.

    Attributes:
        text: In words; {blanks} are filled where it is used.
        quantity: What is measured.
        relation: "more" or "less" than the expected number, or the "same".
        margin: Differences from it that do not matter.
        source: Where the paper says it.
    """

    text: str
    quantity: str
    relation: Relation
    margin: float = 0.0
    source: str = ""

    def verdict(self, low: float, high: float, expected: float | int = 0.0) -> Verdict:
        """The verdict on an interval; inconclusive where there is none (NaN).

        Args:
            expected: The number that the relation refers to.
        """
        least = -np.inf if self.relation == "less" else expected - self.margin
        most = np.inf if self.relation == "more" else expected + self.margin
        if least < low and high < most:
            return "as in the paper"
        return "against the paper" if high < least or low > most else "inconclusive"


@dataclass(frozen=True)
class Finding:
    """A claim of an item, and what this run says about it: a row of ITEM.claims.csv.

    Attributes:
        item, claim: The item that makes the claim, and the claim in words.
        metric, expected: What is compared, and the relation the paper reports.
        paper: The paper's difference, in the metric's unit; NaN where it gives none.
        here, low, high: Ours with its 95 % interval.
        p: p-value of a sign-flip permutation.
        detectable: The smallest difference these texts could have shown.
        prompts: Independent clusters.
    """

    item: str
    claim: str
    metric: str
    expected: Relation
    paper: float
    here: float
    low: float
    high: float
    p: float
    detectable: float
    verdict: Verdict
    prompts: int

    @classmethod
    def of(cls, item: str, claim: Claim, found: Difference | None, paper: float = NONE) -> Finding:
        """Judge a claim.

        Args:
            found: Ours; None where there was nothing to compare.
        """
        told = (item, claim.text, claim.quantity, claim.relation, paper)
        if found is None:
            return cls(*told, NONE, NONE, NONE, NONE, NONE, "missing", 0)
        verdict = claim.verdict(found.low, found.high)
        return cls(
            *told,
            found.mean,
            found.low,
            found.high,
            found.p,
            found.detectable,
            verdict,
            found.clusters,
        )


@dataclass
class Findings:
    """The findings of an item, in the order its claims were judged."""

    item: str
    rows: list[Finding] = field(default_factory=list)

    def claim(
        self,
        text: str,
        scores: pd.DataFrame,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        metric: str,
        expected: Relation,
        paper: float = NONE,
        margin: float = 0.0,
    ) -> None:
        """Judge what the paper says of two arms.

        Args:
            scores: One row per text (`paper.data.ItemData.scores`).
            before, after: Columns of the two arms and their values.
            metric: What is compared: after - before.
            expected, margin: As in `Claim`.
            paper: The paper's difference.
        """
        self.note(text, metric, expected, compare(scores, before, after, metric), paper, margin)

    def as_reported(
        self,
        text: str,
        scores: pd.DataFrame,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        metric: str,
        known: Sequence[float],
    ) -> None:
        """Judge a comparison in the direction of the paper's two numbers; without them nothing is
        judged.

        Args:
            text: With {more} or {raises} for the direction.
            known: The paper's numbers before and after.
        """
        gap = known[1] - known[0]
        if not np.isnan(gap):
            text = text.format(
                more="more" if gap > 0 else "less", raises="raises" if gap > 0 else "lowers"
            )
            self.claim(text, scores, before, after, metric, "more" if gap > 0 else "less", gap)

    def note(
        self,
        text: str,
        metric: str,
        expected: Relation,
        found: Difference | None,
        paper: float = NONE,
        margin: float = 0.0,
    ) -> None:
        """Judge a claim whose difference was computed elsewhere; None: there was nothing to
        compare."""
        self.rows.append(Finding.of(self.item, Claim(text, metric, expected, margin), found, paper))

    def frame(self) -> pd.DataFrame:
        """One row per finding."""
        return pd.DataFrame(
            [vars(each) for each in self.rows], columns=list(Finding.__dataclass_fields__)
        )


def compare(
    scores: pd.DataFrame, before: Mapping[str, Any], after: Mapping[str, Any], metric: str
) -> Difference | None:
    """after - before, paired on prompts; None where one of them has no text."""
    chosen = [rows_with(scores, {**side, "metric": metric}) for side in (before, after)]
    one, two = (part[part["value"].notna()] for part in chosen)
    if not len(one) or not len(two) or not set(one["prompt"]) & set(two["prompt"]):
        return None
    return paired_difference(
        one["value"].to_numpy(),
        one["prompt"].to_numpy(),
        two["value"].to_numpy(),
        two["prompt"].to_numpy(),
    )


def rows_with(table: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """The rows whose columns have these values (a list: one of them)."""
    chosen = pd.Series(True, index=table.index)
    for column, value in wanted.items():
        chosen &= table[column].isin(value if isinstance(value, list | tuple) else [value])
    return table[chosen]


def shown_claims(claims: pd.DataFrame) -> pd.DataFrame:
    """Claims for reading."""
    here = [
        ""
        if pd.isna(row["here"])
        else f"{row['here']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]"
        for row in claims.to_dict("records")
    ]
    paper = ["" if pd.isna(value) else f"{value:+.2f}" for value in claims["paper"]]
    columns = ["verdict", "claim", "metric", "expected"]
    return claims[columns].assign(paper=paper, here=here, prompts=claims["prompts"])
