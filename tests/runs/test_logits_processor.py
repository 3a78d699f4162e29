"""A method inside transformers' own loop writes the texts that it writes in ours."""

import gc

import pytest
import torch
from conftest import fresh, load
from transformers import LogitNormalization, RepetitionPenaltyLogitsProcessor

from lapa2_interp import Augmentation, Layout, augmented, generate
from lapa2_interp.errors import Lapa2Error, MethodError
from lapa2_interp.generation.settings import CellSettings
from lapa2_interp.methods.chat import chat_task
from lapa2_interp.runs import MethodProcessor
from lapa2_interp.runs.logits_processor import NOT_FOLLOWED

PROMPT = "The lake"
SETTINGS = {"attribute": "positive", "length": 20}
PLAIN = {"method": "none", "alpha": 0}
"""Settings of the method whose log-weights are the network's own log-probabilities."""
CHAT = [
    {"role": "system", "content": "You are a sailor."},
    {"role": "user", "content": "Who are you?"},
]


@pytest.fixture(scope="module")
def model():
    loaded = load("tiny-llama", "float64", "TransformersModel")
    settings = loaded.original_model.generation_config
    end = settings.eos_token_id
    settings.eos_token_id = None
    yield loaded
    settings.eos_token_id = end


def texts(model, *processors, network=None, **settings):
    """New tokens of transformers' own `generate`, by row; greedy unless the settings sample."""
    ids = model.tokenizer(PROMPT, return_tensors="pt").input_ids
    settings = {"do_sample": False, "max_new_tokens": 12} | settings
    made = (network or model.original_model).generate(ids, logits_processor=processors, **settings)
    return made[:, ids.shape[1] :].tolist()


def bans(model):
    """By name, arguments of `generate` that ban tokens, made so that they change the plain text."""
    (plain,) = texts(model)
    end = plain[2]
    return {
        "suppress_tokens": {"suppress_tokens": plain[:3]},
        "begin_suppress_tokens": {"begin_suppress_tokens": plain[:1]},
        "bad_words_ids": {"bad_words_ids": [plain[1:3], plain[:1]]},
        "sequence_bias": {"sequence_bias": [[plain[:1], -torch.inf]]},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
        "min_new_tokens": {"min_new_tokens": 8, "eos_token_id": end, "pad_token_id": 1},
        "min_length": {"min_length": 12, "eos_token_id": end, "pad_token_id": 1},
        "forced_eos_token_id": {"forced_eos_token_id": 5, "max_new_tokens": 4},
        "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [7, 8, 9, 10]},
    }


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
            weights = alone(ids, model.original_model(ids).logits[:, -1])
            assert token in weights[0].topk(40).indices
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


@pytest.mark.parametrize(
    "method",
    [
        PLAIN,
        # The nucleus of one token: a banned token must not fill it.
        {"method": "dexperts", "alpha": 0,
         "parameters": {"strength": 0.0, "top_p": 1e-9, "prefixes": "hard"}},
    ],
    ids=["none", "dexperts"],
)  # fmt: skip
@pytest.mark.parametrize(
    "name",
    ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias",
     "no_repeat_ngram_size", "min_new_tokens", "min_length", "forced_eos_token_id",
     "prefix_allowed_tokens_fn"],
)  # fmt: skip
def test_bans_of_generate_stay(model, name, method):
    """The texts are those of transformers alone, whose processors ban the same tokens."""
    banning = bans(model)[name]
    alone = texts(model, **banning)
    assert alone != [texts(model)[0][: len(alone[0])]]
    assert texts(model, MethodProcessor(model, PROMPT, **SETTINGS, **method), **banning) == alone


def test_an_end_token_is_blocked_as_by_our_own_loop(model, monkeypatch):
    settings = SETTINGS | {"method": "preadd", "alpha": 0.5}
    ends = [generate(model, PROMPT, top_k=1, **settings).texts()["tokens"][0][1]]
    card = model.lapa2_card.model_copy(update={"end_ids": tuple(ends)})
    monkeypatch.setattr(model, "lapa2_card", card)
    ours = generate(model, PROMPT, top_k=1, eos="block", **settings).texts()["tokens"][0]
    processor = MethodProcessor(model, PROMPT, **settings)
    assert texts(model, processor, suppress_tokens=ends) == [list(ours)]


def test_what_acts_on_the_log_weights_is_that_of_transformers(model):
    """Warpers and renormalisation come after it, and so does a penalty that is put behind it."""
    processor = MethodProcessor(model, PROMPT, **SETTINGS, **PLAIN)
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    made = []
    for processors in ([processor], [LogitNormalization()]):
        torch.manual_seed(3)
        made.append(texts(model, *processors, num_return_sequences=3, **sampled))
    assert made[0] == made[1]
    penalty = RepetitionPenaltyLogitsProcessor(1.5)
    penalised = texts(model, LogitNormalization(), penalty)
    assert penalised != texts(model)
    assert texts(model, processor, penalty) == penalised
    with pytest.raises(MethodError, match="put the processor of a penalty behind"):
        texts(model, penalty, processor)


@pytest.mark.parametrize(
    "penalty",
    [
        {"repetition_penalty": 1.001},
        {"encoder_repetition_penalty": 1.2},
        {"sequence_bias": [[[5], 0.5]]},
        {"guidance_scale": 1.5},
        {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 5, "pad_token_id": 1},
        {"num_beams": 2},
    ],
    ids=lambda penalty: next(iter(penalty)),
)
def test_a_penalty_that_would_be_lost_is_refused_by_name(model, penalty):
    processor = MethodProcessor(model, PROMPT, **SETTINGS, method="preadd")
    with pytest.raises(MethodError, match=f"changed .* scores.*{next(iter(penalty))}"):
        texts(model, processor, **penalty)


def test_a_penalty_in_the_networks_own_configuration_is_refused(model, monkeypatch):
    monkeypatch.setattr(model.original_model.generation_config, "repetition_penalty", 1.1)
    processor = MethodProcessor(model, PROMPT, **SETTINGS)
    with pytest.raises(MethodError, match="in its generation_config use none of repetition_pen"):
        texts(model, processor)
    assert texts(model, processor, repetition_penalty=1.0)


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_a_setting_without_effect_is_refused(model, name):
    """Also at its usual value, since `generate` has usual values of its own."""
    value = CellSettings.model_fields[name].default if name != "device" else "cpu"
    with pytest.raises(MethodError, match=f"^{name}=?.* has no effect inside generate of transf"):
        MethodProcessor(model, PROMPT, **SETTINGS, **{name: value})


def test_every_setting_is_followed_or_refused():
    followed = {
        "model", "attribute", "method", "parameters", "task", "prefix", "alpha", "augmentation",
        "length", "doubled_bos", "start",
    }  # fmt: skip
    assert followed | {*NOT_FOLLOWED} == {*CellSettings.model_fields, "device"}
    assert not followed & {*NOT_FOLLOWED}


@pytest.mark.parametrize(
    ("method", "parameters"),
    [("caa", {"strength": 5.0}), ("remind", {"every": 4}), ("freectrl", {})],
)
def test_a_method_that_changes_the_network_is_refused(model, method, parameters):
    with pytest.raises(MethodError, match=f"{method} is no arithmetic on logits, since it changes"):
        MethodProcessor(model, PROMPT, **SETTINGS, method=method, parameters=parameters)


def test_a_gate_on_layers_and_two_bos_are_ours(model):
    settings = SETTINGS | {"method": "gate", "alpha": 2.0, "doubled_bos": True,
                           "parameters": {"beta": 0.2, "order": "2/0/3/1"}}  # fmt: skip
    ours = generate(model, PROMPT, top_k=1, **settings).texts()["tokens"][0]
    assert texts(model, MethodProcessor(model, PROMPT, **settings)) == [list(ours)]


def test_a_chat_goes_on_from_its_own_ids():
    """Steered, the answer is that of a bias on the layout by hand."""
    model = load("smollm2-135m", "float32", "TransformersModel")
    task = chat_task(CHAT)
    processor = MethodProcessor(model, "Who?", task=task, method="chat", length=6, alpha=2.0)
    ids = model.tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    settings = {"max_new_tokens": 5, "do_sample": False}
    made = model.original_model.generate(ids, logits_processor=[processor], **settings)
    with augmented(model, Augmentation(alpha=2.0), Layout.of_chat(model, CHAT)):
        wanted = model.original_model.generate(ids, **settings)
    assert made.tolist() == wanted.tolist()
    plain = model.tokenizer("Who?", return_tensors="pt").input_ids
    with pytest.raises(MethodError, match="the ids are not those of the prompt"):
        model.original_model.generate(plain, logits_processor=[processor], **settings)
    several = chat_task(CHAT, later=["Why?"])
    with pytest.raises(MethodError, match="chat is no arithmetic on logits, since it has several"):
        MethodProcessor(model, "Who?", task=several, method="chat", length=6)


def test_no_token_that_is_left_is_an_error(model):
    processor = MethodProcessor(model, PROMPT, **SETTINGS)
    everything = list(range(model.cfg.d_vocab))
    with pytest.raises(MethodError, match=f"no token has positive weight at step 0 .*; "
                       f"{len(everything)} of {len(everything)} tokens are banned"):  # fmt: skip
        texts(model, processor, suppress_tokens=everything)


def test_scores_of_no_pass_of_the_network_are_refused(model):
    processor = MethodProcessor(model, PROMPT, **SETTINGS)
    network = fresh("tiny-llama", "float64", "TransformersModel").original_model
    network.generation_config.eos_token_id = None
    with pytest.raises(MethodError, match="not of a new pass of this model's network"):
        texts(model, processor, network=network)
    with pytest.raises(MethodError, match="without assistant_model and prompt_lookup_num_tokens"):
        texts(model, processor, prompt_lookup_num_tokens=3)


def test_a_bridge_writes_the_same_texts(model):
    bridge = load("tiny-llama", "float64")
    made = [texts(one, MethodProcessor(one, PROMPT, **SETTINGS, method="preadd"), eos_token_id=None)
            for one in (model, bridge)]  # fmt: skip
    assert made[0] == made[1]


def test_a_network_forgets_a_processor_that_is_gone(model):
    hooks = model.original_model._forward_hooks
    before = len(hooks)
    processor = MethodProcessor(model, PROMPT, **SETTINGS)
    assert len(hooks) == before + 1
    del processor
    gc.collect()
    assert len(hooks) <= before


def test_what_it_cannot_do_is_refused(model):
    processor = MethodProcessor(model, PROMPT, **SETTINGS | {"length": 14})
    with pytest.raises(MethodError, match="give a longer length"):
        texts(model, processor, do_sample=False)
    ids = torch.tensor([[0, 5]])
    with pytest.raises(MethodError, match="the ids are not those of the prompt"):
        processor(ids, model.original_model(ids).logits[:, -1])
    with pytest.raises(Lapa2Error, match="unknown setting 'max_new_tokens'"):
        MethodProcessor(model, PROMPT, max_new_tokens=5, **SETTINGS)
