"""The page of a study: figures, tables and sentences in one HTML file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from lapa2_interp._util.version import __version__
from lapa2_interp.circuits.control import ControlScore
from lapa2_interp.circuits.examples import RAW, ContrastExample
from lapa2_interp.circuits.knockout import JointCurve, KnockOut
from lapa2_interp.circuits.logit_attribution import HeadLogitAttribution
from lapa2_interp.circuits.placebo import Placebo
from lapa2_interp.circuits.study_results import EDGES, CircuitStudy, head_name
from lapa2_interp.circuits.unit_table import draw_tables
from lapa2_interp.errors import pluralize
from lapa2_interp.page import Section, page
from lapa2_interp.plots import Drawing, new_figure, plain_axes
from lapa2_interp.stats import FEW
from lapa2_interp.table_formats import format_interval, interval_cells, records

METRIC_TEXTS = {
    "js": "js is the distance between the branches' predictions (Jensen-Shannon divergence).",
    "lex": "lex says how much more each branch favours the words of its own attribute.",
    "llr": "llr is the log-likelihood ratio of the text behind the first prefix and the other.",
    "kl": "kl is the divergence of the first branch's predictions from the other's.",
    "from_raw": "from_raw is the distance of the branches from the predictions without a prefix.",
}
"""Sentences on the metrics of `circuits.metrics`."""


def render_study(study: CircuitStudy) -> str:
    """The HTML page of a study."""
    heads = study.heads
    n_again = len(next(iter(study.variants.values())).units)
    sections = [
        Section(
            "How strong the control is, step by step",
            "In nats, on texts that the model wrote without a prefix."
            f" {' '.join(METRIC_TEXTS[name] for name in study.control[RAW].values)} The table"
            " compares texts that were written behind a prefix: they already say what it wants.",
            study.control[RAW].plot(),
            _score_table(study.control),
        ),
        Section(
            "Layers and KV heads",
            "How much js is lost when heads cannot see the prefix, at any query after it. The"
            " figure shows whole layers, the table the KV heads with the largest loss."
            + _weak_layers(study)
            + _beside_words(study, "layer, js"),
            _beside_placebo(study, "layer"),
            _table_of(study.tables["kv"], 8),
        ),
        Section(
            "Heads",
            "How much is lost when one head cannot see the prefix. Red heads carry control, blue"
            " ones work against it."
            + (
                " Shares are of lex, because shares of lex add up."
                if "lex" in heads.metrics
                else ""
            )
            + " p is corrected for the number of heads."
            + _beside_words(study, "head, js"),
            _beside_placebo(study, "head"),
            _table_of(heads, 16),
        ),
        Section(
            "The same heads, knocked out in other ways",
            "Lost js of the best heads: their keys hidden (cut), their values set to zero, or keys"
            " and values taken from the opposite prefix (resample) or the mean of all. cut,"
            " last_query hides the prefix from the last token of the prompt and the text alone;"
            " cut, predicting_only from the query that predicts alone. Intervals are in the CSV"
            " files.",
            None,
            _variant_table(study),
        ),
        Section(
            "Attention is not control",
            "Each head's attention on the prefix, and how much is lost without it. The table"
            " compares other rankings with this one. The first rows are about"
            f" {pluralize(n_again, 'head')}, of which half were chosen because their effect is"
            " large: this makes their correlation larger."
            + (f" Gradient, {study.gradient[1]}." if study.gradient is not None else ""),
            heads.plot_against(study.prefix_attention.ravel(), "attention on the prefix"),
            _rounded(study.agreement()),
        ),
        Section(
            "Tokens of the prefix",
            "How much js is lost when no head can see one of its tokens (figure), and when one of"
            " the best heads cannot (table)." + _beside_words(study, "position, js"),
            _position_figure(study),
            _token_table(study),
        ),
    ]
    if study.curve is not None:
        metric = study.curve.metric
        sections.append(
            Section(
                "Heads together",
                f"The share of {metric} that is left without the best heads, with these alone,"
                " without random ones, and without those that attend most. Heads are chosen in one"
                " half of the prompts and judged in the other."
                + (" Below 0 the preference for the words turns round." if metric == "lex" else ""),
                study.curve.plot(),
                _joint_table(study.curve),
            )
        )
    if study.logit_attribution is not None:
        sections.append(
            Section(
                "What they write",
                "Direct effects: what a head's reading of the prefix adds to the words of its"
                " attribute. A head that writes for other heads has none."
                + _beside_words(study, "head, direct"),
                study.logit_attribution.plot(),
                _word_table(study.logit_attribution),
            )
        )
    if study.placebo is not None:
        sections.append(_placebo_section(study.placebo))
    model, task = study.settings["model"]["name"], study.settings["task"]
    title = f"Which heads of {model} carry {task} control?"
    findings, details = study.findings()
    return page(title, findings, sections, _facts(study), details)


def _beside_placebo(study: CircuitStudy, over: str) -> Drawing:
    """The figure of a kind of unit, and beside it that of the untrained model."""
    if study.placebo is None:
        return study.tables[over].plot()
    name = f"{over}, js"
    tables = {"trained": study.placebo.trained[name], "untrained": study.placebo.untrained[name]}
    return draw_tables(tables)


def _beside_words(study: CircuitStudy, name: str) -> str:
    """A sentence about a map of nothing."""
    if study.placebo is None:
        return ""
    table = study.placebo.frame()
    nothing = records(table[(table["map"] == name) & (table["kind"] != "trained")])
    words = [f"{row['kind']} {row['largest']:.2g}" for row in nothing]
    return f" Placebo, the largest value: {', '.join(words)}." if words else ""


def _placebo_section(placebo: Placebo) -> Section:
    """Every map beside that of the untrained model and that with shuffled labels."""
    name = "head, direct" if "head, direct" in placebo.shuffled else "head, lex"
    figure = None
    if name in placebo.shuffled:
        tables = {"trained": placebo.trained[name], "labels shuffled": placebo.shuffled[name]}
        figure = draw_tables(tables)
    table = placebo.frame()
    shown = table[["map", "kind"]].assign(
        largest=table["largest"].map("{:.2g}".format),
        named=[
            "" if np.isnan(row["named"]) else f"{row['named']:.0f} of {row['units']}"
            for row in records(table)
        ],
        spearman=table["spearman"].map("{:.2f}".format),
    )
    return Section(
        "Placebo",
        f"The same maps where there is nothing to find: in {placebo.model}, whose weights are those"
        " with which training begins, and with the attributes of half of the prompts swapped, which"
        " changes only measures with a sign (lex, direct). Largest: the largest mean of a unit, by"
        " size. Named: units with family-wise p < .05 of either sign (8 prompts or more). Spearman:"
        " of the order of units with the trained one. Named units of an untrained model have small"
        " effects that are alike in all prompts: compare sizes.",
        figure,
        shown,
    )


def _facts(study: CircuitStudy) -> dict[str, str]:
    """Model, task, texts and metrics in words."""
    settings, model = study.settings, study.settings["model"]
    return {
        "model": f"{model['name']} ({model['dtype']})",
        "weights": str(model["weights"]),
        "task": str(settings["task"]),
        "prefixes": "; ".join(f"{name} {text!r}" for name, text in study.prefixes.items()),
        "texts": (
            f"{len(study.contrast_set.examples)} of {settings['tokens']} tokens, written by the"
            f" model without a prefix, seed {settings['seed']}"
        ),
        "metric": (
            "js, the distance between predictions, ranks heads; shares are of lex, the preference"
            " for the attribute's words; both are means over steps, in nats"
            if "lex" in study.heads.metrics
            else "js, the distance between predictions, mean over steps, in nats"
        ),
        "intervals": "95 %, over prompts; p corrected for the number of units (max T)",
        "noise": f"effects of heads below {study.heads.noise:.2g} nats are rounding",
        "package": f"lapa2_interp {__version__}",
    }


def _weak_layers(study: CircuitStudy) -> str:
    """A sentence about layers that lose less than one of their heads."""
    layers = {row["layer"]: row["effect"] for row in records(study.tables["layer"].frame())}
    weak: dict[int, str] = {}
    for row in records(study.heads.frame()):  # the largest effect first
        layer, effect = row["layer"], row["effect"]
        if effect > max(layers[layer], 0) + study.heads.noise:
            than = (
                f"layer {layer} ({layers[layer]:.3g}) than its head {head_name(row)} ({effect:.3g})"
            )
            weak.setdefault(layer, than)
    if not weak:
        return ""
    first = list(weak.values())[:3]
    others = f", and so in {pluralize(len(weak) - 3, 'more layer')}" if len(weak) > 3 else ""
    return (
        f" Less is lost without {', '.join(first)}{others}: losses do not add up, because other"
        " heads of a layer work against its best, or do what it did."
    )


def _rounded(table: pd.DataFrame) -> pd.DataFrame:
    """The table with its numbers as texts of three digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float | np.floating):
            return "" if np.isnan(value) else f"{value:.3g}"
        return str(value)

    return table.map(rounded)


def _table_of(table: KnockOut, n: int) -> pd.DataFrame:
    """The n largest effects of a table with their intervals, as texts."""
    names = list(table.units[0].labels)
    frame = table.frame().head(n)
    columns = {f"lost {table.metric}": interval_cells(frame, columns=("effect", "low", "high"))}
    shares = frame
    if "lex" in table.metrics:
        shares = table.with_metric("lex").frame()
        shares = frame[names].merge(shares, on=names, how="left")
    of = "lex" if "lex" in table.metrics else table.metric
    columns[f"share of {of}"] = interval_cells(shares, ".1%", ("share", "share_low", "share_high"))
    if table.contrast_set.n_prompts >= FEW:
        columns["p"] = [f"{p:.2g}" for p in frame["p_max"]]
    columns["rank"] = interval_cells(frame, ".0f", ("rank", "rank_low", "rank_high"))
    shown = frame[names].astype(str).assign(**columns)
    if frame["below_noise"].any():
        shown["noise"] = ["below" if below else "" for below in frame["below_noise"]]
    return shown


def _variant_table(study: CircuitStudy) -> pd.DataFrame:
    """Effects of the best heads under every replacement and phase."""
    table: list[dict[str, Any]] = []
    by_head = {
        name: {head_name(row): row for row in records(table.frame())}
        for name, table in {"cut": study.heads, **study.variants}.items()
    }
    for layer, head in study.heads.best(EDGES):
        name = f"{layer}.{head}"
        effects = {head: rows[name]["effect"] for head, rows in by_head.items() if name in rows}
        table.append({"head": name, **effects})
    return _rounded(pd.DataFrame(table))


def _score_table(scores: dict[str, ControlScore]) -> pd.DataFrame:
    """Means of every metric, a row for every source of texts."""
    rows = []
    for source, score in scores.items():
        row: dict[str, Any] = {"texts written behind": source}
        for metric in score.values:
            interval = records(score.interval(metric, None))[0]
            row[metric] = format_interval(interval["mean"], interval["low"], interval["high"])
        rows.append(row)
    return pd.DataFrame(rows)


def _tokens(example: ContrastExample) -> list[str]:
    """The prefix's tokens at each position: one for each attribute where they differ."""
    own = example.layouts[0]
    if own.soft:
        return [f"soft {i + 1}" for i in range(own.soft)]
    by_branch = [layout.tokens[slice(*layout.prefix)] for layout in example.layouts]
    return [" / ".join(dict.fromkeys(map(repr, at))) for at in zip(*by_branch, strict=True)]


def _joint_table(curve: JointCurve) -> pd.DataFrame:
    """Shares of control left: a row for every number of heads, a column for every kind."""
    rows: dict[int, dict[str, str]] = {}
    for row in records(curve.frame()):
        left = format_interval(row["left"], row["low"], row["high"], ".0%")
        rows.setdefault(row["heads"], {})[row["kind"]] = left
    return pd.DataFrame([{"heads": n, **rows[n]} for n in sorted(rows)])


def _position_figure(study: CircuitStudy) -> Drawing:
    """Control lost without each token of the prefix."""
    frame = study.tables["position"].frame().sort_values("position")
    names = _tokens(study.contrast_set.examples[0])
    figure = new_figure(3.3, 0.8 + 0.26 * len(frame))
    axes = figure.subplots()
    at = np.arange(len(frame))[::-1]
    errors = [frame["effect"] - frame["low"], frame["high"] - frame["effect"]]
    axes.barh(at, frame["effect"], color="#0072B2", height=0.6)
    axes.errorbar(frame["effect"], at, xerr=errors, fmt="none", ecolor="0.3", lw=0.8)
    axes.axvline(0, color="0.6", lw=0.6)
    axes.set_yticks(at, names)
    plain_axes(axes, study.tables["position"].label, "")
    return figure


def _token_table(study: CircuitStudy) -> pd.DataFrame:
    """Control lost when a head cannot see a token: a row for every head, a column for every
    token."""
    names = _tokens(study.contrast_set.examples[0])
    rows: dict[str, dict[str, str]] = {}
    for row in sorted(records(study.edges.frame()), key=lambda row: row["position"]):
        shown = format_interval(row["effect"], row["low"], row["high"])
        rows.setdefault(head_name(row), {})[f"{row['position']}: {names[row['position']]}"] = shown
    order = [f"{layer}.{head}" for layer, head in study.heads.best(EDGES)]
    return pd.DataFrame([{"head": name, **rows[name]} for name in order])


def _word_table(attribution: HeadLogitAttribution) -> pd.DataFrame:
    """Words that the heads of largest direct effect promote and demote."""
    rows = []
    table = attribution.frame()
    large = table["direct"].abs() > 1e-3 * table["direct"].abs().max()
    for row in records(table[large].head(6)):
        best, worst = attribution.words(row["layer"], row["head"], 6)
        direct = format_interval(row["direct"], row["low"], row["high"])
        words = {"promotes": best, "demotes": worst}
        shown = {name: " ".join(map(repr, tokens)) for name, tokens in words.items()}
        rows.append({"head": head_name(row), "direct, logits a step": direct, **shown})
    return pd.DataFrame(rows)
