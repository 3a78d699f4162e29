"""One decoding interface to both TransformerLens classes: prompt pass, expansion to samples, one step.

Rows are left-padded; the attention mask and (on the bridge) explicit positions go with every call. On TransformerBridge the
keys and values live in buffers of their final size that each step writes one slot of; HookedTransformer concatenates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from lapa2_interp.attention.hooked import Model, is_bridge
from lapa2_interp.layout import Layout


@runtime_checkable
class Rows(Protocol):
    """The decode state of stacked rows: what the network remembers of each."""

    def prompt_pass(self, layouts: Sequence[Layout]) -> Float[Tensor, "row vocab"]:
        """Read left-padded layouts; the logits of each row's last prompt token."""

    def expand(self, index: Int[Tensor, " expanded"], capacity: int) -> None:
        """Row i becomes a copy of old row index[i], with room for `capacity` keys."""

    def step(self, tokens: Int[Tensor, " row"]) -> Float[Tensor, "row vocab"]:
        """Append one token to each row; the logits after it."""


def open_rows(model: Model) -> Rows:
    """Fresh decode state for a model of either class."""
    return BridgeRows(model) if is_bridge(model) else HookedRows(model)


def padded_ids(layouts: Sequence[Layout], device: Any) -> tuple[Int[Tensor, "row slot"], Int[Tensor, "row slot"]]:
    """Ids and attention mask of left-padded layouts; padding repeats the row's BOS id, masked."""
    ids = torch.tensor([(each.ids[0],) * each.pad + each.ids for each in layouts], device=device)
    pads = torch.tensor([each.pad for each in layouts], device=device)
    return ids, (torch.arange(ids.shape[1], device=device) >= pads[:, None]).long()


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer in a buffer that is written in place and read as a view."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.used = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states.new_empty((*key_states.shape[:2], self.capacity, key_states.shape[3]))
        self.values = value_states.new_empty((*value_states.shape[:2], self.capacity, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.used + key_states.shape[-2]
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def expand(self, index: Int[Tensor, " expanded"], capacity: int) -> SlotLayer:
        wider = SlotLayer(capacity)
        wider.update(self.keys[index, :, : self.used], self.values[index, :, : self.used])
        return wider

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return self.capacity


class BridgeRows:
    """Rows of a TransformerBridge."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def _forward(self, ids: Tensor, positions: Tensor) -> Float[Tensor, "row vocab"]:
        used = self.cache.get_seq_length() + ids.shape[1]
        return self.model(
            ids,
            attention_mask=self.mask[:, :used],
            position_ids=positions,
            past_key_values=self.cache,
            logits_to_keep=1,
        )[:, -1]

    def prompt_pass(self, layouts: Sequence[Layout]) -> Float[Tensor, "row vocab"]:
        ids, self.mask = padded_ids(layouts, self.model.cfg.device)
        self.cache = Cache(layers=[SlotLayer(ids.shape[1]) for _ in range(self.model.cfg.n_layers)])
        self.positions = self.mask.sum(1, keepdim=True)
        return self._forward(ids, (self.mask.cumsum(1) - 1).clamp(min=0))

    def expand(self, index: Int[Tensor, " expanded"], capacity: int) -> None:
        self.cache = Cache(layers=[layer.expand(index, capacity) for layer in self.cache.layers])
        room = self.mask.new_ones((len(index), capacity - self.mask.shape[1]))
        self.mask = torch.cat([self.mask[index], room], dim=1)
        self.positions = self.positions[index]

    def step(self, tokens: Int[Tensor, " row"]) -> Float[Tensor, "row vocab"]:
        logits = self._forward(tokens[:, None], self.positions)
        self.positions = self.positions + 1
        return logits


class HookedRows:
    """Rows of a HookedTransformer, which derives positions from its own cache and mask."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def prompt_pass(self, layouts: Sequence[Layout]) -> Float[Tensor, "row vocab"]:
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        ids, mask = padded_ids(layouts, self.model.cfg.device)
        self.cache = TransformerLensKeyValueCache.init_cache(self.model.cfg, self.model.cfg.device, len(ids))
        return self.model(ids, attention_mask=mask, past_kv_cache=self.cache)[:, -1]

    def expand(self, index: Int[Tensor, " expanded"], capacity: int) -> None:
        for entry in self.cache.entries:
            entry.past_keys, entry.past_values = entry.past_keys[index], entry.past_values[index]
        self.cache.previous_attention_mask = self.cache.previous_attention_mask[index]

    def step(self, tokens: Int[Tensor, " row"]) -> Float[Tensor, "row vocab"]:
        ids = tokens[:, None]
        return self.model(ids, attention_mask=torch.ones_like(ids), past_kv_cache=self.cache)[:, -1]
