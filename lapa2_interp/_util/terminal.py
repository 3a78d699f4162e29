"""What people see of a command: durations and sizes, safe output, and how Ctrl-C ends it."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def format_duration(seconds: float) -> str:
    """Seconds in a readable unit: 40 s, 12 min, 3.4 h, 5.0 days, 7.4 years."""
    for size, name in ((365 * 86400, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {name}" if size > 60 else f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def format_bytes(size: int) -> str:
    """Bytes in a readable unit: 0.1 MB, 3.1 GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


class Terminated(SystemExit):
    """SIGTERM, by which batch systems stop a program."""


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C: unfinished files are removed, and workers are closed.

    A library may turn the exception into its own, or ignore it. The block then ends with it.

    Raises:
        Terminated: With the exit code of a program that SIGTERM ended.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield
        return
    signals: list[BaseException] = []

    def stop(number: int, _: object) -> None:
        sigterm = number == signal.SIGTERM
        signals.append(Terminated(128 + signal.SIGTERM) if sigterm else KeyboardInterrupt())
        raise signals[-1]

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not under nohup
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    except Exception as error:
        if signals:
            raise signals[-1] from error
        raise
    else:
        if signals:
            raise signals[-1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def caused_by_stop(error: BaseException | None) -> bool:
    """True if an error, which a library may have raised, was caused by Ctrl-C or SIGTERM."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt | Terminated):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def deferred_interrupts(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM set an event and are raised when the block ends; a second one is raised at
    once.

    Args:
        stop: The event; the block checks it and ends soon.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield
        return
    held: list[int] = []

    def hold(number: int, _: object) -> None:
        if held:
            raise KeyboardInterrupt
        held.append(number)
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, hold) or signal.SIG_DFL for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters but tab and the end of a line, marks that turn the direction of writing, and
halves of surrogate pairs, which no terminal can show."""


def escape_controls(text: str) -> str:
    """A text with its control characters escaped, as \\x1b."""
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def escape_line(text: str) -> str:
    """A text on one line, with its control characters escaped."""
    return escape_controls(text).replace("\n", "\\n")


class SanitizedStream:
    """A stream to a terminal whose `write` escapes control characters.

    Attributes:
        stream: The original stream, for progress bars, which need control characters.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(escape_controls(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def raw_stream(stream: Any) -> Any:
    """The original stream of a `SanitizedStream`; any other stream is returned as it is."""
    return stream.stream if isinstance(stream, SanitizedStream) else stream


def use_utf8() -> None:
    """Start this process again in Python's UTF-8 mode, if the locale (C, POSIX) has ASCII alone:
    its arguments, names of files and texts are UTF-8 nevertheless."""
    if sys.getfilesystemencoding() == "ascii" and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"  # of the workers
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


@contextmanager
def sanitized_output() -> Iterator[None]:
    """A block in which no printed text can control the terminal, and every text can be printed."""
    streams = sys.stdout, sys.stderr
    with Path(os.devnull).open(
        "w", encoding="utf-8"
    ) as nowhere:  # for a stream that is closed (`>&-`)
        out, err = (nowhere if stream is None else stream for stream in streams)
        errors = getattr(out, "errors", None)
        reconfigure = getattr(out, "reconfigure", lambda **_: None)
        reconfigure(errors="backslashreplace")
        sys.stdout, sys.stderr = (
            SanitizedStream(stream) if stream.isatty() else stream for stream in (out, err)
        )
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams
            reconfigure(errors=errors)
