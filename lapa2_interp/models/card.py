"""Loaded models of every class, what can be read from them, and the card that records them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from pydantic import BaseModel, ConfigDict

from lapa2_interp._util.errors import LayoutError, ModelError
from lapa2_interp.bias.layer_types import FULL_ATTENTION, LayerType, LayerTypeName
from lapa2_interp.bias.text_start import text_markers, text_start
from lapa2_interp.bias.tokens import require_tokenizer
from lapa2_interp.models.fingerprint import (
    adapter_states,
    fingerprint,
    network_tensors,
    plain_tensors,
)
from lapa2_interp.models.fused import check_fused_weights, fused_weights
from lapa2_interp.models.machine import Attn, check_attn
from lapa2_interp.models.offloaded import device_of
from lapa2_interp.models.prepacked import (
    Prepacking,
    can_prepack_layers,
    choose_prepacking,
    prepacked,
)
from lapa2_interp.models.weights import listed_ends

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import GenerationConfig

Model = Any
"""A TransformerBridge, a HookedTransformer (of transformer-lens 3.9), or a `TransformersModel`."""


class TransformersModel:
    """A plain transformers model with the few names of a TransformerLens model that we use.

    It has no hooks: `augmented` reaches its attention through transformers' own interface. So it
    also serves architectures that TransformerLens lacks, or whose hooks are dead.

    Args:
        network: A causal language model.
        tokenizer, name: The model's.
        attn: "fused" reads passes of several queries without the matrix of attention scores,
            "matrix" forms it, and "auto" decides by their size (`attention_interface`).

    Attributes:
        paths: By layer, what the last such pass under `augmented` did: "fused", or the reason why
            it formed the matrix.
        static: Decode with steps of a fixed size (`attention.static_rows`): on a GPU as CUDA
            graphs. Set it to True before you generate.

    Raises:
        ModelError: The network is not a transformers model, or `check_decoder_depth` refuses it.
        LayoutError: The tokenizer is not a tokenizer.
    """

    hook_dict: Mapping[str, Any] = MappingProxyType({})
    static = False

    def __init__(self, network: Any, tokenizer: Any, name: str, attn: str = "auto") -> None:
        check_attn(attn)
        self.attn, self.paths = cast("Attn", attn), dict[int, str]()
        if not hasattr(type(network), "set_attn_implementation"):
            raise ModelError(
                f"TransformersModel(network, tokenizer, name) takes a transformers model; found"
                f" {type(network).__name__}; load_model loads one by its name"
            )
        check_decoder_depth(network)
        self.original_model, self.tokenizer = network, require_tokenizer(tokenizer)
        config = network.config.get_text_config()  # of a model that reads images, too
        n_kv_heads, d_head, _ = max(kv_shapes(config))
        n_layers, n_heads = decoder_size(config)
        self.cfg = SimpleNamespace(
            n_layers=n_layers,
            n_heads=n_heads,
            n_key_value_heads=n_kv_heads,
            d_head=d_head,
            d_vocab=config.vocab_size,
            n_ctx=context_length(config),
            dtype=network.dtype,
            device=device_of(network),
            model_name=name,
            original_architecture=type(network).__name__,
        )

    def __call__(self, ids: Tensor, **settings: Any) -> Tensor:
        """Logits of ids; `settings` as the network takes them."""
        return self.original_model(ids.to(self.cfg.device), **settings).logits

    def eval(self) -> TransformersModel:
        self.original_model.eval()
        return self

    @property
    def W_E(self) -> Tensor:
        """Embeddings [vocab, d_model]."""
        return self.original_model.get_input_embeddings().weight


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


def model_short_context(model: Model) -> int | None:
    """`short_context` of a loaded model, without a look at its weights."""
    config = getattr(network_of(model), "config", None)
    return None if config is None else short_context(config)


def check_rotary_side(short: int | None, first: int, last: int, what: str) -> None:
    """Refuse passes on both sides of a switch of rotary factors.

    Args:
        short: As `short_context`.
        first, last: Tokens of the shortest and the longest pass whose logits count.

    Raises:
        LayoutError: The first has the factors of short texts, and the last has not.
    """
    if short is not None and first <= short < last:
        raise LayoutError(
            f"{what}: passes of {first} to {last} tokens, and beyond {short} this model has other"
            " rotary factors (longrope, original_max_position_embeddings), under which keys from"
            f" before are stale; stay within {short} tokens, or begin beyond them"
        )


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


def layer_types(model: Model) -> tuple[LayerType, ...]:
    """The types of a model's layers, in order: the keys that their queries see.

    Raises:
        ModelError: A layer is of a type that is not known here.
    """
    network: Any = network_of(model)
    if not hasattr(network, "config"):  # a HookedTransformer
        cfg = model.cfg
        local = LayerType("sliding", cfg.window_size) if cfg.use_local_attn else FULL_ATTENTION
        kinds = cfg.attn_types or ("local" if cfg.use_local_attn else "global",) * cfg.n_layers
        return tuple(local if kind == "local" else FULL_ATTENTION for kind in kinds)
    return config_layer_types(network.config)


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


def attention_layers(model: Model) -> list[int]:
    """The layers with attention: in hybrids not the recurrent and convolutional ones."""
    return [
        layer for layer, layer_type in enumerate(layer_types(model)) if layer_type.kind != "none"
    ]


def smallest_window(model: Model) -> int | None:
    """The smallest sliding window or chunk of a model's layers; None if every layer sees all
    keys."""
    return min((seen.size for seen in layer_types(model) if seen.size), default=None)


def plain_network(model: Model) -> Any | None:
    """The network of a model without TransformerLens' hooks: a `TransformersModel`, or a bare
    transformers model; None for the others.

    Raises:
        ModelError: The value is not a model, or is inside a wrapper.
    """
    if "_orig_mod" in getattr(model, "_modules", ()):
        raise ModelError(
            "the model is a wrapper of torch.compile, and a compiled pass does not see what is"
            " changed later; pass the model inside it (model._orig_mod)"
        )
    if isinstance(model, TransformersModel):
        return model.original_model
    if hasattr(type(model), "set_attn_implementation"):
        return model
    if not hasattr(model, "hooks"):
        raise ModelError(
            f"a {type(model).__name__} is no model of TransformerLens or transformers, nor a"
            " TransformersModel; pass the one inside it (of a PEFT model: get_base_model())"
        )
    return None


def n_layers_and_heads(model: Model) -> tuple[int, int]:
    """Layers, and heads of a layer; also of a bare transformers model."""
    if hasattr(model, "cfg"):
        return model.cfg.n_layers, model.cfg.n_heads
    return decoder_size(model.config)


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


def weights_dtype(model: Model) -> torch.dtype:
    """The type in which a model computes, as its weights are now; `cfg.dtype` is that of
    loading."""
    return next(
        weight.dtype for weight in network_of(model).parameters() if weight.is_floating_point()
    )


def kv_heads(model: Model) -> int:
    """KV heads of a layer; with grouped queries several heads share one."""
    return getattr(model.cfg, "n_key_value_heads", None) or model.cfg.n_heads


def is_bridge(model: Model) -> bool:
    """True for a model that wraps a transformers model (TransformerBridge, `TransformersModel`),
    False for a HookedTransformer."""
    return hasattr(model, "original_model")


def network_of(model: Model) -> nn.Module:
    """The transformers model inside a model that wraps one; any other model unchanged."""
    return model.original_model if is_bridge(model) else model


def prepacked_model(model: Model) -> AbstractContextManager[None]:
    """`prepacked` with the layers that the model's card names."""
    return prepacked(network_of(model), model_card(model).prepacking)


class ModelCard(BaseModel):
    """The record of a loaded model, which every manifest holds."""

    model_config = ConfigDict(frozen=True)

    name: str
    """The name it was loaded by: a built-in name, a hub id or a folder."""
    weights: str
    """The origin of the weights: a sha256, a hub commit, or the seed of a random model."""
    architecture: str
    """The transformers class."""
    model_class: str
    """TransformerBridge, HookedTransformer or TransformersModel."""
    dtype: str
    device: str
    n_layers: int
    n_heads: int
    n_ctx: int
    """Positions the model was built for."""
    short_ctx: int | None = None
    """`short_context` of the model."""
    start_token: str
    """The token that starts plain text (`bias.text_start`); "" if text starts with nothing."""
    start_source: str = ""
    """The reason why plain text starts so; "" in the cards of older runs."""
    end_ids: tuple[int, ...]
    """Ids that end a text under the EOS policies stop and block: the tokenizer's and the generation
    config's. A tokenizer may have no token for an id that a model can draw."""
    end_tokens: tuple[str, ...]
    """The same for readers: each id's token, or "id 259" where the tokenizer has none."""
    layer_types: tuple[LayerType, ...] = ()
    """The layers' types; empty if every layer sees all keys."""
    prepacking: Prepacking = "none"
    """Linear layers that compute with prepacked weights (`prepacked`), which may decide last bits.
    """
    attn: str = "matrix"
    """Attention of prompts: with the matrix of scores, "fused", or which layers differ."""


def model_card(model: Model) -> ModelCard:
    """The card of a loaded model; for a model that was made elsewhere, a card read from it.

    Weights that were made elsewhere, or changed since they were loaded, are identified by a hash of
    the weights in memory, or where accelerate keeps them.

    Raises:
        ModelError: The value is not a loaded model, or has no tokenizer; or a fused weight was
            edited of which a TransformerBridge computes with copies.
    """
    check_has_tokenizer(model)
    card, values = getattr(model, "lapa2_card", None), fingerprint(network_of(model))
    if card is None:
        card = make_card(model, model.cfg.model_name, hash_weights(model))
        return attach_card(model, card)
    names: dict[bytes, str] = model.lapa2_weights
    if values not in names:
        model.lapa2_fused = check_fused_weights(network_of(model), model.lapa2_fused)
        names[values] = hash_weights(model)
    if card.weights != names[values]:
        # Weights that were cast may have no prepacked form.
        prepacking = card.prepacking if can_prepack_layers(network_of(model)) else "none"
        dtype = str(weights_dtype(model)).removeprefix("torch.")
        changed = {"weights": names[values], "dtype": dtype, "prepacking": prepacking}
        card = card.model_copy(update=changed)
        model.lapa2_card = card
    return card


def attach_card(model: Model, card: ModelCard) -> ModelCard:
    """Attach a card to a model, whose weights, as they are now, have the card's name."""
    model.lapa2_fused = fused_weights(network_of(model))
    model.lapa2_card = card
    model.lapa2_weights = {fingerprint(network_of(model)): card.weights}
    return card


def check_has_tokenizer(model: Model) -> None:
    """Refuse anything but a loaded model with a tokenizer.

    Raises:
        ModelError: A name, a bare transformers model, or a model without a tokenizer.
    """
    if isinstance(model, str | Path):
        raise ModelError(
            f"a loaded model is needed here, found {model!r}; give load_model(...) of it"
        )
    if plain_network(model) is model:
        raise ModelError(
            f"a {type(model).__name__} has no tokenizer; give TransformersModel(network, tokenizer,"
            " NAME) of lapa2_interp, or its folder or hub id, which load_model loads"
        )
    if getattr(model, "tokenizer", None) is None:
        raise ModelError(f"the {type(model).__name__} has no tokenizer; set model.tokenizer")


def hash_weights(model: Model) -> str:
    """sha256 over a model's weights, configuration and vocabulary, as they are now.

    Raises:
        ModelError: Some weights are nowhere, or cannot be read.
    """
    network: Any = network_of(model)
    config = getattr(network, "config", None)
    facts = model.cfg if config is None else config
    public = {name: value for name, value in facts.to_dict().items() if not name.startswith("_")}
    digest = hashlib.sha256(json.dumps(public, sort_keys=True, default=str).encode())
    digest.update(repr(sorted(model.tokenizer.get_vocab().items())).encode())
    if states := adapter_states(network):
        digest.update(repr(states).encode())
    for name, tensor in network_tensors(network):
        if tensor.is_meta:
            raise ModelError(f"the weight {name} is not in memory; load the whole model")
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for part in plain_tensors(tensor):
            digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return f"sha256 {digest.hexdigest()} (of the weights in memory, configuration and vocabulary)"


def weights_id(model: Model) -> str:
    """An identifier of a model's weights, for files that depend on them. Random weights are hashed,
    since they also depend on the version of torch."""
    weights = model_card(model).weights
    return weights if weights.startswith(("sha256", "hub commit")) else hash_weights(model)


def check_not_quantised(model: Model, what: str) -> None:
    """Refuse a model with quantised weights, where the weights themselves are needed.

    Args:
        model: Also a bare transformers model.
        what: The beginning of the error message.

    Raises:
        ModelError: The layers are quantised, so that their numbers are not those of the layers.
    """
    network: Any = network_of(model)
    quantised = next(
        (
            name
            for name, parameter in network.named_parameters()
            if not parameter.is_floating_point()
        ),
        None,
    )
    if quantised is not None or getattr(network, "hf_quantizer", None) is not None:
        raise ModelError(
            f"{what} the weights themselves, and those of this {type(network).__name__} are"
            " quantised; load the model without quantization_config, from unquantised files"
        )


def make_card(
    model: Model,
    name: str,
    weights: str,
    architecture: str | None = None,
    generation: GenerationConfig | None = None,
    prepacking: Prepacking | None = None,
) -> ModelCard:
    """The card of a model.

    Args:
        name, weights: As in `ModelCard`.
        architecture: The transformers class; by default that of the model's configuration.
        generation: The model's generation configuration, whose end ids are added; by default that
            of the network, if it has one.
        prepacking: By default `choose_prepacking` of the network.

    Raises:
        ModelError: The end ids of the generation configuration are no ids.
    """
    markers = text_markers(model)
    if generation is None:
        generation = getattr(network_of(model), "generation_config", None)
    ends = {*markers.ends, *listed_ends(generation, name)}
    # Configurations and tokenizers also name ends that have no logit, so that none is drawn.
    end_ids = tuple(i for i in sorted(ends) if 0 <= i < model.cfg.d_vocab)
    names = map(model.tokenizer.convert_ids_to_tokens, end_ids)
    config = getattr(network_of(model), "config", None)
    return ModelCard(
        name=name,
        weights=weights,
        architecture=architecture
        or str(getattr(model.cfg, "architecture", None) or model.cfg.original_architecture),
        model_class=type(model).__name__,
        dtype=str(weights_dtype(model)).removeprefix("torch."),
        device=str(model.cfg.device),
        n_layers=model.cfg.n_layers,
        n_heads=model.cfg.n_heads,
        n_ctx=model.cfg.n_ctx,
        short_ctx=None if config is None else short_context(config),
        start_token=""
        if markers.start is None
        else model.tokenizer.convert_ids_to_tokens(markers.start),
        start_source=text_start(model).source,
        end_ids=end_ids,
        end_tokens=tuple(
            f"id {i}" if name is None else name for i, name in zip(end_ids, names, strict=True)
        ),
        layer_types=omit_if_all_full(layer_types(model)),
        prepacking=choose_prepacking(network_of(model)) if prepacking is None else prepacking,
    )
