"""Fused weights of a TransformerBridge, and the copies of their parts that it computes with.

For some architectures (GPT-NeoX, Bloom, Falcon, MPT) TransformerLens splits a fused projection into
copies when it wraps a network, and reads the fused one no more: an edit of it changes the weights,
and no logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lapa2_interp.errors import ModelError
from lapa2_interp.models.fingerprint import values_digest

SPLITTERS = MappingProxyType(
    {"split_qkv_matrix": ("q", "k", "v"), "split_gate_up_matrix": ("gate", "in")}
)
"""Methods of TransformerLens' components that split a fused weight, and the names of the parts."""


def fused_weights(network: Any) -> dict[str, bytes]:
    """A digest of the values of each fused weight, by the name of its module."""
    return {path: _digest_of(pairs) for path, pairs in _split_pairs(network)}


def check_fused_weights(network: Any, before: dict[str, bytes]) -> dict[str, bytes]:
    """Refuse a network with a fused weight that was edited, without the copies of its parts.

    Args:
        before: `fused_weights` before the edit.

    Returns:
        `fused_weights` as they are now.

    Raises:
        ModelError: There is one.
    """
    now = {}
    for path, pairs in _split_pairs(network):
        now[path] = _digest_of(pairs)
        agree = all(torch.equal(fused, copy) for fused, copy in pairs)
        if not agree and now[path] != before.get(path):
            raise ModelError(
                f"the fused weight of {path} was edited, and a TransformerBridge computes with"
                " copies of its parts, which were not; edit those (as"
                " model.blocks[0].attn.q.weight), or use TransformersModel"
            )
    return now


def _digest_of(pairs: list[tuple[Tensor, Tensor]]) -> bytes:
    return b"".join(values_digest(fused) for fused, _ in pairs)


def _split_pairs(network: Any) -> Iterator[tuple[str, list[tuple[Tensor, Tensor]]]]:
    """By module, the parts of its fused weight beside those that are in use: copies, or views that
    a cast or a deep copy of the model makes copies."""
    for path, module in network.named_modules():
        for splitter, names in SPLITTERS.items():
            split = getattr(module, splitter, None)
            if split is None or any(weight.is_meta for weight in module.parameters()):
                continue
            # The split makes linear layers, which draw their first weights.
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                parts = split(module.original_component)
            pairs = [
                (fused.detach(), copy.detach())
                for part, name in zip(parts, names, strict=True)
                for fused, copy in zip(
                    part.parameters(),
                    getattr(module, name).original_component.parameters(),
                    strict=True,
                )
            ]
            yield path.replace("._original_component", ""), pairs
