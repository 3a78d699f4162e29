"""The errors that this package raises on purpose.

Each says what was found, what is allowed and what to do next.

The command line prints the message on one line and exits with code 2; a traceback there means a
defect of this package.

Messages name the parameters of a call by `parameter`, which says at the command line the option.
"""

from __future__ import annotations

import os
import re
import shlex
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails


COMMAND_LINE = "LAPA2_COMMAND_LINE"
"""Set in the environment of a process that runs a command, and so in that of its workers."""


@contextmanager
def on_command_line() -> Iterator[None]:
    """Inside, and in processes that are started inside, errors name options of the command line."""
    before = os.environ.get(COMMAND_LINE)
    os.environ[COMMAND_LINE] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(COMMAND_LINE, None)
        else:
            os.environ[COMMAND_LINE] = before


def parameter(name: str, value: object = "", within: str = "") -> str:
    """A parameter in the words of who calls: max_rows=N in Python, --max-rows N at the command
    line.

    Args:
        value: True of a flag; capitals or dots stand for a value, and "" for none.
        within: The option of NAME=VALUE that the parameter is one of, as in --set omega=60.
    """
    if COMMAND_LINE not in os.environ:
        if value == "":
            return name
        is_word = isinstance(value, str) and re.search("[a-z]", value)
        shown = repr(value) if is_word and not within else str(value).replace(" ", ", ")
        return f"{name}={shown}"
    if within:
        return shlex.join([f"--{within}", f"{name}={value}"])
    option = f"--{name.replace('_', '-')}"
    return option if value == "" or value is True else f"{option} {value}"


class Lapa2Error(Exception):
    """Base of the package's errors.

    Example:
        >>> from lapa2_interp import Lapa2Error, generate
        >>> try:
        ...     generate("tiny-gpt2", lenght=32)
        ... except Lapa2Error as error:
        ...     print(error)
        unknown setting 'lenght'; allowed: model, prompts, ...; did you mean 'length'?
    """


class AugmentationError(Lapa2Error):
    """A field of an augmentation is out of range, or selects layers or heads the model does not
    have."""


class LayoutError(Lapa2Error):
    """Prefix, prompt or span do not fit the tokens, the context or the forward pass."""


class ModelError(Lapa2Error):
    """A model cannot be found or loaded."""


class DeadHookError(ModelError):
    """Editing `hook_attn_scores` does not reach this model's attention, so an augmentation would do
    nothing."""


class TaskError(Lapa2Error):
    """A task file is malformed, or does not have the attribute asked for."""


class MethodError(Lapa2Error):
    """A decoding method is unknown or cannot serve the task."""


class TraceError(Lapa2Error):
    """A trace asks for layers or heads the model does not have, or cannot be read."""


class DataError(Lapa2Error):
    """A corpus cannot be read, or lacks what is asked of it."""


class PrefixError(Lapa2Error):
    """A soft prefix cannot be read, or belongs to another model."""


class ScoringError(Lapa2Error):
    """Texts cannot be scored: a scorer is unknown, its server or key is missing, or the texts are
    not there."""


class StatisticsError(Lapa2Error, ValueError):
    """No interval or test can be made of these values and labels."""


class CircuitError(Lapa2Error):
    """An experiment on a circuit cannot be done: branches that do not fit, too few texts, heads the
    model does not have."""


class RunError(Lapa2Error):
    """A run folder is finished, not writable, or not a run."""


class DamagedError(RunError):
    """A file of a run is not what was written."""


class NoGridError(RunError):
    """A run has none of the grids that an item is made of."""


class GridError(Lapa2Error):
    """A grid is unknown or malformed, or asks for what no method, task or model can do."""


def validation_message(
    error: Exception,
    forms: Mapping[str, str] | None = None,
    fields: Iterable[str] = (),
    located: bool = True,
) -> str:
    """One line about an error of pydantic: the field, the problem, the value. A misspelt field
    comes first. Of another error, its own words.

    Args:
        forms: By name, the allowed values of fields that take more than one type; the message names
            them in place of the first type.
        fields: Names of all fields.
        located: False leaves out the field.
    """
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    problem = main_error(error)
    field_path = ".".join(str(part) for part in problem["loc"]) if located else ""
    at = f"{field_path}: " if field_path else ""
    field = str(problem["loc"][0]) if problem["loc"] else ""
    if forms and field in forms and len(problem["loc"]) > 1:
        # The error is about a part of the value: report the whole of it.
        mine = [part for part in error.errors() if part["loc"][:1] == problem["loc"][:1]]
        problem = min(mine, key=lambda part: len(part["loc"]))
    elif problem["type"] in UNKNOWN_FIELD:
        return (
            unknown_choice("field", field_path, fields)
            if fields
            else f"{field_path}: there is no such field, found {problem['input']!r}"
        )
    if problem["type"] == "value_error":  # a sentence of our own
        return str(problem["msg"]).removeprefix("Value error, ")
    if forms and field in forms and problem["type"] != "missing":
        return f"{field}: takes {forms[field]}; found {_shortened(problem['input'])}"
    message = f"{problem['msg'][:1].lower()}{problem['msg'][1:]}".replace("valid tuple", "list")
    if problem["type"] == "missing":
        return f"{at}{message}"
    return f"{at}{message}, found {_shortened(problem['input'])}"


def _shortened(value: object) -> str:
    text = repr(value)
    return f"{text[:160]}{'...' * (len(text) > 160)}"


def first_sentence(error: Exception) -> str:
    """The first sentence of a library's error, in one line."""
    return " ".join(str(error).split()).split(". ")[0][:200].rstrip(".")


def pluralize(n: int, noun: str) -> str:
    """A number with its noun: 1 cell, 2 cells."""
    return f"{n} {noun}{'s' * (n != 1)}"


UNKNOWN_FIELD = ("extra_forbidden", "unexpected_keyword_argument")


def main_error(error: ValidationError) -> ErrorDetails:
    """The first of pydantic's errors to report: a misspelt field explains a missing one."""
    return min(error.errors(), key=lambda problem: problem["type"] not in UNKNOWN_FIELD)


def unknown_choice(noun: str, name: object, allowed: object) -> str:
    """A sentence about a name that is not in a closed list: the allowed names, and the nearest one
    if it is close."""
    from difflib import get_close_matches

    names = [str(name) for name in allowed]  # type: ignore[attr-defined]
    near = get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {noun} {name!r}; allowed: {', '.join(names)}{hint}"
