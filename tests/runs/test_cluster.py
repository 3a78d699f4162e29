"""The Ray engine, on a real cluster of several nodes on this machine; models larger than one GPU."""

import socket
import sys
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from conftest import HAS_HOOKED, load, plan
from lapa2_interp.runs.jobs import Failed, Job, Opened
from lapa2_interp.runs.local import InProcess
from lapa2_interp.runs.locks import locked

from lapa2_interp import Augmentation
from lapa2_interp._util.errors import GridError, ModelError, RunError
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.loop import decode_batches
from lapa2_interp.methods.registry import get_for_task, load_task
from lapa2_interp.models import load as models
from lapa2_interp.models.machine import store_measurement
from lapa2_interp.runs import ray as clusters
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.runs.launch import launch
from lapa2_interp.runs.manifest import library_versions
from lapa2_interp.runs.ray import Cluster
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
length = 64
max_rows = 8
[[block]]
method = ["prefix", "preadd"]
augmentation = "paper"
"""
"""Two cells, of two and four groups."""


@pytest.fixture(scope="module")
def machines():
    """A cluster: a head that only coordinates, and two nodes of one core."""
    from ray.cluster_utils import Cluster as Machines

    quickly = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 3,
    }
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": quickly}
    machines = Machines(initialize_head=True, head_node_args=head)
    for _ in range(2):
        machines.add_node(num_cpus=1)
    yield machines
    machines.shutdown()


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    file = tmp_path_factory.mktemp("grid") / "two.toml"
    file.write_text(GRID)
    return load_grid(str(file))


@pytest.fixture(scope="module")
def here(grid, tmp_path_factory):
    """The run of one process."""
    folder = tmp_path_factory.mktemp("here") / "run"
    assert sweep(folder, [grid], InProcess("cpu")).made == 2
    return folder


def assert_equal(run, other):
    for cell in sorted((other / "cells").iterdir()):
        for name in ("samples.parquet", "trace.nc"):
            assert (run / "cells" / cell.name / name).read_bytes() == (cell / name).read_bytes(), (
                cell.name,
                name,
            )


class Held(Cell):
    """Holds the first worker that reads it for half a minute."""

    mark: ClassVar[str]

    def __reduce_ex__(self, protocol):
        wait = (
            f"__import__('os').path.exists({self.mark!r}) or (open({self.mark!r}, 'w').close(),"
            " __import__('time').sleep(30))"
        )
        read = f"__import__('pydantic').TypeAdapter(Cell).validate_json({self.model_dump_json()!r})"
        return eval, (f"[{wait}, {read}][1]", {"Cell": Cell})


class LosesAMachine(Cluster):
    """One of its machines is cut off while it does the sixth job."""

    def __init__(self, machines):
        super().__init__(address=machines.address)
        self.machines, self.given, self.lost = machines, 0, []

    def submit(self, job):
        self.given += 1
        if self.given == 6:
            job = replace(job, cell=Held.model_validate(job.cell.model_dump()))
        super().submit(job)
        if self.given == 6:
            busy = next(
                worker
                for worker in self._workers
                if worker.job and isinstance(worker.job[0].cell, Held)
            )
            node = next(node for node in self.machines.worker_nodes if node.node_id == busy.node)
            self.machines.remove_node(node, allow_graceful=False)

    def _lost(self, worker, given, error):
        self.lost.append(given)
        return super()._lost(worker, given, error)


@pytest.mark.alone
def test_a_cluster_that_loses_a_machine_makes_the_bytes_that_one_process_makes(
    machines, grid, here, tmp_path
):
    Held.mark = str(tmp_path / "held")
    engine = LosesAMachine(machines)
    assert engine.slots == 2
    try:
        swept = sweep(tmp_path / "run", [grid], engine)
    finally:
        machines.add_node(num_cpus=1)
    assert (swept.made, swept.failed) == (2, ())
    assert [attempt for _, attempt in filter(None, engine.lost)] == [1], "a job was under way there"
    assert_equal(tmp_path / "run", here)


@pytest.mark.slow
@pytest.mark.alone
def test_a_machine_that_emulates_bfloat16_is_named_and_makes_it(
    machines, grid, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("LAPA2_CACHE", str(tmp_path / "cache"))  # the workers' too
    store_measurement("cpu", "bfloat16 / float32", (3.0,))
    half = [
        Cell.model_validate(cell.model_dump() | {"dtype": "bfloat16"}) for cell in grid.cells[:1]
    ]
    done = sweep(
        tmp_path / "run",
        [replace(grid, cells=(*half, *grid.cells[1:]))],
        Cluster(address=machines.address),
    )
    assert (done.made, done.failed) == (2, ())
    said = capsys.readouterr().err
    assert (
        said.count(
            f"note: on {socket.gethostname()} bfloat16 is slow on this processor: a product takes"
            " 3.0 times"
        )
        == 1
    )


class Deadly(Cell):
    """Kills the worker that reads it."""

    def __reduce_ex__(self, protocol):
        import os

        return os._exit, (1,)


@pytest.mark.slow
@pytest.mark.alone
def test_a_job_that_kills_its_workers_fails_alone_and_machines_that_join_get_workers(
    machines, grid, monkeypatch
):
    monkeypatch.setattr(clusters, "ATTEMPTS", 2)
    cell = grid.cells[0]
    with Cluster(address=machines.address) as engine:
        before = engine.slots
        engine.submit(Job(Deadly.model_validate(cell.model_dump())))
        engine.submit(Job(cell))
        outcomes = []
        while len(outcomes) < 2:
            outcomes += engine.wait()
        found = {type(job.cell): outcome for job, outcome in outcomes}
        assert isinstance(found[Cell], Opened)
        assert isinstance(found[Deadly], Failed)
        assert "died 2 times" in found[Deadly].traceback
        machines.add_node(num_cpus=1)
        engine.submit(Job(cell))
        list(engine.wait())
        engine._grow()
        assert engine.slots == before + 1


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
                Cluster(address=address)
            assert monotonic() - began < 8
    for address in ("nonsense", "ray://127.0.0.1:10001", "127.0.0.1:http"):
        with pytest.raises(RunError, match="allowed: HOST:PORT of the cluster's head, auto"):
            Cluster(address=address)


def test_without_ray_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RunError, match=r"pip install 'lapa2-interp\[ray\]', or use engine='local'"):
        Cluster()


class Machines:
    """Stands for Ray, connected to machines that have these resources, and other libraries."""

    def __init__(self, *resources):
        self.resources = resources

    def nodes(self):
        gone = {"NodeID": "gone", "Alive": False, "Resources": {"CPU": 9.0}}
        return [
            {"NodeID": i, "Alive": True, "Resources": each} for i, each in enumerate(self.resources)
        ] + [gone]

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: 0, gcs_address="127.0.0.1:1")

    def remote(self, kind):
        actor = SimpleNamespace(
            place=SimpleNamespace(remote=object), do=SimpleNamespace(remote=lambda job: object())
        )
        return SimpleNamespace(
            options=lambda **needs: SimpleNamespace(remote=lambda *settings: actor)
        )

    def wait(self, refs, timeout):
        return refs[:1], refs[1:]

    def get(self, ref):
        return "node", "far", library_versions() | {"torch": "1.13.0+cu117"}, None

    def kill(self, actor):
        pass

    def shutdown(self):
        pass


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({}, 5),
        ({"gpus_per_worker": 2.0}, 2),
        ({"gpus_per_worker": 0.25}, 20),
        ({"device": "cpu", "threads": 2}, 7),
        ({"workers": 9}, 9),
    ],
)
def test_workers_are_counted_machine_by_machine(monkeypatch, settings, slots):
    monkeypatch.setattr(
        clusters,
        "_join",
        lambda address: Machines({"GPU": 3.0, "CPU": 7.0}, {"GPU": 2.0, "CPU": 8.0}, {"CPU": 1.0}),
    )
    assert Cluster(**settings).slots == slots


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threads": 5}, "needs 5 CPU where the largest has 4"),
        ({"threads": 5, "workers": 1}, "needs 5 CPU where the largest has 4"),
        ({"device": "auto"}, "has no GPU for device 'auto'; give device='cpu'"),
        ({"device": "cuda:1"}, "allowed: cpu, cuda, auto"),
        ({"gpus_per_worker": 1.5}, "found 1.5"),
        ({"workers": 0}, "found 0"),
    ],
)
def test_what_no_machine_can_do_is_refused(monkeypatch, settings, message):
    monkeypatch.setattr(clusters, "_join", lambda address: Machines({"CPU": 4.0}))
    with pytest.raises(RunError, match=message):
        Cluster(**settings)


def test_a_machine_with_other_libraries_is_refused(monkeypatch):
    monkeypatch.setattr(Cluster, "_answers", lambda self: True)
    monkeypatch.setattr(clusters, "_join", lambda address: Machines({"CPU": 1.0}))
    refused = pytest.raises(
        RunError, match=r"far has torch 1\.13\.0 and this machine \d.*install the same versions"
    )
    with refused, Cluster() as engine:
        next(engine.wait())


def test_a_worker_that_dies_after_long_work_is_replaced(monkeypatch, grid):
    """Its replacement has as long to start as the first had."""
    from ray.exceptions import RayActorError

    machines, now, answer = Machines({"CPU": 1.0}), [0.0], [None]
    started = "node", "far", library_versions(), None
    later = iter([(1, started), (700, RayActorError()), (9, None), (9, started), (700, Failed(""))])

    def wait(refs, timeout):
        seconds, answer[0] = next(later)
        now[0] += seconds
        return refs if answer[0] else [], []

    def get(ref):
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    monkeypatch.setattr(machines, "wait", wait)
    monkeypatch.setattr(machines, "get", get)
    monkeypatch.setattr(Cluster, "_answers", lambda self: True)
    monkeypatch.setattr(clusters, "_join", lambda address: machines)
    monkeypatch.setattr(clusters, "monotonic", lambda: now[0])
    job = Job(grid.cells[0])
    with Cluster() as engine:
        engine.submit(job)
        assert list(engine.wait()) == [(job, Failed(""))]


def test_a_launch_leaves_no_session_of_ray(monkeypatch, tmp_path):
    """Neither where nothing is to be made, nor where the run is in use."""
    joined = []
    machines = Machines({"CPU": 1.0})
    monkeypatch.setattr(machines, "shutdown", joined.clear)
    monkeypatch.setattr(clusters, "_join", lambda address: joined.append(1) or machines)
    (tmp_path / "two.toml").write_text(GRID)
    names, run = [str(tmp_path / "two.toml")], tmp_path / "run"
    with pytest.raises(GridError, match="unknown column"):
        launch(names, run, only={"tsk": "topic"}, engine="ray")
    assert not joined
    run.mkdir()
    with locked(run), pytest.raises(RunError, match="is being filled"):
        launch(names, run, engine="ray", notify=lambda line: None)
    assert not joined
    monkeypatch.setattr("lapa2_interp.runs.launch.finished_of", lambda out, cells: cells)
    monkeypatch.setattr("lapa2_interp.runs.launch.sweep", lambda *_: joined.append(2))
    launch(names, run, engine="ray")
    assert not joined


def test_a_sweep_ends_when_ray_does_on_its_machine(monkeypatch, grid):
    machines = Machines({"CPU": 1.0})
    monkeypatch.setattr(Cluster, "_answers", lambda self: True)
    monkeypatch.setattr(clusters, "_join", lambda address: machines)
    with (
        pytest.raises(RunError, match="Ray has ended on this machine.*the same command goes on"),
        Cluster() as engine,
    ):
        engine.submit(Job(grid.cells[0]))
        machines.resources = ()
        next(engine.wait())


def test_a_sweep_ends_when_the_head_is_gone(monkeypatch, grid):
    machines = Machines({"CPU": 1.0})
    monkeypatch.setattr(clusters, "_join", lambda address: machines)
    monkeypatch.setattr(clusters, "ANSWER", 0.0)
    lost = "the head of the Ray cluster at 127.0.0.1:.*the same command goes on"
    with pytest.raises(RunError, match=lost), Cluster() as engine:
        engine.submit(Job(grid.cells[0]))  # nothing listens at port 1
        next(engine.wait())


# --- models larger than one GPU


def spread(network, place, folder):
    """A model as transformers leaves it when its layers are on several devices, the third on
    `place`."""
    from accelerate import dispatch_model

    device_map = {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.norm": "cpu",
        "lm_head": "cpu",
    }
    device_map |= {f"model.layers.{i}": place if i == 2 else "cpu" for i in range(4)}
    return dispatch_model(
        network, device_map, main_device="cpu", offload_dir=folder, force_hooks=True
    )


PLACES = (
    ["cpu"] if HAS_HOOKED else ["cpu", "disk"]
)  # transformer-lens 3.9 refuses weights on the disk


@pytest.mark.parametrize("place", PLACES)
def test_a_model_in_several_places_makes_the_same_texts_and_traces(place, tmp_path):
    network, tokenizer, _ = models.load_transformers("tiny-llama")
    network = spread(network, place, str(tmp_path))
    assert hasattr(network.model.layers[2], "_hf_hook")
    assert next(network.model.layers[2].parameters()).device.type == (
        "meta" if place == "disk" else "cpu"
    )
    task = load_task("sentiment")
    made = []
    for model in (
        models._make_bridge(network, tokenizer, "tiny-llama", torch.float32, "cpu").eval(),
        load("tiny-llama"),
    ):
        model.cfg.default_prepend_bos = True
        method, rule = get_for_task("preadd", task), Augmentation(alpha=1.0)
        todo = plan(model, method, task, "positive", ("The lake", "Once"), rule, 16, 2)
        made.append(decode_batches(model, todo))
    assert made[0].samples.equals(made[1].samples)
    assert made[0].trace.equals(made[1].trace)


def test_device_auto_leaves_the_placing_to_transformers(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    network, tokenizer, _ = models.load_transformers("tiny-gpt2")
    network.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    asked = []
    inner = AutoModelForCausalLM.from_pretrained

    def from_pretrained(*args, **kwargs):
        asked.append(kwargs["device_map"])
        return inner(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    ids = torch.arange(8)[None]
    logits = models.load_model(str(tmp_path), device="auto")(ids)
    assert asked == ["auto"]
    assert torch.equal(logits, load("tiny-gpt2")(ids))
    assert models.load_model("tiny-gpt2", device="auto").cfg.device == load("tiny-gpt2").cfg.device


def test_a_model_that_the_gpus_do_not_hold_is_refused(tmp_path, monkeypatch):
    network, tokenizer, weights = models.load_transformers("tiny-llama")
    network = spread(network, "cpu", str(tmp_path))
    monkeypatch.setattr(models, "load_transformers", lambda *_: (network, tokenizer, weights))
    network.hf_device_map |= {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(ModelError, match="larger than the GPUs here together.*gpus_per_worker"):
        models.load_model("tiny-llama", device="auto")
    network.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(ModelError, match="use TransformerBridge for a model larger than one GPU"):
        models.load_model("tiny-llama", device="auto", model_class="HookedTransformer")
