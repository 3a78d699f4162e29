"""Attention scores and patterns of a plain transformers model, through its attention interface.

transformers lets a model compute attention by any registered function. Ours is that of its "eager"
models, with two places in the middle where a visitor may edit the scores and read the pattern: what
TransformerLens calls hook_attn_scores and hook_pattern. The visitors of a pass travel with it as an
argument, so that nothing is shared between models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from lapa2_interp._util.errors import DeadHookError
from lapa2_interp.models.blocks import NAME, OUTSIDE, Pass, opened


@dataclass
class Visitor:
    """What is done to the attention of every layer of a pass.

    Attributes:
        edit: Takes layer, scores [row head query key] (masked, before softmax) and the slot of the
            first query; returns the scores.
        read: Takes layer, pattern [row head query key] and the slot of the first query.
        out: Takes layer, the heads' outputs [row query head d_head] and the slot of the first
            query; returns the outputs.
        first: The slot of the pass's first query.
        watch: What is known of that pass.
    """

    edit: Callable[[int, Tensor, int], Tensor] | None = None
    read: Callable[[int, Tensor, int], None] | None = None
    out: Callable[[int, Tensor, int], Tensor] | None = None
    first: int = 0
    watch: Pass = field(default_factory=Pass)


@contextmanager
def visited(
    network: Any,
    visitor: Visitor,
    begin: Callable[[dict[str, Any]], int],
    layers: Collection[int] = (),
) -> Iterator[None]:
    """Let a visitor see every pass of a transformers model inside the block.

    Blocks may be nested and closed in any order: each visitor sees what those before it have left.

    Args:
        begin: Called before a pass with its arguments by name, to which it may add; returns the
            slot of its first query.
        layers: Those that every pass must show to the visitor.

    Raises:
        DeadHookError: The architecture does not use the attention interface, or a pass has not
            shown a layer.
        ModelError: As `blocks.opened`.
    """
    if not network._can_set_attn_implementation():
        raise DeadHookError(
            f"{type(network).__name__} computes its attention without transformers' attention"
            " interface, so it cannot be augmented there; TransformerLens' hooks may reach it"
            " (TransformerBridge, which checks)"
        )

    def before(given: dict[str, Any]) -> None:
        visitor.first = begin(given)
        given[NAME] = (*given.get(NAME, ()), visitor)
        given.update(_of_every_query(network, given))

    with opened(network, before, visitor.watch, layers, attention=True):
        yield


def _of_every_query(network: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments with which every layer of a pass has every query.

    Where layers share keys (Gemma 4), those behind the last keys leave out the queries whose logits
    are not asked for, if these are given as a number, and not if they are given as indices.
    """
    keep = kwargs.get("logits_to_keep")
    if (
        not isinstance(keep, int)
        or not keep
        or not hasattr(network.config.get_text_config(), "kv_sharing_modes")
    ):
        return {}
    read = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    return {"logits_to_keep": torch.arange(max(read.shape[1] - keep, 0), read.shape[1])}


def attend(
    module: Any,
    query: Float[Tensor, "row head query d_head"],
    key: Float[Tensor, "row kv_head key d_head"],
    value: Float[Tensor, "row kv_head key d_head"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Float[Tensor, " head"] | None = None,
    lapa2: tuple[Visitor, ...] = (),
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Attention with visitors between scores and softmax.

    Args:
        s_aux: Scores of a learned sink, which takes a share beside the keys (gpt-oss).

    Returns:
        The heads' outputs [row query head d_head], and the pattern, without a sink's share.

    Raises:
        DeadHookError: The model asks for what this function does not compute, or no pass of the
            block's model is running.
    """
    if not lapa2 and hasattr(module, "layer_idx"):
        raise DeadHookError(OUTSIDE)
    unknown = [name for name in ("position_bias", "sinks") if others.get(name) is not None]
    if unknown or (dropout and module.training):
        raise DeadHookError(
            f"{type(module).__name__} asks for {unknown[0] if unknown else 'dropout'} in its"
            " attention, which cannot be augmented through transformers' interface; put the model"
            " in eval mode, or try TransformerBridge, which checks that its hooks are live"
        )
    repeats = query.shape[1] // key.shape[1]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    # row head query key
    scores = torch.matmul(query, _repeated(key, repeats).transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask[..., : scores.shape[3]]
    for visitor in lapa2:
        if visitor.edit is not None:
            scores = visitor.edit(module.layer_idx, scores, visitor.first)
    if s_aux is not None:
        sinks = s_aux[None, :, None, None].expand(len(scores), -1, scores.shape[2], -1)
        scores = torch.cat([scores, sinks], dim=3)
    pattern = scores.softmax(dim=3, dtype=torch.promote_types(scores.dtype, torch.float32))
    pattern = pattern if s_aux is None else pattern[..., :-1]
    for visitor in lapa2:
        if visitor.read is not None:
            visitor.read(module.layer_idx, pattern, visitor.first)
        visitor.watch.seen.add(module.layer_idx)
    pattern = pattern.to(query.dtype)
    # row head query d_head -> row query head d_head
    out = torch.matmul(pattern, _repeated(value, repeats)).transpose(1, 2).contiguous()
    for visitor in lapa2:
        if visitor.out is not None:
            out = visitor.out(module.layer_idx, out, visitor.first)
    return out, pattern


def _repeated(heads: Tensor, repeats: int) -> Tensor:
    """Shared heads once per query head: row kv_head key d_head -> row head key d_head."""
    if repeats == 1:
        return heads
    rows, n_shared, n_keys, d_head = heads.shape
    # One operation after the other, as `CachedHeads` knows them.
    spread = heads[:, :, None, :, :].expand(rows, n_shared, repeats, n_keys, d_head)
    return spread.reshape(rows, n_shared * repeats, n_keys, d_head)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, eager_mask)
