"""Sections of the page for the items: title, figure, table, notes and claims."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analyses.lab import ANALYSES
from analyses.lab.claims import (
    OUR_VERDICTS,
    VERDICTS,
    deciding_p_values,
    read_claims,
    scorer_kind,
    second_scorer_verdict,
    summarize_disagreement,
    unique_comparisons,
)
from analyses.lab.pages import ITEM_ORDER, page_of
from lapa2_interp.errors import RunError
from lapa2_interp.report.intervals import format_numbers, interval_svg, mark_cell, shared_scale
from lapa2_interp.table_formats import records

VERDICT_MARKS = dict(zip(VERDICTS, "✓✗✓✗≈○–", strict=True))
POSSIBLE_VERDICTS = {
    "paper": [verdict for verdict in VERDICTS if verdict not in OUR_VERDICTS.values()],
    "ours": [verdict for verdict in VERDICTS if verdict not in OUR_VERDICTS],
}
"""Possible verdicts on the paper's claims, and on ours."""


def item_sections(
    tables: Path, figures: Path, names: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """A section for each item with a table, claims or a figure."""
    items = {file.stem for file in tables.glob("*.json")} | {
        file.stem for file in figures.glob("*.png")
    }
    items |= {file.name.removesuffix(".claims.csv") for file in tables.glob("*.claims.csv")}
    ordered = [name for name in ITEM_ORDER if name in items] + sorted(items - set(ITEM_ORDER))
    return [_item_section(name, tables, figures, names) for name in ordered]


def _item_section(
    name: str, tables: Path, figures: Path, names: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    table, image = tables / f"{name}.json", figures / f"{name}.png"
    title, notes, head, data = name, [], [], []
    if table.is_file():
        try:
            facts = json.loads(table.read_text("utf-8"))
            title, notes = str(facts["title"]), [str(note) for note in facts["notes"]]
            head, data = [str(column) for column in facts["rows"]["columns"]], facts["rows"]["data"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{table} is not a table of an item ({type(error).__name__}: {error});"
                f" {page_of(name).relative_to(ANALYSES.parent)} makes it again"
            ) from error
    if name == "eval" and not data and not any("no judge" in note for note in notes):
        notes = ["no judge: this run has no stored ratings.", *notes]
    pairs = _task_method_pairs(tables / f"{name}.csv", names)
    file = tables / f"{name}.claims.csv"
    judged = read_claims(file) if file.is_file() else None
    return {
        "name": name, "title": title, "notes": notes, "head": head, "has_table": table.is_file(),
        "rows": [
            _task_and_method(
                {side: row[head.index(side)] for side in names if side in head}, pairs, names
            )
            | {"cells": [mark_cell(str(cell)) for cell in row]}
            for row in data
        ],
        "image": base64.b64encode(image.read_bytes()).decode("ascii") if image.is_file() else None,
        "judged": judged, "claims": [] if judged is None else _claim_rows(judged, names, pairs),
    }  # fmt: skip


def _task_method_pairs(file: Path, names: Iterable[str]) -> list[dict[str, str]]:
    """The pairs of task and method in an item, from its CSV table: the formatted table lacks a
    column with one value."""
    try:
        table = pd.read_csv(
            file, keep_default_na=False, dtype=str, usecols=lambda column: column in names
        )
    except (OSError, ValueError):  # no such file, or an empty one
        return []
    return records(table.drop_duplicates())


def _task_and_method(
    said: Mapping[str, str], pairs: Sequence[Mapping[str, str]], names: Iterable[str]
) -> dict[str, str]:
    """Task and method of a row: from its own columns, or else from the item's pairs; "" if several
    are possible."""
    left = [
        pair
        for pair in pairs
        if all(pair.get(side, value) == value for side, value in said.items())
    ]
    texts = {side: {pair[side] for pair in left if pair.get(side)} for side in names}
    return {
        side: said.get(side) or (texts[side].pop() if len(texts[side]) == 1 else "")
        for side in names
    }


def claim_groups(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The claims of all items, the paper's and ours, where there are any: {"whose", "verdicts":
    possible verdicts, "claims", "total": numbers of claims by verdict, each comparison once,
    "by_item": the same of every item's rows, "disputed": a sentence on second scorers}. A claim
    whose comparison counts in another row has the mark "again"."""
    tables = [item["judged"] for item in items if item["claims"]]
    if not tables:
        return []
    judged = pd.concat(tables, ignore_index=True)
    once = set(unique_comparisons(judged).index)
    claims = [claim for item in items for claim in item["claims"]]
    for number, claim in enumerate(claims):
        claim["again"] = number not in once
    groups = []
    for whose, verdicts in POSSIBLE_VERDICTS.items():
        own = [claim for claim in claims if claim["whose"] == whose]
        by_item: dict[str, Counter[str]] = {claim["item"]: Counter() for claim in own}
        for claim in own:
            by_item[claim["item"]][claim["verdict"]] += 1
        groups.append(
            {
                "whose": whose,
                "verdicts": verdicts,
                "claims": own,
                "total": Counter(claim["verdict"] for claim in own if not claim["again"]),
                "by_item": by_item,
                "disputed": summarize_disagreement(judged[judged["whose"] == whose]),
            }
        )
    return [group for group in groups if group["claims"]]


def _claim_rows(
    table: pd.DataFrame, names: Mapping[str, Sequence[str]], pairs: Sequence[Mapping[str, str]]
) -> list[dict[str, Any]]:
    """Rows of claims as text, each with a figure of its interval on the scale of its metric."""
    numbers = table[["paper", "here", "low", "high", "detectable"]].join(deciding_p_values(table))
    words = table[
        ["item", "claim", "metric", "expected", "verdict", "raw", "scorer", "whose"]
    ].astype(str)
    texts = (table["texts"] * table["prompts"]).map("{:.0f}".format).replace("nan", "")
    seconds = [second_scorer_verdict(row) for row in records(table)]
    ends = numbers[["low", "high", "here", "paper"]].assign(zero=0.0)
    scales = {metric: shared_scale(part) for metric, part in ends.groupby(words["metric"])}
    rows: list[dict[str, Any]] = []
    for said, row, n, of_arm, second in zip(
        records(words), records(numbers), table["prompts"], texts, seconds, strict=True
    ):
        facts = re.split(r": |, | \(|\)", said["claim"])
        named = {side: fact for side in names for fact in facts if fact in names[side]}
        rows.append(
            said
            | _task_and_method(named, pairs, names)
            | format_numbers(row)
            | {
                "prompts": int(n),
                "texts": of_arm,
                "second": second,
                "scorer": scorer_kind(said["scorer"]),
                "raw": "" if said["raw"] == said["verdict"] else said["raw"],
                "drawing": interval_svg(row, *scales[said["metric"]], said["verdict"]),
            }
        )
    return rows
