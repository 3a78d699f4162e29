"""Drills of `--engine ray`: Ctrl-C. `make drills`. Workers and machines that die:
`tests/runs/test_cluster.py`."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from drills import GRID, SWEEP, contents, different, done

pytestmark = pytest.mark.drill
PATIENCE = 240.0
"""Seconds in which a sweep must end."""
SOON = 5.0
"""Seconds in which one that is stopped must end."""
BIN = Path(sys.executable).parent
QUICKLY = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
}
"""Ray sees within seconds that a machine is lost; a token of the user's is not asked for."""
LONGER = " --set length=200 --set samples=12"
BY_RAY = (SWEEP + LONGER).replace("--workers 1", "--engine ray --address {address}")


@contextmanager
def running(words, log):
    """A process and its children, which are killed at the end."""
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [str(word) for word in words],
            stdout=stream,
            stderr=stream,
            env=os.environ | QUICKLY,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill(process)


def kill(process):
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def until(seen, log):
    """Wait until something is so."""
    last = time.monotonic() + PATIENCE
    while not seen():
        assert time.monotonic() < last, log.read_text(errors="replace")
        time.sleep(0.1)


@contextmanager
def machine(line, log):
    """A machine of a cluster, which is only a group of processes here."""
    with running([BIN / "ray", "start", "--block", "--num-cpus", "1", *line.split()], log) as ray:
        until(lambda: "Ray runtime started" in log.read_text(), log)
        yield ray


@contextmanager
def sweep(home, folder):
    """A sweep on a cluster of one machine that has begun to finish batches; the cluster's address,
    the sweep, and its log."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address, log = f"127.0.0.1:{port}", folder / "log"
    head = f"--head --node-ip-address 127.0.0.1 --port {port} --include-dashboard=false"
    line = BY_RAY.format(home=home, out=folder / "run", address=address)
    with machine(head, folder / "head.log"), running([BIN / "lapa2", *line.split()], log) as lapa2:
        until(lambda: under_way(folder) or lapa2.poll() is not None, log)
        assert lapa2.poll() is None, log.read_text()
        yield address, lapa2, log


def under_way(folder):
    return any(folder.glob("run/cells/*/[0-9]*.json"))


def actors():
    """Processes of workers."""
    numbers = []
    for process_folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"ray::RemoteWorker" in (process_folder / "cmdline").read_bytes():
                numbers.append(int(process_folder.name))
    return numbers


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A grid, and its run by one process."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "grid.toml").write_text(GRID)
    done((SWEEP + LONGER).format(home=folder, out=folder / "run"), folder / "log")
    return folder


def test_ctrl_c_kills_the_workers_of_a_cluster(home, tmp_path, record_property):
    record_property("promise", "2")
    with sweep(home, tmp_path) as (_, lapa2, log):
        assert actors()
        began = time.monotonic()
        lapa2.send_signal(signal.SIGINT)
        assert lapa2.wait(PATIENCE) == 130, log.read_text()
        took = time.monotonic() - began
        assert took < SOON
        last = log.read_text().splitlines()[-1]
        assert last == "lapa2: interrupted; run the same command again to resume"
        until(lambda: not actors(), log)
    done((SWEEP + LONGER).format(home=home, out=tmp_path / "run"), log)
    assert different(contents(tmp_path / "run"), contents(home / "run")) == []
    record_property("result", f"a line, within {took:.1f} s; the same bytes later")
