"""Decoding methods by name, with the parameters of a task.

Also the augmentations of a method's branches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from inspect import getattr_static
from itertools import combinations
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from lapa2_interp._util.values import check_value
from lapa2_interp.bias.augmentation import (
    PAPER_LAWS,
    Augmentation,
    AugmentationLike,
    Augmentations,
    active_augmentations,
    steps_overlap,
    within,
)
from lapa2_interp.errors import (
    AugmentationError,
    MethodError,
    TaskError,
    parameter,
    unknown_choice,
    validation_message,
)
from lapa2_interp.methods.arithmetic import Arithmetic
from lapa2_interp.methods.base import Branch, Method
from lapa2_interp.methods.bayes import AirDecoding, Gedi, Palette, RsaControl
from lapa2_interp.methods.chat import Chat
from lapa2_interp.methods.conditioning import (
    Gate,
    NegPrompt,
    NoControl,
    PrefixConditioning,
    Remind,
)
from lapa2_interp.methods.contrast import ConPrefix, Dexperts, Preadd, Rose, Spa
from lapa2_interp.methods.freectrl import FreeCtrl
from lapa2_interp.methods.prepared import ActivationAddition, Datg
from lapa2_interp.tasks.task import MethodSettings, Task, read_task

HIDDEN = Augmentation(alpha=1, law="cut", phase="after_span")
"""The method hides the prefix from every query after the prefix."""


def known_methods() -> dict[str, type[Method]]:
    """Method classes by name: the paper's in its order, its baselines, related decoders."""
    paper = (NoControl, PrefixConditioning, ConPrefix, AirDecoding, NegPrompt, Preadd, Palette)
    ours = (Rose, RsaControl, Gedi, Dexperts, Arithmetic, Spa, ActivationAddition, Gate, Remind)
    known = (*paper, FreeCtrl, Datg, *ours, Chat)
    return {method.name: method for method in known}


def find_class(name: str, allow_code: bool = False) -> type[Method]:
    """A method's class: a name of `known_methods`, or MODULE:CLASS for a custom class.

    Args:
        allow_code: Import MODULE, which runs it. Otherwise it must be imported already: a name may
            come from another person's file.

    Raises:
        MethodError: Unknown name, the class is not a method, or it is not imported.
    """
    if ":" not in name:
        known = known_methods()
        if name not in known:
            raise MethodError(
                f"{unknown_choice('method', name, known)}; or one of your own as MODULE:CLASS"
            )
        return known[name]
    module, _, class_path = name.partition(":")
    if not allow_code and module not in sys.modules:
        raise MethodError(
            f"method {name!r} is code that is not loaded; if you trust it, import {module} first,"
            f" or give {parameter('allow_code', True)}"
        )
    try:
        member: Any = import_module(module) if allow_code else sys.modules[module]
        for part in class_path.split("."):
            member = getattr_static(member, part)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise MethodError(
            f"method {name!r}: {error}; MODULE must be importable where it runs (PYTHONPATH=FOLDER"
            " says where it lies), and CLASS a name in it"
        ) from None
    if not (isinstance(member, type) and issubclass(member, Method) and is_dataclass(member)):
        raise MethodError(
            f"method {name!r} is {member!r}; it must be a dataclass derived from"
            " lapa2_interp.methods.Method"
        )
    return member


def method_name(method: Method) -> str:
    """The name by which `find_class` returns a method's class."""
    method_class = type(method)
    return (
        method.name
        if known_methods().get(method.name) is method_class
        else f"{method_class.__module__}:{method_class.__qualname__}"
    )


def get(name: str, **parameters: Any) -> Method:
    """A method by name; `lapa2 methods` lists them with their parameters.

    Args:
        name: As in `find_class`. The module of MODULE:CLASS is imported, since the caller names it;
            of names in files, `find_class` asks first.

    Raises:
        MethodError: Unknown name, a parameter the method does not have, or a value out of range.
    """
    method_class = find_class(name, allow_code=True)
    names = [field.name for field in fields(method_class)]  # type: ignore[arg-type]
    unknown = [
        parameter for parameter in parameters if parameter not in names
    ]  # a custom class may ignore them
    if unknown:
        raise MethodError(f"method {name!r}: {unknown_choice('field', unknown[0], names)}")
    hints, reader = _fields_of(method_class)
    for field, value in parameters.items():
        # A cell stores all numbers as floats.
        is_integer = isinstance(value, float) and value.is_integer()
        check_value(field, int(value) if is_integer else value, hints[field], MethodError,
                    f"method {name!r}: ")  # fmt: skip
    try:
        return reader.validate_python(parameters)
    except ValidationError as error:
        raise MethodError(f"method {name!r}: {validation_message(error, fields=names)}") from None


@cache
def _fields_of(method_class: type[Method]) -> tuple[dict[str, Any], Any]:
    """The types of a method's parameters, and what makes a method of parameters."""
    return get_type_hints(method_class, include_extras=True), TypeAdapter(method_class)


def get_for_task(name: str, task: Task, **parameters: Any) -> Method:
    """A method with its parameters from the task's file, such as Air-Decoding's omega; the caller's
    parameters override them.

    Raises:
        MethodError: As `get`.
        TaskError: The task's file has a text that the method does not read.
    """
    made = get(name, **(task.parameters(name) | parameters))
    _check_texts(task, name, type(made), f"task {task.name}")
    return made


def load_task(name: str | Path) -> Task:
    """A built-in task by name, or a user's by the path of its TOML file.

    The task's settings of a method MODULE:CLASS are checked later, by `get_for_task`: nothing is
    imported here.

    Raises:
        TaskError: Unknown name, unreadable file, or a malformed one (the message names the line or
            field); an unknown method or text.
    """
    task, known = read_task(name), known_methods()
    for method in task.methods:
        if method in known:
            _check_texts(task, method, known[method], f"task file {name}")
        elif ":" not in method:
            raise TaskError(f"task file {name}: methods: {unknown_choice('method', method, known)}")
    return task


def _check_texts(task: Task, name: str, method_class: type[Method], where: str) -> None:
    """Raise TaskError if a task has a text for a method that the method does not read."""
    allowed = method_class.text_names
    for attribute, texts in task.methods.get(name, MethodSettings()).texts.items():
        for text in texts:
            if allowed is not None and text not in allowed:
                field_path = f"methods.{name}.texts.{attribute}"
                raise TaskError(f"{where}: {field_path}: {unknown_choice('text', text, allowed)}")


def assign_augmentations(
    method: Method, branches: Sequence[Branch], augmentation: AugmentationLike
) -> tuple[Augmentations, ...]:
    """The augmentation of each branch: Pre-Aug on prefix branches, Pro-Aug on the base branch of
    methods with `pro_aug`, both in the branch's `layers`, and `HIDDEN` on branches whose prefix is
    hidden.

    Beside prefix branches, Pro-Aug takes the paper's laws only (Eq. 15): a knock-out of the prefix,
    or a target share of attention, has no meaning for the prompt. Explicit slots and positions
    count the keys of prefix branches, so the base branch gets the profile's span instead.

    Raises:
        AugmentationError: There is no branch for the augmentation to act on, several rules for
            parts of the prefix would all act on the whole prompt, or a branch lists layers
            and the augmentation names its own by a word, such as "top".
    """
    # The augmentations of the base branch.
    rules = active_augmentations(augmentation)
    on_prompt = rules
    if any(branch.prefix is not None for branch in branches):
        copied = [rule for rule in rules if rule.law in PAPER_LAWS]
        on_prompt = tuple(rule.with_default_span() for rule in copied)
        on_parts = [rule for rule in copied if not isinstance(rule.span, str)]
        if method.pro_aug and any(steps_overlap(a, b) for a, b in combinations(on_parts, 2)):
            raise AugmentationError(
                f"{len(on_parts)} rules act on parts of the prefix at the same steps, and"
                f" {method.name}'s Pro-Aug would add all of them on the prompt; give"
                f" {parameter('pro_aug', 'false', 'set')}, or one rule"
            )
    # Pre-Aug on prefix branches (Algorithm 1, lines 4 to 10), Pro-Aug on the base (11 to 18).
    by_branch = tuple(
        HIDDEN
        if branch.hidden
        else within(
            rules if branch.prefix is not None else on_prompt if method.pro_aug else (),
            branch.layers,
        )
        for branch in branches
    )
    if rules and not any(by_branch):
        raise AugmentationError(
            f"{method.name} has no prefix for an augmentation to act on; generate without one"
            " (alpha 0, augmentation none)"
        )
    return by_branch
