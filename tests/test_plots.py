"""Drawings show the numbers of their tables; pages escape what models write."""

import ast
import math
from pathlib import Path

import pandas as pd

from lapa2_interp import plots
from lapa2_interp.circuits.knockout import JointCurve
from lapa2_interp.page import Section, page


def test_model_text_is_escaped():
    bad = "<script>alert('x')</script> & <b>bold</b>"
    texts = pd.DataFrame({"arm": [bad]}, index=pd.Index([bad], name="prompt"))
    html = page(bad, bad, [Section(bad, bad, table=texts)], {bad: bad})
    assert "<script>" not in html
    assert "<b>" not in html
    assert "&lt;script&gt;" in html


def test_plots_draw_their_tables():
    steps = pd.DataFrame(
        {
            "arm": "a",
            "layer_type": "full",
            "name": "prefix",
            "step": range(5),
            "mean": 0.5,
            "low": 0.4,
            "high": 0.6,
            "n": 3,
        }
    )
    fits = pd.DataFrame({"arm": ["a"], "C": [5.0], "D": [10.0], "R2": [0.9]})
    lines = plots.attention_curves(steps, fits).axes[0].lines
    assert lines[0].get_ydata().tolist() == [0.5] * 5
    assert lines[1].get_ydata()[0] == 0.5
    heads = pd.DataFrame(
        [
            {"arm": arm, "layer": i, "head": j, "prefix": i + j + (arm == "b")}
            for arm in "ab"
            for i in (0, 1)
            for j in (0, 1)
        ]
    )
    first, second = plots.head_maps(heads).axes[:2]
    assert first.images[0].get_array().tolist() == [[0, 1], [1, 2]]
    assert second.images[0].get_array().tolist() == [[1, 1], [1, 1]]


def test_no_arm_is_left_out():
    """Of more arms than colours the next have another dash, or hatch."""
    arms = [f"arm {i}" for i in range(16)]
    numbers = {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 3}
    steps = pd.DataFrame(
        [
            {"arm": arm, "layer_type": "full", "name": "prefix", "step": step} | numbers
            for arm in arms
            for step in range(3)
        ]
    )
    lines = plots.attention_curves(steps).axes[0].lines
    assert [line.get_label() for line in lines] == arms
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 16
    tokens = pd.DataFrame(
        [{"arm": arm, "key": key} | numbers for arm in arms for key in ("BOS", "p1")]
    )
    bars = plots.prefix_token_bars(tokens).axes[1].containers
    assert len([bar for bar in bars if hasattr(bar, "patches")]) == 16


def test_a_curve_without_a_defined_share_is_drawn():
    """As in a model whose control is 0."""
    table = pd.DataFrame(
        {"kind": "only", "heads": [1, 2], "left": math.nan, "low": math.nan, "high": math.nan}
    )
    assert JointCurve("js", table).plot()._repr_png_()


def test_a_dollar_begins_no_formula_but_on_an_axis_of_powers(tmp_path):
    """GPT-2 has tokens such as "$$"; matplotlib would fail to read them as formulas."""
    odd = ("$$", "a $x_{$", r"$\input{a}$", "1 $ and 2 $")
    tokens = pd.DataFrame(
        [
            {"arm": arm, "key": key, "label": odd[key], "mean": 0.1, "low": 0.05, "high": 0.2}
            for arm in odd[:2]
            for key in range(4)
        ]
    )
    bars = plots.prefix_token_bars(tokens)
    bars.suptitle(odd[2])
    bars.savefig(tmp_path / "bars.png")
    assert bars._repr_png_() == bars._repr_png_()

    def drawn(log, label):
        figure = plots.new_figure(3, 2)
        axes = figure.subplots()
        axes.plot([1, 10, 1000], [1, 2, 3], label=label)
        axes.set_xscale("log" if log else "linear")
        axes.legend()
        figure.savefig(tmp_path / "a.png")
        return [label.get_parse_math() for label in axes.get_xticklabels()], axes.get_legend()

    powers, legend = drawn(True, odd[0])
    assert all(powers)
    assert not legend.get_texts()[0].get_parse_math()


def test_layers_are_rows_and_heads_columns_in_every_map():
    axes = plots.new_figure(2, 2).subplots()
    drawn = plots.layer_map(axes, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    assert drawn.get_array().shape == (2, 3)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("head", "layer")
    package = Path(plots.__file__).parent
    wrong = [
        f"{file.name}:{node.lineno}"
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "imshow"
    ]
    assert [source.partition(":")[0] for source in wrong] == ["plots.py"]


def test_a_legend_is_no_wider_than_its_figure():
    for words, columns in (("alpha 0.25 paper, layers bottom", 2), ("a", 4)):
        figure = plots.new_figure(5, 3)
        for i in range(8):
            figure.gca().plot([0, 1], label=f"{words} {i}")
        plots.legend_above(figure, 4)
        [legend] = figure.legends
        assert legend.get_window_extent().width <= figure.bbox.width
        assert legend._ncols >= columns


def test_a_figure_grows_with_its_legend():
    """The panel keeps its height under a legend of many lines; a short one changes nothing."""
    heights = {}
    for n in (2, 26):
        figure = plots.new_figure(6.8, 4)
        for i in range(n):
            figure.gca().plot([0, 1], label=f"a long name of an arm, multiplied everywhere by {i}")
        plots.legend_above(figure, 4)
        figure.draw_without_rendering()
        heights[n] = figure.gca().get_window_extent().height / figure.dpi
        [legend] = figure.legends
        assert legend.get_window_extent().y0 >= figure.gca().get_window_extent().y1
        assert (figure.get_figheight() > 4) == (n > 2)
    assert heights[26] > 0.9 * heights[2]
