"""Numbers and verdicts of the documents: tables are written from their rows (docs/write_tables.py),
and statements hold on both sides (docs/statements.py)."""

import importlib.util
import re
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec
    assert spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


writer = script("write_tables")
checker = script("statements")

ARMS = """\
task,arm,scorer,metric,mean,low,high
sentiment,none,adapter,acc,0.553,0.536,0.571
sentiment,all,adapter,acc,0.564,0.549,0.579
sentiment,chosen,adapter,acc,0.768,0.748,0.787
sentiment,chosen,linear,acc,0.675,0.661,0.69
topic,none,adapter,acc,0.4,0.38,0.42
topic,chosen,adapter,acc,0.5,0.48,0.52
"""
CHANGES = """\
task,arm,against,change,low,high,p_holm,verdict
sentiment,chosen,all,20.4,18.04,22.66,0.001,more
topic,chosen,all,-0.04,-1.26,1.25,0.9,inconclusive
detox,chosen,all,-2.05,-3.95,-0.35,0.08,less
detox,all,none,2.05,0.35,3.95,0.08,more
"""
NUMBERS = """
[words.arm]
chosen = "24 heads"
all = "all heads"
none = "no bias"
[words.against]
all = "minus all heads"

[arms]
file = "arms.csv"
scale = 100
unit = "%"

[changes]
file = "changes.csv"
value = "change"
unit = "points"
sign = true
"""
STATEMENTS = """
[names.arm]
chosen = ["chosen heads"]
all = ["all heads"]
[names.task]
sentiment = ["sentiment"]
topic = ["topic"]
detox = ["detoxification", "toxicity"]

[[statement]]
page = "docs/page.md"
text = "On sentiment chosen heads reach 77 % [75, 79], which is 20 points [18, 23] more than all heads."
rows = [
    {number = "77 % [75, 79]", source = "arms", where = {arm = "chosen", scorer = "adapter", task = "sentiment"}},
    {number = "20 points [18, 23]", says = ["more", "after correction"], source = "changes", where = {task = "sentiment"}},
]

[[statement]]
page = "docs/page.md"
text = "On topic their gain is not decided; toxicity falls by 2.0 points [0.3, 4.0]. Two of the four differences are more"
rows = [
    {says = "not decided", source = "changes", where = {task = "topic"}},
    {number = "2.0 points [0.3, 4.0]", says = "falls", source = "changes", where = {task = "detox", arm = "chosen"}},
    {number = "Two of the four", source = "changes", count = true, where = {verdict = "more"}, of = {}},
]
"""
PAGE = """\
# A page

On sentiment chosen heads reach 77 % [75, 79],
which is 20 points [18, 23] more than all heads. After correction it holds.
On topic their gain is not decided; toxicity falls by 2.0 points [0.3, 4.0]. Two of the four
differences are more, in texts of 64 tokens.

<!-- table
source = "arms"
where = {scorer = "adapter", arm = ["chosen", "none", "all"]}
rows = ["arm"]
columns = [
  {where = {task = "sentiment"}},
  {where = {task = "topic"}, digits = 0, head = "topic alone"},
  {source = "changes", where = {task = ["sentiment", "detox"], against = "all"}, pick = "max"},
]
-->
| arm | sentiment | topic alone | sentiment or detox, minus all heads |
| --- | --- | --- | --- |
| 24 heads | 76.8 % [74.8, 78.7] | 50 % [48, 52] | +20.4 points [18.0, 22.7] |
| no bias | 55.3 % [53.6, 57.1] | 40 % [38, 42] |  |
| all heads | 56.4 % [54.9, 57.9] |  |  |
<!-- end -->
"""
STATEMENTS = STATEMENTS.replace("more than all heads.", "more than all heads. After correction")


@pytest.fixture
def root(tmp_path):
    """A package of one page, with tables made by hand."""
    writer.table_of.cache_clear()
    for name, text in {
        "README.md": "# Readme\n\n## What was found\n\nNothing yet.\n",
        "arms.csv": ARMS,
        "changes.csv": CHANGES,
        "docs/numbers.toml": NUMBERS,
        "docs/statements.toml": STATEMENTS,
        "docs/page.md": PAGE,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    return tmp_path


def edited(root, file, before, after):
    """Exchange a text of a file, wherever its lines end; it must be there."""
    text, places = (root / file).read_text("utf-8"), r"\s+".join(map(re.escape, before.split(" ")))
    assert re.search(places, text)
    (root / file).write_text(re.sub(places, lambda _: after, text), "utf-8")


def problems(root):
    return checker.Statements.read(root).problems(root)


def test_a_page_made_by_hand_holds(root):
    assert writer.changes(root) == {}
    assert problems(root) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("| 24 heads | 76", "| no bias | 76"),
        ("| sentiment | topic alone |", "| topic alone | sentiment |"),
        ("| 50 % [48, 52] |", "| 52 % [48, 52] |"),
        ("| no bias | 55.3 % [53.6, 57.1] | 40 % [38, 42] |  |\n", ""),
    ],
)
def test_a_table_is_written_anew(root, before, after):
    edited(root, "docs/page.md", before, after)
    assert writer.changes(root) == {root / "docs" / "page.md": PAGE}


@pytest.mark.parametrize(
    ("file", "before", "after", "message"),
    [
        ("docs/page.md", '{task = "topic"}, digits', '{task = "detox"}, digits', "docs/page.md:8: a column of a table is empty"),
        ("docs/page.md", 'scorer = "adapter", arm', 'metric = "acc", arm', "2 rows of arms.csv fit"),
        ("docs/page.md", ', head = "topic alone"', ', head = "sentiment"', "two rows or columns of a table are called 'sentiment'"),
        ("docs/page.md", "<!-- end -->", "", "docs/page.md: a comment that is no table with its end"),
        ("docs/page.md", '"arms"', '"legs"', "'legs' is no source of numbers.toml"),
        ("docs/numbers.toml", 'file = "arms.csv"', 'file = "legs.csv"', "legs.csv"),
        ("docs/numbers.toml", 'value = "change"', 'value = "mean"', "changes.csv has no column ['mean']"),
        ("docs/numbers.toml", "scale = 100", "scael = 100", "unknown ['scael']; allowed are file,"),
        ("docs/numbers.toml", 'unit = "points"', 'unit = "litres"', "unit 'litres' is none of %, points, times"),
        ("changes.csv", CHANGES.partition("\n")[2], "", "changes.csv has no rows"),
        ("changes.csv", "18.04", "", "nothing in one of change, low, high"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_written_is_told_in_one_line(root, file, before, after, message):
    edited(root, file, before, after)
    with pytest.raises(writer.NumberError, match=re.escape(message)) as raised:
        writer.changes(root)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("file", "before", "after", "message"),
    [
        ("docs/page.md", "more than all", "less than all", "the text is not on the page"),
        ("docs/page.md", "64 tokens.", "64 tokens, and 12 points [9, 15].", "in no statement"),
        ("README.md", "Nothing yet.", "It adds nothing.", "in no statement"),
        ("README.md", "Nothing yet.", "Nothing in 3 of 4 cases.", "in no statement"),
        ("docs/page.md", "[75, 79]", "[75, 78]", "the text is not on the page"),
        ("arms.csv", "chosen,adapter,acc,0.768", "chosen,adapter,acc,0.778", "'77 % [75, 79]' is 77.8, 74.8, 78.7"),
        ("changes.csv", "20.4,18.04", "20.4,17.04", "'20 points [18, 23]' is 20.4, 17.04, 22.66"),
        ("changes.csv", "0.001", "0.051", "'after correction' is not what the row says"),
        ("changes.csv", "-1.26,1.25", "-1.26,-0.01", "'not decided' is not what the row says"),
        ("changes.csv", "detox,all,none,2.05,0.35,3.95,0.08,more", "detox,all,none,2.05,0.35,3.95,0.08,less", "'Two of the four' is 1 of 4"),
        ("docs/statements.toml", '"falls"', '"gain"', "'gain' is not what the row says: -2.05"),
        ("docs/statements.toml", '"falls"', '"tumbles"', "'tumbles' is not in the text"),
        ("docs/statements.toml", "where = {task = \"topic\"}},", "where = {task = \"topic\"}}, {says = \"on\", source = \"changes\", where = {task = \"topic\"}},", "'on' is no phrase"),
        ("docs/statements.toml", 'arm = "chosen", scorer', 'arm = "all", scorer', "'77 % [75, 79]' is 56.4"),
        ("docs/statements.toml", 'number = "77 % [75, 79]"', 'number = "77 points [75, 79]"', "is in %"),
        ("docs/statements.toml", 'source = "arms", where', 'source = "legs", where', "'legs' is no source"),
        ("docs/statements.toml", 'where = {task = "sentiment"}', "where = {}", "4 rows of changes.csv fit"),
    ],
)  # fmt: skip
def test_what_does_not_hold_is_found(root, file, before, after, message):
    edited(root, file, before, after)
    assert any(message in problem for problem in problems(root)), problems(root)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("chosen heads reach", "all heads reach", "'all heads' is said, but the row has 'chosen heads'"),
        ("On sentiment", "On topic", "'topic' is said, but the row has 'sentiment'"),
        ("more than", "less than", "'more' is not in the text"),
        ("falls by", "rises by", "'falls' is not in the text"),
    ],
)  # fmt: skip
def test_the_same_error_on_page_and_in_the_table_is_found(root, before, after, message):
    """A direction, a method or a task that is exchanged on both sides."""
    for file in ("docs/page.md", "docs/statements.toml"):
        edited(root, file, before, after)
    problem_lines = problems(root)
    assert any(message in problem for problem in problem_lines), problem_lines


def test_a_statement_needs_its_parts(root):
    edited(root, "docs/statements.toml", 'page = "docs/page.md"\n', "")
    with pytest.raises(writer.NumberError, match="needs page, rows, text"):
        problems(root)


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.54, {"about half", "most"}), (0.79, {"most"}), (0.33, {"a third"}), (0.11, {"little"})],
)
def test_a_share_is_what_its_words_say(root, share, words):
    statements = checker.Statements.read(root)
    settings = writer.merged(writer.DEFAULTS, {}, "row")
    phrases = ("about half", "most", "a third", "little")
    assert {
        name for name in phrases if not statements.claim(name, [share], 0, settings, {})
    } == words


def test_tables_of_the_documents_are_those_of_their_rows():
    assert [str(file.relative_to(ROOT)) for file in writer.changes()] == []


def test_every_statement_of_the_documents_holds():
    assert checker.Statements.read().problems() == []


def test_every_source_is_used():
    used = "".join(file.read_text("utf-8") for file in writer.documents())
    used += (ROOT / "docs" / "statements.toml").read_text("utf-8")
    names = set(re.findall(r'source = "([\w.-]+)"', used))
    assert set(writer.Numbers.read().sources) - names == set()


SOFT = '{number = "8 points [2, 13]", says = "adds", source = "main", where = {task = "topic", method = '
EDITS = {
    "soft prefixes lose": ("README.md", "LaPA² adds accuracy", "LaPA² loses accuracy"),
    "more toxic is less": ("docs/results.md", "texts get more toxic", "texts get less toxic"),
    "less toxic is more": ("docs/results.md", "they get less toxic", "they get more toxic"),
    "another cause": ("docs/results.md", "**Distance takes most of it**", "**More keys take most of it**"),
    "another cause in README": ("README.md", "rotates queries and keys with distance", "has more keys"),
    "an exception deleted": ("README.md", "Under the decoding method DExperts no gain over all heads is shown.", ""),
    "other words banned": ("docs/results.md", "may use a word of its own prefix", "may use a word of any prefix"),
    "a number pointed elsewhere": ("docs/statements.toml", SOFT + '"prefix"', SOFT + '"con-prefix"'),
    "a persona": ("docs/results.md", "0.27 [0.16, 0.38]", "0.37 [0.26, 0.48]"),
    "a level": ("README.md", "54 % [51, 57]", "58 % [55, 61]"),
    "a count": ("README.md", "8 of 8", "7 of 8"),
    "the rival is worse": ("README.md", "-3 points [-9, 3]", "-13 points [-19, -7]"),
    "a cell": ("docs/results.md", "| PREADD | +1.21", "| PREADD | -1.21"),
    "another effect under the first picture": ("README.md", "0.7 [0.4, 1.1] at turn 8", "7 [4, 11] at turn 8"),
    "less attention is more": ("README.md", "points [0.4, 3.5] less of", "points [0.4, 3.5] more of"),
    "in short, one case more": ("docs/results.md", "in three of four cases with trained", "in four of four cases with trained"),
    "in short, the rival is better": ("docs/results.md", "not shown to be worse than chosen heads, and", "better than chosen heads, and"),
    "in short, another share": ("docs/results.md", "about a tenth of the fade", "about half of the fade"),
    "in short, a new claim": ("docs/results.md", "All this is about two small models", "The bias never loses accuracy"),
    "a new claim": ("README.md", "This is how our tests judge", "It lowers toxicity."),
}  # fmt: skip
"""Edits of pages that a careless hand could make; each is found."""


@cache
def problems_before():
    return set(checker.Statements.read().problems())


@pytest.fixture
def copy(tmp_path):
    """The documents, and links to what they read."""
    for file in writer.documents():
        path = tmp_path / file.relative_to(ROOT)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, path)
    for name in ("numbers", "statements"):
        shutil.copyfile(ROOT / "docs" / f"{name}.toml", tmp_path / "docs" / f"{name}.toml")
    (tmp_path / "figures").symlink_to(ROOT / "figures")
    (tmp_path / "analyses" / "lab").mkdir()
    results = "analyses/lab/reported_results.csv"
    shutil.copyfile(ROOT / results, tmp_path / results)
    return tmp_path


BOTH_SIDES = {
    "chosen heads keep less": ("README.md", "15 [10, 21] more than that", "15 [10, 21] less than that"),
    "more attention": ("README.md", "points [0.4, 3.5] less of", "points [0.4, 3.5] more of"),
    "another strength": ("README.md", "0.5 in all heads and 1 in", "0.5 in all heads and 2 in"),
    "all heads for chosen ones": ("README.md", "A bias in chosen heads gives", "A bias in all heads gives"),
    "in short, much worse": ("docs/results.md", "controls much better than in all", "controls much worse than in all"),
    "in short, DExperts gains": ("docs/results.md", "At a tuned strength under DExperts no gain", "At a tuned strength under DExperts a gain"),
    "in short, a third": ("docs/results.md", "or about a quarter if", "or about a third if"),
    "in short, three of three": ("docs/results.md", "With LaPA², two of three", "With LaPA², three of three"),
}  # fmt: skip
"""Errors that a hand makes on the page and in the text of its statement alike."""


@pytest.mark.parametrize(("page", "before", "after"), BOTH_SIDES.values(), ids=BOTH_SIDES)
def test_the_same_careless_edit_on_both_sides_is_found(copy, page, before, after):
    edited(copy, page, before, after)
    edited(copy, "docs/statements.toml", before, after)
    assert set(problems(copy)) - problems_before()


@pytest.mark.parametrize(("page", "before", "after"), EDITS.values(), ids=EDITS)
def test_a_careless_edit_is_found(copy, page, before, after):
    edited(copy, page, before, after)
    assert set(problems(copy)) - problems_before() or writer.changes(copy)


def test_no_line_of_a_document_begins_as_a_comment_of_the_site():
    """MyST leaves out a line that begins with a percent sign."""
    for file in (*(ROOT / "docs").rglob("*.md"), *(ROOT / "analyses").glob("*/README.md")):
        assert not re.search("^ *%", file.read_text("utf-8"), re.M), file
