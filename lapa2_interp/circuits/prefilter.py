"""How far the order of heads by gradient agrees with exact knock-outs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lapa2_interp._util.errors import CircuitError, pluralize
from lapa2_interp.circuits.gradients import ESTIMATES, Attribution
from lapa2_interp.circuits.knockout import KnockOut
from lapa2_interp.circuits.statistics import spearman


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
