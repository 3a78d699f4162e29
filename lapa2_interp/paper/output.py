"""The files of an item: its tables as CSV, Markdown, LaTeX and JSON, and its claims."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from lapa2_interp.files import as_csv, write_text
from lapa2_interp.paper.claims import Findings, shown_claims
from lapa2_interp.paper.tables import footnotes, gaps_note, wide


def write_item(
    out: Path,
    item: str,
    title: str,
    table: pd.DataFrame,
    findings: Findings,
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
    shown = wide(table) if shown is None else shown
    notes = [*notes, *footnotes(table), *([gaps] if (gaps := gaps_note(table)) else [])]
    claims = findings.frame()
    for ending, text in {
        "csv": as_csv(table, 6),
        "md": as_markdown(title, shown, notes),
        "tex": as_latex(title, shown, notes, item),
        "json": as_json(item, title, shown, notes),
        "claims.csv": as_csv(claims, 6),
    }.items():
        write_text(folder / f"{item}.{ending}", text)
    parts = [f"{title}\n\n{shown.to_string(index=False)}\n", *notes]
    if len(claims):
        parts.append("\n" + shown_claims(claims).to_string(index=False))
    return "\n".join([*parts, f"\n{folder / item}.csv, .md, .tex"])


def as_json(item: str, title: str, shown: pd.DataFrame, notes: Sequence[str]) -> str:
    """A table as the report reads it."""
    rows = shown.astype(str).to_dict("split")
    facts = {"item": item, "title": title, "notes": [*notes], "rows": rows}
    return json.dumps(facts, indent=1, ensure_ascii=False)


def as_markdown(title: str, shown: pd.DataFrame, notes: Sequence[str]) -> str:
    """A table as Markdown."""
    escaped = [
        [str(value).replace("|", "\\|").replace("\n", " ") for value in row]
        for row in shown.to_numpy()
    ]
    lines = [
        " | ".join(map(str, shown.columns)),
        " | ".join("---" for _ in shown.columns),
        *map(" | ".join, escaped),
    ]
    return (
        f"### {title}\n\n"
        + "\n".join(f"| {line} |" for line in lines)
        + "\n\n"
        + "\n\n".join(notes)
        + "\n"
    )


def as_latex(title: str, shown: pd.DataFrame, notes: Sequence[str], label: str) -> str:
    """A table as LaTeX, for booktabs."""
    lines = [
        r"\begin{table}",
        r"\centering\small",
        rf"\caption{{{_latex(title)}}}",
        rf"\label{{tab:{label}}}",
        rf"\begin{{tabular}}{{{'l' * len(shown.columns)}}}",
        r"\toprule",
        " & ".join(_latex(str(column)) for column in shown.columns) + r" \\",
        r"\midrule",
        *(" & ".join(_latex(str(value)) for value in row) + r" \\" for row in shown.to_numpy()),
        r"\bottomrule",
        r"\end{tabular}",
        *(rf"\par\footnotesize {_latex(note)}" for note in notes),
        r"\end{table}",
        "",
    ]
    return "\n".join(lines)


def _latex(text: str) -> str:
    text = text.replace("\\", r"\textbackslash ")
    for mark in "&%$#_{}":
        text = text.replace(mark, "\\" + mark)
    text = text.replace("~", r"\textasciitilde ").replace("^", r"\textasciicircum ")
    return re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", text)
