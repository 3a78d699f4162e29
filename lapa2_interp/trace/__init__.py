"""Recorded attention: what the query of every step gives to each part of its context.

Axes
    branch        the method's model calls (base, one per prefix)
    sample        one continuation of one prompt
    step          t = 0 is the last prompt query, which predicts the first generated token
    layer, head   absent when the trace is pooled (their mean)
    prefix_token  position within the prefix

Per branch, sample, step, layer and head, the attention summed over (docs/methods.md, "Record
definitions")

    bos, prefix, prompt, generated    the four parts of the context; they add up to 1
    released_slice                    the slots the released code boosts (GPT-2: BOS and all but the last prefix token)
    nearest_2, _4, _6, _8             the last k live keys outside the prefix, the query's own included

and, averaged over layers and heads, `prefix_tokens`: the attention on each prefix token by itself.

Ratios are formed on reading (`local_ratio`), never stored. Every reduction is in float32 inside the
forward pass; a [query, key] matrix is kept only for the (layer, head) pairs asked for.
"""  # noqa: E501

from __future__ import annotations

from typing import Literal

TraceKind = Literal["none", "pooled", "full"]
NEAREST = (2, 4, 6, 8)
SUMS = (
    "prefix",
    "bos",
    "prompt",
    "generated",
    "released_slice",
    *(f"nearest_{k}" for k in NEAREST),
)
