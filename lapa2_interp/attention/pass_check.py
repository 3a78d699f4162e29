"""A check of each forward pass of a block: it reads the rows of the block's layouts."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from lapa2_interp._util.errors import LayoutError, ModelError
from lapa2_interp.bias.layer_types import LayerType, describe_runs
from lapa2_interp.bias.layout import Layout
from lapa2_interp.models.attention_interface import check_matrix_fits
from lapa2_interp.models.cache_name import cache_of
from lapa2_interp.models.facts import Model, facts_of

MASK_CHECK_INTERVAL = 64
"""Tokens between two checks of the mask, in passes of one token."""


class PassCheck:
    """A check of a block's forward passes: the arguments of each are compared with the layouts.

    Args:
        live: The slots of the first pass that are not padding, also after the texts; by default
            all but the layouts' padding.

    Attributes:
        is_ours: True if the pass's ids are known to be those of the layouts.
    """

    def __init__(
        self,
        model: Model,
        layouts: Sequence[Layout],
        check_ids: bool,
        live: Bool[Tensor, "row query"] | None = None,
    ) -> None:
        self.model, self.layouts, self.check_ids = model, layouts, check_ids
        width = max(map(len, layouts))
        ids = [[-1] * row_layout.bos.start + list(row_layout.ids) for row_layout in layouts]
        self.ids = torch.tensor([row + [-1] * (width - len(row)) for row in ids])  # layout slot
        slot = torch.arange(width)
        soft, pad, stop = (
            torch.tensor([[number(row_layout)] for row_layout in layouts])
            for number in (
                lambda row_layout: row_layout.soft,
                lambda row_layout: row_layout.pad,
                len,
            )
        )
        self.pads, self.in_layout = pad, slot < stop
        self.live = (slot < soft) | (slot >= soft + pad)  # layout slot
        if live is not None:
            self.live, self.in_layout = live, torch.ones_like(live)
        self.first, self.is_ours = 0, False
        self.sights: dict[tuple[LayerType, int], Tensor] = {}  # layout slot
        self.unread: Tensor | None = None

    def begin(self, arguments: dict[str, Any]) -> int:
        """Compare a pass's arguments with the layouts, and add the positions of padded rows.

        Returns:
            The slot of its first query.

        Raises:
            LayoutError: The pass reads other tokens, masks other slots, or cannot be given
                positions.
        """
        self.is_ours = False
        if "tokens" in arguments:  # the ids that a HookedTransformer embeds
            self.unread = arguments["tokens"]
            return self.first
        self.first = n_cached_keys(arguments)
        self._check_mask(arguments)
        if facts_of(self.model).backend != "hooked" and facts_of(self.model).backend != "plain":
            check_matrix_fits(
                facts_of(self.model).network, arguments, "the model has hooks on them"
            )
        if facts_of(self.model).backend == "hooked" and facts_of(self.model).backend != "plain":
            return self.first
        ids = arguments.get("input_ids")
        if ids is not None:
            self._check_ids(ids)
        if self.pads.any() and arguments.get("position_ids") is None:
            inputs = arguments.get("inputs_embeds") if ids is None else ids
            self._add_positions(arguments, inputs)
        return self.first

    def first_query(self, attention: Tensor) -> int:
        """The slot of the first query, from scores or pattern [row head query key]."""
        # A HookedTransformer's only cache concatenates, and its `generate` does not call the
        # module's hooks; the bridge's cache may have more slots than live keys.
        if facts_of(self.model).backend == "hooked":
            self.first = attention.shape[3] - attention.shape[2]
            ids, self.unread = self.unread, None
            if ids is not None:
                self._check_ids(ids)
        check_cache_complete(attention.shape[2], attention.shape[3], self.first)
        return self.first

    def _repeat_rows(self, table: Tensor, n_rows: int) -> Tensor | None:
        """A table of the layouts for the rows of a pass, in which the copies of a row follow each
        other; None if the pass has other rows, which `BatchBias` refuses."""
        copies, left = divmod(n_rows, len(table))
        return None if left else table.repeat_interleave(copies, 0)

    def _check_ids(self, ids: Int[Tensor, "row query"]) -> None:
        stop = min(self.first + ids.shape[1], self.ids.shape[1])
        wanted = self._repeat_rows(self.ids[:, self.first : stop], len(ids))
        if not self.check_ids or wanted is None:
            return
        self.is_ours = True
        read_ids = ids[:, : wanted.shape[1]].cpu()
        if (wrong := ((wanted >= 0) & (read_ids != wanted)).nonzero()).numel():
            row, query = wrong[0].tolist()
            raise LayoutError(
                f"row {row} reads {self._shown(read_ids[row, query])} in slot {self.first + query},"
                f" where its layout has {self._shown(wanted[row, query])}; feed the layout's own"
                " ids (layout.tensor), or give check_ids=False to augment other tokens"
            )

    def check_sight(
        self,
        layer: int,
        layer_type: LayerType,
        scores: Float[Tensor, "row head query key"],
        first: int,
    ) -> None:
        """Refuse a layer whose mask leaves its last query other keys than its type says: l would
        count other keys than the layer sees.

        Passes of one query are checked every `MASK_CHECK_INTERVAL` tokens.

        Args:
            scores: As the model has masked them, before any hook.

        Raises:
            ModelError: The layer sees other keys.
        """
        last = first + scores.shape[2] - 1
        if scores.shape[2] == 1 and last % MASK_CHECK_INTERVAL:
            return
        if (layer_type, last) not in self.sights:
            self.sights = {key: sight for key, sight in self.sights.items() if key[1] == last}
            self.sights[layer_type, last] = self._keys_in_sight(layer_type, last)
        wanted = self._repeat_rows(self.sights[layer_type, last], len(scores))
        if wanted is None:
            return
        seen_keys = has_weight(scores[:, :, -1, : last + 1])
        reads_text = wanted[:, -1]  # row; padding sees nothing
        if (wrong := ((seen_keys != wanted).any(1) & reads_text).nonzero()).numel():
            row = int(wrong[0])
            sees, should = (
                describe_runs(keys[row].nonzero()[:, 0].tolist()) for keys in (seen_keys, wanted)
            )
            raise ModelError(
                f"layer {layer} is of type {layer_type} by the model's configuration, and its query"
                f" in slot {last} sees the keys in slots {sees or 'none'}, not {should}; if no mask"
                " of yours hides keys there, and no score is some 700 below the highest, this"
                " model's masks are not known here and it cannot be augmented in texts of this"
                " length"
            )

    def _keys_in_sight(self, layer_type: LayerType, query: int) -> Bool[Tensor, "layout slot"]:
        """The keys that a query sees in layers of a type."""
        slot = torch.arange(query + 1)
        live = pad(self.live, (0, max(query + 1 - self.live.shape[1], 0)), value=True)
        starts = [
            int(layer_type.first_seen(np.array([query]), layout.pad)[0]) for layout in self.layouts
        ]
        return live[:, : query + 1] & (slot >= torch.tensor(starts)[:, None])

    def _shown(self, token: Tensor) -> str:
        tokenizer = getattr(self.model, "tokenizer", None)
        text = "" if tokenizer is None else f" ({tokenizer.decode([int(token)])!r})"
        return f"token {int(token)}{text}"

    def _check_mask(self, arguments: dict[str, Any]) -> None:
        """Refuse a pass that does not mask its layouts' padding: spans would cover other keys.

        Masks that transformers' `generate` makes (one for each layer type, or by query) are not
        checked; transformers makes the masks from the padding it was given.
        """
        mask, width = arguments.get("attention_mask"), self.live.shape[1]
        start = 0
        if "input" in arguments or "past_kv_cache" in arguments:
            start = self.first  # a HookedTransformer stores the mask of cached keys
        if mask is None:
            if self.pads.any() and start < width:
                raise LayoutError(
                    "the layouts are left-padded but the forward pass has no attention_mask; pass"
                    " the rows' mask (PaddedRows.of(layouts).mask)"
                )
        elif isinstance(mask, Tensor) and mask.ndim == 2:
            live, in_layout = (
                self._repeat_rows(table[:, start : start + mask.shape[1]], len(mask))
                for table in (self.live, self.in_layout)
            )
            if live is None or in_layout is None:
                return
            given_live = (mask[:, : live.shape[1]] != 0).cpu()
            if (wrong := (in_layout & (given_live != live)).nonzero()).numel():
                row, slot = wrong[0].tolist()
                raise LayoutError(
                    f"row {row} masks {int((~given_live[row]).sum())} slots where its layout has"
                    f" {int((~live[row]).sum())} of padding (slot {start + slot} differs); give one"
                    " layout a row, in the rows' order, as PaddedRows.of(layouts) has them"
                )

    def _add_positions(self, arguments: dict[str, Any], inputs: Tensor | None) -> None:
        """Add the positions that each row alone would have: transformers counts padding."""
        network = facts_of(self.model).network
        if "position_ids" in signature(network.forward).parameters and inputs is not None:
            slots = torch.arange(self.first, self.first + inputs.shape[1])
            positions = self._repeat_rows((slots - self.pads).clamp(min=0), len(inputs))
            if positions is not None:
                arguments["position_ids"] = positions.to(inputs.device)
        elif getattr(getattr(self.model, "cfg", None), "positional_embedding_type", "") != "alibi":
            raise LayoutError(
                f"{type(network).__name__} takes no position_ids, so that left-padded rows would"
                " be read at other positions than alone; read rows of one length together"
            )


def has_weight(scores: Float[Tensor, "row head key"]) -> Bool[Tensor, "row key"]:
    """The keys to which a query gives a weight in any head, however small: those that no mask
    hides.

    A mask may be -inf, a dtype's smallest number, or any other that no score outweighs, and may be
    added or set. In float64 the weights of hidden keys are 0, and those of others are not, down to
    scores of 700 below the highest.
    """
    return (scores.detach().cpu().double().softmax(2) > 0).any(1)


def check_cache_complete(n_queries: int, n_keys: int, first: int) -> None:
    """Refuse a cache that has dropped keys."""
    if n_keys < first + n_queries:
        raise LayoutError(
            f"the cache holds {n_keys} keys of the {first + n_queries} read so far (a sliding"
            " window drops old ones), so slots are unknown; use a cache that keeps all keys,"
            " such as transformers' DynamicCache()"
        )


def n_cached_keys(kwargs: dict[str, Any]) -> int:
    """The number of keys in the cache that a pass is given, by either library's argument."""
    if (cache := cache_of(kwargs)) is not None:
        return int(cache.get_seq_length())  # some caches count in a tensor that changes later
    hooked = kwargs.get("past_kv_cache")
    return 0 if hooked is None else hooked.previous_attention_mask.shape[1]
