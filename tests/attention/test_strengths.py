"""One strength a head: the gradient by finite differences, and values as tensors."""

import numpy as np
import pytest
import torch
from conftest import load

from lapa2_interp import Augmentation, Layout, augmented
from lapa2_interp.bias.augmentation import LAWS_BY_STRENGTH
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.bias.padded_rows import PaddedRows
from lapa2_interp.errors import AugmentationError, LayoutError
from lapa2_interp.models.facts import facts_of

KINDS = ("TransformerBridge", "TransformersModel")
PROMPTS = ("The lake", "A book is on the m")
STEP = 1e-5


def read(model, rows, layouts, rule, strengths=None):
    """Logits of the last token, row by row."""
    network = model if facts_of(model).backend == "bridge" else facts_of(model).network
    with augmented(model, rule, layouts, strengths=strengths):
        output = network(rows.ids, attention_mask=rows.mask)
    return getattr(output, "logits", output)[:, -1].double()


def opened(model):
    """Two padded rows behind a prefix, and one number for each head."""
    layouts = left_pad([Layout.of(model.tokenizer, "Very good:", prompt) for prompt in PROMPTS])
    rng = torch.Generator().manual_seed(1)
    size = facts_of(model).n_layers, facts_of(model).n_heads
    return PaddedRows.of(layouts), layouts, torch.randn(size, generator=rng, dtype=torch.float64)


def rule_of(law):
    return Augmentation(alpha=0.7, law=law, l0=50 if law == "constant" else None)


def value_of(strengths):
    """The same as a value."""
    return tuple(
        (layer, head, float(strengths[layer, head])) for layer, head in np.ndindex(*strengths.shape)
    )


@pytest.mark.parametrize("law", LAWS_BY_STRENGTH)
@pytest.mark.parametrize("kind", [*KINDS, "fused"])
def test_the_gradient_of_each_strength_is_that_of_finite_differences(kind, law, monkeypatch):
    """Of padded rows; tests/test_conformance.py has all families, along one direction."""
    model = load("tiny-gpt2", "float64", KINDS[0] if kind == KINDS[0] else KINDS[1])
    if kind != KINDS[0]:
        monkeypatch.setattr(model, "attn", "fused" if kind == "fused" else "matrix")
    rows, layouts, strengths = opened(model)
    leaf = strengths.clone().requires_grad_()
    weights = torch.linspace(-1, 1, model.cfg.d_vocab)
    value = (read(model, rows, layouts, rule_of(law), leaf) * weights).sum()
    (gradient,) = torch.autograd.grad(value, leaf)
    for head in [(0, 0), (1, 1), (len(strengths) - 1, 1)]:
        ends = []
        for sign in (1, -1):
            moved = strengths.clone()
            moved[head] += sign * STEP
            with torch.no_grad():
                rule = rule_of(law).model_copy(update={"strengths": value_of(moved)})
                ends.append((read(model, rows, layouts, rule) * weights).sum())
        slope = float(ends[0] - ends[1]) / (2 * STEP)
        assert float(gradient[head]) == pytest.approx(slope, rel=1e-4, abs=1e-6)
        assert abs(slope) > 1e-5, "the strength acts"


def test_a_tensor_is_read_anew_in_every_pass():
    """As a training loop needs: the same block, a step, and another pass."""
    model = load("tiny-llama", "float64", "TransformersModel")
    rows, layouts, strengths = opened(model)
    leaf = strengths.clone().requires_grad_()
    network = facts_of(model).network
    with augmented(model, rule_of("log"), layouts, strengths=leaf):
        for _ in range(2):
            logits = network(rows.ids, attention_mask=rows.mask).logits[:, -1]
            logits.square().sum().backward()
            with torch.no_grad():
                leaf -= 0.1 * leaf.grad.sign()
            leaf.grad = None
        with torch.no_grad():
            moved = network(rows.ids, attention_mask=rows.mask).logits[:, -1]
    wanted = rule_of("log").model_copy(update={"strengths": value_of(leaf.detach())})
    with torch.no_grad():
        torch.testing.assert_close(moved.double(), read(model, rows, layouts, wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_strengths_of_one_are_heads(kind):
    model = load("tiny-llama", "float64", kind)
    rows, layouts, _ = opened(model)
    heads = ((0, 1), (2, 3))
    by_heads = Augmentation(alpha=0.7, heads=heads)
    by_strengths = Augmentation(alpha=0.7, strengths=[(*head, 1.0) for head in heads])
    doubled = Augmentation(alpha=0.35, strengths=[(*head, 2.0) for head in heads])
    with torch.no_grad():
        logits = read(model, rows, layouts, by_heads)
        assert torch.equal(logits, read(model, rows, layouts, by_strengths))
        torch.testing.assert_close(logits, read(model, rows, layouts, doubled))


def test_up_and_down_is_one_augmentation():
    model = load("tiny-llama", "float64")
    rows, layouts, _ = opened(model)
    up = Augmentation(alpha=0.7, law="scale", heads=((0, 1),))
    down = Augmentation(alpha=-1.4, law="scale", heads=((2, 0),))
    both = Augmentation(alpha=0.7, law="scale", strengths=((0, 1, 1.0), (2, 0, -2.0)))
    with torch.no_grad():
        two = read(model, rows, layouts, [(up, down)] * 2)
        torch.testing.assert_close(two, read(model, rows, layouts, both))


def test_strengths_beside_a_cut_in_another_row():
    """Rows share a term: a head of strength 0 must not see -inf times 0."""
    model = load("tiny-llama", "float64")
    rows, layouts, _ = opened(model)
    cut = Augmentation(alpha=1, law="cut")
    strong = Augmentation(alpha=0.7, strengths=((0, 1, 3.0),))
    with torch.no_grad():
        both = read(model, rows, layouts, [cut, strong])
        assert torch.equal(both[0], read(model, rows, layouts, cut)[0])
        assert torch.equal(both[1], read(model, rows, layouts, strong)[1])


def test_refusals():
    model = load("tiny-llama", "float64", "TransformersModel")
    rows, layouts, strengths = opened(model)
    rule = rule_of("log")
    with pytest.raises(AugmentationError, match=r"shape \(2, 4\), and the model has 4 layers"):
        read(model, rows, layouts, rule, strengths[:2])
    with pytest.raises(AugmentationError, match="laws log, .* not to law 'cut'"):
        read(model, rows, layouts, Augmentation(alpha=1, law="cut"), strengths)
    with (
        pytest.raises(LayoutError, match="find and a tensor of strengths; give layouts"),
        augmented(model, rule, find="good", strengths=strengths),
    ):
        pass
    huge = Augmentation(alpha=1, strengths=((0, 1, 1e6),))
    with pytest.raises(AugmentationError, match="makes a bias of"):
        read(model, rows, layouts, huge)
