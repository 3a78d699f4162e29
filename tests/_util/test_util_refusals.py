"""What the room refuses: a call, and what its one line says."""

import json
import os
import zipfile
from pathlib import Path
from unittest.mock import patch

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_unpacking import pack

from lapa2_interp import Layout, circuits, generate, load_model, methods, steer, teacher_forced
from lapa2_interp._util import unpacking
from lapa2_interp._util.parsing import parse_object
from lapa2_interp._util.same_inputs import check_same_inputs
from lapa2_interp._util.unpacking import check_archive, check_hdf5, check_parquet
from lapa2_interp.errors import (
    CircuitError,
    DataError,
    Lapa2Error,
    PrefixError,
    RunError,
    ScoringError,
)
from lapa2_interp.files import holds_only, read_checkpoint, result_folder, write_checkpoint
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.page import write_page
from lapa2_interp.prefixes.importing import read_tensors
from lapa2_interp.report import view
from lapa2_interp.runs.score import score
from lapa2_interp.runs.texts import read_texts
from lapa2_interp.scoring.training import read_graded
from lapa2_interp.tasks.corpora import read_corpus

ASKED = {"attribute": "positive", "prompts": ["The lake"], "length": 12, "dtype": "float32"}
SIZE = 400_000

# --- files


def into(target, *settings):
    with result_folder(Path(target), *settings):
        pytest.fail("entered")


def with_thesis():
    Path("out").mkdir()
    for name in ("table.csv", "a.png", "thesis.tex"):
        Path("out", name).touch()
    into("out", True, holds_only("table.csv", "*.png"))


def looped():
    Path("a").symlink_to(Path("b").absolute())
    Path("b").symlink_to(Path("a").absolute())
    into(Path("a").absolute())


def mounted():
    disk = Path("disk").absolute()
    disk.mkdir()
    with patch.object(os.path, "ismount", lambda path: path == disk):
        into(disk)


def flipped():
    """PyTorch would load it."""
    values = torch.arange(100.0)
    write_checkpoint(Path("state.pt"), {"values": values})
    stored = bytearray(Path("state.pt").read_bytes())
    stored[stored.index(values.numpy().tobytes()) + 40] ^= 1
    Path("state.pt").write_bytes(stored)
    read_checkpoint(Path("state.pt"), "cpu")


def never():
    raise AssertionError


def page_in_file():
    Path("file").write_text("")
    write_page(Path("file/page.html"), lambda: "")


FILES = {
    "a folder with something else": (with_thesis, "holds thesis.tex, which is not of this command's making"),
    "a loop of links": (looped, "loop of links"),
    "a name that is not UTF-8": (lambda: into("b\udce9"), "not UTF-8"),
    "a disk": (mounted, "where a disk is mounted.*such as .*disk/run"),
    "a bit of a checkpoint": (flipped, "checksum of .* differs", ValueError),
    "a list": (lambda: parse_object("[1]"), r"must hold a JSON object, found '\[1\]'", ValueError),
    "very many lists": (lambda: parse_object("[" * 200_000), "nested too deeply", ValueError),
    "a folder as a page": (lambda: write_page(Path.cwd(), never), "is a folder; give a file, such as"),
    "a page of another ending": (lambda: write_page(Path("page.txt"), never),
     "ends in .html; found page.txt, give page.html"),
    "a page in a file": (page_in_file, "cannot write .*; choose another file"),
}  # fmt: skip
INPUTS = [
    ({"seed": 1}, {"seed": 2}, "results of another seed: 1, not 2; .*choose another folder"),
    ({}, {"seed": 2}, "another seed: None, not 2"),
    ({"seed": 1, "old": True}, {"seed": 1}, "another old: True, not None"),
    ({"recipe": {"lr": 1}}, {"recipe": {"lr": 2}}, "another recipe lr: 1, not 2"),
    ({"prompts": ["a" * 200]}, {"prompts": ["b"]}, "another prompts; repeat"),
]
"""Inputs that made results, those of now, and the error."""


def of_file():
    Path("cut.jsonl").touch()
    check_same_inputs({"key": "a"}, {"key": "b"}, Path("cut.jsonl"), CircuitError)


# --- what files unpack to


def packed_text(kind, ending, read, cut=0):
    row, head = '{"text": "calm é", "label": "a"}\n', ""
    if kind == ".csv":
        row, head = "calm é,a\n", "\ufefftext,label\n"
    file = pack(Path(f"t{kind}{ending}"), (head + row * 4000).encode())
    file.write_bytes(file.read_bytes()[: -cut or None])
    read(file)


def graded(ending):
    row = {"prompt": {"text": "calm", "toxicity": 0.5}, "continuation": {"text": " "}}
    read_graded(pack(Path(f"g.jsonl{ending}"), f"{json.dumps(row)}\n".encode() * 3600), test=False)


def of_two_files():
    with zipfile.ZipFile("t.csv.zip", "w") as archive:
        for name in "ab":
            archive.writestr(name, "text\na\n")
    read_texts(Path("t.csv.zip"))


def parquet_of(column, read):
    pq.write_table(pa.table({"text": column}), "t.parquet")
    read(Path("t.parquet"))


def never_written():
    with h5py.File("t.nc", "w") as file:
        file.create_group("a").create_dataset("b", (10**6, 10**6), "f8", chunks=(10, 10))
    check_hdf5(Path("t.nc"))


def of_zeros():
    np.savez_compressed("t.npz", a=np.zeros(SIZE))
    check_archive(Path("t.npz"))


def of_another_size():
    np.save("a.npy", np.zeros(10))
    with zipfile.ZipFile("t.npz", "w") as archive:
        archive.writestr("a.npy", Path("a.npy").read_bytes().replace(b"(10,)", b"(99,)"))
    check_archive(Path("t.npz"))


def squeezed(read):
    torch.save({"a": torch.zeros(SIZE)}, "plain.pt")
    with (
        zipfile.ZipFile("plain.pt") as archive,
        zipfile.ZipFile("t.pt", "w", zipfile.ZIP_DEFLATED) as smaller,
    ):
        for member in archive.namelist():
            smaller.writestr(member, archive.read(member))
    read(Path("t.pt"))


def corpus(file):
    read_corpus(str(file), ["a"])


ENDINGS = (".gz", ".bz2", ".xz", ".zip")
REPEATED = {
    "texts": pa.array(["x" * 1000] * 1000),
    "zeros": pa.array([0] * SIZE),
    "a list": pa.array([[7] * SIZE]),
    "nulls": pa.nulls(SIZE),
}
PACKED = {
    **{
        f"{kind}{ending} {name}": (lambda row=(kind, ending, read, cut): packed_text(*row), message, error)
        for ending in ENDINGS
        for kind in (".jsonl", ".csv")
        for name, read, cut, message, error in (
            (
                "scored",
                read_texts,
                0,
                r"bytes unpack to .* or more, and \d+ are allowed",
                ScoringError,
            ),
            ("learnt", corpus, 0, "are allowed; if you trust the file", DataError),
            ("cut", corpus, 20, "cannot read .*(damaged|are allowed)", DataError),
        )
    },
    **{
        f"graded texts {ending}": (lambda ending=ending: graded(ending), "are allowed", DataError)
        for ending in ENDINGS
    },
    "an archive of two": (of_two_files, "it is an archive of 2 files", ScoringError),
    **{
        f"{name} {read.__name__}": (lambda column=column, read=read: parquet_of(column, read), "are allowed", error)
        for name, column in REPEATED.items()
        for read, error in ((check_parquet, ValueError), (read_texts, ScoringError))
    },
    "data that were never written": (never_written, "unpack to 8000000000000 or more", ValueError),
    "arrays of zeros": (of_zeros, "are allowed", ValueError),
    "an array of another size": (of_another_size, "is not of the size that it names", ValueError),
    "tensors of zeros": (lambda: squeezed(read_tensors), "are allowed", PrefixError),
    "a checkpoint of zeros": (lambda: squeezed(lambda file: read_checkpoint(file, "cpu")), "unpack to", ValueError),
}  # fmt: skip

# --- values


def of_grid():
    Path("grid.toml").write_text('model = "tiny-gpt2"\n')
    cell_of("tiny-gpt2", **ASKED | {"prompts": Path("grid.toml")})


def scored(scorers):
    generate("tiny-gpt2", trace="none", **ASKED).save("run")
    score("run", scorers)


NUMBERS = {
    "knock_out": lambda value: circuits.knock_out("planted", "sentiment", batch_size=value),
    "ContrastSet": lambda value: circuits.ContrastSet.of("planted", "sentiment", tokens=value),
    "select": lambda value: circuits.select("planted", "sentiment", screen=value),
    "measure_fading": lambda value: circuits.measure_fading("planted", "sentiment", filler=(value,)),
    "alpha_at": lambda value: circuits.alpha_at_prefix_attention("planted", "sentiment", value),
    "load_model": lambda value: load_model("tiny-gpt2", workers=value),
    "Layout": lambda value: Layout.of(None, None, "The lake", soft=value),
    "teacher_forced": lambda value: teacher_forced("planted", None, [[1]], chunk=value),
    "get": lambda value: methods.get("air-decoding", omega=value),
    "steer": lambda value: steer("planted", [], "sentiment", out="never", budget=value),
    "view": lambda value: view("nowhere", steps=value),
}  # fmt: skip
PROMPTS = (
    r"^(prompts(: takes task, .*a list of texts| is an em)|cannot read prompts from .*no file)"
)
VALUES = {
    **{
        f"{name} of {value!r}": (
            lambda call=call, value=value: call(value),
            f"input should be a valid (number|integer), found {value!r}",
        )
        for name, call in NUMBERS.items()
        for value in ("0.5", True)
    },
    **{
        f"prompts {prompts}": (lambda prompts=prompts: cell_of("tiny-gpt2", **ASKED | {"prompts": prompts}), PROMPTS)
        for prompts in ([], {"The lake": 1})
    },
    "a grid as prompts": (of_grid, PROMPTS),
    "a word for a classifier alone": (lambda: scored(["linear", "echo"]),
     "linear says which classifier judges accuracy, toxicity"),
}  # fmt: skip


def rows():
    for name, row in FILES.items():
        yield name, *(*row, RunError)[:3]
    for stored, now, message in INPUTS:
        call = lambda stored=stored, now=now: check_same_inputs(stored, now, Path())  # noqa: E731
        yield message, call, message, RunError
    yield "a file of another key", of_file, r"cut\.jsonl has .*choose another file", CircuitError
    for name, row in PACKED.items():
        yield name, *row
    for name, row in VALUES.items():
        yield name, *row, Lapa2Error


@pytest.mark.parametrize(
    ("call", "message", "error"), [pytest.param(*row, id=name[:60]) for name, *row in rows()]
)
def test_what_the_room_refuses(call, message, error, tmp_path, monkeypatch, without_types):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(unpacking, "ALWAYS", 10_000)
    monkeypatch.setattr(unpacking, "RATIO", 10)
    with pytest.raises(error, match=message) as caught:
        call()
    if isinstance(caught.value, Lapa2Error):
        assert "\n" not in str(caught.value)
