"""Estimates of the time that an item's scores, tables and figures take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from lapa2_interp.generation.cell import Cell
from lapa2_interp.paper.scripts import DEFAULT_SCORERS
from lapa2_interp.runs.estimates import reading_seconds
from lapa2_interp.runs.grid import Grid
from lapa2_interp.scoring.adapter import ADAPTER_SHARE
from lapa2_interp.scoring.scorer import expand_scorers

PERPLEXITY_TEXTS = 120
"""Texts of an arm whose perplexity is measured, approximately (`perplexity_texts`)."""
FRACTIONS = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""The paper's five lengths, of the longest: 64, 128, 256, 384 and 512 of 512."""
FIVE_LENGTH_GRIDS = ("sent_topic", "detox")
"""Grids whose texts are scored at all five lengths."""
ATTENTION_PASSES = {"deep": 4}
"""Grids whose texts are not scored, and what it takes to read the attention of their heads, in
readings of a short text: two readings, with thousands of keys."""
LINEAR_SECONDS = 2e-5
"""Seconds of the linear classifiers for a token."""
MASKED_SHARE = 0.4
"""Approximate share of texts that contain a word of a prefix and are scored again without it."""
SCRIPT_SECONDS = 6.0
"""Seconds of an item's script for everything else: intervals, figures."""


def cells_by_arm(cells: Iterable[Cell]) -> list[list[Cell]]:
    """The cells of each arm: those that differ in attribute, prompts or sampling alone."""
    arms: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        key = (cell.model, cell.task.name, cell.method, cell.variant, cell.arm)
        arms.setdefault(key, []).append(cell)
    return list(arms.values())


def perplexity_samples(firsts: int, wanted: int = PERPLEXITY_TEXTS) -> int:
    """The number of samples of each prompt and attribute whose perplexity is measured.

    Args:
        firsts: Prompts times attributes.
        wanted: Texts of an arm, approximately.
    """
    return math.ceil(wanted / firsts)


def perplexity_texts(firsts: int, texts: float, wanted: int = PERPLEXITY_TEXTS) -> float:
    """The number of texts of an arm whose perplexity is measured.

    Args:
        firsts, wanted: See `perplexity_samples`.
        texts: All texts of the arm.
    """
    return min(texts, float(firsts * perplexity_samples(firsts, wanted)))


def scoring_seconds(
    grids: Sequence[Grid], items: int | None = None, scorers: Sequence[str] = ()
) -> float:
    """Seconds to score the texts of grids by the shipped scorers, and to make tables and figures.

    Args:
        items: Scripts to be run; by default one per grid.
        scorers: Values of the option --scorers (`add_scoring`).
    """
    chosen = expand_scorers(scorers, DEFAULT_SCORERS)
    read, classified = 0.0, 0.0
    for grid in grids:
        name = grid.name.rpartition("/")[2]
        # Texts whose attention is read, not scored.
        if times := ATTENTION_PASSES.get(name):
            read += times * sum(cell.n_texts * cell.length for cell in grid.cells)
            continue
        # Scored tokens, arm by arm.
        lengths = sum(FRACTIONS) if name in FIVE_LENGTH_GRIDS else 1.0
        for cells in cells_by_arm(grid.cells):
            texts = sum(cell.n_texts for cell in cells)
            classified += lengths * texts * cells[0].length
            control = "toxicity" if cells[0].task.name == "detox" else "accuracy"
            adapted = float(f"{control}=adapter" in chosen)
            if control == "accuracy":
                adapted += MASKED_SHARE * ("masked=adapter" in chosen)
            read += adapted * ADAPTER_SHARE * texts * cells[0].length
            firsts = sum(len(cell.prompts) for cell in cells)
            # A cut text is the beginning of the whole one, which is read once.
            read += perplexity_texts(firsts, float(texts)) * cells[0].length
    scripts = SCRIPT_SECONDS * (len(grids) if items is None else items)
    return scripts + reading_seconds(read) + classified * LINEAR_SECONDS
