"""Drills of stops: commands that are killed, stopped, or meet another in one folder. `make drills`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from drills import (
    LINES,
    REFUSED,
    SWEEP,
    act,
    contents,
    different,
    done,
    furnish,
    go_on,
    lapa2_lines,
    left_over,
    photograph,
    start,
    stop_midway,
)

from lapa2_interp.cli.app import app

pytestmark = pytest.mark.drill
SOON = 5.0
"""Seconds in which a command that is stopped must end."""
PATIENCE = 240.0
"""Seconds in which all else must end."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return furnish(tmp_path_factory.mktemp("home"))


def finish(process):
    process.join(PATIENCE)
    assert not process.is_alive()
    return process.exitcode


KILLED = {
    "one study": LINES["fading"],
    "one training": LINES["prefix train"],
}


@pytest.mark.parametrize("command", KILLED)
def test_kill_at_every_change_of_the_disk(command, home, tmp_path, record_property):
    """The disk is copied before each change, as a kill would leave it; the command goes on there."""
    record_property("promise", "1, 2")
    folder, shots, log = tmp_path / "folder", tmp_path / "shots", tmp_path / "log"
    folder.mkdir()
    line = KILLED[command].format(home=home, out=folder / "out")
    assert finish(start(photograph, line, folder, shots, log)) == 0, log.read_text()
    wanted = contents(folder)
    tear_lines(folder / "out-kept", shots)
    places = sorted(shots.iterdir())
    assert len(places) > 8
    finish(start(go_on, KILLED[command], home, places, log, tmp_path / "results"))
    results = json.loads((tmp_path / "results").read_text())
    for shot in places:
        code, again = results[shot.name]
        complete = code == 2 and (shot / "out").exists() and "is finished" in log.read_text()
        assert code == 0 or complete, (shot.name, log.read_text())
        assert again == [], shot.name
        assert different(contents(shot), wanted) == [], shot.name
        assert [left for left in left_over(shot) if not is_hollow(left)] == []
    record_property("result", f"{len(places)} kills: the same bytes, nothing finished made again")


def is_hollow(folder):
    """True of a temporary folder without files: the next command that writes there removes it."""
    return not any(path.is_file() for path in Path(folder).rglob("*"))


def tear_lines(file, shots):
    """Add what kills leave of a file of lines: half of a line behind the whole ones."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    for number in range(1, len(lines), 3):
        torn = shots / f"line-{number}"
        torn.mkdir()
        half = lines[number][: len(lines[number]) // 2]
        (torn / file.name).write_text("".join(lines[:number]) + half)


def names_of_commands(group=app, before=()):
    for name in group:
        if not name.startswith("-"):
            inner = list(names_of_commands(group[name], (*before, name)))
            yield from inner or [" ".join((*before, name))]


def test_a_line_of_every_command_is_drilled():
    lines = [f"{line} " for line in LINES.values()]
    assert [
        name
        for name in names_of_commands()
        if not any(line.startswith(f"{name} ") for line in lines)
    ] == []


@pytest.mark.parametrize("command", LINES)
def test_ctrl_c_and_sigterm(command, home, tmp_path, record_property):
    record_property("promise", "2")
    finish(start(stop_midway, LINES[command], home, tmp_path, tmp_path / "results"))
    stops = json.loads((tmp_path / "results").read_text())
    code, _, said = stops.pop("undisturbed")
    assert code == (2 if command in REFUSED else 0), said
    for kind, (code, seconds, said) in stops.items():
        assert code == {"SIGINT": 130, "SIGTERM": 143}[kind], said
        assert seconds < SOON
        [line] = lapa2_lines(said)
        assert line.startswith("lapa2: interrupted; run the same command again to "), said
        assert "Traceback" not in said
    assert left_over(tmp_path) == []
    longest = max(seconds for _, seconds, _ in stops.values())
    record_property("result", f"a line, within {longest:.1f} s")


LONGER = " --set length=200 --set samples=12"


def batches(run):
    return len(list(run.glob("cells/*/[0-9]*.json")))  # a batch exists when its JSON does


def test_a_sweep_of_two_workers_is_stopped_again_and_again(home, tmp_path, record_property):
    """As a terminal does it: Ctrl-C reaches the workers, too. At last a worker alone is killed."""
    record_property("promise", "2")
    run, log = tmp_path / "run", tmp_path / "log"
    line = (SWEEP + LONGER).format(home=home, out=run).replace("--workers 1", "--workers 2")

    def sweep_until_a_batch():
        before, last = batches(run), time.monotonic() + PATIENCE
        with log.open("a") as stream:
            lapa2 = [Path(sys.executable).parent / "lapa2", *line.split()]
            process = subprocess.Popen(lapa2, stdout=stream, stderr=stream, start_new_session=True)
        while batches(run) == before:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < last, log.read_text()
            time.sleep(0.01)
        return process

    for kind, code in {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}.items():
        process = sweep_until_a_batch()
        before, began = finished_batches(run), time.monotonic()
        os.killpg(process.pid, kind) if kind == signal.SIGINT else process.send_signal(kind)
        assert process.wait(PATIENCE) == code, log.read_text()
        assert time.monotonic() - began < SOON
        assert before <= finished_batches(run)
    process = sweep_until_a_batch()
    before = finished_batches(run)
    os.kill(worker_of(process), signal.SIGKILL)
    assert process.wait(PATIENCE) == 0, log.read_text()
    assert before <= finished_batches(run)
    assert "Traceback" not in log.read_text()
    done((SWEEP + LONGER).format(home=home, out=tmp_path / "alone"), log)
    assert different(contents(run), contents(tmp_path / "alone")) == []
    assert left_over(run) == []
    record_property("result", "Ctrl-C, SIGTERM, kill -9, a worker killed: the bytes of one process")


def finished_batches(run):
    """Finished batches, each as it is on the disk."""
    records = run.glob("cells/*/[0-9]*.json")
    return {(str(record), record.stat().st_ino, record.stat().st_mtime_ns) for record in records}


def worker_of(process):
    """One of a sweep's workers."""
    for process_folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (process_folder / "stat").read_text().rpartition(")")[2].split()[1]
            if (
                int(parent) == process.pid
                and b"spawn_main" in (process_folder / "cmdline").read_bytes()
            ):
                return int(process_folder.name)
        except OSError:  # it has ended
            continue
    raise AssertionError("no worker is alive")


def test_two_sweeps_on_one_folder(home, tmp_path, record_property):
    record_property("promise", "2")
    line = SWEEP.format(home=home, out=tmp_path / "run")
    logs = [tmp_path / f"log {number}" for number in range(2)]
    both = [start(act, line, log) for log in logs]
    for process, log in zip(both, logs, strict=True):
        assert finish(process) == 0, log.read_text()
    assert different(contents(tmp_path / "run"), contents(home / "run")) == []
    assert left_over(tmp_path) == []
    record_property("result", "both end well: the bytes of one")


def test_a_killed_conversion_leaves_no_half_made_model(tmp_path, record_property):
    """The default model is converted into the cache by the first command that needs it."""
    record_property("promise", "1")
    line, log = "probe smollm2-135m --device cpu", tmp_path / "log"
    process = start(act, line, log, {"LAPA2_CACHE": str(tmp_path / "cache")})
    while not left_over(tmp_path):
        assert process.is_alive(), log.read_text()
        time.sleep(0.01)
    process.kill()
    process.join()
    shutil.copytree(tmp_path / "cache", tmp_path / "killed")
    for cache in ("killed", "whole"):
        again = start(act, line, log, {"LAPA2_CACHE": str(tmp_path / cache)})
        assert finish(again) == 0, log.read_text()
        assert not left_over(tmp_path / cache)
    killed, undisturbed = (
        {
            name: data
            for name, data in contents(tmp_path / cache).items()
            if name.endswith(".safetensors")
        }
        for cache in ("killed", "whole")
    )
    assert undisturbed
    assert different(killed, undisturbed) == []
    record_property("result", "converted again: the same bytes")
