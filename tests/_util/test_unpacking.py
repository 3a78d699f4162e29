"""No file unpacks to more than its size allows."""

import bz2
import gzip
import json
import lzma
import zipfile

import numpy as np
import pandas as pd
import pytest
import torch

from lapa2_interp._util import unpacking
from lapa2_interp._util.unpacking import check_archive, check_parquet
from lapa2_interp.files import read_checkpoint
from lapa2_interp.runs.texts import read_texts
from lapa2_interp.scoring.training import read_graded

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
def test_a_compressed_text_is_read(tmp_path, packed, kind):
    row, head = '{"text": "calm é", "label": "a"}\n', ""
    if kind == ".csv":
        row, head = "calm é,a\n", "\ufefftext,label\n"
    file = pack(tmp_path / f"t{kind}{packed}", (head + row * 100).encode())
    assert read_texts(file)[0][0]["text"].tolist() == ["calm é"] * 100


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


def test_values_within_the_limit_are_read(tmp_path):
    pd.DataFrame({"text": [f"calm {i}" for i in range(200)], "a": "x"}).to_parquet(
        tmp_path / "t.parquet"
    )
    check_parquet(tmp_path / "t.parquet")
    np.savez_compressed(tmp_path / "t.npz", a=np.arange(9), b=np.zeros((2, 3), "f2"))
    check_archive(tmp_path / "t.npz")
    torch.save({"a": torch.zeros(SIZE)}, tmp_path / "whole.pt")
    assert read_checkpoint(tmp_path / "whole.pt", "cpu")["a"].shape == (SIZE,)
