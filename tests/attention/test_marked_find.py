"""Marked text in a block: each mark has its own factor on the odds of its attention."""

import numpy as np
import pytest
import torch
from conftest import load

from lapa2_interp import Layout, augmented
from lapa2_interp.bias.marked_text import marked
from lapa2_interp.errors import AugmentationError, LayoutError

TEXT = "You are brief. (Never name it:3) Be (kind:0.5). And so on, says he."


def odds(model, ids, block, slots):
    """Odds of the attention of the last query on some keys in the first layer, by head."""
    with block:
        _, cache = model.run_with_cache(torch.tensor([ids]))
    share = cache["blocks.0.attn.hook_pattern"][0, :, -1, slots].sum(-1)
    return (share / (1 - share)).numpy()


@pytest.fixture
def model():
    return load("tiny-gpt2", "float64")


def test_a_factor_is_on_the_odds_of_its_mark(model):
    """Of one mark exactly; the first layer's scores have no other bias."""
    read = marked("You are brief. (Never name it:3) And so on.")
    ids = Layout.of(model.tokenizer, None, read.text).ids
    with augmented(model, None, find=read, tokenizer=model.tokenizer) as finder:
        model(torch.tensor([ids]))
        layout, rules = finder.marked_layout(ids)
    slots = list(range(layout.prefix.start, layout.prefix.stop))
    text = model.tokenizer.decode([ids[slot] for slot in slots])
    assert text.strip() == "Never name it"
    plain = odds(model, ids, torch.no_grad(), slots)
    steered = odds(model, ids, augmented(model, None, find=read, tokenizer=model.tokenizer), slots)
    np.testing.assert_allclose(steered / plain, 3.0, rtol=1e-9)
    assert len(rules) == 1


def test_several_marks_are_several_biases(model):
    """The same as biases of these marks one by one, given by layouts."""
    read = marked(TEXT)
    ids = Layout.of(model.tokenizer, None, read.text).ids
    with augmented(model, None, find=read, tokenizer=model.tokenizer) as finder:
        steered = model(torch.tensor([ids]))
        layout, rules = finder.marked_layout(ids)
    assert [round(float(np.exp(rule.alpha)), 9) for rule in rules] == [3.0, 0.5]
    with augmented(model, tuple(rules), layout):
        by_layout = model(torch.tensor([ids]))
    torch.testing.assert_close(steered, by_layout, rtol=0, atol=0)
    assert (steered - model(torch.tensor([ids]))).abs().max() > 1e-3


def test_marks_of_one_change_nothing_and_none_are_nothing(model):
    for text in ("Be (kind:1). So.", "Be kind. So."):
        read = marked(text)
        ids = Layout.of(model.tokenizer, None, read.text).ids
        with augmented(model, None, find=read, tokenizer=model.tokenizer):
            steered = model(torch.tensor([ids]))
        torch.testing.assert_close(steered, model(torch.tensor([ids])), rtol=0, atol=1e-12)


def test_a_marked_text_takes_no_augmentation_and_must_be_there(model):
    read = marked("Be (kind:2).")
    both = augmented(model, "lapa2", find=read, tokenizer=model.tokenizer)
    with pytest.raises(AugmentationError, match="give no augmentation with it"):
        both.__enter__()
    ids = Layout.of(model.tokenizer, None, "Something else.").ids
    block = augmented(model, None, find=read, tokenizer=model.tokenizer)
    with block, pytest.raises(LayoutError, match=r"row 0 does not have 'Be kind\.'"):
        model(torch.tensor([ids]))
    with augmented(model, None, find=read, tokenizer=model.tokenizer, absent="leave") as finder:
        model(torch.tensor([ids]))
    assert (finder.rows, finder.left) == (1, 1)
