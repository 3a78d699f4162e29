"""The control score: how far the branches' predictions are apart, step by step.

score = control_score(model, "sentiment")
score.interval("js")          # by step, with 95 % intervals over prompts
score.plot()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import pandas as pd
from jaxtyping import Float
from tqdm import tqdm

from lapa2_interp._util.values import Count, numbers_checked
from lapa2_interp.bias.augmentation import AugmentationLike
from lapa2_interp.circuits.contrast_set import ContrastLike, ContrastSet, as_contrast_set
from lapa2_interp.circuits.edits import evaluate_edits
from lapa2_interp.circuits.metrics import METRICS, Metric, metrics_by_name
from lapa2_interp.errors import CircuitError, unknown_choice
from lapa2_interp.models.facts import Model
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.plots import COLOURS, Drawing, new_figure, plain_axes
from lapa2_interp.progress import given_or_new_bar
from lapa2_interp.stats import bounds


@dataclass(frozen=True)
class ControlScore:
    """Control of every text at every step.

    Attributes:
        contrast_set: The texts.
        values: By metric; NaN after the end of a text.
    """

    contrast_set: ContrastSet
    values: Mapping[str, Float[np.ndarray, "example step"]]

    def frame(self) -> pd.DataFrame:
        """A row for every text and step: prompt, source, example (its number), step,
        l_kv, and every metric.

        l_kv counts the keys of the query, BOS and its own included; step 0 predicts the text's
        first token.
        """
        rows = []
        for i, example in enumerate(self.contrast_set.examples):
            of_text = {"prompt": example.prompt, "source": example.source, "example": i}
            for step in range(example.n_steps):
                of_step = {"step": step, "l_kv": example.layouts[0].n_live + step}
                values = {name: steps[i, step] for name, steps in self.values.items()}
                rows.append(of_text | of_step | values)
        return pd.DataFrame(rows)

    def interval(self, metric: str, group_by: str | None = "step") -> pd.DataFrame:
        """Means of a metric with 95 % intervals over prompts, by step, by source, or (None) of all.

        Every step of every text has the same weight here, and every prompt in a knock-out. The two
        differ a little where texts have different lengths.

        Raises:
            CircuitError: The metric was not computed, or there is no such column.
        """
        frame = self.frame()
        if metric not in self.values:
            raise CircuitError(unknown_choice("metric", metric, self.values))
        if group_by is not None and group_by not in frame:
            raise CircuitError(unknown_choice("column", group_by, frame.columns))
        rows = []
        for value, part in (
            [(None, frame)] if group_by is None else frame.groupby(group_by, sort=False)
        ):
            part = part[part[metric].notna()]  # a metric of some steps has none at the others
            if not len(part):
                continue
            numbers = part[metric].to_numpy(float)
            low, high = bounds(numbers, part["prompt"])
            row = {} if group_by is None else {group_by: value}
            row |= {"mean": numbers.mean(), "low": float(low), "high": float(high)}
            rows.append(row | {"n": len(part), "prompts": part["prompt"].nunique()})
        return pd.DataFrame(rows)

    def plot(self, metrics: Sequence[str] | None = None) -> Drawing:
        """Every metric against the step, with 95 % bands; three beside each other."""
        shown = list(self.values) if metrics is None else list(metrics)
        columns = min(3, len(shown))
        rows = -(-len(shown) // columns)
        figure = new_figure(2.6 * columns, 2.1 * rows)
        for i, (metric, colour) in enumerate(zip(shown, cycle(COLOURS), strict=False)):
            axes = figure.add_subplot(rows, columns, i + 1)
            curve = self.interval(metric)
            axes.plot(curve["step"], curve["mean"], color=colour, lw=1.4)
            axes.fill_between(
                curve["step"], curve["low"], curve["high"], color=colour, alpha=0.15, lw=0
            )
            axes.axhline(0, color="0.7", lw=0.6)
            axes.set_title(metric, fontsize=9)
            plain_axes(axes, "step", "nats" if metric in METRICS else "")
        return figure


@numbers_checked
@accepts_model_name
def control_score(
    model: Model,
    contrast: ContrastLike,
    *,
    metrics: str | Metric | Sequence[str] | Mapping[str, Metric] | None = None,
    augmentation: AugmentationLike = None,
    batch_size: Count | None = None,
    progress: tqdm | None = None,
) -> ControlScore:
    """Measure how far the branches' predictions are apart at every step.

    Args:
        model: A TransformerBridge, with custom hooks if it has any, or a `TransformersModel`.
        contrast: A `ContrastSet`, or a task by name or value, or one or more examples.
        metrics: One or more names of `METRICS`, a function of `Predictions`, or functions by name;
            by default all that can be computed.
        augmentation: One or more augmentations that act in every branch.
        batch_size: Texts in one forward pass; changes nothing but memory and time.
        progress: A bar that counts steps.

    Raises:
        CircuitError: Prefixes of different lengths, an unknown metric, or one that lacks words.
        TaskError: A task without opposite attributes.
    """
    contrast_set = as_contrast_set(model, contrast)
    chosen = metrics_by_name(contrast_set.metrics if metrics is None else metrics)
    longest = max(example.n_steps for example in contrast_set.examples)
    values = {name: np.full((len(contrast_set.examples), longest), np.nan) for name in chosen}
    total = contrast_set.n_branch_steps
    with given_or_new_bar(progress, total, "control", "step") as bar:
        for _, group, metric_values in evaluate_edits(
            model, contrast_set, [None], chosen, augmentation, bar, batch_size
        ):
            for name, steps in metric_values.items():
                values[name][group, : steps.shape[1]] = steps.double().cpu().numpy()
    return ControlScore(contrast_set, values)
