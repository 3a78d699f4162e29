"""The guard of `augmented`: what its door refuses, and what is watched in the passes of its block.

`guard_rows` checks the arguments of a block. `GuardedRows` compares every pass with the layouts: once
before the pass with its arguments, once with the keys that its first layer shows, and in each layer
with the keys that the layer's mask leaves in sight.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from lapa2_interp.attention.batch_bias import BatchBias, CapCallback
from lapa2_interp.bias.augmentation import (
    Augmentation,
    AugmentationLike,
    active_augmentations,
    broadcast_to_rows,
)
from lapa2_interp.bias.layer_types import LayerType, describe_layers, describe_runs
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.recipes import parse_recipes
from lapa2_interp.errors import DeadHookError, LayoutError, ModelError, TraceError
from lapa2_interp.models.attention_interface import check_matrix_fits
from lapa2_interp.models.blocks import has_open_block
from lapa2_interp.models.facts import AUTO_SCORES, Model, facts_of
from lapa2_interp.models.positions import rows_problem
from lapa2_interp.models.rotary import refuse_mixed_rotary

MASK_CHECK_INTERVAL = 64
"""Tokens between two checks of the mask, in passes of one token."""
SINK_ERROR = (
    "this model's attention has a learned sink beside its keys, so what reads the scores cannot"
    " know or reach a share; use law log, scale or cut"
)


def guard_rows(
    model: Model,
    augmentation: Augmentation | Sequence[AugmentationLike] | str | None,
    layout: Layout | Sequence[Layout] | None,
    check_ids: bool,
    capped: CapCallback | None,
    learned: Float[Tensor, "layer head"] | None = None,
) -> GuardedRows:
    """The rows of a block whose layouts are given.

    Raises:
        LayoutError: There is no layout, or another number of them than of augmentations; or one of
            either is none; or the network reads padded rows otherwise than alone.
        AugmentationError, ModelError: As `GuardedRows`.
    """
    if layout is None:
        raise LayoutError(
            "augmented was given no layout; give one, such as Layout.of(...), or find=..., a text"
        )
    layouts = list(layout) if isinstance(layout, Sequence) else [layout]
    if isinstance(augmentation, str):
        augmentation = parse_recipes(augmentation)
    rules = [
        parse_recipes(row) if isinstance(row, str) else row
        for row in broadcast_to_rows(augmentation, len(layouts))
    ]
    flat = [rule for row in rules for rule in (row if isinstance(row, Sequence) else (row,))]
    for value, kind in (
        *((rule, Augmentation) for rule in flat if rule is not None),
        *((one, Layout) for one in layouts),
    ):
        if not isinstance(value, kind):
            raise LayoutError(
                f"augmented(model, augmentation, layout) was given {value!r} for its"
                f" {kind.__name__.lower()}"
            )
    if not layouts or len(rules) != len(layouts):
        raise LayoutError(
            f"{len(rules)} augmentations for {len(layouts)} layouts; give one layout a row, and one"
            " augmentation or as many"
        )
    if any(row_layout.pad for row_layout in layouts):
        check_padding(model)
    active = list(map(active_augmentations, rules))
    return GuardedRows(model, active, layouts, check_ids, capped, learned=learned)


def check_padding(model: Model) -> None:
    """Refuse a plain transformers model that reads padded rows otherwise than alone (`rows_problem`
    tries it by passes of its own, so not inside another block).

    Raises:
        LayoutError: It does.
    """
    if facts_of(model).backend != "plain" or has_open_block(model):
        return
    if (problem := rows_problem(model)) is not None:
        raise LayoutError(f"{problem}; read rows of one length together")


def check_recorder(observer: Any, layer_types: Sequence[LayerType]) -> None:
    """Refuse a recorder that was made for layers of other types.

    Raises:
        TraceError: It was.
    """
    recorded = getattr(observer, "layer_types", None)
    if recorded is not None and recorded != layer_types:
        raise TraceError(
            f"the recorder is for a model of layers {describe_layers(recorded)}, and this one's are"
            f" {describe_layers(layer_types)}; give Recorder(...,"
            " layer_types=facts_of(model).layer_types), of lapa2_interp.models"
        )


def check_no_sink(pattern: Float[Tensor, "row head query key"]) -> None:
    """Refuse a pattern that gives a share to a learned sink, which the scores do not show.

    Raises:
        DeadHookError: It does.
    """
    shares = pattern[:, :, -1].sum(2)
    if ((shares - 1).abs() > 0.02)[shares > 0].any():  # a HookedTransformer's padding has none
        raise DeadHookError(SINK_ERROR)


class GuardedRows:
    """Rows of one length or padded to it: their bias, and the guard of the passes that read them.

    Args:
        rules: The active augmentations of each row.
        layouts: One for each row.
        check_ids: Refuse passes that read other tokens.
        capped: Called with the biases that were cut at +-BIAS_CAP.
        live: By row and slot of the first pass, False on padding, also after the text; by default
            all but the layouts' padding.
        learned: As in `BatchBias`.

    Attributes:
        bias: What is added to the scores of a pass.
        first: The slot of the pass's first query.
        keys_checked: The numbers of queries and keys, and the first slot, of the pass that
            `check_keys` has seen.

    Raises:
        AugmentationError, LayoutError: As `BatchBias`.
    """

    def __init__(
        self,
        model: Model,
        rules: Sequence[tuple[Augmentation, ...]],
        layouts: Sequence[Layout],
        check_ids: bool = True,
        capped: CapCallback | None = None,
        live: Bool[Tensor, "row query"] | None = None,
        learned: Float[Tensor, "layer head"] | None = None,
    ) -> None:
        self.model, self.facts = model, facts_of(model)
        if self.facts.rotary_limit is not None:
            refuse_mixed_rotary(self.facts.network)
        self.layouts, self.check_ids = layouts, check_ids
        self.bias = BatchBias(
            rules,
            layouts,
            (self.facts.n_layers, self.facts.n_heads),
            self.facts.layer_types,
            may_repeat=self.facts.is_bare,
            capped=capped,
            learned=learned,
        )
        # Tables of the rows by slot: ids (-1 where the layout has none), slots, padding.
        width = max(map(len, layouts))
        ids = [[-1] * one.bos.start + list(one.ids) for one in layouts]
        self.ids = torch.tensor([row + [-1] * (width - len(row)) for row in ids])  # layout slot
        slot = torch.arange(width)
        sizes = torch.tensor([[one.soft, one.pad, len(one)] for one in layouts])
        soft, self.pads, stop = sizes.split(1, dim=1)  # layout 1
        self.is_padded = any(one.pad for one in layouts)
        self.in_layout = slot < stop  # layout slot
        self.live = (slot < soft) | (slot >= soft + self.pads)  # layout slot
        self.can_grow = live is None or bool(live[:, -1].all())
        if live is not None:
            self.live, self.in_layout = live, torch.ones_like(live)
        # The state of a pass.
        self.first, self.reads_layouts = 0, False
        self.keys_checked: tuple[int, int, int] | None = None
        self.unread_ids: Tensor | None = None  # of a HookedTransformer, until layer 0 tells `first`
        self.sights: dict[tuple[LayerType, int], Tensor] = {}  # layout slot
        self._augmented_slot: float = math.inf  # of a query whose keys and values are augmented

    def begin(self, arguments: dict[str, Any], first: int) -> None:
        """Compare a pass's arguments with the layouts, and add the positions of padded rows.

        Raises:
            LayoutError: The pass reads other tokens, masks other slots, or cannot be given
                positions.
            ModelError: Its scores do not fit into the machine's memory.
        """
        self.reads_layouts, self.keys_checked = False, None
        if "tokens" in arguments:  # the ids that a HookedTransformer embeds
            self.unread_ids = arguments["tokens"]
            return
        self.first = first
        mask = arguments.get("attention_mask")
        if mask is not None or self.is_padded:
            self._check_mask(mask, self.facts.backend == "hooked")
        if self.facts.backend == "hooked":
            return
        ids = arguments.get("input_ids")
        inputs = arguments.get("inputs_embeds") if ids is None else ids
        if self.facts.backend == "bridge" and inputs is not None:
            n_rows, n_queries = inputs.shape[:2]
            n_keys = first + n_queries
            if n_rows * n_queries * n_keys >= AUTO_SCORES:
                check_matrix_fits(self.facts, n_rows, n_queries, n_keys, "it has hooks on them")
        if ids is not None and self.check_ids:
            self._check_ids(ids)
        if self.is_padded and arguments.get("position_ids") is None and inputs is not None:
            self._add_positions(arguments, inputs)

    def find_first_query(self, attention: Float[Tensor, "row head query key"]) -> None:
        """Note the slot of the first query of a HookedTransformer's pass, and compare its ids.

        Its `generate` does not call the module's hooks, so that `begin` does not know the slot. Its
        only cache concatenates, so that scores and patterns show it.
        """
        self.first = attention.shape[3] - attention.shape[2]
        ids, self.unread_ids = self.unread_ids, None
        if ids is not None and self.check_ids:
            self._check_ids(ids)

    def check_keys(self, n_queries: int, n_keys: int) -> None:
        """Refuse a pass whose keys are not those of the rows; asked in the first layer of a pass.

        Raises:
            LayoutError: It ends before the span, or a key in its cache was computed under an
                augmentation that is meant for predicting queries alone.
        """
        self.keys_checked = n_queries, n_keys, self.first
        if n_keys < self.bias.last_key and not self.reads_layouts:
            raise LayoutError(
                f"the span ends at slot {self.bias.last_key} but the forward pass has"
                f" {n_keys} keys; feed the layout's own ids (layout.tensor)"
            )
        if self.first > self._augmented_slot:
            raise LayoutError(
                "under phase 'predicting_only' a cache must not keep keys of the query that"
                " predicts; use new_rows(model, rules), a pass over the whole text, or"
                " phase 'last_query'"
            )
        last = np.array([self.first + n_queries - 1])
        acts = (layout.acts(rule, last)[0] for rule, layout in self.bias.query_phase_rules)
        self._augmented_slot = int(last[0]) if any(acts) else math.inf

    def check_sight(self, layer: int, scores: Float[Tensor, "row head query key"]) -> None:
        """Refuse a layer whose mask leaves its last query other keys than its type says: l would
        count other keys than the layer sees.

        Passes of one query are checked every `MASK_CHECK_INTERVAL` tokens.

        Args:
            scores: As the model has masked them, before any hook.

        Raises:
            ModelError: The layer sees other keys.
            LayoutError: Its cache has dropped keys.
        """
        if scores.shape[3] < self.first + scores.shape[2]:
            self.refuse_dropped_keys(scores)
        last = self.first + scores.shape[2] - 1
        if scores.shape[2] == 1 and last % MASK_CHECK_INTERVAL:
            return
        layer_type = self.bias.layer_types[layer]
        if (layer_type, last) not in self.sights:
            self.sights = {key: sight for key, sight in self.sights.items() if key[1] == last}
            # The keys that the query sees in layers of this type.
            slot = torch.arange(last + 1)
            live = pad(self.live, (0, max(last + 1 - self.live.shape[1], 0)), value=True)
            query = np.array([last])
            starts = [layer_type.first_seen(query, layout.pad).tolist() for layout in self.layouts]
            sight = live[:, : last + 1] & (slot >= torch.tensor(starts))
            self.sights[layer_type, last] = sight
        in_sight = self._repeat_rows(self.sights[layer_type, last], len(scores))
        if in_sight is None:
            return
        seen_keys = has_weight(scores[:, :, -1, : last + 1])
        reads_text = in_sight[:, -1]  # row; padding sees nothing
        if (wrong := ((seen_keys != in_sight).any(1) & reads_text).nonzero()).numel():
            row = int(wrong[0])
            sees, should = (
                describe_runs(keys[row].nonzero()[:, 0].tolist()) for keys in (seen_keys, in_sight)
            )
            raise ModelError(
                f"layer {layer} is of type {layer_type} by the model's configuration, and its query"
                f" in slot {last} sees the keys in slots {sees or 'none'}, not {should}; if no mask"
                " of yours hides keys there, and no score is some 700 below the highest, this"
                " model's masks are not known here and it cannot be augmented in texts of this"
                " length"
            )

    def refuse_dropped_keys(self, attention: Float[Tensor, "row head query key"]) -> NoReturn:
        """Refuse scores or a pattern that lack keys of the text."""
        raise LayoutError(
            f"the cache holds {attention.shape[3]} keys of the {self.first + attention.shape[2]}"
            " read so far (a sliding window drops old ones), so slots are unknown; use a cache that"
            " keeps all keys, such as transformers' DynamicCache()"
        )

    def _repeat_rows(self, table: Tensor, n_rows: int) -> Tensor | None:
        """A table of the layouts for the rows of a pass, in which the copies of a row follow each
        other; None if the pass has other rows, which `BatchBias` refuses."""
        if n_rows == len(table):
            return table
        copies, left = divmod(n_rows, len(table))
        return None if left else table.repeat_interleave(copies, 0)

    def _check_ids(self, ids: Int[Tensor, "row query"]) -> None:
        """Refuse other ids than those of the layouts."""
        stop = min(self.first + ids.shape[1], self.ids.shape[1])
        layout_ids = self._repeat_rows(self.ids[:, self.first : stop], len(ids))
        if layout_ids is None:
            return
        self.reads_layouts = True
        read_ids = ids[:, : layout_ids.shape[1]].cpu()
        if (wrong := ((layout_ids >= 0) & (read_ids != layout_ids)).nonzero()).numel():
            row, query = wrong[0].tolist()
            tokenizer = getattr(self.model, "tokenizer", None)
            read, expected = (
                f"token {token}" + (f" ({tokenizer.decode([token])!r})" if tokenizer else "")
                for token in (int(read_ids[row, query]), int(layout_ids[row, query]))
            )
            raise LayoutError(
                f"row {row} reads {read} in slot {self.first + query}, where its layout has"
                f" {expected}; feed the layout's own ids (layout.tensor), or give check_ids=False"
                " to augment other tokens"
            )

    def _check_mask(self, mask: Any, is_hooked: bool) -> None:
        """Refuse a pass that does not mask its layouts' padding: spans would cover other keys.

        Masks that transformers' `generate` makes (one for each layer type, or by query) are not
        checked; transformers makes the masks from the padding it was given.
        """
        start = self.first if is_hooked else 0  # its cache stores the mask of cached keys
        if mask is None:
            if start < self.live.shape[1]:
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
            unmasked = (mask[:, : live.shape[1]] != 0).cpu()
            if (wrong := (in_layout & (unmasked != live)).nonzero()).numel():
                row, slot = wrong[0].tolist()
                raise LayoutError(
                    f"row {row} masks {int((~unmasked[row]).sum())} slots where its layout has"
                    f" {int((~live[row]).sum())} of padding (slot {start + slot} differs); give one"
                    " layout a row, in the rows' order, as PaddedRows.of(layouts) has them"
                )

    def _add_positions(self, arguments: dict[str, Any], inputs: Tensor) -> None:
        """Add the positions that each row alone would have: transformers counts padding."""
        if "position_ids" in self.facts.parameters:
            slots = torch.arange(self.first, self.first + inputs.shape[1])
            positions = self._repeat_rows((slots - self.pads).clamp(min=0), len(inputs))
            if positions is not None:
                arguments["position_ids"] = positions.to(inputs.device)
        elif getattr(getattr(self.model, "cfg", None), "positional_embedding_type", "") != "alibi":
            raise LayoutError(
                f"{type(self.facts.network).__name__} takes no position_ids, so that left-padded"
                " rows would be read at other positions than alone; read rows of one length"
                " together"
            )


def has_weight(scores: Float[Tensor, "row head key"]) -> Bool[Tensor, "row key"]:
    """The keys to which a query gives a weight in any head, however small: those that no mask
    hides.

    A mask may be -inf, a dtype's smallest number, or any other that no score outweighs, and may be
    added or set. In float64 the weights of hidden keys are 0, and those of others are not, down to
    scores of 700 below the highest.
    """
    return (scores.detach().cpu().double().softmax(2) > 0).any(1)
