"""Heads and tokens that are chosen, on models whose circuit is known."""

import json
import shlex
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from lapa2_interp import Layout, load_run
from lapa2_interp.bias.augmentation import active_augmentations
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.gradients import attribution
from lapa2_interp.circuits.knockout import knock_out
from lapa2_interp.circuits.selection import (
    SHIPPED,
    Selection,
    choose_units,
    select,
    shipped_selection,
    sufficient_tokens,
)
from lapa2_interp.cli.app import main
from lapa2_interp.errors import AugmentationError, CircuitError
from lapa2_interp.models.planted import answer_key
from tests.conftest import load

pytestmark = pytest.mark.usefixtures("shared_models")

ATTRIBUTE = 1
"""Position of the attribute in "Very positive:"."""


@pytest.fixture(scope="module")
def contrast_set():
    return ContrastSet.of(load("planted"), "sentiment", tokens=12)


@pytest.fixture(scope="module")
def chosen(contrast_set):
    return select(
        load("planted"), contrast_set, score="cut", heads=4, positions="auto", metric="lex"
    )


def test_the_planted_circuit_is_chosen(chosen):
    """By what is lost: carrier and relay. The reader sees the prompt, decoy and idle heads write
    nothing, the suppressor works against the prefix."""
    key = answer_key("planted").heads
    assert chosen.heads == (key["carrier"], key["relay"])
    assert key["suppressor"] in chosen.suppressors
    assert not {key["decoy"], *chosen.heads} & set(chosen.suppressors)
    assert chosen.positions == (ATTRIBUTE,)
    assert chosen.stability > 0.9
    assert len(chosen.prompts) == 15
    assert all(low <= mean <= high for mean, low, high in chosen.scores)


@pytest.mark.parametrize("score", ["slope", "dla", "mass", "random"])
def test_other_scores(score, contrast_set):
    key = answer_key("planted").heads
    selection = select(load("planted"), contrast_set, score=score, heads=2, metric="lex")
    assert len(selection.heads) <= 2
    if score in ("slope", "dla"):
        assert selection.heads[0] == key["carrier"]
        assert key["decoy"] not in selection.heads
        assert key["suppressor"] in selection.suppressors
    if score == "mass":
        assert selection.heads[0] == key["decoy"], "attention is not control"
    if score == "random":
        drawn = [
            select(load("planted"), contrast_set, score=score, heads=2, metric="lex", seed=seed)
            for seed in (1, 2, 2, 3, 4)
        ]
        assert len(set(selection.heads)) == 2
        assert selection.suppressors == ()
        assert drawn[1].heads == drawn[2].heads
        assert len({selection.heads for selection in drawn}) > 1
        assert [selection.seed for selection in drawn] == [1, 2, 2, 3, 4]


def test_an_augmentation_of_a_selection(chosen, tmp_path):
    key = answer_key("planted").heads
    law = chosen.augmentation(0.25, law="log")
    assert (law.alpha, law.heads, law.span) == (
        0.25,
        tuple(sorted(chosen.heads)),
        ("prefix", (ATTRIBUTE,)),
    )
    with pytest.raises(AugmentationError, match=r"gives the heads itself; found heads=\("):
        chosen.augmentation(heads=((0, 1),))
    with pytest.raises(AugmentationError, match="beta"):
        chosen.augmentation(beta=1)
    assert key["suppressor"] in chosen.suppressors
    file = tmp_path / "card.json"
    chosen.save(file)
    assert Selection.load(file) == chosen
    assert json.loads(file.read_text())["task"]["positive"] == "Very positive:"
    chosen.check(load("planted"))
    with pytest.raises(CircuitError, match="belongs to planted with .* choose again"):
        chosen.check(load("planted:3"))


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_selection_of_another_model_does_not_steer(
    command, chosen, tmp_path, capsys, monkeypatch
):
    file = tmp_path / "card.json"
    chosen.save(file)
    asked = ["generate", "--attribute", "positive", "--prompt", "a", "--out", str(tmp_path / "run")]
    if command == "chat":
        messages = tmp_path / "messages.json"
        messages.write_text(json.dumps([{"role": "system", "content": "Be brief."}]))
        asked = ["chat", str(messages)]
        monkeypatch.setattr(  # tiny models have no chat template
            Layout, "of_chat", lambda tokenizer, *_, **__: Layout.of(tokenizer, "Be brief.", "a")
        )
    where = ["--model", "tiny-llama", "--length", "12", "--dtype", "float32"]
    assert main([*asked, *where, "--card", str(file)]) == 2
    assert "the card belongs to planted with" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_selection_does_not_depend_on_what_attributes_are_called(contrast_set):
    """Turned round, the same heads and tokens are chosen."""
    turned = ContrastSet(
        tuple(example.swapped() for example in contrast_set.examples), contrast_set.words[::-1]
    )
    model = load("planted")
    one, swapped = (
        select(model, texts, score="cut", heads=4, metric="lex") for texts in (contrast_set, turned)
    )
    assert set(one.heads) == set(swapped.heads)
    assert set(one.suppressors) == set(swapped.suppressors)


def test_random_labels_select_next_to_nothing(contrast_set):
    """With the branches swapped at random in each prompt the effects in lex have random signs. Of
    200 draws a head is chosen in at most 18 (5 % and three standard deviations)."""
    measured = knock_out(load("planted"), contrast_set, metric="lex", other_metrics=())
    effects = contrast_set.by_prompt(measured.values)
    rng, carrier = np.random.default_rng(0), 0
    at = measured.units.index(next(u for u in measured.units if u.heads == (answer_key("planted").heads["carrier"],)))  # fmt: skip
    for _ in range(200):
        signs = rng.choice([-1.0, 1.0], (len(effects), 1))
        carrier += at in choose_units(signs * effects, 8)[0]
    assert carrier <= 18
    assert at in choose_units(effects, 8)[0]


def test_two_tokens_are_needed_where_a_gate_reads_the_first():
    """In the twin "spread" the carrier does not find the attribute without the first token."""
    model = load("planted-spread")
    assert sufficient_tokens(model, "sentiment", "lex") == (0, ATTRIBUTE)
    assert sufficient_tokens(load("planted"), "sentiment", "lex") == (ATTRIBUTE,)


def test_tokens_that_are_given(contrast_set):
    selection = select(load("planted"), contrast_set, score="random", heads=1, positions=(2, 1))
    assert selection.positions == (1, 2)
    every = select(load("planted"), contrast_set, score="random", heads=1, positions=(0, 1, 2))
    assert every.positions is None


def test_a_card_names_the_metric_that_was_used(contrast_set, chosen):
    """Scores that need no control say none, unless tokens or Pro-Aug are chosen by it."""
    model, few = load("planted"), replace(contrast_set, examples=contrast_set.examples[:8])
    named = {
        (score, heads, positions): select(
            model, few, score=score, heads=heads, positions=positions, metric="lex"
        ).metric
        for score, heads, positions in product(("random", "cut"), (0, 1), ("all", "auto"))
    }
    used = {("cut", 1, "all")} | {choice for choice in named if choice[2] == "auto"}
    assert {choice for choice, metric in named.items() if metric == "lex"} == used
    assert {metric for choice, metric in named.items() if choice not in used} == {None}
    assert chosen.metric == "lex"


def test_a_selection_that_ships_is_that_of_the_weights(chosen, tmp_path, monkeypatch, capsys):
    shipped = chosen.model_copy(update={"prompts": (), "alpha": 0.7, "gain": "It gains."})
    shipped.save(tmp_path / "planted-1.5.sentiment.json")
    monkeypatch.setattr("lapa2_interp.circuits.selection.SHIPPED", tmp_path)
    assert shipped_selection("planted") == shipped
    for model, task in (("planted:3", "sentiment"), ("planted", "topic")):
        with pytest.raises(CircuitError, match=r"there are some of planted, sentiment \("):
            shipped_selection(model, task)
    line = f"select planted --shipped --out {tmp_path / 'card.json'}"
    assert main(line.split()) == 0
    assert "alpha 0.7. It gains." in capsys.readouterr().out
    assert Selection.load(tmp_path / "card.json") == shipped
    for option in ("--heads 3", "--tokens 8", "--score slope"):
        assert main(f"{line} {option}".split()) == 2
        assert "--shipped chooses nothing: leave out" in capsys.readouterr().err


def test_damaged_files(tmp_path):
    (tmp_path / "bad.json").write_text('{"heads": []}')
    with pytest.raises(CircuitError, match=r"is not a card of heads .*`lapa2 select` makes one"):
        Selection.load(tmp_path / "bad.json")


@pytest.mark.long
def test_the_commands(tmp_path, capsys):
    """The card that one command writes is read by the other; the page says what it found."""
    key, card, out = answer_key("planted").heads, tmp_path / "card.json", tmp_path / "fading"
    line = "select planted --metric lex --score slope --heads 1 --positions auto --tokens 8 --out"
    assert main([*line.split(), str(card)]) == 0
    layer, head = key["carrier"]
    printed = capsys.readouterr().out
    assert printed.startswith(f"{layer}.{head} ")
    assert "tokens of the prefix: 1" in printed
    assert Selection.load(card).heads == (key["carrier"],)
    line = "generate --model planted --attribute positive --prompt 'The lake' --length 12"
    made = shlex.split(f"{line} --card {card} --out {tmp_path / 'made'}")
    assert main(made) == 0
    (cell,) = load_run(tmp_path / "made").by_key.values()
    (rule,) = active_augmentations(cell.augmentation)
    assert (rule.heads, rule.span, rule.alpha) == ((key["carrier"],), ("prefix", (1,)), 0.5)
    bias = ["--augmentation", "lapa2:law=sqrt,phase=decode + instaboost:span=bos"]
    assert main([*made[:-1], str(tmp_path / "more"), *bias]) == 0
    (cell,) = load_run(tmp_path / "more").by_key.values()
    chosen, on_bos = active_augmentations(cell.augmentation)
    assert (chosen.heads, chosen.span, chosen.law) == (rule.heads, ("prefix", (1,)), "sqrt")
    assert (on_bos.heads, on_bos.span, on_bos.law) == (rule.heads, "bos", "scale")
    assert main([*made[:-1], str(tmp_path / "no"), "--augmentation", "lapa2:heads=0.1"]) == 2
    assert "recipe lapa2 is given heads twice; leave heads out" in capsys.readouterr().err
    line = f"fading planted --filler 40 --tokens 4 --card {card} --random 1 --out {out}"
    assert main(line.split()) == 0
    printed = capsys.readouterr().out
    assert "mass mediates: holding the mass restores four fifths of the fade" in printed
    tables = {"fading.csv", "control.csv", "prompts.csv"}
    assert {file.name for file in out.iterdir()} == {*tables, "fading.png"}
    assert main(f"select planted --positions x --out {card}".split()) == 2
    assert "positions: takes 'all', 'auto', or positions from 0" in capsys.readouterr().err
    assert main(f"fading planted:3 --card {card} --out {tmp_path / 'no'}".split()) == 2
    assert "choose again in this model" in capsys.readouterr().err


def test_more_random_heads_than_there_are_is_all_of_them():
    model = load("planted")
    selection = select(
        model, ContrastSet.of(model, "sentiment", tokens=4), score="random", heads=1000
    )
    assert len(selection.heads) == model.cfg.n_layers * model.cfg.n_heads


def test_one_half_of_the_prompts_screens_and_the_other_decides(monkeypatch):
    """The kept heads and their effects are those of the two halves on their own."""
    model = load("planted")
    prompts = [
        f"The {noun}" for noun in ["lake", "sea", "road", "book", "film", "food", "city", "house"]
    ]
    prompts += [f"A {noun}" for noun in ["lake", "sea", "road", "book", "film", "food", "city"]]
    texts = ContrastSet.of(model, "sentiment", prompts=prompts, tokens=8)
    screening, deciding = (
        replace(texts, examples=tuple(e for e in texts.examples if e.prompt in prompts[i::2]))
        for i in (1, 0)
    )
    selection = select(model, texts, heads=2, metric="lex", screen=3)
    screened = attribution(model, screening, metric="lex").table().best(3, absolute=True)
    exact = knock_out(model, deciding, metric="lex", other_metrics=())
    key = answer_key("planted").heads
    assert selection.screened == 3
    assert selection.heads[0] == key["carrier"]
    assert {*selection.heads, *selection.suppressors} <= set(screened)
    effects = {unit.heads[0]: mean for unit, mean in zip(exact.units, exact.means, strict=True)}
    for head, (mean, _, _) in zip(
        (*selection.heads, *selection.suppressors), selection.scores, strict=True
    ):
        assert mean == pytest.approx(effects[head], rel=1e-6)
    assert selection.prompts == tuple(prompts)


def test_few_prompts_or_heads_are_not_screened(contrast_set):
    model = load("planted")
    few = {example.prompt for example in contrast_set.examples[:14]}
    contrast_set = replace(
        contrast_set, examples=tuple(e for e in contrast_set.examples if e.prompt in few)
    )
    every = select(model, contrast_set, heads=2, metric="lex", screen=0)
    assert every.screened is None
    assert select(model, contrast_set, heads=2, metric="lex", screen=4).scores == every.scores
    with pytest.raises(CircuitError, match="screen must be at least the 4 heads to choose"):
        select(model, contrast_set, heads=4, screen=3)


def test_the_selections_that_ship_are_of_models_that_were_tested():
    files = sorted(SHIPPED.glob("*.json"))
    assert files
    for file in files:
        card = Selection.load(file)
        assert file.name == f"{card.model}.sentiment.json"
        assert card.alpha > 0
        assert "[" in card.gain, "an interval"
        assert not card.prompts, "which are not ours"
        assert card.weights.startswith("sha256 ")
