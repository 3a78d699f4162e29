"""Files and folders of somebody else: nothing in them names a path, leads out by a link, or runs."""

import json
import os
import shutil
import sys

import pytest

from lapa2_interp import generate, load_run
from lapa2_interp.cli.app import main
from lapa2_interp.errors import (
    Lapa2Error,
    MethodError,
    RunError,
    TaskError,
)
from lapa2_interp.files import (
    HOST,
    TEMPORARY_PREFIX,
    atomic_folder,
    remove_abandoned,
    remove_path,
)
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.registry import get_for_task, load_task
from lapa2_interp.report import view
from lapa2_interp.runs.engines import InProcess
from lapa2_interp.runs.fill import fill_run
from lapa2_interp.runs.generate import make_cells
from lapa2_interp.runs.grid import Grid, load_grid
from lapa2_interp.runs.store import FinishedBatch
from lapa2_interp.runs.sweep import sweep
from lapa2_interp.runs.texts import read_texts
from lapa2_interp.runs.worker import Worker
from lapa2_interp.tasks.prompts import read_prompts

TASK = """
[attributes.calm]
prefix = "Very calm:"
[attributes.angry]
prefix = "Very angry:"
[prompts]
texts = ["The lake"]
"""
GRID = """
model = "tiny-gpt2"
trace = "pooled"
augmentation = "none"
dtype = "float32"
task = "sentiment"
attribute = "positive"
prompts = 1
samples = 1
length = 20
"""
METHOD = """
from dataclasses import dataclass
from typing import ClassVar
from pathlib import Path
from lapa2_interp.methods import Branch, Method
Path(__file__).with_name("ran").touch()

@dataclass(frozen=True)
class Own(Method):
    name: ClassVar[str] = "{module}:Own"
    paper_name: ClassVar[str] = "own"
    equation: ClassVar[str] = "the model behind the prefix"
    alpha: ClassVar[float] = 0.5

    def branches(self, task, attribute):
        return (Branch("prefix", task.prefix(attribute)),)

    def combine(self, log_probs, state):
        return log_probs["prefix"]
"""


@pytest.fixture
def code(tmp_path, monkeypatch, request):
    """A module beside the data, which tells that it ran by a file `ran`; its name and its folder."""
    name = f"own_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(METHOD.replace("{module}", name))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def precious(tmp_path):
    """A folder of somebody's work, which stays as it is."""
    folder = tmp_path / "precious"
    (folder / "deep").mkdir(parents=True)
    for name in ("thesis.tex", "deep/data.csv"):
        (folder / name).write_text("years of work")
    yield folder
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == [
        "deep", "deep/data.csv", "thesis.tex",
    ]  # fmt: skip
    assert {path.read_text() for path in folder.rglob("*") if path.is_file()} == {"years of work"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of one cell."""
    cell = cell_of(
        "tiny-gpt2", attribute="positive", prompts=["The lake"], length=20, dtype="float32"
    )
    folder = tmp_path_factory.mktemp("made") / "run"
    fill_run(folder, [Grid("one", "", (cell,))], InProcess("cpu"))
    return folder


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def again(run):
    cells = tuple(load_run(run).by_key.values())
    return fill_run(run, [Grid("one", "", cells)], InProcess("cpu"))


# --- paths


@pytest.mark.parametrize("key", ["../../x", "0" * 16 + "\n"])
def test_commands_take_no_key_as_a_path(run, key, capsys):
    raw = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(raw | {"grids": {"one": [key]}}))
    for words in (["runs", run], ["trace", run], ["view", run], ["report", run]):
        assert main(list(map(str, words))) == 2
        assert capsys.readouterr().err.count("\n") == 1


# --- links


def test_a_link_that_looks_unfinished_is_unlinked_and_not_followed(tmp_path, precious):
    for name in ("x", "y"):
        (tmp_path / f"{TEMPORARY_PREFIX}{name}").symlink_to(precious)
    (tmp_path / f"{TEMPORARY_PREFIX}z").symlink_to(tmp_path / "nowhere")
    remove_abandoned(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_planted_temporary_folder_moves_nothing_and_loses_nothing(tmp_path, precious):
    """With the name of a dead process it is removed, and links in it are not followed; with another
    name it stays."""
    home = tmp_path / "home"
    left = home / f"{TEMPORARY_PREFIX}{HOST}-{10**9 - 1}-abcdefgh"
    alive = home / f"{TEMPORARY_PREFIX}x"
    for temporary in (left, alive):
        temporary.mkdir(parents=True)
        for name in ("link", "new", "before"):
            (temporary / name).symlink_to(precious)
    with atomic_folder(home / "mine"):
        pass
    assert sorted(path.name for path in home.iterdir()) == [alive.name, "mine"]
    assert len(list(alive.iterdir())) == 3


def test_links_in_a_run_are_unlinked_by_the_sweep_that_goes_on(run, precious, tmp_path):
    key = next(iter(load_run(run).by_key))
    cell_folder = run / "cells" / key
    before = (cell_folder / "000.parquet").read_bytes()
    (cell_folder / "000.json").unlink()
    (cell_folder / "000.parquet").unlink()
    links = [run / f"{TEMPORARY_PREFIX}x", cell_folder / f"{TEMPORARY_PREFIX}y", cell_folder / "000.parquet", cell_folder / "001.nc"]  # fmt: skip
    for link in links:
        link.symlink_to(precious)
    assert again(run).made == 1
    assert not any(link.is_symlink() for link in links)
    assert (cell_folder / "000.parquet").read_bytes() == before


@pytest.mark.parametrize("name", ["cells", "cells/KEY"])
def test_a_linked_folder_of_a_run_is_refused(run, name, tmp_path):
    cells = tuple(load_run(run).by_key.values())
    linked = run / name.replace("KEY", cells[0].key)
    linked.rename(tmp_path / "moved")
    for record in (tmp_path / "moved").rglob("000.json"):
        record.unlink()
    (tmp_path / "moved" / f"{TEMPORARY_PREFIX}mine").mkdir()
    linked.symlink_to(tmp_path / "moved")
    before = sorted((tmp_path / "moved").rglob("*"))
    with pytest.raises(RunError, match=f"{linked.name} is a link, which is not followed"):
        fill_run(run, [Grid("one", "", cells)], InProcess("cpu"))
    assert sorted((tmp_path / "moved").rglob("*")) == before


def test_a_linked_lock_keeps_what_it_points_to(run, precious):
    (run / ".lock").unlink(missing_ok=True)
    (run / ".lock").symlink_to(precious / "thesis.tex")
    with pytest.raises(RunError, match="cannot write"):
        again(run)


def test_a_folder_is_removed_and_its_links_are_not_followed(tmp_path, precious):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    for name in ("link", "deep/link"):
        (folder / name).symlink_to(precious)
    remove_path(folder / "link")
    remove_path(folder)
    remove_path(folder)
    assert not folder.exists()


def test_a_page_replaces_a_link_and_not_what_it_points_to(run, precious):
    (run / "report.html").symlink_to(precious / "thesis.tex")
    assert main(["report", str(run)]) == 0
    assert not (run / "report.html").is_symlink()


def test_force_replaces_a_run_with_a_link_and_keeps_what_it_points_to(run, precious, tmp_path):
    (run / "cells" / "x").symlink_to(precious)
    load_run(run).save(tmp_path / "copy")
    load_run(tmp_path / "copy").save(run, force=True)
    assert load_run(run).cells["state"].tolist() == ["finished"]


# --- code


def test_a_task_file_imports_no_code_that_it_names(tmp_path, code):
    file = tmp_path / "mine.toml"
    file.write_text(f'{TASK}\n[methods."{code}:Own"]\nparameters = {{}}\n')
    assert load_task(str(file)).attributes
    assert not (tmp_path / "ran").exists()
    assert get_for_task(f"{code}:Own", load_task(str(file))).alpha == 0.5, "named in the call"
    assert (tmp_path / "ran").exists()


def test_a_text_for_a_method_of_ones_own_is_checked_when_it_is_used(tmp_path, code):
    file = tmp_path / "mine.toml"
    text = f'{TASK}\n[methods."{code}:Own".texts.calm]\nprefx = "misspelt"\n'
    file.write_text(text)
    module = tmp_path / f"{code}.py"
    module.write_text(
        module.read_text().replace("alpha:", 'text_names: ClassVar = ("prefix",)\n    alpha:')
    )
    task = load_task(str(file))
    with pytest.raises(TaskError, match="did you mean 'prefix'"):
        get_for_task(f"{code}:Own", task)


def test_a_grid_imports_code_only_where_it_is_allowed(tmp_path, code, capsys, monkeypatch):
    grid = tmp_path / "grid.toml"
    grid.write_text(f'{GRID}method = "{code}:Own"\n')
    for act in (load_grid, lambda name: sweep([name], tmp_path / "run", workers=1)):
        with pytest.raises(Lapa2Error, match=f"{code}:Own' is code .*import {code} first, or give"):
            act(str(grid))
    for words in ("grids", "sweep"):
        out = ["--out", str(tmp_path / "run")] if words == "sweep" else []
        assert main([words, str(grid), *out]) == 2
        assert "give --allow-code" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert main(["sweep", str(grid), "--allow-code", "--workers", "1", "--device", "cpu", "--out", str(tmp_path / "run")]) == 0  # fmt: skip
    assert load_run(tmp_path / "run").cells["state"].tolist() == ["finished"]
    assert (tmp_path / "ran").exists()


def test_what_the_user_has_imported_may_be_named_in_a_file(tmp_path, code):
    __import__(code)
    grid = tmp_path / "grid.toml"
    grid.write_text(f'{GRID}method = "{code}:Own"\n')
    (cell,) = load_grid(str(grid)).cells
    assert cell.decoding_method.alpha == 0.5


def test_consent_reaches_the_workers(tmp_path, code):
    """Whoever sweeps has allowed the cell's code, and a worker on another machine imports it."""
    grid = tmp_path / "grid.toml"
    grid.write_text(f'{GRID}method = "{code}:Own"\n')
    (cell,) = load_grid(str(grid), allow_code=True).cells
    text = cell.model_dump_json()
    sys.modules.pop(code)
    outcome = Worker("cpu").try_batch(Cell.model_validate_json(text), 0)
    assert isinstance(outcome, FinishedBatch), outcome


def test_reading_a_run_imports_no_code_that_it_names(tmp_path, code, capsys):
    """Also a view, which needs the method and asks for it."""
    own = generate("tiny-gpt2", method=f"{code}:Own", attribute="positive", prompts=["The lake"], length=20, alpha=0.5)  # fmt: skip
    own.save(tmp_path / "run")
    (text,) = (file.read_text() for file in tmp_path.glob("run/cells/*/cell.json"))
    sys.modules.pop(code)
    (tmp_path / "ran").unlink()
    folder = str(tmp_path / "run")
    scored = ["score", "--scorers", "distinct", "--out", str(tmp_path / "scores")]
    for words in (["runs"], ["trace"], ["report"], scored):
        assert main([words[0], folder, *words[1:]]) == 0, capsys.readouterr().err
    cell = Cell.model_validate_json(text)
    for act in (lambda: view(folder), lambda: cell.decoding_method, lambda: cell.branches, lambda: make_cells("tiny-gpt2", [cell])):  # fmt: skip
        with pytest.raises(MethodError, match=f"{code}:Own' is code that is not loaded"):
            act()
    assert main(["view", folder]) == 2
    assert not (tmp_path / "ran").exists()
    assert main(["view", folder, "--allow-code"]) == 0
    assert (tmp_path / "ran").exists()


# --- readers


@pytest.mark.parametrize("name", ["000.parquet", "000.nc", "000.json"])
def test_at_a_pipe_in_the_place_of_a_result_nobody_waits(run, name, capsys):
    (folder,) = (run / "cells").iterdir()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    for words in (["score", "--scorers", "distinct"], ["trace"], ["report"], ["view"]):
        main([words[0], str(run), *words[1:]])
        assert capsys.readouterr().err.count("\n") <= 1


def test_a_byte_order_mark_is_dropped_wherever_text_is_read(tmp_path):
    mark = "\N{ZERO WIDTH NO-BREAK SPACE}"
    for name, text, read in (
        ("t.toml", TASK, lambda file: load_task(str(file)).attributes["calm"].prefix),
        ("g.toml", f'{GRID}method = "prefix"', lambda file: load_grid(str(file)).cells[0].key),
        ("p.txt", "The lake\nThe sea", read_prompts),
        ("p.jsonl", '{"prompt": "The lake"}', read_prompts),
        ("p.csv", "prompt,n\nThe lake,1", read_prompts),
        ("s.jsonl", '{"text": "a b"}', lambda file: read_texts(file)[0][0]["text"].tolist()),
        ("s.csv", "text,n\na b,1", lambda file: read_texts(file)[0][0]["text"].tolist()),
    ):
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        plain = read(file)
        file.write_text(mark + text, encoding="utf-8")
        assert read(file) == plain, name


def test_prompts_of_a_table_are_its_column(tmp_path):
    file = tmp_path / "p.csv"
    file.write_text('id,prompt\n1,"The lake, at dawn"\n\n2,The sea\n')
    assert read_prompts(file) == ("The lake, at dawn", "The sea")


# --- beyond reason


def test_work_beyond_reason_asks_first(tmp_path, capsys):
    many = ["--model", "tiny-gpt2", "--attribute", "positive", "--prompt", "The lake", "--length", "20", "--device", "cpu"]  # fmt: skip
    assert main(["generate", *many, "--samples", str(10**12), "--out", str(tmp_path / "run")]) == 2
    assert "give --yes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
