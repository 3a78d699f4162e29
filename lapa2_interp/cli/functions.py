"""Commands that are functions of the package, made of the class of their settings. The rules:

1. A first field without a default that is not by name alone is the argument; a sequence takes
   several.
2. All others are options: --max-rows of `max_rows`. A bool is a flag, a sequence takes several
   values, a mapping is NAME=VALUE, repeated (its name may be another: `OPTION_NAMES`).
3. What a command line cannot give, such as a loaded model or a function, is no option.
4. The command calls the function and prints the result's `summary()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from inspect import Parameter as Argument
from inspect import Signature, signature
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from cyclopts import Parameter

from lapa2_interp._util.settings import Settings, fields_of, print_to_stderr, silent
from lapa2_interp.cli.texts import OPTION_NAMES, columns, settings

Values = dict[str, Any]
"""Values of settings by name."""
Command = Callable[..., None]
READERS: dict[str, Callable[[Sequence[str], Values], Any]] = {
    "only": lambda texts, values: columns(texts),
}
"""Readers of NAME=VALUE texts, by the name of the mapping; of others a value is the text."""


def option_type(annotation: Any) -> Any:
    """The type of the option for a setting of this type; None if it is no option."""
    members = get_args(annotation) if _is_union(annotation) else (annotation,)
    # Bounds are left to the function.
    members = tuple(
        get_args(member)[0] if get_origin(member) is Annotated else member
        for member in members
        if member is not Any
    )
    plain = [member for member in members if member is not NoneType]
    if str in plain:  # a text says the same as a mapping or as numbers
        plain = [member for member in plain if get_origin(member) is not Mapping]
        plain = [member for member in plain if member not in (Sequence[int], Sequence[float])]
    origins = [get_origin(member) or member for member in plain]
    if not plain or Callable in origins:
        return None
    for member, origin in zip(plain, origins, strict=True):
        if origin is Mapping:
            return tuple[str, ...]
        if origin is Sequence:
            inner: Any = option_type(get_args(member)[0])
            return tuple[inner, ...]
        if origin is tuple:
            return _or_none(tuple[tuple(map(option_type, get_args(member)))], members)  # type: ignore[misc]
    if str in plain and Path in plain:  # beside a value, a text is its name or its file
        value_type = str if Any in get_args(annotation) else Path
    else:
        value_type = plain[0]
        for member in plain[1:]:
            value_type |= member
    return _or_none(value_type, members)


def _or_none(value_type: Any, members: Sequence[Any]) -> Any:
    return value_type | None if NoneType in members else value_type


def _is_union(annotation: Any) -> bool:
    return type(annotation).__name__ in ("UnionType", "_UnionGenericAlias", "Union")


def arguments_of(settings_class: type[Settings]) -> list[Argument]:
    """The argument and options of a command with these settings, as cyclopts takes them."""
    arguments: list[Argument] = []
    for number, (name, field) in enumerate(fields_of(settings_class).items()):
        value_type = option_type(field.annotation)
        if value_type is None:
            continue
        several = get_origin(value_type) is tuple and get_args(value_type)[-1] is Ellipsis
        kind: Any = Argument.KEYWORD_ONLY
        default = field.default
        if field.is_required():
            default = Argument.empty
            if number == 0 and not field.kw_only:
                kind = Argument.VAR_POSITIONAL if several else Argument.POSITIONAL_ONLY
                value_type = get_args(value_type)[0] if several else value_type
        elif several and default is None:
            default = ()
        shown = Parameter(
            name=OPTION_NAMES.get(name),
            help=field.description,
            consume_multiple=several and name not in OPTION_NAMES,
            show_default=default not in ((), None, False),
        )
        annotated: Any = Annotated[value_type, shown]
        arguments.append(Argument(name, kind, default=default, annotation=annotated))
    # A parameter without a default comes before those with one.
    return sorted(arguments, key=lambda one: (one.kind, one.default is not Argument.empty))


def command_of(
    settings_class: type[Settings],
    path: str,
    *,
    prepare: Callable[[Values], None] | None = None,
    read: Mapping[str, Callable[[Sequence[str], Values], Any]] | None = None,
    show: Callable[[Any, Values], None] | None = None,
) -> Callable[..., None]:
    """The command that is a function of the package.

    Args:
        settings_class: What the function takes.
        path: MODULE:FUNCTION, which is imported when the command runs.
        prepare: Changes the values before the call, where the command line's default is another.
        read: Readers of mappings beside `READERS`.
        show: Prints the result; by default its `summary()`.
    """
    arguments, fields = arguments_of(settings_class), fields_of(settings_class)
    mappings = {name for name, field in fields.items() if "Mapping" in str(field.annotation)}
    readers = {**READERS, **(read or {})}

    def run(*words: Any, **options: Any) -> None:
        values = _given(arguments, options)
        if arguments[0].kind is Argument.VAR_POSITIONAL:
            values[arguments[0].name] = words
        elif words:
            (values[arguments[0].name],) = words
        for name in mappings & set(values):
            texts, reader = values[name], readers.get(name)
            values[name] = settings(texts, name) if reader is None else reader(texts, values)
        if prepare is not None:
            prepare(values)
        for name, field in fields.items():
            if field.default is silent:
                values[name] = print_to_stderr
        module, _, function = path.partition(":")
        result = getattr(import_module(f"lapa2_interp.{module}"), function)(**values)
        if show is None:
            print(result.summary())
        else:
            show(result, values)

    run.__name__, run.__doc__ = path.partition(":")[2], settings_class.__doc__
    run.__signature__ = Signature(arguments)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in arguments}
    return run


def _given(arguments: Sequence[Argument], options: Values) -> Values:
    """Values of arguments that are not their defaults."""
    return {
        argument.name: options[argument.name]
        for argument in arguments
        if argument.name in options and options[argument.name] != argument.default
    }


def with_options_of(settings_class: type[Settings]) -> Callable[[Command], Command]:
    """A decorator of a command that also has the options of these settings, in place of its
    parameter `options`, whose value is what is given of them."""
    handed_on = arguments_of(settings_class)

    def decorate(handler: Command) -> Command:
        parameters = signature(handler, eval_str=True).parameters

        @wraps(handler)
        def run(*words: Any, **values: Any) -> None:
            options = _given(handed_on, values)
            mine = {name: value for name, value in values.items() if name in parameters}
            handler(*words, options=options, **mine)

        arguments: list[Argument] = []
        for parameter in parameters.values():
            arguments += handed_on if parameter.name == "options" else [parameter]
        run.__signature__ = Signature(arguments)  # type: ignore[attr-defined]
        run.__annotations__ = {argument.name: argument.annotation for argument in arguments}
        return run

    return decorate


def load_task(values: Values) -> None:
    """Prepare a call: the task, checked by the methods that have texts of it."""
    from lapa2_interp.methods.registry import load_task

    if "task" in values:
        values["task"] = load_task(values["task"])
