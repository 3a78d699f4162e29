"""Arms at equal attention on the prefix.

The same alpha moves much attention in all heads and little in a few. So arms that differ by heads,
layers or tokens are compared at equal mean mass: the attention on the prefix, averaged over all
layers and heads of the model, steps and texts.

    few = Augmentation(alpha=1, heads=((21, 1), (18, 4)))
    goal = mean_mass(model, "sentiment", few)
    alpha_at_mass(model, "sentiment", goal)           # alpha of all heads with as much
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from lapa2_interp._util.errors import CircuitError
from lapa2_interp.attention.tables import select_layer_type
from lapa2_interp.bias.augmentation import ALPHA_BOUNDS, Augmentation, AugmentationLike
from lapa2_interp.circuits.question import ContrastLike, ContrastSet
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.models.card import Model
from lapa2_interp.models.load import accepts_model_name

CLOSE = 1e-3
"""How far the attention that is reached may lie from the one that is asked for, as a share of it.
"""


@accepts_model_name
def mean_mass(
    model: Model, about: ContrastLike, augmentation: AugmentationLike = None, **settings: Any
) -> float:
    """The attention on the prefix, from 0 to 1: its mean over layers, heads, steps, branches and
    texts.

    A text that was written behind a prefix (`source`) is read behind this one alone, another text
    behind all.

    Args:
        model, about, settings: As `control`.
        augmentation: What acts: one, or several.

    Raises:
        CircuitError: As `control`.
    """
    question = ContrastSet.of(model, about, **settings)
    rows = [
        (case, branch)
        for case in question.cases
        for branch, name in enumerate(case.names)
        if case.source == name or case.source not in case.names
    ]
    trace = teacher_forced(
        model,
        [case.layouts[branch] for case, branch in rows],
        [case.text for case, _ in rows],
        [augmentation] * len(rows),
        prefixes=[case.prefixes[branch] for case, branch in rows],
        trace="pooled",
    )
    return float(np.nanmean(select_layer_type(trace, "prefix").mean("step").to_numpy()))


@accepts_model_name
def alpha_at_mass(
    model: Model,
    about: ContrastLike,
    mass: float,
    augmentation: AugmentationLike = None,
    *,
    most: float = 8.0,
    **settings: Any,
) -> float:
    """The alpha at which an augmentation gives the prefix this much attention (`mean_mass`), to one
    part in a thousand.

    Texts are given, so every alpha is measured on the same ones. The alpha is found between two
    that lie on either side of it.

    Args:
        model, about, settings: As `mean_mass`. Texts of the baseline are fair to all arms.
        mass: The mean attention, above that without a bias.
        augmentation: What acts, one alone, whatever its alpha; by default LaPA2 in all heads.
        most: The largest alpha that is tried, above 0.

    Raises:
        CircuitError: The mass is not above that without a bias, or it is above what `most` gives
            (the message names what can be reached); or several augmentations.
    """
    question = ContrastSet.of(model, about, **settings)
    given = augmentation if isinstance(augmentation, Sequence) else (augmentation,)
    if len(given) != 1:
        raise CircuitError(f"alpha is that of one augmentation; found {len(given)}")
    rule = given[0] or Augmentation(alpha=1)
    high = ALPHA_BOUNDS.get(rule.law, (0.0, math.inf))[1]
    if not 0 < mass < 1:
        raise CircuitError(f"mass must be a share of attention between 0 and 1; found {mass:g}")
    if not 0 < most < math.inf:
        raise CircuitError(f"most must be a finite number above 0; found {most:g}")
    top = min(most, high)

    @cache
    def reached(alpha: float) -> float:
        return mean_mass(model, question, rule.model_copy(update={"alpha": alpha}))

    if mass <= reached(0.0):
        raise CircuitError(
            f"without a bias the mean attention on the prefix is {reached(0.0):.4g} already; ask"
            f" for more than that, found {mass:.4g}"
        )
    low, high = 0.0, min(0.5, top)
    while reached(high) < mass:
        if high == top:
            raise CircuitError(
                f"{rule.label}: alpha {top:g} gives the prefix {reached(top):.4g} of the attention"
                f" and {mass:.4g} is asked for; ask for less, or for a larger `most`"
            )
        low, high = high, min(2 * high, top)
    for _ in range(60):
        # The next alpha lies on the line between both, but not close to an end of it.
        part = (mass - reached(low)) / (reached(high) - reached(low))
        alpha = low + min(max(part, 0.1), 0.9) * (high - low)
        if abs(reached(alpha) - mass) <= CLOSE * mass:
            return alpha
        low, high = (alpha, high) if reached(alpha) < mass else (low, alpha)
    return high


__all__ = ["alpha_at_mass", "mean_mass"]
