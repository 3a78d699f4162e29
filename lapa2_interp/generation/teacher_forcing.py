"""A given text read as if it had been generated: the same traces, under another augmentation.

Arms that generate write different texts, so that both the augmentation and the text differ between
their traces. Here the text is fixed and only the augmentation changes. The text goes through the
network in chunks of queries behind a cache of fixed size,
every query with its own l; the trace equals that of cached decoding, token by token.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from lapa2_interp._util.values import Count, numbers_checked
from lapa2_interp.attention.cache import check_tokens, new_rows
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.attention.trace import TraceKind, concat_traces
from lapa2_interp.bias.augmentation import (
    Augmentation,
    AugmentationLike,
    active_augmentations,
    broadcast_to_rows,
)
from lapa2_interp.bias.layout import Layout, left_pad
from lapa2_interp.bias.places import head_pairs
from lapa2_interp.bias.recipes import resolve_recipes
from lapa2_interp.errors import LayoutError, TraceError
from lapa2_interp.models.card import prepacked_model
from lapa2_interp.models.facts import Model, check_rotary_side, decided_path, facts_of
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.models.span_attention import SCORES_AT_ONCE
from lapa2_interp.prefixes.soft_prefix import SoftPrefix

if TYPE_CHECKING:
    import xarray as xr

KEYS_AT_ONCE = 2**14
"""Keys of a batch, all rows together: two contexts of SmolLM2, or 60 texts of 256 tokens."""


@numbers_checked
@accepts_model_name
@torch.no_grad()
def teacher_forced(
    model: Model,
    layouts: Layout | Sequence[Layout],
    texts: Sequence[Sequence[int]] | Int[Tensor, "row token"],
    augmentation: Augmentation | Sequence[AugmentationLike] | str | None = None,
    *,
    prefixes: Sequence[SoftPrefix | None] | None = None,
    trace: TraceKind = "full",
    branch: str = "target",
    patterns: str | Sequence[tuple[int, int]] = (),
    chunk: Count | None = None,
    progress: tqdm | None = None,
) -> xr.Dataset:
    """The trace of texts that are given, row by row, after their prefixes and prompts.

    Example:
        >>> from lapa2_interp import Augmentation, Layout, load_model, teacher_forced
        >>> model = load_model("tiny-gpt2")
        >>> layout = Layout.of(model, "Very positive:", " The lake")
        >>> text = model.tokenizer(" is calm").input_ids
        >>> plain = teacher_forced(model, layout, [text])
        >>> steered = teacher_forced(model, layout, [text], Augmentation(alpha=1.0))
        >>> bool((steered["prefix"] > plain["prefix"]).mean() > 0.9)
        True

    Args:
        layouts: One per row, or one for all.
        texts: Token ids after the prompt, of any lengths >= 1. Step t is the query that would
            predict token t, so that as many steps are recorded as there are tokens, and the last
            token is not read.
        augmentation: One, or several as a tuple, for all rows; or a list with those of each row.
        prefixes: The rows' soft prefixes.
        trace: "pooled" or "full".
        branch: Name of the trace's only branch; its samples are the rows.
        patterns: Heads whose whole attention rows are kept: (layer, head) pairs, or a text such as
            "3.1,4.0-8".
        chunk: Queries read at once; changes nothing but memory and time. Under a pooled law it is
            1.
        progress: A bar to advance by the steps read.

    Raises:
        TraceError: No text, an empty one, trace "none", a head that the model does not have, or a
            chunk of nothing.
        LayoutError: A text exceeds the context or crosses a switch of the model's rotary factors,
            the model lacks a token, or the numbers of layouts,
            texts, prefixes and augmentations differ.
    """
    # Check the arguments, and give each text its layout, augmentations and prefix.
    try:
        rows = [[operator.index(token) for token in text] for text in texts]
    except TypeError as error:
        raise TraceError(
            f"texts are lists of token ids, one list for each text; found {str(texts)[:80]}"
        ) from error
    row_layouts = list(layouts) if isinstance(layouts, Sequence) else [layouts] * len(rows)
    if trace == "none" or not rows or not all(rows):
        given_texts = (
            "trace 'none'"
            if trace == "none"
            else f"{len(rows)} texts" + (", one empty" if rows else "")
        )
        raise TraceError(
            "a teacher-forced trace needs texts of at least one token, and trace pooled or full;"
            f" found {given_texts}"
        )
    if len(row_layouts) != len(rows):
        raise LayoutError(
            f"{len(rows)} texts for {len(row_layouts)} layouts; give one layout a text, or one for"
            " all"
        )
    augmentations = [
        resolve_recipes(row) for row in broadcast_to_rows(resolve_recipes(augmentation), len(rows))
    ]
    soft = [None] * len(rows) if prefixes is None else list(prefixes)
    if not len(augmentations) == len(soft) == len(rows):
        raise LayoutError(
            f"{len(augmentations)} augmentations and {len(soft)} prefixes for {len(rows)} texts;"
            " give one a text"
        )
    pairs = head_pairs("patterns", patterns, TraceError)
    # Every text must fit the context.
    for number, (row_layout, row) in enumerate(zip(row_layouts, rows, strict=True)):
        check_text_fits(model, row_layout, row, number)
    short = facts_of(model).short_context
    # Read batch by batch, and join the traces.
    parts = []
    for chosen in _split_texts(row_layouts, rows, model.cfg.n_ctx, short):
        batch = _Batch(
            [row_layouts[i] for i in chosen],
            [rows[i] for i in chosen],
            [augmentations[i] for i in chosen],
            [soft[i] for i in chosen],
        )
        with prepacked_model(model):
            parts.append(_read(model, batch, trace, branch, pairs, chunk, progress))
    if len(parts) == 1:
        return parts[0]
    return concat_traces(parts).assign_coords(sample=np.arange(len(rows)))


def check_text_fits(model: Model, layout: Layout, tokens: Sequence[int], number: int = 0) -> None:
    """Refuse a text that cannot be read after its layout.

    Raises:
        LayoutError: It exceeds the context, has a token without an embedding, or crosses a switch
            of the model's rotary factors.
    """
    check_tokens(model, tokens)
    if layout.n_live + len(tokens) - 1 > model.cfg.n_ctx:
        raise LayoutError(
            f"prefix, prompt and text have {layout.n_live + len(tokens) - 1} tokens, more than"
            f" the model's context of {model.cfg.n_ctx}; give at most"
            f" {model.cfg.n_ctx - layout.n_live + 1} tokens of text"
        )
    first = 0 if layout.soft else len(layout.ids)
    last = layout.n_live + len(tokens) - 1
    check_rotary_side(facts_of(model).short_context, first, last, f"text {number}")


def _split_texts(
    layouts: Sequence[Layout], rows: Sequence[Sequence[int]], n_ctx: int, short: int | None
) -> list[list[int]]:
    """Rows that are read together, in order: as many as fit the context side by side and the memory
    meant for a batch, on one side of a switch of rotary factors."""

    def room(i: int) -> int:
        return n_ctx if short is None or len(layouts[i].ids) > short else short

    batches: list[list[int]] = []
    for i in range(len(rows)):
        chosen = [*batches[-1], i] if batches else [i]
        width = _width([layouts[j] for j in chosen], [rows[j] for j in chosen])
        alike = room(chosen[0]) == room(i)
        if batches and alike and width <= room(i) and len(chosen) * width <= KEYS_AT_ONCE:
            batches[-1] = chosen
        else:
            batches.append([i])
    return batches


def _width(layouts: Sequence[Layout], rows: Sequence[Sequence[int]]) -> int:
    return (
        max(layout.soft for layout in layouts)
        + max(len(layout.ids) for layout in layouts)
        + max(map(len, rows))
        - 1
    )


class _Batch(NamedTuple):
    """Layouts, texts and augmentations of the rows of one batch."""

    layouts: list[Layout]
    rows: list[list[int]]
    augmentations: list[AugmentationLike]
    prefixes: list[SoftPrefix | None]


def _read(
    model: Model,
    batch: _Batch,
    trace: TraceKind,
    branch: str,
    patterns: Sequence[tuple[int, int]],
    chunk: int | None,
    progress: tqdm | None,
) -> xr.Dataset:
    padded, steps = left_pad(batch.layouts), [len(row) for row in batch.rows]
    width = _width(batch.layouts, batch.rows)
    active = [rule for row in batch.augmentations for rule in active_augmentations(row)]
    if any(rule.pooled for rule in active):
        chunk = 1  # a pooled law reads all queries of a pass; in decoding there is one
    scores_of_query = len(padded) * model.cfg.n_heads * width
    # Rows that end earlier are filled up with their last token, which no earlier query can see.
    even = [row[:-1] + row[-1:] * (max(steps) - len(row)) for row in batch.rows]
    tokens = torch.tensor(even, device=model.cfg.device, dtype=torch.long)
    recorder = Recorder(
        model.cfg.n_layers, model.cfg.n_heads, trace, patterns, facts_of(model).layer_types
    )
    recorder.begin(padded)
    cached_rows = new_rows(model, active)
    with (
        decided_path(model, tokens.shape[1], width) as fused,
        augmented(model, batch.augmentations, padded, recorder),
    ):
        # Without the matrix, a text is read at once.
        chunk = chunk or (tokens.shape[1] if fused else SCORES_AT_ONCE // scores_of_query) or 1
        cached_rows.prompt_pass(padded, batch.prefixes)
        cached_rows.expand(torch.arange(len(padded), device=tokens.device), capacity=width)
        for part in tokens.split(chunk, dim=1) if tokens.shape[1] else ():
            cached_rows.read_tokens(part)
            if progress is not None:
                progress.update(part.numel())
    return recorder.dataset(padded, (branch,), steps)
