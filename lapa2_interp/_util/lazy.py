"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], modules: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package that imports a name when it is first used, so that
    importing the package loads neither torch nor transformers.

    The package says each name three times, which a test compares: in this table, in `__all__`, and
    for type checkers and editors in an `if TYPE_CHECKING` block.

    Args:
        package: Its `__name__`.
        homes: By module of the package, the names that it defines, with spaces between them.
        modules: Modules that are names themselves.

    Raises:
        AttributeError: From `__getattr__`, for a name that is not in the table.
    """
    places = {name: (module, name) for module, names in homes.items() for name in names.split()}
    places |= {module.rpartition(".")[2]: (module, "") for module in modules.split()}

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = places[name]
        value: Any = import_module(f"{package}.{module}")
        if attribute:
            value = getattr(value, attribute)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *places})
