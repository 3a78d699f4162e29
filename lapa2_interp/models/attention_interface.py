"""Attention scores and patterns of a plain transformers model, through its attention interface.

transformers lets a model compute attention by any registered function. Ours is that of its "eager"
models, with two hook points: TransformerLens calls them hook_attn_scores, where the scores may be
edited, and hook_pattern, where the pattern is read. The hooks of a pass travel with it as an
argument, so that nothing is shared between models.

A pass of many queries may go without the matrix of scores (`span_attention`), if all hooks have a
form for it: biases on spans, and sums over spans. Its masks are not formed either:

1. Before the pass, `path_of_pass` decides, a pure function of shape, dtype and type of device.
2. transformers asks for a mask for each type of layer, and gets that of the last query alone, one
   row, unless the mask hides more than later keys, those before a window or chunk, and padding.
3. A layer adds the biases, calls the kernel and has its sums read. A layer that cannot forms the
   matrix, and `AttentionHooks.paths` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from lapa2_interp.bias.layer_types import LayerType
from lapa2_interp.errors import DeadHookError, ModelError, parameter
from lapa2_interp.models.blocks import (
    ATTENTION_NAME,
    OUTSIDE_ERROR,
    Begin,
    PassState,
    change_nothing,
    open_block,
)
from lapa2_interp.models.facts import (
    AUTO_SCORES,
    FUSED,
    ModelFacts,
    TransformersModel,
    facts_of,
    path_of_pass,
)
from lapa2_interp.models.machine import Attn, machine_memory
from lapa2_interp.models.offloaded import device_of
from lapa2_interp.models.span_attention import SpanScores

FUSED_NAME = f"{ATTENTION_NAME}_fused"
"""Name of our attention function in a pass whose masks are single rows."""


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
            of the first query; reads those of the last query.
        edit_spans: The same edit as `edit_scores`, by biases on spans: takes layer and
            `SpanScores`.
        read_spans: Reads what `read_pattern` does, as sums, after the outputs: takes the same.
        needs_matrix: Takes a layer; returns the reason why it needs scores or pattern, or None.
        first: The slot of the pass's first query.
        state: The state of that pass.
        paths: By layer, the path of the last pass of several queries: "fused", or the reason why it
            has formed the matrix.
    """

    edit_scores: Callable[[int, Tensor, int], Tensor] | None = None
    read_pattern: Callable[[int, Tensor, int], None] | None = None
    edit_output: Callable[[int, Tensor, int], Tensor] | None = None
    check_sight: Callable[[int, Tensor, int], None] | None = None
    edit_spans: Callable[[int, SpanScores], None] | None = None
    read_spans: Callable[[int, SpanScores], None] | None = None
    needs_matrix: Callable[[int], str | None] = lambda _layer: None
    first: int = 0
    state: PassState = field(default_factory=PassState)
    paths: dict[int, str] = field(default_factory=dict)


@dataclass
class _Pass:
    """A forward pass, as its layers get it.

    Attributes:
        hooks: Those of all open blocks, in order.
        path: "fused", or the reason why the pass forms the matrix.
        n_keys: Its keys, with those that a cache holds.
        live: Its mask of padding.
        layer_types: Of a pass without the matrix.
    """

    hooks: tuple[AttentionHooks, ...]
    path: str
    n_keys: int
    live: Int[Tensor, "row key"] | None
    layer_types: tuple[LayerType, ...]

    def hidden(self) -> Bool[Tensor, "row key"] | None:
        """The keys of padding."""
        return None if self.live is None else self.live[:, : self.n_keys] == 0

    def first_seen(self, layer: int, queries: range, query: Tensor) -> Int[Tensor, "row query"]:
        """The first slot that each query sees, padding aside."""
        hidden, slots = self.hidden(), np.array(queries)
        pads = [0] * len(query) if hidden is None else hidden.long().cummin(1)[0].sum(1).tolist()
        seen = np.stack([self.layer_types[layer].first_seen(slots, pad) for pad in pads])
        return torch.from_numpy(seen).to(query.device)

    def seen(self, layer: int, queries: range, query: Tensor) -> Bool[Tensor, "row query key"]:
        """The keys that each query sees."""
        keys = torch.arange(self.n_keys, device=query.device)
        own = torch.tensor([*queries], device=query.device)[:, None]
        seen = (keys <= own) & (keys >= self.first_seen(layer, queries, query)[..., None])
        hidden = self.hidden()
        return seen if hidden is None else seen & ~hidden[:, None].to(query.device)


def check_matrix_fits(
    facts: ModelFacts, n_rows: int, n_queries: int, n_keys: int, path: str
) -> None:
    """Refuse a pass with a matrix of scores that is larger than the machine's memory.

    Args:
        path: Why it forms the matrix.

    Raises:
        ModelError: It is: scores and pattern of one layer, in float32, do not fit.
    """
    size, memory = 8 * n_rows * facts.n_heads * n_queries * n_keys, machine_memory()
    if size > memory:
        raise ModelError(
            f"{n_rows} x {n_queries} tokens, read at once, form {size / 1e9:.0f} GB of attention"
            f" scores and patterns in each layer, and the machine has {memory / 1e9:.0f} GB"
            f" ({path}); load the model as TransformersModel with {parameter('attn', 'fused')}, or"
            " read fewer at once, behind a cache"
        )


@contextmanager
def hook_attention(
    facts: ModelFacts,
    hooks: AttentionHooks,
    begin: Begin = change_nothing,
    layers: Collection[int] = (),
    attn: Attn = "auto",
) -> Iterator[None]:
    """Call hooks in the attention of every pass of a transformers model inside the block.

    Blocks may be nested and closed in any order: each block's hooks get what those before them have
    left.

    Args:
        facts: Those of a model of backend "plain".
        begin: As `Begin`.
        layers: Layers in which every pass must call the hooks.
        attn: When a pass goes without the matrix (`path_of_pass`); the innermost block's counts.

    Raises:
        DeadHookError: The architecture does not use the attention interface, or a pass has
            not called the hooks of a layer.
        ModelError: As `blocks.open_block`.
    """
    network = facts.network
    if not network._can_set_attn_implementation():
        raise DeadHookError(
            f"{type(network).__name__} computes its attention without transformers' attention"
            " interface, so it cannot be augmented there; TransformerLens' hooks may reach it"
            " (TransformerBridge, which checks)"
        )

    def before(arguments: dict[str, Any], first: int) -> None:
        hooks.first = first
        begin(arguments, first)
        outer = arguments.get(ATTENTION_NAME)
        blocks = (*(outer.hooks if outer else ()), hooks)
        inputs = arguments.get("input_ids")
        inputs = arguments.get("inputs_embeds") if inputs is None else inputs
        n_rows, n_queries = (1, 1) if inputs is None else inputs.shape[:2]
        n_keys = first + n_queries
        path = _path_of_blocks(network, arguments, blocks, attn, n_queries, n_keys)
        if path == FUSED:
            mask, layer_types = arguments.get("attention_mask"), facts.layer_types
            arguments[ATTENTION_NAME] = _Pass(blocks, path, n_keys, mask, layer_types)
        else:
            arguments[ATTENTION_NAME] = _Pass(blocks, path, n_keys, None, ())
            if n_rows * n_queries * n_keys >= AUTO_SCORES:
                check_matrix_fits(facts, n_rows, n_queries, n_keys, path)
        arguments.update(_arguments_for_all_queries(network, arguments))
        now = network.config._attn_implementation
        name = FUSED_NAME if path == FUSED else ATTENTION_NAME
        if now != name and now in (FUSED_NAME, ATTENTION_NAME):  # not what others have set since
            network.set_attn_implementation(name)

    with open_block(network, hooks.state, layers, before, attention=True):
        yield


def read_without_matrix(model: TransformersModel) -> AbstractContextManager[None]:
    """A block in which nothing is changed, and passes go without the matrix."""
    return hook_attention(facts_of(model), AttentionHooks(), attn="fused")


def _path_of_blocks(
    network: Any,
    arguments: dict[str, Any],
    blocks: tuple[AttentionHooks, ...],
    attn: Attn,
    n_queries: int,
    n_keys: int,
) -> str:
    """The path of a pass inside blocks: "fused", or the reason why it forms the matrix."""
    mask = arguments.get("attention_mask")
    returns_patterns = arguments.get("output_attentions")
    if returns_patterns is None:
        returns_patterns = getattr(network.config, "output_attentions", False)
    if n_queries == 1:
        return "one query"
    if any(block.edit_scores and not block.edit_spans for block in blocks):
        return "a block edits single scores"
    if any(block.read_pattern and not block.read_spans for block in blocks):
        return "an observer reads whole patterns"
    if returns_patterns:
        return "the pass returns its patterns"
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        return "the pass has a mask of its own"
    return path_of_pass(attn, n_queries, n_keys, device_of(network).type)


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
    lapa2: _Pass | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention with hooks between scores and softmax, and after the softmax; or without scores and
    softmax (`SpanScores`), where pass and layer allow it.

    Args:
        s_aux: Scores of a learned sink, which takes a share beside the keys (gpt-oss).

    Returns:
        The heads' outputs [row query head d_value], and the pattern, without a sink's share; None
        without the matrix.

    Raises:
        DeadHookError: The model asks for what this function does not compute, or no pass of the
            block's model is running.
    """
    if lapa2 is None and hasattr(module, "layer_idx"):
        raise DeadHookError(OUTSIDE_ERROR)
    unknown = [name for name in ("position_bias", "sinks") if others.get(name) is not None]
    if unknown or (dropout and module.training):
        raise DeadHookError(
            f"{type(module).__name__} asks for {unknown[0] if unknown else 'dropout'} in its"
            " attention, which cannot be augmented through transformers' interface; put the model"
            " in eval mode, or try TransformerBridge, which checks that its hooks are live"
        )
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    blocks = () if lapa2 is None else lapa2.hooks
    for hooks in blocks:
        if module.layer_idx in hooks.state.seen:
            raise DeadHookError(
                f"{type(module).__name__} computes several attentions in one layer, so its heads"
                " have no pattern of their own"
            )
    if lapa2 is not None and query.shape[2] > 1:
        path = lapa2.path
        if path == FUSED:
            path = _path_of_layer(module.layer_idx, lapa2, query, key, attention_mask, softcap)
        for hooks in blocks:
            hooks.paths[module.layer_idx] = path
        if path == FUSED:
            assert attention_mask is not None
            return _attend_spans(
                module.layer_idx, lapa2, query, key, value, attention_mask, scale, s_aux
            ), None
        if lapa2.path == FUSED and _is_one_row(attention_mask, query):
            assert attention_mask is not None
            attention_mask = _whole_mask(module.layer_idx, lapa2, query, key, attention_mask)
    scores = shared_product(query, key.transpose(2, 3)) * scale  # row head query key
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask[..., : scores.shape[3]]
    for hooks in blocks:
        if hooks.check_sight is not None:
            hooks.check_sight(module.layer_idx, scores, hooks.first)
    for hooks in blocks:
        if hooks.edit_scores is not None:
            scores = hooks.edit_scores(module.layer_idx, scores, hooks.first)
    if s_aux is not None:
        sinks = s_aux[None, :, None, None].expand(len(scores), -1, scores.shape[2], -1)
        scores = torch.cat([scores, sinks], dim=3)
    pattern = scores.softmax(dim=3, dtype=torch.promote_types(scores.dtype, torch.float32))
    pattern = pattern if s_aux is None else pattern[..., :-1]
    for hooks in blocks:
        if hooks.read_pattern is not None:
            hooks.read_pattern(module.layer_idx, pattern, hooks.first)
        hooks.state.seen.add(module.layer_idx)
    pattern = pattern.to(query.dtype)
    # row head query d_value -> row query head d_value
    out = shared_product(pattern, value).transpose(1, 2).contiguous()
    for hooks in blocks:
        if hooks.edit_output is not None:
            out = hooks.edit_output(module.layer_idx, out, hooks.first)
    return out, pattern


def _is_one_row(mask: Tensor | None, query: Tensor) -> bool:
    """True for the mask of the last query alone (`_last_row_mask`)."""
    return mask is not None and mask.shape[2] == 1 < query.shape[2]


def _path_of_layer(
    layer: int,
    this: _Pass,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    softcap: float | None,
) -> str:
    """The path of a layer in a pass without the matrix: "fused", or the reason for a matrix."""
    if not _is_one_row(mask, query):
        return "its mask hides more than later keys, those before a window, and padding"
    if softcap is not None:
        return "its scores have a cap"
    if key.shape[2] < this.n_keys:
        return "its cache has dropped keys"
    reasons = (hooks.needs_matrix(layer) for hooks in this.hooks)
    return next((reason for reason in reasons if reason), FUSED)


def _queries(this: _Pass, query: Tensor) -> range:
    """The slots of a pass's queries."""
    return range(this.n_keys - query.shape[2], this.n_keys)


def _check_last_row(layer: int, this: _Pass, query: Tensor, mask: Tensor) -> None:
    """Refuse a layer whose last query sees other keys than its type and the padding say.

    Raises:
        ModelError: It does.
    """
    wanted = this.seen(layer, _queries(this, query)[-1:], query)
    wanted = pad(wanted, (0, mask.shape[3] - this.n_keys))  # later slots of a static cache
    live = wanted.any(2, keepdim=True)  # a row of padding alone sees nothing
    if (((mask[:, 0] == 0) != wanted) & live).any():
        raise ModelError(
            f"layer {layer} is of type {this.layer_types[layer]} by the model's configuration, and"
            " the mask of its last query is another; read it with attn='matrix'"
        )


def _whole_mask(
    layer: int, this: _Pass, query: Tensor, key: Tensor, mask: Tensor
) -> Float[Tensor, "row 1 query key"]:
    """The mask of all queries, in a pass in which the model was given that of the last."""
    _check_last_row(layer, this, query, mask)
    seen = this.seen(layer, _queries(this, query), query)
    seen = pad(seen, (0, key.shape[2] - this.n_keys))[:, None]
    zero = mask.new_zeros(())
    return torch.where(seen, zero, torch.finfo(mask.dtype).min)


def _attend_spans(
    layer: int,
    this: _Pass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Float[Tensor, "row 1 query=1 key"],
    scale: float,
    sinks: Float[Tensor, " head"] | None,
) -> Float[Tensor, "row query head d_value"]:
    """The heads' outputs without the matrix."""
    key, value = key[:, :, : this.n_keys], value[:, :, : this.n_keys]
    layer_type = this.layer_types[layer]
    in_part = bool(layer_type.size) and this.n_keys > layer_type.size
    first_seen = this.first_seen(layer, _queries(this, query), query) if in_part else None
    scores = SpanScores(query, key, value, scale, this.hidden(), first_seen, sinks)
    # The model's own mask of the last query.
    last = shared_product(query[:, :, -1:], key.transpose(2, 3)) * scale
    last = last + mask[..., : this.n_keys]  # row head query=1 key
    for hooks in this.hooks:
        if hooks.check_sight is not None:
            all_queries = last.expand(-1, -1, query.shape[2], -1)
            hooks.check_sight(layer, all_queries, hooks.first)
    _check_last_row(layer, this, query, mask)
    for hooks in this.hooks:
        if hooks.edit_spans is not None:
            hooks.edit_spans(layer, scores)
    out = scores.outputs().transpose(1, 2).contiguous()
    for hooks in this.hooks:
        if hooks.read_spans is not None:
            hooks.read_spans(layer, scores)
        hooks.state.seen.add(layer)
    for hooks in this.hooks:
        if hooks.edit_output is not None:
            out = hooks.edit_output(layer, out, hooks.first)
    return out


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


def _last_row_mask(
    *, q_length: int, q_offset: Any = 0, allow_is_causal_skip: bool = True, **settings: Any
) -> Tensor:
    """transformers' mask of the last query alone [row 1 1 key], where those of the others follow
    from the layer's type and the padding; else the whole mask."""
    if allow_is_causal_skip:
        q_length, q_offset = 1, q_offset + q_length - 1
    return eager_mask(q_length=q_length, q_offset=q_offset, **settings)


for name, make_mask in ((ATTENTION_NAME, eager_mask), (FUSED_NAME, _last_row_mask)):
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)
