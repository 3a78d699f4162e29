"""Numbers are numbers in every call, and text is read where all is text."""

import numpy as np
import pytest

from lapa2_interp._util.values import plain, read_fields, read_value


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
