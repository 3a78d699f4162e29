"""The whole study of a model and a task, from the control score to the words a head writes, as one
folder and one page.

Every step writes what it found into the folder, and the same call goes on where it stopped:

    question.json      the texts
    control.csv        the control score of every text and step
    layer.jsonl, kv.jsonl, head.jsonl, position.jsonl, ...      knock-outs, a unit a line
    *.csv              their tables; columns that begin with lex_ are of that metric, others of js
    together.csv       heads knocked out together
    gradient.csv       the gradient's order of heads
    writes.nc          what heads write, and writes.csv its table
    heads.json         the heads that carry control, [[layer, head], ...]
    circuit.json       nodes and edges
    patterns.json      attention of the best heads on one text, as CircuitsVis takes it
    report.html        the page
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.ticker import MaxNLocator
from pydantic import TypeAdapter
from torch import Tensor

from lapa2_interp._util.errors import CircuitError, pluralize
from lapa2_interp._util.files import (
    as_csv,
    atomic_write,
    is_damage,
    read_text,
    with_checksums,
    without_checksums,
    write_netcdf,
    write_text,
)
from lapa2_interp._util.page import Section, page
from lapa2_interp._util.plots import Drawing, new_figure, plain_axes
from lapa2_interp._util.progress import format_duration
from lapa2_interp._util.version import __version__
from lapa2_interp.attention.cache import soft_inputs
from lapa2_interp.bias.augmentation import Phase
from lapa2_interp.bias.tokens import token_texts
from lapa2_interp.circuits.cases import RAW, ContrastExample, prefix_texts
from lapa2_interp.circuits.direct import HeadLogitAttribution, head_logit_attribution, whole
from lapa2_interp.circuits.edits import Heads
from lapa2_interp.circuits.gradients import Attribution, Recall, attribution, recall
from lapa2_interp.circuits.knockout import (
    JointCurve,
    KnockOut,
    Unit,
    joint_curve,
    knock_out,
    lost,
    prefix_mass,
    units_of,
    write_heads,
)
from lapa2_interp.circuits.question import ContrastSet
from lapa2_interp.circuits.score import Control, control
from lapa2_interp.circuits.statistics import spearman
from lapa2_interp.models.card import Model, model_card, plain_network
from lapa2_interp.models.liveness import HOOK_PATTERN
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.stats import FEW
from lapa2_interp.tasks.task import Task

BEST = 24
"""Heads that the other replacements and phases are tried on; as many random ones beside them."""
SIZES = (1, 2, 4, 8, 16, 32)
TABLES = ("layer", "kv", "head", "position")
EDGES = 8
"""The best heads, whose view of each token of the prefix is hidden by itself."""
SAFE = 32
"""Fewer prompts find the strong heads only."""
AGAIN = 14
"""What the other replacements and phases take, in knock-outs of as many heads."""


@dataclass(frozen=True)
class CircuitStudy:
    """What was found.

    Attributes:
        control: The control score, on the texts that are asked about and on those written behind
            each prefix.
        tables: Knock-outs by what is knocked out: layer, kv, head, position.
        others: Knock-outs of the best and of random heads, by replacement or phase.
        edges: The best heads' view of each token of the prefix.
        curve: Heads knocked out together.
        mass: Attention on the prefix by head.
        writes: What heads write; None on a model without hooks.
        gradient: The gradient's order of heads, with what it is worth; None without hooks, or in
            half precision.
        facts: How it was made.
    """

    question: ContrastSet
    control: dict[str, Control]
    tables: dict[str, KnockOut]
    others: dict[str, KnockOut]
    edges: KnockOut
    curve: JointCurve | None
    mass: np.ndarray
    writes: HeadLogitAttribution | None
    gradient: tuple[Attribution, Recall] | None
    facts: dict[str, str]

    @property
    def heads(self) -> KnockOut:
        return self.tables["head"]

    def answer(self) -> str:
        """Which heads, how sure, what share they explain, and what was not tested, in words."""
        return _answer(self)

    def agreement(self) -> pd.DataFrame:
        """Spearman correlation of every other ranking with the exact effects of the same heads."""
        return _agreement(self)


@accepts_model_name
def study(
    model: Model,
    task: str | Task,
    folder: str | Path,
    *,
    attribute: str | None = None,
    prompts: tuple[str, ...] | None = None,
    tokens: int = 32,
    samples: int = 1,
    seed: int = 1,
    best: int = BEST,
    notify: Callable[[str], None] = print,
) -> CircuitStudy:
    """Ask everything, and write the folder and its page.

    Args:
        model: From `load_model`.
        task, attribute, prompts, tokens, samples, seed: As `make_examples`.
        folder: A new one, or one that the same call has begun.
        best: How many of the best heads are tested again with the other replacements and phases;
            as many random heads are added. At least 1.
        notify: Told what begins.

    Raises:
        CircuitError: The folder holds another study; or as `control`.
    """
    if best < 1:
        raise CircuitError(f"best must be at least 1; found {best}")
    place = Path(folder)
    settings: dict[str, Any] = {
        "model": model_card(model).model_dump(mode="json"),
        "task": task if isinstance(task, str) else task.name,
        "attribute": attribute,
        "prompts": prompts,
        "tokens": tokens,
        "samples": samples,
        "seed": seed,
    }
    question = _question(model, task, place, settings)
    asked: dict[str, Any] = {"attribute": attribute, "prompts": prompts, "tokens": tokens}
    asked |= {"samples": samples, "seed": seed}
    notify(
        f"{pluralize(len(question.cases), 'text')} of {pluralize(question.n_prompts, 'prompt')},"
        f" {' against '.join(question.cases[0].names)}"
    )
    started = time.perf_counter()
    scores = {RAW: control(model, question)}
    seconds = time.perf_counter() - started
    for source in question.cases[0].names[:2]:
        behind = ContrastSet.of(model, task, **asked, source=source)
        scores[source] = control(model, behind)
    table = pd.concat([each.frame() for each in scores.values()])
    write_text(place / "control.csv", as_csv(table))
    also = ("lex",) if question.words else ()
    kinds = {over: len(units_of(model, question, over)) for over in TABLES}
    # A control score reads one row more than a knock-out, and every metric.
    readings = sum(kinds.values()) + AGAIN * min(2 * best, kinds["head"]) + 6 * len(SIZES)
    readings += EDGES * kinds["position"]
    notify(
        f"about {format_duration(seconds * readings * 2 / 3)} in all; finished knock-outs are not"
        " repeated"
    )
    tables = {}
    for over in TABLES:
        notify(f"knocking out each {'KV head' if over == 'kv' else over}")
        tables[over] = knock_out(
            model, question, over=over, metric="js", also=also, file=place / f"{over}.jsonl"
        )
        _write_table(tables[over], place / f"{over}.csv")
    heads = tables["head"]
    mass = prefix_mass(model, question)
    chosen = _some_heads(heads, best)
    others = {}
    again: tuple[tuple[str, Phase], ...] = (
        ("zero", "all_queries"),
        ("resample", "all_queries"),
        ("mean", "all_queries"),
        ("cut", "last_query"),
        ("cut", "query"),
    )
    for how, phase in again:
        name = how if phase == "all_queries" else f"{how}, {phase}"
        notify(f"{pluralize(len(chosen), 'head')} again: {name}")
        others[name] = knock_out(
            model,
            question,
            units=chosen,
            how=how,
            phase=phase,
            metric="js",
            also=also,
            file=place / f"{how}-{phase}.jsonl",
        )
        _write_table(others[name], place / f"{how}-{phase}.csv")
    notify(f"the best {pluralize(EDGES, 'head')} and each token of the prefix")
    edges = knock_out(
        model,
        question,
        units=_views(heads, len(tables["position"].units)),
        metric="js",
        also=also,
        file=place / "edge.jsonl",
    )
    _write_table(edges, place / "edge.csv")
    curve = None
    if question.n_prompts >= 2:
        notify("knocking out heads together")
        curve = joint_curve(model, heads, sizes=SIZES, mass=mass, file=place / "together.jsonl")
        write_text(place / "together.csv", as_csv(curve.frame()))
    gradient = None
    if plain_network(model) is None and model.cfg.dtype in (torch.float32, torch.float64):
        notify("the gradient's order of heads, beside the exact one")
        slopes = attribution(model, question, metric="js")
        write_text(place / "gradient.csv", as_csv(slopes.frame()))
        gradient = slopes, recall(slopes, heads, n=max(1, min(best, len(heads.units) // 2)))
    written = None
    if question.words and plain_network(model) is None:
        notify("reading what heads write")
        written = head_logit_attribution(model, question)
        with atomic_write(place / "writes.nc") as file:
            write_netcdf(file, written.dataset())
        write_text(place / "writes.csv", as_csv(written.frame()))
    prefixes = prefix_texts(model.tokenizer, question.cases[0])
    facts = {
        "model": f"{settings['model']['name']} ({settings['model']['dtype']})",
        "weights": str(settings["model"]["weights"]),
        "task": str(settings["task"]),
        "prefixes": "; ".join(f"{name} {text!r}" for name, text in prefixes.items()),
        "texts": (
            f"{len(question.cases)} of {tokens} tokens, written by the model without a prefix, seed"
            f" {seed}"
        ),
        "metric": (
            "js, the distance between predictions, ranks heads; shares are of lex, the preference"
            " for the attribute's words; both are means over steps, in nats"
            if also
            else "js, the distance between predictions, mean over steps, in nats"
        ),
        "intervals": "95 %, over prompts; p corrected for the number of units (max T)",
        "noise": f"effects of heads below {heads.noise:.2g} nats are rounding",
        "package": f"lapa2_interp {__version__}",
    }
    found = CircuitStudy(
        question, scores, tables, others, edges, curve, mass, written, gradient, facts
    )
    if question.n_prompts >= FEW:
        carriers = heads.carriers()
        write_heads(carriers[["layer", "head"]].to_numpy().tolist(), place / "heads.json")
    if not (place / QUESTION).is_file():
        raise CircuitError(
            f"{place} is gone: it was moved or removed; bring it back and repeat the command, which"
            " goes on from what is there"
        )
    write_text(place / "circuit.json", json.dumps(export(found), indent=1) + "\n")
    if plain_network(model) is None:
        shown = patterns(model, question.cases[0], heads.best(8))
        write_text(place / "patterns.json", json.dumps(shown))
    write_text(place / "report.html", write_page(found))
    return found


def _question(model: Model, task: str | Task, place: Path, settings: dict[str, Any]) -> ContrastSet:
    """The texts: written once, and read from the folder afterwards."""
    file = place / QUESTION
    plain = json.loads(json.dumps(settings))
    asked = {name: settings[name] for name in ("attribute", "prompts", "tokens", "samples", "seed")}
    if file.is_file():
        kept = read_question(place)
        if kept["settings"] != plain:
            other = next(name for name in plain if kept["settings"].get(name) != plain[name])
            before, now = kept["settings"].get(other), plain[other]
            if isinstance(before, dict) and isinstance(now, dict):  # of the model: what differs
                field = next(name for name in now if before.get(name) != now[name])
                other, before, now = f"{other} {field}", before.get(field), now[field]
            raise CircuitError(
                f"{place} holds a study made with {other}={before!r}, and {now!r} was asked for;"
                " give another folder"
            )
        texts: dict[str, list[list[int]]] = {}
        for prompt, text in kept["texts"]:
            texts.setdefault(prompt, []).append(text)
        question = ContrastSet.of(
            model, task, attribute=settings["attribute"], prompts=tuple(texts), texts=texts
        )
        now = question.facts(model)
        if others := [name for name in now if kept.get("facts", now).get(name) != now[name]]:
            raise CircuitError(
                f"{place} holds a study made with other {' and '.join(others)}: the file of the"
                " task has changed; give another folder"
            )
        return question
    question = ContrastSet.of(model, task, **asked)
    texts_now = [[case.prompt, list(case.text)] for case in question.cases]
    facts = question.facts(model)
    write_text(file, with_checksums({"settings": plain, "texts": texts_now, "facts": facts}))
    return question


QUESTION = "question.json"
_TEXTS = TypeAdapter(list[tuple[str, list[int]]])
"""Prompts and the tokens behind them."""


def read_question(folder: Path) -> dict[str, Any]:
    """The settings and texts of a study, as its folder keeps them.

    Raises:
        CircuitError: They are not there, or not what was written.
    """
    file = folder / QUESTION
    try:
        kept, _ = without_checksums(read_text(file))
        kept["texts"] = _TEXTS.validate_python(kept.get("texts"))
        if not isinstance(kept.get("settings"), dict):
            raise ValueError("it has no settings")
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not is_damage(error):
            raise
        why = " ".join(str(error).split())[:120]
        raise CircuitError(
            f"{file} is missing or damaged ({why}); `lapa2 circuits` with another folder makes the"
            " study again"
        ) from error
    return kept


def _some_heads(heads: KnockOut, best: int) -> list[Unit]:
    """The units of the best heads and of as many others at random."""
    order = np.argsort(-heads.question.by_prompt(heads.effects).mean(0), kind="stable")
    first, rest = order[:best], order[best:]
    rng = np.random.default_rng(0)
    drawn = rng.choice(rest, min(best, len(rest)), replace=False)
    return [heads.units[i] for i in sorted({*first.tolist(), *drawn.tolist()})]


def _views(heads: KnockOut, n_positions: int) -> list[Unit]:
    """The best heads' view of each token of the prefix, a unit each."""
    return [
        Unit({"layer": layer, "head": head, "position": slot}, ((layer, head),), (slot,))
        for layer, head in heads.best(EDGES)
        for slot in range(n_positions)
    ]


def _write_table(table: KnockOut, file: Path) -> None:
    """A table with its effects in lex beside those in js, as CSV."""
    names = list(table.units[0].where)
    frame = table.frame()
    if "lex" in table.others:
        kept = ["effect", "low", "high", "share", "share_low", "share_high"]
        lex = table.with_metric("lex").frame()[[*names, *kept]]
        frame = frame.merge(lex.rename(columns={name: f"lex_{name}" for name in kept}), on=names)
    write_text(file, as_csv(frame))


def export(found: CircuitStudy) -> dict[str, Any]:
    """Nodes and edges of the circuit, with the tokens of one prompt: plain JSON.

    Nodes are the prefix, its tokens, the heads, and the logits. Heads are those that carry control
    or work against it (family-wise p < .05); with fewer than 8 prompts the best 8, and `claims` is
    false. An edge from the prefix to a head is what is lost when the head cannot see it, in nats a
    step; from a token, the same for this token alone, of the best heads; from a head to the logits,
    what it writes there directly, in logits a step.
    """
    case, table = found.question.cases[0], found.heads.frame()
    own, claims = case.layouts[0], found.question.n_prompts >= FEW
    kept = table[(table["p_max"] < 0.05) & ~table["below_noise"]] if claims else table.head(EDGES)
    direct = {}
    if found.writes is not None:
        rows = _records(found.writes.frame())
        direct = {(row["layer"], row["head"]): row["direct"] for row in rows}
    names = [*own.tokens[own.n_bos : own.n_bos + own.l_pre]]
    if own.soft:
        names = [f"soft {i + 1}" for i in range(own.soft)]
    nodes: list[dict[str, Any]] = [{"id": "prefix", "kind": "prefix"}]
    nodes += [{"id": f"prefix.{i}", "kind": "token", "token": name} for i, name in enumerate(names)]
    edges: list[dict[str, Any]] = []
    for row in _records(kept):
        layer, head = row["layer"], row["head"]
        node, interval = f"{layer}.{head}", [row["low"], row["high"]]
        role = "carries" if row["effect"] > 0 else "works against"
        nodes.append({"id": node, "kind": "head", "layer": layer, "head": head, "role": role})
        edge = {"from": "prefix", "to": node, "lost": row["effect"], "interval": interval}
        edges.append(edge | ({"p_max": row["p_max"]} if claims else {}))
        if (layer, head) in direct:
            edges.append({"from": node, "to": "logits", "direct": direct[layer, head]})
    shown = {node["id"] for node in nodes}
    for row in _records(found.edges.frame()):
        if (node := _name(row)) in shown:
            interval = [row["low"], row["high"]]
            edge = {"from": f"prefix.{row['position']}", "to": node, "lost": row["effect"]}
            edges.append(edge | {"interval": interval})
    nodes.append({"id": "logits", "kind": "logits"})
    return {
        "prompt": case.prompt,
        "tokens": list(own.tokens),
        "prefix": list(own.prefix),
        "metric": found.heads.metric,
        "units": {"lost": "nats a step", "direct": "logits a step"},
        "claims": claims,
        "nodes": nodes,
        "edges": edges,
    }


def patterns(model: Model, case: ContrastExample, heads: Heads) -> dict[str, Any]:
    """Attention patterns of some heads on the target's branch of a case, for CircuitsVis.

        found = patterns(model, case, heads)
        circuitsvis.attention.attention_patterns(found["tokens"], np.array(found["attention"]))

    Returns:
        tokens, the heads' names, and attention [head query key] with four digits.
    """
    layouts, prefixes = whole(case)
    inputs = soft_inputs(model, layouts[:1], prefixes[:1])
    kept: dict[int, np.ndarray] = {}

    def keep(pattern: Tensor, hook: Any) -> None:
        kept[int(hook.name.split(".")[1])] = pattern[0].float().cpu().numpy()

    names = [HOOK_PATTERN.format(layer) for layer in sorted({layer for layer, _ in heads})]
    with torch.no_grad(), model.hooks(fwd_hooks=[(name, keep) for name in names]):
        model(**inputs)
    soft = [f"soft {i + 1}" for i in range(layouts[0].soft)]
    tokens = [*soft, *token_texts(model.tokenizer, "", layouts[0].ids)]
    attention = [np.round(kept[layer][head], 4).tolist() for layer, head in heads]
    names = [f"{layer}.{head}" for layer, head in heads]
    return {"tokens": tokens, "heads": names, "attention": attention}


def _agreement(found: CircuitStudy) -> pd.DataFrame:
    exact = {unit.heads[0]: i for i, unit in enumerate(found.heads.units)}
    effects = found.question.by_prompt(found.heads.effects).mean(0)
    rows = []
    for name, table in found.others.items():
        places = [exact[unit.heads[0]] for unit in table.units]
        other = table.question.by_prompt(table.effects).mean(0)
        rows.append((name, len(places), spearman(effects[places], other)))
    rows.append(("attention on the prefix", effects.size, spearman(effects, found.mass.ravel())))
    if found.gradient is not None:
        worth = found.gradient[1]
        rows.append(("gradient (cut_hat)", worth.heads, worth.cut_hat))
    if found.writes is not None:
        rows_of = {
            (row["layer"], row["head"]): row["direct"] for row in _records(found.writes.frame())
        }
        direct = np.array([rows_of[unit.heads[0]] for unit in found.heads.units])
        rows.append(("direct effect", effects.size, spearman(effects, direct)))
    return pd.DataFrame(rows, columns=["ranking", "heads", "spearman"])


def _answer(found: CircuitStudy) -> str:
    heads, n = found.heads, found.question.n_prompts
    names = " and ".join(repr(each) for each in found.question.cases[0].names)
    table = heads.frame()
    score = _records(found.control[RAW].interval("js", None))[0]
    parts = [
        f"On {pluralize(n, 'prompt')}, the predictions behind the prefixes of {names} are"
        f" {_with_interval(score['mean'], score['low'], score['high'])} nats a step apart (js)."
    ]
    if np.abs(heads.whole).max() <= heads.noise:
        return (
            f"{parts[0]} That is no more than rounding: in these texts the model does not tell the"
            " prefixes apart, so there is no control that a head could carry."
        )
    if n < FEW:
        largest = table[(table["effect"] > 0) & ~table["below_noise"]].head(5)
        best = ", ".join(_name(row) for row in _records(largest))
        parts.append(
            f"The losses are largest without heads {best}." if best else "No head carries control."
        )
        parts.append(f"With fewer than {FEW} prompts these are numbers, and no claim is made.")
    else:
        carriers = heads.carriers()
        named = ", ".join(_name(row) for row in _records(carriers.head(8)))
        if len(carriers):
            more = f", the largest first: {named}" + (", ..." if len(carriers) > 8 else "")
            parts.append(
                f"{pluralize(len(carriers), 'head')} of {len(table)}"
                f" {'carries' if len(carriers) == 1 else 'carry'} control"
                f" (family-wise p < .05){more}."
            )
        else:
            parts.append(f"No head of {len(table)} carries control for sure (family-wise p < .05).")
        places = _readers_of_place(found)
        if places:
            one = len(places) == 1
            parts.append(
                f"{'Head' if one else 'Heads'} {', '.join(places)} of these"
                f" {'reads' if one else 'read'} where the prefix is and not what it says: with the"
                " opposite prefix's keys and values instead (resample) almost nothing is lost."
            )
        against = table[(table["p_max"] < 0.05) & (table["effect"] < 0) & ~table["below_noise"]]
        if len(against):
            named = ", ".join(_name(row) for row in _records(against[::-1].head(5)))
            more = f": {named}" + (", ..." if len(against) > 5 else "")
            verb = "works" if len(against) == 1 else "work"
            parts.append(f"{pluralize(len(against), 'head')} {verb} against it{more}.")
        parts.append(
            f"Halves of the prompts agree on the order of heads with rank correlation"
            f" {heads.split_half:.2f}."
        )
        if n < SAFE:
            parts.append(
                f"With fewer than {SAFE} prompts weak heads are missed, and the effects of the"
                " heads named here are somewhat too large, because the same prompts chose them."
            )
    if found.curve is not None:
        left = {(row["kind"], row["heads"]): row for row in _records(found.curve.frame())}
        sizes = [size for size in SIZES if ("without", size) in left]
        if sizes:
            size = 8 if 8 in sizes else sizes[-1]
            what = "preference for the attribute's words" if found.curve.metric == "lex" else "js"
            part = {kind: left[kind, size] for kind in ("without", "only")}
            shares = {
                kind: _with_interval(row["left"], row["low"], row["high"], ".0%")
                for kind, row in part.items()
            }
            turned = " (below 0: it turns round)" if part["without"]["left"] < 0 else ""
            parts.append(
                f"Without the best {pluralize(size, 'head')} (chosen in one half of the prompts,"
                f" judged in the other) {shares['without']} of the {what} is left{turned}; with"
                f" these alone {shares['only']}."
            )
    agreed = {row["ranking"]: row["spearman"] for row in _records(found.agreement())}
    mass = agreed["attention on the prefix"]
    parts.append(
        f"A ranking of heads by their attention on the prefix has rank correlation {mass:.2f} with"
        " this one."
    )
    untested = ["what MLPs do with it", "paths from head to head", "other prefixes and prompts"]
    if found.writes is None:
        untested.append("what heads write")
    if found.gradient is None:
        untested.append("the gradient's order")
    longest = max(case.n for case in found.question.cases)
    parts.append(f"Not tested: {', '.join(untested)}, and texts longer than {longest} tokens.")
    return " ".join(parts)


def write_page(found: CircuitStudy) -> str:
    """The page of a study."""
    heads = found.heads
    n_again = len(next(iter(found.others.values())).units)
    sections = [
        Section(
            "How strong the control is, step by step",
            "On texts that the model wrote without a prefix. js is the distance between the"
            " branches' predictions; lex says how much more each favours its own words. The table"
            " compares texts that were written behind a prefix: they already say what it wants.",
            found.control[RAW].plot(),
            _score_table(found.control),
        ),
        Section(
            "Layers and KV heads",
            "How much js is lost when heads cannot see the prefix, at any query after it. The"
            " figure shows whole layers, the table the KV heads with the largest loss.",
            _layers(found.tables["layer"]),
            _table_of(found.tables["kv"], 8),
        ),
        Section(
            "Heads",
            "How much is lost when one head cannot see the prefix. Red heads carry control, blue"
            " ones work against it."
            + (" Shares are of lex, because shares of lex add up." if _has_lex(heads) else "")
            + " p is corrected for the number of heads.",
            heads.plot(),
            _table_of(heads, 16),
        ),
        Section(
            "The same heads, knocked out in other ways",
            "Lost js of the best heads: their keys hidden (cut), their values set to zero, or keys"
            " and values taken from the opposite prefix (resample) or the mean of all. cut,"
            " last_query hides the prefix from the last token of the prompt and the text alone;"
            " cut, query from the predicting query alone. Intervals are in the CSV files.",
            None,
            _ways(found),
        ),
        Section(
            "Attention is not control",
            "Each head's attention on the prefix, and how much is lost without it. The table"
            " compares other rankings with this one. The first rows are about"
            f" {pluralize(n_again, 'head')}, of which half were chosen because their effect is"
            " large: this makes their correlation larger."
            + (f" Gradient, {found.gradient[1]}." if found.gradient is not None else ""),
            _against_mass(found),
            _rounded(found.agreement()),
        ),
        Section(
            "Tokens of the prefix",
            "How much js is lost when no head can see one of its tokens (figure), and when one of"
            " the best heads cannot (table).",
            _positions(found),
            _token_table(found),
        ),
    ]
    if found.curve is not None:
        metric = found.curve.metric
        sections.append(
            Section(
                "Heads together",
                f"The share of {metric} that is left without the best heads, with these alone,"
                " without random ones, and without those that attend most. Heads are chosen in one"
                " half of the prompts and judged in the other."
                + (" Below 0 the preference for the words turns round." if metric == "lex" else ""),
                found.curve.plot(),
                _together(found.curve),
            )
        )
    if found.writes is not None:
        sections.append(
            Section(
                "What they write",
                "Direct effects: what a head's reading of the prefix adds to the words of its"
                " attribute. A head that writes for other heads has none.",
                found.writes.plot(),
                _words(found.writes),
            )
        )
    name = found.facts["model"].split(" ")[0]
    title = f"Which heads of {name} carry {found.facts['task']} control?"
    return page(title, found.answer(), sections, found.facts)


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def _name(row: dict[str, Any]) -> str:
    """A head as layer.head."""
    return f"{row['layer']}.{row['head']}"


def _rounded(table: pd.DataFrame) -> pd.DataFrame:
    """Numbers as texts of three digits."""

    def shown(value: Any) -> Any:
        if isinstance(value, float | np.floating):
            return "" if np.isnan(value) else f"{value:.3g}"
        return str(value)

    return table.map(shown)


def _with_interval(mean: float, low: float, high: float, form: str = ".3g") -> str:
    """A number and, if it is known, its interval."""
    shown = f"{mean:{form}}"
    return shown if np.isnan(low) else f"{shown} [{low:{form}}, {high:{form}}]"


def _has_lex(table: KnockOut) -> bool:
    return "lex" in table.others


def _table_of(table: KnockOut, n: int) -> pd.DataFrame:
    """What a reader needs of the n largest effects of a table, as texts."""
    names = list(table.units[0].where)
    frame = table.frame().head(n)
    columns = {f"lost {table.metric}": _intervals(frame, "effect", "low", "high")}
    shares = frame
    if _has_lex(table):
        shares = table.with_metric("lex").frame()
        shares = frame[names].merge(shares, on=names, how="left")
    of = "lex" if _has_lex(table) else table.metric
    columns[f"share of {of}"] = _intervals(shares, "share", "share_low", "share_high", ".1%")
    if table.n_prompts >= FEW:
        columns["p"] = [f"{p:.2g}" for p in frame["p_max"]]
    columns["rank"] = _intervals(frame, "rank", "rank_low", "rank_high", ".0f")
    shown = frame[names].astype(str).assign(**columns)
    if frame["below_noise"].any():
        shown["noise"] = ["below" if below else "" for below in frame["below_noise"]]
    return shown


def _intervals(frame: pd.DataFrame, mean: str, low: str, high: str, form: str = ".3g") -> list[str]:
    rows = frame[[mean, low, high]].to_numpy(float).tolist()
    return [_with_interval(a, b, c, form) for a, b, c in rows]


def _readers_of_place(found: CircuitStudy) -> list[str]:
    """Heads among the first 8 carriers that lose at most a tenth of their effect when they read the
    opposite prefix instead: what they write does not depend on the attribute."""
    swapped = {_name(row): row for row in _records(found.others["resample"].frame())}
    return [
        _name(row)
        for row in _records(found.heads.carriers().head(8))
        if _name(row) in swapped and swapped[_name(row)]["high"] < row["effect"] / 10
    ]


def _ways(found: CircuitStudy) -> pd.DataFrame:
    """The best heads under every replacement and phase."""
    rows = []
    by_head = {
        name: {_name(row): row for row in _records(table.frame())}
        for name, table in {"cut": found.heads, **found.others}.items()
    }
    for layer, head in found.heads.best(EDGES):
        own = f"{layer}.{head}"
        shown = {
            name: rows_of[own]["effect"] for name, rows_of in by_head.items() if own in rows_of
        }
        rows.append({"head": own, **shown})
    return _rounded(pd.DataFrame(rows))


def _score_table(scores: dict[str, Control]) -> pd.DataFrame:
    rows = []
    for source, each in scores.items():
        row: dict[str, Any] = {"texts written behind": source}
        for metric in each.values:
            found = _records(each.interval(metric, None))[0]
            row[metric] = _with_interval(found["mean"], found["low"], found["high"])
        rows.append(row)
    return pd.DataFrame(rows)


def _tokens(case: ContrastExample) -> list[str]:
    """The prefix's tokens at each position: one for each attribute where they differ."""
    own = case.layouts[0]
    if own.soft:
        return [f"soft {i + 1}" for i in range(own.soft)]
    by_branch = [each.tokens[each.n_bos : each.n_bos + each.l_pre] for each in case.layouts]
    return [" / ".join(dict.fromkeys(map(repr, at))) for at in zip(*by_branch, strict=True)]


def _together(curve: JointCurve) -> pd.DataFrame:
    """What is left: a row for every number of heads, a column for every kind."""
    rows: dict[int, dict[str, str]] = {}
    for row in _records(curve.frame()):
        left = _with_interval(row["left"], row["low"], row["high"], ".0%")
        rows.setdefault(row["heads"], {})[row["kind"]] = left
    return pd.DataFrame([{"heads": n, **rows[n]} for n in sorted(rows)])


def _positions(found: CircuitStudy) -> Drawing:
    frame = found.tables["position"].frame().sort_values("position")
    names = _tokens(found.question.cases[0])
    figure = new_figure(5.4, 0.8 + 0.26 * len(frame))
    axes = figure.subplots()
    at = np.arange(len(frame))[::-1]
    errors = [frame["effect"] - frame["low"], frame["high"] - frame["effect"]]
    axes.barh(at, frame["effect"], color="#0072B2", height=0.6)
    axes.errorbar(frame["effect"], at, xerr=errors, fmt="none", ecolor="0.3", lw=0.8)
    axes.axvline(0, color="0.6", lw=0.6)
    axes.set_yticks(at, names)
    plain_axes(axes, lost(found.tables["position"].metric), "")
    return figure


def _token_table(found: CircuitStudy) -> pd.DataFrame:
    """What is lost when a head cannot see a token: a row for every head, a column for every
    token."""
    names = _tokens(found.question.cases[0])
    rows: dict[str, dict[str, str]] = {}
    for row in sorted(_records(found.edges.frame()), key=lambda row: row["position"]):
        shown = _with_interval(row["effect"], row["low"], row["high"])
        rows.setdefault(_name(row), {})[f"{row['position']}: {names[row['position']]}"] = shown
    order = [f"{layer}.{head}" for layer, head in found.heads.best(EDGES)]
    return pd.DataFrame([{"head": name, **rows[name]} for name in order])


def _words(found: HeadLogitAttribution) -> pd.DataFrame:
    rows = []
    table = found.frame()
    large = table["direct"].abs() > 1e-3 * table["direct"].abs().max()
    for row in _records(table[large].head(6)):
        best, worst = found.words(row["layer"], row["head"], 6)
        direct = _with_interval(row["direct"], row["low"], row["high"])
        words = {"promotes": best, "demotes": worst}
        shown = {name: " ".join(map(repr, each)) for name, each in words.items()}
        rows.append({"head": _name(row), "direct, logits a step": direct, **shown})
    return pd.DataFrame(rows)


def _layers(table: KnockOut) -> Drawing:
    frame = table.frame().sort_values("layer")
    figure = new_figure(6.0, 2.4)
    axes = figure.subplots()
    errors = [frame["effect"] - frame["low"], frame["high"] - frame["effect"]]
    axes.bar(frame["layer"], frame["effect"], color="#0072B2")
    axes.errorbar(frame["layer"], frame["effect"], yerr=errors, fmt="none", ecolor="0.3", lw=0.8)
    axes.axhline(0, color="0.6", lw=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plain_axes(axes, "layer", lost(table.metric))
    return figure


def _against_mass(found: CircuitStudy) -> Drawing:
    table = found.heads.frame()
    rows = _records(table)
    mass = [float(found.mass[row["layer"], row["head"]]) for row in rows]
    figure = new_figure(4.6, 3.2)
    axes = figure.subplots()
    axes.axhline(0, color="0.7", lw=0.6)
    axes.scatter(mass, table["effect"], s=9, color="#0072B2", lw=0)
    told = [i for i, row in enumerate(rows) if not row["below_noise"]]
    for i in dict.fromkeys((*told[:6], *told[-2:])):
        axes.annotate(_name(rows[i]), (mass[i], rows[i]["effect"]), fontsize=7, xytext=(3, 2),
                      textcoords="offset points")  # fmt: skip
    plain_axes(axes, "attention on the prefix", lost(found.heads.metric))
    return figure


__all__ = ["BEST", "CircuitStudy", "export", "study", "write_page"]
