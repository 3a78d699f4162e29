"""Recorded attention: the attention of every step's query to each part of its context.

Axes
    branch        the method's model calls (base, one per prefix)
    sample        one continuation of one prompt
    step          t = 0 is the last prompt query, which predicts the first generated token
    layer, head   absent when the trace is pooled (their mean)
    layer_type    "full", "sliding 512", ...: of models whose layers do not all see all keys. Pooled
                  sums are means over the layers of a type, and a full trace names the type of each
                  layer in `type_of_layer`; a layer without attention ("none") has NaN
    prefix_token  position within the prefix

Per branch, sample, step, layer and head a trace has the attention summed over parts of the context
(`SUMS`; docs/methods.md, "Record definitions"). The first four parts add up to 1; "bos" is missing, or NaN
beside samples that have it, where a text starts with nothing. Averaged over layers
(of a type) and heads it has `prefix_tokens`: the attention on each single prefix token. `in_sight`, of models with sliding windows: the number of tokens of the prefix, or of the prompt
on the raw model, that the query of a step sees in a layer or type of layers.

Ratios are computed by readers (`local_ratio`), never stored. Every reduction is in float32 inside the
forward pass; attention rows are stored only for the (layer, head) pairs in `patterns`.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


@dataclass(frozen=True)
class TracedTexts:
    """Texts of a batch or of a cell.

    Attributes:
        texts: One row per sample: prompt, attribute, sample, text (as it is scored),
            continuation, tokens, n_tokens, finish ("length", "end", or "empty" where no token was
            left to draw). Of chats of several turns one row per answer, with turn, message and
            context (`generation.turns`).
        trace: The recorded attention, sample i being row i; None without one.
    """

    texts: pd.DataFrame
    trace: xr.Dataset | None


TraceKind = Literal["none", "pooled", "full"]
NEAREST = (2, 4, 6, 8)
SUMS = {
    "prefix": "keys of the prefix",
    "bos": "keys of BOS, one or two",
    "prompt": "keys of the prompt",
    "generated": "keys of generated tokens, the query's own included",
    "released_slice": "the slots that the released code boosts",
    **{
        f"nearest_{k}": f"the last {k} live keys outside the prefix, the query's own included"
        for k in NEAREST
    },
}
"""Sums of a trace: name, and the keys whose attention they add up."""


def sums_in(trace: xr.Dataset) -> list[str]:
    """The sums that a trace has: all of `SUMS`, but for "bos" where no text starts with it."""
    return [name for name in SUMS if name in trace]


def join_traces(traces: Sequence[xr.Dataset], table: pd.DataFrame) -> xr.Dataset:
    """Join traces along `sample`, padded with NaN to the longest.

    Samples are numbered as the rows of the table.
    """
    joined = concat_traces(traces).assign_coords(sample=np.arange(len(table)))
    names = {"prompt": "prompt_text"} | {
        name: name for name in ("task", "attribute", "method", "arm", "cell")
    }
    coords = {
        name: ("sample", table[column].astype(str).to_numpy())
        for column, name in names.items()
        if column in table
    }
    if "turn" in table:
        coords["turn"] = ("sample", table["turn"].to_numpy())
    return joined.assign_coords(coords)


def concat_traces(traces: Sequence[xr.Dataset]) -> xr.Dataset:
    """Traces one after another along `sample`, padded with NaN to the longest."""
    import xarray as xr

    return xr.concat(
        traces, dim="sample", join="outer", data_vars="all", coords="different", compat="equals"
    )
