"""Results of a study, their summary in words, and the circuit as nodes and edges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.control import ControlScore
from lapa2_interp.circuits.examples import RAW
from lapa2_interp.circuits.gradients import Attribution, PrefilterRecall
from lapa2_interp.circuits.knockout import JointCurve, KnockOut
from lapa2_interp.circuits.logit_attribution import HeadLogitAttribution
from lapa2_interp.circuits.placebo import Placebo
from lapa2_interp.circuits.statistics import spearman
from lapa2_interp.errors import pluralize
from lapa2_interp.stats import FEW
from lapa2_interp.table_formats import format_interval, format_number, records

SIZES = (1, 2, 4, 8, 16, 32)
"""Numbers of heads that are knocked out together."""
EDGES = 8
"""Number of the best heads for which each token of the prefix is hidden by itself."""
SAFE = 32
"""With fewer prompts only strong heads are found."""


@dataclass(frozen=True)
class CircuitStudy:
    """Results of a study.

    Attributes:
        contrast_set: The texts, written without a prefix.
        settings: What decides the study, as its folder stores it: the model's card (name, weights,
            dtype, ...), task, attribute, prompts, tokens, samples, seed.
        prefixes: By attribute, the prefix.
        control: Control scores by source: of these texts, and of texts that each prefix steered.
        tables: Knock-outs by kind of unit: layer, kv, head, position.
        variants: Knock-outs of the best and of random heads, by replacement or phase.
        edges: Knock-outs of the best heads' view of each token of the prefix.
        curve: Knock-outs of heads together; None with one prompt.
        prefix_attention: Attention on the prefix by head.
        logit_attribution: Direct effects of heads; None without hooks or words.
        gradient: The gradient's estimates, and their agreement with exact effects; None without
            hooks, or in half precision.
        placebo: Maps of the untrained model and with shuffled labels; None where none was asked
            for.
    """

    contrast_set: ContrastSet
    settings: Mapping[str, Any]
    prefixes: Mapping[str, str]
    control: dict[str, ControlScore]
    tables: dict[str, KnockOut]
    variants: dict[str, KnockOut]
    edges: KnockOut
    curve: JointCurve | None
    prefix_attention: np.ndarray
    logit_attribution: HeadLogitAttribution | None
    gradient: tuple[Attribution, PrefilterRecall] | None
    placebo: Placebo | None = None

    @property
    def heads(self) -> KnockOut:
        """The knock-outs of single heads."""
        return self.tables["head"]

    def agreement(self) -> pd.DataFrame:
        """Spearman correlation of every other ranking with the exact effects of the same heads."""
        numbers = {unit.heads[0]: i for i, unit in enumerate(self.heads.units)}
        effects = self.heads.means
        rows = []
        for name, table in self.variants.items():
            exact = effects[[numbers[unit.heads[0]] for unit in table.units]]
            rows.append((name, len(exact), spearman(exact, table.means)))
        ranking = self.prefix_attention.ravel()
        rows.append(("attention on the prefix", effects.size, spearman(effects, ranking)))
        if self.gradient is not None:
            recall = self.gradient[1]
            rows.append(("gradient (cut_hat)", recall.heads, recall.cut_hat))
        if self.logit_attribution is not None:
            direct = self.logit_attribution.table().means
            rows.append(("direct effect", effects.size, spearman(effects, direct)))
        return pd.DataFrame(rows, columns=["ranking", "heads", "spearman"])

    def findings(self) -> tuple[list[str], list[str]]:
        """The answer in sentences: how strong the control is, the heads, and heads together; and
        further tests and limits."""
        n = self.contrast_set.n_prompts
        names = " and ".join(repr(name) for name in self.contrast_set.attributes)
        score = records(self.control[RAW].interval("js", None))[0]
        control = (
            f"On {pluralize(n, 'prompt')}, the predictions behind the prefixes of {names} are"
            f" {format_interval(score['mean'], score['low'], score['high'])} nats a step apart"
            " (js)."
        )
        if np.abs(self.heads.total).max() <= self.heads.noise:
            nothing = (
                f"{control} That is no more than rounding: in these texts the model does not tell"
                " the prefixes apart, so there is no control that a head could carry."
            )
            return [nothing], []
        first, *others = _untested_heads(self) if n < FEW else _tested_heads(self)
        return [control, first, *_joint_heads(self)], [*others, *_placebo(self), *_limits(self)]

    def summary(self) -> str:
        """`findings` as one text."""
        findings, others = self.findings()
        return " ".join([*findings, *others])


def _untested_heads(study: CircuitStudy) -> list[str]:
    """Sentences about the heads of largest effect, where prompts are too few for tests."""
    table = study.heads.frame()
    largest = table[(table["effect"] > 0) & ~table["below_noise"]].head(5)
    best = ", ".join(head_name(row) for row in records(largest))
    return [
        f"The losses are largest without heads {best}." if best else "No head carries control.",
        f"With fewer than {FEW} prompts these are numbers, and no claim is made.",
    ]


def _tested_heads(study: CircuitStudy) -> list[str]:
    """Sentences about the heads that carry control or work against it, by family-wise tests."""
    heads, table, parts = study.heads, study.heads.frame(), []
    carriers = heads.carriers()
    named = ", ".join(head_name(row) for row in records(carriers.head(8)))
    if len(carriers):
        more = f", the largest first: {named}" + (", ..." if len(carriers) > 8 else "")
        parts.append(
            f"{pluralize(len(carriers), 'head')} of {len(table)}"
            f" {'carries' if len(carriers) == 1 else 'carry'} control"
            f" (family-wise p < .05){more}."
        )
    else:
        parts.append(f"No head of {len(table)} carries control for sure (family-wise p < .05).")
    readers = _position_readers(study)
    if readers:
        one = len(readers) == 1
        parts.append(
            f"{'Head' if one else 'Heads'} {', '.join(readers)} of these"
            f" {'reads' if one else 'read'} where the prefix is and not what it says: with the"
            " opposite prefix's keys and values instead (resample) almost nothing is lost."
        )
    against = table[(table["p_max"] < 0.05) & (table["effect"] < 0) & ~table["below_noise"]]
    if len(against):
        named = ", ".join(head_name(row) for row in records(against[::-1].head(5)))
        more = f": {named}" + (", ..." if len(against) > 5 else "")
        verb = "works" if len(against) == 1 else "work"
        parts.append(f"{pluralize(len(against), 'head')} {verb} against it{more}.")
    parts.append(
        f"Halves of the prompts agree on the order of heads with rank correlation"
        f" {format_number(heads.split_half, '.2f')}."
    )
    if study.contrast_set.n_prompts < SAFE:
        parts.append(
            f"With fewer than {SAFE} prompts weak heads are missed, and the effects of the"
            " heads named here are somewhat too large, because the same prompts chose them."
        )
    return parts


def _joint_heads(study: CircuitStudy) -> list[str]:
    """A sentence about control without the best heads, and with these alone."""
    if study.curve is None:
        return []
    left = {(row["kind"], row["heads"]): row for row in records(study.curve.frame())}
    sizes = [size for size in SIZES if ("without", size) in left]
    if not sizes:
        return []
    size = 8 if 8 in sizes else sizes[-1]
    measure = "preference for the attribute's words" if study.curve.metric == "lex" else "js"
    part = {kind: left[kind, size] for kind in ("without", "only")}
    shares = {
        kind: format_interval(row["left"], row["low"], row["high"], ".0%")
        for kind, row in part.items()
    }
    turned = " (below 0: the preference is reversed)" if part["without"]["left"] < 0 else ""
    return [
        f"Without the best {pluralize(size, 'head')} (chosen in one half of the prompts,"
        f" judged in the other) {shares['without']} of the {measure} is left{turned}; with"
        f" these alone {shares['only']}."
    ]


def _placebo(study: CircuitStudy) -> list[str]:
    """A sentence about the same map of nothing."""
    if study.placebo is None:
        return []
    by_map = {(row["kind"], row["map"]): row for row in records(study.placebo.frame())}

    def sentence(kind: str, name: str, beginning: str) -> str:
        row, trained = by_map[kind, name], by_map["trained", name]
        passing = "" if np.isnan(row["named"]) else f", and {row['named']:.0f} pass the same test"
        return (
            f"{beginning} {row['largest']:.2g} nats ({name.rpartition(', ')[2]}; trained"
            f" {trained['largest']:.2g}){passing}."
        )

    parts = [
        sentence("untrained", "head, js", "In the untrained model the largest effect of a head is")
    ]
    if "head, lex" in study.placebo.shuffled:
        parts.append(sentence("labels shuffled", "head, lex", "With shuffled labels it is"))
    return [" ".join(parts)]


def _limits(study: CircuitStudy) -> list[str]:
    """Sentences about rankings by attention, and about what was not tested."""
    correlations = {row["ranking"]: row["spearman"] for row in records(study.agreement())}
    attention = correlations["attention on the prefix"]
    ranking = (
        "A ranking of heads by their attention on the prefix has rank correlation"
        f" {format_number(attention, '.2f')} with this one."
    )
    untested = ["what MLPs do with it", "paths from head to head", "other prefixes and prompts"]
    if study.logit_attribution is None:
        untested.append("what heads write")
    if study.gradient is None:
        untested.append("the gradient's order")
    longest = max(example.n_steps for example in study.contrast_set.examples)
    untested_line = f"Not tested: {', '.join(untested)}, and texts longer than {longest} tokens."
    return [ranking, untested_line]


def head_name(row: dict[str, Any]) -> str:
    """A head as layer.head."""
    return f"{row['layer']}.{row['head']}"


def _position_readers(study: CircuitStudy) -> list[str]:
    """Heads among the first 8 carriers that lose at most a tenth of their effect when they read the
    opposite prefix instead: their output does not depend on the attribute."""
    resampled = {head_name(row): row for row in records(study.variants["resample"].frame())}
    return [
        head_name(row)
        for row in records(study.heads.carriers().head(8))
        if head_name(row) in resampled and resampled[head_name(row)]["high"] < row["effect"] / 10
    ]


def make_circuit_graph(study: CircuitStudy) -> dict[str, Any]:
    """Make nodes and edges of the circuit, with the tokens of one prompt: plain JSON.

    Nodes are the prefix, its tokens, heads, and the logits. Heads are those that carry control or
    work against it (family-wise p < .05); with fewer than 8 prompts the best 8, and `claims` is
    false. An edge from the prefix to a head is the control lost when the head cannot see it, in
    nats a step; from a token to one of the best heads, the control lost when the head cannot see
    this token; from a head to the logits, its direct effect, in logits a step.
    """
    example, table = study.contrast_set.examples[0], study.heads.frame()
    layout, claims = example.layouts[0], study.contrast_set.n_prompts >= FEW
    shown = table[(table["p_max"] < 0.05) & ~table["below_noise"]] if claims else table.head(EDGES)
    direct = {}
    if study.logit_attribution is not None:
        rows = records(study.logit_attribution.frame())
        direct = {(row["layer"], row["head"]): row["direct"] for row in rows}
    names = [*layout.tokens[slice(*layout.prefix)]]
    if layout.soft:
        names = [f"soft {i + 1}" for i in range(layout.soft)]
    # Nodes, and edges from the prefix to heads and from heads to the logits.
    nodes: list[dict[str, Any]] = [{"id": "prefix", "kind": "prefix"}]
    nodes += [{"id": f"prefix.{i}", "kind": "token", "token": name} for i, name in enumerate(names)]
    edges: list[dict[str, Any]] = []
    for row in records(shown):
        layer, head = row["layer"], row["head"]
        node, interval = f"{layer}.{head}", [row["low"], row["high"]]
        role = "carries" if row["effect"] > 0 else "works against"
        nodes.append({"id": node, "kind": "head", "layer": layer, "head": head, "role": role})
        edge = {"from": "prefix", "to": node, "lost": row["effect"], "interval": interval}
        edges.append(edge | ({"p_max": row["p_max"]} if claims else {}))
        if (layer, head) in direct:
            edges.append({"from": node, "to": "logits", "direct": direct[layer, head]})
    # Edges from tokens to heads.
    ids = {node["id"] for node in nodes}
    for row in records(study.edges.frame()):
        if (node := head_name(row)) in ids:
            interval = [row["low"], row["high"]]
            edge = {"from": f"prefix.{row['position']}", "to": node, "lost": row["effect"]}
            edges.append(edge | {"interval": interval})
    nodes.append({"id": "logits", "kind": "logits"})
    return {
        "prompt": example.prompt,
        "tokens": list(layout.tokens),
        "prefix": list(layout.prefix),
        "metric": study.heads.metric,
        "units": {"lost": "nats a step", "direct": "logits a step"},
        "claims": claims,
        "nodes": nodes,
        "edges": edges,
    }
