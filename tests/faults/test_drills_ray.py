"""Drills of `--engine ray`: coordinators, workers, heads and links that die, and machines that are slow."""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from drills import FULL, SWEEP, contents, left_over

# They run in one process, as `--dist loadfile` has it: each looks for Ray's processes everywhere.
pytestmark = [pytest.mark.drill, pytest.mark.alone]
KILLS = 20 if FULL else 1
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
RAYLET = Path("/tmp/ray/session_latest/logs/raylet.out")
"""What Ray says of a machine's workers; the folder has no other name that sockets in it allow."""
GRID = """
model = "tiny-gpt2"
dtype = "float32"
trace = "pooled"
task = "sentiment"
attribute = "positive"
prompts = 4
samples = 4
length = 48
max_rows = 4
method = ["prefix", "preadd"]
augmentation = ["none", "paper"]
"""
HERE, FAR = "10.231.77.1", "10.231.77.2"
BY_RAY = SWEEP.replace("--workers 1", "--engine ray --address {address}")


class Running:
    """A process and its children; what it says goes to a file."""

    def __init__(self, words, log, **environment):
        self.log = log
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                [*map(str, words)],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=os.environ | QUICKLY | environment,
                start_new_session=True,
            )

    def wait_for(self, *codes):
        """What it has said when it ends, which must be in time and with one of these codes."""
        code = self.process.wait(PATIENCE)
        said = self.log.read_text(errors="replace")
        assert code in codes, said
        assert "Traceback" not in said, said
        return said

    def kill(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def lapa2(line, log, *inside, **environment):
    return Running([*inside, BIN / "lapa2", *line.split()], log, **environment)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@contextmanager
def head(folder, host="127.0.0.1", cpus=2, inside=(), port=None, **environment):
    """A cluster of one machine; its address."""
    port = port or free_port()
    line = f"start --head --block --node-ip-address {host} --port {port} --num-cpus {cpus} --include-dashboard=false"
    ray = Running([*inside, BIN / "ray", *line.split()], folder / "head.log", **environment)
    try:
        until(lambda: "Ray runtime started" in ray.log.read_text(), ray.log)
        yield f"{host}:{port}", ray
    finally:
        ray.kill()


def until(seen, log):
    """Wait until something is so."""
    last = time.monotonic() + PATIENCE
    while not seen():
        assert time.monotonic() < last, log.read_text(errors="replace")
        time.sleep(0.1)


def of_ray(title):
    """Processes whose command line holds a title."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if title in (each / "cmdline").read_bytes().decode(errors="replace"):
                found.append(int(each.name))
    return found


def under_way(folder):
    """Whether a sweep has finished a group and not yet its last cell."""
    return any((folder / "run" / "parts").glob("*/[0-9]*"))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A grid, and its run by one process."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "grid.toml").write_text(GRID)
    lapa2(SWEEP.format(home=folder, out=folder / "run"), folder / "log").wait_for(0)
    return folder


def assert_same(folder, home):
    """The run is that of one process, and nothing else is left."""
    wanted, found = contents(home / "run"), contents(folder / "run")
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []
    assert not left_over(folder)


def test_a_killed_coordinator_goes_on_to_the_same_bytes(home, tmp_path, record_property):
    line, rng, killed = SWEEP.replace("--workers 1", "--engine ray"), random.Random(1), 0
    before = set(of_ray("raylet"))
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        killed += killed_on_the_way(
            lapa2(line.format(home=home, out=folder / "run"), folder / "log"), folder, rng
        )
        lapa2(line.format(home=home, out=folder / "run"), folder / "again").wait_for(0)
        assert_same(folder, home)
    until(lambda: set(of_ray("raylet")) <= before, folder / "log")  # Ray's own processes end, too
    record_property("coordinators killed", killed)
    assert killed


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_coordinator_ends_soon_and_goes_on(kind, home, tmp_path, record_property):
    line = SWEEP.replace("--workers 1", "--engine ray").format(home=home, out=tmp_path / "run")
    sweep = lapa2(line, tmp_path / "log")
    until(lambda: under_way(tmp_path) or sweep.process.poll() is not None, sweep.log)
    began = time.monotonic()
    sweep.process.send_signal(kind)
    said = sweep.wait_for(143 if kind == signal.SIGTERM else 130)
    took = time.monotonic() - began
    assert took < SOON, said
    assert said.splitlines()[-1].startswith("lapa2: interrupted; the same command "), said
    lapa2(line, tmp_path / "again").wait_for(0)
    assert_same(tmp_path, home)
    record_property("stopped by", kind.name)
    record_property("ended within, seconds", round(took, 1))


def killed_on_the_way(sweep, folder, rng):
    until(lambda: under_way(folder) or sweep.process.poll() is not None, sweep.log)
    time.sleep(rng.uniform(0, 2))
    sweep.process.kill()
    return sweep.process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("harm", ["killed", "stopped for 5 s"])
def test_workers_that_die_or_are_slow_change_nothing(harm, home, tmp_path, record_property):
    rng, harmed = random.Random(2), 0
    with head(tmp_path) as (address, _):
        sweep = lapa2(
            BY_RAY.format(home=home, out=tmp_path / "run", address=address), tmp_path / "log"
        )
        until(lambda: under_way(tmp_path), sweep.log)
        for _ in range(3):
            workers = of_ray("ray::RemoteWorker")
            if not workers or sweep.process.poll() is not None:
                break
            each = rng.choice(workers)
            with suppress(ProcessLookupError):
                if harm == "killed":
                    os.kill(each, signal.SIGKILL)
                else:
                    os.kill(each, signal.SIGSTOP)
                    time.sleep(5)
                    os.kill(each, signal.SIGCONT)
                harmed += 1
            time.sleep(1)
        sweep.wait_for(0)
        assert_same(tmp_path, home)
    record_property("workers", f"{harmed} {harm}")
    assert harmed


HOG = """
import re, time
held = []
while True:
    free = int(re.search(r"MemAvailable: +(\\d+)", open("/proc/meminfo").read())[1])
    if free > {enough}:
        held.append(bytearray(b"x") * 2**27)
    else:
        time.sleep(0.01)
"""
"""Takes memory until no more than so many KiB are free; and again, where others give some back."""


def test_workers_that_ray_kills_for_want_of_memory_change_nothing(home, tmp_path, record_property):
    """Another program takes the machine's memory until Ray has killed a worker."""
    kib = dict(re.findall(r"(\w+): +(\d+)", Path("/proc/meminfo").read_text()))
    total, free = int(kib["MemTotal"]), int(kib["MemAvailable"])
    limit = free - 4 * 2**20
    watched = {
        "RAY_memory_usage_threshold": f"{1 - limit / total:.4f}",
        "RAY_memory_monitor_refresh_ms": "50",
    }
    with head(tmp_path, **watched) as (address, _):
        sweep = lapa2(
            BY_RAY.format(home=home, out=tmp_path / "run", address=address), tmp_path / "log"
        )
        until(lambda: under_way(tmp_path), sweep.log)
        before = set(of_ray("ray::RemoteWorker"))
        hog = Running([sys.executable, "-c", HOG.format(enough=limit - 2**19)], tmp_path / "hog")
        try:
            until(lambda: before - set(of_ray("ray::RemoteWorker")), sweep.log)
            assert sweep.process.poll() is None, "the sweep ended before memory did"
        finally:
            hog.kill()
        sweep.wait_for(0)
        assert_same(tmp_path, home)
        assert "OOM kill reason" in RAYLET.read_text(errors="replace")
    record_property("workers", "killed by Ray, for want of memory")


def test_a_machine_with_another_version_is_refused(home, tmp_path):
    folder = tmp_path / "other" / "scipy-0.0.1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: scipy\nVersion: 0.0.1\n")
    with head(tmp_path, PYTHONPATH=str(folder.parent)) as (address, _):
        line = BY_RAY.format(home=home, out=tmp_path / "run", address=address)
        said = lapa2(line, tmp_path / "log").wait_for(2)
    last = said.splitlines()[-1]
    assert last.startswith("lapa2: "), said
    assert "has scipy 0.0.1 and this machine" in last
    assert not list((tmp_path / "run" / "parts").glob("*/[0-9]*"))


def test_a_head_that_is_lost_ends_the_sweep_and_a_new_one_goes_on(home, tmp_path):
    line = BY_RAY.format(home=home, out=tmp_path / "run", address="{address}")
    with head(tmp_path) as (address, ray):
        sweep = lapa2(line.format(address=address), tmp_path / "log")
        until(lambda: under_way(tmp_path), sweep.log)
        ray.kill()
        said = sweep.wait_for(2)
    assert said.splitlines()[-1].startswith("lapa2: "), said
    assert "the same command goes on where this one stopped" in said
    with head(tmp_path) as (address, _):
        lapa2(line.format(address=address), tmp_path / "again").wait_for(0)
    assert_same(tmp_path, home)


@contextmanager
def two_namespaces():
    """Two networks joined by a slow link, as commands that run a program in each."""
    names = [f"lapa2-{os.getpid()}-{i}" for i in (0, 1)]
    ends = [f"lapa2v{i}" for i in (0, 1)]
    inside = [("ip", "netns", "exec", name) for name in names]

    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here (Debian's iproute2)")

    def ip(*words):
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"network namespaces are forbidden here: {done.stderr.strip()}")

    try:
        for name in names:
            ip("ip", "netns", "add", name)
        ip(
            "ip",
            "link",
            "add",
            ends[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            names[1],
        )
        for where, end, address in zip(inside, ends, (HERE, FAR), strict=True):
            ip(*where, "ip", "address", "add", f"{address}/24", "dev", end)
            ip(*where, "ip", "link", "set", end, "up")
            ip(*where, "ip", "link", "set", "lo", "up")
        yield inside, lambda: ip(*inside[1], "ip", "link", "set", ends[1], "down")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def works_beside(node):
    """Whether a worker runs in the network of a process."""
    own = Path(f"/proc/{node.process.pid}/ns/net").readlink()
    found = []
    for each in of_ray("ray::RemoteWorker"):
        with suppress(OSError):
            found.append(Path(f"/proc/{each}/ns/net").readlink())
    return own in found


def test_two_machines_in_networks_of_their_own_and_the_link_is_cut(home, tmp_path, record_property):
    """The far one joins, works, and vanishes without a word."""
    with (
        two_namespaces() as ((here, far), cut),
        head(tmp_path, HERE, 1, here, 6390) as (address, _),
    ):
        join = f"start --block --address {address} --node-ip-address {FAR} --num-cpus 1"
        node = Running([*far, BIN / "ray", *join.split()], tmp_path / "far.log")
        try:
            until(lambda: "Ray runtime started" in node.log.read_text(), node.log)
            sweep = lapa2(
                BY_RAY.format(home=home, out=tmp_path / "run", address=address),
                tmp_path / "log",
                *here,
            )
            until(lambda: under_way(tmp_path) and works_beside(node), sweep.log)
            cut()
            assert sweep.process.poll() is None, "the sweep ended before the link was cut"
            sweep.wait_for(0)
        finally:
            node.kill()
    assert_same(tmp_path, home)
    record_property("links cut", 1)
