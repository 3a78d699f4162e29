"""Rows that continue prompts: the usual ones, or rows of static steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jaxtyping import Int
from torch import Tensor

from lapa2_interp.attention.cache import BridgeRows, Rows
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.attention.static_rows import print_note, static_problem, static_rows
from lapa2_interp.bias.augmentation import AugmentationLike
from lapa2_interp.bias.layout import Layout
from lapa2_interp.models.facts import Model


@contextmanager
def continued_rows(
    model: Model,
    rows: Rows,
    index: Int[Tensor, " row"],
    capacity: int,
    augmentations: Sequence[AugmentationLike],
    layouts: Sequence[Layout],
    recorder: Recorder | None,
) -> Iterator[Rows]:
    """Rows that continue others which have read their prompts, under an augmentation inside the
    block.

    If the model asks for static steps and cannot have them, one line on standard error says why,
    and the steps are the usual ones.

    Args:
        index: For every row the old row that it continues.
        capacity: Keys of the longest text.
        augmentations, layouts, recorder: As in `hooked.augmented`.

    Raises:
        ModelError: The model does not keep to the mask that it is given.
    """
    if getattr(model, "static", False):
        if (problem := static_problem(model, rows, augmentations)) is None:
            assert isinstance(rows, BridgeRows)
            with static_rows(rows, index, capacity, augmentations, layouts, recorder) as static:
                yield static
            return
        print_note(problem)
    rows.expand(index, capacity)
    with augmented(model, augmentations, layouts, recorder):
        yield rows
