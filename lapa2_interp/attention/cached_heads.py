"""Products with cached keys and values without copies for grouped-query attention.

Where query heads share a key-value head, transformers' `repeat_kv` copies every cached slot, in
every layer at every step. At 130 keys that is a third of a step's time.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map_only


class CachedHeads(Tensor):
    """A view of cached keys or values that replaces the repeated tensor.

    It has the repeated tensor's shape and transpose, and products that read each shared head once.
    In half precision on a CPU, where products need dense matrices, the copy made here keeps the
    order in memory; PyTorch's own copy would transpose, which is slow. Every other operation gets a
    plain, repeated tensor.
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
                return args[1]._product(*tree_map_only(cls, cls._copied, args[:1]))
            if isinstance(args[0], cls):
                view = args[0]
                if func == Tensor.shape.__get__:  # type: ignore[attr-defined]
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

    def _product(
        self, left: Float[Tensor, "row head query inner"]
    ) -> Float[Tensor, "row head query outer"]:
        grouped = left.reshape(*self.shape[:2], self.repeats * left.shape[2], left.shape[3])
        right = self.as_subclass(Tensor)
        if right.device.type == "cpu" and right.dtype in (torch.bfloat16, torch.float16):
            right = right.clone()  # dense, in the order it has
        return (grouped @ right).view(*left.shape[:3], self.shape[3])

    def _copied(self) -> Tensor:
        plain = self.as_subclass(Tensor)
        return plain if self.repeats == 1 else plain.repeat_interleave(self.repeats, dim=1)
