"""One decoding interface to both TransformerLens classes.

The interface has the prompt pass, the expansion to samples, and further tokens.

Rows are left-padded; the attention mask and (on the bridge) explicit positions go with every call.
On TransformerBridge keys and values lie in buffers of their final size, and each step writes one
slot. HookedTransformer concatenates keys and values.

A soft prefix fills the first slots of its rows' cache before anything is read. In rows without a
soft prefix those slots are masked. `recomputed_rows` has the same interface and no cache.

A long prompt is read in pieces of queries, so that its attention scores fit into memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from lapa2_interp.attention.cached_heads import SlotLayer, new_cache_layers
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.padded_rows import PaddedRows
from lapa2_interp.errors import LayoutError, ModelError, PrefixError, parameter
from lapa2_interp.models.blocks import check_no_checkpointing, dropped_cache
from lapa2_interp.models.cache_name import OLD, let_bridges_read
from lapa2_interp.models.facts import Model, facts_of, is_fused
from lapa2_interp.models.rotary import refuse_mixed_rotary
from lapa2_interp.prefixes.soft_prefix import SoftPrefix

PROMPT_SCORES = 2**28
"""Attention scores of one layer up to which a prompt is read whole: 1 GiB in float32."""
CACHE_BYTES = 2 << 30
"""Bytes of a batch's cached keys and values, at most."""


class Rows(ABC):
    """The decode state of stacked rows, such as the cached keys and values of their texts."""

    @abstractmethod
    def prompt_pass(
        self,
        layouts: Sequence[Layout],
        prefixes: Sequence[SoftPrefix | None] | None = None,
        keep: int = 1,
    ) -> Float[Tensor, "row query vocab"]:
        """Read left-padded layouts, after soft prefixes if there are any.

        Returns:
            The logits of each row's last `keep` tokens.
        """

    @abstractmethod
    def expand(self, index: Int[Tensor, " expanded"], capacity: int) -> None:
        """Make row i a copy of the old row index[i], with room for `capacity` keys."""

    @abstractmethod
    def read_tokens(
        self, tokens: Int[Tensor, "row query"], keep: int = 1
    ) -> Float[Tensor, "row last vocab"]:
        """Append tokens to each row.

        Returns:
            The logits after the last `keep` of them.
        """


def rows_in_memory(model: Model, keys: int, positions: int) -> int:
    """Rows whose cached keys, and logits at some positions, take CACHE_BYTES; at least one."""
    facts = facts_of(model)
    numbers = 2 * facts.n_layers * facts.n_kv_heads * model.cfg.d_head * keys
    numbers += positions * model.cfg.d_vocab
    return max(1, CACHE_BYTES // (numbers * facts.dtype.itemsize))


def check_packing(model: Model) -> None:
    """Refuse a model whose rows cannot be cut.

    Raises:
        LayoutError: The model has recurrent or convolutional layers.
    """
    layers = new_cache_layers(model, DynamicLayer) if facts_of(model).backend != "hooked" else []
    if any(hasattr(layer, "conv_states") for layer in layers):
        raise LayoutError(
            f"the recurrent or convolutional layers of {type(facts_of(model).network).__name__}"
            " cannot forget a token, so that turns of unequal length cannot stay in its cache;"
            f" leave out {parameter('keep_turns', 'true', 'set')}"
        )


def new_rows(model: Model, rules: Iterable[Augmentation] = ()) -> CachedRows | RereadRows:
    """A new decode state for a model of either class.

    Args:
        rules: The augmentations of the coming passes. Under phase "predicting_only" each token is
            read again when it is no longer the last, so that the cache holds unaugmented keys and
            values. A long prompt is read in pieces, except under a pooled law, which needs all
            queries of a pass.
    """
    rules = list(rules)
    rows_class = HookedRows if facts_of(model).backend == "hooked" else BridgeRows
    rows = rows_class(model, in_pieces=not any(rule.pooled for rule in rules))
    return RereadRows(rows) if any(rule.phase == "predicting_only" for rule in rules) else rows


def check_readable(model: Model, layouts: Sequence[Layout]) -> None:
    """Refuse layouts that a model cannot read, and models whose passes are random; from now on also
    passes that mix rotary factors (`rotary.refuse_mixed_rotary`).

    Raises:
        ModelError: Its dropout is on, or its passes drop the cache.
        LayoutError: The model has no embedding for a token.
    """
    facts = facts_of(model)
    network: Any = facts.network
    if network.training:
        check_no_checkpointing(network)
    if facts.rotary_limit is not None:
        refuse_mixed_rotary(network)
    if facts.backend == "bridge" and facts.cache_name != OLD:
        let_bridges_read(network)
    drops = [module for module in network.modules() if isinstance(module, nn.Dropout) and module.p]
    share = getattr(facts.config, "attention_dropout", None)
    if any(module.training for module in drops) or (network.training and share):
        raise ModelError(
            "the model is in training mode, in which dropout makes every pass another one; call"
            " model.eval() first"
        )
    for layout in layouts:
        check_tokens(model, layout.ids)


def check_tokens(model: Model, ids: Sequence[int]) -> None:
    """Refuse tokens without an embedding.

    Raises:
        LayoutError: There is such a token.
    """
    n = model.cfg.d_vocab
    if ids and not (min(ids) >= 0 and max(ids) < n):
        unknown = next(token for token in ids if not 0 <= token < n)
        raise LayoutError(
            f"token {unknown} has no embedding: the model has {n} tokens, 0 to {n - 1}; its"
            " tokenizer must be the one it was trained with"
        )


def soft_keys_and_values(
    model: Model, layouts: Sequence[Layout], prefixes: Sequence[SoftPrefix | None] | None
) -> Float[Tensor, "two layer row kv_head slot d_head"] | None:
    """Keys and values of every row's soft slots, zero in rows without a soft prefix; None if no row
    has one.

    Raises:
        LayoutError: A layout has another number of soft slots than its prefix.
        PrefixError: A prefix belongs to another model.
    """
    row_prefixes = [None] * len(layouts) if prefixes is None else list(prefixes)
    for layout, prefix in zip(layouts, row_prefixes, strict=True):
        if layout.soft != (0 if prefix is None else len(prefix)):
            raise LayoutError(
                f"a layout has {layout.soft} soft slots, its prefix"
                f" {0 if prefix is None else len(prefix)}; make it with Layout.of(tokenizer, None,"
                " prompt, soft=len(prefix))"
            )
    distinct = {id(prefix): prefix for prefix in row_prefixes if prefix is not None}
    if not distinct:
        return None
    shape = next(iter(distinct.values())).card.shape
    slots = max(map(len, distinct.values()))
    stacked = torch.zeros(
        2,
        shape.n_layers,
        len(layouts),
        shape.n_kv_heads,
        slots,
        shape.d_head,
        dtype=facts_of(model).dtype,
    )
    for prefix in distinct.values():
        prefix.check(model)
        rows = [row for row, row_prefix in enumerate(row_prefixes) if row_prefix is prefix]
        keys_and_values = torch.stack([prefix.keys, prefix.values]).to(stacked)
        stacked[:, :, rows, :, : len(prefix)] = keys_and_values[:, :, None]
    return stacked.to(model.cfg.device)


def bos_positions(
    layouts: Sequence[Layout], prefixes: Sequence[SoftPrefix | None] | None
) -> list[int]:
    """The position of each row's BOS: 0, or the number of slots of a shifted soft prefix."""
    row_prefixes = [None] * len(layouts) if prefixes is None else list(prefixes)
    return [
        len(prefix) if prefix is not None and prefix.card.shifted else 0 for prefix in row_prefixes
    ]


def check_window(window: int | None, layouts: Sequence[Layout], used: int) -> None:
    """Refuse rows with padding between soft slots and text if a sliding window would count it.

    Args:
        window: `ModelFacts.window`.
        used: Number of slots that are read.

    Raises:
        LayoutError: There are such rows, and `used` exceeds the window.
    """
    if window is None or used <= window:
        return
    if any(layout.soft and layout.bos.start > layout.soft for layout in layouts):
        raise LayoutError(
            f"{used} slots exceed the sliding window of {window} tokens, and rows after soft"
            " prefixes are padded, so that they would see other keys than alone; read prompts of"
            " one length in tokens together"
        )


class CachedRows(Rows):
    """Rows with a cache; what fills it is of each class of models.

    Args:
        in_pieces: Read a long prompt in pieces of queries. In one piece, edits of a pass meet all
            tokens of the prompt at once.

    Attributes:
        mask: 1 on live slots, also on those that are still to be read.
        positions: The position of each row's next token.
    """

    mask: Int[Tensor, "row slot"]
    positions: Int[Tensor, "row 1"]

    def __init__(self, model: Model, in_pieces: bool = False) -> None:
        self.model, self.in_pieces = model, in_pieces
        self.layouts: Sequence[Layout] = ()
        self.facts = facts_of(model)

    @abstractmethod
    def _open(
        self, layouts: Sequence[Layout], prefixes: Sequence[SoftPrefix | None] | None
    ) -> None:
        """Make a cache that holds soft prefixes, and nothing else."""

    @abstractmethod
    def _forward(
        self, ids: Tensor, positions: Tensor, keep: int = 1
    ) -> Float[Tensor, "row query vocab"]:
        """One pass: the logits of the last `keep` tokens."""

    @abstractmethod
    def _select(self, index: Int[Tensor, " expanded"], capacity: int) -> None:
        """`expand` of the cache."""

    @abstractmethod
    def _keep(self, slots: Int[Tensor, "row kept"], capacity: int) -> None:
        """`pack` of the cache."""

    @abstractmethod
    def crop(self, n: int) -> None:
        """Remove the last `n` tokens of each row."""

    def prompt_pass(
        self,
        layouts: Sequence[Layout],
        prefixes: Sequence[SoftPrefix | None] | None = None,
        keep: int = 1,
    ) -> Float[Tensor, "row query vocab"]:
        first = bos_positions(layouts, prefixes)
        rows = PaddedRows.of(layouts, self.model.cfg.device, first)
        self.layouts, self.mask = rows.layouts, rows.mask
        self.positions = rows.positions[:, -1:] + 1
        self._open(self.layouts, prefixes)
        # Pieces of at most PROMPT_SCORES scores; but one where the rotary factors depend on the
        # length of a pass, and where no matrix of scores is formed.
        size, n_keys = rows.ids.shape[1], self.mask.shape[1]
        one_piece = self.facts.rotary_limit is not None or is_fused(self.model, size, n_keys)
        if self.in_pieces and not one_piece:
            size = max(1, PROMPT_SCORES // (len(layouts) * self.model.cfg.n_heads * n_keys))
        logits = [
            self._forward(ids, positions, keep)
            for ids, positions in zip(
                rows.ids.split(size, dim=1), rows.positions.split(size, dim=1), strict=True
            )
        ]
        return torch.cat(logits, dim=1)[:, -keep:]

    def expand(self, index: Int[Tensor, " expanded"], capacity: int) -> None:
        self._select(index, capacity)
        room = self.mask.new_ones((len(index), capacity - self.mask.shape[1]))
        self.mask = torch.cat([self.mask[index], room], dim=1)
        self.positions = self.positions[index]

    def read_tokens(
        self, tokens: Int[Tensor, "row query"], keep: int = 1
    ) -> Float[Tensor, "row last vocab"]:
        count = torch.arange(tokens.shape[1], device=tokens.device)
        logits = self._forward(tokens, self.positions + count, keep)
        self.positions = self.positions + tokens.shape[1]
        return logits

    def pack(self, texts: Sequence[Sequence[int]], capacity: int) -> None:
        """Keep the keys of these texts, with which the rows begin, and no others: left-padded, so
        that all end at one slot, with room for `capacity` keys.

        A query's slot then gives its l where the rows' texts had unequal lengths, too.
        """
        width, device = max(map(len, texts)), self.mask.device
        self.positions = torch.tensor([[len(ids)] for ids in texts], device=device)
        token = torch.arange(width, device=device) - (width - self.positions)  # row kept
        # A row's first token lies in its first live slot; a token below 0 is padding.
        slots = (self.mask.argmax(1, keepdim=True) + token).clamp(min=0)
        room = self.mask.new_ones(len(texts), capacity - width)
        self.mask = torch.cat([(token >= 0).long(), room], dim=1)
        self._keep(slots, capacity)


class BridgeRows(CachedRows):
    """Rows of a TransformerBridge or a `TransformersModel`.

    Attributes:
        shift: Added to the positions of every pass.
    """

    shift = 0

    def _forward(
        self, ids: Tensor, positions: Tensor, keep: int = 1
    ) -> Float[Tensor, "row query vocab"]:
        used = self.cache.get_seq_length() + ids.shape[1]
        if self.facts.window is not None:
            check_window(self.facts.window, self.layouts, used)
        if self.facts.network.training:
            check_no_checkpointing(self.facts.network)
        logits = self.model(
            ids,
            attention_mask=self.mask[:, :used],
            position_ids=positions + self.shift,
            logits_to_keep=keep,
            **{self.facts.cache_name: self.cache},
        )[:, -keep:]
        if self.cache.get_seq_length() != used:
            raise dropped_cache(self.facts.network)
        return logits

    def start_after_prefix(
        self, layouts: Sequence[Layout], prefixes: Sequence[SoftPrefix | None]
    ) -> None:
        """Start with soft prefixes of one length alone, so that `read_tokens` begins with BOS."""
        device = self.model.cfg.device
        self.mask = torch.ones(len(layouts), layouts[0].soft, dtype=torch.long, device=device)
        self.positions = torch.tensor(bos_positions(layouts, prefixes), device=device)[:, None]
        self._open(layouts, prefixes)

    def start_after_keys(
        self,
        layouts: Sequence[Layout],
        keys: Sequence[Float[Tensor, "layer kv_head token d_head"]],
        values: Sequence[Float[Tensor, "layer kv_head token d_head"]],
        capacity: int,
    ) -> None:
        """Start with keys and values of the first tokens of each row's text, left-padded, so that
        `read_tokens` goes on behind them.

        Args:
            layouts: The texts.
            keys, values: By row; a row may begin with no token.
            capacity: Slots that the rows have room for.
        """
        device, n_rows = self.model.cfg.device, len(layouts)
        self.positions = torch.tensor([[one.shape[2]] for one in keys], device=device)
        width = int(self.positions.max())
        live = (torch.arange(width, device=device) >= width - self.positions).long()
        self.mask = torch.cat([live, live.new_ones(n_rows, capacity - width)], dim=1)
        self.layouts = layouts
        self._open(layouts, None)
        for i, layer in enumerate(self.cache.layers):
            layer.capacity = capacity
            layer.lazy_initialization(
                *(numbers[0][None, i].expand(n_rows, -1, -1, -1) for numbers in (keys, values))
            )
            for buffer, numbers in ((layer.keys, keys), (layer.values, values)):
                buffer[:, :, :width] = 0  # padding
                for row, of_row in enumerate(numbers):
                    buffer[row, :, width - of_row.shape[2] : width] = of_row[i]
            layer.used = width

    def _open(
        self, layouts: Sequence[Layout], prefixes: Sequence[SoftPrefix | None] | None
    ) -> None:
        check_readable(self.model, layouts)
        # In half precision a CPU's product with a view also differs where no head is shared.
        half = self.facts.dtype.itemsize < 4
        grouped = half or self.facts.n_kv_heads < self.facts.n_heads
        capacity, shared = len(layouts[0]), grouped and self.facts.backend != "plain"
        layers = new_cache_layers(self.model, lambda: SlotLayer(capacity, shared))
        soft = soft_keys_and_values(self.model, layouts, prefixes)
        if soft is not None:
            for layer, keys, values in zip(layers, *soft, strict=True):
                layer.update(keys, values)
        self.cache = Cache(layers=layers)

    def _select(self, index: Int[Tensor, " expanded"], capacity: int) -> None:
        for i, layer in enumerate(self.cache.layers):
            if isinstance(layer, SlotLayer):
                self.cache.layers[i] = layer.expand(index, capacity)
            else:
                layer.reorder_cache(index)

    def _keep(self, slots: Int[Tensor, "row kept"], capacity: int) -> None:
        for i, layer in enumerate(self.cache.layers):
            if isinstance(layer, SlotLayer):  # others keep nothing of their own
                self.cache.layers[i] = layer.pack(slots, capacity)

    def crop(self, n: int) -> None:
        for layer in self.cache.layers:
            if isinstance(layer, SlotLayer):
                layer.used -= n
            elif hasattr(layer, "conv_states"):  # others keep nothing of their own
                raise LayoutError(
                    "phase 'predicting_only' reads tokens twice, and the recurrent or convolutional"
                    f" layers of {type(self.facts.network).__name__} cannot forget one; use"
                    " phase 'last_query'"
                )
        self.positions = self.positions - n


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
        check_window(self.facts.window, self.layouts, used)
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


class WrappedRows(Rows):
    """Rows that read as others do, but for what a subclass changes."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def prompt_pass(
        self,
        layouts: Sequence[Layout],
        prefixes: Sequence[SoftPrefix | None] | None = None,
        keep: int = 1,
    ) -> Float[Tensor, "row query vocab"]:
        return self.rows.prompt_pass(layouts, prefixes, keep)

    def expand(self, index: Int[Tensor, " expanded"], capacity: int) -> None:
        self.rows.expand(index, capacity)

    def read_tokens(
        self, tokens: Int[Tensor, "row query"], keep: int = 1
    ) -> Float[Tensor, "row last vocab"]:
        return self.rows.read_tokens(tokens, keep)


class RereadRows(WrappedRows):
    """Rows that read their last token again together with the next one.

    The query that predicts a token is then the last of its pass, where phase "predicting_only"
    acts, and a token's cached keys and values come from a pass in which it was not the last."""

    rows: CachedRows

    def prompt_pass(
        self,
        layouts: Sequence[Layout],
        prefixes: Sequence[SoftPrefix | None] | None = None,
        keep: int = 1,
    ) -> Float[Tensor, "row query vocab"]:
        logits = super().prompt_pass(layouts, prefixes, keep)
        self.rows.crop(1)
        self.last = torch.tensor([[layout.ids[-1]] for layout in layouts], device=logits.device)
        return logits

    def expand(self, index: Int[Tensor, " expanded"], capacity: int) -> None:
        super().expand(index, capacity)
        self.last = self.last[index.to(self.last.device)]

    def read_tokens(
        self, tokens: Int[Tensor, "row query"], keep: int = 1
    ) -> Float[Tensor, "row last vocab"]:
        logits = []
        for token in tokens.split(1, dim=1):
            logits.append(self.rows.read_tokens(torch.cat([self.last, token], dim=1)))
            self.rows.crop(1)
            self.last = token
        return torch.cat(logits[-keep:], dim=1)

    def pack(self, texts: Sequence[Sequence[int]], capacity: int) -> None:
        """As of `CachedRows`."""
        self.rows.pack([ids[:-1] for ids in texts], capacity)
        self.last = torch.tensor([[ids[-1]] for ids in texts], device=self.last.device)
