"""The propositions on traces of a model: curves, exponents, heads, predictions and verdicts.

A claim is tested where it is exact (`theory`): on log-odds. Written with r = l / l_pre,

    log(A'/(1-A')) + log(r - 1) = log(e_P/e_R) + alpha * log(r)

holds for any logits, so its slope against log r is alpha plus the growth rate of e_P / e_R. The
bounded-ratio form of Proposition 1 says that it does not grow (O(1/l)); Proposition 2, with uniform
logits, that the slope is alpha. Proposition 1 itself is about the mean of A over draws, which may
fall as 1/l while A of a typical text does not: both are measured. Slopes of log A' approach alpha -
1 only far out; such slopes are reported beside the closed form's own slope over the same lengths,
never judged.

Two lengths: r - 1 counts all keys of the softmax, BOS included (`l_kv`); the bias counts as the
paper does, without BOS. `propositions.claims` has the claims and their verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from lapa2_interp.attention.tables import local_ratio_terms
from lapa2_interp.attention.trace import NEAREST
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.theory import (
    fit_decay,
    fit_slopes,
    ratio_bound,
    shifted_share,
)
from lapa2_interp.errors import TraceError
from lapa2_interp.propositions.claims import (
    ATTENTION_FALLS,
    CLOSED_FORM,
    FIRST_LAYER_RISE,
    LOCAL_SHARE,
    LOG_ODDS_SLOPE,
    MEAN_DECAY,
    POOLED_RISE,
    ROUNDING_MARGINS,
    SLOWER_DECAY,
    TYPICAL_RATIO,
    Claim,
    mean_curve_slope,
    rate_row,
    verdict_row,
)
from lapa2_interp.stats import Interval, bounds, mean_interval

if TYPE_CHECKING:
    import xarray as xr


# Traces of real models have the axes alpha, sample, step, layer, head.


def thinned_steps(n_steps: int) -> Int[np.ndarray, " step"]:
    """At most 48 of the steps 0 to n_steps - 1, in equal ratios: slopes on log l give all scales
    equal weight, and traces stay small."""
    return np.unique(np.geomspace(1, n_steps, min(48, n_steps)).round().astype(np.int64)) - 1


def thin(traces: xr.Dataset) -> xr.Dataset:
    """The trace at the steps from which slopes are computed; a thinned trace is unchanged."""
    steps = traces["step"].to_numpy()
    return traces.isel(step=np.isin(steps, thinned_steps(int(steps[-1]) + 1)))


def stack_alphas(traces: Mapping[float, xr.Dataset]) -> xr.Dataset:
    """Traces of the same prompts under several alphas, stacked along a new axis `alpha`; only the
    first branch with a prefix.

    All texts are cut at the end of the shortest, so that every point of a curve is over the same
    texts.

    Raises:
        TraceError: No trace at alpha 0, traces of different size or prefixes, pooled ones, texts
            beyond a sliding window, a text without a prefix, or fewer than 3 common steps.
    """
    import xarray as xr

    if 0.0 not in traces:
        raise TraceError(
            f"the baseline is alpha 0, found only {', '.join(f'{a:g}' for a in traces)}; add 0"
        )
    # The branch with a prefix of each trace.
    parts = []
    for trace in traces.values():
        controlled = np.flatnonzero((trace["l_pre"].to_numpy() > 0).any(axis=1))
        if not len(controlled):
            raise TraceError(
                "the traces have no prefix (its length is 0), so there is no prefix attention to"
                " follow"
            )
        if "head" not in trace.dims:
            raise TraceError("these traces are pooled over heads; record them with trace full")
        if "in_sight" in trace and (trace["in_sight"] < trace["l_pre"]).any():
            raise TraceError(
                "the texts are longer than the sliding window of some layers, where the prefix is"
                " hidden, not only outweighed; give shorter texts"
            )
        parts.append(trace.isel(branch=int(controlled[0]), drop=True))
    # Only equal texts and prefixes can be stacked.
    first = parts[0]
    for trace in parts:
        if dict(trace.sizes) != dict(first.sizes) or not np.array_equal(
            trace["l_pre"], first["l_pre"]
        ):
            raise TraceError(
                "traces of different samples, steps or prefixes cannot be compared:"
                f" {dict(first.sizes)}, {dict(trace.sizes)}"
            )
    if not (first["l_pre"] > 0).all():
        raise TraceError("some texts have no prefix (its length is 0); leave them out")
    # Stack, and cut at the end of the shortest text.
    axis = pd.Index([float(alpha) for alpha in traces], name="alpha")
    stacked = xr.concat(parts, dim=axis, coords="minimal", compat="override", join="override")
    common = ~np.isnan(stacked["prefix"].to_numpy()).any(axis=(0, 1, 3, 4))
    if common.sum() < 3:
        raise TraceError(
            f"a slope needs at least 3 steps, found {common.sum()} that all texts have; ask for"
            " longer texts"
        )
    return stacked.isel(step=common)


@dataclass(frozen=True)
class PrefixCurves:
    """Attention on the prefix by alpha, text and step, of all heads pooled or of every head.

    Attributes:
        alphas: The alphas, 0 among them.
        share: A'.
        odds: log(A'/(1-A')), -inf where A' is 0.
        log_r: log(l/l_pre) with the paper's l.
        log_rest: log(r - 1) with all keys.
        log_l: log of the number of all keys.
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
    def baseline(self) -> int:
        """Index of the baseline among the alphas."""
        return self.alphas.index(0.0)

    def slope(
        self, x: Float[np.ndarray, "sample step"], y: Float[np.ndarray, "alpha sample step *head"]
    ) -> Float[np.ndarray, "alpha sample *head"]:
        """Slopes along the steps of every text (and head); NaN where a value is infinite."""
        return fit_slopes(x.reshape(len(x), *[1] * (y.ndim - 3), x.shape[1]), np.moveaxis(y, 2, -1))

    def with_head_axes(
        self, x: Float[np.ndarray, "sample step"]
    ) -> Float[np.ndarray, "sample step *one"]:
        """A view of the values with axes for heads if the curves have them."""
        return x.reshape(*x.shape, *[1] * (self.share.ndim - 3))

    def growth(self) -> Float[np.ndarray, "alpha sample *head"]:
        """Slope of log(e_P / e_R), the bias included, against log l."""
        return self.slope(self.log_l, self.odds + self.with_head_axes(self.log_rest))

    def corrected_slope(self) -> Float[np.ndarray, "alpha sample *head"]:
        """Slope of log-odds + log(r - 1) against log r: alpha in Proposition 2."""
        return self.slope(self.log_r, self.odds + self.with_head_axes(self.log_rest))

    def rise_slope(self) -> Float[np.ndarray, "alpha sample *head"]:
        """Slope of the log-odds' rise over the baseline against log r: alpha, if queries and keys
        are the baseline's."""
        with np.errstate(invalid="ignore"):
            return self.slope(self.log_r, self.odds - self.odds[[self.baseline]])

    def exponents(self) -> Float[np.ndarray, "alpha sample *head"]:
        """Slope of log A' against log l."""
        with np.errstate(divide="ignore"):
            return self.slope(self.log_l, np.log(self.share))


def prefix_curves(
    traces: xr.Dataset, *, pooled: bool, layer: int | None = None, sink: bool = True
) -> PrefixCurves:
    """The prefix attention of `stack_alphas` traces, pooled over layers and heads as the paper
    does, or head by head.

    In float64. The attention outside the prefix is summed from its parts: 1 - A' would lose it to
    rounding where the prefix has nearly all.

    Args:
        layer: Only this layer.
        sink: False leaves BOS out of attention and lengths, as if it were not a key.
    """
    parts = ["prompt", "generated", *(["bos"] if sink and "bos" in traces else [])]
    share, *others = (traces[name].to_numpy().astype(np.float64) for name in ("prefix", *parts))
    rest = np.sum(others, axis=0)
    if layer is not None:
        share, rest = (array[..., layer : layer + 1, :] for array in (share, rest))
    if pooled:
        share, rest = (array.mean((-2, -1)) for array in (share, rest))
    n = traces["l_pre"].to_numpy()[:, None]
    l_kv = traces["l_kv"].to_numpy().astype(np.float64)
    n_bos = traces["n_bos"].to_numpy()[:, None]
    l = l_kv if sink else l_kv - n_bos
    with np.errstate(divide="ignore"):
        odds = np.log(share) - np.log(rest)
    return PrefixCurves(
        alphas=tuple(float(alpha) for alpha in traces["alpha"].to_numpy()),
        share=share,
        odds=odds,
        log_r=np.log((l_kv - n_bos) / n),
        log_rest=np.log(l / n - 1),
        log_l=np.log(l),
        texts=_text_clusters(traces),
    )


def _text_clusters(traces: xr.Dataset) -> np.ndarray:
    names = traces["prompt_text"] if "prompt_text" in traces.coords else traces["sample"]
    return np.asarray(names.to_numpy())


def head_kinds(traces: xr.Dataset) -> pd.DataFrame:
    """Kinds of the baseline's heads by their attention: columns layer, head, kind.

    sink: at least half on BOS. local: at least half on the query's own token and the one before.
    prefix: at least half on the prefix. mixed: none of these.
    """
    base = traces.sel(alpha=0.0)
    parts = {"bos": "sink", "nearest_2": "local", "prefix": "prefix"}
    parts = {name: kind for name, kind in parts.items() if name in base}
    means = base[list(parts)].mean(("sample", "step")).to_dataframe().reset_index()
    kind = np.select([means[name] >= 0.5 for name in parts], list(parts.values()), "mixed")
    return means[["layer", "head"]].assign(kind=kind)


def head_decay_table(traces: xr.Dataset) -> pd.DataFrame:
    """The decay of prefix attention in every head.

    Returns:
        Columns alpha, layer, head, kind; growth (slope of log(e_P/e_R) on log l, the bias
        included), low, high; verdict (at alpha 0: on growth 0 within 0.05, as 1/l predicts);
        exponent (slope of log A'); sup_ratio (largest e_P/e_R of any text and step); tightness (A
        over the bound this supremum gives, at the last step, mean over texts); C, D and R2 of
        C/(t+D) on the baseline's mean curve. Slopes are computed on steps in equal ratios (`thin`),
        the other columns on all steps.
    """
    curves, all_steps = (
        prefix_curves(thin(traces), pooled=False),
        prefix_curves(traces, pooled=False),
    )
    growth, exponents = curves.growth(), curves.exponents()
    t = traces["step"].to_numpy().astype(np.float64)
    l = np.exp(all_steps.log_l)[:, :, None, None]
    n = traces["l_pre"].to_numpy()[:, None, None, None]
    kinds, frames = head_kinds(traces), []
    for i, alpha in enumerate(curves.alphas):
        low, high = bounds(growth[i], curves.texts)
        supremum = np.exp(all_steps.odds[i] + all_steps.with_head_axes(all_steps.log_rest)).max(
            (0, 1)
        )
        tight = (all_steps.share[i][:, -1] / ratio_bound(l[:, -1], n[:, 0], supremum)).mean(0)
        columns = {
            "growth": growth[i].mean(0), "low": low, "high": high, "exponent": exponents[i].mean(0),
            "sup_ratio": supremum, "tightness": tight,
        }  # fmt: skip
        table = kinds.assign(
            alpha=alpha, **{name: value.ravel() for name, value in columns.items()}
        )
        if alpha == 0:
            intervals = table[["growth", "low", "high"]].to_numpy()
            judged = [TYPICAL_RATIO.verdict(float(low), float(high)) for _, low, high in intervals]
            fits = [
                fit_decay(t, curve) for curve in all_steps.share[i].mean(0).reshape(len(t), -1).T
            ]
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


def decay_curve_table(traces: xr.Dataset) -> pd.DataFrame:
    """The curve of the paper's figures, A' averaged over layers and heads: columns alpha, step,
    l_kv (keys, BOS included), mean, low, high, texts, and C, D, R2 of C/(t+D) over all steps (NaN
    without a fit)."""
    curves = prefix_curves(traces, pooled=True)
    t = traces["step"].to_numpy()
    frames = []
    for i, alpha in enumerate(curves.alphas):
        low, high = bounds(curves.share[i], curves.texts)
        mean = curves.share[i].mean(0)
        fit = fit_decay(t.astype(np.float64), mean)
        columns = {
            "step": t,
            "l_kv": np.exp(curves.log_l).mean(0),
            "mean": mean,
            "low": low,
            "high": high,
        }
        counts = {"texts": len(pd.unique(curves.texts)), "C": fit.c, "D": fit.d, "R2": fit.r2}
        frames.append(pd.DataFrame({"alpha": alpha, **columns, **counts}))
    return pd.concat(frames, ignore_index=True)


def exponent_table(traces: xr.Dataset) -> pd.DataFrame:
    """Exponents of the pooled curve: columns alpha, quantity ("log-odds", "rise", "log A'"), mean,
    low, high, texts, predicted.

    Predicted: alpha on log-odds and for the rise; on log A' the slope of the closed form with the
    baseline's own e_P/e_R held fixed, over the same lengths.
    """
    curves = prefix_curves(thin(traces), pooled=True)
    rows = []
    for i, alpha in enumerate(curves.alphas):
        fixed = (
            (curves.odds[curves.baseline] + curves.log_rest).mean(1, keepdims=True)
            - curves.log_rest
            + alpha * curves.log_r
        )
        log_share = -np.log1p(np.exp(-fixed))
        measured = {
            "log-odds": (curves.corrected_slope()[i], alpha),
            "rise": (curves.rise_slope()[i], alpha),
            "log A'": (curves.exponents()[i], float(fit_slopes(curves.log_l, log_share).mean())),
        }
        for quantity, (values, predicted) in measured.items():
            one = mean_interval(values, curves.texts)
            rows.append(
                {"alpha": alpha, "quantity": quantity, **one.columns}
                | {"texts": one.clusters, "predicted": predicted}
            )
    return pd.DataFrame(rows)


def prediction_table(
    traces: xr.Dataset, augmentations: Mapping[float, Augmentation]
) -> pd.DataFrame:
    """A' predicted from the baseline by the exact law beside the measured A', layer by layer.

    The rest of the effect comes through queries and keys that the bias changed in lower layers;
    `direct` is the predicted share of the effect.

    Args:
        traces: With the same texts at every alpha (teacher-forced).
        augmentations: By alpha; the prediction uses their bias, layers, heads and phase.

    Returns:
        Columns alpha, layer, baseline, predicted, measured (means over texts, steps and heads),
        low, high (of measured - predicted, over texts), texts, error (largest difference of any
        head's log-odds, if the baseline is not 0), direct.

    Raises:
        TraceError: An augmentation acts on keys other than the prefix, whose mass the trace lacks.
    """
    curves = prefix_curves(thin(traces), pooled=False)
    steps, base = thin(traces)["step"].to_numpy(), curves.baseline
    n, l_kv = traces["l_pre"].to_numpy(), thin(traces)["l_kv"].to_numpy()
    n_layers, n_heads = curves.share.shape[-2:]
    rows = []
    for i, alpha in enumerate(curves.alphas):
        if alpha == 0:
            continue
        rule = augmentations[alpha]
        if rule.span != "prefix":
            raise TraceError(
                f"A' is predicted for augmentations of the exact prefix, not of span {rule.span!r}"
            )
        # The bias of every step and head, and the shares that it predicts.
        l = l_kv - (traces["n_bos"].to_numpy()[:, None] if rule.length_rule == "paper" else 0)
        bias = np.stack([rule.bias(l[j], int(prefix_length)) for j, prefix_length in enumerate(n)])
        bias = np.where((rule.phase == "decode") & (steps == 0), 0.0, bias)
        of_heads = bias[:, :, None, None] * rule.head_strengths(n_layers, n_heads)
        predicted, measured = shifted_share(curves.share[base], of_heads), curves.share[i]
        with np.errstate(invalid="ignore"):
            error = np.nanmax(np.abs(curves.odds[i] - curves.odds[base] - of_heads), axis=(0, 1, 3))
        # Means by layer, and the interval of what the prediction misses.
        for layer in range(n_layers):
            means = [
                shares[:, :, layer].mean((1, 2))
                for shares in (curves.share[base], predicted, measured)
            ]
            gap = mean_interval(means[2] - means[1], curves.texts)
            b, p, m = (float(mean_share.mean()) for mean_share in means)
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


LOCAL_TABLE_COLUMNS = [
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
    """Local dependency (methods: "Record definitions"): the share of the k nearest keys in the
    attention outside the prefix.

    Two poolings: "pooled" is the paper's, the ratio of masses averaged over heads (of a layer, or
    of all); "per head" averages the heads' ratios. Within a head and a layer the bias cannot change
    the ratio: a change there comes from earlier layers. A pooled ratio also moves because
    heads with much attention on the prefix lose more of the rest than others.

    Returns:
        Columns alpha, layer (number, or "all"), k, outside ("prefix", or "prefix and BOS": the keys
        that do not count), pooling, baseline, augmented, difference, low, high, texts. Means over
        texts and steps.
    """
    alphas, names, rows = [float(a) for a in traces["alpha"].to_numpy()], _text_clusters(traces), []
    base = alphas.index(0.0)
    for without_bos, outside in ((False, "prefix"), (True, "prefix and BOS")):
        for k in NEAREST:
            near, rest = (
                term.transpose("alpha", "sample", "step", "layer", "head")
                for term in local_ratio_terms(traces, k, without_bos=without_bos)
            )
            heads = (near / rest).to_numpy()
            layers = (near.mean("head") / rest.mean("head")).to_numpy()
            pooled = (near.mean(("layer", "head")) / rest.mean(("layer", "head"))).to_numpy()
            by_layer: dict[tuple[str, int | str], np.ndarray]
            by_layer = {
                ("pooled", "all"): pooled.mean(2),
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
    return pd.DataFrame(rows, columns=LOCAL_TABLE_COLUMNS)


def trace_verdicts(
    traces: xr.Dataset,
    where: str,
    first_layer: int = 0,
    *,
    same_texts: bool = True,
    dtype: str = "float32",
) -> pd.DataFrame:
    """Verdicts on the claims, on a model's traces.

    Args:
        traces: From `stack_alphas`.
        where: Their description for the table ("smollm2-135m, the same texts").
        first_layer: The first augmented layer, where queries and keys are still the baseline's.
        same_texts: True if every alpha has the same texts, so that the law is exact there.
        dtype: Precision of the model, which limits the precision of the law.
    """
    thinned = thin(traces)
    curves, first = (
        prefix_curves(thinned, pooled=True),
        prefix_curves(thinned, pooled=False, layer=first_layer),
    )
    no_sink = prefix_curves(thinned, pooled=True, sink=False)
    base, rows = curves.baseline, []

    def add(claim: Claim, values: np.ndarray, expected: float | int, **marks: object) -> None:
        rows.append(
            verdict_row(claim, where, mean_interval(values, curves.texts), expected, **marks)
        )

    # The baseline: attention falls, at the rate 1/l.
    add(ATTENTION_FALLS, curves.exponents()[base], 0)
    rows.append(
        verdict_row(
            MEAN_DECAY, where, mean_curve_slope(curves.log_l, curves.share[base], curves.texts), -1
        )
    )
    kinds = {"": curves, ", BOS left out": no_sink}
    ratios = {keys: odds_of.odds[base] + odds_of.log_rest for keys, odds_of in kinds.items()}
    rows.append(rate_row(where, curves.log_l, ratios, curves.texts))
    add(TYPICAL_RATIO, curves.growth()[base], 0)
    # Each alpha: the bias, the decay, and the share of near keys.
    local = local_table(traces)
    paper = local[
        (local["layer"] == "all") & (local["outside"] == "prefix") & (local["pooling"] == "pooled")
    ]
    for i, alpha in enumerate(curves.alphas):
        if alpha == 0:
            continue
        if same_texts:
            rise = first.rise_slope()[i]
            seen = np.isfinite(rise).all(
                0
            )  # heads that give the prefix nothing at all have no odds
            if seen.any():
                add(
                    replace(FIRST_LAYER_RISE, margin=ROUNDING_MARGINS[dtype]),
                    rise[:, seen].mean(1),
                    alpha,
                    alpha=alpha,
                )
        add(POOLED_RISE, curves.rise_slope()[i], alpha, alpha=alpha)
        add(LOG_ODDS_SLOPE, curves.corrected_slope()[i], alpha, alpha=alpha)
        add(SLOWER_DECAY, curves.exponents()[i] - curves.exponents()[base], 0, alpha=alpha)
        closed_form = 1 / (1 + np.exp(curves.log_rest[:, -1] - alpha * curves.log_r[:, -1]))
        add(CLOSED_FORM, curves.share[i][:, -1] / closed_form, 1, alpha=alpha)
        for row in paper[paper["alpha"] == alpha].to_dict("records"):
            change = Interval(
                row["difference"], row["low"], row["high"], row["texts"], row["texts"]
            )
            rows.append(verdict_row(LOCAL_SHARE, where, change, 0, alpha=alpha, k=row["k"]))
    return pd.DataFrame(rows)
