"""Numbers for readers: no minus before 0, one function for what may be negative."""

import ast
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import lapa2_interp
from lapa2_interp.table_formats import (
    as_csv,
    as_text,
    format_interval,
    format_number,
    interval_cells,
)

PACKAGE = Path(lapa2_interp.__file__).parent
FILES = [
    *PACKAGE.rglob("*.py"),
    *(PACKAGE.parent / "analyses").rglob("*.py"),
]


@pytest.mark.parametrize(
    ("value", "form", "shown"),
    [
        (-0.0, ".3g", "0"),
        (-0.04, ".1f", "0.0"),
        (-0.04, "+.1f", "+0.0"),
        (-0.06, "+.1f", "-0.1"),
        (0.25, "+.1f", "+0.2"),
        (np.float32(-0.001), ".2f", "0.00"),
        (-0.001, ".0%", "0%"),
        (math.nan, "+.1f", "no number"),
    ],
)
def test_zero_has_no_minus(value, form, shown):
    assert format_number(value, form) == shown


def test_intervals_and_tables_have_no_minus_before_zero():
    assert format_interval(-0.01, -0.2, 0.01, "+.1f", " points") == "+0.0 points [-0.2, +0.0]"
    assert format_interval(-0.01, math.nan, math.nan, ".1f", " %") == "0.0 %"
    table = pd.DataFrame({"mean": [-0.0], "low": [-0.001], "high": [0.5], "n": [3]})
    assert interval_cells(table, ".2f") == ["0.00 [0.00, 0.50]"]
    for text in (as_csv(table), as_csv(table, 6), as_text(table, ".1f")):
        assert "-0.0 " not in text
        assert "-0," not in text
    assert as_csv(table).splitlines()[1] == "0.0,-0.001,0.5,3"


def test_numbers_that_may_be_negative_are_formatted_by_one_function():
    """A sign is asked for only where a number may be negative; pandas has no format of its own."""
    wrong = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FormattedValue) and isinstance(node.format_spec, ast.JoinedStr):
                (first, *_) = node.format_spec.values
                if isinstance(first, ast.Constant) and str(first.value).startswith("+"):
                    wrong.append(f"{file.name}:{node.lineno}")
            is_table = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "to_string"
            if is_table and any(option.arg == "float_format" for option in node.keywords):
                wrong.append(f"{file.name}:{node.lineno}")
    assert [source for source in wrong if not source.startswith("table_formats.py")] == []
