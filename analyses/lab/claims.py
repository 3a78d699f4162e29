"""Claims of the paper and claims of ours, with a verdict on each.

A claim puts a number in a range. The measured number has a 95 % interval. The verdict says whether
the whole interval lies inside the range, outside it, or neither.

The claims of an item are tested together, those of the paper and ours separately, in two families
of tests: that there is a difference, and that it is too small to matter (`MARGINS`, two one-sided
tests). The p-values of each family have Holm's correction for the number of claims.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from lapa2_interp.errors import RunError, pluralize
from lapa2_interp.propositions.claims import Claim, Relation, Verdict
from lapa2_interp.scoring.tables import metric_name, paired_change, scorer_of_metric
from lapa2_interp.stats import LEVEL, Difference, holm
from lapa2_interp.table_formats import format_interval, format_number

VERDICTS = (
    "as in the paper",
    "against the paper",
    "as expected",
    "against what was expected",
    "no difference",
    "inconclusive",
    "missing",
)
"""Verdicts in the order of `count_verdicts`; two are worded differently on our claims
(`OUR_VERDICTS`)."""
OUR_VERDICTS = {
    "as in the paper": "as expected",
    "against the paper": "against what was expected",
}
Whose = Literal["paper", "ours"]
NAN = float("nan")
MARGINS = {"acc": 5.0, "tox": 2.0, "ppl": 2.0}
"""Differences, in the metric's unit, that do not matter: fixed before the runs that use them."""


def difference_verdict(
    relation: Relation, low: float, high: float, p: float, p_within: float
) -> Verdict:
    """The verdict on a difference.

    "more" and "less" claim its sign. If the sign is not significant and the difference is shown to
    be smaller than the margin, the verdict is "no difference". "same" claims exactly that.

    Args:
        low, high: Its 95 % interval.
        p: p-value of the test that there is a difference: of its sign, or that it is beyond the
            margin ("same").
        p_within: p-value of the test that it is smaller than the margin; NaN without a margin.
    """
    if relation == "same":
        side: Verdict = "against the paper" if p < LEVEL else "inconclusive"
        return "as in the paper" if p_within < LEVEL else side
    side = Claim("", "", relation).verdict(low, high)
    if side != "inconclusive" and p < LEVEL:
        return side
    return "no difference" if p_within < LEVEL else "inconclusive"


def p_values(relation: Relation, change: Difference, margin: float) -> tuple[float, float]:
    """The two p-values of `difference_verdict`.

    Args:
        margin: Differences that do not matter; 0 if all matter.
    """
    p = change.p_beyond(margin) if relation == "same" else change.p
    return p, change.p_within(margin) if margin else NAN


@dataclass(frozen=True)
class ClaimResult:
    """A claim of an item and its result on this run: a row of ITEM.claims.csv.

    Attributes:
        item, claim: Name of the item that makes the claim, and the claim as a sentence.
        metric, expected: The compared metric, and the relation the paper reports.
        paper: The paper's difference, in the metric's unit; NaN if the paper gives none.
        here, low, high: Our difference with its 95 % interval.
        p, p_within: p-values of the tests that there is a difference, and that it is too small to
            matter (`difference_verdict`).
        detectable: The smallest difference these texts could have shown.
        verdict: The verdict; in `ItemClaims.frame` after Holm's correction.
        prompts: Independent clusters.
        second, second_here, second_low, second_high, second_verdict: The metric's second scorer,
            its difference and verdict, not corrected; empty without a second scorer.
        margin: Differences that do not matter; 0 if all matter.
        holm, holm_within: Both p-values after Holm's correction over the item's claims of one
            `whose`.
        raw: The verdict without correction.
        scorer: The first scorer.
        task, method: The task and the method of both arms; "" if they differ.
        grids: Names of the item's grids, separated by spaces.
        error, texts, noise: Fields of `stats.Difference`, from which other numbers of prompts and
            texts are planned (`lab.power`).
        compared: A hash that is equal for equal tests on the same texts; "" if not known.
        whose: "paper", or "ours" for a claim that the paper does not make. In tables, verdicts on
            our claims are worded by `OUR_VERDICTS` (`ItemClaims.frame`).
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
    second_here: float = NAN
    second_low: float = NAN
    second_high: float = NAN
    second_verdict: Verdict | Literal[""] = ""
    margin: float = 0.0
    p_within: float = NAN
    holm: float = NAN
    holm_within: float = NAN
    raw: Verdict | Literal[""] = ""
    scorer: str = ""
    task: str = ""
    method: str = ""
    grids: str = ""
    error: float = NAN
    texts: float = NAN
    noise: float = NAN
    compared: str = ""
    whose: Whose = "paper"

    @classmethod
    def from_difference(
        cls,
        item: str,
        claim: Claim,
        change: Difference | None,
        paper: float = NAN,
        second: tuple[str, Difference] | None = None,
        **facts: Any,
    ) -> ClaimResult:
        """The result of a claim, from a measured difference.

        Args:
            change: Our difference; None if there was nothing to compare.
            second: Name of the second scorer, and our difference by its numbers.
            facts: Fields scorer, task, method, compared and whose.
        """
        first = (item, claim.text, claim.quantity, claim.relation, paper)
        facts["margin"] = claim.margin
        if change is None:
            return cls(*first, NAN, NAN, NAN, NAN, NAN, "missing", 0, raw="missing", **facts)
        p, p_within = p_values(claim.relation, change, claim.margin)
        verdict = difference_verdict(claim.relation, change.low, change.high, p, p_within)
        facts |= {"p_within": p_within, "raw": verdict}
        facts |= {"error": change.error, "texts": change.texts, "noise": change.noise}
        if second is not None:  # the verdict by the second scorer
            name, second_change = second
            tests = p_values(claim.relation, second_change, claim.margin)
            by_second = difference_verdict(
                claim.relation, second_change.low, second_change.high, *tests
            )
            facts |= {
                "second": name,
                "second_here": second_change.mean,
                "second_verdict": by_second,
            }
            facts |= {"second_low": second_change.low, "second_high": second_change.high}
        ends = change.mean, change.low, change.high
        return cls(*first, *ends, p, change.detectable, verdict, change.clusters, **facts)


@dataclass
class ItemClaims:
    """The claims of an item with their results, in the order in which they were added."""

    item: str
    grids: tuple[str, ...] = ()
    rows: list[ClaimResult] = field(default_factory=list)

    def add_claim(
        self,
        text: str,
        scores: pd.DataFrame,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        metric: str,
        expected: Relation,
        paper: float = NAN,
        margin: float | None = None,
        whose: Whose = "paper",
    ) -> None:
        """Test a claim about two arms.

        Args:
            scores: One row per text (`lab.data.ItemData.scores`).
            before, after: Columns of the two arms and their values.
            metric: The compared metric, after - before.
            expected: The relation, as in `Claim`.
            paper: The paper's difference.
            margin: Differences that do not matter; by default `MARGINS`.
            whose: "paper", or "ours".
        """
        if margin is None:
            margin = MARGINS.get(metric, 0.0)
        sides = _scored_rows(scores, before, after, metric)
        change = paired_change(*sides)
        second = compare_by_second_scorer(scores, before, after, metric)
        facts = _comparison_facts(*sides, f"{metric} {expected} {margin:g}")
        self.add_difference(
            text, metric, expected, change, paper, margin, second, whose=whose, **facts
        )

    def add_reported_claim(
        self,
        text: str,
        scores: pd.DataFrame,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        metric: str,
        known: Sequence[float],
    ) -> None:
        """Test a difference in the direction of the paper's two numbers; without them add nothing.

        Args:
            text: The claim, with {more} or {raises} for the direction.
            known: The paper's numbers before and after.
        """
        gap = known[1] - known[0]
        if not np.isnan(gap):
            text = text.format(
                more="more" if gap > 0 else "less", raises="raises" if gap > 0 else "lowers"
            )
            self.add_claim(text, scores, before, after, metric, "more" if gap > 0 else "less", gap)

    def add_difference(
        self,
        text: str,
        metric: str,
        expected: Relation,
        change: Difference | None,
        paper: float = NAN,
        margin: float = 0.0,
        second: tuple[str, Difference] | None = None,
        **facts: Any,
    ) -> None:
        """Add a claim whose difference was computed elsewhere; None if there was nothing to
        compare. `second`: name of the metric's second scorer, and the difference by its numbers."""
        claim = Claim(text, metric, expected, margin)
        facts["grids"] = " ".join(self.grids)
        self.rows.append(
            ClaimResult.from_difference(self.item, claim, change, paper, second, **facts)
        )

    def frame(self) -> pd.DataFrame:
        """One row per claim. Verdicts are corrected for the number of the item's claims, the
        paper's and ours separately, in each of the two families of tests. A comparison that several
        claims share counts once in the correction."""
        keys = [(row.whose, row.compared or str(number)) for number, row in enumerate(self.rows)]
        # One row of each comparison takes part in the correction.
        of_key = dict(zip(reversed(keys), reversed(self.rows), strict=True))
        there: dict[tuple[Whose, str], float] = {}
        small: dict[tuple[Whose, str], float] = {}
        for whose in {row.whose for row in self.rows}:
            own = {key: row for key, row in of_key.items() if row.whose == whose}
            there |= _holm({key: row.p for key, row in own.items()})
            small |= _holm({key: row.p_within for key, row in own.items() if row.margin})
        rows = []
        for key, row in zip(keys, self.rows, strict=True):
            both = there[key], small.get(key, NAN)
            verdict = row.raw
            if verdict != "missing":
                verdict = difference_verdict(row.expected, row.low, row.high, *both)
            verdicts: dict[str, str] = {"verdict": verdict, "raw": row.raw}
            verdicts["second_verdict"] = row.second_verdict
            if row.whose == "ours":
                verdicts = {name: OUR_VERDICTS.get(one, one) for name, one in verdicts.items()}
            rows.append(vars(row) | {"holm": both[0], "holm_within": both[1], **verdicts})
        return pd.DataFrame(rows, columns=list(ClaimResult.__dataclass_fields__))


def _holm(p: Mapping[tuple[Whose, str], float]) -> dict[tuple[Whose, str], float]:
    """Holm's corrected p-values of one family of tests."""
    return dict(zip(p, map(float, holm(list(p.values()))), strict=True))


def compare_arms(
    scores: pd.DataFrame, before: Mapping[str, Any], after: Mapping[str, Any], metric: str
) -> Difference | None:
    """The difference after - before (`scoring.tables.paired_change`); None without
    pairs."""
    return paired_change(*_scored_rows(scores, before, after, metric))


def _scored_rows(
    scores: pd.DataFrame, before: Mapping[str, Any], after: Mapping[str, Any], metric: str
) -> tuple[pd.DataFrame, pd.DataFrame]:
    one, two = (select_rows(scores, {"metric": metric, **side}) for side in (before, after))
    return one[one["value"].notna()], two[two["value"].notna()]


def _comparison_facts(before: pd.DataFrame, after: pd.DataFrame, test: str) -> dict[str, str]:
    """The fields scorer, task, method and compared of a `ClaimResult`.

    The hash `compared` identifies texts by cell, prompt and sample, and numbers by their scorer,
    since the last digits of a number differ between machines.

    Args:
        before, after: Rows of two arms that have a number.
        test: The metric, the tested relation and its margin.
    """
    both = pd.concat([before, after])
    facts = {}
    for name in ("scorer", "task", "method"):
        values = list(both[name].unique()) if name in both else []
        facts[name] = str(values[0]) if len(values) == 1 else ""
    if "cell" in both and len(before) and len(after):
        names = ["cell", "length", "part", "prompt", "sample", "scorer"]
        known = [name for name in names if name in both]
        texts = [side[known].sort_values(known).to_csv(index=False) for side in (before, after)]
        words = f"{test} {texts}"
        facts["compared"] = hashlib.sha256(words.encode()).hexdigest()[:12]
    return facts


def unique_comparisons(claims: pd.DataFrame) -> pd.DataFrame:
    """Rows of a table of claims in which each comparison stands once, the paper's and ours
    separately. If several items make it, the row with the largest corrected p-value stays, since
    items correct for different numbers of claims."""
    alone = claims["compared"] == ""
    ordered = claims.assign(largest=-deciding_p_values(claims)["holm"].fillna(1.0)).sort_values(
        "largest", kind="stable"
    )
    first = ~ordered[["whose", "compared"]].duplicated() | alone
    return claims[first.reindex(claims.index)]


def deciding_p_values(claims: pd.DataFrame) -> pd.DataFrame:
    """Columns p and holm of the test that decided each verdict; if neither did, the smaller."""
    small = (claims["verdict"] == "no difference") | (
        (claims["expected"] == "same") & claims["verdict"].isin(["as in the paper", "as expected"])
    )
    small |= (claims["verdict"] == "inconclusive") & (claims["holm_within"] < claims["holm"])
    return pd.DataFrame(
        {name: claims[name].where(~small, claims[f"{name}_within"]) for name in ("p", "holm")}
    )


def compare_by_second_scorer(
    scores: pd.DataFrame, before: Mapping[str, Any], after: Mapping[str, Any], metric: str
) -> tuple[str, Difference] | None:
    """Name of the metric's second scorer, and the difference by its numbers; None without one."""
    for name in dict.fromkeys(map(str, scores["metric"])):
        if name != metric and metric_name(name) == metric:
            change = compare_arms(scores, before, after, name)
            if change is not None:
                return scorer_of_metric(name), change
    return None


def select_rows(table: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """Rows whose columns have these values; a list allows any of its values."""
    rows = np.arange(len(table))
    for column, value in wanted.items():
        values = value if isinstance(value, list | tuple) else [value]
        rows = rows[table[column].iloc[rows].isin(values)]
    return table.iloc[rows]


TEXT_COLUMNS = ("item", "claim", "metric", "expected", "verdict", "raw", "second", "second_verdict",
         "scorer", "task", "method", "grids", "compared", "whose")  # fmt: skip
"""Columns of a table of claims that hold text."""


def read_claims(file: Path) -> pd.DataFrame:
    """Read a table of claims (`ItemClaims.frame`).

    Raises:
        RunError: The file is not such a table, or was written by another version of the package.
    """
    numbers = [name for name in ClaimResult.__dataclass_fields__ if name not in TEXT_COLUMNS]
    try:
        table = pd.read_csv(
            file, keep_default_na=False, na_values=["", "nan"], dtype={"compared": str}
        )
        if missing := [name for name in ClaimResult.__dataclass_fields__ if name not in table]:
            raise ValueError(f"no column {', '.join(missing)}")
        words = {name: table[name].astype(object).fillna("") for name in TEXT_COLUMNS}
        return table.assign(**words, **table[numbers].astype(float)).astype({"prompts": int})
    except (OSError, ValueError) as error:
        raise RunError(
            f"{file} is not a table of claims of this version ({error}); the item's script in"
            " analyses/ makes it again"
        ) from error


def summarize_disagreement(claims: pd.DataFrame) -> str:
    """A sentence that counts the claims with another verdict by their second scorer; "" if no claim
    has a second scorer."""
    once = unique_comparisons(claims)
    both = once[(once["second"] != "") & (once["raw"] != "missing")]
    if not len(both):
        return ""
    others = both[both["raw"] != both["second_verdict"]]
    sides = (*OUR_VERDICTS, *OUR_VERDICTS.values())
    opposite = (others["raw"].isin(sides) & others["second_verdict"].isin(sides)).sum()
    return (
        f"Of {pluralize(len(both), 'claim')} with two scorers, {len(others)} have another verdict"
        f" by the second (≠; both without correction), {opposite} of them the opposite one."
    )


def count_verdicts(claims: pd.DataFrame, column: str = "verdict") -> str:
    """The number of claims with each verdict, as text; each comparison counts once.

    Args:
        column: verdict, or raw for verdicts without correction.
    """
    numbers = unique_comparisons(claims)[column].value_counts()
    return ", ".join(f"{numbers[verdict]} {verdict}" for verdict in VERDICTS if verdict in numbers)


def format_claims(claims: pd.DataFrame) -> pd.DataFrame:
    """A table of claims formatted as text."""
    rows = [dict(zip(claims.columns, row, strict=True)) for row in claims.to_numpy(dtype=object)]
    here = ["" if pd.isna(row["here"]) else _value_and_interval(row) for row in rows]
    paper = ["" if pd.isna(value) else format_number(value, "+.2f") for value in claims["paper"]]
    columns = ["verdict", "claim", "metric", "expected"]
    formatted = claims[columns].assign(paper=paper, here=here)
    for name, values in deciding_p_values(claims).items():
        formatted[name] = ["" if pd.isna(value) else f"{value:.2g}" for value in values]
    formatted["uncorrected"] = claims["raw"].where(claims["raw"] != claims["verdict"], "")
    n = claims["texts"] * claims["prompts"]
    formatted["texts"] = ["" if pd.isna(count) else f"{count:.0f}" for count in n]
    formatted["prompts"] = claims["prompts"]
    formatted["scorer"] = claims["scorer"].map(scorer_kind)
    if (claims["second"] != "").any():
        formatted["second scorer"] = [second_scorer_verdict(row) for row in rows]
    return formatted


def scorer_kind(scorer: str) -> str:
    """The kind of a scorer: "adapter" in "accuracy (adapter sentiment 0123456789ab)"."""
    return scorer.partition(" (")[2].split(" ")[0].strip("(),")


def second_scorer_verdict(row: Mapping[str, Any]) -> str:
    """The verdict by a claim's second scorer as text: "" without one, "agrees", or the verdict."""
    if row["second"] == "":
        return ""
    if row["second_verdict"] == row["raw"]:
        return "agrees"
    return f"≠ {row['second']}: {row['second_verdict']} ({_value_and_interval(row, 'second_')})"


def _value_and_interval(row: Mapping[str, Any], of: str = "") -> str:
    return format_interval(row[f"{of}here"], row[f"{of}low"], row[f"{of}high"], "+.2f")
