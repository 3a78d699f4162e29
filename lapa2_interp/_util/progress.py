"""Progress of long work, on standard error: a bar on a terminal; elsewhere, as in a log, a plain
line every 15 s.

Work of less than two seconds shows nothing. Printed lines may quote any text, so control characters
are escaped on a terminal (`sanitized_output`).
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

SHOWN_AFTER = 2.0
"""Seconds."""
LINE_EVERY = 15.0
"""Seconds."""


def progress_bar(total: int, label: str, unit: str = "token", *, initial: int = 0) -> tqdm:
    """A bar to advance by `update`; a context manager.

    Args:
        total: Number of units.
        label: Name of the work.
        unit: Name of a unit, in the singular.
        initial: Units done before.
    """
    form: dict[str, Any] = {
        "desc": escape_line(label),
        "total": total,
        "unit": unit,
        "initial": initial,
        "delay": SHOWN_AFTER,
    }
    if sys.stderr.isatty():
        return tqdm(
            **form, file=raw_stream(sys.stderr), mininterval=0.2, smoothing=0.1, dynamic_ncols=True
        )
    return LineBar(**form, mininterval=1.0, miniters=1, smoothing=0.1)


def format_duration(seconds: float) -> str:
    """Seconds in a readable unit: 40 s, 12 min, 3.4 h, 5.0 days, 7.4 years."""
    for size, name in ((365 * 86400, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {name}" if size > 60 else f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def format_bytes(size: int) -> str:
    """Bytes in a readable unit: 0.1 MB, 3.1 GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


@contextmanager
def given_or_new_bar(
    given: tqdm | None, total: int, label: str, unit: str = "token"
) -> Iterator[tqdm]:
    """The given bar, or a new one that is closed at the end of the block."""
    if given is not None:
        yield given
        return
    with progress_bar(total, label, unit) as own:
        yield own


def hidden_bar() -> tqdm:
    """A bar that shows nothing, for work inside other work."""
    return tqdm(disable=True)


class CountingBar(tqdm):
    """A bar that shows nothing, and reports the number of finished units to a function."""

    def __init__(self, report: Callable[[int], object]) -> None:
        super().__init__(disable=True)
        self.report, self.done = report, 0

    def update(self, n: int | float | None = 1) -> None:
        """Count units, and report."""
        self.done += int(n or 0)
        self.report(self.done)


class LineBar(tqdm):
    """A bar as whole lines, at most one every 15 s, and one when the work ends."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Write a line if one is due. `close` writes the last line, since it has the last
        postfix."""
        now = self._time()
        if now - getattr(self, "written", self.start_t) < LINE_EVERY or self.n >= (
            self.total or float("inf")
        ):
            return False
        self.written = now
        self._write()
        return True

    def clear(self, nolock: bool = False) -> None:
        """Do nothing: a written line stays."""

    def close(self) -> None:
        """Write the last line, if the work took long enough to be reported."""
        if getattr(self, "disable", True):
            return
        self.disable = True
        self._decr_instances(self)
        if self._time() - self.start_t >= self.delay:
            self._write()

    def _write(self) -> None:
        self.fp.write(f"{self}\n")
        self.fp.flush()

    def __str__(self) -> str:
        n, total, gone = self.n, self.total, self.format_dict["elapsed"]
        done = (
            f"{100 * n // total} % ({n:,} of {total:,} {self.unit}s)"
            if total
            else f"{n:,} {self.unit}s"
        )
        parts = [
            done,
            *([self.postfix] if self.postfix else []),
            f"{self.format_interval(gone)} gone",
        ]
        rate = self.format_dict["rate"] or (n - self.initial) / max(gone, 1e-9)
        if not self.disable and rate and total and n < total:
            parts.append(f"{self.format_interval(round((total - n) / rate))} left")
        return f"{self.desc}: {', '.join(parts)}"


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

    kinds = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not under nohup
        kinds.append(signal.SIGINT)
    before = {kind: signal.signal(kind, stop) for kind in kinds}
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
        for kind, handler in before.items():
            signal.signal(kind, handler)


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

    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, hold) or signal.SIG_DFL for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
        if held:
            signal.raise_signal(held[0])


CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters but tab and the end of a line, marks that turn the direction of writing, and
halves of surrogate pairs, which no terminal can show."""


def escape_controls(text: str) -> str:
    """A text with its control characters escaped, as \\x1b."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


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
