"""Knock-out: the control that is lost when a unit cannot see the prefix.

    effect = D - D without the unit          per step; > 0 where the unit carries control

A unit is a layer, a head, a KV head of a layer, a position of the prefix, a head's view of one
position, or any set of heads. A head that is cut sees one of four replacements instead of the
prefix (`edits`). `resample` and `mean` change the target's branch and the others one after the
other, and average the two effects: with both changed at once, a unit that alone carries the control
would count twice. Knock-outs of several heads at once (`joint_curve`) say which heads are needed,
and which suffice.

    table = knock_out(model, "sentiment")
    table.frame()                             # effect, interval, share, family-wise p, rank
    joint_curve(model, table)                 # cut the best n, all but the best n, random n
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from tqdm import tqdm

from lapa2_interp._util.values import Count, numbers_checked
from lapa2_interp.bias.augmentation import AugmentationLike, Phase
from lapa2_interp.circuits.contrast_set import ContrastLike, as_contrast_set
from lapa2_interp.circuits.edits import Edit, Heads, evaluate_edits
from lapa2_interp.circuits.metrics import METRICS, Metric, metrics_by_name
from lapa2_interp.circuits.result_store import (
    CONTROL,
    RECHECKED,
    ResultStore,
)
from lapa2_interp.circuits.statistics import share_interval
from lapa2_interp.circuits.unit_table import UnitTable
from lapa2_interp.circuits.units import Unit, all_heads, check_heads, make_units
from lapa2_interp.errors import CircuitError, pluralize, unknown_choice
from lapa2_interp.models.facts import Model
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.plots import Drawing, new_figure, plain_axes
from lapa2_interp.progress import given_or_new_bar

NULL = "nothing"
"""Name and key of the null unit, in which every head's output changes by one rounding step and no
more (`edits.Edit`, replacement "null"); its effect is the table's noise."""


@dataclass(frozen=True, kw_only=True, repr=False)
class KnockOut(UnitTable):
    """Effects of units: the control that each carries.

    The values are the control lost without each unit, and the whole is the control itself, both
    means over steps. The noise is the largest effect of the null unit in an example.

    Attributes:
        replacement, phase, metric, augmentation: As in `knock_out`.
        others: The tables by other metrics, from the same passes.
    """

    # Other tables may lack these, or have other units.
    units: tuple[Unit, ...]
    total: Float[np.ndarray, " example"]
    noise: float
    replacement: str
    phase: Phase
    metric: str
    augmentation: AugmentationLike = None
    others: Mapping[str, KnockOut] = field(default_factory=dict)

    @property
    def metrics(self) -> tuple[str, ...]:
        """All metrics of these passes, that of this table first."""
        return self.metric, *self.others

    def with_metric(self, metric: str) -> KnockOut:
        """The table of these passes by another metric.

        Raises:
            CircuitError: The metric was not computed.
        """
        if metric not in self.metrics:
            raise CircuitError(unknown_choice("metric", metric, self.metrics))
        return self if metric == self.metric else self.others[metric]


@numbers_checked
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
    batch_size: Count | None = None,
    progress: tqdm | None = None,
) -> KnockOut:
    """Measure the control that is lost without each unit.

    Args:
        model: A TransformerBridge, with custom hooks if it has any, or a `TransformersModel`.
        contrast: A `ContrastSet`, or a task by name or value, or one or more examples.
        over: "layer", "head", "kv", "position", "head x position", or sets of heads by name: pairs,
            or a text such as "3.1,4.0-8".
        units: Chosen units, instead of all of a kind.
        replacement: "cut", "zero", "resample" or "mean" (`edits`).
        phase: "after_span" (whatever reaches the text, also through the prompt), "last_query",
            "decode", or "predicting_only" (the predicting query alone).
        metric: A name of `METRICS`, a function of `Predictions`, or {name: function}.
        other_metrics: Further metrics, from the same passes; by default lex where there are words.
        augmentation: One or more augmentations that act in every branch besides.
        file: A file for finished units, a line each, from which the same call continues. The
            control itself and the two stored units of largest effect are computed again: the new
            numbers must equal the stored values but for rounding. New values are shifted by the
            difference that rounding makes in the control.
        batch_size: Texts in one forward pass; changes nothing but memory and time.

    Raises:
        CircuitError: As `control_score`; unknown units, or none, or two of one name; or the file
            has results for other inputs.
    """
    # Metrics, units and their edits.
    contrast_set = as_contrast_set(model, contrast)
    chosen = metrics_by_name(metric)
    main = next(iter(chosen))  # the table's metric; the others are its `others`
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
    names = [CONTROL, NULL, *(unit.name for unit in wanted)]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise CircuitError(f"two units are called {twice!r}; give each another name")
    # The store, which knows units by their heads and positions.
    store = ResultStore(
        file,
        model,
        contrast_set,
        replacement=replacement,
        phase=phase,
        metrics=list(chosen),
        augmentation=str(augmentation),
    )
    # What is computed: the control first, the stored units that are compared, and what is missing.
    again: list[str] = []
    if CONTROL in store:
        of_units = [unit.key for unit in wanted if unit.key in store]
        control = store[CONTROL][main]
        of_units.sort(key=lambda key: -np.abs(control - store[key][main]).max())
        again = [CONTROL, *list(dict.fromkeys(of_units))[:RECHECKED]]
    keys = [*again, *(key for key in edits if key not in store)]
    todo = [(key, edit) for key in keys for edit in edits[key]]
    # Metrics of every example under every edit: means over steps and over a unit's edits.
    n = len(contrast_set.examples)
    pending = {key: n * len(edits[key]) for key, _ in todo}  # values that a unit still lacks
    means: dict[str, dict[str, np.ndarray]] = {}
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
            for name, steps in values.items():
                unit_means[name][group] += steps.double().mean(1).cpu().numpy() / len(edits[key])
            pending[key] -= len(group)
            if not pending[key]:
                now = means.pop(key)
                if key not in again:
                    store.add(key, {name: now[name] + store.shift.get(name, 0) for name in chosen})
                elif key == CONTROL:
                    store.check_control(store[CONTROL], now)
                else:
                    name_of_unit = next(unit.name for unit in wanted if unit.key == key)
                    store.check(store[key], now, name_of_unit)
    # A unit's effect: the control that is lost without it.
    tables = {}
    for name in chosen:
        control = store[CONTROL][name]
        tables[name] = KnockOut(
            contrast_set=contrast_set,
            units=tuple(wanted),
            values=np.stack([control - store[unit.key][name] for unit in wanted], axis=1),
            total=control,
            noise=float(np.abs(control - store[NULL][name]).max()),
            label=f"lost {name}, nats a step" if name in METRICS else f"lost {name}",
            replacement=replacement,
            phase=phase,
            metric=name,
            augmentation=augmentation,
        )
    return replace(tables.pop(main), others=tables)


def _edits(unit: Unit, replacement: str, phase: Phase) -> list[Edit]:
    """Edits of a unit: one, or one for each branch that is changed at a time."""
    edit = Edit(unit.heads, replacement, phase, unit.positions)
    if replacement in ("cut", "zero"):
        return [edit]
    return [replace(edit, branches="target"), replace(edit, branches="others")]


@dataclass(frozen=True)
class JointCurve:
    """The share of control that is left when several heads are knocked out together.

    Attributes:
        metric: The metric of control.
        rows: The table.
    """

    metric: str
    rows: pd.DataFrame

    def frame(self) -> pd.DataFrame:
        """A row for every kind and size: left (the share of the control that is left), its 95 %
        interval over prompts, heads, and prompts.

        Kinds: "without" the best n (are they needed?), "only" the best n (do they suffice?),
        without "random" n, and without "mass", the n with the largest attention on the prefix.
        """
        return self.rows

    def plot(self) -> Drawing:
        """The share of control left against the number of heads."""
        figure = new_figure(3.3, 2.8)
        axes = figure.subplots()
        for colour, (kind, part) in zip(
            ("#D55E00", "#0072B2", "#777777", "#E69F00"),
            self.rows.groupby("kind", sort=False),
            strict=False,
        ):
            axes.plot(part["heads"], part["left"], color=colour, marker="o", ms=3, label=kind)
            axes.fill_between(
                part["heads"], part["low"], part["high"], color=colour, alpha=0.12, lw=0
            )
        axes.axhline(1, color="0.7", lw=0.6)
        axes.axhline(0, color="0.7", lw=0.6)
        sizes = sorted(set(self.rows["heads"]))
        axes.set_xscale("log", base=2)
        axes.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)  # also where no share is defined
        axes.set_xticks(sizes, [str(size) for size in sizes])
        figure.legend(loc="outside upper left", fontsize=8, frameon=False, ncols=4, handlelength=1)
        plain_axes(axes, "heads", f"share of {self.metric} left")
        return figure


@numbers_checked
@accepts_model_name
def joint_curve(
    model: Model,
    table: KnockOut,
    *,
    sizes: Sequence[Count] = (1, 2, 4, 8, 16, 32),
    replacement: str | None = None,
    phase: Phase | None = None,
    metric: str | Metric | Mapping[str, Metric] | None = None,
    prefix_attention: Float[np.ndarray, "layer head"] | None = None,
    seeds: Count = 3,
    file: str | Path | None = None,
    progress: tqdm | None = None,
) -> JointCurve:
    """Measure control without the best n heads, with these alone, and without other n heads.

    Heads are chosen by their effects in one half of the prompts and judged in the other, then the
    halves change places: in the texts that chose them, effects of chosen heads are too large.

    Args:
        table: Knock-outs of single heads.
        sizes: Numbers of heads; those that the table or the model does not have are left out.
        replacement, phase, metric: As `knock_out`; by default the table's. If it has lex, that is
            the metric, because shares of lex add up.
        prefix_attention: By head (`prefix_attention_by_head`), for the kind "mass".
        seeds: Random sets of each size, drawn from all heads of the model.
        file: A file for finished sets, as in `knock_out`; each half has its own, whose name ends in
            -0 or -1.

    Raises:
        CircuitError: The table is not one of heads, or has fewer than 2 prompts; no size that it
            has; or as `knock_out`.
    """
    if metric is None:
        metric = "lex" if "lex" in table.metrics else table.metric
        if metric not in METRICS:
            raise CircuitError(
                f"the table's metric {metric!r} is a custom function; give it again as metric"
            )
    metric_name = next(iter(metrics_by_name(metric)))
    single = all(len(unit.heads) == 1 and unit.positions is None for unit in table.units)
    if (
        table.contrast_set.n_prompts < 2
        or not single
        or len({u.heads for u in table.units}) < len(table.units)
    ):
        raise CircuitError("a joint curve needs knock-outs of single heads, of 2 prompts or more")
    every = all_heads(model)
    requested = sizes
    sizes = [n for n in sizes if n <= len(table.units) and n < len(every)]
    if not sizes:
        raise CircuitError(
            f"a joint curve of {pluralize(len(every), 'head')} needs sizes below that; found"
            f" {', '.join(map(str, requested)) or 'none'}"
        )
    asked = table.contrast_set
    prompts = list(dict.fromkeys(asked.clusters))
    control = np.zeros(len(asked.examples))
    left: dict[tuple[str, int], Float[np.ndarray, "draw example"]] = {}
    for fold in (0, 1):
        own_file = None
        if file is not None:
            own_file = Path(file).with_name(f"{Path(file).stem}-{fold}{Path(file).suffix}")
        # Heads in the order of their effects in one half of the prompts.
        held_out = set(prompts[fold::2])
        choosing = [i for i, prompt in enumerate(prompts) if prompt not in held_out]
        judged = [i for i, prompt in enumerate(asked.clusters) if prompt in held_out]
        order = np.argsort(-table.by_prompt[choosing].mean(0), kind="stable")
        best = [table.units[i].heads[0] for i in order]
        # Sets of heads that are knocked out, by kind, size and draw.
        rng = np.random.default_rng(fold)
        sets: dict[tuple[str, int, int], Heads] = {}
        for n in sizes:
            sets["without", n, 0] = tuple(best[:n])
            sets["only", n, 0] = tuple(pair for pair in every if pair not in set(best[:n]))
            for seed in range(seeds):
                sets["random", n, seed] = tuple(
                    every[i] for i in sorted(rng.choice(len(every), n, replace=False))
                )
            if prefix_attention is not None:
                largest = np.argsort(-prefix_attention.ravel(), kind="stable")[:n]
                sets["mass", n, 0] = tuple(every[i] for i in largest)
        together = knock_out(
            model,
            replace(asked, examples=tuple(asked.examples[i] for i in judged)),
            units=[Unit({"name": str(name)}, heads) for name, heads in sets.items()],
            replacement=replacement or table.replacement,
            phase=phase or table.phase,
            metric=metric,
            other_metrics=(),
            augmentation=table.augmentation,
            file=own_file,
            progress=progress,
        )
        # Control of the other half, and what is left of it.
        control[judged] = together.total
        for i, (kind, n, seed) in enumerate(sets):
            draws = left.setdefault(
                (kind, n), np.zeros((seeds if kind == "random" else 1, len(control)))
            )
            draws[seed, judged] = together.total - together.values[:, i]
    # Shares over the prompts of both halves; random draws are averaged.
    rows = []
    for (kind, n), draws in left.items():
        part = asked.by_prompt(draws.mean(0))[:, None]
        share, low, high = share_interval(part, asked.by_prompt(control))
        row = {"kind": kind, "heads": n, "left": share[0], "low": low[0], "high": high[0]}
        rows.append(row | {"prompts": len(prompts)})
    frame = pd.DataFrame(rows).sort_values(["kind", "heads"], ignore_index=True)
    return JointCurve(metric_name, frame)
