"""Numbers of the documents are those of their rows: docs/write_numbers.py finds nothing to change,
and in the pages that tell results no number stands without its row."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("write_numbers", ROOT / "docs" / "write_numbers.py")
assert SPEC
assert SPEC.loader
writer = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(writer)

STRICT = ["README.md", "docs/results.md"]
"""Pages where every number has its row, but for settings and sizes; of README.md, one section. In
README.md of the studies, outside "## Plan", so has every interval, percentage, difference and ratio."""

MARKED = re.compile(rf"{writer.NUMBER}(?: of {writer.NUMBER})?{writer.WRITTEN}<!--n:[\w.-]+-->")
NO_PROSE = re.compile(
    r"^ *```.*?^ *```$|^<!-- (?:table|lines:).*?^<!-- end -->$|^#+ [\d.]+|!\[.*?\]|\]\(.*?\)|`[^`]*`|<!--.*?-->",
    re.M | re.S,
)
"""Blocks, numbers of sections, code, texts of images, targets of links and labels' marks."""
DIGITS = r"(?<![\w.,/])[+-]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
BOTH_ENDS = rf" ?\[{DIGITS}, {DIGITS}\]"
CLAIM = re.compile(
    rf"{DIGITS}(?:(?: ?%| (?:points?|times)(?!\w))(?:{BOTH_ENDS})?|{BOTH_ENDS})|{BOTH_ENDS}"
)
SMALL = "one|two|three|four|five|six|seven|eight|nine|ten"
COUNTED = re.compile(rf"\b(?:{SMALL}) of (?:the )?(?:{SMALL})\b", re.I)
SETTING = re.compile(
    rf"{DIGITS}(?:[-–]\w|\w)*(?:(?:,| to| and| or) {DIGITS})*(?: or more)? (?:new |more |neutral )?"
    r"(?:tokens|steps|keys|heads|layers|texts|prompts|samples|words|models?|tasks|methods)\b"
    r"|(?:alpha|omega|lambda|\$\\(?:alpha|omega|lambda)\$|Tables?|Sections?|Figures?|Eq\.|Propositions?|Gemma|seed)"
    rf" (?:=|of )?{DIGITS}(?:/\d)?(?:(?:,| to| and| or) {DIGITS}(?:/\d)?)*"
    r"|(?<!\w)\d+[MB]\b|\w*[A-Za-z²]+-?\d[\w.-]*|\d+-\w+"
)
"""Settings and sizes: "64, 128 or 256 tokens", "alpha 1/2", "Table 4", "135M", "SmolLM2-135M"."""


def prose(text):
    """A text with its marked numbers and all that is no prose blotted out, on its lines."""
    blot = lambda match: re.sub(r"[^\n]+", " @ ", match[0])  # noqa: E731
    return NO_PROSE.sub(blot, MARKED.sub("@", text))


def bare_numbers(text, claims_only=False):
    """Numbers of a page without their row, each with words around it."""
    text = re.sub("95 % intervals?", "", " ".join(prose(text).split()))
    patterns = [(text, CLAIM)]
    if not claims_only:  # the noun after it excuses no percentage
        rest = SETTING.sub("", CLAIM.sub("", text))
        patterns += [(text, COUNTED), (rest, re.compile(DIGITS))]
    return [
        source[max(match.start() - 30, 0) : match.end() + 20]
        for source, pattern in patterns
        for match in pattern.finditer(source)
    ]


def unlabelled(text, numbers, comparing=True):
    """Ids, with their sentences, that have a number there and no words of their row, counts left
    out; only in sentences that compare numbers of one file, or in all."""
    wrong = []
    for sentence in sentences(text):
        ids = re.findall(r"<!--n:([\w.-]+)-->", sentence)
        ids = [name for name in dict.fromkeys(ids) if not numbers.settings(name)["count"]]
        files = [numbers.settings(name)["file"] for name in ids]
        wrong += [
            f"{name}: {sentence}"
            for name, file in zip(ids, files, strict=True)
            if files.count(file) > comparing and f"<!--l:{name}" not in sentence
        ]
    return wrong


COMPARED = ("arm", "family", "method", "task", "scorer")
"""Columns whose words, and values that have none, may stand beside a number only with a mark."""


def sentences(text):
    text = re.sub(r"^<!-- (?:table|lines:).*?^<!-- end -->$", "\n\n", text, flags=re.M | re.S)
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*] ", text):
        yield from re.split(r"(?<=[.?!])\W*\s+(?=[^a-z])", " ".join(paragraph.split()))


def unmarked_words(text, numbers):
    """Words for arms, methods, tasks and scorers beside a number that no mark ties to its row."""
    words = {word for column in COMPARED for word in numbers.words.get(column, {}).values()}
    words |= {"sentiment", "topic", "linear", "adapter"} - {""}
    longest = "|".join(sorted(map(re.escape, words - {""}), key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w-])(?:{longest})(?![\w-])")
    unmarked = []
    for sentence in sentences(text):
        rest = re.sub(r"\]\(.*?\)", "", sentence)
        for mark in writer.MARK.finditer(rest):
            label = numbers.label(mark["id"], mark["column"]) if mark["kind"] == "l" else ""
            rest = rest.replace(label + mark[0], "")
        if "<!--n:" in sentence:
            unmarked += [f"{word}: {sentence}" for word in pattern.findall(rest)]
    return unmarked


TABLE = """\
task,arm,scorer,metric,mean,low,high
sentiment,none,adapter,acc,0.553,0.536,0.571
sentiment,all,adapter,acc,0.564,0.549,0.579
sentiment,chosen,adapter,acc,0.768,0.748,0.787
sentiment,chosen,linear,acc,0.675,0.661,0.69
topic,none,adapter,acc,0.4,0.38,0.42
topic,chosen,adapter,acc,0.5,0.48,0.52
"""
CHANGES = """\
task,arm,against,change,low,high,verdict
sentiment,chosen,all,20.4,18.04,22.66,more
topic,chosen,all,-0.04,-1.26,1.25,inconclusive
detox,chosen,all,-2.05,-3.95,-0.35,less
detox,all,none,2.05,0.35,3.95,more
"""
NUMBERS = """
[words.arm]
chosen = "24 heads"
all = "all heads"
none = "no bias"
[words.against]
all = "minus all heads"
none = "minus no bias"
[words.task]
sentiment = "sentiment"
topic = "topic"
[words.scorer]
adapter = "by the first scorer"
linear = "by the second scorer"

[arms]
file = "arms.csv"
scale = 100
unit = "%"
label = "{arm}, {task}"
[arms.none]
where = {task = "sentiment", arm = "none"}
[arms.all]
where = {task = "sentiment", arm = "all"}
[arms.chosen]
where = {task = "sentiment", arm = "chosen", scorer = "adapter"}
[arms.linear]
where = {task = "sentiment", arm = "chosen", scorer = "linear"}
[arms.topic]
where = {task = "topic", arm = "chosen"}
[arms.highest]
where = {task = "topic"}
label = ""
pick = "max"
interval = []

[changes]
file = "changes.csv"
value = "change"
unit = "points"
sign = true
label = "{arm} {against}, {task}"
[changes.sentiment]
where = {task = "sentiment"}
[changes.topic]
where = {task = "topic"}
[changes.detox]
where = {task = "detox", arm = "chosen"}
[changes.more]
where = {verdict = "more"}
count = true
[changes.decided]
where = {verdict = "!inconclusive"}
of = {arm = ["all", "chosen"]}
count = true
[changes.share]
where = {low = "> 0"}
of = {arm = "!nothing"}
count = true
unit = "%"
digits = 0
[changes.tasks]
where = {}
count = true
distinct = "task"
label = "tasks"
"""
PAGE = """\
# A page

At 64 tokens 24 heads<!--l:arms.chosen:arm--> have 76.8 % [74.8, 78.7]<!--n:arms.chosen--> and
all heads<!--l:arms.all:arm--> 56.4 % [54.9, 57.9]<!--n:arms.all-->. By the second
scorer it is 67.5 % [66.1, 69.0]<!--n:arms.linear-->.

24 heads<!--l:changes.topic:arm--> change it by 0.0 points [-1.3, 1.2]<!--n:changes.topic--> on
topic<!--l:changes.topic:task-->, at most 50.0 %<!--n:arms.highest-->; 2<!--n:changes.more--> of
all, 3 of 4<!--n:changes.decided-->, or 50 %<!--n:changes.share-->; and
24 heads minus all heads, sentiment<!--l:changes.sentiment-->: +20.4 points [18.0, 22.7]<!--n:changes.sentiment-->.

<!-- lines: arms.none arms.chosen changes.topic changes.tasks -->
- no bias, sentiment: 55.3 % [53.6, 57.1]
- 24 heads, sentiment: 76.8 % [74.8, 78.7]
- 24 heads minus all heads, topic: 0.0 points [-1.3, 1.2]
- tasks: 3
<!-- end -->

<!-- table
source = "arms"
where = {scorer = "adapter", arm = ["chosen", "none", "all"]}
rows = ["arm"]
columns = [
  {where = {task = "sentiment"}},
  {where = {task = "topic"}, digits = 0},
  {source = "changes", where = {task = ["sentiment", "detox"], against = "all"}, pick = "max"},
]
-->
| arm | sentiment | topic | sentiment or detox, minus all heads |
| --- | --- | --- | --- |
| 24 heads | 76.8 % [74.8, 78.7] | 50 % [48, 52] | +20.4 points [18.0, 22.7] |
| no bias | 55.3 % [53.6, 57.1] | 40 % [38, 42] |  |
| all heads | 56.4 % [54.9, 57.9] |  |  |
<!-- end -->

```text
1<!--n:arms.all-->
```
"""


@pytest.fixture
def root(tmp_path):
    """A package of one page, with tables made by hand."""
    for name, text in {
        "README.md": "# Readme\n",
        "arms.csv": TABLE,
        "changes.csv": CHANGES,
        "docs/numbers.toml": NUMBERS,
        "docs/page.md": PAGE,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    return tmp_path


def exchanged(text, before, after):
    """A text with one of two replaced by the other, or where both are there, each by the other."""
    assert before in text
    text = text.replace(before, "\0")
    return (text.replace(after, before) if after else text).replace("\0", after)


def test_a_page_made_by_hand_is_as_it_is_written(root):
    assert writer.changes(root) == {}


SWAPS = {
    "the words of two arms": [("24 heads<!--l:arms", "all heads<!--l:arms")],
    "the numbers of two arms": [("76.8 % [74.8, 78.7]<!", "56.4 % [54.9, 57.9]<!")],
    "words and numbers of two arms": [
        ("24 heads<!--l:arms", "all heads<!--l:arms"),
        ("76.8 % [74.8, 78.7]<!", "56.4 % [54.9, 57.9]<!"),
    ],
    "the numbers of two scorers": [("76.8 % [74.8, 78.7]<!", "67.5 % [66.1, 69.0]<!")],
    "the words of two tasks": [("topic<!--l:", "sentiment<!--l:")],
    "a triple is shifted": [("67.5 % [66.1, 69.0]", "68.5 % [67.1, 70.0]")],
    "an end of an interval": [("[66.1, 69.0]", "[66.1, 69.1]")],
    "a sign": [("+20.4 points [18.0, 22.7]<!", "-20.4 points [18.0, 22.7]<!")],
    "no sign": [("+20.4 points [18.0, 22.7]<!", "20.4 points [18.0, 22.7]<!")],
    "a count": [("2<!--n:", "3<!--n:")],
    "one of two counts": [("3 of 4<", "3 of 5<")],
    "a share": [("50 %<", "51 %<")],
    "a unit": [("50.0 %<", "50.0 points<")],
    "no interval": [("67.5 % [66.1, 69.0]", "67.5 %")],
    "a rounding": [("67.5 % [66.1, 69.0]", "67.50 % [66.10, 69.00]")],
    "the label of a line": [("- no bias, sentiment", "- 24 heads, sentiment")],
    "a number of a line": [("topic: 0.0 points", "topic: 0.1 points")],
    "two rows of a table": [
        ("| 24 heads | 76", "| no bias | 76"),
        ("| no bias | 55", "| 24 heads | 55"),
    ],
    "two heads of a table": [("| sentiment | topic |", "| topic | sentiment |")],
    "a cell of a table": [("| 50 % [48, 52] |", "| 52 % [48, 52] |")],
    "a row less": [("| no bias | 55.3 % [53.6, 57.1] | 40 % [38, 42] |  |\n", "")],
    "a line more": [("- tasks: 3\n", "- tasks: 3\n- tasks: 4\n")],
}


@pytest.mark.parametrize("swaps", SWAPS.values(), ids=SWAPS)
def test_what_is_typed_is_written_anew(root, swaps):
    """And as it was: the page that was right comes back."""
    text = PAGE
    for swap in swaps:
        text = exchanged(text, *swap)
    (root / "docs" / "page.md").write_text(text, "utf-8")
    assert writer.changes(root) == {root / "docs" / "page.md": PAGE}


@pytest.mark.parametrize(
    ("file", "swap"),
    [
        ("docs/numbers.toml", ('arm = "all"}', 'arm = "none"}')),
        ("docs/numbers.toml", ('scorer = "adapter"', 'scorer = "linear"')),
        ("docs/numbers.toml", ("scale = 100", "scale = 10")),
        ("docs/numbers.toml", ("sign = true", "sign = false")),
        ("arms.csv", ("sentiment,all,adapter,acc,0.564", "sentiment,all,adapter,acc,0.574")),
        ("changes.csv", ("detox,chosen,all,-2.05,-3.95,-0.35,less", "detox,chosen,all,-2.05,-3.95,-0.35,inconclusive")),
    ],
)  # fmt: skip
def test_another_row_or_setting_is_seen(root, file, swap):
    text = (root / file).read_text("utf-8")
    (root / file).write_text(exchanged(text, *swap), "utf-8")
    assert list(writer.changes(root)) == [root / "docs" / "page.md"]


@pytest.mark.parametrize(
    ("file", "swap", "message"),
    [
        ("docs/page.md", ("heads<!--l:arms.chosen", "layers<!--l:arms.chosen"), "docs/page.md:3: no label before <!--l:arms.chosen:arm-->; it is '24 heads'"),
        ("docs/page.md", ("67.5 % [66.1, 69.0]<", "much<"), "docs/page.md:5: no number before <!--n:arms.linear-->; it is 67.5 % [66.1, 69.0]"),
        ("docs/numbers.toml", ('chosen = "24 heads"', 'chosen = "12 heads"'), "docs/page.md:3: no label before <!--l:arms.chosen:arm-->; it is '12 heads'"),
        ("docs/page.md", ("n:arms.linear", "n:arms.lines"), "'arms.lines' is not in numbers.toml"),
        ("docs/page.md", ("arms.chosen:arm-->", "arms.chosen:head-->"), "arms.csv has no column 'head'"),
        ("docs/page.md", ("lines: arms.none arms.chosen", "lines: arms.linear arms.chosen"), "docs/page.md:12: labels of arms.linear and arms.chosen need another column"),
        ("docs/page.md", ("lines: arms.none", "lines: arms.highest"), "docs/page.md:12: arms.highest has no label"),
        ("docs/page.md", ('{task = "topic"}, digits', '{task = "sentiment"}, digits'), "docs/page.md:19: two rows or columns of a table are called 'sentiment'"),
        ("docs/page.md", ("n:arms.linear-->", "n:arms.linear->"), "docs/page.md:5: a comment that is no mark, and no block with its end"),
        ("docs/page.md", ("- tasks: 3\n<!-- end -->", "- tasks: 3"), "docs/page.md:12: a comment that is no mark"),
        ("docs/page.md", ("lines: arms", "lines arms"), "docs/page.md:12: a comment that is no mark"),
        ("docs/page.md", ('{task = "topic"}', '{task = "detox"}'), "a column of a table is empty"),
        ("docs/page.md", ('where = {scorer = "adapter", arm', "where = {arm"), "docs/page.md:19: 2 rows of arms.csv fit"),
        ("docs/numbers.toml", (', scorer = "adapter"', ""), "2 rows of arms.csv fit {'task': 'sentiment', 'arm': 'chosen'}"),
        ("docs/numbers.toml", ('arm = "all"', 'arm = "some"'), "0 rows of arms.csv fit"),
        ("docs/numbers.toml", ('file = "arms.csv"', 'file = "legs.csv"'), "legs.csv"),
        ("docs/numbers.toml", ('value = "change"', 'value = "mean"'), "changes.csv has no column ['mean']"),
        ("docs/numbers.toml", ("scale = 100", "scael = 100"), "unknown ['scael']; allowed are file,"),
        ("docs/numbers.toml", ('unit = "points"', 'unit = "litres"'), "unit 'litres' is none of %, points, times"),
        ("changes.csv", (CHANGES.partition("\n")[2], ""), "changes.csv has no rows"),
        ("changes.csv", ("-1.26", ""), "nothing in one of change, low, high"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_told_in_one_line(root, file, swap, message):
    text = (root / file).read_text("utf-8")
    (root / file).write_text(exchanged(text, *swap), "utf-8")
    with pytest.raises(writer.NumberError) as raised:
        writer.changes(root)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_notebooks_and_their_scripts_have_numbers_in_cells_of_text(root):
    right, wrong = "67.5 % [66.1, 69.0]<!--n:arms.linear-->", "6 %<!--n:arms.linear-->"
    script = "# %% [markdown]\n# # Title\n#\n# It is {0}.\n\n# %%\nprint(1)  # {1}\n"
    book = {
        "cells": [
            {"cell_type": "markdown", "source": ["# Title\n", "\n", "It is {0}."]},
            {"cell_type": "code", "source": ["print(1)  # {1}"]},
        ]
    }
    book = json.dumps(book, indent=1, ensure_ascii=False) + "\n"
    for name, text in {"analyses/study/one.py": script, "docs/notebooks/one.ipynb": book}.items():
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text.replace("{0}", wrong).replace("{1}", wrong), "utf-8")
        expected = text.replace("{0}", right).replace("{1}", wrong)
        assert writer.changes(root)[root / name] == expected


BARE = {
    "It adds 2.8 points [1.2, 4.5] to it.": 1,
    "It adds +2.8 points to it, or 3 %.": 2,
    "It is 1.14 times as high, .527 of it.": 2,
    "It holds in 9 of 44 verdicts.": 2,
    "It is 12 [3, 14], not [4, 15].": 2,
    "Perplexity rises to 16.2, and accuracy falls\nby 21 points.": 2,
    "On 12 % of the prompts, 5 points over 64 tokens.": 2,
    "It adds +2.8 points [1.2, 4.5]<!--n:a.b--> to 3 of 4<!--n:a.c--> in 9<!--n:a.d--> cases.": 0,
    "SmolLM2-135M, Gemma 3 270M and GPT-2 after 64, 128 and 256 tokens, alpha 1/2 or $\\alpha$ 1.": 0,
    "24 heads on 810 new prompts; Table 4, Eq. 11; dist-3; 95 % intervals; a 4-bit file.": 0,
    "[Link](a.md#2-claims), `lapa2 --alpha 0.5`, LaPA²\n\n```sh\nx 12 %\n```\n\n## 4. With heads\n\n": 0,
    "## 4 With 12 %\n\nIt helps two of three methods, and Five of the six attributes; one of them.": 3,
    "<!-- lines: a.b -->\n- a: 12 % [3, 14]\n<!-- end -->\n\n![12 %](a.png)": 0,
}


@pytest.mark.parametrize(("text", "count"), BARE.items())
def test_a_number_without_its_row_is_found(text, count):
    assert len(bare_numbers(text)) == count, bare_numbers(text)


def test_a_number_without_words_of_its_row_is_found(root):
    numbers = writer.Numbers(NUMBERS, root)
    one, two, more = "1<!--n:arms.chosen-->", "2<!--n:arms.all-->", "3<!--n:changes.more-->"
    named = "24 heads<!--l:arms.chosen:arm-->"
    assert not unlabelled(f"It is {one} in {more}. It is\n{two}.\n\n- {one}\n- {two}", numbers)
    assert len(unlabelled(f"It is {one}, or\n{two}.", numbers)) == 2
    assert len(unlabelled(f"In {named} it is {one}, or\n{two}.", numbers)) == 1
    assert len(unlabelled(f"It is {one} in {more}.", numbers, comparing=False)) == 1
    assert not unlabelled(f"In {named} it is {one} in {more}.", numbers, comparing=False)
    assert not unmarked_words(f"In {named} it is {one} or 24 layers. In all heads.", numbers)
    assert len(unmarked_words(f"In all heads, on topic, by `linear`, it is {one}.", numbers)) == 3
    assert len(unmarked_words(f"**In 24 heads** it is so in {more}.", numbers)) == 1


def test_words_of_another_column_are_left(root):
    """Such as "by the second scorer", where only the words of the task are asked for."""
    text = NUMBERS.replace('topic = "topic"', 'topic = "scorer"')
    numbers = writer.Numbers(text, root)
    line = "By the second scorer<!--l:arms.topic:task--> it is 50.0 %<!--n:arms.highest-->."
    assert numbers.markdown(line, "page") == line


def test_a_label_has_the_name_of_the_column_of_its_number(root):
    text = NUMBERS.replace("{against}, {task}", "{against}, {value}")
    text += """
[words.columns]
change = "adapter"
low = "linear"
[changes.low]
where = {task = "sentiment"}
value = "low"
interval = []
"""
    numbers = writer.Numbers(text, root)
    assert numbers.lines("changes.sentiment changes.low") == (
        "- 24 heads minus all heads, adapter: +20.4 points [18.0, 22.7]\n"
        "- 24 heads minus all heads, linear: +18.0 points\n"
    )


@pytest.mark.slow
def test_documents_come_back_when_everything_written_is_lost():
    """The body of every block, and the number before every mark."""
    numbers = writer.Numbers((ROOT / "docs" / "numbers.toml").read_text("utf-8"))
    block = re.compile(r"(^<!-- (?:table|lines:).*?-->\n).*?(^<!-- end -->$)", re.M | re.S)
    for file in writer.documents():
        text = file.read_text("utf-8")
        lost = block.sub(r"\1x\n\2", text)
        for identity, settings in numbers.ids.items():
            number, mark = numbers.number(settings), f"<!--n:{identity}-->"
            lost = lost.replace(number + mark, ("3 of 7" if settings["of"] else "7") + mark)
        if file.suffix == ".md":
            assert numbers.markdown(lost, file.name) == text


def test_every_number_of_the_documents_is_that_of_its_row():
    assert [str(file.relative_to(ROOT)) for file in writer.changes()] == []


def test_every_id_is_used():
    used = "".join(file.read_text("utf-8") for file in writer.documents())
    numbers = writer.Numbers((ROOT / "docs" / "numbers.toml").read_text("utf-8"))
    lists = " ".join(re.findall("<!-- lines:(.*?)-->", used, re.S)).split()
    for identity in numbers.ids:
        source = f"{identity.partition('.')[0]}.*"
        assert {identity, source} & set(lists) or f":{identity}-->" in used, identity


def test_no_number_of_a_result_stands_without_its_row():
    bare = {}
    for name in STRICT:
        text = (ROOT / name).read_text("utf-8")
        if name == "README.md":
            text = re.search(r"^## Does LaPA² work\?$(.*?)^## ", text, re.M | re.S)[1]
        bare[name] = bare_numbers(text)
    for file in (ROOT / "analyses").glob("*/README.md"):
        text = re.sub(r"^## Plan$.*?(?=^## |\Z)", "", file.read_text("utf-8"), flags=re.M | re.S)
        bare[file.parent.name] = bare_numbers(text, claims_only=True)
    for file in writer.documents():  # and an interval on no page at all
        if file.suffix == ".md":
            bare[f"{file.name}, intervals"] = re.findall(BOTH_ENDS, prose(file.read_text("utf-8")))
    assert {name: numbers for name, numbers in bare.items() if numbers} == {}


def test_numbers_in_sentences_have_words_of_their_rows():
    """In the pages that tell results all, elsewhere those that are compared."""
    numbers = writer.Numbers((ROOT / "docs" / "numbers.toml").read_text("utf-8"))
    for file in writer.documents():
        if file.suffix == ".md":
            comparing = str(file.relative_to(ROOT)) not in STRICT
            assert unlabelled(file.read_text("utf-8"), numbers, comparing) == [], file
            assert comparing or unmarked_words(file.read_text("utf-8"), numbers) == [], file


def test_no_line_of_a_document_begins_as_a_comment_of_the_site():
    """MyST leaves out a line that begins with a percent sign."""
    for file in (*(ROOT / "docs").rglob("*.md"), *(ROOT / "analyses").glob("*/README.md")):
        assert not re.search("^ *%", file.read_text("utf-8"), re.M), file
