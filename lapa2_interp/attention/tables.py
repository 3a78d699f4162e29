"""Tables read from a finished trace: means with intervals, decay fits, heads, local dependency."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from jaxtyping import Float

from lapa2_interp.attention.trace import NEAREST, sums_in
from lapa2_interp.bias.theory import DecayFit, fit_decay
from lapa2_interp.errors import TraceError, parameter, unknown_choice
from lapa2_interp.stats import bounds, mean_interval

if TYPE_CHECKING:
    import xarray as xr


def traced_layer_types(trace: xr.Dataset) -> list[str]:
    """The types of a trace's layers by the keys that they see: "full" first, then windows."""
    return (
        [str(layer_type) for layer_type in trace["layer_type"].to_numpy()]
        if "layer_type" in trace
        else ["full"]
    )


def select_layer_type(trace: xr.Dataset, name: str, layer_type: str | None = None) -> xr.DataArray:
    """One of the sums in the layers of one type, by default the first of `traced_layer_types`.

    A mean over layers with and without windows would follow no law.
    """
    values = trace[name]
    if layer_type is None:
        layer_type = traced_layer_types(trace)[0]
    if "layer_type" in values.dims:
        return values.sel(layer_type=layer_type, drop=True)
    if "layer" in values.dims and "type_of_layer" in trace.coords:
        return values.isel(layer=trace["type_of_layer"].to_numpy() == layer_type)
    return values


def pooled(
    trace: xr.Dataset, name: str, layer_type: str | None = None
) -> Float[np.ndarray, "branch sample step"]:
    """One of the sums, averaged over heads and the layers of a type (`select_layer_type`) where the
    trace has them; NaN after a sample's last step."""
    values = select_layer_type(trace, name, layer_type)
    return values.mean(
        [axis for axis in ("layer", "head") if axis in values.dims], skipna=False
    ).to_numpy()


def local_ratio(
    trace: xr.Dataset, k: int, *, without_bos: bool = False
) -> Float[np.ndarray, "branch sample step *head"]:
    """Local dependency: the share of the last k keys in the attention outside the prefix (paper,
    "Local Dependency").

    Args:
        k: 2, 4, 6 or 8.
        without_bos: False: nearest_k / (1 - prefix), as in the paper's text. True: nearest_k / (1 -
            prefix - bos), without the attention sink; the released code is close to this, because
            its slice from slot 0 counts BOS as prefix.

    Raises:
        TraceError: Another k.
    """
    near, rest = local_ratio_terms(trace, k, without_bos=without_bos)
    return (near / rest).to_numpy()


def local_ratio_terms(
    trace: xr.Dataset, k: int, *, without_bos: bool = False
) -> tuple[xr.DataArray, xr.DataArray]:
    """Numerator and denominator of `local_ratio`, for averages over heads before the division.

    Of a model with sliding windows: in the layers of the first type (`traced_layer_types`).
    """
    if k not in NEAREST:
        raise TraceError(f"the trace has the nearest {', '.join(map(str, NEAREST))} keys, not {k}")
    near = select_layer_type(trace, f"nearest_{k}")
    # A sum, since 1 - prefix - bos is only rounding in a head that attends almost only to BOS.
    rest = select_layer_type(trace, "prompt") + select_layer_type(trace, "generated")
    if not without_bos:
        on_bos = select_layer_type(trace, "bos").fillna(0) if "bos" in trace else 0
        return near, rest + on_bos
    # In a short context all keys outside the prefix are near, also BOS.
    return near.where(trace["l_kv"] - trace["l_pre"] - trace["n_bos"] >= k, rest), rest


def augmented_part(trace: xr.Dataset, branch: str | None = None) -> str:
    """The part that a branch's augmentation acts on: "prefix", or "prompt" on the raw model."""
    return (
        "prefix"
        if (trace["l_pre"].to_numpy()[_branch_index(trace, branch)] > 0).any()
        else "prompt"
    )


def branch_name(trace: xr.Dataset, branch: str | None = None) -> str:
    """The name of the branch to read: the given one, or the first with a prefix.

    Raises:
        TraceError: The trace has no such branch.
    """
    return str(trace["branch"].to_numpy()[_branch_index(trace, branch)])


def step_table(trace: xr.Dataset, texts: pd.DataFrame, branch: str | None = None) -> pd.DataFrame:
    """Attention on prefix, BOS (of texts that start with it), released slice and prompt against
    step, one row per arm, name and step.

    Args:
        trace: The trace of a run; its samples are the rows of `texts`.
        texts: With columns `prompt` (the bootstrap's cluster) and, if arms are compared, `arm`.
        branch: Name of the branch; by default the first with a prefix.

    Returns:
        Columns arm, layer_type, step, name, mean, low, high (95 %, over prompts; NaN for a
        single prompt), n, prompts. There is a curve for each layer type. Steps that any sample of
        the arm lacks are left out, so that all points of a curve have the same texts.

    Raises:
        TraceError: Another number of samples than the trace has; or no such branch.
    """
    at = _branch_index(trace, branch)
    rows = []
    for arm, members in _split_by_arm(trace, texts):
        for layer_type in traced_layer_types(trace):
            for name in ("prefix", "bos", "released_slice", "prompt"):
                if name not in trace:
                    continue
                curve = pooled(trace, name, layer_type)[at, members.index]
                curve = curve[:, ~np.isnan(curve).any(axis=0)]
                if name == "bos" and not curve.size:
                    continue
                low, high = bounds(curve, members["prompt"])
                columns = {
                    "step": trace["step"].to_numpy()[: curve.shape[1]],
                    "mean": curve.mean(axis=0),
                    "low": low,
                    "high": high,
                }
                named = {"arm": arm, "layer_type": layer_type, "name": name}
                counts = {"n": len(curve), "prompts": members["prompt"].nunique()}
                rows.append(pd.DataFrame({**named, **columns, **counts}))
    return pd.concat(rows, ignore_index=True)


def fit_table(steps: pd.DataFrame, name: str = "prefix") -> pd.DataFrame:
    """C / (t + D) fitted to each arm's mean curve: columns arm, C, D, R2; NaN if it does not fit or
    has under 3 steps. Layers with windows, where l stops growing, have no fit."""
    rows = []
    for arm in dict.fromkeys(steps["arm"]):
        curve = steps[
            (steps["name"] == name) & (steps["arm"] == arm) & (steps["layer_type"] == "full")
        ]
        fit = DecayFit(np.nan, np.nan, np.nan)
        if len(curve) >= 3:
            fit = fit_decay(curve["step"].to_numpy(), curve["mean"].to_numpy())
        rows.append({"arm": arm, "C": fit.c, "D": fit.d, "R2": fit.r2})
    return pd.DataFrame(rows, columns=["arm", "C", "D", "R2"])


def head_table(trace: xr.Dataset, texts: pd.DataFrame, branch: str | None = None) -> pd.DataFrame:
    """The sums of every head, averaged over each text's steps and then over texts: columns arm,
    layer, head, then the sums."""
    at = _branch_index(trace, branch)
    if "head" not in trace["prefix"].dims:
        raise TraceError(
            f"this trace is pooled over heads; record it with {parameter('trace', 'full')}"
        )
    frames = []
    for arm, members in _split_by_arm(trace, texts):
        part = trace[sums_in(trace)].isel(branch=at, sample=members.index.to_numpy())
        means = part.mean("step").mean("sample").to_dataframe().reset_index()
        frames.append(means.assign(arm=arm)[["arm", "layer", "head", *sums_in(trace)]])
    return pd.concat(frames, ignore_index=True)


def prefix_token_table(
    trace: xr.Dataset, texts: pd.DataFrame, branch: str | None = None
) -> pd.DataFrame:
    """Attention on BOS and on each prefix token, mean over steps, layers (of the first type) and
    heads.

    Returns:
        Columns arm, key ("BOS", "p1", ...; those that any sample of the arm has), mean, low, high
        (95 %, over prompts), n.
    """
    at = _branch_index(trace, branch)
    rows = []
    for arm, members in _split_by_arm(trace, texts):
        tokens = (
            select_layer_type(trace, "prefix_tokens")[at, members.index].mean("step").to_numpy()
        )
        masses = {f"p{i + 1}": tokens[:, i] for i in range(tokens.shape[1])}
        if "bos" in trace:
            with warnings.catch_warnings():  # a mean of nothing, of texts that start with nothing
                warnings.simplefilter("ignore", RuntimeWarning)
                on_bos = np.nanmean(pooled(trace, "bos")[at, members.index], axis=1)
            masses = {"BOS": on_bos} | masses
        for key, values in masses.items():
            has = ~np.isnan(values)
            if not has.any():
                continue
            interval = mean_interval(values[has], members["prompt"].to_numpy()[has])
            row = {
                "arm": arm,
                "key": key,
                "mean": interval.mean,
                "low": interval.low,
                "high": interval.high,
            }
            rows.append(row | {"n": interval.n})
    return pd.DataFrame(rows)


def _split_by_arm(trace: xr.Dataset, texts: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    if len(texts) != trace.sizes["sample"]:
        raise TraceError(
            f"{len(texts)} texts for a trace of {trace.sizes['sample']}; give both the same"
            " rows: trace.isel(sample=numbers) beside texts.iloc[numbers]"
        )
    texts = texts.reset_index(drop=True)
    for column, coordinate in (("prompt", "prompt_text"), ("attribute",) * 2, ("arm",) * 2):
        if column in texts and coordinate in trace.coords:
            sample_values = texts[column].astype(str).to_numpy()
            trace_values = np.broadcast_to(trace[coordinate].to_numpy().astype(str), len(texts))
            # Other values are not an error: arms may have been renamed.
            if (
                set(sample_values) == set(trace_values)
                and (differs := sample_values != trace_values).any()
            ):
                at = int(differs.argmax())
                raise TraceError(
                    f"texts and trace are in another order: {column} {sample_values[at]!r} and"
                    f" {trace_values[at]!r} at {at}; give texts.iloc[numbers] beside"
                    " trace.isel(sample=numbers)"
                )
    if "arm" not in texts:
        return [("run", texts)]
    return [(str(arm), members) for arm, members in texts.groupby("arm", sort=False)]


def _branch_index(trace: xr.Dataset, branch: str | None) -> int:
    names = [str(name) for name in trace["branch"].to_numpy()]
    if branch is None:
        with_prefix = np.flatnonzero((trace["l_pre"].to_numpy() > 0).any(axis=1))
        return int(with_prefix[0]) if len(with_prefix) else 0
    if branch not in names:
        raise TraceError(unknown_choice("branch", branch, names))
    return names.index(branch)
