"""Attention on the prefix by head, and arms at equal mean attention.

One alpha moves much attention in all heads and little in a few. So arms that differ by heads,
layers or tokens are compared at equal attention on the prefix, averaged over all layers and heads
of the model, steps and texts.

    few = Augmentation(alpha=1, heads=((21, 1), (18, 4)))
    goal = mean_prefix_attention(model, "sentiment", few)
    alpha_at_prefix_attention(model, "sentiment", goal)   # alpha of all heads with as much
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Annotated

import numpy as np
from jaxtyping import Float
from pydantic import Field

from lapa2_interp._util.values import Positive, numbers_checked
from lapa2_interp.attention.tables import select_layer_type
from lapa2_interp.bias.augmentation import (
    ALPHA_BOUNDS,
    Augmentation,
    AugmentationLike,
    active_augmentations,
)
from lapa2_interp.circuits.contrast_set import ContrastLike, as_contrast_set
from lapa2_interp.errors import CircuitError
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.models.facts import Model
from lapa2_interp.models.load import accepts_model_name

GOAL_TOLERANCE = 1e-3
"""Largest distance of the attention from the goal, as a share of the goal."""


@accepts_model_name
def mean_prefix_attention(
    model: Model, contrast: ContrastLike, augmentation: AugmentationLike = None
) -> float:
    """Attention on the prefix, from 0 to 1: the mean over layers, heads, steps, branches and texts.

    A text that a prefix steered (`source`) counts in the branch of this prefix alone, another text
    in all branches.

    Args:
        model: A TransformerBridge, with custom hooks if it has any, or a `TransformersModel`.
        contrast: A `ContrastSet`, or a task by name or value, or one or more examples.
        augmentation: One or more augmentations.

    Raises:
        CircuitError: As `control_score`.
    """
    contrast_set = as_contrast_set(model, contrast)
    rows = [
        (example, branch)
        for example in contrast_set.examples
        for branch, name in enumerate(example.attributes)
        if example.source == name or example.source not in example.attributes
    ]
    trace = teacher_forced(
        model,
        [example.layouts[branch] for example, branch in rows],
        [example.text for example, _ in rows],
        [augmentation] * len(rows),
        prefixes=[example.prefixes[branch] for example, branch in rows],
        trace="pooled",
    )
    return float(np.nanmean(select_layer_type(trace, "prefix").mean("step").to_numpy()))


@numbers_checked
@accepts_model_name
def alpha_at_prefix_attention(
    model: Model,
    contrast: ContrastLike,
    goal: Annotated[float, Field(gt=0, lt=1)],
    augmentation: AugmentationLike = None,
    *,
    beside: AugmentationLike = None,
    max_alpha: Positive = 8.0,
) -> float:
    """The alpha at which an augmentation gives the prefix the mean attention `goal`, to one part in
    a thousand.

    Texts are given, so every alpha is measured on the same ones. The alpha is found by regula falsi
    between a smaller and a larger one.

    Args:
        model, contrast: As `mean_prefix_attention`. Texts of the baseline are fair to all
            arms.
        goal: The mean attention, above that without a bias.
        augmentation: One augmentation, whose alpha is replaced; by default LaPA2 in all heads.
        beside: Augmentations that act, too, as they are.
        max_alpha: The largest alpha that is tried.

    Raises:
        CircuitError: The goal is not above the attention without a bias, or it is above that of
            `max_alpha` (the message names the reachable attention); or several augmentations.
    """
    contrast_set = as_contrast_set(model, contrast)
    rules = augmentation if isinstance(augmentation, Sequence) else (augmentation,)
    if len(rules) != 1:
        raise CircuitError(f"alpha is that of one augmentation; found {len(rules)}")
    rule = rules[0] or Augmentation(alpha=1)
    high = ALPHA_BOUNDS.get(rule.law, (0.0, math.inf))[1]
    top = min(max_alpha, high)

    @cache
    def reached(alpha: float) -> float:
        tried = rule.model_copy(update={"alpha": alpha})
        return mean_prefix_attention(model, contrast_set, (tried, *active_augmentations(beside)))

    if goal <= reached(0.0):
        raise CircuitError(
            f"without a bias the mean attention on the prefix is {reached(0.0):.4g} already; ask"
            f" for more than that, found {goal:.4g}"
        )
    # An alpha whose attention is above the goal.
    low, high = 0.0, min(0.5, top)
    while reached(high) < goal:
        if high == top:
            raise CircuitError(
                f"{rule.label}: alpha {top:g} gives the prefix {reached(top):.4g} of the attention"
                f" and {goal:.4g} is asked for; ask for less, or for a larger `max_alpha`"
            )
        low, high = high, min(2 * high, top)
    for _ in range(60):
        # The next alpha lies on the line between both, but not close to an end of it.
        part = (goal - reached(low)) / (reached(high) - reached(low))
        alpha = low + min(max(part, 0.1), 0.9) * (high - low)
        if abs(reached(alpha) - goal) <= GOAL_TOLERANCE * goal:
            return alpha
        low, high = (alpha, high) if reached(alpha) < goal else (low, alpha)
    return high


@accepts_model_name
def prefix_attention_by_head(
    model: Model, contrast: ContrastLike
) -> Float[np.ndarray, "layer head"]:
    """Attention on the prefix by head, from 0 to 1: the mean over branches, texts and steps."""
    contrast_set = as_contrast_set(model, contrast)
    attention = []
    for example in contrast_set.examples:
        layouts = list(example.layouts)
        texts = [example.text] * len(layouts)
        trace = teacher_forced(model, layouts, texts, prefixes=example.prefixes)
        attention.append(trace["prefix"].mean(["branch", "sample", "step"]).to_numpy())
    return np.mean(attention, axis=0).astype(float)
