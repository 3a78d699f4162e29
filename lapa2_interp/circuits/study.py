"""Study of a model and a task, in one folder.

A study goes from the control score to the words that heads promote. `report.study_page` renders its
results as a page.

Texts and knock-outs are stored in the folder as they finish, and the same call continues from
them; the rest is computed again:

    contrast_set.json  the texts
    control.csv        the control score of every text and step
    layer.jsonl, kv.jsonl, head.jsonl, position.jsonl, ...      knock-outs, a unit a line
    *.csv              their tables; columns that begin with lex_ are of that metric, others of js
    together.csv       heads knocked out together
    gradient.csv       the gradient's order of heads
    writes.csv         direct effects of heads
    heads.json         the heads that carry control, [[layer, head], ...]
    circuit.json       nodes and edges
    placebo.csv        maps of the untrained model and with shuffled labels, beside the others
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import TypeAdapter

from lapa2_interp._util.parsing import parse_object, read_text
from lapa2_interp._util.same_inputs import check_same_inputs
from lapa2_interp._util.settings import helped_by
from lapa2_interp._util.terminal import format_duration
from lapa2_interp._util.values import Count, numbers_checked
from lapa2_interp.bias.augmentation import Phase
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.control import control_score
from lapa2_interp.circuits.examples import RAW, prefix_texts
from lapa2_interp.circuits.gradients import attribution, has_gradients, prefilter_recall
from lapa2_interp.circuits.knockout import KnockOut, joint_curve, knock_out
from lapa2_interp.circuits.logit_attribution import head_logit_attribution
from lapa2_interp.circuits.placebo import check_placebo, maps_of, measure_placebo
from lapa2_interp.circuits.prefix_attention import prefix_attention_by_head
from lapa2_interp.circuits.settings import BEST, StudySettings
from lapa2_interp.circuits.study_results import EDGES, SIZES, CircuitStudy, make_circuit_graph
from lapa2_interp.circuits.units import Unit, make_units
from lapa2_interp.errors import CircuitError, pluralize
from lapa2_interp.files import is_damage, write_json, write_text
from lapa2_interp.models.card import identify
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.stats import FEW
from lapa2_interp.table_formats import as_csv
from lapa2_interp.tasks.prompts import as_prompts
from lapa2_interp.tasks.task import Prompts, Task

TABLES = ("layer", "kv", "head", "position")
VARIANT_COST = 14
"""Time of all other replacements and phases of a head, in knock-outs."""
OTHER_KNOCK_OUTS: tuple[tuple[str, Phase], ...] = (
    ("zero", "after_span"),
    ("resample", "after_span"),
    ("mean", "after_span"),
    ("cut", "last_query"),
    ("cut", "predicting_only"),
)
"""Other replacements and phases of a knock-out."""
TEXT_SETTINGS = ("attribute", "prefixes", "prompts", "tokens", "samples", "seed")


@helped_by(StudySettings)
@numbers_checked
@accepts_model_name
def run_study(
    model: Model,
    task: str | Task,
    folder: str | Path,
    *,
    attribute: str | None = None,
    prefixes: str = "hard",
    prompts: str | Path | Sequence[str | Path] | Prompts | None = None,
    tokens: Count = 32,
    samples: Count = 1,
    seed: int = 1,
    best: Count = BEST,
    placebo: Model | None = None,
    report: Callable[[str], None] = print,
) -> CircuitStudy:
    """Make the whole study, and write its folder.

    Args:
        model: A model or its name.
        task, attribute, prefixes, prompts, tokens, samples, seed: As `ContrastSet.of`.
        folder: A new folder, or one that the same call has begun.
        placebo: The same model untrained, load_model("random:NAME"): every map is made of it, too.
        report: A function that takes a line about each step.

    Raises:
        CircuitError: The folder holds another study; or as `check_placebo` and `control_score`.
    """
    folder = Path(folder)
    # The texts.
    settings: dict[str, Any] = {
        "model": identify(model).model_dump(mode="json"),
        "task": task if isinstance(task, str) else task.name,
        "attribute": attribute,
        "prefixes": prefixes,
        "prompts": None if prompts is None else list(as_prompts(prompts).texts),
        "tokens": tokens,
        "samples": samples,
        "seed": seed,
    }
    contrast_set = _study_texts(model, task, folder, settings)
    if placebo is not None:
        check_placebo(model, placebo, contrast_set)
    text_settings = _text_settings(settings)
    report(
        f"{pluralize(len(contrast_set.examples), 'text')} of"
        f" {pluralize(contrast_set.n_prompts, 'prompt')},"
        f" {' against '.join(contrast_set.attributes)}"
    )
    # Control scores, by the source of the texts.
    started = time.perf_counter()
    scores = {RAW: control_score(model, contrast_set)}
    seconds = time.perf_counter() - started
    for source in contrast_set.attributes[:2]:
        steered = ContrastSet.of(model, task, **text_settings, source=source)
        scores[source] = control_score(model, steered)
    table = pd.concat([score.frame() for score in scores.values()])
    write_text(folder / "control.csv", as_csv(table))
    # An estimate of the time. A control score takes a row more than a knock-out, and all metrics.
    other_metrics = ("lex",) if contrast_set.words else ()
    kinds = {over: len(make_units(model, contrast_set, over)) for over in TABLES}
    passes = sum(kinds.values()) + VARIANT_COST * min(2 * best, kinds["head"]) + 6 * len(SIZES)
    passes += EDGES * kinds["position"]
    passes += sum(kinds.values()) * (placebo is not None)
    report(
        f"about {format_duration(seconds * passes * 2 / 3)} in all; finished knock-outs are not"
        " repeated"
    )

    def knocked_out(name: str, **what: Any) -> KnockOut:
        table = knock_out(
            model,
            contrast_set,
            metric="js",
            other_metrics=other_metrics,
            file=folder / f"{name}.jsonl",
            **what,
        )
        _write_table(table, folder / f"{name}.csv")
        return table

    # Knock-outs of all units.
    tables = {}
    for over in TABLES:
        report(f"knocking out each {'KV head' if over == 'kv' else over}")
        tables[over] = knocked_out(over, over=over)
    heads = tables["head"]
    # Other replacements and phases, on the best and on random heads.
    attention = prefix_attention_by_head(model, contrast_set)
    chosen = _best_and_random_heads(heads, best)
    variants = {}
    for replacement, phase in OTHER_KNOCK_OUTS:
        name = replacement if phase == "after_span" else f"{replacement}, {phase}"
        report(f"{pluralize(len(chosen), 'head')} again: {name}")
        variants[name] = knocked_out(
            f"{replacement}-{phase}", units=chosen, replacement=replacement, phase=phase
        )
    # Single tokens, and heads together.
    report(f"the best {pluralize(EDGES, 'head')} and each token of the prefix")
    edges = knocked_out("edge", units=_head_token_units(heads, len(tables["position"].units)))
    curve = None
    if contrast_set.n_prompts >= 2:
        report("knocking out heads together")
        curve = joint_curve(
            model, heads, sizes=SIZES, prefix_attention=attention, file=folder / "together.jsonl"
        )
        write_text(folder / "together.csv", as_csv(curve.frame()))
    # Gradients and direct effects, where the model has hooks.
    gradient = None
    if has_gradients(model):
        report("the gradient's order of heads, beside the exact one")
        slopes = attribution(model, contrast_set, metric="js")
        write_text(folder / "gradient.csv", as_csv(slopes.frame()))
        gradient = (
            slopes,
            prefilter_recall(slopes, heads, n=max(1, min(best, len(heads.units) // 2))),
        )
    written = None
    if contrast_set.words and facts_of(model).backend != "plain":
        report("reading what heads write")
        written = head_logit_attribution(model, contrast_set)
        write_text(folder / "writes.csv", as_csv(written.frame()))
    # The placebo.
    nothing = None
    if placebo is not None:
        slopes_table = None if gradient is None else gradient[0].table()
        trained = maps_of(tables, slopes_table, None if written is None else written.table())
        nothing = measure_placebo(placebo, trained, contrast_set, TABLES, folder, report)
        write_text(folder / "placebo.csv", as_csv(nothing.frame()))
    # The last files.
    study = CircuitStudy(
        contrast_set=contrast_set,
        settings=settings,
        prefixes=prefix_texts(model.tokenizer, contrast_set.examples[0]),
        control=scores,
        tables=tables,
        variants=variants,
        edges=edges,
        curve=curve,
        prefix_attention=attention,
        logit_attribution=written,
        gradient=gradient,
        placebo=nothing,
    )
    if contrast_set.n_prompts >= FEW:
        carriers = heads.carriers()
        heads_list = carriers[["layer", "head"]].to_numpy().tolist()
        write_text(folder / "heads.json", f"{json.dumps(heads_list)}\n")
    if not (folder / CONTRAST_SET_FILE).is_file():
        raise CircuitError(
            f"{folder} is gone: it was moved or removed; bring it back and repeat the command,"
            " which resumes from what is there"
        )
    write_json(folder / "circuit.json", make_circuit_graph(study))
    return study


def _text_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide the texts; prompts have been read, and are texts."""
    text_settings = {name: settings[name] for name in TEXT_SETTINGS}
    prompts = text_settings["prompts"]
    return text_settings | {"prompts": None if prompts is None else Prompts(texts=tuple(prompts))}


def _study_texts(
    model: Model, task: str | Task, folder: Path, settings: dict[str, Any]
) -> ContrastSet:
    """The texts of a study: from its folder, or else written by the model and saved there."""
    file = folder / CONTRAST_SET_FILE
    if file.is_file():
        stored = load_texts(folder)
        check_same_inputs(stored["settings"], settings, folder, CircuitError)
        texts: dict[str, list[list[int]]] = {}
        for prompt, text in stored["texts"]:
            texts.setdefault(prompt, []).append(text)
        prompts = Prompts(texts=tuple(texts))
        contrast_set = ContrastSet.of(
            model,
            task,
            attribute=settings["attribute"],
            prefixes=settings["prefixes"],
            prompts=prompts,
            texts=texts,
        )
        # The task's file may have changed, and with it the layouts.
        check_same_inputs(stored["facts"], contrast_set.facts(model), folder, CircuitError)
        return contrast_set
    text_settings = _text_settings(settings)
    contrast_set = ContrastSet.of(model, task, **text_settings)
    texts_now = [[example.prompt, list(example.text)] for example in contrast_set.examples]
    facts = contrast_set.facts(model)
    write_json(file, {"settings": settings, "texts": texts_now, "facts": facts})
    return contrast_set


CONTRAST_SET_FILE = "contrast_set.json"
"""The settings and texts of a study."""
_TEXTS = TypeAdapter(list[tuple[str, list[int]]])
"""Prompts, each with the tokens of a text."""


def load_texts(folder: Path) -> dict[str, Any]:
    """Load the settings and texts of a study from its folder.

    Raises:
        CircuitError: The file is missing or damaged.
    """
    file = folder / CONTRAST_SET_FILE
    try:
        stored = parse_object(read_text(file))
        stored["texts"] = _TEXTS.validate_python(stored.get("texts"))
        if not all(isinstance(stored.get(name), dict) for name in ("settings", "facts")):
            raise ValueError("it has no settings or facts")
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not is_damage(error):
            raise
        reason = " ".join(str(error).split())[:120]
        raise CircuitError(
            f"{file} is missing or damaged ({reason}); `lapa2 circuits` with another folder makes"
            " the study again"
        ) from error
    return stored


def _best_and_random_heads(heads: KnockOut, best: int) -> list[Unit]:
    """Units of the best heads, and of as many others at random."""
    order = heads.order()
    first, rest = order[:best], order[best:]
    rng = np.random.default_rng(0)
    drawn = rng.choice(rest, min(best, len(rest)), replace=False)
    return [heads.units[i] for i in sorted({*first.tolist(), *drawn.tolist()})]


def _head_token_units(heads: KnockOut, n_positions: int) -> list[Unit]:
    """Units of the best heads' view of each token of the prefix."""
    return [
        Unit({"layer": layer, "head": head, "position": p}, ((layer, head),), (p,))
        for layer, head in heads.best(EDGES)
        for p in range(n_positions)
    ]


def _write_table(table: KnockOut, file: Path) -> None:
    """Write a table as CSV, with effects in lex beside those in js."""
    names = list(table.units[0].labels)
    frame = table.frame()
    if "lex" in table.metrics:
        columns = ["effect", "low", "high", "share", "share_low", "share_high"]
        lex = table.with_metric("lex").frame()[[*names, *columns]]
        lex = lex.rename(columns={name: f"lex_{name}" for name in columns})
        frame = frame.merge(lex, on=names)
    write_text(file, as_csv(frame))
