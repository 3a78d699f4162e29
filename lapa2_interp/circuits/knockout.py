"""Knock-out: the control that is lost when a unit cannot see the prefix.

    effect = D - D without the unit          per step; > 0 where the unit carries control

A unit is a layer, a head, a KV head of a layer, a position of the prefix, a head's view of one
position, or any set of heads. It sees one of four replacements instead of the prefix (`edits`).
`resample` and `mean` change the target's branch and the others one after the other, and average the
two effects: with both changed at once, a unit that alone carries the control would count twice.

    table = knock_out(model, "sentiment")
    table.frame()                             # effect, interval, share, family-wise p, rank
    joint_curve(model, table)                 # cut the best n, all but the best n, random n
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from lapa2_interp._util.errors import CircuitError, unknown_choice
from lapa2_interp._util.progress import given_or_new_bar
from lapa2_interp.bias.augmentation import AugmentationLike, Phase
from lapa2_interp.circuits.contrast_set import ContrastLike, ContrastSet
from lapa2_interp.circuits.edits import Edit, evaluate_edits
from lapa2_interp.circuits.metrics import METRICS, Metric, metrics_by_name
from lapa2_interp.circuits.result_store import (
    CONTROL,
    RECHECKED,
    ResultStore,
    check_unchanged,
    rounding_share,
)
from lapa2_interp.circuits.unit_table import UnitTable
from lapa2_interp.circuits.units import Unit, all_heads, check_heads, make_units
from lapa2_interp.models.card import Model
from lapa2_interp.models.load import accepts_model_name

NULL = "nothing"
"""Name of the null unit, in which every head's output changes by one rounding step and no more."""


@dataclass(frozen=True, kw_only=True, repr=False)
class KnockOut(UnitTable):
    """Effects of units: the control that each carries.

    The values are the control lost without each unit, and the whole is the control itself, both
    means over steps. The noise is the largest effect of the null unit in an example.

    Attributes:
        replacement, phase, metric, augmentation: As in `knock_out`.
        by_metric: By metric, (control, effects, noise).
    """

    whole: Float[np.ndarray, " example"]
    noise: float
    replacement: str
    phase: Phase
    metric: str
    by_metric: Mapping[str, tuple[np.ndarray, np.ndarray, float]]
    augmentation: AugmentationLike = None

    def with_metric(self, metric: str) -> KnockOut:
        """This table by another of its metrics."""
        if metric not in self.by_metric:
            raise CircuitError(unknown_choice("metric", metric, self.by_metric))
        whole, values, noise = self.by_metric[metric]
        label = f"lost {metric}, nats a step" if metric in METRICS else f"lost {metric}"
        return replace(self, metric=metric, whole=whole, values=values, noise=noise, label=label)


@accepts_model_name
def knock_out(
    model: Model,
    contrast: ContrastLike,
    *,
    over: str | Mapping[str, Any] = "head",
    units: Sequence[Unit] | None = None,
    replacement: str = "cut",
    phase: Phase = "after_span",
    metric: str | Metric | Mapping[str, Metric] = "js",
    other_metrics: Sequence[str] | None = None,
    augmentation: AugmentationLike = None,
    file: str | Path | None = None,
    batch_size: int | None = None,
    progress: tqdm | None = None,
    **settings: Any,
) -> KnockOut:
    """Measure the control that is lost without each unit.

    Args:
        model, contrast, settings: As `control_score`.
        over: "layer", "head", "kv", "position", "head x position", or sets of heads by name.
        units: Chosen units, instead of all of a kind.
        replacement: "cut", "zero", "resample" or "mean" (`edits`).
        phase: "after_span" (whatever reaches the text, also through the prompt), "last_query",
            "decode", or "predicting_only" (the predicting query alone).
        metric: A name of `METRICS`, a function of `Predictions`, or {name: function}.
        other_metrics: Further metrics, from the same passes; by default lex where there are words.
        augmentation: One or more augmentations that act in every branch besides.
        file: A file for finished units, a line each, from which the same call continues. The
            control itself and the two stored units of largest effect are computed again: they must
            equal the stored values but for rounding. New values are shifted by the difference that
            rounding makes in the control.
        batch_size: Texts in one forward pass; changes nothing but memory and time.

    Raises:
        CircuitError: As `control_score`; unknown units, or none, or two of one name; or the file
            has results for other inputs.
    """
    # Metrics, units and their edits.
    contrast_set = ContrastSet.of(model, contrast, **settings)
    chosen = metrics_by_name(metric)
    first = next(iter(chosen))
    more = (("lex",) if contrast_set.words else ()) if other_metrics is None else other_metrics
    if further := [name for name in more if name not in chosen]:
        chosen |= metrics_by_name(further)
    if units is None:
        wanted = make_units(model, contrast_set, over)
    else:
        check_heads(model, wanted := list(units))
    if not wanted:
        raise CircuitError("there is no unit to knock out; give at least one")
    edits: dict[str, Sequence[Edit | None]] = {
        CONTROL: [None],
        NULL: [Edit(all_heads(model), replacement="null")],
        **{unit.key: _edits(unit, replacement, phase) for unit in wanted},
    }
    names = ["", NULL, *(unit.name for unit in wanted)]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise CircuitError(f"two units are called {twice!r}; give each another name")
    # The store, which knows units by their heads and positions.
    more_facts = {
        "replacement": replacement,
        "phase": phase,
        "metrics": list(chosen),
        "augmentation": str(augmentation),
    }
    store = ResultStore(
        file, contrast_set.key(model, **more_facts), contrast_set.facts(model, **more_facts)
    )
    # What is computed: the control first, the stored units that are compared, and what is missing.
    again: list[str] = []
    if CONTROL in store:
        of_units = [unit.key for unit in wanted if unit.key in store]
        whole = store[CONTROL][first]
        of_units.sort(key=lambda key: -np.abs(whole - store[key][first]).max())
        again = [CONTROL, *list(dict.fromkeys(of_units))[:RECHECKED]]
    keys = [*again, *(key for key in edits if key not in store)]
    todo = [(key, edit) for key in keys for edit in edits[key]]
    # Metrics of every example under every edit: means over steps and over a unit's edits.
    n = len(contrast_set.examples)
    pending = {key: n * len(edits[key]) for key, _ in todo}  # values that a unit still lacks
    means: dict[str, dict[str, np.ndarray]] = {}
    shift = {name: np.zeros(n) for name in chosen}  # the stored control, less the one of now
    total = contrast_set.n_branch_steps * len(todo)
    with (
        closing(store),
        given_or_new_bar(progress, total, f"knock-out, {replacement}", "step") as bar,
    ):
        for number, group, values in evaluate_edits(
            model, contrast_set, [edit for _, edit in todo], chosen, augmentation, bar, batch_size
        ):
            key = todo[number][0]
            unit_means = means.setdefault(key, {name: np.zeros(n) for name in chosen})
            for name, each in values.items():
                unit_means[name][group] += each.double().mean(1).cpu().numpy() / len(edits[key])
            pending[key] -= len(group)
            if not pending[key]:
                found = means.pop(key)
                if key == CONTROL and again:
                    check_unchanged(file, store[key], found)
                    shift = {name: store[key][name] - found[name] for name in chosen}
                    continue
                found = {name: found[name] + shift[name] for name in chosen}
                if key not in again:
                    store.add(key, found)
                    continue
                label = next(unit.name for unit in wanted if unit.key == key)
                share = rounding_share(model)
                check_unchanged(file, store[key], found, label, store[CONTROL], share)
    # A unit's effect: the control that is lost without it.
    by_metric = {}
    for name in chosen:
        whole = store[CONTROL][name]
        effects = np.stack([whole - store[unit.key][name] for unit in wanted], axis=1)
        noise = float(np.abs(whole - store[NULL][name]).max())
        by_metric[name] = whole, effects, noise
    whole, effects, noise = by_metric[first]
    table = KnockOut(
        contrast_set=contrast_set,
        units=tuple(wanted),
        values=effects,
        whole=whole,
        noise=noise,
        replacement=replacement,
        phase=phase,
        metric=first,
        by_metric=by_metric,
        augmentation=augmentation,
    )
    return table.with_metric(first)


def _edits(unit: Unit, replacement: str, phase: Phase) -> list[Edit]:
    """Edits of a unit: one, or one for each branch that is changed at a time."""
    edit = Edit(unit.heads, replacement, phase, unit.positions)
    if replacement in ("cut", "zero"):
        return [edit]
    return [replace(edit, branches="target"), replace(edit, branches="others")]
