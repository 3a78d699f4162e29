"""The texts of an arm whose perplexity is measured, and the lengths at which items score."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lapa2_interp.generation.cell import Cell

PERPLEXITY_TEXTS = 120
"""Texts of an arm whose perplexity is measured, approximately (`perplexity_texts`)."""
FRACTIONS = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""The paper's five lengths, of the longest: 64, 128, 256, 384 and 512 of 512."""


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
