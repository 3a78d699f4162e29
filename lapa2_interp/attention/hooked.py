"""The augmentation on any forward pass: through TransformerLens hook points, or in a plain
transformers model through its attention interface.

    with augmented(model, Augmentation(alpha=0.5), Layout.of(model.tokenizer, "Very positive:", "The lake")):
        logits = model(tokens)

1. Before each forward pass note how many keys the cache holds: with the layouts, that gives every
   query's slot and l. The last dimension of a score tensor would not give l: padding and fixed-size
   caches make it larger than l.
2. At `blocks.{i}.attn.hook_attn_scores` ([row, head, query, key], masked, before softmax) add b(l)
   to the span's keys, row by row, in at least float32 (Eq. 7).
3. At `blocks.{i}.attn.hook_pattern` let an observer read the pattern, and give half-precision
   models their dtype back.

A plain transformers model has the same two places (`interface`). When the block ends, also
through an exception, everything is as before.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lapa2_interp.attention.bias import Bias
from lapa2_interp.attention.interface import Visitor, by_name, visited
from lapa2_interp.augmentation import Augmentation, Rules, of_rows, several
from lapa2_interp.errors import DeadHookError, LayoutError
from lapa2_interp.layout import Layout
from lapa2_interp.loaded import (
    Model,
    attention_layers,
    is_bridge,
    network_of,
    plain_network,
    size_of,
)

SCORES = "blocks.{}.attn.hook_attn_scores"
PATTERN = "blocks.{}.attn.hook_pattern"


@runtime_checkable
class Observer(Protocol):
    """Something that reads attention patterns while the model runs, such as `trace.Recorder`."""

    def observe(self, layer: int, pattern: Float[Tensor, "row head query key"], first: int) -> None:
        """Called once per layer and forward pass; `first` is the slot of the first query."""


@runtime_checkable
class CapObserver(Protocol):
    """An observer that is also told where a bias that depends on the scores was cut at +-CAP."""

    def capped(self, layer: int, caps: Bool[Tensor, "row head query"], first: int) -> None:
        """Called before `observe` of the same layer and pass."""


@contextmanager
def augmented(
    model: Model,
    augmentation: Augmentation | Sequence[Rules] | None,
    layout: Layout | Sequence[Layout],
    observer: Observer | None = None,
) -> Iterator[None]:
    """Apply an augmentation to every forward pass of a model inside the block.

    Works with `model(tokens)`, `run_with_cache`, `run_with_hooks` and KV caches alike, and works
    beside hooks that are already there. The forward pass must read the layout's keys:
    `layout.tensor`, or left-padded rows of several layouts
    (`left_pad`) with their attention mask. A plain transformers model may also `generate`, by
    sampling or with beams:

        with augmented(hf_model, Augmentation(alpha=0.5), layout):
            mask = torch.ones_like(layout.tensor)
            hf_model.generate(layout.tensor, attention_mask=mask, max_new_tokens=100)

    Hooks on scores that are entered before the block act before the augmentation, and those entered
    inside it after. So a law that reads the scores belongs into the innermost block.

    Args:
        model: A TransformerBridge, a HookedTransformer, or a transformers model.
        augmentation: One for all rows, or several as a tuple; or a list with those of each row,
            `[(one, other), None]`. None leaves a row alone.
        layout: One for all rows, or one per row.
        observer: Sees the attention pattern of every layer and pass.

    Raises:
        AugmentationError: Layers or heads the model does not have.
        ModelError: The model is none of these.
        LayoutError: A span lies outside the sequence; the numbers of augmentations, layouts and
            rows of the forward pass differ; a cache has dropped keys; or, under phase "query", a
            cache holds keys that were computed under the augmentation.
    """
    plain = plain_network(model)
    layouts = list(layout) if isinstance(layout, Sequence) else [layout]
    given = of_rows(augmentation, len(layouts))
    flat = [rule for row in given for rule in (row if isinstance(row, Sequence) else (row,))]
    for each, kind in (
        *((rule, Augmentation) for rule in flat if rule is not None),
        *((l, Layout) for l in layouts),
    ):
        if not isinstance(each, kind):
            raise LayoutError(
                f"augmented(model, augmentation, layout) was given {each!r} for its"
                f" {kind.__name__.lower()}"
            )
    if not layouts or len(given) != len(layouts):
        raise LayoutError(
            f"{len(given)} augmentations for {len(layouts)} layouts; give one layout a row, and one"
            " augmentation or as many"
        )
    bias = Bias(
        [several(row) for row in given],
        layouts,
        size_of(model),
        may_repeat=plain is model,
        capped=observer.capped if isinstance(observer, CapObserver) else None,
    )
    held, changed = 0, math.inf  # keys in the cache, and the slot of a query that is not clean
    unchecked = set(bias.reading_layers)

    def begin(kwargs: dict[str, Any]) -> int:
        nonlocal held
        held = _held(kwargs)
        if held <= max(each.soft for each in layouts):
            _check_padding(layouts, kwargs.get("attention_mask"))
        return held

    def edit(layer: int, scores: Tensor, first: int) -> Tensor:
        nonlocal changed
        _check_keys(scores, first)
        if first > changed:
            raise LayoutError(
                "under phase 'query' a cache must not keep keys of the query that predicts; use"
                " open_rows(..., direct=True), a pass over the whole text, or phase 'last_query'"
            )
        last = first + scores.shape[2] - 1
        changed = last if bias.acts_on_last(last) else math.inf
        return bias.add(layer, scores, first) if layer in bias.layers else scores

    def look(layer: int, pattern: Tensor, first: int) -> None:
        if layer in unchecked:
            unchecked.remove(layer)
            _check_no_sink(pattern)
        if observer is not None:
            observer.observe(layer, pattern, first)

    if plain is not None:
        with visited(plain, Visitor(edit, look), begin):
            yield
        return

    def before_forward(network: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        begin(by_name(network, args, kwargs))

    def first_query(attention: Tensor) -> int:
        # A HookedTransformer's only cache concatenates, and its `generate` passes by
        # `before_forward`; the bridge may carry one with more slots than live keys.
        n_queries, n_keys = attention.shape[2:]
        first = held if is_bridge(model) else n_keys - n_queries
        _check_keys(attention, first)
        return first

    def on_scores(scores: Tensor, hook: Any, layer: int) -> Tensor:
        return edit(layer, scores, first_query(scores))

    def on_pattern(pattern: Tensor, hook: Any, layer: int) -> Tensor:
        look(layer, pattern, first_query(pattern))
        return pattern.to(model.cfg.dtype)

    attending = attention_layers(model)
    biased = [layer for layer in bias.layers if layer in attending]
    read = attending if observer is not None else biased
    hooks = [(SCORES.format(layer), partial(on_scores, layer=layer)) for layer in biased]
    hooks += [(PATTERN.format(layer), partial(on_pattern, layer=layer)) for layer in read]
    with ExitStack() as undo:
        network = network_of(model)
        handle = network.register_forward_pre_hook(before_forward, with_kwargs=True)
        undo.callback(handle.remove)
        undo.enter_context(model.hooks(fwd_hooks=hooks))
        yield


@contextmanager
def without_sinks(model: Model) -> Iterator[None]:
    """Refuse, in the block, a model whose attention has a learned sink beside its keys.

    Raises:
        DeadHookError: It has one.
    """
    if (plain := plain_network(model)) is not None:
        if any(name.endswith(".sinks") for name, _ in plain.named_parameters()):
            raise DeadHookError(SINK)
        yield
        return
    hooks = [
        (PATTERN.format(layer), lambda pattern, hook: _check_no_sink(pattern))
        for layer in attention_layers(model)
    ]
    with model.hooks(fwd_hooks=hooks):
        yield


@contextmanager
def on_scores(model: Model, change: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Let a function change the attention scores of every layer and pass inside the block.

    Args:
        model: A TransformerBridge, or a transformers model.
        change: Takes layer and scores [row head query key] (masked, before softmax); returns the
            scores, in any precision.
    """
    if (plain := plain_network(model)) is not None:
        visitor = Visitor(lambda layer, scores, _first: change(layer, scores))
        with visited(plain, visitor, lambda _kwargs: 0):
            yield
        return
    layers = attention_layers(model)
    hooks: list[tuple[str, Callable]] = [
        (SCORES.format(layer), lambda scores, hook, layer=layer: change(layer, scores))
        for layer in layers
    ]
    hooks += [
        (PATTERN.format(layer), lambda pattern, hook: pattern.to(model.cfg.dtype))
        for layer in layers
    ]
    with model.hooks(fwd_hooks=hooks):
        yield


def _check_keys(attention: Float[Tensor, "row head query key"], first: int) -> None:
    """Refuse a cache that has dropped keys."""
    n_queries, n_keys = attention.shape[2:]
    if n_keys < first + n_queries:
        raise LayoutError(
            f"the cache holds {n_keys} keys of the {first + n_queries} read so far (a sliding"
            " window drops old ones), so slots cannot be told; use a cache that keeps all keys,"
            " such as transformers' DynamicCache()"
        )


SINK = (
    "this model's attention has a learned sink beside its keys, so what reads the scores cannot"
    " know or reach a share; use law log, scale or cut"
)


def _check_no_sink(pattern: Float[Tensor, "row head query key"]) -> None:
    """Refuse a pattern that gives a share to a learned sink, which the scores do not show."""
    if (pattern[:, :, -1].sum(2) - 1).abs().max() > 0.02:
        raise DeadHookError(SINK)


def _held(kwargs: dict[str, Any]) -> int:
    """Keys in the cache that a pass is given, as transformers or a HookedTransformer names it."""
    if (cache := kwargs.get("past_key_values")) is not None:
        return int(cache.get_seq_length())  # some caches count in a tensor they later change
    hooked = kwargs.get("past_kv_cache")
    return 0 if hooked is None else hooked.previous_attention_mask.shape[1]


def _check_padding(layouts: Sequence[Layout], mask: Any) -> None:
    """Refuse a first pass that does not mask its layouts' padding: spans would lie on other keys.

    Masks that transformers' `generate` has made (one a layer type, or by query) come from the
    padding that it was given.
    """
    pads = torch.tensor([each.pad for each in layouts])
    if mask is None:
        if pads.any():
            raise LayoutError(
                "the layouts are left-padded but the forward pass has no attention_mask; pass the"
                " rows' mask"
            )
    elif isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= len(layouts[0]):
        masked = (mask[:, : len(layouts[0])] == 0).sum(1).cpu()
        if (len(masked) == len(pads) or len(pads) == 1) and (
            wrong := (masked != pads).nonzero()
        ).numel():
            row = int(wrong[0, 0])
            raise LayoutError(
                f"row {row} masks {int(masked[row])} slots where its layout has"
                f" {int(pads[row % len(pads)])} of padding; give one layout a row, in the rows'"
                " order, padded with left_pad"
            )
