"""The claims of the paper's propositions, and the verdict on each from a measured number.

A verdict compares a 95 % interval with a margin around the claimed number: an interval inside
the margin is "as in the paper", one outside it is "against the paper", any other is
"inconclusive". Intervals are over texts (prompts, where several texts share one), because the
steps of a text are not independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Float

from lapa2_interp.bias.theory import fit_slopes
from lapa2_interp.stats import (
    FEW,
    Interval,
    label_codes,
    mean_interval,
    resampled_means,
    student_quantile,
    tails,
)

Verdict = Literal[
    "as in the paper", "against the paper", "no difference", "inconclusive", "missing"
]
Relation = Literal["more", "less", "same"]


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, and the range it puts a number in.

    Attributes:
        text: The sentence; {blanks} are filled where it is used.
        quantity: The measured quantity.
        relation: "more" or "less" than the expected number, or the "same".
        margin: Differences from it that do not matter.
        source: The place in the paper.
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


SLOPE_MARGIN = 0.05
"""Margin on slopes: well below the difference between alphas a quarter apart. A quantity that
grows as l^0.05 doubles in 10^6 steps."""
SHARE_MARGIN = 0.02
"""Margin on ratios of attention shares."""
ROUNDING_MARGINS = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 1e-2, "float16": 1e-2}
"""Margin on slopes that only rounding may change, by the precision of attention."""


EXPECTED_SHARE = Claim(
    "E[A] = l_pre / l", "mean of A * l / l_pre at the shortest l", "same", 0.05, "Prop. 1"
)
MEAN_DECAY = Claim(
    "E[A] falls as 1/l", "slope of log mean A on log l", "same", SLOPE_MARGIN, "Prop. 1"
)
BOUNDED_RATIO = Claim(
    "A is O(1/l)",
    "slope of log(e_P/e_R) on log l, far half",
    "less",
    SLOPE_MARGIN,
    "Prop. 1, bounded ratio",
)
TYPICAL_RATIO = Claim(
    "a typical A keeps e_P/e_R",
    "mean slope of log(e_P/e_R) on log l",
    "same",
    SLOPE_MARGIN,
    "uniform logits",
)
CLOSED_FORM = Claim(
    "A' is what Eq. 11 says",
    "mean of A' / Eq. 11 at the longest l",
    "same",
    0.05,
    "Prop. 2, Eq. 11",
)
FIRST_LAYER_RISE = Claim(
    "the bias adds alpha log(l/l_pre)",
    "slope of the log-odds' rise, first layer",
    "same",
    0.001,
    "Eq. 9",
)
POOLED_RISE = Claim(
    "it adds that over all layers",
    "slope of the rise of pooled A's log-odds",
    "same",
    SLOPE_MARGIN,
    "Prop. 2",
)
LOG_ODDS_SLOPE = Claim(
    "odds go as r^alpha / (r-1)",
    "slope of log-odds + log(r-1) on log r",
    "same",
    SLOPE_MARGIN,
    "Prop. 2",
)
SLOWER_DECAY = Claim(
    "decay is slower with the bias", "slope of log A' minus slope of log A", "more", 0.0, "Prop. 2"
)
ATTENTION_FALLS = Claim(
    "prefix attention falls", "mean slope of log A on log l", "less", 0.0, "Def. 1"
)
LOCAL_SHARE = Claim(
    "nearest {k} keep their share",
    "change of nearest_{k}/(1-prefix)",
    "same",
    SHARE_MARGIN,
    "Local Dependency",
)


def verdict_row(
    claim: Claim, where: str, interval: Interval, expected: float | int, **marks: object
) -> dict[str, object]:
    """One row of a verdict table; alpha is NaN where the claim is not about a single alpha."""
    return {
        "claim": claim.text.format(**marks),
        "source": claim.source,
        "where": where,
        "alpha": marks.get("alpha", np.nan),
        "quantity": claim.quantity.format(**marks),
        "expected": {"same": "", "less": "<= ", "more": ">= "}[claim.relation] + f"{expected:.3g}",
        "margin": claim.margin,
        **interval.columns,
        "texts": interval.clusters,
        "verdict": claim.verdict(interval.low, interval.high, expected),
    }


def rate_row(
    where: str,
    x: Float[np.ndarray, "*#text step"],
    ratios: Mapping[str, Float[np.ndarray, "text step"]],
    texts: np.ndarray,
) -> dict[str, object]:
    """The verdict on O(1/l): that log(e_P/e_R) stays bounded, also beyond all measured lengths.

    The slope over the far half of log l must be 0 or less. With an attention sink the slope is
    above 0 over a long range, although the ratio stays bounded. The claim is therefore refuted only
    if the slope does not decrease with length, for any choice of counted keys. A slope that
    decreases significantly, however slowly, leaves the claim open: no measured length shows where
    the decrease ends.

    Args:
        ratios: log(e_P/e_R) by the counted keys: all, and without the sink if there is one.
            Leaving keys out of e_R only makes the ratio larger, so a bound on the second holds for
            the first. The row has the better verdict.
    """
    middle = np.asarray(x).reshape(-1, np.shape(x)[-1]).mean(0)
    near = middle <= (middle[0] + middle[-1]) / 2
    if min(near.sum(), (~near).sum()) < 3:
        unknown = Interval(np.nan, np.nan, np.nan, len(texts), len(pd.unique(texts)))
        return verdict_row(BOUNDED_RATIO, where, unknown, 0)
    rows = []
    for keys, ratio in ratios.items():
        halves = [fit_slopes(x[..., part], ratio[..., part]) for part in (near, ~near)]
        change = mean_interval(halves[1] - halves[0], texts)
        row = verdict_row(BOUNDED_RATIO, where, mean_interval(halves[1], texts), 0)
        if row["verdict"] == "against the paper" and (
            change.high < 0 or change.mean < -BOUNDED_RATIO.margin
        ):
            row["verdict"] = "inconclusive"
        rows.append(row | {"quantity": f"{BOUNDED_RATIO.quantity}{keys}"})
    order = ("as in the paper", "inconclusive", "against the paper")
    return min(rows, key=lambda row: order.index(str(row["verdict"])))


ON_SYNTHETIC = "synthetic: "
"""How `where` of a verdict on synthetic logits begins."""
BROKEN = ("not exchangeable", "unbounded")
"""Words of `where` on families that break an assumption (`LOGIT_FAMILIES`)."""


def count_by_source(verdicts: pd.DataFrame) -> list[str]:
    """Numbers of verdicts as sentences: those on a model apart from those on synthetic logits,
    which keep the paper's assumptions, or break them to show what then is left of a claim."""
    where = verdicts["where"].astype(str)
    synthetic = where.str.startswith(ON_SYNTHETIC)
    broken = where.str.contains("|".join(BROKEN))
    parts = {
        "the model": verdicts[~synthetic],
        "synthetic logits that keep the assumptions": verdicts[synthetic & ~broken],
        "synthetic logits that break them": verdicts[synthetic & broken],
    }
    counts = {name: part["verdict"].value_counts() for name, part in parts.items()}
    return [
        f"Claims on {name}: {', '.join(f'{n} {verdict}' for verdict, n in counted.items())}."
        for name, counted in counts.items()
        if len(counted)
    ]


def mean_curve_slope(
    x: Float[np.ndarray, "*#text step"], share: Float[np.ndarray, "text step"], texts: np.ndarray
) -> Interval:
    """Slope of the log of the mean curve against log l; its interval resamples the texts of the
    mean."""
    x = np.asarray(x).reshape(-1, np.shape(x)[-1]).mean(0)
    n = len(pd.unique(texts))
    mean = float(fit_slopes(x, np.log(share.mean(0))))
    if n >= FEW:
        low, high = np.percentile(fit_slopes(x, np.log(resampled_means(share, texts))), tails(n))
    elif n > 1:  # too few to resample: the jackknife leaves out each text in turn
        codes, _ = label_codes(texts)
        left = np.array([fit_slopes(x, np.log(share[codes != i].mean(0))) for i in range(n)])
        error = np.sqrt((n - 1) / n * ((left - left.mean()) ** 2).sum())
        half = student_quantile(0.975, n - 1) * error
        low, high = mean - half, mean + half
    else:
        low, high = np.nan, np.nan
    return Interval(mean, float(low), float(high), len(texts), n)
