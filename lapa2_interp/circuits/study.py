"""The whole study of a model and a task, from the control score to the words a head writes, as one
folder and one page.

Every step writes what it found into the folder, and the same call goes on where it stopped:

    question.json      the texts
    control.csv        the control score of every text and step
    layer.jsonl, kv.jsonl, head.jsonl, position.jsonl, ...      knock-outs, a unit a line
    *.csv              their tables
    writes.nc          what heads write
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
from torch import Tensor

from lapa2_interp import __version__
from lapa2_interp.attention.cache import soft_inputs
from lapa2_interp.attention.hooked import PATTERN
from lapa2_interp.augmentation import Phase
from lapa2_interp.circuits.attribution import Attribution, Recall, attribution, recall
from lapa2_interp.circuits.cases import Case
from lapa2_interp.circuits.control import Control, control
from lapa2_interp.circuits.edits import Heads
from lapa2_interp.circuits.knockout import (
    JointCurve,
    KnockOut,
    Unit,
    joint_curve,
    knock_out,
    prefix_mass,
    units_of,
    write_heads,
)
from lapa2_interp.circuits.question import FEW, RAW, Question
from lapa2_interp.circuits.writes import Writes, whole, writes
from lapa2_interp.errors import CircuitError, counted
from lapa2_interp.files import whole_file
from lapa2_interp.loaded import Model, model_card, plain_network
from lapa2_interp.page import Section, page
from lapa2_interp.plots import Drawing, new_figure, plain_axes
from lapa2_interp.progress import shown_time
from lapa2_interp.tasks import Task

BEST = 24
"""Heads that the other replacements and phases are tried on; as many random ones beside them."""
SIZES = (1, 2, 4, 8, 16, 32)
TABLES = ("layer", "kv", "head", "position")
AGAIN = 14
"""What the other replacements and phases take, in knock-outs of as many heads."""


@dataclass(frozen=True)
class Study:
    """What was found.

    Attributes:
        control: The control score, on the texts that are asked about and on those written behind
            each prefix.
        tables: Knock-outs by what is knocked out: layer, kv, head, position.
        others: Knock-outs of the best and of random heads, by replacement or phase.
        curve: Heads knocked out together.
        mass: Attention on the prefix by head.
        writes: What heads write; None on a model without hooks.
        gradient: The gradient's order of heads, with what it is worth; None without hooks, or in
            half precision.
        facts: How it was made.
    """

    question: Question
    control: dict[str, Control]
    tables: dict[str, KnockOut]
    others: dict[str, KnockOut]
    curve: JointCurve | None
    mass: np.ndarray
    writes: Writes | None
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
) -> Study:
    """Ask everything, and write the folder and its page.

    Args:
        model: From `load_model`.
        task, attribute, prompts, tokens, samples, seed: As `make_cases`.
        folder: A new one, or one that the same call has begun.
        best: Heads that the other replacements and phases are tried on.
        notify: Told what begins.

    Raises:
        CircuitError: The folder holds another study; or as `control`.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
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
        f"{counted(len(question.cases), 'text')} of {counted(question.n_prompts, 'prompt')},"
        f" {' against '.join(question.cases[0].names)}"
    )
    started = time.perf_counter()
    scores = {RAW: control(model, question)}
    seconds = time.perf_counter() - started
    for source in question.cases[0].names[:2]:
        behind = Question.of(model, task, **asked, source=source)
        scores[source] = control(model, behind)
    pd.concat([each.frame() for each in scores.values()]).to_csv(place / "control.csv", index=False)
    also = ("lex",) if question.words else ()
    kinds = {over: len(units_of(model, question, over)) for over in TABLES}
    # A control score reads one row more than a knock-out, and every metric.
    readings = sum(kinds.values()) + AGAIN * min(2 * best, kinds["head"]) + 6 * len(SIZES)
    notify(f"about {shown_time(seconds * readings * 2 / 3)} in all, less what is finished")
    tables = {}
    for over in TABLES:
        notify(f"knocking out each {'KV head' if over == 'kv' else over}")
        tables[over] = knock_out(
            model, question, over=over, metric="js", also=also, file=place / f"{over}.jsonl"
        )
        tables[over].frame().to_csv(place / f"{over}.csv", index=False)
    heads = tables["head"]
    mass = prefix_mass(model, question)
    chosen = _some_heads(model, heads, best)
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
        notify(f"{counted(len(chosen), 'head')} again: {name}")
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
    curve = None
    if question.n_prompts >= 2:
        notify("knocking out heads together")
        curve = joint_curve(
            model, heads, sizes=SIZES, metric="lex" if question.words else "js", mass=mass
        )
        curve.frame().to_csv(place / "together.csv", index=False)
    gradient = None
    if plain_network(model) is None and model.cfg.dtype in (torch.float32, torch.float64):
        notify("the gradient's order of heads, beside the exact one")
        slopes = attribution(model, question, metric="js")
        slopes.frame().to_csv(place / "gradient.csv", index=False)
        gradient = slopes, recall(slopes, heads, n=min(best, len(heads.units) // 2))
    written = None
    if question.words and plain_network(model) is None:
        notify("reading what heads write")
        written = writes(model, question)
        with whole_file(place / "writes.nc") as file:
            written.dataset().to_netcdf(file)
        written.frame().to_csv(place / "writes.csv", index=False)
    facts = {
        "model": f"{settings['model']['name']} ({settings['model']['dtype']})",
        "weights": str(settings["model"]["weights"]),
        "task": str(settings["task"]),
        "prefixes": "; ".join(_prefixes(question.cases[0])),
        "texts": (
            f"{len(question.cases)} of {tokens} tokens, written by the model without a prefix, seed"
            f" {seed}"
        ),
        "metric": "js ranks heads and lex gives shares; both are means over steps, in nats",
        "intervals": "95 %, over prompts; p corrected for the number of units (max T)",
        "package": f"lapa2_interp {__version__}",
    }
    found = Study(question, scores, tables, others, curve, mass, written, gradient, facts)
    if question.n_prompts >= FEW:
        carriers = heads.carriers()
        write_heads(carriers[["layer", "head"]].to_numpy().tolist(), place / "heads.json")
    with whole_file(place / "circuit.json") as file:
        file.write_text(json.dumps(export(found), indent=1) + "\n", "utf-8")
    if plain_network(model) is None:
        with whole_file(place / "patterns.json") as file:
            file.write_text(json.dumps(patterns(model, question.cases[0], heads.best(8))), "utf-8")
    with whole_file(place / "report.html") as file:
        file.write_text(write_page(found), "utf-8")
    return found


def _question(model: Model, task: str | Task, place: Path, settings: dict[str, Any]) -> Question:
    """The texts: written once, and read from the folder afterwards."""
    file = place / "question.json"
    plain = json.loads(json.dumps(settings))
    asked = {name: settings[name] for name in ("attribute", "prompts", "tokens", "samples", "seed")}
    if file.is_file():
        kept = json.loads(file.read_text("utf-8"))
        if kept["settings"] != plain:
            other = next(name for name in plain if kept["settings"].get(name) != plain[name])
            raise CircuitError(f"{place} holds a study with another {other}; give another folder")
        texts: dict[str, list[list[int]]] = {}
        for prompt, text in kept["texts"]:
            texts.setdefault(prompt, []).append(text)
        return Question.of(
            model, task, attribute=settings["attribute"], prompts=tuple(texts), texts=texts
        )
    question = Question.of(model, task, **asked)
    texts_now = [[case.prompt, list(case.text)] for case in question.cases]
    with whole_file(file) as new:
        new.write_text(json.dumps({"settings": plain, "texts": texts_now}) + "\n", "utf-8")
    return question


def _some_heads(model: Model, heads: KnockOut, best: int) -> list[Unit]:
    """The units of the best heads and of as many others at random."""
    order = np.argsort(-heads.question.by_prompt(heads.effects).mean(0), kind="stable")
    first, rest = order[:best], order[best:]
    rng = np.random.default_rng(0)
    drawn = rng.choice(rest, min(best, len(rest)), replace=False)
    return [heads.units[i] for i in sorted({*first.tolist(), *drawn.tolist()})]


def _prefixes(case: Case) -> list[str]:
    return [
        f"{name} {''.join(each.tokens[each.n_bos : each.n_bos + each.l_pre]).replace('Ġ', ' ')!r}"
        for name, each in zip(case.names, case.layouts, strict=True)
    ]


def export(found: Study) -> dict[str, Any]:
    """Nodes and edges of the circuit, with the tokens of one prompt: plain JSON.

    Nodes are the prefix's tokens, heads that carry control, and the logits. An edge from a token to
    a head is what is lost where the head does not see the prefix; from a head to the logits, what
    it writes there directly.
    """
    case = found.question.cases[0]
    own = case.layouts[0]
    table = found.heads.frame()
    kept = table[(table["low"] > 0) & ~table["below_noise"]].head(40)
    direct = {}
    if found.writes is not None:
        rows = _records(found.writes.frame())
        direct = {(row["layer"], row["head"]): row["direct"] for row in rows}
    nodes: list[dict[str, Any]] = [
        {"id": f"prefix.{i}", "kind": "token", "token": own.tokens[own.n_bos + i]}
        for i in range(own.l_pre if not own.soft else 0)
    ]
    edges: list[dict[str, Any]] = []
    for row in _records(kept):
        layer, head = row["layer"], row["head"]
        node = f"{layer}.{head}"
        nodes.append({"id": node, "kind": "head", "layer": layer, "head": head})
        interval = [row["low"], row["high"]]
        edges.append({"from": "prefix", "to": node, "lost": row["effect"], "interval": interval})
        if (layer, head) in direct:
            edges.append({"from": node, "to": "logits", "direct": direct[layer, head]})
    nodes.append({"id": "logits", "kind": "logits"})
    return {
        "prompt": case.prompt,
        "tokens": list(own.tokens),
        "prefix": list(own.prefix),
        "metric": found.heads.metric,
        "nodes": nodes,
        "edges": edges,
    }


def patterns(model: Model, case: Case, heads: Heads) -> dict[str, Any]:
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

    names = [PATTERN.format(layer) for layer in sorted({layer for layer, _ in heads})]
    with torch.no_grad(), model.hooks(fwd_hooks=[(name, keep) for name in names]):
        model(**inputs)
    soft = [f"soft {i + 1}" for i in range(layouts[0].soft)]
    tokens = [*soft, *model.tokenizer.convert_ids_to_tokens(list(layouts[0].ids))]
    attention = [np.round(kept[layer][head], 4).tolist() for layer, head in heads]
    names = [f"{layer}.{head}" for layer, head in heads]
    return {"tokens": tokens, "heads": names, "attention": attention}


def _agreement(found: Study) -> pd.DataFrame:
    from scipy.stats import spearmanr

    exact = {unit.heads[0]: i for i, unit in enumerate(found.heads.units)}
    effects = found.question.by_prompt(found.heads.effects).mean(0)
    rows = []
    for name, table in found.others.items():
        places = [exact[unit.heads[0]] for unit in table.units]
        other = table.question.by_prompt(table.effects).mean(0)
        rows.append((name, len(places), float(spearmanr(effects[places], other)[0])))
    rows.append(
        ("attention on the prefix", effects.size, float(spearmanr(effects, found.mass.ravel())[0]))
    )
    if found.gradient is not None:
        worth = found.gradient[1]
        rows.append(("gradient (cut_hat)", worth.heads, worth.cut_hat))
    if found.writes is not None:
        rows_of = {
            (row["layer"], row["head"]): row["direct"] for row in _records(found.writes.frame())
        }
        direct = [rows_of[unit.heads[0]] for unit in found.heads.units]
        rows.append(("direct effect", effects.size, float(spearmanr(effects, direct)[0])))
    return pd.DataFrame(rows, columns=["ranking", "heads", "spearman"])


def _answer(found: Study) -> str:
    heads, n = found.heads, found.question.n_prompts
    names = " and ".join(repr(each) for each in found.question.cases[0].names)
    table = heads.frame()
    score = _records(found.control[RAW].interval("js", None))[0]
    parts = [
        f"On {counted(n, 'prompt')}, the prefixes of {names} differ by {score['mean']:.3g} nats a"
        f" step (js, [{score['low']:.3g}, {score['high']:.3g}])."
    ]
    if n < FEW:
        best = ", ".join(_name(row) for row in _records(table.head(5)))
        parts.append(
            f"The largest losses are without heads {best}. With fewer than {FEW} prompts these are"
            " numbers, and no claim is made."
        )
    else:
        carriers = heads.carriers()
        named = ", ".join(_name(row) for row in _records(carriers.head(8)))
        if len(carriers):
            more = f", the largest first: {named}" + (", ..." if len(carriers) > 8 else "")
            parts.append(
                f"{counted(len(carriers), 'head')} of {len(table)} carry control"
                f" (family-wise p < .05){more}."
            )
        else:
            parts.append(f"No head of {len(table)} carries control for sure (family-wise p < .05).")
        parts.append(
            f"Halves of the prompts agree on the order of heads with rank correlation"
            f" {heads.split_half:.2f}."
        )
    if found.curve is not None:
        left = {(row["kind"], row["heads"]): row for row in _records(found.curve.frame())}
        sizes = [size for size in SIZES if ("without", size) in left]
        if sizes:
            size = 8 if 8 in sizes else sizes[-1]
            without, only = left["without", size], left["only", size]
            parts.append(
                f"Without the best {size} (chosen in one half of the prompts, judged in the other)"
                f" {without['left']:.0%} of the control is left"
                f" [{without['low']:.0%}, {without['high']:.0%}]; with these alone"
                f" {only['left']:.0%} [{only['low']:.0%}, {only['high']:.0%}]."
            )
    agreed = {row["ranking"]: row["spearman"] for row in _records(found.agreement())}
    mass = agreed["attention on the prefix"]
    parts.append(f"Attention on the prefix ranks heads with correlation {mass:.2f}.")
    parts.append(
        "Not tested: what MLPs do with it, paths from head to head, other prefixes and texts longer"
        f" than {max(case.n for case in found.question.cases)} tokens."
    )
    return " ".join(parts)


def write_page(found: Study) -> str:
    """The page of a study."""
    heads = found.heads
    sections = [
        Section(
            "How strong the control is, step by step",
            "On texts that the model wrote without a prefix. js is the distance between the"
            " branches' predictions; lex says how much more each favours its own words. Texts"
            " written behind a prefix (table) already say what it wants.",
            found.control[RAW].plot(),
            _score_table(found.control),
        ),
        Section(
            "Layers and KV heads",
            "Control lost where no head of a layer sees the prefix, at any query after it.",
            _layers(found.tables["layer"]),
            _rounded(_head_table(found.tables["kv"]).head(8)),
        ),
        Section(
            "Heads",
            "Control lost where one head does not see the prefix. Red heads carry it, blue ones"
            " work against it. Shares are of lex, where shares add up; p is corrected for the"
            " number of heads.",
            heads.plot(),
            _rounded(_head_table(heads).head(16)),
        ),
        Section(
            "Attention is not control",
            "Each head's attention on the prefix, and what is lost without it. The table compares"
            " other rankings with the exact one."
            + (f" Gradient, {found.gradient[1]}." if found.gradient is not None else ""),
            _against_mass(found),
            _rounded(found.agreement()),
        ),
        Section(
            "Tokens of the prefix",
            "Control lost where no head sees one of its tokens.",
            found.tables["position"].plot(),
            _rounded(_with_tokens(found)),
        ),
    ]
    if found.curve is not None:
        sections.append(
            Section(
                "Heads together",
                "The share of control that is left without the best heads, with them alone, without"
                " random ones, and without those that attend most. Heads are chosen in one half of"
                " the prompts and judged in the other.",
                found.curve.plot(),
                _rounded(found.curve.frame()),
            )
        )
    if found.writes is not None:
        sections.append(
            Section(
                "What they write",
                "Direct effects: what a head's reading of the prefix adds to the words of its"
                " attribute. A head that writes for other heads has none.",
                found.writes.plot(),
                _rounded(_words(found.writes)),
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


def _head_table(table: KnockOut) -> pd.DataFrame:
    """What a reader needs of a table of knock-outs."""
    frame = table.frame()
    names = list(table.units[0].where)
    if "lex" in table.others:
        lex = table.with_metric("lex").frame().set_index(names)
        for name in ("share", "share_low", "share_high"):
            frame[name] = [lex.loc[tuple(key), name] for key in frame[names].to_numpy()]
    kept = ["effect", "low", "high", "share", "share_low", "share_high", "p_max"]
    return frame[[*names, *kept, "rank", "rank_low", "rank_high", "below_noise"]]


def _score_table(scores: dict[str, Control]) -> pd.DataFrame:
    rows = []
    for source, each in scores.items():
        row: dict[str, Any] = {"texts written behind": source}
        for metric in each.values:
            whole = _records(each.interval(metric, None))[0]
            row[metric] = f"{whole['mean']:.3g} [{whole['low']:.3g}, {whole['high']:.3g}]"
        rows.append(row)
    return pd.DataFrame(rows)


def _with_tokens(found: Study) -> pd.DataFrame:
    table = found.tables["position"].frame()
    case = found.question.cases[0]
    for name, each in zip(case.names, case.layouts, strict=True):
        if not each.soft:
            tokens = [each.tokens[each.n_bos + i].replace("Ġ", " ") for i in table["position"]]
            table.insert(1, f"token, {name}", [repr(token) for token in tokens])
    return table


def _words(found: Writes) -> pd.DataFrame:
    rows = []
    table = found.frame()
    for row in _records(table[table["size"] > 0].head(6)):
        best, worst = found.words(row["layer"], row["head"], 6)
        head = _name(row)
        numbers = {"direct": row["direct"], "low": row["low"], "high": row["high"]}
        words = {"promotes": best, "demotes": worst}
        shown = {name: " ".join(map(repr, each)) for name, each in words.items()}
        rows.append({"head": head, **numbers, **shown})
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
    plain_axes(axes, "layer", f"lost {table.metric}, nats a step")
    return figure


def _against_mass(found: Study) -> Drawing:
    table = found.heads.frame()
    rows = _records(table)
    mass = [float(found.mass[row["layer"], row["head"]]) for row in rows]
    figure = new_figure(4.6, 3.2)
    axes = figure.subplots()
    axes.axhline(0, color="0.7", lw=0.6)
    axes.scatter(mass, table["effect"], s=9, color="#0072B2", lw=0)
    for i in (*range(min(6, len(rows))), len(rows) - 1):
        axes.annotate(_name(rows[i]), (mass[i], rows[i]["effect"]), fontsize=7, xytext=(3, 2),
                      textcoords="offset points")  # fmt: skip
    plain_axes(axes, "attention on the prefix", f"lost {found.heads.metric}, nats a step")
    return figure


__all__ = ["BEST", "Study", "export", "study", "write_page"]
