"""Given texts: laws and augmentations that are particular. That a trace is that
of decoding: `test_conformance`."""

import pytest
import xarray as xr
from conftest import load

from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.recipes import recipe
from lapa2_interp.generation.teacher_forcing import teacher_forced


def test_a_text_fills_the_context():
    model = load("tiny-gpt2")
    branch = Layout.of(model.tokenizer, "Very positive:", "The lake")
    room = model.cfg.n_ctx - len(branch) + 1
    assert teacher_forced(model, branch, [[5] * room], trace="pooled").sizes["step"] == room


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
