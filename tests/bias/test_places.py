"""Layers, heads, slots and steps as text: one form in every place that names them."""

import pytest
from conftest import load

from lapa2_interp import Augmentation, Layout, circuits, recipe, teacher_forced
from lapa2_interp.bias.places import read_place
from lapa2_interp.bias.recipes import parse_recipes
from lapa2_interp.errors import Lapa2Error
from lapa2_interp.generation.settings import CellSettings

HEADS = ((0, 1), (1, 0), (1, 1), (1, 2))
PLACES = [
    ("layers", "0,5,10-12", (0, 5, 10, 11, 12)),
    ("layers", "1-3/2", (1, 2, 3)),
    ("heads", "0.1,1.0-2", HEADS),
    ("heads", "2-3.1", ((2, 1), (3, 1))),
    ("strengths", "3.1:0.5, 4.0:-2", ((3, 1, 0.5), (4, 0, -2.0))),
    ("strengths", "0.1:1e-3/0.2:.25", ((0, 1, 0.001), (0, 2, 0.25))),
    ("span", "1:4, 6:8", ((1, 4), (6, 8))),
    ("span", "prefix:0,2-3", ("prefix", (0, 2, 3))),
    ("span", " prefix: 0 / 2 ", ("prefix", (0, 2))),
    ("steps", "0:16", (0, 16)),
    ("steps", " 0 : 16", (0, 16)),
]


@pytest.mark.parametrize(("name", "text", "value"), PLACES)
def test_a_text_is_its_numbers(name, text, value):
    assert read_place(name, text) == value
    assert Augmentation(alpha=1, **{name: text}) == Augmentation(alpha=1, **{name: value})


@pytest.mark.parametrize(
    ("name", "one", "others"),
    [
        ("layers", (0, 1), [(1, 0), (0, 1, 1), "1,0", "0-1,1", [1, 0]]),
        ("heads", ((0, 1), (1, 0)), [((1, 0), (0, 1), (0, 1)), "1.0,0.1", [[1, 0], [0, 1]]]),
    ],
)
def test_layers_and_heads_are_a_set(name, one, others):
    wanted = Augmentation(alpha=1, **{name: one})
    for text in others:
        same = Augmentation(alpha=1, **{name: text})
        assert (same, same.label) == (wanted, wanted.label)
    for doubled in ((1, True), ((0, 1), (0, True)), (1, 1.0)):
        with pytest.raises(Lapa2Error, match=f"augmentation {name}"):
            Augmentation(alpha=1, **{name: doubled})


def test_heads_are_named_alike_everywhere():
    text = "0.1,1.0-2"
    named = parse_recipes(f"lapa2:heads={text.replace(',', '/')},tokens=0-1")
    assert named == recipe("lapa2", heads=text, tokens="0-1")
    assert (named[0].heads, named[0].positions) == (HEADS, (0, 1))
    assert CellSettings.of({"patterns": text}).patterns == HEADS
    model = load("planted")
    effects = circuits.knock_out(model, "sentiment", over={"some": text})
    assert effects.units[0].heads == HEADS
    layout = Layout.of(model.tokenizer, "Very positive:", " The lake")
    traces = [teacher_forced(model, layout, [[1, 2]], patterns=heads) for heads in (text, HEADS)]
    assert traces[0].identical(traces[1])
    assert traces[0].sizes["pair"] == len(HEADS)
