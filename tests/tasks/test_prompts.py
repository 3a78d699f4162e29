"""A value that is a text or the path of a file: one rule, wherever prompts and prefixes are
given."""

import bz2
import gzip
import json
import lzma
import zipfile
from pathlib import Path

import pandas as pd
import pytest
from conftest import lapa2, load

from lapa2_interp import generate
from lapa2_interp._util.paths import is_path, kind_of
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.pro_aug import prompt_slope
from lapa2_interp.errors import Lapa2Error
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.registry import load_task
from lapa2_interp.report.steer import steer
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.runs.texts import read_texts
from lapa2_interp.tasks.corpora import read_corpus
from lapa2_interp.tasks.prompts import READERS, as_prompts, read_prompts
from lapa2_interp.tasks.task import EXAMPLE, Prompts

LAKE = ("The lake", "The sea")
TEXTS = (
    "I like and/or", "and/or", "his/her/their", "The U.S. and e.g. this", "U.S.", "e.g.", "Node.js",
    "google.com", "/ 3", "/help me", "...", "The file a.txt is", "1.5", "x" * 5000, "a\nb",
    "Visit us at www.sapo.pt", "He scored 3.pt", ".", "..", "/", "./", "tabs\tand\nnotes.txt",
)  # fmt: skip
PATHS = (
    "p.TXT", "none.txt", "my prompts.Jsonl", "See notes.txt", "a/b.json", "x.csv ", "x.tsv", "x.parquet", "x.xz",
    "x.md", "x.xlsx", "/nowhere/prompts", "./prompts", "../prompts", "~/prompts",
)  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_what_is_a_path_is_what_exists_or_looks_like_one(tmp_path):
    assert not any(map(is_path, TEXTS))
    assert all(map(is_path, PATHS))
    assert not is_path("")
    for name in ("plain", "two words"):
        assert not is_path(name)
        (tmp_path / name).touch()
        assert is_path(name)
    (tmp_path / "The").mkdir()
    assert is_path("The")
    assert is_path(tmp_path / "anything")
    for name, kind in {"a.JSONL.xz": ".jsonl", "a.txt.2024": ".2024", "a": "", "a.GZ": ""}.items():
        assert kind_of(tmp_path / name) == kind


def written(file):
    """A file of the two prompts in the form of its ending."""
    kind = kind_of(file)
    table, sep = pd.DataFrame({"id": [1, 2], "prompt": LAKE}), {".tsv": "\t"}.get(kind, ",")
    if kind == ".parquet":
        table.to_parquet(file)
        return
    raw = {
        ".txt": "\n".join(LAKE),
        ".json": json.dumps([LAKE[0], {"prompt": {"text": LAKE[1]}}]),
        ".jsonl": "\n".join(json.dumps({"prompt": text}) for text in LAKE),
    }.get(kind, table.to_csv(index=False, sep=sep))
    packed = file.suffix.lower()
    if packed == ".zip":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("inside", raw)
        return
    pack = {".gz": gzip, ".xz": lzma, ".bz2": bz2}
    file.write_bytes(pack[packed].compress(raw.encode()) if packed in pack else raw.encode())


@pytest.mark.parametrize(
    "name",
    [*(f"p{kind}" for kind in READERS), *(f"P{kind.upper()}" for kind in READERS), "p.txt.gz",
     "p.jsonl.xz", "P.CSV.BZ2", "p.tsv.zip"],
)  # fmt: skip
def test_files_of_every_form_are_read_whatever_the_case_of_their_ending(name, tmp_path):
    written(tmp_path / name)
    assert read_prompts(name) == LAKE
    assert cell_of("tiny-gpt2", prompts=name, attribute="positive").prompts == LAKE
    both = ["A", tmp_path / name]
    assert cell_of("tiny-gpt2", prompts=both, attribute="positive").prompts == ("A", *LAKE)


@pytest.mark.parametrize("value", [*PATHS, "folder", "notes"])
def test_a_path_that_cannot_be_read_is_never_a_prompt_nor_a_prefix(value, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes").write_text("The lake")
    model, ways = load("tiny-gpt2"), {"attribute": "positive"}
    (tmp_path / "grid").mkdir()
    grid, task = tmp_path / "grid" / "g.toml", tmp_path / "grid" / "t.toml"
    grid.write_text(f'model = "tiny-gpt2"\nprompts = ["{value}"]\n')
    for asked in (
        lambda: generate(model, value, **ways),
        lambda: generate(model, ["The lake", value], **ways),
        lambda: generate(model, "The lake", prefix=value, **ways),
        lambda: load_grid(str(grid)),
        lambda: ContrastSet.of(model, "sentiment", prompts=[value]),
        lambda: ContrastSet.of(model, "sentiment", prompts=value),
        lambda: prompt_slope(model, "sentiment", "air-decoding", prompts=["a"] * 8 + [value]),
        lambda: steer("tiny-gpt2", value, "sentiment", out=tmp_path / "out"),
    ):
        with pytest.raises(Lapa2Error, match=r"prompts from|is the path of"):
            asked()
    task.write_text(f'[attributes.calm]\nprefix = "{value}"\n[prompts]\ntexts = ["{value}"]\n')
    read = load_task(task)
    assert (read.prefix("calm"), read.prompts.texts) == (value, (value,)), "a task file holds texts"
    assert cell_of("tiny-gpt2", task=task, attribute="calm").prompts == (value,)
    for line in ("layout --prompt", "layout --prompt a --prefix", "generate --model tiny-gpt2 --out out --prompts"):  # fmt: skip
        assert lapa2(line, value) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "grid", "notes"]


def test_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "p.txt").write_text("The lake")
    (tmp_path / "home" / "mood.toml").write_text(EXAMPLE)
    for name in ("~/p.txt", Path("~/p.txt")):
        assert as_prompts(name).texts == ("The lake",)
    assert load_task("~/mood.toml").name == "mood"


def test_texts_are_texts(tmp_path):
    """A sentence with a slash or dots, and any text in `Prompts` or in a file."""
    assert as_prompts(TEXTS).texts == TEXTS
    looks = Prompts(texts=("a.txt", "./b"))
    assert as_prompts(looks).texts == looks.texts
    assert cell_of("tiny-gpt2", prompts=looks, attribute="positive").prompts == looks.texts
    (tmp_path / "p.txt").write_text("a.txt\n./b\n")
    contrast_set = ContrastSet.of(load("tiny-gpt2"), "sentiment", prompts="p.txt", tokens=2)
    assert contrast_set.prompts == ("a.txt", "./b")
    form = cell_of("tiny-gpt2", prompts="and/or", prefix="Very good/bad:", attribute="positive")
    assert form.task.prefix("positive") == "Very good/bad:"


def test_a_prompt_of_a_table_may_have_a_comma(tmp_path):
    (tmp_path / "p.csv").write_text('id,prompt\n0,"The hut, and more"\n')
    assert read_prompts("p.csv") == ("The hut, and more",)


def test_a_command_reads_the_files_that_generate_reads(tmp_path, capsys):
    written(tmp_path / "P.JSON")
    line = "select planted --score mass --tokens 2 --heads 1 --out card.json --prompts"
    assert lapa2(line, "P.JSON") == 2
    assert "2 prompts" in capsys.readouterr().err
    assert lapa2(line, "P.md") == 2
    assert "cannot read prompts from P.md: No such file" in capsys.readouterr().err


def test_tables_tasks_and_grids_are_known_by_endings_of_any_case(tmp_path):
    (tmp_path / "S.JSONL").write_text('{"text": "a b", "label": "x"}\n')
    assert read_texts(tmp_path / "S.JSONL")[0][0]["text"].tolist() == ["a b"]
    assert read_corpus("S.JSONL", ["x"]).texts == {"x": ("a b",)}
    (tmp_path / "MOOD.TOML").write_text(
        '[attributes.calm]\nprefix = "Very calm:"\n[prompts]\ntexts = ["The sea"]\n'
    )
    assert load_task("MOOD.TOML").name == "MOOD"
    (tmp_path / "G.TOML").write_text('model = "tiny-gpt2"\nattribute = "positive"\n')
    assert len(load_grid("G.TOML").cells) == 1
