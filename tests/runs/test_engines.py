"""The contract of engines: kill a sweep anywhere, repeat it, and the bytes are the same.

Hypothesis tries sequences of sweeps that something happens to. Batches are made without a model
(`jobs`), so that a sweep takes milliseconds.
"""

import errno
import os
import re
import shutil
import socket
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from jobs import FakeWorker, Pool, Serial, Shuffling, cluster_of

from lapa2_interp.errors import DamagedError, RunError
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.runs import fill as filling
from lapa2_interp.runs.engines import WorkerLost
from lapa2_interp.runs.fill import ATTEMPTS, LOCK, fill_run
from lapa2_interp.runs.grid import Grid
from lapa2_interp.runs.run import load_run
from lapa2_interp.runs.store import read_batch

ASKED = {
    "attribute": "positive", "prompts": ["The lake", "The sea", "The hut"], "samples": 2,
    "length": 12, "max_rows": 2, "dtype": "float32",
}  # fmt: skip
CELLS = tuple(
    cell_of("tiny-gpt2", alpha=alpha, trace=trace, **ASKED)
    for alpha, trace in ((0.0, "none"), (0.5, "pooled"), (1.0, "none"))
)
"""Three cells of three batches."""
BATCHES = [(cell.key, number) for cell in CELLS for number in range(3)]
GRIDS = (Grid("one", "", CELLS[:2]), Grid("two", "", CELLS[1:]))
ENGINES = ("serial", "pool", "shuffling", "cluster")
CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "tempfile.mkdtemp")
DISK = {errno.ENOSPC: "is full; .* is kept: make room", errno.EDQUOT: "is full", errno.EROFS: "Read-only"}  # fmt: skip
AGAIN = re.compile(r"\((\w{16})\): batch (\d+) made again; .* is missing or damaged")
NOBODY = 2**22 + 1
"""The number of no process."""
WATCHED = {"folder": None, "act": None}


def _hook(event, arguments):
    """Python's audit hooks cannot be removed, so one stays, and acts while a folder is watched."""
    act, folder = WATCHED["act"], WATCHED["folder"]
    if act and (event in CHANGES or (event == "open" and str(arguments[0]).startswith(folder))):
        act()


@contextmanager
def before_change(folder, number, act):
    """Call a function before the folder changes, or a file of it is opened, for the nth time."""
    if WATCHED["act"] is None and "added" not in WATCHED:
        sys.addaudithook(_hook)
        WATCHED["added"] = True
    count = 0

    def counted():
        nonlocal count
        count += 1
        if count == number:
            WATCHED["act"] = None
            act()

    WATCHED.update(folder=str(folder), act=counted)
    try:
        yield
    finally:
        WATCHED["act"] = None


def contents(run):
    """The bytes of texts, traces and settings, and the names of all else."""
    files = sorted(file for file in run.rglob("*") if file.is_file() and file.name != LOCK)
    return {
        str(file.relative_to(run)): file.read_bytes()
        if file.suffix in (".parquet", ".nc") or file.name == "cell.json"
        else None
        for file in files
    }


def stamps(run):
    """When the files of each finished batch were written, by cell and batch."""
    stored = {}
    for record in run.glob("cells/*/[0-9]*.json"):
        files = sorted(record.parent.glob(f"{record.stem}.*"))
        batch = record.parent.name, int(record.stem)
        stored[batch] = [(file.name, file.stat().st_mtime_ns) for file in files]
    return stored


def flip(file):
    """One bit of a file, which keeps its size."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if file.suffix != ".json" else 0] ^= 1
    file.write_bytes(data)


HARMS = {
    "away": Path.unlink,
    "cut": lambda file: os.truncate(file, 300),
    "empty": lambda file: os.truncate(file, 0),
    "one bit": flip,
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


def error_of(function):
    """The `RunError` that a call raises, if it does."""
    try:
        function()
    except RunError as error:
        return error
    return None


class Stopped(KeyboardInterrupt):
    """Ctrl-C, which a test gave."""


def stop():
    raise Stopped


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a run is that one process has made in one go."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert fill_run(run, GRIDS, Serial(FakeWorker()), pytest.fail).made == 3
    return contents(run)


class Sweeps(RuleBasedStateMachine):
    """A run, to which sweeps and accidents happen."""

    wanted: dict

    def __init__(self):
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="sweeps"))
        self.run = self.home / "run"
        self.patches = pytest.MonkeyPatch()
        self.head = socket.create_server(("127.0.0.1", 0))
        self.damaged, self.notes = set(), []

    @initialize(batches=st.integers(0, 9))
    def begin(self, batches):
        """A sweep that was stopped after some batches."""
        self.interrupted("serial", False, batches)

    def engine(self, kind, worker):
        if kind == "cluster":
            return cluster_of(worker, self.head, self.patches)
        return {"serial": Serial, "pool": Pool, "shuffling": Shuffling}[kind](worker)

    def sweep(self, kind, turned, worker, expect=None):
        """Sweep; batches that were sound are neither made again nor written again."""
        before = {batch: at for batch, at in stamps(self.run).items() if batch not in self.damaged}
        notes = []
        try:
            done = fill_run(self.run, GRIDS[:: -1 if turned else 1], self.engine(kind, worker), notes.append)  # fmt: skip
        finally:
            self.notes = notes
            assert not before.keys() & worker.made
            after = stamps(self.run)
            assert before.items() <= after.items()
            assert not list(self.run.rglob(".writing-*"))
            self.damaged -= set(worker.made)
        return done

    kinds = st.sampled_from(ENGINES)

    @rule(kind=kinds, turned=st.booleans())
    def undisturbed(self, kind, turned):
        """In any engine, and with the grids in any order."""
        missing = set(BATCHES) - (stamps(self.run).keys() - self.damaged)
        worker, damaged = FakeWorker(), self.damaged & stamps(self.run).keys()
        done = self.sweep(kind, turned, worker)
        assert (done.before + done.made, done.failed, done.elsewhere) == (3, (), 0)
        assert sorted(worker.made) == sorted(missing), "none is made twice"
        matches = [AGAIN.search(line) for line in self.notes]
        assert {(match[1], int(match[2])) for match in matches} == damaged
        assert contents(self.run) == self.wanted

    @rule(kind=kinds, turned=st.booleans(), batches=st.integers(0, 8))
    def interrupted(self, kind, turned, batches):
        """Ctrl-C before a batch; what is finished stays."""
        worker = FakeWorker(before=lambda number: number == batches and stop())
        try:
            self.sweep(kind, turned, worker)
        except Stopped:
            assert len(worker.made) <= batches

    @rule(kind=kinds, change=st.integers(1, 240))
    def killed(self, kind, change):
        """The folder is what a kill leaves before a change of it, which no code may tidy up."""
        if not self.run.exists():
            return
        shot = self.home / "shot"
        with before_change(self.run, change, lambda: shutil.copytree(self.run, shot)):
            self.sweep(kind, False, FakeWorker())
        if shot.exists():
            shutil.rmtree(self.run)
            shutil.copytree(shot, self.run)
            for file in [*self.run.rglob(".writing-*")]:  # of a process that has ended
                file.rename(str(file).replace(f"-{os.getpid()}-", f"-{NOBODY}-"))
            shutil.rmtree(shot)
            self.damaged = set()

    @rule(number=st.sampled_from([*DISK]), at=st.integers(1, 30), kind=kinds)
    def disk_is_full(self, number, at, kind):
        real, calls = os.fsync, 0

        def fsync(handle):
            nonlocal calls
            calls += 1
            if calls >= at:
                raise OSError(number, os.strerror(number))
            real(handle)

        with patch.object(os, "fsync", fsync):
            error = error_of(lambda: self.sweep(kind, False, FakeWorker()))
        assert (error is not None) == (calls >= at)
        assert error is None or re.search(DISK[number], str(error))

    @rule(kind=kinds, batch=st.sampled_from(BATCHES), always=st.booleans())
    def worker_dies(self, kind, batch, always):
        """Its batch is made again, three times at most; nobody else's is lost."""
        worker = FakeWorker({batch: WorkerLost("killed", begun=True)}, always)
        done = self.sweep(kind, False, worker)
        if not worker.begun[batch]:
            return
        others = {another: n for another, n in worker.begun.items() if another != batch}
        assert set(others.values()) <= {1}
        assert worker.begun[batch] == (ATTEMPTS if always else 2)
        assert done.failed == ((batch[0],) if always else ())
        if always:
            assert "the worker died 3 times" in load_run(self.run).failures[batch[0]].reason

    @rule(kind=kinds, batch=st.sampled_from(BATCHES))
    def batch_raises(self, kind, batch):
        """Its cell fails, which is noted, and the others are made."""
        worker = FakeWorker({batch: ValueError("out of luck")}, always=True)
        done = self.sweep(kind, False, worker)
        if not worker.begun[batch]:
            return
        run = load_run(self.run)
        assert (done.failed, run.state(batch[0])) == ((batch[0],), "failed")
        assert run.failures[batch[0]].reason == "ValueError('out of luck')"
        assert sum(f"({batch[0]}): ValueError('out of luck')" in line for line in self.notes) == 1
        assert done.before + done.made == 2

    @rule(kinds=st.tuples(kinds, kinds), batches=st.integers(0, 8))
    def another_at_the_same_time(self, kinds, batches):
        """A cell belongs to the sweep that has begun it; no batch is made twice."""
        second, state = FakeWorker(), {}

        def meanwhile(number):
            if number == batches and not state:
                state["done"] = fill_run(self.run, GRIDS, self.engine(kinds[1], second), self.notes.append)  # fmt: skip

        first = FakeWorker(before=meanwhile)
        before = set(stamps(self.run)) - self.damaged
        done = fill_run(self.run, GRIDS, self.engine(kinds[0], first), self.notes.append)
        made = first.made + second.made
        assert len(made) == len(set(made))
        assert not before & {*made}
        assert done.before + done.made == 3
        if state:
            nested = state["done"]
            assert nested.before + nested.made + nested.elsewhere == 3
            assert nested.elsewhere >= 1
        self.damaged -= {*made}
        assert contents(self.run) == self.wanted

    @rule(batch=st.sampled_from(BATCHES), suffix=st.sampled_from((".parquet", ".nc", ".json")), how=st.sampled_from([*HARMS]))  # fmt: skip
    def damage(self, batch, suffix, how):
        """A file of a batch: the cell is not read, and the others are."""
        key, number = batch
        file = self.run / "cells" / key / f"{number:03d}{suffix}"
        if batch in self.damaged or not file.is_file() or batch not in stamps(self.run):
            return
        was_finished = load_run(self.run).state(key) == "finished"
        HARMS[how](file)
        self.damaged.add(batch)
        run = load_run(self.run)
        if was_finished:
            seen_at_once = suffix == ".json" or how == "away"
            if seen_at_once:
                gone = suffix == ".json" and how == "away"
                assert run.state(key) == ("partly" if gone else "damaged")
            with pytest.raises(RunError, match=r"is missing or damaged|is damaged|not finished"):
                run.texts([key]), run.trace(key)
        with pytest.raises(DamagedError, match=f"{file.name} is missing or damaged .*makes it ag"):
            read_batch(file.parent, number, run.by_key[key])
        sound = [sound_key for sound_key in run.finished if sound_key not in dict(self.damaged)]
        assert len(run.texts(sound)) == 6 * len(sound)

    @rule(batch=st.sampled_from(BATCHES))
    def remove(self, batch):
        """A whole batch, by hand."""
        for file in (self.run / "cells" / batch[0]).glob(f"{batch[1]:03d}.*"):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        self.damaged.discard(batch)

    @invariant()
    def what_is_there_is_right(self):
        """Sound batches have the bytes of an undisturbed run."""
        for key, number in stamps(self.run).keys() - self.damaged:
            for suffix in (".parquet", ".nc"):
                name = f"cells/{key}/{number:03d}{suffix}"
                if name in self.wanted:
                    assert (self.run / name).read_bytes() == self.wanted[name]

    def teardown(self):
        try:
            self.undisturbed("serial", False)
            run = load_run(self.run)
            assert len(run.finished) == 3
            assert run.failures == {}
        finally:
            self.head.close()
            self.patches.undo()
            shutil.rmtree(self.home)


def test_kill_anywhere_repeat_the_same_bytes(undisturbed, monkeypatch):
    monkeypatch.setattr(filling, "LOOK", 0.001)
    monkeypatch.setattr(
        os, "fsync", lambda handle: None
    )  # a machine that loses its power is none of these
    Sweeps.wanted = undisturbed
    run_state_machine_as_test(
        Sweeps,
        settings=settings(
            max_examples=12, stateful_step_count=6, derandomize=True, database=None, deadline=None,
            print_blob=False, phases=[Phase.generate], suppress_health_check=[*HealthCheck],
        ),
    )  # fmt: skip
