"""What the configuration of a transformers model says, also before its weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lapa2_interp.bias.layer_types import FULL_ATTENTION, LayerType, LayerTypeName
from lapa2_interp.errors import ModelError

DEFAULT_CONTEXT = 2048
"""Context of models whose configuration names none, such as Bloom; transformer-lens has the same.
"""


def context_length(config: Any) -> int:
    """Tokens that a transformers model can read: its positions, or the length of its training.

    Configurations without a table of positions name no number, or only that of the training.
    """
    for name in ("max_position_embeddings", "max_seq_len", "seq_length"):
        if isinstance(length := getattr(config, name, None), int) and length > 0:
            return length
    return DEFAULT_CONTEXT


def rotary_limit(config: Any) -> tuple[str, int] | None:
    """The kind of rotary factors that depend on the length of a pass ("longrope" or "dynamic"), and
    the longest pass with the factors of short texts; None for models without such factors.

    longrope (Phi-3.5, Phi-4-mini, PhiMoE) has two sets of factors, and PhiMoE two scales of them;
    dynamic NTK has different factors for every length beyond the context.
    """
    config = config.get_text_config()
    parameters = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    for table in (parameters, *parameters.values()):  # of all layers, or by their type
        if not isinstance(table, Mapping):
            continue
        kind = table.get("rope_type") or table.get("type") or ""
        if kind == "longrope" or "long_mscale" in table:
            original = table.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            return "longrope", original or context_length(config)
        if "dynamic" in kind:
            return "dynamic", context_length(config)
    return None


def short_context(config: Any) -> int | None:
    """Tokens of the longest pass with the rotary factors of short texts; None if the whole context
    has one set of factors."""
    kind, limit = rotary_limit(config) or ("", 0)
    return limit if kind == "longrope" and limit < context_length(config) else None


def kv_shapes(config: Any) -> list[tuple[int, int, int]]:
    """By layer the number of KV heads and the dimensions of a key and a value; a single entry if
    the configuration has one for all layers."""
    shapes = []
    for block in getattr(config, "per_layer_config", None) or [config]:
        heads = decoder_size(block)[1] if block is config else block.num_attention_heads
        key = getattr(block, "qk_head_dim", None) or getattr(block, "head_dim", None)
        key = key or block.hidden_size // heads
        value = block.v_head_dim if getattr(block, "kv_lora_rank", None) else key
        shapes.append((getattr(block, "num_key_value_heads", None) or heads, key, value))
    return shapes


LAYER_TYPE_NAMES: Mapping[str, LayerTypeName] = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "hybrid": "full",
    "sliding_attention": "sliding",
    "local": "sliding",
    "hybrid_sliding": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "none",
    "mamba": "none",
    "conv": "none",
    "moe": "none",
    "mlp": "none",
}
"""Kinds of attention by the layer types of transformers' configurations."""

UNKNOWN_MASKS = ("keep_window_size", "index_block_size", "local_attn_chunk_length")
"""Settings of models whose masks are not known here (Doge, MiniMax M3, Reformer): numbers of keys
that hide none of fewer."""


def unknown_mask(config: Any, keys: int | None = None) -> str:
    """The setting by which a model hides keys in a way that is not known here; "" if there is none.

    Args:
        keys: Keys of the longest text; by default there is no longest.
    """
    config = config.get_text_config()
    if getattr(config, "attention_type", None) == "block_sparse":  # BigBird
        return "attention_type"
    sizes = {name: getattr(config, name, None) for name in UNKNOWN_MASKS}
    return next((n for n, size in sizes.items() if size and (keys is None or size < keys)), "")


def config_layer_types(config: Any) -> tuple[LayerType, ...]:
    """`layer_types` of a model with this configuration of transformers."""
    config = config.get_text_config()
    if unknown := unknown_mask(config):
        raise ModelError(
            f"the model hides keys by {unknown}, so which keys its queries see is not known here"
        )
    # The names of the layers' types in the configuration.
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    kinds = next(
        (
            names
            for name in ("layer_types", "layers_block_type", "attention_layers")
            if (names := getattr(config, name, None)) is not None
        ),
        None,
    )
    if kinds is None:
        windowed = window and getattr(config, "use_sliding_window", None) is not False
        kinds = ["sliding_attention" if windowed else "full_attention"] * decoder_size(config)[0]
    if config.model_type == "minimax" and window:  # its window is that of its "full" layers
        kinds = ["sliding_attention" if kind == "full_attention" else kind for kind in kinds]
    # The types with their sizes.
    sizes = {"sliding": window, "chunked": getattr(config, "attention_chunk_size", None)}
    layer_types = []
    for layer, kind in enumerate(kinds):
        size = sizes.get(LAYER_TYPE_NAMES[kind], 0) if kind in LAYER_TYPE_NAMES else None
        if size is None:
            raise ModelError(
                f"layer {layer} is of type {kind!r}, and which keys its queries see is not known"
                f" here; known types: {', '.join(LAYER_TYPE_NAMES)}"
            )
        layer_types.append(LayerType(LAYER_TYPE_NAMES[kind], size))
    return tuple(layer_types)


def is_hybrid(config: Any) -> bool:
    """True for models with recurrent or convolutional layers, in place of attention or beside
    it."""
    from transformers import DynamicCache

    return any(layer_type.kind == "none" for layer_type in config_layer_types(config)) or any(
        hasattr(cache_layer, "conv_states")
        for cache_layer in DynamicCache(config=config.get_text_config()).layers
    )


def omit_if_all_full(seen: tuple[LayerType, ...]) -> tuple[LayerType, ...]:
    """An empty tuple if every layer sees all keys, as cards record it."""
    return () if set(seen) == {FULL_ATTENTION} else seen


def decoder_size(config: Any) -> tuple[int, int]:
    """Layers, and heads of a layer, of the part that predicts tokens: configurations of encoder and
    decoder give the general names to the encoder's numbers."""
    config = config.get_text_config()
    return (
        getattr(config, "decoder_layers", None) or config.num_hidden_layers,
        getattr(config, "decoder_attention_heads", None) or config.num_attention_heads,
    )


def check_decoder_depth(network: Any) -> None:
    """Refuse a decoder whose configuration has another number of layers for its encoder.

    Raises:
        ModelError: It has: transformers makes caches for the encoder's number.
    """
    config = network.config.get_text_config()
    if (layers := decoder_size(config)[0]) != config.num_hidden_layers:
        raise ModelError(
            f"{type(network).__name__} has {layers} decoder layers, and num_hidden_layers of its"
            f" configuration is {config.num_hidden_layers}, its encoder's, for which transformers"
            " makes its caches; give a model in which both are equal"
        )
