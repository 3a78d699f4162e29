"""Axes of a block of settings: lists, whose combinations are points.

One point gives one cell or several (`resolve.cells_of`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.errors import Lapa2Error

TABLES = ("method", "parameters", "augmentation")
"""Settings that may be a table with lists in it."""


def as_axis(value: Any) -> list[Any]:
    """The values of a setting: those of a list, or the only one."""
    return value if isinstance(value, list) else [value]


def product(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Points of a block, of which each field is a value or a list of values, and each part of a
    table (`axes_of_table`), too."""
    axes: dict[str, list[Any]] = {}
    for name, value in fields.items():
        axes[name] = []
        for one in value if isinstance(value, list) else [value]:
            is_table = name in TABLES and isinstance(one, Mapping)
            axes[name] += _combinations(axes_of_table(name, one)) if is_table else [one]
    return _combinations(axes)


def size_of_product(fields: Mapping[str, Any]) -> int:
    """Number of points of `product`.

    Raises:
        Lapa2Error: A list is empty.
    """
    size = 1
    for name, value in fields.items():
        values = _not_empty(name, value) if isinstance(value, list) else [value]
        size *= sum(
            math.prod(map(len, axes_of_table(name, one).values())) if name in TABLES else 1
            for one in values
        )
    return size


def axes_of_table(name: str, value: Any) -> dict[str, list[Any]]:
    """The parts of a setting's table, each with its values: a list is one value where the part may
    have it (layers = [0, 1], heads = [[3, 1]], span = ["prefix", [0]], steps = [0, 16]), and else
    an axis (layers = ["all", "bottom"], layers = ["0", "1-3"], steps = [[0, 16], [16, 32]]). Empty
    for what is no table.

    Raises:
        Lapa2Error: A list is empty.
    """
    axes = {}
    for part, values in value.items() if isinstance(value, Mapping) else ():
        is_field = name == "augmentation" and part in Augmentation.model_fields
        one = (
            not isinstance(values, list)
            or part == "label"
            or (is_field and is_value_of(part, values))
        )
        axes[part] = [values] if one else _not_empty(f"{name}.{part}", values)
    return axes


def _combinations(axes: Mapping[str, Iterable[Any]]) -> Iterator[dict[str, Any]]:
    for point in itertools.product(*axes.values()):
        yield dict(zip(axes, point, strict=True))


def _not_empty(name: str, values: list[Any]) -> list[Any]:
    if not values:
        raise Lapa2Error(f"{name} is an empty list, so there is no cell")
    return values


def is_value_of(field: str, value: Any) -> bool:
    """True if a field of an augmentation may have this value, whatever its other fields are. A list
    of texts alone is several values: each of them is one (`bias.places`)."""
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return False
    info = Augmentation.model_fields[field]
    annotation: Any = Annotated[info.annotation, info]
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError:
        return False
    return True
