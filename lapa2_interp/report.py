"""One self-contained HTML page of a run: tables, pictures and texts side by side. Model text is escaped."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from lapa2_interp.plots import Drawing


@dataclass(frozen=True)
class Section:
    """A heading, what one sees, and a picture or a table below it."""

    title: str
    text: str
    figure: Drawing | None = None
    table: pd.DataFrame | None = None


def page(
    title: str, lead: str, sections: Sequence[Section], texts: pd.DataFrame | None, facts: Mapping[str, str]
) -> str:
    """The page as one string; it loads nothing from anywhere.

    Args:
        title, lead: What the run was and its main finding.
        sections: In order.
        texts: Sample texts side by side: one row per prompt, one column per arm; the index labels the rows. None: no texts.
        facts: Settings, by name.
    """
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("lapa2_interp", "."), autoescape=True, trim_blocks=True)
    return environment.get_template("report.html.j2").render(
        title=title,
        lead=lead,
        sections=[
            {"title": s.title, "text": s.text, "image": s.figure and _png(s.figure), "table": _cells(s.table)}
            for s in sections
        ],
        texts=None if texts is None else _cells(texts.reset_index()),
        facts=facts,
    )


def _png(drawing: Drawing) -> str:
    return base64.b64encode(drawing._repr_png_()).decode("ascii")


def _cells(table: pd.DataFrame | None) -> dict[str, list] | None:
    return None if table is None else {"head": list(table.columns), "rows": table.to_numpy().tolist()}
