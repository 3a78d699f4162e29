"""Writes the tables of the documents from committed CSV files: `python docs/write_tables.py`; with
`--check` it only says which documents it would change, and fails if there are any.

A table stands between `<!-- table ... -->` and `<!-- end -->`. Its first lines say which rows and
columns it has, and `numbers.toml` says what their values are called. CONTRIBUTING.md, "A number is
its row", explains this.
"""

from __future__ import annotations

import csv
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS = {
    "file": "", "where": {}, "value": "mean", "interval": ["low", "high"], "digits": 1, "scale": 1,
    "unit": "", "sign": False, "count": False, "of": None, "distinct": "", "pick": "",
}  # fmt: skip
"""What a source, a table or a statement may say of a number."""
UNITS = ("%", "points", "times")
TABLE = re.compile(
    r"^<!-- table(?P<head>(?:(?!-->).)*)-->\n(?:(?!<!-- table).)*?^<!-- end -->$", re.M | re.S
)

Settings = dict[str, Any]
Row = dict[str, str]


class NumberError(Exception):
    """A number cannot be written, or is not that of its row."""


@cache
def table_of(file: Path) -> list[Row]:
    """Rows of a CSV file, each value as it is written there."""
    if not file.is_file():
        raise NumberError(f"no file {file}")
    with file.open(encoding="utf-8", newline="") as opened:
        rows = list(csv.DictReader(opened))
    if not rows:
        raise NumberError(f"{file} has no rows")
    return rows


def fits(value: str, wanted: Any) -> bool:
    """True if a value is, as text or number, the wanted one, or one of a list; `> 0` and `< 0`
    compare, `!x` is any value but x, `~x` one that contains x."""
    if isinstance(wanted, list):
        return any(fits(value, one) for one in wanted)
    text = str(wanted)
    if text[:1] in ("!", "~"):
        return text[1:] in value if text[0] == "~" else value != text[1:]
    if text.startswith(("> ", "< ")):
        sign = 1 if text[0] == ">" else -1
        return bool(value) and sign * float(value) > sign * float(text[2:])
    try:
        return value == text or float(value) == float(text)
    except ValueError:
        return False


def rounded(value: float, digits: int, sign: bool = False) -> str:
    text = f"{value:{'+' if sign else ''},.{digits}f}"
    return text if re.search("[1-9]", text) else text.lstrip("+-")


def merged(settings: Settings, own: Settings, name: str) -> Settings:
    """Settings of a number with some of its own; its filter is added to theirs."""
    if unknown := set(own) - set(DEFAULTS):
        raise NumberError(f"{name}: unknown {sorted(unknown)}; allowed are {', '.join(DEFAULTS)}")
    return settings | own | {"where": settings["where"] | own.get("where", {})}


class Numbers:
    """The sources of numbers.toml, and the words for values of columns.

    Args:
        text: What numbers.toml says.
        root: Folder that the names of files start from.

    Raises:
        NumberError: A key is not known.
    """

    def __init__(self, text: str, root: Path = ROOT) -> None:
        self.root = root
        sources = tomllib.loads(text)
        self.words: dict[str, dict[str, str]] = sources.pop("words", {})
        self.sources = {name: merged(DEFAULTS, own, name) for name, own in sources.items()}

    @classmethod
    def read(cls, root: Path = ROOT) -> Numbers:
        """Those of the checkout."""
        return cls((root / "docs" / "numbers.toml").read_text("utf-8"), root)

    def settings(self, own: Settings, name: str) -> Settings:
        """What `source` says, with some settings of its own."""
        own = dict(own)
        source = own.pop("source", None)
        if source is not None and source not in self.sources:
            raise NumberError(f"{name}: {source!r} is no source of numbers.toml")
        return merged(DEFAULTS if source is None else self.sources[source], own, name)

    def rows(self, settings: Settings, where: Settings) -> list[Row]:
        """Rows of a source that fit a filter; those equal in its column `distinct` count once."""
        rows = table_of(self.root / settings["file"])
        columns = [settings["value"], *settings["interval"]]
        if settings["count"]:
            columns = [settings["distinct"]] if settings["distinct"] else []
        if unknown := {*where, *columns} - set(rows[0]):
            raise NumberError(f"{settings['file']} has no column {sorted(unknown)}")
        rows = [row for row in rows if all(fits(row[name], where[name]) for name in where)]
        if name := settings["distinct"]:
            rows = list({row[name] or id(row): row for row in reversed(rows)}.values())[::-1]
        return rows

    def row(self, settings: Settings) -> Row:
        """The one row of a number; of several the one with the lowest or highest value, if asked.

        Raises:
            NumberError: No row fits, or several.
        """
        rows = self.rows(settings, settings["where"])
        if rows and settings["pick"] in ("min", "max"):
            by_value = sorted(rows, key=lambda row: float(row[settings["value"]]))
            return by_value[0 if settings["pick"] == "min" else -1]
        if len(rows) != 1:
            raise NumberError(f"{len(rows)} rows of {settings['file']} fit {settings['where']}")
        return rows[0]

    def counts(self, settings: Settings) -> list[int]:
        """How many rows fit, and of how many."""
        filters = [settings["where"], settings["of"]]
        return [len(self.rows(settings, where)) for where in filters if where is not None]

    def values(self, settings: Settings) -> list[float]:
        """The value of a row, and the ends of its interval."""
        row = self.row(settings)
        names = [settings["value"], *settings["interval"]]
        if not all(row[name] for name in names):
            raise NumberError(f"{settings['file']}: nothing in one of {', '.join(names)}")
        return [float(row[name]) * settings["scale"] for name in names]

    def number(self, settings: Settings) -> str:
        """A number as a table has it: with sign, unit and interval."""
        if settings["unit"] not in ("", *UNITS):
            raise NumberError(f"unit {settings['unit']!r} is none of {', '.join(UNITS)}")
        if settings["count"]:
            return " of ".join(f"{count:,}" for count in self.counts(settings))
        unit, digits = f" {settings['unit']}".rstrip(), settings["digits"]
        value, *ends = self.values(settings)
        interval = f" [{', '.join(rounded(end, digits) for end in ends)}]" if ends else ""
        return f"{rounded(value, digits, settings['sign'])}{unit}{interval}"

    def word(self, column: str, value: str) -> str:
        return self.words.get(column, {}).get(value, value)

    def table(self, head: str) -> str:
        """A table: a row for each value of some columns, cells from the rows of a file that fit."""
        spec = tomllib.loads(head)
        row_names, columns = spec.pop("rows"), spec.pop("columns")
        settings = self.settings(spec, "table")
        where, rows = settings["where"], table_of(self.root / settings["file"])
        values: list[Any] = [  # in the order of the filter's list, otherwise of the file
            map(str, where[name]) if isinstance(where.get(name), list)
            else dict.fromkeys(row[name] for row in rows if fits(row[name], where.get(name, "!")))
            for name in row_names
        ]  # fmt: skip
        heads = [self.word("columns", name) for name in row_names]
        heads += [self.head(column) for column in columns]
        lines = []
        for keys in product(*values):
            fixed = dict(zip(row_names, keys, strict=True))
            cells = [self.cell(settings, column, fixed) for column in columns]
            if any(cell.strip("0") for cell in cells):
                lines.append([self.word(*pair) for pair in fixed.items()] + cells)
        if not lines or not all(map(any, zip(*lines, strict=True))):
            raise NumberError(f"a column of a table is empty: {', '.join(heads)}")
        names = [*heads, *(" | ".join(cells[: len(row_names)]) for cells in lines)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise NumberError(f"two rows or columns of a table are called {twice[0]!r}")
        return "".join(
            f"| {' | '.join(cells)} |\n" for cells in (heads, ["---"] * len(heads), *lines)
        )

    def head(self, column: str | Settings) -> str:
        """The words of a column's filter and of the name of its value, where it has its own; or its
        `head`, if it says one."""
        if isinstance(column, str):
            return self.word("columns", column)
        if "head" in column:
            return str(column["head"])
        filters = [
            [
                self.word(name, str(value))
                for value in (wanted if isinstance(wanted, list) else [wanted])
            ]
            for name, wanted in column.get("where", {}).items()
        ]
        words = [" or ".join(dict.fromkeys(filter(None, values))) for values in filters]
        return ", ".join(filter(None, [*words, self.word("columns", column.get("value", ""))]))

    def cell(self, settings: Settings, column: str | Settings, fixed: Settings) -> str:
        """The number of a cell, or the text of a column; empty where no row fits or has a value."""
        own = {"value": column, "interval": []} if isinstance(column, str) else dict(column)
        own.pop("head", None)
        if "source" in own:
            settings = self.settings({"source": own.pop("source")}, "column")
        settings = merged(merged(settings, own, "column"), {"where": fixed}, "row")
        if not settings["count"]:
            names = [settings["value"], *settings["interval"]]
            rows = self.rows(settings, settings["where"])
            if not any(row[name] for row in rows for name in names):
                return ""
        if isinstance(column, str):
            return self.word(column, self.row(settings)[column]).replace("|", "\\|")
        return self.number(settings)

    def markdown(self, text: str, name: str) -> str:
        """A text in Markdown with every table as its rows have it.

        Raises:
            NumberError: A table cannot be written; the message has name and line.
        """

        def written(block: re.Match[str]) -> str:
            try:
                return f"<!-- table{block['head']}-->\n{self.table(block['head'])}<!-- end -->"
            except (NumberError, KeyError, ValueError) as error:
                line = text.count("\n", 0, block.start()) + 1
                raise NumberError(f"{name}:{line}: {error}") from error

        if stray := re.search(
            r"<!--", re.sub(r"^ *```.*?^ *```$", "", TABLE.sub("", text), flags=re.M | re.S)
        ):
            start = stray.string[stray.start() :].splitlines()[0]
            raise NumberError(f"{name}: a comment that is no table with its end: {start}")
        return TABLE.sub(written, text)


def documents(root: Path = ROOT) -> Iterator[Path]:
    """README.md, and the pages of docs/ and analyses/."""
    for pattern in ("README.md", "docs/**/*.md", "analyses/*/*.md"):
        for file in sorted(root.glob(pattern)):
            # What is built of these, and pages that include them.
            if not {"_build", "studies"} & {*file.relative_to(root).parts}:
                yield file


def changes(root: Path = ROOT) -> dict[Path, str]:
    """Documents in which a table is not as its rows have it: what they should be."""
    numbers, changed = Numbers.read(root), {}
    for file in documents(root):
        text = file.read_text("utf-8")
        written = numbers.markdown(text, str(file.relative_to(root)))
        if written != text:
            changed[file] = written
    return changed


if __name__ == "__main__":
    try:
        to_write = changes()
    except NumberError as problem:
        sys.exit(str(problem))
    for changed_file, document in to_write.items():
        print(changed_file.relative_to(ROOT))
        if "--check" not in sys.argv:
            changed_file.write_text(document, "utf-8")
    sys.exit(1 if to_write and "--check" in sys.argv else 0)
