"""A given text read as if it had been generated: the same traces, under another augmentation.

Free-running arms write different texts, so what differs between their traces is the augmentation and the text. Here the text is
fixed and the augmentation alone changes. The text goes through the network in chunks of queries behind a cache of fixed size,
every query with its own l; the trace equals that of cached decoding, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from lapa2_interp.attention.cache import open_rows
from lapa2_interp.attention.hooked import Model, augmented
from lapa2_interp.augmentation import Augmentation
from lapa2_interp.errors import LayoutError, TraceError
from lapa2_interp.layout import Layout, left_pad
from lapa2_interp.prefixes import SoftPrefix
from lapa2_interp.trace import Recorder, TraceKind

if TYPE_CHECKING:
    import xarray as xr

SCORES_AT_ONCE = 2**24
"""Attention scores of one layer that a chunk may hold; 64 MiB each time they are copied in float32."""


@torch.no_grad()
def teacher_forced(
    model: Model,
    layouts: Layout | Sequence[Layout],
    texts: Sequence[Sequence[int]] | Int[Tensor, "row token"],
    augmentation: Augmentation | Sequence[Augmentation | None] | None = None,
    *,
    prefixes: Sequence[SoftPrefix | None] | None = None,
    trace: TraceKind = "full",
    branch: str = "target",
    chunk: int | None = None,
    progress: tqdm | None = None,
) -> xr.Dataset:
    """The trace of texts that are given, row by row, behind their prefixes and prompts.

    Args:
        layouts: One per row, or one for all.
        texts: Token ids after the prompt, of any lengths >= 1. Step t is the query that would predict token t, so that as many
            steps are recorded as there are tokens, and the last token is not read.
        augmentation: One, or one per row.
        prefixes: The rows' soft prefixes.
        trace: "pooled" or "full".
        branch: The name the trace gives to the rows, which are its samples.
        chunk: Queries read at once; changes nothing but memory and time.
        progress: A bar to advance by the steps read.

    Raises:
        TraceError: No text, an empty one, or trace "none".
        LayoutError: A text exceeds the context, or layouts, texts and augmentations are not as many.
    """
    rows = [[int(token) for token in text] for text in texts]
    given = list(layouts) if isinstance(layouts, Sequence) else [layouts] * len(rows)
    if trace == "none" or not rows or not all(rows):
        found = "trace 'none'" if trace == "none" else f"{len(rows)} texts" + (", one empty" if rows else "")
        raise TraceError(
            f"a teacher-forced trace needs texts of at least one token, and trace pooled or full; found {found}"
        )
    if len(given) != len(rows):
        raise LayoutError(f"{len(rows)} texts for {len(given)} layouts; give one layout a text, or one for all")
    padded, steps = left_pad(given), [len(row) for row in rows]
    width = len(padded[0]) + max(steps) - 1
    if width > model.cfg.n_ctx:
        raise LayoutError(
            f"prefix, prompt and text have {width} tokens, more than the model's context of {model.cfg.n_ctx}; give at most "
            f"{model.cfg.n_ctx - len(padded[0]) + 1} tokens of text"
        )
    chunk = chunk or max(1, SCORES_AT_ONCE // (len(rows) * model.cfg.n_heads * width))
    # Rows that end earlier go on with their last token, which nothing before it can see.
    tokens = torch.tensor([row[:-1] + row[-1:] * (max(steps) - len(row)) for row in rows], device=model.cfg.device)
    recorder = Recorder(model.cfg.n_layers, model.cfg.n_heads, trace)
    recorder.begin(padded)
    state = open_rows(model)
    with augmented(model, augmentation, padded, recorder):
        state.prompt_pass(padded, prefixes)
        state.expand(torch.arange(len(rows), device=tokens.device), capacity=width)
        for part in tokens.split(chunk, dim=1) if tokens.shape[1] else ():
            state.read(part)
            if progress is not None:
                progress.update(part.numel())
    return recorder.dataset(padded, (branch,), steps)
