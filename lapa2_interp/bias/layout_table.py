"""The table of `lapa2 layout`: the keys of a branch, and l and bias at every step."""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from lapa2_interp._util.values import numbers_checked
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.layer_types import FULL_ATTENTION, LayerType
from lapa2_interp.bias.layout import Layout

BLOCKED = "blocked"
"""A bias of -infinity in the table."""


def _bias_to_json(b: float) -> float | str | None:
    return None if math.isnan(b) else BLOCKED if b == -math.inf else float(b)


@numbers_checked
def explain_layout(
    layout: Layout,
    augmentation: Augmentation | None,
    steps: Annotated[int, Field(ge=1, le=1_000_000)],
    layer_type: LayerType = FULL_ATTENTION,
) -> dict[str, Any]:
    """The content of `lapa2 layout` as plain values: every key with its part, the spans, and l and
    bias of every step in layers of one type.

    Step 0 is the last prompt query. Under the phases after_span and everywhere the augmented
    queries before it count down from -1. A bias that depends on the scores is None, a bias of
    -infinity is `BLOCKED`.

    Args:
        steps: Generation steps; a million are more than any context has positions.
    """
    # The spans, and the first query at which something is added.
    spans = {
        "bos": (layout.bos,) if layout.n_bos else (),
        "released": layout.spans("released"),
        "prefix": (layout.prefix,) if layout.l_pre else (),
        "prompt": (layout.before, layout.prompt) if layout.n_before else (layout.prompt,),
    }
    spans["boosted"] = layout.spans(augmentation.span) if augmentation else ()
    inside = {
        name: {slot for span in parts for slot in range(*span)} for name, parts in spans.items()
    }
    last = len(layout) - 1
    first = last
    if augmentation is not None and augmentation.phase in ("after_span", "everywhere"):
        early = np.arange(layout.bos.start, last)
        first = min([*early[layout.acts(augmentation, early, layer_type)].tolist(), last])
    queries = np.arange(first, last + steps)
    lengths = layout.lengths(
        queries, augmentation.length_rule if augmentation else "paper", layer_type
    )
    if augmentation is None:
        bias = np.zeros(len(queries))
    elif augmentation.reads_scores or augmentation.multiplies:
        bias = np.where(layout.acts(augmentation, queries, layer_type), np.nan, 0.0)
    else:
        bias = layout.bias(augmentation, queries, layer_type)
    # The bias of every step, and the keys by slot.
    keys = [(None, f"soft {i + 1}") for i in range(layout.soft)] + list(
        zip(layout.ids, layout.tokens, strict=True)
    )
    return {
        "l_pre": layout.l_pre,
        "l_pro": layout.l_pro,
        "n_bos": layout.n_bos,
        "n": layout.n(augmentation.span) if augmentation else layout.controlled.size,
        "merged": layout.merged,
        "spans": {name: [list(span) for span in parts] for name, parts in spans.items()},
        "tokens": [
            {
                "slot": slot,
                "id": number,
                "token": token,
                "part": next(name for name in ("bos", "prefix", "prompt") if slot in inside[name]),
                "boosted": slot in inside["boosted"],
            }
            for slot, (number, token) in enumerate(keys)
        ],
        "augmentation": augmentation and augmentation.model_dump(mode="json"),
        "layer_type": str(layer_type),
        "steps": [
            {"step": int(query) - last, "l": int(l), "bias": _bias_to_json(b)}
            for query, l, b in zip(queries, lengths, bias, strict=True)
        ],
    }
