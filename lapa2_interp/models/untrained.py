"""Untrained models: the placebo of what is read from a trained one."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from lapa2_interp.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNTRAINED = "random:"
"""In front of a model's name: the same model with untrained weights."""
SEED = 1
"""Of untrained weights."""


def untrained(network: PreTrainedModel) -> PreTrainedModel:
    """A new network of the same class and configuration, whose weights are those with which its
    training would begin.

    Raises:
        ModelError: The network is quantised.
    """
    import torch

    if getattr(network, "hf_quantizer", None) is not None:
        raise ModelError(
            "quantised weights have no random ones of their kind; give the name of the model that"
            " is not quantised"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        fresh = type(network)(copy.deepcopy(network.config))
    return fresh.to(network.dtype).eval()
