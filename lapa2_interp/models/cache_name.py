"""The name of the argument by which a network takes its cache of keys and values.

It is `cache` from transformers 5.24 on and was `past_key_values` before, and models with code of
their own keep the old one. The bridges of TransformerLens 4.3 read old names alone, so without
`let_bridges_read` their cache stays empty and a step sees its own tokens only
(docs/known-upstream.md).
"""

from __future__ import annotations

from inspect import signature
from typing import Any

NEW = "cache"
OLD = "past_key_values"
READ_BY_BRIDGES = (OLD, "cache_params")
"""The names by which attention and recurrent layers of a TransformerBridge look for a cache."""


def cache_name(network: Any) -> str:
    """The name of the cache among the arguments and outputs of a transformers model."""
    return NEW if NEW in signature(network.forward).parameters else OLD


def let_bridges_read(network: Any) -> None:
    """Give the layers of a TransformerBridge the cache by the names that they read, from now on,
    and the network and the modules that they wrap by its own name; networks that take the old name
    are not changed.

    Args:
        network: The transformers model inside the bridge.
    """
    if not hasattr(network, "config") or cache_name(network) == OLD:
        return
    from transformer_lens.model_bridge.generalized_components import (
        AttentionBridge,
        GatedDeltaNetBridge,
    )

    parts: list[Any] = [
        part
        for part in network.modules()
        if isinstance(part, AttentionBridge | GatedDeltaNetBridge)
        and NEW in signature(part.original_component.forward).parameters
    ]
    if not parts or _to_old_names in parts[0]._forward_pre_hooks.values():
        return
    for part in parts:
        part.register_forward_pre_hook(_to_old_names, with_kwargs=True)
    for module in (network, *(part.original_component for part in parts)):
        module.register_forward_pre_hook(_to_new_name, with_kwargs=True)


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _to_old_names(part: Any, args: tuple, kwargs: dict[str, Any]) -> Call:
    rest = {name: value for name, value in kwargs.items() if name != NEW}
    return args, rest | dict.fromkeys(READ_BY_BRIDGES, kwargs.get(NEW))


def _to_new_name(part: Any, args: tuple, kwargs: dict[str, Any]) -> Call:
    if OLD not in kwargs:
        return args, kwargs
    rest = {name: value for name, value in kwargs.items() if name not in READ_BY_BRIDGES}
    return args, rest | {NEW: kwargs[OLD] if kwargs.get(NEW) is None else kwargs[NEW]}
