"""Placebos of maps: what a map looks like where there is nothing to find.

- *untrained*: the same texts read by the same architecture with random weights;
- *labels shuffled*: in half of the prompts, drawn at random, each prefix counts as the other's.
  With two attributes a metric with a sign changes its sign there, so that no further pass is
  needed. js does not know which prefix is which, and has no such placebo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.gradients import attribution, has_gradients
from lapa2_interp.circuits.knockout import KnockOut, knock_out
from lapa2_interp.circuits.logit_attribution import head_logit_attribution
from lapa2_interp.circuits.statistics import spearman
from lapa2_interp.circuits.unit_table import UnitTable
from lapa2_interp.errors import CircuitError
from lapa2_interp.models.card import identify
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.stats import FEW, LEVEL

Maps = Mapping[str, UnitTable]
"""Tables of units by the names of their maps, such as "head, js"."""
SIGNED = ("lex", "direct")
"""Measures that change their sign when the attributes of two prefixes are swapped."""


@dataclass(frozen=True)
class Placebo:
    """Maps of nothing beside those of a study.

    Attributes:
        model: Name of the untrained model.
        trained: The study's maps.
        untrained: Those of the untrained model.
        shuffled: Those with shuffled labels, of measures with a sign; empty with three attributes
            or more, or one prompt.
    """

    model: str
    trained: Maps
    untrained: Maps
    shuffled: Maps

    def frame(self) -> pd.DataFrame:
        """A row for every map and kind ("trained", "untrained", "labels shuffled").

        Columns: largest (the largest mean of a unit, by size), units, named (units with family-wise
        p < .05 of either sign, above the noise; NaN with fewer than 8 prompts), and spearman (of
        the units' order with the trained one).
        """
        rows = []
        for name, first in self.trained.items():
            kinds = {"trained": first, "untrained": self.untrained.get(name)}
            kinds["labels shuffled"] = self.shuffled.get(name)
            for kind, table in kinds.items():
                if table is None:
                    continue
                row = {"map": name, "kind": kind, "largest": np.abs(table.means).max()}
                row |= {"units": len(table.units), "named": n_named(table)}
                rows.append(row | {"spearman": spearman(first.means, table.means)})
        return pd.DataFrame(rows)


def n_named(table: UnitTable) -> float:
    """Units that pass the family-wise test; NaN with fewer than 8 prompts."""
    if table.contrast_set.n_prompts < FEW:
        return np.nan
    frame = table.frame()
    passed = (frame["p_max"] < LEVEL) & (frame[table.name].abs() > (table.noise or 0))
    return float(passed.sum())


def maps_of(
    tables: Mapping[str, KnockOut],
    slopes: UnitTable | None,
    direct: UnitTable | None,
) -> dict[str, UnitTable]:
    """The maps of knock-outs (by kind of unit, in each metric), of gradients and of direct effects,
    by name."""
    maps: dict[str, UnitTable] = {
        f"{over}, {metric}": table.with_metric(metric)
        for over, table in tables.items()
        for metric in table.metrics
    }
    maps |= {} if slopes is None else {"head, cut_hat": slopes}
    return maps | ({} if direct is None else {"head, direct": direct})


def shuffled_labels(table: UnitTable) -> UnitTable:
    """A table of a measure with a sign, whose attributes are swapped in half of the prompts.

    Raises:
        CircuitError: Three attributes or more, or one prompt.
    """
    contrast_set = table.contrast_set
    if len(contrast_set.attributes) != 2 or contrast_set.n_prompts < 2:
        raise CircuitError(
            "labels are shuffled between two attributes, in half of the prompts; found"
            f" {len(contrast_set.attributes)} attributes and {contrast_set.n_prompts} prompts"
        )
    prompts = list(dict.fromkeys(contrast_set.clusters))
    order = np.random.default_rng(1).permutation(len(prompts))
    swapped = {prompts[i] for i in order[: len(prompts) // 2]}
    signs = np.array([-1.0 if prompt in swapped else 1.0 for prompt in contrast_set.clusters])
    total = None if table.total is None else table.total * signs
    return replace(table, values=table.values * signs[:, None], total=total)


def check_placebo(model: Model, placebo: Model, contrast_set: ContrastSet) -> None:
    """Refuse a placebo that is no untrained copy of a model.

    Raises:
        CircuitError: It has other layers, heads or tokens, or the same weights; or prefixes are
            soft.
    """
    shapes = [
        (one.cfg.n_layers, one.cfg.n_heads, one.cfg.d_vocab, type(one).__name__)
        for one in (model, placebo)
    ]
    if shapes[0] != shapes[1] or identify(model).weights == identify(placebo).weights:
        name = identify(model).name
        raise CircuitError(
            f"the placebo {identify(placebo).name!r} is no untrained {name!r}; give"
            f' load_model("random:{name}") of the same class'
        )
    if any(layout.soft for example in contrast_set.examples for layout in example.layouts):
        raise CircuitError(
            "a soft prefix fits the weights that it was trained with, so an untrained model cannot"
            " read it; give hard prefixes, or no placebo"
        )


def measure_placebo(
    placebo: Model,
    trained: Maps,
    contrast_set: ContrastSet,
    kinds: Sequence[str],
    folder: Path,
    report: Callable[[str], None],
) -> Placebo:
    """Make the maps of the untrained model, and those with shuffled labels.

    Args:
        trained: The maps of the trained model.
        kinds: Kinds of units that are knocked out.
        folder: Where finished knock-outs are kept.
        report: A function that takes a line about each step.
    """
    tables = {}
    for over in kinds:
        report(f"untrained: knocking out each {'KV head' if over == 'kv' else over}")
        tables[over] = knock_out(
            placebo,
            contrast_set,
            over=over,
            metric="js",
            other_metrics=("lex",) if contrast_set.words else (),
            file=folder / f"untrained-{over}.jsonl",
        )
    slopes = direct = None
    if "head, cut_hat" in trained and has_gradients(placebo):
        slopes = attribution(placebo, contrast_set, metric="js").table()
    if "head, direct" in trained and facts_of(placebo).backend != "plain":
        direct = head_logit_attribution(placebo, contrast_set).table()
    shuffled = {}
    if len(contrast_set.attributes) == 2 and contrast_set.n_prompts >= 2:
        shuffled = {
            name: shuffled_labels(table)
            for name, table in trained.items()
            if name.rpartition(", ")[2] in SIGNED
        }
    return Placebo(identify(placebo).name, trained, maps_of(tables, slopes, direct), shuffled)
