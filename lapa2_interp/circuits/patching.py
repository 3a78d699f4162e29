"""Activation patching: one branch's activations in the other branch's run.

The source s is the target's branch, the destination d the opposite one: the same text after two
prefixes. D is a metric of one run, its mean over steps.

    denoise: an activation of s in d          recovery = mean(D_patched - D_d) / mean(D_s - D_d)
    noise:   an activation of d in s          recovery = mean(D_s - D_patched) / mean(D_s - D_d)

Both are shares of one difference, and ratios of sums over prompts. Denoising finds activations that
suffice, noising activations that are needed. They differ where heads replace or need each other.

    found = patch(model, "sentiment")                  # keys and values of the prefix
    found.frame()                                      # recovery, interval, family-wise p, rank
    patch(model, "sentiment", "z", direction="both").plot()

Nodes:

- `prefix_kv`: keys or values of a KV head in the prefix's slots. Later queries see a prefix through
  these alone.
- `prefix_to_head`: keys and values as one query head sees them: the edge from the prefix to a head.
- `z` (a head's output), `pattern`, `resid_pre`, `resid_mid`, `resid_post`, `attn_out`, `mlp_out`:
  activations at hooks of a TransformerBridge.
- `head_to_logits`: a head's output in the final norm's input, with later layers unchanged: the edge
  from a head to the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from lapa2_interp._util.errors import CircuitError, pluralize, unknown_choice
from lapa2_interp._util.plots import Drawing, new_figure, plain_axes
from lapa2_interp._util.progress import given_or_new_bar
from lapa2_interp.circuits.contrast_set import ContrastLike, ContrastSet
from lapa2_interp.circuits.edits import items_per_batch
from lapa2_interp.circuits.examples import ContrastExample, batches
from lapa2_interp.circuits.patch_nodes import (
    Location,
    PatchUnit,
    check_node,
    make_patch_units,
    patched_runs,
)
from lapa2_interp.circuits.statistics import max_t, ranks, share_interval
from lapa2_interp.models.card import Model, prepacked_model
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.stats import FEW, bounds

Direction = Literal["denoise", "noise"]
RunMetric = Callable[[Tensor, Tensor], Tensor]
"""A function of the log-probabilities of one run [item step vocab] and its text [item step] that
gives one number for each text and step, [item step]."""
RUN_METRICS = ("favour", "log_prob")


@dataclass(frozen=True)
class Patching:
    """Effects of patching each unit of a node.

    Attributes:
        contrast_set: The texts.
        node, metric: As in `patch`.
        units: The units that were patched.
        source: D_s by example: the mean over steps in the target's branch.
        destination: D_d by example, in the opposite branch.
        effects: By direction and example, the change of D towards the other run: D_patched - D_d,
            or D_s - D_patched under noise.
    """

    contrast_set: ContrastSet
    node: str
    metric: str
    units: tuple[PatchUnit, ...]
    source: Float[np.ndarray, " example"]
    destination: Float[np.ndarray, " example"]
    effects: Mapping[str, Float[np.ndarray, "example unit"]]

    def frame(self) -> pd.DataFrame:
        """A row for every direction and unit, largest recovery first.

        Columns: direction; the unit's labels; effect, in the metric's units a step; recovery
        with its 95 % interval over prompts; t, p, p_max (corrected for the number of units) and q;
        rank with its interval. With fewer than 8 prompts there are no p-values: numbers, no claims.
        """
        tables = []
        whole = self.contrast_set.by_prompt(self.source - self.destination)
        few = len(whole) < FEW
        for direction, effects in self.effects.items():
            values = self.contrast_set.by_prompt(effects)
            with np.errstate(divide="ignore", invalid="ignore"):
                recovery, low, high = share_interval(values, whole)
            tests, order = max_t(values), ranks(values * (np.sign(whole.sum()) or 1.0))
            table = pd.DataFrame([dict(unit.labels) for unit in self.units])
            columns = {
                "effect": values.mean(0),
                "recovery": recovery,
                "low": low,
                "high": high,
                "t": tests.t,
                "p": np.nan if few else tests.p,
                "p_max": np.nan if few else tests.p_max,
                "q": np.nan if few else tests.q,
                "rank": order.rank,
                "rank_low": order.low,
                "rank_high": order.high,
            }
            table = table.assign(**columns).sort_values("rank", ignore_index=True)
            table.insert(0, "direction", direction)
            tables.append(table)
        return pd.concat(tables, ignore_index=True)

    def interval(self) -> pd.DataFrame:
        """Each unit's recovery with its 95 % interval over prompts, largest first."""
        return self.frame()[["direction", *self.units[0].labels, "recovery", "low", "high"]]

    def sums(self) -> pd.DataFrame:
        """The denominator of all recoveries: D_s, D_d and their difference, with 95 % intervals
        over prompts. Where the difference's interval includes 0, recoveries mean nothing."""
        names = self.contrast_set.attributes
        runs = {
            "source": (names[0], self.source),
            "destination": (names[1], self.destination),
            "difference": ("", self.source - self.destination),
        }
        rows = []
        for run, (attribute, values) in runs.items():
            means = self.contrast_set.by_prompt(values)
            low, high = bounds(means, np.arange(len(means)))
            row = {"run": run, "attribute": attribute, "mean": means.mean()}
            rows.append(row | {"low": float(low), "high": float(high), "prompts": len(means)})
        return pd.DataFrame(rows)

    def map(
        self, direction: str | None = None, part: str | None = None
    ) -> Float[np.ndarray, "layer column"]:
        """Recoveries of heads or KV heads as a grid; of the residual stream, by layer and part of
        the text, in the order of `slots`.

        Args:
            direction: By default the first one.
            part: "k", "v" or "kv", where there are several.

        Raises:
            CircuitError: The units are sets by name; or there are several parts, and none was
                named.
        """
        names = [name for name in ("head", "kv_head", "slots") if name in self.units[0].labels]
        if not names:
            raise CircuitError("sets of units have no map; see frame()")
        chosen = next(iter(self.effects)) if direction is None else direction
        if chosen not in self.effects:
            raise CircuitError(unknown_choice("direction", chosen, self.effects))
        parts = list(dict.fromkeys(unit.part for unit in self.units))
        if part is None and len(parts) > 1:
            raise CircuitError(f"there is a map for each of {', '.join(parts)}; name one: part=")
        wanted = parts[0] if part is None else part
        if wanted not in parts:
            raise CircuitError(unknown_choice("part", wanted, parts))
        # Rows are layers, columns heads, KV heads or slots.
        layers = sorted({unit.labels["layer"] for unit in self.units})
        columns = list(dict.fromkeys(unit.labels[names[0]] for unit in self.units))
        grid = np.full((layers[-1] + 1, len(columns)), np.nan)
        whole = self.contrast_set.by_prompt(self.source - self.destination).mean()
        means = self.contrast_set.by_prompt(self.effects[chosen]).mean(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            recovery = means / whole
        for unit, value in zip(self.units, recovery, strict=True):
            if unit.part == wanted:
                grid[unit.labels["layer"], columns.index(unit.labels[names[0]])] = value
        return grid

    def plot(self) -> Drawing:
        """A map for every direction and part of the cache; of sets, recoveries with intervals."""
        if "name" in self.units[0].labels:
            return self._plot_sets()
        parts = list(dict.fromkeys(unit.part for unit in self.units))
        shown = [
            (direction, part, self.map(direction, part))
            for direction, part in product(self.effects, parts)
        ]
        n_layers, n_columns = shown[0][2].shape
        figure = new_figure((1.6 + 0.2 * n_columns) * len(shown), 1.2 + 0.13 * n_layers)
        found = [np.abs(grid[np.isfinite(grid)]).max(initial=0.0) for _, _, grid in shown]
        top = float(max(found)) or 1.0
        kind = list(self.units[0].labels)[1]
        for axes, (direction, part, grid) in zip(
            np.atleast_1d(figure.subplots(1, len(shown))), shown, strict=True
        ):
            drawn = axes.imshow(grid, cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")
            axes.set_title(" ".join((direction, self.node, part)).strip(), fontsize=8)
            plain_axes(axes, kind.replace("_", " "), "layer")
            if kind == "slots":
                axes.set_xticks(
                    range(n_columns), list(dict.fromkeys(p.labels["slots"] for p in self.units))
                )
        figure.colorbar(drawn, ax=axes, label=f"recovered {self.metric}, share")
        return figure

    def _plot_sets(self) -> Drawing:
        """Recoveries of sets with intervals."""
        figure = new_figure(5.2, 0.8 + 0.2 * len(self.units) * len(self.effects))
        axes, table = figure.subplots(), self.frame()
        at = np.arange(len(table))[::-1]
        errors = [table["recovery"] - table["low"], table["high"] - table["recovery"]]
        axes.errorbar(table["recovery"], at, xerr=errors, fmt="o", ms=3, lw=0.8, color="#0072B2")
        axes.axvline(0, color="0.6", lw=0.6)
        axes.set_yticks(at, table["direction"] + " " + table["name"])
        plain_axes(axes, f"recovered {self.metric}, share", self.node)
        return figure


@accepts_model_name
def patch(
    model: Model,
    contrast: ContrastLike,
    node: str = "prefix_kv",
    *,
    metric: str | RunMetric | None = None,
    direction: str = "denoise",
    slots: Sequence[str] | None = None,
    parts: Sequence[str] | None = None,
    together: Mapping[str, Sequence[Location]] | None = None,
    batch_size: int | None = None,
    progress: tqdm | None = None,
    **settings: Any,
) -> Patching:
    """Measure the share of the difference between two branches that each unit of a node carries.

    Args:
        model: A TransformerBridge, with custom hooks if it has any; for nodes of the prefix also a
            `TransformersModel`.
        contrast, settings: As `control_score`, of two attributes.
        node: One of `NODES`.
        metric: "favour" (lse over the target's words minus lse over the opposite's, of the
            log-probabilities), "log_prob" (of the text's tokens), or a `RunMetric`. By default
            favour, and log_prob where there are no words. The target's favour minus the opposite's
            is the metric lex of `control_score`.
        direction: "denoise", "noise", or "both".
        slots: Parts of the text by name: "prefix", "bos", "prompt", "last" (the prompt's last
            token), "generated". A unit of `z` or `pattern` covers all these slots, by default
            every query after the prefix. The residual nodes have a unit for each slot, by default
            for all; sets by name (`together`) name their slots themselves. Other nodes take none.
        parts: For nodes of the prefix: "k", "v", "kv" (both together), a unit for each. By default
            k and v for `prefix_kv`, both together for `prefix_to_head`.
        together: Sets by name, each patched together, instead of every location by itself: pairs of
            a layer and a head, a KV head (`prefix_kv`) or a part of the text (residual nodes).
        batch_size: Patched texts in one forward pass; changes nothing but memory and time.
        progress: A bar that counts steps.

    Raises:
        CircuitError: More or fewer than two branches, an unknown name, a location or a hook that
            the model does not have, or an argument that the node does not take.
        DeadHookError: A hook of the node does not run.
    """
    contrast_set = ContrastSet.of(model, contrast, **settings)
    if len(contrast_set.attributes) != 2:
        raise CircuitError(
            f"patching is between two branches; found {', '.join(contrast_set.attributes)}; give"
            " examples of two attributes"
        )
    if direction not in (*get_args(Direction), "both"):
        raise CircuitError(unknown_choice("direction", direction, (*get_args(Direction), "both")))
    if metric is None:
        metric = "favour" if contrast_set.words else "log_prob"
    run_metric = _run_metric(metric, contrast_set)
    slots, parts = ((each,) if isinstance(each, str) else each for each in (slots, parts))
    check_node(model, contrast_set, node, slots, parts)
    units = make_patch_units(model, contrast_set, node, slots, parts, together)
    runs_of = patched_runs(model, node, slots)
    directions = get_args(Direction) if direction == "both" else (direction,)
    # Batches: directions, examples and units.
    n_examples, n_units = len(contrast_set.examples), len(units)
    sums = np.zeros((2, n_examples))
    effects = {each: np.zeros((n_examples, n_units)) for each in directions}
    most = items_per_batch(model, contrast_set.examples, batch_size)
    total = sum(example.n_steps for example in contrast_set.examples) * n_units * len(directions)
    n_together = max(1, most // n_units)  # examples
    size = max(1, most // n_together)  # units
    work = product(
        directions, list(batches(contrast_set.examples, n_together)), range(0, n_units, size)
    )
    with (
        given_or_new_bar(progress, total, f"patching {node}", "step") as bar,
        torch.no_grad(),
        prepacked_model(model),
    ):
        for each, group, first in work:
            examples, some = [contrast_set.examples[i] for i in group], units[first : first + size]
            into = 1 if each == "denoise" else 0
            runs = runs_of(examples, some, into)
            values = np.stack([_run_value(run_metric, logits, examples) for logits in runs])
            sums[:, group] = values[:2]
            change = values[2:] - values[into]
            effects[each][group, first : first + size] = (change if into else -change).T
            bar.update(sum(example.n_steps for example in examples) * len(some))
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", "metric")
    return Patching(contrast_set, node, name, tuple(units), sums[0], sums[1], effects)


def _run_metric(metric: str | RunMetric, contrast_set: ContrastSet) -> RunMetric:
    """The function of a metric's name."""
    if not isinstance(metric, str):
        return metric
    if metric == "log_prob":
        return lambda log_probs, text: log_probs.gather(2, text[:, :, None])[:, :, 0]
    if metric != "favour":
        raise CircuitError(f"{unknown_choice('metric', metric, RUN_METRICS)}, or a function")
    if len(contrast_set.words) != 2:
        raise CircuitError(
            "metric favour needs the words of each attribute, as token ids: words={name: ids}"
            " beside examples; metric log_prob does not"
        )
    plus, minus = (list(words) for words in contrast_set.words)
    return lambda log_probs, text: (
        log_probs[:, :, plus].logsumexp(2) - log_probs[:, :, minus].logsumexp(2)
    )


def _run_value(
    metric: RunMetric,
    logits: Float[Tensor, "example step vocab"],
    examples: Sequence[ContrastExample],
) -> Float[np.ndarray, " example"]:
    """A run's metric, its mean over steps."""
    text = torch.tensor([example.text for example in examples], device=logits.device)
    wide = torch.promote_types(logits.dtype, torch.float32)
    found = metric(logits.to(wide).log_softmax(2), text)
    if found.shape != text.shape:
        raise CircuitError(
            f"the metric gave numbers of shape {list(found.shape)} for"
            f" {pluralize(text.shape[0], 'text')} of {pluralize(text.shape[1], 'step')}; give one"
            " for each text and step"
        )
    return found.double().mean(1).cpu().numpy()
