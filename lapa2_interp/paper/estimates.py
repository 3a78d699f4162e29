"""How long an item's scores, tables and figures take."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lapa2_interp.generation.cell import Cell
from lapa2_interp.models.machine import default_device, n_cores
from lapa2_interp.models.sizes import model_size
from lapa2_interp.models.smollm2 import SMOLLM2
from lapa2_interp.paper.scripts import USUAL
from lapa2_interp.runs.estimates import adapter_seconds, pace
from lapa2_interp.runs.grid import Grid
from lapa2_interp.scoring.scorer import chosen_scorers

PERPLEXITY_TEXTS = 120
"""About how many texts of an arm have their perplexity measured (`texts_read`)."""
FRACTIONS = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""The paper's five lengths, of the longest: 64, 128, 256, 384 and 512 of 512."""
READ_AT_FIVE = ("sent_topic", "detox")
"""Grids whose texts are scored at all five lengths."""
READ_FOR_ATTENTION = {"deep": 2}
"""Grids whose texts are not scored but read so many times, for the attention of every head."""
KEY_READ = 0.2
"""What a key costs a query where a text is read at once, of what it costs in a step of decoding."""
TOKEN = 2e-5
"""Seconds that the linear classifiers take for a token."""
MASKED = 0.4
"""Share of the texts, about, that say a word of a prefix, and are read again without it."""
ITEM = 6.0
"""Seconds that the script of a figure or table takes for all else: intervals, drawing."""


def samples_read(firsts: int, wanted: int = PERPLEXITY_TEXTS) -> int:
    """How many samples of each prompt and attribute have their perplexity measured.

    Args:
        firsts: Prompts times attributes.
        wanted: About so many texts of an arm.
    """
    return math.ceil(wanted / firsts)


def texts_read(firsts: int, texts: float, wanted: int = PERPLEXITY_TEXTS) -> float:
    """How many texts of an arm have their perplexity measured.

    Args:
        firsts, wanted: As `samples_read`.
        texts: All texts of the arm.
    """
    return min(texts, float(firsts * samples_read(firsts, wanted)))


def scoring_seconds(
    grids: Sequence[Grid], items: int | None = None, scorers: Sequence[str] = ()
) -> float:
    """Seconds to score the texts of grids by the scorers that ship, and to make tables and figures.

    Args:
        items: Scripts to be run; by default one per grid.
        scorers: As `add_scoring` takes them.
    """
    chosen = chosen_scorers(scorers, USUAL)
    read, seen, classified, adapted = 0.0, 0.0, 0.0, 0.0
    for grid in grids:
        name = grid.name.rpartition("/")[2]
        if times := READ_FOR_ATTENTION.get(name):
            tokens = [cell.n_texts * cell.length for cell in grid.cells]
            read += times * sum(tokens)
            seen += times * sum(
                each * cell.length / 2 for each, cell in zip(tokens, grid.cells, strict=True)
            )
            continue
        lengths = sum(FRACTIONS) if name in READ_AT_FIVE else 1.0
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
                adapted += MASKED * texts * cells[0].length * ("masked=adapter" in chosen)
            firsts = sum(len(cell.prompts) for cell in cells)
            # A text that is cut is the beginning of the whole one, which is read once.
            read += texts_read(firsts, float(texts)) * cells[0].length
    operations = 2 * read * model_size(SMOLLM2).parameters
    device = default_device()
    at = pace(SMOLLM2, "float32", device, operations=operations)
    scripts = ITEM * (len(grids) if items is None else items)
    reading = (read * at.row + seen * KEY_READ * at.key) / (n_cores() if device == "cpu" else 1)
    return scripts + reading + adapter_seconds(adapted) + classified * TOKEN
