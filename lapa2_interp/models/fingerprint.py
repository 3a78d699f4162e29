"""Fingerprints of weights: another number after any change of their values.

    with weights_read_once():
        before = fingerprint(network)

What is made of weights (their prepacked form, the hash that identifies a model) is valid as long
as they have the same fingerprint. PyTorch's own counter of changes, `tensor._version`, does not
count what is written through `weight.data`, as adapters are merged, weights are pruned and
optimisers step. So the values are read, once a call: as much memory as one decoding
step reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import xxhash
from jaxtyping import Int, UInt8

from lapa2_interp.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CHUNK = 1 << 16
"""Numbers that one sum covers, on an accelerator."""
MIXER = 0x1E3779B97F4A7C15
"""An odd number whose bits look random."""
TABLES = ("attn.mask", "attn.IGNORE")
"""Ends of the names of a HookedTransformer's buffers that are no weights: [query key] tables."""

_read: ContextVar[dict[int, tuple[weakref.ref[Tensor], tuple, bytes]] | None] = ContextVar(
    "read", default=None
)


@contextmanager
def weights_read_once() -> Iterator[None]:
    """Inside the block every weight is read once, however often its fingerprint is asked for.

    A block belongs around one call, in which nobody writes weights through `.data`; other changes
    are seen inside it, too. Blocks may be nested. It also serves as a decorator.
    """
    if _read.get() is not None:
        yield
        return
    token = _read.set({})
    try:
        yield
    finally:
        _read.reset(token)


def fingerprint(network: Any) -> bytes:
    """A fingerprint of the names, shapes, types and values of a network's weights, of its buffers,
    and of the state of its adapters.

    Weights that are nowhere count by name, shape and type alone.

    Raises:
        ModelError: Weights are in an object that cannot be read.
    """
    digest = xxhash.xxh3_128()
    for name, weight in network_tensors(network):
        if not name.endswith(TABLES):
            digest.update(name.encode())
            digest.update(weight_fingerprint(weight() if callable(weight) else weight))
    digest.update(repr(adapter_states(network)).encode())
    return digest.digest()


def network_tensors(network: Any) -> list[tuple[str, Tensor | Callable[[], Tensor]]]:
    """The tensors that a network computes with, by name: those of its `state_dict`, and buffers
    that it lacks (such as rotary frequencies), without those that a forward pass itself changes.

    In place of a weight that accelerate keeps elsewhere there is a function that reads it from
    there, since memory may not hold all of them.

    Raises:
        ModelError: Weights are in an object that cannot be read; or a function does not find its
            weight.
    """
    tensors: list[tuple[str, Tensor | Callable[[], Tensor]]] = []
    offloaded = _offloaded_weights(network)
    for name, entry in network.state_dict(keep_vars=True).items():
        parts = [(name, entry)] if hasattr(entry, "is_meta") else _packed_tensors(name, entry)
        for part_name, tensor in parts:
            if id(tensor) in offloaded:
                weights, key = offloaded[id(tensor)]
                reader = partial(_read_offloaded, part_name, weights, key, tensor.dtype)
                tensors.append((part_name, reader))
            else:
                tensors.append((part_name, tensor))
    for path, module in network.named_modules():
        for buffer in sorted(getattr(module, "_non_persistent_buffers_set", ())):
            name, tensor = f"{path}.{buffer}", module._buffers.get(buffer)
            if tensor is not None and not _changes_in_passes(module, buffer):
                tensors.append((name, tensor))
    return tensors


def _read_offloaded(
    name: str, weights: Mapping[str, Tensor], key: str, dtype: torch.dtype
) -> Tensor:
    try:
        return weights[key].to(dtype)
    except KeyError:
        raise ModelError(
            f"accelerate does not find the weight {name}, which it has offloaded under another"
            " name; offload the model without preload_module_classes, or use TransformersModel"
        ) from None


def offload_hooks(network: Any) -> Iterator[tuple[Any, Any]]:
    """The modules whose weights accelerate brings to a device for each pass, and its hooks."""
    for module in network.modules():
        # Not by getattr: a module of TransformerLens also has the attributes of the one inside it.
        hook = vars(module).get("_hf_hook")
        for part in getattr(hook, "hooks", [hook]):
            if getattr(part, "offload", False):
                yield module, part


def _offloaded_weights(network: Any) -> dict[int, tuple[Mapping[str, Tensor], str]]:
    """By id of the empty tensor in its place, the mapping that holds an offloaded weight, and its
    key there."""
    offloaded = {}
    for module, hook in offload_hooks(network):
        inside = {"recurse": hook.place_submodules}
        for name, tensor in (*module.named_parameters(**inside), *module.named_buffers(**inside)):
            if tensor.is_meta:
                offloaded[id(tensor)] = hook.weights_map, name
    return offloaded


def _packed_tensors(name: str, entry: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an entry of a `state_dict` into which a quantised layer packs several."""
    import torch

    if hasattr(entry, "is_meta"):
        yield name, entry
    elif isinstance(entry, tuple | list):
        for i, part in enumerate(entry):
            yield from _packed_tensors(f"{name}.{i}", part)
    elif not isinstance(entry, torch.dtype | str | int | float | None):
        raise ModelError(
            f"the weights in {name} are packed in a {type(entry).__name__}, so that a change of"
            " them could not be seen; load the model without this quantisation"
        )


def _changes_in_passes(module: Any, buffer: str) -> bool:
    """True for rotary frequencies that each pass chooses by its length; what it chooses from is a
    buffer of its own (original_inv_freq)."""
    prefix, marker, _ = buffer.partition("inv_freq")
    if not marker or prefix.endswith("original_"):
        return False
    kinds = getattr(module, "rope_type", "")
    kind = kinds if isinstance(kinds, str) else kinds.get(prefix.removesuffix("_"), "")
    return kind == "longrope" or "dynamic" in kind


def adapter_states(network: Any) -> list[tuple]:
    """What the layers of adapters (PEFT) compute with beside weights: which are active, merged or
    disabled, and their scale."""
    return [
        (name, disabled, module.active_adapters, module.merged_adapters, _sorted_scale(module))
        for name, module in network.named_modules()
        if isinstance(disabled := getattr(module, "disable_adapters", None), bool)
    ]


def _sorted_scale(layer: Any) -> list[tuple[str, float]]:
    return sorted(dict(getattr(layer, "scaling", None) or {}).items())


def weight_fingerprint(weight: Tensor) -> bytes:
    """A fingerprint of one weight: 128 bits of its shape, type and values."""
    memory = _read.get()
    if memory is None:
        return values_digest(weight)
    # What moves at once when a weight is replaced, moved, converted or written to, except through
    # `.data`.
    version = -1 if weight.is_inference() else weight._version
    address = 0 if weight.is_meta or hasattr(weight, "__tensor_flatten__") else weight.data_ptr()
    state = address, version, weight.dtype, weight.device, tuple(weight.shape)
    weight_then, state_then, digest = memory.get(id(weight), (None, None, b""))
    if weight_then is None or weight_then() is not weight or state != state_then:
        digest = values_digest(weight)
        memory[id(weight)] = weakref.ref(weight), state, digest
    return digest


def plain_tensors(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors inside a tensor; a quantised one has several."""
    if getattr(tensor, "is_quantized", False):
        yield tensor.dequantize()
        return
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from plain_tensors(getattr(tensor, name))


def values_digest(weight: Tensor) -> bytes:
    """A digest of a tensor's shape, type and values, as they are now."""
    import torch

    digest = xxhash.xxh3_128(f"{weight.dtype} {tuple(weight.shape)}".encode())
    is_plain = not weight.is_quantized and not hasattr(weight, "__tensor_flatten__")
    for tensor in (weight,) if is_plain else plain_tensors(weight):
        if tensor.is_meta or not tensor.numel():
            continue
        content = tensor.detach().contiguous().flatten().view(torch.uint8)
        if content.device.type != "cpu":
            content = _sums(content).cpu().view(torch.uint8)
        digest.update(content.numpy().data)
    return digest.digest()


def _sums(content: UInt8[Tensor, " byte"]) -> Int[Tensor, " sum"]:
    """Sums of the content as 64-bit numbers, each times an odd number of its place, modulo 2^64.

    Another value at one place alone always gives another sum. They are computed where the weight
    is, and few enough to be copied.
    """
    import torch

    width = CHUNK * 8
    padded = torch.nn.functional.pad(content, (0, -len(content) % width))
    numbers = padded.view(torch.int64).view(-1, CHUNK)
    # A product drops what it shifts beyond the highest bit, so high bits move to low ones first.
    mixed = numbers * MIXER
    mixed ^= mixed >> 32 & 0xFFFFFFFF
    return (mixed * _factors(content.device)).sum(1)


@cache
def _factors(device: torch.device) -> Int[Tensor, " place"]:
    import torch

    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=generator)
    return (drawn | 1).to(device)
