"""Rows whose steps a GPU can replay as CUDA graphs.

The tensors of such a step keep their places. A model that asks for these steps has them in
`continued_rows`.

A step of one token a row launches hundreds of small operations, and on a GPU starting the
operations takes longer than computing them. A graph starts all operations at once, but a graph
always reads and writes the same places in memory. So keys and values, mask and bias lie here in
tensors of a fixed size:

1. Before the pass, outside the graph: write the slot of the new keys, unmask it, and compute the
   bias of this step's l, while the device still computes the step before; then the tokens and their
   positions.
2. The pass: the keys of a fixed number of slots, a *bucket* (128, 256, 512, ...) that holds the
   live ones. Later slots are masked. So a step reads at most twice the live keys, and a text needs
   few graphs. Each layer adds the bias to its scores and copies its pattern.
3. After the pass: the recorder reads the patterns of all layers at once.

Combining branches and drawing stay outside, because methods have conditions on values.

Static steps work on `TransformersModel` alone. There attention is one function of this package, and
a step runs no other Python code that must see every token; the hooks of a TransformerBridge are
such code.
On a CPU the same step is called directly: tests compare its texts and traces with those of
`hooked.augmented`. Static steps are no faster there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from lapa2_interp.attention.batch_bias import BatchBias
from lapa2_interp.attention.cache import BridgeRows, Rows, check_window
from lapa2_interp.attention.cached_heads import SlotLayer
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.bias.augmentation import AugmentationLike, active_augmentations
from lapa2_interp.bias.layer_types import FULL_ATTENTION
from lapa2_interp.bias.layout import Layout
from lapa2_interp.errors import ModelError
from lapa2_interp.models.attention_interface import AttentionHooks, hook_attention
from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.fingerprint import offload_hooks

SMALLEST_BUCKET = 128
"""Keys that the first steps read."""
WARM_UP = 2
"""Passes before the one that is captured."""


def bucket(n_keys: int) -> int:
    """The number of slots that a step reads if `n_keys` keys are live: a power of two."""
    return max(SMALLEST_BUCKET, 1 << (n_keys - 1).bit_length())


def cuda_graph(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A function as a CUDA graph that writes its result to the same tensor each time."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # libraries choose their kernels in the first passes
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


CAPTURE: dict[str, Callable[[Callable[[], Tensor]], Callable[[], Tensor]]] = {"cuda": cuda_graph}
"""By type of device, how a pass is captured; elsewhere it is called."""


class StaticLayer(SlotLayer):
    """Keys and values of one layer in a buffer that a pass reads up to a fixed width.

    Attributes:
        slot: The slot of the next key, as a tensor [1].
        width: The number of slots that a pass reads.
    """

    def __init__(self, like: SlotLayer, n_rows: int, capacity: int, slot: Tensor) -> None:
        super().__init__(capacity, shared=False)
        # Zeros, because a masked slot must not hold NaN.
        self.keys, self.values = (
            tensor.new_zeros(n_rows, tensor.shape[1], capacity, tensor.shape[3])
            for tensor in (like.keys, like.values)
        )
        self.slot, self.width, self.is_initialized = slot, capacity, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.slot, key_states)
        self.values.index_copy_(2, self.slot, value_states)
        self.used += 1
        return self.keys[:, :, : self.width], self.values[:, :, : self.width]


class StaticStep:
    """The pass of one token a row, on tensors that keep their places.

    Args:
        rows: Rows that have read their prompts; their cache gives the shapes.
        n_rows, capacity: Rows of the step, and slots.
        by_head: Give every layer and head a bias of its own; otherwise they share one.

    Attributes:
        first: The slot of the tokens.
        mask, bias: Numbers that are added to the scores: 0 on live keys, and b.
        patterns: The attention of the last pass.
    """

    def __init__(self, rows: BridgeRows, n_rows: int, capacity: int, by_head: bool) -> None:
        self.model, self.by_head, self.first = rows.model, by_head, 0
        facts = facts_of(self.model)
        n_layers, n_heads = facts.n_layers, facts.n_heads
        device, dtype = self.model.cfg.device, facts_of(self.model).dtype
        wide = {"device": device, "dtype": torch.promote_types(dtype, torch.float32)}
        self.slot = torch.zeros(1, dtype=torch.long, device=device)
        self.tokens = torch.zeros(n_rows, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.tokens)
        self.mask = torch.zeros(n_rows, 1, 1, capacity, device=device, dtype=dtype)
        sharing = (n_layers, n_rows, n_heads) if by_head else (1, n_rows, 1)
        self.bias = torch.zeros(*sharing, 1, capacity, **wide)  # layer row head 1 key
        # layer row head 1 key
        self.patterns = torch.zeros(n_layers, n_rows, n_heads, 1, capacity, **wide)
        self.layers = [
            StaticLayer(layer, n_rows, capacity, self.slot) for layer in rows.cache.layers
        ]
        self.cache = Cache(layers=self.layers)
        self.passes: dict[int, Callable[[], Tensor]] = {}

    def take(self, rows: BridgeRows, index: Int[Tensor, " row"]) -> None:
        """Begin with copies of rows that have read their prompts."""
        live = rows.mask[index].bool()  # row key
        n = self.first = live.shape[1]
        for layer, old in zip(self.layers, rows.cache.layers, strict=True):
            layer.keys[:, :, :n] = old.keys[index, :, :n]
            layer.values[:, :, :n] = old.values[index, :, :n]
        self.bias.zero_()
        self.mask.fill_(torch.finfo(self.mask.dtype).min)
        self.mask[:, 0, 0, :n].masked_fill_(live, 0)

    def edit(self, layer: int, scores: Tensor, _first: int) -> Tensor:
        """Add the bias."""
        return scores + self.bias[layer if self.by_head else 0][..., : scores.shape[3]]

    def read(self, layer: int, pattern: Tensor, _first: int) -> None:
        """Copy the pattern."""
        self.patterns[layer, ..., : pattern.shape[3]].copy_(pattern)

    def run(self, width: int) -> Float[Tensor, "row vocab"]:
        """The logits after the tokens, in a tensor that the next pass may write again."""
        if width not in self.passes:
            run = self.passes[width] = partial(self._pass, width)
            try:
                if (capture := CAPTURE.get(self.tokens.device.type)) is not None:
                    self.passes[width] = capture(run)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                print_note(f"the model's pass cannot be captured as a graph ({reason})")
        return self.passes[width]()

    def _pass(self, width: int) -> Float[Tensor, "row vocab"]:
        """Read the tokens; a repeated pass writes the same numbers again."""
        for layer in self.layers:
            layer.used, layer.width = self.first, width
        return self.model(
            self.tokens,
            attention_mask=self.mask[..., :width],
            position_ids=self.positions,
            logits_to_keep=1,
            **{cache_name(facts_of(self.model).network): self.cache},
        )[:, -1]


class StaticRows(BridgeRows):
    """Rows that have read their prompts, and that a `StaticStep` continues.

    Row i begins as a copy of the old row index[i].
    """

    def __init__(
        self,
        rows: BridgeRows,
        index: Int[Tensor, " row"],
        step: StaticStep,
        bias: BatchBias,
        recorder: Recorder | None,
    ) -> None:
        super().__init__(rows.model)
        self.layouts = rows.layouts
        self.step, self.bias, self.recorder = step, bias, recorder
        self.positions = rows.positions[index]
        step.take(rows, index)
        self._prepare()

    def _prepare(self) -> None:
        """Write all that the next step reads besides its tokens: a GPU is told so while the last
        step computes."""
        step = self.step
        first, width = step.first, bucket(step.first + 1)
        if first == step.mask.shape[3]:
            return
        step.slot.fill_(first)
        step.mask[..., first] = 0
        for layer, b in enumerate(step.bias[..., :width]):
            b.copy_(self.bias.add(layer, self._hidden(layer, torch.zeros_like(b)), first))

    def _forward(
        self, ids: Tensor, positions: Tensor, keep: int = 1
    ) -> Float[Tensor, "row query vocab"]:
        step = self.step
        first, width = step.first, bucket(step.first + 1)
        check_window(self.facts.window, self.layouts, first + 1)
        step.tokens.copy_(ids)
        step.positions.copy_(positions)
        is_new = width not in step.passes
        logits = step.run(width)
        if is_new and (step.patterns.gt(0) & step.mask.lt(0))[..., :width].any():
            raise ModelError(
                f"{type(facts_of(self.model).network).__name__} reads slots that its mask"
                " hides, so its steps cannot have a fixed size; set model.static = False"
            )
        if self.recorder is not None:
            self.recorder.observe_all(step.patterns[..., : first + 1], first)
        step.first += 1
        self._prepare()
        return logits[:, None]

    def _hidden(
        self, layer: int, scores: Float[Tensor, "row head query=1 key"]
    ) -> Float[Tensor, "row head query=1 key"]:
        """The scores without the keys that the layer's type hides from the next query."""
        kind, query = self.bias.layer_types[layer], np.array([self.step.first])
        if kind == FULL_ATTENTION:
            return scores
        starts = [int(kind.first_seen(query, layout.pad)[0]) for layout in self.bias.layouts]
        start = torch.tensor(starts, device=scores.device)[:, None, None, None]
        slot = torch.arange(scores.shape[3], device=scores.device)
        return scores.masked_fill(slot < start, torch.finfo(self.step.mask.dtype).min)


@contextmanager
def static_rows(
    rows: BridgeRows,
    index: Int[Tensor, " row"],
    capacity: int,
    augmentations: Sequence[AugmentationLike],
    layouts: Sequence[Layout],
    recorder: Recorder | None,
) -> Iterator[Rows]:
    """`continued_rows` of a model that has no `static_problem`."""
    step, bias = _static_step(rows, len(index), capacity, augmentations, layouts)
    hooks, facts = AttentionHooks(step.edit, step.read), facts_of(rows.model)
    with hook_attention(facts, hooks, layers=range(facts.n_layers)):
        yield StaticRows(rows, index, step, bias, recorder)


def _static_step(
    rows: BridgeRows,
    n_rows: int,
    capacity: int,
    augmentations: Sequence[AugmentationLike],
    layouts: Sequence[Layout],
) -> tuple[StaticStep, BatchBias]:
    """A step that fits, and the bias that it adds."""
    facts = facts_of(rows.model)
    size, kinds = (facts.n_layers, facts.n_heads), facts.layer_types
    bias = BatchBias([active_augmentations(rules) for rules in augmentations], layouts, size, kinds)
    one_for_all = {*kinds} == {FULL_ATTENTION} and all(
        term.every_head and len(term.layers) == size[0] for term in bias.length_terms
    )
    return StaticStep(rows, n_rows, bucket(capacity), not one_for_all), bias


def static_problem(
    model: Model, rows: Rows, augmentations: Sequence[AugmentationLike]
) -> str | None:
    """The reason why rows cannot be continued with static steps; None if they can."""
    facts = facts_of(model)
    if facts.backend != "plain":
        return "the model has hooks, so load it with model class TransformersModel"
    if not isinstance(rows, BridgeRows):
        return "the method or the phase reads tokens again, or a chat keeps its turns"
    rules = [rule for row in augmentations for rule in active_augmentations(row)]
    if any(rule.reads_scores or rule.multiplies for rule in rules):
        return "a law reads the scores"
    if facts.rotary_limit is not None:
        return "the model's rotary factors depend on the length of a text"
    if not all(isinstance(layer, SlotLayer) for layer in rows.cache.layers):
        return "not every layer keeps keys and values"
    if len({parameter.device for parameter in facts.network.parameters()}) > 1:
        return "the model lies on several devices"
    if any(offload_hooks(facts.network)):
        return "the model's weights are offloaded"
    return None


@cache
def print_note(problem: str) -> None:
    """Print once why steps are not replayed."""
    print(f"note: decoding without CUDA graphs: {problem}", file=sys.stderr)
