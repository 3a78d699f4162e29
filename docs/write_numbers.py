"""Writes the numbers of the documents from their rows: `python docs/write_numbers.py`; with
`--check` it only says which documents it would change, and fails if there are any.

A number of a text stands before a mark `<!--n:id-->`, words that name it before a mark
`<!--l:id-->` or `<!--l:id:column-->`; tables and lists stand between `<!-- table ... -->` or
`<!-- lines: ids -->` and `<!-- end -->`. `numbers.toml` says which row of which file an id is.
CONTRIBUTING.md, "A number is its row", explains all of this.
"""

from __future__ import annotations

import csv
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS = {
    "file": "", "where": {}, "value": "mean", "interval": ["low", "high"], "digits": 1, "scale": 1,
    "unit": "", "sign": False, "label": "", "count": False, "of": {}, "distinct": "", "pick": "",
}  # fmt: skip
"""What numbers.toml and the head of a table may say of a number."""
UNITS = ("%", "points", "times")
NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?"
WRITTEN = rf"(?: (?:{'|'.join(UNITS)})(?!\w))?(?: \[{NUMBER}, {NUMBER}\])?"
MARK = re.compile(r"<!--(?P<kind>[nl]):(?P<id>[\w.-]+)(?::(?P<column>[^>|]+))?-->")
PART = re.compile(
    r"^<!-- (?P<block>table|lines:)(?P<head>(?:(?!-->).)*)-->\n"
    r"(?:(?!<!-- (?:table|lines:)).)*?^<!-- end -->$"
    r"|^ *```(?P<fence>.*?)^ *```$|^[^\n]*(?P<comment><!--)[^\n]*$",
    re.M | re.S,
)
"""Of a text: a block, a fenced block of code, which stays, or a line with marks."""
CELL = re.compile(r"(?P<start>^# %% \[markdown\]\n)(?P<text>(?:#.*\n)*)", re.M)

Settings = dict[str, Any]
Row = dict[str, str]


class NumberError(Exception):
    """A number cannot be written."""


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


def ends_with(text: str, words: str) -> bool:
    """True if a text ends with some words, as they are or as they begin a sentence."""
    return bool(re.search(rf"(?<![\w.])(?i:{re.escape(words[:1])}){re.escape(words[1:])}$", text))


class Numbers:
    """The sources and ids of numbers.toml, and the words of their labels.

    Args:
        text: What numbers.toml says.
        root: Folder that the names of files start from.

    Raises:
        NumberError: A key is not known.
    """

    def __init__(self, text: str, root: Path = ROOT) -> None:
        self.root = root
        self.sources: dict[str, Settings] = {}
        self.ids: dict[str, Settings] = {}
        sources = tomllib.loads(text)
        self.words: dict[str, dict[str, str]] = sources.pop("words", {})
        for name, source in sources.items():
            ids = {
                short: own
                for short, own in source.items()
                if isinstance(own, dict) and short not in DEFAULTS
            }
            own = {key: value for key, value in source.items() if key not in ids}
            self.sources[name] = merged(DEFAULTS, own, name)
            for short, of_id in ids.items():
                self.ids[f"{name}.{short}"] = merged(self.sources[name], of_id, f"{name}.{short}")

    def settings(self, identity: str) -> Settings:
        if identity not in self.ids:
            raise NumberError(f"{identity!r} is not in numbers.toml")
        return self.ids[identity]

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

    def number(self, settings: Settings) -> str:
        """A number as it is written: with sign, unit and interval."""
        if settings["unit"] not in ("", *UNITS):
            raise NumberError(f"unit {settings['unit']!r} is none of {', '.join(UNITS)}")
        unit, digits = f" {settings['unit']}".rstrip(), settings["digits"]
        if settings["count"]:
            count = len(self.rows(settings, settings["where"]))
            if not settings["of"]:
                return f"{count:,}"
            of = len(self.rows(settings, settings["of"]))
            if unit != " %":
                return f"{count:,} of {of:,}"
            return f"{rounded(100 * count / of, digits)}{unit}"
        row = self.row(settings)
        names = [settings["value"], *settings["interval"]]
        if not all(row[name] for name in names):
            raise NumberError(f"{settings['file']}: nothing in one of {', '.join(names)}")
        value, *ends = (float(row[name]) * settings["scale"] for name in names)
        interval = f" [{', '.join(rounded(end, digits) for end in ends)}]" if ends else ""
        return f"{rounded(value, digits, settings['sign'])}{unit}{interval}"

    def word(self, column: str, value: str) -> str:
        return self.words.get(column, {}).get(value, value)

    def label(self, identity: str, column: str | None = None) -> str:
        """The words of a row, or of the value in one of its columns; `value` stands for the name of
        the column that the number is from, `file` for that of its file."""
        settings = self.settings(identity)
        template = settings["label"] if column is None else f"{{{column}}}"
        row = {**settings["where"]} if settings["count"] else self.row(settings)
        try:
            words = {name: self.word(name, str(value)) for name, value in row.items()}
            words["value"] = self.word("columns", settings["value"])
            words["file"] = self.word("file", settings["file"])
            return str(template.format_map(words))
        except KeyError as error:
            raise NumberError(f"{settings['file']} has no column {error}") from error

    @cached_property
    def labels(self) -> set[str]:
        """Every label of an estimate."""
        estimates = [name for name, own in self.ids.items() if own["label"] and not own["count"]]
        return {self.label(identity) for identity in estimates}

    def lines(self, head: str) -> str:
        """A list of statements, label and number of each id; `source.*` are all of a source.

        Raises:
            NumberError: Only typed words tell the labels of two rows of a file from one another.
        """
        asked, generated = [], dict[tuple[str, ...], str]()
        for name in head.split():
            source = name.removesuffix("*")
            asked += [i for i in self.ids if i.startswith(source)] if source != name else [name]
        for identity in asked:
            settings = self.settings(identity)
            if not settings["label"]:
                raise NumberError(f"{identity} has no label")
            columns = re.findall(r"{(.+?)}", settings["label"])
            key = (settings["file"], *(self.label(identity, column) for column in columns))
            if generated.setdefault(key, identity) != identity and not settings["count"]:
                raise NumberError(f"labels of {generated[key]} and {identity} need another column")
        return "".join(f"- {self.label(i)}: {self.number(self.settings(i))}\n" for i in asked)

    def table(self, head: str) -> str:
        """A table: a row for each value of some columns, cells from the rows of a file that fit."""
        spec = tomllib.loads(head)
        row_names, columns = spec.pop("rows"), spec.pop("columns")
        base = self.sources[spec.pop("source")] if "source" in spec else DEFAULTS
        settings = merged(base, spec, "table")
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
        """The words of a column's filter and of the name of its value, where it has its own."""
        if isinstance(column, str):
            return self.word("columns", column)
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
        """The number of a cell, or the text of a column; empty where no row fits."""
        own = (
            {"count": False, "value": column, "interval": []} if isinstance(column, str) else column
        )
        if "source" in own:
            settings = self.sources[str(own["source"])]
        own = {key: value for key, value in own.items() if key != "source"}
        settings = merged(merged(settings, own, "column"), {"where": fixed}, "row")
        if not settings["count"] and not self.rows(settings, settings["where"]):
            return ""
        if isinstance(column, str):
            return self.word(column, self.row(settings)[column]).replace("|", "\\|")
        return self.number(settings)

    def before(self, text: str, mark: re.Match[str]) -> str:
        """What stands before a mark on its line, with the number or label as it should be."""
        settings = self.settings(mark["id"])
        if mark["kind"] == "n":
            number, of = self.number(settings), rf"(?: of {NUMBER})?" if settings["of"] else ""
            match = re.search(rf"(?<![\w.,/+-]){NUMBER}{of}{WRITTEN}$", text)
            if not match:
                raise NumberError(f"no number before {mark[0]}; it is {number}")
            return text[: match.start()] + number
        label = self.label(mark["id"], mark["column"])
        column = mark["column"]
        known = set(self.words.get(column, {}).values()) - {""} if column else self.labels
        endings = [words for words in known | {label} if ends_with(text, words)]
        if not endings:
            raise NumberError(f"no label before {mark[0]}; it is {label!r}")
        there = max(endings, key=len)
        return text if there == label else text[: -len(there)] + label

    def markdown(self, text: str, name: str) -> str:
        """A text in Markdown with every number and label as its row has them.

        Raises:
            NumberError: A number cannot be written; the message has name and line.
        """

        def written(part: re.Match[str]) -> str:
            try:
                if part["block"]:
                    rows = (self.table if part["block"] == "table" else self.lines)(part["head"])
                    return f"<!-- {part['block']}{part['head']}-->\n{rows}<!-- end -->"
                line, end = "", 0
                for mark in () if part["fence"] else MARK.finditer(part[0]):
                    line += self.before(part[0][end : mark.start()], mark) + mark[0]
                    end = mark.end()
                if part["comment"] and "<!--" in MARK.sub("", part[0]):
                    raise NumberError("a comment that is no mark, and no block with its end")
                return line + part[0][end:]
            except (NumberError, KeyError, ValueError) as error:
                number = text.count("\n", 0, part.start()) + 1
                raise NumberError(f"{name}:{number}: {error}") from error

        return PART.sub(written, text)

    def document(self, text: str, name: str) -> str:
        """A document of any kind: Markdown, a script with cells of Markdown, or its notebook."""
        if name.endswith(".py"):
            return CELL.sub(lambda cell: cell["start"] + self.comment(cell["text"], name), text)
        if name.endswith(".ipynb"):
            book = json.loads(text)
            for cell in book["cells"]:
                if cell["cell_type"] == "markdown":
                    source = self.markdown("".join(cell["source"]), name)
                    cell["source"] = source.splitlines(keepends=True)
            return json.dumps(book, indent=1, ensure_ascii=False) + "\n"
        return self.markdown(text, name)

    def comment(self, text: str, name: str) -> str:
        lines = self.markdown(re.sub("^# ?", "", text, flags=re.M), name).splitlines()
        return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def documents(root: Path = ROOT) -> Iterator[Path]:
    """README.md, the pages of docs/, and the scripts and notebooks with cells of Markdown."""
    for pattern in (
        "README.md",
        "docs/**/*.md",
        "docs/notebooks/*.ipynb",
        "analyses/*/*.md",
        "analyses/*/*.py",
    ):
        for file in sorted(root.glob(pattern)):
            # What is built of these, and pages that include them.
            if not {"_build", "studies"} & {*file.relative_to(root).parts}:
                yield file


def changes(root: Path = ROOT) -> dict[Path, str]:
    """Documents in which a number or label is not as its row has it: what they should be."""
    numbers = Numbers((root / "docs" / "numbers.toml").read_text("utf-8"), root)
    return {
        file: written
        for file in documents(root)
        if (
            written := numbers.document(
                text := file.read_text("utf-8"), str(file.relative_to(root))
            )
        )
        != text
    }


if __name__ == "__main__":
    try:
        written = changes()
    except NumberError as problem:
        sys.exit(str(problem))
    for changed, document in written.items():
        print(changed.relative_to(ROOT))
        if "--check" not in sys.argv:
            changed.write_text(document, "utf-8")
    sys.exit(1 if written and "--check" in sys.argv else 0)
