"""`lapa2 bench` in its short form. Of speeds, only orderings that hold on any machine are asserted."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from lapa2_interp._util.errors import Lapa2Error
from lapa2_interp.attention.batch_bias import BatchBias
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.cli.app import main
from lapa2_interp.generation import loop
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.air_decoding import AirDecoding
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.card import network_of
from lapa2_interp.models.load import load_tokenizer
from lapa2_interp.runs.contenders import PARTS, prompt_tokens
from lapa2_interp.runs.speed import (
    COLUMNS,
    CONFIGS,
    MORE,
    TEXT,
    Setting,
    _load,
    _plan,
    bench,
)

ALL = [
    "transformers-eager",
    "transformers-sdpa",
    "transformer-lens",
    "unpacked",
    "packed",
    "packed-transformers",
    "roofline",
]
SHORT = {
    "shapes": ["tiny-gpt2"],
    "contexts": [10],
    "length": 6,
    "dtypes": ["float32"],
    "device": "cpu",
    "repeats": 2,
}


@pytest.mark.parametrize(
    ("shape", "size"),
    [("gpt2-small", 124_439_808), ("gpt2-medium", 354_823_168), ("llama-7b", 6_738_415_616)],
)
def test_shapes_have_the_size_of_their_models(shape, size):
    config, fields = CONFIGS[shape]
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(config(**fields)).num_parameters() == size


@pytest.mark.parametrize("method", ["prefix", "air-decoding", "preadd"])
def test_contenders_share_weights_and_prompts_have_the_tokens_asked_for(method):
    subject = _load("tiny-gpt2", "float32", "cpu")
    setting = Setting("tiny-gpt2", "float32", method, samples=2, context=9, length=4, trace="none")
    todo = _plan(subject.model, setting)
    assert todo.steps == (4,)
    assert {layout.l_pro for (layout,) in todo.layouts} == {9}
    assert len(todo.batches) == 1
    for ids in prompt_tokens(todo, torch.device("cpu")):
        assert torch.allclose(subject.plain(ids).logits, subject.model(ids), atol=1e-4)
    assert (
        subject.plain.get_input_embeddings().weight
        is network_of(subject.model).get_input_embeddings().weight
    )


@pytest.mark.parametrize("method", ["prefix", "air-decoding", "preadd"])
def test_ids_of_another_tokenizer_fit_every_vocabulary(method):
    """Shapes with random weights are given SmolLM2's tokenizer; Llama has 32,000 words."""
    tokenizer, task = load_tokenizer("smollm2-135m"), load_task("sentiment")
    cell = cell_of(
        "smollm2-135m",
        method=method,
        task=task,
        attribute=next(iter(task.attributes)),
        prompts=[TEXT],
        dtype="float32",
    )
    fronts = [each.prefix for each in cell.branches if each.prefix]
    assert fronts
    assert max(tokenizer(" ".join([TEXT, MORE, *fronts])).input_ids) < 32_000
    assert len(tokenizer(TEXT + MORE * 9).input_ids) == len(TEXT.split()) + 9 * len(MORE.split())


@pytest.fixture(scope="module")
def found():
    return bench(**SHORT, samples=[1, 3], breakdown=True)


def test_every_contender_has_a_row_in_every_setting(found):
    table = found.table
    assert table["contender"].tolist() == ALL * 2
    assert set(COLUMNS) <= set(table.columns)
    assert table["samples"].tolist() == [1] * 7 + [3] * 7
    assert (table["rows"] == 3 * table["samples"]).all(), "Air-Decoding has three branches"


def test_the_numbers_of_a_row_agree(found):
    table = found.table
    assert (table["steps"] == 5).all()
    tokens = table["samples"] * table["steps"]
    assert np.allclose(table["tokens_per_s"] * table["steps"] * table["step_seconds"], tokens)
    assert np.allclose(table["row_tokens_per_s"] * table["step_seconds"], table["rows"])
    timed = table[table["contender"] != "roofline"]
    assert np.allclose(
        timed["seconds"] - timed["prompt_seconds"], timed["steps"] * timed["step_seconds"]
    )
    assert (timed["prompt_seconds"] > 0).all()


def test_ratios_are_those_of_the_steps(found):
    for _, part in found.table.groupby("samples"):
        step = part.set_index("contender")["step_seconds"]
        for column, peer in (
            ("ratio", ALL[0]),
            ("to_float32", ALL[0]),
            ("to_sdpa", ALL[1]),
            ("of_roofline", ALL[-1]),
        ):
            assert np.allclose(part[column], step[peer] / step.to_numpy())


def test_products_alone_are_faster_than_any_whole_step(found):
    for _, part in found.table.groupby("samples"):
        step = part.set_index("contender")["step_seconds"]
        assert (step["roofline"] < step.drop("roofline")).all()
    notes = found.table.set_index("contender")["note"]
    assert all("257x32: " in note and note.count(":") == 5 for note in notes["roofline"])
    assert (notes.drop("roofline") == "").all()


def test_more_samples_make_more_tokens_in_a_second(found):
    packed = found.table[found.table["contender"] == "packed"].set_index("samples")["tokens_per_s"]
    assert packed[3] > packed[1]


def test_a_full_trace_does_not_multiply_a_step():
    speeds = {
        trace: bench(**SHORT, samples=[3], only=["unpacked"], trace=trace).table["tokens_per_s"][0]
        for trace in ("none", "full")
    }
    assert speeds["full"] > 0.2 * speeds["none"]


def test_the_parts_of_a_step_are_its_whole(found):
    parts = found.parts
    assert parts["part"].tolist() == list(PARTS) * 2
    assert np.allclose(parts.groupby("samples")["share"].sum(), 1)
    assert (parts["share"] > 0).all()
    assert BatchBias.add.__name__ == "add"
    assert (Recorder.observe.__name__, AirDecoding.combine.__name__) == ("observe", "combine")
    assert loop.draw.__name__ == "draw"


def test_a_method_of_one_branch_is_compared_with_generate():
    table = bench(**SHORT, samples=[2], method="prefix", only=["packed", "transformers-sdpa"]).table
    assert table["contender"].tolist() == ["transformers-sdpa", "packed"]
    assert table["rows"].tolist() == [2, 2]
    assert table["ratio"].isna().all(), "transformers-eager did not run"
    assert table["to_sdpa"][0] == 1


def test_the_command_writes_a_table_a_page_and_a_figure(tmp_path, capsys):
    words = "bench --shape tiny-gpt2 --samples 2 --context 8 --length 4 --dtype float32 bfloat16 --repeats 1"
    words += " --device cpu --method preadd --threads 1 --breakdown --out"
    threads = torch.get_num_threads()
    assert main([*words.split(), str(tmp_path / "new" / "bench")]) == 0
    assert torch.get_num_threads() == threads
    out = tmp_path / "new" / "bench"
    assert {file.name for file in out.iterdir()} == {
        "bench.csv",
        "bench.md",
        "bench.png",
        "parts.csv",
    }
    table = pd.read_csv(out / "bench.csv")
    assert len(table) == 14
    assert (table["rows"] == 4).all()
    half = table[table["dtype"] == "bfloat16"].set_index("contender")
    whole = table[table["dtype"] == "float32"].set_index("contender")
    assert half["to_float32"]["packed"] == pytest.approx(
        whole["step_seconds"]["transformers-eager"] / half["step_seconds"]["packed"]
    )
    printed = capsys.readouterr().out
    first = printed.splitlines()[0]
    assert "; 1 thread; torch " in first
    assert "transformer-lens " in first
    assert (table["machine"] == first).all()
    assert "| x eager |" in (page := (out / "bench.md").read_text("utf-8"))
    assert page.startswith(first)
    assert page in printed


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"shapes": ["gpt2-smal"]}, ["unknown shape 'gpt2-smal'", "gpt2-medium", "did you mean 'gpt2-small'"]),
        ({"shapes": ["llama-7b"]}, ["llama-7b", "CUDA", "'cpu'", "smollm2-135m"]),
        ({"only": ["packd"]}, ["unknown contender 'packd'", "roofline", "did you mean 'packed'"]),
        ({"method": "gedi"}, ["unknown method 'gedi'", "air-decoding"]),
        ({"trace": "some"}, ["unknown trace 'some'", "pooled"]),
        ({"dtypes": ["float31"]}, ["unknown dtype 'float31'", "bfloat16"]),
        ({"samples": [0]}, ["samples 0", "1 or more"]),
        ({"length": 1}, ["length 1", "2 or more"]),
        ({"threads": 0}, ["threads 0", "1 or more"]),
        ({"contexts": [300]}, ["exceed the context of 256 of tiny-gpt2"]),
        ({"device": "cuda:77"}, ["cannot use device 'cuda:77'", "allowed: cpu"]),
    ],
    ids=json.dumps,
)  # fmt: skip
def test_refusals_name_what_is_allowed(given, words):
    with pytest.raises(Lapa2Error) as error:
        bench(**SHORT | given)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


def test_a_value_given_twice_is_timed_once():
    twice = {"shapes": ["tiny-gpt2"] * 2, "samples": [1, 1], "contexts": [10, 10]}
    table = bench(
        **SHORT | twice | {"dtypes": ["float32"] * 2, "repeats": 1},
        only=["transformers-eager", "packed"],
    ).table
    assert table["contender"].tolist() == ["transformers-eager", "packed"]
    assert (table["ratio"] == table["step_seconds"][0] / table["step_seconds"]).all()


def test_a_folder_that_is_there_is_refused_before_anything_is_timed(tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    assert main(["bench", "--shape", "tiny-gpt2", "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "choose another --out" in printed.err
