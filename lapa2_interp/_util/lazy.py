"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


@cache
def _homes(package: str) -> dict[str, tuple[str, str | None]]:
    """Module and name for each import of the package's `if TYPE_CHECKING` block."""
    tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text("utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    found: dict[str, tuple[str, str | None]] = {}
    for node in (each for block in blocks for each in block.body):
        if isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                found[each.asname or each.name] = node.module, each.name
    return found


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose `if TYPE_CHECKING` block says where each name
    comes from.

    Type checkers and editors read that block; at run time a name is imported when it is first
    used, so that importing the package loads neither torch nor transformers.

    Args:
        package: Its `__name__`.

    Raises:
        AttributeError: From `__getattr__`, for a name that the block does not import.
    """

    def load(name: str) -> Any:
        if name.startswith("__") or name not in _homes(package):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = _homes(package)[name]
        try:
            found = getattr(import_module(module), str(original))
        except AttributeError:  # a module of that package
            found = import_module(f"{module}.{original}")
        setattr(sys.modules[package], name, found)
        return found

    return load, lambda: sorted({*vars(sys.modules[package]), *_homes(package)})
