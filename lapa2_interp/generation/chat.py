"""Chats continued, their spans steered: `Layout.of_chat` says which tokens are the span.

A chat has no task, attribute or method, so it is no cell: what is made here is returned, and not
stored in a run. Draws, augmentations and traces are those of the decode loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from lapa2_interp._util.errors import LayoutError
from lapa2_interp._util.progress import progress_bar
from lapa2_interp.attention.cache import new_rows
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.bias.augmentation import AugmentationLike, active_augmentations
from lapa2_interp.bias.layout import Layout, left_pad
from lapa2_interp.bias.recipes import resolve_recipes
from lapa2_interp.bias.tokens import decode_tokens
from lapa2_interp.generation.loop import Ending, check_numbers
from lapa2_interp.generation.sampling import NOTHING, draw, uniforms
from lapa2_interp.generation.settings import CellSettings
from lapa2_interp.models.card import (
    Model,
    check_rotary_side,
    layer_types,
    model_card,
    model_short_context,
    prepacked_model,
)
from lapa2_interp.models.load import accepts_model_name

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class ChatTexts:
    """Continuations of one chat.

    Attributes:
        tokens: By sample, the drawn tokens, an end token included.
        texts: The same, decoded.
        trace: The attention, as of a run: branch "chat", and `prefix` is the span. Pooled over
            layers and heads, or of every head.
    """

    tokens: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    trace: xr.Dataset


@accepts_model_name
@torch.no_grad()
def continue_chats(
    model: Model,
    layouts: Sequence[Layout],
    augmentation: AugmentationLike | str = None,
    *,
    length: int = 64,
    samples: int = 1,
    seed: int = 1,
    top_k: int = CellSettings.model_fields["top_k"].default,
    eos: Literal["keep", "stop", "block"] = "stop",
    trace: Literal["pooled", "full"] = "pooled",
) -> list[ChatTexts]:
    """Sample the next turns of chats, with their spans steered, and record where the attention
    goes. All are read as one batch.

    Args:
        layouts: From `Layout.of_chat`, one per chat; any others work, too.
        augmentation: What acts on the spans: one, several, or none.
        length: Tokens of each sample, >= 1.
        samples: How many of each chat. Sample i is the same whatever their number.
        top_k: Tokens of largest probability that are kept; 1 is greedy. Temperature is 1.
        eos: What an end token does: it ends the text, is kept as any other, or is never drawn.
        trace: Means over layers and heads, or every head.

    Returns:
        What was made of each chat.

    Raises:
        LayoutError: No chat; a chat and its continuation exceed the model's context, or lie on
            both sides of a switch of its rotary factors; or length, samples or top_k are below 1.
        AugmentationError: Layers or heads the model does not have.
        ModelError: The model's logits are not numbers.
    """
    if min(length, samples, top_k) < 1:
        raise LayoutError(
            f"length, samples and top_k must be at least 1, found {length}, {samples} and {top_k}"
        )
    if not layouts:
        raise LayoutError("no chat to continue; give at least one layout")
    longest = max(map(len, layouts))
    if longest + length > model.cfg.n_ctx:
        raise LayoutError(
            f"a chat of {longest} tokens and {length} new ones exceed the context of"
            f" {model.cfg.n_ctx} of {model_card(model).name}; shorten the chat or the length"
        )
    shortest = min(len(each.ids) for each in layouts)
    what = "chats that are read together, with their continuations"
    check_rotary_side(model_short_context(model), shortest, longest + length - 1, what)
    augmentations = active_augmentations(resolve_recipes(augmentation))
    ends = torch.tensor(model_card(model).end_ids, dtype=torch.long)
    recorder = Recorder(
        model.cfg.n_layers, model.cfg.n_heads, trace, layer_types=layer_types(model)
    )
    rows = new_rows(
        model, reread_last=any(each.phase == "predicting_only" for each in augmentations)
    )
    padded = left_pad(layouts)
    of_rows = [layout for layout in padded for _ in range(samples)]
    uniform = torch.from_numpy(
        np.stack(
            [
                uniforms(seed, " ".join(map(str, layout.ids)), sample, length)
                for layout in layouts
                for sample in range(samples)
            ]
        )
    )  # row step; row = chat x sample
    expansion = torch.arange(len(padded)).repeat_interleave(samples)
    recorder.begin(padded, expansion)
    ending = Ending.at([length] * len(of_rows))
    drawn: list[torch.Tensor] = []
    with prepacked_model(model), progress_bar(length * len(of_rows), "chat") as bar:
        with augmented(model, [augmentations] * len(padded), padded, recorder):
            logits = rows.prompt_pass(padded)[expansion, -1]  # row vocab
        rows.expand(expansion.to(logits.device), capacity=len(padded[0]) + length - 1)
        recorder.begin(of_rows)
        with augmented(model, [augmentations] * len(of_rows), of_rows, recorder):
            for step in range(length):
                weights = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)
                if eos == "block":
                    weights = weights.index_fill(1, ends.to(weights.device), -torch.inf)
                tokens = draw(weights, uniform[:, step].to(weights.device), top_k=top_k)
                drawn.append(tokens.cpu())
                if (drawn[-1] == NOTHING).any():
                    check_numbers(model, logits, step)
                bar.update(ending.running(step))
                if eos == "stop":
                    ending.stop(torch.isin(drawn[-1], ends), step + 1, "end")
                if not ending.running(step + 1):
                    break
                logits = rows.read_tokens(tokens[:, None])[:, -1]
    rows_of_tokens = torch.stack(drawn, 1).tolist()
    kept = [row[:n] for row, n in zip(rows_of_tokens, ending.n_tokens, strict=True)]
    whole = recorder.dataset(of_rows, ("chat",), ending.n_tokens)
    chats = []
    for number, layout in enumerate(layouts):
        mine = slice(number * samples, (number + 1) * samples)
        own = kept[mine]
        its = {
            "sample": mine,
            "step": slice(max(map(len, own))),
            "prefix_token": slice(layout.l_pre),
        }
        chats.append(
            ChatTexts(
                tuple(map(tuple, own)),
                tuple(_text(model, layout, row) for row in own),
                whole.isel(its).assign_coords(sample=range(samples)),
            )
        )
    return chats


def _text(model: Model, layout: Layout, tokens: Sequence[int]) -> str:
    """Text of tokens after a chat, without the tokens that only mark."""
    before, marks = list(layout.ids), {*model.tokenizer.all_special_ids}
    whole = decode_tokens(
        model.tokenizer, [*before, *(each for each in tokens if each not in marks)]
    )
    return whole[len(decode_tokens(model.tokenizer, before)) :]
