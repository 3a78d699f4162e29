"""What a machine computes fast is measured, kept for its kind, and decides what dtype "auto" means;
a run keeps its dtype."""

import json

import pytest
import torch

from lapa2_interp import load_model
from lapa2_interp.cli.app import main
from lapa2_interp.errors import GridError
from lapa2_interp.generation.cell import Cell
from lapa2_interp.models import identify, machine
from lapa2_interp.models.machine import (
    faster_dtype,
    processor_kind,
    resolve_dtype,
    slow_dtype_note,
    slowdown,
    store_measurement,
    stored_measurement,
)
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.runs.run import load_run
from lapa2_interp.runs.sweep import load_grids

GRID = """
model = "tiny-gpt2"
augmentation = "none"
dtype = "auto"
task = "sentiment"
prompts = 2
samples = 1
length = 20
method = "prefix"
trace = "none"
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """A cache with nothing in it."""
    monkeypatch.setenv("LAPA2_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def set_speed(dtype="bfloat16", times=1.0):
    """Products in a dtype take so many times as long as in float32."""
    store_measurement("cpu", f"{dtype} / float32", (times,))


@pytest.fixture
def grid(tmp_path):
    file = tmp_path / "g.toml"
    file.write_text(GRID)
    return file


# --- measuring


def test_a_kind_names_the_processor_and_what_restricts_it(monkeypatch):
    for name in machine.ISA_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    plain = processor_kind("cpu")
    assert torch.backends.cpu.get_cpu_capability() in plain
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert processor_kind("cpu") == f"{plain}, ONEDNN_MAX_CPU_ISA=AVX2"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a card, {device}")
    assert processor_kind("cuda:1") == "a card, cuda:1"


def test_numbers_are_kept_for_their_kind_of_machine(monkeypatch, own_cache):
    monkeypatch.delenv("MKL_CBWR", raising=False)
    store_measurement("cpu", "x", (1.23456789, 2.0))
    store_measurement("cpu", "y", (3.0,))
    assert (stored_measurement("cpu", "x"), stored_measurement("cpu", "y")) == (
        (1.235, 2.0),
        (3.0,),
    )
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert stored_measurement("cpu", "x") is None
    store_measurement("cpu", "x", (9.0,))
    monkeypatch.delenv("MKL_CBWR")
    assert stored_measurement("cpu", "x") == (1.235, 2.0)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"kind": 3}', '{"kind": {"x": ["a"]}}'])
def test_a_damaged_file_of_numbers_is_as_none(own_cache, text):
    store_measurement("cpu", "x", (1.0,))
    (own_cache / "machine.json").write_text(text)
    assert stored_measurement("cpu", "x") is None
    store_measurement("cpu", "x", (2.0,))
    assert stored_measurement("cpu", "x") == (2.0,)


def test_numbers_that_cannot_be_are_not_taken(own_cache):
    store_measurement("cpu", "x", (1.0,))
    (own_cache / "machine.json").write_text(
        json.dumps({processor_kind("cpu"): {"x": [0.0, 1.0], "y": [-1.0], "z": [], "w": [1]}})
    )
    assert [stored_measurement("cpu", name) for name in "xyzw"] == [None, None, None, (1.0,)]


def test_slowness_is_timed_once_and_is_that_of_the_products(monkeypatch):
    taken = {"float32": 2.0, "bfloat16": 5.0}
    monkeypatch.setattr(machine, "matmul_seconds", taken.__getitem__)
    machine._time_slowdown.cache_clear()
    assert slowdown("bfloat16") == 2.5
    machine._time_slowdown.cache_clear()
    taken.clear()
    assert slowdown("bfloat16") == 2.5


def test_products_are_really_timed_on_one_thread(monkeypatch):
    before, seen, real = torch.get_num_threads(), [], torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional,
        "linear",
        lambda x, w: seen.append(torch.get_num_threads()) or real(x, w),
    )
    torch.set_num_threads(2)
    try:
        assert 1e-5 < machine.matmul_seconds("float32") < 10
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


def test_a_cache_that_keeps_nothing_does_not_time_again(monkeypatch, tmp_path):
    """Points of one grid would else be of different dtypes where the two are about as fast."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("LAPA2_CACHE", str(tmp_path / "file"))
    machine._time_slowdown.cache_clear()
    taken = iter([5.0, 2.0])
    monkeypatch.setattr(machine, "matmul_seconds", lambda dtype: next(taken))
    assert slowdown("bfloat16") == slowdown("bfloat16") == 2.5
    machine._time_slowdown.cache_clear()


# --- precision


@pytest.mark.parametrize(
    ("times", "dtype"), [(0.5, "bfloat16"), (0.89, "bfloat16"), (0.95, "float32"), (6.0, "float32")]
)
def test_auto_is_bfloat16_only_where_it_is_really_faster(times, dtype):
    set_speed(times=times)
    assert faster_dtype("cpu") == resolve_dtype("auto", "cpu") == dtype
    assert identify(load_model("tiny-gpt2", "auto", "cpu")).dtype == dtype


def test_flags_have_no_say(monkeypatch):
    """They stay as they are where the libraries are told to use less of the processor."""
    set_speed(times=6.0)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert faster_dtype("cpu") == "float32"


@pytest.mark.parametrize(("native", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_on_cuda_bfloat16_has_to_be_native(monkeypatch, native, dtype):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation
    )
    assert faster_dtype("cuda") == faster_dtype("cuda:1") == dtype
    assert faster_dtype("mps") == "float32"


def test_a_dtype_by_name_is_itself():
    assert resolve_dtype("float64") == "float64"


def test_a_named_dtype_that_is_slow_here_is_said_in_one_line():
    set_speed("bfloat16", 5.86)
    set_speed("float16", 1.1)
    assert (
        slow_dtype_note("bfloat16", "cpu")
        == "bfloat16 is slow on this processor: a product takes 5.9 times as long as in float32"
    )
    assert (
        slow_dtype_note("float16", "cpu")
        is slow_dtype_note("float32", "cpu")
        is slow_dtype_note("bfloat16", "cuda")
        is None
    )


def test_generate_says_so_and_does_it(tmp_path, capsys):
    set_speed(times=3.0)
    line = "generate --model tiny-gpt2 --attribute positive --length 20 --prompt"
    options = [*line.split(), "The lake"]
    assert main([*options, "--dtype", "bfloat16", "--out", str(tmp_path / "named")]) == 0
    assert (
        "note: bfloat16 is slow on this processor: a product takes 3.0 times"
        in capsys.readouterr().err
    )
    assert main([*options, "--out", str(tmp_path / "auto")]) == 0
    assert "slow" not in capsys.readouterr().err
    made = [load_run(tmp_path / name).manifest().model.dtype for name in ("named", "auto")]
    assert made == ["bfloat16", "float32"]


# --- grids and runs


@pytest.mark.parametrize("times", [0.5, 3.0])
def test_no_cell_is_of_dtype_auto(grid, times):
    set_speed(times=times)
    cells = load_grid(str(grid)).cells
    assert {cell.dtype for cell in cells} == {faster_dtype()}
    named = load_grid(str(grid), {"dtype": faster_dtype()}).cells
    assert [cell.key for cell in cells] == [cell.key for cell in named], "auto is no part of a key"
    with pytest.raises(ValueError, match="dtype"):
        Cell.model_validate(cells[0].model_dump() | {"dtype": "auto"})


def test_the_quick_grids_leave_the_dtype_to_the_machine_and_the_papers_do_not():
    from lapa2_interp.runs.grid import built_in

    seen = {"quick": set(), "paper": set()}
    for name in built_in():
        load_grid(
            name,
            check=False,
            auto=lambda grid, model, named, name=name: (
                seen[name.partition("/")[0]].add(name) or "float32"
            ),
        )
    assert seen == {
        "quick": {name for name in built_in() if name.startswith("quick/")},
        "paper": set(),
    }


def swept(grid, out, *more):
    return main(["sweep", str(grid), "--out", str(out), "--workers", "1", *more])


def test_a_run_goes_on_in_the_dtype_it_was_begun_in(grid, tmp_path, capsys):
    set_speed(times=0.5)
    out = tmp_path / "run"
    assert swept(grid, out, "--set", "attribute=positive") == 0
    (first,) = load_run(out).by_key
    assert load_run(out).by_key[first].dtype == "bfloat16"
    set_speed(times=3.0)  # another machine
    capsys.readouterr()
    assert swept(grid, out) == 0
    printed = capsys.readouterr()
    assert "1 cell made" in printed.out
    assert ", 1 were there" in printed.out
    assert "note: bfloat16 is slow on this processor" in printed.err
    run = load_run(out)
    assert len(run.finished) == 2
    assert {cell.dtype for cell in run.by_key.values()} == {"bfloat16"}
    assert first in run.by_key
    assert swept(grid, tmp_path / "other") == 0
    assert {cell.dtype for cell in load_run(tmp_path / "other").by_key.values()} == {"float32"}


def test_damaged_settings_do_not_hide_the_dtype_of_the_others(grid, tmp_path):
    set_speed(times=0.5)
    out = tmp_path / "run"
    assert swept(grid, out) == 0
    first = next(iter(load_run(out).by_key))
    (out / "cells" / first / "cell.json").unlink()
    set_speed(times=3.0)
    assert [cell.dtype for cell in load_grids(out, [str(grid)])[0].cells] == [
        "bfloat16",
        "bfloat16",
    ]
    assert swept(grid, out) == 0
    assert len(load_run(out).finished) == 2


def test_a_grid_that_a_run_has_in_two_dtypes_asks_for_one(grid, tmp_path, capsys):
    out = tmp_path / "run"
    assert swept(grid, out, "--set", 'dtype=["float32","bfloat16"]') == 0
    capsys.readouterr()
    assert swept(grid, out) == 2
    assert (
        capsys.readouterr().err
        == f"lapa2: grid {grid}, block 1: {out} has cells of g and tiny-gpt2 in bfloat16 and float32;"
        " say with which to go on: --dtype bfloat16 or --dtype float32\n"
    )
    assert len(load_run(out).by_key) == 4, "nothing was changed"
    assert swept(grid, out, "--dtype", "float32") == 0
    assert ", 2 were there" in capsys.readouterr().out


def test_a_block_that_names_its_dtype_does_not_say_what_auto_is(tmp_path):
    file = tmp_path / "two.toml"
    file.write_text(
        GRID.replace('dtype = "auto"\n', "")
        + '[[block]]\ndtype = "auto"\n[[block]]\ndtype = "float64"\n'
    )
    set_speed(times=0.5)
    assert swept(file, tmp_path / "run") == 0
    set_speed(times=3.0)
    assert swept(file, tmp_path / "run") == 0
    assert {cell.dtype for cell in load_run(tmp_path / "run").by_key.values()} == {
        "bfloat16",
        "float64",
    }
    assert len(load_run(tmp_path / "run").by_key) == 4


def test_a_grid_that_is_new_to_a_run_is_in_the_dtype_of_the_run(grid, tmp_path):
    set_speed(times=0.5)
    assert swept(grid, tmp_path / "run", "--set", "attribute=positive") == 0
    set_speed(times=3.0)
    renamed = grid.rename(tmp_path / "other.toml")
    assert [cell.dtype for cell in load_grids(tmp_path / "run", [str(renamed)])[0].cells] == [
        "bfloat16"
    ] * 2
    assert (
        load_grids(tmp_path / "run", [str(renamed)], dtype="float32")[0].cells[0].dtype == "float32"
    )


def test_another_dtype_than_that_of_the_run_is_refused(grid, tmp_path):
    set_speed(times=0.5)
    with pytest.raises(
        GridError,
        match="in bfloat16, which dtype='float32' would leave behind; leave it out, or sweep into",
    ):
        assert swept(grid, tmp_path / "run") == 0
        load_grids(tmp_path / "run", [str(grid)], dtype="float32")
    assert load_grids(tmp_path / "new", [str(grid)], dtype="float32")[0].cells[0].dtype == "float32"
