"""Sizes of models from their configurations, without their weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lapa2_interp._util.errors import ModelError
from lapa2_interp.bias.keys_seen import KeysSeen
from lapa2_interp.models.card import context_of, keys_seen_by, kv_sizes, short_context, unless_full
from lapa2_interp.models.load import OWN_CODE, has_own_code, load_tokenizer, name_of, source_of
from lapa2_interp.models.planted import is_planted, planted_config
from lapa2_interp.models.smollm2 import SMOLLM2, smollm2_file
from lapa2_interp.models.tiny import TINY, tiny_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Size:
    """A model's size, without its weights."""

    parameters: int
    n_layers: int
    n_heads: int
    n_ctx: int
    kv_width: int
    """Numbers of one key, all its heads together; as many of a value."""
    vocab: int
    keys_seen: tuple[KeysSeen, ...] = ()
    """By layer, which keys its queries see; none are listed where every layer sees all keys."""
    short_ctx: int | None = None
    """As `short_context`."""


PAPER_SIZES = {
    "gpt2-medium": Size(354_823_168, 24, 16, 1024, 1024, 50_257),
    "meta-llama/Llama-2-7b-hf": Size(6_738_415_616, 32, 32, 4096, 4096, 32_000),
    "EleutherAI/pythia-12b": Size(11_846_072_320, 36, 40, 2048, 5120, 50_688),
    "meta-llama/Llama-2-13b-hf": Size(13_015_864_320, 40, 40, 4096, 5120, 32_000),
}
"""Sizes of the paper's models, for estimates where the hub is not reached."""


@cache
def model_size(name: str | Path) -> Size:
    """A model's size from its configuration.

    Raises:
        ModelError: No configuration is found, or it is not that of a causal language model with
            attention.
    """
    name = name_of(name)
    if name in PAPER_SIZES:
        return PAPER_SIZES[name]
    import torch
    from transformers import AutoModelForCausalLM

    config = load_config(name)
    text = config.get_text_config()
    try:
        with torch.device("meta"):
            parameters = AutoModelForCausalLM.from_config(config).num_parameters()
        kv_heads, d_head, _ = max(kv_sizes(text))
        return Size(
            parameters,
            text.num_hidden_layers,
            text.num_attention_heads,
            context_of(text),
            kv_heads * d_head,
            text.vocab_size,
            unless_full(keys_seen_by(config)),
            short_context(text),
        )
    except (AttributeError, ValueError) as error:
        raise ModelError(
            f"{name!r} is a {config.model_type} model, whose size cannot be told"
            f" ({str(error).splitlines()[0]:.120}); give a causal language model with attention"
        ) from error


def load_config(name: str | Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """A model's configuration alone.

    Raises:
        ModelError: None is found.
    """
    from transformers import AutoConfig

    name = name_of(name)
    try:
        if name in TINY:
            return tiny_config(name, load_tokenizer(name))
        if is_planted(name):
            return planted_config(name)
        # Unless told no, transformers asks on the terminal, and runs the code on a "y".
        return AutoConfig.from_pretrained(str(source_of(name)), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        if has_own_code(error):
            raise ModelError(f"the model {name!r} {OWN_CODE}") from error
        raise ModelError(
            f"no configuration of {name!r} is found: {' '.join(str(error).split())[:120]}"
        ) from error


ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def weight_bytes(model: str, dtype: str) -> int:
    """Memory of a model's weights."""
    return model_size(model).parameters * ITEM_BYTES[dtype]


def is_here(model: str) -> bool:
    """Whether a model's weights can be had without the network."""
    from huggingface_hub import try_to_load_from_cache

    if model == SMOLLM2:
        return smollm2_file() is not None
    names = ("model.safetensors", "model.safetensors.index.json")
    return (
        model in TINY
        or is_planted(model)
        or Path(model).is_dir()
        or any(isinstance(try_to_load_from_cache(model, n), str) for n in names)
    )
