"""Numbers are numbers in every call, and text is read where all is text."""

import numpy as np
import pytest

from lapa2_interp import Layout, circuits, load_model, methods, steer, teacher_forced
from lapa2_interp._util.errors import Lapa2Error
from lapa2_interp._util.values import plain, read_fields, read_value
from lapa2_interp.report import view


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        (".5", 0.5),
        ("5.", 5.0),
        ("true", True),
        ("-1e3", -1000.0),
        ("0.5x", "0.5x"),
        ("mle", "mle"),
    ],
)
def test_text_is_read_as_in_a_grid_file(text, value):
    number = read_value(text)
    assert (number, type(number)) == (value, type(value))


def test_arrays_become_tuples_of_numbers():
    assert plain([np.int64(1), range(2), np.array([[1.5]])]) == (1, (0, 1), ((1.5,),))


def test_where_text_is_allowed_it_stays_text():
    assert read_fields({"prefixes": "5", "omega": "5"}, {"prefixes": str, "omega": float}) == {
        "prefixes": "5",
        "omega": 5,
    }


@pytest.mark.parametrize(
    "call",
    [
        lambda value: circuits.knock_out("planted", "sentiment", batch_size=value),
        lambda value: circuits.ContrastSet.of("planted", "sentiment", tokens=value),
        lambda value: circuits.select("planted", "sentiment", screen=value),
        lambda value: circuits.measure_fading("planted", "sentiment", filler=(value,)),
        lambda value: circuits.alpha_at_prefix_attention("planted", "sentiment", value),
        lambda value: load_model("tiny-gpt2", workers=value),
        lambda value: Layout.of(None, None, "The lake", soft=value),
        lambda value: teacher_forced("planted", None, [[1]], chunk=value),
        lambda value: methods.get("air-decoding", omega=value),
        lambda value: steer("planted", [], "sentiment", out="never", budget=value),
        lambda value: view("nowhere", steps=value),
    ],
)
@pytest.mark.parametrize("value", ["0.5", True])
def test_what_is_no_number_is_refused_in_one_sentence(call, value):
    with pytest.raises(
        Lapa2Error, match=f"input should be a valid (number|integer), found {value!r}"
    ):
        call(value)
