"""Files and folders of somebody else: nothing in them names a path, leads out by a link, or runs."""

import json
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
from conftest import change_texts, load

from lapa2_interp import generate, load_run
from lapa2_interp._util.errors import (
    DamagedError,
    Lapa2Error,
    MethodError,
    RunError,
    ScoringError,
    TaskError,
)
from lapa2_interp._util.files import (
    HOST,
    TEMPORARY_PREFIX,
    atomic_folder,
    remove_abandoned,
    remove_path,
    sha256_of,
)
from lapa2_interp._util.parsing import parse_json, parse_toml, read_text
from lapa2_interp.cli.app import main
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.registry import get_for_task, load_task
from lapa2_interp.report import view
from lapa2_interp.runs.engines import InProcess
from lapa2_interp.runs.fill import fill_run
from lapa2_interp.runs.generate import make_cells
from lapa2_interp.runs.grid import Grid, load_grid
from lapa2_interp.runs.run import finished_cell
from lapa2_interp.runs.store import FinishedBatch
from lapa2_interp.runs.sweep import sweep
from lapa2_interp.runs.texts import read_texts
from lapa2_interp.runs.worker import Worker
from lapa2_interp.scoring.scorer import ScoreCache
from lapa2_interp.tasks.corpora import read_corpus
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


@pytest.mark.parametrize("key", ["../../x", "/home/me/project/package", "A" * 16, "0" * 15, "x" * 16, "0" * 16 + "\n"])  # fmt: skip
def test_a_key_is_sixteen_hexadecimal_digits_and_never_a_path(run, key, capsys):
    raw = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(raw | {"grids": {"one": [key]}}))
    with pytest.raises(DamagedError, match="run.json is damaged or of another version: grids"):
        load_run(run)
    for words in (["runs", run], ["trace", run], ["view", run], ["report", run]):
        assert main(list(map(str, words))) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".hidden", "a\\\\b", ""])
def test_names_of_tasks_and_attributes_are_no_paths(tmp_path, name, run):
    file = tmp_path / "mine.toml"
    for text in (
        f'name = "{name}"\n{TASK}',
        TASK.replace("attributes.calm", f'attributes."{name}"'),
    ):
        file.write_text(text)
        with pytest.raises(TaskError, match="name has letters and no NUL, slash or backslash"):
            load_task(str(file))
    (cell,) = run.glob("cells/*/cell.json")
    raw = json.loads(cell.read_text())
    raw["task"]["name"] = name.replace("\\\\", "\\")
    cell.write_text(json.dumps(raw))
    with pytest.raises(DamagedError, match="a task's name"):
        load_run(run)


@pytest.mark.parametrize("name", ["ca\\nlm", "\\u001b[31mred", "a\\u202Eb", " calm", "x" * 201])
def test_names_of_attributes_are_one_line(tmp_path, name):
    """Tables and pages show them."""
    (tmp_path / "mine.toml").write_text(TASK.replace("attributes.calm", f'attributes."{name}"'))
    with pytest.raises(TaskError, match="an attribute's name is one line of at most 200"):
        load_task(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize("name", ["sentiment", "topic", "detox"])
def test_a_task_file_cannot_pose_as_a_built_in(tmp_path, name):
    mine, theirs = tmp_path / "mine.toml", tmp_path / f"{name}.toml"
    mine.write_text(f'name = "{name}"\n{TASK}')
    theirs.write_text(TASK)
    for file in (mine, theirs):
        with pytest.raises(TaskError, match=f"'{name}' is a task of the package"):
            load_task(str(file))
    assert load_task(name).attributes != {}


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


def test_linked_scores_are_refused(tmp_path, precious):
    (tmp_path / "scores.sqlite").symlink_to(precious / "thesis.tex")
    with pytest.raises(ScoringError, match="scores.sqlite is a link"):
        ScoreCache(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "scores.sqlite").unlink()
    (tmp_path / "pipe").rename(tmp_path / "scores.sqlite")
    with pytest.raises(ScoringError, match="is a pipe"):
        ScoreCache(tmp_path)


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


@pytest.mark.parametrize("name", ["os:system", "json:JSONDecoder", "lapa2_interp._util.files:Path", ":x", "x:", "sys:modules.os"])  # fmt: skip
def test_a_name_that_is_no_method_is_refused(tmp_path, name):
    grid = tmp_path / "grid.toml"
    grid.write_text(f'{GRID}method = "{name}"\n')
    for allow in (False, True):
        with pytest.raises(Lapa2Error, match="grid .*block 1: "):
            load_grid(str(grid), allow_code=allow)


# --- readers


def pipe(path):
    os.mkfifo(path)


def folder(path):
    path.mkdir()


def listener(path):
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket may not be long
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


@pytest.mark.parametrize("make", [pipe, folder, listener])
def test_what_is_no_file_is_one_line_and_nobody_waits(tmp_path, make, run, capsys):
    key = next(iter(load_run(run).by_key))
    (run / "cells" / key / "cell.json").unlink()
    make(run / "cells" / key / "cell.json")
    with pytest.raises(DamagedError, match=r"is a folder|is a pipe"):
        load_run(run)
    for name, read in {
        "p.txt": read_prompts,
        "p.csv": read_prompts,
        "p.jsonl": read_prompts,
        "t.toml": lambda file: load_task(str(file)),
        "g.toml": lambda file: load_grid(str(file)),
        "c.jsonl": lambda file: read_corpus(str(file), ["a"]),
        "s.jsonl": read_texts,
    }.items():
        make(tmp_path / name)
        with pytest.raises(Lapa2Error) as error:
            read(tmp_path / name)
        assert "\n" not in str(error.value)
    with pytest.raises((ValueError, OSError)):
        sha256_of(tmp_path / "p.txt")


@pytest.mark.parametrize("name", ["000.parquet", "000.nc", "000.json"])
def test_a_pipe_in_the_place_of_a_result_is_damage(run, name, capsys):
    (folder,) = (run / "cells").iterdir()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(RunError, match="damaged"):
        finished_cell(load_run(run))
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[" * 150 + "]" * 150, "nested too deeply"),
        ('{"a":' * 150 + "1" + "}" * 150, "nested too deeply"),
        ('{"a": ' + "9" * 5_000 + "}", "a whole number of thousands of digits"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "has the field 'c' twice"),
        ('{"a": "\x00"}', "control character"),
        ("", "Expecting value"),
    ],
)
def test_json_that_no_program_should_have_written(text, message, run):
    with pytest.raises(ValueError, match=message):
        parse_json(text)
    for file in (run / "run.json", *run.glob("cells/*/cell.json")):
        data = file.read_bytes()
        file.write_text(text, "utf-8")
        with pytest.raises(DamagedError) as error:
            load_run(run)
        assert len(str(error.value)) < 600
        assert "\n" not in str(error.value)
        file.write_bytes(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 5_000, "nested too deeply"),
        ("a = " + "[" * 150 + "]" * 150, "nested too deeply"),
        (".".join("a" * 3_000) + " = 1", "nested too deeply"),
        ("a = " + "9" * 5_000, "a whole number of thousands of digits"),
        ("a = 1\na = 2", "overwrite"),
    ],
)
def test_toml_that_no_program_should_have_written(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        parse_toml(text)
    (tmp_path / "x.toml").write_text(text)
    for read in (load_task, load_grid):
        with pytest.raises(Lapa2Error, match=message):
            read(str(tmp_path / "x.toml"))


def test_text_says_where_it_is_none(tmp_path):
    file = tmp_path / "x"
    for raw, message in ((b"a\n\xff", "line 2: the bytes"), (b"a\n\nb\0", "line 3 has a NUL")):
        file.write_bytes(raw)
        with pytest.raises(ValueError, match=message):
            read_text(file)
    with file.open("wb") as opened:
        opened.truncate(2**31)
    with pytest.raises(ValueError, match="has 2147483648 bytes; a text has"):
        read_text(file)


def test_prompts_of_a_table_are_its_column(tmp_path):
    file = tmp_path / "p.csv"
    file.write_text('id,prompt\n1,"The lake, at dawn"\n\n2,The sea\n')
    assert read_prompts(file) == ("The lake, at dawn", "The sea")
    for text, message in (
        ("id,text\n1,The lake\n", "needs one column named prompt; found id, text"),
        ("prompt,prompt\na,b\n", "needs one column named prompt; found prompt, prompt"),
        ("id,prompt\n1\n", "row 1: expected 2 fields and a prompt"),
        ("id,prompt\n1,\n", "row 1: expected 2 fields and a prompt"),
        ("prompt\n", "has no prompts"),
        ("", "is not CSV"),
        ('prompt\n"a\n', "is not CSV"),
    ):
        file.write_text(text)
        with pytest.raises(TaskError, match=message):
            read_prompts(file)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("p.md", r"it is no file of prompts: give a file that ends in \.txt, "),
        ("p.xlsx", "it is no file of prompts"),
        ("prompts", "it is no file of prompts"),
        ("p.csv ", "it is no file of prompts"),
        ("p.tar.gz", "it is no file of prompts"),
        ("p.json", "cannot read prompts from .*p.json: "),
        ("p.json.xz", r"it is not compressed as \.xz says, or damaged"),
        ("p.JSONL.GZ", r"it is not compressed as \.GZ says, or damaged"),
        ("p.txt.zip", r"it is not compressed as \.zip says, or damaged"),
        ("p.txt.bz2", r"it is not compressed as \.bz2 says, or damaged"),
        ("p.tsv", "it needs one column named prompt; found The lake"),
        ("P.PARQUET", "it is not Parquet"),
    ],
)
def test_a_file_of_another_form_is_no_file_of_prompts(tmp_path, name, message):
    (tmp_path / name).write_text("The lake\n")
    with pytest.raises(TaskError, match=message) as error:
        read_prompts(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_parquet_under_another_name_is_no_file_of_prompts(run, tmp_path):
    (folder,) = (run / "cells").iterdir()
    shutil.copy(folder / "000.parquet", tmp_path / "p.txt")
    with pytest.raises(TaskError, match=r"p.txt line \d+"):
        read_prompts(tmp_path / "p.txt")


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_number_is_no_text_to_score(tmp_path, ending):
    import pandas as pd

    file = tmp_path / f"s{ending}"
    if ending == ".jsonl":
        file.write_text('{"text": "a b"}\n{"text": 7}\n')
    else:
        pd.DataFrame({"text": [7, 8]}).to_parquet(file)
    with pytest.raises(ScoringError, match="row [12] has no text in column 'text', found '7'"):
        read_texts(file)


def test_of_two_columns_none_is_taken(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "s.csv").write_text("text,text\na,b\n")
    (tmp_path / "s.jsonl").write_text('{"text": "a", "text": "b"}\n')
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "s.parquet")
    for name in ("s.csv", "s.jsonl", "s.parquet"):
        with pytest.raises(ScoringError, match=r"two columns 'text'|field 'text' twice"):
            read_texts(tmp_path / name)


# --- beyond reason


def test_work_beyond_reason_asks_first(tmp_path, capsys):
    many = ["--model", "tiny-gpt2", "--attribute", "positive", "--prompt", "The lake", "--length", "20", "--device", "cpu"]  # fmt: skip
    assert main(["generate", *many, "--samples", str(10**12), "--out", str(tmp_path / "run")]) == 2
    assert "give --yes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunError, match=r"10{12} texts would take .*yes=True"):
        generate(load("tiny-gpt2"), attribute="positive", prompts=["The lake"], samples=10**12)
    grid = tmp_path / "grid.toml"
    text = GRID.replace("samples = 1", f"samples = {10**12}")
    grid.write_text(f'{text}method = "prefix"')
    with pytest.raises(RunError, match=r"would take .*yes=True"):
        sweep([str(grid)], tmp_path / "run", workers=1, device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_grid_of_many_points_asks_before_it_is_resolved(tmp_path):
    grid = tmp_path / "grid.toml"
    grid.write_text(f"{GRID}seed = {list(range(200_000))}\n")
    with pytest.raises(Lapa2Error, match="block 1: 200000 points, .*--yes"):
        load_grid(str(grid))


def test_samples_without_their_columns_are_damage(run):
    change_texts(run, lambda texts: texts.drop(columns="prompt"))
    with pytest.raises(DamagedError, match="it has no column prompt"):
        load_run(run).texts()
