"""An edit of a fused weight that a TransformerBridge would not compute with is refused."""

import copy

import pytest
import torch
from conftest import fresh

from lapa2_interp import generate, load_model
from lapa2_interp.errors import ModelError
from lapa2_interp.models.card import hash_weights, identify
from lapa2_interp.models.fused import fused_weights

SETTINGS = {"attribute": "positive", "prompts": ["The lake"], "top_k": 1, "length": 16}
FUSED = "gpt_neox.layers.1.attention.query_key_value"


@pytest.fixture
def model():
    return fresh("tiny-neox", model_class="TransformerBridge")


def weight_of(model, name=FUSED):
    return model.original_model.get_submodule(name).weight


def test_an_edit_of_the_fused_weight_is_refused_until_it_is_put_back(model):
    name, values = identify(model).weights, weight_of(model).data.clone()
    weight_of(model).data *= -1.5
    for _ in range(2):
        with pytest.raises(ModelError, match="layers.1.attention was edited.*TransformersModel"):
            generate(model, **SETTINGS)
    weight_of(model).data[:] = values
    assert identify(model).weights == name


def test_edits_of_the_parts_and_of_both_are_taken(model):
    name = identify(model).weights
    before = generate(model, **SETTINGS).texts()["tokens"].tolist()
    model.blocks[1].attn.q.weight.data *= -2
    assert generate(model, **SETTINGS).texts()["tokens"].tolist() != before
    assert identify(model).weights == hash_weights(model) != name
    model.blocks[1].attn.q.weight.data /= -2
    weight_of(model).data *= 4
    for part in (model.blocks[1].attn.q, model.blocks[1].attn.k, model.blocks[1].attn.v):
        part.weight.data *= 4
    assert identify(model).weights == hash_weights(model) != name


def test_a_cast_changes_both(model):
    name = identify(model).weights
    model.original_model.to(torch.float64)
    assert identify(model).weights != name


@pytest.mark.parametrize("cast", [False, True])
def test_views_that_a_copy_or_a_cast_of_the_model_parts_are_compared(cast):
    """GPT-2's parts are views, so that an edit of the fused weight of the model itself acts."""
    original = fresh("tiny-gpt2", model_class="TransformerBridge")  # a copy refers to it
    model = copy.deepcopy(original)
    if cast:
        model.original_model.to(torch.float64)
    name = identify(model).weights
    model.blocks[1].attn.q.weight.data *= 2
    assert identify(model).weights != name
    weight_of(model, "transformer.h.1.attn.c_attn").data *= 2
    with pytest.raises(ModelError, match="h.1.attn was edited"):
        identify(model)


def test_an_edit_of_a_fused_weight_with_views_is_taken():
    model = load_model("tiny-gpt2", device="cpu")
    name = identify(model).weights
    weight_of(model, "transformer.h.1.attn.c_attn").data *= 2
    assert identify(model).weights != name


def test_reading_fused_weights_draws_no_random_numbers(model):
    state = torch.get_rng_state()
    assert len(fused_weights(model.original_model)) == model.cfg.n_layers
    assert torch.equal(torch.get_rng_state(), state)
