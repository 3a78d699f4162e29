"""Attention scores and patterns of a plain transformers model, through its attention interface.

transformers lets a model compute attention by any registered function. Ours is that of its "eager"
models, with two hook points: TransformerLens calls them hook_attn_scores, where the scores may be
edited, and hook_pattern, where the pattern is read. The hooks of a pass travel with it as an
argument, so that nothing is shared between models."""

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
from lapa2_interp.models.blocks import ATTENTION_NAME, OUTSIDE_ERROR, PassState, open_block


@dataclass
class AttentionHooks:
    """Functions that are called in the attention of every layer of a pass.

    Attributes:
        edit_scores: Takes layer, scores [row head query key] (masked, before softmax) and the slot
            of the first query; returns the scores.
        read_pattern: Takes layer, pattern [row head query key] and the slot of the first query.
        edit_output: Takes layer, the heads' outputs [row query head d_head] and the slot of the
            first query; returns the outputs.
        check_sight: Takes layer, scores as the model has masked them, before any edit, and the slot
            of the first query.
        first: The slot of the pass's first query.
        state: The state of that pass.
    """

    edit_scores: Callable[[int, Tensor, int], Tensor] | None = None
    read_pattern: Callable[[int, Tensor, int], None] | None = None
    edit_output: Callable[[int, Tensor, int], Tensor] | None = None
    check_sight: Callable[[int, Tensor, int], None] | None = None
    first: int = 0
    state: PassState = field(default_factory=PassState)


@contextmanager
def hook_attention(
    network: Any,
    hooks: AttentionHooks,
    begin: Callable[[dict[str, Any]], int],
    layers: Collection[int] = (),
) -> Iterator[None]:
    """Call hooks in the attention of every pass of a transformers model inside the block.

    Blocks may be nested and closed in any order: each block's hooks get what those before them have
    left.

    Args:
        begin: Called before a pass with its arguments by name, to which it may add; returns the
            slot of its first query.
        layers: Layers in which every pass must call the hooks.

    Raises:
        DeadHookError: The architecture does not use the attention interface, or a pass has
            not called the hooks of a layer.
        ModelError: As `blocks.open_block`.
    """
    if not network._can_set_attn_implementation():
        raise DeadHookError(
            f"{type(network).__name__} computes its attention without transformers' attention"
            " interface, so it cannot be augmented there; TransformerLens' hooks may reach it"
            " (TransformerBridge, which checks)"
        )

    def before(arguments: dict[str, Any]) -> None:
        hooks.first = begin(arguments)
        arguments[ATTENTION_NAME] = (*arguments.get(ATTENTION_NAME, ()), hooks)
        arguments.update(_arguments_for_all_queries(network, arguments))

    with open_block(network, before, hooks.state, layers, attention=True):
        yield


def _arguments_for_all_queries(network: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that keep every query in every layer of a pass.

    Where layers share keys (Gemma 4), the layers after the last own keys leave out the queries
    whose logits are not asked for. They do so if these are given as a number, and not as indices.
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
    value: Float[Tensor, "row kv_head key d_value"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Float[Tensor, " head"] | None = None,
    lapa2: tuple[AttentionHooks, ...] = (),
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Attention with hooks between scores and softmax, and after the softmax.

    Args:
        s_aux: Scores of a learned sink, which takes a share beside the keys (gpt-oss).

    Returns:
        The heads' outputs [row query head d_value], and the pattern, without a sink's share.

    Raises:
        DeadHookError: The model asks for what this function does not compute, or no pass of the
            block's model is running.
    """
    if not lapa2 and hasattr(module, "layer_idx"):
        raise DeadHookError(OUTSIDE_ERROR)
    unknown = [name for name in ("position_bias", "sinks") if others.get(name) is not None]
    if unknown or (dropout and module.training):
        raise DeadHookError(
            f"{type(module).__name__} asks for {unknown[0] if unknown else 'dropout'} in its"
            " attention, which cannot be augmented through transformers' interface; put the model"
            " in eval mode, or try TransformerBridge, which checks that its hooks are live"
        )
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    scores = shared_product(query, key.transpose(2, 3)) * scale  # row head query key
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask[..., : scores.shape[3]]
    for hooks in lapa2:
        if module.layer_idx in hooks.state.seen:
            raise DeadHookError(
                f"{type(module).__name__} computes several attentions in one layer, so its heads"
                " have no pattern of their own"
            )
        if hooks.check_sight is not None:
            hooks.check_sight(module.layer_idx, scores, hooks.first)
    for hooks in lapa2:
        if hooks.edit_scores is not None:
            scores = hooks.edit_scores(module.layer_idx, scores, hooks.first)
    if s_aux is not None:
        sinks = s_aux[None, :, None, None].expand(len(scores), -1, scores.shape[2], -1)
        scores = torch.cat([scores, sinks], dim=3)
    pattern = scores.softmax(dim=3, dtype=torch.promote_types(scores.dtype, torch.float32))
    pattern = pattern if s_aux is None else pattern[..., :-1]
    for hooks in lapa2:
        if hooks.read_pattern is not None:
            hooks.read_pattern(module.layer_idx, pattern, hooks.first)
        hooks.state.seen.add(module.layer_idx)
    pattern = pattern.to(query.dtype)
    # row head query d_value -> row query head d_value
    out = shared_product(pattern, value).transpose(1, 2).contiguous()
    for hooks in lapa2:
        if hooks.edit_output is not None:
            out = hooks.edit_output(module.layer_idx, out, hooks.first)
    return out, pattern


def shared_product(
    left: Float[Tensor, "row head query inner"], right: Float[Tensor, "row kv_head inner outer"]
) -> Float[Tensor, "row head query outer"]:
    """The product of every head with the shared head of its group, which is read once.

    In half precision on a CPU, where products need dense matrices, the copy made here keeps the
    order in memory; PyTorch's own copy would transpose, which is slow.
    """
    if right.device.type == "cpu" and right.dtype in (torch.bfloat16, torch.float16):
        right = right.clone()  # dense, in the order it has
    grouped = left.reshape(*right.shape[:2], -1, left.shape[3])
    return (grouped @ right).view(*left.shape[:3], right.shape[3])


AttentionInterface.register(ATTENTION_NAME, attend)
AttentionMaskInterface.register(ATTENTION_NAME, eager_mask)
