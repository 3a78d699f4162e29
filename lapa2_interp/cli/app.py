"""The command line, `lapa2`: arguments in, one call, words out.

Help is built from the types and docstrings of the commands; torch is imported when one runs.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from cyclopts import (
    UNSET,
    App,
    CoercionError,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    Token,
    UnknownOptionError,
    convert,
)  # fmt: skip
from rich.console import Console

from lapa2_interp._util.errors import Lapa2Error, on_command_line
from lapa2_interp._util.terminal import (
    Terminated,
    escape_line,
    raw_stream,
    sanitized_output,
    stop_on_sigterm,
    use_utf8,
)
from lapa2_interp._util.version import __version__

COMMANDS = {
    "Steer and look": "look:layout generate:generate steer:steer chat:chat generate:trace"
    " view:view",
    "Experiments": "sweep:grids sweep:sweep sweep:runs sweep:power paper:report paper:propositions",
    "Scores": "score:score scorers word_lists:word_lists",
    "Circuits": "circuits:circuits circuits:select circuits:fading",
    "Models and prefixes": "look:models look:fetch look:probe prefix look:list_prefixes",
    "Lists": "look:list_methods look:list_recipes look:list_tasks",
}
"""Commands by group, as the help shows them: MODULE:FUNCTION, or a name of `FAMILIES`."""
FAMILIES = {
    "prefix": (
        "Train soft prefixes, measure them on held-out text, or import them.",
        "prefix:train prefix:evaluate prefix:score prefix:import_ prefix:recipes",
    ),
    "scorers": (
        "List and train scorers; make and read sheets for human raters.",
        "score:list_scorers score:train score:sheets score:answers",
    ),
}
"""Commands of commands: their help, and what they have."""


def add_command(app: App, path: str, **shown: Any) -> None:
    """Add a command of this room, MODULE:NAME: a function, or NAME = command_of(...). Its docstring
    is read from the file, so that a list of commands imports none of their modules."""
    node, function = definition(f"cli.{path}"), path.partition(":")[2]
    if isinstance(node, ast.Assign):  # of a function of the package
        assert isinstance(node.value, ast.Call)
        node = definition(ast.literal_eval(node.value.args[0]))
    assert isinstance(node, ast.FunctionDef)
    name = function.removeprefix("list_").removesuffix("_").replace("_", "-")
    app.command(
        f"{__package__}.{path}",
        name="list" if name == app.name[0] else name,
        help=ast.get_docstring(node),
        help_format="markdown",
        **shown,
    )


@cache
def module_tree(module: str) -> ast.Module:
    """The source of a module of this package, such as runs.score, which is not imported."""
    file = Path(__file__).parents[1] / f"{module.replace('.', '/')}.py"
    return ast.parse(file.read_text("utf-8"))


def definition(path: str) -> ast.FunctionDef | ast.Assign:
    """The statement of this package that defines MODULE:NAME."""
    module, _, name = path.partition(":")
    for node in module_tree(module).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node
    raise LookupError(f"lapa2_interp.{module} does not define {name}")


NUMBERS = (int, float, int | None, float | None)
"""Types of options that are a number."""
SEVERAL = (tuple[int, ...], tuple[float, ...], tuple[float, float], tuple[float, float] | None)
"""Types of options that are several."""


def convert_value(annotation: Any, tokens: Sequence[Token]) -> Any:
    """An option's value: numbers as a grid file has them, all else as cyclopts reads it.

    Raises:
        Lapa2Error: No number where one belongs, in the sentence of every setting.
    """
    if annotation not in (*NUMBERS, *SEVERAL):
        return convert(annotation, tokens)
    from lapa2_interp._util.values import check_value, read_value

    name = str(tokens[0].keyword or tokens[0].value).lstrip("-").replace("-", "_")
    values = tuple(read_value(token.value) for token in tokens)
    value = values if annotation in SEVERAL else values[0]
    return check_value(name, value, annotation)


app = App(
    name="lapa2",
    version=__version__,
    help=(
        "Length-aware attention augmentation (LaPA2) on TransformerLens models: steer a language"
        " model with a prefix, keep the prefix from fading as the text grows, and record where the"
        " attention goes.\n\nStart with `lapa2 layout` to see which keys a prefix covers and what"
        " is added to them, make texts with `lapa2 generate`, and whole experiments with `lapa2"
        " sweep` (`lapa2 grids` lists them with what they take)."
    ),
    help_format="plaintext",  # of the list of commands; markdown takes a third of its time
    default_parameter=Parameter(negative=(), converter=convert_value),
    suppress_keyboard_interrupt=False,
)
for number, (title, paths) in enumerate(COMMANDS.items(), 1):
    shown: dict[str, Any] = {"group": Group(title, sort_key=number)}
    for shown["sort_key"], path in enumerate(paths.split()):
        if path in FAMILIES:
            help_text, members = FAMILIES[path]
            family = App(name=path, help=help_text, **shown)
            for member in members.split():
                add_command(family, member)
            app.command(family)
        else:
            add_command(app, path, **shown)
app.register_install_completion_command(help="Complete commands and options in this shell.")


def setting_problem(words: Sequence[str], error: CycloptsError) -> str | None:
    """The sentence about a setting of `lapa2 generate`, as Python and a grid say it; None where the
    error is about something else."""
    if list(words[:1]) != ["generate"]:
        return None
    token = getattr(error, "token", None)
    from lapa2_interp._util.values import read_value
    from lapa2_interp.cli.options import name_of_setting
    from lapa2_interp.generation.settings import CellSettings, unknown_setting

    if isinstance(error, UnknownOptionError):
        return unknown_setting(name_of_setting(str(token.keyword if token else "")))
    if isinstance(error, CoercionError) and token is not None:
        name = name_of_setting(str(token.keyword))
        if name in CellSettings.model_fields:
            try:
                CellSettings.of({name: read_value(token.value)})
            except Lapa2Error as problem:
                return str(problem)
    return None


def check_arguments(words: Sequence[str]) -> None:
    """Refuse arguments that are no text.

    Raises:
        Lapa2Error: The bytes of an argument are not of the locale's encoding.
    """
    for number, word in enumerate(words, start=1):
        if re.search("[\ud800-\udfff]", word):
            raise Lapa2Error(
                f"argument {number}, {ascii(word)[:80]}, is not"
                f" {sys.getfilesystemencoding().upper()}; give texts and names of files in the"
                " encoding of this locale"
            )


OPTION = re.compile(r"--?[a-zA-Z][\w-]*(=.*)?|--", re.DOTALL)
"""A word that is an option, or ends the options. Another that begins with a dash is a value."""


def join_dashed_values(words: Sequence[str]) -> list[str]:
    """The words of a command with OPTION=VALUE for each value such as "-5 degrees", which cyclopts
    takes for an option where it stands alone."""

    def is_dashed_value(word: str) -> bool:
        return word.startswith("-") and not OPTION.fullmatch(word)

    if not any(map(is_dashed_value, words)):
        return list(words)
    collection = app.parse_commands(words)[1][-1].assemble_argument_collection()
    joined: list[str] = []
    option, takes_more = "", False  # the option whose value may come next
    for number, word in enumerate(words):
        if word == "--":
            return [*joined, *words[number:]]
        if option and is_dashed_value(word):
            if joined[-1] == option:
                joined.pop()
            joined.append(f"{option}={word}")
        else:
            joined.append(word)
        if OPTION.fullmatch(word):
            option, takes_more = "", False
            with suppress(ValueError):  # no option of this command, or one with its value
                argument, _, flag = collection.match(word)
                takes_more = bool(argument.parameter.consume_multiple)
                option = word if flag is UNSET else ""
        elif not takes_more:
            option = ""
    return joined


def resumes(words: Sequence[str]) -> bool:
    """True if a command that is stopped keeps what it has finished."""
    match words:
        case ["sweep" | "score" | "circuits" | "steer", *_] | ["prefix", "train", *_]:
            return True
        case ["select" | "fading", *options]:
            return any(word.partition("=")[0] == "--file" for word in options)
    return False


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # `_run` ends all commands in one way


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0; 2 after an error of ours or of the command line, which is one line on
        stderr; 130 after Ctrl-C; 141 where the reader of the output left before the end; 143 after
        SIGTERM.
    """
    if arguments is None:
        use_utf8()
    words = list(sys.argv[1:] if arguments is None else arguments)
    with sanitized_output(), on_command_line():
        return _run(words)


def _run(words: list[str]) -> int:
    done = False
    try:
        check_arguments(words)
        with stop_on_sigterm():
            app(
                join_dashed_values(words),
                console=_Console(file=raw_stream(sys.stdout)),  # the help is ours, and in colour
                exit_on_error=False,
                print_error=False,
                result_action="return_value",
            )
        done = True
        sys.stdout.flush()
    except Lapa2Error as error:
        print(f"lapa2: {escape_line(str(error))}", file=sys.stderr)
    except CycloptsError as error:
        message = setting_problem(words, error) or " ".join(str(error).split())
        unread = isinstance(error, MissingArgumentError) and error.keyword in words
        if isinstance(error, UnknownOptionError):  # perhaps a text, such as the value of an option
            word = str(error.token.keyword)
            behind_option = any(OPTION.fullmatch(a) and b == word for a, b in pairwise(words))
            unread = behind_option or not word.startswith("--")
        if unread:
            message += "; a value that looks like an option follows an equals sign: --OPTION=VALUE"
        print(f"lapa2: {escape_line(message)} (see --help)", file=sys.stderr)
    except UnicodeEncodeError as error:  # a name of a file that the locale has no letters for
        print(
            f"lapa2: the letters {ascii(error.object[error.start : error.end])[:40]} are not in"
            f" this locale's encoding ({error.encoding}); set PYTHONUTF8=1 and repeat",
            file=sys.stderr,
        )
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0 if done else 128 + signal.SIGPIPE
    except OSError as error:  # a disk that is full, read-only or closed to this user
        file = f"{error.filename}: " if error.filename else ""
        reason = error.strerror or str(error)
        print(f"lapa2: {escape_line(f'{file}{reason}')}; mend it and repeat", file=sys.stderr)
    except MemoryError as error:
        print(
            f"lapa2: too little memory ({escape_line(str(error)) or 'no more is given'}); ask for"
            " less at a time (fewer samples, a shorter length), or repeat it where there is more",
            file=sys.stderr,
        )
    except (KeyboardInterrupt, Terminated) as stop:  # what was half-made is gone already
        after = "resume" if resumes(words) else "start over; no partial output is left"
        print(f"lapa2: interrupted; run the same command again to {after}", file=sys.stderr)
        return 130 if isinstance(stop, KeyboardInterrupt) else 143
    else:
        return 0
    return 2
