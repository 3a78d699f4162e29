"""No file unpacks to more than its size allows."""

import bz2
import gzip
import json
import lzma
import zipfile

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lapa2_interp._util import unpacking
from lapa2_interp._util.errors import DataError, PrefixError, ScoringError
from lapa2_interp._util.files import read_checkpoint
from lapa2_interp._util.unpacking import check_archive, check_hdf5, check_parquet
from lapa2_interp.prefixes.importing import read_tensors
from lapa2_interp.runs.texts import read_texts
from lapa2_interp.scoring.training import read_graded
from lapa2_interp.tasks.corpora import read_corpus

LIMIT = 10_000
SIZE = 400_000


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Files of this test may unpack to a few kilobytes."""
    monkeypatch.setattr(unpacking, "ALWAYS", LIMIT)
    monkeypatch.setattr(unpacking, "RATIO", 10)


def pack(file, content):
    if file.suffix == ".zip":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("inside", content)
    else:
        squeeze = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
        file.write_bytes(squeeze[file.suffix](content))
    return file


@pytest.mark.parametrize("packed", [".gz", ".bz2", ".xz", ".zip"])
@pytest.mark.parametrize("kind", [".jsonl", ".csv"])
def test_a_compressed_text_is_read_up_to_its_limit(tmp_path, packed, kind):
    row, head = '{"text": "calm é", "label": "a"}\n', ""
    if kind == ".csv":
        row, head = "calm é,a\n", "\ufefftext,label\n"
    file = pack(tmp_path / f"t{kind}{packed}", (head + row * 100).encode())
    assert read_texts(file)[0][0]["text"].tolist() == ["calm é"] * 100
    pack(file, (head + row * 4000).encode())
    with pytest.raises(ScoringError, match=r"bytes unpack to .* or more, and \d+ are allowed"):
        read_texts(file)
    with pytest.raises(DataError, match="are allowed; if you trust the file"):
        read_corpus(str(file), ["a"])
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot read .*(damaged|are allowed)"):
        read_corpus(str(file), ["a"])


@pytest.mark.parametrize("packed", [".gz", ".bz2", ".xz", ".zip"])
def test_graded_texts_may_be_compressed_in_every_way(tmp_path, packed):
    rows = [
        {"prompt": {"text": f"calm {i}", "toxicity": 0.5}, "continuation": {"text": " "}}
        for i in range(9)
    ]
    content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    file = tmp_path / f"g.jsonl{packed}"
    pack(file, content)
    assert len(read_graded(file, test=False).texts) + len(read_graded(file, test=True).texts) == 9
    pack(file, content * 400)
    with pytest.raises(DataError, match="are allowed"):
        read_graded(file, test=False)


def test_an_archive_holds_one_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "t.csv.zip", "w") as archive:
        for name in "ab":
            archive.writestr(name, "text\na\n")
    with pytest.raises(ScoringError, match="it is an archive of 2 files"):
        read_texts(tmp_path / "t.csv.zip")


@pytest.mark.parametrize(
    "column",
    [pa.array(["x" * 1000] * 1000), pa.array([0] * SIZE), pa.array([[7] * SIZE]), pa.nulls(SIZE)],
)
def test_a_value_that_is_repeated_counts_every_time(tmp_path, column):
    file = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": column}), file)
    assert file.stat().st_size < LIMIT
    with pytest.raises(ValueError, match="are allowed"):
        check_parquet(file)
    with pytest.raises(ScoringError, match="are allowed"):
        read_texts(file)
    pd.DataFrame({"text": [f"calm {i}" for i in range(200)], "a": "x"}).to_parquet(file)
    check_parquet(file)


def test_data_that_were_never_written_count(tmp_path):
    with h5py.File(tmp_path / "t.nc", "w") as file:
        file.create_group("a").create_dataset("b", (10**6, 10**6), "f8", chunks=(10, 10))
    with pytest.raises(ValueError, match="unpack to 8000000000000 or more"):
        check_hdf5(tmp_path / "t.nc")


def test_arrays_are_of_the_size_that_their_files_hold(tmp_path):
    np.savez_compressed(tmp_path / "t.npz", a=np.arange(9), b=np.zeros((2, 3), "f2"))
    check_archive(tmp_path / "t.npz")
    np.savez_compressed(tmp_path / "t.npz", a=np.zeros(SIZE))
    with pytest.raises(ValueError, match="are allowed"):
        check_archive(tmp_path / "t.npz")
    np.save(tmp_path / "a.npy", np.zeros(10))
    lied = (tmp_path / "a.npy").read_bytes().replace(b"(10,)", b"(99,)")
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("a.npy", lied)
    with pytest.raises(ValueError, match="is not of the size that it names"):
        check_archive(tmp_path / "t.npz")


def test_a_checkpoint_unpacks_to_what_it_holds(tmp_path):
    torch.save({"a": torch.zeros(SIZE)}, tmp_path / "whole.pt")
    with (
        zipfile.ZipFile(tmp_path / "whole.pt") as archive,
        zipfile.ZipFile(tmp_path / "t.pt", "w", zipfile.ZIP_DEFLATED) as squeezed,
    ):
        for member in archive.namelist():
            squeezed.writestr(member, archive.read(member))
    with pytest.raises(PrefixError, match="are allowed"):
        read_tensors(tmp_path / "t.pt")
    with pytest.raises(ValueError, match="unpack to"):
        read_checkpoint(tmp_path / "t.pt", "cpu")
    assert read_checkpoint(tmp_path / "whole.pt", "cpu")["a"].shape == (SIZE,)
