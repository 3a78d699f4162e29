"""Commands that are functions of the package.

A function's signature and docstring are the one declaration: its options, their types, defaults and
help are read from the file that has it, so that help imports nothing heavy. The rules:

1. A first parameter without a default, before "*", is the argument; a sequence takes several.
2. All others are options: --max-rows of `max_rows`. A bool is a flag, a sequence takes several
   values, a mapping is NAME=VALUE, repeated (its name may be another: `OPTION_NAMES`).
3. What a command line cannot give, such as a loaded model or a function, is no option.
4. The command calls the function and prints the result's `summary()`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import wraps
from importlib import import_module
from inspect import Parameter as Argument
from inspect import Signature, signature
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from cyclopts import Parameter
from docstring_parser import parse
from pydantic import Field

from lapa2_interp._util.values import Count, Natural, NotNegative, Positive, Temperature
from lapa2_interp.cli.app import definition
from lapa2_interp.cli.options import OPTION_NAMES, columns, settings
from lapa2_interp.models.machine import Attn, Dtype, DtypeOrAuto, ModelClass

Values = dict[str, Any]
"""Values of a function's parameters by name."""
Command = Callable[..., None]
READERS: dict[str, Callable[[Sequence[str], Values], Any]] = {
    "only": lambda texts, values: columns(texts),
}
"""Readers of NAME=VALUE texts, by the name of the mapping; of others a value is the text."""


class _Names(dict[str, Any]):
    """Names in signatures that a command line knows; any other stands for no option."""

    def __missing__(self, name: str) -> Any:
        return Any


TYPES = _Names(
    {value_type.__name__: value_type for value_type in (str, int, float, bool, tuple, list)},
    Any=Any, Literal=Literal, Annotated=Annotated, Field=Field,
    Count=Count, Natural=Natural, Positive=Positive, NotNegative=NotNegative,
    Temperature=Temperature,
    Path=Path, Sequence=Sequence, Mapping=Mapping, Callable=Callable,
    Attn=Attn, Dtype=Dtype, DtypeOrAuto=DtypeOrAuto, ModelClass=ModelClass,
)  # fmt: skip


def option_type(annotation: Any) -> Any:
    """The type of the option for a parameter of this type; None if it is no option."""
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


def _annotation(module: str, node: ast.expr) -> Any:
    """An annotation as a type, with the names that the module gives to types."""
    names = _Names(TYPES)
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id not in TYPES:
            with suppress(LookupError):
                named = definition(f"{module}:{part.id}")
                if isinstance(named, ast.Assign):
                    names[part.id] = _annotation(module, named.value)
    return eval(ast.unparse(node), {}, names)


def _default(module: str, node: ast.expr) -> Any:
    """A default as a value: a literal, or a constant of the module."""
    if isinstance(node, ast.Name):
        constant = definition(f"{module}:{node.id}")
        assert isinstance(constant, ast.Assign)
        node = constant.value
    return ast.literal_eval(node)


def arguments_of(path: str) -> list[Argument]:
    """The arguments and options of a function MODULE:FUNCTION, as cyclopts takes them."""
    module = path.partition(":")[0]
    function = definition(path)
    assert isinstance(function, ast.FunctionDef)
    positional = function.args.args
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(function.args.defaults))
    defaults += [*function.args.defaults, *function.args.kw_defaults]
    arguments = []
    for node, default in zip([*positional, *function.args.kwonlyargs], defaults, strict=True):
        assert node.annotation is not None
        value_type = option_type(_annotation(module, node.annotation))
        if value_type is None:
            continue
        several = get_origin(value_type) is tuple and get_args(value_type)[-1] is Ellipsis
        position: Any = Argument.KEYWORD_ONLY
        value: Any = Argument.empty
        if positional and node is positional[0] and default is None:
            position = Argument.VAR_POSITIONAL if several else Argument.POSITIONAL_ONLY
            value_type = get_args(value_type)[0] if several else value_type
        elif default is not None:
            value = _default(module, default)
            value = () if several and value is None else value
        if position is Argument.KEYWORD_ONLY:
            name = OPTION_NAMES.get(node.arg)
            shown = Parameter(name=name, consume_multiple=several and name is None,
                              show_default=value not in ((), None, False))  # fmt: skip
            value_type = Annotated[value_type, shown]
        arguments.append(Argument(node.arg, position, default=value, annotation=value_type))
    # A parameter without a default comes before those with one.
    return sorted(arguments, key=lambda one: (one.kind, one.default is not Argument.empty))


def command_of(
    path: str,
    *,
    prepare: Callable[[Values], None] | None = None,
    read: Mapping[str, Callable[[Sequence[str], Values], Any]] | None = None,
    show: Callable[[Any, Values], None] | None = None,
) -> Callable[..., None]:
    """The command that is a function of the package.

    Args:
        path: MODULE:FUNCTION.
        prepare: Changes the values before the call, where the command line's default is another.
        read: Readers of mappings beside `READERS`.
        show: Prints the result; by default its `summary()`.
    """
    arguments = arguments_of(path)
    function = definition(path)
    assert isinstance(function, ast.FunctionDef)
    listeners = [
        node.arg
        for node, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
        if isinstance(default, ast.Lambda)
    ]
    mappings = {
        node.arg
        for node in [*function.args.args, *function.args.kwonlyargs]
        if node.annotation is not None and "Mapping" in ast.unparse(node.annotation)
    }
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
        for name in listeners:
            values.setdefault(name, lambda text: print(text, file=sys.stderr))
        module, _, name = path.partition(":")
        result = getattr(import_module(f"lapa2_interp.{module}"), name)(**values)
        if show is None:
            print(result.summary())
        else:
            show(result, values)

    run.__name__, run.__doc__ = path.partition(":")[2], ast.get_docstring(function)
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


def hands_on(path: str, without: Sequence[str] = ()) -> Callable[[Command], Command]:
    """A decorator of a command that also has the options of a function of the package.

    In place of the command's parameter `options`, its options are those of the function that the
    command does not have itself, with their help. What is given of them is the value of `options`.

    Args:
        path: MODULE:FUNCTION.
        without: Parameters of the function that are no options.
    """

    def decorate(handler: Command) -> Command:
        own = signature(handler, eval_str=True).parameters
        taken = {*own, *without}
        for parameter in own.values():
            if is_dataclass(parameter.annotation):
                taken |= {field.name for field in fields(parameter.annotation)}
        function = definition(path)
        assert isinstance(function, ast.FunctionDef)
        params = parse(ast.get_docstring(function) or "").params
        help_texts = {param.arg_name: param.description for param in params}
        handed_on = [
            argument.replace(
                annotation=Annotated[argument.annotation, Parameter(help=help_texts[argument.name])]
            )
            for argument in arguments_of(path)
            if argument.name not in taken
        ]

        @wraps(handler)
        def run(*words: Any, **values: Any) -> None:
            options = _given(handed_on, values)
            mine = {name: value for name, value in values.items() if name in own}
            handler(*words, options=options, **mine)

        arguments: list[Argument] = []
        for parameter in own.values():
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
