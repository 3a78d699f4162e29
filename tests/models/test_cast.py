"""A model that is cast after loading is that of a model loaded in the type."""

import pytest
import torch
from conftest import fresh, load

from lapa2_interp import generate
from lapa2_interp.attention.hooked import edit_scores
from lapa2_interp.bias.layout import Layout
from lapa2_interp.models.card import identify

SETTINGS = {"attribute": "positive", "prompts": ["The lake"], "top_k": 1, "length": 16}
TYPES = [
    (kind, dtype)
    for kind in ("TransformerBridge", "TransformersModel")
    for dtype in ("float64", "bfloat16")
]


@pytest.mark.parametrize(("model_class", "dtype"), TYPES)
def test_texts_and_card_are_those_of_the_type(model_class, dtype):
    model = fresh("tiny-llama", model_class=model_class)
    model.original_model.to(getattr(torch, dtype))
    wanted = load("tiny-llama", dtype, model_class)
    runs = [generate(one, alpha=0.5, **SETTINGS) for one in (model, wanted)]
    texts = [run.texts()["tokens"].tolist() for run in runs]
    assert texts[0] == texts[1]
    facts = runs[0].manifest().model
    assert (facts.dtype, facts.prepacking) == (dtype, identify(wanted).prepacking)


@torch.no_grad()
def test_scores_are_edited_in_the_type():
    model = fresh("tiny-llama", model_class="TransformerBridge")
    ids = Layout.of(model, "Good:", "The lake").tensor
    model.original_model.to(torch.bfloat16)
    plain = model(ids)
    with edit_scores(model, lambda layer, scores: scores.float()):
        torch.testing.assert_close(model(ids), plain, atol=0.1, rtol=0)
