"""analyses/heads/equal_attention.py: the grid's sets and strengths, and comparisons of planted rows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analyses.heads import equal_attention as script
from lapa2_interp._util.parsing import parse_toml
from lapa2_interp.bias.recipes import parse_recipes
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.prefix_attention import mean_prefix_attention
from lapa2_interp.circuits.selection import select
from tests.conftest import load


def test_every_set_of_the_grid_gives_the_prefix_the_same_attention(monkeypatch):
    monkeypatch.setattr(script, "FAR_DOWN", -0.5)  # of few heads, one that is hidden lacks
    model = load("planted", model_class="TransformersModel")
    card = select(model, "sentiment", heads=2)
    prompts = ["The lake", "The road", "The book"]
    blocks = parse_toml(script.grid(model, card, prompts, "planted"))["block"]
    assert len(blocks) == script.DRAWS
    texts = [
        ContrastSet.of(model, "sentiment", prompts=prompts, source=name, tokens=64, seed=2).examples
        for name in card.task
    ]
    contrast_set = ContrastSet.of_examples(*texts[0], *texts[1])
    shares, drawn = [], set()
    for third, block in enumerate(blocks, 1):
        recipes = {arm["label"]: arm["recipe"] for arm in block["augmentation"]}
        assert recipes.pop("no bias") == "none"
        arms = {label: parse_recipes(recipe) for label, recipe in recipes.items()}
        shares += [mean_prefix_attention(model, contrast_set, rules) for rules in arms.values()]
        (free,) = arms[f"random, no opposers {third}"]
        assert not set(free.heads) & {*card.heads, *card.suppressors}
        drawn.add(heads := arms[f"random {third}"][0].heads)
        assert not set(heads) & set(card.heads)
        up, down = arms["2 heads" + script.DOWN]
        assert (up.heads, down.heads) == (
            tuple(sorted(card.heads)),
            tuple(sorted(card.suppressors)),
        )
    assert shares == pytest.approx([shares[0]] * len(shares), rel=3e-3)
    assert len(drawn) > 1


def test_sets_are_compared_on_the_same_prompts():
    rng = np.random.default_rng(0)
    gains = {"no bias": 0, "24 heads": 20, "all heads": 2, "random": -3}
    rows = pd.DataFrame(
        [
            {"arm": arm, "attribute": attribute, "prompt": prompt, "sample": 0}
            | {"acc hidden": easy + gain, "acc (linear)": easy + gain / 2}
            for prompt, easy in enumerate(rng.normal(50, 30, 40))
            for attribute in ("positive", "negative")
            for arm, gain in gains.items()
        ]
    )
    table = script.differences(rows).set_index(["metric", "arm", "against"])
    hidden = table.loc["acc hidden"]
    assert hidden.loc[("24 heads", "all heads"), "difference"] == pytest.approx(18)
    assert hidden.loc[("24 heads", "random"), "difference"] == pytest.approx(23)
    assert hidden.loc[("random", "no bias"), "difference"] == pytest.approx(-3)
    assert table.loc[("acc (linear)", "24 heads", "no bias"), "difference"] == pytest.approx(10)
    assert len(table) == 2 * 5
    assert (table["p_holm"] >= table["p"]).all()
