"""`lapa2 learn`: strengths of heads from a task or a table of pairs, with a card and a page.

1. Pairs. Of a task, the model writes texts behind every prefix, and the task's classifiers say
   which have their attribute, with the words of the prefixes hidden from them: for each prompt one
   of each attribute, the first that all classifiers agree on. Behind each prefix the text of its
   attribute is wanted, and that of the other is not.
2. Fluent texts: what the model writes without a prefix, unless the table has others.
3. `circuits.learning.learn`, whose checkpoint lies in the folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lapa2_interp._util.parsing import parse_object, read_text
from lapa2_interp._util.same_inputs import check_same_inputs
from lapa2_interp._util.settings import fields_of
from lapa2_interp.circuits.examples import RAW, write_texts
from lapa2_interp.circuits.learning import Learned, TextPair, check_can_learn, learn
from lapa2_interp.circuits.settings import LearnSettings
from lapa2_interp.errors import DataError, RunError, parameter, pluralize
from lapa2_interp.files import write_json, write_text
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.card import identify
from lapa2_interp.models.facts import Model
from lapa2_interp.page import Section, page, write_page
from lapa2_interp.report.steer_result import shipped_classifiers
from lapa2_interp.scoring.registry import ScorerOptions, score_texts
from lapa2_interp.scoring.scorer import ScoreCache
from lapa2_interp.stats import FEW
from lapa2_interp.table_formats import as_csv
from lapa2_interp.tasks.prompts import as_prompts
from lapa2_interp.tasks.task import Task

CARD, PAIRS, HISTORY, CHECKPOINT = "card.json", "pairs.csv", "history.csv", "learn.pt"
ORIGIN = "pairs.json"
"""What the pairs were made of, so that a folder goes on with the same ones."""
COLUMNS = ("prefix", "prompt", "wanted", "unwanted", "text")
"""Columns of a table of pairs; *text* is fluent text that continues the prompt."""
TEXTS = 4
"""Texts that the model writes for each prompt and attribute, by default."""
SHOWN_HEADS = 24
"""Heads in the page's table."""


def learn_in_folder(
    model: Model,
    out: str | Path,
    *,
    prompts: str | Path | Sequence[str | Path] | None = None,
    task: str | Task | None = None,
    pairs: str | Path | None = None,
    prefix: str | None = None,
    tokens: int = 32,
    texts: int | None = None,
    classifiers: Sequence[str] = (),
    **options: Any,
) -> Learned:
    """`lapa2 learn` in Python, with a loaded model.

    Args:
        out: A folder for all results, which may have those of a stopped call.
        prompts: Prompts for which the model writes pairs, 50 or so.
        task: The task whose prefixes and classifiers make these pairs; by default sentiment.
        pairs: In place of prompts, a table of pairs (`read_pairs`).
        prefix: The prefix of a table that has no column of it.
        tokens: Tokens of a written text.
        texts: Texts for each prompt and attribute, 4 by default.
        classifiers: Those that choose pairs (`accuracy=` of `lapa2 score`). By default linear and
            adapter, for tasks that have them.
        options: Of `circuits.learn`.

    Returns:
        The strengths; the folder has their card, the pairs, and a page, report.html.

    Raises:
        RunError: Neither prompts nor pairs, or both; an option of the other of the two; or a
            folder of other pairs.
        DataError: A table lacks a column, or too few prompts have a text of each attribute.
        CircuitError: As `circuits.learn`.
    """
    _check_options(prompts, task, pairs, prefix, texts, classifiers)
    check_can_learn(model)
    folder = Path(out)
    if pairs is not None:
        given_pairs = read_pairs(pairs, prefix)
        prefixes = {text: text for text in given_pairs["prefix"]}
        origin: dict[str, Any] = {"pairs": given_pairs.to_dict("list")}
    else:
        chosen = load_task(task or "sentiment") if not isinstance(task, Task) else task
        prefixes = {name: chosen.prefix(name) for name in chosen.attributes}
        texts = TEXTS if texts is None else texts
        classifiers = tuple(classifiers) or shipped_classifiers(chosen)
        assert prompts is not None
        asked = as_prompts(prompts).texts
        origin = {"task": chosen.name, "prefixes": prefixes, "prompts": asked, "texts": texts}
        origin["classifiers"] = list(classifiers)
    origin |= {"weights": identify(model).weights, "tokens": tokens}
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / ORIGIN).exists():
        check_same_inputs(parse_object(read_text(folder / ORIGIN)), origin, folder)
    if (folder / PAIRS).exists() and (folder / ORIGIN).exists():
        table = read_pairs(folder / PAIRS)
    else:
        write_json(folder / ORIGIN, origin)
        if pairs is None:
            given_pairs = written_pairs(model, chosen, asked, tokens, texts or 0, classifiers)
        table = with_fluent_texts(model, given_pairs, tokens)
        write_text(folder / PAIRS, as_csv(table[[*COLUMNS]]))
    learned = learn(
        model,
        [TextPair(*row) for row in table[[*COLUMNS[:4]]].itertuples(index=False)],
        texts=dict(zip(table["prompt"], table["text"], strict=True)),
        **{"file": folder / CHECKPOINT, **options},
    )
    write_text(folder / HISTORY, as_csv(learned.history))
    write_page(folder / "report.html", lambda: _render(learned, table, options))
    learned.selection(prefixes).save(folder / CARD)
    return learned


def _check_options(
    prompts: Any,
    task: Any,
    pairs: Any,
    prefix: str | None,
    texts: int | None,
    classifiers: Sequence[str],
) -> None:
    """Refuse options that do not go together."""
    if (prompts is None) == (pairs is None):
        raise RunError(
            f"learn takes prompts or pairs, and one of the two; give {parameter('prompts')}, for"
            f" which the model writes pairs, or {parameter('pairs')}, a table of them"
        )
    of_task = {"task": task, "texts": texts, "classifiers": classifiers or None}
    of_others = {"prefix": prefix} if pairs is None else of_task
    if unused := [name for name, value in of_others.items() if value is not None]:
        what = "pairs that the model writes" if pairs is None else "a table of pairs"
        raise RunError(f"{parameter(unused[0])} says nothing of {what}; leave it out")


def read_pairs(file: str | Path, prefix: str | None = None) -> pd.DataFrame:
    """A table of pairs: prompt, wanted, unwanted, and where it has them prefix and text.

    Args:
        prefix: That of all rows, where the table has no column of it.

    Raises:
        DataError: It cannot be read, lacks a column, or has two prefixes to choose from.
    """
    try:
        table = pd.read_csv(file, keep_default_na=False, dtype=str)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file}: {error}") from error
    if prefix is not None and "prefix" in table:
        raise DataError(f"{file} has a column prefix; leave out {parameter('prefix')}")
    if prefix is not None:
        table["prefix"] = prefix
    if missing := [name for name in COLUMNS[:4] if name not in table]:
        raise DataError(
            f"{file} has no column {missing[0]}; a table of pairs has the columns"
            f" {', '.join(COLUMNS[:4])}, and may have text. One prefix for all is"
            f" {parameter('prefix')}"
        )
    table = table[[name for name in COLUMNS if name in table]]
    if table.empty:
        raise DataError(f"{file} has no rows; give a pair for each of at least {FEW} prompts")
    for name in table:
        if (empty := table[name].str.strip() == "").any():
            raise DataError(
                f"{file} has no {name} in row {1 + int(empty.to_numpy().argmax())} below the names"
                " of its columns; fill it, or leave the row out"
            )
    if "text" in table and (table.groupby("prompt")["text"].nunique() > 1).any():
        prompt = table.groupby("prompt")["text"].nunique().idxmax()
        raise DataError(f"{file} has several texts of the prompt {prompt!r}; give it one")
    return table


def written_pairs(
    model: Model,
    task: Task,
    prompts: Sequence[str],
    tokens: int,
    samples: int,
    classifiers: Sequence[str],
) -> pd.DataFrame:
    """Pairs that the model writes and classifiers choose. Words of the prefixes are hidden from
    them, so that no text is wanted because it repeats its prefix.

    Raises:
        DataError: Too few prompts have a text of each attribute.
    """
    rows = [
        {"prompt": prompt, "attribute": name, "continuation": model.tokenizer.decode(ids)}
        for name in task.attributes
        for prompt, texts in write_texts(
            model, task, name, prompts, tokens=tokens, samples=samples
        ).items()
        for ids in texts
    ]
    written = pd.DataFrame(rows)
    written["text"] = written["prompt"] + written["continuation"]
    asked = [f"masked={name}" for name in classifiers]
    options = ScorerOptions(task=task, device=str(model.cfg.device))
    with closing(ScoreCache(None)) as cache:
        scores = score_texts(written, asked, options, cache)
    values = scores["value"].astype(float).to_numpy().reshape(len(asked), len(written))
    right = written.iloc[np.flatnonzero((values > 0.5).all(axis=0))].drop_duplicates(
        ["prompt", "attribute"]
    )
    chosen = right.pivot(index="prompt", columns="attribute", values="continuation")
    chosen = chosen.reindex(columns=[*task.attributes]).dropna()
    if len(chosen) < FEW:
        raise DataError(
            f"the classifiers find a text of each attribute for {pluralize(len(chosen), 'prompt')}"
            f" of {len(prompts)}; give more prompts or texts, or a table of pairs"
        )
    pairs = [
        (task.prefix(wanted), prompt, row[wanted], row[unwanted])
        for prompt, row in chosen.iterrows()
        for wanted, unwanted in permutations(task.attributes, 2)
    ]
    return pd.DataFrame(pairs, columns=[*COLUMNS[:4]])


def with_fluent_texts(model: Model, pairs: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """The table with a column *text*: its own, or what the model writes without a prefix."""
    if "text" in pairs:
        return pairs
    prompts = list(dict.fromkeys(pairs["prompt"]))
    # Any task will do, because such texts stand behind none of its prefixes.
    written = write_texts(model, load_task("sentiment"), RAW, prompts, tokens=tokens)
    texts = {prompt: model.tokenizer.decode(ids) for prompt, (ids,) in written.items()}
    return pairs.assign(text=pairs["prompt"].map(texts))


def _render(learned: Learned, pairs: pd.DataFrame, options: Mapping[str, Any]) -> str:
    best, heads = learned.best_parts, learned.frame()
    up = int((heads["strength"] > 0).sum())
    findings = [
        f"Behind their prefix, wanted texts of held-out prompts became {best['change']:.2f} nats a"
        " text more probable against the unwanted ones. Behind a neutral prefix the predictions"
        f" moved by {best['kl']:.4f} nats a token (KL), and fluent text became"
        f" {best['rise']:.4f} nats a token less probable.",
        f"{pluralize(up, 'head')} got a strength above 0, and {len(heads) - up} one below.",
    ]
    shown = heads.head(SHOWN_HEADS)
    shown = shown.assign(strength=shown["strength"].map("{:.3f}".format))
    sections = [
        Section(
            "Strengths and cost",
            "Left: the strength of every head. Right: what control costs, step by step; the ring is"
            " the step that is kept.",
            learned.plot(),
            None,
        ),
        Section("Heads", "Those with the largest strengths.", None, shown),
        Section(
            "Pairs",
            "The first of them.",
            None,
            pairs.head(6),
        ),
    ]
    facts = {
        "model": f"{learned.model} ({learned.weights})",
        "bias": learned.rule.label,
        "pairs": f"{learned.pairs} to learn from, {learned.held_out} held out",
        "step": f"{learned.best} of {learned.history['step'].max()}",
        "settings": ", ".join(
            f"{name} {options.get(name, field.default)}"
            for name, field in fields_of(LearnSettings).items()
            if name not in ("file", "steps")
        ),
    }
    return page(f"Strengths of heads in {Path(learned.model).name}", findings, sections, facts)
