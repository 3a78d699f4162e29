"""The speed study in its short form. Of speeds, only orders that hold on any machine are asserted."""

import sys
from functools import partial
from time import process_time

import numpy as np
import pandas as pd
import pytest
import torch

from lapa2_interp.models.facts import facts_of


@pytest.fixture(scope="module")
def bench():
    from analyses.speed import bench as module

    return module


def run(bench, monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["bench.py", "--shape", "tiny-gpt2", *words.split()])
    # The toy device of another file, which stays for the life of the process, cannot be waited for.
    monkeypatch.setattr(torch.accelerator, "is_available", torch.cuda.is_available)
    bench.main()


@pytest.mark.slow
def test_the_study_writes_a_table_and_a_page(bench, without_types, monkeypatch, tmp_path, capsys):
    threads = torch.get_num_threads()
    monkeypatch.setattr(bench, "COPIED", 1 << 22)
    # Beside other tests, only the time of this process tells.
    monkeypatch.setattr(bench, "Timer", partial(bench.Timer, timer=process_time))
    words = "--samples 1 3 --context 8 --length 10 --dtype float32 --repeats 2 --threads 1 --out"
    run(bench, monkeypatch, f"{words} {tmp_path}/new/bench")
    assert torch.get_num_threads() == threads
    table = pd.read_csv(tmp_path / "new" / "bench" / "bench.csv")
    assert table["contender"].tolist() == list(bench.CONTENDERS) * 2
    assert (table["rows"] == 3 * table["samples"]).all(), "Air-Decoding has three branches"
    for _, part in table.groupby("samples"):
        step = part.set_index("contender")["step"]
        assert (step["roofline"] < step.drop(["roofline", "bandwidth"])).all()
    page = (tmp_path / "new" / "bench" / "bench.md").read_text("utf-8")
    assert page in capsys.readouterr().out
    assert "x eager" in page
    assert "1 threads; torch" in page


def test_ratios_are_those_of_the_steps(bench):
    rows = {"shape": "s", "dtype": "float32", "samples": 4, "context": 8, "rows": 12}
    names = ["transformers-eager", "transformers-sdpa", "packed", "roofline", "bandwidth"]
    table = pd.DataFrame(
        [
            {**rows, "contender": n, "step": s, "peak": 2e9 if n == "packed" else float("nan")}
            for n, s in zip(names, (0.4, 0.2, 0.1, 0.05, 0.025), strict=True)
        ]
    )
    shown = bench.shown(table).set_index("contender").loc["packed"]
    assert shown["x eager"] == "4.00"
    assert shown["x sdpa"] == "2.00"
    assert shown["of roofline"] == "50 %"
    assert shown["of bandwidth"] == "25 %"
    assert shown["GB"] == "2.0"
    assert shown["tokens/s"] == "40.0"


def test_bytes_of_a_step(bench):
    """Weights, and two numbers a layer, KV head and dimension of each live key."""
    bridge, plain, _ = bench.load("tiny-llama", "float32", "cpu")
    plan = bench.planned(bridge, "air-decoding", 2, 9, 4, trace="none")
    config = plain.config
    read = {
        name: parameter.numel()
        for name, parameter in plain.named_parameters()
        if name != "model.embed_tokens.weight"
    }
    live = sum(
        2 * (row[0].n_live + 2) for row in plan.arrangement.layouts
    )  # two samples, two new tokens
    width = config.num_key_value_heads * config.head_dim
    keys = live * config.num_hidden_layers * 2 * width
    tied = config.tie_word_embeddings * config.vocab_size * config.hidden_size
    assert bench.read_bytes(plain, plan) == 4 * (sum(read.values()) + tied + keys)


@pytest.mark.parametrize("method", ["prefix", "air-decoding", "preadd"])
def test_contenders_share_weights_and_prompts_have_the_tokens_asked_for(bench, method):
    bridge, plain, direct = bench.load("tiny-gpt2", "float32", "cpu")
    plan = bench.planned(bridge, method, 2, 9, 4, trace="none")
    assert plan.arrangement.steps == (4,)
    assert {row[0].l_pro for row in plan.arrangement.layouts} == {9}
    assert len(plan.batches) == 1
    for ids in bench.prompt_tokens(plan, torch.device("cpu")):
        assert torch.allclose(plain(ids).logits, bridge(ids), atol=1e-4)
    own, shared = (
        network.get_input_embeddings().weight for network in (plain, facts_of(direct).network)
    )
    assert own is shared


@pytest.mark.parametrize(
    ("shape", "size"),
    [("gpt2-small", 124_439_808), ("gpt2-medium", 354_823_168), ("llama-7b", 6_738_415_616)],
)
def test_shapes_have_the_size_of_their_models(bench, shape, size):
    config, fields = bench.CONFIGS[shape]
    with torch.device("meta"):
        network = bench.AutoModelForCausalLM.from_config(config(**fields))
    assert network.num_parameters() == size


def test_growth_measures_its_points_and_finds_exponents():
    from analyses.speed import growth

    points = ("keys", 64), ("rows", 2), ("heads", 4), ("cells", 3), ("prompt, fused", 64)
    for what, n in points:
        assert growth.measure("tiny-gpt2", what, n)["seconds"] > 0
    n = np.array([1, 2, 4, 8, 16, 32])
    table = pd.DataFrame({"what": "rows", "n": n, "seconds": 0.1 * n**1.5, "bytes": 7.0 * n**2})
    fits = growth.exponents(table)
    assert fits[["seconds", "bytes"]].to_numpy() == pytest.approx(np.array([[1.5, 2.0]]))
    assert len(growth.draw(table, fits).axes) == 2
    two = pd.concat([table.assign(what=f"prompt, {attn}") for attn in ("matrix", "fused")])
    panels = growth.draw(two, growth.exponents(two)).axes
    assert [len(panel.lines) for panel in panels] == [2, 2]
    assert panels[0].get_title() == "exponent 1.50, 1.50"
