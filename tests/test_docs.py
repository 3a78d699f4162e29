"""The documents: their Python runs, their commands parse, their links lead somewhere."""

from __future__ import annotations

import inspect
import re
import runpy
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from cyclopts import CycloptsError

import lapa2_interp
from lapa2_interp.cli.app import app

ROOT = Path(__file__).parent.parent
MANUALS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "analyses" / "README.md",
    *sorted((ROOT / "analyses").glob("*/README.md")),
]
PAGES = [*MANUALS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
KEEPS_THE_MODEL = "# needs smollm2-135m"
"""In a block of Python that a tiny model cannot run, such as one with shipped soft prefixes."""
SMALL, TINY = "smollm2-135m", "tiny-gpt2"
SHELL = ("sh", "bash", "console")
PLAIN = ("text", "toml", "json", "yaml", "math", "{include}", "{toctree}")
"""Languages of blocks that are not run: everything else is Python or commands."""


def name_of(file):
    return str(file.relative_to(ROOT))


def blocks(file):
    """Fenced blocks: (line number, language, text)."""
    blocks, opened = [], None
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        mark = line.strip()
        if mark.startswith("```"):
            if opened is None:
                opened = (number, mark[3:].partition(" ")[0], [])
            else:
                blocks.append((opened[0], opened[1], "\n".join(opened[2])))
                opened = None
        elif opened is not None:
            opened[2].append(line)
    assert opened is None, f"{file.name}:{opened[0]}: a block without an end"
    return blocks


def outside_blocks(file):
    """Lines that stand in no fenced block: (line number, line)."""
    inside = False
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        if line.strip().startswith("```"):
            inside = not inside
        elif not inside:
            yield number, line


def shell_lines(file):
    """Lines of commands, those that go on after a backslash as one: (line number, line)."""
    sources = [
        (start + i, line)
        for start, language, text in blocks(file)
        if language in SHELL
        for i, line in enumerate(text.splitlines(), 1)
    ]
    before = ""
    for number, line in outside_blocks(
        file
    ):  # indented code stands after an empty line, and after no list
        if line.startswith("    ") and (not before or before.startswith("    ")):
            sources.append((number, line.strip()))
        before = line
    joined = ""
    for number, line in sorted(sources):
        joined += line.removesuffix("\\")
        if not line.endswith("\\"):
            yield number, joined.strip()
            joined = ""


def commands(file):
    """Commands by their words, comments left out: (line number, words)."""
    for number, line in shell_lines(file):
        words = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        for word in lexer:
            if set(word) <= set("&|;"):
                yield number, words
                words = []
            else:
                words.append(word)
        if words:
            yield number, words


def of_lapa2(words):
    """What follows `lapa2`, after settings of the environment; None for another command."""
    while words and re.fullmatch(r"[A-Z_0-9]+=\S*", words[0]):
        words = words[1:]
    return words[1:] if words and words[0].removeprefix(".venv/bin/") == "lapa2" else None


def rendered(text):
    """A text as it is read: without what says which rows a table has (docs/write_tables.py)."""
    return re.sub("<!--.*?-->", lambda head: "\n" * head[0].count("\n"), text, flags=re.DOTALL)


def code_spans(line):
    return re.findall(r"(?<!`)`([^`]+)`(?!`)", line)


def check_command(words):
    app.parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.long
@pytest.mark.parametrize("file", MANUALS, ids=name_of)
def test_the_python_of_a_document_runs(file, tmp_path, monkeypatch):
    """All blocks of a document in order, in one namespace and one new folder."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "document"}
    for number, language, text in blocks(file):
        if language != "python":
            continue
        if KEEPS_THE_MODEL not in text:
            text = text.replace(SMALL, TINY)
        exec(compile("\n" * number + text, str(file), "exec"), namespace)


@pytest.mark.parametrize("file", PAGES, ids=name_of)
def test_every_block_says_what_it_is(file):
    """So that none is skipped in silence: Python runs, commands are parsed, and the rest says that
    it is neither."""
    known = ("python", *SHELL, *PLAIN)
    assert not [
        f"{number}: {language!r}" for number, language, _ in blocks(file) if language not in known
    ]


@pytest.mark.parametrize("file", PAGES, ids=name_of)
def test_the_commands_of_a_document_parse(file):
    wrong = []
    for number, words in commands(file):
        if (arguments := of_lapa2(words)) is not None:
            try:
                check_command(arguments)
            except CycloptsError as error:
                wrong.append(f"{number}: {shlex.join(words)}: {error}")
    assert not wrong


@pytest.mark.parametrize("file", PAGES, ids=name_of)
def test_the_commands_named_in_a_document_exist(file):
    """In running text and tables: whole commands parse, and what is only named, as `lapa2 sweep`,
    is a command."""
    wrong = []
    for number, line in outside_blocks(file):
        for span in code_spans(line):
            arguments = of_lapa2(shlex.split(span)) if span.startswith("lapa2 ") else None
            if not arguments:
                continue
            names, _, rest = app.parse_commands(arguments)
            try:
                if not names and not arguments[0].startswith("-"):
                    wrong.append(f"{number}: {span}: no such command")
                elif rest:
                    check_command(arguments)
            except CycloptsError as error:
                wrong.append(f"{number}: {span}: {error}")
    assert not wrong


@pytest.mark.parametrize("file", PAGES, ids=name_of)
def test_the_scripts_and_make_targets_of_a_document_exist(file):
    rules = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    targets = set(" ".join(rules).split())
    spans = [(number, shlex.split(span)) for number, line in outside_blocks(file) for span in code_spans(line)
             if span.startswith(("make ", "python "))]  # fmt: skip
    wrong = []
    for number, words in [*commands(file), *spans]:
        if words[0] == "make":
            asked = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
            wrong += [f"{number}: make {word}" for word in asked if word not in targets]
        elif words[0] == "python" and words[1].endswith(".py"):
            wrong += [] if (ROOT / words[1]).is_file() else [f"{number}: {words[1]}"]
    assert not wrong


def anchors(file):
    """What links may name in a document: its headings, as GitHub writes them."""
    headings = [
        line.lstrip("#").strip() for _, line in outside_blocks(file) if line.startswith("#")
    ]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", PAGES, ids=name_of)
def test_the_links_of_a_document_lead_somewhere(file):
    wrong = []
    for number, line in outside_blocks(file):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            if re.match(r"[a-z]+:", target):
                continue
            page, _, anchor = target.partition("#")
            linked = (file.parent / page).resolve() if page else file
            if not linked.exists():
                wrong.append(f"{number}: {target}: no such file")
            elif anchor and (linked.suffix != ".md" or anchor not in anchors(linked)):
                wrong.append(f"{number}: {target}: no such heading")
    assert not wrong


@pytest.mark.parametrize("file", PAGES, ids=name_of)
def test_no_line_of_a_document_is_long(file):
    """Tables and links cannot be broken."""
    lines = enumerate(rendered(file.read_text("utf-8")).splitlines(), 1)
    long = [(number, line) for number, line in lines if len(line) > 100]
    assert not [
        f"{number}: {len(line)} characters"
        for number, line in long
        if not line.startswith("|") and not re.search(r"\]\(\S+\)|https?://", line)
    ]


def test_every_picture_of_the_gallery_stands_under_a_sentence():
    """docs/conf.py makes it of the table beside the figure, or of the page that shows it."""
    site = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    captions = {figure: site["caption_of"](figure) for figure in (ROOT / "figures").rglob("*.png")}
    wrong = {
        str(figure): caption
        for figure, caption in captions.items()
        if not re.fullmatch(
            r"(.+\? )?This picture shows .{10,}\. \[.+\]\(\S+\.md\) discusses it\.", caption
        )
    }
    assert captions
    assert not wrong


def test_the_site_leads_to_every_page():
    """The studies stand in a group of their own, which the sidebar folds."""
    docs = ROOT / "docs"
    listed = "\n".join(
        text
        for file in (docs / "index.md", docs / "studies.md")
        for _, language, text in blocks(file)
        if language == "{toctree}"
    )
    pages = [
        page for pattern in ("*.md", "api/*.md", "notebooks/*.ipynb") for page in docs.glob(pattern)
    ]
    names = [page.relative_to(docs).with_suffix("").as_posix() for page in pages]
    names += [f"studies/{page.parent.name}" for page in (ROOT / "analyses").glob("*/README.md")]
    assert sorted([*re.findall(r"^[\w/-]+$", listed, re.MULTILINE), "index"]) == sorted(names)
    studies = (docs / "studies.md").read_text("utf-8")
    for page in (ROOT / "analyses").glob("*/README.md"):
        assert f"](../{page.relative_to(ROOT)})" in studies, "a line says what it asks"


def test_the_site_describes_nothing_that_is_gone():
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    names = re.findall(r"auto(?:class|data|function|exception):: (lapa2_interp\.[\w.]+)", pages)
    assert len(names) > 5
    for name in names:
        module, _, own = name.rpartition(".")
        assert hasattr(import_module(module), own), name


ROOMS = [
    import_module(".".join(file.parent.relative_to(ROOT).parts))
    for file in (ROOT / "lapa2_interp").rglob("__init__.py")
    if "__all__" in file.read_text("utf-8")
]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_the_site_describes_every_public_name(room):
    """Sphinx reads the constants of a room only where they are defined; and a name of the first day
    is described on the page of that."""
    api = "".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    described = re.search(rf"automodule:: {room.__name__}\n( +:exclude-members: (.+)\n)?", api)
    assert set((described[2] or "").split(", ")) - {""} <= set(lapa2_interp.__all__)
    for name in room.__all__:
        value = getattr(room, name)
        if inspect.ismodule(value):
            assert f"automodule:: {value.__name__}\n" in api
        elif not inspect.isfunction(value) and not inspect.isclass(value):
            assert re.search(rf"autodata:: {room.__name__}\.\w+\.{name}\n", api)
