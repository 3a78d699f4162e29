"""Contrast sets behind soft prefixes: `ContrastSet.of(prefixes=SET)`."""

import pytest
from conftest import load, soft_set
from test_chats import TASK

from lapa2_interp import generate
from lapa2_interp._util.errors import CircuitError
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.control import control_score
from lapa2_interp.circuits.edits import read_prefixes
from lapa2_interp.circuits.study import run_study
from lapa2_interp.methods.registry import load_task
from lapa2_interp.prefixes.soft_prefix import load_prefix

PROMPTS = ["The lake", "A road"]


@pytest.fixture(scope="module")
def model():
    return load("tiny-llama", "float32")


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("set")
    soft_set(folder, model, load_task("sentiment"))
    return folder


def of(model, folder, **settings):
    asked = {"prompts": PROMPTS, "tokens": 4} | settings
    return ContrastSet.of(model, "sentiment", prefixes=str(folder), **asked)


def test_each_branch_has_the_soft_prefix_of_its_attribute(model, folder):
    contrast_set = of(model, folder, attribute="negative")
    assert contrast_set.l_pre == 5
    expected = [load_prefix(folder, name) for name in ("negative", "positive")]
    for example in contrast_set.examples:
        assert example.attributes == ("negative", "positive")
        for prefix, own in zip(example.prefixes, expected, strict=True):
            assert prefix.keys.equal(own.keys)
        assert all(
            layout.soft == 5 and layout.l_pro == example.raw.l_pro for layout in example.layouts
        )
    # The prefixes decide: exchanged, the signed metric turns round.
    turned = of(model, folder)
    one, two = (control_score(model, made).values["llr"].mean() for made in (contrast_set, turned))
    assert one == pytest.approx(-two, abs=1e-5)
    assert abs(one) > 1e-3


def test_steered_texts_are_those_that_the_soft_prefix_writes(model, folder):
    made = of(model, folder, source="positive", seed=3)
    run = generate(
        model, method={"name": "prefix", "prefixes": str(folder)}, task="sentiment",
        attribute="positive", prompts=PROMPTS, alpha=0, length=4 + 8, samples=1, seed=3,
        eos="block", trace="none",
    )  # fmt: skip
    written = dict(zip(run.texts()["prompt"], run.texts()["tokens"], strict=True))
    for example in made.examples:
        assert list(example.text) == list(written[example.prompt])[:4]


def test_what_has_no_soft_prefix_or_no_position_is_refused(model, folder, tmp_path):
    with pytest.raises(CircuitError, match="a chat has hard prefixes; found 'mle'"):
        ContrastSet.of(model, TASK, prefixes="mle")
    example = of(model, folder).examples[0]
    with pytest.raises(CircuitError, match="keys of a soft prefix have fixed positions"):
        read_prefixes(model, [(example, 0)], shift=3)
    # A study that was begun with other prefixes is another study.
    settings = {"prompts": PROMPTS[:1], "tokens": 1, "report": lambda line: None}
    run_study(model, "sentiment", tmp_path / "study", prefixes=str(folder), **settings)
    with pytest.raises(CircuitError, match="prefixes"):
        run_study(model, "sentiment", tmp_path / "study", **settings)
