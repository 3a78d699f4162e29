"""Contrast: PREADD, SPA, Con-Prefix, ROSE and DExperts against their formulas in plain Python."""

import math

import numpy as np
import pytest
import torch
from conftest import generate, load
from formulas import CLASSES, as_logs, distributions, normalised, run, unit

from lapa2_interp.bias.layout import Layout
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.base import nucleus
from lapa2_interp.models.facts import facts_of


@pytest.mark.parametrize("lam", [-1.0, 0.5, 2.0])
def test_preadd(lam):
    for p, combined in zip(
        steps := distributions("base", "prefix"),
        run(methods.get("preadd", lam=lam), steps),
        strict=True,
    ):
        for sample in range(2):
            expected = [
                pre**lam * base ** (1 - lam)
                for base, pre in zip(p["base"][sample], p["prefix"][sample], strict=True)
            ]
            assert combined[sample] == pytest.approx(unit(expected), abs=1e-12)


def test_preadd_by_hand():
    """Base (1/2, 1/4, 1/4), prefix (1/4, 1/2, 1/4), lam -1: weights base^2 / prefix = 1, 1/8, 1/4."""
    p = {"base": [[0.5, 0.25, 0.25]], "prefix": [[0.25, 0.5, 0.25]]}
    assert normalised(methods.get("preadd").combine(as_logs(p), None))[0] == pytest.approx(
        [8 / 11, 1 / 11, 2 / 11]
    )


def test_con_prefix():
    steps = distributions("target", "b", "c")
    for p, combined in zip(
        steps, run(methods.get("con-prefix", form="hard-contrast", lam=0.7), steps), strict=True
    ):
        for sample in range(2):
            expected = [
                p["target"][sample][x] ** 1.7 / (p["b"][sample][x] * p["c"][sample][x]) ** 0.35
                for x in range(5)
            ]
            assert combined[sample] == pytest.approx(unit(expected), abs=1e-12)


def mean_log(p, classes, sample, x):
    others = [c for c in classes if c != "target"]
    return sum(math.log(p[c][sample][x]) for c in others) / len(others)


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("strength", [0.5, 2.0, -1.0])
def test_rose(classes, strength):
    steps = distributions(*classes)
    for p, combined in zip(steps, run(methods.get("rose", strength=strength), steps), strict=True):
        for sample in range(2):
            z = [
                math.log(p["target"][sample][x]) - strength * mean_log(p, classes, sample, x)
                for x in range(5)
            ]
            assert combined[sample] == pytest.approx(unit(np.exp(z)), abs=1e-12)


@pytest.mark.parametrize("omega", [0.0, 1.0, 1.4, -0.5])
def test_spa(omega):
    steps = distributions("prefix", "masked")
    for p, combined in zip(steps, run(methods.get("spa", omega=omega), steps), strict=True):
        for sample in range(2):
            weights = [
                p["prefix"][sample][x] ** omega * p["masked"][sample][x] ** (1 - omega)
                for x in range(5)
            ]
            assert combined[sample] == pytest.approx(unit(weights), abs=1e-12)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_the_hidden_prefix_of_spa_is_masked_and_keeps_its_positions(name):
    """Against transformers' own attention mask: 0 on the prefix's keys, positions as they are."""
    model = load(name)
    settings = {"length": 20, "trace": "full", "top_k": 1}
    method = methods.get("spa", omega=0.0)  # the masked branch alone decides
    made = generate(model, method, "sentiment", "positive", ["The lake"], **settings)
    layout = Layout.of(model.tokenizer, "Very positive:", "The lake")
    new = [int(token) for token in made.texts["tokens"][0]]
    ids = torch.tensor([[*layout.ids, *new]])
    mask = torch.ones_like(ids)
    mask[0, slice(*layout.prefix)] = 0
    positions = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        logits = facts_of(model).network(ids, attention_mask=mask, position_ids=positions).logits
    assert new == logits[0, len(layout.ids) - 1 : -1].argmax(-1).tolist()
    assert np.abs(made.trace["prefix"].sel(branch="masked").to_numpy()).max() == 0
    assert made.trace["prefix"].sel(branch="prefix").to_numpy().min() > 0


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("top_p", [0.6, 0.9, 1.0])
def test_dexperts(classes, top_p):
    steps = distributions("base", *classes)
    for p, combined in zip(
        steps, run(methods.get("dexperts", strength=3.2, top_p=top_p), steps), strict=True
    ):
        for sample in range(2):
            held, nucleus_tokens = 0.0, []
            for x in sorted(range(5), key=lambda x: -p["base"][sample][x]):
                if held < top_p:
                    nucleus_tokens.append(x)
                held += p["base"][sample][x]
            weights = [0.0] * 5
            for x in nucleus_tokens:
                ratio = math.log(p["target"][sample][x]) - mean_log(p, classes, sample, x)
                weights[x] = p["base"][sample][x] * math.exp(3.2 * ratio)
            assert combined[sample] == pytest.approx(unit(weights), abs=1e-12)


def test_dexperts_by_hand():
    """Base (.5, .3, .2), top-p .7 keeps two; expert over anti-expert 2 and 1/2, strength 1: weights
    1, .15."""
    p = {"base": [[0.5, 0.3, 0.2]], "target": [[0.4, 0.2, 0.4]], "other": [[0.2, 0.4, 0.4]]}
    log_weights = methods.get("dexperts", strength=1, top_p=0.7).combine(as_logs(p), None)
    assert normalised(log_weights)[0] == pytest.approx([1 / 1.15, 0.15 / 1.15, 0])


@pytest.mark.parametrize("top_k", [None, 1, 20])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_nucleus_is_that_of_transformers(top_p, top_k):
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = (
        torch.randn(8, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    )
    expected = logits if top_k is None else TopKLogitsWarper(top_k)(None, logits)
    expected = TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(nucleus(logits, top_p, top_k), expected)


def test_rose_keeps_impossible_tokens_impossible():
    logs = {
        "target": torch.tensor([[0.0, -torch.inf]]),
        "other": torch.tensor([[0.0, -torch.inf]]),
        "base": torch.zeros(1, 2),
    }
    assert methods.get("rose", strength=1.5).combine(logs, None)[0].tolist() == [0, -torch.inf]
