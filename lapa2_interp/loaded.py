"""A loaded model of either TransformerLens class, and the card that says what was loaded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from lapa2_interp.errors import ModelError
from lapa2_interp.layout import FULL, KeysSeen, KeysSeenKind, text_markers
from lapa2_interp.packed import Packing, choose_packing, packed

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import GenerationConfig

ModelClass = Literal["TransformerBridge", "HookedTransformer", "TransformersModel"]
Model = Any
"""A TransformerLens model (TransformerBridge, or HookedTransformer under transformer-lens 3.9), or
a `TransformersModel`."""


class TransformersModel:
    """A plain transformers model behind the few names by which texts are generated and read.

    It has no hooks: `augmented` reaches its attention through transformers' own interface. So it
    also serves architectures that TransformerLens lacks, or whose hooks are dead.

    Args:
        network: A causal language model.
        tokenizer, name: The model's.
    """

    hook_dict: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, network: Any, tokenizer: Any, name: str) -> None:
        self.original_model, self.tokenizer = network, tokenizer
        config = network.config.get_text_config()  # of a model that reads images, too
        n_kv_heads, d_head, _ = max(kv_sizes(config))
        self.cfg = SimpleNamespace(
            n_layers=config.num_hidden_layers,
            n_heads=config.num_attention_heads,
            n_key_value_heads=n_kv_heads,
            d_head=d_head,
            d_vocab=config.vocab_size,
            n_ctx=context_of(config),
            dtype=network.dtype,
            device=network.device,
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


UNNAMED = 2048
"""Context of models that name none, such as Bloom: what transformer-lens takes."""


def context_of(config: Any) -> int:
    """Tokens that a transformers model can read: those it has positions for, or was trained on.

    Models without a table of positions name no number, or only that of their training.
    """
    for name in ("max_position_embeddings", "max_seq_len", "seq_length"):
        if isinstance(found := getattr(config, name, None), int) and found > 0:
            return found
    return UNNAMED


def kv_sizes(config: Any) -> list[tuple[int, int, int]]:
    """KV heads of the layers, and numbers of a key and of a value; one entry where all are alike in
    the configuration."""
    found = []
    for each in getattr(config, "per_layer_config", None) or [config]:
        heads = each.num_attention_heads
        key = getattr(each, "qk_head_dim", None) or getattr(each, "head_dim", None)
        key = key or each.hidden_size // heads
        value = each.v_head_dim if getattr(each, "kv_lora_rank", None) else key
        found.append((getattr(each, "num_key_value_heads", None) or heads, key, value))
    return found


KEYS_SEEN: Mapping[str, KeysSeenKind] = MappingProxyType(
    {
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
)
"""What the layer types of transformers' configurations mean for attention."""


def keys_seen(model: Model) -> tuple[KeysSeen, ...]:
    """By layer, which keys its queries see.

    Raises:
        ModelError: A layer is of a type that is not known here.
    """
    network: Any = network_of(model)
    if not hasattr(network, "config"):  # a HookedTransformer
        cfg = model.cfg
        local = KeysSeen("sliding", cfg.window_size) if cfg.use_local_attn else FULL
        kinds = cfg.attn_types or ("local" if cfg.use_local_attn else "global",) * cfg.n_layers
        return tuple(local if kind == "local" else FULL for kind in kinds)
    return keys_seen_of(network.config.get_text_config())


def keys_seen_of(config: Any) -> tuple[KeysSeen, ...]:
    """As `keys_seen`, from a transformers configuration."""
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    kinds = next(
        (
            found
            for name in ("layer_types", "layers_block_type", "attention_layers")
            if (found := getattr(config, name, None)) is not None
        ),
        None,
    )
    if kinds is None:
        windowed = window and getattr(config, "use_sliding_window", None) is not False
        kinds = ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers
    sizes = {"sliding": window, "chunked": getattr(config, "attention_chunk_size", None)}
    found = []
    for layer, kind in enumerate(kinds):
        if kind not in KEYS_SEEN:
            raise ModelError(
                f"layer {layer} is of type {kind!r}, and which keys its queries see is not known"
                f" here; known types: {', '.join(KEYS_SEEN)}"
            )
        found.append(KeysSeen(KEYS_SEEN[kind], sizes.get(KEYS_SEEN[kind]) or 0))
    return tuple(found)


def attention_layers(model: Model) -> list[int]:
    """The layers that have attention: all, but for hybrids with recurrent or convolutional ones."""
    return [layer for layer, each in enumerate(keys_seen(model)) if each.kind != "none"]


def window_of(model: Model) -> int | None:
    """The smallest sliding window or chunk of a model's layers; None where every layer sees all
    keys."""
    return min((each.size for each in keys_seen(model) if each.size), default=None)


def plain_network(model: Model) -> Any | None:
    """The network of a model without TransformerLens' hooks: a `TransformersModel`, or a bare
    transformers model; None for the others.

    Raises:
        ModelError: It is no model, or one inside a wrapper.
    """
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


def size_of(model: Model) -> tuple[int, int]:
    """Layers, and heads of a layer; also of a bare transformers model."""
    if hasattr(model, "cfg"):
        return model.cfg.n_layers, model.cfg.n_heads
    config = model.config.get_text_config()
    return config.num_hidden_layers, config.num_attention_heads


def kv_heads(model: Model) -> int:
    """KV heads of a layer; with grouped queries several heads share one."""
    return getattr(model.cfg, "n_key_value_heads", None) or model.cfg.n_heads


def is_bridge(model: Model) -> bool:
    """Whether a model wraps a transformers model (TransformerBridge, `TransformersModel`), or is a
    HookedTransformer."""
    return hasattr(model, "original_model")


def network_of(model: Model) -> nn.Module:
    """The transformers model inside a model that wraps one; any other model itself."""
    return model.original_model if is_bridge(model) else model


def packed_model(model: Model) -> AbstractContextManager[None]:
    """`packed` for a model, as its card says."""
    return packed(network_of(model), model_card(model).packing)


class ModelCard(BaseModel):
    """What was loaded, as recorded in every manifest."""

    model_config = ConfigDict(frozen=True)

    name: str
    """The name it was loaded by: a built-in name, a hub id or a folder."""
    weights: str
    """Where the weights come from: a sha256, a hub commit, or the seed of a random model."""
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
    start_token: str
    """The token that starts plain text (`layout.text_markers`)."""
    end_tokens: tuple[str, ...]
    """Tokens that end a text under the EOS policies stop and block: the tokenizer's and the
    generation config's."""
    packing: Packing = "none"
    """Linear layers that compute with packed weights (`packed`), which may decide last bits."""


def model_card(model: Model) -> ModelCard:
    """The card of a loaded model; for a TransformerLens model made elsewhere, what can be read from
    it."""
    card = getattr(model, "lapa2_card", None)
    return card or make_card(model, model.cfg.model_name, "loaded outside lapa2_interp")


def make_card(
    model: Model,
    name: str,
    weights: str,
    architecture: str | None = None,
    generation: GenerationConfig | None = None,
    packing: Packing | None = None,
) -> ModelCard:
    """The card of a model.

    Args:
        name, weights: As the card has them.
        architecture: The transformers class; by default what the model's configuration says.
        generation: The model's generation configuration, whose end tokens count, too.
        packing: By default as `choose_packing` has it.
    """
    markers = text_markers(model.tokenizer)
    listed = generation.eos_token_id if generation is not None else None
    ends = {*markers.ends, *([listed] if isinstance(listed, int) else listed or [])}
    # Configurations name ends that the tokenizer lacks, and tokenizers those without a logit.
    names = [
        model.tokenizer.convert_ids_to_tokens(i) for i in sorted(ends) if i < model.cfg.d_vocab
    ]
    return ModelCard(
        name=name,
        weights=weights,
        architecture=architecture
        or str(getattr(model.cfg, "architecture", None) or model.cfg.original_architecture),
        model_class=type(model).__name__,
        dtype=str(model.cfg.dtype).removeprefix("torch."),
        device=str(model.cfg.device),
        n_layers=model.cfg.n_layers,
        n_heads=model.cfg.n_heads,
        n_ctx=model.cfg.n_ctx,
        start_token=model.tokenizer.convert_ids_to_tokens(markers.start),
        end_tokens=tuple(name for name in names if name is not None),
        packing=choose_packing(network_of(model)) if packing is None else packing,
    )
