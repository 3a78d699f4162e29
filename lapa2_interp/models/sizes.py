"""Sizes of models from their configurations, without their weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lapa2_interp.bias.layer_types import LayerType
from lapa2_interp.errors import ModelError
from lapa2_interp.models.configuration import (
    config_layer_types,
    context_length,
    kv_shapes,
    omit_if_all_full,
    short_context,
)
from lapa2_interp.models.load import expand_name, load_error, load_tokenizer, model_source
from lapa2_interp.models.planted import is_planted, planted_config
from lapa2_interp.models.tiny import TINY, tiny_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class ModelSize:
    """A model's size, without its weights."""

    parameters: int
    n_layers: int
    n_heads: int
    n_ctx: int
    kv_width: int
    """Dimensions of one key, all its heads together; a value has as many."""
    vocab: int
    layer_types: tuple[LayerType, ...] = ()
    """The layers' types; empty if every layer sees all keys."""
    short_ctx: int | None = None
    """`short_context` of the model."""


PAPER_SIZES = {
    "gpt2-medium": ModelSize(354_823_168, 24, 16, 1024, 1024, 50_257),
    "meta-llama/Llama-2-7b-hf": ModelSize(6_738_415_616, 32, 32, 4096, 4096, 32_000),
    "EleutherAI/pythia-12b": ModelSize(11_846_072_320, 36, 40, 2048, 5120, 50_688),
    "meta-llama/Llama-2-13b-hf": ModelSize(13_015_864_320, 40, 40, 4096, 5120, 32_000),
}
"""Sizes of the paper's models, for estimates without the hub."""


@cache
def model_size(name: str | Path) -> ModelSize:
    """A model's size from its configuration.

    Raises:
        ModelError: No configuration is found, or it is not that of a causal language model with
            attention.
    """
    name = expand_name(name)
    if name in PAPER_SIZES:
        return PAPER_SIZES[name]
    import torch
    from transformers import AutoModelForCausalLM

    config = load_config(name)
    text = config.get_text_config()
    try:
        with torch.device("meta"):
            parameters = AutoModelForCausalLM.from_config(config).num_parameters()
        kv_heads, d_head, _ = max(kv_shapes(text))
        return ModelSize(
            parameters,
            text.num_hidden_layers,
            text.num_attention_heads,
            context_length(text),
            kv_heads * d_head,
            text.vocab_size,
            omit_if_all_full(config_layer_types(config)),
            short_context(text),
        )
    except (AttributeError, ValueError) as error:
        raise ModelError(
            f"{name!r} is a {config.model_type} model, whose size is unknown"
            f" ({str(error).splitlines()[0]:.120}); give a causal language model with attention"
        ) from error


def load_config(name: str | Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """A model's configuration alone.

    Raises:
        ModelError: None is found.
    """
    from transformers import AutoConfig

    name = expand_name(name)
    try:
        if name in TINY:
            return tiny_config(name, load_tokenizer(name))
        if is_planted(name):
            return planted_config(name)
        # Without an explicit False, transformers would ask on the terminal whether to run the code.
        return AutoConfig.from_pretrained(
            str(model_source(name)), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ModelError(load_error(name, error)) from error


DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def weight_bytes(model: str, dtype: str) -> int:
    """Memory of a model's weights, in bytes."""
    return model_size(model).parameters * DTYPE_BYTES[dtype]
