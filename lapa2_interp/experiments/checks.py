"""What cannot run is refused before anything does: a worker would find it only when it opens the cell."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from lapa2_interp.errors import GridError, Lapa2Error, LayoutError, ModelError, PrefixError
from lapa2_interp.experiments.estimates import model_size
from lapa2_interp.experiments.grids import Cell, Grid
from lapa2_interp.layout import Layout, layout
from lapa2_interp.methods import Method, Soft
from lapa2_interp.models import load_tokenizer
from lapa2_interp.plan import assign
from lapa2_interp.prefixes import read_card, set_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_grids(grids: Sequence[Grid]) -> None:
    """Resolve every cell as far as that needs no weights: the model's configuration, its tokenizer, the cards of prefixes.

    Raises:
        ModelError: A model is unknown, or neither here nor reached.
        GridError: A cell cannot be made: its grid, the cell, and why.
    """
    for grid in grids:
        for cell in grid.cells:
            try:
                check_cell(cell)
            except ModelError:
                raise
            except Lapa2Error as error:
                raise GridError(f"grid {grid.name}, cell {cell.key} ({cell.where}): {error}") from None


def check_cell(cell: Cell) -> None:
    """Refuse a cell whose texts do not fit, or whose augmentation asks for what its model and prefixes do not have.

    Raises:
        Lapa2Error: Why.
    """
    _check_class(cell.model_class)
    tokenizer, size = _tokenizer(cell.model), model_size(cell.model)
    prompts = cell.task.prompts.texts
    twice = [prompt for i, prompt in enumerate(prompts) if prompt in prompts[:i]]
    if twice:
        raise LayoutError(f"the prompt {twice[0]!r} is given twice and would draw the same texts; ask for more samples")
    steps = {}
    for prompt in prompts:
        n = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        steps[prompt] = cell.length - n if cell.task.length_counts_prompt else cell.length
        if steps[prompt] < 1:
            raise LayoutError(f"length {cell.length} leaves nothing to generate after the {n} tokens of {prompt!r}")
    method = cell.decoder
    branches = method.branches(cell.task, cell.attribute)
    prepared = type(method).prepare is not Method.prepare  # which may put another text in front of every prompt
    for branch, augmentation in zip(branches, assign(method, branches, cell.augmentation), strict=True):
        if augmentation is not None:
            augmentation.selects(size.n_layers, size.n_heads)
        soft = 0
        if isinstance(branch.prefix, Soft):
            soft = _slots(cell.model, cell.task.name, branch.prefix)
        text = branch.prefix if isinstance(branch.prefix, str) and not prepared else None
        for prompt in prompts:
            found = _layout(cell.model, text, branch.join + prompt, soft, cell.doubled_bos)
            if len(found) + steps[prompt] > size.n_ctx:
                raise LayoutError(
                    f"{len(found)} tokens of BOS, prefix and prompt ({prompt[:40]!r}) and {steps[prompt]} new ones exceed the "
                    f"context of {size.n_ctx} of {cell.model}; shorten the prompt or the length"
                )
            if augmentation is not None and not prepared:
                found.spans(augmentation.span)


def check_device(device: str | None) -> None:
    """Refuse a device this machine does not have.

    Raises:
        ModelError: It does not.
    """
    import torch

    if device is not None:
        try:
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ModelError(f"cannot use device {device!r}: {str(error).splitlines()[0]}") from error


@cache
def _check_class(model_class: str) -> None:
    if model_class == "HookedTransformer":
        try:
            from transformer_lens import HookedTransformer  # noqa: F401
        except ImportError:
            raise ModelError(
                "the installed transformer-lens has no HookedTransformer; install transformer-lens 3.9 or use TransformerBridge"
            ) from None


@cache
def _tokenizer(model: str) -> PreTrainedTokenizerBase:
    return load_tokenizer(model)


@cache
def _layout(model: str, text: str | None, prompt: str, soft: int, doubled_bos: bool) -> Layout:
    return layout(_tokenizer(model), text, prompt, soft=soft, doubled_bos=doubled_bos)


def _slots(model: str, task: str, prefix: Soft) -> int:
    card = read_card(set_folder(model, task, prefix.set) / f"{prefix.attribute}.json")
    size = model_size(model)
    if card.shape.n_layers != size.n_layers:
        raise PrefixError(
            f"the soft prefix {prefix.attribute!r} was made for {card.model} ({card.shape}); {model} has {size.n_layers} layers"
        )
    return card.shape.n_slots
