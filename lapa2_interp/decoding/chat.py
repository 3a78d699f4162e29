"""A chat continued, its span steered: `Layout.of_chat` says which tokens are the span.

A chat has no task, attribute or method, so it is no cell: what is made here is returned, and not
stored in a run. Draws, augmentations and traces are those of the decode loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from lapa2_interp.attention.cache import open_rows
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.augmentation import Rules, several
from lapa2_interp.cell import TOP_K
from lapa2_interp.decoding.sampling import draw, uniforms
from lapa2_interp.errors import LayoutError
from lapa2_interp.layout import Layout
from lapa2_interp.loaded import Model, model_card, packed_model
from lapa2_interp.progress import progress_bar
from lapa2_interp.trace.recorder import Recorder

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class ChatTexts:
    """What a chat was continued with.

    Attributes:
        tokens: By sample, the drawn tokens, an end token included.
        texts: The same, decoded.
        trace: The attention, as of a run: branch "chat", and `prefix` is the span. Pooled over
            layers and heads, or of every head.
    """

    tokens: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    trace: xr.Dataset


@torch.no_grad()
def continue_chat(
    model: Model,
    layout: Layout,
    augmentation: Rules = None,
    *,
    length: int = 64,
    samples: int = 1,
    seed: int = 1,
    top_k: int = TOP_K,
    eos: Literal["keep", "stop", "block"] = "stop",
    trace: Literal["pooled", "full"] = "pooled",
) -> ChatTexts:
    """Sample the next turn of a chat, with its span steered, and record where the attention goes.

    Args:
        layout: From `Layout.of_chat`; any other works, too.
        augmentation: What acts on the span: one, several, or none.
        length: Tokens of each sample, >= 1.
        samples: How many, read as one batch. Sample i is the same whatever their number.
        top_k: Tokens of largest probability that are kept; 1 is greedy. Temperature is 1.
        eos: What an end token does: it ends the text, is kept as any other, or is never drawn.
        trace: Means over layers and heads, or every head.

    Raises:
        LayoutError: The chat and its continuation exceed the model's context; or length, samples or
            top_k are below 1.
        AugmentationError: Layers or heads the model does not have.
    """
    if min(length, samples, top_k) < 1:
        raise LayoutError(
            f"length, samples and top_k must be at least 1, found {length}, {samples} and {top_k}"
        )
    if len(layout) + length > model.cfg.n_ctx:
        raise LayoutError(
            f"a chat of {len(layout)} tokens and {length} new ones exceed the context of"
            f" {model.cfg.n_ctx} of {model_card(model).name}; shorten the chat or the length"
        )
    rules = several(augmentation)
    ends = torch.tensor(model.tokenizer.convert_tokens_to_ids(list(model_card(model).end_tokens)))
    recorder = Recorder(model.cfg.n_layers, model.cfg.n_heads, trace)
    rows = open_rows(model, direct=any(rule.phase == "query" for rule in rules))
    text = " ".join(map(str, layout.ids))
    uniform = torch.from_numpy(
        np.stack([uniforms(seed, text, sample, length) for sample in range(samples)])
    )  # sample step
    expansion = torch.zeros(samples, dtype=torch.long)
    recorder.begin([layout], expansion)
    drawn: list[torch.Tensor] = []
    with packed_model(model), progress_bar(length * samples, "chat") as bar:
        with augmented(model, [rules], layout, recorder):
            logits = rows.prompt_pass([layout])[expansion, -1]  # sample vocab
        rows.expand(expansion.to(logits.device), capacity=len(layout) + length - 1)
        recorder.begin([layout] * samples)
        running = torch.ones(samples, dtype=torch.bool)
        with augmented(model, [rules] * samples, [layout] * samples, recorder):
            for step in range(length):
                weights = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)
                if eos == "block":
                    weights = weights.index_fill(1, ends.to(weights.device), -torch.inf)
                tokens = draw(weights, uniform[:, step].to(weights.device), top_k=top_k)
                drawn.append(tokens.cpu())
                bar.update(int(running.sum()))
                if eos == "stop":
                    running &= ~torch.isin(drawn[-1], ends)
                if step + 1 == length or not running.any():
                    break
                logits = rows.read(tokens[:, None])[:, -1]
    kept = [_up_to_end(row, ends.tolist(), eos) for row in torch.stack(drawn, 1).tolist()]
    return ChatTexts(
        tuple(map(tuple, kept)),
        tuple(model.tokenizer.decode(row, skip_special_tokens=True) for row in kept),
        recorder.dataset([layout] * samples, ("chat",), [len(row) for row in kept]),
    )


def _up_to_end(tokens: list[int], ends: Sequence[int], eos: str) -> list[int]:
    stops = [i + 1 for i, token in enumerate(tokens) if token in ends] if eos == "stop" else []
    return tokens[: stops[0]] if stops else tokens
