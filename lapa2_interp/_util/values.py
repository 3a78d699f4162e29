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
from types import NoneType, SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import Field

from lapa2_interp._util.parsing import parse_toml
from lapa2_interp.errors import Lapa2Error, parameter, validation_message

P = ParamSpec("P")
T = TypeVar("T")

Count = Annotated[int, Field(ge=1)]
"""A whole number of at least 1."""
Natural = Annotated[int, Field(ge=0)]
"""A whole number of at least 0."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A finite number above 0."""
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A finite number of at least 0."""
Temperature = Annotated[float, Field(ge=1e-30, le=1e30, allow_inf_nan=False)]
"""A number by which log-weights are divided. Within the bounds float32 still tells the quotients
apart: at the lower one the likeliest token is drawn, at the upper one all are equally likely."""

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
    name: str, value: Any, annotation: Any, error: type[Lapa2Error] = Lapa2Error, where: str = ""
) -> Any:
    """The value; one of another type, such as a number as text, is refused.

    Args:
        annotation: The type, perhaps with bounds (`Annotated`).
        error: The error that is raised.
        where: What comes before the name in its message.
    """
    from pydantic import ValidationError

    try:
        return _adapter(annotation).validate_python(plain(value), strict=True)
    except ValidationError as problem:
        raise error(f"{where}{name}: {validation_message(problem, located=False)}") from None


def read_fields(texts: Mapping[str, str], annotations: Mapping[str, Any]) -> dict[str, Any]:
    """Texts as values of fields of these types; where a field may be text, they are that text."""
    values: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            check_value(name, text, annotations.get(name, str))
            values[name] = text
        except Lapa2Error:
            values[name] = read_value(text)
    return values


@cache
def _adapter(annotation: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(annotation)


def numbers_checked(function: Callable[P, T]) -> Callable[P, T]:
    """A function that refuses other types, and numbers out of bounds, where its signature has a
    number or an annotation such as Annotated[int, Field(ge=1)], in the sentence of every
    setting."""
    shape, names = signature(function), unwrap(function).__globals__

    @cache
    def annotations() -> dict[str, Any]:
        checked = {}
        for name, argument in shape.parameters.items():
            with suppress(NameError):  # a name for type checkers alone is no number's
                one = SimpleNamespace(__annotations__={name: argument.annotation})
                hint = get_type_hints(one, names, include_extras=True)[name]
                if takes_numbers(hint):
                    checked[name] = number_type(hint)
        return checked

    @wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> T:
        values = dict(zip(shape.parameters, arguments, strict=False)) | named
        for name, annotation in annotations().items():
            if name in values:
                try:
                    _adapter(annotation).validate_python(plain(values[name]), strict=True)
                except ValueError:  # pydantic's are
                    check_value(parameter(name), values[name], annotation)
        return function(*arguments, **named)

    return call


def takes_numbers(annotation: Any) -> bool:
    """True of the type of a parameter whose values are checked where it is declared."""
    return get_origin(annotation) is not Literal and number_type(annotation) is not None


def number_type(annotation: Any) -> Any:
    """The type for pydantic of a parameter that takes numbers, truth values or several of them,
    perhaps with bounds, and None or words beside them; None for other types."""
    if get_origin(annotation) is Annotated:
        return annotation if number_type(get_args(annotation)[0]) is not None else None
    if get_origin(annotation) is Sequence:
        inner = number_type(get_args(annotation)[0])
        return None if inner is None else tuple[inner, ...]  # type: ignore[valid-type]
    if get_origin(annotation) in (Union, UnionType, tuple):
        parts = tuple(number_type(part) for part in get_args(annotation))
        if None in parts:
            return None
        return tuple[parts] if get_origin(annotation) is tuple else Union[parts]  # type: ignore[valid-type]  # noqa: UP007
    if annotation is NoneType or get_origin(annotation) is Literal:
        return annotation
    return annotation if annotation in (int, float, bool) else None
