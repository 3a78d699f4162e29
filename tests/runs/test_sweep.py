"""What goes wrong in a sweep is said, and harms nothing else. That a run which is stopped anywhere
becomes what an undisturbed one is: `test_engines`. What is refused: `test_runs_refusals`."""

import errno
import functools
import glob
import hashlib
import importlib.metadata
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import endings
import pandas as pd
import pytest
import torch
import xarray as xr
from conftest import MODEL_CLASSES, lapa2, load, soft_prefix, soft_set, start, warm
from conftest import generate as decode
from jobs import FakeWorker, Serial, batch_of
from test_engines import contents
from tqdm import tqdm

from lapa2_interp import generate
from lapa2_interp.cli.app import main
from lapa2_interp.errors import RunError
from lapa2_interp.files import acquire_lock, temporary_folder, write_text
from lapa2_interp.methods import load_task
from lapa2_interp.models.machine import processor_kind
from lapa2_interp.prefixes.soft_prefix import save_prefix
from lapa2_interp.progress import CountingBar
from lapa2_interp.runs import engines
from lapa2_interp.runs import fill as filling
from lapa2_interp.runs import sweep as sweeping
from lapa2_interp.runs import worker as working
from lapa2_interp.runs.engines import InProcess, LocalPool, WorkerLost
from lapa2_interp.runs.estimates import row_tokens_of
from lapa2_interp.runs.fill import ATTEMPTS, fill_run, open_run, remove_earlier_cells
from lapa2_interp.runs.generate import make_cells
from lapa2_interp.runs.grid import Grid, load_grid
from lapa2_interp.runs.manifest import BatchRecord, Manifest
from lapa2_interp.runs.run import finished_cell, load_run
from lapa2_interp.runs.store import Failure, Listing
from lapa2_interp.runs.worker import Worker, check_files
from lapa2_interp.scoring.task_scorer import SHIPPED_WEIGHTS
from lapa2_interp.tasks import task as tasks

COMMON = """
model = "tiny-gpt2"
dtype = "float32"
trace = "none"
task = "sentiment"
attribute = "positive"
prompts = 3
samples = 2
length = 18
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
trace = "pooled"
"""
"""Four cells of two or three batches each, the last one with a trace, which takes longer to write than
these texts to make; both grids have the baseline of prefix."""


def grid_of(folder, text):
    """A grid of this text, and its cells."""
    (folder / "g.toml").write_text(text)
    grid = load_grid(str(folder / "g.toml"), allow_code=True)
    return grid, grid.cells


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grids")
    for name, text in (("one", ONE), ("two", TWO)):
        (folder / f"{name}.toml").write_text(text)
    return [folder / "one.toml", folder / "two.toml"]


@pytest.fixture(scope="module")
def grids(files):
    return [load_grid(str(file)) for file in files]


@pytest.fixture(scope="module")
def cells(grids):
    return list({cell.key: cell for grid in grids for cell in grid.cells}.values())


@pytest.fixture(scope="module")
def cell(cells):
    """The first cell."""
    return cells[0]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, grids):
    """A run that a model has made in one go."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = fill_run(folder, grids, InProcess("cpu"), pytest.fail)
    assert (done.before, done.made, done.failed) == (0, 4, ())
    return folder


def fake_fill(run, grids, worker=None, notify=pytest.fail):
    """A sweep whose batches are made without a model."""
    return fill_run(run, grids, Serial(worker or FakeWorker()), notify)


@pytest.fixture
def fake(grids, tmp_path):
    """A finished run of such batches, which may be spoiled."""
    fake_fill(tmp_path / "fake", grids)
    return tmp_path / "fake"


def half_done(run, grids, batches):
    """A run that was stopped after so many batches."""

    def stop(number):
        if number == batches:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fake_fill(run, grids, FakeWorker(before=stop))


def assert_equal_runs(run, expected):
    ours, theirs = contents(run), contents(expected)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert load_run(run).finished.keys() == load_run(expected).by_key.keys()


# --- stopping


def seen(run):
    """Finished batches, while another process makes some; `Path.glob` ends in an error then."""
    return glob.glob("cells/*/[0-9]*.json", root_dir=run)  # noqa: PTH207


def command(run, files, *more):
    # What runs in the background of a script ignores SIGINT, and so would its children.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from lapa2_interp.cli.app import main; raise SystemExit(main())"
    )
    names = map(str, files)
    line = ["sweep", *names, "--out", str(run), "--device", "cpu", *more]
    return [sys.executable, "-c", program, *line]


@pytest.fixture
def alone(tmp_path):
    """Start the command in a session of its own, as a terminal would; what it prints goes to the
    file `printed`."""
    started = []

    def begin(*arguments):
        with (tmp_path / "printed").open("w") as stream:
            line = command(*arguments)
            started.append(
                subprocess.Popen(line, stdout=stream, stderr=stream, start_new_session=True)
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
    assert printed.splitlines()[-1] == "lapa2: interrupted; run the same command again to resume"
    assert "Traceback" not in printed
    wait_for(lambda: is_over(process.pid), 20)


def run_command(run, files, log):
    """`lapa2 sweep`, here."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in `command`
    finish = filling._Filling._finish

    def finish_and_wait(self, work):
        finish(self, work)
        time.sleep(60)  # or until the signal: the cells are done in a moment

    filling._Filling._finish = finish_and_wait
    with log.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    raise SystemExit(main(command(run, files, "--workers", "1")[3:]))


@pytest.mark.alone
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_that_stop_it_are_told_what_is_finished(files, tmp_path, number, code):
    run, log = tmp_path / "run", tmp_path / "log"
    process = start(run_command, run, files, log)
    wait_for(lambda: len(seen(run)) == 2 or not process.is_alive())  # those of the first cell
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == code, log.read_text()
    finished = load_run(run).finished
    assert 1 <= len(finished) < 4
    assert log.read_text().splitlines()[-2:] == [
        f"{len(finished)} of 4 cells finished",
        "lapa2: interrupted; run the same command again to resume",
    ]
    assert "Traceback" not in log.read_text()
    assert not list(run.rglob(".writing-*")), "it had the time to clean up"


def test_only_some_cells_of_a_grid_are_made_and_the_others_later(files, tmp_path, monkeypatch):
    """The run notes all cells; another call makes what is left."""
    monkeypatch.setattr(sweeping, "local_engine", lambda *_: Serial(FakeWorker()))
    run, names = tmp_path / "run", [str(file) for file in files]
    done = sweeping.sweep(names, run, only={"method": "prefix"}, notify=print)
    cells = load_run(run).cells
    assert set(cells["method"][cells["state"] == "finished"]) == {"prefix"}
    assert (done.made, len(cells)) == ((cells["method"] == "prefix").sum(), 4)
    numbers = {"samples": [str(float(cells["samples"][0]))]}  # as text no cell has it
    assert sweeping.sweep(names, run, only={"method": ["prefix"]} | numbers).made == 0
    assert sweeping.sweep(names, run).before == done.made
    assert len(load_run(run).finished) == 4


# --- workers


MEMORY = "wants more memory than there is"


def test_a_worker_tells_how_far_it_is_after_every_step(cell):
    shown = []
    with InProcess("cpu") as engine:
        outcome = engine.submit(cell, 0, None, CountingBar(shown.append)).result()
    assert len(shown) == outcome.texts["n_tokens"].max()
    assert shown == sorted(set(shown))
    assert shown[-1] == outcome.record.new_tokens


def test_a_worker_that_has_not_begun_is_not_waited_for(cell, monkeypatch):
    monkeypatch.setattr(engines, "BEGIN", "import time; time.sleep(30)")
    with LocalPool(1, "cpu") as engine:
        engine.submit(cell, 0, None, tqdm(disable=True))
        process = engine._slots[0].worker.process
        wait_for(process.is_alive)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert not process.is_alive()


@pytest.mark.alone
def test_a_worker_that_dies_with_nothing_to_do_is_replaced(undisturbed, cell, quick_processes):
    texts = load_run(undisturbed).texts([cell.key])["text"]
    with LocalPool(1, "cpu") as engine:
        for _ in range(2):
            outcome = engine.submit(cell, 0, None, tqdm(disable=True)).result()
            assert outcome.texts["text"].equals(texts[: len(outcome.texts)])
            process = engine._slots[0].worker.process
            process.kill()
            process.join()


@pytest.fixture
def idle(monkeypatch, without_types):
    """A worker that need not begin, and a function that has its next batch made by another."""
    monkeypatch.setattr(engines, "BEGIN", "")

    def outcome(make):
        monkeypatch.setattr(engines, "_make_batch", make)
        with LocalPool(1, "cpu") as engine:
            future = engine.submit(SimpleNamespace(key="any"), 0, None, tqdm(disable=True))
            return future.exception(60) or future.result()

    return outcome


@pytest.mark.parametrize(
    ("act", "message", "begun"),
    [
        *(
            (functools.partial(endings.end_by, number), message, True)
            for number, message in (
                (-signal.SIGKILL, f"killed at this batch, which .*{MEMORY}; fewer rows .*max_rows=N"),
                (-signal.SIGSEGV, "process was ended by SIGSEGV at this batch, a fault in a library$"),
                (-signal.SIGTERM, "its process was ended by SIGTERM at this batch$"),
                (3, "its process ended by itself at this batch, with exit code 3$"),
            )
        ),
        (endings.unreadable, "^its answer cannot be read: ValueError: not to be read$", None),
    ],
)  # fmt: skip
def test_how_a_worker_ended_is_told(idle, act, message, begun):
    error = idle(act)
    assert re.search(message, str(error))
    assert begun is None or error.begun == begun


def test_a_batch_whose_workers_die_is_given_up(grids, cell, tmp_path):
    batch = cell.key, 0
    worker = FakeWorker({batch: WorkerLost("killed", begun=True)}, always=True)
    done = fake_fill(tmp_path / "run", grids, worker, lambda line: None)
    assert (done.failed, done.made) == ((cell.key,), 3)
    assert worker.begun[batch] == ATTEMPTS == 3


def test_of_a_worker_elsewhere_that_died_the_last_line_is_told():
    reason = filling._worker_lost(OSError("its machine\n\nis gone\n")).reason
    assert reason.startswith("the worker died 3 times: OSError: is gone; where memory ran out, ")


SCRIPT = """
import sys
from pathlib import Path
from lapa2_interp.runs.sweep import sweep
print(sweep(*sys.argv[1:], workers=2).made)
"""


@pytest.mark.parametrize("name", ["script.py", "<stdin>"])
def test_workers_do_not_run_the_script_that_sweeps(tmp_path, monkeypatch, idle, name):
    """It has no guard, or is no file at all; what it has in memory stays what it was."""
    (tmp_path / "script.py").write_text("raise SystemExit('run again')")
    script = ModuleType("__main__")
    script.__file__ = str(tmp_path / name)
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert idle(endings.answer) == "made"
    assert sys.modules["__main__"] is script
    assert script.__file__ == str(tmp_path / name)


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("name", ["script.py", "-"])
def test_a_script_without_a_guard_sweeps_with_workers(files, tmp_path, name):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, name, files[0], tmp_path / "run"],
        input=SCRIPT, capture_output=True, text=True, cwd=tmp_path, check=False,
        env=os.environ | {"PYTHONPATH": str(Path(engines.__file__).parents[2])},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert load_run(tmp_path / "run").cells["state"].tolist() == ["finished"] * 2


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("import os; os._exit(1)", "ended by itself before its first batch, with exit code 1"),
        ("import os; os.kill(os.getpid(), 9)", f"killed before its first batch, .* {MEMORY}; .*"),
    ],
)
def test_a_worker_that_cannot_start_is_no_fault_of_a_batch(
    grids, tmp_path, monkeypatch, capfd, begin, message
):
    monkeypatch.setattr(engines, "BEGIN", begin)
    run = tmp_path / "run"
    with pytest.raises(RunError, match=f"cannot start, tried 3 times: .*{message}.*workers=1 ma"):
        fill_run(run, grids, LocalPool(2, "cpu"), pytest.fail)
    assert "Traceback" not in capfd.readouterr().err
    assert set(load_run(run).cells["state"]) == {"missing"}


@pytest.mark.alone
def test_a_worker_that_starts_slowly_or_at_the_second_try_is_no_worse(
    undisturbed, grids, tmp_path, monkeypatch, quick_processes
):
    there = tmp_path / "there"
    first = f"import os, time; fd = os.open({str(there)!r}, os.O_CREAT | os.O_APPEND | os.O_WRONLY)"
    ends = "os.write(fd, b'.') and os.fstat(fd).st_size == 1 and os._exit(1)"
    monkeypatch.setattr(engines, "BEGIN", f"{first}; {ends}; time.sleep(0.3); {engines.BEGIN}")
    done = fill_run(tmp_path / "run", grids, LocalPool(1, "cpu"), pytest.fail)
    assert (done.made, done.failed, there.read_text()) == (4, (), "..")
    assert_equal_runs(tmp_path / "run", undisturbed)


def test_a_bar_moves_inside_a_batch_and_ends_where_the_work_does(
    grids, cells, tmp_path, monkeypatch
):
    """In a run that goes on it counts what is left; work of a failed cell or of a worker that died
    is taken out."""

    class Bar(tqdm):
        def update(self, n=1):
            at.append(at[-1] + n)
            assert 0 <= at[-1] <= self.total
            return super().update(n)

    class Telling(Serial):
        def submit(self, cell, number, packing, progress):
            for tokens in (2, 4):
                progress.update(tokens)
            return super().submit(cell, number, packing, progress)

    half_done(tmp_path / "run", grids, 1)
    at, bars = [0], []

    def bar_of(total, *_):
        bars.append(Bar(total=total, file=io.StringIO()))
        return bars[0]

    monkeypatch.setattr(filling, "progress_bar", bar_of)
    failing, dying = cells[2].key, cells[1].key
    faults = {(failing, 1): ValueError("no"), (dying, 1): WorkerLost("killed", begun=True)}
    engine = Telling(FakeWorker(faults))
    done = fill_run(tmp_path / "run", grids, engine, lambda _: None)
    assert done.failed == (failing,)
    row_tokens = [row_tokens_of(planned) for planned in cells]
    left = sum(row_tokens) - row_tokens[0] * 4 // 6 - (row_tokens[2] - row_tokens[2] * 4 // 6)
    assert at[-1] == bars[0].n == bars[0].total == left, "4 of 6 texts were there; 2 of 6 failed"
    assert "3/4 cells, 1 failed" in bars[0].postfix
    moves = [after - before for before, after in pairwise(at)]
    assert min(moves) < 0 < max(moves)


def test_a_worker_shares_between_plans_what_a_method_has_prepared(cells, monkeypatch):
    from lapa2_interp.methods.base import Prepared
    from lapa2_interp.methods.conditioning import PrefixConditioning

    made = []

    def prepare(self, context, task, attribute, prompt):
        context.cached("table", lambda: made.append(prompt))
        return Prepared()

    monkeypatch.setattr(PrefixConditioning, "prepare", prepare)
    worker = Worker("cpu")
    alike = [planned for planned in cells if planned.method == "prefix"]
    assert len({id(worker.plan(planned)) for planned in alike for _ in range(2)}) == len(alike)
    assert len(made) == 1


def test_memory_that_runs_out_says_what_to_do(cell, monkeypatch):
    def plan(*_):
        raise MemoryError("no more")

    monkeypatch.setattr(working, "plan_batches", plan)
    assert (
        Worker("cpu").try_batch(cell, 0).reason
        == "MemoryError: no more; fewer rows share a batch with max_rows=N"
    )


def test_an_interrupt_that_a_library_made_an_error_of_is_no_failure(cell, monkeypatch):
    def plan(*_):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as stop:
            raise RuntimeError("a library's own") from stop

    monkeypatch.setattr(working, "plan_batches", plan)
    with pytest.raises(KeyboardInterrupt):
        Worker("cpu").try_batch(cell, 0)


def test_threads_count_on_any_cpu_while_a_batch_is_made(cell):
    before = torch.get_num_threads()
    assert Worker("cpu:0", threads=before + 1).make_batch(cell, 0).record.threads == before + 1
    assert torch.get_num_threads() == before


def test_a_prefix_that_changed_since_the_grid_was_resolved_is_not_used(tmp_path):
    model = load("tiny-gpt2")
    folder = soft_set(tmp_path / "set", model, load_task("sentiment"))
    text = ONE.replace('"prefix"', f'{{ name = "prefix", prefixes = "{folder}" }}')
    before = grid_of(tmp_path, text)[1][0]
    sha = hashlib.sha256(Path(folder, "positive.safetensors").read_bytes()).hexdigest()
    made = Worker("cpu").try_batch(before, 0)
    assert (made.record.branches["prefix"].sha256, before.files) == (sha, {"prefix": sha})
    save_prefix(soft_prefix(model, seed=9), Path(folder), "float32")
    assert "here, and had" in Worker("cpu").try_batch(before, 0).reason
    assert grid_of(tmp_path, text)[1][0].key != before.key


DATG = '{{ name = "datg", scorer = "accuracy=WHERE{}" }}'
CODE = """from dataclasses import dataclass
from lapa2_interp.methods.conditioning import PrefixConditioning
@dataclass(frozen=True)
class Own(PrefixConditioning):
    pass
"""


@pytest.mark.parametrize(
    ("method", "file", "name"),
    [
        ('{ name = "freectrl", words = "WHERE/words.json" }', "words.json", "words"),
        ('"of_mine:Own"', "of_mine.py", "its code"),
        # A file with the card beside it, or a folder.
        (DATG.format("/sentiment.npz"), "sentiment.npz", "scorer"),
        (DATG.format("/sentiment.npz"), "sentiment.json", "scorer's card"),
        (DATG.format("/model"), "model/config.json", "scorer.*"),
    ],
)
def test_a_file_that_changed_since_the_grid_was_resolved_is_not_used(
    tmp_path, cell, monkeypatch, method, file, name
):
    """Batches made with two versions of it are never mixed: it is part of the key."""
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copy(Path(tasks.__file__).parent / "words" / "sentiment.json", tmp_path / "words.json")
    for name_of_file in ("sentiment.npz", "sentiment.json"):
        shutil.copy(SHIPPED_WEIGHTS / name_of_file, tmp_path)
    write_text(tmp_path / "model" / "config.json", "{}")
    write_text(tmp_path / "of_mine.py", CODE)
    text = ONE.replace('"prefix"', method.replace("WHERE", str(tmp_path)))
    plan = Worker("cpu").plan(cell)
    before = grid_of(tmp_path, text)[1][0]
    check_files(replace(plan, cell=before))
    with (tmp_path / file).open("ab") as stream:
        stream.write(b"\n")
    after = grid_of(tmp_path, text)[1][0]
    assert after.files.keys() == before.files.keys() > set()
    assert after.key != before.key
    with pytest.raises(RunError, match=f"the file behind .{name}. has sha256 .* here, and had"):
        check_files(replace(plan, cell=before))


def test_a_scorer_of_the_package_is_no_file_of_a_cell(tmp_path):
    text = ONE.replace('"prefix"', DATG.format("").replace("accuracy=WHERE", "accuracy"))
    assert grid_of(tmp_path, text)[1][0].files == {}


@pytest.mark.parametrize("back", [False, True])
def test_a_run_folder_that_is_moved_meanwhile_is_not_filled(grids, tmp_path, back):
    """Nor one that takes its place."""
    run = tmp_path / "run"

    def move(number):
        if number == 2:
            run.rename(tmp_path / "before")
            if back:
                shutil.copytree(tmp_path / "before", run)

    with pytest.raises(RunError, match="is gone: it was moved or removed"):
        fake_fill(run, grids, FakeWorker(before=move))
    assert run.exists() == back


# --- what goes wrong


def test_a_failing_cell_is_told_by_the_command_until_it_is_made(tmp_path, monkeypatch, capsys):
    """That the rest is made, and what is finished stays: `test_engines`."""

    def failing(self, cell, number, *_):
        if failing.on and number == 1 and "layers top" in cell.arm:
            raise ValueError("out of luck")
        return batch_of(cell, number)

    failing.on, run = True, tmp_path / "run"
    monkeypatch.setattr(Worker, "make_batch", failing)
    (tmp_path / "two.toml").write_text(TWO)
    line = f"sweep {tmp_path / 'two.toml'} --out {run} --workers 1 --device cpu"
    assert lapa2(line) == 2
    printed = capsys.readouterr()
    assert "2 cells made" in printed.out
    (bad,) = load_run(run).select(layers="top").by_key
    assert f"({bad}): ValueError: out of luck" in printed.err
    assert "lapa2: 1 cell failed; `lapa2 runs" in printed.err.splitlines()[-1]
    traceback = load_run(run).failures[bad].traceback
    assert traceback.startswith("Traceback (most recent call last)")
    assert lapa2("runs", run, "--traceback", "--state", "failed") == 0
    printed = capsys.readouterr().out
    assert "two: 2 finished, 1 failed" in printed
    assert 'raise ValueError("out of luck")' in printed
    assert printed.count("baseline") == 0
    failing.on = False
    assert lapa2(line) == 0
    assert "1 cell made" in capsys.readouterr().out
    assert not list(run.rglob("failed.json"))
    assert lapa2("runs", run) == 0
    assert "two: 3 finished" in capsys.readouterr().out


def test_a_listing_that_is_lost_or_of_another_version_is_no_obstacle(fake, grids):
    listing = fake / "run.json"
    listing.write_text(listing.read_text().replace(Listing().lapa2_interp, "9.0"))
    assert len(load_run(fake).finished) == 4
    assert fake_fill(fake, grids).before == 4
    listing.unlink()
    assert fake_fill(fake, grids).before == 4
    assert {"one", "two"} == load_run(fake).listing.grids.keys()


def test_an_empty_folder_becomes_a_run(grids, tmp_path):
    run = open_run(tmp_path, grids)
    assert (len(run.texts()), run.finished) == (0, {})
    assert run.cells["state"].tolist() == ["missing"] * 4


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_text(file.read_text().replace('"seed": 1', '"seed": 2')),
        lambda file: file.write_text("{"),
        Path.unlink,
    ],
    ids=["changed", "cut", "away"],
)
def test_settings_of_a_cell_that_are_damaged_are_written_anew(fake, grids, tmp_path, cell, spoil):
    file = fake / "cells" / cell.key / "cell.json"
    before = file.read_text()
    spoil(file)
    (tmp_path / "auto.toml").write_text(ONE.replace('dtype = "float32"', 'dtype = "auto"'))
    (grid,) = sweeping.load_grids(fake, [str(tmp_path / "auto.toml")])
    assert {planned.dtype for planned in grid.cells} == {"float32"}, (
        "that of the cells that can be read"
    )
    assert fake_fill(fake, grids).before == 4
    assert file.read_text() == before


def with_record(batch, of_model=(), **changes):
    """A batch whose record, or whose model's card, says something else."""
    card = batch.record.model.model_copy(update=dict(of_model))
    return replace(batch, record=batch.record.model_copy(update={"model": card, **changes}))


OTHERWISE = {
    "threads was 1 and is 7": {"threads": 7},
    "and is 1.0": {"versions": {"torch": "1.0"}},
    f"processor was {processor_kind()} and is another": {"processor": "another"},
    "and is 9.9": {"lapa2_interp": "9.9"},
    "and is all": {"of_model": {"prepacking": "all"}},
}


class Otherwise(FakeWorker):
    """Makes batches of a cell whose records say something else."""

    def __init__(self, key, facts):
        super().__init__()
        self.key, self.facts = key, facts

    def outcome(self, cell, number):
        batch = super().outcome(cell, number)
        return with_record(batch, **self.facts) if cell.key == self.key else batch


def test_batches_that_were_made_otherwise_are_made_again(grids, tmp_path, cell):
    """Each change counts alone; here a sweep meets all of them at once."""
    half_done(tmp_path / "run", grids, 1)
    batch = batch_of(cell, 0)
    for change, facts in OTHERWISE.items():
        assert change in batch.record.changes(with_record(batch, **facts).record)
    every = {name: value for facts in OTHERWISE.values() for name, value in facts.items()}
    notes, worker = [], Otherwise(cell.key, every)
    fake_fill(tmp_path / "run", grids, worker, notes.append)
    assert (cell.key, 0) in worker.made
    (note,) = notes
    assert f"({cell.key}): 1 finished batch made again; " in note
    assert all(change in note for change in OTHERWISE)
    run = load_run(tmp_path / "run")
    first, *others = run.records(cell.key)
    assert not any(first.changes(record) for record in others), "no cell is of two kinds"
    assert len(run.finished) == 4


def test_another_commit_alone_makes_nothing_again(grids, tmp_path, cell):
    half_done(tmp_path / "run", grids, 1)
    worker = Otherwise(cell.key, {"commit": "another"})
    assert fake_fill(tmp_path / "run", grids, worker).made == 4
    assert (cell.key, 0) not in worker.made


def test_the_first_batch_of_a_sweep_says_how_the_others_of_its_cell_are_made(cell, tmp_path):
    class Packing(Serial):
        def submit(self, cell, number, packing, progress):
            packings.append(packing)
            return super().submit(cell, number, packing, progress)

    packings, worker = [], Otherwise(cell.key, {"of_model": {"prepacking": "all"}})
    only = [Grid("one", "", (cell,))]
    fill_run(tmp_path / "run", only, Packing(worker), pytest.fail)
    assert packings == [None, "all"]


def test_what_is_beside_the_batches_of_a_cell_stays_and_is_no_batch(fake, grids, cell):
    """What a kill left, a copy by a file manager, and what other commands write."""
    own = fake / "cells" / cell.key
    old = Failure(when="2026-01-01T00:00:00Z", traceback="ValueError: old")
    write_text(own / "failed.json", old.model_dump_json())
    shutil.copy(own / "000.json", own / "000 (copy).json")
    with temporary_folder(fake) as scores:  # as `lapa2 score RUN --out RUN/scores` does
        assert load_run(fake).failures == {}
        assert fake_fill(fake, grids).before == 4
        assert scores.is_dir()
    assert (own / "000 (copy).json").exists()
    shutil.copy(own / "000.parquet", own / "009.parquet")
    text = (own / "000.json").read_text()
    (own / "009.json").write_text(text.replace('"000.', '"009.'))
    assert fake_fill(fake, grids).before == 4
    assert not (own / "009.json").exists(), "a number that the cell does not have"
    assert len(load_run(fake).finished) == 4


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (OSError(errno.EIO, "Input/output error"), "store._record"),
        (OSError(errno.EIO, "Input/output error"), "store.sha256_of"),
        (OSError(errno.EIO, "Input/output error"), "store.read_text"),
        (MemoryError("Unable to allocate 9 GiB"), "store.pd.read_parquet"),
    ],
)
def test_a_disk_that_fails_or_too_little_memory_is_no_damage(fake, monkeypatch, error, where):
    """The cell may be sound: it is not made again."""

    def fails(*_, **__):
        raise error

    before = contents(fake)
    monkeypatch.setattr(f"lapa2_interp.runs.{where}", fails)
    with pytest.raises(type(error), match=str(error.args[-1])):
        load_run(fake).texts()
    assert contents(fake) == before


# --- reading


def test_generate_gives_what_a_sweep_writes(undisturbed, tmp_path):
    swept, model = load_run(undisturbed), load("tiny-gpt2")
    made = make_cells(model, list(swept.by_key.values())).save(tmp_path / "made")
    assert_equal_runs(made.folder, swept.folder)
    for key in swept.by_key:
        for ours, theirs in zip(made.records(key), swept.records(key), strict=True):
            assert not ours.changes(theirs)
    asked = {"attribute": "positive", "prompts": ["The book"], "length": 14, "dtype": "float32"}
    alone = generate("tiny-gpt2", **asked).save(tmp_path / "alone")
    grid = Grid("mine", "", tuple(alone.by_key.values()))
    fill_run(tmp_path / "swept", [grid], InProcess("cpu"), pytest.fail)
    assert_equal_runs(tmp_path / "swept", alone.folder)


def test_reading_is_tidy_and_generates_nothing(undisturbed, monkeypatch):
    def never(*_, **__):
        raise AssertionError("a reader loads no model")

    loads = [f"models.load.load_{kind}" for kind in ("model", "transformers", "tokenizer")]
    for name in (*loads, "generation.loop.decode_batch", "generation.plan.plan_batches"):
        monkeypatch.setattr(f"lapa2_interp.{name}", never)
    run = load_run(undisturbed)
    texts, cells = run.texts(), run.cells
    assert len(texts) == 3 * 6 + 3
    assert not texts.duplicated(["cell", "prompt", "sample"]).any()
    sizes = texts.groupby("cell", sort=False).size().to_dict()
    assert sizes == {key: 3 * cell.samples for key, cell in run.by_key.items()}
    # A byte is a token.
    assert (texts["n_tokens"] + texts["prompt"].str.len()).tolist() == [18] * 21
    assert list(cells["key"]) == list(run.by_key)
    assert cells["grids"].tolist().count("one, two") == 1
    tokens = cells.set_index("key")["tokens"].to_dict()
    assert tokens == texts.groupby("cell")["n_tokens"].sum().to_dict()
    assert (cells["seconds"] > 0).all()
    row = cells[cells["layers"] == "top"].iloc[0]
    named = {
        "model": "tiny-gpt2", "dtype": "float32", "task": "sentiment", "attribute": "positive",
        "method": "prefix", "alpha": 0.5, "law": "log", "profile": "paper", "max_length": 18,
        "samples": 2, "seed": 1, "why": "",
    }  # fmt: skip
    assert row[list(named)].to_dict() == named
    assert isinstance(run.trace(cells["key"].iloc[-1]), xr.Dataset)
    assert run.trace(row["key"]) is None
    own = texts[texts["cell"] == row["key"]].reset_index(drop=True)
    pd.testing.assert_frame_equal(run.texts([row["key"]]), own)
    chosen = run.select(method="prefix", arm=["baseline", row["arm"]], task="sentiment")
    arms = ("baseline", row["arm"])
    assert list(chosen.by_key) == [key for key, cell in run.by_key.items() if cell.arm in arms]


def test_states_of_cells_are_listed(grids, tmp_path, capsys):
    half_done(tmp_path / "run", grids, 3)
    run = load_run(tmp_path / "run")
    assert run.cells["state"].tolist() == ["finished", "partly", "missing", "missing"]
    assert set(run.texts()["cell"]) == {run.cells["key"][0]}
    assert lapa2("runs", tmp_path / "run", "--json", "--state", "missing") == 0
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == ["missing"] * 2
    assert lapa2("runs", tmp_path / "run") == 0
    assert "one: 1 finished, 1 partly\ntwo: 1 finished, 2 missing\n" in capsys.readouterr().out


def test_a_manifest_says_what_made_the_cell(undisturbed):
    run = load_run(undisturbed)
    for key, cell in run.by_key.items():
        manifest = run.manifest(key)
        assert (manifest.cell, manifest.cell.key) == (cell, key)
        assert cell.prompts == ("Once upon a time", "The book", "The chicken")
        assert (manifest.model.name, manifest.model.weights) == ("tiny-gpt2", "random, seed 0")
        assert (manifest.model.dtype, manifest.model.device, manifest.threads) == (
            "float32",
            "cpu",
            1,
        )
        assert manifest.versions["torch"] == importlib.metadata.version("torch")
        assert manifest.new_tokens == run.texts([key])["n_tokens"].sum()
        assert manifest.seconds > 0
        assert (
            manifest.branches["prefix" if cell.method == "prefix" else "target"] == "Very positive:"
        )


@pytest.mark.parametrize("form", [Manifest, BatchRecord, Listing, Failure])
def test_every_field_of_a_stored_file_is_documented(form):
    assert [name for name, field in form.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_every_class_of_model_and_every_option_reaches_the_worker(tmp_path, model_class):
    text = HEAD.replace("prompts = 3", "prompts = 1").replace("samples = 2", "samples = 1")
    text = text.replace('"float32"', '"float64"')
    text += f'model_class = "{model_class}"\neos = "stop"\ntop_k = 5\nseed = 3\n'
    grid, (cell,) = grid_of(tmp_path, text + 'method = "prefix"\n')
    assert fill_run(tmp_path / "run", [grid], InProcess("cpu"), pytest.fail).made == 1
    finished = finished_cell(load_run(tmp_path / "run"), cell.key)
    assert finished.trace is None
    card = load_run(tmp_path / "run").manifest().model
    assert (card.model_class, card.dtype) == (model_class, "float64")
    alone = decode(
        load("tiny-gpt2", "float64", model_class), cell.decoding_method, cell.task, "positive",
        cell.task.prompts.texts, length=18, seed=3, top_k=5, eos="stop", trace="none",
    )  # fmt: skip
    assert finished.texts["text"].tolist() == alone.texts["text"].tolist()


# --- a grid that has changed


EARLIER = "2 cells of an earlier grid are in "


@pytest.fixture
def changed(fake, tmp_path):
    """A run whose grid two has lost two of its cells since: the folder, and the grids now."""
    grid, _ = grid_of(tmp_path, ONE)
    return fake, [replace(grid, name="one"), replace(grid, name="two")]


def test_a_sweep_names_what_an_earlier_grid_has_left(changed, grids):
    run, fewer = changed
    for _ in range(2):  # every time, not only when the grid has changed
        notes = []
        done = fake_fill(run, fewer, notify=notes.append)
        assert (done.before, done.made) == (2, 0)
        (line,) = notes
        assert line.startswith(f"{EARLIER}{run} too, and in no table or report: tiny-gpt2 sent")
        assert line.endswith("lists them, and with --remove-earlier removes them")
    assert len(load_run(run).by_key) == 2
    assert fake_fill(run, grids).before == 4, "with the grid as it was"


def test_cells_of_an_earlier_grid_are_listed_read_and_removed_when_asked_for(changed, capsys):
    run, fewer = changed
    fake_fill(run, fewer, notify=lambda line: None)
    now, every = load_run(run), load_run(run, earlier=True)
    old = [key for key in every.by_key if key not in now.by_key]
    assert every.cells["grids"].tolist() == ["one, two"] * 2 + [""] * 2
    assert len(every.texts(old)) == sum(every.by_key[key].n_texts for key in old)
    assert lapa2("runs", run) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].startswith("earlier grids (in no table or report; --remove-earlier removes")
    assert printed[2].endswith("): 2 finished")
    assert [line[:16] for line in printed[-2:]] == old
    assert all(", of an earlier grid  " in line for line in printed[-2:])
    assert lapa2("runs", run, "--json --remove-earlier") == 2
    assert set(old) < {folder.name for folder in (run / "cells").iterdir()}, "not asked for"
    assert lapa2("runs", run, "--remove-earlier") == 0
    assert "2 cells of earlier grids removed" in capsys.readouterr().out
    assert {folder.name for folder in (run / "cells").iterdir()} == set(now.by_key)
    assert load_run(run, earlier=True).cells.equals(now.cells)
    fake_fill(run, fewer)


def test_what_another_sweep_makes_and_links_are_not_removed(changed, tmp_path):
    run, fewer = changed
    fake_fill(run, fewer, notify=lambda line: None)
    busy, idle = (
        key for key in load_run(run, earlier=True).by_key if key not in load_run(run).by_key
    )
    (tmp_path / "precious").mkdir()
    (run / "cells" / ("0" * 16)).symlink_to(tmp_path / "precious")
    notes = []
    with acquire_lock(run / "cells" / busy / filling.LOCK):
        assert remove_earlier_cells(run, notes.append) == [idle]
    assert notes == [f"{busy} is being made by another sweep, and stays"]
    assert (run / "cells" / ("0" * 16)).is_symlink()
    assert (run / "cells" / busy / "000.json").exists()
