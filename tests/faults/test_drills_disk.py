"""Drills: disks that are full, read-only, slow, gone, or shared, and a clock that goes back.
`make drills`.

What happens to a sweep at every single write is in test_sweep.py; here are whole commands.
"""

import os
import random
import shlex
import shutil
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import matplotlib.font_manager  # noqa: F401 - a process that is nobody cannot import any more
import pytest
from conftest import start
from drills import FULL, SWEEP, act, contents, furnish, left_over
from lapa2_interp.runs.local import InProcess
from test_drills import COMMANDS, place_of

from lapa2_interp import load_run
from lapa2_interp._util.errors import RunError
from lapa2_interp._util.files import TEMPORARY_PREFIX, remove_abandoned
from lapa2_interp.cli.app import main
from lapa2_interp.runs import manifest
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.runs.sweep import sweep

pytestmark = [pytest.mark.drill, pytest.mark.alone]
NOBODY = 65534
SHORT = (
    "sweep", "generate", "score", "propositions", "select", "view", "report", "prefix train",
)  # fmt: skip
LOSSES = 4 if FULL else 1
WRITING = tuple(COMMANDS) if FULL else SHORT


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    furnish(folder)
    return folder


@pytest.fixture
def disk(tmp_path):
    """A disk of a megabyte, and how to change it: `mount -o remount,...`."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")

    def remount(how):
        subprocess.run(["mount", "-o", f"remount,{how}", str(place)], check=True)

    yield place, remount
    subprocess.run(["umount", "-l", str(place)], check=True)


def line_of(command, home, folder):
    line = COMMANDS[command].replace("perplexity=tiny-gpt2 ", "")
    return line.format(home=home, run=home / "run", out=folder / "out")


def refused(line, capsys):
    """A command that ends with code 2: its last line, and no other of ours."""
    capsys.readouterr()
    assert main(shlex.split(line)) == 2, line
    said = [each for each in capsys.readouterr().err.splitlines() if each.startswith("lapa2: ")]
    assert len(said) == 1, said
    return said[0]


@pytest.fixture(scope="module")
def undisturbed(home, tmp_path_factory):
    known = {}

    def of(command):
        if command not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            assert main(shlex.split(line_of(command, home, folder))) == 0
            known[command] = contents(place_of(command, folder))
        return known[command]

    return of


@pytest.mark.parametrize("command", WRITING)
def test_on_a_full_disk_a_command_ends_in_a_line_and_goes_on_later(
    command, home, disk, undisturbed, capsys, record_property
):
    folder, remount = disk
    wanted = undisturbed(command)
    line, blocks = line_of(command, home, folder), folder / "something else"
    refused = []
    for pages in (0, 6, 40):
        blocks.write_bytes(bytes((1 << 20) - 4096 * pages - 4096))
        if main(shlex.split(line)) == 0:
            break
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("lapa2: "), said
        assert "full" in said or "No space left" in said, said
        assert not left_over(folder)
        refused.append(4 * pages)
        blocks.unlink()
    assert refused, "there was room"
    remount("size=50m")
    if contents_or_nothing(place_of(command, folder)) != wanted:
        assert main(shlex.split(line)) == 0
    assert contents(place_of(command, folder)) == wanted
    record_property("command", command)
    record_property("refused with KiB free", ", ".join(map(str, refused)))


def contents_or_nothing(place):
    return contents(place) if place.exists() else {}


@pytest.mark.parametrize("command", WRITING)
def test_a_read_only_disk_is_refused(command, home, disk, capsys):
    folder, remount = disk
    remount("ro")
    said = refused(line_of(command, home, folder), capsys)
    assert "Read-only file system" in said, said
    assert str(folder) in said


READING = {
    "runs": "runs {run}",
    "score": "score {run} --scorers distinct --cache {out}-cache --out {out}",
    "report": "report {run} --out {out}.html",
    "trace": "trace {run} --only method=prefix --out {out}",
}


def test_a_run_on_a_read_only_disk_is_read(home, disk, tmp_path, capsys):
    folder, remount = disk
    remount("size=20m")
    shutil.copytree(home / "run", folder / "run")
    remount("ro")
    for name, line in READING.items():
        words = line.format(run=folder / "run", out=tmp_path / name)
        assert main(shlex.split(words)) == 0, capsys.readouterr().err
    assert "Read-only file system" in refused(SWEEP.format(home=home, out=folder / "run"), capsys)


def act_as_nobody(line, log):
    if os.getuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    act(line, log)


def test_permissions_that_are_lost_are_named(home, capsys):
    """Another user's process, since root may read and write everything. Who is not root is the owner,
    who is kept out of closed files alone."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        folder.chmod(0o755)
        (folder / "cache").mkdir()
        (folder / "cache").chmod(0o777)
        shutil.copy(home / "grid.toml", folder)
        run = shutil.copytree(home / "run", folder / "run")
        key = next(iter(load_run(run).plan))
        log = folder / "log"
        log.touch()
        log.chmod(0o666)
        closed = {
            f"score {run} --scorers distinct --cache {folder}/cache --out {folder}/cache/scores": run / "cells" / key / "samples.parquet",
            f"runs {run}": run / "run.json",
            f"runs {run} --json": run / "plan" / f"{key}.json",
            f"trace {run} --out {folder}/cache/table": run / "cells" / key / "trace.nc",
            SWEEP.format(home=folder, out=run): None,
            f"generate --model tiny-gpt2 --attribute positive --length 20 --device cpu --out {run}/new": None,
        }  # fmt: skip
        for line, file in closed.items():
            if file is None and os.getuid():
                continue
            if file is not None:
                file.chmod(0)
            log.write_text("")
            process = start(act_as_nobody, line, log)
            process.join()
            said = log.read_text().splitlines()
            assert process.exitcode == 2, (line, said[-3:])
            assert said[-1].startswith("lapa2: "), (line, said)
            assert "Permission denied" in said[-1], (line, said)
            if file is not None:
                file.chmod(0o644)


class Loses(InProcess):
    """Loses the run's folder after some outcomes."""

    def __init__(self, folder, after):
        super().__init__("cpu")
        self.folder, self.left = folder, after

    def wait(self, told):
        yield from super().wait(told)
        self.left -= 1
        if self.left == 0:
            self.folder.rename(self.folder.with_name("elsewhere"))


@pytest.mark.parametrize("after", [1, 2, 5])
def test_a_run_folder_that_vanishes_stops_the_sweep_and_goes_on_where_it_is(home, tmp_path, after):
    run, grids = tmp_path / "run", [load_grid(str(home / "grid.toml"))]
    with pytest.raises(RunError, match="run is gone: .* repeat the command"):
        sweep(run, grids, Loses(run, after))
    assert not run.exists(), "nothing is written where the run was"
    sweep(tmp_path / "elsewhere", grids, InProcess("cpu"))
    assert contents(tmp_path / "elsewhere") == contents(home / "run")


@pytest.mark.parametrize(
    "command", WRITING if FULL else ["sweep", "score", "circuits", "prefix train"]
)
def test_a_folder_that_is_moved_midway_ends_a_command_well_or_in_a_line(
    command, home, undisturbed, tmp_path, record_property
):
    """The folder that holds --out. A command that ends well has made it again, with its whole result.
    Once the folder is back, the same command goes on in it."""
    wanted, rng, refused = undisturbed(command), random.Random(command), 0
    for number in range(LOSSES):
        place = tmp_path / str(number)
        folder, log = place / "folder", place / "log"
        folder.mkdir(parents=True)
        line = line_of(command, home, folder)
        process = start(act, line, log)
        while process.is_alive() and not any(folder.iterdir()):
            time.sleep(0.005)
        process.join(rng.uniform(0, 0.5))
        folder.rename(place / "elsewhere")
        process.join()
        said = log.read_text().splitlines()
        assert "Traceback" not in said, said
        refused += process.exitcode == 2
        if process.exitcode == 2:
            assert said[-1].startswith("lapa2: "), said
        else:
            assert process.exitcode == 0, said
            there = folder if folder.exists() else place / "elsewhere"
            found = contents(place_of(command, there))
            assert found | {".plan": None} == wanted | {".plan": None}
        assert command != "sweep" or not folder.exists(), "it went on where its run was"
        shutil.rmtree(folder, ignore_errors=True)
        (place / "elsewhere").rename(folder)
        if contents_or_nothing(place_of(command, folder)) != wanted:
            assert main(shlex.split(line)) == 0
        assert contents(place_of(command, folder)) == wanted
        for each in folder.glob(f"{TEMPORARY_PREFIX}*"):
            os.utime(each, (0, 0))
        remove_abandoned(folder)  # as the next command there does, after a minute
        assert not left_over(folder)
        shutil.rmtree(place)
    record_property("command", command)
    record_property("times moved", LOSSES)
    record_property("refused", refused)


def test_a_slow_disk_changes_nothing(home, tmp_path, monkeypatch, record_property):
    real, calls = os.fsync, []

    def slow(handle):
        calls.append(handle)
        time.sleep(0.02)
        real(handle)

    monkeypatch.setattr(os, "fsync", slow)
    sweep(tmp_path / "run", [load_grid(str(home / "grid.toml"))], InProcess("cpu"))
    assert contents(tmp_path / "run") == contents(home / "run")
    record_property("slow writes", len(calls))


@pytest.mark.parametrize(
    "command", ["generate", "score", "circuits", "prefix train"] if FULL else ["generate", "score"]
)
def test_two_processes_with_one_place_do_not_mix(
    command, home, undisturbed, tmp_path, record_property
):
    """Each ends well, or in a line; what is there is what one alone would have made."""
    wanted, line = undisturbed(command), line_of(command, home, tmp_path)
    logs = [tmp_path / f"log {number}" for number in range(2)]
    both = [start(act, line, log) for log in logs]
    for process, log in zip(both, logs, strict=True):
        process.join()
        said = log.read_text().splitlines()
        assert process.exitcode in (0, 2), said
        if process.exitcode == 2:
            assert said[-1].startswith("lapa2: "), said
    assert 0 in [process.exitcode for process in both]
    assert contents(place_of(command, tmp_path)) == wanted
    assert not left_over(tmp_path)
    record_property("command", command)
    record_property("exit codes", str([process.exitcode for process in both]))


class Past(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime(1999, 1, 1, tzinfo=UTC)


def test_a_clock_that_goes_back_changes_nothing(home, tmp_path, monkeypatch):
    """Half of a run is of the future, the other half of 1999."""
    run, grids = tmp_path / "run", [load_grid(str(home / "grid.toml"))]
    shutil.copytree(home / "run", run)
    gone, *kept = load_run(run).plan
    shutil.rmtree(run / "cells" / gone)
    future = time.time() + 1e9
    for file in run.rglob("*"):
        os.utime(file, (future, future))
    monkeypatch.setattr(manifest, "datetime", Past)
    done = sweep(run, grids, InProcess("cpu"))
    assert (done.before, done.made) == (len(kept), 1)
    assert load_run(run).manifest(gone).created.year == 1999
    assert contents(run) == contents(home / "run")
