"""Tables as CSV, Markdown, LaTeX and dictionaries."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pandas as pd


NO_NUMBER = "no number"


def format_number(value: float, form: str = ".3g") -> str:
    """A number for readers: 0 has no minus, also where it is a rounded number; NaN is `NO_NUMBER`.
    Numbers that may be negative are shown by this alone.

    Args:
        form: A format: an optional "+", the digits and the type, such as "+.1f".
    """
    if math.isnan(value):
        return NO_NUMBER
    sign, digits = form[: form.startswith("+")], form.removeprefix("+")
    return f"{value:{sign}z{digits}}"


def format_interval(
    mean: float, low: float, high: float, form: str = ".3g", suffix: str = ""
) -> str:
    """A number, a suffix, and if it is known the interval: "61 % [55, 67]"."""
    if math.isnan(mean):
        return format_number(mean)
    return f"{format_number(mean, form)}{suffix}{interval_text(low, high, form)}"


def interval_cells(
    table: pd.DataFrame, form: str = ".3g", columns: Sequence[str] = ("mean", "low", "high")
) -> list[str]:
    """The three columns of every row as `format_interval`."""
    rows = table[[*columns]].to_numpy(float)
    return [format_interval(mean, low, high, form) for mean, low, high in rows]


def interval_text(low: float, high: float, form: str) -> str:
    """ " [low, high]", or nothing where there is no interval."""
    if math.isnan(low):
        return ""
    return f" [{format_number(low, form)}, {format_number(high, form)}]"


def as_text(shown: pd.DataFrame, form: str = ".4g", missing: str = "") -> str:
    """A table for the terminal, without its index.

    Args:
        form: Of its numbers, as `format_number`.
        missing: In the place of NaN.
    """
    return str(shown.to_string(index=False, float_format=number_formatter(form), na_rep=missing))


def number_formatter(form: str) -> Callable[[float], str]:
    """`format_number` in one format, as pandas takes it."""
    return lambda value: format_number(value, form)


def as_csv(table: pd.DataFrame, digits: int | None = None) -> str:
    """A table as CSV, without its index.

    All texts are quoted if one holds a carriage return, since a reader would begin a new row there.

    Args:
        digits: Significant digits of a number, at most; by default all.
    """
    texts = table.select_dtypes(exclude=["number", "bool"]).astype(str)
    split = any(texts[name].str.contains("\r", regex=False).any() for name in texts)
    quoting: Literal[0, 2] = 2 if split else 0  # csv.QUOTE_NONNUMERIC, csv.QUOTE_MINIMAL
    how = None if digits is None else f"%.{digits}g"
    numbers: dict[str, Any] = {
        str(name): table[name] + 0.0 for name in table.select_dtypes("float")
    }  # no -0.0
    return str(table.assign(**numbers).to_csv(index=False, float_format=how, quoting=quoting))


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


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as dictionaries by column."""
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]
