"""The page of a run: one HTML file that loads nothing and escapes the texts of models.

Its sections, from a run folder:

1. texts of the arms side by side, every token coloured by the attention of the query that predicted
   it;
2. attention on the prefix against step, of cells in grids that are not this package's;
3. the scores in the run folder (`lapa2 score RUN`), and each arm against the baseline;
4. every cell with its state;
5. models, grids, weights, versions and seeds.

A section without data is left out. A template that extends `run_report.html.j2` can fill the blocks
between them; `page_values` gives what the template needs.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from lapa2_interp.errors import RunError, TraceError, pluralize
from lapa2_interp.page import embedded, template, write_page
from lapa2_interp.report.intervals import format_numbers, interval_svg, mark_cell, shared_scale
from lapa2_interp.report.run_texts import MAX_PROMPTS, each_text, texts_to_show
from lapa2_interp.runs.attention import ALIKE
from lapa2_interp.runs.grid import built_in
from lapa2_interp.runs.manifest import Manifest
from lapa2_interp.runs.run import Run, load_run
from lapa2_interp.runs.score import score_notes
from lapa2_interp.runs.store import STATES
from lapa2_interp.scoring.tables import (
    CELL_COLUMNS,
    EXTRA_CELL_COLUMNS,
    format_scores,
    varying_columns,
)
from lapa2_interp.table_formats import records

PAGE_BYTES = 3_800_000
"""Largest intended page in bytes, which limits the number of prompts with texts."""
TEMPLATES = Path(__file__).parent
"""The folder of `run_report.html.j2`."""
MOST_FIGURES = 24
"""Figures of attention on a page."""
PREPACKING_NAMES = {"all": "every linear layer", "lm_head": "the output layer"}
"""Descriptions of the values of `ModelCard.prepacking`."""


def write_report(run: Run | str | Path, out: str | Path | None = None) -> Path:
    """Write a run's page; returns the file.

    Args:
        run: A run or its folder.
        out: The file; by default RUN/report.html. An existing file is replaced. Pages of `lapa2
            view` beside it (view*.html) are linked.

    Raises:
        RunError: The file cannot be written, or as `page_values`.
        ModelError: As `page_values`.
    """
    run = run if isinstance(run, Run) else load_run(run)
    file = run.require_folder() / "report.html" if out is None else Path(out)
    return write_page(file, lambda: run_report(run, views_beside(file)))


def run_report(run: Run, views: Sequence[str] = ()) -> str:
    """The page of a run as one string; `page_values` says of what, and what it raises."""
    return template("run_report.html.j2", TEMPLATES).render(page_values(run, views))


def views_beside(file: Path) -> list[str]:
    """The names of the pages of `lapa2 view` that lie beside a file."""
    return sorted(path.name for path in file.parent.glob("view*.html"))


def page_values(run: Run, views: Sequence[str] = (), further_bytes: int = 0) -> dict[str, Any]:
    """What `run_report.html.j2` shows of a run; equal folders give equal pages.

    Args:
        run: The run, finished or not.
        views: Names of pages of `lapa2 view` in the same folder, to be linked.
        further_bytes: Size of what a page has besides. Fewer texts are shown then, so that the page
            stays below `PAGE_BYTES`.

    Raises:
        RunError: A cell or a table of scores is damaged.
        ModelError: The tokenizer of a cell's model is not there.
    """
    cells = run.cells
    attention, left = _attention_figures(run, cells)
    used = further_bytes + sum(len(figure["image"]) for figure in attention) + 100_000
    n_prompts, texts = texts_to_show(run, PAGE_BYTES - used)
    manifests = [run.manifest(key) for key in run.finished]
    return {
        "title": _title(run),
        "states": STATES,
        "names": {
            "task": list(dict.fromkeys(cells.get("task", ()))),
            "method": list(dict.fromkeys(cells.get("method", ()))),
        },
        "run": _overview(run, cells),
        "facts": _run_facts(run, manifests),
        "attention": attention,
        "attention_left": left,
        "scores": [] if run.folder is None else _score_sections(run, run.folder),
        "cells": _cell_rows(cells),
        "n_prompts": n_prompts,
        "max_prompts": MAX_PROMPTS,
        "traced": any(text["p"] or text["b"] for text in each_text(texts)),
        "n_texts": sum(1 for _ in each_text(texts)),
        "texts": embedded(texts),
        "views": [(name, f"./{quote(name)}") for name in views],
    }


# --- the run


def _title(run: Run) -> str:
    """The run's name and what it is of: models, tasks and methods, or how many where they are
    more than two."""
    cells = run.by_key.values()
    values = {
        "model": dict.fromkeys(cell.model for cell in cells),
        "task": dict.fromkeys(cell.task.name for cell in cells),
        "method": dict.fromkeys(cell.method for cell in cells),
    }
    name = "A run" if run.folder is None else run.folder.name
    parts = [
        " and ".join(texts) if len(texts) < 3 else pluralize(len(texts), what)
        for what, texts in values.items()
    ]
    return f"{name}: {', '.join(filter(None, parts))}"


def _overview(run: Run, cells: pd.DataFrame) -> dict[str, Any]:
    """Numbers of cells by state, of all grids and of each, and of finished texts and tokens."""

    def counts(keys: Iterable[str]) -> dict[str, int]:
        states = (
            cells[cells["key"].isin(list(keys))]["state"] if len(cells) else pd.Series(dtype=str)
        )
        return {state: int((states == state).sum()) for state in STATES}

    finished = run.finished
    return {
        "states": counts(run.by_key),
        "n_cells": len(run.by_key),
        "texts": sum(cell.n_texts for cell in finished.values()),
        "tokens": int(cells["tokens"].sum()) if "tokens" in cells else 0,
        "grids": [(name, counts(keys)) for name, keys in run.listing.grids.items()],
    }


def _run_facts(run: Run, manifests: Sequence[Manifest]) -> dict[str, list[str]]:
    """Settings and versions of the finished cells: the distinct values of each."""
    cards = [manifest.model for manifest in manifests]
    plan = run.by_key.values()
    facts = {
        "Model": (
            f"{card.name}: {card.architecture}, {card.n_layers} layers x {card.n_heads} heads,"
            f" {card.dtype}, {card.model_class}"
            for card in cards
        ),
        "Weights": (f"{card.name}: {card.weights}" for card in cards),
        "Device": (card.device for card in cards),
        "CPU threads": (
            str(manifest.threads) for manifest in manifests if manifest.threads is not None
        ),
        "Packed weights": (
            PREPACKING_NAMES[card.prepacking] for card in cards if card.prepacking != "none"
        ),
        "Attention of prompts": (card.attn for card in cards if card.attn != "matrix"),
        "Package": (f"lapa2_interp {manifest.lapa2_interp}" for manifest in manifests),
        "Commit": (manifest.commit or "outside a git checkout" for manifest in manifests),
        "Libraries": (
            ", ".join(f"{name} {value}" for name, value in manifest.versions.items())
            for manifest in manifests
        ),
        "Seed": (str(cell.seed) for cell in plan),
        "Samples per prompt": (str(cell.samples) for cell in plan),
        "Longest text": (f"{cell.length} tokens" for cell in plan),
        "Sampling": (
            f"top-{cell.top_k}, temperature {cell.temperature:g}, EOS policy {cell.eos}"
            for cell in plan
        ),
        "Trace": (cell.trace for cell in plan),
        "Problems": (problem for manifest in manifests for problem in manifest.problems),
    }
    return {
        name: distinct
        for name, values in facts.items()
        if (distinct := list(dict.fromkeys(values)))
    }


def _cell_rows(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """A row for every cell, unfinished cells first."""
    rows = []
    for row in records(cells):
        numbers = {"tokens": "", "seconds": ""}
        if row["state"] == "finished":
            numbers = {"tokens": f"{row['tokens']:.0f}", "seconds": f"{row['seconds']:.1f}"}
        rows.append(row | numbers | {"size": f"{row['samples']} x {row['max_length']}"})
    return sorted(rows, key=lambda row: row["state"] == "finished")


# --- attention


def _attention_figures(run: Run, cells: pd.DataFrame) -> tuple[list[dict[str, str]], int]:
    """Attention against step of cells in grids that are not this package's: a figure for each kind
    of cells that can be drawn together; and how many kinds are left
    out."""
    own = {
        key
        for name, keys in run.listing.grids.items()
        if name not in built_in()
        for key in keys
        if run.by_key[key].trace != "none"
    }
    if not own:
        return [], 0
    kinds = cells[cells["key"].isin(own) & (cells["state"] == "finished")].groupby(
        [*ALIKE], sort=False
    )
    figures = []
    for _, kind in list(kinds)[:MOST_FIGURES]:
        with suppress(TraceError):  # all texts ended before a first token
            attention = run.attention(key=list(kind["key"]))
            first = kind.iloc[0]
            variant = f" ({first['variant']})" if first["variant"] else ""
            figures.append(
                {
                    "title": f"{first['task']}, {first['method']}{variant}: attention on the"
                    f" {attention.part}",
                    "about": f"{first['model']}, {first['max_length']} tokens; mean over layers,"
                    " heads, texts and attributes, with 95 % intervals over prompts",
                    "image": b64encode(attention.plot()._repr_png_()).decode("ascii"),
                }
            )
    return figures, max(0, len(kinds) - MOST_FIGURES)


# --- scores


def _score_sections(run: Run, folder: Path) -> list[dict[str, Any]]:
    """The sections of all scores in a run's folders.

    Raises:
        RunError: A table is not from `lapa2 score`.
    """
    return [
        _score_section(run, file.parent)
        for file in sorted(folder.glob("*/table.csv"))
        if (file.parent / "differences.csv").is_file()
    ]


def _score_section(run: Run, folder: Path) -> dict[str, Any]:
    """The scores in one folder as text, and one figure a metric of each arm against the
    baseline."""
    # Read both tables, and draw the differences.
    words = dict.fromkeys((*CELL_COLUMNS, *EXTRA_CELL_COLUMNS, "metric", "scorer", "why"), str)
    try:
        table, differences = (
            pd.read_csv(
                folder / name,
                dtype=words,
                keep_default_na=False,
                na_values={key: [""] for key in ("mean", "low", "high", "difference", "p")},
            )
            for name in ("table.csv", "differences.csv")
        )
        shown, notes = format_scores(table, differences), score_notes(table, differences)
        figures = [
            _difference_figure(str(metric), str(scorer), part)
            for (metric, scorer), part in differences.groupby(["metric", "scorer"], sort=False)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{folder} has no tables of `lapa2 score` ({type(error).__name__}: {error}); score"
            f" again, or remove the folder"
        ) from error
    # The table as text, and arms without scores.
    arms = {cell.arm for cell in run.finished.values()}
    if "arm" in table and (left := sorted(arms - set(table["arm"]))):
        notes.append(f"not among these scores: {', '.join(left)}")
    return {
        "name": folder.name,
        "head": list(shown),
        "rows": [
            {side: str(row.get(side, "")) for side in ("task", "method")}
            | {"cells": [mark_cell(str(cell)) for cell in row.values()]}
            for row in records(shown)
        ],
        "notes": notes,
        "figures": figures,
    }


def _difference_figure(metric: str, scorer: str, part: pd.DataFrame) -> dict[str, Any]:
    """A metric's differences from the baseline, drawn on one scale."""
    keys = varying_columns(part)
    least, most = shared_scale(part[["low", "high", "difference"]].assign(zero=0.0))
    rows = []
    for row in records(part):
        ends = {name: row[name] for name in ("low", "high")}
        ends |= {"here": row["difference"], "paper": math.nan}
        clear = "clear" if row["low"] > 0 or row["high"] < 0 else "unclear"
        words = format_numbers(ends | {"p": row["p"], "holm": math.nan, "detectable": math.nan})
        rows.append(
            {
                "arm": ", ".join(str(row[key]) for key in keys if row[key] != "") or metric,
                "drawing": interval_svg(ends, least, most, clear),
                "prompts": row["prompts"],
                "task": row.get("task", ""),
                "method": row.get("method", ""),
            }
            | words
        )
    return {"metric": metric, "scorer": scorer, "rows": rows, "least": least, "most": most}
