"""Estimates of the time that an item's scores, tables and figures take."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lapa2_interp.generation.cell import Cell
from lapa2_interp.models.machine import default_device, n_cores
from lapa2_interp.models.sizes import model_size
from lapa2_interp.models.smollm2 import SMOLLM2
from lapa2_interp.paper.scripts import DEFAULT_SCORERS
from lapa2_interp.runs.estimates import adapter_seconds, pace
from lapa2_interp.runs.grid import Grid
from lapa2_interp.scoring.scorer import expand_scorers

PERPLEXITY_TEXTS = 120
"""Texts of an arm whose perplexity is measured, approximately (`perplexity_texts`)."""
FRACTIONS = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""The paper's five lengths, of the longest: 64, 128, 256, 384 and 512 of 512."""
FIVE_LENGTH_GRIDS = ("sent_topic", "detox")
"""Grids whose texts are scored at all five lengths."""
ATTENTION_PASSES = {"deep": 2}
"""Grids whose texts are not scored, and the forward passes that read the attention of their
heads."""
KEY_COST = 0.2
"""Cost of a key for a query in one pass over a text, relative to its cost in a decoding step."""
LINEAR_SECONDS = 2e-5
"""Seconds of the linear classifiers for a token."""
MASKED_SHARE = 0.4
"""Approximate share of texts that contain a word of a prefix and are scored again without it."""
SCRIPT_SECONDS = 6.0
"""Seconds of an item's script for everything else: intervals, figures."""


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
    read, seen, classified, adapted = 0.0, 0.0, 0.0, 0.0
    for grid in grids:
        name = grid.name.rpartition("/")[2]
        # Texts whose attention is read, not scored.
        if times := ATTENTION_PASSES.get(name):
            tokens = [cell.n_texts * cell.length for cell in grid.cells]
            read += times * sum(tokens)
            seen += times * sum(
                each * cell.length / 2 for each, cell in zip(tokens, grid.cells, strict=True)
            )
            continue
        # Scored tokens, arm by arm.
        lengths = sum(FRACTIONS) if name in FIVE_LENGTH_GRIDS else 1.0
        arms: dict[tuple[str, ...], list[Cell]] = {}
        for cell in grid.cells:
            arms.setdefault(
                (cell.model, cell.task.name, cell.method, cell.variant, cell.arm), []
            ).append(cell)
        for cells in arms.values():
            texts = sum(cell.n_texts for cell in cells)
            classified += lengths * texts * cells[0].length
            control = "toxicity" if cells[0].task.name == "detox" else "accuracy"
            adapted += texts * cells[0].length * (f"{control}=adapter" in chosen)
            if control == "accuracy":
                adapted += MASKED_SHARE * texts * cells[0].length * ("masked=adapter" in chosen)
            firsts = sum(len(cell.prompts) for cell in cells)
            # A cut text is the beginning of the whole one, which is read once.
            read += perplexity_texts(firsts, float(texts)) * cells[0].length
    # Tokens to seconds, at this machine's pace.
    operations = 2 * read * model_size(SMOLLM2).parameters
    device = default_device()
    at = pace(SMOLLM2, "float32", device, operations=operations)
    scripts = SCRIPT_SECONDS * (len(grids) if items is None else items)
    reading = (read * at.row + seen * KEY_COST * at.key) / (n_cores() if device == "cpu" else 1)
    return scripts + reading + adapter_seconds(adapted) + classified * LINEAR_SECONDS
