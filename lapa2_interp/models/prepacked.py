"""Linear layers whose weights are prepacked for the CPU's matrix products.

    with prepacked(network), torch.no_grad():
        logits = network(tokens).logits

A matrix product first brings its weights into an order that suits the processor (oneDNN's
"reorder"). In a decoding step, with few rows, that is a large part of the work, and it is the same
at every step. Inside the block every linear layer does it once, in the first pass, and keeps the
result. Hooks, outputs, `state_dict` and gradients are as without it.

A weight that has changed is prepacked again. Where the block begins, the values of every prepacked
weight are compared with those that it was made of (`fingerprint`). Inside the block every product
checks that the layer still has the same weight tensor, unchanged by any operation on it; what is
written there through `weight.data` counts from the next block on.

GPT-2's activation, a tanh form of GELU in eight operations, is one operation inside the block.

The rows of such a product do not depend on each other: in float32 a row has the same bits alone and
in any batch. In bfloat16 it has the same bits in any batch of as many rows; processors with matrix
units (AMX) sum in an order that depends on the number of rows, so that the last bit of a few
numbers may differ. A product of one row would use another kernel, and one of two or three rows
takes longer than one of four, so these are computed as four rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.nn.functional import gelu, pad
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from lapa2_interp.errors import ModelError, unknown_choice
from lapa2_interp.models.fingerprint import weight_fingerprint
from lapa2_interp.models.machine import usable_memory

PrepackOption = Literal["auto", "on", "off"]
"""Prepack weights: auto prepacks those that fit the memory (`choose_prepacking`)."""
Prepacking = Literal["all", "lm_head", "none"]
"""Prepacked layers: every linear layer, the output layer alone (a small share of a large model, and
the layer that gains most), or none."""
MEMORY_SHARE = 0.5
"""Largest share of a machine's memory for the weights and prepacked copies of all workers."""
ROWS = 60
"""Rows that weights are prepacked for; the order also suits fewer and more rows."""
MIN_ROWS = 4
"""Rows of the smallest product."""

Module = Any
"""A `torch.nn.Module`."""

_prepacked_weights: weakref.WeakKeyDictionary[Any, _PrepackedWeight] = weakref.WeakKeyDictionary()


def choose_prepacking(network: Module, pack: str = "auto", workers: int = 1) -> Prepacking:
    """The layers of a network to prepack.

    The choice depends on the machine, the network and the number of workers, and not on the memory
    that is free now, so that a resumed run computes as it began.

    Args:
        pack: auto prepacks all layers if the weights and prepacked copies of all workers take at
            most `MEMORY_SHARE` of the memory; else the output layer, if that fits; else none.
        workers: Processes on this machine that hold the network.

    Raises:
        ModelError: Unknown `pack`, or "on" where nothing can be prepacked.
    """
    if pack not in get_args(PrepackOption):
        raise ModelError(unknown_choice("pack", pack, get_args(PrepackOption)))
    layers = list(_linear_layers(network))
    if pack == "off" or not can_prepack_layers(network):
        if pack == "on":
            raise ModelError(
                "pack 'on' needs linear layers in float32 or bfloat16 on a CPU, and a PyTorch with"
                " oneDNN that computes in this precision; use auto"
            )
        return "none"
    if pack == "on":
        return "all"
    budget = MEMORY_SHARE * usable_memory() / workers - sum(
        parameter.nbytes for parameter in network.parameters()
    )
    head = output_layer(network)
    if sum(layer.weight.nbytes for layer in layers) <= budget:
        return "all"
    return "lm_head" if head is not None and head.weight.nbytes <= budget else "none"


@contextmanager
def prepacked(network: Module, prepacking: Prepacking | None = None) -> Iterator[None]:
    """Compute the linear layers of a network with prepacked weights inside the block.

    Products with gradients, of another dtype or on another device, and those of layers whose
    `forward` was replaced, are computed as usual. Blocks may be nested.

    Args:
        network: A transformers model.
        prepacking: By default `choose_prepacking(network)`.
    """
    prepacking = choose_prepacking(network) if prepacking is None else prepacking
    # The layers to prepack, and GPT-2's activations.
    layers: list[Module] = [output_layer(network)] if prepacking == "lm_head" else []
    if prepacking == "all":
        layers = [*_linear_layers(network)]
        layers += [module for module in network.modules() if type(module) is NewGELUActivation]
    layers = [layer for layer in layers if layer is not None and "forward" not in vars(layer)]
    for layer in layers:
        stored = _prepacked_weights.get(layer)
        if stored is not None and stored.values != weight_fingerprint(layer.weight):
            del _prepacked_weights[layer]
    # Replace the forward functions inside the block.
    try:
        for layer in layers:
            layer.forward = _gelu if type(layer) is NewGELUActivation else _prepacked_forward(layer)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def output_layer(network: Module) -> Module | None:
    """The linear layer that computes the logits; None if there is none."""
    with suppress(AttributeError, NotImplementedError):  # transformers' word for: it has none
        head = network.get_output_embeddings()
        if head is not None:
            return next(_linear_layers(head), None)
    return None


def can_prepack(weight: Tensor) -> bool:
    """True if this weight can be prepacked here: on a CPU, in float32 or bfloat16, by a PyTorch
    with oneDNN that has the operations for it."""
    return weight.device.type == "cpu" and _prepacking_works(weight.dtype)


@cache
def _prepacking_works(dtype: torch.dtype) -> bool:
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    weight = torch.ones(16, 16, dtype=dtype)
    try:  # private operations; some processors have none for bfloat16
        product = torch.ops.mkldnn._linear_pointwise(weight, _reorder(weight), None, "none", [], "")
        return bool((product == 16).all())
    except (AttributeError, RuntimeError):
        return False


def _linear_layers(network: Module) -> Iterator[Module]:
    """Each linear layer once, without layers and weights of derived classes, such as quantised
    ones, and without those whose weights accelerate places before a pass."""
    return (
        module
        for module in network.modules()
        if type(module) in (Linear, Conv1D)
        and type(module.weight) in (Tensor, Parameter)
        and not hasattr(module, "_hf_hook")
    )


def can_prepack_layers(network: Module) -> bool:
    """True if a network has linear layers whose weights can be prepacked here."""
    layer = next(_linear_layers(network), None)
    return layer is not None and can_prepack(layer.weight)


def _reorder(weight: Float[Tensor, "out in"]) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)


class _PrepackedWeight:
    """The prepacked weight of a layer, with the facts by which a change of the weight is seen."""

    def __init__(self, layer: Module) -> None:
        weight = layer.weight
        rows = weight.detach().t() if isinstance(layer, Conv1D) else weight.detach()
        self.reordered = _reorder(rows)  # out in, in the processor's order
        self.values = weight_fingerprint(weight)
        self.weight, self.state = weakref.ref(weight), (weight.data_ptr(), weight._version)


def _prepacked_forward(layer: Module) -> Callable[[Tensor], Tensor]:
    """The layer's `forward`, with the prepacked weight where possible."""
    usual = type(layer).forward
    stored = _prepacked_weights.get(layer)
    product = torch.ops.mkldnn._linear_pointwise

    def forward(x: Tensor) -> Tensor:  # *rows in -> *rows out
        nonlocal stored
        weight: Any = layer.weight
        if (
            torch.is_grad_enabled()
            or type(x) is not Tensor
            or x.dtype != weight.dtype
            or x.device != weight.device
            or not x.numel()
            or weight.is_inference()
        ):
            return usual(layer, x)
        # Another tensor, or one that an operation has changed or moved, is prepacked again.
        if (
            stored is None
            or stored.state != (weight.data_ptr(), weight._version)
            or stored.weight() is not weight
        ):
            if not can_prepack(weight):
                return usual(layer, x)
            stored = _prepacked_weights[layer] = _PrepackedWeight(layer)
        n_rows = x.numel() // x.shape[-1]
        if n_rows >= MIN_ROWS:
            return product(x, stored.reordered, layer.bias, "none", [], "")
        few = pad(x.reshape(n_rows, -1), (0, 0, 0, MIN_ROWS - n_rows))
        out = product(few, stored.reordered, layer.bias, "none", [], "")
        return out[:n_rows].view(*x.shape[:-1], -1)

    return forward


def _gelu(x: Tensor) -> Tensor:
    """GPT-2's GELU; in half precision as transformers has it, which rounds after each operation."""
    if x.dtype != torch.float32 or torch.is_grad_enabled():
        return NewGELUActivation.forward(None, x)
    return gelu(x, approximate="tanh")
