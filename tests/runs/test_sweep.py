"""A run that is stopped anywhere becomes what an undisturbed one is; what goes wrong is said, and
harms nothing else."""

import errno
import functools
import glob
import io
import json
import multiprocessing
import os
import pickle
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from conftest import MODEL_CLASSES, generate, load, start, warm
from lapa2_interp.runs.jobs import ATTEMPTS, Failed, Job, Opened, Part, ignore_progress
from lapa2_interp.runs.local import InProcess, Processes
from tqdm import tqdm

from lapa2_interp._util.errors import DamagedError, GridError, RunError
from lapa2_interp._util.files import (
    LOCK,
    TEMPORARY_PREFIX,
    atomic_folder,
    temporary_folder,
    with_checksums,
    without_checksums,
    write_text,
)
from lapa2_interp.cli.app import main
from lapa2_interp.models.machine import processor_kind
from lapa2_interp.runs import launch as launching
from lapa2_interp.runs import local
from lapa2_interp.runs import store as reading
from lapa2_interp.runs import sweep as sweeping
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.runs.manifest import MANIFEST, Manifest, read_manifest
from lapa2_interp.runs.run import load_run
from lapa2_interp.runs.store import SAMPLES, TRACE, read_cell, read_file
from lapa2_interp.runs.sweep import add_grids, load_grids, sweep
from lapa2_interp.runs.worker import Worker, check_files
from lapa2_interp.scoring.task_scorer import SHIPPED_WEIGHTS
from lapa2_interp.tasks import task as tasks

COMMON = """
model = "tiny-gpt2"
dtype = "float32"
trace = "pooled"
task = "sentiment"
attribute = "positive"
prompts = 3
samples = 2
length = 22
max_rows = 4
"""
HEAD = f'{COMMON}augmentation = "none"\n'
ONE = f"""{COMMON}
method = "prefix"
augmentation = ["none", "paper"]
"""
TWO = f"""{HEAD}
[[block]]
method = "prefix"
augmentation = ["none", {{ layers = "top" }}]
[[block]]
method = "air-decoding"
augmentation = "paper"
samples = 1
"""
"""Four cells of two or three groups each; both grids have the baseline of prefix."""


def seen(folder, pattern):
    """What is there while another process adds and removes; `Path.glob` ends in an error then."""
    return glob.glob(pattern, root_dir=folder)  # noqa: PTH207


class Recording(InProcess):
    """Keeps what its worker makes."""

    def __init__(self):
        super().__init__("cpu")
        self.made = {}

    def wait(self, told=ignore_progress):
        for job, outcome in super().wait(told):
            self.made[job.cell.key, job.group] = outcome
            yield job, outcome


class Replaying:
    """Gives what was made before, which takes no time."""

    def __init__(self, made, slots=1):
        self.made, self.slots, self.jobs, self.done = made, slots, [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, job):
        self.jobs.append(job)

    def wait(self, told=ignore_progress):
        job = self.jobs.pop(0)
        self.done.append((job.cell.key, job.group))
        yield job, self.made[job.cell.key, job.group]


def write_grids(folder, trace):
    for name, text in (("one", ONE), ("two", TWO)):
        (folder / f"{name}.toml").write_text(text.replace('"pooled"', f'"{trace}"'))
    return [folder / "one.toml", folder / "two.toml"]


def grids_of(files):
    return [load_grid(str(file)) for file in files]


def made_in_one_go(files, folder):
    engine = Recording()
    done = sweep(folder, grids_of(files), engine, pytest.fail)
    assert (done.before, done.made, done.failed) == (0, 4, ())
    assert len(engine.made) == 4 + 2 + 2 + 2 + 3
    return folder, engine.made


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_grids(tmp_path_factory.mktemp("grids"), "none")


@pytest.fixture(scope="module")
def traced_files(tmp_path_factory):
    return write_grids(tmp_path_factory.mktemp("grids"), "pooled")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, files):
    """A run folder, made in one go, and the outcomes it was made of."""
    return made_in_one_go(files, tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.fixture(scope="module")
def traced(tmp_path_factory, traced_files):
    """The same with traces, which take longer to write than these texts to generate."""
    return made_in_one_go(traced_files, tmp_path_factory.mktemp("traced") / "run")


def in_a_file(made, folder):
    """Outcomes for another process."""
    (folder / "outcomes.pickle").write_bytes(pickle.dumps(made))
    return folder / "outcomes.pickle"


def contents(run):
    """What a run consists of: the bytes of its texts and traces, and the names of everything else."""
    found = {}
    for file in sorted(each for each in run.rglob("*") if each.is_file() and each.name != ".lock"):
        same = file.name in (SAMPLES, TRACE) or file.parent.name == "plan"
        found[str(file.relative_to(run))] = file.read_bytes() if same else None
    return found


def assert_equal_runs(run, other):
    ours, theirs = contents(run), contents(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert (
        sorted(load_run(run).finished)
        == sorted(load_run(other).finished)
        == sorted(load_run(run).by_key)
    )


def stamps(run):
    return {
        str(file): file.stat().st_mtime_ns
        for folder in run.glob("cells/[0-9a-f]*")
        for file in [folder, *folder.iterdir()]
    }


def lapa2(line, *more):
    return main([*shlex.split(line), *map(str, more)])


# --- stopping


CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "tempfile.mkdtemp")


def replay_until(folder, files, outcomes, at):
    """Sweep, and be killed just before the file system is changed or a file of the run is opened
    for the `at`-th time."""
    number = count(1)

    def killer(event, arguments):
        if (
            event in CHANGES or (event == "open" and str(arguments[0]).startswith(str(folder)))
        ) and next(number) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    made, grids = pickle.loads(outcomes.read_bytes()), grids_of(files)
    sys.addaudithook(killer)
    sweep(folder, grids, Replaying(made))


def assert_sound(run, other):
    """A run that was killed: what it calls finished is whole and right."""
    if (run / "run.json").exists():
        for key in load_run(run).finished:
            read_manifest(run / "cells" / key)
            for file in (other / "cells" / key).iterdir():
                assert (
                    file.name == MANIFEST
                    or (run / "cells" / key / file.name).read_bytes() == file.read_bytes()
                )
    return stamps(run)


@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        pytest.param("undisturbed", 1, marks=pytest.mark.long),
        pytest.param("undisturbed", 3, marks=pytest.mark.slow),
        pytest.param("traced", 1, marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_change_of_the_disk_it_goes_on_to_the_same(request, tmp_path, kind, rounds):
    whole, made = request.getfixturevalue(kind)
    files = request.getfixturevalue("files" if kind == "undisturbed" else "traced_files")
    outcomes = in_a_file(made, tmp_path)
    rng, killed = random.Random(5), 0
    for number in range(rounds):
        run = tmp_path / str(number)
        for at in (
            rng.randrange(1, 260),
            rng.randrange(1, 60),
        ):  # the second time soon after it went on
            process = start(replay_until, run, files, outcomes, at)
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
            killed += process.exitcode != 0
            before = assert_sound(run, whole)
        engine = Replaying(made)
        done = sweep(run, grids_of(files), engine, pytest.fail)
        assert (done.before + done.made, done.failed) == (4, ())
        assert not {key for key, _ in engine.done} & {Path(name).name for name in before}
        assert_equal_runs(run, whole)
        assert before.items() <= stamps(run).items()
        shutil.rmtree(run)
    assert killed > rounds


def really_sweep(folder, files):
    sweep(folder, grids_of(files), InProcess("cpu"))


@pytest.mark.slow
@pytest.mark.alone
def test_killed_at_random_times_while_it_generates_it_goes_on_to_the_same(
    traced, traced_files, tmp_path
):
    rng, run, parts = random.Random(2), tmp_path / "run", 0
    for number in range(3):
        process = start(really_sweep, run, traced_files)
        wanted = len(seen(run, "*/*")) + rng.randrange(1, 8)
        while process.is_alive():
            inside = len(seen(run, "parts/*/[0-9]"))
            # The first time as soon as a part of a cell is there.
            if inside if number == 0 else len(seen(run, "*/*")) + inside >= wanted:
                break
            time.sleep(0.002)
        process.join(rng.random() * 0.4 if number else 0)
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        before = assert_sound(run, traced[0])
        parts = max(parts, len(seen(run, "parts/*/[0-9]")))
    process = start(really_sweep, run, traced_files)
    process.join()
    assert process.exitcode == 0
    assert parts, "it was never killed inside a cell"
    assert_equal_runs(run, traced[0])
    assert before.items() <= stamps(run).items()
    assert not list(run.rglob(".writing-*"))


def command(run, files, *more):
    # What runs in the background of a script ignores SIGINT, and so would its children.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from lapa2_interp.cli.app import main; raise SystemExit(main())"
    )
    return [
        sys.executable,
        "-c",
        program,
        "sweep",
        *map(str, files),
        "--out",
        str(run),
        "--device",
        "cpu",
        *more,
    ]


@pytest.fixture
def alone(tmp_path):
    """Start the command in a session of its own, as a terminal would; what it prints goes to the
    file `printed`."""
    started = []

    def begin(*arguments):
        with (tmp_path / "printed").open("w") as stream:
            started.append(
                subprocess.Popen(
                    command(*arguments), stdout=stream, stderr=stream, start_new_session=True
                )
            )
        return started[-1]

    yield begin
    for process in started:
        if not is_over(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(condition, seconds=120.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def is_over(session):
    """Whether no process of it runs."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group = file.read_text().rpartition(")")[2].split()[:3]
            if int(group) == session and state != "Z":
                return False
    return True


@pytest.fixture
def quick_processes(monkeypatch):
    """Workers that have everything imported."""
    real, context = multiprocessing.get_context, warm()
    monkeypatch.setattr(
        multiprocessing, "get_context", lambda name=None: context if name == "spawn" else real(name)
    )


@pytest.mark.slow
@pytest.mark.alone
def test_workers_end_with_a_coordinator_that_was_killed_and_another_number_of_them_makes_the_same(
    traced, traced_files, tmp_path, quick_processes, alone
):
    run = tmp_path / "run"
    process = alone(run, traced_files[::-1], "--workers", "2")
    wait_for(lambda: seen(run, "parts/*/[0-9]") or process.poll() is not None)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert_sound(run, traced[0])
    wait_for(lambda: is_over(process.pid), 20)
    done = sweep(run, grids_of(traced_files), Processes(2, "cpu"), pytest.fail)
    assert (done.before + done.made, done.failed) == (4, ())
    assert_equal_runs(run, traced[0])


@pytest.mark.alone
def test_ctrl_c_in_a_terminal_is_a_sentence_even_while_workers_start(files, tmp_path, alone):
    """A terminal interrupts the workers, too."""
    process = alone(tmp_path / "run", files, "--workers", "2")
    wait_for(lambda: (tmp_path / "run" / "run.json").exists() or process.poll() is not None)
    time.sleep(0.7)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    printed = (tmp_path / "printed").read_text()
    assert "0 of 4 cells finished" in printed
    assert printed.splitlines()[-1] == "lapa2: interrupted; the same command goes on"
    assert "Traceback" not in printed
    wait_for(lambda: is_over(process.pid), 20)


def run_command(run, files, log):
    """`lapa2 sweep`, here."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored by what runs in the background of a script
    finish = sweeping._Sweep._finish

    def finish_and_wait(self, cell):
        finish(self, cell)
        time.sleep(60)  # or until the signal: the cells are done in a moment

    sweeping._Sweep._finish = finish_and_wait
    with log.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    raise SystemExit(main(command(run, files, "--workers", "1")[3:]))


@pytest.mark.alone
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_that_stop_it_are_told_what_is_finished(undisturbed, files, tmp_path, number, code):
    run, log = tmp_path / "run", tmp_path / "log"
    process = start(run_command, run, files, log)
    wait_for(lambda: list(run.glob("cells/[0-9a-f]*")) or not process.is_alive())
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == code, log.read_text()
    finished = load_run(run).finished
    assert 1 <= len(finished) < 4
    assert log.read_text().splitlines()[-2:] == [
        f"{len(finished)} of 4 cells finished",
        "lapa2: interrupted; the same command goes on",
    ]
    assert "Traceback" not in log.read_text()
    assert not list(run.rglob(".writing-*")), "it had the time to clean up"
    done = sweep(run, grids_of(files), Replaying(undisturbed[1]), pytest.fail)
    assert done.before == len(finished)
    assert_equal_runs(run, undisturbed[0])


def test_only_some_cells_of_a_grid_are_made_and_the_others_later(
    files, undisturbed, tmp_path, monkeypatch
):
    """The run notes all cells; another call makes what is left, and the bytes are those of one
    call."""
    monkeypatch.setattr(launching, "_engine", lambda *_: Replaying(undisturbed[1]))
    run, names = tmp_path / "run", [str(file) for file in files]
    done = launching.launch(names, run, only={"method": "prefix"}, notify=print)
    cells = load_run(run).cells
    assert set(cells["method"][cells["state"] == "finished"]) == {"prefix"}
    assert (done.made, len(cells)) == ((cells["method"] == "prefix").sum(), 4)
    for only, message in (
        ({"methd": "prefix"}, "unknown column 'methd'.*did you mean 'method'"),
        ({"method": "prefx"}, "unknown method 'prefx'"),
    ):
        with pytest.raises(GridError, match=message):
            launching.launch(names, run, only=only)
    numbers = {"samples": [str(float(cells["samples"][0]))]}  # as text no cell has it
    assert launching.launch(names, run, only={"method": ["prefix"]} | numbers).made == 0
    assert launching.launch(names, run).before == done.made
    assert_equal_runs(run, undisturbed[0])


@pytest.mark.parametrize(
    ("option", "value", "shown"),
    [("address", "auto", "address auto"), ("gpus_per_worker", 2.0, "gpus_per_worker=2.0")],
)
def test_options_of_ray_are_refused_without_it(files, tmp_path, option, value, shown):
    named = f"{shown} belongs to engine='ray'"
    with pytest.raises(RunError, match=named):
        launching.launch([str(files[0])], tmp_path / "run", **{option: value})


# --- workers


def in_any_order(outcomes):
    """An engine of three workers whose jobs end in another order than they began."""
    engine = Replaying(outcomes, slots=3)

    def wait(told):
        job = engine.jobs.pop(len(engine.jobs) // 2)
        yield job, outcomes[job.cell.key, job.group]

    engine.wait = wait
    return engine


def test_the_order_of_grids_and_of_outcomes_changes_nothing(undisturbed, files, tmp_path):
    whole, made = undisturbed
    sweep(tmp_path / "a", grids_of(files)[::-1], Replaying(made), pytest.fail)
    sweep(tmp_path / "b", grids_of(files), in_any_order(made), pytest.fail)
    for run in ("a", "b"):
        assert_equal_runs(tmp_path / run, whole)


def test_a_cell_that_two_grids_have_is_made_once(undisturbed, files):
    whole, made = undisturbed
    one, two = grids_of(files)
    shared = {cell.key for cell in one.cells} & {cell.key for cell in two.cells}
    assert [load_run(whole).by_key[key].arm for key in shared] == ["baseline"]
    assert len(load_run(whole).by_key) == 4
    assert [key for key, group in made if group is None] == list(
        dict.fromkeys(key for key, _ in made)
    )


def deadly(folder, victim, always, job):
    """`local._do`, but a job (by key and group) kills its process, the first time or always."""
    with (folder / f"{job.cell.key} {job.group}").open("a") as file:
        file.write(".")
    if (job.cell.key, job.group) == victim and (
        always or (folder / f"{job.cell.key} {job.group}").stat().st_size == 1
    ):
        os.kill(os.getpid(), signal.SIGKILL)
    return local._worker.do(job)


@pytest.mark.alone
@pytest.mark.parametrize("always", [False, True])
def test_a_job_whose_worker_dies_is_done_again_and_gives_up_in_the_end(
    undisturbed, files, tmp_path, monkeypatch, quick_processes, always
):
    whole, made = undisturbed
    victim = list(made)[1]
    assert victim[1] == 0
    (tmp_path / "log").mkdir()
    monkeypatch.setattr(local, "_do", functools.partial(deadly, tmp_path / "log", victim, always))
    told = []
    done = sweep(tmp_path / "run", grids_of(files), Processes(2, "cpu"), told.append)
    tries = {tuple(file.name.split()): file.stat().st_size for file in (tmp_path / "log").iterdir()}
    assert tries[victim[0], "0"] == (ATTEMPTS if always else 2)
    assert {n for (key, _), n in tries.items() if key != victim[0]} == {1}, (
        "nobody else's job was lost"
    )
    if always:
        assert (done.made, done.failed) == (3, (victim[0],))
        assert "the worker died 3 times" in load_run(tmp_path / "run").failures[victim[0]].reason
        (line,) = told
        assert line.startswith(
            f"failed: {load_run(whole).by_key[victim[0]].description} ({victim[0]}): "
        )
        monkeypatch.undo()
        sweep(tmp_path / "run", grids_of(files), Replaying(made), pytest.fail)
    assert_equal_runs(tmp_path / "run", whole)


def test_a_worker_tells_how_far_it_is_after_every_step(undisturbed):
    cell = next(iter(load_run(undisturbed[0]).by_key.values()))
    told = []
    with InProcess("cpu") as engine:
        for group in (None, 0):
            engine.submit(Job(cell, group))
            ((_, outcome),) = engine.wait(lambda job, share: told.append((job.group, share)))
    assert isinstance(outcome, Part)
    groups, shares = zip(*told, strict=True)
    assert set(groups) == {0}
    assert len(shares) == outcome.samples["n_tokens"].max()
    assert list(shares) == sorted(set(shares))
    assert shares[-1] == 1


def at_half(job):
    """In place of `local._do`: a job that is half done for a while."""
    time.sleep(0.5)
    local._share.value = 0.5
    time.sleep(0.5)
    return Failed("")


def slow_to_begin(*_):
    """In place of `local._begin`: a worker that is still importing when the sweep is over."""
    time.sleep(30)


def test_a_worker_that_has_not_begun_is_not_waited_for(undisturbed, monkeypatch, quick_processes):
    monkeypatch.setattr(local, "_begin", slow_to_begin)
    with Processes(1, "cpu") as engine:
        engine.submit(Job(next(iter(load_run(undisturbed[0]).by_key.values()))))
        (process,) = engine._pools[0]._processes.values()
        wait_for(lambda: process.is_alive())
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert not process.is_alive()


@pytest.mark.alone
def test_the_coordinator_sees_how_far_processes_are(undisturbed, monkeypatch, quick_processes):
    job = Job(next(iter(load_run(undisturbed[0]).by_key.values())), 0)
    monkeypatch.setattr(local, "_do", at_half)
    monkeypatch.setattr(local, "LOOK", 0.01)
    told = []
    with Processes(1, "cpu") as engine:
        for _ in range(2):
            engine.submit(job)
            told.append([])
            assert list(engine.wait(lambda of, share: told[-1].append((of, share)))) == [
                (job, Failed(""))
            ]
    for each in told:
        jobs, shares = zip(*each, strict=True)
        assert all(each is job for each in jobs)
        assert list(shares) == sorted(shares)
        assert set(shares) == {0.0, 0.5}, "the share of the job before is not taken for its own"


@pytest.mark.parametrize("fails", [False, True])
def test_a_bar_moves_inside_a_group_and_ends_at_its_total(
    undisturbed, files, tmp_path, monkeypatch, fails
):
    class Bar(tqdm):
        def update(self, n=1):
            at.append(at[-1] + n)
            assert 0 <= at[-1] <= self.total
            return super().update(n)

    class Telling(Replaying):
        def wait(self, told):
            job = self.jobs[0]
            for share in (0.5, 0.75, 0.25):  # its worker has died, and another has begun
                told(job, share)
            if job.group == 0 and fails:
                yield self.jobs.pop(0), Failed("why\n")
            else:
                yield from super().wait(told)

    at, bars = [0], []

    def bar_of(total, label):
        bars.append(Bar(total=total, file=io.StringIO()))
        return bars[0]

    monkeypatch.setattr(sweeping, "progress_bar", bar_of)
    sweep(tmp_path / "run", grids_of(files), Telling(undisturbed[1]), lambda _: None)
    assert at[-1] == bars[0].total
    assert (at[-1] == 0) == fails
    moves = [after - before for before, after in pairwise(at)]
    assert any(move > 0 for move in moves)
    assert any(move < 0 for move in moves)


@pytest.mark.alone
def test_a_worker_that_dies_with_nothing_to_do_is_replaced(undisturbed, quick_processes):
    cell = next(iter(load_run(undisturbed[0]).by_key.values()))
    with Processes(1, "cpu") as engine:
        for _ in range(2):
            engine.submit(Job(cell))
            ((job, outcome),) = engine.wait()
            assert isinstance(outcome, Opened)
            assert outcome.groups == undisturbed[1][job.cell.key, None].groups
            (process,) = engine._pools[0]._processes.values()
            process.kill()
            process.join()
            time.sleep(0.3)


def leave(_):
    raise SystemExit("leaving")


def test_whatever_a_worker_raises_is_a_failure_of_its_job_alone(
    undisturbed, quick_processes, monkeypatch
):
    monkeypatch.setattr(local, "_do", leave)
    cell = next(iter(load_run(undisturbed[0]).by_key.values()))
    with Processes(1, "cpu") as engine:
        engine.submit(Job(cell))
        ((_, outcome),) = engine.wait()
    assert isinstance(outcome, Failed)
    assert "SystemExit: leaving" in outcome.traceback


def test_a_worker_shares_between_plans_what_a_method_has_prepared(undisturbed, monkeypatch):
    from lapa2_interp.methods.base import Prepared
    from lapa2_interp.methods.prefix import PrefixConditioning

    made = []

    def prepare(self, context, task, attribute, prompt):
        context.cached("table", lambda: made.append(prompt))
        return Prepared()

    monkeypatch.setattr(PrefixConditioning, "prepare", prepare)
    worker = Worker("cpu")
    cells = [cell for cell in load_run(undisturbed[0]).by_key.values() if cell.method == "prefix"]
    for _ in range(2):
        for cell in cells:
            assert isinstance(worker.do(Job(cell)), Opened)
    assert len(made) == 1
    assert len({id(worker.plan(cell)) for cell in cells for _ in range(2)}) == len(cells)


def test_memory_that_runs_out_says_what_to_do(undisturbed, monkeypatch):
    def plan(*_):
        raise MemoryError("no more")

    monkeypatch.setattr("lapa2_interp.runs.worker.plan_batches", plan)
    cell = next(iter(load_run(undisturbed[0]).by_key.values()))
    outcome = Worker("cpu").do(Job(cell))
    assert (
        outcome.traceback.splitlines()[-1]
        == "MemoryError: no more; fewer rows share a batch with --set max_rows=N"
    )


def test_a_prefix_that_changed_since_the_grid_was_resolved_is_not_used(tmp_path):
    from conftest import soft_prefix, soft_set

    from lapa2_interp.methods import load_task
    from lapa2_interp.prefixes.soft_prefix import save_prefix

    model = load("tiny-gpt2")
    folder = soft_set(tmp_path / "set", model, load_task("sentiment"))
    (tmp_path / "g.toml").write_text(
        ONE.replace('"prefix"', f'{{ name = "prefix", prefixes = "{folder}" }}')
    )
    cell = load_grid(str(tmp_path / "g.toml")).cells[0]
    assert isinstance(Worker("cpu").do(Job(cell)), Opened)
    save_prefix(soft_prefix(model, seed=9), Path(folder), "float32")
    outcome = Worker("cpu").do(Job(cell))
    assert isinstance(outcome, Failed)
    assert "here, and had" in outcome.traceback.splitlines()[-1]
    assert load_grid(str(tmp_path / "g.toml")).cells[0].key != cell.key
    part = Worker("cpu").do(Job(cell, 0, None))  # one that joins when the cell is open already
    assert isinstance(part, Failed)
    assert "here, and had" in part.traceback.splitlines()[-1]


def test_a_word_list_that_changed_since_the_grid_was_resolved_is_not_used(tmp_path):
    words = tmp_path / "words.json"
    shutil.copy(Path(tasks.__file__).parent / "words" / "sentiment.json", words)
    (tmp_path / "g.toml").write_text(
        ONE.replace('"prefix"', f'{{ name = "freectrl", words = "{words}" }}')
    )
    cell = load_grid(str(tmp_path / "g.toml")).cells[0]
    without_soft_prefixes = SimpleNamespace(prefix_names={})
    check_files(cell, without_soft_prefixes)
    words.write_text(words.read_text() + "\n")
    with pytest.raises(RunError, match="the file behind 'words' has sha256 .* here, and had"):
        check_files(cell, without_soft_prefixes)
    assert load_grid(str(tmp_path / "g.toml")).cells[0].key != cell.key


def test_the_code_of_a_method_of_ones_own_is_part_of_its_cells_key(tmp_path, monkeypatch):
    """Groups made by two versions of it are never mixed."""
    code = tmp_path / "of_mine.py"
    code.write_text(
        "from dataclasses import dataclass\nfrom lapa2_interp.methods.prefix import"
        " PrefixConditioning\n@dataclass(frozen=True)\nclass Own(PrefixConditioning):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "g.toml").write_text(ONE.replace('"prefix"', '"of_mine:Own"'))
    cell = load_grid(str(tmp_path / "g.toml"), allow_code=True).cells[0]
    assert set(cell.files) == {"its code"}
    check_files(cell, SimpleNamespace(prefix_names={}))
    code.write_text(code.read_text() + "# another\n")
    assert load_grid(str(tmp_path / "g.toml")).cells[0].key != cell.key
    with pytest.raises(RunError, match="the file behind 'its code' has sha256 .* here, and had"):
        check_files(cell, SimpleNamespace(prefix_names={}))


def test_the_scorer_of_datg_is_part_of_its_cells_key(tmp_path):
    """A file with the card beside it, or a folder; a name of the package is not looked for."""
    for name in ("sentiment.npz", "sentiment.json"):
        shutil.copy(SHIPPED_WEIGHTS / name, tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def cell(scorer):
        method = f'{{ name = "datg", scorer = "{scorer}" }}'
        (tmp_path / "g.toml").write_text(ONE.replace('"prefix"', method))
        return load_grid(str(tmp_path / "g.toml")).cells[0]

    assert cell("accuracy").files == {}
    for scorer, changed in (
        ("sentiment.npz", "sentiment.npz"),
        ("sentiment.npz", "sentiment.json"),
        ("model", "model/config.json"),
    ):
        before = cell(f"accuracy={tmp_path / scorer}")
        with (tmp_path / changed).open("ab") as file:
            file.write(b" ")
        after = cell(f"accuracy={tmp_path / scorer}")
        assert after.files.keys() == before.files.keys() > set()
        assert after.key != before.key
        with pytest.raises(RunError, match="the file behind .scorer"):
            check_files(before, SimpleNamespace(prefix_names={}))


def test_groups_made_with_other_weights_are_not_mixed(undisturbed, files, tmp_path):
    """A worker that loads the model after its file was replaced."""
    made = {
        (key, group): replace(each, weights="sha256 other") if group == 1 else each
        for (key, group), each in undisturbed[1].items()
    }
    with pytest.raises(RunError, match="was made with tiny-gpt2 .* and it is now sha256 other"):
        sweep(tmp_path / "run", grids_of(files), Replaying(made), pytest.fail)


def test_a_run_folder_that_another_took_the_place_of_is_not_filled(undisturbed, files, tmp_path):
    run = tmp_path / "run"

    class Replacing(Replaying):
        def wait(self, told=ignore_progress):
            if len(self.done) == 2:
                run.rename(tmp_path / "before")
                shutil.copytree(tmp_path / "before", run)
            return super().wait(told)

    with pytest.raises(RunError, match="is gone: it was moved or removed"):
        sweep(run, grids_of(files), Replacing(undisturbed[1]), pytest.fail)


def test_threads_count_on_any_cpu():
    before = torch.get_num_threads()
    try:
        assert Worker("cpu:0", threads=before + 1).on_cpu
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_an_interrupt_that_a_library_made_an_error_of_is_no_failure(undisturbed, monkeypatch):
    def plan(*_):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as stop:
            raise RuntimeError("a library's own") from stop

    monkeypatch.setattr("lapa2_interp.runs.worker.plan_batches", plan)
    with pytest.raises(KeyboardInterrupt):
        Worker("cpu").do(Job(next(iter(load_run(undisturbed[0]).by_key.values()))))


# --- what goes wrong


def test_a_failing_cell_is_recorded_the_rest_goes_on_and_the_next_sweep_tries_it_again(
    undisturbed, files, tmp_path, monkeypatch, capsys
):
    from lapa2_interp.runs import worker as decoding

    real, made = decoding.decode_batches, []

    def failing(model, todo, groups, **settings):
        made.append(groups)
        if (
            any(each is not None and each.layers == "top" for each in todo.augmentations)
            and len(groups[0]) == 2
        ):
            raise ValueError("out of luck")
        return real(model, todo, groups, **settings)

    monkeypatch.setattr(decoding, "decode_batches", failing)
    (tmp_path / "two.toml").write_text(TWO)
    line = f"sweep {tmp_path / 'two.toml'} --out {tmp_path / 'run'} --workers 1 --device cpu"
    assert lapa2(line) == 2
    printed = capsys.readouterr()
    assert "2 cells made" in printed.out
    (bad,) = load_run(tmp_path / "run").select(layers="top").by_key
    assert f"({bad}): ValueError: out of luck" in printed.err
    assert "lapa2: 1 cell failed; `lapa2 runs" in printed.err.splitlines()[-1]
    run = load_run(tmp_path / "run")
    assert run.cells.set_index("key")["state"].value_counts().to_dict() == {
        "finished": 2,
        "failed": 1,
    }
    assert run.failures[bad].traceback.startswith("Traceback (most recent call last)")
    assert 'raise ValueError("out of luck")' in run.failures[bad].traceback
    assert lapa2("runs", tmp_path / "run", "--traceback", "--state", "failed") == 0
    printed = capsys.readouterr().out
    assert "two: 2 finished, 1 failed" in printed
    assert "raise ValueError" in printed
    assert printed.count("baseline") == 0
    before = stamps(tmp_path / "run")

    monkeypatch.setattr(
        decoding, "decode_batches", lambda *a, **k: made.append(None) or real(*a, **k)
    )
    made.clear()
    assert lapa2(line) == 0
    assert "1 cell made" in capsys.readouterr().out
    assert len(made) == 1, "the group that had been finished was kept"
    assert load_run(tmp_path / "run").failures == {}
    assert not (tmp_path / "run" / "failed" / f"{bad}.json").exists()
    assert before.items() <= stamps(tmp_path / "run").items()
    assert lapa2("runs", tmp_path / "run") == 0
    assert "two: 3 finished" in capsys.readouterr().out


def test_a_model_that_cannot_be_opened_fails_its_cells_alone(undisturbed, files, tmp_path):
    (tmp_path / "g.toml").write_text(
        TWO.replace("layers", "profile").replace('"top"', '"paper", layers = [9]')
    )
    told = []
    done = sweep(tmp_path / "run", grids_of([tmp_path / "g.toml"]), InProcess("cpu"), told.append)
    assert done.made == 2
    assert len(done.failed) == 1
    assert "layer 9 does not exist; the model has layers 0-3" in told[0]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("at", [1, 4, 15, 40, 73])
def test_a_disk_that_is_full_stops_cleanly_and_goes_on(
    undisturbed, files, tmp_path, monkeypatch, number, at
):
    whole, made = undisturbed
    real, calls = os.fsync, count(1)

    def fsync(handle):
        if next(calls) >= at:
            raise OSError(number, os.strerror(number))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        message = (
            "cannot write .*: Read-only"
            if number == errno.EROFS
            else "is full; .* is kept: make room and repeat"
        )
        with pytest.raises(RunError, match=message):
            sweep(tmp_path / "run", grids_of(files), Replaying(made), pytest.fail)
    assert next(calls) > at
    assert not list((tmp_path / "run").rglob(".writing-*"))
    before = assert_sound(tmp_path / "run", whole)
    sweep(tmp_path / "run", grids_of(files), Replaying(made), pytest.fail)
    assert_equal_runs(tmp_path / "run", whole)
    assert before.items() <= stamps(tmp_path / "run").items()


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill_disk(folder, files, outcomes):
    try:
        sweep(folder, grids_of(files), Replaying(pickle.loads(outcomes.read_bytes())))
    except RunError as error:
        raise SystemExit(7 if "is full" in str(error) else 8) from error


@pytest.mark.alone
def test_a_real_full_disk_stops_cleanly_and_goes_on(traced, traced_files, tmp_path, small_disk):
    """In another process, because HDF5 has been seen to take one down."""
    process = start(fill_disk, small_disk / "run", traced_files, in_a_file(traced[1], tmp_path))
    process.join()
    assert process.exitcode == 7
    assert assert_sound(small_disk / "run", traced[0]), "some cells are finished"
    subprocess.run(["mount", "-o", "remount,size=10m", str(small_disk)], check=True)
    sweep(small_disk / "run", grids_of(traced_files), Replaying(traced[1]), pytest.fail)
    assert_equal_runs(small_disk / "run", traced[0])


def hold(folder, files, outcomes, until):
    """Sweep, and stay in the middle of it until a file is there."""
    engine = Replaying(pickle.loads(outcomes.read_bytes()))
    real, number = engine.wait, count(1)

    def wait(told):
        if next(number) == 5:
            (until.parent / "waiting").touch()
            wait_for(until.exists)
        return real(told)

    engine.wait = wait
    sweep(folder, grids_of(files), engine)


def test_two_processes_on_one_run_the_second_is_refused(undisturbed, files, tmp_path, capsys):
    run = tmp_path / "run"
    process = start(hold, run, files, in_a_file(undisturbed[1], tmp_path), tmp_path / "go")
    wait_for((tmp_path / "waiting").exists)
    before = contents(run)
    with pytest.raises(
        RunError,
        match=f"is being filled by process {process.pid} on .*; wait for it, or give another",
    ):
        sweep(run, grids_of(files), Replaying(undisturbed[1]))
    assert lapa2("runs", run) == 0, "it may be read meanwhile"
    assert contents(run) == before
    (tmp_path / "go").touch()
    process.join()
    assert process.exitcode == 0
    assert_equal_runs(run, undisturbed[0])
    assert sweep(run, grids_of(files), Replaying({})).before == 4, "who has ended holds nothing"


@pytest.fixture
def copy(undisturbed, tmp_path):
    """A finished run that may be spoiled."""
    return shutil.copytree(undisturbed[0], tmp_path / "copy")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"format": 1},
            (
                "run of format 1 .*this is .*format 2; read it with that version, or sweep into a"
                " new folder"
            ),
        ),
        ({"grids": None}, "is not a run: its run.json is something else's"),
        ({"grids": 3}, "is damaged or of another version: grids: .*found 3"),
        ({"nonsense": 3}, "is damaged or of another version: nonsense"),
    ],
)
def test_a_run_of_another_version_is_not_read(copy, files, change, message):
    raw, _ = without_checksums((copy / "run.json").read_text())
    changed = {name: each for name, each in (raw | change).items() if each is not None}
    (copy / "run.json").write_text(with_checksums(changed))
    before = contents(copy)
    for act in (load_run, lambda run: sweep(run, grids_of(files), Replaying({}))):
        with pytest.raises(RunError, match=message):
            act(copy)
    assert contents(copy) == before


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "sweep", "form', "\x00\xff"])
def test_a_damaged_list_of_cells_is_refused(copy, text):
    (copy / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedError, match="run.json is damaged: .*; remove it, and `lapa2 sweep`"):
        load_run(copy)


def test_a_run_that_another_version_of_the_same_format_began_goes_on(copy, files):
    raw, _ = without_checksums((copy / "run.json").read_text())
    (copy / "run.json").write_text(with_checksums(raw | {"lapa2_interp": "9.0"}))
    assert len(load_run(copy).finished) == 4
    assert sweep(copy, grids_of(files), Replaying({})).before == 4


def test_a_plan_that_was_changed_is_refused_and_written_anew_by_a_sweep(copy, files):
    file = next((copy / "plan").iterdir())
    before = file.read_text()
    file.write_text(before.replace('"seed": 1', '"seed": 2'))
    with pytest.raises(DamagedError, match=f"{file.name} has changed, .* give the key"):
        load_run(copy)
    assert sweep(copy, grids_of(files), Replaying({}), pytest.fail).before == 4
    assert file.read_text() == before


def test_a_folder_that_is_something_else_is_left_alone(files, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="exists and is not a run; choose another place"):
        sweep(tmp_path / "thesis", grids_of(files), Replaying({}))
    assert [each.name for each in (tmp_path / "thesis").iterdir()] == ["chapter1.txt"]
    with pytest.raises(RunError, match="cannot write .*file: File exists"):
        sweep(tmp_path / "file", grids_of(files), Replaying({}))
    with pytest.raises(
        RunError,
        match="is not a run: it has no run.json; `lapa2 generate` and `lapa2 sweep GRID --out",
    ):
        load_run(tmp_path / "thesis")
    (tmp_path / "empty").mkdir()
    assert len(add_grids(tmp_path / "empty", grids_of(files)).by_key) == 4


def test_weights_that_changed_since_the_run_was_made_are_refused(undisturbed, files, copy):
    made = undisturbed[1]
    key = next(iter(load_run(copy).by_key))
    shutil.rmtree(copy / "cells" / key)
    opened = made[key, None]
    other = opened.facts["model"].model_copy(update={"weights": "sha256 of others"})
    changed = made | {(key, None): replace(opened, facts=opened.facts | {"model": other})}
    with pytest.raises(
        RunError,
        match=(
            "was made with tiny-gpt2 of random, seed 0, and it is now sha256 of others; sweep into"
        ),
    ):
        sweep(copy, grids_of(files), Replaying(changed))


def half_done(run, files, made, jobs):
    """A run that was stopped after so many jobs; its first cell has some groups."""
    engine = Replaying(made)
    real = engine.wait

    def wait(told):
        if len(engine.done) == jobs:
            raise KeyboardInterrupt
        return real(told)

    engine.wait = wait
    with pytest.raises(KeyboardInterrupt):
        sweep(run, grids_of(files), engine, pytest.fail)


def test_groups_that_were_made_otherwise_are_made_again(undisturbed, files, tmp_path):
    whole, made = undisturbed
    half_done(tmp_path / "run", files, made, 2)
    (key,) = (folder.name for folder in (tmp_path / "run" / "parts").iterdir())
    opened = made[key, None]
    assert opened.groups == (4, 2)
    assert (tmp_path / "run" / "parts" / key / "0").is_dir()
    card = opened.facts["model"]
    unpacked = card.model_copy(update={"prepacking": "none"})
    for other, told in (
        (replace(opened, groups=(3, 2, 1)), "groups was [4, 2] and is [3, 2, 1]"),
        (replace(opened, facts=opened.facts | {"threads": 7}), "threads was 1 and is 7"),
        (
            replace(opened, facts=opened.facts | {"model": unpacked}),
            f"prepacking was {card.prepacking} and is none",
        ),
        (replace(opened, facts=opened.facts | {"versions": {"torch": "1.0"}}), "and is 1.0"),
        (
            replace(opened, maker=opened.maker | {"processor": "another"}),
            f"processor was {processor_kind()} and is another",
        ),
        (replace(opened, maker=opened.maker | {"lapa2_interp": "9.9"}), "and is 9.9"),
    ):
        place = shutil.copytree(tmp_path / "run", tmp_path / "other", dirs_exist_ok=True)
        engine = Replaying(made | {(key, None): other, (key, 2): made[key, 1]})
        notes = []
        sweep(place, grids_of(files), engine, notes.append)
        assert (key, 0) in engine.done
        assert len(notes) == 1
        assert f"({key}): 1 finished group of rows made again" in notes[0]
        assert told in notes[0]
        shutil.rmtree(place)
    engine = Replaying(made)
    sweep(tmp_path / "run", grids_of(files), engine, pytest.fail)
    assert (key, 0) not in engine.done
    assert_equal_runs(tmp_path / "run", whole)


def rewrite(file, change):
    file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize(
    "spoil",
    [
        Path.unlink,
        lambda file: rewrite(file, lambda old: old[: len(old) // 2]),
        lambda file: rewrite(file, lambda old: b""),
    ],
    ids=["away", "half", "empty"],
)
def test_a_cell_that_lost_a_file_or_some_of_it_is_made_again(
    traced, traced_files, tmp_path, capsys, spoil
):
    run = shutil.copytree(traced[0], tmp_path / "run")
    assert load_run(run).cells["state"].tolist() == ["finished"] * 4
    for key, name in zip(load_run(run).by_key, (SAMPLES, TRACE, MANIFEST), strict=False):
        spoil(run / "cells" / key / name)
    assert load_run(run).cells["state"].tolist() == ["damaged"] * 3 + ["finished"]
    assert lapa2("runs", run, "--state", "damaged") == 0
    printed = capsys.readouterr().out
    assert "one: 2 damaged\ntwo: 1 finished, 2 damaged" in printed
    assert (
        "with the same grids, or `lapa2 generate` with --force, makes damaged cells again"
        in printed
    )
    done = sweep(run, grids_of(traced_files), Replaying(traced[1]), pytest.fail)
    assert (done.before, done.made) == (1, 3)
    assert_equal_runs(run, traced[0])


def test_the_files_of_another_cell_are_none_of_this_one(undisturbed, copy):
    one, two, *_ = load_run(copy).by_key
    shutil.rmtree(copy / "cells" / one)
    shutil.copytree(copy / "cells" / two, copy / "cells" / one)
    assert load_run(copy).cells["state"].tolist() == ["damaged"] + ["finished"] * 3


def test_a_plan_that_is_away_is_written_anew(undisturbed, files, copy):
    key = next(iter(load_run(copy).by_key))
    file = copy / "plan" / f"{key}.json"
    before = file.read_bytes()
    file.unlink()
    with pytest.raises(
        RunError,
        match=(
            f"{key}.json is missing; .*`lapa2 sweep` with the cell's grid .one, two. writes it again"
        ),
    ):
        load_run(copy)
    done = sweep(copy, grids_of(files), Replaying({}), pytest.fail)
    assert (done.before, done.made) == (4, 0)
    assert file.read_bytes() == before
    file.write_text("{")
    with pytest.raises(
        RunError,
        match=f"{key}.json is damaged or of another version: .*; .*`lapa2 sweep` with the cell",
    ):
        load_run(copy)


def test_what_a_kill_left_beside_finished_cells_is_taken_away(undisturbed, files, copy):
    key = next(iter(load_run(copy).by_key))
    write_text(
        copy / "failed" / f"{key}.json",
        '{"when": "2026-01-01T00:00:00Z", "traceback": "ValueError: old"}',
    )
    (copy / "parts" / key / "1").mkdir(parents=True)
    (copy / "scores" / ".writing-of-another").mkdir(parents=True)
    assert load_run(copy).failures == {}
    sweep(copy, grids_of(files), Replaying({}), pytest.fail)
    assert not (copy / "parts" / key).exists()
    assert not (copy / "failed" / f"{key}.json").exists()
    assert (copy / "scores" / ".writing-of-another").exists(), "not the sweep's"


def test_folders_are_on_the_disk_before_they_have_their_name(tmp_path, monkeypatch):
    log, real_fsync, real_rename = [], os.fsync, os.rename

    def fsync(handle):
        log.append(Path(f"/proc/self/fd/{handle}").readlink())
        real_fsync(handle)

    def rename(source, target, **settings):
        if Path(target).name != LOCK:
            log.append((Path(source), Path(target)))
        real_rename(source, target, **settings)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", rename)
    with atomic_folder(tmp_path / "deep" / "er" / "place") as fresh:
        (fresh / "a").write_text("a")
        (fresh / "b").write_text("b")
        assert not (tmp_path / "deep" / "er" / "place").exists()
    parent = tmp_path / "deep" / "er"
    assert log[:2] == [tmp_path, tmp_path / "deep"], "new folders are in their parents"
    assert set(log[2:4]) == {fresh / "a", fresh / "b"}
    assert log[4:] == [fresh, (fresh, parent / "place"), parent]
    log.clear()
    write_text(parent / "new" / "file", "text")
    above, made, (source, target), after = log
    assert (above, made, target, after) == (
        parent,
        source,
        parent / "new" / "file",
        parent / "new",
    )
    assert [each.name for each in (parent / "new").iterdir()] == ["file"]


def hold_aside(folder):
    """Be killed with a temporary folder."""
    with temporary_folder(folder) as beside:
        (beside / "half").write_text("made")
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_lives_stays(tmp_path):
    process = start(hold_aside, tmp_path)
    process.join()
    (left,) = tmp_path.glob(f"{TEMPORARY_PREFIX}*")
    (
        tmp_path / f"{TEMPORARY_PREFIX}older"
    ).mkdir()  # without a lock nothing tells whether its owner lives
    with temporary_folder(tmp_path) as mine, temporary_folder(tmp_path) as other:
        assert not left.exists()
        assert mine.exists()
        assert other.exists()
    assert [each.name for each in tmp_path.iterdir()] == [f"{TEMPORARY_PREFIX}older"]


def test_a_stop_while_a_temporary_folder_is_removed_leaves_nothing_of_it(tmp_path, monkeypatch):
    def stopped(place, **_):
        monkeypatch.undo()
        (place / "half").unlink()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), temporary_folder(tmp_path) as beside:
        for name in ("half", "other"):
            (beside / "new" / name).parent.mkdir(exist_ok=True)
            (beside / "new" / name).write_text("made")
        monkeypatch.setattr(shutil, "rmtree", stopped)
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    write_text(tmp_path / "file", "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_text(tmp_path / "file", "new")
    with pytest.raises(OSError, match="full"), atomic_folder(tmp_path / "folder"):
        pass
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("file", "old")]


def test_a_stop_between_two_renames_keeps_the_old_folder(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    write_text(tmp_path / "run" / "file", "old")
    rename = os.rename

    def stopped(source, target, **settings):
        rename(source, target, **settings)
        if Path(target).name == "before":
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", stopped)
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "run"):
        pass
    assert (tmp_path / "run" / "file").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


# --- reading


def test_samples_and_traces_are_those_of_generate(traced):
    run = load_run(traced[0])
    samples = run.samples()
    for cell in run.by_key.values():
        alone = generate(
            load("tiny-gpt2"), cell.decoding_method, cell.task, "positive", cell.task.prompts.texts, augmentation=cell.augmentation,
            length=22, samples=cell.samples, seed=1, trace="pooled", max_rows=4,
        )  # fmt: skip
        ours = samples[samples["cell"] == cell.key]
        assert ours["text"].tolist() == alone.samples["text"].tolist()
        assert [list(tokens) for tokens in ours["tokens"]] == alone.samples["tokens"].tolist()
        assert (ours["arm"] == cell.arm).all()
        trace = run.trace(cell.key)
        assert set(trace.variables) - {"arm", "task", "method", "cell"} == set(
            alone.trace.variables
        )
        for name, values in alone.trace.variables.items():
            assert trace[name].dims == values.dims, name
            if values.dtype.kind == "f":
                np.testing.assert_allclose(trace[name], values, atol=1e-5, err_msg=name)
            else:
                assert trace[name].to_numpy().tolist() == values.to_numpy().tolist(), name
        assert np.isnan(trace["l_kv"]).any() == np.isnan(alone.trace["l_kv"]).any()
    assert any(np.isnan(run.trace(key)["l_kv"]).any() for key in run.by_key), (
        "the parts are not all equally long"
    )


def test_reading_is_tidy_and_generates_nothing(traced, monkeypatch):
    def never(*_, **__):
        raise AssertionError("a reader loads no model")

    for name in (
        "models.load.load_model",
        "models.load.load_transformers",
        "models.load.load_tokenizer",
        "generation.loop.decode_batches",
        "generation.plan.plan_batches",
    ):
        monkeypatch.setattr(f"lapa2_interp.{name}", never)
    run = load_run(traced[0])
    samples, cells = run.samples(), run.cells
    assert len(samples) == 3 * 6 + 3
    assert not samples.duplicated(["cell", "prompt", "sample"]).any()
    assert samples.groupby("cell", sort=False).size().to_dict() == {
        key: 3 * cell.samples for key, cell in run.by_key.items()
    }
    assert (samples["n_tokens"] + samples["prompt"].str.len()).tolist() == [22] * 21, (
        "a byte is a token"
    )
    assert list(samples["sample"].unique()) == [0, 1]
    assert list(cells["key"]) == list(run.by_key)
    assert (cells["state"] == "finished").all()
    assert cells["grids"].tolist().count("one, two") == 1
    assert (
        cells.set_index("key")["tokens"].to_dict()
        == samples.groupby("cell")["n_tokens"].sum().to_dict()
    )
    assert (cells["seconds"] > 0).all()
    row = cells[cells["layers"] == "top"].iloc[0]
    assert (row["model"], row["dtype"], row["task"], row["attribute"]) == (
        "tiny-gpt2",
        "float32",
        "sentiment",
        "positive",
    )
    assert (row["method"], row["alpha"], row["law"], row["profile"]) == (
        "prefix",
        0.5,
        "log",
        "paper",
    )
    assert (row["max_length"], row["samples"], row["seed"], row["why"]) == (22, 2, 1, "")
    assert isinstance(run.trace(row["key"]), xr.Dataset)
    only = run.samples([row["key"]])
    pd.testing.assert_frame_equal(
        only, samples[samples["cell"] == row["key"]].reset_index(drop=True)
    )
    chosen = run.select(method="prefix", arm=["baseline", row["arm"]], task="sentiment")
    assert list(chosen.by_key) == [
        key for key, cell in run.by_key.items() if cell.arm in ("baseline", row["arm"])
    ]
    with pytest.raises(RunError, match="unknown column 'methd'; allowed: .*did you mean 'method'"):
        run.select(methd="prefix")


def test_missing_and_damaged_cells_are_named(undisturbed, files, tmp_path, capsys):
    half_done(tmp_path / "run", files, undisturbed[1], 5)
    run = load_run(tmp_path / "run")
    assert run.cells["state"].tolist() == ["finished", "partly", "missing", "missing"]
    key = run.cells["key"][2]
    assert set(run.samples()["cell"]) == {run.cells["key"][0]}
    for read in (run.finished_cell, run.trace, lambda missing: run.samples([missing])):
        with pytest.raises(
            RunError, match=f"cell {key} .* is not finished; `lapa2 sweep` with its grid makes it"
        ):
            read(key)
        with pytest.raises(RunError, match="has no cell 'nonsense'; `lapa2 runs .*` lists them"):
            read("nonsense")
    assert lapa2("runs", tmp_path / "run", "--json", "--state", "missing") == 0
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == ["missing"] * 2
    assert lapa2("runs", tmp_path / "run") == 0
    assert "one: 1 finished, 1 partly\ntwo: 1 finished, 2 missing\n" in capsys.readouterr().out
    file = tmp_path / "run" / "cells" / run.cells["key"][0] / SAMPLES
    rewrite(file, lambda old: old[:4] + bytes(400) + old[404:])  # what its footer does not tell
    with pytest.raises(
        DamagedError,
        match="samples.parquet is damaged: its sha256 .*; remove the folder of the cell",
    ):
        run.samples()
    rewrite(file, lambda old: old[:500])
    assert run.finished == {}


def flip(file, at, bit=0):
    """One bit of a file, which keeps its size."""
    data = bytearray(file.read_bytes())
    data[at % len(data)] ^= 1 << bit
    file.write_bytes(data)


def test_a_changed_bit_is_seen_and_a_cell_that_is_removed_is_made_again(
    traced, traced_files, tmp_path
):
    """What the file formats do not notice: a bit of a text, a number of a trace, a second."""
    run = shutil.copytree(traced[0], tmp_path / "run")
    one, two, three, four = load_run(run).by_key
    flip(run / "cells" / one / SAMPLES, 200)
    flip(run / "cells" / two / TRACE, -100)
    manifest = run / "cells" / three / MANIFEST
    manifest.write_text(manifest.read_text().replace('"seconds": ', '"seconds": 1'))
    flip(run / "plan" / f"{four}.json", 30)
    assert read_manifest(run / "cells" / four).cell.key == four
    for read in (read_cell, lambda place: read_file(place, SAMPLES)):
        with pytest.raises(DamagedError, match="samples.parquet is damaged: its sha256"):
            read(run / "cells" / one)
    with pytest.raises(DamagedError, match="trace.nc is damaged: its sha256"):
        read_cell(run / "cells" / two)
    with pytest.raises(DamagedError, match=r"manifest.json is damaged: its contents are not"):
        read_manifest(manifest.parent)
    for key in (one, two):
        shutil.rmtree(run / "cells" / key)
    done = sweep(run, grids_of(traced_files), Replaying(traced[1]), pytest.fail)
    assert (done.before, done.made) == (1, 3)
    assert_equal_runs(run, traced[0])


def test_a_listing_that_is_damaged_or_lost_is_written_anew_by_a_sweep(copy, files, capsys):
    flip(copy / "run.json", 40)
    assert lapa2("runs", copy) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (copy / "run.json").unlink()
    with pytest.raises(DamagedError, match="no run.json; `lapa2 sweep` with its grids writes it"):
        load_run(copy)
    assert sweep(copy, grids_of(files), Replaying({}), pytest.fail).before == 4
    assert {"one", "two"} <= load_run(copy).listing.grids.keys()


def test_a_changed_bit_in_the_name_of_the_seal_is_seen(copy):
    listing = copy / "run.json"
    listing.write_text(listing.read_text("utf-8").replace('"seal"', '"sdal"'), "utf-8")
    with pytest.raises(DamagedError, match="run.json is damaged or of .* if it is damaged, remove"):
        load_run(copy)


def test_a_damaged_plan_does_not_stop_the_sweep_that_writes_it_again(copy, files, tmp_path):
    """Also one whose settings make no cell: it is asked for the dtype of the run."""
    file = next((copy / "plan").iterdir())
    for text in (file.read_text("utf-8").replace('"length":', '"lenght":'), '{"length": 0}'):
        file.write_text(text, "utf-8")
        auto = tmp_path / "auto.toml"
        auto.write_text(files[0].read_text("utf-8").replace('dtype = "float32"', 'dtype = "auto"'))
        assert load_grids(copy, [str(auto)])


def test_a_disk_that_fails_is_no_damage(copy, monkeypatch):
    """The cell may be sound: it is not made again."""
    import pyarrow.parquet as pq

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    whole = load_run(copy)
    monkeypatch.setattr(pq, "read_metadata", fails)
    reading._are_sound.cache_clear()
    with pytest.raises(OSError, match="Input/output"):
        whole.finished  # noqa: B018
    monkeypatch.setattr("lapa2_interp.runs.store.without_checksums", fails)
    with pytest.raises(OSError, match="Input/output"):
        load_run(copy)


def test_a_damaged_group_is_made_again_and_a_damaged_failure_is_said(undisturbed, files, tmp_path):
    whole, made = undisturbed
    half_done(tmp_path / "run", files, made, 2)
    (folder,) = (tmp_path / "run" / "parts").iterdir()
    other = load_run(tmp_path / "run").cells["key"][3]
    write_text(tmp_path / "run" / "failed" / f"{other}.json", "\x00")
    told = load_run(tmp_path / "run").cells
    assert (told["state"][3], told["why"][3]) == (
        "failed", f"unknown: {tmp_path}/run/failed/{other}.json is damaged",
    )  # fmt: skip
    flip(folder / "0" / SAMPLES, 300)
    notes, engine = [], Replaying(made)
    sweep(tmp_path / "run", grids_of(files), engine, notes.append)
    assert (folder.name, 0) in engine.done
    (note,) = notes
    assert "a group of rows made again; " in note
    assert "0 is damaged: samples.parquet has another sha256" in note
    assert_equal_runs(tmp_path / "run", whole)
    half_done(tmp_path / "other", files, made, 2)
    flip(tmp_path / "other" / "parts" / folder.name / "0" / "part.json", 30)
    sweep(tmp_path / "other", grids_of(files), Replaying(made), notes.append)
    assert "0 is damaged" in notes[-1]
    assert_equal_runs(tmp_path / "other", whole)


def test_a_run_without_a_finished_cell_reads_as_empty(files, tmp_path):
    run = add_grids(tmp_path / "run", grids_of(files))
    assert len(run.samples()) == 0
    assert run.finished == {}
    assert run.cells["state"].tolist() == ["missing"] * 4


def test_a_manifest_says_what_made_the_cell(traced):
    import importlib.metadata

    run = load_run(traced[0])
    for key, cell in run.by_key.items():
        found = run.finished_cell(key).manifest
        made = found.cell
        assert (made, made.key) == (cell, key)
        assert (made.length, made.seed, made.max_rows, made.trace) == (22, 1, 4, "pooled")
        assert (
            made.prompts
            == cell.task.prompts.texts
            == ("Once upon a time", "The book", "The chicken")
        )
        assert (found.model.name, found.model.weights) == ("tiny-gpt2", "random, seed 0")
        assert (found.model.dtype, found.model.device, found.threads) == ("float32", "cpu", 1)
        assert found.versions["torch"] == importlib.metadata.version("torch")
        assert found.new_tokens == run.samples([key])["n_tokens"].sum()
        assert found.seconds > 0
        assert found.branches["prefix" if cell.method == "prefix" else "target"] == "Very positive:"
        inside = json.loads(run.trace(key).attrs["manifest"])
        assert inside["cell"] == json.loads(cell.model_dump_json())
        assert not {"created", "seconds", "commit"} & inside.keys(), "equal runs have equal bytes"


def test_a_manifest_has_the_sha_of_its_soft_prefixes(tmp_path):
    import hashlib

    from conftest import soft_set

    from lapa2_interp.methods import load_task

    folder = soft_set(tmp_path / "set", load("tiny-gpt2"), load_task("sentiment"))
    (tmp_path / "g.toml").write_text(
        HEAD + f'method = {{ name = "prefix", prefixes = "{folder}" }}'
    )
    (grid,) = grids_of([tmp_path / "g.toml"])
    sweep(tmp_path / "run", [grid], InProcess("cpu"), pytest.fail)
    (cell,) = grid.cells
    sha = hashlib.sha256(Path(folder, "positive.safetensors").read_bytes()).hexdigest()
    assert (
        load_run(tmp_path / "run").finished_cell(cell.key).manifest.branches["prefix"].sha256 == sha
    )
    assert cell.files == {"prefix": sha}


def test_every_field_of_a_manifest_is_documented():
    import ast
    import inspect

    (body,) = (
        node.body for node in ast.walk(ast.parse(inspect.getsource(sys.modules[Manifest.__module__])))
        if isinstance(node, ast.ClassDef) and node.name == "Manifest"
    )  # fmt: skip
    bare = [
        node.target.id
        for node, after in zip(body, [*body[1:], None], strict=True)
        if isinstance(node, ast.AnnAssign)
        and not (
            isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        )
    ]
    assert bare == []


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_every_class_of_model_and_every_option_reaches_the_worker(tmp_path, model_class):
    text = HEAD.replace("prompts = 3", "prompts = 1").replace("samples = 2", "samples = 1")
    text = text.replace('"float32"', '"float64"').replace('"pooled"', '"none"')
    text += f'model_class = "{model_class}"\neos = "stop"\ntop_k = 5\nseed = 3\n'
    text += 'method = "prefix"\n'
    (tmp_path / "g.toml").write_text(text)
    (grid,) = grids_of([tmp_path / "g.toml"])
    done = sweep(tmp_path / "run", [grid], InProcess("cpu"), pytest.fail)
    assert done.made == 1
    run, (cell,) = load_run(tmp_path / "run"), grid.cells
    found = run.finished_cell(cell.key)
    assert (found.trace, run.trace(cell.key)) == (None, None)
    assert (found.manifest.model.model_class, found.manifest.model.dtype) == (
        model_class,
        "float64",
    )
    alone = generate(
        load("tiny-gpt2", "float64", model_class), cell.decoding_method, cell.task, "positive", cell.task.prompts.texts, length=22,
        seed=3, top_k=5, eos="stop", trace="none",
    )  # fmt: skip
    assert found.samples["text"].tolist() == alone.samples["text"].tolist()


def test_the_bar_ends_where_the_work_does(undisturbed, files, tmp_path, monkeypatch):
    """In a run that goes on it counts what is left, and a failed cell's work is taken out."""
    from lapa2_interp.runs import sweep as module
    from lapa2_interp.runs.estimates import cost

    whole, made = undisturbed
    bars, real = [], module.progress_bar

    def progress_bar(total, label):
        bars.append((total, real(total, label)))
        return bars[-1][1]

    monkeypatch.setattr(module, "progress_bar", progress_bar)
    half_done(tmp_path / "run", files, made, 2)
    key = list(load_run(whole).by_key)[3]
    failing = made | {(key, 1): Failed("Traceback\nValueError: no")}
    done = sweep(tmp_path / "run", grids_of(files), Replaying(failing), lambda _: None)
    assert done.failed == (key,)
    costs = {each: cost(cell) for each, cell in load_run(whole).by_key.items()}
    (_, _), (total, bar) = bars
    assert total == sum(costs.values())
    assert bar.n == bar.total
    first = costs[next(iter(costs))]
    assert bar.n == total - first * 4 // 6 - (costs[key] - costs[key] // 3), (
        "4 of 6 texts were there; 2 of 3 failed"
    )
    assert "3/4 cells, 1 failed" in bar.postfix


def test_grids_of_one_name_are_refused_and_cells_that_no_grid_has_are_named(tmp_path, capsys):
    """A file x.toml in two folders; and a grid whose cells are others now."""
    for folder, length in (("a", 20), ("b", 21)):
        (tmp_path / folder).mkdir()
        grid = ONE.replace("length = 22", f"length = {length}").replace(
            "prompts = 3", "prompts = 1"
        )
        (tmp_path / folder / "x.toml").write_text(grid)
    one, two = (tmp_path / folder / "x.toml" for folder in "ab")
    assert lapa2("sweep --workers 1 --out", tmp_path / "run", one, two) == 2
    assert "two grids have the name x; rename a file" in capsys.readouterr().err
    assert lapa2("sweep --workers 1 --out", tmp_path / "run", one) == 0
    assert "no longer in a grid" not in capsys.readouterr().err
    assert lapa2("sweep --workers 1 --out", tmp_path / "run", two) == 0
    printed = capsys.readouterr()
    assert "2 finished cells of " in printed.out + printed.err
    assert "no longer in a grid, as x has other cells now" in printed.out + printed.err


def test_a_machine_without_memory_damages_nothing(undisturbed, tmp_path, monkeypatch):
    run = shutil.copytree(undisturbed[0], tmp_path / "run")
    before = contents_of(run)

    def full(*_):
        raise MemoryError("Unable to allocate 9 GiB")

    monkeypatch.setattr("lapa2_interp.runs.store.pd.read_parquet", full)
    with pytest.raises(MemoryError):
        load_run(run).samples()
    assert contents_of(run) == before


def contents_of(folder):
    return {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_a_plan_that_is_a_folder_is_damage(undisturbed, files, tmp_path):
    run = shutil.copytree(undisturbed[0], tmp_path / "run")
    plan = next((run / "plan").iterdir())
    plan.unlink()
    plan.mkdir()
    with pytest.raises(DamagedError, match="is a folder; remove it"):
        load_run(run)
    plan.rmdir()
    sweep(run, grids_of(files), InProcess("cpu"))
    assert_equal_runs(run, undisturbed[0])


def test_a_copy_beside_the_groups_of_a_cell_is_no_group(undisturbed, files, tmp_path):
    whole, made = undisturbed
    run = tmp_path / "run"
    half_done(run, files, made, 2)
    (group,) = run.glob("parts/*/0")
    shutil.copytree(group, group.with_name("0 (copy)"))
    sweep(run, grids_of(files), InProcess("cpu"), pytest.fail)
    assert_equal_runs(run, whole)


def test_a_note_of_groups_that_is_no_text_is_made_anew(undisturbed, files, tmp_path):
    whole, made = undisturbed
    run = tmp_path / "run"
    half_done(run, files, made, 2)
    (note,) = run.glob("parts/*/opened.json")
    note.write_bytes(b"\xff\xfe")
    said = []
    sweep(run, grids_of(files), InProcess("cpu"), said.append)
    assert any("made again" in line for line in said)
    assert_equal_runs(run, whole)


def test_a_sweep_leaves_what_other_commands_write_in_its_folder(files, tmp_path):
    run = tmp_path / "run"
    sweep(run, grids_of(files)[:1], InProcess("cpu"))
    with temporary_folder(run) as scores:  # as `lapa2 score RUN --out RUN/scores` does
        sweep(run, grids_of(files)[:1], InProcess("cpu"))
        assert scores.is_dir()
