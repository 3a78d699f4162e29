"""Options and errors of the scripts in analyses/ and figures/, in the command line's style."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from lapa2_interp.errors import Lapa2Error, ScoringError, unknown_choice
from lapa2_interp.models.machine import Dtype
from lapa2_interp.scoring.scorer import expand_scorers

if TYPE_CHECKING:
    from types import TracebackType

DEFAULT_SCORERS = ("accuracy", "masked", "echo", "toxicity", "perplexity")
"""The scorers of a script, by default."""


class ScriptOptions(argparse.ArgumentParser):
    """A script's options.

    Args:
        title: Description of the script, for --help.
    """

    def __init__(self, title: str, **settings: Any) -> None:
        super().__init__(description=title, allow_abbrev=False, **settings)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse options, with a hint for a misspelt option; in a notebook, take the defaults.

        From now on `print_error` prints the script's errors.
        """
        sys.excepthook = print_error
        if args is None and Path(sys.argv[0]).name.startswith(("ipykernel", "colab_kernel")):
            args = []
        options, rest = self.parse_known_args(args, namespace)
        if rest and rest[0].startswith("-"):
            names = [name for name in self._option_string_actions if name.startswith("--")]
            self.error(unknown_choice("option", rest[0].partition("=")[0], names))
        if rest:
            self.error(f"there is no place for {rest[0]!r}")
        return options

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line."""
        print(f"error: {message} (see --help)", file=sys.stderr)
        sys.exit(2)


def whole_number(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """The argparse type of a whole number in a range."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            allowed = f"at least {least}" if most is None else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"takes a whole number, {allowed}; found {text!r}")
        return number

    return parse


def add_scoring(
    options: argparse.ArgumentParser,
    texts: int | None,
    scorers: Sequence[str] | None = DEFAULT_SCORERS,
) -> None:
    """Add the options of scripts that score.

    Args:
        texts: The default of --perplexity.
        scorers: The default of --scorers.
    """
    options.add_argument(
        "--scorers",
        nargs="+",
        default=scorers,
        type=_scorer,
        help=(
            "NAME or NAME=MODEL, as of `lapa2 score` (default:"
            f" {' '.join(scorers or DEFAULT_SCORERS)}): toxicity=MODEL:LABEL,"
            " perplexity=gpt2-large, or for one task alone sentiment:accuracy=MODEL. A plain"
            " accuracy or toxicity is by both classifiers that ship; linear or adapter alone takes"
            " that one, linear being fast"
        ),
    )
    options.add_argument(
        "--perplexity",
        type=whole_number(),
        default=texts,
        help="texts of an arm whose perplexity is measured",
    )
    options.add_argument("--device", help="of scorers that run a model")
    options.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        default="float32",
        help="precision of the perplexity model",
    )


def _scorer(text: str) -> str:
    try:
        expand_scorers([text], DEFAULT_SCORERS)
    except ScoringError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def print_error(
    error_class: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """The `sys.excepthook` of scripts: an error that a user can correct is one line on stderr and
    exit code 2, as in the command line."""
    if isinstance(error, KeyboardInterrupt):
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    if isinstance(error, OSError) and error.filename is not None:
        print(f"error: cannot use {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    if isinstance(error, Lapa2Error):
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.__excepthook__(error_class, error, trace)
