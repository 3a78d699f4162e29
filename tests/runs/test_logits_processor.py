"""A method inside transformers' own loop writes the texts that it writes in ours."""

import pytest
import torch
from conftest import load

from lapa2_interp import generate
from lapa2_interp._util.errors import MethodError
from lapa2_interp.runs import MethodProcessor

PROMPT = "The lake"
SETTINGS = {"attribute": "positive", "length": 20}


@pytest.fixture(scope="module")
def model():
    loaded = load("tiny-llama", "float64", "TransformersModel")
    settings = loaded.original_model.generation_config
    end = settings.eos_token_id
    settings.eos_token_id = None
    yield loaded
    settings.eos_token_id = end


def texts(model, processor, **settings):
    ids = model.tokenizer(PROMPT, return_tensors="pt").input_ids
    made = model.original_model.generate(
        ids, logits_processor=[processor], max_new_tokens=12, **settings
    )
    return made[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    "method",
    ["prefix", "preadd", "rose", "arithmetic", "air-decoding", "gedi", "palette"],
)
def test_greedy_texts_are_ours(model, method):
    settings = SETTINGS | {"method": method, "alpha": 0.5, "parameters": {"prefixes": "hard"}}
    if method in ("preadd", "rose", "palette"):
        settings.pop("parameters")
    ours = generate(model, PROMPT, top_k=1, **settings).texts()["tokens"][0]
    processor = MethodProcessor(model, PROMPT, **settings)
    assert texts(model, processor, do_sample=False) == [list(ours)]
    assert texts(model, processor, do_sample=False) == [list(ours)], "a second text begins anew"


def test_samples_share_their_prompt_and_go_their_own_ways(model):
    processor = MethodProcessor(model, PROMPT, method="preadd", **SETTINGS)
    torch.manual_seed(1)
    made = texts(model, processor, do_sample=True, top_k=40, num_return_sequences=3)
    assert len({tuple(row) for row in made}) == 3
    # Every sample's last step is that of a text alone.
    for row in made:
        alone = MethodProcessor(model, PROMPT, method="preadd", **SETTINGS)
        ids = torch.tensor([[*alone.prompt]])
        for token in row:
            weights = alone(ids, torch.zeros(1, model.cfg.d_vocab, dtype=torch.float64))
            assert token in weights[0].topk(40).indices
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


def test_what_it_cannot_do_is_refused(model):
    processor = MethodProcessor(model, PROMPT, **SETTINGS | {"length": 14})
    with pytest.raises(MethodError, match="use no beams"):
        texts(model, processor, num_beams=3)
    with pytest.raises(MethodError, match="give a longer length"):
        texts(model, processor, do_sample=False)
    with pytest.raises(MethodError, match="the ids are not those of the prompt"):
        processor(torch.tensor([[0, 5]]), torch.zeros(1, model.cfg.d_vocab))
    with pytest.raises(MethodError, match="freectrl is no arithmetic on logits"):
        MethodProcessor(model, PROMPT, method="freectrl", **SETTINGS)
