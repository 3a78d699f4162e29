"""The control score: how far the branches' predictions are apart, step by step.

found = control(model, "sentiment")
found.interval("js")          # by step, with 95 % intervals over prompts
found.plot()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from tqdm import tqdm

from lapa2_interp._util.errors import CircuitError, unknown_choice
from lapa2_interp._util.plots import COLOURS, Drawing, new_figure, plain_axes
from lapa2_interp._util.progress import given_bar
from lapa2_interp.bias.augmentation import AugmentationLike
from lapa2_interp.circuits.metrics import METRICS, Metric, metrics_by_name
from lapa2_interp.circuits.question import ContrastLike, ContrastSet, evaluate_edits
from lapa2_interp.models.card import Model
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.stats import bounds


@dataclass(frozen=True)
class Control:
    """The control of every text at every step.

    Attributes:
        question: What was asked.
        values: By metric; NaN after the end of a text.
    """

    question: ContrastSet
    values: Mapping[str, Float[np.ndarray, "case step"]]

    def frame(self) -> pd.DataFrame:
        """A row for every text and step: prompt, source, case, step, l_kv, and every metric.

        l_kv counts the keys of the query, BOS and its own included; step 0 predicts the text's
        first token.
        """
        rows = []
        for i, case in enumerate(self.question.cases):
            for step in range(case.n):
                row = {"prompt": case.prompt, "source": case.source, "case": i, "step": step}
                row["l_kv"] = case.layouts[0].n_live + step
                rows.append(row | {name: each[i, step] for name, each in self.values.items()})
        return pd.DataFrame(rows)

    def interval(self, metric: str, by: str | None = "step") -> pd.DataFrame:
        """Means of a metric with 95 % intervals over prompts: by step, by source, or (None) of all.

        Every step of every text has the same weight. A knock-out gives it to every prompt: the two
        differ a little where texts have several lengths.

        Raises:
            CircuitError: The metric was not computed, or there is no such column.
        """
        frame = self.frame()
        if metric not in self.values:
            raise CircuitError(unknown_choice("metric", metric, self.values))
        if by is not None and by not in frame:
            raise CircuitError(unknown_choice("column", by, frame.columns))
        rows = []
        for value, part in [(None, frame)] if by is None else frame.groupby(by, sort=False):
            part = part[part[metric].notna()]  # a metric of some steps has none at the others
            if not len(part):
                continue
            numbers = part[metric].to_numpy(float)
            low, high = bounds(numbers, part["prompt"])
            row = {} if by is None else {by: value}
            row |= {"mean": numbers.mean(), "low": float(low), "high": float(high)}
            rows.append(row | {"n": len(part), "prompts": part["prompt"].nunique()})
        return pd.DataFrame(rows)

    def plot(self, metrics: Sequence[str] | None = None) -> Drawing:
        """Every metric against the step, with 95 % bands."""
        shown = list(self.values) if metrics is None else list(metrics)
        figure = new_figure(2.6 * len(shown), 2.3)
        for axes, metric, colour in zip(
            np.atleast_1d(figure.subplots(1, len(shown))), shown, cycle(COLOURS), strict=False
        ):
            curve = self.interval(metric)
            axes.plot(curve["step"], curve["mean"], color=colour, lw=1.4)
            axes.fill_between(
                curve["step"], curve["low"], curve["high"], color=colour, alpha=0.15, lw=0
            )
            axes.axhline(0, color="0.7", lw=0.6)
            axes.set_title(metric, fontsize=9)
            plain_axes(axes, "step", "nats" if metric in METRICS else "")
        return figure


@accepts_model_name
def control(
    model: Model,
    about: ContrastLike,
    *,
    metrics: str | Metric | Sequence[str] | Mapping[str, Metric] | None = None,
    augmentation: AugmentationLike = None,
    at_once: int | None = None,
    progress: tqdm | None = None,
    **settings: Any,
) -> Control:
    """How far the branches' predictions are apart at every step of some texts.

    Args:
        model: A TransformerBridge, with hooks of one's own if there are any, or a
            `TransformersModel`.
        about: A task by name or value, a case or several, or a `ContrastSet`.
        metrics: A name of `METRICS` or several, a function of `Predictions`, or functions by name;
            by default all that can be computed.
        augmentation: What acts in every branch: one, or several.
        at_once: Texts read together; changes nothing but memory and time.
        progress: A bar to advance by steps read.
        settings: For a task, as `make_examples`: attribute, prompts, texts, source, tokens,
            samples, seed. For cases, words={name: token ids}, which lex needs.

    Raises:
        CircuitError: Prefixes of different lengths, an unknown metric, or one that lacks words.
        TaskError: A task without opposite attributes.
    """
    question = ContrastSet.of(model, about, **settings)
    chosen = metrics_by_name(question.metrics if metrics is None else metrics)
    longest = max(case.n for case in question.cases)
    values = {name: np.full((len(question.cases), longest), np.nan) for name in chosen}
    total = sum(case.n * len(case.names) for case in question.cases)
    with given_bar(progress, total, "control", "step") as bar:
        for _, group, found in evaluate_edits(
            model, question, [None], chosen, augmentation, bar, at_once
        ):
            for name, each in found.items():
                values[name][group, : each.shape[1]] = each.double().cpu().numpy()
    return Control(question, values)
