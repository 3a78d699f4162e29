"""A prefilter by the gradient: exact knock-outs of the heads of largest cut_hat, and its recall."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from lapa2_interp._util.errors import CircuitError, pluralize
from lapa2_interp.bias.augmentation import AugmentationLike, Phase
from lapa2_interp.circuits.contrast_set import ContrastLike, ContrastSet
from lapa2_interp.circuits.gradients import ESTIMATES, Attribution, attribution, check_gradients
from lapa2_interp.circuits.knockout import KnockOut, knock_out
from lapa2_interp.circuits.metrics import Metric
from lapa2_interp.circuits.statistics import spearman
from lapa2_interp.circuits.units import make_units
from lapa2_interp.models.card import Model
from lapa2_interp.models.load import accepts_model_name


@dataclass(frozen=True)
class PrefilterRecall:
    """Agreement of the gradient's order of heads with exact knock-outs.

    Attributes:
        heads: Number of heads that were compared.
        n: Number of heads that the prefilter keeps, by the size of cut_hat.
        cut_hat, slope: Spearman correlations with the exact effects over heads; NaN where all are
            equal.
        recall: The share of the n largest exact effects, of either sign, that it keeps.
        missed: The head of the largest effect that it does not keep; None if it keeps all.
        largest_missed: That effect, in nats a step; 0 where nothing is missed.
    """

    heads: int
    n: int
    cut_hat: float
    slope: float
    recall: float
    missed: tuple[int, int] | None
    largest_missed: float

    def __str__(self) -> str:
        missed = "none missed"
        if self.missed is not None:
            layer, head = self.missed
            missed = f"largest effect missed {self.largest_missed:.3g} ({layer}.{head})"
        return (
            f"{pluralize(self.heads, 'head')}: Spearman {self.cut_hat:.2f} (cut_hat),"
            f" {self.slope:.2f} (slope); recall@{self.n} {self.recall:.2f}; {missed}"
        )


def prefilter_recall(gradient: Attribution, exact: KnockOut, n: int = 24) -> PrefilterRecall:
    """Compare the gradient's order of heads with exact knock-outs.

    Args:
        gradient: The estimates.
        exact: Knock-outs of single heads; heads without a knock-out are left out.
        n: Number of heads that the prefilter keeps.

    Raises:
        CircuitError: The knock-outs are not of single heads, of another model's size, of other
            texts, or of another metric; or n is below 1.
    """
    for unit in exact.units:
        if len(unit.heads) != 1 or unit.positions is not None:
            raise CircuitError(
                f"recall compares single heads; found {unit.name!r}; give knock-outs made with"
                ' over="head"'
            )
    if n < 1:
        raise CircuitError(f"recall needs at least one head to keep; found n={n}")
    if gradient.metric != exact.metric:
        raise CircuitError(
            f"the attribution is of metric {gradient.metric!r}, the knock-outs of {exact.metric!r};"
            " use exact.with_metric(...), or give both the same metric"
        )
    if gradient.contrast_set != exact.contrast_set:
        raise CircuitError(
            "the attribution and the knock-outs are of other texts; pass one ContrastSet to both"
        )
    pairs = [unit.heads[0] for unit in exact.units]
    n_layers, n_heads = gradient.cut_hats.shape[1:]
    for layer, head in pairs:
        if not (layer < n_layers and head < n_heads):
            raise CircuitError(
                f"the knock-outs have head ({layer}, {head}); the attribution has layers"
                f" 0-{n_layers - 1}, heads 0-{n_heads - 1}: they are of different models"
            )
    # The order of both, and the heads of largest effect that the prefilter keeps.
    at = tuple(np.array(pairs).T)
    effects = exact.means
    cut_hats, slopes = (gradient.table(name).map()[at] for name in ESTIMATES)
    n = min(n, len(pairs))
    by_gradient, largest = (
        np.argsort(-np.abs(each), kind="stable") for each in (cut_hats, effects)
    )
    shared = set(by_gradient[:n].tolist()) & set(largest[:n].tolist())
    rest = [i for i in largest.tolist() if i not in set(by_gradient[:n].tolist())]
    return PrefilterRecall(
        len(pairs),
        n,
        spearman(cut_hats, effects),
        spearman(slopes, effects),
        len(shared) / n,
        pairs[rest[0]] if rest else None,
        float(effects[rest[0]]) if rest else 0.0,
    )


@dataclass(frozen=True)
class PrefilteredKnockOut:
    """Exact knock-outs of the heads of largest cut_hat, and of random others.

    Attributes:
        exact: The knock-outs.
        attribution: The gradient of all heads.
        n: Number of units that were chosen by the size of cut_hat; the others are random.
    """

    exact: KnockOut
    attribution: Attribution
    n: int

    @cached_property
    def recall(self) -> PrefilterRecall:
        """Recall among the heads that were knocked out. The largest effect missed is that of a
        random head, and the heads that were not knocked out may hide such effects too."""
        return prefilter_recall(self.attribution, self.exact, self.n)

    def frame(self) -> pd.DataFrame:
        """The table `exact.frame()` with cut_hat and slope, and `chosen`: True where the gradient
        chose the head."""
        chosen = set(self.attribution.table().best(self.n, absolute=True))
        table = self.exact.frame().merge(
            self.attribution.frame()[["layer", "head", *ESTIMATES]], on=["layer", "head"]
        )
        heads = zip(table["layer"], table["head"], strict=True)
        return table.assign(chosen=[pair in chosen for pair in heads])


@accepts_model_name
def prefiltered_knock_out(
    model: Model,
    contrast: ContrastLike,
    *,
    n: int = 24,
    random: int = 24,
    seed: int = 0,
    metric: str | Metric | Mapping[str, Metric] = "js",
    replacement: str = "cut",
    phase: Phase = "after_span",
    other_metrics: Sequence[str] | None = None,
    augmentation: AugmentationLike = None,
    file: str | Path | None = None,
    batch_size: int | None = None,
    progress: tqdm | None = None,
    **settings: Any,
) -> PrefilteredKnockOut:
    """Knock out the n heads of largest cut_hat, of either sign, and random others.

    The random heads are the check: if one of them has an effect as large as those of the chosen,
    the gradient's order cannot be trusted here. p_max is corrected for the heads that are knocked
    out, and not for their choice among all on the same prompts.

    Args:
        model, contrast, settings: As `control_score`; the model as `attribution`.
        n: Heads chosen by cut_hat.
        random: Heads drawn from the others.
        seed: Seed of the draw.
        metric, replacement, phase, other_metrics, augmentation, file, batch_size, progress: As
            `knock_out`. cut_hat is always that of "cut" and "after_span".

    Raises:
        CircuitError: As `attribution` and `knock_out`; or n is below 1.
    """
    if n < 1 or random < 0:
        raise CircuitError(
            f"a prefilter keeps at least one head, and draws 0 or more; found n={n},"
            f" random={random}"
        )
    check_gradients(model)
    contrast_set = ContrastSet.of(model, contrast, **settings)
    found = attribution(
        model, contrast_set, metric=metric, augmentation=augmentation, progress=progress
    )
    # Units of the chosen and of the random heads.
    every = make_units(model, contrast_set, "head")
    chosen = set(found.table().best(n, absolute=True))
    others = [i for i, unit in enumerate(every) if unit.heads[0] not in chosen]
    drawn = np.random.default_rng(seed).permutation(others)[:random].tolist()
    units = [unit for i, unit in enumerate(every) if unit.heads[0] in chosen or i in drawn]
    exact = knock_out(
        model,
        contrast_set,
        units=units,
        replacement=replacement,
        phase=phase,
        metric=metric,
        other_metrics=other_metrics,
        augmentation=augmentation,
        file=file,
        batch_size=batch_size,
        progress=progress,
    )
    return PrefilteredKnockOut(exact, found, len(chosen))
