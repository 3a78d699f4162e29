"""Results are resumed with the inputs that made them, or not at all."""

from lapa2_interp._util.same_inputs import check_same_inputs


def test_equal_inputs_pass_also_as_tuples_and_in_another_order(tmp_path):
    check_same_inputs(
        {"model": {"weights": "ab", "layers": [1, 2]}, "seed": 1},
        {"seed": 1, "model": {"layers": (1, 2), "weights": "ab"}},
        tmp_path,
    )
