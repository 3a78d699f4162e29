"""Rows of several layouts: ids, mask and positions, against each row alone."""

import pytest
import torch

from lapa2_interp import Augmentation, Layout, PaddedRows, augmented, load_model
from lapa2_interp.bias.layout import left_pad
from lapa2_interp.models.load import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny-gpt2")


def test_ids_mask_and_positions_of_every_row(tokenizer):
    alone = [Layout.of(tokenizer, "ab:", "c"), Layout.of(tokenizer, None, "a longer prompt")]
    rows = PaddedRows.of(alone)
    assert rows.layouts == left_pad(alone)
    for row, layout in enumerate(alone):
        live = rows.mask[row].bool()
        assert rows.ids[row, live].tolist() == list(layout.ids)
        assert rows.positions[row, live].tolist() == list(range(len(layout)))
        assert live.tolist() == sorted(live.tolist())
        assert set(rows.ids[row, ~live].tolist()) <= {layout.ids[0]}
        assert not rows.positions[row, ~live].any()
    again = PaddedRows.of(rows.layouts)
    assert again.layouts == rows.layouts
    assert torch.equal(again.ids, rows.ids)


def test_rows_that_are_padded_stay_at_their_slots(tokenizer):
    """Some rows of a batch, whose longest is not among them."""
    padded = left_pad([Layout.of(tokenizer, "ab:", text) for text in ("c", "d", "a longer prompt")])
    rows = PaddedRows.of(padded[:2])
    assert rows.layouts == padded[:2]
    assert rows.ids.shape == (2, len(padded[2]))


def test_soft_slots_are_live_and_have_no_ids(tokenizer):
    alone = [
        Layout.of(tokenizer, None, "abc", soft=3),
        Layout.of(tokenizer, "Good:", "a"),
        Layout.of(tokenizer, None, "a longer prompt", soft=2),
    ]
    rows = PaddedRows.of(alone, bos_positions=[3, 0, 0])
    assert rows.mask.shape[1] == rows.ids.shape[1] + 3
    assert rows.mask.sum(1).tolist() == [layout.n_live for layout in alone]
    assert rows.mask[:, :3].sum(1).tolist() == [3, 0, 2]
    assert rows.positions[:, -1].tolist() == [
        first + len(layout.ids) - 1 for first, layout in zip([3, 0, 0], alone, strict=True)
    ]


@torch.no_grad()
def test_a_pass_over_the_rows_is_each_row_alone():
    model = load_model("tiny-llama", "float64")
    alone = [Layout.of(model, "Very good:", text) for text in (" A", " A book is on the table")]
    rows, rule = PaddedRows.of(alone), Augmentation(alpha=0.7)
    with augmented(model, rule, rows.layouts):
        logits = model(rows.ids, attention_mask=rows.mask, position_ids=rows.positions)[:, -1]
    for row, layout in enumerate(alone):
        with augmented(model, rule, layout):
            assert (logits[row] - model(layout.tensor)[0, -1]).abs().max() < 1e-12
