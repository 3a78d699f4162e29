"""Passes under edits that begin above a clean pass give what whole passes give."""

import numpy as np
import pytest
from conftest import load
from test_circuits import contrast_set

from lapa2_interp.circuits import clean_pass, edits
from lapa2_interp.circuits.clean_pass import CleanPass, layers_to_keep
from lapa2_interp.circuits.knockout import knock_out


def both_ways(model, monkeypatch, **settings):
    """Effects of all heads that begin above a clean pass, and from whole passes; and the layers at
    which the first began."""
    asked, began, real = contrast_set(model), [], CleanPass.first_layer
    with monkeypatch.context() as patch:
        patch.setattr(CleanPass, "first_layer", lambda *a: (began.append(real(*a)), began[-1])[1])
        above = knock_out(model, asked, batch_size=4, **settings).values
    with monkeypatch.context() as patch:
        patch.setattr(edits, "LEAST_SAVED", 10**9)
        fresh = knock_out(model, asked, batch_size=4, **settings).values
    return above, fresh, set(began)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-neox"])
@pytest.mark.parametrize("replacement", ["cut", "zero", "resample", "mean"])
def test_effects_are_those_of_whole_passes(name, replacement, monkeypatch):
    above, fresh, began = both_ways(load(name), monkeypatch, replacement=replacement)
    assert began == {0, 1, 2, 3}
    np.testing.assert_allclose(above, fresh, rtol=1e-6, atol=1e-9)
    assert np.abs(fresh).max() > 1e-5


def test_less_memory_keeps_fewer_layers(monkeypatch):
    monkeypatch.setattr(clean_pass, "KEPT_BYTES", 1000)
    assert list(layers_to_keep(30, 10)) == list(range(1, 30))
    assert list(layers_to_keep(30, 100)) == [3, 6, 9, 12, 15, 18, 21, 24, 27]
    assert list(layers_to_keep(30, 5000)) == []


def test_a_model_whose_layers_share_more_is_read_whole(monkeypatch):
    """Its last block adds what the first one has returned."""
    model, layers = load("tiny-llama"), []
    handles = [
        model.blocks[0].register_forward_hook(lambda block, args, out: layers.append(out)),
        model.blocks[3].register_forward_hook(lambda block, args, out: out + layers[-1]),
    ]
    try:
        above, fresh, began = both_ways(model, monkeypatch)
    finally:
        for handle in handles:
            handle.remove()
    assert began == {0}
    assert np.array_equal(above, fresh)


def test_the_blocks_are_as_before():
    model = load("tiny-llama")
    knock_out(model, contrast_set(model))
    assert not any("forward" in vars(block) for block in model.blocks)
