"""The page of `steer`: what was chosen, tuned and judged, in one HTML file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, NullLocator

from lapa2_interp.errors import pluralize
from lapa2_interp.models.sizes import model_size
from lapa2_interp.page import Section, page, write_page
from lapa2_interp.plots import (
    COLOURS,
    Drawing,
    band,
    error_bars,
    layer_map,
    legend_above,
    new_figure,
    plain_axes,
)
from lapa2_interp.report.steer_result import ORDER, Steered, format_test
from lapa2_interp.stats import describe_intervals
from lapa2_interp.table_formats import format_interval

SHOWN_TEXTS = 3
"""Prompts whose texts are on the page."""
COLOUR = dict(zip(ORDER, COLOURS, strict=False))
"""Of each arm."""


def write_steer_page(file: Path, steered: Steered) -> Path:
    """Write the page of a result.

    Raises:
        RunError: The file cannot be written.
    """
    return write_page(file, lambda: _render(steered))


def _render(steered: Steered) -> str:
    plan, card = steered.plan, steered.selection
    names = ", ".join(plan.task.attributes)
    parts = plan.parts()
    sections = [
        Section(
            "Judged",
            "Accuracy with the words of all prefixes hidden, and 95 % intervals"
            f" ({describe_intervals(steered.table['prompts'])})."
            f" These {pluralize(len(parts['judge']), 'prompt')} decided nothing before. First come"
            " all attributes together.",
            judged_figure(steered),
            _wide(steered),
        ),
        Section(
            "Tuned",
            f"Perplexity against that of {plan.method} without bias, with the bias in"
            f" {steered.tuning['place'].nunique()} places, on"
            f" {pluralize(len(parts['tune']), 'prompt')}. Rings are the strengths that are judged.",
            tuning_figure(steered),
            None,
        ),
        Section(
            "Chosen",
            f"{pluralize(len(card.heads), 'head')} by {card.by} (red), and heads that work against"
            f" the prefix (blue), on {pluralize(len(parts['choose']), 'prompt')}."
            + _stability(steered),
            heads_figure(steered),
            None,
        ),
        Section("Texts", "The first prompts that judge, one text an arm.", None, _texts(steered)),
    ]
    method = [plan.method, *(f"{name}={value}" for name, value in plan.parameters.items())]
    facts = {
        "model": f"{plan.model} ({plan.dtype})",
        "task": f"{plan.task.name}: {names}",
        "method": ", ".join(method),
        "budget": f"{plan.budget:g} times the perplexity of continuations without bias"
        f" ({plan.perplexity})",
        "classifiers": ", ".join(plan.classifiers),
        "texts": f"{plan.length} tokens, {plan.samples} for each prompt and attribute, seed"
        f" {plan.seed}",
        "heads": ", ".join(f"{layer}.{head}" for layer, head in card.heads),
    }
    return page(
        f"Steering {plan.model} on {plan.task.name}",
        [card.gain, *map(format_test, steered.tests.to_dict("records"))],
        sections,
        facts,
    )


def judged_figure(steered: Steered) -> Drawing:
    """Accuracy of every arm by the deciding classifier: all attributes, then each."""
    part = steered.table[steered.table["metric"] == steered.plan.metrics[0]]
    attributes = ["all", *steered.plan.task.attributes]
    arms = list(dict.fromkeys(part["arm"]))
    figure = new_figure(6.8, 0.7 + 0.17 * len(arms) * len(attributes))
    axes = figure.subplots()
    for i, arm in enumerate(arms):
        rows = part[part["arm"] == arm].set_index("attribute").reindex(attributes)
        rows = 100 * rows[["mean", "low", "high"]].astype(float)
        y = np.arange(len(attributes)) + (i - (len(arms) - 1) / 2) * 0.15
        drawn = axes.errorbar(
            rows["mean"], y, xerr=error_bars(rows), fmt="o", ms=4, lw=1.4, color=COLOUR[arm]
        )
        drawn.set_label(str(arm))
    axes.set_yticks(np.arange(len(attributes)), attributes)
    axes.invert_yaxis()
    plain_axes(axes, f"accuracy in %, {steered.plan.metrics[0]}", "")
    legend_above(figure, 6)
    return figure


def tuning_figure(steered: Steered) -> Drawing:
    """Ratio of perplexity against alpha, a curve for each place of the bias."""
    figure = new_figure(6.8, 3.2)
    axes = figure.subplots()
    for label, rows in steered.tuning.groupby("place", sort=False):
        colour = COLOUR[str(label)]
        tuned = rows[rows["tuned"]]
        first = pd.DataFrame({"alpha": [0.0], "ratio": [1.0], "low": [1.0], "high": [1.0]})
        curve = pd.concat([first, rows.loc[~rows["tuned"], list(first)]])
        curve = curve.rename(columns={"ratio": "mean"})
        band(axes, curve, "alpha", colour, lw=1.4, marker=".", label=str(label))
        axes.plot(tuned["alpha"], tuned["ratio"], "o", ms=8, mfc="none", color=colour)
    axes.axhline(steered.plan.budget, color="0.6", lw=0.8, ls="--")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    plain_axes(axes, "alpha", "perplexity, as a multiple")
    legend_above(figure, steered.tuning["place"].nunique())
    return figure


def heads_figure(steered: Steered) -> Drawing:
    """Scores of the chosen heads and of those that work against the prefix, layer x head."""
    card, size = steered.selection, model_size(steered.plan.model)
    scores = np.full((size.n_layers, size.n_heads), np.nan)
    for (layer, head), (mean, _, _) in zip(
        (*card.heads, *card.suppressors), card.scores, strict=True
    ):
        scores[layer, head] = mean
    reach = float(np.nanmax(np.abs(scores)))
    figure = new_figure(min(6.8, 2.2 + 0.22 * size.n_heads), max(2.0, 1.0 + 0.13 * size.n_layers))
    axes = figure.subplots()
    drawn = layer_map(axes, scores, cmap="RdBu_r", vmin=-reach, vmax=reach)
    figure.colorbar(drawn, ax=axes, shrink=0.9).ax.tick_params(labelsize=7)
    return figure


def _stability(steered: Steered) -> str:
    card, size = steered.selection, model_size(steered.plan.model)
    chance = len(card.heads) ** 2 / (size.n_layers * size.n_heads)
    said = [f"{form!r} chooses {n}" for form, n in card.chosen_by_wordings.items()]
    halves = f" Both halves of the prompts choose {card.chosen_by_halves} of these heads."
    again = f" Of these heads, {', '.join(said)}; by chance it would be {chance:.1f}."
    return halves + again * bool(said)


def _wide(steered: Steered) -> pd.DataFrame:
    """A row per arm, a column per metric, for all attributes together."""
    part = steered.table[steered.table["attribute"] == "all"]
    if part.empty:
        part = steered.table
    shares = ("accuracy", "masked", "echo", "repetition", "distinct")

    def cell(row: pd.Series) -> str:
        scale = 100 if str(row["metric"]).startswith(shares) else 1
        mean, low, high = (scale * float(row[name]) for name in ("mean", "low", "high"))
        return format_interval(mean, low, high, ".1f")

    cells = part.assign(cell=part.apply(cell, axis=1))
    wide = cells.pivot(index="arm", columns="metric", values="cell")
    order = list(dict.fromkeys(steered.table["metric"]))
    return wide[order].rename_axis(columns=None).reset_index()


def _texts(steered: Steered) -> pd.DataFrame:
    prompts = list(dict.fromkeys(steered.texts["prompt"]))[:SHOWN_TEXTS]
    part = steered.texts[steered.texts["prompt"].isin(prompts) & (steered.texts["sample"] == 0)]
    part = part.assign(arm=pd.Categorical(part["arm"], ORDER, ordered=True))
    part = part.sort_values(["prompt", "attribute", "arm"], kind="stable")
    return part[["attribute", "arm", "text"]]
