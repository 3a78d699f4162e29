"""Run folders appear complete or not at all."""

import signal
import subprocess
import sys

import pandas as pd
import pytest
import xarray as xr
from conftest import load

from lapa2_interp import Augmentation, load_task, methods
from lapa2_interp.errors import RunError
from lapa2_interp.runs.generate import run_arms
from lapa2_interp.runs.manifest import OF_THE_DAY, new_folder, read_run, write_run


@pytest.fixture(scope="module")
def run():
    arms = {"baseline": None, "alpha 1": Augmentation(alpha=1, heads=((0, 1),))}
    return run_arms(
        load("tiny-gpt2"), methods.get("prefix"), load_task("sentiment"), ["positive", "negative"], ["The lake", "The sea"],
        arms, length=20, samples=2, seed=4,
    )  # fmt: skip


def test_a_run_reads_back_equal(run, tmp_path):
    with new_folder(tmp_path / "run") as folder:
        write_run(folder, run)
    again = read_run(tmp_path / "run")
    assert again.manifest == run.manifest
    assert again.samples["tokens"].map(list).tolist() == run.samples["tokens"].tolist()
    pd.testing.assert_frame_equal(again.samples.drop(columns="tokens"), run.samples.drop(columns="tokens"))
    assert again.trace.attrs["manifest"] == run.manifest.model_dump_json(indent=1, exclude=set(OF_THE_DAY))
    xr.testing.assert_equal(again.trace, run.trace)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "manifest.json",
        "samples.parquet",
        "trace.nc",
    ]


def test_a_run_holds_every_arm_and_attribute(run):
    counts = run.samples.groupby(["arm", "attribute"]).size()
    assert counts.tolist() == [4, 4, 4, 4]
    assert run.trace.sizes["sample"] == 16
    assert run.manifest.new_tokens == run.samples["n_tokens"].sum()
    assert run.manifest.arms["alpha 1"] == Augmentation(alpha=1, heads=((0, 1),))


def test_the_same_run_twice_is_the_same(run):
    again = run_arms(
        load("tiny-gpt2"), methods.get("prefix"), load_task("sentiment"), ["positive", "negative"], ["The lake", "The sea"],
        run.manifest.arms, length=20, samples=2, seed=4,
    )  # fmt: skip
    assert again.samples.equals(run.samples)
    xr.testing.assert_identical(again.trace, run.trace)


def test_a_failing_block_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "run") as folder:
        (folder / "samples.parquet").write_text("half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_process_leaves_no_run(tmp_path):
    """Killed in the middle, even by SIGKILL, the run's own place stays empty."""
    code = (
        "import os, signal, sys, pathlib\n"
        # A process started in the background of a script ignores SIGINT, and so would its children.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from lapa2_interp.runs.manifest import new_folder\n"
        "with new_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'samples.parquet').write_text('half')\n"
        "    os.kill(os.getpid(), int(sys.argv[2]))\n"
        "    signal.pause()\n"
    )
    for number in (signal.SIGINT, signal.SIGKILL):
        command = [sys.executable, "-c", code, tmp_path / "run", str(int(number))]
        done = subprocess.run(command, stderr=subprocess.PIPE, timeout=120)
        assert done.returncode != 0
        assert not (tmp_path / "run").exists()


def test_a_finished_run_is_replaced_only_by_force(run, tmp_path):
    for force in (False, True):
        with new_folder(tmp_path / "run", force) as folder:
            write_run(folder, run)
            (folder / f"made with force {force}").touch()
    assert (tmp_path / "run" / "made with force True").exists()
    assert not (tmp_path / "run" / "made with force False").exists()
    with pytest.raises(RunError, match="is finished; --force replaces it"), new_folder(tmp_path / "run"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_failed_replacement_keeps_the_old_run(run, tmp_path):
    with new_folder(tmp_path / "run") as folder:
        write_run(folder, run)
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "run", force=True):
        raise ZeroDivisionError
    assert read_run(tmp_path / "run").manifest == run.manifest


def test_a_folder_that_is_no_run_is_never_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    for force in (False, True):
        with pytest.raises(RunError, match="not a folder of this command"), new_folder(tmp_path / "thesis", force):
            pass
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "years of work"


def test_somebody_elses_manifest_protects_its_folder(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text('{"name": "my web app"}')
    with pytest.raises(RunError, match="not a folder of this command"), new_folder(tmp_path / "app", force=True):
        pass
    assert (tmp_path / "app" / "manifest.json").exists()


def test_parents_made_for_a_run_that_fails_are_removed(tmp_path):
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "deep" / "er" / "run"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["samples.parquet", "trace.nc"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_files_are_named(run, tmp_path, name, damage):
    with new_folder(tmp_path / "run") as folder:
        write_run(folder, run)
    file = tmp_path / "run" / name
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(RunError, match=f"{name} is missing or damaged"):
        read_run(tmp_path / "run")


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write .*choose another --out"), new_folder(tmp_path / "file" / "run"):
        pass
    with pytest.raises(RunError, match="not a folder of this command"), new_folder(tmp_path / "file"):
        pass


def test_reading_what_is_no_run(tmp_path):
    with pytest.raises(RunError, match=r"is not a run folder: it has no manifest\.json"):
        read_run(tmp_path)
    (tmp_path / "manifest.json").write_text('{"model": 3}')
    with pytest.raises(RunError, match=r"manifest\.json is not a manifest of this version: created: field required"):
        read_run(tmp_path)
