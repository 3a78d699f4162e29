"""What a command prints may quote any text; on a terminal it does nothing but show."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters but tab and the end of a line, marks that turn the direction of writing, and
halves of surrogate pairs, which no terminal can show."""


def visible(text: str) -> str:
    """A text with its control characters spelt out, as \\x1b."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """The same on one line."""
    return visible(text).replace("\n", "\\n")


class Terminal:
    """A stream to a terminal whose `write` spells control characters out.

    Attributes:
        stream: The stream as it was, for what draws on purpose.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(visible(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def drawing(stream: TextIO) -> TextIO:
    """The stream under a `Terminal`; any other is itself."""
    return stream.stream if isinstance(stream, Terminal) else stream


@contextmanager
def harmless_output() -> Iterator[None]:
    """A block in which what is printed on a terminal is harmless, and everywhere can be printed."""
    before = sys.stdout, sys.stderr
    errors = getattr(sys.stdout, "errors", None)
    reconfigure = getattr(sys.stdout, "reconfigure", lambda **_: None)
    reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = (Terminal(stream) if stream.isatty() else stream for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        reconfigure(errors=errors)
