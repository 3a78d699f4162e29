"""Progress of long work, on standard error.

A bar on a terminal; elsewhere, as in a log, a plain line every 15 s. Work of less than two seconds
shows nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from lapa2_interp._util.terminal import escape_line, raw_stream

SHOWN_AFTER = 2.0
"""Seconds."""
LINE_EVERY = 15.0
"""Seconds."""


def progress_bar(total: int, label: str, noun: str = "token", *, initial: int = 0) -> tqdm:
    """A bar to advance by `update`; a context manager.

    Args:
        total: Number of what is counted.
        label: Name of the work.
        noun: What is counted, in the singular.
        initial: Number that was done before.
    """
    form: dict[str, Any] = {
        "desc": label if label.isprintable() else escape_line(label),
        "total": total,
        "unit": noun,
        "initial": initial,
        "delay": SHOWN_AFTER,
        # Batches end in bursts, so only the rate since the beginning says how long the rest takes.
        "smoothing": 0,
    }
    if sys.stderr.isatty():
        return tqdm(**form, file=raw_stream(sys.stderr), mininterval=0.2, dynamic_ncols=True)
    return LineBar(**form, mininterval=1.0, miniters=1)


@contextmanager
def given_or_new_bar(
    bar: tqdm | None, total: int, label: str, noun: str = "token"
) -> Iterator[tqdm]:
    """The given bar, or a new one that is closed at the end of the block."""
    if bar is not None:
        yield bar
        return
    with progress_bar(total, label, noun) as own:
        yield own


def hidden_bar() -> tqdm:
    """A bar that shows nothing, for work inside other work."""
    return tqdm(disable=True)


class CountingBar(tqdm):
    """A bar that shows nothing, and reports the number that is finished to a function."""

    def __init__(self, report: Callable[[int], object]) -> None:
        super().__init__(disable=True)
        self.report, self.done = report, 0

    def update(self, n: int | float | None = 1) -> None:
        """Count, and report."""
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
        rate = (n - self.initial) / max(gone, 1e-9)
        if not self.disable and rate and total and n < total:
            parts.append(f"{self.format_interval(round((total - n) / rate))} left")
        return f"{self.desc}: {', '.join(parts)}"
