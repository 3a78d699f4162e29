"""Results are resumed with the inputs that made them, or not at all."""

import pytest

from lapa2_interp._util.errors import CircuitError, RunError
from lapa2_interp._util.same_inputs import check_same_inputs


def test_equal_inputs_pass_also_as_tuples_and_in_another_order(tmp_path):
    check_same_inputs(
        {"model": {"weights": "ab", "layers": [1, 2]}, "seed": 1},
        {"seed": 1, "model": {"layers": (1, 2), "weights": "ab"}},
        tmp_path,
    )


@pytest.mark.parametrize(
    ("stored", "now", "message"),
    [
        ({"seed": 1}, {"seed": 2}, "results of another seed: 1, not 2; .*choose another folder"),
        ({}, {"seed": 2}, "another seed: None, not 2"),
        ({"seed": 1, "old": True}, {"seed": 1}, "another old: True, not None"),
        ({"recipe": {"lr": 1}}, {"recipe": {"lr": 2}}, "another recipe lr: 1, not 2"),
        ({"prompts": ["a" * 200]}, {"prompts": ["b"]}, "another prompts; repeat"),
    ],
)
def test_the_first_input_that_differs_is_named(tmp_path, stored, now, message):
    with pytest.raises(RunError, match=message):
        check_same_inputs(stored, now, tmp_path)


def test_a_file_is_called_one_and_the_error_is_the_callers(tmp_path):
    file = tmp_path / "cut.jsonl"
    file.touch()
    with pytest.raises(CircuitError, match=r"cut\.jsonl has .*choose another file"):
        check_same_inputs({"key": "a"}, {"key": "b"}, file, CircuitError)
