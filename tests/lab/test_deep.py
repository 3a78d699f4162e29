"""The items long and deep: small runs of their grids on tiny models, and numbers by other ways."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import load, redraw, script

from lapa2_interp import Augmentation, Layout, load_run
from lapa2_interp.errors import RunError
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.runs.generate import make_cells
from lapa2_interp.runs.grid import load_grid
from lapa2_interp.runs.run import finished_cell, write_run

ROOT = Path(__file__).resolve().parents[2]
DEEP = """
model = "tiny-llama"
augmentation = "none"
dtype = "float32"
task = "sentiment"
attribute = "positive"
method = "prefix"
prompts = 4
samples = 2
length = 200
eos = "block"
trace = "none"
"""
LONG = """
model = "tiny-gpt2"
trace = "pooled"
dtype = "float32"
task = "sentiment"
method = "prefix"
prompts = 3
samples = 1
length = 48
eos = "block"
augmentation = ["none", "lapa2", "token-selective:tokens=1,alpha=0.55"]
"""


def made(folder, name, text):
    (folder / f"{name}.toml").write_text(text)
    grid = load_grid(str(folder / f"{name}.toml"))
    (model,) = {cell.model for cell in grid.cells}
    write_run(folder / "run", make_cells(load(model), grid.cells, name=name))
    return folder / "run"


def table(run, name):
    return pd.read_csv(run / "tables" / f"{name}.csv", keep_default_na=False, na_values=[""])


def test_deep_reads_what_the_law_leaves(tmp_path):
    """In layer 0, whose inputs are the text alone, LaPA2 multiplies the odds by the law exactly;
    shares and the rest are those of two readings, window by window."""
    run = made(tmp_path, "deep", DEEP)
    outcome = script("long/deep", run)
    assert outcome["edges"][:2] == [64, 128]
    assert 190 < outcome["edges"][2] < 256
    (first, *_), shares = outcome["lengths"].index.get_level_values("text"), {}
    for low, high in pairwise(outcome["edges"]):
        keys = np.arange(low, min(high, outcome["edges"][-1]))
        own = outcome["lengths"][first, low]
        assert own == pytest.approx(1 / (1 / keys).mean(), rel=0.02), "its texts may end earlier"
        shares[low] = 3.0 / outcome["lengths"].xs(low, level="l_kv")  # the mean of 3/l
    slope = outcome["slope"](pd.DataFrame(shares), *outcome["edges"][:2])
    assert slope.tolist() == pytest.approx([-1] * len(slope)), "also where the last window is wider"
    rows, heads = table(run, "deep"), table(run, "deep.heads")
    model, cells = load("tiny-llama"), load_run(run)
    (key,) = cells.by_key
    shares, gains = [], []
    for sample in finished_cell(cells, key).texts.itertuples():
        layout = Layout.of(model.tokenizer, "Very positive:", sample.prompt)
        pair = [
            teacher_forced(model, layout, [sample.tokens], Augmentation(alpha=alpha))["prefix"]
            for alpha in (0.0, 0.5)
        ]
        keys = len(layout.ids) + np.arange(pair[0].sizes["step"])
        inside = (keys >= 64) & (keys < 128)
        one, two = (trace[0, 0].to_numpy().astype(float)[inside] for trace in pair)
        shares.append([one.mean(), two.mean()])
        law = 0.5 * np.log((keys[inside] - 1) / layout.l_pre)  # the paper's l has no BOS
        gain = np.log(two / (1 - two)) - np.log(one / (1 - one))
        gains.append(gain.mean(axis=(0, 2)) / law.mean())
    rows = rows[rows["l_kv"] == 64]
    share = rows[rows["quantity"] == "share"].set_index("alpha")["mean"]
    assert share.tolist() == pytest.approx(np.mean(shares, axis=0), rel=1e-5)
    left = rows[rows["quantity"] == "part of the law that is left"]
    assert left["mean"].tolist() == pytest.approx(np.mean(gains, axis=0), rel=1e-4)
    assert left["mean"].iloc[0] == pytest.approx(1, abs=1e-4)
    assert abs(left["mean"].iloc[1:] - 1).max() > 1e-3
    assert len(heads) == 4 * model.cfg.n_layers * model.cfg.n_heads
    claims = table(run, "deep.claims").set_index("claim")
    assert set(claims["prompts"]) == {4}, "two texts of each"
    assert claims.loc["in layer 0 the law holds to 1 %", "raw"] == "as expected"
    derived = claims.index.str.contains("attention falls as")
    assert set(claims["whose"][derived]) == {"paper"}
    assert set(claims["whose"][~derived]) == {"ours"}
    redraw("long/deep", run)
    assert (run / "figures" / "deep.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_the_grid_is_refused(tmp_path):
    short = DEEP.replace("prompts = 4", "prompts = 1").replace("length = 200", "length = 20")
    with pytest.raises(RunError, match=r"no grid 'deep'"):
        script("long/deep", made(tmp_path, "long", short))


def test_long_texts_are_scored_in_eighths(tmp_path):
    run = made(tmp_path, "long", LONG)
    script("long/analyse", run, "--scorers", "linear", "accuracy", "masked", "echo", "repetition")
    rows = table(run, "long")
    accuracy = rows[(rows["metric"] == "acc") & (rows["attribute"] == "all")]
    assert sorted(accuracy["part"].unique()) == [*range(1, 9)]
    assert list(dict.fromkeys(accuracy["arm"])) == ["baseline", "lapa2", "token-selective"]
    assert {"acc", "acc masked", "echo %", "rep %"} <= set(rows["metric"])
    claims = table(run, "long.claims")
    assert claims["claim"].tolist() == [
        "the last eighth is less on target than the first: baseline",
        "the last eighth is as much on target as the first: lapa2",
        "the last eighth is more on target with lapa2 than with baseline",
        "the last eighth is more on target with token-selective than with lapa2",
    ]
    assert claims["expected"].tolist() == ["less", "same", "more", "more"]
    assert claims["margin"].tolist() == [5.0] * 4
    assert claims["whose"].tolist() == ["paper"] * 3 + ["ours"]
    steps = table(run, "long.steps")
    assert set(steps["arm"]) == {"baseline", "lapa2", "token-selective"}
    redraw("long/analyse", run)
    assert (run / "figures" / "long.png").read_bytes().startswith(b"\x89PNG")
