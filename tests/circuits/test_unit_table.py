"""The table of units by itself, on numbers."""

import numpy as np
import pytest
from conftest import load
from test_circuits import contrast_set

from lapa2_interp.circuits.unit_table import UnitTable, draw_tables
from lapa2_interp.circuits.units import Unit, head_units
from lapa2_interp.errors import CircuitError

HEADS = head_units(2, 2)
PROMPTS = ("a", "b", "c", "d", "e", "f", "g", "h", "a")


def table(values, units=HEADS, **more):
    """A table in which each unit has nearly one value in all of 8 prompts, one of them twice."""
    values = np.array(values, float)
    rows = values + 1e-3 * np.random.default_rng(0).normal(size=(len(PROMPTS), len(values)))
    return UnitTable(contrast_set(load("tiny-gpt2"), prompts=PROMPTS), units, rows, **more)


def test_columns_are_those_that_are_known():
    measured = table([1, 3, -2, 0], name="direct").frame()
    assert list(measured)[:5] == ["layer", "head", "direct", "low", "high"]
    assert not {"share", "noise", "below_noise"} & set(measured)
    assert measured["rank"].tolist() == [1, 2, 3, 4]
    assert measured[["layer", "head"]].to_numpy().tolist() == [[0, 1], [0, 0], [1, 1], [1, 0]]


def test_texts_of_one_prompt_count_as_one():
    measured = table([1, 3, -2, 0])
    assert measured.by_prompt[0] == pytest.approx(measured.values[[0, 8]].mean(0))
    assert measured.means == pytest.approx(measured.by_prompt.mean(0))


def test_carriers_are_above_the_noise():
    measured = table([1, 3, -2, 0.1], noise=0.5)
    assert measured.carriers()[["layer", "head"]].to_numpy().tolist() == [[0, 1], [0, 0]]
    assert len(table([1, 3, -2, 0.1]).carriers()) == 3
    assert measured.frame()["below_noise"].tolist() == [False, False, True, False]


def test_the_order_is_by_value_by_size_or_by_share():
    total = np.full(len(PROMPTS), -4.0)
    measured = table([1, 3, -2, 0], total=total)
    assert measured.best(2) == ((0, 1), (0, 0))
    assert measured.best(2, absolute=True) == ((0, 1), (1, 0))
    shares = table([1, 3, -2, 0], total=total, as_shares=True)
    assert shares.best(2) == ((1, 0), (1, 1))
    assert shares.frame()["share"].is_monotonic_decreasing
    assert shares.map().ravel() == pytest.approx([-0.25, -0.75, 0.5, 0], abs=1e-3)
    assert list(shares.interval())[2:] == ["share", "share_low", "share_high"]


def test_a_map_has_a_place_for_heads_that_were_left_out():
    units = tuple(Unit({"layer": i, "head": j}, ((i, j),)) for i, j in ((0, 2), (2, 1)))
    grid = table([1, 3], units).map()
    assert grid.shape == (3, 3)
    assert (np.isnan(grid).sum(), round(grid[0, 2]), round(grid[2, 1])) == (7, 1, 3)


def test_layers_and_heads_at_a_position_have_no_map():
    layers = table([1, 3], tuple(Unit({"layer": i}, ((i, 0),)) for i in (0, 1)))
    cells = table([1, 3], tuple(Unit({"layer": 0, "head": 0, "position": p}, ((0, 0),), (p,))
                                for p in (0, 1)))  # fmt: skip
    for measured in (layers, cells):
        with pytest.raises(CircuitError, match="only heads, KV heads and slots have a map"):
            measured.map()
        assert len(measured.plot().axes) == 1


def test_maps_of_one_quantity_have_one_scale():
    same = {name: table(values) for name, values in (("a", [1, 3, -2, 0]), ("b", [1, 0, 0, 0]))}
    images = [axes.images[0] for axes in draw_tables(same).axes if axes.images]
    assert images[0].get_clim() == images[1].get_clim()
    relabelled = {**same, "b": table([1, 0, 0, 0], label="slope")}
    images = [axes.images[0] for axes in draw_tables(relabelled).axes if axes.images]
    assert images[0].get_clim() != images[1].get_clim()


def test_the_largest_above_the_noise_are_named():
    axes = table([1, 3, -2, 0.1], noise=0.5).plot_against(np.arange(4.0), "x", named=4).axes[0]
    assert [label.get_text() for label in axes.texts] == ["0.1", "1.0", "0.0"]
    assert axes.texts[0].xy == pytest.approx((1, 3), abs=1e-2)


def test_a_table_is_shown_in_few_words():
    measured = table([1, 3, -2, 0], label="lost js, nats a step")
    assert repr(measured).startswith(
        "<UnitTable: lost js, nats a step, of 4 units in <ContrastSet: 9"
    )
    shown = measured._repr_html_()
    assert "95 % intervals over prompts" in shown
    assert shown.count("<tr>") == 4
