"""Checks what the documents say of the results: `python docs/statements.py` prints what does not
hold, and fails if there is something.

`statements.toml` is a table of statements: a page, a text that stands on it, the rows that it is
about, and what it claims of them. Both sides are checked. The text must be on the page, and each
number, direction and verdict in it must be that of its row. Every number of a result that stands on
a page must be in a statement. CONTRIBUTING.md, "A number is its row", explains this.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from write_tables import ROOT, TABLE, NumberError, Numbers, Row, Settings, documents

SMALL = "no one two three four five six seven eight nine ten eleven twelve"
COUNTS = {word: number for number, word in enumerate(SMALL.split())} | {"none": 0}
"""Words for numbers of cases."""
DIGITS = r"[+-]?\d[\d,]*(?:\.\d+)?"
COUNT = rf"(?:{DIGITS}|{'|'.join(COUNTS)})"
OF = rf"(?: of (?:the |its |their |our |all )?(?P<of>{COUNT}))"
NUMBER = re.compile(
    rf"(?P<value>{COUNT}){OF}?"
    rf"(?: (?P<unit>%|points?|times))?(?: \[(?P<low>{DIGITS}), (?P<high>{DIGITS})\])?",
    re.I,
)
"""A number of a text: "12 points [9, 15]", "five of the six"."""

UP = (
    "above", "add", "adds", "added", "beats", "better", "costs", "exceeds", "gain", "gained",
    "gains", "grows", "higher", "larger", "longer", "more", "raise", "raised", "raises", "rise",
    "rises", "rose", "slower", "stronger",
)  # fmt: skip
DOWN = (
    "below", "cheaper", "drop", "drops", "fall", "falls", "faster", "fell", "fewer", "less", "lose",
    "loses", "lost", "lower", "lowered", "lowers", "shrinks", "smaller", "weaker", "worse",
)  # fmt: skip
OPEN = re.compile(
    r"no (?:gain|loss|harm|change|difference)(?: (?:over|of) .+)? is shown"
    r"|(?:is |are )?not (?:shown|decided)(?: to .+)?|(?:is )?(?:open|undecided)"
    r"|cannot tell|equal|as much as|about the same"
)
SHARES = {
    "nearly all": (0.85, 1.05), "three quarters": (0.7, 0.8), "two thirds": (0.6, 0.72),
    "most": (0.5, 1.01), "mostly": (0.5, 1.01),
    "half": (0.4, 0.6), "a third": (0.28, 0.39),
    "a quarter": (0.2, 0.3), "a fifth": (0.15, 0.25), "a tenth": (0.07, 0.13),
    "little": (-0.05, 0.2), "a small part": (-0.05, 0.2), "nothing": (-0.05, 0.05),
}  # fmt: skip
"""The phrases that may stand in `says`: directions (such a word may have others behind it, as in
"more toxic"), what is not decided, and shares from, to."""
CORRECTED = {"after correction": True, "not decided after correction": False}
"""These phrases say whether the row's p_holm is below .05."""
DIRECTIONS = re.compile(
    r"\b(?:adds?|beats?|better|gains?|raises?|rises?|falls?|fell|lowers?|loses?|worse"
    r"|more toxic|less toxic|not shown|undecided|no gain|not decided)\b"
)
"""Words with which a sentence tells a result, on the pages that are `STRICT`."""
STRICT = {"README.md": "What was found", "docs/results.md": r"(?:In short|\d+\. .*)"}
"""Sections of pages where every number has its row, but for settings and sizes, and every direction
is checked."""
PLAIN = r"[+-]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
SETTING = re.compile(
    rf"(?<![\w.,/]){PLAIN}(?:[-–]\w|\w)*(?:(?:,| to| and| or) \d[\d,]*)*(?: or more)?"
    r" (?:new |more |best |neutral |chosen |opposing |trained |generated |other |random )*(?:tokens"
    r"|steps|keys|heads|layers|texts|prompts|samples|words|models?|tasks|methods|messages|chats|turns"
    r"|answers|minutes|hours|million|billion|seeds?|runs|GB|MB|lines|characters|resamples)\b"
    r"|(?:alpha|omega|lambda|strength|temperature|turn|top-k|layer|step|length|Tables?|Sections?"
    r"|\$\\(?:alpha|omega|lambda)\$|Figures?|Eq\.|Equations?|Propositions?|Gemma|seed|version)"
    r" (?:=|of )?\d[\d,.]*(?:/\d)?(?:(?:,| to| and| or) \d[\d,.]*(?:/\d)?)*"
    r"|(?<!\w)\d+[MB]\b|\w*[A-Za-z²]+-?\d[\w.-]*|\d+-\w+|\d{4}-\d\d-\d\d"
)
"""Settings and sizes: "64, 128 or 256 tokens", "alpha 1/2", "Table 4", "135M", "SmolLM2-135M"."""
ENDS = rf" ?\[{DIGITS}, {DIGITS}\]"
RESULT = re.compile(
    rf"(?<![\w.,/+-]){DIGITS}(?:(?: ?%| (?:points?|times)(?!\w))(?:{ENDS})?|{ENDS})|{ENDS}"
)
"""Numbers of results wherever they stand: intervals, percentages, differences and ratios."""
COUNTED = re.compile(rf"\b{COUNT}{OF}\b(?! (?:tokens|prompts|texts))".replace("?P<of>", "?:"), re.I)
NO_PROSE = re.compile(
    r"^ *```.*?^ *```$|^#+ .*?$|^\d+\. |!\[.*?\](?=\()|\]\([^)]*\)|`[^`]*`|^\|.*?$|<!--.*?-->",
    re.M | re.S,
)
"""Code, headings, texts of images, targets of links, and tables."""
STATEMENT = {"page", "text", "rows"}
ABOUT_ROW = {"number", "says", "source"}


def joined(text: str) -> str:
    """A text with single spaces; of a script, without the signs of comments."""
    return " ".join(text.split())


def page_text(file: Path) -> str:
    """What a page says."""
    text = file.read_text("utf-8")
    return joined(re.sub("^# ?", "", text, flags=re.M) if file.suffix == ".py" else text)


def sentence_around(text: str, match: re.Match[str]) -> str:
    """The sentences of a text that some words stand in."""
    begin = max((m.end() for m in re.finditer(r"[.?!:;] ", text[: match.start()])), default=0)
    end = re.search(r"[.?!;](?: |$)", text[match.end() :])
    return text[begin : match.end() + end.start()] if end else text[begin:]


def value_of(written: str) -> float:
    """A number in digits or in words."""
    word = written.lower()
    return float(COUNTS[word] if word in COUNTS else word.replace(",", ""))


def named(text: str, words: str) -> re.Match[str] | None:
    """Where words or a number stand in a text, and not as a part of others."""
    alone = rf"(?<![\w-])(?<!\d[.,]){re.escape(words)}(?![\w-]|[.,]\d)"
    return re.search(alone, text, re.I)


class Statements:
    """The statements of statements.toml.

    Args:
        text: What statements.toml says.
        numbers: Sources of the numbers.

    Raises:
        NumberError: A key is not known.
    """

    def __init__(self, text: str, numbers: Numbers) -> None:
        table = tomllib.loads(text)
        self.numbers = numbers
        self.names: dict[str, dict[str, list[str]]] = table.get("names", {})
        self.statements: list[Settings] = table.get("statement", [])
        for statement in self.statements:
            statement["text"] = joined(statement["text"])
            if set(statement) != STATEMENT:
                raise NumberError(
                    f"{statement['text'][:60]!r} needs {', '.join(sorted(STATEMENT))}"
                )

    @classmethod
    def read(cls, root: Path = ROOT) -> Statements:
        """Those of the checkout."""
        text = (root / "docs" / "statements.toml").read_text("utf-8")
        return cls(text, Numbers.read(root))

    def problems(self, root: Path = ROOT) -> list[str]:
        """What does not hold, a line each; and numbers of results that are in no statement."""
        lines = []
        for statement in self.statements:
            text, page = statement["text"], statement["page"]
            if not (root / page).is_file() or text not in page_text(root / page):
                lines.append(f"{page}: the text is not on the page: {text!r}")
            for row in statement["rows"]:
                try:
                    lines += [f"{page}: {text!r}: {problem}" for problem in self.row(text, row)]
                except (NumberError, KeyError, ValueError) as error:
                    lines.append(f"{page}: {text!r}: {error}")
        for file in documents(root):
            page = file.relative_to(root).as_posix()
            lines += [f"{page}: in no statement: {part}" for part in self.bare(file, page)]
        return lines

    def row(self, text: str, about: Settings) -> list[str]:
        """What is wrong about one row of a statement."""
        says = about.get("says", [])
        says = [says] if isinstance(says, str) else says
        own = {key: value for key, value in about.items() if key not in ("number", "says")}
        settings = self.numbers.settings(own, "row")
        wrong = [f"{words!r} is not in the text" for words in says if not named(text, words)]
        if settings["count"]:
            if "number" in about:
                wrong += self.count(about["number"], self.numbers.counts(settings))
            record = {key: str(value) for key, value in settings["where"].items()}
        else:
            record, values = self.numbers.row(settings), self.numbers.values(settings)
            neutral = 1.0 if settings["unit"] == "times" else 0.0
            if "number" in about:
                down = any(words in DOWN for words in says)
                wrong += self.number(about["number"], values, settings["unit"], down)
            for words in says:
                wrong += self.claim(words, values, neutral, settings, record)
        part = about.get("number", says[0] if says else "")
        if part and (match := named(text, part)):
            wrong += self.misnamed(sentence_around(text, match), record)
        elif part:
            wrong.append(f"{part!r} is not in the text")
        return wrong

    def count(self, written: str, counts: list[int]) -> list[str]:
        match = NUMBER.fullmatch(written)
        numbers = [match["value"], match["of"]][: len(counts)] if match else []
        values = [value_of(word) for word in numbers if word]
        return [] if values == counts else [f"{written!r} is {' of '.join(map(str, counts))}"]

    def number(self, written: str, values: list[float], unit: str, down: bool) -> list[str]:
        """A number, and its interval if it has one, as it is rounded in the text. Where a word says
        that something falls, the number may be the amount of the fall."""
        match = NUMBER.fullmatch(written)
        if not match or match["of"]:
            return [f"{written!r} is no number with a unit and an interval"]
        parts = [match["value"], match["low"], match["high"]]
        if down and match["value"][0] not in "+-" and values[0] < 0:
            values = [-values[0], *(-value for value in reversed(values[1:]))]
        wrong = []
        for part, value in zip(parts, values, strict=False):
            if part is not None:
                digits = len(part.partition(".")[2])
                if abs(value_of(part) - value) > 0.5 * 10**-digits + 1e-9:
                    wrong.append(f"{written!r} is {', '.join(f'{v:.4g}' for v in values)}")
                    break
        if match["low"] and len(values) < 3:
            wrong.append(f"{written!r} has an interval that its row has not")
        if match["unit"] and unit and match["unit"].removesuffix("s") != unit.removesuffix("s"):
            wrong.append(f"{written!r} is in {unit}")
        return wrong

    def claim(
        self, words: str, values: list[float], neutral: float, settings: Settings, record: Row
    ) -> list[str]:
        """What a direction or a verdict claims of a row."""
        value, low, high = values if len(values) == 3 else (values[0],) * 3
        first = words.partition(" ")[0]
        if words in CORRECTED:
            true = (float(record["p_holm"]) < 0.05) == CORRECTED[words]
        elif (share_words := words.removeprefix("about ")) in SHARES:
            share = value / 100 if settings["unit"] == "%" else value
            true = SHARES[share_words][0] <= share <= SHARES[share_words][1]
        elif OPEN.fullmatch(words):
            true = low <= neutral <= high
        elif first in UP:
            true = low > neutral
        elif first in DOWN:
            true = high < neutral
        else:
            return [f"{words!r} is no phrase of docs/statements.py"]
        shown = ", ".join(f"{number:.4g}" for number in values)
        return [] if true else [f"{words!r} is not what the row says: {shown}"]

    def misnamed(self, sentence: str, record: Row) -> list[str]:
        """Names of another method, task or cause in the sentence, without those of the row."""
        wrong = []
        for column, names in self.names.items():
            of_row = names.get(record.get(column, ""))
            there = [
                words for several in names.values() for words in several if named(sentence, words)
            ]
            if of_row and there and not any(named(sentence, words) for words in of_row):
                wrong.append(f"{there[0]!r} is said, but the row has {of_row[0]!r}")
        return wrong

    def bare(self, file: Path, page: str) -> list[str]:
        """Numbers of results on a page that are in no statement; on strict pages also other
        numbers, and sentences that tell a direction."""
        text = file.read_text("utf-8")
        strict = page in STRICT
        if strict:
            sections = rf"^## {STRICT[page]}$((?s:.*?))(?=^## |\Z)"
            text = "\n".join(part[1] for part in re.finditer(sections, text, re.M))
        if page.startswith("analyses/"):
            text = re.sub(r"^## Plan$.*?(?=^## |\Z)", "", text, flags=re.M | re.S)
        prose = joined(NO_PROSE.sub(" ", TABLE.sub(" ", text)))
        prose_left = prose
        for statement in self.statements:
            if statement["page"] == page:
                plain = joined(NO_PROSE.sub(" ", statement["text"]))
                blotted = plain
                for row in statement["rows"]:
                    if "number" in row:
                        blotted = blotted.replace(row["number"], "@", 1)
                prose_left = prose_left.replace(
                    plain, DIRECTIONS.sub("@", blotted) if strict else blotted
                )
        prose_left = re.sub(r"(?i)95 % intervals?|chance is \d+ %[^.]*", "", prose_left)
        patterns = [RESULT]
        if strict:
            prose_left = SETTING.sub("@", prose_left)
            patterns += [
                COUNTED,
                DIRECTIONS,
                re.compile(r"(?<![\w.,/@])[+-]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"),
            ]
        elif page.startswith("docs/") or page == "README.md":
            patterns = [re.compile(ENDS)]
        return list(dict.fromkeys(
            prose_left[max(match.start() - 40, 0) : match.end() + 30]
            for pattern in patterns
            for match in pattern.finditer(prose_left)
        ))  # fmt: skip


if __name__ == "__main__":
    try:
        wrong_lines = Statements.read().problems()
    except NumberError as problem:
        sys.exit(str(problem))
    print("\n".join(wrong_lines) or "every statement holds")
    sys.exit(bool(wrong_lines))
