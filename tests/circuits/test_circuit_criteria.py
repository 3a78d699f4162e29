"""analyses/circuit_criteria.py: its three criteria, from control scores under a cut of the other
heads."""

import numpy as np
import pandas as pd
import pytest
from conftest import load, script

from lapa2_interp import Augmentation
from lapa2_interp.circuits import ContrastSet, control_score, select
from lapa2_interp.circuits.units import all_heads

pytestmark = pytest.mark.long
CHOOSING = ["A man", "It was", "One day", "He had", "She saw", "We are", "They go", "No one"]
PROMPTS = [f"The {word} of the" for word in ("lake", "book", "city", "road", "king", "day")]


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
    script("analyses", "circuit_criteria", folder / "card.json", "--out", folder, *options)
    assert (folder / "faithfulness.png").is_file()
    names = ("faithfulness", "completeness", "minimality")
    return model, card, {name: pd.read_csv(folder / f"{name}.csv") for name in names}


def lex(model, asked, heads):
    """Mean lex by prompt where only these heads see the prefix."""
    others = tuple(head for head in all_heads(model) if head not in heads)
    rule = Augmentation(alpha=1, law="cut", phase="after_span", heads=others) if others else None
    score = control_score(model, asked, metrics=("lex",), augmentation=rule).values["lex"]
    return asked.by_prompt(np.nanmean(score, axis=1))


def test_faithfulness_is_lex_of_these_heads_alone(tables):
    model, card, frames = tables
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


def test_completeness_and_minimality_are_judged_on_other_prompts(tables):
    model, card, frames = tables
    further, asked = (
        ContrastSet.of(model, "sentiment", prompts=prompts, tokens=6)
        for prompts in (PROMPTS[4:], PROMPTS[:4])
    )
    control = lex(model, further, all_heads(model)).sum()
    for row in frames["completeness"].to_dict("records"):
        left_out = str(row["which"]).split() if row["heads"] else []
        subset = [tuple(map(int, head.split("."))) for head in left_out]
        of_c, of_m = (
            lex(model, further, tuple(head for head in heads if head not in subset)).sum()
            for heads in (card.heads, all_heads(model))
        )
        assert row["share"] == pytest.approx((of_c - of_m) / control, abs=1e-4)
        assert row["prompts"] == 2
    judging = type(asked)(asked.examples[1::2], asked.words)
    control = lex(model, judging, all_heads(model)).sum()
    # With two heads, a K of the minimality of one holds nothing or the other head.
    for row in frames["minimality"].to_dict("records"):
        head = (row["layer"], row["head"])
        (partner,) = (card_head for card_head in card.heads if card_head != head)
        before, after = ((head,), ()) if row["K"] else ((head, partner), (partner,))
        lost = lex(model, judging, before).sum() - lex(model, judging, after).sum()
        assert row["share"] == pytest.approx(lost / control, abs=1e-4)
