"""Names in documents and docstrings lead somewhere; names of locals say what the thing is."""

import ast
import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

import lapa2_interp

PACKAGE = Path(lapa2_interp.__file__).parent
DOCUMENTS = PACKAGE.parent / "docs"
TOP = sorted(path.stem for path in PACKAGE.iterdir() if not path.name.startswith("__"))
FILES = (
    "py",
    "json",
    "toml",
    "csv",
    "md",
    "lines",
    "html",
    "js",
    "css",
    "nc",
    "txt",
    "parquet",
    "j2",
    "png",
)
OTHERS = ("layout.tensor", "run.cells", "run.save")
"""Attributes of values."""
MODULES = {
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in PACKAGE.rglob("*.py")
}


def fields_of(kind):
    """The fields of a model or a dataclass, which need not be attributes of the class."""
    return getattr(kind, "model_fields", {}) | getattr(kind, "__dataclass_fields__", {})


def exists(name):
    """True for a module, or a name of one, also in a short form such as `module.name`."""
    parts = name.split(".")
    for module in MODULES:
        own = module.removesuffix(".__init__").split(".")
        for tail in (own[start:] for start in range(len(own))):
            if parts[: len(tail)] == tail:
                value = importlib.import_module(f"lapa2_interp.{'.'.join(own)}")
                if all(
                    value := fields_of(value).get(part, getattr(value, part, None))
                    for part in parts[len(tail) :]
                ):
                    return True
    return False


def names_in(text):
    """Names in backticks that begin with a room of the package or a module of it."""
    stems = {module.split(".")[-1] for module in MODULES} | set(TOP)
    for name in re.findall(r"`(?:lapa2_interp\.)?([a-z_]+(?:\.\w+)+)(?:\([^`]*\))?`", text):
        head, last = name.split(".")[0], name.split(".")[-1]
        if name not in OTHERS and head in stems and last not in FILES:
            yield name


def test_names_in_docstrings_and_documents_exist():
    lost = []
    for file in [*PACKAGE.rglob("*.py"), *DOCUMENTS.glob("*.md")]:
        text = file.read_text("utf-8")
        if file.suffix == ".py":
            nodes = ast.walk(ast.parse(text))
            text = "\n".join(
                node.value.value
                for node in nodes
                if isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            )
        lost += [f"{file.name}: {name}" for name in names_in(text) if not exists(name)]
    assert not lost


# --- names of locals

PRONOUNS = {"each", "found", "given", "other", "told", "kept", "whole", "place"}
"""Words that name no thing: no local, loop variable, `as` name, inner function or parameter of a
private function is called so. Fields, columns and parameters of public functions may be."""
CLEAN = ("lapa2_interp", "analyses", "tests", "docs", ".ci")
"""Folders that have none of these names, without an exception."""
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def local_names(tree):
    """Names that a module binds outside of the fields of its classes, each with its line."""
    fields = {
        statement.target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields:
            yield node.id, node.lineno
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno
    yield from private_names(tree, nested=False)


def private_names(node, nested):
    """Functions inside of functions, and the parameters that no caller outside of their module can
    name: of these functions, of lambdas, and of functions whose names begin with one underscore."""
    is_private = nested
    if isinstance(node, Scope):
        name = getattr(node, "name", "_")
        if nested:
            yield name, node.lineno
        if nested or (name.startswith("_") and not name.startswith("__")):
            arguments = node.args
            for argument in (
                *arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs,
                *filter(None, (arguments.vararg, arguments.kwarg)),
            ):  # fmt: skip
                yield argument.arg, argument.lineno
        is_private = True
    for child in ast.iter_child_nodes(node):
        yield from private_names(child, is_private)


def test_names_of_locals_are_seen():
    """Each kind of binding, and none that a caller or a table may name."""
    module = """
class Cell:
    given: int
    def public(self, told): ...
    def _private(self, told): ...
def public(found, *, place=1):
    whole = [each for each in found]
    with open(place) as kept: ...
    try: ...
    except OSError as other: ...
    match whole:
        case [place, *told]: ...
    return lambda each: each, (found := 1)
async def _private(*given, **place):
    def kept(): ...
import os as whole
"""
    counted = Counter(name for name, _ in local_names(ast.parse(module)) if name in PRONOUNS)
    seen = {"told": 2, "whole": 2, "each": 2, "kept": 2, "other": 1, "place": 2, "found": 1}
    assert counted == seen | {"given": 1}


@pytest.mark.parametrize("folder", CLEAN)
def test_locals_have_names_that_say_what_they_are(folder):
    top = PACKAGE.parent
    files = sorted((top / folder).rglob("*.py"))
    assert files
    bad = [
        f"{file.relative_to(top)}:{line}: {name}"
        for file in files
        for name, line in local_names(ast.parse(file.read_text("utf-8")))
        if name in PRONOUNS
    ]
    assert not bad


SCRIPTS = ("*.js", "*.j2")
"""Files with scripts of pages, and templates."""


def script_names(text):
    """Names that a script or a template binds: of const, let and var, of functions, of their
    parameters, and of loops and macros of a template."""
    for line in text.splitlines():
        for names in re.findall(
            r"\b(?:const|let|var) ([\w\s,{}\[\]]+)|{%-? for ([\w\s,]+) in", line
        ):
            yield from re.findall(r"\w+", " ".join(names).partition(" of ")[0])
        yield from re.findall(r"[,;]\s*(\w+)\s*=(?![=>])", line)
        for names in re.findall(r"\(([\w\s,{}\[\]=]*)\)\s*=>|\b(\w+)\s*=>", line):
            yield from re.findall(r"\w+", " ".join(names))
        for names in re.findall(r"(?:\bfunction|{%-? macro) \w+\s*\(([^)]*)\)", line):
            yield from re.findall(r"\w+", names)


def test_names_of_scripts_are_seen():
    script = """
const each = 1, found = 2; let other = 3;
for (const told of all) {} for (const [kept, i] of all) {}
all.map((whole, i) => i).filter(place => place);
function column(given) {}
{% for each in all %}{% macro rows(found) %}
"""
    assert Counter(name for name in script_names(script) if name in PRONOUNS) == {
        "each": 2, "found": 2, "other": 1, "told": 1, "kept": 1, "whole": 1, "place": 1, "given": 1,
    }  # fmt: skip


@pytest.mark.parametrize("folder", ["lapa2_interp", "analyses"])
def test_names_of_scripts_say_what_they_are(folder):
    top = PACKAGE.parent
    files = [file for form in SCRIPTS for file in sorted((top / folder).rglob(form))]
    assert files
    bad = [
        f"{file.relative_to(top)}: {name}"
        for file in files
        for name in script_names(file.read_text("utf-8"))
        if name in PRONOUNS
    ]
    assert not bad
