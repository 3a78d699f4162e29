"""Law multiply: scores times a factor, by transformers' own softmax in plain loops, and however a
text is read."""

import math

import numpy as np
import pytest
import torch
from conftest import HAS_HOOKED, load

from lapa2_interp import Augmentation, Layout, augmented, recipe
from lapa2_interp.attention.cache import new_rows
from lapa2_interp.attention.hooked import edit_scores
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.errors import AugmentationError

CLASSES = ("HookedTransformer",) if HAS_HOOKED else ("TransformerBridge", "TransformersModel")
TOKENS = torch.tensor([[40, 41, 42], [90, 81, 72]])
RULES = {
    "key-scale": recipe("key-scale", beta=3),
    "softer": (Augmentation(alpha=-0.5, law="multiply", heads="1.0,2.1", phase="everywhere"),),
    "log-n": recipe("log-n", l0=8),
    "log-n while decoding": recipe("log-n", l0=8, phase="decode"),
    "ssmax": recipe("ssmax", s=0.3, layers="top"),
    "with a bias": (*recipe("ssmax"), Augmentation(alpha=0.5)),
}


def factors(name, query, key, prefix, last, layer, head):
    """The factor of a score, and what is added to it, by the formula."""
    l = query + 1  # every key counts, BOS too
    if name == "key-scale":
        return (3.0 if key in prefix and query == last else 1.0), 0.0
    if name == "softer":
        return (0.5 if key in prefix and (layer, head) in ((1, 0), (2, 1)) else 1.0), 0.0
    if name == "log-n":
        return math.log(l) / math.log(8), 0.0
    if name == "log-n while decoding":
        return (math.log(l) / math.log(8) if query >= last - 2 else 1.0), 0.0
    if name == "ssmax":
        return (0.3 * math.log(l) if layer >= 2 else 1.0), 0.0
    bias = 0.5 * math.log((l - 1) / len(prefix)) if key in prefix and query >= last - 3 else 0.0
    return 0.43 * math.log(l), bias


@pytest.fixture(params=CLASSES)
def of_class(request):
    return request.param


@torch.no_grad()
@pytest.mark.parametrize("name", RULES)
def test_scores_are_multiplied_by_the_formula(tiny, of_class, name):
    """One pass: every score by hand. Cached passes of padded rows: the same logits."""
    model = load(tiny, "float64", of_class)
    own = [Layout.of(model.tokenizer, "Very good:", prompt) for prompt in ("The lake", "I saw")]
    alone = []
    for row, layout in enumerate(own):
        ids = torch.cat([layout.tensor, TOKENS[row : row + 1]], dim=1)
        last, prefix = ids.shape[1] - 1, range(*layout.prefix)

        def change(layer, scores, last=last, prefix=prefix):
            new = scores.clone()
            for head in range(scores.shape[1]):
                for query in range(last + 1):
                    for key in range(query + 1):
                        factor, bias = factors(name, query, key, prefix, last, layer, head)
                        new[0, head, query, key] = scores[0, head, query, key] * factor + bias
            return new

        with augmented(model, RULES[name], layout):
            one_pass = model(ids)
        if of_class != "HookedTransformer":
            with edit_scores(model, change):
                assert torch.allclose(model(ids), one_pass, rtol=0, atol=1e-9)
        assert (model(ids) - one_pass).abs().max() > 1e-3
        alone.append(one_pass[0, -TOKENS.shape[1] - 1 :])
    padded, rules = left_pad(own), RULES[name]
    state = new_rows(model, rules)
    with augmented(model, rules, padded):
        logits = [state.prompt_pass(padded)[:, -1]]
        state.expand(torch.arange(2), len(padded[0]) + 4)
        logits += [state.read_tokens(step)[:, -1] for step in TOKENS.split(1, dim=1)]
    atol = 1e-5 if of_class == "HookedTransformer" else 1e-9
    for row, one_pass in enumerate(alone):
        cached = torch.stack([step[row] for step in logits])
        steps = slice(-1, None) if name == "key-scale" else slice(None)  # only there it predicts
        assert torch.allclose(cached[steps], one_pass[steps], rtol=0, atol=atol)


@torch.no_grad()
def test_a_factor_of_one_changes_no_bit(tiny, of_class):
    """alpha 0, and a length of l0."""
    model = load(tiny, "float32", of_class)
    layout = Layout.of(model.tokenizer, "Very good:", "The lake")
    with augmented(model, None, layout):
        plain = model(layout.tensor)
    for rule in (
        Augmentation(alpha=0, law="multiply", span="all"),
        recipe("log-n", l0=len(layout), phase="last_query"),
        recipe("key-scale", beta=1),
    ):
        with augmented(model, rule, layout):
            assert torch.equal(model(layout.tensor), plain)


def test_closed_forms():
    """log-n is SSMax with s = 1/ln(l0); two scores that differ by d have odds exp(beta d)."""
    l = np.array([1, 8, 200])
    (log_n,), (ssmax,) = recipe("log-n", l0=math.exp(1 / 0.3)), recipe("ssmax", s=0.3)
    assert log_n == ssmax
    assert np.allclose(1 + ssmax.bias(l, 3), 0.3 * np.log(l), rtol=0, atol=1e-12)
    assert Augmentation(alpha=2, law="multiply").bias(l, 3).tolist() == [2, 2, 2]
    half = Augmentation(alpha=0.5, law="multiply", l0=8)
    assert np.allclose(1 + half.bias(l, 3), (1 + np.log(l) / math.log(8)) / 2, rtol=0, atol=1e-12)


@torch.no_grad()
def test_sharper_attention_is_that_of_a_higher_temperature():
    """All keys times beta: log A - log A' of two keys is multiplied by beta, in the first layer."""
    model = load("tiny-llama", "float64", "TransformersModel")
    layout = Layout.of(model.tokenizer, "Very good:", "The lake")
    seen = {}

    class Reader:
        def observe(self, layer, pattern, first):
            seen.setdefault(layer, pattern[0, :, -1].log())

    patterns = []
    for alpha in (0, 1.5):
        seen.clear()
        rule = Augmentation(alpha=alpha, law="multiply", span="all")
        with augmented(model, rule, layout, Reader()):
            model(layout.tensor)
        patterns.append(seen[0] - seen[0][:, :1])
    assert torch.allclose(patterns[1], 2.5 * patterns[0], rtol=0, atol=1e-9)


@torch.no_grad()
def test_a_pass_without_the_matrix_forms_it():
    """Its layers say why, and the numbers are the same; other layers go without."""
    model = load("tiny-llama", "float64", "TransformersModel")
    layout = Layout.of(model.tokenizer, "Very good:", "The lake")
    rule = Augmentation(alpha=1, law="multiply", span="all", layers="1", phase="everywhere")
    with augmented(model, rule, layout) as paths:
        wanted = model(layout.tensor)
    before = model.attn
    model.attn = "fused"
    try:
        with augmented(model, rule, layout) as paths:
            assert torch.allclose(model(layout.tensor), wanted, rtol=0, atol=1e-9)
    finally:
        model.attn = before
    assert paths[1] == "a law that multiplies scores"
    assert paths[0] == paths[2] == "fused"


def test_the_attention_does_not_decide_its_effect():
    rule = Augmentation(alpha=1, law="multiply")
    with pytest.raises(AugmentationError, match="changes every score by another number"):
        rule.shift(np.zeros(3), 10, 3)
