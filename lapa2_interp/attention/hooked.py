"""The augmentation of forward passes, through hook points or an attention interface.

A TransformerLens model has hook points, a plain transformers model the interface.

    with augmented(model, Augmentation(alpha=0.5), Layout.of(model.tokenizer, "Very positive:", "The lake")):
        logits = model(tokens)

1. Before each forward pass note the number of cached keys: with the layouts, that number gives
   every query's slot and l. The last dimension of a score tensor would not give l: padding and
   fixed-size caches make that dimension larger than l.
2. At `blocks.{i}.attn.hook_attn_scores` ([row, head, query, key], masked, before softmax) add b(l)
   to the span's keys, row by row, in at least float32 (Eq. 9).
3. At `blocks.{i}.attn.hook_pattern` let an observer read the pattern, and give half-precision
   models their dtype back.

A plain transformers model has the same two hook points (`models.attention_interface`). When the
block ends, also by an exception, the model is as before.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from lapa2_interp.attention.found_rows import FoundRows
from lapa2_interp.attention.guard import (
    SINK_ERROR,
    GuardedRows,
    check_no_sink,
    check_recorder,
    guard_rows,
)
from lapa2_interp.bias.augmentation import Augmentation, AugmentationLike
from lapa2_interp.bias.find_spans import Absent, Occurrence, SpanFinder, Target
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.marked_text import MarkedText
from lapa2_interp.errors import DeadHookError, LayoutError
from lapa2_interp.models.attention_interface import AttentionHooks, hook_attention
from lapa2_interp.models.blocks import attach_hooks
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.hook_names import HOOK_PATTERN, HOOK_SCORES
from lapa2_interp.models.machine import Attn
from lapa2_interp.models.span_attention import SpanScores


@runtime_checkable
class Observer(Protocol):
    """A reader of attention patterns while the model runs, such as `attention.recorder.Recorder`.

    A method `capped`, if the reader has one, is called before `observe` of the same layer and pass,
    with the mask of the biases that were cut at +-BIAS_CAP (`batch_bias.CapCallback`).
    """

    def observe(self, layer: int, pattern: Float[Tensor, "row head query key"], first: int) -> None:
        """Called once per layer and forward pass; `first` is the slot of the first query."""


@runtime_checkable
class SpanObserver(Observer, Protocol):
    """An observer that can also read sums of attention where the matrix is not formed."""

    def observe_spans(self, layer: int, scores: SpanScores) -> None:
        """Called in place of `observe`, after the layer's outputs."""

    def needs_patterns(self, layer: int) -> str | None:
        """The reason why a layer must form the matrix all the same, or None."""


@contextmanager
def augmented(
    model: Model,
    augmentation: Augmentation | Sequence[AugmentationLike] | str | None,
    layout: Layout | Sequence[Layout] | None = None,
    observer: Observer | None = None,
    check_ids: bool = True,
    *,
    find: Target | Sequence[Target] | MarkedText | None = None,
    occurrence: Occurrence = "only",
    absent: Absent = "refuse",
    tokenizer: Any = None,
    strengths: Float[Tensor, "layer head"] | None = None,
) -> Iterator[Any]:
    """Apply an augmentation to every forward pass of a model inside the block.

    The augmentation works with `model(tokens)`, `run_with_cache`, `run_with_hooks`, KV caches and
    other hooks. The forward pass must read the layout's keys: `layout.tensor`, or left-padded rows
    of several layouts (`PaddedRows.of`) with their attention mask; positions that are not given
    come from the layouts. A prompt may be read in several passes with a cache. A plain transformers
    model may also `generate`, by sampling or with beams:

        with augmented(hf_model, Augmentation(alpha=0.5), layout):
            mask = torch.ones_like(layout.tensor)
            hf_model.generate(layout.tensor, attention_mask=mask, max_new_tokens=100)

    Where other code makes the rows (a pipeline, a harness, a trainer), `find` takes the place of
    layouts: the span is searched in the ids of each first pass of a text, row by row, and kept for
    the passes behind its cache (docs/inside-other-tools.md):

        with augmented(hf_model, "lapa2", find="You are a sailor.", tokenizer=tokenizer):
            pipeline("text-generation", hf_model, tokenizer=tokenizer)(chat)

    Such rows are augmented at every query after the span, unless the augmentation names a phase.
    The first token of a row counts as BOS if it is a special token outside the span.

    Hooks on scores that are added before the block act before the augmentation, and hooks added
    inside the block after. So a law that reads the scores belongs in the innermost block.

    Example:
        >>> from lapa2_interp import Augmentation, Layout, augmented, load_model
        >>> model = load_model("tiny-gpt2")
        >>> layout = Layout.of(model, "Very positive:", " The lake")
        >>> plain = model(layout.tensor)
        >>> with augmented(model, Augmentation(alpha=0.5), layout):
        ...     steered = model(layout.tensor)
        >>> bool((plain[0, -1] - steered[0, -1]).abs().max() > 0.01)
        True

    Args:
        model: A TransformerBridge, a HookedTransformer, or a transformers model.
        augmentation: One for all rows, or several as a tuple; or a list with those of each row,
            `[(one, other), None]`. None does not change a row; a text names recipes, such as
            "instaboost:M=5".
        layout: One for all rows, or one for each row.
        observer: Gets the attention pattern of every layer and pass.
        check_ids: Refuse a pass whose token ids are not those of the layouts. With False the
            layouts only give the spans.
        find: In place of layouts: a text, token ids, a function of a row's ids that returns (start,
            stop), or a list of these, which are one span together. A text takes all tokens that
            have a letter of it. Or a text with marks (`bias.marked_text.marked`), which say how
            strong each is; the augmentation is then None.
        occurrence: The occurrence in a row that counts: "first", "last", or "only", which refuses
            rows with several.
        absent: "refuse" rows without the span, or "leave" them alone and count them.
        tokenizer: By which texts are found; by default `model.tokenizer`.
        strengths: By layer and head, a number that multiplies the bias of every row there, as
            `Augmentation.strengths` does. Gradients flow to them, so that they can be learned. Not
            with `find`.

    Yields:
        Of a plain transformers model: by layer, the path of the last pass of several queries,
        "fused", or the reason why the pass has formed the matrix of scores
        (`models.attention_interface`). Empty with hooks, which always form the matrix. With
        `find` a `bias.find_spans.SpanFinder`, with the numbers `rows` and `left` of rows read and
        left.

    Raises:
        AugmentationError: Layers or heads the model does not have, or a bias that is too large.
        ModelError: The model is of another class, or compiled, or in training mode with gradient
            checkpointing; or a block or pass is another thread's or a copy's; or its queries see
            other keys than its configuration says.
        TraceError: A recorder was made for layers of other types.
        DeadHookError: A pass did not call the augmentation, since hooks or attention function were
            changed inside the block.
        LayoutError: A span lies outside the sequence; the numbers of augmentations, layouts and
            rows of the forward pass differ; the pass reads other tokens or masks other slots than
            the layouts have, or mixes rotary factors (`rotary.refuse_mixed_rotary`); a cache has
            dropped keys; or, under phase "predicting_only", a cache holds keys that were computed
            under the augmentation; or the network reads padded rows otherwise than alone
            (`positions.rows_problem`, tried once for each network by short passes). With `find`,
            a row lacks the span, or a pass does not show its rows (`found_rows.FoundRows.of_pass`).
    """
    facts, capped = facts_of(model), getattr(observer, "capped", None)
    found_rows: FoundRows | None = None
    if find is None:
        rows = guard_rows(model, augmentation, layout, check_ids, capped, strengths)
    elif layout is not None:
        raise LayoutError("augmented was given a layout and find; give one of the two")
    elif strengths is not None:
        raise LayoutError(
            "augmented was given find and a tensor of strengths; give layouts, or the strengths of"
            " the augmentation, Augmentation(strengths=((layer, head, strength), ...))"
        )
    else:
        tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
        finder = SpanFinder(find, occurrence, absent, tokenizer)
        found_rows = FoundRows(model, augmentation, finder, capped)
        rows = found_rows.sample
    if observer is not None:
        check_recorder(observer, facts.layer_types)
    bias = rows.bias
    block = _Block(rows, found_rows, observer, set(bias.score_law_layers), facts.dtype)
    read_layers = facts.attention_layers if observer is not None else bias.layers
    with ExitStack() as stack:
        if found_rows is not None:  # the rows of a cache are known once the pass has returned it
            stack.callback(facts.network.register_forward_hook(found_rows.keep).remove)
        if facts.backend == "plain":
            reads_spans = observer is None or isinstance(observer, SpanObserver)
            hooks = AttentionHooks(
                check_sight=lambda layer, scores, _first: block.rows.check_sight(layer, scores),
                edit_scores=block.add_bias,
                read_pattern=block.read_pattern,
                edit_spans=block.add_bias_to_spans,
                read_spans=block.read_spans if reads_spans else None,
                needs_matrix=block.needs_matrix,
                paths=getattr(model, "paths", {}),
            )
            attn: Attn = getattr(model, "attn", "auto")
            stack.enter_context(hook_attention(facts, hooks, block.begin, read_layers, attn))
            yield hooks.paths if found_rows is None else found_rows.finder
            return

        def on_masked(scores: Tensor, hook: Any, layer: int) -> None:
            if facts.backend == "hooked":
                block.rows.find_first_query(scores)
            block.rows.check_sight(layer, scores)

        def on_scores(scores: Tensor, hook: Any, layer: int) -> Tensor:
            return block.add_bias(layer, scores, block.rows.first)

        def on_pattern(pattern: Tensor, hook: Any, layer: int) -> Tensor:
            if facts.backend == "hooked":
                block.rows.find_first_query(pattern)
            if observer is not None or layer in block.unchecked:
                block.read_pattern(layer, pattern, block.rows.first)
            return pattern.to(block.dtype)  # a biased pattern is float32 in models of any type

        if facts.backend == "hooked":
            # Layer 0 tells the slot of the first query, and so which ids must have been read.
            read_layers = sorted({0, *read_layers})
        ahead = [(HOOK_SCORES.format(i), partial(on_masked, layer=i)) for i in bias.layers]
        points = [(HOOK_SCORES.format(i), partial(on_scores, layer=i)) for i in bias.layers]
        points += [(HOOK_PATTERN.format(i), partial(on_pattern, layer=i)) for i in read_layers]
        stack.enter_context(attach_hooks(model, points, block.begin, ahead))
        yield {} if found_rows is None else found_rows.finder


@dataclass
class _Block:
    """What runs in the passes of one `augmented` block, whatever the backend.

    Attributes:
        rows: The rows of the current pass; with `find` others in each.
        found_rows: Finds them, with `find`.
        unchecked: Layers that may have a learned sink, which a law that reads scores cannot reach.
        dtype: The type of the model's patterns in the current pass.
    """

    rows: GuardedRows
    found_rows: FoundRows | None
    observer: Observer | None
    unchecked: set[int]
    dtype: torch.dtype

    def begin(self, arguments: dict[str, Any], first: int) -> None:
        if self.found_rows is not None:
            self.rows = self.found_rows.of_pass(arguments, first)
        self.rows.begin(arguments, first)
        self.dtype = self.rows.facts.dtype  # the weights may have been cast since the last pass

    def add_bias(self, layer: int, scores: Tensor, first: int) -> Tensor:
        if self.rows.keys_checked != (scores.shape[2], scores.shape[3], first):
            self.rows.check_keys(scores.shape[2], scores.shape[3])
        bias = self.rows.bias
        return bias.add(layer, scores, first) if layer in bias.layers else scores

    def add_bias_to_spans(self, layer: int, scores: SpanScores) -> None:
        if self.rows.keys_checked != (scores.n_queries, scores.n_keys, scores.first):
            self.rows.check_keys(scores.n_queries, scores.n_keys)
        if layer in self.rows.bias.layers:
            self.rows.bias.add_to_spans(layer, scores)

    def read_pattern(self, layer: int, pattern: Tensor, first: int) -> None:
        if layer in self.unchecked:
            self.unchecked.remove(layer)
            check_no_sink(pattern)
        if self.observer is not None:
            if pattern.shape[3] < first + pattern.shape[2]:
                self.rows.refuse_dropped_keys(pattern)
            self.observer.observe(layer, pattern, first)

    def read_spans(self, layer: int, scores: SpanScores) -> None:
        if layer in self.unchecked:
            self.unchecked.remove(layer)
            check_no_sink((scores.key_lse - scores.lse).exp()[..., None])
        if self.observer is not None:
            assert isinstance(self.observer, SpanObserver)
            self.observer.observe_spans(layer, scores)

    def needs_matrix(self, layer: int) -> str | None:
        """The reason why a layer must form the matrix of scores, or None."""
        if layer in self.rows.bias.factor_layers:
            return "a law that multiplies scores"
        observer = self.observer
        return observer.needs_patterns(layer) if isinstance(observer, SpanObserver) else None


@contextmanager
def refuse_sinks(model: Model) -> Iterator[None]:
    """Refuse, inside the block, a model whose attention has a learned sink beside its keys.

    Raises:
        DeadHookError: The model has a sink.
    """
    facts = facts_of(model)
    if facts.backend == "plain":
        if any(name.endswith(".sinks") for name, _ in facts.network.named_parameters()):
            raise DeadHookError(SINK_ERROR)
        yield
        return
    hooks = [
        (HOOK_PATTERN.format(layer), lambda pattern, hook: check_no_sink(pattern))
        for layer in facts_of(model).attention_layers
    ]
    with attach_hooks(model, hooks):
        yield


@contextmanager
def edit_scores(model: Model, change: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Edit the attention scores of every layer and pass inside the block by a function.

    Args:
        model: A TransformerBridge, or a transformers model.
        change: Takes layer and scores [row head query key] (masked, before softmax); returns the
            scores, in any precision.
    """
    facts = facts_of(model)
    if facts.backend == "plain":
        hook = AttentionHooks(lambda layer, scores, _first: change(layer, scores))
        with hook_attention(facts, hook):
            yield
        return
    layers = facts_of(model).attention_layers
    hooks: list[tuple[str, Callable]] = [
        (HOOK_SCORES.format(layer), lambda scores, hook, layer=layer: change(layer, scores))
        for layer in layers
    ]
    hooks += [
        (HOOK_PATTERN.format(layer), lambda pattern, hook: pattern.to(facts_of(model).dtype))
        for layer in layers
    ]
    with attach_hooks(model, hooks):
        yield
