"""Activation patching: one branch's activations in the other branch's run.

The source s is the target's branch, the destination d the opposite one: the same text after two
prefixes. D is a metric of one run, its mean over steps.

    denoise: an activation of s in d          recovery = mean(D_patched - D_d) / mean(D_s - D_d)
    noise:   an activation of d in s          recovery = mean(D_s - D_patched) / mean(D_s - D_d)

Both are shares of one difference, and ratios of sums over prompts. Denoising finds activations that
suffice, noising activations that are needed. They differ where heads replace or need each other.

    found = patch(model, "sentiment")                  # keys and values of the prefix
    found.frame()                                      # share recovered, interval, p, rank
    patch(model, "sentiment", "z", direction="both").plot()

Nodes:

- `prefix_kv`: keys or values of a KV head in the prefix's slots. Later queries see a prefix through
  these alone.
- `prefix_to_head`: keys and values as one query head sees them: the edge from the prefix to a head.
- `z` (a head's output), `pattern`, `resid_pre`, `resid_post`, `attn_out`, `mlp_out`:
  activations at hooks of a TransformerBridge.
- `head_to_logits`: a head's output in the final norm's input, with later layers unchanged: the edge
  from a head to the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from lapa2_interp._util.values import Count, numbers_checked
from lapa2_interp.circuits.contrast_set import ContrastLike, ContrastSet, as_contrast_set
from lapa2_interp.circuits.edits import items_per_batch
from lapa2_interp.circuits.examples import ContrastExample, batches
from lapa2_interp.circuits.metrics import favour
from lapa2_interp.circuits.patch_nodes import (
    check_node,
    make_patch_units,
    patched_runs,
)
from lapa2_interp.circuits.unit_table import UnitTable, draw_tables
from lapa2_interp.circuits.units import Location, PatchUnit
from lapa2_interp.errors import CircuitError, pluralize, unknown_choice
from lapa2_interp.models.card import prepacked_model
from lapa2_interp.models.facts import Model
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.plots import Drawing
from lapa2_interp.progress import given_or_new_bar
from lapa2_interp.stats import bounds

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

    def table(self, direction: str | None = None) -> UnitTable:
        """The table of a direction, by default of the first. Its shares are the recoveries.

        Raises:
            CircuitError: The direction was not patched.

        Example:
            >>> from lapa2_interp import circuits, load_model
            >>> found = circuits.patch(load_model("planted"), "sentiment", "z")
            >>> found.table("denoise").best(1)
            ((1, 2),)
        """
        chosen = next(iter(self.effects)) if direction is None else direction
        if chosen not in self.effects:
            raise CircuitError(unknown_choice("direction", chosen, self.effects))
        return UnitTable(
            self.contrast_set,
            self.units,
            self.effects[chosen],
            self.source - self.destination,
            label=f"recovered {self.metric}, share",
            as_shares=True,
        )

    def frame(self) -> pd.DataFrame:
        """The frames of all directions (`UnitTable.frame`), with the direction before them."""
        tables = {direction: self.table(direction).frame() for direction in self.effects}
        return pd.concat(tables, names=["direction"]).reset_index(0).reset_index(drop=True)

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
            low, high = bounds(means)
            row = {"run": run, "attribute": attribute, "mean": means.mean()}
            rows.append(row | {"low": float(low), "high": float(high), "prompts": len(means)})
        return pd.DataFrame(rows)

    def plot(self) -> Drawing:
        """A map for every direction and part of the cache; of sets, recoveries with intervals."""
        return draw_tables(
            {f"{direction} {self.node}": self.table(direction) for direction in self.effects}
        )


@numbers_checked
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
    keep: Mapping[str, Sequence[Location]] | None = None,
    batch_size: Count | None = None,
    progress: tqdm | None = None,
) -> Patching:
    """Measure the share of the difference between two branches that each unit of a node carries.

    Args:
        model: A TransformerBridge, with custom hooks if it has any; for nodes of the prefix also a
            `TransformersModel`.
        contrast: A `ContrastSet`, or a task by name or value, or one or more examples; of two
            attributes.
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
        keep: For `z` and `pattern`, by name of a set: heads that keep the activation of their own
            run while the set is patched, so that nothing acts through them.
        batch_size: Patched texts in one forward pass; changes nothing but memory and time.
        progress: A bar that counts steps.

    Raises:
        CircuitError: More or fewer than two branches, an unknown name, a location or a hook that
            the model does not have, or an argument that the node does not take.
        DeadHookError: A hook of the node does not run.
    """
    contrast_set = as_contrast_set(model, contrast)
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
    slots, parts = ((names,) if isinstance(names, str) else names for names in (slots, parts))
    check_node(model, contrast_set, node, slots, parts)
    units = make_patch_units(model, contrast_set, node, slots, parts, together, keep)
    runs_of = patched_runs(model, node, slots)
    directions = get_args(Direction) if direction == "both" else (direction,)
    # Batches: directions, examples and units.
    n_examples, n_units = len(contrast_set.examples), len(units)
    sums = np.zeros((2, n_examples))
    effects = {direction: np.zeros((n_examples, n_units)) for direction in directions}
    most = items_per_batch(model, contrast_set.examples, batch_size)
    total = sum(example.n_steps for example in contrast_set.examples) * n_units * len(directions)
    n_together = max(1, most // n_units)  # examples
    size = max(1, most // n_together)  # units
    passes = product(
        directions, list(batches(contrast_set.examples, n_together)), range(0, n_units, size)
    )
    with (
        given_or_new_bar(progress, total, f"patching {node}", "step") as bar,
        torch.no_grad(),
        prepacked_model(model),
    ):
        for way, group, first in passes:
            examples, some = [contrast_set.examples[i] for i in group], units[first : first + size]
            into = 1 if way == "denoise" else 0
            runs = runs_of(examples, some, into)
            values = np.stack([_run_value(run_metric, logits, examples) for logits in runs])
            sums[:, group] = values[:2]
            change = values[2:] - values[into]
            effects[way][group, first : first + size] = (change if into else -change).T
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
    return lambda log_probs, _text: favour(log_probs, contrast_set.words)


def _run_value(
    metric: RunMetric,
    logits: Float[Tensor, "example step vocab"],
    examples: Sequence[ContrastExample],
) -> Float[np.ndarray, " example"]:
    """A run's metric, its mean over steps."""
    text = torch.tensor([example.text for example in examples], device=logits.device)
    wide = torch.promote_types(logits.dtype, torch.float32)
    values = metric(logits.to(wide).log_softmax(2), text)
    if values.shape != text.shape:
        raise CircuitError(
            f"the metric gave numbers of shape {list(values.shape)} for"
            f" {pluralize(text.shape[0], 'text')} of {pluralize(text.shape[1], 'step')}; give one"
            " for each text and step"
        )
    return values.double().mean(1).cpu().numpy()
