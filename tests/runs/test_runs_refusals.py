"""What the room refuses, grids apart: a call, and what its one line says."""

import json
import multiprocessing
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import pytest
import xarray as xr
from conftest import load
from jobs import FakeWorker, Serial, edit, in_batches, three_batches
from test_select import SHORT, of_trace, of_traces, two_methods

from lapa2_interp import generate, load_run
from lapa2_interp.attention.tables import step_table
from lapa2_interp.errors import (
    DamagedError,
    GridError,
    Lapa2Error,
    ModelError,
    RunError,
    TraceError,
)
from lapa2_interp.files import remove_path, result_folder, sha256_of
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.conditioning import NoControl
from lapa2_interp.runs import store
from lapa2_interp.runs.attention import one_kind
from lapa2_interp.runs.engines import LocalPool
from lapa2_interp.runs.fill import fill_run
from lapa2_interp.runs.generate import make_cells
from lapa2_interp.runs.grid import Grid
from lapa2_interp.runs.ray import RayPool
from lapa2_interp.runs.run import Run, finished_cell
from lapa2_interp.runs.store import Listing, is_run
from lapa2_interp.runs.sweep import sweep

KEY = three_batches().key
FOLDER = Path("run/cells", KEY)


def untouched(act):
    """What a call on the run raises, which changes nothing of the run."""
    before = {file: file.read_bytes() for file in Path("run").rglob("*") if file.is_file()}
    try:
        act(Path("run"))
    finally:
        after = {file for file in Path("run").rglob("*") if file.is_file()}
        assert after - {Path("run/.lock")} == before.keys() - {Path("run/.lock")}
        assert all(file.read_bytes() == data for file, data in before.items())


def swept(*cells, worker=None, run="run"):
    grid = Grid("one", "", cells or (three_batches(),))
    return fill_run(Path(run), [grid], Serial(worker or FakeWorker()), pytest.fail)


# --- folders


def written(name, text='{"name": "years of work"}'):
    """A file in a folder that is there then."""
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)


def into(target, force=False):
    with result_folder(Path(target), force, is_run):
        pytest.fail("entered")


def into_thesis(name, force):
    written(f"thesis/{name}")
    try:
        into("thesis", force)
    finally:
        assert [file.name for file in Path("thesis").iterdir()] == [name]


def in_own_folder(target):
    """The shell would stay in a folder that is gone."""
    written("in/file")
    with pytest.MonkeyPatch.context() as patches:
        patches.chdir("in")
        into(target)


def of_thesis(act):
    written("thesis/chapter1.txt")
    act(Path("thesis"))


def into_file():
    Path("file").touch()
    swept(run="file")


def saved_by_force():
    in_batches()
    (FOLDER / "000.json").unlink()
    untouched(lambda run: two_methods().save(run, force=True))


def into_listing(text):
    in_batches()
    Path("run/run.json").write_text(text)
    two_methods().save("run")


THERE = "is finished; force=True replaces it"
NO_RUN = "is not a run: it has no run.json; `lapa2 generate` and `lapa2 sweep GRID --out"
YOURS = "is the folder you are in, .*give a folder in it, such as"
FOLDERS = {
    **{
        f"{name} of somebody{', force' * force}": (
            lambda name=name, force=force: into_thesis(name, force),
            "not a folder of this command",
        )
        for name in ("chapter1.txt", "run.json")
        for force in (False, True)
    },
    "a folder in a file": (lambda: in_own_folder("file/run"), "cannot write .*choose another out"),
    "a file": (lambda: in_own_folder("file"), "not a folder of this command"),
    "the folder one is in": (lambda: in_own_folder("."), YOURS),
    "a folder above": (lambda: in_own_folder(".."), YOURS),
    "a sweep into a thesis": (lambda: of_thesis(lambda thesis: swept(run=thesis)),
     "exists and is not a run; choose another out"),
    "a sweep into a file": (into_file, "cannot write .*file: File exists"),
    "a thesis as a run": (lambda: of_thesis(load_run), NO_RUN),
    "a cell's folder as a run": (lambda: load_run(in_batches().cell_folder(KEY)), NO_RUN),
    "no folder": (lambda: load_run("nowhere"), "there is no folder nowhere; `lapa2 generate`.*; looked for /.*/nowhere"),
    "a finished run": (lambda: (two_methods().save("run"), two_methods().save("run")), THERE),
    "an unfinished run, force": (saved_by_force,
     r"is a run with 1 of 1 cell not finished \(`lapa2 runs .*run`\); choose another out"),
    **{
        f"a run with the listing {text}": (lambda text=text: into_listing(text), "force=True replaces it")
        for text in ("{", '{"format": 2}')
    },
    "the folder of a run in memory": (lambda: two_methods().require_folder(), "in memory only; run.save"),
}  # fmt: skip

# --- a run's listing, cells and batches


def load_and_sweep(harm):
    """Both refuse what is harmed, and change nothing."""
    in_batches()
    harm(Path("run"))
    with pytest.raises(RunError) as first:
        untouched(load_run)
    with pytest.raises(RunError) as second:
        untouched(lambda run: swept())
    assert str(first.value) == str(second.value)
    raise first.value


def listed(**change):
    def harm(run):
        raw = json.loads((run / "run.json").read_text()) | change
        raw = {name: value for name, value in raw.items() if value is not None}
        (run / "run.json").write_text(json.dumps(raw))

    return harm


def listing_of(data):
    return lambda run: (run / "run.json").write_bytes(data)


def reading(harm, read=load_run):
    """What reading a harmed run of three batches raises."""
    in_batches()
    harm(Path("run"))
    read("run")


def in_place(name, kind):
    """A file, a folder or a loop of links in the place of a part of a run."""
    target = Path("run", name.replace("KEY", KEY))
    remove_path(target)
    {
        "a file": target.touch,
        "a folder": target.mkdir,
        "a loop": lambda: target.symlink_to(target.absolute()),
    }[kind]()


def sweep_onto(name):
    in_batches()
    in_place(name, "a file")
    swept()


def settings_as(spoil):
    return lambda: reading(lambda run: spoil(FOLDER / "cell.json"))


def attention_of(run):
    load_run(run).attention()


def unmade(run):
    store.remove_batches(FOLDER)


def cut_trace(run):
    (FOLDER / "000.nc").write_bytes(b"cut")


def change_seed(file):
    file.write_text(file.read_text().replace('"seed": 1', '"seed": 2'))


def row_of(column, value, message):
    """A batch in which a value of the texts is another; with `row 0` in all rows, since a column of
    a file has one type."""
    in_batches()
    file = FOLDER / "000.parquet"
    table = pd.read_parquet(file)
    first = value if "row 0" in message else table[column].iloc[0]
    table[column] = pd.Series([first, value], dtype=object)
    table.to_parquet(file, index=False)
    edit(FOLDER / "000.json", sha256={file.name: sha256_of(file)})
    store.read_texts(FOLDER, 0, three_batches())


def counted(read):
    """Records that count other texts than their files have, and 6 in all."""
    in_batches()
    for number, n in ((0, 1), (1, 3)):
        edit(FOLDER / f"00{number}.json", n_texts=n)
    assert load_run("run").state(KEY) == "finished"
    read()


def of_another_cell(read):
    """A batch of one cell in the folder of another."""
    other_cell = Cell.model_validate(three_batches().model_dump() | {"seed": 2})
    swept(three_batches(), other_cell)
    for file in Path("run/cells", other_cell.key).glob("000.*"):
        (FOLDER / file.name).write_bytes(file.read_bytes())
    run = load_run("run")
    assert run.state(KEY) == "damaged"
    read(run)


def of_unknown_method():
    cell = Cell.model_validate(three_batches().model_dump() | {"method": "prefx"})
    Run(None, Listing(grids={"own": (cell.key,)}), {cell.key: cell}).save("run")
    load_run("run").cells  # noqa: B018


def other_weights(began):
    """Of a worker that loads the model after its file was replaced, and of a run made before."""
    if began:
        in_batches()
        (FOLDER / "001.json").unlink()

    class Replaced(FakeWorker):
        def outcome(self, cell, number):
            batch = super().outcome(cell, number)
            if not (began or number):
                return batch
            card = batch.record.model.model_copy(update={"weights": "sha256 other"})
            return replace(batch, record=batch.record.model_copy(update={"model": card}))

    swept(worker=Replaced())


ROWS = [
    ("text", None, "text of row 1 is .*, not a text"),
    ("text", 3.5, "text of row 0 is 3.5, not a text"),
    ("continuation", 2, "continuation of row 0 is 2, not a text"),
    ("prompt", None, "prompt of row 1 is .*, not a text"),
    ("prompt", "The land", "prompt of row 1 is 'The land', not a prompt of the cell"),
    ("attribute", "zebra", "attribute of row 1 is 'zebra', not 'positive'"),
    ("sample", -7, "sample of row 1 is .*-7.*, not below 2"),
    ("sample", 0, "sample of row 1 is .*0.*, not another one of its prompt"),
    ("sample", 0.5, "sample of row 0 is .*, not a whole number"),
    ("sample", "0", "sample of row 0 is .*, not a whole number"),
    ("n_tokens", 10**12, "n_tokens of row 1 is .*, not the number of its tokens"),
    ("tokens", "x", "tokens of row 0 is 'x', not ids"),
    ("tokens", [0.5], "tokens of row 0 is .*, not ids"),
    ("tokens", None, "tokens of row 1 is None, not ids"),
    ("finish", "<b>", "finish of row 1 is '<b>', not one of length, end, empty"),
]
"""A column of texts, a value that no text of the cell has, and the error."""
ANOTHER = "is damaged or of another version: "
WHAT_IS_THERE = {
    ("a file", "cells"): "is a file; remove it",
    ("a folder", "cells"): "is missing",
    ("a loop", "cells"): "is a loop of links; remove it",
    ("a file", "cells/KEY"): "is a file; remove it",
    ("a folder", "cells/KEY"): "is missing",
    ("a loop", "cells/KEY"): "is a loop of links; remove it",
    ("a file", "cells/KEY/cell.json"): "is damaged",
    ("a folder", "cells/KEY/cell.json"): "is a folder; remove it",
    ("a loop", "cells/KEY/cell.json"): "is a loop of links; remove it",
}  # fmt: skip
"""What is in the place of a part of a run, and the error."""
OTHER_WEIGHTS = (
    "another tiny-gpt2.s weights: .random, seed 0., not .sha256 other.; .* choose another folder"
)
STORED = {
    **{
        f"a listing: {message[:40]}": (lambda harm=harm: load_and_sweep(harm), message)
        for message, harm in {
            "run of format 2 .*format 4; read it with that version, or sweep into a new": listed(
                format=2
            ),
            "is not a run: its run.json is something else's": listed(grids=None),
            f"{ANOTHER}grids: .*found 3": listed(grids=3),
            f"{ANOTHER}nonsense": listed(nonsense=3),
        }.items()
    },
    **{
        f"a listing {data!r}": (
            lambda data=data: load_and_sweep(listing_of(data)),
            "run.json is damaged: .*; remove it, and `lapa2 sweep`",
            DamagedError,
        )
        for data in (b"", b"[]", b'{"format": 4, "gri', b"\x00\xff")
    },
    "a lost listing": (lambda: reading(lambda run: (run / "run.json").unlink()),
     "no run.json; `lapa2 sweep` with its grids writes it", DamagedError),
    "a listing of a cell that is not there": (
        lambda: reading(listed(grids={"g": ["0" * 16]})),
        # the version of the run is not told, being this one
        f"run.json lists the cell {'0' * 16}, and `lapa2 sweep` with the cell's grid .g. writes",
        DamagedError,
    ),
    "a listing without grids": (lambda: reading(listed(grids={}), lambda run: load_run(run).attention()),
     "has no cells, since its run.json has no grids; `lapa2 sw", TraceError),
    **{
        f"{kind} in the place of {name}": (
            lambda name=name, kind=kind: reading(lambda run: in_place(name, kind)),
            message,
            DamagedError,
        )
        for (kind, name), message in WHAT_IS_THERE.items()
    },
    **{
        f"a sweep onto a file {name}": (
            lambda name=name: sweep_onto(name),
            "is a file in the place of a folder; remove it",
        )
        for name in ("cells", "cells/KEY")
    },
    "settings that changed": (settings_as(change_seed),
     f"{KEY}/cell.json has changed, .* give the key", DamagedError),
    **{
        f"settings {text}": (
            settings_as(lambda file, text=text: file.write_text(text)),
            f"{KEY}/cell.json {ANOTHER}",
            DamagedError,
        )
        for text in ("{", '{"length": 0}')
    },
    "no settings": (settings_as(Path.unlink),
     "is missing; .*`lapa2 sweep` with the cell's grid .one. writes it", DamagedError),
    **{
        f"{column} {value!r}": (
            lambda row=(column, value, message): row_of(*row),
            rf"000\.parquet is missing or damaged \({message}",
            DamagedError,
        )
        for column, value, message in ROWS
    },
    "fewer texts counted": (lambda: counted(lambda: load_run("run").texts()),
     r"000\.parquet .*it has 2 texts, and 000\.json 1", DamagedError),
    "fewer samples counted": (lambda: counted(lambda: store.read_trace(FOLDER, 0, three_batches())),
     r"000\.nc .*it has 2 samples, not 1", DamagedError),
    "attention of a cell that is not made": (lambda: reading(unmade, attention_of),
     "/positive prefix.* is not finished", TraceError),
    "attention of a damaged trace": (lambda: reading(cut_trace, attention_of),
     r"000\.nc is missing or damaged"),
    "texts of another cell": (lambda: of_another_cell(lambda run: run.texts(KEY)), "damaged"),
    "records of another cell": (lambda: of_another_cell(lambda run: run.records(KEY)),
     f"it belongs to cell (?!{KEY})", DamagedError),
    "an unknown method": (of_unknown_method, "unknown method 'prefx'", Lapa2Error),
    **{
        f"other weights{' of a run made before' * began}": (lambda began=began: other_weights(began), OTHER_WEIGHTS)
        for began in (False, True)
    },
}  # fmt: skip

# --- parts of a run


@cache
def partly():
    """A run in memory of a cell that is made and one that is not."""
    made = two_methods()
    first, *_ = made.batches
    return replace(made, batches={first: made.batches[first]})


def missing_key():
    return next(key for key in partly().by_key if partly().state(key) == "missing")


def ended():
    """A run whose texts have no token."""
    run = two_methods()
    key, (batch,) = next(iter(run.batches.items()))
    batch = replace(batch, texts=batch.texts.assign(n_tokens=0))
    return Run(None, run.listing, {key: run.by_key[key]}, {key: [batch]})


def turned(column):
    """Samples in another order than their trace."""
    run = two_methods().select(method="prefix")
    texts, trace = run.texts(), xr.concat([run.trace(key) for key in run.by_key], "sample")
    ascending = texts[column].iloc[0] != texts[column].min()
    step_table(trace, texts.sort_values(column, ascending=ascending))


def unlike(word):
    of_traces().trace([*of_trace("full").by_key, *of_trace(word).by_key])


def two_attributes():
    cells = [
        cell_of("tiny-gpt2", **SHORT | {"attribute": attribute, "trace": trace})
        for attribute, trace in (("positive", "full"), ("negative", "pooled"))
    ]
    return make_cells(load("tiny-gpt2"), cells)


def first_key():
    return next(iter(two_methods().by_key))


READERS = {
    "finished_cell": finished_cell,
    "trace": lambda run, key: run.trace(key),
    "manifest": lambda run, key: run.manifest(key),
    "texts": lambda run, key: run.texts([key]),
}
TABLES = ("steps", "fits", "heads", "prefix_tokens", "plot", "attention")
PARTS = {
    **{
        f"{name} of {wanted}": (lambda name=name, wanted=wanted: getattr(two_methods(), name)(**wanted), message)
        for name in ("select", "texts")
        for wanted, message in (
            ({"method": "prefx"}, "no cell with method=prefx; method may be prefix, air-"),
            ({"alpha": [0.5, 1.5]}, "no cell with alpha=1.5; alpha may be 0.0, 0.5"),
            ({"method": "prefix", "max_length": 18}, "method=prefix and max_length=18 together"),
            ({"methods": "prefix"}, "unknown column 'methods'.*did you mean 'method'"),
            ({"arm": []}, "arm is an empty list; give a value, or leave arm out"),
            ({"key": "ab"}, "has no cell with key=ab"),
            ({"method": 1}, "no cell with method=1; method may be prefix"),
        )
    },
    "attention of no cell": (lambda: two_methods().attention(attribute="happy"),
     "no cell with attribute=happy; .* positive"),
    "one cell of four": (lambda: finished_cell(two_methods()), "has 4 cells; give the key of one"),
    **{
        f"{name} of {what}": (lambda read=read, key=key: read(partly(), key()), message)
        for name, read in READERS.items()
        for what, key, message in (
            ("a cell that is not there", lambda: "nonsense", "no cell 'nonsense'; run.cells lists"),
            (
                "a cell that is not made",
                missing_key,
                r"cell \w{16} .* is not finished; `lapa2 sweep` with its grid makes it",
            ),
        )
    },
    "a part of a key": (lambda: two_methods().texts(first_key()[:5]), r"has no cell '\w{5}'"),
    "a number": (lambda: two_methods().texts(5), "has no cell 5"),
    "a run as a key": (lambda: two_methods().texts(two_methods()),
     r"not a key; ask the run itself: run.select\(...\).texts"),
    "a key and values": (lambda: two_methods().texts(first_key(), method="prefix"),
     "give keys, or values .method=prefix., not both"),
    "steps of an unknown branch": (lambda: two_methods().steps("none", method="prefix"),
     "unknown branch 'none'", TraceError),
    **{
        f"{name} of texts that have no token": (
            lambda name=name: getattr(ended(), name)(),
            "all texts of the run ended before a first token",
            TraceError,
        )
        for name in TABLES
    },
    "a drawing of two kinds": (lambda: two_methods().plot(),
     "several kinds .*method: prefix, air-decoding", TraceError),
    "heads of two kinds": (lambda: two_methods().heads().plot(),
     "several kinds .*method: prefix, air-decoding", TraceError),
    "steps of two lengths": (lambda: one_kind(two_methods().steps()),
     "several kinds .*max_length: 14, 18.*choose one, such as ", TraceError),
    "heads of a pooled trace": (lambda: of_trace("pooled").heads(), "pooled over heads", TraceError),
    **{
        f"traces full and {word}": (
            lambda word=word: unlike(word),
            rf"(\w{{16}}) .*trace full. and \w{{16}} .*trace {word}.* such as the key '\1'",
        )
        for word in ("pooled", "none")
    },
    "traces of two attributes": (lambda: two_attributes().trace(),
     "choose cells alike, such as attribute='positive'"),
    "steps without a trace": (lambda: of_trace("none").steps(),
     "no cell with a trace; generate it with trace=", TraceError),
    **{
        f"texts by {column} in another order than their trace": (
            lambda column=column: turned(column),
            "texts and trace are in another order",
            TraceError,
        )
        for column in ("arm", "prompt")
    },
}  # fmt: skip

# --- launches and workers

GRID = """
model = "tiny-gpt2"
dtype = "float32"
task = "sentiment"
attribute = "positive"
prompts = 3
augmentation = "none"
"""


def launched(method='"prefix"', **settings):
    Path("g.toml").write_text(f"{GRID}method = {method}\n")
    return sweep(["g.toml"], "run", **settings)


def of_two_folders():
    for folder in "ab":
        written(f"{folder}/x.toml", f'{GRID}method = "prefix"\n')
    sweep(["a/x.toml", "b/x.toml"], "run")


def with_a_method_of_the_script():
    class Mine(NoControl):
        pass

    Mine.__module__, Mine.__qualname__ = "__main__", "Mine"
    with patch.object(sys.modules["__main__"], "Mine", Mine, create=True):
        launched('"__main__:Mine"', workers=2, device="cpu", allow_code=True)


def in_a_process(daemon):
    """A worker of somebody's pool; and one that still imports its parent's script."""
    here = multiprocessing.current_process()
    with (
        patch.dict(here._config, daemon=daemon),
        patch.object(here, "_inheriting", not daemon, create=True),
    ):
        fill_run(
            Path("run"), [Grid("one", "", (three_batches(),))], LocalPool(2, "cpu"), pytest.fail
        )


def without_ray():
    with patch.dict(sys.modules, ray=None):
        RayPool()


def full_memory(error):
    with patch("lapa2_interp.runs.worker.decode_batch", side_effect=error):
        generate(load("tiny-gpt2"), attribute="positive", prompts=["a", "b"], samples=2)


LAUNCHES = {
    **{
        f"only {only}": (lambda only=only: launched(only=only), message, GridError)
        for only, message in (
            ({"methd": "prefix"}, "unknown column 'methd'.*did you mean 'method'"),
            ({"method": "prefx"}, "unknown method 'prefx'"),
        )
    },
    **{
        f"{shown} without Ray": (lambda option=option: launched(**option), f"{shown} belongs to engine='ray'")
        for option, shown in (
            ({"address": "auto"}, "address='auto'"),
            ({"gpus_per_worker": 2.0}, "gpus_per_worker=2.0"),
        )
    },
    "Ray that is not there": (without_ray, r"pip install 'lapa2-interp\[ray\]', or use engine='local'"),
    **{
        f"a cluster {address}": (
            lambda address=address: RayPool(address=address),
            "allowed: HOST:PORT of the cluster's head, auto",
        )
        for address in ("nonsense", "ray://127.0.0.1:10001", "127.0.0.1:http")
    },
    "two grids of one name": (of_two_folders, "two grids have the name x; rename a file", GridError),
    "a method of the script": (with_a_method_of_the_script,
     "'__main__:Mine' is in the script that runs.*workers=1", GridError),
    "workers of a daemon": (lambda: in_a_process(True),
     "daemonic processes are not allowed to have children; workers=1 makes"),
    "workers of a process that starts": (lambda: in_a_process(False),
     'put what the script does under if __name__ == "__main__":'),
    **{
        f"memory that runs out {error}": (
            lambda error=error: full_memory(error),
            "does not hold 4 rows at once; .*max_rows=N",
            ModelError,
        )
        for error in (
            MemoryError(),
            RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message", "error"),
    [
        pytest.param(*(*row, RunError)[:3], id=name)
        for name, row in {**FOLDERS, **STORED, **PARTS, **LAUNCHES}.items()
    ],
)
def test_what_the_room_refuses(call, message, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
