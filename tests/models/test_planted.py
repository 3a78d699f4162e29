"""The model whose circuit is known: its answer key against its own forward passes."""

from collections import Counter

import numpy as np
import pytest
import torch
from conftest import MODEL_CLASSES, generate, load

from lapa2_interp import Augmentation, Layout, augmented, load_model
from lapa2_interp.models import identify
from lapa2_interp.models.hook_names import HOOK_PATTERN
from lapa2_interp.models.planted import (
    CIRCUITS,
    FILLERS,
    NEGATIVE,
    POSITIVE,
    PROMPTS,
    answer_key,
    vocabulary,
)
from lapa2_interp.models.sizes import model_size
from lapa2_interp.tasks.word_lists import STOPWORDS, read_word_list

NAMES = [f"planted{'-' * bool(circuit)}{circuit}" for circuit in CIRCUITS]
LENGTHS = (8, 64, 200)
CLASSES = (*MODEL_CLASSES, "TransformersModel")


def layouts(model, prompt="The lake"):
    return [
        Layout.of(model.tokenizer, f"Very {word}:", prompt) for word in ("positive", "negative")
    ]


def a_text(name, n, seed=0):
    """n words that no head looks for."""
    words = vocabulary(name)
    known = [words[word] for word in (*FILLERS, *POSITIVE, *NEGATIVE)]
    return [known[i] for i in np.random.default_rng(seed).integers(len(known), size=n)]


def lex(model, name, layout, text, rules=()):
    """By query from the prompt's last on, as a user would compute it."""
    words = vocabulary(name)
    with torch.no_grad(), augmented(model, [tuple(rules)], layout):
        log_probs = model(torch.tensor([[*layout.ids, *text]]))[0].double().log_softmax(-1)
    plus, minus = (
        log_probs[:, [words[word] for word in side]].logsumexp(-1) for side in (POSITIVE, NEGATIVE)
    )
    return (plus - minus)[len(layout) - 1 :]


def cut(*heads, phase="after_span"):
    return Augmentation(alpha=1, law="cut", phase=phase, heads=heads)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("prompt", ["The lake", "The president of the country"])
def test_control_is_the_closed_form_at_every_length(name, seed, prompt):
    name = f"{name}:{seed}"
    model, key, text = load(name), answer_key(name), a_text(name, max(LENGTHS))
    for sign, layout in zip((1, -1), layouts(model, prompt), strict=True):
        log_odds = lex(model, name, layout, text)
        for t in (0, 1, *LENGTHS):
            expected = sign * key.lex(len(layout) + t, layout.l_pro, asking=t == 0)
            assert log_odds[t].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 5])
def test_effects_of_cut_heads_are_the_closed_form(name, seed):
    name = f"{name}:{seed}"
    model, key, text = load(name), answer_key(name), a_text(name, max(LENGTHS))
    pair = layouts(model)

    def control(rules=()):
        return torch.sub(*(lex(model, name, layout, text, rules) for layout in pair))

    uncut = control()
    for role, head in key.heads.items():
        effect = uncut - control([cut(head)])
        for t in LENGTHS:
            expected = key.effect(role, len(pair[0]) + t, pair[0].l_pro)
            assert effect[t].item() == pytest.approx(expected, abs=2e-5)
    n_layers, n_heads = key.shape
    idle = {(i, j) for i in range(n_layers) for j in range(n_heads)} - set(key.heads.values())
    assert (uncut - control([cut(*idle)])).abs().max() < 1e-5


def test_in_float64_it_is_exact():
    """With LayerNorm: a Llama's norm is computed in float32 whatever the dtype."""
    name = "planted-gpt2"
    model, key = load_model(name, "float64"), answer_key(name)
    layout = layouts(model)[0]
    log_odds = lex(model, name, layout, a_text(name, 300))
    expected = [key.lex(len(layout) + t, layout.l_pro) for t in range(1, 301)]
    assert np.abs(log_odds[1:].numpy() - expected).max() < 1e-8


@pytest.mark.parametrize("model_class", CLASSES)
def test_biases_act_as_the_key_says(model_class):
    """Other laws, a bias on the attribute alone, and the exact law of the mass."""
    model, key = load("planted", model_class=model_class), answer_key("planted")
    layout, text = layouts(model)[0], a_text("planted", 64)
    l = len(layout) + 64
    b = 0.5 * np.log(l - 1) - 0.5 * np.log(3)
    log_odds = lex(
        model, "planted", layout, text, [Augmentation(alpha=0.5, heads=(key.heads["carrier"],))]
    )
    expected = key.lex(l, layout.l_pro, weights={"carrier": (np.exp(b),) * 3})
    assert log_odds[64].item() == pytest.approx(expected, abs=1e-5)
    one = Augmentation(alpha=2, law="scale", span=("prefix", (1,)))
    weights = dict.fromkeys(key.heads, (float(np.exp(2)), 1.0, 1.0))
    log_odds = lex(model, "planted", layout, text, [one])
    assert log_odds[64].item() == pytest.approx(key.lex(l, layout.l_pro, weights=weights), abs=1e-5)


def test_selective_steering_beats_steering_everything():
    """True by construction; a bench that cannot show it here is broken."""
    name = "planted"
    model, key, text = load(name), answer_key(name), a_text(name, 200)
    pair = layouts(model)

    def control(**fields):
        rules = [Augmentation(alpha=0.5, **fields)] if fields else []
        return torch.sub(*(lex(model, name, layout, text, rules) for layout in pair))[-1].item()

    carrier, everything = control(heads=(key.heads["carrier"],)), control(phase="last_query")
    token = control(heads=(key.heads["carrier"],), span=("prefix", (1,)))
    assert token > carrier > everything > control() > control(heads=(key.heads["suppressor"],))
    assert control(heads=(key.heads["decoy"],)) == pytest.approx(control(), abs=1e-5)


def test_the_decoy_has_the_largest_mass_and_no_effect():
    """So an instrument that ranks heads by attention is wrong here."""
    name = "planted"
    model, key = load(name), answer_key(name)
    layout, patterns = layouts(model)[0], {}
    hooks = [
        (HOOK_PATTERN.format(i), lambda p, hook, i=i: patterns.__setitem__(i, p[0].clone()))
        for i in range(2)
    ]
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        model(torch.tensor([[*layout.ids, *a_text(name, 64)]]))
    mass = {
        (layer, head): patterns[layer][head, -1, slice(*layout.prefix)].sum().item()
        for layer in range(2)
        for head in range(4)
    }
    assert max(mass, key=mass.get) == key.heads["decoy"]
    assert key.effect("decoy", 71, 2) == 0
    effects = {role: abs(key.effect(role, 71, 2)) for role in key.heads}
    assert sorted(effects, key=effects.get, reverse=True) == [
        "carrier", "relay", "suppressor", "reader", "decoy",
    ]  # fmt: skip
    odds = key.odds["carrier"]
    assert mass[key.heads["carrier"]] == pytest.approx((odds + 2) / (odds + 69), abs=1e-5)


def test_the_variants_are_what_they_are_for():
    gain, backup, spread, plain = (
        answer_key(f"planted{circuit}") for circuit in ("-gain", "-backup", "-spread", "")
    )
    # Fades by gain: holding the relay's mass at its early value changes nothing later.
    assert gain.control(200, 2) < 0.5 * gain.control(15, 2)
    far, near = (key_share(gain, l) for l in (200, 15))
    b = np.log(near / (1 - near)) - np.log(far / (1 - far))
    held = gain.control(200, 2, weights={"decoy": (np.exp(b),) * 3})
    assert held == pytest.approx(gain.control(200, 2))
    # Backup: the carrier's lone cut hides behind the backup, which by itself seems to do nothing.
    none, cut_of = (0.0,) * 3, backup.control(71, 2)
    both = cut_of - backup.control(71, 2, weights={"carrier": none, "backup": none})
    alone = backup.effect("carrier", 71, 2), backup.effect("backup", 71, 2)
    assert both > 1.3 * sum(alone)
    assert abs(alone[1]) < 0.02 * both
    # Spread: both tokens are needed.
    for weights in ((0.0, 1.0, 1.0), (1.0, 0.0, 1.0)):
        every = dict.fromkeys(("gate", "carrier"), weights)
        assert spread.control(71, 2, weights=every) < 0.6 * spread.control(71, 2)
    every = dict.fromkeys(("gate", "carrier"), (1.0, 0.0, 1.0))
    assert plain.control(71, 2, weights=every) > 0.99 * plain.control(71, 2)


def key_share(key, l):
    return key.odds["decoy"] / (key.odds["decoy"] + l - 1)


def test_heads_and_vocabulary_depend_on_the_seed():
    places = {role: Counter() for role in answer_key("planted").heads}
    for seed in range(60):
        key = answer_key(f"planted:{seed}")
        for role, head in key.heads.items():
            places[role][head] += 1
        assert key.heads["carrier"][1] // 2 == key.heads["decoy"][1] // 2  # one KV head
    assert all(len(seen) == 4 for seen in places.values())
    assert vocabulary("planted:1") != vocabulary("planted:2")
    assert answer_key("planted:1").gain != answer_key("planted:2").gain
    assert answer_key("planted") == answer_key("planted:0")


def test_its_words_are_known():
    lists = {k: set(v) for k, v in read_word_list("", "sentiment").items()}
    assert {word.strip() for word in POSITIVE} <= lists["positive"]
    assert {word.strip() for word in NEGATIVE} <= lists["negative"]
    assert {word.strip() for word in FILLERS} <= STOPWORDS
    from lapa2_interp.methods.registry import load_task

    assert load_task("sentiment").prompts.texts == PROMPTS
    tokenizer = load("planted").tokenizer
    for text in (*PROMPTS, "Very positive:The lake", "Very negative:The lake"):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    layout = Layout.of(tokenizer, "Very positive:", "The lake")
    assert (layout.tokens[2], layout.l_pre, layout.l_pro, layout.merged) == (
        " positive",
        3,
        2,
        None,
    )


def test_it_is_a_model_like_others():
    model = load_model("planted-gpt2", seed=2)
    assert identify(model).name == "planted-gpt2:2"
    assert model_size("planted").n_heads == 4
    run = generate(model, "prefix", "sentiment", "positive", ["The lake"], length=12, samples=3)
    words = {word for text in run.texts.continuation for word in text.split()}
    assert words <= {word.strip() for word in (*FILLERS, *POSITIVE, *NEGATIVE)}
