"""The bias as a value: laws, profiles, selection, JSON, errors."""

import numpy as np
import pytest
import torch
from conftest import load

from lapa2_interp import Augmentation, Layout, augmented
from lapa2_interp.errors import AugmentationError
from lapa2_interp.generation.resolve import cell_of


@pytest.mark.parametrize(
    ("law", "l0", "expected"),
    [
        ("log", None, [0.0, 0.0, 0.5 * np.log(8 / 4), 0.5 * np.log(100 / 4)]),
        ("linear", None, [0.5 * 2 / 4, 0.5, 1.0, 12.5]),
        ("sqrt", None, [0.5 * np.sqrt(0.5), 0.5, 0.5 * np.sqrt(2), 2.5]),
        ("constant", 128, [0.5 * np.log(32)] * 4),
    ],
)
def test_laws_at_and_around_n(law, l0, expected):
    lengths = np.array([2, 4, 8, 100])
    assert Augmentation(alpha=0.5, law=law, l0=l0).bias(lengths, 4) == pytest.approx(
        expected, abs=1e-15
    )
    released = Augmentation(alpha=0.5, law=law, l0=l0, profile="released").bias(lengths, 4)
    assert released[:2].tolist() == [0, 0]
    assert released[2:] == pytest.approx(expected[2:], abs=1e-15)


def test_profiles_fill_only_what_is_not_given():
    paper, released = Augmentation(alpha=1), Augmentation(alpha=1, profile="released")
    assert (paper.span, paper.length_rule, paper.phase) == ("prefix", "paper", "last_query")
    assert (released.span, released.length_rule, released.phase) == ("released", "kv", "decode")
    mixed = Augmentation(alpha=1, profile="released", span="prefix")
    assert (mixed.span, mixed.length_rule, mixed.phase) == ("prefix", "kv", "decode")


@pytest.mark.parametrize(
    "fields",
    [
        {"alpha": 0.5},
        {"alpha": 2, "profile": "released"},
        {
            "alpha": 1,
            "law": "constant",
            "l0": 128,
            "span": ((0, 2), (4, 5)),
            "layers": (0, 3),
            "heads": ((0, 1), (3, 2)),
        },
        {
            "alpha": 1 / 3,
            "span": "prefix+bos",
            "phase": "after_span",
            "length_rule": "kv",
            "layers": "top",
        },
        {"alpha": 0.5, "strengths": ((3, 1, -0.5), (4, 0, 1 / 3))},
    ],
)
def test_json_round_trip(fields):
    augmentation = Augmentation(**fields)
    again = Augmentation.model_validate_json(augmentation.to_json())
    assert again == augmentation
    assert hash(again) == hash(augmentation)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", [0, 1, 2, 3, 4]),
        ("bottom", [0, 1]),
        ("top", [2, 3, 4]),
        ("even", [0, 2, 4]),
        ("odd", [1, 3]),
        ((4,), [4]),
    ],
)
def test_layer_rules(layers, expected):
    selected = Augmentation(alpha=1, layers=layers).head_mask(5, 2)
    assert np.flatnonzero(selected.all(axis=1)).tolist() == expected
    assert selected.sum() == 2 * len(expected)


def test_the_papers_halves():
    assert np.flatnonzero(
        Augmentation(alpha=1, layers="bottom").head_mask(24, 16).all(1)
    ).tolist() == list(range(12))
    assert np.flatnonzero(
        Augmentation(alpha=1, layers="top").head_mask(32, 32).all(1)
    ).tolist() == list(range(16, 32))


def test_layers_and_heads_intersect():
    selected = Augmentation(alpha=1, layers="even", heads=((0, 1), (1, 1), (2, 0))).head_mask(4, 2)
    assert np.argwhere(selected).tolist() == [[0, 1], [2, 0]]


def test_the_log_law_stops_at_l0():
    growing, stopped = Augmentation(alpha=0.5), Augmentation(alpha=0.5, l0=40)
    l = np.array([2, 4, 40, 41, 5000])
    assert stopped.bias(l, 4)[:3].tolist() == growing.bias(l, 4)[:3].tolist()
    assert stopped.bias(l, 4)[3:].tolist() == [0.5 * np.log(10)] * 2
    assert stopped.bias(l, np.full(5, 50)).tolist() == [0] * 5, "a prefix longer than l0"


def test_strengths_are_kept_in_order_without_those_of_0():
    one = Augmentation(alpha=1, strengths=[[2, 0, 0.5], [1, 1, -2], [0, 0, 0]])
    assert one.strengths == ((1, 1, -2.0), (2, 0, 0.5))
    assert one == Augmentation(alpha=1, strengths="1.1:-2, 2.0:5e-1")
    assert one.head_strengths(3, 2).tolist() == [[0, 0], [0, -2], [0.5, 0]]
    assert one.head_mask(3, 2).tolist() == [[False, False], [False, True], [True, False]]
    assert one.within([2]).head_strengths(3, 2).tolist() == [[0, 0], [0, 0], [0.5, 0]]
    assert one.within([0]) is None


def test_a_bias_without_strengths_is_written_as_before_there_were_any():
    """So the keys of older cells stay."""
    assert "strengths" not in Augmentation(alpha=1).to_json()
    assert '"strengths":[[3,1,0.5]]' in Augmentation(alpha=1, strengths="3.1:.5").to_json()


def test_a_cell_refuses_an_augmentation_that_its_key_would_not_tell():
    class Doubled(Augmentation):
        def bias(self, l, n):
            return 2 * super().bias(l, n)

    settings = {"attribute": "positive", "dtype": "float32"}
    assert cell_of("tiny-gpt2", augmentation=Augmentation(alpha=1.0), **settings).augmentation
    with pytest.raises(AugmentationError, match="key cannot tell Doubled from Augmentation"):
        cell_of("tiny-gpt2", augmentation=Doubled(alpha=1.0), **settings)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"law": "linear"},
        {"law": "sqrt"},
        {"law": "constant", "l0": 128},
        {"law": "scale"},
        {"profile": "released"},
    ],
)
def test_a_bias_beyond_all_use_is_refused(fields):
    """It would be NaN in the softmax, or blur the shares within the span."""
    lengths = np.array([2, 8, 100])
    for alpha in (1e308, 1e38, 1e7):
        rule = Augmentation(alpha=alpha, **fields)
        with pytest.raises(
            AugmentationError, match=r"makes a bias of .*; allowed: -10000 to 10000"
        ):
            rule.check_bias(rule.bias(lengths, 4))
    if fields.get("law") == "scale":
        with pytest.raises(AugmentationError, match="makes a bias of -1e"):
            rule.check_bias(-rule.bias(lengths, 4))
    assert np.abs(Augmentation(alpha=300, **fields).bias(lengths, 4)).max() < 1e4
    assert np.isneginf(Augmentation(alpha=1, law="cut").bias(lengths, 4)).all()


@pytest.mark.parametrize("kind", ["TransformerBridge", "TransformersModel"])
def test_no_pass_makes_nan_of_a_bias(kind):
    model = load("tiny-gpt2", "float32", kind)
    layout = Layout.of(model.tokenizer, "Very positive:", "The lake")

    class Broken(Augmentation):
        def bias(self, l, n):
            return np.full_like(l, np.nan, dtype=float)

    class Endless(Augmentation):
        def bias(self, l, n):
            return np.full_like(l, -np.inf, dtype=float)

    for rule in (Augmentation(alpha=1e308), Broken(alpha=1), Endless(alpha=1)):
        with (
            augmented(model, rule, layout),
            pytest.raises(AugmentationError, match="makes a bias of"),
        ):
            model(layout.tensor)
    # The largest that is allowed; and laws that read the scores are cut at +-20 anyway.
    reading = [{"law": "power"}, {"law": "target", "tau": 0.3}, {"law": "ratio", "tau": 0.3}]
    rules = [Augmentation(alpha=1e308, law="power")] + [
        Augmentation(alpha=1, **fields) for fields in reading
    ]
    for rule in (
        Augmentation(alpha=1e4, law="scale"),
        Augmentation(alpha=-1e4, law="scale"),
        *rules,
    ):
        with torch.no_grad(), augmented(model, rule, layout):
            assert model(layout.tensor).isfinite().all()
