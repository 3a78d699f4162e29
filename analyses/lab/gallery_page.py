"""The page of a run of the gallery: the page of the run, with the paper's items and claims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analyses.lab.gallery import read_gallery
from analyses.lab.item_sections import VERDICT_MARKS, claim_groups, item_sections
from analyses.lab.pages import ITEM_ORDER
from lapa2_interp.page import template, write_page
from lapa2_interp.report.run_page import TEMPLATES, page_values, views_beside
from lapa2_interp.runs.run import Run, load_run


def write_gallery_report(
    run: Run | str | Path, tables: Path | None = None, out: Path | None = None
) -> Path:
    """Write the page of a run and of the items made from it; returns the file.

    Args:
        tables: The folder of the items' tables (ITEM.json, ITEM.csv, ITEM.claims.csv), with
            figures/ (ITEM.png) beside it; by default RUN/tables. Any file may be missing.
        out: The file; by default RUN/report.html. An existing file is replaced.

    Raises:
        RunError: A cell, a table or the results.json beside the tables is damaged, or the file
            cannot be written.
        ModelError: The tokenizer of a cell's model is not there.
    """
    run = run if isinstance(run, Run) else load_run(run)
    tables = tables or run.require_folder() / "tables"
    file = out or run.require_folder() / "report.html"
    return write_page(file, lambda: gallery_report(run, tables, tables.parent / "figures", file))


def gallery_report(run: Run, tables: Path, figures: Path, file: Path) -> str:
    """The page as one string; equal folders give equal pages."""
    cells = run.cells
    names = {side: list(dict.fromkeys(cells.get(side, ()))) for side in ("task", "method")}
    items = item_sections(tables, figures, names)
    # The items come first, and texts take the bytes that are left.
    size = sum(len(item["image"] or "") + 3 * len(str(item["rows"])) for item in items)
    values = page_values(run, views_beside(file), size) | {
        "items": items,
        "groups": claim_groups(items),
        "verdicts": VERDICT_MARKS,
        "absent": [name for name in ITEM_ORDER if name not in {item["name"] for item in items}],
        "others": _other_runs(run, tables.parent),
    }
    return template("gallery_report.html.j2", Path(__file__).parent, TEMPLATES).render(values)


def _other_runs(run: Run, folder: Path) -> list[dict[str, Any]]:
    """Other runs with tables in the folder, from its results.json."""
    return [
        {
            "grids": ", ".join(gallery_run.grids),
            "cells": sum(grid.get("finished", 0) for grid in gallery_run.grids.values()),
            "made": ", ".join((*gallery_run.weights, *gallery_run.dtypes, *gallery_run.devices)),
            "commits": ", ".join(
                commit if " " in commit else commit[:12] for commit in gallery_run.commits
            ),
            "analysed": f"{gallery_run.analysed_when:%Y-%m-%d}, {gallery_run.analysed_on}",
        }
        for gallery_run in read_gallery(folder).runs
        if not set(gallery_run.grids) <= set(run.listing.grids)
    ]
