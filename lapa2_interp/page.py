"""A page of figures and tables as one HTML file that loads nothing."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib import rc_context

from lapa2_interp.errors import RunError
from lapa2_interp.files import write_text
from lapa2_interp.plots import COLOURS, Drawing

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"
TURNS = re.compile("[\u202a-\u202e\u2066-\u2069]")
"""Characters that turn the direction of what follows on the page; Arabic and Hebrew do without."""


@dataclass(frozen=True)
class Section:
    """A heading, what one sees, and a picture or a table below it."""

    title: str
    text: str
    figure: Drawing | None = None
    table: pd.DataFrame | None = None


def page(
    title: str,
    findings: Sequence[str],
    sections: Sequence[Section],
    facts: Mapping[str, str],
    details: Sequence[str] = (),
) -> str:
    """The page as one string; a page loads nothing from anywhere.

    Args:
        title, findings: What the run was, and its main findings, a paragraph each.
        sections: In order.
        facts: Settings, by name.
        details: Further sentences about the findings, folded.
    """
    return template("report.html.j2").render(
        title=title,
        findings=findings,
        details=details,
        sections=[
            {
                "title": section.title,
                "text": section.text,
                "picture": section.figure and picture(section.figure, 112),
                "table": section.table,
            }
            for section in sections
        ],
        facts=facts,
    )


def write_page(file: Path, render: Callable[[], str]) -> Path:
    """Write a page, and replace an existing one; returns the file.

    Raises:
        RunError: The file is a folder, is no .html file, or cannot be written. The first two are
            found before the page is made.
    """
    if file.is_dir():
        raise RunError(f"{file} is a folder; give a file, such as {file / 'page.html'}")
    if file.suffix.lower() not in (".html", ".htm"):  # a page replaces only a page
        raise RunError(
            f"the name of a page ends in .html; found {file.name}, give"
            f" {file.with_suffix('.html').name}"
        )
    html = render()
    try:
        write_text(file, html)
    except OSError as error:
        raise RunError(
            f"cannot write {file}: {error.strerror or error}; choose another file"
        ) from error
    return file


def template(name: str, *folders: Path) -> Template:
    """A template of the first of the folders that has it; each may extend one of the others, or
    `base.html.j2`."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader([*folders, TEMPLATES])
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_straight
    )
    environment.globals["colours"] = COLOURS
    return environment.get_template(name)


def embedded(data: Any) -> Markup:
    """JSON that can stand in a script element whatever its strings are.

    Raises:
        ValueError: A number is not finite: JSON has no such numbers, and no browser would read it.
    """
    from markupsafe import Markup

    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Markup(text)


def _straight(value: Any) -> Any:
    """A text, or HTML, with what would turn its direction spelt out, as \\u202e: which JSON, in a
    script element, reads as the character."""
    if not isinstance(value, str):
        return value
    return type(value)(TURNS.sub(lambda match: f"\\u{ord(match[0]):04x}", value))


def picture(drawing: Drawing, scale: int, narrow: float | None = None) -> list[dict[str, Any]]:
    """A drawing as sources and widths of an image: as it is, and laid out again for a narrow page.

    Args:
        scale: Pixels of the page per inch, so that the text of the drawing is as large as that
            beside it: 9 points are 9 * scale / 72 pixels.
        narrow: Width of the narrow form in inches; None makes none.
    """
    parts = []
    for inches in (drawing.get_figwidth(), *([] if narrow is None else [narrow])):
        drawing.set_figwidth(inches)
        buffer = BytesIO()
        with rc_context({"svg.hashsalt": "lapa2"}):
            drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        data = base64.b64encode(buffer.getvalue()).decode()
        parts.append(
            {"source": f"data:image/svg+xml;base64,{data}", "width": round(inches * scale)}
        )
    return parts
