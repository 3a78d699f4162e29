"""What of a batch's augmentations no forward pass changes: keys, heads, and b by query."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.layer_types import LayerType
from lapa2_interp.bias.layout import Layout
from lapa2_interp.errors import AugmentationError


def _head_strengths(
    augmentation: Augmentation, size: tuple[int, int], attends: Bool[np.ndarray, " layer"]
) -> Float[np.ndarray, "layer head"]:
    """The strength of every head under an augmentation, in a model with layers without attention.

    Raises:
        AugmentationError: Such a layer is named, or none of the chosen layers has attention.
    """
    strengths = augmentation.head_strengths(*size)
    lost = np.flatnonzero(strengths.any(1) & ~attends)
    named = augmentation.strengths or augmentation.heads
    asks_for_them = not isinstance(augmentation.layers, str) or named != "all"
    if len(lost) and (asks_for_them or not strengths[attends].any()):
        raise AugmentationError(
            f"layer {lost[0]} has no attention, so nothing can be augmented there; layers with"
            f" attention: {', '.join(map(str, np.flatnonzero(attends)))}"
        )
    return strengths * attends[:, None]


class Term:
    """At most one augmentation for each row, with static masks of keys and heads."""

    def __init__(
        self,
        augmentations: Sequence[Augmentation | None],
        layouts: Sequence[Layout],
        size: tuple[int, int],
        attends: Bool[np.ndarray, " layer"],
    ) -> None:
        self.augmentations, self.layouts = list(augmentations), list(layouts)
        keys = np.zeros((len(layouts), max(len(layout) for layout in layouts)), bool)  # row key
        strengths = np.zeros((size[0], len(layouts), size[1]))  # layer row head
        by_rule = {
            augmentation: _head_strengths(augmentation, size, attends)
            for augmentation in set(augmentations)
            if augmentation is not None
        }
        for row, (augmentation, layout) in enumerate(zip(augmentations, layouts, strict=True)):
            if augmentation is not None:
                for span in layout.spans(augmentation.span):
                    keys[row, span.start : span.stop] = True
                strengths[:, row] = by_rule[augmentation]  # layer head
        # Later keys get nothing, so masks of keys end at the last one.
        self.stop = int(np.flatnonzero(keys.any(0)).max(initial=-1)) + 1
        self.keys, self.heads = keys[:, : self.stop], strengths != 0
        # None where all biased heads have one bias.
        self.strengths = None if set(np.unique(strengths)) <= {0.0, 1.0} else strengths
        self.layers = [layer for layer in range(size[0]) if self.heads[layer].any()]
        biased = [augmentation is not None for augmentation in augmentations]
        self.every_head = bool((strengths[self.layers][:, biased] == 1).all())
        # A factor on all keys also reaches those that a pass has beyond the layouts.
        self.of_all_keys = np.array(
            [rule is not None and rule.span == "all" for rule in augmentations]
        )
        self.reads_scores = any(rule is not None and rule.reads_scores for rule in augmentations)
        self.rows_by_rule = {
            augmentation: [
                row for row, row_rule in enumerate(augmentations) if row_rule == augmentation
            ]
            for augmentation in set(augmentations)
            if augmentation is not None and augmentation.reads_scores
        }

    def by_query(
        self, slots: Int[np.ndarray, " query"], layer_type: LayerType
    ) -> Shaped[np.ndarray, "row query"]:
        """b of every row and query in layers of one type; for laws that read the scores, whether
        they act there."""
        nothing = np.zeros(len(slots), bool if self.reads_scores else float)
        values: dict[tuple[int, int], np.ndarray] = {}  # read once for samples of one prompt
        for augmentation, layout in zip(self.augmentations, self.layouts, strict=True):
            if (id(augmentation), id(layout)) in values:
                continue
            if augmentation is None:
                value = nothing
            elif self.reads_scores:
                value = layout.acts(augmentation, slots, layer_type)
            else:  # `check_bias` also checks a user's custom law
                value = layout.bias(augmentation, slots, layer_type)
                largest = max(abs(entry[2]) for entry in augmentation.strengths or [(0, 0, 1.0)])
                augmentation.check_bias(value * largest)
            if augmentation is not None and augmentation.phase == "predicting_only":
                value = np.where(slots == slots[-1], value, nothing)
            values[id(augmentation), id(layout)] = value
        return np.stack(
            [
                values[id(augmentation), id(layout)]
                for augmentation, layout in zip(self.augmentations, self.layouts, strict=True)
            ]
        )
