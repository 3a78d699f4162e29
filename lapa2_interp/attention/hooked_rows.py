"""Rows of a HookedTransformer, which concatenates keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapa2_interp._util.errors import PrefixError, parameter
from lapa2_interp.attention.cache import (
    CachedRows,
    check_readable,
    check_window,
    soft_keys_and_values,
)
from lapa2_interp.bias.layout import Layout
from lapa2_interp.prefixes.soft_prefix import SoftPrefix


class HookedRows(CachedRows):
    """Rows of a HookedTransformer, which derives positions from its own cache and mask: soft slots
    always shift them."""

    def _open(
        self, layouts: Sequence[Layout], prefixes: Sequence[SoftPrefix | None] | None
    ) -> None:
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        check_readable(self.model, layouts)
        self.cache = TransformerLensKeyValueCache.init_cache(
            self.model.cfg, self.model.cfg.device, len(layouts)
        )
        soft = soft_keys_and_values(self.model, layouts, prefixes)
        if soft is None:
            return
        unshifted = [
            prefix for prefix in prefixes or () if prefix is not None and not prefix.card.shifted
        ]
        if unshifted:
            raise PrefixError(
                f"{unshifted[0]!r} needs positions that start at 0, and a HookedTransformer's"
                " always follow its cache; use TransformerBridge, or a prefix trained with"
                f" shifted positions ({parameter('shifted', 'true', 'set')})"
            )
        for entry, block, keys, values in zip(
            self.cache.entries, self.model.blocks, *soft.transpose(3, 4), strict=True
        ):
            entry.past_keys, entry.past_values = _before_rotation(block.attn, keys), values
        self.cache.previous_attention_mask = self.mask[:, : soft.shape[4]]

    def _forward(
        self, ids: Tensor, positions: Tensor, keep: int = 1
    ) -> Float[Tensor, "row query vocab"]:
        first = self.cache.previous_attention_mask.shape[1]
        used = first + ids.shape[1]
        check_window(self.model, self.layouts, used)
        return self.model(ids, attention_mask=self.mask[:, first:used], past_kv_cache=self.cache)[
            :, -keep:
        ]

    def _select(self, index: Int[Tensor, " expanded"], capacity: int) -> None:
        for entry in self.cache.entries:
            entry.past_keys, entry.past_values = entry.past_keys[index], entry.past_values[index]
        self.cache.previous_attention_mask = self.cache.previous_attention_mask[index]

    def _keep(self, slots: Int[Tensor, "row kept"], capacity: int) -> None:
        row = torch.arange(len(slots), device=slots.device)[:, None]
        for entry in self.cache.entries:
            entry.past_keys, entry.past_values = (
                entry.past_keys[row, slots],
                entry.past_values[row, slots],
            )
        self.cache.previous_attention_mask = self.mask[:, : slots.shape[1]]

    def crop(self, n: int) -> None:
        for entry in self.cache.entries:
            entry.past_keys, entry.past_values = entry.past_keys[:, :-n], entry.past_values[:, :-n]
        self.cache.previous_attention_mask = self.cache.previous_attention_mask[:, :-n]
        self.positions = self.positions - n


def _before_rotation(
    attention: Any, keys: Float[Tensor, "row slot kv_head d_head"]
) -> Float[Tensor, "row slot kv_head d_head"]:
    """Keys of soft slots as a HookedTransformer's cache holds keys: it turns all of them by their
    positions in each pass, and soft prefixes are stored as they are after that."""
    if attention.cfg.positional_embedding_type != "rotary":
        return keys
    cos, sin = (
        table[: keys.shape[1], None].to(keys.device, torch.promote_types(keys.dtype, torch.float32))
        for table in (attention.rotary_cos, attention.rotary_sin)
    )
    turned, unturned = keys.tensor_split([cos.shape[2]], dim=3)
    back = turned * cos - attention.rotate_every_two(turned) * sin
    return torch.cat([(back / (cos**2 + sin**2)).to(keys.dtype), unturned], dim=3)
