"""The two classes of TransformerLens around a transformers model."""

from __future__ import annotations

import copy
import importlib.metadata
import tempfile
from typing import TYPE_CHECKING, Any
from unittest import mock

from lapa2_interp.errors import ModelError
from lapa2_interp.models.cache_name import let_bridges_read
from lapa2_interp.models.configuration import short_context
from lapa2_interp.models.facts import Model, check_not_quantised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _without_reload(tokenizer: PreTrainedTokenizerBase, name: str) -> PreTrainedTokenizerBase:
    """A copy that TransformerLens uses unchanged, instead of loading the tokenizer again with BOS
    switched on.

    Spans are counted by the model's own tokenizer, and one that prepends BOS would count one more.
    """
    taken = copy.copy(tokenizer)
    taken.init_kwargs = {**tokenizer.init_kwargs, "name_or_path": name, "add_bos_token": True}
    return taken


def make_bridge(network: Any, tokenizer: Any, name: str, dtype: Any, device: str) -> Model:
    """A TransformerBridge, to which the network then belongs."""
    from transformer_lens.model_bridge import TransformerBridge

    # For models that read images, too, transformer-lens would have pip install torchvision.
    with mock.patch("subprocess.check_call", side_effect=OSError):
        model = TransformerBridge.boot_transformers(
            name,
            hf_model=network,
            tokenizer=_without_reload(tokenizer, name),
            dtype=dtype,
            device=device,
        )
    let_bridges_read(network)
    return model


def make_hooked_transformer(
    network: Any, tokenizer: Any, name: str, dtype: Any, device: str
) -> Model:
    """A HookedTransformer with the network's weights, unprocessed.

    Raises:
        ModelError: transformer-lens has none, the weights are quantised, or there are two sets of
            rotary factors.
    """
    if short := short_context(network.config):
        raise ModelError(
            "a HookedTransformer has one set of rotary factors, and this model has others beyond"
            f" {short} tokens (longrope); use TransformerBridge or TransformersModel"
        )
    try:
        from transformer_lens import HookedTransformer, HookedTransformerConfig
        from transformer_lens import loading_from_pretrained as loading
    except ImportError:
        version = importlib.metadata.version("transformer-lens")
        raise ModelError(
            f"transformer-lens {version} has no HookedTransformer; install transformer-lens 3.9 or"
            " use TransformerBridge"
        ) from None
    check_not_quantised(network, "a HookedTransformer takes")
    # Convert the configuration and the weights without processing them.
    config = copy.deepcopy(network.config)
    config.architectures = [type(network).__name__]
    if config.model_type == "gpt2":
        config.n_ctx = config.n_positions
    # transformer-lens guesses the architecture from the folder's path, so its name is neutral.
    with tempfile.TemporaryDirectory(prefix="config-") as folder:
        config.save_pretrained(folder)
        settings = loading.convert_hf_model_config(folder)
        settings |= {"device": device, "dtype": dtype, "model_name": name, "tokenizer_name": None}
        cfg = HookedTransformerConfig.from_dict(settings)
        model = HookedTransformer(
            cfg, tokenizer=_without_reload(tokenizer, name), move_to_device=False
        )
        model.load_and_process_state_dict(
            loading.get_pretrained_state_dict(folder, cfg, hf_model=network, dtype=dtype),
            fold_ln=False,
            center_writing_weights=False,
            center_unembed=False,
            fold_value_biases=False,
        )
    return model.to(device, print_details=False)
