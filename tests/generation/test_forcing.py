"""A text read in one pass against cached decoding, and chunks against none."""

import numpy as np
import pytest
import torch
import xarray as xr
from conftest import generate, load, soft_prefix

from lapa2_interp import Augmentation
from lapa2_interp._util.errors import LayoutError, TraceError
from lapa2_interp.attention.trace import SUMS
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.recipes import recipe
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods
from lapa2_interp.models.card import is_bridge

AUGMENTATIONS = [
    None,
    Augmentation(alpha=0.5),
    Augmentation(alpha=1.0, phase="decode", layers="top"),
    Augmentation(alpha=1.0, profile="released"),
    Augmentation(alpha=0.7, phase="after_span", heads=((0, 1), (2, 3))),
]


def same(found, expected, atol=1e-6):
    for name in (*SUMS, "prefix_tokens"):
        np.testing.assert_allclose(
            found[name].to_numpy(), expected[name].to_numpy(), atol=atol, equal_nan=True
        )
    assert found["l_kv"].to_numpy().tolist() == expected["l_kv"].to_numpy().tolist()


@pytest.mark.parametrize("augmentation", AUGMENTATIONS, ids=str)
def test_equals_cached_decoding(tiny, model_class, augmentation):
    """The texts a model made, read again under the same augmentation: prompts of several lengths,
    left-padded."""
    model, task = load(tiny, "float64", model_class), load_task("sentiment")
    prompts = ["The lake", "Once upon a time", "A"]
    made = generate(
        model,
        methods.get("prefix"),
        task,
        "positive",
        prompts,
        length=30,
        samples=2,
        augmentation=augmentation,
    )
    layouts = [
        Layout.of(model.tokenizer, "Very positive:", prompt) for prompt in made.samples["prompt"]
    ]
    again = teacher_forced(model, layouts, made.samples["tokens"].tolist(), augmentation, chunk=7)
    same(
        again, made.trace, 1e-6 if is_bridge(model) else 1e-5
    )  # HookedTransformer rotates in float32


@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
def test_chunks_change_nothing(tiny, chunk):
    model = load(tiny, "float64")
    branch = Layout.of(model.tokenizer, "Very positive:", "The lake")
    texts = [list(range(40, 70)), list(range(90, 101))]
    whole = teacher_forced(model, branch, texts, Augmentation(alpha=0.5), chunk=1000)
    same(teacher_forced(model, branch, texts, Augmentation(alpha=0.5), chunk=chunk), whole)
    assert np.isfinite(whole["prefix"].to_numpy()[0, 0]).all()
    assert np.isnan(whole["prefix"].to_numpy()[0, 1, 11:]).all(), "the second text has 11 tokens"


def test_beside_a_soft_prefix(tiny):
    model = load(tiny, "float64")
    prefix = soft_prefix(model)
    rows = [
        Layout.of(model.tokenizer, None, "The lake", soft=len(prefix)),
        Layout.of(model.tokenizer, "Very good:", "A lake of"),
    ]
    texts = [list(range(40, 60)), list(range(50, 70))]
    both = teacher_forced(model, rows, texts, Augmentation(alpha=0.5), prefixes=[prefix, None])
    for i, alone in enumerate((prefix, None)):
        one = teacher_forced(
            model, rows[i], texts[i : i + 1], Augmentation(alpha=0.5), prefixes=[alone]
        )
        for name in SUMS:
            assert np.abs(both[name].to_numpy()[:, i] - one[name].to_numpy()[:, 0]).max() < 1e-6, (
                name
            )


def test_a_trace_of_one_full_pass():
    """The recorder reads every step of a pass over prompt and text at once, too."""
    from lapa2_interp import augmented
    from lapa2_interp.attention.recorder import Recorder

    model = load("tiny-gpt2", "float64")
    branch, text = Layout.of(model.tokenizer, "Very positive:", "The lake"), list(range(40, 60))
    recorder = Recorder(model.cfg.n_layers, model.cfg.n_heads)
    recorder.begin([branch])
    with augmented(model, Augmentation(alpha=0.5), branch, recorder), torch.no_grad():
        model(torch.tensor([[*branch.ids, *text[:-1]]]))
    same(
        recorder.dataset([branch], ["target"], [20]),
        teacher_forced(model, branch, [text], Augmentation(alpha=0.5)),
    )


def test_bad_input():
    model = load("tiny-gpt2")
    branch = Layout.of(model.tokenizer, "Very positive:", "The lake")
    with pytest.raises(TraceError, match="found 1 texts, one empty"):
        teacher_forced(model, branch, [[]])
    with pytest.raises(TraceError, match="found trace 'none'"):
        teacher_forced(model, branch, [[5]], trace="none")
    room = model.cfg.n_ctx - len(branch) + 1
    with pytest.raises(
        LayoutError, match=rf"context of {model.cfg.n_ctx}; give at most {room} tokens"
    ):
        teacher_forced(model, branch, [[5] * (room + 1)])
    assert teacher_forced(model, branch, [[5] * room], trace="pooled").sizes["step"] == room
    with pytest.raises(LayoutError, match="3 texts for 2 layouts"):
        teacher_forced(model, [branch, branch], [[5]] * 3)


def test_a_pooled_law_is_read_query_by_query(tiny):
    """Its attention is that of all queries of a pass: in decoding there is one."""
    model = load(tiny)
    layout = Layout.of(model.tokenizer, "Very positive:", "The lake")
    text = list(range(40, 52))
    rule = recipe("spotlight")
    one = teacher_forced(model, layout, [text], rule, chunk=1)
    for chunk in (None, 5):
        xr.testing.assert_allclose(one, teacher_forced(model, layout, [text], rule, chunk=chunk))


def test_a_tuple_acts_on_every_row_and_a_list_row_by_row(tiny):
    model = load(tiny)
    layout = Layout.of(model.tokenizer, "Very positive:", "The lake")
    text = list(range(40, 48))
    both = recipe("pasta", alpha=0.1, heads=((0, 1),))
    assert len(both) > 1
    joint = teacher_forced(model, layout, [text] * 3, both)
    for i in range(3):
        alone = teacher_forced(model, layout, [text], [both])
        assert joint["prefix"][0, i].to_numpy() == pytest.approx(alone["prefix"][0, 0].to_numpy())
    rows = teacher_forced(model, layout, [text] * len(both), list(both))
    assert abs(rows["prefix"][0, 0] - joint["prefix"][0, 0]).max() > 1e-4
