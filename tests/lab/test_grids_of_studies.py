"""The grids of studies: every file in analyses/ that `lapa2 sweep` reads."""

from pathlib import Path

import pytest

from lapa2_interp.bias.recipes import RECIPES, recipe_name
from lapa2_interp.runs.grid import load_grid

ROOT = Path(__file__).resolve().parents[2]
GRIDS = [
    file
    for file in sorted((ROOT / "analyses").glob("*/*.toml"))
    # Tasks of instructions are written first, into the folder of the run.
    if "[[block]]" in file.read_text("utf-8") and file.parent.name != "instructions"
]
PROMPTS = {"steering.toml", "bases.toml"}
"""Items of `make reproduce` that need prompts, which `make steering-prompts` writes."""
ITEMS = ("heads", "frontier", "long", "deep", "related")


@pytest.mark.parametrize("file", GRIDS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_grid_has_cells_and_needs_at_most_prompts_or_a_model(file):
    grid = load_grid(str(file), check=False)
    assert grid.name == file.stem
    assert len(grid.cells) == len({cell.key for cell in grid.cells}) >= 1
    assert grid.description
    assert all(cell.description and cell.decoding_method for cell in grid.cells)
    if file.name in PROMPTS:
        assert grid.needs
        assert all("`make steering-prompts`" in need for need in grid.needs)
    if file.stem in ITEMS:
        assert not grid.needs


def arms(grid):
    """Texts of each arm, over its attributes."""
    n_texts = {}
    for cell in grid.cells:
        arm = (cell.model, cell.task.name, cell.method, cell.variant, cell.arm)
        n_texts[arm] = n_texts.get(arm, 0) + cell.samples * len(cell.task.prompts.texts)
    return n_texts


MULTIPLY = {"key-scale", "log-n", "ssmax"}
"""Recipes of law multiply, which has a comparison of its own."""


def test_the_frontier_has_all_biases_with_300_texts_an_arm():
    grid = load_grid(str(ROOT / "analyses/frontier/frontier.toml"))
    assert set(arms(grid).values()) == {300}
    for task in ("sentiment", "topic"):
        rules = {cell.active_augmentations for cell in grid.cells if cell.task.name == task}
        assert {recipe_name(rule) for rule in rules if rule} == set(RECIPES) - MULTIPLY
        assert len(rules) == len(RECIPES) - len(MULTIPLY) + 2  # the baseline; PASTA in chosen heads
