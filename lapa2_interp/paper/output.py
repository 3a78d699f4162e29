"""The files of an item: its tables as CSV, Markdown, LaTeX and JSON, and its claims."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from lapa2_interp._util.files import (
    as_csv,
    as_latex,
    as_markdown,
    parse_json,
    read_text,
    write_text,
)
from lapa2_interp.paper.claims import ClaimResult, ItemClaims, format_claims, read_claims
from lapa2_interp.paper.tables import footnotes, format_item_table, gaps_note


def write_item(
    out: Path,
    item: str,
    title: str,
    table: pd.DataFrame,
    findings: ItemClaims,
    notes: Sequence[str] = (),
    shown: pd.DataFrame | None = None,
) -> str:
    """Write OUT/tables/ITEM.csv, .md, .tex, .json and .claims.csv; the words for a terminal.

    Args:
        table: Tidy.
        notes: Lines under the table, besides scorers, models and profiles.
        shown: The table for reading; by default `wide(table)`.
    """
    folder = out / "tables"
    shown = format_item_table(table) if shown is None else shown
    notes = [*notes, *footnotes(table), *([gaps] if (gaps := gaps_note(table)) else [])]
    claims = findings.frame()
    _write(folder, item, title, table, claims, notes, shown)
    parts = [f"{title}\n\n{shown.to_string(index=False)}\n", *notes]
    if len(claims):
        parts.append("\n" + format_claims(claims).to_string(index=False))
    return "\n".join([*parts, f"\n{folder / item}.csv, .md, .tex"])


def _write(
    folder: Path,
    item: str,
    title: str,
    table: pd.DataFrame,
    claims: pd.DataFrame,
    notes: Sequence[str],
    shown: pd.DataFrame,
) -> None:
    for ending, text in {
        "csv": as_csv(table, 6),
        "md": as_markdown(title, shown, notes),
        "tex": as_latex(title, shown, notes, item),
        "json": item_json(item, title, shown, notes),
        "claims.csv": as_csv(claims, 6),
    }.items():
        write_text(folder / f"{item}.{ending}", text)


RUN_COLUMNS = ("model", "task", "method")
"""Columns by which rows of two runs belong together; a table for reading leaves out those that have
one value."""


def merge_item(item: str, beside: Path, tables: Path) -> bool:
    """Add to an item what its tables of another run have besides: rows of the models, tasks and
    methods that this run lacks. Verdicts are corrected anew.

    Args:
        beside, tables: The folders of the other run's tables, and of this one's, which change.

    Returns:
        Whether there was something to add.

    Raises:
        RunError: A table of claims is none of this version.
    """
    if not all((folder / f"{item}.csv").is_file() for folder in (beside, tables)):
        return False
    own, other = (
        pd.read_csv(folder / f"{item}.csv", keep_default_na=False) for folder in (tables, beside)
    )
    places = [name for name in RUN_COLUMNS if name in own and name in other]
    here = set(own[places].itertuples(index=False, name=None)) if places else set()

    def lacking(rows: pd.DataFrame) -> pd.DataFrame:
        """Those of another place."""
        found = [row not in here for row in rows[places].itertuples(index=False, name=None)]
        return rows[np.array(found, dtype=bool)]

    if not places or not len(kept := lacking(other)):
        return False
    facts, shown = [], []
    for folder, rows in ((tables, own), (beside, other)):
        known = parse_json(read_text(folder / f"{item}.json"))
        read = pd.DataFrame(known["rows"]["data"], columns=known["rows"]["columns"])
        for number, name in enumerate(places):
            if name not in read:
                read.insert(number, name, rows[name].iloc[0])
        facts.append(known)
        shown.append(read)
    joined = pd.concat([shown[0], lacking(shown[1])], ignore_index=True).fillna("")
    steps = {
        name: int(of[1]) for name in map(str, joined) if (of := re.match(r"step (\d+)$", name))
    }
    columns = sorted(map(str, joined), key=lambda name: steps.get(name, -1))
    alike = [name for name in places if joined[name].nunique() == 1]
    claims = [read_claims(folder / f"{item}.claims.csv") for folder in (tables, beside)]
    of_other = claims[1][~claims[1]["claim"].isin(claims[0]["claim"])]
    found = [
        ClaimResult(**{str(name): value for name, value in row.items()})
        for row in pd.concat([claims[0], of_other]).to_dict("records")
    ]
    _write(
        tables,
        item,
        facts[0]["title"],
        pd.concat([own, kept], ignore_index=True),
        ItemClaims(item, rows=found).frame(),
        list(dict.fromkeys([*facts[0]["notes"], *facts[1]["notes"]])),
        joined[columns].drop(columns=alike),
    )
    return True


def item_json(item: str, title: str, shown: pd.DataFrame, notes: Sequence[str]) -> str:
    """A table as the report reads it."""
    rows = shown.astype(str).to_dict("split")
    facts = {"item": item, "title": title, "notes": [*notes], "rows": rows}
    return json.dumps(facts, indent=1, ensure_ascii=False)
