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

from lapa2_interp.attention.cache import BridgeRows
from lapa2_interp.attention.cached_heads import SlotLayer
from lapa2_interp.models.facts import Model

KEPT_BYTES = 2**28
"""Memory for the residual streams of all groups."""


@dataclass(frozen=True)
class CleanPass:
    """A group of examples, read without an edit.

    Attributes:
        rows: The rows after their prefixes.
        tokens: Prompt and text that follow.
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
        """Read tokens after prefixes, and keep the residual stream before some layers.

        Args:
            layers: Numbers above 0. None are kept where a block returns more than this stream.
        """
        if not layers:
            return cls(rows, tokens, {})
        blocks: Any = model.blocks
        residuals: dict[int, Tensor] = {}
        lengths: set[int] = set()  # of the tuples that blocks return; 0 for a tensor

        def keep(layer: int) -> Callable:
            def after(block: Any, args: Any, output: Any) -> None:
                lengths.add(len(output) if isinstance(output, tuple) else 0)
                residuals[layer] = output[0] if isinstance(output, tuple) else output

            return after

        first_pass = cls(rows, tokens, residuals)
        with ExitStack() as stack:
            for layer in layers:
                handle = blocks[layer - 1].register_forward_hook(keep(layer))
                stack.callback(handle.remove)
            first_pass.rows_again(torch.arange(len(tokens), device=tokens.device)).read_tokens(
                tokens
            )
        return cls(rows, tokens, residuals if lengths in ({0}, {1}) else {}, lengths == {1})

    def is_whole(self, model: Model) -> bool:
        """True if a pass of the first row that begins at any of the layers has the logits of a
        whole one. Such a pass has others where blocks share more than the residual stream, such as
        the keys of an earlier layer. Two tokens show it."""
        index = torch.zeros(1, dtype=torch.long, device=self.tokens.device)
        tokens = self.tokens[:1, :2]
        short = CleanPass(self.rows, tokens, {})
        alone = CleanPass.read(model, short.rows_again(index), tokens, list(self.residuals))
        logits = alone.rows_again(index).read_tokens(tokens)
        for layer in alone.residuals:
            rows = alone.rows_again(index)
            with alone.skip_below(layer, model, rows, index):
                if not torch.equal(rows.read_tokens(tokens), logits):
                    return False
        return True

    def rows_again(self, index: Int[Tensor, " row"]) -> BridgeRows:
        """Copies of the rows after their prefixes, with room for the tokens."""
        rows = copy(self.rows)
        rows.cache = Cache(layers=list(self.rows.cache.layers))
        rows.expand(index, capacity=rows.cache.get_seq_length() + self.tokens.shape[1])
        return rows

    def first_layer(self, lowest: int) -> int:
        """The layer at which a pass begins whose lowest edit is in this layer."""
        return max((layer for layer in self.residuals if layer <= lowest), default=0)

    @contextmanager
    def skip_below(
        self, layer: int, model: Model, rows: BridgeRows, index: Int[Tensor, " row"]
    ) -> Iterator[None]:
        """Skip the blocks below a layer in the passes inside, which read all tokens at once.

        Args:
            layer: 0, or one of `residuals`.
            rows: The rows that read the tokens; those are counted in the skipped layers, too.
            index: The row of this pass that each is a copy of.
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
                output = residual if number == layer - 1 else hidden_states
                return (output,) if self.in_tuple else output

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
