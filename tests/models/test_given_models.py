"""What takes a model takes its name, or a model made elsewhere; a bare network is told how."""

from pathlib import Path

import numpy as np
import pytest
from conftest import load

import lapa2_interp
from lapa2_interp import Layout, circuits, generate, teacher_forced
from lapa2_interp.errors import ModelError
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.models import TransformersModel, identify
from lapa2_interp.models.load import load_transformers

SETTINGS = {"attribute": "positive", "prompts": ["The lake"], "samples": 1, "length": 14}
SMALL = {"prompts": ["The lake"], "tokens": 2}


def made(attention="eager"):
    network, tokenizer, _ = load_transformers("tiny-llama")
    network.set_attn_implementation(attention)
    return TransformersModel(network, tokenizer, "mine")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_put_together_by_hand_generates_as_the_loaded_one(attention):
    model = made(attention)
    run = generate(model, alpha=1.0, **SETTINGS)
    wanted = generate(load("tiny-llama"), alpha=1.0, **SETTINGS)
    assert run.texts()["tokens"].tolist() == wanted.texts()["tokens"].tolist()
    shares = [result.trace()["prefix"].to_numpy() for result in (run, wanted)]
    np.testing.assert_allclose(*shares, atol=1e-5)
    facts = run.manifest().model
    assert (facts.name, facts.model_class) == ("mine", "TransformersModel")
    assert facts.weights.startswith("sha256 ")


def test_a_bridge_made_elsewhere_generates(tmp_path):
    from transformer_lens.model_bridge import TransformerBridge

    network, tokenizer, _ = load_transformers("tiny-llama")
    for part in (network, tokenizer):
        part.save_pretrained(tmp_path)
    run = generate(TransformerBridge.boot_transformers(str(tmp_path), device="cpu"), **SETTINGS)
    wanted = generate(load("tiny-llama"), **SETTINGS)
    assert run.texts()["text"].tolist() == wanted.texts()["text"].tolist()
    assert run.manifest().model.weights.startswith("sha256 ")


def test_a_folder_is_given_as_a_path(tmp_path):
    for part in load_transformers("tiny-llama")[:2]:
        part.save_pretrained(tmp_path)
    run = generate(Path(tmp_path), model_class="TransformersModel", **SETTINGS)
    assert run.manifest().model.name == str(tmp_path)


def calls(model):
    """Every public function that takes a model, by name."""
    layout = Layout.of(load("tiny-llama"), "Very", " lake")
    return {
        "generate": lambda: generate(model, **SETTINGS),
        "teacher_forced": lambda: teacher_forced(model, layout, [[1, 2]]),
        "ContrastSet.of": lambda: circuits.ContrastSet.of(model, "sentiment", **SMALL),
        "control_score": lambda: circuits.control_score(model, contrast="sentiment"),
        "knock_out": lambda: circuits.knock_out(model, over="layer", contrast="sentiment"),
        "joint_curve": lambda: circuits.joint_curve(model, heads=[(0, 0)], contrast="sentiment"),
        "make_units": lambda: circuits.make_units(model, None, "layer"),
        "prefix_attention_by_head": lambda: circuits.prefix_attention_by_head(
            model, contrast="sentiment"
        ),
        "mean_prefix_attention": lambda: circuits.mean_prefix_attention(
            model, contrast="sentiment"
        ),
        "alpha_at_prefix_attention": lambda: circuits.alpha_at_prefix_attention(
            model, goal=0.5, contrast="sentiment"
        ),
        "patch": lambda: circuits.patch(model, node="z", contrast="sentiment"),
        "attribution": lambda: circuits.attribution(model, contrast="sentiment"),
        "head_logit_attribution": lambda: circuits.head_logit_attribution(
            model, contrast="sentiment"
        ),
        "prompt_slope": lambda: circuits.prompt_slope(model, "sentiment"),
        "measure_fading": lambda: circuits.measure_fading(model, contrast="sentiment"),
        "select": lambda: circuits.select(model, contrast="sentiment"),
        "sufficient_tokens": lambda: circuits.sufficient_tokens(model, contrast="sentiment"),
    }


ONLY_LOADED = {
    "cell_of": lambda model: cell_of(model, **SETTINGS),
    "identify": identify,
    "probe": lapa2_interp.models.probe,
    "find_prefix": lambda model: lapa2_interp.prefixes.find_prefix(
        model, "sentiment", "mle", "positive"
    ),
    "soft_inputs": lambda model: lapa2_interp.attention.soft_inputs(model, [], []),
}


@pytest.mark.parametrize("name", [*calls(None), *ONLY_LOADED])
def test_a_bare_network_is_told_how(name):
    network = load("tiny-llama", model_class="TransformersModel").original_model
    call = ONLY_LOADED[name] if name in ONLY_LOADED else lambda model: calls(model)[name]()
    with pytest.raises(
        ModelError,
        match=r"LlamaForCausalLM has no tokenizer; give TransformersModel\(network, tokenizer, NAM",
    ):
        call(network)


@pytest.mark.parametrize("name", [name for name in calls(None) if name != "generate"])
def test_a_name_is_loaded(name, monkeypatch):
    class LoadedError(Exception):
        pass

    def loading(name_or_model):
        raise LoadedError(name_or_model)

    monkeypatch.setattr("lapa2_interp.models.load.load_model", loading)
    with pytest.raises(LoadedError, match="planted"):
        calls("planted")[name]()


def test_a_circuit_is_found_by_name():
    texts = [
        circuits.ContrastSet.of(model, "sentiment", **SMALL)
        for model in ("planted", load("planted"))
    ]
    by_name = circuits.knock_out("planted", texts[0], over="layer")
    by_model = circuits.knock_out(load("planted"), texts[1], over="layer")
    assert np.array_equal(by_name.values, by_model.values)
