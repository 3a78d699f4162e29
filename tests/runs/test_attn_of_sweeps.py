"""`attn` of a sweep: how its workers read prompts. Records keep it, and keys do not have it."""

import numpy as np
import pytest

from lapa2_interp.errors import ModelError
from lapa2_interp.runs.run import load_run
from lapa2_interp.runs.store import read_batch
from lapa2_interp.runs.sweep import sweep
from lapa2_interp.runs.worker import Worker

GRID = """
model = "tiny-gpt2"
model_class = "TransformersModel"
dtype = "float32"
trace = "pooled"
task = "sentiment"
attribute = "positive"
prompts = 2
samples = 2
length = 18
max_rows = 2
method = "prefix"
augmentation = ["paper", { alpha = 1.0 }]
"""


@pytest.fixture
def grid(tmp_path):
    (tmp_path / "one.toml").write_text(GRID)
    return str(tmp_path / "one.toml")


def sweep_on_cpu(grid, run, notes, **settings):
    return sweep(grid, run, device="cpu", notify=notes.append, **settings)


def stopped_after(batches, monkeypatch, sweep_once):
    """A sweep in this process that is stopped."""
    make, made = Worker.make_batch, []

    def make_some(*arguments):
        if len(made) == batches:
            raise KeyboardInterrupt
        made.append(make(*arguments))
        return made[-1]

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Worker, "make_batch", make_some)
        sweep_once()


def texts_and_traces(run):
    """By key and batch: way of attention, tokens, and the attention on the prefix."""
    facts = {}
    for key, cell in run.by_key.items():
        for number in range(2):
            batch = read_batch(run.cell_folder(key), number, cell)
            tokens = [list(ids) for ids in batch.texts["tokens"]]
            trace = batch.trace["prefix"].values.tobytes()
            facts[key, number] = batch.record.model.attn, tokens, trace
    return facts


@pytest.mark.long
def test_a_resumed_sweep_without_the_matrix_has_the_same_bits(grid, tmp_path, monkeypatch):
    """Begun in this process, and finished by two others."""
    notes, fused = [], {"attn": "fused", "workers": 1}
    sweep_on_cpu(grid, tmp_path / "one", notes, **fused)
    stopped_after(1, monkeypatch, lambda: sweep_on_cpu(grid, tmp_path / "two", notes, **fused))
    sweep_on_cpu(grid, tmp_path / "two", notes, attn="fused", workers=2)
    assert not [note for note in notes if "made again" in note]
    one, two = (texts_and_traces(load_run(tmp_path / name)) for name in ("one", "two"))
    assert one == two
    assert {attn for attn, *_ in one.values()} == {"fused"}


def test_keys_do_not_have_it_and_a_cell_is_of_one_kind(grid, tmp_path, monkeypatch):
    notes = []
    sweep_on_cpu(grid, tmp_path / "auto", notes, workers=1)
    auto = texts_and_traces(load_run(tmp_path / "auto"))
    assert {attn for attn, *_ in auto.values()} == {"matrix"}, "its prompts are short"
    stopped_after(1, monkeypatch, lambda: sweep_on_cpu(grid, tmp_path / "two", notes, workers=1))
    sweep_on_cpu(grid, tmp_path / "two", notes, workers=1, attn="fused")
    assert any("1 finished batch made again; attn was matrix and is fused" in n for n in notes)
    run = load_run(tmp_path / "two")
    fused = texts_and_traces(run)
    assert {attn for attn, *_ in fused.values()} == {"fused"}
    assert fused.keys() == auto.keys()
    for at, (_, _, trace) in fused.items():
        pair = (np.frombuffer(x, np.float32) for x in (trace, auto[at][2]))
        np.testing.assert_allclose(*pair, atol=1e-6)


def test_hooks_form_the_matrix(tmp_path):
    (tmp_path / "one.toml").write_text(GRID.replace("TransformersModel", "TransformerBridge"))
    with pytest.raises(ModelError, match="TransformerBridge has hooks on the matrix"):
        sweep(str(tmp_path / "one.toml"), tmp_path / "run", device="cpu", attn="fused")
    assert not (tmp_path / "run").exists()
