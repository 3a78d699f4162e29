"""Cards of heads as biases, in Python and in grids."""

import json

import pytest
from conftest import load

from lapa2_interp import Augmentation, generate
from lapa2_interp.bias.head_card import HeadCard
from lapa2_interp.bias.recipes import parse_recipes
from lapa2_interp.errors import AugmentationError, CircuitError, ModelError
from lapa2_interp.models.card import identify
from lapa2_interp.models.planted import PROMPTS
from lapa2_interp.runs.grid import load_grid

KIND = "TransformersModel"


def saved(folder, **fields):
    """A card's file, with a fact that other cards have beside."""
    model = load("planted", model_class=KIND)
    card = {
        "model": "planted",
        "weights": identify(model).weights,
        "heads": [[0, 1], [1, 0]],
        "positions": None,
    }
    (folder / "card.json").write_text(json.dumps(card | {"seed": 1} | fields))
    return folder / "card.json"


def cells(folder, text):
    """The cells of a grid, whose lines are TOML."""
    file = folder / "grid.toml"
    file.write_text(f'model = "planted"\nprompts = ["The lake"]\nlength = 12\n{text}\n')
    return load_grid(str(file)).cells


@pytest.mark.parametrize(
    ("fields", "line", "wanted"),
    [
        ({}, "", Augmentation(alpha=0.5, heads=((0, 1), (1, 0)))),
        ({"alpha": 2.0}, "", Augmentation(alpha=2, heads=((0, 1), (1, 0)))),
        ({"alpha": 2.0}, ", alpha = 3.0", Augmentation(alpha=3, heads=((0, 1), (1, 0)))),
        (
            {"positions": [1]},
            ', law = "sqrt"',
            Augmentation(alpha=0.5, heads=((0, 1), (1, 0)), span=("prefix", (1,)), law="sqrt"),
        ),
        (
            {"strengths": [0.5, -2.0], "law": "constant", "l0": 64.0, "alpha": 1.0},
            "",
            Augmentation(
                alpha=1, strengths=((0, 1, 0.5), (1, 0, -2.0)), law="constant", l0=64.0
            ),
        ),
        (
            {"alpha": 2.0},
            ', recipe = "instaboost:M=5"',
            parse_recipes("instaboost:M=5,heads=0.1/1.0")[0],
        ),
    ],
)  # fmt: skip
def test_a_card_in_a_grid_is_the_bias_by_hand(tmp_path, fields, line, wanted):
    file = saved(tmp_path, **fields)
    made = cells(tmp_path, f'augmentation = {{ card = "{file}"{line} }}')
    (bias,) = {cell.active_augmentations for cell in made}
    assert bias == (wanted,)
    assert not any(
        "heads_of" in cell.model_copy(update={"heads_of": ""}).model_dump() for cell in made
    )
    by_hand = cells(tmp_path, f"augmentation = {as_toml(wanted)}")
    assert [cell.key for cell in made] == [cell.key for cell in by_hand], "a card decides no key"
    assert {cell.heads_of for cell in made} == {HeadCard.load(file).weights}
    if not line:
        assert HeadCard.load(file).augmentation() == wanted


def as_toml(bias):
    """The fields of a bias as a table of a grid."""
    fields = {
        name: plain for name, plain in json.loads(bias.to_json()).items() if plain is not None
    }
    return (
        "{ " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in fields.items()) + " }"
    )


def test_cards_and_alphas_are_axes(tmp_path):
    file = saved(tmp_path)
    made = cells(tmp_path, f'alpha = [0, 1, 2]\naugmentation = {{ card = "{file}" }}')
    alphas = {
        cell.active_augmentations[0].alpha if cell.active_augmentations else 0 for cell in made
    }
    assert alphas == {0, 1, 2}


def test_what_a_card_decides_is_refused_beside_it(tmp_path):
    file = saved(tmp_path)
    for name in ("heads", "strengths"):
        with pytest.raises(AugmentationError, match=f"a card gives the heads itself; found {name}"):
            HeadCard.load(file).augmentation(**{name: "3.1"})
    with pytest.raises(CircuitError, match=r"cannot read .*none.json"):
        HeadCard.load(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(CircuitError, match=r"is not a card of heads .*`lapa2 select` makes one"):
        HeadCard.load(tmp_path / "other.json")


def test_another_model_is_refused(tmp_path):
    asked = {"attribute": "positive", "length": 12, "augmentation": {"card": saved(tmp_path)}}
    run = generate(load("planted", model_class=KIND), PROMPTS[:2], **asked)
    assert run.texts()["arm"].unique().tolist() == ["alpha 0.5 paper, heads 0.1,1.0"]
    with pytest.raises(ModelError, match=r"the card's heads are those of a model with .*; found"):
        generate("planted:3", PROMPTS[:2], **asked, model_class=KIND)
