"""The real model: what the paper says happens, happens here."""

import numpy as np
import pytest
from conftest import generate, load

from lapa2_interp import Augmentation
from lapa2_interp.attention.tables import pooled
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.theory import fit_decay
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods


@pytest.fixture(
    scope="module",
    params=[pytest.param(5, marks=pytest.mark.long), pytest.param(15, marks=pytest.mark.slow)],
)
def curves(request):
    """Traces by arm: texts behind some or all of the prompts, written by the baseline and read by
    every arm."""
    model, task = load("smollm2-135m"), load_task("sentiment")
    prompts = task.prompts.texts[: request.param]
    base = generate(
        model,
        methods.get("prefix"),
        task,
        "positive",
        prompts,
        length=82,
        trace="pooled",
    )
    layouts = [Layout.of(model.tokenizer, task.prefix("positive"), prompt) for prompt in prompts]
    texts = base.texts["tokens"].tolist()
    read = {
        arm: teacher_forced(model, layouts, texts, rule, trace="pooled")
        for arm, rule in {
            "half": Augmentation(alpha=0.5),
            "released": Augmentation(alpha=0.5, profile="released"),
        }.items()
    }
    return {"baseline": base.trace, **read}


def at(trace, name, steps):
    return pooled(trace, name)[0][:, steps].mean(axis=1)


def test_prefix_attention_fades_without_the_bias(curves):
    base = curves["baseline"]
    early, late = at(base, "prefix", slice(0, 8)), at(base, "prefix", slice(56, 72))
    assert (late < early).all(), "for every prompt"
    assert late.mean() < 0.5 * early.mean()
    curve = pooled(base, "prefix")[0][:, :72].mean(axis=0).astype(float)
    assert fit_decay(np.arange(72), curve).r2 > (0.8 if len(base["sample"]) == 15 else 0.7), (
        "a mean of five is noisier"
    )


def test_lapa2_holds_it_up_at_step_64(curves):
    base, half = (at(curves[arm], "prefix", slice(56, 72)) for arm in ("baseline", "half"))
    assert (half > base).mean() >= 14 / 15
    assert half.mean() > 2 * base.mean()


def test_the_released_span_feeds_the_sink_instead(curves):
    """BOS gains more than the prefix does, and the prefix gains less than under the paper's span."""
    window = slice(56, 72)
    gain = {
        (arm, name): (at(curves[arm], name, window) - at(curves["baseline"], name, window)).mean()
        for arm in ("half", "released")
        for name in ("prefix", "bos")
    }
    assert gain["released", "bos"] > 3 * gain["released", "prefix"]
    assert gain["half", "prefix"] > 2 * gain["released", "prefix"]


@pytest.mark.long
def test_bfloat16_reads_a_text_as_float32_does():
    """Prefix attention at every step: bfloat16 keeps three digits of a number, and two of what 30
    layers make of it."""
    shares = []
    for dtype in ("float32", "bfloat16"):
        model = load("smollm2-135m", dtype)
        branch = Layout.of(model.tokenizer, "Very positive:", "The lake")
        text = model.tokenizer(
            " is a quiet place where people come to swim.", add_special_tokens=False
        ).input_ids
        trace = teacher_forced(model, branch, [text], Augmentation(alpha=0.5), trace="pooled")
        shares.append(pooled(trace, "prefix")[0][0].astype(float))
    np.testing.assert_allclose(shares[1], shares[0], rtol=0.05)
