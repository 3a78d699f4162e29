"""Drills: files that a disk, a copy or a hand has damaged. `make drills`.

Every kind of file is cut, emptied, exchanged, or has one bit flipped. What reads it then says so in
one line, or reads the same values: a bit between them, which decides nothing, may change.
"""

import json
import random
import shutil

import numpy as np
import pytest
import torch
from conftest import load, soft_prefix
from drills import FULL, furnish
from lapa2_interp.runs.local import InProcess

from lapa2_interp import load_model, load_run
from lapa2_interp._util.errors import Lapa2Error
from lapa2_interp._util.files import (
    CHECKSUMS_FIELD,
    OWN_ENTRY,
    _fields_sha256,
    read_checkpoint,
    without_checksums,
)
from lapa2_interp.circuits.selection import Selection
from lapa2_interp.cli.app import main
from lapa2_interp.models import model_card
from lapa2_interp.prefixes.soft_prefix import load_prefix, save_prefix
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.runs.store import SAMPLES, TRACE
from lapa2_interp.runs.sweep import read_part, sweep
from lapa2_interp.scoring.scorer import ScoreCache
from lapa2_interp.scoring.task_scorer import load_card
from lapa2_interp.tasks.task import read_prompts

pytestmark = pytest.mark.drill
POINTS = 10 if FULL else 3


def ways(whole, rng, points=POINTS):
    """(what was done, the bytes then) of a file."""
    for _ in range(points):
        cut = rng.randrange(1, len(whole))
        yield f"cut at {cut}", whole[:cut]
        at, bit = rng.randrange(len(whole)), rng.randrange(8)
        yield (
            f"bit {bit} of byte {at}",
            whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :],
        )
    yield "empty", b""
    yield "another kind: PNG", b"\x89PNG\r\n\x1a\n" + bytes(64)
    yield "another kind: JSON", b'{"something": "else"}\n'


def newer(whole):
    """A JSON file as a later version may write it, sealed as this one was."""
    fields = json.loads(whole)
    beside = fields.pop(CHECKSUMS_FIELD, None)
    fields |= {"invented_later": 1}
    if beside is not None:
        fields[CHECKSUMS_FIELD] = {name: each for name, each in beside.items() if name != OWN_ENTRY}
        fields[CHECKSUMS_FIELD] |= {OWN_ENTRY: _fields_sha256(fields)}
    yield "a newer version's key", json.dumps(fields).encode()


def one_line(error):
    assert "\n" not in str(error), str(error)
    return str(error)


def line_of(error):
    """The message, which is one line that names what to do."""
    text = one_line(error)
    assert ";" in text or "missing" in text, text
    return text


class Count:
    """What became of damage: refused with a line, or read as the same values."""

    def __init__(self):
        self.refused, self.same, self.again = 0, 0, 0

    def record(self, record_property, kind):
        record_property("file", kind)
        for name, n in (("refused", self.refused), ("made again", self.again), ("same", self.same)):
            record_property(name, n)
        assert self.refused + self.again


def drill(file, read, record_property, also=(), kind=None, names=True, count=None):
    """Damage a file in every way: `edited_logits` gives the same value as before, or raises one line."""
    whole, wanted = file.read_bytes(), read()
    count, rng = count or Count(), random.Random(file.name)
    for done, data in [*ways(whole, rng), *also]:
        file.write_bytes(data)
        try:
            found = read()
        except Lapa2Error as error:
            text = line_of(error)
            assert not names or file.name in text or file.parent.name in text, (done, text)
            count.refused += 1
        else:
            assert found == wanted, f"{file.name}, {done}: read as another value"
            count.same += 1
    file.write_bytes(whole)
    assert read() == wanted
    count.record(record_property, kind or file.name)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    furnish(folder)
    return folder


def again(run, home):
    sweep(run, [load_grid(str(home / "grid.toml"))], InProcess("cpu"))


@pytest.fixture
def run(home, tmp_path):
    return shutil.copytree(home / "run", tmp_path / "run")


def of_cell(run, key):
    made = load_run(run).finished_cell(key)
    return (
        made.manifest,
        made.samples.to_json(),
        made.trace.to_dict()["data_vars"]["prefix"].__repr__(),
    )


def everything(run):
    """All that a run says, without its place."""
    found = load_run(run)
    return (
        found.listing,
        found.cells.to_json(),
        [found.manifest(key).model_dump_json() for key in found.finished],
    )


@pytest.mark.parametrize("name", ["manifest.json", SAMPLES, TRACE])
def test_a_file_of_a_cell(run, home, name, record_property, tmp_path):
    """Nothing but the cell is lost, and when it is removed, a sweep makes the same bytes."""
    key, other = list(load_run(run).plan)[:2]
    file = run / "cells" / key / name
    whole = file.read_bytes()
    also = newer(whole) if name == "manifest.json" else ()
    drill(file, lambda: repr(of_cell(run, key)), record_property, also)
    beside = repr(of_cell(run, other))
    rng = random.Random(name)
    for _, data in [*ways(whole, rng, 1), *also]:
        file.write_bytes(data)
        assert len(load_run(run).finished) >= 3
        assert repr(of_cell(run, other)) == beside
    shutil.rmtree(run / "cells" / key)
    before = (run / "cells" / other / SAMPLES).stat().st_mtime_ns
    again(run, home)
    assert repr(of_cell(run, key)[1:]) == repr(of_cell(home / "run", key)[1:])
    if name != "manifest.json":
        assert file.read_bytes() == whole
    assert (run / "cells" / other / SAMPLES).stat().st_mtime_ns == before


def test_run_json(run, record_property):
    file = run / "run.json"
    drill(file, lambda: everything(run), record_property, newer(file.read_bytes()))
    raw, _ = without_checksums(file.read_text())
    file.write_text(json.dumps(raw | {"format": 99}))
    with pytest.raises(Lapa2Error, match="run of format 99"):
        load_run(run)


def test_a_plan(run, home, record_property):
    plan = load_run(run).plan
    file = run / "plan" / f"{next(iter(plan))}.json"
    whole = file.read_bytes()
    drill(file, lambda: everything(run), record_property, newer(whole), "plan/KEY.json")
    file.write_bytes(whole[:100])
    again(run, home)
    assert file.read_bytes() == whole
    assert load_run(run).cells["state"].tolist() == ["finished"] * len(plan)


def test_a_note_of_a_failure(run, record_property):
    """The run is read all the same; the words of a traceback may change unseen."""
    key = next(iter(load_run(run).plan))
    shutil.rmtree(run / "cells" / key)
    file = run / "failed" / f"{key}.json"
    file.parent.mkdir()
    file.write_text('{"when": "2026-01-01T00:00:00Z", "traceback": "ValueError: why"}')
    count, whole = Count(), file.read_bytes()
    for _, data in [*ways(whole, random.Random(1)), *newer(whole)]:
        file.write_bytes(data)
        row = load_run(run).cells.iloc[0]
        assert row["state"] == "failed"
        damaged = row["why"].endswith("is damaged")
        count.refused += damaged
        count.same += not damaged
    count.record(record_property, "failed/KEY.json")


@pytest.mark.parametrize("name", ["part.json", SAMPLES, TRACE])
def test_a_group_of_rows(tmp_path, name, record_property, home):
    class Stops(InProcess):
        def wait(self, told):
            for each in super().wait(told):
                yield each
                if each[0].group == 0:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path / "run", [load_grid(str(home / "grid.toml"))], Stops("cpu"))
    (folder,) = (tmp_path / "run" / "parts").glob("*/0")

    def read():
        part = read_part(folder)
        return part.samples.to_json(), repr(part.trace), part.seconds, part.problems

    drill(folder / name, read, record_property, kind=f"parts/KEY/0/{name}")


@pytest.mark.parametrize("ending", ["json", "safetensors"])
def test_a_soft_prefix(tmp_path, ending, record_property):
    save_prefix(soft_prefix(load("tiny-gpt2")), tmp_path)

    def read():
        found = load_prefix(tmp_path, "positive")
        return found.card, found.keys.tolist(), found.values.tolist()

    file = tmp_path / f"positive.{ending}"
    also = newer(file.read_bytes()) if ending == "json" else ()
    drill(file, read, record_property, also, f"a prefix's {ending}")


@pytest.mark.parametrize(
    ("kind", "ending"),
    [("linear", ".npz"), ("linear", ".json"), ("adapter", ".safetensors"), ("adapter", ".json")],
)
def test_a_trained_scorer(tmp_path, kind, ending, record_property):
    from lapa2_interp.scoring.adapter import ADAPTER_ENDING, AdapterCard
    from lapa2_interp.scoring.linear import LinearCard
    from lapa2_interp.scoring.task_scorer import SHIPPED_WEIGHTS

    form, weights = (LinearCard, ".npz") if kind == "linear" else (AdapterCard, ADAPTER_ENDING)
    for file in SHIPPED_WEIGHTS.glob("sentiment*"):
        shutil.copy(file, tmp_path)
    file = (tmp_path / f"sentiment{weights}").with_suffix(ending)
    also = newer(file.read_bytes()) if ending == ".json" else ()
    drill(
        file,
        lambda: load_card(form, kind, "sentiment", tmp_path, weights).model_dump_json(),
        record_property,
        also,
        f"{kind} scorer's {ending}",
    )


def test_the_converted_model(tmp_path, record_property):
    """A damaged file of the cached SmolLM2 is seen; here small files stand for it."""
    from lapa2_interp.models.smollm2 import _find_damage, _write_seal

    count, rng = Count(), random.Random(4)
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes(rng.randbytes(5000))
    _write_seal(tmp_path)
    for name in ("model.safetensors", "config.json", "seal.json"):
        whole = (tmp_path / name).read_bytes()
        for done, data in ways(whole, rng):
            (tmp_path / name).write_bytes(data)
            seen = _find_damage(tmp_path) is not None
            assert seen or name == "seal.json", (name, done)
            count.again += seen
            count.same += not seen
            (tmp_path / name).write_bytes(whole)
    assert _find_damage(tmp_path) is None
    count.record(record_property, "the converted SmolLM2")


def test_the_folder_of_a_model(tmp_path, record_property):
    """A model of one's own has no checksum: a file that can be read makes another model, which a
    run tells from the one it was begun with. What cannot be read is refused in one line."""
    from lapa2_interp.models.load import load_transformers

    network, tokenizer, _ = load_transformers("tiny-llama")
    network.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    wanted, count, rng = model_card(load_model(str(tmp_path))).weights, Count(), random.Random(5)
    for file in sorted(tmp_path.iterdir()):
        whole = file.read_bytes()
        for done, data in ways(whole, rng, 2 * POINTS):
            file.write_bytes(data)
            try:
                found = load_model(str(tmp_path))
            except Lapa2Error as error:
                text = one_line(error)
                assert str(tmp_path) in text or "tokenizer" in text, done
                count.refused += 1
            else:
                assert model_card(found).weights != wanted, (file.name, done)
                count.again += 1
        file.write_bytes(whole)
    assert model_card(load_model(str(tmp_path))).weights == wanted
    count.record(record_property, "a model's folder (made again: another model)")


def test_scores(tmp_path, record_property, capsys):
    """A score is read as it was, asked for again, or the file is refused in one line."""
    wanted = {f"{i:064x}": (i / 7, 1 - i / 7) for i in range(200)}
    file, count = tmp_path / "scores.sqlite", Count()
    with ScoreCache(tmp_path) as cache:
        cache.put(wanted.items())
    whole = file.read_bytes()
    for done, data in list(ways(whole, random.Random(2), 10 * POINTS)):
        file.write_bytes(data)
        try:
            with ScoreCache(tmp_path) as cache:
                found = cache.get(list(wanted))
        except Lapa2Error as error:
            line_of(error)
            count.refused += 1
            continue
        assert found.items() <= wanted.items(), done
        whole_again = found == wanted
        count.same += whole_again
        count.again += not whole_again
    count.record(record_property, "scores.sqlite")


def test_a_selection(tmp_path, record_property):
    """The card of `lapa2 select`."""
    file = tmp_path / "selection.json"
    line = f"select planted --score mass --heads 2 --tokens 4 --device cpu --out {file}"
    assert main(line.split()) == 0
    drill(file, lambda: Selection.load(file), record_property, newer(file.read_bytes()))


def test_the_store_of_a_circuit(tmp_path, record_property, capsys):
    """A damaged line is made again; a damaged first line is refused."""
    from lapa2_interp.circuits.result_store import ResultStore

    file, count = tmp_path / "units.jsonl", Count()
    wanted = {f"unit {i}": {"js": np.linspace(0, 1 / (i + 1), 5)} for i in range(20)}
    store = ResultStore(file, "key")
    for name, values in wanted.items():
        store.add(name, values)
    store.close()
    whole = file.read_bytes()
    for done, data in list(ways(whole, random.Random(3), 3 * POINTS)):
        file.write_bytes(data)
        try:
            store = ResultStore(file, "key")
        except Lapa2Error as error:
            line_of(error)
            count.refused += 1
            continue
        store.close()
        for name, values in store.results.items():
            assert np.array_equal(values["js"], wanted[name]["js"]), done
        lost = len(store.results) < len(wanted)
        count.again += lost
        count.same += not lost
    count.record(record_property, "units.jsonl")


def test_the_texts_of_a_study(tmp_path, record_property):
    from lapa2_interp._util.files import with_checksums
    from lapa2_interp.circuits.study import load_texts

    file = tmp_path / "contrast_set.json"
    file.write_text(with_checksums({"settings": {"seed": 1}, "texts": [["The lake", [1, 2, 3]]]}))
    drill(file, lambda: load_texts(tmp_path), record_property)


def test_a_checkpoint(tmp_path, record_property):
    """Of a training; PyTorch itself would read a flipped bit."""
    torch.manual_seed(0)
    file = tmp_path / "state.pt"
    torch.save({"parameters": {"a": torch.randn(40, 40)}, "step": 7}, file)

    def read():
        try:
            found = read_checkpoint(file, "cpu")
            return found["parameters"]["a"].tolist(), found["step"]
        except (ValueError, KeyError) as error:
            raise Lapa2Error(f"{file.name}; {' '.join(str(error).split())}") from error

    drill(file, read, record_property, kind="a training's checkpoint")


@pytest.mark.parametrize("name", ["grid.toml", "task.toml", "prompts.txt", "prompts.jsonl"])
def test_what_people_write(tmp_path, home, name, record_property):
    """Grids, tasks and prompts have no checksum: what was changed is another cell, with another
    key. What cannot be read is refused in one line."""
    file, count = tmp_path / name, Count()
    text = {
        "grid.toml": (home / "grid.toml").read_text(),
        "task.toml": 'length_counts_prompt = false\n[attributes.good]\nprefix = "Good."\n'
        '[attributes.bad]\nprefix = "Bad."\n[prompts]\ntexts = ["The lake"]\n',
        "prompts.txt": "The lake\nThe sea\n",
        "prompts.jsonl": '{"prompt": "The lake"}\n{"prompt": {"text": "The sea"}}\n',
    }[name]
    file.write_text(text)

    def read():
        if name == "grid.toml":
            return tuple(cell.key for cell in load_grid(str(file)).cells)
        if name == "task.toml":
            from lapa2_interp.methods import load_task

            return load_task(str(file)).model_dump_json()
        return read_prompts(file)

    wanted = read()
    for _, data in list(ways(text.encode(), random.Random(name), 3 * POINTS)):
        file.write_bytes(data)
        try:
            found = read()
        except Lapa2Error as error:
            one_line(error)
            count.refused += 1
        else:
            count.same += found == wanted
            count.again += found != wanted
    count.record(record_property, f"{name} (made again: another cell)")
