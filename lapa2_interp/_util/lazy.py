"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@cache
def _homes(package: str) -> dict[str, tuple[str, str]]:
    """Module and name for each import of the package's `if TYPE_CHECKING` block."""
    tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text("utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


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
        spec = find_spec(module)
        is_package = spec is not None and spec.submodule_search_locations is not None
        if is_package and find_spec(f"{module}.{original}"):
            value: Any = import_module(f"{module}.{original}")
        else:
            value = getattr(import_module(module), original)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *_homes(package)})
