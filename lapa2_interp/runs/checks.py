"""Checks that refuse what cannot run before a sweep begins.

A worker would find the mistake only when opening the cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from lapa2_interp.bias.layout import Layout
from lapa2_interp.errors import GridError, Lapa2Error, ModelError, PrefixError
from lapa2_interp.generation.arrange import arrange
from lapa2_interp.generation.cell import Cell
from lapa2_interp.methods.base import SoftPrefixKey
from lapa2_interp.models.load import load_tokenizer, move_to_device
from lapa2_interp.models.sizes import model_size
from lapa2_interp.prefixes.soft_prefix import read_card, set_folder
from lapa2_interp.runs.grid import Grid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_grids(grids: Sequence[Grid]) -> None:
    """Resolve every cell as far as that needs no weights: the model's configuration, its tokenizer,
    the cards of prefixes.

    Raises:
        ModelError: A model is unknown, or neither on this machine nor on a hub that can be reached.
        GridError: A cell cannot be made: its grid, the cell, and why.
    """
    for grid in grids:
        for cell in grid.cells:
            try:
                check_cell(cell)
            except ModelError:
                raise
            except Lapa2Error as error:
                raise GridError(
                    f"grid {grid.name}, cell {cell.key} ({cell.description}): {error}"
                ) from None


def check_cell(cell: Cell) -> None:
    """Refuse a cell whose texts do not fit, or whose augmentation asks for what its model and
    prefixes do not have.

    Raises:
        Lapa2Error: Why.
    """
    _check_class(cell.model_class)
    slots = {
        branch.name: _slots(cell.model, cell.task.name, branch.prefix)
        for branch in cell.branches
        if isinstance(branch.prefix, SoftPrefixKey)
    }
    arrange(cell, _tokenizer(cell.model), model_size(cell.model), slots, layout=_layout)


def check_device(device: str | None) -> None:
    """Refuse a device this machine does not have.

    Raises:
        ModelError: The machine does not have it.
    """
    import torch

    if device is not None:
        move_to_device(torch.zeros(1), device)


@cache
def _check_class(model_class: str) -> None:
    if model_class == "HookedTransformer":
        try:
            from transformer_lens import HookedTransformer  # noqa: F401
        except ImportError:
            raise ModelError(
                "the installed transformer-lens has no HookedTransformer; install transformer-lens"
                " 3.9 or use TransformerBridge"
            ) from None


@cache
def _tokenizer(model: str) -> PreTrainedTokenizerBase:
    return load_tokenizer(model)


@cache
def _layout(
    tokenizer: Any, text: str | None, prompt: str, soft: int, doubled_bos: bool, start: str
) -> Layout:
    return Layout.of(tokenizer, text, prompt, soft=soft, doubled_bos=doubled_bos, start=start)


def _slots(model: str, task: str, prefix: SoftPrefixKey) -> int:
    card = read_card(set_folder(model, task, prefix.set) / f"{prefix.attribute}.json")
    size = model_size(model)
    if card.shape.n_layers != size.n_layers:
        raise PrefixError(
            f"the soft prefix {prefix.attribute!r} was made for {card.model} ({card.shape});"
            f" {model} has {size.n_layers} layers"
        )
    return card.shape.n_slots
