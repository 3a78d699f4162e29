"""The paper's claims as measurements with intervals, and a verdict on each (`paper.claims`).

A claim is tested where it is exact (`theory`): on log-odds. Written with r = l / l_pre,

    log(A'/(1-A')) + log(r - 1) = log(e_P/e_R) + alpha * log(r)

holds for any logits, so that its slope against log r is alpha plus how fast e_P / e_R grows. The
bounded-ratio form of Proposition 1 says that it does not grow (O(1/l)); Proposition 2, with uniform
logits, that the slope is alpha. Proposition 1 itself is about the mean of A over draws, which may
fall as 1/l while A of a typical text does not: both are measured. Slopes of log A' approach alpha -
1 only far out; they are reported beside the closed form's own slope over the same lengths, never
judged.

Two lengths: r - 1 counts all keys of the softmax, BOS included (`l_kv`); the bias counts as the
paper does, without BOS.

A verdict compares a 95 % interval with a margin around what was claimed: inside it supports,
outside it refutes, anything else is inconclusive. Intervals are over texts (prompts, where several
texts share one), because the steps of a text are not independent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from lapa2_interp._util.errors import TraceError
from lapa2_interp.attention.tables import local_ratio_terms
from lapa2_interp.attention.trace import NEAREST
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.synthetic import LOGIT_FAMILIES
from lapa2_interp.bias.theory import (
    augmented_share,
    fit_decay,
    fit_slopes,
    prefix_share,
    ratio_bound,
    shifted_share,
)
from lapa2_interp.paper.claims import Claim
from lapa2_interp.stats import FEW, Interval, bounds, mean_interval, resampled_means, tails

if TYPE_CHECKING:
    import xarray as xr

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
SLOPE = 0.05
"""Margin on slopes: the regimes of alphas a quarter apart stay well apart. What grows as l^0.05
doubles in 10^6 steps."""
SHARE = 0.02
"""Margin on ratios of attention shares."""
EXACT = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 1e-2, "float16": 1e-2}
"""Margin on slopes where only rounding may differ, by the precision attention was computed in."""


EXPECTED = Claim(
    "E[A] = l_pre / l", "mean of A * l / l_pre at the shortest l", "same", 0.05, "Prop. 1"
)
MEAN_RATE = Claim("E[A] falls as 1/l", "slope of log mean A on log l", "same", SLOPE, "Prop. 1")
RATE = Claim(
    "A is O(1/l)",
    "slope of log(e_P/e_R) on log l, far half",
    "less",
    SLOPE,
    "Prop. 1, bounded ratio",
)
TYPICAL = Claim(
    "a typical A keeps e_P/e_R",
    "mean slope of log(e_P/e_R) on log l",
    "same",
    SLOPE,
    "uniform logits",
)
REACHED = Claim(
    "A' is what Eq. 8 says", "mean of A' / Eq. 8 at the longest l", "same", 0.05, "Prop. 2, Eq. 8"
)
CORRECTION = Claim(
    "the bias adds alpha log(l/l_pre)",
    "slope of the log-odds' rise, first layer",
    "same",
    0.001,
    "Eq. 7",
)
DEEP = Claim(
    "it adds that over all layers",
    "slope of the rise of pooled A's log-odds",
    "same",
    SLOPE,
    "Prop. 2",
)
ODDS = Claim(
    "odds go as r^alpha / (r-1)", "slope of log-odds + log(r-1) on log r", "same", SLOPE, "Prop. 2"
)
SLOWER = Claim(
    "decay is slower with the bias", "slope of log A' minus slope of log A", "more", 0.0, "Prop. 2"
)
FALLS = Claim("prefix attention falls", "mean slope of log A on log l", "less", 0.0, "Def. 1")
LOCAL = Claim(
    "nearest {k} keep their share",
    "change of nearest_{k}/(1-prefix)",
    "same",
    SHARE,
    "Local Dependency",
)


def verdict_row(
    claim: Claim, where: str, found: Interval, expected: float | int, **marks: object
) -> dict[str, object]:
    """One row of a verdict table."""
    return {
        "claim": claim.text.format(**marks),
        "source": claim.source,
        "where": where,
        **{name: value for name, value in marks.items() if name == "alpha"},
        "quantity": claim.quantity.format(**marks),
        "expected": {"same": "", "less": "<= ", "more": ">= "}[claim.relation] + f"{expected:.3g}",
        "margin": claim.margin,
        "mean": found.mean,
        "low": found.low,
        "high": found.high,
        "texts": found.clusters,
        "verdict": claim.verdict(found.low, found.high, expected),
    }


def rate_row(
    where: str,
    x: Float[np.ndarray, "*#text step"],
    ratios: Mapping[str, Float[np.ndarray, "text step"]],
    texts: np.ndarray,
) -> dict[str, object]:
    """The verdict on O(1/l), which says that log(e_P/e_R) stays bounded: about lengths beyond any
    that were measured.

    The slope over the far half of log l must be 0 or less. Behind an attention sink the slope is
    above 0 over a long range, although the ratio stays bounded. The claim is therefore refuted only
    if the slope does not get smaller with length, whichever keys are counted. A slope that surely
    falls, however slowly, leaves it open: no length that was measured says where the fall ends.

    Args:
        ratios: log(e_P/e_R) by which keys are counted: all, and where a sink is known all but the
            sink. Leaving keys out of e_R only makes the ratio larger, so that a bound on the second
            holds for the first; the row is that of the better verdict.
    """
    middle = np.asarray(x).reshape(-1, np.shape(x)[-1]).mean(0)
    near = middle <= (middle[0] + middle[-1]) / 2
    if min(near.sum(), (~near).sum()) < 3:
        unknown = Interval(np.nan, np.nan, np.nan, len(texts), len(pd.unique(texts)))
        return verdict_row(RATE, where, unknown, 0)
    rows = []
    for keys, ratio in ratios.items():
        halves = [fit_slopes(x[..., part], ratio[..., part]) for part in (near, ~near)]
        change = mean_interval(halves[1] - halves[0], texts)
        row = verdict_row(RATE, where, mean_interval(halves[1], texts), 0)
        if row["verdict"] == "against the paper" and (
            change.high < 0 or change.mean < -RATE.margin
        ):
            row["verdict"] = "inconclusive"
        rows.append(row | {"quantity": f"{RATE.quantity}{keys}"})
    order = ("as in the paper", "inconclusive", "against the paper")
    return min(rows, key=lambda row: order.index(str(row["verdict"])))


def mean_rate(
    x: Float[np.ndarray, "*#text step"], share: Float[np.ndarray, "text step"], texts: np.ndarray
) -> Interval:
    """Slope of the log of the mean curve against log l; the interval resamples texts before the
    mean is taken."""
    x = np.asarray(x).reshape(-1, np.shape(x)[-1]).mean(0)
    n = len(pd.unique(texts))
    mean = float(fit_slopes(x, np.log(share.mean(0))))
    if n < FEW:  # too few to resample: each text left out in turn
        codes = pd.factorize(texts)[0]
        left = (
            np.array([float(fit_slopes(x, np.log(share[codes != i].mean(0)))) for i in range(n)])
            if n > 1
            else np.array([np.nan])
        )
        from scipy.stats import t

        half = (
            float(t.ppf(0.975, n - 1) * np.sqrt((n - 1) / n * ((left - left.mean()) ** 2).sum()))
            if n > 1
            else np.nan
        )
        return Interval(mean, mean - half, mean + half, len(texts), n)
    low, high = np.percentile(fit_slopes(x, np.log(resampled_means(share, texts))), tails(n))
    return Interval(mean, float(low), float(high), len(texts), n)


# --- synthetic logits


def synthetic_shares(
    drawn: Mapping[str, Float[np.ndarray, "text prefix length"]],
    lengths: Int[np.ndarray, " length"],
    l_pre: int,
    alphas: Sequence[float] = ALPHAS,
) -> pd.DataFrame:
    """A' of every family, alpha and length: columns family, alpha, l, mean, low, high (95 %, texts
    resampled), texts, predicted (Eq. 8), ratio (mean e_P / e_R)."""
    r, rows = lengths / l_pre, []
    for name, odds in drawn.items():
        ratio = np.exp(odds + np.log(r - 1)).mean((0, 1))
        for alpha in alphas:
            shares = shifted_share(1 / (1 + np.exp(-odds)), alpha * np.log(r)).mean(1)
            predicted = augmented_share(lengths, l_pre, alpha)
            for i, l in enumerate(lengths):
                found = mean_interval(shares[:, i], np.arange(len(shares)), resamples=500)
                rows.append(
                    {
                        "family": name,
                        "alpha": alpha,
                        "l": int(l),
                        "mean": found.mean,
                        "low": found.low,
                        "high": found.high,
                        "texts": found.n,
                        "predicted": predicted[i],
                        "ratio": ratio[i],
                    }
                )
    return pd.DataFrame(rows)


def synthetic_slopes(
    drawn: Mapping[str, Float[np.ndarray, "text prefix length"]],
    lengths: Int[np.ndarray, " length"],
    l_pre: int,
    alphas: Sequence[float] = ALPHAS,
) -> pd.DataFrame:
    """Slopes of every family and alpha: columns family, alpha, quantity ("log-odds", "log A'"),
    mean, low, high, texts, and
    `predicted`: alpha on log-odds, the closed form's own slope over these lengths on log A'."""
    r, rows = lengths / l_pre, []
    x = np.log(r)
    for name, odds in drawn.items():
        for alpha in alphas:
            biased = odds + alpha * x
            share = np.log(shifted_share(1 / (1 + np.exp(-odds)), alpha * x).mean(1))
            measured = {
                "log-odds": (fit_slopes(x, biased + np.log(r - 1)).mean(1), alpha),
                "log A'": (
                    fit_slopes(x, share),
                    float(fit_slopes(x, np.log(augmented_share(lengths, l_pre, alpha)))),
                ),
            }
            for quantity, (values, predicted) in measured.items():
                found = mean_interval(values, np.arange(len(values)))
                rows.append(
                    {
                        "family": name,
                        "alpha": alpha,
                        "quantity": quantity,
                        "mean": found.mean,
                        "low": found.low,
                        "high": found.high,
                        "texts": found.n,
                        "predicted": predicted,
                    }
                )
    return pd.DataFrame(rows)


def synthetic_verdicts(
    drawn: Mapping[str, Float[np.ndarray, "text prefix length"]],
    lengths: Int[np.ndarray, " length"],
    l_pre: int,
    alphas: Sequence[float] = ALPHAS,
) -> pd.DataFrame:
    """The claims on every family, under the assumptions it keeps or breaks.

    Not the law of the bias: synthetic A' is computed by it.
    (`tests/paper/test_propositions.py` puts the bias on whole rows of logits.)
    """
    x, rows = np.log(lengths), []
    for name, odds in drawn.items():
        texts, ratio = np.arange(len(odds)), odds + np.log(lengths / l_pre - 1)
        family = LOGIT_FAMILIES.get(name)
        where = f"synthetic: {name}" + (f" ({family.keeps})" if family else "")
        share = 1 / (1 + np.exp(-odds))
        start = share[..., 0].mean(1) / float(prefix_share(float(lengths[0]), l_pre))
        seen = [_effective(share[..., i]) >= ENOUGH for i in range(len(lengths))]
        rows.append(_unless(seen[0], verdict_row(EXPECTED, where, mean_interval(start, texts), 1)))
        rows.append(
            _unless(
                all(seen),
                verdict_row(MEAN_RATE, where, mean_rate(x[None], share.mean(1), texts), -1),
            )
        )
        rows.append(rate_row(where, x[None], {"": ratio.mean(1)}, texts))
        rows.append(
            verdict_row(TYPICAL, where, mean_interval(fit_slopes(x, ratio).mean(1), texts), 0)
        )
        for alpha in sorted({alpha for alpha in alphas if alpha > 0}):
            said = augmented_share(lengths[-1:], l_pre, alpha)
            found = (
                shifted_share(share[..., -1], alpha * np.log(lengths[-1] / l_pre)) / said
            ).mean(1)
            rows.append(verdict_row(REACHED, where, mean_interval(found, texts), 1, alpha=alpha))
    return _verdict_table(rows)


ENOUGH = 100
"""Draws that a mean must rest on for a verdict."""


def _effective(shares: Float[np.ndarray, "*draw"]) -> float:
    """How many draws a mean rests on, (sum a)^2 / sum a^2: few if rare draws make up most of the
    mean."""
    return float(shares.sum() ** 2 / (shares**2).sum())


def _unless(seen: bool, row: dict[str, object]) -> dict[str, object]:
    """The row, made inconclusive unless the mean was seen.

    An interval from draws says nothing about draws that are rarer still.
    """
    return row if seen else row | {"verdict": "inconclusive"}


def _verdict_table(rows: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    """Verdict rows as a table that always has a column alpha (NaN where a row is about no single
    alpha)."""
    columns = [
        "claim",
        "source",
        "where",
        "alpha",
        "quantity",
        "expected",
        "margin",
        "mean",
        "low",
        "high",
        "texts",
        "verdict",
    ]
    return pd.DataFrame(rows, columns=columns)


# --- traces of real models: axes alpha, sample, step, layer, head


def thinned_steps(n_steps: int, n: int = 48) -> Int[np.ndarray, " step"]:
    """Steps 0 to n_steps - 1, at most n, in equal ratios: slopes on log l weigh all scales alike,
    and traces stay small."""
    return np.unique(np.geomspace(1, n_steps, min(n, n_steps)).round().astype(np.int64)) - 1


def thin(traces: xr.Dataset) -> xr.Dataset:
    """The trace at those steps that slopes are read from; a thin trace stays as it is."""
    steps = traces["step"].to_numpy()
    return traces.isel(step=np.isin(steps, thinned_steps(int(steps[-1]) + 1)))


def by_alpha(traces: Mapping[float, xr.Dataset]) -> xr.Dataset:
    """Traces of the same prompts under several alphas as one, along a new axis `alpha`; the branch
    that is controlled.

    All texts are cut at the end of the shortest, so that every point of a curve is over the same
    texts.

    Raises:
        TraceError: No trace at alpha 0, traces of different size or prefixes, pooled ones, texts
            beyond a sliding window, a text without a prefix, or fewer than 3 steps that all texts
            have.
    """
    import xarray as xr

    if 0.0 not in traces:
        raise TraceError(
            f"the baseline is alpha 0, found only {', '.join(f'{a:g}' for a in traces)}; add 0"
        )
    parts = []
    for each in traces.values():
        controlled = np.flatnonzero((each["l_pre"].to_numpy() > 0).any(axis=1))
        if not len(controlled):
            raise TraceError(
                "the traces have no prefix (its length is 0), so there is no prefix attention to"
                " follow"
            )
        if "head" not in each.dims:
            raise TraceError("these traces are pooled over heads; record them with trace full")
        if "in_sight" in each and (each["in_sight"] < each["l_pre"]).any():
            raise TraceError(
                "the texts are longer than the sliding window of some layers, where the prefix is"
                " hidden, not only outweighed; give shorter texts"
            )
        parts.append(each.isel(branch=int(controlled[0]), drop=True))
    first = parts[0]
    for each in parts:
        if dict(each.sizes) != dict(first.sizes) or not np.array_equal(
            each["l_pre"], first["l_pre"]
        ):
            raise TraceError(
                "traces of different samples, steps or prefixes cannot be compared:"
                f" {dict(first.sizes)}, {dict(each.sizes)}"
            )
    if not (first["l_pre"] > 0).all():
        raise TraceError("some texts have no prefix (its length is 0); leave them out")
    axis = pd.Index([float(alpha) for alpha in traces], name="alpha")
    whole = xr.concat(parts, dim=axis, coords="minimal", compat="override", join="override")
    alive = ~np.isnan(whole["prefix"].to_numpy()).any(axis=(0, 1, 3, 4))
    if alive.sum() < 3:
        raise TraceError(
            f"a slope needs at least 3 steps, found {alive.sum()} that all texts have; ask for"
            " longer texts"
        )
    return whole.isel(step=alive)


@dataclass(frozen=True)
class Curves:
    """Attention on the prefix by alpha, text and step, of all heads pooled or of every head.

    Attributes:
        share: A'. `odds`: log(A'/(1-A')), -inf where A' is 0.
        log_r: log(l/l_pre) with the paper's l. `log_rest`: log(r - 1) with all keys. `log_l`: log
            of all keys.
        texts: The cluster of each text: its prompt, or its number.
    """

    alphas: tuple[float, ...]
    share: Float[np.ndarray, "alpha sample step *head"]
    odds: Float[np.ndarray, "alpha sample step *head"]
    log_r: Float[np.ndarray, "sample step"]
    log_rest: Float[np.ndarray, "sample step"]
    log_l: Float[np.ndarray, "sample step"]
    texts: np.ndarray

    @property
    def base(self) -> int:
        """The baseline's number among the alphas."""
        return self.alphas.index(0.0)

    def slope(
        self, x: Float[np.ndarray, "sample step"], y: Float[np.ndarray, "alpha sample step *head"]
    ) -> Float[np.ndarray, "alpha sample *head"]:
        """Slopes along the steps of every text, and head if there are heads; NaN where a value is
        infinite."""
        return fit_slopes(x.reshape(len(x), *[1] * (y.ndim - 3), x.shape[1]), np.moveaxis(y, 2, -1))

    def wide(self, x: Float[np.ndarray, "sample step"]) -> Float[np.ndarray, "sample step *one"]:
        """With axes for heads where the curves have them."""
        return x.reshape(*x.shape, *[1] * (self.share.ndim - 3))

    def growth(self) -> Float[np.ndarray, "alpha sample *head"]:
        """Slope of log(e_P / e_R), the bias included, against log l."""
        return self.slope(self.log_l, self.odds + self.wide(self.log_rest))

    def corrected(self) -> Float[np.ndarray, "alpha sample *head"]:
        """Slope of log-odds + log(r - 1) against log r: alpha in Proposition 2."""
        return self.slope(self.log_r, self.odds + self.wide(self.log_rest))

    def rise(self) -> Float[np.ndarray, "alpha sample *head"]:
        """Slope of the log-odds' rise over the baseline against log r: alpha, where queries and
        keys are the baseline's."""
        with np.errstate(invalid="ignore"):
            return self.slope(self.log_r, self.odds - self.odds[[self.base]])

    def exponents(self) -> Float[np.ndarray, "alpha sample *head"]:
        """Slope of log A' against log l."""
        with np.errstate(divide="ignore"):
            return self.slope(self.log_l, np.log(self.share))


def curves(
    traces: xr.Dataset, *, pooled: bool, layer: int | None = None, sink: bool = True
) -> Curves:
    """The prefix attention of `by_alpha` traces, pooled over layers and heads as the paper does, or
    head by head.

    In float64. The attention outside the prefix is summed from its parts: 1 - A' would lose it to
    rounding where the prefix has nearly all.

    Args:
        layer: Only this layer.
        sink: False leaves BOS out, of attention and of lengths, as if it were no key.
    """
    parts = ["prompt", "generated", *(["bos"] if sink else [])]
    share, *others = (traces[name].to_numpy().astype(np.float64) for name in ("prefix", *parts))
    rest = np.sum(others, axis=0)
    if layer is not None:
        share, rest = (each[..., layer : layer + 1, :] for each in (share, rest))
    if pooled:
        share, rest = (each.mean((-2, -1)) for each in (share, rest))
    n = traces["l_pre"].to_numpy()[:, None]
    l_kv = traces["l_kv"].to_numpy().astype(np.float64)
    n_bos = traces["n_bos"].to_numpy()[:, None]
    l = l_kv if sink else l_kv - n_bos
    with np.errstate(divide="ignore"):
        odds = np.log(share) - np.log(rest)
    return Curves(
        tuple(float(a) for a in traces["alpha"].to_numpy()),
        share, odds, np.log((l_kv - n_bos) / n), np.log(l / n - 1), np.log(l), _texts(traces),
    )  # fmt: skip


def _texts(traces: xr.Dataset) -> np.ndarray:
    names = traces["prompt_text"] if "prompt_text" in traces.coords else traces["sample"]
    return np.asarray(names.to_numpy())


def head_kinds(traces: xr.Dataset) -> pd.DataFrame:
    """What the baseline's heads attend to: columns layer, head, kind.

    sink: at least half on BOS. local: at least half on the query's own token and the one before.
    prefix: at least half on the prefix. Else mixed.
    """
    base = traces.sel(alpha=0.0)
    means = (
        base[["bos", "nearest_2", "prefix"]].mean(("sample", "step")).to_dataframe().reset_index()
    )
    kind = np.select(
        [means["bos"] >= 0.5, means["nearest_2"] >= 0.5, means["prefix"] >= 0.5],
        ["sink", "local", "prefix"],
        "mixed",
    )
    return means[["layer", "head"]].assign(kind=kind)


def head_table(traces: xr.Dataset) -> pd.DataFrame:
    """Every head's decay.

    Returns:
        Columns alpha, layer, head, kind; growth (slope of log(e_P/e_R) on log l, the bias
        included), low, high; verdict (at alpha 0: is the growth 0 to 0.05, as 1/l predicts);
        exponent (slope of log A'); sup_ratio (largest e_P/e_R of any text and step); tightness (A
        over the bound this supremum gives, at the last step, mean over texts); C, D and R2 of
        C/(t+D) on the baseline's mean curve. Slopes are read from steps in equal ratios (`thin`),
        the others from all.
    """
    found, whole = curves(thin(traces), pooled=False), curves(traces, pooled=False)
    growth, exponents = found.growth(), found.exponents()
    t = traces["step"].to_numpy().astype(np.float64)
    l = np.exp(whole.log_l)[:, :, None, None]
    n = traces["l_pre"].to_numpy()[:, None, None, None]
    kinds, frames = head_kinds(traces), []
    for i, alpha in enumerate(found.alphas):
        low, high = bounds(growth[i], found.texts)
        supremum = np.exp(whole.odds[i] + whole.wide(whole.log_rest)).max((0, 1))
        tight = (whole.share[i][:, -1] / ratio_bound(l[:, -1], n[:, 0], supremum)).mean(0)
        columns = {
            "growth": growth[i].mean(0), "low": low, "high": high, "exponent": exponents[i].mean(0),
            "sup_ratio": supremum, "tightness": tight,
        }  # fmt: skip
        table = kinds.assign(
            alpha=alpha, **{name: value.ravel() for name, value in columns.items()}
        )
        if alpha == 0:
            intervals = table[["growth", "low", "high"]].to_numpy()
            judged = [TYPICAL.verdict(float(low), float(high)) for _, low, high in intervals]
            fits = [fit_decay(t, curve) for curve in whole.share[i].mean(0).reshape(len(t), -1).T]
            table = table.assign(
                verdict=judged,
                C=[f.c for f in fits],
                D=[f.d for f in fits],
                R2=[f.r2 for f in fits],
            )
        frames.append(table)
    first = ["alpha", "layer", "head", "kind", "growth", "low", "high", "verdict"]
    joined = pd.concat(frames, ignore_index=True)
    return joined[[*first, *(name for name in joined if name not in first)]]


def pooled_table(traces: xr.Dataset) -> pd.DataFrame:
    """The curve of the paper's figures, A' averaged over layers and heads: columns alpha, step,
    l_kv (keys, BOS included), mean, low, high, texts, and C, D, R2 of C/(t+D) over all steps (NaN
    where none fits)."""
    found = curves(traces, pooled=True)
    t = traces["step"].to_numpy()
    frames = []
    for i, alpha in enumerate(found.alphas):
        low, high = bounds(found.share[i], found.texts)
        mean = found.share[i].mean(0)
        fit = fit_decay(t.astype(np.float64), mean)
        columns = {
            "step": t,
            "l_kv": np.exp(found.log_l).mean(0),
            "mean": mean,
            "low": low,
            "high": high,
        }
        counts = {"texts": len(pd.unique(found.texts)), "C": fit.c, "D": fit.d, "R2": fit.r2}
        frames.append(pd.DataFrame({"alpha": alpha, **columns, **counts}))
    return pd.concat(frames, ignore_index=True)


def exponent_table(traces: xr.Dataset) -> pd.DataFrame:
    """Exponents of the pooled curve: columns alpha, quantity ("log-odds", "rise", "log A'"), mean,
    low, high, texts, predicted.

    Predicted: alpha on log-odds and for the rise; on log A' the slope of the closed form with the
    baseline's own e_P/e_R held fixed, over the same lengths.
    """
    found = curves(thin(traces), pooled=True)
    rows = []
    for i, alpha in enumerate(found.alphas):
        fixed = (
            (found.odds[found.base] + found.log_rest).mean(1, keepdims=True)
            - found.log_rest
            + alpha * found.log_r
        )
        log_share = -np.log1p(np.exp(-fixed))
        measured = {
            "log-odds": (found.corrected()[i], alpha),
            "rise": (found.rise()[i], alpha),
            "log A'": (found.exponents()[i], float(fit_slopes(found.log_l, log_share).mean())),
        }
        for quantity, (values, predicted) in measured.items():
            one = mean_interval(values, found.texts)
            rows.append(
                {
                    "alpha": alpha,
                    "quantity": quantity,
                    "mean": one.mean,
                    "low": one.low,
                    "high": one.high,
                    "texts": one.clusters,
                    "predicted": predicted,
                }
            )
    return pd.DataFrame(rows)


def prediction_table(
    traces: xr.Dataset, augmentations: Mapping[float, Augmentation]
) -> pd.DataFrame:
    """A' predicted from the baseline by the exact law against A' as measured, layer by layer.

    The effect that the prediction misses came through queries and keys that the bias changed in
    lower layers; `direct` is the share of the effect that is predicted.

    Args:
        traces: With the same texts at every alpha (teacher-forced).
        augmentations: By alpha; the prediction uses where, when and by how much they act.

    Returns:
        Columns alpha, layer, baseline, predicted, measured (means over texts, steps and heads),
        low, high (of measured - predicted, over texts), texts, error (largest difference of any
        head's log-odds, where the baseline is not 0), direct.

    Raises:
        TraceError: An augmentation acts on other keys than the prefix, whose mass the trace does
            not give.
    """
    found = curves(thin(traces), pooled=False)
    steps, base = thin(traces)["step"].to_numpy(), found.base
    n, l_kv = traces["l_pre"].to_numpy(), thin(traces)["l_kv"].to_numpy()
    n_layers, n_heads = found.share.shape[-2:]
    rows = []
    for i, alpha in enumerate(found.alphas):
        if alpha == 0:
            continue
        rule = augmentations[alpha]
        if rule.span != "prefix":
            raise TraceError(
                f"A' is predicted for augmentations of the exact prefix, not of span {rule.span!r}"
            )
        l = l_kv - (traces["n_bos"].to_numpy()[:, None] if rule.length_rule == "paper" else 0)
        bias = np.stack([rule.bias(l[j], int(each)) for j, each in enumerate(n)])
        bias = np.where((rule.phase == "decode") & (steps == 0), 0.0, bias)
        of_heads = bias[:, :, None, None] * rule.head_mask(n_layers, n_heads)
        predicted, measured = shifted_share(found.share[base], of_heads), found.share[i]
        with np.errstate(invalid="ignore"):
            error = np.nanmax(np.abs(found.odds[i] - found.odds[base] - of_heads), axis=(0, 1, 3))
        for layer in range(n_layers):
            means = [
                each[:, :, layer].mean((1, 2)) for each in (found.share[base], predicted, measured)
            ]
            gap = mean_interval(means[2] - means[1], found.texts)
            b, p, m = (float(each.mean()) for each in means)
            rows.append(
                {
                    "alpha": alpha,
                    "layer": layer,
                    "baseline": b,
                    "predicted": p,
                    "measured": m,
                    "low": gap.low,
                    "high": gap.high,
                    "texts": gap.clusters,
                    "error": float(error[layer]),
                    "direct": (p - b) / (m - b) if m != b else np.nan,
                }
            )
    return pd.DataFrame(rows)


LOCAL_COLUMNS = [
    "alpha",
    "layer",
    "k",
    "outside",
    "pooling",
    "baseline",
    "augmented",
    "difference",
    "low",
    "high",
    "texts",
]


def local_table(traces: xr.Dataset) -> pd.DataFrame:
    """Local dependency (methods: "Record definitions"): what the k nearest keys get of the
    attention outside the prefix.

    Two poolings: "pooled" is the paper's, the ratio of masses averaged over heads (of a layer, or
    of all); "per head" averages the heads' ratios. Within a head and a layer the bias cannot change
    the ratio: what changes there came from the layers before. A pooled ratio also moves because
    heads with much attention on the prefix lose more of the rest than others.

    Returns:
        Columns alpha, layer (number, or "all"), k, outside ("prefix", or "prefix and BOS": what is
        not counted), pooling, baseline, augmented, difference, low, high, texts. Means over texts
        and steps.
    """
    alphas, names, rows = [float(a) for a in traces["alpha"].to_numpy()], _texts(traces), []
    base = alphas.index(0.0)
    for without_bos, outside in ((False, "prefix"), (True, "prefix and BOS")):
        for k in NEAREST:
            near, rest = local_ratio_terms(traces, k, without_bos=without_bos)
            axes = ("alpha", "sample", "step")
            near, rest = (
                near.transpose(*axes, "layer", "head"),
                rest.transpose(*axes, "layer", "head"),
            )
            heads = (near / rest).to_numpy()
            layers = (near.mean("head") / rest.mean("head")).to_numpy()
            whole = (near.mean(("layer", "head")) / rest.mean(("layer", "head"))).to_numpy()
            by_layer: dict[tuple[str, int | str], np.ndarray]
            by_layer = {
                ("pooled", "all"): whole.mean(2),
                ("per head", "all"): np.nanmean(heads, axis=(2, 3, 4)),
            }
            for at in range(traces.sizes["layer"]):
                by_layer["pooled", at] = layers[:, :, :, at].mean(2)
                by_layer["per head", at] = np.nanmean(heads[:, :, :, at], axis=(2, 3))
            for i, alpha in enumerate(alphas):
                if alpha == 0:
                    continue
                for (pooling, layer), values in by_layer.items():
                    gap = mean_interval(values[i] - values[base], names, resamples=1000)
                    means = float(values[base].mean()), float(values[i].mean())
                    numbers = (*means, gap.mean, gap.low, gap.high, gap.clusters)
                    rows.append((alpha, layer, k, outside, pooling, *numbers))
    return pd.DataFrame(rows, columns=LOCAL_COLUMNS)


def trace_verdicts(
    traces: xr.Dataset,
    where: str,
    first_layer: int = 0,
    *,
    same_texts: bool = True,
    dtype: str = "float32",
) -> pd.DataFrame:
    """The claims on a real model's traces.

    Args:
        traces: From `by_alpha`.
        where: What they are, for the table ("smollm2-135m, the same texts").
        first_layer: The first augmented layer, where queries and keys are still the baseline's.
        same_texts: Every alpha read the same texts, so that the law is exact there.
        dtype: Precision of the model; in half precision attention is rounded, and the law holds to
            that.
    """
    thinned = thin(traces)
    found, first = curves(thinned, pooled=True), curves(thinned, pooled=False, layer=first_layer)
    no_sink = curves(thinned, pooled=True, sink=False)
    base, rows = found.base, []

    def add(claim: Claim, values: np.ndarray, expected: float | int, **marks: object) -> None:
        rows.append(
            verdict_row(claim, where, mean_interval(values, found.texts), expected, **marks)
        )

    add(FALLS, found.exponents()[base], 0)
    rows.append(
        verdict_row(MEAN_RATE, where, mean_rate(found.log_l, found.share[base], found.texts), -1)
    )
    kinds = {"": found, ", BOS left out": no_sink}
    ratios = {keys: each.odds[base] + each.log_rest for keys, each in kinds.items()}
    rows.append(rate_row(where, found.log_l, ratios, found.texts))
    add(TYPICAL, found.growth()[base], 0)
    local = local_table(traces)
    paper = local[
        (local["layer"] == "all") & (local["outside"] == "prefix") & (local["pooling"] == "pooled")
    ]
    for i, alpha in enumerate(found.alphas):
        if alpha == 0:
            continue
        if same_texts:
            rise = first.rise()[i]
            seen = np.isfinite(rise).all(
                0
            )  # heads that give the prefix nothing at all have no odds
            if seen.any():
                add(
                    replace(CORRECTION, margin=EXACT[dtype]),
                    rise[:, seen].mean(1),
                    alpha,
                    alpha=alpha,
                )
        add(DEEP, found.rise()[i], alpha, alpha=alpha)
        add(ODDS, found.corrected()[i], alpha, alpha=alpha)
        add(SLOWER, found.exponents()[i] - found.exponents()[base], 0, alpha=alpha)
        said = 1 / (1 + np.exp(found.log_rest[:, -1] - alpha * found.log_r[:, -1]))
        add(REACHED, found.share[i][:, -1] / said, 1, alpha=alpha)
        for row in paper[paper["alpha"] == alpha].to_dict("records"):
            change = Interval(
                row["difference"], row["low"], row["high"], row["texts"], row["texts"]
            )
            rows.append(verdict_row(LOCAL, where, change, 0, alpha=alpha, k=row["k"]))
    return _verdict_table(rows)
