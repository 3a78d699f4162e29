"""The heads of a request: a card of heads, a card of strengths, or all heads."""

from datetime import UTC, datetime

import pytest

from lapa2_interp import Augmentation, Selection
from lapa2_interp.bias.recipes import parse_recipes
from lapa2_interp.serving.request import Defaults, ProtocolError, Steering, _rules

HEADS = ((0, 1), (2, 3))
RULES = (Augmentation(alpha=0.7),)


def card(**learned):
    return Selection(
        model="m", weights="w", task={"a": "A:", "b": "B:"}, by="learned", metric=None,
        heads=HEADS, suppressors=(), scores=(), positions=None, prompts=("p",), inputs="i",
        stability=None, seed=1, created=datetime(2026, 11, 30, tzinfo=UTC), **learned,
    )  # fmt: skip


CARDS = {
    "heads": card(),
    "log": card(strengths=(0.5, -2.0), l0=40.0),
    "constant": card(strengths=(0.5, -2.0), law="constant", l0=40.0),
}


def rule_of(heads, rules=RULES, **steering):
    defaults = Defaults("m", "system", rules, cards=CARDS)
    (rule,) = _rules(defaults, Steering(heads=heads, **steering))
    return rule


@pytest.mark.parametrize("name", ["log", "constant"])
def test_a_card_of_strengths_is_that_of_a_recipe(name):
    (wanted,) = parse_recipes("lapa2", 0.7, CARDS[name].fields())
    rule = rule_of(name)
    for field in ("alpha", "law", "l0", "strengths", "heads"):
        assert getattr(rule, field) == getattr(wanted, field), field


@pytest.mark.parametrize("recipe", ["lapa2:law=sqrt,alpha=0.3", "instaboost", "set-point:tau=0.3"])
def test_another_law_than_that_of_the_card_is_refused(recipe):
    with pytest.raises(ProtocolError, match="were learned under law 'log', and the request has"):
        rule_of("log", augmentation=recipe)
    assert rule_of("heads", augmentation=recipe).heads == HEADS


@pytest.mark.parametrize(("heads", "wanted"), [("all", "all"), ("heads", HEADS)])
def test_strengths_that_are_left_take_the_end_of_the_law_with_them(heads, wanted):
    (learned,) = parse_recipes("lapa2", 0.7, CARDS["log"].fields())
    rule = rule_of(heads, (learned,))
    assert (rule.strengths, rule.heads, rule.l0) == (None, wanted, None)
    (learned,) = parse_recipes("lapa2", 0.7, CARDS["constant"].fields())
    assert rule_of(heads, (learned,)).l0 == 40.0, "which the constant law needs"
