"""How the texts of NAME=VALUE options are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_type_hints

from lapa2_interp._util.values import read_fields
from lapa2_interp.errors import Lapa2Error, MethodError, ScoringError

OPTION_NAMES = {"parameters": ("--set",), "changes": ("--set",)}
"""Options of settings that have another name."""


def method_parameters(method: str, texts: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE options of --set, for the parameters of a method."""
    from lapa2_interp.methods.registry import find_class

    return read_fields(settings(texts), get_type_hints(find_class(method, True)))


def settings(texts: Sequence[str], option: str = "set") -> dict[str, str]:
    """NAME=VALUE texts of an option, each name once (`read_fields` reads the values)."""
    assignments = _assignments(texts, option, "NAME=VALUE, such as omega=60", MethodError)
    for name, values in assignments.items():
        if len(values) > 1:
            raise MethodError(
                f"--{option} gives {name} twice, {' and '.join(values)}; give it once"
            )
    return {name: values[0] for name, values in assignments.items()}


def columns(texts: Sequence[str]) -> dict[str, list[str]]:
    """COLUMN=VALUE options of --only; a column that is given twice may have either value."""
    return _assignments(texts, "only", "COLUMN=VALUE, such as task=sentiment", ScoringError)


def _assignments(
    texts: Sequence[str], option: str, form: str, error: type[Lapa2Error]
) -> dict[str, list[str]]:
    assignments: dict[str, list[str]] = {}
    for text in texts:
        name, mark, value = text.partition("=")
        if not mark:
            raise error(f"--{option} {text!r} is not of the form {form}")
        assignments.setdefault(name, []).append(value)
    return assignments
