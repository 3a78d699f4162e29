"""What an arm is called: a recipe's name, or a label of the user's, which decides no text."""

import re

import pytest
import torch
from conftest import load

from lapa2_interp import Augmentation, Cell, Layout, augmented, generate, load_run, teacher_forced
from lapa2_interp.bias.recipes import (
    parse_recipes,
    recipe,
)
from lapa2_interp.errors import AugmentationError
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.runs.engines import InProcess
from lapa2_interp.runs.fill import fill_run
from lapa2_interp.runs.generate import make_cells
from lapa2_interp.runs.grid import load_grid

ASKED = {"attribute": "positive", "prompts": ["The lake"], "dtype": "float32", "length": 12}
GRID = """model = "tiny-gpt2"
dtype = "float32"
trace = "pooled"
method = "prefix"
task = "sentiment"
attribute = "positive"
prompts = 1
samples = 1
length = 20
{block}
"""


def grid(folder, block, name="mine"):
    file = folder / f"{name}.toml"
    file.write_text(GRID.format(block=block))
    return load_grid(str(file))


def arms(grid_or_run):
    return [cell.arm for cell in grid_or_run.cells]


@pytest.mark.parametrize(
    ("augmentation", "label"),
    [
        (recipe("instaboost", M=5), "instaboost:M=5"),
        (recipe("lapa2"), "lapa2"),
        (recipe("set-point", tau=0.25, floor=False), "set-point:tau=0.25,floor=false"),
        (recipe("selective", tokens=(0, 2), heads=((3, 1),)), "selective:tokens=0/2,heads=3.1"),
        (recipe("lapa2", steps=(0, 16)), "lapa2:steps=0:16"),
        (
            parse_recipes("lapa2:tokens=1 +instaboost:M=5.0,layers=top"),
            "lapa2:tokens=1 + instaboost:M=5,layers=top",
        ),
    ],
)
def test_a_recipe_has_its_name(augmentation, label):
    assert augmentation.label == label
    assert parse_recipes(label) == augmentation
    assert cell_of("tiny-gpt2", augmentation=augmentation, **ASKED).arm == label
    assert cell_of("tiny-gpt2", augmentation=label, **ASKED).arm == label


def test_many_strengths_are_counted_in_a_label():
    few = recipe("lapa2", strengths="3.1:0.5,4.0:-2")
    assert few.label == "lapa2:strengths=3.1:0.5/4.0:-2"
    assert parse_recipes(few.label) == few
    assert Augmentation(alpha=1.0, strengths="3.1:0.5").label == "alpha 1 paper, strengths 3.1:0.5"
    close = recipe("lapa2", strengths=((3, 1, 1 / 3),))
    assert parse_recipes(close.label) == close, "no digit is lost"
    many = recipe("lapa2", strengths=tuple((layer, 0, 0.5) for layer in range(12)))
    assert re.fullmatch(r"lapa2:12 strengths \(#[0-9a-f]{6}\)", many.label)
    doubled = recipe("lapa2", strengths=tuple((layer, 0, 1.0) for layer in range(12)))
    assert doubled.label != many.label


def test_long_lists_are_short_in_a_label():
    many = recipe("head-selective", heads=tuple((layer, 0) for layer in range(12)), alpha=1.0)
    assert re.fullmatch(r"head-selective:12 heads \(#[0-9a-f]{6}\),alpha=1", many.label)
    others = recipe("head-selective", heads=tuple((layer, 1) for layer in range(12)), alpha=1.0)
    assert others.label != many.label


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({"layers": (0, 1, 5)}, "layers 0,1,5"),
        ({"layers": (*range(11),)}, "layers 0,1,2,3,4,5,6,7,8,9,10"),
        ({"layers": (*range(15),)}, "layers 0-14"),
        ({"layers": (0, 1, *range(10, 20), 29)}, "layers 0,1,10-19,29"),
        ({"layers": (*range(0, 30, 2), 29)}, r"16 layers \(#[0-9a-f]{6}\)"),
        ({"heads": ((3, 1), (4, 0))}, "heads 3.1,4.0"),
        ({"heads": tuple((layer, 0) for layer in range(24))}, r"24 heads \(#[0-9a-f]{6}\)"),
    ],
)
def test_a_list_is_named_or_counted_in_a_label(fields, label):
    assert re.fullmatch(f"alpha 1 paper, {label}", Augmentation(alpha=1.0, **fields).label)


def test_a_label_is_no_part_of_the_key():
    plain = cell_of("tiny-gpt2", alpha=0.5, **ASKED)
    named = cell_of("tiny-gpt2", alpha=0.5, label="ours", **ASKED)
    assert (named.arm, plain.arm) == ("ours", "alpha 0.5 paper")
    assert named.key == plain.key
    assert named.sampling_key == plain.sampling_key
    assert Cell.model_validate_json(named.model_dump_json()).arm == "ours"
    by_name = cell_of("tiny-gpt2", augmentation="lapa2:alpha=0.5", **ASKED)
    assert by_name.key == plain.key


def test_the_base_method_is_the_baseline():
    with pytest.raises(
        AugmentationError, match="label 'ours' is for an augmentation.* 'baseline' is the arm"
    ):
        cell_of("tiny-gpt2", alpha=0, label="ours", **ASKED)
    assert cell_of("tiny-gpt2", augmentation="lapa2:alpha=0", **ASKED).arm == "baseline"


def test_recipes_by_name_do_what_their_augmentations_do():
    model = load("tiny-gpt2")
    text, rules = "instaboost:M=5", recipe("instaboost", M=5)
    made = generate(model, augmentation=text, **ASKED)
    assert made.cells["arm"].tolist() == [text]
    assert made.texts()["arm"].tolist() == [text]
    assert made.manifest().cell.active_augmentations == tuple(rules)
    assert made.trace()["arm"].to_numpy().tolist() == [text]
    layout = Layout.of(model.tokenizer, "Very positive:", "The lake")
    logits = []
    for augmentation in (text, rules, [text]):
        with augmented(model, augmentation, layout), torch.no_grad():
            logits.append(model(layout.tensor))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    with (
        pytest.raises(AugmentationError, match="unknown recipe 'instabost'.*did you mean"),
        augmented(model, "instabost", layout),
    ):
        pass
    one, two = (teacher_forced(model, layout, [[5, 6, 7]], bias) for bias in (text, rules))
    assert one.equals(two)


def test_labels_of_a_grid(tmp_path):
    labelled = grid(
        tmp_path,
        """augmentation = ["none", "instaboost:M=5", "paper", { alpha = 1.0, label = "strong" },
            { recipe = "set-point:tau=0.3", label = "held" }]""",
    )
    assert arms(labelled) == ["baseline", "instaboost:M=5", "alpha 0.5 paper", "strong", "held"]
    of_block = grid(
        tmp_path, '[[block]]\nlabel = "ours"\nmethod = ["prefix", "preadd"]\n'
        'augmentation = ["none", "paper"]'
    )  # fmt: skip
    assert arms(of_block) == ["baseline", "ours", "baseline", "ours"]  # of two methods


def test_labels_of_two_grids_in_one_run(tmp_path):
    """The same cell takes the later label; two arms of one label are told apart."""
    run = tmp_path / "run"
    one = grid(tmp_path, 'augmentation = ["none", "paper"]', "one")
    fill_run(run, [one], InProcess("cpu"))
    two = 'augmentation = [{ alpha = 0.5, label = "ours" }, { alpha = 1.0, label = "more" }]'
    fill_run(run, [grid(tmp_path, two, "two")], InProcess("cpu"))
    stored = load_run(run)
    assert stored.cells["arm"].tolist() == ["baseline", "ours", "more"]
    assert stored.texts()["arm"].tolist() == ["baseline", "ours", "more"]
    assert stored.trace()["arm"].to_numpy().tolist() == ["baseline", "ours", "more"]
    third = grid(tmp_path, 'augmentation = { alpha = 2.0, label = "more" }', "three")
    fill_run(run, [third], InProcess("cpu"))
    assert load_run(run).cells["arm"].tolist()[2:] == ["more", "more (alpha 2 paper)"]
    again = load_run(load_run(run).save(tmp_path / "copy").folder)
    assert again.cells["arm"].tolist()[2:] == ["more", "more (alpha 2 paper)"]


def test_a_label_survives_saving(tmp_path):
    cell = cell_of("tiny-gpt2", augmentation="instaboost:M=5", **ASKED)
    run = make_cells(load("tiny-gpt2"), [cell]).save(tmp_path / "run")
    again = load_run(run.folder)
    assert again.cells["arm"].tolist() == ["instaboost:M=5"]
    assert again.by_key[cell.key].augmentation == Augmentation(**dict(recipe("instaboost", M=5)[0]))
