"""Settings of a command: one class declares them, and its function and its options are made of it.

    @dataclass(frozen=True)
    class CountSettings(Settings):
        \"\"\"Count words.\"\"\"

        source: str
        \"\"\"A file.\"\"\"
        _: KW_ONLY
        least: Count = 1
        \"\"\"The smallest count that is shown.\"\"\"

    @takes(CountSettings)
    def count_words(settings: CountSettings) -> Table: ...

    count_words("lake.txt", least=2)

Fields are the function's parameters: names, order, types, bounds, defaults and help are written in
no other place, and type checkers follow a call through `takes` to the field. The module of such a
class loads no torch: the command line's help reads it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import cleandoc, signature
from textwrap import fill
from typing import Any, ParamSpec, TypeVar

from pydantic import (
    ConfigDict,
    ValidationError,
    field_validator,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from lapa2_interp._util.values import plain, takes_numbers
from lapa2_interp.errors import (
    Lapa2Error,
    main_error,
    parameter,
    unknown_choice,
    validation_message,
)

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
S = TypeVar("S", bound="Settings")
T = TypeVar("T")

CONFIG = ConfigDict(strict=True, use_attribute_docstrings=True, arbitrary_types_allowed=True)


@dataclass(frozen=True, config=CONFIG)
class Settings:
    """The base of settings."""

    @field_validator("*", mode="wrap")
    @classmethod
    def _numbers_checked(cls, value: Any, check: Callable[[Any], Any], info: Any) -> Any:
        """Numbers and truth values are checked here; what reads a name or a path refuses it."""
        if takes_numbers(fields_of(cls)[str(info.field_name)].annotation):
            value = plain(value)
            check(value)  # whose result would be a float of a whole number, and printed as one
        return value


def fields_of(settings_class: Any) -> dict[str, FieldInfo]:
    """The fields by name: type, default, help (`description`), and whether each is by name alone
    (`kw_only`)."""
    fields: dict[str, FieldInfo] = settings_class.__pydantic_fields__
    return fields


def silent(text: str) -> None:
    """What a function tells by default: nothing. The command line prints it to stderr."""


def print_to_stderr(text: str) -> None:
    """Tell a line beside the output."""
    print(text, file=sys.stderr)


def takes(settings_class: Callable[P, S]) -> Callable[[Callable[[S], T]], Callable[P, T]]:
    """A function of settings as one whose parameters are their fields.

    Its docstring begins with that of the class, in place of its first paragraph, and has the help
    of the fields.

    Raises:
        Lapa2Error: An unknown name; another type, or a number out of bounds.
    """
    fields = fields_of(settings_class)

    def decorate(function: Callable[[S], T]) -> Callable[P, T]:
        @wraps(function)
        def call(*arguments: P.args, **named: P.kwargs) -> T:
            for name in named:
                if name not in fields:
                    raise Lapa2Error(unknown_choice("setting", name, fields))
            try:
                settings = settings_class(*arguments, **named)
            except ValidationError as error:
                name = parameter(str(main_error(error)["loc"][0]))
                raise Lapa2Error(f"{name}: {validation_message(error, located=False)}") from None
            return function(settings)

        about, sections = settings_class.__doc__, (function.__doc__ or "").partition("\n\n")[2]
        call.__doc__ = with_help(f"{about}\n\n    Args:\n\n{sections}", fields)
        returned = signature(function).return_annotation
        shape = signature(settings_class).replace(return_annotation=returned)
        call.__signature__ = shape  # type: ignore[attr-defined]
        return call

    return decorate


def with_help(docstring: str, fields: Mapping[str, FieldInfo]) -> str:
    """A docstring whose section "Args" also has the help of the fields that it does not name."""
    docstring = cleandoc(docstring)
    lines = [
        fill(
            f"{name}: {' '.join((field.description or '').split())}",
            width=96,
            initial_indent="    ",
            subsequent_indent="        ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, field in fields.items()
        if not re.search(rf"^    {name}: ", docstring, re.MULTILINE)
    ]
    return docstring.replace("Args:\n", "\n".join(["Args:", *lines, ""]), 1)


def helped_by(settings_class: type[Settings]) -> Callable[[F], F]:
    """A function that repeats fields in its signature, with their help in its docstring."""

    def decorate(function: F) -> F:
        function.__doc__ = with_help(function.__doc__ or "", fields_of(settings_class))
        return function

    return decorate
