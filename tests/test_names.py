"""Names in documents and docstrings lead somewhere."""

import ast
import importlib
import re
from pathlib import Path

import lapa2_interp

PACKAGE = Path(lapa2_interp.__file__).parent
DOCUMENTS = PACKAGE.parent / "docs"
TOP = sorted(each.stem for each in PACKAGE.iterdir() if not each.name.startswith("__"))
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
OTHERS = ("layout.tensor", "run.cells", "run.save", "plan.BatchPlan.batches")
"""Attributes of values."""
MODULES = {
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in PACKAGE.rglob("*.py")
}


def exists(name):
    """True for a module, or a name of one, also in a short form such as `module.name`."""
    parts = name.split(".")
    for module in MODULES:
        own = module.removesuffix(".__init__").split(".")
        for tail in (own[start:] for start in range(len(own))):
            if parts[: len(tail)] == tail:
                found = importlib.import_module(f"lapa2_interp.{'.'.join(own)}")
                if all(
                    found := getattr(found, "model_fields", {}).get(
                        part, getattr(found, part, None)
                    )
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
