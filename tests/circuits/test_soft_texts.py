"""Contrast sets behind soft prefixes: `ContrastSet.of(prefixes=SET)`."""

import pandas as pd
import pytest
from conftest import lapa2, load, soft_set
from test_chats import TASK

from lapa2_interp import generate
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.control import control_score
from lapa2_interp.circuits.edits import read_prefixes
from lapa2_interp.circuits.selection import Selection, select
from lapa2_interp.circuits.study import run_study
from lapa2_interp.errors import CircuitError
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


def test_what_has_no_soft_prefix_or_no_position_is_refused(model, folder, tmp_path, capsys):
    with pytest.raises(CircuitError, match="a chat has hard prefixes; found 'mle'"):
        ContrastSet.of(model, TASK, prefixes="mle")
    example = of(model, folder).examples[0]
    with pytest.raises(CircuitError, match="keys of a soft prefix have fixed positions"):
        read_prefixes(model, [(example, 0)], shift=3)
    # Pro-Aug is decided with a method's own prefixes.
    prompts = [
        f"The {name}" for name in ("lake", "sea", "hut", "road", "hill", "town", "farm", "mill")
    ]
    with pytest.raises(CircuitError, match="stand behind soft ones; leave out pro_aug"):
        select(model, of(model, folder, prompts=prompts), score="mass", pro_aug="air-decoding")
    # The account moves prefixes; nothing is written before the refusal.
    call = ("fading tiny-llama --account --prefixes", folder, "--out", tmp_path / "account")
    assert lapa2(*call) != 0
    assert "the keys of soft ones have fixed positions" in capsys.readouterr().err
    assert not (tmp_path / "account").exists()


def test_a_study_is_of_these_prefixes(model, folder, tmp_path):
    settings = {"prompts": PROMPTS[:1], "tokens": 1, "report": lambda line: None}
    run_study(model, "sentiment", tmp_path / "study", prefixes=str(folder), **settings)
    table = pd.read_csv(tmp_path / "study" / "control.csv")
    for source, rows in table.groupby("source"):
        made = of(model, folder, prompts=PROMPTS[:1], tokens=1, source=source)
        expected = control_score(model, made).values["js"].mean()
        assert rows["js"].mean() == pytest.approx(expected, rel=1e-4)
    assert table["source"].nunique() == 3
    # One that was begun with other prefixes is another study.
    with pytest.raises(CircuitError, match="prefixes"):
        run_study(model, "sentiment", tmp_path / "study", **settings)


def test_a_card_names_its_soft_prefixes_and_refuses_others(model, folder, tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(f"A {name}" for name in "abcdefgh"))
    card = tmp_path / "card.json"
    call = ("select tiny-llama --score mass --heads 2 --tokens 2 --prefixes", folder)
    assert lapa2(*call, "--prompts", tmp_path / "prompts.txt", "--out", card) == 0
    chosen = Selection.load(card)
    assert chosen.task == {name: f"<soft mle {name}>" for name in ("positive", "negative")}
    chosen.check(model, of(model, folder))
    with pytest.raises(CircuitError, match="made behind '<soft mle positive>'.*found 'Very pos"):
        chosen.check(model, ContrastSet.of(model, "sentiment", prompts=PROMPTS, tokens=1))
