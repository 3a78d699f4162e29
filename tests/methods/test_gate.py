"""The gate of plausibility: by plain Python, at its ends, and as DIRECTER's greedy loop."""

import pytest
import torch
from conftest import generate, load

from lapa2_interp import Augmentation, Layout, recipe
from lapa2_interp.attention.hooked import edit_scores
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.registry import load_task

PROMPTS = ["The lake", "I saw"]
SETTINGS = {"length": 16, "samples": 2, "trace": "none"}


def log_probs(seed=0, samples=40, vocab=5):
    rng = torch.Generator().manual_seed(seed)
    drawn = 3 * torch.randn(2, samples, vocab, generator=rng, dtype=torch.float64)
    return dict(zip(("steered", "plain"), drawn.log_softmax(2), strict=True))


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.5, 1.0])
def test_weights_are_those_of_the_formula(beta):
    p, n_steered = log_probs(), 0
    combined = methods.get("gate", beta=beta).combine(p, None)
    for row in range(40):
        steered, plain = (p[name][row].exp().tolist() for name in ("steered", "plain"))
        accepted = plain[steered.index(max(steered))] > beta * max(plain)
        n_steered += accepted
        assert torch.equal(combined[row], p["steered" if accepted else "plain"][row])
    assert {0.0: n_steered == 40, 1.0: n_steered == 0}.get(beta, 0 < n_steered < 40)


def test_its_ends_are_the_prefix_with_and_without_steering(tiny, model_class):
    """At beta 0 every step is steered, at beta 1 none is; at alpha 0 there is nothing to steer."""
    model, task = load(tiny, "float64", model_class), load_task("sentiment")
    rule, prefix = Augmentation(alpha=3), methods.get("prefix")

    def texts(method, augmentation):
        asked = model, method, task, "positive", PROMPTS
        return generate(*asked, augmentation=augmentation, **SETTINGS).texts["tokens"].tolist()

    plain, steered = texts(prefix, None), texts(prefix, rule)
    assert plain != steered
    assert texts(methods.get("gate", beta=0), rule) == steered
    assert texts(methods.get("gate", beta=1), rule) == plain
    assert texts(methods.get("gate"), None) == plain


@torch.no_grad()
def test_greedy_texts_are_directers(tiny):
    """With keys scaled in all layers: the steered token where the pass without steering gives it
    more than half of its largest probability."""
    model, task = load(tiny, "float64"), load_task("sentiment")
    made = generate(model, methods.get("gate"), task, "positive", PROMPTS, length=20, top_k=1,
                    augmentation=recipe("key-scale", beta=4), trace="none")  # fmt: skip
    refused = 0
    for sample in made.texts.itertuples():
        layout = Layout.of(model.tokenizer, task.prefix("positive"), sample.prompt)
        prefix = slice(*layout.prefix)

        def scale(layer, scores, prefix=prefix):
            scores = scores.clone()
            scores[:, :, -1, prefix] *= 4
            return scores

        for step, token in enumerate(sample.tokens):
            ids = torch.tensor([[*layout.ids, *sample.tokens[:step]]])
            raw = model(ids)[0, -1].softmax(0)
            with edit_scores(model, scale):
                wanted = int(model(ids)[0, -1].argmax())
            if not raw[wanted] > 0.5 * raw.max():
                refused += 1
                wanted = int(raw.argmax())
            assert token == wanted
    assert 0 < refused < made.texts["n_tokens"].sum()
