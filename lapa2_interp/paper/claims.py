"""Claims of the paper and their verdicts.

A claim puts a number in a range. The measured number has a 95 % interval. The verdict says whether
the whole interval lies inside the range, outside it, or neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from lapa2_interp.errors import counted
from lapa2_interp.scoring.tables import other_scorer, plain
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
        second, second_here, second_low, second_high, second_verdict: Another scorer of the metric,
            and what its numbers say; empty where there is none.
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
    second: str = ""
    second_here: float = NONE
    second_low: float = NONE
    second_high: float = NONE
    second_verdict: Verdict | Literal[""] = ""

    @classmethod
    def of(
        cls,
        item: str,
        claim: Claim,
        found: Difference | None,
        paper: float = NONE,
        second: tuple[str, Difference] | None = None,
    ) -> Finding:
        """Judge a claim.

        Args:
            found: Ours; None where there was nothing to compare.
            second: Another scorer, and ours by its numbers.
        """
        told = (item, claim.text, claim.quantity, claim.relation, paper)
        if found is None:
            return cls(*told, NONE, NONE, NONE, NONE, NONE, "missing", 0)
        verdict = claim.verdict(found.low, found.high)
        of_second: tuple[Any, ...] = ()
        if second is not None:
            name, other = second
            of_second = (name, other.mean, other.low, other.high)
            of_second += (claim.verdict(other.low, other.high),)
        return cls(
            *told,
            found.mean,
            found.low,
            found.high,
            found.p,
            found.detectable,
            verdict,
            found.clusters,
            *of_second,
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
        found = compare(scores, before, after, metric)
        second = next(by_others(scores, before, after, metric), None)
        self.note(text, metric, expected, found, paper, margin, second)

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
        second: tuple[str, Difference] | None = None,
    ) -> None:
        """Judge a claim whose difference was computed elsewhere; None: there was nothing to
        compare. `second`: another scorer of the metric, and the difference in its numbers."""
        claim = Claim(text, metric, expected, margin)
        self.rows.append(Finding.of(self.item, claim, found, paper, second))

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


def by_others(
    scores: pd.DataFrame, before: Mapping[str, Any], after: Mapping[str, Any], metric: str
) -> Iterator[tuple[str, Difference]]:
    """As `compare`, by the metric's other scorers: the scorer's name, and the difference."""
    for name in dict.fromkeys(map(str, scores["metric"])):
        if name != metric and plain(name) == metric:
            found = compare(scores, before, after, name)
            if found is not None:
                yield other_scorer(name), found


def rows_with(table: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """The rows whose columns have these values (a list: one of them)."""
    chosen = pd.Series(True, index=table.index)
    for column, value in wanted.items():
        chosen &= table[column].isin(value if isinstance(value, list | tuple) else [value])
    return table[chosen]


def read_claims(file: Path) -> pd.DataFrame:
    """A table of claims as `Findings.frame` gave it.

    Raises:
        KeyError, ValueError: The file is no such table.
    """
    found = pd.read_csv(file, keep_default_na=False, na_values=["", "nan"])
    words = ["item", "claim", "metric", "expected", "verdict", "second", "second_verdict"]
    return found.assign(**{name: found[name].astype(object).fillna("") for name in words})


def disputed(claims: pd.DataFrame) -> str:
    """How many claims have another verdict by their second scorer, in words; "" where no claim has
    one."""
    both = claims[(claims["second"] != "") & (claims["verdict"] != "missing")]
    if not len(both):
        return ""
    others = both[both["verdict"] != both["second_verdict"]]
    sure = [str(verdict) != "inconclusive" for verdict in others["verdict"]]
    sure_too = [str(verdict) != "inconclusive" for verdict in others["second_verdict"]]
    opposite = sum(a and b for a, b in zip(sure, sure_too, strict=True))
    return (
        f"Of {counted(len(both), 'claim')} with two scorers, {len(others)} have another verdict by"
        f" the second (≠), {opposite} of them the opposite one."
    )


def shown_claims(claims: pd.DataFrame) -> pd.DataFrame:
    """Claims for reading."""
    rows = [dict(zip(claims.columns, row, strict=True)) for row in claims.to_numpy(dtype=object)]
    here = ["" if pd.isna(row["here"]) else _range(row) for row in rows]
    paper = ["" if pd.isna(value) else f"{value:+.2f}" for value in claims["paper"]]
    columns = ["verdict", "claim", "metric", "expected"]
    shown = claims[columns].assign(paper=paper, here=here, prompts=claims["prompts"])
    if (claims["second"] != "").any():
        shown["second scorer"] = [disagreement(row) for row in rows]
    return shown


def disagreement(row: Mapping[str, Any]) -> str:
    """What a claim's second scorer says: "" where there is none, "agrees", or its own verdict."""
    if row["second"] == "":
        return ""
    if row["second_verdict"] == row["verdict"]:
        return "agrees"
    return f"≠ {row['second']}: {row['second_verdict']} ({_range(row, 'second_')})"


def _range(row: Mapping[str, Any], of: str = "") -> str:
    return f"{row[f'{of}here']:+.2f} [{row[f'{of}low']:+.2f}, {row[f'{of}high']:+.2f}]"
