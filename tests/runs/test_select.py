"""Parts of a run: cells by their columns, their texts and traces together, and attention by
step."""

from functools import cache
from typing import get_args

import numpy as np
import pandas as pd
import pytest
from conftest import load

from lapa2_interp import Augmentation, generate, load_run
from lapa2_interp.attention.tables import fit_table, head_table, prefix_token_table, step_table
from lapa2_interp.attention.trace import TraceKind
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.runs.attention import ALIKE, SHOWN
from lapa2_interp.runs.generate import make_cells
from lapa2_interp.runs.run import Run, finished_cell

ASKED = {"attribute": "positive", "prompts": ["The lake", "A road"], "dtype": "float32"}


SHORT = ASKED | {"length": 14}


@cache
def two_methods():
    """Two methods with two arms each; the traced texts of one method are longer."""
    cells = [
        cell_of("tiny-gpt2", method=method, alpha=alpha, length=length, **ASKED)
        for method, length in (("prefix", 14), ("air-decoding", 18))
        for alpha in (0.0, 0.5)
    ]
    return make_cells(load("tiny-gpt2"), cells, name="mine")


@cache
def of_traces():
    """A cell of each kind of trace."""
    cells = [cell_of("tiny-gpt2", trace=trace, **SHORT) for trace in get_args(TraceKind)]
    return make_cells(load("tiny-gpt2"), cells)


def of_trace(kind):
    """The cell with this kind of trace."""
    key = next(key for key, cell in of_traces().by_key.items() if cell.trace == kind)
    return of_traces().select(key=key)


@pytest.fixture
def run():
    return two_methods()


def test_a_selection_is_a_run_of_its_own(run, tmp_path):
    part = run.select(method="prefix")
    assert isinstance(part, Run)
    assert list(part.by_key) == list(run.by_key)[:2]
    assert part.cells["method"].tolist() == ["prefix"] * 2
    assert part.listing.grids == {"mine": tuple(part.by_key)}
    assert part.select(alpha=0.5).manifest().cell.active_augmentations == (Augmentation(alpha=0.5),)
    again = load_run(run.save(tmp_path / "all").folder).select(alpha=["0", 0.5], method="prefix")
    assert again.texts()["text"].equals(part.texts()["text"])
    saved = load_run(again.save(tmp_path / "part").folder)
    assert saved.texts().equals(again.texts())


def test_values_may_come_in_any_list(run):
    for several in (["baseline"], {"baseline"}, np.array(["baseline"]), pd.Series(["baseline"])):
        assert list(run.select(arm=several).by_key) == list(run.by_key)[::2]
    assert list(run.select(arm=(arm for arm in ["baseline"])).by_key) == list(run.by_key)[::2]
    assert run.select().by_key == run.by_key


def test_one_key_is_a_key_and_not_its_letters(run):
    key = list(run.by_key)[1]
    assert set(run.texts(key)["cell"]) == set(run.trace(key)["cell"].to_numpy()) == {key}
    for keys in ([key], [key, key]):
        assert run.texts(keys).equals(run.texts(key))
        assert run.trace(keys).equals(run.trace(key))


def test_traces_of_several_cells_are_one_with_coordinates(run):
    for wanted in ({}, {"method": "prefix"}, {"alpha": 0.5}):
        trace, texts = run.trace(**wanted), run.texts(**wanted)
        assert trace.sizes["sample"] == len(texts)
        for name in ("task", "method", "attribute", "arm", "cell"):
            assert trace[name].to_numpy().tolist() == texts[name].tolist()
        assert trace["prompt_text"].to_numpy().tolist() == texts["prompt"].tolist()
        for key in set(texts["cell"]):
            alone, at = finished_cell(run, key).trace, (texts["cell"] == key).to_numpy()
            part = trace["prefix"].isel(sample=at).sel(branch=alone["branch"], step=alone["step"])
            np.testing.assert_array_equal(part, alone["prefix"])
    both = run.trace(method="air-decoding", alpha=[0, 0.5])
    assert both.where(both["arm"] == "baseline", drop=True).sizes["sample"] == 2


def test_steps_are_a_tidy_table_by_arm(run):
    steps = run.steps()
    for (method, arm), part in steps.groupby(["method", "arm"]):
        key = next(k for k, cell in run.by_key.items() if (cell.method, cell.arm) == (method, arm))
        assert set(part["cell"]) == {key}
    assert set(run.steps(method="prefix")["method"]) == {"prefix"}


def test_tables_are_those_of_each_cell_after_its_columns(run):
    for again, table in (
        (run.steps(), step_table),
        (run.heads().frame(), head_table),
        (run.prefix_tokens(), prefix_token_table),
    ):
        assert list(again)[:9] == [*ALIKE, "attribute", "cell", "arm"]
        assert list(dict.fromkeys(again["cell"])) == list(run.by_key)
        for key, part in again.groupby("cell"):
            alone = table(run.trace(key), run.texts(key))
            assert part[list(alone)].reset_index(drop=True).equals(alone)
            for column, value in run.by_key[key].columns.items():
                assert column not in part or set(part[column]) == {value}, column


def test_fits_are_those_of_the_curves(run):
    fits = run.fits()
    assert list(fits) == [*ALIKE, "attribute", "cell", "arm", "C", "D", "R2"]
    assert fits["method"].tolist() == ["prefix"] * 2 + ["air-decoding"] * 2
    for (_, row), key in zip(fits.iterrows(), run.by_key, strict=True):
        alone = fit_table(step_table(run.trace(key), run.texts(key))).iloc[0]
        assert row[list(alone.index)].equals(alone.rename(row.name))


def test_a_cell_of_two_attributes_is_one_arm():
    asked = ASKED | {"attribute": "all", "length": 14, "alpha": [0, 0.5]}
    run = generate(load("tiny-gpt2"), **asked)
    steps = run.steps()
    assert set(steps["attribute"]) == {"positive, negative"}
    assert set(steps["n"]) == {4}
    for arm, part in steps.groupby("arm"):
        keys = [key for key, cell in run.by_key.items() if cell.arm == arm]
        assert set(part["cell"]) == {", ".join(keys)}
        alone = step_table(run.trace(keys), run.texts(keys))
        assert part[list(alone)].reset_index(drop=True).equals(alone)
    assert run.fits()["arm"].tolist() == ["baseline", "alpha 0.5 paper"]


def test_heads_show_the_strongest_and_draw_their_maps(run):
    heads = run.heads(method="prefix")
    best = heads.largest(2)
    for arm, part in best.groupby("arm"):
        (key,) = run.select(method="prefix", arm=arm).by_key
        alone = head_table(run.trace(key), run.texts(key))
        top = alone.sort_values("prefix", ascending=False).head(2)
        assert part[list(alone)].to_numpy().tolist() == top.to_numpy().tolist()
    drawn = [axes.images[0].get_array() for axes in heads.plot().axes if axes.images]
    alone = [head_table(run.trace(key), run.texts(key)) for key in list(run.by_key)[:2]]
    tables = [part.pivot(index="layer", columns="head", values="prefix") for part in alone]
    np.testing.assert_array_equal(drawn[0], tables[0])
    np.testing.assert_array_equal(drawn[1], tables[1] - tables[0])


def test_a_run_draws_its_curves(run):
    lines = [
        line for line in run.plot(method="prefix").axes[0].lines if line.get_linestyle() == "-"
    ]
    for line, key in zip(lines, run.select(method="prefix").by_key, strict=True):
        steps = step_table(run.trace(key), run.texts(key))
        curve = steps[steps["name"] == "prefix"]
        assert line.get_ydata().tolist() == curve["mean"].tolist()
        assert line.get_label() == run.by_key[key].arm


def test_a_run_shows_its_cells_in_a_notebook(run):
    shown = run._repr_html_()
    assert "the run: 4 cells" in shown
    assert all(key in shown for key in run.by_key)
    hostile = "<script>x</script>"
    cell = cell_of("tiny-gpt2", label=hostile, length=14, trace="none", **ASKED)
    named = make_cells(load("tiny-gpt2"), [cell])
    assert hostile in named.cells["arm"].tolist()
    assert "<script>" not in named._repr_html_()
    many = {f"{n:016x}": cell for n in range(SHOWN + 3)}
    listing = named.listing.model_copy(update={"grids": {"mine": tuple(many)}})
    assert "and 3 more: <code>run.cells</code>" in Run(None, listing, many)._repr_html_()


def test_a_pooled_trace_has_the_tokens_of_the_prefix():
    run = of_trace("pooled")
    (key,) = run.by_key
    alone = prefix_token_table(run.trace(key), run.texts(key))
    assert run.prefix_tokens()[list(alone)].equals(alone)


def test_a_cell_without_a_trace_has_none_and_the_others_have_theirs():
    (pooled,), (none,) = of_trace("pooled").by_key, of_trace("none").by_key
    assert of_traces().trace(none) is None
    assert of_traces().trace(pooled).sizes["sample"] == 2
