"""Progress as it is seen: a bar on a terminal, whole lines in a log, nothing for what is quick."""

import io
import itertools
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from lapa2_interp import progress
from lapa2_interp._util.terminal import (
    Terminated,
    deferred_interrupts,
    escape_line,
    raw_stream,
    sanitized_output,
    stop_on_sigterm,
)
from lapa2_interp.progress import hidden_bar, progress_bar

CODE = """
import time
from lapa2_interp import progress
progress.SHOWN_AFTER = 0.05
with progress.progress_bar(1200, "3 cells") as bar:
    for _ in range(10):
        time.sleep(0.05)
        bar.update(120)
"""


@pytest.fixture
def clock(monkeypatch):
    """Seconds of our own, which pass when a test says so."""
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def work(clock, bar, steps, seconds, units=1):
    with bar:
        for _ in range(steps):
            clock[0] += seconds
            bar.update(units)
            yield


def lines(capsys):
    written = capsys.readouterr().err
    assert not re.search(r"[^\S\n ]|[\x00-\x09\x0b-\x1f\x1b\x7f]", written), repr(written)
    assert written == "" or written.endswith("\n")
    return written.splitlines()


def test_a_log_gets_a_line_every_15_seconds_and_one_at_the_end(clock, capsys):
    for _ in work(clock, progress_bar(1200, "3 cells"), steps=40, seconds=1.0, units=30):
        pass
    assert lines(capsys) == [
        "3 cells: 37 % (450 of 1,200 tokens), 00:15 gone, 00:25 left",
        "3 cells: 75 % (900 of 1,200 tokens), 00:30 gone, 00:10 left",
        "3 cells: 100 % (1,200 of 1,200 tokens), 00:40 gone",
    ]


def test_the_time_left_follows_the_whole_work_and_not_the_last_burst(clock, capsys):
    """Rows of a batch that end early are counted when the batch ends."""
    with progress_bar(1000, "1 cell") as bar:
        for _ in range(15):
            clock[0] += 1.0
            bar.update(1)
        for _ in range(14):
            clock[0] += 1.0
            bar.update(1)
        clock[0] += 1.0
        bar.update(271)
    assert lines(capsys)[:2] == [
        "1 cell: 1 % (15 of 1,000 tokens), 00:15 gone, 16:25 left",
        "1 cell: 30 % (300 of 1,000 tokens), 00:30 gone, 01:10 left",
    ]


def test_slow_steps_give_a_line_each_and_the_last_only_one(clock, capsys):
    for _ in work(clock, progress_bar(3, "preparing", "prompt"), steps=3, seconds=60.0):
        pass
    assert lines(capsys) == [
        "preparing: 33 % (1 of 3 prompts), 01:00 gone, 02:00 left",
        "preparing: 66 % (2 of 3 prompts), 02:00 gone, 01:00 left",
        "preparing: 100 % (3 of 3 prompts), 03:00 gone",
    ]


@pytest.mark.parametrize(("seconds", "shown"), [(1.9, 0), (2.1, 1)])
def test_a_log_is_told_nothing_of_quick_work(clock, capsys, seconds, shown):
    for _ in work(clock, progress_bar(2, "scoring", "text"), steps=2, seconds=seconds / 2):
        pass
    assert len(lines(capsys)) == shown


def test_what_a_bar_is_told_on_the_way_is_in_its_lines(clock, capsys):
    """A postfix adds no line of its own; work that falls away or was done before is not counted as
    done now."""
    bar = progress_bar(100, "2 cells", initial=20)
    for _ in work(clock, bar, steps=4, seconds=10.0, units=10):
        bar.set_postfix_str("1/2 cells")
        bar.clear()
        bar.total = 60
    assert lines(capsys) == [
        "2 cells: 66 % (40 of 60 tokens), 1/2 cells, 00:20 gone, 00:20 left",
        "2 cells: 100 % (60 of 60 tokens), 1/2 cells, 00:40 gone",
    ]


def test_work_that_is_broken_off_says_how_far_it_came(clock, capsys):
    for _ in itertools.islice(
        work(clock, progress_bar(10, "scoring", "text"), steps=10, seconds=1.0), 4
    ):
        pass
    assert lines(capsys) == ["scoring: 40 % (4 of 10 texts), 00:04 gone"]


def test_no_progress_is_silent(clock, capsys):
    for _ in work(clock, hidden_bar(), steps=100, seconds=10.0):
        pass
    assert lines(capsys) == []


def test_the_two_forms_from_outside():
    """On a terminal one line that is drawn again; in a pipe whole lines."""
    command = [sys.executable, "-c", CODE]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with subprocess.Popen(command, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        try:
            while part := os.read(ours, 4096):
                seen += part
        except OSError:  # the other side is closed
            pass
        assert process.wait() == 0
    os.close(ours)
    assert seen.count(b"\r3 cells: ") > 1
    assert b"1200/1200" in seen
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"3 cells: 100 % \(1,200 of 1,200 tokens\), 00:0\d gone\n", done.stderr), (
        repr(done.stderr)
    )


def test_there_is_one_way_to_make_a_bar():
    package = Path(progress.__file__).parent
    makers = [
        file.name
        for file in package.rglob("*.py")
        if re.search(r"\btqdm\(", file.read_text("utf-8"))
    ]
    assert makers == ["progress.py"]


def test_on_a_terminal_control_characters_are_spelt_out(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    with sanitized_output():
        print("a\x1b[2J\x9b\u202eb\ud800\tc")
        raw_stream(sys.stdout).write("\r\x1b[A")
    assert out.getvalue() == "a\\x1b[2J\\x9b\\u202eb\\ud800\tc\n\r\x1b[A"
    assert sys.stdout is out
    assert escape_line("a\nb\x1b") == "a\\nb\\x1b"


def test_what_is_no_terminal_gets_texts_as_they_are(monkeypatch, tmp_path):
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        monkeypatch.setattr(sys, "stdout", log)
        with sanitized_output():
            print("a\x1b[2Jb \ud800")
    assert (tmp_path / "log").read_text(encoding="utf-8") == "a\x1b[2Jb \\ud800\n"


@pytest.mark.parametrize(
    ("kind", "exception"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)],
)
def test_a_held_interrupt_counts_when_the_block_ends(kind, exception):
    stop, done = threading.Event(), []
    with pytest.raises(exception), stop_on_sigterm():
        with deferred_interrupts(stop):
            assert not stop.is_set()
            signal.raise_signal(kind)
            assert stop.is_set()
            done.append("kept")
        done.append("behind the block")
    assert done == ["kept"]


@pytest.mark.parametrize(
    ("kind", "exception"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)],
)
def test_an_interrupt_that_a_library_turns_into_an_error_of_its_own_counts(kind, exception):
    """As matplotlib's renderer does."""
    with pytest.raises(exception), stop_on_sigterm():
        try:
            signal.raise_signal(kind)
        except BaseException:
            raise ValueError("Invalid affine transformation matrix") from None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ValueError, match="its own"), stop_on_sigterm():
        raise ValueError("its own")


@pytest.mark.parametrize(
    ("kind", "exception"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)],
)
def test_an_interrupt_that_something_swallows_counts_at_the_end(kind, exception):
    with pytest.raises(exception), stop_on_sigterm():
        with suppress(BaseException):
            signal.raise_signal(kind)
        went_on = True
    assert went_on


def test_a_second_interrupt_counts_at_once():
    stop, done = threading.Event(), []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts(stop):
        signal.raise_signal(signal.SIGINT)
        done.append("first")
        signal.raise_signal(signal.SIGINT)
        done.append("second")
    assert done == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_thread_holds_nothing():
    """Python gives signals to the main thread alone."""
    done = []

    def work():
        with deferred_interrupts(threading.Event()), stop_on_sigterm():
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]
