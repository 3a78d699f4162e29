"""The rows of a block whose spans are found in what its passes read (`augmented` with `find`).

They are found in the ids of each first pass, and kept for the passes behind its cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache

from lapa2_interp.attention.batch_bias import CapCallback
from lapa2_interp.attention.guard import GuardedRows
from lapa2_interp.bias.augmentation import (
    Augmentation,
    AugmentationLike,
    active_augmentations,
)
from lapa2_interp.bias.find_spans import SpanFinder
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.recipes import resolve_recipes
from lapa2_interp.errors import AugmentationError, LayoutError
from lapa2_interp.models.blocks import cache_of, has_open_block
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.positions import rows_problem

FINDABLE = ("prefix", "bos", "input")
"""Spans of an augmentation that found rows have."""
SAMPLE = Layout(ids=(0, 0, 0), tokens=(), n_bos=1, l_pre=1, l_pro=1, counted=1)
"""A row from which an augmentation's layers are known before the first pass."""
GUESSES = (
    "as generation does that guesses several tokens ahead; with find=, all tokens of the first pass"
    " count as the prompt, also guesses; leave out prompt_lookup_num_tokens and assistant models,"
    " or give augmented(...) layouts"
)
"""The end of the sentence about a pass that reads guesses."""


class FoundRows:
    """Rows whose spans are found in what the passes of a block read.

    Args:
        augmentation: Of every row.
        capped: As `GuardedRows`.

    Attributes:
        sample: Rows of an example, with the layers of all that follow.

    Raises:
        AugmentationError: The augmentation is one for each row, or has a span of its own, or layers
            or heads that the model does not have.
        LayoutError: The model's passes do not show their ids.
    """

    def __init__(
        self,
        model: Model,
        augmentation: Augmentation | Sequence[AugmentationLike] | str | None,
        finder: SpanFinder,
        capped: CapCallback | None = None,
    ) -> None:
        facts = facts_of(model)
        if facts.backend == "hooked":
            raise LayoutError(
                "the passes of a HookedTransformer do not show their rows' padding; find spans in a"
                " TransformerBridge or a transformers model, or give layouts"
            )
        self.model, self.finder, self.capped = model, finder, capped
        self.rules = _rules_to_find(augmentation)
        if finder.marked is not None:
            if self.rules:
                raise AugmentationError(
                    "a marked text says how strong each of its marks is; give no augmentation with"
                    " it, or find the text without marks"
                )
            self.rules = finder.marked.rules
        self.sample = GuardedRows(model, [self.rules], [SAMPLE], capped=capped)
        self.padding_problem = None
        if facts.backend == "plain" and not has_open_block(model):
            self.padding_problem = rows_problem(model)
        self._by_cache: WeakKeyDictionary[Any, GuardedRows] = WeakKeyDictionary()
        self._last = self.sample
        self._read: Tensor | None = None  # the ids of the last pass that was to keep no cache

    def of_pass(self, arguments: dict[str, Any], first: int) -> GuardedRows:
        """The rows of a pass with these arguments, whose first query has this slot.

        Raises:
            LayoutError: It has no ids, a filled cache, a piece of a prompt, no cache in a text that
                grows, or masks other slots than those before and after a text; or a row lacks the
                span, or has it more than once.
        """
        ids, cache = arguments.get("input_ids"), cache_of(arguments)
        if ids is None:
            raise LayoutError(
                "spans are found in token ids, and the pass was given inputs_embeds; give it"
                " input_ids, or give augmented(...) layouts"
            )
        if first:
            self._last = self._behind(cache, ids)
            return self._last
        self._check_not_read_again(ids, arguments)
        keep = arguments.get("logits_to_keep")
        reads_guesses = cache is not None and isinstance(keep, int) and keep > 1
        if reads_guesses and any(rule.phase != "after_span" for rule in self.rules):
            raise LayoutError(f"the pass asks for the logits of its last {keep} tokens, {GUESSES}")
        self._last = self._found(ids, arguments.get("attention_mask"))
        if cache is not None:
            self._by_cache[cache] = self._last
        return self._last

    def keep(self, network: Any, args: Any, output: Any) -> None:
        """Keep the rows of a pass for those behind the cache that it returns; a hook of the
        network."""
        values = output.values() if isinstance(output, Mapping) else output
        for value in values if isinstance(values, Iterable) else ():
            if isinstance(value, Cache):
                self._by_cache[value] = self._last

    def _behind(self, cache: Any, ids: Int[Tensor, "row query"]) -> GuardedRows:
        rows = self._by_cache.get(cache)
        if rows is None:
            raise LayoutError(
                "the pass has a cache that was filled before the block or by another pass, so its"
                " spans cannot be found; read the whole text in one pass inside the block, or give"
                " layouts"
            )
        first_pass, left = rows.live.shape[1], int(cache.get_seq_length())
        if left < first_pass:
            raise LayoutError(
                f"the cache was cut to {left} of the {first_pass} tokens of its first pass,"
                f" {GUESSES}"
            )
        if ids.shape[1] > 1:
            raise LayoutError(
                f"the pass reads {ids.shape[1]} more tokens behind its cache, and spans are found"
                " in the first pass alone; read a prompt in one pass (no prefill_chunk_size, no"
                " prompt_lookup_num_tokens, no assistant model, no cache of earlier turns), or give"
                " layouts"
            )
        if not rows.can_grow:
            raise LayoutError(
                "a row is padded after its text, so tokens behind its cache do not follow it; pad"
                " on the left (tokenizer.padding_side = 'left')"
            )
        return rows

    def _check_not_read_again(
        self, ids: Int[Tensor, "row query"], arguments: dict[str, Any]
    ) -> None:
        """Refuse a text that grows by a token in each pass without a cache: the span would be
        searched in what was generated, and its prompt would grow."""
        before = self._read
        self._read = ids if arguments.get("use_cache") is False else None
        if before is None or self._read is None or ids.shape[1] != before.shape[1] + 1:
            return
        if {*map(tuple, ids[:, :-1].tolist())} <= {*map(tuple, before.tolist())}:
            raise LayoutError(
                "a text is read again with each new token, so what was generated counts as prompt;"
                " generate with use_cache=True"
            )

    def _found(self, ids: Int[Tensor, "row query"], mask: Any) -> GuardedRows:
        """The rows of a first pass."""
        live = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        if not isinstance(live, Tensor) or live.shape != ids.shape:
            raise LayoutError(
                "spans are found in rows with a mask of 0 and 1 [row, token], or none; this pass's"
                " mask is another, as with a static cache; leave cache_implementation out, or give"
                " layouts"
            )
        live = (live != 0).cpu()
        lengths, pads = live.sum(1).tolist(), live.int().argmax(1).tolist()
        layouts: list[Layout] = []
        rules: list[tuple[Augmentation, ...]] = []
        known: dict[tuple[tuple[int, ...], int], int] = {}  # samples and beams share their layout
        for row, tokens in enumerate(ids.tolist()):
            pad, length = pads[row], lengths[row]
            if not live[row, pad : pad + length].all():
                raise LayoutError(
                    f"row {row} masks tokens inside its text, so its keys have no slots of their"
                    " own; mask padding before and after a text alone"
                )
            text = tuple(tokens[pad : pad + length])
            same = known.setdefault((text, pad), row)
            if self.finder.marked is not None:
                layout, of_row = self.finder.marked_layout(text, pad, row)
            else:
                layout, positions = self.finder.layout(text, pad, row)
                of_row = _rules_on(self.rules, positions)
            layouts.append(layout if same == row else layouts[same])
            rules.append(of_row if same == row else rules[same])
        if self.padding_problem and any(pads):
            raise LayoutError(f"{self.padding_problem}; read rows of one length together")
        return GuardedRows(self.model, rules, layouts, capped=self.capped, live=live)


def _rules_to_find(augmentation: Any) -> tuple[Augmentation, ...]:
    """The active augmentations of every row; they act after the span unless they name a phase.

    Raises:
        AugmentationError: They are one for each row, or have spans of their own.
    """
    resolved = resolve_recipes(augmentation)
    if isinstance(resolved, list):
        raise AugmentationError(
            "with find, rows are not known before they are read; give one augmentation, or several"
            " that act together as a tuple"
        )
    rules = active_augmentations(resolved)
    for rule in rules:
        if not isinstance(rule, Augmentation):
            raise AugmentationError(f"augmented was given {rule!r} for its augmentation")
        if rule.span not in FINDABLE or rule.follows_released_code:
            raise AugmentationError(
                f"find says what the span is, and the augmentation has span {rule.span!r} of"
                f" profile {rule.profile!r}; leave both out, or give span {', '.join(FINDABLE[1:])}"
            )
    return tuple(
        rule
        if "phase" in rule.model_fields_set
        else rule.model_copy(update={"phase": "after_span"})
        for rule in rules
    )


def _rules_on(
    rules: tuple[Augmentation, ...], positions: tuple[int, ...]
) -> tuple[Augmentation, ...]:
    """The augmentations of a row whose span has these positions in its prefix; none without any."""
    if not positions or len(positions) == positions[-1] + 1:
        return rules if positions else ()
    in_parts = {"span": ("prefix", positions)}
    return tuple(
        rule.model_copy(update=in_parts) if rule.span == "prefix" else rule for rule in rules
    )
