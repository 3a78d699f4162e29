"""Products with cached keys and values without copies for grouped-query attention.

Where query heads share a key-value head, transformers' `repeat_kv` copies every cached slot, in
every layer at every step. At 130 keys that is a third of a step's time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lapa2_interp.models.attention_interface import shared_product

_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]


class CachedHeads(Tensor):
    """A view of cached keys or values that replaces the repeated tensor.

    It has the repeated tensor's shape and transpose, and products that read each shared head once.
    Every other operation gets a plain, repeated tensor.
    """

    repeats = 1

    @classmethod
    def of(cls, heads: Tensor) -> Tensor:
        """The heads as such a view; a tensor of another class, such as a distributed one, is
        returned unchanged."""
        return heads.as_subclass(cls) if type(heads) is Tensor else heads

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
                    return cls.of(func(*args, **kwargs))
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
