"""Arms at equal attention on the prefix."""

import numpy as np
import pytest

from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.prefix_attention import (
    alpha_at_prefix_attention,
    mean_prefix_attention,
    prefix_attention_by_head,
)
from lapa2_interp.errors import CircuitError
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.models.planted import answer_key
from tests.conftest import load

ARMS = {
    "all heads": {},
    "one head": {"heads": ((0, 1),)},
    "a layer": {"layers": (1,)},
    "a token": {"span": ("prefix", (1,))},
    "linear": {"law": "linear"},
}


@pytest.fixture(scope="module")
def contrast_set():
    prompts = ["The lake", "Once upon a time", "The road"]
    return ContrastSet.of(load("tiny-llama"), "sentiment", prompts=prompts, tokens=6)


def test_the_mean_mass_is_that_of_the_heads(contrast_set):
    model = load("tiny-llama")
    assert mean_prefix_attention(model, contrast_set) == pytest.approx(
        prefix_attention_by_head(model, contrast_set).mean()
    )


def test_a_text_is_read_behind_the_prefix_it_was_written_behind():
    model = load("tiny-llama")
    written = ContrastSet.of(model, "sentiment", prompts=["The lake"], tokens=6, source="negative")
    (example,) = written.examples
    trace = teacher_forced(
        model, example.layouts[example.attributes.index("negative")], [example.text]
    )
    assert mean_prefix_attention(model, written) == pytest.approx(
        float(trace["prefix"].mean()), rel=1e-6
    )


@pytest.mark.parametrize("arm", ARMS)
def test_mass_rises_with_alpha_and_is_hit(arm, contrast_set):
    model, rule = load("tiny-llama"), Augmentation(alpha=1, **ARMS[arm])
    alphas = [0.0, 0.1, 0.4, 1.0, 2.0, 4.0]
    masses = [
        mean_prefix_attention(model, contrast_set, rule.model_copy(update={"alpha": a}))
        for a in alphas
    ]
    assert (np.diff(masses) > 0).all()
    wanted = 0.6 * masses[0] + 0.4 * masses[3]
    alpha = alpha_at_prefix_attention(model, contrast_set, wanted, rule)
    assert 0 < alpha < 1
    hit = mean_prefix_attention(model, contrast_set, rule.model_copy(update={"alpha": alpha}))
    assert hit == pytest.approx(wanted, rel=1e-3)


def test_equal_mass_is_unequal_alpha():
    """One head of many needs a larger alpha for what all heads do with little."""
    model, heads = load("planted"), (answer_key("planted").heads["carrier"],)
    contrast_set = ContrastSet.of(model, "sentiment", prompts=["The lake", "The road"], tokens=6)
    few = Augmentation(alpha=1, heads=heads)
    wanted = mean_prefix_attention(model, contrast_set, few)
    assert alpha_at_prefix_attention(model, contrast_set, wanted, few) == pytest.approx(1, rel=0.05)
    assert alpha_at_prefix_attention(model, contrast_set, wanted) < 0.5


def test_what_cannot_be_reached_is_refused(contrast_set):
    """The message names what can be."""
    model, rule = load("tiny-llama"), Augmentation(alpha=2, heads=((0, 1),))
    most = mean_prefix_attention(model, contrast_set, rule)
    with pytest.raises(
        CircuitError, match=f"alpha 2 gives the prefix {most:.4g} of .* ask for less"
    ):
        alpha_at_prefix_attention(model, contrast_set, 1.2 * most, rule, max_alpha=2)
