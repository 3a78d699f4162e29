"""The repository for the hub: its own loop and masks, which import nothing of ours, give our texts."""

import sys
from pathlib import Path

import pytest
import torch
from conftest import load
from families import FAMILIES, PLAIN, SIZE, save_family
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

from lapa2_interp import Layout, generate, load_model
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.bias.padded_rows import PaddedRows
from lapa2_interp.models.tiny import TINY

FOLDER = Path(__file__).parents[2] / "analyses" / "hub" / "lapa2"
PROMPTS = ("The lake", "A book is on the table")
SETTINGS = {"custom_generate": str(FOLDER), "trust_remote_code": True, "eos_token_id": []}
ROWS = {
    "inputs": torch.tensor([[0, 40, 77, 9, 120, 33, 200], [3, 3, 0, 40, 77, 9, 61]]),
    "attention_mask": torch.tensor([[1] * 7, [0, 0, *[1] * 5]]),
}
"""A row, and a shorter one beside it."""
N = 3
"""Tokens of the prefix of `ROWS`, after one of BOS."""


@pytest.fixture(autouse=True)
def modules_cache(tmp_path, monkeypatch):
    """Where transformers puts the code that it copies."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr("sys.path", [*sys.path])


def rows_of(model):
    layouts = [Layout.of(model.tokenizer, "Very positive:", prompt) for prompt in PROMPTS]
    rows = PaddedRows.of(left_pad(layouts))
    return {"inputs": rows.ids, "attention_mask": rows.mask}, layouts[0].l_pre


def network_of(model_type, dtype="float32", **settings):
    """A random network of transformers."""
    settings = {key: value for key, value in {**SIZE, **settings}.items() if value is not None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = AutoConfig.for_model(model_type, **settings)
        return AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()


def family_of(name, dtype="float32"):
    return network_of(FAMILIES[name].model_type, dtype, **FAMILIES[name].settings)


def made(network, **settings):
    """The tokens that the folder's code makes after `ROWS`."""
    settings = {**ROWS, **SETTINGS, "prefix_tokens": N, "max_new_tokens": 6} | settings
    return network.generate(**settings)[:, ROWS["inputs"].shape[1] :].tolist()


def own(network, **settings):
    """The tokens that transformers makes after `ROWS`."""
    settings = {**ROWS, "max_new_tokens": 6, "eos_token_id": None} | settings
    return network.generate(**settings)[:, ROWS["inputs"].shape[1] :].tolist()


def texts_of_both(model, alpha):
    """Tokens of the folder's code and of `generate`, by prompt; our length counts the prompt, too."""
    ours = generate(
        model, list(PROMPTS), attribute="positive", alpha=alpha, top_k=1, length=46
    ).texts()["tokens"]
    inputs, n = rows_of(model)
    folder = model.original_model.generate(
        **inputs, **SETTINGS, prefix_tokens=n, alpha=alpha, max_new_tokens=46
    )[:, -46:].tolist()
    assert all(len(text) >= 24 for text in ours)
    return [row[: len(text)] for row, text in zip(folder, ours, strict=True)], [*map(list, ours)]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 2.0])
def test_greedy_texts_are_ours_token_by_token(alpha):
    for name in TINY:
        folder, ours = texts_of_both(load(name, "float64", PLAIN), alpha)
        assert folder == ours


@pytest.mark.parametrize("name", ["Gemma 2", "gpt-oss", "Llama 4", "OPT"])
def test_texts_of_models_with_caps_sinks_windows_and_chunks_are_ours(name, tmp_path, monkeypatch):
    family = FAMILIES[name]
    wide = {
        key: 128 for key in ("sliding_window", "attention_chunk_size") if key in family.settings
    }
    monkeypatch.setitem(FAMILIES, name, family._replace(settings={**family.settings, **wide}))
    model = load_model(save_family(name, tmp_path / "model"), "float64", "cpu", PLAIN)
    folder, ours = texts_of_both(model, alpha=2.0)
    assert folder == ours


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "name",
    ["Llama", "Qwen2", "GPT-2", "GPT-NeoX", "Gemma 3", "Mistral", "Mixtral", "GPT-J", "Phi-3"],
)
def test_without_a_bias_texts_are_those_of_transformers(name, dtype):
    network = family_of(name, dtype)
    assert made(network, alpha=0.0) == own(network)
    assert made(network, alpha=8.0) != own(network)


class Forbid(LogitsProcessor):
    """Tokens below 100 are never drawn."""

    def __call__(self, input_ids, scores):
        scores[:, :100] = -torch.inf
        return scores


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True},
        {"do_sample": True, "temperature": 3.0, "top_k": 0, "top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 5.0, "no_repeat_ngram_size": 2, "bad_words_ids": [[7]]},
        {"do_sample": True, "num_return_sequences": 2},
        {"generation_config": GenerationConfig(do_sample=True, temperature=2.0, max_new_tokens=4)},
        {"logits_processor": LogitsProcessorList([Forbid()])},
        {"use_cache": True, "num_beams": 1, "top_p": 1.0, "repetition_penalty": 1.0, "top_k": None},
    ],
    ids=" ".join,
)
def test_settings_and_the_models_own_are_followed_as_transformers_follows_them(settings):
    network = family_of("Llama")
    for defaults in ({}, {"do_sample": True, "top_k": 5}, {"max_new_tokens": 3, "pad_token_id": 7}):
        network.generation_config = GenerationConfig(bos_token_id=0, **defaults)
        torch.manual_seed(0)
        wanted = own(network, **settings)
        torch.manual_seed(0)
        assert made(network, alpha=0.0, **settings) == wanted


def test_texts_end_and_are_padded_where_the_models_own_settings_say():
    network = family_of("Llama")
    end = made(network)[0][1]
    network.generation_config = GenerationConfig(
        eos_token_id=[end], pad_token_id=7, max_new_tokens=9
    )
    ended = network.generate(
        **ROWS, custom_generate=str(FOLDER), trust_remote_code=True, prefix_tokens=N
    )[0, 7:].tolist()
    assert (len(ended), ended[1]) == (9, end)
    assert set(ended[2:]) == {7}


def test_temperature_0_is_greedy_and_a_tensor_is_an_alpha():
    network = family_of("Llama")
    wanted = made(network)
    assert made(network, temperature=0.0, do_sample=True) == wanted
    assert made(network, alpha=torch.tensor(0.5)) == wanted


def test_a_row_without_a_mask_has_no_padding():
    network = family_of("Llama")  # its BOS is also its token of padding, and another ends texts
    network.generation_config.eos_token_id = 1
    row = {"inputs": ROWS["inputs"][:1], "attention_mask": None, "eos_token_id": 1}
    assert made(network, **row)[0] == made(network, eos_token_id=1)[0]


def test_the_test_of_a_model_runs_once_and_changes_nothing():
    network, passes = family_of("Phi-3"), []
    network.register_forward_pre_hook(lambda *_: passes.append(1))
    before = {name: value.clone() for name, value in network.named_buffers()}
    before |= {name: value.clone() for name, value in network.named_parameters()}
    drawn = torch.get_rng_state()
    made(network, max_new_tokens=2)
    first = len(passes)
    made(network, max_new_tokens=2)
    assert (first, len(passes) - first) == (2 + 6, 2)
    assert torch.equal(torch.get_rng_state(), drawn)
    after = dict([*network.named_buffers(), *network.named_parameters()])
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_beams": 2}, "has no num_beams=2"),
        ({"penalty_alpha": 0.6}, "has no penalty_alpha=0.6"),
        ({"prompt_lookup_num_tokens": 2}, "has no prompt_lookup_num_tokens=2"),
        ({"stop_strings": ["."]}, r"has no stop_strings=\['.'\]"),
        ({"cache_implementation": "quantized"}, "has no cache_implementation='quantized'"),
        ({"return_dict_in_generate": True}, "has no return_dict_in_generate=True"),
        ({"generation_config": GenerationConfig(num_beams=3)}, "has no num_beams=3"),
        ({"token_type_ids": torch.zeros(2, 7)}, "has no token_type_ids; leave it out"),
        ({"position_ids": torch.zeros(2, 7)}, "has no position_ids"),
        ({"streamer": object()}, "has no streamer"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 leaves no token"),
        ({"prefix_tokens": 99}, "is not a part of every row"),
        ({"prefix_tokens": 0}, "is not a part of every row"),
        ({"prefix_tokens": 2.5}, "is not a part of every row"),
        ({"bos_tokens": -1}, "is not a part of every row"),
        ({"alpha": -0.5}, "gives no bias from 0"),
        ({"alpha": float("nan")}, "gives no bias from 0"),
        ({"alpha": 1e6}, "gives no bias from 0"),
        ({"attention_mask": 1 - ROWS["attention_mask"]}, "padded on the left"),
        ({"attention_mask": torch.tensor([[1] * 7, [1, 0, *[1] * 5]])}, "padded on the left"),
    ],
)
def test_what_it_cannot_do_is_refused(changes, problem):
    with pytest.raises(ValueError, match=problem):
        made(load("tiny-gpt2", "float64", PLAIN).original_model, **changes)


def test_what_the_models_own_settings_ask_for_is_refused():
    network = family_of("Llama")
    network.generation_config.num_beams = 4
    with pytest.raises(ValueError, match="has no num_beams=4.*give num_beams=1"):
        made(network)
    assert made(network, num_beams=1) == made(family_of("Llama"))


@pytest.mark.parametrize(
    ("model_type", "settings", "problem"),
    [
        ("mpt", {"num_key_value_heads": None}, "does not add numbers of a mask"),
        ("doge", {}, "does not add numbers of a mask"),
        ("codegen", FAMILIES["CodeGen"].settings, "does not add numbers of a mask"),
        ("bloom", {"num_key_value_heads": None}, "cannot read this loop"),
        ("falcon", {"num_key_value_heads": None, "alibi": True}, "cannot read this loop"),
        ("rwkv", {"attention_hidden_size": 32, "context_length": 64}, "cannot read this loop"),
        ("mamba", {"state_size": 4}, "'linear_attention', which are not attention alone"),
        ("jamba", FAMILIES["Jamba"].settings, "which are not attention alone"),
        ("lfm2", FAMILIES["LFM2"].settings, "'conv', which are not attention alone"),
        ("mistral", {"sliding_window": 8}, "'sliding_attention', which see 8 keys"),
        ("gpt_neo", {**FAMILIES["GPT-Neo"].settings, "window_size": 8}, "'local', which see 8"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_it_would_misread_is_refused(model_type, settings, problem, dtype):
    with pytest.raises(ValueError, match=f"{problem}.*the package lapa2-interp"):
        made(network_of(model_type, dtype, **settings))


def test_a_model_in_training_mode_and_other_attention_are_refused():
    network = family_of("Llama")
    with pytest.raises(ValueError, match="call model.eval"):
        made(network.train())
    network.eval().set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="'flex_attention' ignores the bias"):
        made(network)


def test_rotary_factors_that_change_in_mid_text_are_refused():
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    network = network_of("llama", max_position_embeddings=10, rope_parameters=dynamic)
    assert made(network, alpha=0.0, max_new_tokens=4) == own(network, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"other rotary factors \(dynamic\) beyond 10 tokens"):
        made(network, max_new_tokens=5)
    longrope = FAMILIES["Phi-3"].settings["rope_parameters"]
    network = network_of("phi3", original_max_position_embeddings=10, rope_parameters=longrope)
    assert made(network, alpha=0.0, max_new_tokens=4) == own(network, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"other rotary factors \(longrope\) beyond 10 tokens"):
        made(network, max_new_tokens=5)
    beyond = {name: rows[:1].repeat(1, 2) for name, rows in ROWS.items()}
    assert made(network, **beyond, alpha=0.0) == own(network, **beyond)
