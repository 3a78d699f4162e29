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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from tqdm import tqdm

from lapa2_interp._util.errors import CircuitError, unknown_choice
from lapa2_interp._util.plots import Drawing, new_figure, plain_axes
from lapa2_interp._util.progress import given_or_new_bar
from lapa2_interp.bias.augmentation import (
    AugmentationLike,
    Phase,
)
from lapa2_interp.circuits.contrast_set import ContrastLike, ContrastSet
from lapa2_interp.circuits.edits import Edit, Heads, evaluate_edits
from lapa2_interp.circuits.metrics import METRICS, Metric, metrics_by_name
from lapa2_interp.circuits.result_store import (
    CONTROL,
    UnitStore,
    rounding_share,
)
from lapa2_interp.circuits.statistics import max_t, ranks, share_interval, split_half
from lapa2_interp.circuits.units import Unit, all_heads, make_units
from lapa2_interp.models.card import Model
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.stats import FEW, bounds

NULL = "nothing"
"""Name of the null unit, in which every head's output changes by one rounding step and no more."""


@dataclass(frozen=True)
class KnockOut:
    """Effects of units: the control that each carries.

    Attributes:
        contrast_set: The texts.
        units: The units that were knocked out.
        replacement, phase, metric, augmentation: As in `knock_out`.
        control: The control itself by example, its mean over steps.
        effects: The control lost without each unit, by example, its mean over steps.
        noise: The largest effect of the null unit in an example: effects below it are rounding.
        other_metrics: By metric, (control, effects, noise).
    """

    contrast_set: ContrastSet
    units: tuple[Unit, ...]
    replacement: str
    phase: Phase
    metric: str
    control: Float[np.ndarray, " example"]
    effects: Float[np.ndarray, "example unit"]
    noise: float
    other_metrics: Mapping[str, tuple[np.ndarray, np.ndarray, float]] = field(default_factory=dict)
    augmentation: AugmentationLike = None

    @property
    def n_prompts(self) -> int:
        """Number of different prompts."""
        return self.contrast_set.n_prompts

    @property
    def split_half(self) -> float:
        """Spearman correlation of the units' order between halves of the prompts."""
        return split_half(self.contrast_set.by_prompt(self.effects))

    def with_metric(self, metric: str) -> KnockOut:
        """This table by another of its metrics."""
        if metric == self.metric:
            return self
        if metric not in self.other_metrics:
            raise CircuitError(unknown_choice("metric", metric, [self.metric, *self.other_metrics]))
        whole, effects, noise = self.other_metrics[metric]
        others = dict(self.other_metrics) | {self.metric: (self.control, self.effects, self.noise)}
        del others[metric]
        return replace(
            self, metric=metric, control=whole, effects=effects, noise=noise, other_metrics=others
        )

    def frame(self) -> pd.DataFrame:
        """A row for every unit, largest effect first.

        Columns: the unit's labels; effect with its 95 % interval over prompts; share of the whole
        control, with its interval; t, p, p_max (corrected for the number of units) and q; rank with
        its interval; the noise, and below_noise. With fewer than 8 prompts there
        are no p-values: numbers, no claims.
        """
        effects = self.contrast_set.by_prompt(self.effects)
        whole = self.contrast_set.by_prompt(self.control)
        n = len(effects)
        low, high = bounds(effects, np.arange(n))
        share, share_low, share_high = share_interval(effects, whole)
        order, tests = ranks(effects), max_t(effects)
        few = n < FEW
        table = pd.DataFrame([dict(unit.labels) for unit in self.units])
        mean = effects.mean(0)
        columns = {
            "effect": mean,
            "low": low,
            "high": high,
            "share": share,
            "share_low": share_low,
            "share_high": share_high,
            "t": tests.t,
            "p": np.nan if few else tests.p,
            "p_max": np.nan if few else tests.p_max,
            "q": np.nan if few else tests.q,
            "rank": order.rank,
            "rank_low": order.low,
            "rank_high": order.high,
            "noise": self.noise,
            "below_noise": np.abs(mean) <= self.noise,
        }
        return table.assign(**columns).sort_values("rank", ignore_index=True)

    def interval(self) -> pd.DataFrame:
        """Each unit's effect with its 95 % interval over prompts, largest first."""
        return self.frame()[[*self.units[0].labels, "effect", "low", "high"]]

    def carriers(self, level: float = 0.05) -> pd.DataFrame:
        """Units that carry control: a positive effect above the noise, family-wise p below `level`.

        Raises:
            CircuitError: Fewer than 8 prompts.
        """
        if self.n_prompts < FEW:
            raise CircuitError(
                f"{self.n_prompts} prompts are too few for a claim; give at least {FEW}"
            )
        table = self.frame()
        return table[(table["p_max"] < level) & (table["effect"] > 0) & ~table["below_noise"]]

    def best(self, n: int) -> Heads:
        """The heads of the n units of largest effect."""
        order = np.argsort(-self.contrast_set.by_prompt(self.effects).mean(0), kind="stable")[:n]
        return tuple(dict.fromkeys(pair for i in order for pair in self.units[i].heads))

    def map(self) -> Float[np.ndarray, "layer head"]:
        """Effects of heads (or KV heads) as a grid."""
        names = [name for name in ("head", "kv_head") if name in self.units[0].labels]
        if len(self.units[0].labels) != 2 or not names:
            raise CircuitError("only heads and KV heads have a map; see frame()")
        mean = self.contrast_set.by_prompt(self.effects).mean(0)
        shape = [1 + max(unit.labels[name] for unit in self.units) for name in ("layer", names[0])]
        grid = np.full(shape, np.nan)
        for unit, value in zip(self.units, mean, strict=True):
            grid[unit.labels["layer"], unit.labels[names[0]]] = value
        return grid

    def plot(self) -> Drawing:
        """A map of heads or KV heads; of other units, effects with their intervals."""
        if len(self.units[0].labels) == 2 and "layer" in self.units[0].labels:
            return _plot_map(self.map(), effect_label(self.metric))
        table = self.frame().head(40)
        figure = new_figure(5.2, 0.6 + 0.16 * len(table))
        axes = figure.subplots()
        if "position" in self.units[0].labels and len(self.units[0].labels) == 1:
            table = table.sort_values("position")
        names = [
            ".".join(str(row[name]) for name in self.units[0].labels) for _, row in table.iterrows()
        ]
        at = np.arange(len(table))[::-1]
        errors = [table["effect"] - table["low"], table["high"] - table["effect"]]
        axes.errorbar(table["effect"], at, xerr=errors, fmt="o", ms=3, lw=0.8, color="#0072B2")
        axes.axvline(0, color="0.6", lw=0.6)
        axes.set_yticks(at, names)
        plain_axes(axes, effect_label(self.metric), " x ".join(self.units[0].labels))
        return figure


def effect_label(metric: str) -> str:
    """The label of an axis of effects."""
    return f"lost {metric}, nats a step" if metric in METRICS else f"lost {metric}"


def _plot_map(grid: Float[np.ndarray, "layer head"], label: str) -> Drawing:
    """A map of layers and heads with a colour bar."""
    n_layers, n_heads = grid.shape
    figure = new_figure(max(3.2, 1.3 + 0.22 * n_heads), max(2.0, 1.0 + 0.13 * n_layers))
    axes = figure.subplots()
    top = float(np.nanmax(np.abs(grid))) or 1.0
    shown = axes.imshow(grid, cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")
    figure.colorbar(shown, ax=axes, label=label)
    plain_axes(axes, "head", "layer")
    axes.set_xticks(range(0, n_heads, max(1, n_heads // 9)))
    axes.set_yticks(range(0, n_layers, max(1, n_layers // 10)))
    return figure


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
    wanted = list(units) if units is not None else make_units(model, contrast_set, over)
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
    store = UnitStore(
        file,
        contrast_set.key(model, **more_facts),
        contrast_set.facts(model, **more_facts),
        {unit.key: unit.name for unit in reversed(wanted)},  # the first of units with one key
        rounding_share(model),
    )
    # Metrics of every example under every edit: means over steps and over a unit's edits.
    todo = [(key, edit) for key in store.to_compute(edits, first) for edit in edits[key]]
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
            for name, each in values.items():
                unit_means[name][group] += each.double().mean(1).cpu().numpy() / len(edits[key])
            pending[key] -= len(group)
            if not pending[key]:
                store.finish(key, means.pop(key))
    # A unit's effect: the control that is lost without it.
    whole = {name: store[CONTROL][name] for name in chosen}
    effects = {
        name: np.stack([whole[name] - store[unit.key][name] for unit in wanted], axis=1)
        for name in chosen
    }
    noise = {name: float(np.abs(whole[name] - store[NULL][name]).max()) for name in chosen}
    return KnockOut(
        contrast_set,
        tuple(wanted),
        replacement,
        phase,
        first,
        whole[first],
        effects[first],
        noise[first],
        {name: (whole[name], effects[name], noise[name]) for name in chosen if name != first},
        augmentation,
    )


def _edits(unit: Unit, replacement: str, phase: Phase) -> list[Edit]:
    """Edits of a unit: one, or one for each branch that is changed at a time."""
    edit = Edit(unit.heads, replacement, phase, unit.positions)
    if replacement in ("cut", "zero"):
        return [edit]
    return [replace(edit, branches="target"), replace(edit, branches="others")]
