"""Whether weights can be computed with outside a model's passes."""

from __future__ import annotations

from torch import nn

from lapa2_interp.errors import ModelError
from lapa2_interp.models.facts import Model, check_not_quantised, facts_of


def check_weights_readable(model: Model, what: str, part: nn.Module | None = None) -> None:
    """Refuse weights that cannot be computed with outside the model's passes.

    Args:
        what: The beginning of the error message.
        part: The module whose weights are read; by default all.

    Raises:
        ModelError: They are quantised, or some are offloaded.
    """
    check_not_quantised(model, what)
    network = facts_of(model).network
    if any(weight.is_meta for weight in (part or network).parameters()):
        raise ModelError(
            f"{what} the weights themselves, and those of this {type(network).__name__} are"
            " offloaded; load the whole model into memory"
        )
