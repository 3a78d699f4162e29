"""Prompts as a user gives them: texts, and files of texts."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from lapa2_interp._util.parsing import check_text_length, parse_json, read_text
from lapa2_interp._util.paths import (
    COMPRESSIONS,
    check_regular_file,
    in_one_line,
    is_path,
    kind_of,
    looked_for,
    with_home,
)
from lapa2_interp.errors import LayoutError, TaskError
from lapa2_interp.tasks.task import Prompts

Entries = Iterable[tuple[str, object]]
"""Places in a file, each with what should be a prompt."""


def as_prompts(source: str | Path | Sequence[str | Path] | Prompts) -> Prompts:
    """Prompts as values: files are read, and texts are taken as they are.

    Args:
        source: A text or a path (`_util.paths.is_path` tells which), or several of them; or
            `Prompts`, which hold texts alone, also those that look like a path.

    Raises:
        LayoutError: There is no prompt; or one is no text, empty, too long, or has a NUL or half a
            character.
        TaskError: As `read_prompts`.
    """
    if isinstance(source, Prompts):
        texts = list(source.texts)
    else:
        texts = []
        for value in (source,) if isinstance(source, str | Path) else source:
            if not isinstance(value, str | Path):
                raise LayoutError(f"prompts must be texts, found {value!r}")
            if is_path(value):
                texts += read_prompts(Path(value))
            else:
                texts.append(str(value))
    if not texts:
        raise LayoutError("prompts is an empty list; give at least one text")
    for text in texts:
        check_prompt(text)
    return Prompts(texts=tuple(texts))


def check_prompt(text: str) -> None:
    """Refuse a text that no model can continue.

    Raises:
        LayoutError: The text is empty or too long, or has a NUL or half a character.
    """
    check_text_length("prompt", text)
    if not text.isascii() and text.encode("utf-8", "replace").decode() != text:
        raise LayoutError(
            f"the prompt {text!r} has half a character of UTF-16, which UTF-8 does not have; give"
            " whole characters"
        )
    if "\0" in text:
        raise LayoutError(
            f"the prompt {text[:40]!r} has a NUL, which a trace cannot name; leave it out"
        )
    if not text:
        raise LayoutError(
            "the prompt '' tokenises to nothing of its own; give at least one token of text"
        )


def read_prompts(path: str | Path) -> tuple[str, ...]:
    """Read prompts from a file (`PROMPT_FILES`), by its ending in letters of any case.

    A prompt is a text, or the "text" of an object, as RealToxicityPrompts has it.

    Raises:
        TaskError: There is no such file, it is unreadable, empty, or of another format, or a line
            is malformed; the message has its number.
    """
    path = with_home(path)
    shown = in_one_line(path)
    try:
        check_regular_file(path)
        if (kind := kind_of(path)) not in READERS:
            raise ValueError(f"it is no file of prompts: give {PROMPT_FILES}")
        prompts = [_prompt_of(where, entry) for where, entry in READERS[kind](path)]
    except OSError as error:
        raise TaskError(
            f"cannot read prompts from {shown}: {error.strerror}; give {PROMPT_FILES} (a text that"
            f" looks like a path may stand in one){looked_for(path)}"
        ) from None
    except ValueError as error:
        mark = "" if str(error).startswith(("line", "row", "entry")) else ":"
        raise TaskError(f"cannot read prompts from {shown}{mark} {error}") from None
    if not prompts:
        raise TaskError(f"{shown} has no prompts; give at least one")
    return tuple(prompts)


def _prompt_of(where: str, entry: object) -> str:
    """The prompt of an entry; raises ValueError if there is none."""
    text = entry.get("text") if isinstance(entry, dict) else entry
    if not isinstance(text, str) or not text.strip():
        shown = repr(entry)
        raise ValueError(
            f'{where}: expected a text as "prompt" (or, as RealToxicityPrompts has it, in'
            f' "prompt"."text"), found {shown[:60]}{"..." * (len(shown) > 60)}'
        )
    return text


def _numbered_lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a text that are not blank. Only these marks end a line: JSON allows the other
    line separators of Unicode inside a text."""
    lines = enumerate(re.split("\r\n?|\n", read_text(path)), start=1)
    return [(number, line) for number, line in lines if line.strip()]


def _lines(path: Path) -> Entries:
    return [(f"line {number}", line) for number, line in _numbered_lines(path)]


def _json_lines(path: Path) -> Entries:
    for number, line in _numbered_lines(path):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or "prompt" not in row:
            raise ValueError(
                f'line {number}: expected a JSON object with a text in "prompt", found'
                f" {line[:60]!r}{'...' * (len(line) > 60)}"
            )
        yield f"line {number}", row["prompt"]


def _json_list(path: Path) -> Entries:
    rows = parse_json(read_text(path))
    if not isinstance(rows, list):
        raise ValueError(f"it must hold a JSON list, found {str(rows)[:40]!r}")
    for number, row in enumerate(rows, start=1):
        yield f"entry {number}", row.get("prompt") if isinstance(row, dict) else row


def _table(path: Path, delimiter: str) -> Entries:
    """The column `prompt` of a table in text."""
    form = "CSV" if delimiter == "," else "TSV"
    stream = io.StringIO(read_text(path), newline="")
    try:
        read = csv.reader(stream, delimiter=delimiter, strict=True)
        columns, *rows = [row for row in read if row]
    except (csv.Error, ValueError) as error:
        raise ValueError(f"it is not {form}: {error}; give a column named prompt") from None
    at = _only_prompt(columns)
    for number, row in enumerate(rows, start=1):
        if len(row) != len(columns) or not row[at].strip():
            raise ValueError(
                f"row {number}: expected {len(columns)} fields and a prompt, found {str(row)[:80]}"
            )
        yield f"row {number}", row[at]


def _parquet(path: Path) -> Entries:
    """The column `prompt` of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read()
    except pa.ArrowException as error:
        raise ValueError(f"it is not Parquet: {' '.join(str(error).split())[:80]}") from None
    column = table.column(_only_prompt(table.column_names)).to_pylist()
    return [(f"row {number}", entry) for number, entry in enumerate(column, start=1)]


def _only_prompt(columns: Sequence[str]) -> int:
    """The place of the column `prompt`."""
    if columns.count("prompt") != 1:
        raise ValueError(f"it needs one column named prompt; found {', '.join(columns)}")
    return columns.index("prompt")


READERS: Mapping[str, Callable[[Path], Entries]] = {
    ".txt": _lines,
    ".jsonl": _json_lines,
    ".json": _json_list,
    ".csv": partial(_table, delimiter=","),
    ".tsv": partial(_table, delimiter="\t"),
    ".parquet": _parquet,
}
"""Readers of prompts by ending."""
PROMPT_FILES = (
    f"a file that ends in {', '.join(READERS)}, also compressed ({', '.join(COMPRESSIONS)})"
)
"""Files of prompts, in words: lines of text, a JSON list, or a field or column "prompt"."""
