"""The likelihood of texts after a prefix: the loss in training, and the measure in evaluation.

Texts are right-padded rows of token ids: [slots,] BOS, text. Every token of a text is scored, the
first one too, unless text starts with nothing (`bias.text_start`): nothing predicts it then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers.cache_utils import DynamicCache

from lapa2_interp.errors import LayoutError, ModelError
from lapa2_interp.models.blocks import check_no_checkpointing, dropped_cache
from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.models.configuration import short_context
from lapa2_interp.models.lone_pass import lone_pass

CHUNK = 256
"""Positions whose logits exist at the same time: [chunk, vocab] stays in the processor's cache."""


@dataclass(frozen=True)
class TextRows:
    """Right-padded texts.

    Attributes:
        ids: BOS, prefix ids if any, text, padding.
        live: True for all ids but padding.
        targets: True for the ids that are scored: those of the text that have an id in front.
    """

    ids: Int[Tensor, "row slot"]
    live: Bool[Tensor, "row slot"]
    targets: Bool[Tensor, "row slot"]

    @classmethod
    def of(
        cls, texts: Sequence[Sequence[int]], start: Sequence[int], device: Any = "cpu"
    ) -> TextRows:
        """Rows of texts after the same ids, `start`: BOS if text starts with it, and a hard prefix
        if there is one."""
        width = len(start) + max(map(len, texts))
        rows = [[*start, *text] for text in texts]
        ids = torch.tensor([row + row[:1] * (width - len(row)) for row in rows])
        stops = torch.tensor([len(start) + len(text) for text in texts])
        slot = torch.arange(width)
        live = slot < stops[:, None]
        return cls(
            ids.to(device), live.to(device), (live & (slot >= max(len(start), 1))).to(device)
        )


class _TokenNll(torch.autograd.Function):
    """-log P of targets from hidden states, chunk by chunk.

    The loss of a position depends on its own hidden state only. Its gradient is therefore computed
    together with its logits, and the logits of all positions never exist at the same time.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor
    ) -> Tensor:
        losses, gradients = [], []
        for part, wanted in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
            with torch.set_grad_enabled(ctx.needs_input_grad[0]):
                part = part.detach().requires_grad_(ctx.needs_input_grad[0])
                logits = head(part)  # position vocab
                loss = cross_entropy(
                    logits.to(torch.promote_types(logits.dtype, torch.float32)),
                    wanted,
                    reduction="none",
                )
            losses.append(loss.detach())
            if ctx.needs_input_grad[0]:
                gradients.extend(torch.autograd.grad(loss, part, torch.ones_like(loss)))
        if gradients:
            ctx.save_for_backward(torch.cat(gradients))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradients,) = ctx.saved_tensors
        return gradients * upstream[0][:, None].to(gradients.dtype), None, None


def _last_states(network: Any, **inputs: Any) -> Float[Tensor, "row slot d_model"]:
    """What the output layer of a network reads in a pass. It is given no position, so that the
    logits of all never exist.

    Raises:
        ModelError: The network has no output layer, or does not call it.
    """
    states: list[Tensor] = []

    def keep(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states.append(args[0])
        return (args[0][:, :0],)

    if (layer := network.get_output_embeddings()) is not None:
        handle = layer.register_forward_pre_hook(keep)
        try:
            network(**inputs)
        finally:
            handle.remove()
    if not states:
        raise ModelError(
            f"{type(network).__name__} computes its logits without an output layer, so the"
            " likelihood of a text cannot be read; give another causal model"
        )
    return states[-1]


def _output_head(network: Any) -> Callable[[Tensor], Tensor]:
    """The map from what the output layer reads to the logits. Some families scale the logits
    (Granite, Cohere, Falcon-H1) or cap them (Gemma 2)."""
    config = network.config.get_text_config()
    embeddings = network.get_output_embeddings()
    scale = 1.0
    for name, power in {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}.items():
        scale *= float(getattr(config, name, None) or 1.0) ** power
    cap = getattr(config, "final_logit_softcapping", None)

    def logits(hidden: Tensor) -> Tensor:
        logits = embeddings(hidden)
        logits = logits * scale if scale != 1 else logits
        return torch.tanh(logits / cap) * cap if cap else logits

    return logits


def check_has_embeddings(network: Any, ids: Tensor) -> None:
    """Refuse tokens that a network does not have.

    Raises:
        LayoutError: The model has no embedding for a token.
    """
    try:
        n = getattr(network.get_input_embeddings(), "num_embeddings", None)  # I-BERT's has none
    except NotImplementedError:  # CANINE hashes characters
        return
    if n is not None and (most := int(ids.max())) >= n:
        raise LayoutError(
            f"token {most} has no embedding: the model has {n} tokens, 0 to {n - 1}; its tokenizer"
            " must be the one it was trained with"
        )


def text_nll(
    network: Any,
    rows: TextRows,
    keys: Float[Tensor, "row layer kv_head slot d_head"] | None = None,
    values: Float[Tensor, "row layer kv_head slot d_head"] | None = None,
    shifted: bool = False,
) -> Float[Tensor, "row position"]:
    """-log P of every scored token in nats, 0 elsewhere; position i is the token at slot i + 1.

    Args:
        network: A transformers causal language model.
        keys, values: A soft prefix for every row, in the network's dtype.
        shifted: Positions start after the slots.

    Raises:
        LayoutError: The network has no embedding for a token; or the texts after soft prefixes
            are longer than passes with the rotary factors of short texts.
        ModelError: The network drops its cache, and so the soft prefix.
    """
    check_no_checkpointing(network)
    check_has_embeddings(network, rows.ids)
    short = short_context(network.config)
    if short is not None and keys is None and rows.ids.shape[1] - 1 > short:
        return _nll_across_rotary_change(network, rows, short)
    return _nll_of_one_pass(network, rows, keys, values, shifted)


def _nll_of_one_pass(
    network: Any,
    rows: TextRows,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    shifted: bool = False,
) -> Float[Tensor, "row position"]:
    """`text_nll` from one forward pass."""
    with lone_pass(network):
        return _nll_of_lone_pass(network, rows, keys, values, shifted)


def _nll_of_lone_pass(
    network: Any, rows: TextRows, keys: Tensor | None, values: Tensor | None, shifted: bool
) -> Float[Tensor, "row position"]:
    n_rows, width = rows.ids.shape
    slots, cache = 0, None
    if keys is not None and values is not None:
        slots, cache = keys.shape[3], DynamicCache()
        for layer in range(keys.shape[1]):
            cache.update(keys[:, layer], values[:, layer], layer)
    positions = torch.arange(width - 1, device=rows.ids.device) + (slots if shifted else 0)
    live = rows.live[:, :-1].long()
    hidden = _last_states(
        network,
        input_ids=rows.ids[:, :-1],
        attention_mask=torch.cat([live.new_ones(n_rows, slots), live], dim=1),
        position_ids=positions.expand(n_rows, -1),
        use_cache=cache is not None,
        **{cache_name(network): cache},
    )
    if cache is not None and not cache.get_seq_length() > slots:
        raise dropped_cache(network)
    scored = rows.targets[:, 1:]
    nll = _TokenNll.apply(hidden[scored], _output_head(network), rows.ids[:, 1:][scored])
    return torch.zeros_like(scored, dtype=nll.dtype).masked_scatter(scored, nll)


def _nll_across_rotary_change(
    network: Any, rows: TextRows, short: int
) -> Float[Tensor, "row position"]:
    """`text_nll` for a model whose rotary factors change beyond `short` tokens. Each token is
    scored as in a forward pass over the text before it, so longer texts need a second pass."""
    parts = rows.ids, rows.live, rows.targets
    near = TextRows(*(part[:, : short + 1] for part in parts))
    nll = pad(_nll_of_one_pass(network, near), (0, rows.ids.shape[1] - 1 - short))
    longer = rows.live[:, short + 1].nonzero()[:, 0]
    far = TextRows(*(part[longer] for part in parts))
    far.targets[:, : short + 1] = False
    return nll.index_add(0, longer, _nll_of_one_pass(network, far))
