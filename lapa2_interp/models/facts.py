"""What a loaded model is: facts that are read once, when it is loaded, and not from its weights.

    facts = facts_of(model)
    facts.backend, facts.n_layers, facts.layer_types

Which weights it has is another question, whose answer must be read from them (`card.identify`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from inspect import signature
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

from lapa2_interp.bias.layer_types import FULL_ATTENTION, LayerType, describe_runs
from lapa2_interp.bias.tokens import require_tokenizer
from lapa2_interp.errors import LayoutError, ModelError
from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.models.configuration import (
    check_decoder_depth,
    config_layer_types,
    context_length,
    decoder_size,
    kv_shapes,
    rotary_limit,
    short_context,
)
from lapa2_interp.models.machine import Attn, check_attn
from lapa2_interp.models.offloaded import device_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Model = Any
"""A TransformerBridge, a HookedTransformer (of transformer-lens 3.9), or a `TransformersModel`."""
FUSED = "fused"
"""The path of a layer without the matrix; all other paths are reasons for the matrix."""
AUTO_SCORES = 2**20
"""Scores of a head from which `attn="auto"` goes without the matrix, on a CPU."""


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


def path_of_pass(attn: Attn, n_queries: int, n_keys: int, device_type: str) -> str:
    """The path of a pass: "fused", or the reason why it forms the matrix."""
    if attn != "auto":
        return FUSED if attn == "fused" else "attn is matrix"
    if device_type != "cpu":
        return f"attn is auto, which forms the matrix on {device_type}"
    if n_queries * n_keys < AUTO_SCORES:
        return f"attn is auto, and {n_queries} queries of {n_keys} keys are few"
    return FUSED


def is_fused(model: Model, n_queries: int, n_keys: int) -> bool:
    """True if a model reads a pass of this size without the matrix, as far as size decides."""
    if not isinstance(model, TransformersModel) or n_queries == 1:
        return False
    device = model.cfg.device.type
    return path_of_pass(model.attn, n_queries, n_keys, device) == FUSED


@contextmanager
def decided_path(model: Model, n_queries: int, n_keys: int) -> Iterator[bool]:
    """Decide `attn="auto"` of a model, inside the block, by its largest pass of several queries, so
    that all passes go one way. Yields True if they go without the matrix."""
    if not isinstance(model, TransformersModel):
        yield False
        return
    before, fused = model.attn, is_fused(model, n_queries, n_keys)
    try:
        model.paths.clear()
        model.attn = "fused" if fused else "matrix"
        yield fused
    finally:
        model.attn = before


def describe_paths(model: Model) -> str:
    """The paths of a model's last pass of several queries (`ModelCard.attn`)."""
    paths = getattr(model, "paths", {})
    reasons = sorted({*paths.values()} - {FUSED})
    if FUSED not in paths.values():
        return "matrix"
    layers = ((why, [layer for layer in paths if paths[layer] == why]) for why in reasons)
    return "; ".join([FUSED, *(f"layers {describe_runs(some)}: {why}" for why, some in layers)])


class ModelFacts:
    """What a model is. No pass changes it, and no edit of its weights, but for `dtype`.

    Attributes:
        network: The transformers model inside; a HookedTransformer or a bare transformers model
            itself.
        backend: "hooked" (a HookedTransformer) and "bridge" (a TransformerBridge) have
            TransformerLens' hook points; "plain" models (a `TransformersModel`, or a bare
            transformers model) have transformers' attention interface alone.
        is_bare: True for a transformers model that nothing wraps, and so without a tokenizer.
        config: The configuration of transformers; None for a HookedTransformer.
        n_layers, n_heads: Layers, and heads of a layer.

    Raises:
        ModelError: The value is not a model, or is inside a wrapper.
    """

    def __init__(self, model: Model) -> None:
        if "_orig_mod" in getattr(model, "_modules", ()):
            raise ModelError(
                "the model is a wrapper of torch.compile, and a compiled pass does not see what is"
                " changed later; pass the model inside it (model._orig_mod)"
            )
        self.is_bare = hasattr(type(model), "set_attn_implementation")
        self.network: Any = model if self.is_bare else getattr(model, "original_model", model)
        self.backend: Literal["hooked", "bridge", "plain"]
        if self.is_bare or isinstance(model, TransformersModel):
            self.backend = "plain"
        elif hasattr(model, "hooks"):
            self.backend = "hooked" if self.network is model else "bridge"
        else:
            raise ModelError(
                f"a {type(model).__name__} is no model of TransformerLens or transformers, nor a"
                " TransformersModel; pass the one inside it (of a PEFT model: get_base_model())"
            )
        self.config: Any = getattr(self.network, "config", None)
        self._cfg = getattr(model, "cfg", None)  # of TransformerLens
        if self._cfg is None:
            self.n_layers, self.n_heads = decoder_size(self.config)
        else:
            self.n_layers, self.n_heads = self._cfg.n_layers, self._cfg.n_heads

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the model computes, as its weights are now; `cfg.dtype` is that of
        loading."""
        return next(
            weight.dtype for weight in self.network.parameters() if weight.is_floating_point()
        )

    @cached_property
    def n_kv_heads(self) -> int:
        """KV heads of a layer; with grouped queries several heads share one."""
        return getattr(self._cfg, "n_key_value_heads", None) or self.n_heads

    @cached_property
    def layer_types(self) -> tuple[LayerType, ...]:
        """The types of the layers, in order: the keys that their queries see.

        Raises:
            ModelError: A layer is of a type that is not known here.
        """
        if self.config is not None:
            return config_layer_types(self.config)
        cfg: Any = self._cfg
        local = LayerType("sliding", cfg.window_size) if cfg.use_local_attn else FULL_ATTENTION
        kinds = cfg.attn_types or ("local" if cfg.use_local_attn else "global",) * self.n_layers
        return tuple(local if kind == "local" else FULL_ATTENTION for kind in kinds)

    @cached_property
    def attention_layers(self) -> list[int]:
        """The layers with attention: in hybrids not the recurrent and convolutional ones."""
        return [layer for layer, seen in enumerate(self.layer_types) if seen.kind != "none"]

    @cached_property
    def window(self) -> int | None:
        """The smallest sliding window or chunk of the layers; None if every layer sees all keys."""
        return min((seen.size for seen in self.layer_types if seen.size), default=None)

    @cached_property
    def kv_shapes(self) -> list[tuple[int, int, int]]:
        """As `configuration.kv_shapes`; of a HookedTransformer there is none."""
        return [] if self.config is None else kv_shapes(self.config.get_text_config())

    @cached_property
    def rotary_limit(self) -> tuple[str, int] | None:
        """As `configuration.rotary_limit`."""
        return None if self.config is None else rotary_limit(self.config)

    @cached_property
    def short_context(self) -> int | None:
        """As `configuration.short_context`."""
        return None if self.config is None else short_context(self.config)

    @cached_property
    def cache_name(self) -> str:
        """The name of the argument by which the network takes its cache of keys and values."""
        return cache_name(self.network)

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The names of the parameters of the network's forward pass."""
        return frozenset(signature(self.network.forward).parameters)


def facts_of(model: Model) -> ModelFacts:
    """The facts of a model, which it keeps from then on.

    Those of a bare transformers model, whose configuration is the user's to edit, are read each
    time, when a block opens.

    Example:
        >>> from lapa2_interp import load_model
        >>> from lapa2_interp.models import facts_of
        >>> facts = facts_of(load_model("tiny-gpt2"))
        >>> facts.backend, facts.n_layers, str(facts.layer_types[0])
        ('bridge', 4, 'full')

    Raises:
        ModelError: The value is not a model, or is inside a wrapper.
    """
    # Not by getattr: a TransformerBridge also has the attributes of the network inside it.
    facts: ModelFacts | None = getattr(model, "__dict__", {}).get("lapa2_facts")
    if facts is None or facts.network is not getattr(model, "original_model", model):
        facts = ModelFacts(model)
        if not facts.is_bare:
            model.lapa2_facts = facts
    return facts


def check_has_tokenizer(model: Model) -> None:
    """Refuse anything but a loaded model with a tokenizer.

    Raises:
        ModelError: A name, a bare transformers model, or a model without a tokenizer.
    """
    if isinstance(model, str | Path):
        raise ModelError(
            f"a loaded model is needed here, found {model!r}; give load_model(...) of it"
        )
    if facts_of(model).is_bare:
        raise ModelError(
            f"a {type(model).__name__} has no tokenizer; give TransformersModel(network, tokenizer,"
            " NAME) of lapa2_interp, or its folder or hub id, which load_model loads"
        )
    if getattr(model, "tokenizer", None) is None:
        raise ModelError(f"the {type(model).__name__} has no tokenizer; set model.tokenizer")


def check_not_quantised(model: Model, what: str) -> None:
    """Refuse a model with quantised weights, where the weights themselves are needed.

    Args:
        model: Also a bare transformers model.
        what: The beginning of the error message.

    Raises:
        ModelError: The layers are quantised, so that their numbers are not those of the layers.
    """
    network: Any = facts_of(model).network
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
