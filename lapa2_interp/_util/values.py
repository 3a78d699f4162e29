"""Values as users give them: text read as a value, arrays as lists, numbers that are no text.

A number is a number: text is read as one where all is text (the command line, recipes) and nowhere
else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, wraps
from inspect import signature, unwrap
from types import NoneType, UnionType
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_origin

from lapa2_interp._util.errors import Lapa2Error, parameter, validation_message
from lapa2_interp._util.parsing import parse_toml

P = ParamSpec("P")
T = TypeVar("T")

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
"""A number that TOML may refuse, such as .5"""


def read_value(text: str) -> Any:
    """A value as a grid file has it, or a number such as .5, or the text where it is neither."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return float(text) if NUMBER.fullmatch(text) else text


def plain(value: Any) -> Any:
    """A value without arrays: those of numpy, pandas and torch, lists and ranges become tuples, and
    their numbers Python's."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(map(plain, value)) if isinstance(value, list | tuple | range) else value


def check_value(
    name: str, value: Any, kind: Any, error: type[Lapa2Error] = Lapa2Error, where: str = ""
) -> Any:
    """The value; one of another type, such as a number as text, is refused.

    Args:
        kind: The type, perhaps with bounds (`Annotated`).
        error: The error that is raised.
        where: What comes before the name in its message.
    """
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(plain(value), strict=True)
    except ValidationError as problem:
        raise error(f"{where}{name}: {validation_message(problem)}") from None


def read_fields(texts: Mapping[str, str], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Texts as values of fields of these types; where a field may be text, they are that text."""
    values: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            check_value(name, text, kinds.get(name, str))
            values[name] = text
        except Lapa2Error:
            values[name] = read_value(text)
    return values


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def numbers_checked(function: Callable[P, T]) -> Callable[P, T]:
    """A function that refuses other types, and numbers out of bounds, where its signature has a
    number or an annotation such as Annotated[int, Field(ge=1)], in the sentence of every
    setting."""
    shape, names = signature(function), unwrap(function).__globals__

    @cache
    def kinds() -> dict[str, Any]:
        checked = {}
        for name, own in shape.parameters.items():
            kind = own.annotation
            with suppress(NameError):  # a name for type checkers alone is no number's
                kind = eval(kind, names) if isinstance(kind, str) else kind
                if is_number(kind):
                    checked[name] = tuple[int, ...] if kind == Sequence[int] else kind
        return checked

    @wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> T:
        values = dict(zip(shape.parameters, arguments, strict=False)) | named
        for name, kind in kinds().items():
            if name in values:
                check_value(parameter(name), values[name], kind)
        return function(*arguments, **named)

    return call


def is_number(kind: Any) -> bool:
    """True for the types of numbers, of truth values and of several integers, with bounds or
    None."""
    if get_origin(kind) is Annotated:
        return is_number(get_args(kind)[0])
    if isinstance(kind, UnionType):
        return all(part is NoneType or is_number(part) for part in get_args(kind))
    return kind in (int, float, bool, Sequence[int])
