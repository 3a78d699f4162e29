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
from functools import partial
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from lapa2_interp._util.errors import DeadHookError, LayoutError, TraceError
from lapa2_interp.attention.batch_bias import CapCallback
from lapa2_interp.attention.block_rows import BlockRows, FoundRows
from lapa2_interp.bias.augmentation import (
    Augmentation,
    AugmentationLike,
    active_augmentations,
    broadcast_to_rows,
)
from lapa2_interp.bias.find_spans import Absent, Occurrence, SpanFinder, Target
from lapa2_interp.bias.layer_types import describe_layers
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.recipes import resolve_recipes
from lapa2_interp.models.attention_interface import (
    AttentionHooks,
    hook_attention,
)
from lapa2_interp.models.blocks import attach_hooks, has_open_block
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.hook_names import HOOK_PATTERN, HOOK_SCORES
from lapa2_interp.models.machine import Attn
from lapa2_interp.models.positions import rows_problem
from lapa2_interp.models.rotary import refuse_mixed_rotary
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
    find: Target | Sequence[Target] | None = None,
    occurrence: Occurrence = "only",
    absent: Absent = "refuse",
    tokenizer: Any = None,
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
            have a letter of it.
        occurrence: The occurrence in a row that counts: "first", "last", or "only", which refuses
            rows with several.
        absent: "refuse" rows without the span, or "leave" them alone and count them.
        tokenizer: By which texts are found; by default `model.tokenizer`.

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
            a row lacks the span, or a pass does not show its rows (`block_rows.FoundRows.of_pass`).
    """
    facts = facts_of(model)
    refuse_mixed_rotary(facts.network)
    capped = getattr(observer, "capped", None)
    searched: FoundRows | None = None
    if find is None:
        rows = _rows_of_layouts(model, augmentation, layout, check_ids, capped)
    elif layout is not None:
        raise LayoutError("augmented was given a layout and find; give one of the two")
    else:
        tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
        finder = SpanFinder(find, occurrence, absent, tokenizer)
        searched = FoundRows(model, augmentation, finder, capped)
        rows = searched.sample
    bias = rows.bias
    recorded = getattr(observer, "layer_types", None)
    if recorded is not None and recorded != bias.layer_types:
        raise TraceError(
            f"the recorder is for a model of layers {describe_layers(recorded)}, and this one's are"
            f" {describe_layers(bias.layer_types)}; give Recorder(...,"
            " layer_types=facts_of(model).layer_types), of lapa2_interp.models"
        )
    unchecked = set(bias.score_law_layers)  # layers that may have a learned sink

    def begin(arguments: dict[str, Any]) -> int:
        nonlocal rows
        if searched is not None:
            rows = searched.of_pass(arguments)
        return rows.check.begin(arguments)

    # The hooks of a layer.
    def check_sight(layer: int, scores: Tensor, first: int) -> None:
        rows.check.check_sight(layer, bias.layer_types[layer], scores, first)

    def add_bias(layer: int, scores: Tensor, first: int) -> Tensor:
        rows.check_pass(scores.shape[2], scores.shape[3], first)
        return rows.bias.add(layer, scores, first) if layer in bias.layers else scores

    def add_bias_to_spans(layer: int, scores: SpanScores) -> None:
        rows.check_pass(scores.n_queries, scores.n_keys, scores.first)
        if layer in bias.layers:
            rows.bias.add_to_spans(layer, scores)

    def read_pattern(layer: int, pattern: Tensor, first: int) -> None:
        if layer in unchecked:
            unchecked.remove(layer)
            _check_no_sink(pattern)
        if observer is not None:
            observer.observe(layer, pattern, first)

    def read_spans(layer: int, scores: SpanScores) -> None:
        if layer in unchecked:
            unchecked.remove(layer)
            _check_no_sink((scores.key_lse - scores.lse).exp()[..., None])
        if observer is not None:
            assert isinstance(observer, SpanObserver)
            observer.observe_spans(layer, scores)

    def needs_matrix(layer: int) -> str | None:
        if layer in bias.factor_layers:
            return "a law that multiplies scores"
        return observer.needs_patterns(layer) if isinstance(observer, SpanObserver) else None

    # Attach them.
    keep = ExitStack()
    if searched is not None:
        keep.callback(facts_of(model).network.register_forward_hook(searched.keep).remove)
    observed = facts_of(model).attention_layers if observer is not None else bias.layers
    if facts.backend == "plain":
        reads_spans = observer is None or isinstance(observer, SpanObserver)
        hooks = AttentionHooks(
            edit_scores=add_bias,
            read_pattern=read_pattern,
            check_sight=check_sight,
            edit_spans=add_bias_to_spans,
            read_spans=read_spans if reads_spans else None,
            needs_matrix=needs_matrix,
            paths=getattr(model, "paths", {}),
        )
        attn: Attn = getattr(model, "attn", "auto")
        with keep, hook_attention(facts.network, hooks, begin, observed, attn):
            yield hooks.paths if searched is None else searched.finder
        return

    def on_masked(scores: Tensor, hook: Any, layer: int) -> None:
        check_sight(layer, scores, rows.check.first_query(scores))

    def on_scores(scores: Tensor, hook: Any, layer: int) -> Tensor:
        return add_bias(layer, scores, rows.check.first_query(scores))

    def on_pattern(pattern: Tensor, hook: Any, layer: int) -> Tensor:
        read_pattern(layer, pattern, rows.check.first_query(pattern))
        return pattern.to(facts_of(model).dtype)

    if facts_of(model).backend == "hooked":
        observed = sorted({0, *observed})  # layer 0 gives the first query, and so the ids
    sight_hooks, score_hooks, pattern_hooks = (
        [(point.format(layer), partial(hook, layer=layer)) for layer in layers]
        for point, hook, layers in (
            (HOOK_SCORES, on_masked, bias.layers),
            (HOOK_SCORES, on_scores, bias.layers),
            (HOOK_PATTERN, on_pattern, observed),
        )
    )
    with keep, attach_hooks(model, [*score_hooks, *pattern_hooks], begin, ahead=sight_hooks):
        yield {} if searched is None else searched.finder


def _rows_of_layouts(
    model: Model,
    augmentation: Any,
    layout: Layout | Sequence[Layout] | None,
    check_ids: bool,
    capped: CapCallback | None,
) -> BlockRows:
    """The rows of a block whose layouts are given.

    Raises:
        LayoutError: As `augmented`.
    """
    if layout is None:
        raise LayoutError(
            "augmented was given no layout; give one, such as Layout.of(...), or find=..., a text"
        )
    layouts = list(layout) if isinstance(layout, Sequence) else [layout]
    rules = _augmentations_of_rows(augmentation, layouts)
    padded = facts_of(model).backend == "plain" and any(row_layout.pad for row_layout in layouts)
    if padded and not has_open_block(model) and (problem := rows_problem(model)) is not None:
        raise LayoutError(f"{problem}; read rows of one length together")
    return BlockRows(model, rules, layouts, check_ids, capped)


def _augmentations_of_rows(
    augmentation: Augmentation | Sequence[AugmentationLike] | str | None, layouts: Sequence[Layout]
) -> list[tuple[Augmentation, ...]]:
    """The active augmentations of each row.

    Raises:
        LayoutError: Another number than of layouts, or one that is none; or a layout that is none.
    """
    rules = [
        resolve_recipes(row)
        for row in broadcast_to_rows(resolve_recipes(augmentation), len(layouts))
    ]
    flat = [rule for row in rules for rule in (row if isinstance(row, Sequence) else (row,))]
    for value, kind in (
        *((rule, Augmentation) for rule in flat if rule is not None),
        *((l, Layout) for l in layouts),
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
    return [active_augmentations(row) for row in rules]


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
        (HOOK_PATTERN.format(layer), lambda pattern, hook: _check_no_sink(pattern))
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
        with hook_attention(facts.network, hook, lambda _given: 0):
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


SINK_ERROR = (
    "this model's attention has a learned sink beside its keys, so what reads the scores cannot"
    " know or reach a share; use law log, scale or cut"
)


def _check_no_sink(pattern: Float[Tensor, "row head query key"]) -> None:
    """Refuse a pattern that gives a share to a learned sink, which the scores do not show."""
    shares = pattern[:, :, -1].sum(2)
    if ((shares - 1).abs() > 0.02)[shares > 0].any():  # a HookedTransformer's padding has none
        raise DeadHookError(SINK_ERROR)
