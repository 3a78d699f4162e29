"""Strengths that are learned: the loss by hand, the planted circuit, placebos, checkpoints."""

from functools import cache

import numpy as np
import pytest
import torch
from conftest import load
from torch.nn.functional import softplus

from lapa2_interp import Augmentation, Layout, augmented
from lapa2_interp.bias.recipes import parse_recipes
from lapa2_interp.circuits.learning import PairObjective, TextPair, learn
from lapa2_interp.circuits.selection import Selection
from lapa2_interp.errors import AugmentationError, CircuitError
from lapa2_interp.models.facts import facts_of
from lapa2_interp.models.planted import FILLERS, NEGATIVE, POSITIVE, PROMPTS, answer_key

KIND = "TransformersModel"
NEUTRAL = "Very:"


@cache
def planted_pairs(seed=0):
    """Fillers and words of an attribute behind either prefix; and fillers alone."""
    rng, pairs, texts = np.random.default_rng(seed), [], {}
    for prompt in PROMPTS:
        draws = [rng.choice(FILLERS, 3) for _ in range(3)]
        plus = "".join([*draws[0], rng.choice(POSITIVE)])
        minus = "".join([*draws[0], rng.choice(NEGATIVE)])
        pairs.append(TextPair("Very positive:", prompt, plus, minus))
        pairs.append(TextPair("Very negative:", prompt, minus, plus))
        texts[prompt] = "".join(draws[1])
    return pairs, texts


@cache
def learned(**settings):
    pairs, texts = planted_pairs()
    model = load("planted", "float64", KIND)
    return learn(
        model, pairs, texts=texts, neutral=NEUTRAL, steps=40, **{"rate": 0.1, "batch": 8} | settings
    )


def test_the_planted_circuit_is_learned():
    """Up where the attribute's words come from, down where they are held back, and 0 elsewhere."""
    key, strengths = answer_key("planted").heads, learned().strengths
    assert strengths[key["carrier"]] > 0.5
    assert strengths[key["suppressor"]] < -0.5
    assert strengths[key["decoy"]] == 0
    acting = {key[role] for role in ("carrier", "suppressor", "relay", "reader")}
    assert {tuple(map(int, head)) for head in np.argwhere(strengths)} <= acting
    history = learned().history
    held_out = history[history["part"] == "held-out"].set_index("step")
    assert held_out["loss"].idxmin() == learned().best
    assert held_out.loc[learned().best, "change"] > 0.1
    assert held_out.loc[0, "change"] == pytest.approx(0, abs=1e-6)


def test_the_loss_is_its_formula():
    """Each text in a pass of its own, without padding."""
    model = load("planted", "float64", KIND)
    pairs, texts = planted_pairs()
    objective = PairObjective(model, pairs, texts, NEUTRAL, "log", 2.0)
    size = facts_of(model).n_layers, facts_of(model).n_heads
    strengths = torch.randn(size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def log_probs(prefix, prompt, text, steered):
        layout = Layout.of(model.tokenizer, prefix, prompt)
        ids = model.tokenizer(text, add_special_tokens=False).input_ids
        rule = objective.rule.model_copy(update={"strengths": entries}) if steered else None
        with torch.no_grad(), augmented(model, rule, layout):
            logits = model(torch.tensor([[*layout.ids, *ids[:-1]]]))[0, -len(ids) :]
        every = logits.double().log_softmax(1)
        return every, every[torch.arange(len(ids)), torch.tensor(ids)]

    entries = tuple((i, j, float(strengths[i, j])) for i, j in np.ndindex(size))
    indices, wanted = [0, 1, 5], 0.0
    for pair in (pairs[i] for i in indices):
        ratios, nll = [], []
        for steered in (True, False):
            plus, minus, fluent = (
                log_probs(pair.prefix, pair.prompt, text, steered)[1]
                for text in (pair.wanted, pair.unwanted, texts[pair.prompt])
            )
            ratios.append(plus.sum() - minus.sum())
            nll.append(-fluent.mean())
        moved, base = (
            log_probs(NEUTRAL, pair.prompt, texts[pair.prompt], steered)[0]
            for steered in (True, False)
        )
        kl = (base.exp() * (base - moved)).sum(1).mean()
        rise = max(0.0, float(nll[0] - nll[1]))
        wanted += float(softplus(-(ratios[0] - ratios[1])) + 2.0 * (kl + rise))
    total, _ = objective.loss(objective.by_strengths(strengths), indices)
    assert float(total.detach()) == pytest.approx(wanted, rel=1e-5)


def test_shuffled_labels_teach_nothing():
    pairs, texts = planted_pairs()
    rng = np.random.default_rng(4)
    mixed = [
        pair._replace(wanted=pair.unwanted, unwanted=pair.wanted) if rng.random() < 0.5 else pair
        for pair in pairs
    ]
    model = load("planted", "float64", KIND)
    placebo = learn(model, mixed, texts=texts, neutral=NEUTRAL, steps=40, rate=0.1)
    assert np.abs(placebo.strengths).max() < 0.5 * np.abs(learned().strengths).max()


def test_a_stopped_training_goes_on(tmp_path):
    pairs, texts = planted_pairs()
    model, file = load("planted", "float64", KIND), tmp_path / "learn.pt"
    settings = {"texts": texts, "neutral": NEUTRAL, "check": 5, "rate": 0.1}
    at_once = learn(model, pairs, steps=20, **settings)
    learn(model, pairs, steps=10, file=file, **settings)
    resumed = learn(model, pairs, steps=20, file=file, **settings)
    np.testing.assert_array_equal(resumed.strengths, at_once.strengths)
    assert resumed.history.equals(at_once.history)
    others = {prompt: f"{text} is" for prompt, text in texts.items()}
    for changed in ({"rate": 0.2}, {"texts": others}):
        with pytest.raises(CircuitError, match="checkpoint of other pairs, settings or weights"):
            learn(model, pairs, steps=20, file=file, **settings | changed)
    with pytest.raises(CircuitError, match="checkpoint of other pairs, settings or weights"):
        learn(model, pairs[2:], steps=20, file=file, **settings)
    with pytest.raises(CircuitError, match="has 20 steps, and 15 were asked for; ask for as many"):
        learn(model, pairs, steps=15, file=file, **settings)


def test_a_look_at_the_end_alone_is_none_of_who_goes_on(tmp_path):
    pairs, texts = planted_pairs()
    model, file = load("planted", "float64", KIND), tmp_path / "learn.pt"
    settings = {"texts": texts, "neutral": NEUTRAL, "check": 5, "rate": 0.1}
    at_once = learn(model, pairs, steps=10, **settings)
    learn(model, pairs, steps=7, file=file, **settings)
    resumed = learn(model, pairs, steps=10, file=file, **settings)
    assert resumed.history.equals(at_once.history)


@pytest.mark.parametrize("tied", ["layer", "all"])
def test_tied_strengths_are_equal(tied):
    strengths = learned(tied=tied).strengths
    axis = {"layer": 1, "all": None}[tied]
    assert (strengths.max(axis) == strengths.min(axis)).all()
    assert np.abs(strengths).max() > 0


def test_the_bias_is_that_of_the_strengths():
    result = learned()
    bias = result.augmentation(0.5)
    assert isinstance(bias, Augmentation)
    assert bias.head_strengths(*result.strengths.shape) == pytest.approx(result.strengths)
    assert bias.law == "log"
    assert bias.l0 == max(
        len(Layout.of(load("planted").tokenizer, pair.prefix, pair.prompt)) + 4
        for pair in planted_pairs()[0]
    )
    assert result.frame()["strength"].abs().is_monotonic_decreasing


def test_a_card_of_strengths_steers_as_they_do(tmp_path):
    result = learned()
    result.selection({"positive": "Very positive:", "negative": "Very negative:"}).save(
        tmp_path / "card.json"
    )
    card = Selection.load(tmp_path / "card.json")
    assert card.augmentation() == result.augmentation()
    assert card.augmentation(0.5) == result.augmentation(0.5)
    assert parse_recipes("lapa2", None, card.recipe_parameters()) == (result.augmentation(),)
    assert card.training["step"] == result.best
    with pytest.raises(CircuitError, match="the card belongs to planted"):
        card.check(load("planted:3", "float64", KIND))
    with pytest.raises(AugmentationError, match="gives the heads itself; found strengths="):
        card.augmentation(strengths="0.1:2")


def test_the_figure(tmp_path):
    learned().plot().savefig(tmp_path / "learned.png")
    assert (tmp_path / "learned.png").stat().st_size > 10_000


def test_refusals():
    pairs, texts = planted_pairs()
    model = load("planted", "float64", KIND)
    with pytest.raises(CircuitError, match="3 prompts are too few to learn from"):
        learn(model, pairs[:6], texts=texts)
    with pytest.raises(CircuitError, match="no fluent text for the prompt 'Once upon a time'"):
        learn(model, pairs, texts={p: t for p, t in texts.items() if p != "Once upon a time"})
    with pytest.raises(CircuitError, match="gradients in bfloat16 are mostly rounding"):
        learn(load("planted", "bfloat16", KIND), pairs, texts=texts)
    empty = [pairs[0]._replace(wanted=""), *pairs[1:]]
    with pytest.raises(CircuitError, match="a text of the prompt 'Once upon a time' has no token"):
        learn(model, empty, texts=texts, neutral=NEUTRAL)
