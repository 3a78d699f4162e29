"""The cached keys and values of a layer, and products with them without copies.

A layer's keys and values lie in one buffer, token by token (`SlotLayer`). Where query heads share a
key-value head, transformers' `repeat_kv` copies every cached slot, in every layer at every step. At
130 keys the copies take a third of a step's time; views (`CachedHeads`) avoid the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from lapa2_interp.models.attention_interface import shared_product
from lapa2_interp.models.facts import Model, facts_of

_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]


class CachedHeads(Tensor):
    """A view of cached keys or values that replaces the repeated tensor.

    It has the repeated tensor's shape and transpose, and products that read each shared head once.
    Every other operation gets a plain, repeated tensor.
    """

    repeats = 1

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.matmul and isinstance(args[1], cls) and args[1].dim() == 4:
                left = args[0]._copied() if isinstance(args[0], cls) else args[0]
                return shared_product(left, args[1].as_subclass(Tensor))
            if isinstance(args[0], cls):
                view = args[0]
                if func == _SHAPE:
                    return torch.Size((len(view), view.shape[1] * view.repeats, *view.shape[2:]))
                if func is Tensor.transpose and args[1:] in ((-2, -1), (2, 3)):
                    return cls._repeated(view.transpose(-2, -1), view.repeats)
                if view.repeats == 1 and func in (Tensor.__getitem__, Tensor.expand):
                    return func(*args, **kwargs).as_subclass(cls)
                if func is Tensor.reshape and view.dim() == len(args) == 5 and view.stride(2) == 0:
                    # repeat_kv's last step: (row, kv_head, repeat, slot, d_head) becomes (row,
                    # head, slot, d_head)
                    return cls._repeated(view[:, :, 0], view.shape[2])
            args, kwargs = tree_map_only(cls, cls._copied, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def _repeated(cls, heads: Tensor, repeats: int) -> CachedHeads:
        view = heads.as_subclass(cls)
        view.repeats = repeats
        return view

    def _copied(self) -> Tensor:
        plain = self.as_subclass(Tensor)
        return plain if self.repeats == 1 else plain.repeat_interleave(self.repeats, dim=1)


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer in a buffer that is written in place and read as a view.

    Args:
        shared: Query heads share a key-value head: give the model views whose repetition costs
            nothing (`CachedHeads`).
    """

    is_sliding = False

    def __init__(self, capacity: int, shared: bool) -> None:
        super().__init__()
        self.capacity, self.shared = capacity, shared
        self.used = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states.new_empty(
            (*key_states.shape[:2], self.capacity, key_states.shape[3])
        )
        self.values = value_states.new_empty(
            (*value_states.shape[:2], self.capacity, value_states.shape[3])
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.device != key_states.device:
            # A soft prefix was stored before the layer's device was known.
            self.keys, self.values = (
                self.keys.to(key_states.device),
                self.values.to(key_states.device),
            )
        end = self.used + key_states.shape[-2]
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        self.used = end
        keys, values = self.keys[:, :, :end], self.values[:, :, :end]
        if self.shared and type(keys) is Tensor:  # a distributed tensor is none
            return keys.as_subclass(CachedHeads), values.as_subclass(CachedHeads)
        return keys, values

    def expand(self, index: Int[Tensor, " expanded"], capacity: int) -> SlotLayer:
        wider = SlotLayer(capacity, self.shared)
        index = index.to(self.keys.device)
        wider.update(self.keys[index, :, : self.used], self.values[index, :, : self.used])
        return wider

    def pack(self, slots: Int[Tensor, "row kept"], capacity: int) -> SlotLayer:
        packed, slots = SlotLayer(capacity, self.shared), slots.to(self.keys.device)
        row = torch.arange(len(slots), device=slots.device)[:, None]
        # row kept kv_head d_head -> row kv_head kept d_head
        packed.update(*(x[row, :, slots].transpose(1, 2) for x in (self.keys, self.values)))
        return packed

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length  # its name in the first versions of transformers 5


def new_cache_layers(model: Model, make_layer: Callable[[], CacheLayerMixin]) -> list[Any]:
    """The layers of a new cache: those of `make_layer` where a layer of the model caches keys and
    values and nothing else.

    Layers without own keys (recurrent layers, and those that share another layer's) have the cache
    layer of transformers.
    """
    network: Any = facts_of(model).network
    layers = DynamicCache(config=network.config.get_text_config()).layers
    return [
        make_layer()
        if isinstance(layer, DynamicLayer) and not hasattr(layer, "conv_states")
        else layer
        for layer in layers
    ]
