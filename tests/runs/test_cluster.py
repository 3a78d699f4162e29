"""The Ray engine: on a real cluster of several nodes on this machine, and beside a stand-in for Ray."""

import socket
import sys
from concurrent.futures import Future
from time import monotonic, sleep
from types import SimpleNamespace
from typing import ClassVar

import pytest

from lapa2_interp.errors import GridError, Lapa2Error, RunError
from lapa2_interp.generation.cell import Cell
from lapa2_interp.progress import hidden_bar
from lapa2_interp.runs import ray as clusters
from lapa2_interp.runs.engines import InProcess
from lapa2_interp.runs.fill import fill_run
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.runs.manifest import library_versions
from lapa2_interp.runs.ray import RayPool
from lapa2_interp.runs.sweep import sweep

GRID = """
model = "tiny-gpt2"
dtype = "float32"
trace = "pooled"
augmentation = "none"
task = "sentiment"
attribute = "positive"
prompts = 4
samples = 4
length = 32
max_rows = 8
[[block]]
method = ["prefix", "preadd"]
augmentation = "paper"
"""
"""Two cells, of two and four batches."""


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    file = tmp_path_factory.mktemp("grid") / "two.toml"
    file.write_text(GRID)
    return load_grid(str(file))


# --- a real cluster


@pytest.fixture
def cluster():
    """A head that only coordinates, and two nodes of one core."""
    from ray.cluster_utils import Cluster

    quickly = {"initial_delay_ms": 0, "period_ms": 500, "failure_threshold": 3}
    quickly = {f"health_check_{name}": value for name, value in quickly.items()}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": quickly}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        nodes.add_node(num_cpus=1)
    yield nodes
    nodes.shutdown()


class Trap(Cell):
    """Runs code on the worker that reads it."""

    code: ClassVar[str]

    def __reduce_ex__(self, protocol):
        return eval, (self.code,)


class Unlucky(RayPool):
    """The second batch kills its worker, and the fifth is under way on a machine that is lost."""

    def __init__(self, cluster, file):
        super().__init__(address=cluster.address)
        node = "__import__('ray').get_runtime_context().get_node_id()"
        note = f"__import__('pathlib').Path({str(file)!r}).write_text({node})"
        self.traps = {2: "__import__('os')._exit(1)", 5: f"({note}, __import__('time').sleep(60))"}
        self.cluster, self.file, self.futures = cluster, file, []

    def submit(self, cell, number, packing, progress):
        submitted = len(self.futures) + 1
        if submitted in self.traps:
            Trap.code = self.traps[submitted]
            cell = Trap.model_validate(cell.model_dump())
        self.futures.append(super().submit(cell, number, packing, progress))
        if submitted == 5:
            while not (self.file.exists() and self.file.read_text()):
                assert not self.futures[-1].done()
                sleep(0.1)
            nodes = {node.node_id: node for node in self.cluster.worker_nodes}
            self.cluster.remove_node(nodes[self.file.read_text()], allow_graceful=False)
        return self.futures[-1]


def contents(run):
    """Texts and traces of a run."""
    files = (file for suffix in ("parquet", "nc") for file in run.glob(f"cells/*/*.{suffix}"))
    return {file.relative_to(run): file.read_bytes() for file in files}


@pytest.mark.alone
def test_a_cluster_that_loses_a_worker_and_a_machine_makes_the_bytes_of_one_process(
    cluster, grid, tmp_path
):
    engine = Unlucky(cluster, tmp_path / "node")
    assert engine.n_workers == 2
    swept = fill_run(tmp_path / "far", [grid], engine)
    assert (swept.made, swept.failed) == (2, ())
    lost = [number for number, future in enumerate(engine.futures, 1) if future.exception()]
    assert lost == [2, 5]
    assert len(engine.futures) == 6 + len(lost), "what was lost is made again, and nothing else"
    assert fill_run(tmp_path / "here", [grid], InProcess("cpu")).made == 2
    assert len(contents(tmp_path / "here")) == 2 * 6
    assert contents(tmp_path / "far") == contents(tmp_path / "here")


@pytest.mark.alone
def test_a_cluster_that_is_not_there_is_refused_soon(monkeypatch):
    monkeypatch.setattr(clusters, "ANSWER", 4.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        busy = f"127.0.0.1:{silent.getsockname()[1]}"
        for address, reason in (("127.0.0.1:1", "refused"), (busy, "no answer in 4 s")):
            began = monotonic()
            with pytest.raises(
                RunError, match=f"cannot join the Ray cluster at {address} .*{reason}.*ray start"
            ):
                RayPool(address=address)
            assert monotonic() - began < 8
    for address in ("nonsense", "ray://127.0.0.1:10001", "127.0.0.1:http"):
        with pytest.raises(RunError, match="allowed: HOST:PORT of the cluster's head, auto"):
            RayPool(address=address)


def test_without_ray_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RunError, match=r"pip install 'lapa2-interp\[ray\]', or use engine='local'"):
        RayPool()


# --- a stand-in for Ray


class Actor:
    """Stands for a worker; the test decides what comes of its batch."""

    def __init__(self):
        self.batch = Future()
        self.place = SimpleNamespace(remote=lambda: self)
        self.remote_batch = SimpleNamespace(remote=lambda *_: self)
        self.future = lambda: self.batch


class Machines:
    """Stands for Ray, connected to machines that have these resources."""

    def __init__(self, head, resources):
        from ray import exceptions

        self.head, self.resources, self.exceptions = head, [*resources], exceptions
        self.actors, self.n_ready, self.joined = [], None, 0
        self.versions, self.slow, self.error = dict(library_versions()), None, None
        self.shutdown, self.kill = lambda: setattr(self, "joined", 0), self.actors.remove

    def nodes(self):
        nodes = [(i, True, resources) for i, resources in enumerate(self.resources)]
        nodes.append(("gone", False, {"CPU": 9.0}))
        return [dict(zip(("NodeID", "Alive", "Resources"), node, strict=True)) for node in nodes]

    def get_runtime_context(self):
        address = f"127.0.0.1:{self.head.getsockname()[1]}"
        return SimpleNamespace(get_node_id=lambda: 0, gcs_address=address)

    def remote(self, kind):
        return SimpleNamespace(options=lambda **needs: SimpleNamespace(remote=self.start))

    def start(self, *settings):
        self.actors.append(Actor())
        return self.actors[-1]

    def wait(self, references, timeout):
        return references[: self.n_ready], []

    def get(self, reference):
        if self.error:
            raise self.exceptions.RayError(self.error)
        return "far", self.versions, self.slow


@pytest.fixture
def pretend(monkeypatch):
    """Makes machines for an engine to join."""
    with socket.create_server(("127.0.0.1", 0)) as head:

        def make(*resources):
            machines = Machines(head, resources)

            def join(address):
                machines.joined += 1
                return machines

            monkeypatch.setattr(clusters, "_join", join)
            return machines

        yield make


@pytest.mark.parametrize(
    ("settings", "workers"),
    [
        ({}, 5),
        ({"gpus_per_worker": 2.0}, 2),
        ({"gpus_per_worker": 0.25}, 20),
        ({"device": "cpu", "threads": 2}, 7),
        ({"workers": 9}, 9),
    ],
)
def test_workers_are_counted_machine_by_machine(pretend, settings, workers):
    pretend({"GPU": 3.0, "CPU": 7.0}, {"GPU": 2.0, "CPU": 8.0}, {"CPU": 1.0})
    with RayPool(**settings) as engine:
        assert engine.n_workers == engine.slots() == workers


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threads": 5}, "needs 5 CPU where the largest has 4"),
        ({"threads": 5, "workers": 1}, "needs 5 CPU where the largest has 4"),
        ({"device": "auto"}, "has no GPU for device 'auto'; give device='cpu'"),
        ({"device": "cuda:1"}, "allowed: cpu, cuda, auto"),
        ({"gpus_per_worker": 1.5}, "found 1.5"),
    ],
)
def test_what_no_machine_can_do_is_refused(pretend, settings, message):
    machines = pretend({"CPU": 4.0})
    with pytest.raises(RunError, match=message):
        RayPool(**settings)
    assert not machines.joined


def test_no_workers(pretend):
    machines = pretend({"CPU": 4.0})
    with pytest.raises(Lapa2Error, match="workers: .* or equal to 1, found 0"):
        RayPool(workers=0)
    assert not machines.joined


def test_a_dead_worker_is_replaced_and_machines_that_join_get_workers(pretend, grid):
    machines = pretend({"CPU": 1.0})
    with RayPool() as engine:
        assert engine.slots() == 1
        (lost,) = machines.actors
        engine.submit(grid.cells[0], 0, None, hidden_bar())
        assert engine.slots() == 1
        assert machines.actors == [lost]
        lost.batch.set_exception(machines.exceptions.RayActorError())
        assert engine.slots() == 1
        assert lost not in machines.actors
        machines.resources.append({"CPU": 2.0})
        assert engine.slots() == 3
        assert len(machines.actors) == 3


def test_ctrl_c_ends_the_workers_and_those_that_start(pretend, grid, tmp_path, monkeypatch):
    machines, seen = pretend({"CPU": 2.0}), []
    machines.n_ready = 1

    def stop(*_, **__):
        seen.extend(machines.actors)
        raise KeyboardInterrupt

    monkeypatch.setattr("lapa2_interp.runs.fill.wait", stop)
    with pytest.raises(KeyboardInterrupt):
        fill_run(tmp_path / "run", [grid], RayPool())
    assert len(seen) == 2
    assert not machines.actors
    assert not machines.joined


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda ray: ray.versions.update(torch="1.0+cpu"), "far has torch 1.0 and .*the same"),
        (
            lambda ray: setattr(ray, "error", "no numpy."),
            "a worker cannot start .*: no numpy; every",
        ),
        (
            lambda ray: setattr(ray, "n_ready", 0),
            "no room for a worker for 10 minutes; `ray status`",
        ),
        (
            lambda ray: ray.resources.clear(),
            "Ray has ended on this machine.*the same command resumes",
        ),
        (
            lambda ray: ray.head.close(),
            "the head of the Ray cluster at 127.0.0.1:.* has not answered",
        ),
    ],
)
def test_a_sweep_that_can_have_no_worker_ends(pretend, monkeypatch, harm, message):
    machines, clock = pretend({"CPU": 1.0}), iter(range(0, 10**6, 200))
    monkeypatch.setattr(clusters, "monotonic", lambda: next(clock))
    with RayPool() as engine:
        harm(machines)
        with pytest.raises(RunError, match=message):
            engine.slots()


def test_a_machine_that_emulates_bfloat16_is_named_once(pretend, grid, capsys):
    machines = pretend({"CPU": 2.0})
    machines.slow = "bfloat16 is slow there"
    machines.versions["torch"] = machines.versions["torch"].partition("+")[0] + "+another"
    half = Cell.model_validate(grid.cells[0].model_dump() | {"dtype": "bfloat16"})
    with RayPool() as engine:
        engine.slots()
        for cell in (half, half):
            engine.submit(cell, 0, None, hidden_bar())
    assert capsys.readouterr().err == "note: on far bfloat16 is slow there\n"


def test_a_launch_leaves_no_session_of_ray(pretend, monkeypatch, tmp_path):
    machines = pretend({"CPU": 1.0})
    (tmp_path / "two.toml").write_text(GRID)
    names, run = [str(tmp_path / "two.toml")], tmp_path / "run"
    with pytest.raises(GridError, match="unknown column"):
        sweep(names, run, only={"tsk": "topic"}, engine="ray")
    monkeypatch.setattr("lapa2_interp.runs.sweep.fill_run", lambda *_: seen.append(machines.joined))
    seen = []
    sweep(names, run, engine="ray", notify=lambda line: None)
    assert seen == [1]
    assert not machines.joined
