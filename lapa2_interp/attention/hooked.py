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

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from lapa2_interp._util.errors import DeadHookError, LayoutError, ModelError, TraceError
from lapa2_interp.attention.batch_bias import BatchBias
from lapa2_interp.bias.augmentation import (
    Augmentation,
    AugmentationLike,
    active_augmentations,
    broadcast_to_rows,
)
from lapa2_interp.bias.layer_types import LayerType, describe_layers, describe_runs
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.recipes import resolve_recipes
from lapa2_interp.models.attention_interface import (
    AttentionHooks,
    check_matrix_fits,
    hook_attention,
)
from lapa2_interp.models.blocks import attach_hooks, has_open_block
from lapa2_interp.models.cache_name import cache_of
from lapa2_interp.models.card import (
    Model,
    attention_layers,
    is_bridge,
    layer_types,
    n_layers_and_heads,
    network_of,
    plain_network,
    weights_dtype,
)
from lapa2_interp.models.hook_names import HOOK_PATTERN, HOOK_SCORES
from lapa2_interp.models.machine import Attn
from lapa2_interp.models.positions import rows_problem
from lapa2_interp.models.rotary import refuse_mixed_rotary
from lapa2_interp.models.span_attention import SpanScores

MASK_CHECK_INTERVAL = 64
"""Tokens between two checks of the mask, in passes of one token."""


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
    layout: Layout | Sequence[Layout],
    observer: Observer | None = None,
    check_ids: bool = True,
) -> Iterator[Mapping[int, str]]:
    """Apply an augmentation to every forward pass of a model inside the block.

    The augmentation works with `model(tokens)`, `run_with_cache`, `run_with_hooks`, KV caches and
    other hooks. The forward pass must read the layout's keys: `layout.tensor`, or left-padded rows
    of several layouts (`PaddedRows.of`) with their attention mask; positions that are not given
    come from the layouts. A prompt may be read in several passes with a cache. A plain transformers
    model may also `generate`, by sampling or with beams:

        with augmented(hf_model, Augmentation(alpha=0.5), layout):
            mask = torch.ones_like(layout.tensor)
            hf_model.generate(layout.tensor, attention_mask=mask, max_new_tokens=100)

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

    Yields:
        Of a plain transformers model: by layer, the path of the last pass of several queries,
        "fused", or the reason why the pass has formed the matrix of scores
        (`models.attention_interface`). Empty with hooks, which always form the matrix.

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
            (`positions.rows_problem`, tried once for each network by short passes).
    """
    plain = plain_network(model)
    refuse_mixed_rotary(network_of(model))
    layouts = list(layout) if isinstance(layout, Sequence) else [layout]
    padded = plain is not None and any(row_layout.pad for row_layout in layouts)
    if padded and not has_open_block(model) and (problem := rows_problem(model)) is not None:
        raise LayoutError(f"{problem}; read rows of one length together")
    # The bias, and the check of each pass.
    bias = BatchBias(
        _augmentations_of_rows(augmentation, layouts),
        layouts,
        n_layers_and_heads(model),
        layer_types(model),
        may_repeat=plain is model,
        capped=getattr(observer, "capped", None),
    )
    recorded = getattr(observer, "layer_types", None)
    if recorded is not None and recorded != bias.layer_types:
        raise TraceError(
            f"the recorder is for a model of layers {describe_layers(recorded)}, and this one's are"
            f" {describe_layers(bias.layer_types)}; give Recorder(...,"
            " layer_types=layer_types(model)), of lapa2_interp.models.card"
        )
    passes = _PassCheck(model, layouts, check_ids)
    augmented_slot: float = math.inf  # the slot of a query whose keys and values are augmented
    unchecked = set(bias.score_law_layers)  # layers that may have a learned sink

    # The hooks of a layer.
    def check_sight(layer: int, scores: Tensor, first: int) -> None:
        passes.check_sight(layer, bias.layer_types[layer], scores, first)

    def check_pass(n_queries: int, n_keys: int, first: int) -> None:
        nonlocal augmented_slot
        _check_cache_complete(n_queries, n_keys, first)
        if n_keys < bias.last_key and not passes.is_ours:
            raise LayoutError(
                f"the span ends at slot {bias.last_key} but the forward pass has"
                f" {n_keys} keys; feed the layout's own ids (layout.tensor)"
            )
        if first > augmented_slot:
            raise LayoutError(
                "under phase 'predicting_only' a cache must not keep keys of the query that"
                " predicts; use new_rows(model, rules), a pass over the whole text, or"
                " phase 'last_query'"
            )
        last = first + n_queries - 1
        augmented_slot = last if bias.query_phase_acts_on(last) else math.inf

    def add_bias(layer: int, scores: Tensor, first: int) -> Tensor:
        check_pass(scores.shape[2], scores.shape[3], first)
        return bias.add(layer, scores, first) if layer in bias.layers else scores

    def add_bias_to_spans(layer: int, scores: SpanScores) -> None:
        check_pass(scores.n_queries, scores.n_keys, scores.first)
        if layer in bias.layers:
            bias.add_to_spans(layer, scores)

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

    def needs_matrix(layer: int, differentiated: bool) -> str | None:
        if differentiated and layer in bias.score_law_layers:
            return "the gradient of a law that reads the scores"
        return observer.needs_patterns(layer) if isinstance(observer, SpanObserver) else None

    # Attach them.
    observed = attention_layers(model) if observer is not None else bias.layers
    if plain is not None:
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
        with hook_attention(plain, hooks, passes.begin, observed, attn):
            yield hooks.paths
        return

    def on_masked(scores: Tensor, hook: Any, layer: int) -> None:
        check_sight(layer, scores, passes.first_query(scores))

    def on_scores(scores: Tensor, hook: Any, layer: int) -> Tensor:
        return add_bias(layer, scores, passes.first_query(scores))

    def on_pattern(pattern: Tensor, hook: Any, layer: int) -> Tensor:
        read_pattern(layer, pattern, passes.first_query(pattern))
        return pattern.to(weights_dtype(model))

    if not is_bridge(model):
        observed = sorted({0, *observed})  # layer 0 gives the first query, and so the ids
    sight_hooks, score_hooks, pattern_hooks = (
        [(point.format(layer), partial(hook, layer=layer)) for layer in layers]
        for point, hook, layers in (
            (HOOK_SCORES, on_masked, bias.layers),
            (HOOK_SCORES, on_scores, bias.layers),
            (HOOK_PATTERN, on_pattern, observed),
        )
    )
    with attach_hooks(model, [*score_hooks, *pattern_hooks], passes.begin, ahead=sight_hooks):
        yield {}


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


class _PassCheck:
    """A check of a block's forward passes: the arguments of each are compared with the layouts.

    Attributes:
        is_ours: True if the pass's ids are known to be those of the layouts.
    """

    def __init__(self, model: Model, layouts: Sequence[Layout], check_ids: bool) -> None:
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
        self.first = _n_cached_keys(arguments)
        self._check_mask(arguments)
        if is_bridge(self.model) and plain_network(self.model) is None:
            check_matrix_fits(network_of(self.model), arguments, "the model has hooks on them")
        if not is_bridge(self.model) and plain_network(self.model) is None:
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
        if not is_bridge(self.model):
            self.first = attention.shape[3] - attention.shape[2]
            ids, self.unread = self.unread, None
            if ids is not None:
                self._check_ids(ids)
        _check_cache_complete(attention.shape[2], attention.shape[3], self.first)
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
        network = network_of(self.model)
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


@contextmanager
def refuse_sinks(model: Model) -> Iterator[None]:
    """Refuse, inside the block, a model whose attention has a learned sink beside its keys.

    Raises:
        DeadHookError: The model has a sink.
    """
    if (plain := plain_network(model)) is not None:
        if any(name.endswith(".sinks") for name, _ in plain.named_parameters()):
            raise DeadHookError(SINK_ERROR)
        yield
        return
    hooks = [
        (HOOK_PATTERN.format(layer), lambda pattern, hook: _check_no_sink(pattern))
        for layer in attention_layers(model)
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
    if (plain := plain_network(model)) is not None:
        hook = AttentionHooks(lambda layer, scores, _first: change(layer, scores))
        with hook_attention(plain, hook, lambda _given: 0):
            yield
        return
    layers = attention_layers(model)
    hooks: list[tuple[str, Callable]] = [
        (HOOK_SCORES.format(layer), lambda scores, hook, layer=layer: change(layer, scores))
        for layer in layers
    ]
    hooks += [
        (HOOK_PATTERN.format(layer), lambda pattern, hook: pattern.to(weights_dtype(model)))
        for layer in layers
    ]
    with attach_hooks(model, hooks):
        yield


def _check_cache_complete(n_queries: int, n_keys: int, first: int) -> None:
    """Refuse a cache that has dropped keys."""
    if n_keys < first + n_queries:
        raise LayoutError(
            f"the cache holds {n_keys} keys of the {first + n_queries} read so far (a sliding"
            " window drops old ones), so slots are unknown; use a cache that keeps all keys,"
            " such as transformers' DynamicCache()"
        )


SINK_ERROR = (
    "this model's attention has a learned sink beside its keys, so what reads the scores cannot"
    " know or reach a share; use law log, scale or cut"
)


def _check_no_sink(pattern: Float[Tensor, "row head query key"]) -> None:
    """Refuse a pattern that gives a share to a learned sink, which the scores do not show."""
    shares = pattern[:, :, -1].sum(2)
    if ((shares - 1).abs() > 0.02)[shares > 0].any():  # a HookedTransformer's padding has none
        raise DeadHookError(SINK_ERROR)


def _n_cached_keys(kwargs: dict[str, Any]) -> int:
    """The number of keys in the cache that a pass is given, by either library's argument."""
    if (cache := cache_of(kwargs)) is not None:
        return int(cache.get_seq_length())  # some caches count in a tensor that changes later
    hooked = kwargs.get("past_kv_cache")
    return 0 if hooked is None else hooked.previous_attention_mask.shape[1]
