"""Text, JSON and TOML from files that anyone may have written.

Every reader checks first that the file is a regular one, and bounds its size and nesting.
Text may be compressed, as the file's ending says.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lapa2_interp._util.paths import LARGEST_TEXT
from lapa2_interp._util.unpacking import open_packed
from lapa2_interp.errors import LayoutError

MAX_LETTERS = 2**22
"""Largest number of letters of a text. A tokenizer takes a hundred times their memory, and where
memory ends we could not report an error."""
DEEPEST = 100
"""Nested lists and tables in a file, at most."""


def check_text_length(name: str, text: str) -> None:
    """Refuse a text that is too long for any model, before it is tokenised.

    Raises:
        LayoutError: The text has more than MAX_LETTERS letters.
    """
    if len(text) > MAX_LETTERS:
        raise LayoutError(
            f"the {name} {text[:20]!r}... has {len(text)} letters, and {MAX_LETTERS} are allowed;"
            " give a shorter text, or a file with one on each line"
        )


def read_text(file: Path, may_hold_nul: bool = False) -> str:
    """The text of a file in UTF-8, without a byte-order mark.

    Raises:
        OSError: The file does not exist, is a folder, or cannot be read.
        ValueError: The file is no regular file, too large, not UTF-8, has a NUL, or is not
            compressed as its ending says.
    """
    with open_packed(file) as opened:
        if (size := file.stat().st_size) > LARGEST_TEXT:
            raise ValueError(f"it has {size} bytes; a text has {LARGEST_TEXT} at most")
        raw = opened.read()
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line, bad = raw[: error.start].count(b"\n") + 1, raw[error.start : error.start + 4]
        raise ValueError(
            f"line {line}: the bytes {bad!r} are not UTF-8; save the file as UTF-8"
        ) from None
    if "\0" in text and not may_hold_nul:
        line = raw[: raw.index(0)].count(b"\n") + 1
        raise ValueError(f"line {line} has a NUL, which no text has; give a text file")
    return text


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: The text is no JSON, has a field twice, is nested too deeply, or has a number of
            thousands of digits.
    """
    return _check_nesting(lambda: json.loads(text, object_pairs_hook=_unique_fields))


def parse_object(text: str) -> dict[str, Any]:
    """The fields of a JSON object.

    Raises:
        ValueError: As `parse_json`, or the value is no object.
    """
    fields = parse_json(text)
    if not isinstance(fields, dict):
        raise ValueError(f"it must hold a JSON object, found {str(fields)[:40]!r}")
    return fields


def parse_toml(text: str) -> dict[str, Any]:
    """The fields of a TOML text.

    Raises:
        ValueError: As `parse_json`.
    """
    return dict(_check_nesting(lambda: tomllib.loads(text)))


def whole_number(text: str) -> int | None:
    """The whole number that a text of at most 18 digits is; None of any other text."""
    return int(text) if re.fullmatch(r"\d{1,18}", text, re.ASCII) else None


def _check_nesting(parse: Callable[[], Any]) -> Any:
    """The result of a parser, whose nesting is at most `DEEPEST`."""
    deep = f"it is nested too deeply; {DEEPEST} levels are allowed"
    try:
        value = parse()
    except RecursionError:
        raise ValueError(deep) from None
    except ValueError as error:
        if "integer string" not in str(error):
            raise
        raise ValueError("it has a whole number of thousands of digits") from None
    level, levels = [value], 0
    while level := [part for part in level if isinstance(part, dict | list)]:
        if (levels := levels + 1) > DEEPEST:
            raise ValueError(deep)
        level = [
            inner for part in level for inner in (part.values() if isinstance(part, dict) else part)
        ]
    return value


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; raises ValueError if it has a field twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has the field {twice!r} twice; give it once")
    return fields
