"""What somebody else's files may not be: a call, and what its one line says. What they may not do:
`test_untrusted`."""

import json
import os
import socket
from functools import cache
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import change_texts, load
from test_untrusted import GRID, TASK

from lapa2_interp import generate, load_run
from lapa2_interp._util.parsing import parse_json, parse_toml, read_text
from lapa2_interp.errors import DamagedError, Lapa2Error, RunError, ScoringError, TaskError
from lapa2_interp.files import sha256_of
from lapa2_interp.methods.registry import load_task
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.runs.run import finished_cell
from lapa2_interp.runs.sweep import sweep
from lapa2_interp.runs.texts import read_texts
from lapa2_interp.scoring.scorer import ScoreCache
from lapa2_interp.tasks.corpora import read_corpus
from lapa2_interp.tasks.prompts import read_prompts


@cache
def made():
    """A run of one cell."""
    asked = {"attribute": "positive", "prompts": ["The lake"], "length": 20}
    return generate("tiny-gpt2", dtype="float32", **asked)


def stored():
    return made().save("run")


def edit(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def task_of(text, file="mine.toml"):
    Path(file).write_text(text)
    load_task(file)


def grid_of(lines, **settings):
    Path("grid.toml").write_text(f"{GRID}{lines}\n")
    load_grid("grid.toml", **settings)


def listing_of(key):
    stored()
    edit(Path("run/run.json"), grids={"one": [key]})
    load_run("run")


def cell_file():
    (file,) = Path("run").glob("cells/*/cell.json")
    return file


def cell_of_task(name):
    stored()
    task = json.loads(cell_file().read_text())["task"]
    edit(cell_file(), task=task | {"name": name})
    load_run("run")


def settings_as(text, file):
    """A file of a run that holds other JSON."""
    stored()
    (Path("run/run.json") if file == "run.json" else cell_file()).write_text(text, "utf-8")
    load_run("run")


# --- what is no file


def pipe(path):
    os.mkfifo(path)


def folder(path):
    path.mkdir()


def listener(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)  # in the folder that one is in: the name of a socket may not be long


def no_file(make, name, read):
    make(Path(name))
    read(Path(name))


def settings_made(make):
    stored()
    file = cell_file()
    file.unlink()
    with pytest.MonkeyPatch.context() as patches:
        patches.chdir(file.parent)
        make(Path(file.name))
    load_run("run")


def result_made(name):
    stored()
    file = cell_file().with_name(name)
    file.unlink()
    os.mkfifo(file)
    finished_cell(load_run("run"))


def linked_scores():
    Path("scores.sqlite").symlink_to(Path("thesis.tex"))
    ScoreCache(Path())


def piped_scores():
    os.mkfifo("scores.sqlite")
    ScoreCache(Path())


def without_prompts():
    change_texts(stored().folder, lambda texts: texts.drop(columns="prompt"))
    load_run("run").texts()


# --- texts


def text_of(data):
    Path("x").write_bytes(data)
    read_text(Path("x"))


def large_text():
    with Path("x").open("wb") as opened:
        opened.truncate(2**31)
    read_text(Path("x"))


def as_prompts():
    """Parquet under another name."""
    pd.DataFrame({"prompt": ["The lake"]}).to_parquet("p.txt")
    read_prompts("p.txt")


def scored(name, make):
    make(name)
    read_texts(Path(name))


def two_columns(name):
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, name)


def many(samples):
    generate(load("tiny-gpt2"), attribute="positive", prompts=["The lake"], samples=samples)


def launched(samples):
    text = GRID.replace("samples = 1", f"samples = {samples}")
    Path("grid.toml").write_text(f'{text}method = "prefix"')
    sweep(["grid.toml"], "run", workers=1, device="cpu")


JSON = [
    ("[" * 100_000, "nested too deeply"),
    ("[" * 150 + "]" * 150, "nested too deeply"),
    ('{"a":' * 150 + "1" + "}" * 150, "nested too deeply"),
    ('{"a": ' + "9" * 5_000 + "}", "a whole number of thousands of digits"),
    ('{"a": 1, "b": {"c": 1, "c": 2}}', "has the field 'c' twice"),
    ('{"a": "\x00"}', "control character"),
    ("", "Expecting value"),
]
"""JSON that no program should have written."""
TOML = [
    ("a = " + "[" * 5_000, "nested too deeply"),
    ("a = " + "[" * 150 + "]" * 150, "nested too deeply"),
    (".".join("a" * 3_000) + " = 1", "nested too deeply"),
    ("a = " + "9" * 5_000, "a whole number of thousands of digits"),
    ("a = 1\na = 2", "overwrite"),
]
NO_PATHS = ("../x", "a/b", "..", ".hidden", "a\\\\b", "")
"""As TOML writes them."""
READERS = {
    "p.txt": read_prompts,
    "p.csv": read_prompts,
    "p.jsonl": read_prompts,
    "t.toml": lambda file: load_task(str(file)),
    "g.toml": lambda file: load_grid(str(file)),
    "c.jsonl": lambda file: read_corpus(str(file), ["a"]),
    "s.jsonl": read_texts,
}
NAME = "name has letters and no NUL, slash or backslash"
TWICE = r"two columns 'text'|field 'text' twice"
CALLS = {
    **{
        f"the key {key!r}": (
            lambda key=key: listing_of(key),
            "run.json is damaged or of another version: grids",
            DamagedError,
        )
        for key in ("../../x", "/home/me/package", "A" * 16, "0" * 15, "x" * 16, "0" * 16 + "\n")
    },
    **{
        f"a task {name!r}": (lambda name=name: task_of(f'name = "{name}"\n{TASK}'), NAME, TaskError)
        for name in NO_PATHS
    },
    **{
        f"an attribute {name!r}": (
            lambda name=name: task_of(TASK.replace("attributes.calm", f'attributes."{name}"')),
            NAME,
            TaskError,
        )
        for name in NO_PATHS
    },
    **{
        f"a cell of a task {name!r}": (
            lambda name=name: cell_of_task(name.replace("\\\\", "\\")),
            "a task's name",
            DamagedError,
        )
        for name in NO_PATHS
    },
    # Tables and pages show them.
    **{
        f"an attribute {name[:9]!r}": (
            lambda name=name: task_of(TASK.replace("attributes.calm", f'attributes."{name}"')),
            "an attribute's name is one line of at most 200",
            TaskError,
        )
        for name in ("ca\\nlm", "\\u001b[31mred", "a\\u202Eb", " calm", "x" * 201)
    },
    **{
        f"another {name} {file}": (
            lambda text=text, file=file: task_of(text, file),
            f"'{name}' is a task of the package",
            TaskError,
        )
        for name in ("sentiment", "topic", "detox")
        for file, text in (("mine.toml", f'name = "{name}"\n{TASK}'), (f"{name}.toml", TASK))
    },
    **{
        f"the method {name}{', code' * allow}": (
            lambda name=name, allow=allow: grid_of(f'method = "{name}"', allow_code=allow),
            "grid .*block 1: ",
        )
        for name in (
            "os:system",
            "json:JSONDecoder",
            "lapa2_interp.files:Path",
            ":x",
            "x:",
            "sys:modules.os",
        )
        for allow in (False, True)
    },
    "linked scores": (linked_scores, "scores.sqlite is a link", ScoringError),
    "piped scores": (piped_scores, "is a pipe", ScoringError),
    **{
        f"{make.__name__} {name}": (lambda row=(make, name, read): no_file(*row), ".")
        for make in (pipe, folder, listener)
        for name, read in READERS.items()
    },
    **{
        f"{make.__name__} as a cell": (lambda make=make: settings_made(make), r"is a folder|is a pipe", DamagedError)
        for make in (pipe, folder, listener)
    },
    **{
        f"{make.__name__} to sum": (lambda make=make: no_file(make, "p.txt", sha256_of), ".", (ValueError, OSError))
        for make in (pipe, folder, listener)
    },
    **{
        f"a pipe as {name}": (lambda name=name: result_made(name), "damaged", RunError)
        for name in ("000.parquet", "000.nc", "000.json")
    },
    **{f"JSON {text[:9]!r} of {len(text)}": (lambda text=text: parse_json(text), message, ValueError) for text, message in JSON},
    **{
        f"{file} {text[:9]!r} of {len(text)}": (lambda text=text, file=file: settings_as(text, file), ".", DamagedError)
        for text, _ in JSON
        for file in ("run.json", "cell.json")
    },
    **{f"TOML {text[:9]!r} of {len(text)}": (lambda text=text: parse_toml(text), message, ValueError) for text, message in TOML},
    **{
        f"{read.__name__} {text[:9]!r} of {len(text)}": (
            lambda text=text, read=read: (Path("x.toml").write_text(text), read("x.toml")),
            message,
        )
        for text, message in TOML
        for read in (load_task, load_grid)
    },
    "text that is none": (lambda: text_of(b"a\n\xff"), "line 2: the bytes", ValueError),
    "text with a NUL": (lambda: text_of(b"a\n\nb\0"), "line 3 has a NUL", ValueError),
    "a large text": (large_text, "has 2147483648 bytes; a text has", ValueError),
    "Parquet as prompts": (as_prompts, r"p.txt line \d+", TaskError),
    "a number to score in JSON lines": (
        lambda: scored(
            "s.jsonl", lambda name: Path(name).write_text('{"text": "a b"}\n{"text": 7}\n')
        ),
        "row [12] has no text in column 'text', found '7'",
        ScoringError,
    ),
    "a number to score in Parquet": (lambda: scored("s.parquet", pd.DataFrame({"text": [7, 8]}).to_parquet),
     "row [12] has no text in column 'text', found '7'", ScoringError),
    **{
        f"two columns {name}": (lambda name=name, make=make: scored(name, make), TWICE, ScoringError)
        for name, make in {
            "s.csv": lambda name: Path(name).write_text("text,text\na,b\n"),
            "s.jsonl": lambda name: Path(name).write_text('{"text": "a", "text": "b"}\n'),
            "s.parquet": two_columns,
        }.items()
    },
    "samples without prompts": (without_prompts, "it has no column prompt", DamagedError),
    # Beyond reason.
    "very many samples": (lambda: many(10**12), r"10{12} texts would take .*yes=True", RunError),
    "very many samples of a grid": (lambda: launched(10**12), r"would take .*yes=True", RunError),
    "very many points of a grid": (lambda: grid_of(f"seed = {list(range(200_000))}"),
     "block 1: 200000 points, .*--yes|block 1: 200000 points, .*yes=True"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message", "error"),
    [
        pytest.param(*(*row, Lapa2Error)[:3], id=ascii(name)[1:-1][:60])
        for name, row in CALLS.items()
    ],
)
def test_what_may_not_be(call, message, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as caught:
        call()
    if isinstance(caught.value, Lapa2Error):
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600
