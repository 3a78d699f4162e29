"""A circuit as nodes and edges: plain JSON."""

from __future__ import annotations

from typing import Any

from lapa2_interp._util.table_formats import records
from lapa2_interp.circuits.study_results import EDGES, CircuitStudy, head_name
from lapa2_interp.stats import FEW


def make_circuit_graph(found: CircuitStudy) -> dict[str, Any]:
    """Make nodes and edges of the circuit, with the tokens of one prompt: plain JSON.

    Nodes are the prefix, its tokens, heads, and the logits. Heads are those that carry control or
    work against it (family-wise p < .05); with fewer than 8 prompts the best 8, and `claims` is
    false. An edge from the prefix to a head is the control lost when the head cannot see it, in
    nats a step; from a token to one of the best heads, the control lost when the head cannot see
    this token; from a head to the logits, its direct effect, in logits a step.
    """
    example, table = found.contrast_set.examples[0], found.heads.frame()
    layout, claims = example.layouts[0], found.contrast_set.n_prompts >= FEW
    shown = table[(table["p_max"] < 0.05) & ~table["below_noise"]] if claims else table.head(EDGES)
    direct = {}
    if found.logit_attribution is not None:
        rows = records(found.logit_attribution.frame())
        direct = {(row["layer"], row["head"]): row["direct"] for row in rows}
    names = [*layout.tokens[layout.n_bos : layout.n_bos + layout.l_pre]]
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
    for row in records(found.edges.frame()):
        if (node := head_name(row)) in ids:
            interval = [row["low"], row["high"]]
            edge = {"from": f"prefix.{row['position']}", "to": node, "lost": row["effect"]}
            edges.append(edge | {"interval": interval})
    nodes.append({"id": "logits", "kind": "logits"})
    return {
        "prompt": example.prompt,
        "tokens": list(layout.tokens),
        "prefix": list(layout.prefix),
        "metric": found.heads.metric,
        "units": {"lost": "nats a step", "direct": "logits a step"},
        "claims": claims,
        "nodes": nodes,
        "edges": edges,
    }
