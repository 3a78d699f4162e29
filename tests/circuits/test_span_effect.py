"""What a span does to later tokens, against TransformerLens' own hooks."""

import numpy as np
import pytest
import torch
from conftest import TINY, load

from lapa2_interp import Augmentation, Layout
from lapa2_interp.circuits import read_span, span_effect
from lapa2_interp.errors import CircuitError, LayoutError
from lapa2_interp.methods.registry import HIDDEN

TEXT = " is calm and deep"


def of(model):
    layout = Layout.of(model, "Very positive:", " The lake")
    return layout, model.tokenizer(TEXT, add_special_tokens=False).input_ids


def by_hooks(model, layout, tokens, bias=0.0):
    """The divergence of two whole passes: one with the bias on the prefix from the last token of
    the prompt on, one also without the prefix for every later query."""
    ids, n, prefix = torch.tensor([[*layout.ids, *tokens[:-1]]]), len(layout), layout.prefix

    def steer(scores, hook):
        scores = scores.clone()
        scores[:, :, n - 1 :, slice(*prefix)] += bias
        return scores

    def hide(scores, hook):
        scores = scores.clone()
        scores[:, :, prefix.stop :, slice(*prefix)] = -torch.inf
        return scores

    predicted = []
    for hooks in ([steer], [steer, hide]):
        at = [(f"blocks.{i}.attn.hook_attn_scores", hook) for i in range(model.cfg.n_layers) for hook in hooks]  # fmt: skip
        with torch.no_grad():
            logits = model.run_with_hooks(ids, fwd_hooks=at)
        predicted.append(logits[0, n - 1 :].double().softmax(-1).numpy())
    middle = np.mean(predicted, axis=0)
    return np.mean([(p * np.log(p / middle)).sum(-1) for p in predicted], axis=0)


@pytest.mark.parametrize("name", TINY)
def test_an_effect_is_the_divergence_of_passes_with_hooks(name):
    model = load(name, "float64")
    layout, tokens = of(model)
    effect = span_effect(model, layout, tokens)
    np.testing.assert_allclose(effect, by_hooks(model, layout, tokens), atol=1e-9)
    assert effect.min() > 0
    reading, ids = read_span(model, layout, tokens), torch.tensor([[*layout.ids, *tokens[:-1]]])
    logits, cache = model.run_with_cache(ids)
    patterns = torch.stack([cache[f"blocks.{i}.attn.hook_pattern"][0] for i in range(model.cfg.n_layers)])  # fmt: skip
    n = len(layout)
    masses = patterns[:, :, n - 1 :, slice(*layout.prefix)].sum(-1).mean((0, 1))
    np.testing.assert_allclose(reading.attention, masses.detach(), atol=1e-6)
    entropy = torch.distributions.Categorical(logits=logits[0, n - 1 :]).entropy()
    np.testing.assert_allclose(reading.entropy, entropy.detach(), atol=1e-9)
    constant = Augmentation(alpha=0.5, law="constant", l0=20)
    b = layout.bias(constant, np.array([len(layout)]))[0]
    steered = span_effect(model, layout, tokens, constant)
    np.testing.assert_allclose(steered, by_hooks(model, layout, tokens, b), atol=1e-9)


def test_what_is_hidden_already_has_no_effect():
    model = load("tiny-llama", "float64")
    layout, tokens = of(model)
    assert np.abs(span_effect(model, layout, tokens, HIDDEN)).max() < 1e-15


@pytest.mark.parametrize("pooled", [False, True])
def test_an_effect_is_that_of_its_first_tokens_alone(pooled):
    """A later token changes no earlier step, also under a law that reads all queries of a pass."""
    model = load("tiny-gpt2", "float64")
    layout, tokens = of(model)
    rule = Augmentation(alpha=0.6, law="ratio", tau=0.9, pooled=pooled)
    long = span_effect(model, layout, tokens, rule)
    np.testing.assert_allclose(span_effect(model, layout, tokens[:4], rule), long[:4], atol=1e-12)
    np.testing.assert_allclose(span_effect(model, layout, tokens[:1], rule), long[:1], atol=1e-12)


def test_what_has_no_effect_to_measure_is_refused():
    model = load("tiny-gpt2")
    layout, tokens = of(model)
    with pytest.raises(CircuitError, match="found no token after it"):
        span_effect(model, layout, [])
    with pytest.raises(CircuitError, match="found an empty span"):
        span_effect(model, Layout.of(model, None, " The lake"), tokens)
    with pytest.raises(LayoutError, match="more than the model's context"):
        span_effect(model, layout, tokens * 1000)
    with pytest.raises(LayoutError, match="has no embedding"):
        span_effect(model, layout, [model.cfg.d_vocab])
