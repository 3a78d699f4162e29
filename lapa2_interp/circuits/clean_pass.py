"""Clean passes, from which passes under edits begin.

An edit of layer L leaves the residual stream before L as it is. So each group of examples is read
once without an edit, and the residual stream before some layers is kept. A pass under edits begins
at the highest of these layers that is not above an edit: the blocks below are skipped. Their keys
and values are not needed, since the pass reads the whole text behind the prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from lapa2_interp.attention.cache import BridgeRows, SlotLayer
from lapa2_interp.models.card import Model

KEPT_BYTES = 2**28
"""Memory for the residual streams of all groups."""


@dataclass(frozen=True)
class CleanPass:
    """A group of examples, read without an edit.

    Attributes:
        rows: The prefixes, read.
        tokens: Prompt and text behind them.
        residuals: By layer, the residual stream before it.
        in_tuple: True if a block of this model returns a tuple.
    """

    rows: BridgeRows
    tokens: Int[Tensor, "row token"]
    residuals: Mapping[int, Float[Tensor, "row token d_model"]]
    in_tuple: bool = False

    @classmethod
    def read(
        cls,
        model: Model,
        rows: BridgeRows,
        tokens: Int[Tensor, "row token"],
        layers: Sequence[int],
    ) -> CleanPass:
        """Read tokens behind prefixes, and keep the residual stream before some layers.

        It is kept only where a pass that begins with it has the same logits. In a model whose
        layers share more than this stream, it has others.

        Args:
            layers: Numbers above 0, in increasing order.
        """
        blocks: Any = model.blocks
        if not layers:
            return cls(rows, tokens, {})
        kept: dict[int, Tensor] = {}
        tuples: set[int] = set()  # lengths of what the blocks return, 0 for a tensor

        def keep(layer: int) -> Callable:
            def after(block: Any, args: Any, output: Any) -> None:
                tuples.add(len(output) if isinstance(output, tuple) else 0)
                kept[layer] = output[0] if isinstance(output, tuple) else output

            return after

        index = torch.arange(len(tokens), device=tokens.device)
        with ExitStack() as stack:
            for layer in layers:
                handle = blocks[layer - 1].register_forward_hook(keep(layer))
                stack.callback(handle.remove)
            logits = cls(rows, tokens, {})._copy(index, tokens.shape[1]).read_tokens(tokens)
        if tuples not in ({0}, {1}):
            return cls(rows, tokens, {})
        found = cls(rows, tokens, kept, tuples == {1})
        begun = found._copy(index, tokens.shape[1])
        with found.begin(model, begun, layers[len(layers) // 2], index):
            again = begun.read_tokens(tokens)
        return (
            found if torch.allclose(logits, again, rtol=1e-3, atol=1e-3) else cls(rows, tokens, {})
        )

    def _copy(self, index: Int[Tensor, " row"], n: int) -> BridgeRows:
        """Copies of rows that have read their prefixes, with room for `n` tokens more."""
        rows = copy(self.rows)
        rows.cache = Cache(layers=list(self.rows.cache.layers))
        rows.expand(index, capacity=self.rows.cache.get_seq_length() + n)
        return rows

    def start(self, index: Int[Tensor, " row"]) -> tuple[BridgeRows, Int[Tensor, "row token"]]:
        """Copies of rows that have read their prefixes, and the tokens that follow."""
        return self._copy(index, self.tokens.shape[1]), self.tokens[index]

    def first_layer(self, lowest: int) -> int:
        """The layer at which a pass begins whose lowest edit is in this layer."""
        return max((layer for layer in self.residuals if layer <= lowest), default=0)

    @contextmanager
    def begin(
        self, model: Model, rows: BridgeRows, layer: int, index: Int[Tensor, " row"]
    ) -> Iterator[None]:
        """Skip the blocks below a layer in the passes inside, which read all tokens at once.

        Args:
            rows: They read the tokens, and count them in the skipped layers.
            index: The clean row of each.
        """
        if not layer:
            yield
            return
        residual = self.residuals[layer][index]

        def skip(number: int) -> Callable:
            cache = rows.cache.layers[number]

            def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
                assert isinstance(cache, SlotLayer)
                cache.used += hidden_states.shape[1]
                found = residual if number == layer - 1 else hidden_states
                return (found,) if self.in_tuple else found

            return forward

        skipped: Any = list(model.blocks)[:layer]
        try:
            for number, block in enumerate(skipped):
                vars(block)["forward"] = skip(number)  # a bridge hands on what is set otherwise
            yield
        finally:
            for block in skipped:
                vars(block).pop("forward", None)


def layers_to_keep(n_layers: int, bytes_per_layer: int) -> range:
    """As many layers, evenly spaced, as have their residual streams in `KEPT_BYTES`."""
    return range(every := max(1, -(-n_layers * bytes_per_layer // KEPT_BYTES)), n_layers, every)
