"""The paper's claims as measurements with intervals, and a verdict on each: supported, not supported, or inconclusive.

A claim is tested where it is exact (`theory`): on log-odds. Written with r = l / l_pre,

    log(A'/(1-A')) + log(r - 1) = log(e_P/e_R) + alpha * log(r)

holds for any logits, so that its slope against log r is alpha plus how fast e_P / e_R grows. Proposition 1 says the growth is 0
(O(1/l): at most 0); Proposition 2 says the slope is alpha. Slopes of log A' itself approach alpha - 1 only far out; they are
reported beside the closed form's own slope over the same lengths, and never judged.

Two lengths: r - 1 counts all keys of the softmax, BOS included (`l_kv`); the bias counts as the paper does, without BOS.

A verdict compares a 95 % interval with a margin around what was claimed: inside it supports, outside it refutes, anything else is
inconclusive. Intervals come from resampling texts, because the steps of a text are not independent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from lapa2_interp.augmentation import Augmentation
from lapa2_interp.errors import TraceError
from lapa2_interp.stats import Interval, bounds, mean_interval
from lapa2_interp.synthetic import FAMILIES
from lapa2_interp.theory import (
    augmented_share,
    fit_decay,
    log_odds,
    logit_ratio,
    prefix_share,
    ratio_bound,
    shifted_share,
    slopes,
)
from lapa2_interp.trace import NEAREST

if TYPE_CHECKING:
    import xarray as xr

Verdict = Literal["supported", "not supported", "inconclusive"]
Kind = Literal["equal", "at most", "at least"]
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
SLOPE = 0.05
"""Margin on slopes: the regimes of alphas a quarter apart stay well apart."""
SHARE = 0.02
"""Margin on attention shares and on ratios of them."""
EXACT = 1e-3
"""Margin where only rounding may differ."""


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper and the number it says something about.

    Attributes:
        name: Short, for tables.
        source: Where the paper says it.
        quantity: What is measured.
        kind: How it relates to the expected number.
        margin: Differences that do not matter.
    """

    name: str
    source: str
    quantity: str
    kind: Kind
    margin: float


RATE = Claim("A decays as O(1/l)", "Prop. 1, bounded ratio", "slope of log(e_P/e_R), far half", "at most", SLOPE)
PROPORTIONAL = Claim("A is proportional to 1/l", "Prop. 1", "slope of log(e_P/e_R) on log l", "equal", SLOPE)
EXPECTED = Claim("E[A] = l_pre / l", "Prop. 1, Eq. 3", "mean of A * l / l_pre at the shortest l", "equal", 0.05)
CORRECTION = Claim("the bias adds alpha log(l/l_pre)", "Prop. 2, Eq. 8", "slope of the log-odds' rise", "equal", EXACT)
EXPONENT = Claim("A' follows l^(alpha-1)", "Prop. 2", "slope of log-odds + log(r-1) on log r", "equal", SLOPE)
REACHED = Claim("A' is what Eq. 8 says", "Prop. 2, Eq. 8", "mean of A' at the longest l", "equal", SHARE)
SLOWER = Claim("decay is slower with the bias", "Prop. 2", "slope of log A' minus slope of log A", "at least", 0.0)
FALLS = Claim("prefix attention falls", "Def. 1", "slope of log A on log l", "at most", 0.0)
DEEP = Claim("so it does, all layers pooled", "Sec. 4.1", "slope of the log-odds' rise", "equal", SLOPE)
LOCAL = Claim("nearest {k} keep their share", "Local Dependency", "change of nearest_{k}/(1-prefix)", "equal", SHARE)


def judge(found: Interval, expected: float | int, margin: float, kind: Kind = "equal") -> Verdict:
    """Whether an interval lies within the margin of what was expected, outside it, or neither; NaN bounds are neither."""
    low = -np.inf if kind == "at most" else expected - margin
    high = np.inf if kind == "at least" else expected + margin
    if low <= found.low and found.high <= high:
        return "supported"
    return "not supported" if found.high < low or found.low > high else "inconclusive"


def verdict_row(claim: Claim, where: str, found: Interval, expected: float | int, **marks: object) -> dict[str, object]:
    """One row of a verdict table."""
    return {
        "claim": claim.name.format(**marks),
        "source": claim.source,
        "where": where,
        **{name: value for name, value in marks.items() if name == "alpha"},
        "quantity": claim.quantity.format(**marks),
        "expected": {"equal": "", "at most": "<= ", "at least": ">= "}[claim.kind] + f"{expected:.3g}",
        "margin": claim.margin,
        "mean": found.mean,
        "low": found.low,
        "high": found.high,
        "texts": found.clusters,
        "verdict": judge(found, expected, claim.margin, claim.kind),
    }


def rate_row(
    where: str, x: Float[np.ndarray, "*#text step"], ratio: Float[np.ndarray, "text step"], texts: np.ndarray
) -> dict[str, object]:
    """The verdict on O(1/l), which says that log(e_P/e_R) stays bounded: about lengths beyond any that were measured.

    The slope over the far half of log l must be 0 or less. Where it is not, that refutes the claim unless the slope gets smaller
    with length: behind an attention sink the ratio rises for long and stays bounded all the same.
    """
    middle = np.asarray(x).reshape(-1, np.shape(x)[-1]).mean(0)
    near = middle <= (middle[0] + middle[-1]) / 2
    if min(near.sum(), (~near).sum()) < 3:
        unknown = Interval(np.nan, np.nan, np.nan, len(texts), len(pd.unique(texts)))
        return verdict_row(RATE, where, unknown, 0)
    halves = [slopes(x[..., part], ratio[..., part]) for part in (near, ~near)]
    far, change = mean_interval(halves[1], texts), mean_interval(halves[1] - halves[0], texts)
    row = verdict_row(RATE, where, far, 0)
    if row["verdict"] == "not supported" and (change.high < 0 or change.mean < -RATE.margin):
        row["verdict"] = "inconclusive"
    return row


# --- synthetic logits


def synthetic_shares(
    drawn: Mapping[str, Float[np.ndarray, "text prefix length"]],
    lengths: Int[np.ndarray, " length"],
    l_pre: int,
    alphas: Sequence[float] = ALPHAS,
) -> pd.DataFrame:
    """A' of every family, alpha and length: columns family, alpha, l, mean, low, high (95 %, texts resampled), texts, predicted
    (Eq. 8), ratio (mean e_P / e_R)."""
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
                        "family": name, "alpha": alpha, "l": int(l), "mean": found.mean, "low": found.low,
                        "high": found.high, "texts": found.n, "predicted": predicted[i], "ratio": ratio[i],
                    }
                )  # fmt: skip
    return pd.DataFrame(rows)


def synthetic_slopes(
    drawn: Mapping[str, Float[np.ndarray, "text prefix length"]],
    lengths: Int[np.ndarray, " length"],
    l_pre: int,
    alphas: Sequence[float] = ALPHAS,
) -> pd.DataFrame:
    """Slopes of every family and alpha: columns family, alpha, quantity ("log-odds", "rise", "log A'"), mean, low, high, texts,
    and `predicted`: alpha on log-odds, the closed form's own slope over these lengths on log A'."""
    r, rows = lengths / l_pre, []
    x = np.log(r)
    for name, odds in drawn.items():
        for alpha in alphas:
            biased = odds + alpha * x
            share = np.log(shifted_share(1 / (1 + np.exp(-odds)), alpha * x).mean(1))
            measured = {
                "log-odds": (slopes(x, biased + np.log(r - 1)).mean(1), alpha),
                "rise": (slopes(x, biased - odds).mean(1), alpha),
                "log A'": (slopes(x, share), float(slopes(x, np.log(augmented_share(lengths, l_pre, alpha))))),
            }
            for quantity, (values, predicted) in measured.items():
                found = mean_interval(values, np.arange(len(values)))
                rows.append(
                    {
                        "family": name, "alpha": alpha, "quantity": quantity, "mean": found.mean, "low": found.low,
                        "high": found.high, "texts": found.n, "predicted": predicted,
                    }
                )  # fmt: skip
    return pd.DataFrame(rows)


def synthetic_verdicts(
    drawn: Mapping[str, Float[np.ndarray, "text prefix length"]],
    lengths: Int[np.ndarray, " length"],
    l_pre: int,
    alphas: Sequence[float] = ALPHAS,
) -> pd.DataFrame:
    """The claims on every family, under the assumptions it keeps or breaks."""
    x, rows = np.log(lengths / l_pre), []
    for name, odds in drawn.items():
        texts, of = np.arange(len(odds)), odds + np.log(lengths / l_pre - 1)
        family = FAMILIES.get(name)
        kept = "" if family is None else ("identical" if family.identical else "not identical") + (
            "" if family.bounded else ", ratio unbounded"
        )  # fmt: skip
        where = f"synthetic: {name}" + (f" ({kept})" if kept else "")
        growth = mean_interval(slopes(x, of).mean(1), texts)
        share = 1 / (1 + np.exp(-odds))
        rows.append(rate_row(where, np.log(lengths), of.mean(1), texts))
        rows.append(verdict_row(PROPORTIONAL, where, growth, 0))
        mean_share = share[..., 0].mean(1) / float(prefix_share(float(lengths[0]), l_pre))
        rows.append(verdict_row(EXPECTED, where, mean_interval(mean_share, texts), 1))
        for alpha in (a for a in alphas if a > 0):
            biased = odds + alpha * x
            rise = mean_interval(slopes(x, biased - odds).mean(1), texts)
            rows.append(verdict_row(CORRECTION, where, rise, alpha, alpha=alpha))
            slope = mean_interval(slopes(x, biased + np.log(lengths / l_pre - 1)).mean(1), texts)
            rows.append(verdict_row(EXPONENT, where, slope, alpha, alpha=alpha))
            if alpha >= 1:  # the smaller ones are lost in rounding there
                reached = shifted_share(share[..., -1], alpha * x[-1]).mean(1)
                said = float(augmented_share(float(lengths[-1]), l_pre, alpha))
                rows.append(verdict_row(REACHED, where, mean_interval(reached, texts), said, alpha=alpha))
    return pd.DataFrame(rows)


# --- traces of real models: axes alpha, sample, step, layer, head


def thinned_steps(n_steps: int, n: int = 48) -> Int[np.ndarray, " step"]:
    """Steps 0 to n_steps - 1, at most n, in equal ratios: slopes on log l weigh all scales alike, and traces stay small."""
    return np.unique(np.geomspace(1, n_steps, min(n, n_steps)).round().astype(np.int64)) - 1


def by_alpha(traces: Mapping[float, xr.Dataset]) -> xr.Dataset:
    """Traces of the same prompts under several alphas as one, along a new axis `alpha`; the branch that is controlled.

    Raises:
        TraceError: No trace at alpha 0, traces of different size, pooled ones, no prefix, or fewer than 3 steps.
    """
    import xarray as xr

    if 0.0 not in traces:
        raise TraceError(f"the baseline is alpha 0, found only {', '.join(f'{a:g}' for a in traces)}; add 0")
    parts = []
    for each in traces.values():
        controlled = np.flatnonzero((each["l_pre"].to_numpy() > 0).any(axis=1))
        if not len(controlled):
            raise TraceError("the traces have no prefix (its length is 0), so there is no prefix attention to follow")
        if "head" not in each.dims:
            raise TraceError("these traces are pooled over heads; record them with trace full")
        parts.append(each.isel(branch=int(controlled[0]), drop=True))
    sizes = {tuple(each.sizes[name] for name in ("sample", "step")) for each in parts}
    if len(sizes) > 1:
        raise TraceError(f"the traces have different samples and steps: {sorted(sizes)}")
    if parts[0].sizes["step"] < 3:
        raise TraceError(f"a slope needs at least 3 steps, found {parts[0].sizes['step']}; ask for longer texts")
    return xr.concat(
        parts,
        dim=pd.Index([float(a) for a in traces], name="alpha"),
        coords="minimal",
        compat="override",
        join="override",
    )


@dataclass(frozen=True)
class Curves:
    """Attention on the prefix by alpha, text and step, of all heads pooled or of every head.

    Attributes:
        share: A'. `log_r`: log(l/l_pre) with the paper's l. `log_rest`: log(r - 1) with all keys.
        texts: What makes texts alike: their prompts, or their numbers.
    """

    alphas: tuple[float, ...]
    share: Float[np.ndarray, "alpha sample step *head"]
    log_r: Float[np.ndarray, "sample step"]
    log_rest: Float[np.ndarray, "sample step"]
    log_l: Float[np.ndarray, "sample step"]
    texts: np.ndarray

    def slope(
        self, x: Float[np.ndarray, "sample step"], y: Float[np.ndarray, "*alpha sample step *head"]
    ) -> Float[np.ndarray, "*alpha sample *head"]:
        """Slopes along the steps of every text, and head if there are heads."""
        axis = y.ndim - 3 if self.share.ndim == 5 else y.ndim - 1
        x = x.reshape(*x.shape[:1], *[1] * (self.share.ndim - 3), x.shape[1])
        return slopes(x, np.moveaxis(y, axis, -1))

    def _wide(self, x: Float[np.ndarray, "sample step"]) -> Float[np.ndarray, "sample step *one"]:
        return x.reshape(*x.shape, *[1] * (self.share.ndim - 3))

    def growth(self) -> Float[np.ndarray, "alpha sample *head"]:
        """Slope of log(e_P / e_R), the bias included, against log l."""
        return self.slope(self.log_l, log_odds(self.share) + self._wide(self.log_rest))

    def corrected(self) -> Float[np.ndarray, "alpha sample *head"]:
        """Slope of log-odds + log(r - 1) against log r: alpha in Proposition 2."""
        return self.slope(self.log_r, log_odds(self.share) + self._wide(self.log_rest))

    def rise(self) -> Float[np.ndarray, "alpha sample *head"]:
        """Slope of the log-odds' rise over the baseline against log r: alpha, where queries and keys are the baseline's."""
        odds = log_odds(self.share)
        return self.slope(self.log_r, odds - odds[[self.alphas.index(0.0)]])

    def exponents(self) -> Float[np.ndarray, "alpha sample *head"]:
        """Slope of log A' against log l."""
        with np.errstate(divide="ignore"):
            return self.slope(self.log_l, np.log(self.share))


def curves(traces: xr.Dataset, *, pooled: bool, layer: int | None = None) -> Curves:
    """The prefix attention of `by_alpha` traces, pooled over layers and heads as the paper does, or head by head.

    Texts that end early are cut where the shortest ends. Float64; r - 1 counts keys with BOS, l_pre / l without.
    """
    share = traces["prefix"].to_numpy().astype(np.float64)
    if layer is not None:
        share = share[..., layer : layer + 1, :]
    common = ~np.isnan(share).any(axis=(0, 1, 3, 4))
    share = share[:, :, common]
    n = traces["l_pre"].to_numpy()[:, None]
    l = traces["l_kv"].to_numpy()[:, common].astype(np.float64)
    names = traces["prompt_text"].to_numpy() if "prompt_text" in traces.coords else np.arange(len(l))
    return Curves(
        tuple(float(a) for a in traces["alpha"].to_numpy()),
        share.mean((-2, -1)) if pooled else share,
        np.log((l - traces["n_bos"].to_numpy()[:, None]) / n),
        np.log(l / n - 1),
        np.log(l),
        names,
    )


def head_kinds(traces: xr.Dataset) -> pd.DataFrame:
    """What the baseline's heads attend to: columns layer, head, kind.

    sink: at least half on BOS. local: at least half on the query's own token and the one before. prefix: at least half on the
    prefix. Else mixed.
    """
    base = traces.sel(alpha=0.0)
    means = base[["bos", "nearest_2", "prefix"]].mean(("sample", "step")).to_dataframe().reset_index()
    kind = np.select(
        [means["bos"] >= 0.5, means["nearest_2"] >= 0.5, means["prefix"] >= 0.5], ["sink", "local", "prefix"], "mixed"
    )
    return means[["layer", "head"]].assign(kind=kind)


def head_table(traces: xr.Dataset) -> pd.DataFrame:
    """Every head's decay.

    Returns:
        Columns alpha, layer, head, growth (slope of log(e_P/e_R) on log l, the bias included; at alpha 0 the predicted 1/l is 0),
        low, high, verdict (is it 0, to 0.05), exponent (slope of log A'), sup_ratio (largest e_P/e_R of any text and step),
        tightness (A over the bound this supremum gives, at the last step, mean over texts), kind; C, D and R2 of C/(t+D) on the
        baseline's mean curve.
    """
    found = curves(traces, pooled=False)
    growth, exponents = found.growth(), found.exponents()
    t = traces["step"].to_numpy()[: found.share.shape[2]].astype(np.float64)
    l = np.exp(found.log_l)[:, :, None, None]
    n = traces["l_pre"].to_numpy()[:, None, None, None]
    frames = []
    for i, alpha in enumerate(found.alphas):
        low, high = bounds(growth[i], found.texts)
        supremum = logit_ratio(found.share[i], l, n).max((0, 1))
        tight = (found.share[i][:, -1] / ratio_bound(l[:, -1], n[:, 0], supremum)).mean(0)
        columns = {
            "growth": growth[i].mean(0), "low": low, "high": high, "exponent": exponents[i].mean(0),
            "sup_ratio": supremum, "tightness": tight,
        }  # fmt: skip
        table = head_kinds(traces).assign(alpha=alpha, **{name: value.ravel() for name, value in columns.items()})
        count = len(pd.unique(found.texts))
        rows = table[["growth", "low", "high"]].to_numpy()
        intervals = [Interval(float(m), float(a), float(b), count, count) for m, a, b in rows]
        table["verdict"] = [judge(each, 0, SLOPE) for each in intervals]
        if alpha == 0:
            mean = found.share[i].mean(0)
            fits = [fit_decay(t, curve) for curve in mean.reshape(len(t), -1).T]
            table = table.assign(C=[f.c for f in fits], D=[f.d for f in fits], R2=[f.r2 for f in fits])
        frames.append(table)
    first = ["alpha", "layer", "head", "kind", "growth", "low", "high", "verdict"]
    whole = pd.concat(frames, ignore_index=True)
    return whole[[*first, *(name for name in whole if name not in first)]]


def pooled_table(traces: xr.Dataset) -> pd.DataFrame:
    """The curve of the paper's figures, A' averaged over layers and heads: columns alpha, step, l, mean, low, high, texts, and
    C, D, R2 of C/(t+D) (NaN where none fits)."""
    found = curves(traces, pooled=True)
    t = traces["step"].to_numpy()[: found.share.shape[2]]
    frames = []
    for i, alpha in enumerate(found.alphas):
        low, high = bounds(found.share[i], found.texts)
        mean = found.share[i].mean(0)
        fit = fit_decay(t.astype(np.float64), mean)
        columns = {"step": t, "l": np.exp(found.log_l).mean(0), "mean": mean, "low": low, "high": high}
        counts = {"texts": len(pd.unique(found.texts)), "C": fit.c, "D": fit.d, "R2": fit.r2}
        frames.append(pd.DataFrame({"alpha": alpha, **columns, **counts}))
    return pd.concat(frames, ignore_index=True)


def exponent_table(traces: xr.Dataset) -> pd.DataFrame:
    """Exponents of the pooled curve: columns alpha, quantity ("log-odds", "rise", "log A'"), mean, low, high, texts, predicted.

    Predicted: alpha on log-odds and for the rise; on log A' the slope of the closed form with the baseline's own e_P/e_R held
    fixed, over the same lengths.
    """
    found = curves(traces, pooled=True)
    base = found.share[found.alphas.index(0.0)]
    rows = []
    for i, alpha in enumerate(found.alphas):
        fixed = (log_odds(base) + found.log_rest).mean(1, keepdims=True) - found.log_rest + alpha * found.log_r
        log_share = -np.log1p(np.exp(-fixed))
        measured = {
            "log-odds": (found.corrected()[i], alpha),
            "rise": (found.rise()[i], alpha),
            "log A'": (found.exponents()[i], float(slopes(found.log_l, log_share).mean())),
        }
        for quantity, (values, predicted) in measured.items():
            one = mean_interval(values, found.texts)
            rows.append(
                {
                    "alpha": alpha, "quantity": quantity, "mean": one.mean, "low": one.low, "high": one.high,
                    "texts": one.clusters, "predicted": predicted,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def prediction_table(traces: xr.Dataset, augmentations: Mapping[float, Augmentation]) -> pd.DataFrame:
    """A' predicted from the baseline by the exact law against A' as measured, layer by layer.

    What the prediction misses came through queries and keys that the bias changed further down; `direct` is the share of the
    effect that it has.

    Args:
        traces: With the same texts at every alpha (teacher-forced).
        augmentations: By alpha; their `bias` is what is predicted with. With span "prefix" only.

    Returns:
        Columns alpha, layer, baseline, predicted, measured (means over texts, steps and heads), low, high (of measured -
        predicted, texts resampled), texts, error (largest difference of any head's log-odds), direct.
    """
    found = curves(traces, pooled=False)
    base = found.share[found.alphas.index(0.0)]
    l = np.exp(found.log_r) * traces["l_pre"].to_numpy()[:, None]
    rows = []
    for i, alpha in enumerate(found.alphas):
        if alpha == 0:
            continue
        bias = np.stack([augmentations[alpha].bias(l[j], int(n)) for j, n in enumerate(traces["l_pre"].to_numpy())])
        predicted, measured = shifted_share(base, bias[:, :, None, None]), found.share[i]
        error = np.abs(log_odds(measured) - log_odds(predicted)).max((0, 1, 3))
        for layer in range(base.shape[2]):
            means = [each[:, :, layer].mean((1, 2)) for each in (base, predicted, measured)]
            gap = mean_interval(means[2] - means[1], found.texts)
            b, p, m = (float(each.mean()) for each in means)
            rows.append(
                {
                    "alpha": alpha, "layer": layer, "baseline": b, "predicted": p, "measured": m, "low": gap.low,
                    "high": gap.high, "texts": gap.clusters, "error": float(error[layer]),
                    "direct": (p - b) / (m - b) if m != b else np.nan,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def local_table(traces: xr.Dataset) -> pd.DataFrame:
    """Local dependency (methods: "Record definitions"): what the k nearest keys get of the attention outside the prefix.

    Two poolings: "pooled" is the paper's, the ratio of masses averaged over heads (of a layer, or of all); "per head" averages
    the heads' ratios. Within a head and a layer the bias cannot change the ratio: what changes there came from the layers before.
    A pooled ratio also moves because heads with much attention on the prefix lose more of the rest than others.

    Returns:
        Columns alpha, layer (number, or "all"), k, outside ("prefix", or "prefix and BOS": what is not counted), pooling,
        baseline, augmented, difference, low, high, texts. Means over texts and steps.
    """
    names = traces["prompt_text"].to_numpy() if "prompt_text" in traces.coords else np.arange(traces.sizes["sample"])
    alphas = [float(a) for a in traces["alpha"].to_numpy()]
    alive = ~np.isnan(traces["prefix"].to_numpy()).any(axis=(0, 1, 3, 4))
    part = traces.isel(step=alive)
    outside = {"prefix": 1 - part["prefix"], "prefix and BOS": 1 - part["prefix"] - part["bos"]}
    rows = []
    for counted, rest in outside.items():
        for k in NEAREST:
            near = part[f"nearest_{k}"] if counted == "prefix" else part[f"nearest_{k}"] - _bos_among(part, k)
            with np.errstate(divide="ignore", invalid="ignore"):
                heads = (near / rest).to_numpy()
                layers = (near.mean("head") / rest.mean("head")).to_numpy()
                whole = (near.mean(("layer", "head")) / rest.mean(("layer", "head"))).to_numpy()
            by_layer: dict[tuple[str, int | str], np.ndarray]
            by_layer = {("pooled", "all"): whole.mean(2), ("per head", "all"): np.nanmean(heads, axis=(2, 3, 4))}
            for at in range(traces.sizes["layer"]):
                by_layer["pooled", at] = layers[:, :, :, at].mean(2)
                by_layer["per head", at] = np.nanmean(heads[:, :, :, at], axis=(2, 3))
            base = alphas.index(0.0)
            for i, alpha in enumerate(alphas):
                if alpha == 0:
                    continue
                for (pooling, layer), values in by_layer.items():
                    gap = mean_interval(values[i] - values[base], names, resamples=1000)
                    rows.append(
                        {
                            "alpha": alpha, "layer": layer, "k": k, "outside": counted, "pooling": pooling,
                            "baseline": float(values[base].mean()), "augmented": float(values[i].mean()),
                            "difference": gap.mean, "low": gap.low, "high": gap.high, "texts": gap.clusters,
                        }
                    )  # fmt: skip
    return pd.DataFrame(rows)


def _bos_among(traces: xr.Dataset, k: int) -> xr.DataArray:
    """BOS's mass where BOS is one of the k nearest keys outside the prefix: texts so short that all of them count."""
    near = traces["l_kv"] - traces["l_pre"]
    return traces["bos"].where(near <= k, 0.0)


def trace_verdicts(traces: xr.Dataset, where: str, first_layer: int = 0, *, same_texts: bool = True) -> pd.DataFrame:
    """The claims on a real model's traces.

    Args:
        traces: From `by_alpha`.
        where: What they are, for the table ("smollm2-135m, teacher-forced").
        first_layer: The first augmented layer, where queries and keys are still the baseline's.
        same_texts: Every alpha read the same texts, so that the law is exact there.
    """
    found, first = curves(traces, pooled=True), curves(traces, pooled=False, layer=first_layer)
    base, rows = found.alphas.index(0.0), []

    def add(claim: Claim, values: np.ndarray, expected: float | int, **marks: object) -> None:
        rows.append(verdict_row(claim, where, mean_interval(values, found.texts), expected, **marks))

    add(FALLS, found.exponents()[base], 0)
    rows.append(rate_row(where, found.log_l, log_odds(found.share[base]) + found.log_rest, found.texts))
    add(PROPORTIONAL, found.growth()[base], 0)
    local = local_table(traces)
    paper = local[(local["layer"] == "all") & (local["outside"] == "prefix") & (local["pooling"] == "pooled")]
    for i, alpha in enumerate(found.alphas):
        if alpha == 0:
            continue
        if same_texts:
            add(CORRECTION, first.rise()[i].mean((1, 2)), alpha, alpha=alpha)
        add(DEEP, found.rise()[i], alpha, alpha=alpha)
        add(EXPONENT, found.corrected()[i], alpha, alpha=alpha)
        add(SLOWER, found.exponents()[i] - found.exponents()[base], 0, alpha=alpha)
        said = 1 / (1 + np.exp(found.log_rest[:, -1] - alpha * found.log_r[:, -1]))
        add(REACHED, found.share[i][:, -1], float(said.mean()), alpha=alpha)
        for row in paper[paper["alpha"] == alpha].to_dict("records"):
            change = Interval(row["difference"], row["low"], row["high"], row["texts"], row["texts"])
            rows.append(verdict_row(LOCAL, where, change, 0, alpha=alpha, k=row["k"]))
    return pd.DataFrame(rows)
