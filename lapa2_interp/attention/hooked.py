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

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from lapa2_interp.attention.interface import Visitor, visited
from lapa2_interp.augmentation import Augmentation
from lapa2_interp.errors import LayoutError
from lapa2_interp.layout import Layout
from lapa2_interp.loaded import Model, is_bridge, network_of, plain_network, size_of

SCORES = "blocks.{}.attn.hook_attn_scores"
PATTERN = "blocks.{}.attn.hook_pattern"


@runtime_checkable
class Observer(Protocol):
    """Something that reads attention patterns while the model runs, such as `trace.Recorder`."""

    def observe(self, layer: int, pattern: Float[Tensor, "row head query key"], first: int) -> None:
        """Called once per layer and forward pass; `first` is the slot of the first query."""


class _Bias:
    """The bias of a batch of rows: static key masks and, per forward pass, one number per row and
    query."""

    def __init__(
        self, model: Model, augmentations: Sequence[Augmentation | None], layouts: Sequence[Layout]
    ) -> None:
        self.rows = [
            (augmentation if augmentation is not None and augmentation.alpha > 0 else None, each)
            for augmentation, each in zip(augmentations, layouts, strict=True)
        ]
        n_layers, n_heads = size_of(model)
        width = max(len(each) for each in layouts)
        keys = np.zeros((len(layouts), width))  # row key
        heads = np.zeros((n_layers, len(layouts), n_heads))  # layer row head
        chosen = {
            a: a.selects(n_layers, n_heads) for a in {a for a, _ in self.rows} if a is not None
        }
        for row, (augmentation, each) in enumerate(self.rows):
            if augmentation is not None:
                for span in each.spans(augmentation.span):
                    keys[row, span.start : span.stop] = 1
                heads[:, row] = chosen[augmentation]  # layer head
        self.layers = [layer for layer in range(n_layers) if heads[layer].any()]
        self.last_key = int(np.flatnonzero(keys.any(0)).max(initial=-1)) + 1
        self.keys = torch.from_numpy(keys[:, : self.last_key])
        self.heads = torch.from_numpy(heads)
        self.every_head = bool((heads[self.layers] == 1).all())
        self.of_queries: tuple[range, Tensor | None] = (range(0), None)
        self.may_repeat = plain_network(model) is model

    def _compute(self, queries: range, device: torch.device) -> Float[Tensor, "row query"] | None:
        """b of every row and query; None where all are 0."""
        slots, nothing = np.array(queries), np.zeros(len(queries))
        # Samples of one prompt share its layout.
        distinct = {
            (id(augmentation), id(each)): (augmentation, each) for augmentation, each in self.rows
        }
        of = {
            key: nothing if a is None else each.bias(a, slots)
            for key, (a, each) in distinct.items()
        }
        # row query
        table = np.stack([of[id(augmentation), id(each)] for augmentation, each in self.rows])
        if not table.any():
            return None
        self.keys, self.heads = self.keys.to(device), self.heads.to(device)
        return torch.from_numpy(table).to(device)

    def add(
        self, layer: int, scores: Float[Tensor, "row head query key"], first: int
    ) -> Float[Tensor, "row head query key"]:
        """The scores with the bias on the span's keys, as a new tensor.

        Where these queries get no bias, the given tensor is returned.

        `first` is the slot of the first query. The numbers per row and query are computed once per
        pass.
        """
        n_rows, _, n_queries, n_keys = scores.shape
        copies, left = divmod(n_rows, len(self.rows))
        if n_rows != len(self.rows) and len(self.rows) > 1 and (left or not self.may_repeat):
            raise LayoutError(
                f"the forward pass has {n_rows} rows, but {len(self.rows)} layouts were given; give"
                " one each"
            )
        if n_keys < self.last_key:
            raise LayoutError(
                f"the span ends at slot {self.last_key} but the forward pass has {n_keys} keys; "
                "feed the layout's own ids (layout.tensor)"
            )
        queries = range(first, first + n_queries)
        if self.of_queries[0] != queries:
            self.of_queries = queries, self._compute(queries, scores.device)
        of_queries = self.of_queries[1]  # row query
        if of_queries is None:
            return scores
        heads, keys = self.heads[layer], self.keys
        if copies > 1 and len(self.rows) > 1:
            # Several sequences or beams of a prompt lie behind each other in `generate`.
            of_queries, keys, heads = (
                each.repeat_interleave(copies, dim=0) for each in (of_queries, keys, heads)
            )
        # row 1 query key
        bias = rearrange(of_queries, "row query -> row 1 query 1") * rearrange(
            keys, "row key -> row 1 1 key"
        )
        if not self.every_head:
            # row head query key
            bias = bias * rearrange(heads, "row head -> row head 1 1")
        wide = torch.promote_types(scores.dtype, torch.float32)
        scores = scores.to(wide, copy=True)
        scores[..., : self.last_key] += bias.to(
            scores.device, wide
        )  # a model may span several GPUs
        return scores


@contextmanager
def augmented(
    model: Model,
    augmentation: Augmentation | Sequence[Augmentation | None] | None,
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

    Args:
        model: A TransformerBridge, a HookedTransformer, or a transformers model.
        augmentation: One for all rows, or one per row; None leaves a row alone.
        layout: One for all rows, or one per row.
        observer: Sees the attention pattern of every layer and pass.

    Raises:
        AugmentationError: Layers or heads the model does not have.
        LayoutError: A span lies outside the sequence; the numbers of augmentations, layouts and
            rows of the forward pass differ; or a cache has dropped keys.
    """
    layouts = list(layout) if isinstance(layout, Sequence) else [layout]
    rules = (
        list(augmentation) if isinstance(augmentation, Sequence) else [augmentation] * len(layouts)
    )
    for each, kind in (
        *((rule, Augmentation) for rule in rules if rule is not None),
        *((l, Layout) for l in layouts),
    ):
        if not isinstance(each, kind):
            raise LayoutError(
                f"augmented(model, augmentation, layout) was given {each!r} for its"
                f" {kind.__name__.lower()}"
            )
    if not layouts or len(rules) != len(layouts):
        raise LayoutError(
            f"{len(rules)} augmentations for {len(layouts)} layouts; give one layout a row, and one"
            " augmentation or as many"
        )
    bias = _Bias(model, rules, layouts)
    held = 0

    def begin(kwargs: dict[str, Any]) -> int:
        nonlocal held
        cache = kwargs.get("past_key_values")
        held = (
            0 if cache is None else int(cache.get_seq_length())
        )  # some caches count in a tensor they later change
        if held <= max(each.soft for each in layouts):
            _check_padding(layouts, kwargs.get("attention_mask"))
        return held

    def edit(layer: int, scores: Tensor, first: int) -> Tensor:
        _check_keys(scores, first)
        return bias.add(layer, scores, first) if layer in bias.layers else scores

    def look(layer: int, pattern: Tensor, first: int) -> None:
        if observer is not None:
            observer.observe(layer, pattern, first)

    if (plain := plain_network(model)) is not None:
        with visited(plain, Visitor(edit, look), begin):
            yield
        return

    def before_forward(_network: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        begin(kwargs)

    def first_query(attention: Tensor) -> int:
        # A HookedTransformer's only cache concatenates; the bridge may carry one with more slots
        # than live keys.
        n_queries, n_keys = attention.shape[2:]
        first = held if is_bridge(model) else n_keys - n_queries
        _check_keys(attention, first)
        return first

    def on_scores(scores: Tensor, hook: Any, layer: int) -> Tensor:
        return bias.add(layer, scores, first_query(scores))

    def on_pattern(pattern: Tensor, hook: Any, layer: int) -> Tensor:
        if observer is not None:
            observer.observe(layer, pattern, first_query(pattern))
        return pattern.to(model.cfg.dtype)

    read = range(model.cfg.n_layers) if observer is not None else bias.layers
    hooks = [(SCORES.format(layer), partial(on_scores, layer=layer)) for layer in bias.layers]
    hooks += [(PATTERN.format(layer), partial(on_pattern, layer=layer)) for layer in read]
    with ExitStack() as undo:
        network = network_of(model)
        handle = network.register_forward_pre_hook(before_forward, with_kwargs=True)
        undo.callback(handle.remove)
        undo.enter_context(model.hooks(fwd_hooks=hooks))
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


def _check_padding(layouts: Sequence[Layout], mask: Tensor | None) -> None:
    """Refuse a first pass that does not mask its layouts' padding: spans would lie on other
    keys."""
    pads = torch.tensor([each.pad for each in layouts])
    if mask is None:
        if pads.any():
            raise LayoutError(
                "the layouts are left-padded but the forward pass has no attention_mask; pass the"
                " rows' mask"
            )
    elif mask.ndim == 2 and mask.shape[1] >= len(layouts[0]):
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
