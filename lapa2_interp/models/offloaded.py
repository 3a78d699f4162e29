"""The device of models whose weights accelerate offloads."""

from __future__ import annotations

from typing import Any

import torch

from lapa2_interp.errors import ModelError
from lapa2_interp.models.fingerprint import offload_hooks


def device_of(network: Any) -> torch.device:
    """The device of a transformers model's inputs: that of its first weights, or to which
    accelerate brings them."""
    if network.device.type != "meta":
        return network.device
    devices = (hook.execution_device for _, hook in offload_hooks(network))
    device = next((device for device in devices if device is not None), None)
    if device is None:
        raise ModelError(
            f"the weights of this {type(network).__name__} are not in memory (device meta), and no"
            " hook of accelerate brings them; load the model with its weights"
        )
    return torch.zeros(0, device=device).device  # accelerate may give a number
