"""The files of an item: its tables as CSV, Markdown, LaTeX and JSON, and its claims."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analyses.lab.claims import ClaimResult, ItemClaims, format_claims, read_claims
from analyses.lab.tables import footnotes, format_item_table, gaps_note
from lapa2_interp.files import write_text
from lapa2_interp.table_formats import as_csv, as_latex, as_markdown, records


def write_item(
    out: Path,
    item: str,
    title: str,
    table: pd.DataFrame,
    findings: ItemClaims,
    notes: Sequence[str] = (),
    formatted: pd.DataFrame | None = None,
) -> str:
    """Write OUT/tables/ITEM.csv, .md, .tex, .json and .claims.csv; returns the text to print.

    Args:
        table: The tidy table.
        notes: Lines under the table, before those on scorers, models and profiles.
        formatted: The table as text; by default `format_item_table(table)`.
    """
    folder = out / "tables"
    formatted = format_item_table(table) if formatted is None else formatted
    notes = [*notes, *footnotes(table), *([gaps] if (gaps := gaps_note(table)) else [])]
    claims = findings.frame()
    _write_tables(folder, item, title, table, claims, notes, formatted)
    parts = [f"{title}\n\n{formatted.to_string(index=False)}\n", *notes]
    if len(claims):
        parts.append("\n" + format_claims(claims).to_string(index=False))
    return "\n".join([*parts, f"\n{folder / item}.csv, .md, .tex"])


def _write_tables(
    folder: Path,
    item: str,
    title: str,
    table: pd.DataFrame,
    claims: pd.DataFrame,
    notes: Sequence[str],
    formatted: pd.DataFrame,
) -> None:
    for ending, text in {
        "csv": as_csv(table, 6),
        "md": as_markdown(title, formatted, notes),
        "tex": as_latex(title, formatted, notes, item),
        "json": item_json(item, title, formatted, notes),
        "claims.csv": as_csv(claims, 6),
    }.items():
        write_text(folder / f"{item}.{ending}", text)


RUN_COLUMNS = ("model", "task", "method")
"""Columns by which the rows of two runs are matched; a formatted table lacks those with one
value."""


def merge_item(item: str, beside: Path, tables: Path) -> bool:
    """Add to an item's tables the rows of another run whose model, task and method this run lacks.
    Verdicts are corrected again, over all claims.

    Args:
        beside: Folder of the other run's tables.
        tables: Folder of this run's tables, which change.

    Returns:
        True if there were rows to add.

    Raises:
        RunError: A table of claims was written by another version of the package.
    """
    if not all((folder / f"{item}.csv").is_file() for folder in (beside, tables)):
        return False
    own, of_beside = (
        pd.read_csv(folder / f"{item}.csv", keep_default_na=False) for folder in (tables, beside)
    )
    places = [name for name in RUN_COLUMNS if name in own and name in of_beside]
    here = set(own[places].itertuples(index=False, name=None)) if places else set()

    def new_rows(rows: pd.DataFrame) -> pd.DataFrame:
        """Rows whose model, task and method this run lacks."""
        is_new = [row not in here for row in rows[places].itertuples(index=False, name=None)]
        return rows[np.array(is_new, dtype=bool)]

    if not places or not len(added := new_rows(of_beside)):
        return False
    # Both formatted tables, with the columns that they lack because they have one value.
    facts, texts = [], []
    for folder, rows in ((tables, own), (beside, of_beside)):
        known = json.loads((folder / f"{item}.json").read_text("utf-8"))
        text = pd.DataFrame(known["rows"]["data"], columns=known["rows"]["columns"])
        for number, name in enumerate(places):
            if name not in text:
                text.insert(number, name, rows[name].iloc[0])
        facts.append(known)
        texts.append(text)
    joined = pd.concat([texts[0], new_rows(texts[1])], ignore_index=True).fillna("")
    steps = {
        name: int(of[1]) for name in map(str, joined) if (of := re.match(r"step (\d{1,9})$", name))
    }
    columns = sorted(map(str, joined), key=lambda name: steps.get(name, -1))
    alike = [name for name in places if joined[name].nunique() == 1]
    # The claims of both runs.
    claims = [read_claims(folder / f"{item}.claims.csv") for folder in (tables, beside)]
    of_other = claims[1][~claims[1]["claim"].isin(claims[0]["claim"])]
    results = [ClaimResult(**row) for row in records(pd.concat([claims[0], of_other]))]
    _write_tables(
        tables,
        item,
        facts[0]["title"],
        pd.concat([own, added], ignore_index=True),
        ItemClaims(item, rows=results).frame(),
        list(dict.fromkeys([*facts[0]["notes"], *facts[1]["notes"]])),
        joined[columns].drop(columns=alike),
    )
    return True


def item_json(item: str, title: str, formatted: pd.DataFrame, notes: Sequence[str]) -> str:
    """A formatted table as JSON, which the report reads."""
    rows = formatted.astype(str).to_dict("split")
    facts = {"item": item, "title": title, "notes": [*notes], "rows": rows}
    return json.dumps(facts, indent=1, ensure_ascii=False)
