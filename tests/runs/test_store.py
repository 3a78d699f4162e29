"""Runs in folders appear complete or not at all, and read back as they were."""

import json
import re
import shutil
from collections import Counter
from dataclasses import replace

import pandas as pd
import pytest
import xarray as xr
from conftest import load, run_of, unpack
from jobs import FakeWorker, Serial, edit, in_batches

from lapa2_interp import Augmentation, generate, load_run
from lapa2_interp.attention.tables import step_table
from lapa2_interp.cli.app import main
from lapa2_interp.errors import DamagedError, RunError
from lapa2_interp.files import result_folder
from lapa2_interp.generation.cell import Cell, _with_slot
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods import load_task
from lapa2_interp.runs import store
from lapa2_interp.runs.engines import InProcess
from lapa2_interp.runs.fill import fill_run, open_run
from lapa2_interp.runs.generate import make_cells
from lapa2_interp.runs.grid import Grid
from lapa2_interp.runs.run import Run, finished_cell, write_run
from lapa2_interp.runs.store import is_run
from lapa2_interp.runs.texts import each_once
from lapa2_interp.tasks.task import Task

ONE_HEAD = Augmentation(alpha=1, heads=((0, 1),))
ASKED = (
    "prefix", load_task("sentiment"), ["positive", "negative"], ["The lake", "The sea"], (None, ONE_HEAD),
)  # fmt: skip


@pytest.fixture(scope="module")
def run():
    return run_of(load("tiny-gpt2"), *ASKED, length=20, samples=2, seed=4)


@pytest.fixture(scope="module")
def one(run):
    return run.select(attribute="positive", arm="baseline")


@pytest.fixture(scope="module")
def stored(run, tmp_path_factory):
    return run.save(tmp_path_factory.mktemp("stored") / "run").folder


@pytest.fixture
def saved(stored, tmp_path):
    """A copy of the run's folder."""
    return load_run(shutil.copytree(stored, tmp_path / "run"))


def same(one, two):
    assert one.texts["tokens"].map(list).tolist() == two.texts["tokens"].map(list).tolist()
    pd.testing.assert_frame_equal(
        one.texts.drop(columns="tokens"), two.texts.drop(columns="tokens")
    )
    xr.testing.assert_equal(one.trace, two.trace)


def test_a_run_reads_back_equal(run, stored):
    again = load_run(stored)
    assert again.by_key == run.by_key
    assert again.finished == run.by_key
    assert run.texts().groupby(["arm", "attribute"]).size().tolist() == [4, 4, 4, 4]
    for key in run.by_key:
        same(finished_cell(again, key), finished_cell(run, key))
        assert again.manifest(key) == run.manifest(key)
        names = {"cell.json", "000.json", "000.parquet", "000.nc"}
        assert {path.name for path in again.cell_folder(key).iterdir()} == names
    assert {path.name for path in stored.iterdir()} == {"cells", "run.json"}


def test_one_cell_is_a_run(run, saved):
    key = next(iter(run.by_key))
    for source in (run, saved):
        alone = source.select(key=key)
        assert list(alone.by_key) == [key]
        same(finished_cell(alone), finished_cell(run, key))
        assert alone.manifest() == run.manifest(key)
        assert alone.texts()["text"].tolist() == run.texts([key])["text"].tolist()


def test_a_run_is_replaced_by_force(one, tmp_path):
    for force in (False, True):
        with result_folder(tmp_path / "run", force, is_run) as folder:
            write_run(folder, one)
            (folder / ("report.html" if force else "view.html")).touch()
    assert (tmp_path / "run" / "report.html").exists()
    assert not (tmp_path / "run" / "view.html").exists()
    for target in (tmp_path / "run", tmp_path / "deep" / "er"):
        with pytest.raises(ZeroDivisionError), result_folder(target, True, is_run) as folder:
            (folder / "run.json").write_text("half")
            raise ZeroDivisionError
    assert load_run(tmp_path / "run").finished == one.by_key
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "run" / "run.json").write_text("{")
    assert one.save(tmp_path / "run", force=True).finished == one.by_key


def test_what_another_process_finished_meanwhile_is_not_replaced(one, tmp_path):
    target = tmp_path / "run"
    with (
        pytest.raises(RunError, match="is finished; force=True replaces it"),
        result_folder(target, False, is_run) as mine,
    ):
        write_run(mine, one)
        one.save(target)
        (target / "notes.txt").write_text("of a user")
    assert (target / "notes.txt").read_text() == "of a user"


def test_an_arm_by_another_name_has_the_trace_of_its_texts(run):
    texts, trace = run.texts(), xr.concat([run.trace(key) for key in run.by_key], "sample")
    named = texts.assign(arm=texts["arm"].map(lambda arm: f"own {arm}"))
    assert len(step_table(trace, named)) == len(step_table(trace, texts))


@pytest.mark.parametrize(
    ("prefix", "attribute", "form"),
    [
        ("Very y:", "y", "Very {attribute}:"),
        ("Positive, very positive:", "positive", "{Attribute}, very {attribute}:"),
        ("a/b and a/bc", "a/b", "{attribute} and a/bc"),
        ("attribute it", "attribute", "{attribute} it"),
    ],
)
def test_the_form_of_a_wording_replaces_whole_words(prefix, attribute, form):
    assert _with_slot(prefix, attribute) == form


def test_texts_without_a_first_token_have_no_attention(run):
    """They are left out, and said."""
    key = next(iter(run.by_key))
    cell = finished_cell(run, key)
    texts, trace = cell.texts.copy(), cell.trace.copy(deep=True)
    texts.loc[0, "n_tokens"] = 0
    for name in trace.data_vars:
        if "step" in trace[name].dims:
            trace[name] = trace[name].where(trace["sample"] != 0)
    batch = replace(run.batches[key][0], texts=texts, trace=trace)
    ended = Run(None, run.listing, {key: run.by_key[key]}, {key: [batch]})
    attention = ended.attention()
    assert (attention.n_untraced, len(attention.kinds[0][0])) == (1, len(texts) - 1)
    assert set(attention.steps()["n"]) == {len(texts) - 1}


def test_reading_takes_a_listing_and_two_small_files_a_cell(saved, monkeypatch):
    opened, real = Counter(), store.read_text
    monkeypatch.setattr(store, "read_text", lambda file: opened.update([file.name]) or real(file))
    for name in ("sha256_of", "read_texts", "read_trace"):
        monkeypatch.setattr(store, name, lambda *_: pytest.fail("a large file is read"))
    store._record.cache_clear()
    assert len(load_run(saved.folder).cells) == 4
    assert opened == {"run.json": 1, "cell.json": 4, "000.json": 4}


def test_generate_makes_a_run_of_one_cell(tmp_path):
    """The one call: names in, a run in memory out; without alpha it is the method's own."""
    asked = {"attribute": "positive", "prompts": ["The lake"], "length": 14, "samples": 2}
    run = generate("tiny-gpt2", method="prefix", task="sentiment", dtype="float32", **asked)
    (cell,) = run.by_key.values()
    assert cell.augmentation == Augmentation(alpha=0.5)
    again = make_cells(load("tiny-gpt2"), [cell])
    assert again.texts().equals(run.texts())
    assert again.manifest().cell == run.manifest().cell == cell
    saved = run.save(tmp_path / "run")
    same(finished_cell(saved), finished_cell(run))
    assert saved.manifest() == run.manifest()
    assert generate(load("tiny-gpt2"), alpha=0, **asked).texts()["arm"].unique() == ["baseline"]


def test_cells_of_generate_and_of_a_sweep_are_read_together(tmp_path):
    """One folder may hold both: their traces have the same coordinates."""
    asked = {"attribute": "positive", "prompts": ["The lake"], "length": 14, "dtype": "float32"}
    generate("tiny-gpt2", **asked).save(tmp_path / "run")
    stronger = cell_of("tiny-gpt2", alpha=1, **asked)
    swept = fill_run(tmp_path / "run", [Grid("more", "", (stronger,))], InProcess("cpu"))
    assert swept.made == 1
    attention = load_run(tmp_path / "run").attention()
    ((texts, trace),) = attention.kinds
    assert trace["arm"].to_numpy().tolist() == texts["arm"].tolist()
    assert len(set(texts["arm"])) == 2


def test_columns_are_chosen_by_number_and_by_text(tmp_path, capsys):
    asked = {"attribute": "positive", "prompts": ["The lake"], "dtype": "float32", "samples": 1}
    cells = [
        cell_of("tiny-gpt2", length=length, alpha=alpha, **asked)
        for length in (14, 18) for alpha in (0.0, 0.5)
    ]  # fmt: skip
    fill_run(tmp_path / "run", [Grid("mine", "", tuple(cells))], InProcess("cpu"))
    run = load_run(tmp_path / "run")
    for wanted in ({"max_length": 14}, {"max_length": "14"}, {"alpha": "0.50"}, {"alpha": 0.5}):
        assert len(run.select(**wanted).by_key) == 2, wanted
    assert len(run.select(alpha=[0, "0.5"]).by_key) == 4
    assert len(run.attention(max_length="14").kinds[0][0]) == 2
    line = ["score", str(tmp_path / "run"), "--scorers", "repetition", "--out"]
    assert main([*line, str(tmp_path / "scores")]) == 0
    table = pd.read_csv(tmp_path / "scores" / "table.csv")
    assert table[["max_length", "n"]].to_numpy().tolist() == [[14, 1], [14, 1], [18, 1], [18, 1]]
    assert main([*line, str(tmp_path / "cut"), "--lengths", "16", "--only", "alpha=0"]) == 0
    assert pd.read_csv(tmp_path / "cut" / "table.csv")[["length", "n"]].to_numpy().tolist() == [
        [16, 1]
    ]
    assert main([*line, str(tmp_path / "some"), "--lengths", "16"]) == 0
    assert "length 16: only of the longer texts, of 14, 18 tokens" in capsys.readouterr().err
    assert main([*line, str(tmp_path / "long"), "--lengths", "20"]) == 2
    assert "the run's texts have 14, 18 tokens; 20 is longer" in capsys.readouterr().err
    assert main([*line, str(tmp_path / "none"), "--lengths", "0"]) == 2
    assert (
        "--lengths: input should be greater than or equal to 1, found 0" in capsys.readouterr().err
    )


def test_of_cells_that_draw_the_same_texts_the_one_with_most_counts(tmp_path):
    def cell(prompts, **changed):
        return cell_of("tiny-gpt2", prompts=prompts, **own, **changed)

    own = {"attribute": "positive", "dtype": "float32"}
    few = cell(["a", "b"], samples=1, length=20)
    cells = [
        few,
        cell(["a", "b", "c"], samples=2, length=20, trace="none"),  # has the texts of the first
        cell(["c", "e"], samples=2, length=20),  # its "c" is the last one's
        cell(["a", "b", "c"], samples=2, length=20, trace="pooled"),
        cell(["d"], samples=1, length=20),
        *(
            cell(["a"], length=20, **change)
            for change in ({"seed": 2}, {"top_k": 50}, {"alpha": 1})
        ),
        cell(["a"], length=21),
    ]
    counted = each_once({planned.key: planned for planned in cells})
    assert counted == [planned.key for planned in cells[3:]]
    assert each_once({few.key: few}) == [few.key]
    assert [planned.variant for planned in cells[5:7]] == ["", "top-k 50"]


def test_files_of_one_task_name_are_told_apart_by_their_texts():
    """By the texts of the method itself; a built-in task's own are not told."""

    def variant(method, **texts):
        wording = {"calm": {"prefix": "Calm:"}, "angry": {"prefix": "Angry:"}}
        methods = {"preadd": {"texts": {"calm": texts}}} if texts else {}
        mood = Task(name="mood", attributes=wording, prompts={"texts": ["a"]}, methods=methods)
        return cell_of("tiny-gpt2", method=method, task=mood, attribute="calm", **own).variant

    own = {"dtype": "float32"}
    assert variant("prefix") == "prefix {Attribute}:"
    assert variant("prefix", prefix="Be angry.") == variant("prefix")
    variants = {variant("preadd", prefix=text) for text in ("Be angry.", "Be cross.")}
    assert len(variants) == 2
    assert all(name.startswith("prefix {Attribute}:, texts ") for name in variants)
    detox = cell_of("tiny-gpt2", method="preadd", task="detox", attribute="nontoxic", **own)
    assert detox.variant == ""


def test_a_copy_of_an_unfinished_run_says_what_is_missing(saved, tmp_path):
    (saved.cell_folder(next(iter(saved.by_key))) / "000.json").unlink()
    copy = load_run(saved.folder).save(tmp_path / "copy")
    assert copy.cells["state"].value_counts().to_dict() == {"finished": 3, "missing": 1}


@pytest.fixture
def batched(tmp_path):
    return in_batches(tmp_path / "run")


def again(run):
    """What a sweep says that makes the run again."""
    notes, grid = [], Grid("one", "", tuple(run.by_key.values()))
    fill_run(run.folder, [grid], Serial(FakeWorker()), notes.append)
    return notes


def texts_of(run):
    return load_run(run.folder).texts()["text"].tolist()


def remove_last(folder):
    """The last batch, so that the others look like all."""
    for file in folder.glob("002.*"):
        file.unlink()
    for number in range(2):
        edit(folder / f"00{number}.json", n_batches=2)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (remove_last, "all batches made again; their records count 4 of 6 texts, in 2 batches"),
        (lambda folder: edit(folder / "000.json", n_batches=2), "count 6 of 6 texts, in 2 and 3 bat"),
        (lambda folder: edit(folder / "001.json", n_texts=3), "count 7 of 6 texts"),
        (lambda folder: edit(folder / "001.json", n_batches=10**12), "batch 1 made again.*it counts"),
        (lambda folder: edit(folder / "001.json", n_batches=0), "batch 1 made again.*n_batches"),
        (lambda folder: edit(folder / "001.json", n_texts=-2), "batch 1 made again.*n_texts"),
        (lambda folder: edit(folder / "001.json", seconds=-1), "batch 1 made again.*seconds"),
        (lambda folder: edit(folder / "001.json", new_tokens=-1), "batch 1 made again.*new_tokens"),
        (lambda folder: edit(folder / "001.json", memory=-1), "batch 1 made again.*memory"),
    ],
)  # fmt: skip
def test_a_count_in_a_record_is_compared_with_the_cells_texts(batched, harm, message):
    ((key, _),) = batched.by_key.items()
    wanted = texts_of(batched)
    harm(batched.cell_folder(key))
    assert batched.state(key) == "damaged"
    with pytest.raises(RunError, match="is damaged"):
        finished_cell(batched, key)
    (said,) = again(batched)
    assert re.search(message, said)
    assert texts_of(batched) == wanted


def test_one_record_with_a_wrong_count_of_batches_is_found_by_the_next_batch(batched):
    ((key, _),) = batched.by_key.items()
    wanted, folder = texts_of(batched), batched.cell_folder(key)
    for file in [*folder.glob("000.*"), *folder.glob("002.*")]:
        file.unlink()
    edit(folder / "001.json", n_batches=5)
    assert "n_batches was 5 and is 3" in "".join(again(batched))
    assert texts_of(batched) == wanted


def test_texts_that_are_not_those_that_were_written_are_damage(batched):
    """Although they can be read: only their sha256 tells."""
    ((key, cell),) = batched.by_key.items()
    folder = batched.cell_folder(key)
    table = pd.read_parquet(folder / "001.parquet")
    table.assign(text=table["text"] + "!").to_parquet(folder / "001.parquet", index=False)
    with pytest.raises(DamagedError, match="its sha256 is not that in 001.json"):
        store.read_texts(folder, 1, cell)


@pytest.mark.parametrize(
    "note", ["blank", "control", "NUL", "no text", "a folder", "a loop", "a file"]
)
def test_a_damaged_note_of_a_failure_is_told_as_one(batched, note):
    ((key, _),) = batched.by_key.items()
    folder = batched.cell_folder(key)
    store.remove_batches(folder)
    file = folder / "failed.json"
    if note == "a folder":
        file.mkdir()
    elif note == "a loop":
        file.symlink_to(file)
    else:
        blank = {
            "when": "2026-01-01T00:00:00Z",
            "traceback": "\x1c" if note == "control" else " \n",
        }
        texts = {"no text": "{", "a file": "[1]", "NUL": "\0"}
        file.write_text(texts.get(note, json.dumps(blank)))
    assert batched.failures[key].reason == f"unknown: {file} is damaged"
    assert main(["runs", str(batched.folder)]) == 0
    assert again(batched) == []
    assert not file.exists()
    assert batched.state(key) == "finished"


def test_the_label_of_a_cell_is_that_of_its_grids_now(tmp_path):
    def cell(label):
        return cell_of("tiny-gpt2", attribute="positive", prompts=["A"], alpha=1.0, label=label, dtype="float32")  # fmt: skip

    def swept(**labels):
        grids = [
            Grid(name, "", tuple(map(cell, own_labels))) for name, own_labels in labels.items()
        ]
        return [stored.label for stored in open_run(tmp_path / "run", grids).by_key.values()]

    assert swept(one=["strong"]) == ["strong"]
    assert swept(one=[""]) == [""]
    assert swept(one=["strong", ""]) == ["strong"]
    assert swept(two=[""]) == ["strong"], "that of another grid"
    assert swept(one=["stronger"], two=[""]) == ["stronger"]
    assert swept(one=[""], two=[""]) == [""]


def test_keys_of_stored_cells_stay(tmp_path):
    """A key made in another way would turn every stored run into an unfinished one."""
    run = unpack("small_run", tmp_path) / "run"
    files = list((run / "cells").glob("*/cell.json"))
    assert len(files) == 135
    for file in files:
        assert Cell.model_validate_json(file.read_text("utf-8")).key == file.parent.name
    assert len(load_run(run).finished) == 135
