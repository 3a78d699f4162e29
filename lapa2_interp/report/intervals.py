"""Numbers and intervals of the page: as HTML, as text and as small SVG figures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from lapa2_interp.runs.store import STATES
from lapa2_interp.table_formats import format_number

if TYPE_CHECKING:
    from markupsafe import Markup

SCALE_LIMIT = 4
"""Range of a metric's scale, as a multiple of its median row; a value beyond it is a triangle at
the end of the scale."""
NUMBER = r"[+-]?\d[\d.,]*"


def mark_cell(cell: str) -> Markup:
    """A cell of a table as HTML with the same text: **bold** numbers, pale intervals, marked
    gaps."""
    from markupsafe import Markup, escape

    if cell in (*STATES[1:], "no number"):
        return Markup('<span class="gap">{}</span>').format(cell)
    parts = re.fullmatch(rf"(\*\*)?({NUMBER})(?(1)\*\*)( \[.*)?", cell)
    if parts is None:
        return escape(cell)
    number = Markup("<b>{}</b>" if parts[1] else "{}").format(parts[2])
    return number + Markup('<span class="ci">{}</span>').format(parts[3]) if parts[3] else number


def format_numbers(numbers: Mapping[str, float]) -> dict[str, str]:
    """Numbers of a claim with as many digits as its interval allows."""
    here, low, high = numbers["here"], numbers["low"], numbers["high"]
    width = high - low
    size = width if width > 0 else abs(here)
    digits = (
        min(6, max(1, 1 - math.floor(math.log10(size)))) if size > 0 and math.isfinite(size) else 2
    )

    def number(value: float, sign: str = "+") -> str:
        return "" if math.isnan(value) else format_number(value, f"{sign}.{digits}f")

    interval = "no interval" if math.isnan(low) else f"[{number(low)}, {number(high)}]"
    return {
        "paper": "" if math.isnan(numbers["paper"]) else format_number(numbers["paper"], "+.4g"),
        "here": number(here),
        "interval": interval if not math.isnan(here) else "",
        "p": "" if math.isnan(numbers["p"]) else f"{numbers['p']:.3g}",
        "holm": "" if math.isnan(numbers["holm"]) else f"{numbers['holm']:.3g}",
        "detectable": number(numbers["detectable"], ""),
    }


def shared_scale(ends: pd.DataFrame) -> tuple[float, float]:
    """The two ends of the scale that all intervals of a metric share.

    The scale covers all rows up to `SCALE_LIMIT`, so that an outlier does not shrink the others to
    points.
    """
    reach = ends.abs().max(axis=1)
    if not (reach > 0).any():
        return 0.0, 0.0
    far = SCALE_LIMIT * float(reach[reach > 0].median())  # rows without a difference do not count
    return max(float(np.nanmin(ends)), -far) + 0.0, min(float(np.nanmax(ends)), far) + 0.0


def interval_svg(
    numbers: Mapping[str, float], least: float, most: float, verdict: str
) -> Markup | str:
    """An SVG figure of an interval: a line, our difference as a dot, the paper's as a diamond, and
    zero as an upright line. A triangle is a value beyond the ends of the scale.
    """
    from markupsafe import Markup

    if math.isnan(numbers["here"]) or most <= least:
        return ""

    def x(value: float) -> float:
        return round(6 + 148 * (min(max(value, least), most) - least) / (most - least), 1)

    def mark(name: str, usual: str) -> str:
        value = numbers[name]
        if math.isnan(value):
            return ""
        beyond = (value > most) - (value < least)
        path = (
            f"M{x(value) + 5 * beyond} 9l{-9 * beyond} -5v10z" if beyond else usual.format(x(value))
        )
        return f'<path class="{name}" d="{path}"/>'

    zero = x(0.0)
    here, paper = (
        mark("here", "M{0} 9m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0"),
        mark("paper", "M{0} 3l5 6l-5 6l-5-6z"),
    )
    line = (
        ""
        if math.isnan(numbers["low"])
        else f'<path class="line" d="M{x(numbers["low"])} 9H{x(numbers["high"])}"/>'
    )
    return Markup(
        f'<svg class="forest {verdict.split()[0]}" width="160" height="18" viewBox="0 0 160 18"'
        f' aria-hidden="true"><path class="zero" d="M{zero} 0V18"/>{line}{here}{paper}</svg>'
    )
