"""analyses/circuits/criteria.py: its three criteria, from control scores under a cut of the other
heads; and analyses/circuits/draw_criteria.py: their tests."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import load, script

from lapa2_interp import Augmentation
from lapa2_interp.circuits import ContrastSet, attribution, control_score, select
from lapa2_interp.circuits.units import all_heads

ROOT = Path(__file__).parents[2]
CHOOSING = ["A man", "It was", "One day", "He had", "She saw", "We are", "They go", "No one"]
PROMPTS = [f"The {word} of the" for word in ("lake", "book", "city", "road", "king", "day")]


def pairs(listed):
    """Heads of a text such as "3.1 4.0"."""
    return [tuple(map(int, head.split("."))) for head in listed.split()]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("criteria")
    model = load("planted", "float32")
    card = select(
        model,
        ContrastSet.of(model, "sentiment", prompts=CHOOSING, tokens=6),
        score="slope",
        heads=2,
    )
    card.save(folder / "card.json")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    settings = {"task": "sentiment", "prompts": folder / "prompts.txt", "tokens": 6, "random": 4}
    settings |= {"n": 4, "further": 2}
    options = [f"--{name}={value}" for name, value in settings.items()]
    script("circuits/criteria", folder / "card.json", "--out", folder, *options)
    names = ("faithfulness", "controls", "minimality")
    tables = {name: pd.read_csv(folder / f"{name}.csv") for name in names}
    return model, card, tables, json.loads((folder / "left-out.json").read_text())


def lex(model, asked, heads):
    """Mean lex by prompt where only these heads see the prefix."""
    others = tuple(head for head in all_heads(model) if head not in heads)
    rule = Augmentation(alpha=1, law="cut", phase="after_span", heads=others) if others else None
    score = control_score(model, asked, metrics=("lex",), augmentation=rule).values["lex"]
    return asked.by_prompt(np.nanmean(score, axis=1))


def test_faithfulness_is_lex_of_these_heads_alone(tables):
    model, card, frames, _ = tables
    asked = ContrastSet.of(model, "sentiment", prompts=PROMPTS[:4], tokens=6)
    table = frames["faithfulness"].query("order == 'by slope'").set_index("heads")
    control = lex(model, asked, all_heads(model)).sum()
    for n in (1, 2):
        share = lex(model, asked, card.heads[:n]).sum() / control
        assert table.loc[n, "share"] == pytest.approx(share, abs=1e-4)
    assert table.loc[0, "share"] == pytest.approx(0, abs=1e-5)
    assert table.loc[8, "share"] == 1
    curve = table["share"]
    expected = np.trapezoid(np.abs(curve - 1), np.array(curve.index) / 8)
    assert table["area"].tolist() == pytest.approx([expected] * len(table), abs=1e-4)


def test_sets_of_heads_and_minimality_are_judged_on_other_prompts(tables):
    model, card, frames, left_out = tables
    further, asked = (
        ContrastSet.of(model, "sentiment", prompts=prompts, tokens=6)
        for prompts in (PROMPTS[4:], PROMPTS[:4])
    )
    assert len(frames["controls"]) == 2
    for name, listed in left_out.items():
        heads = tuple(head for head in all_heads(model) if head not in pairs(listed))
        assert frames["controls"][name].to_numpy() == pytest.approx(
            lex(model, further, heads), abs=1e-4
        )
    # Which heads a set lacks.
    every, chosen = set(all_heads(model)), set(card.heads)
    lacks = {name: set(pairs(listed)) for name, listed in left_out.items()}
    assert lacks["all"] == set()
    assert lacks["chosen"] == every - chosen
    for kind in ("greedy", "random"):
        assert lacks[f"chosen without {kind}"] - lacks[f"all without {kind}"] == every - chosen
        assert lacks[f"all without {kind}"] <= chosen
    assert len(lacks["all without opposing"]) == len(chosen)
    assert lacks["chosen and opposing"] == every - chosen - lacks["all without opposing"]
    # Those that oppose most, by slope on the card's prompts.
    choosing = ContrastSet.of(model, "sentiment", prompts=card.prompts, tokens=6)
    slopes = attribution(model, choosing, metric=card.metric).table("slope").values.mean(0)
    least = np.argsort(slopes)[: len(chosen)]
    assert lacks["all without opposing"] == {all_heads(model)[i] for i in least}
    # The K of the largest gap on the finding half: grown head by head, and at random.
    finding = type(asked)(asked.examples[::2], asked.words)

    def gap(subset):
        return abs(
            (
                lex(model, finding, tuple(head for head in card.heads if head not in subset))
                - lex(
                    model, finding, tuple(head for head in all_heads(model) if head not in subset)
                )
            ).mean()
        )

    first = max(((head,) for head in card.heads), key=gap)
    assert lacks["all without greedy"] == set(max((first, card.heads), key=gap))
    rng = np.random.default_rng(0)
    rng.permutation(len(every))  # the random order of faithfulness
    drawn = [
        tuple(head for head, one in zip(card.heads, rng.random(2) < 0.5, strict=True) if one)
        for _ in range(4)
    ]
    assert gap(lacks["all without random"]) == pytest.approx(max(map(gap, drawn)), abs=1e-6)
    judging = type(asked)(asked.examples[1::2], asked.words)
    control = lex(model, judging, all_heads(model)).sum()
    # With two heads, a K of the minimality of one holds nothing or the other head.
    for row in frames["minimality"].to_dict("records"):
        head = (row["layer"], row["head"])
        (partner,) = (card_head for card_head in card.heads if card_head != head)
        ways = {0: ((head, partner), (partner,)), 1: ((head,), ())}
        finding_lost = {
            n: abs((lex(model, finding, one) - lex(model, finding, two)).mean())
            for n, (one, two) in ways.items()
            if n == 0 or (partner,) in drawn
        }
        assert row["K"] == max(finding_lost, key=finding_lost.get)
        before, after = ways[row["K"]]
        lost = lex(model, judging, before).sum() - lex(model, judging, after).sum()
        assert row["share"] == pytest.approx(lost / control, abs=1e-4)
        changes = lex(model, judging, before) - lex(model, judging, after)
        flips = [abs((np.array(signs) * changes).mean()) for signs in product((1, -1), repeat=2)]
        assert row["p"] == np.mean(np.array(flips) >= abs(changes.mean()) * (1 - 1e-9))


def test_tests_of_all_folders_are_corrected_together(tmp_path, monkeypatch):
    from analyses.circuits import draw_criteria as figure

    rng, folders = np.random.default_rng(0), [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        controls = pd.DataFrame({"prompt": range(12), "all": 1.0, "chosen": 1.3})
        controls["chosen"] += rng.normal(0, 0.1, 12)
        for name in {name for pair in figure.DIFFERENCES.values() for name in pair}:
            if name not in controls:
                controls[name] = rng.normal(1, 0.1, 12)
        controls.to_csv(folder / "controls.csv", index=False)
        pd.DataFrame(
            {"layer": [2], "head": [1], "K": [0], "share": [0.2], "low": [0.1], "high": [0.3]}
            | {"p": [0.01], "prompts": [6]}
        ).to_csv(folder / "minimality.csv", index=False)
        pd.DataFrame(
            {"order": ["by slope"] * 2 + ["random"] * 2, "heads": [1, 8, 1, 8]}
            | {"share": [0.5, 1, 0.1, 1], "low": [0.4, 1, 0, 1], "high": [0.6, 1, 0.2, 1]}
        ).to_csv(folder / "faithfulness.csv", index=False)
    table = figure.criteria(folders)
    assert len(table) == 2 * (len(figure.DIFFERENCES) + 1)
    first = table[table["criterion"] == "chosen heads"].iloc[0]
    changes = pd.read_csv(folders[0] / "controls.csv").eval("chosen - all")
    assert first["share"] == pytest.approx(changes.mean())
    assert first["p"] == 2 / 2**12  # all twelve have one sign
    assert first["p_holm"] == pytest.approx(12 * 2 / 2**12)
    assert table.loc[table["heads"] == "2.1", "p"].tolist() == [0.01, 0.01]
    figure.draw(folders, table).savefig(tmp_path / "criteria.png")
