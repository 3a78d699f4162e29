"""A gate of plausibility: a step is steered only where the model without steering would allow it.

    x* = the likeliest token of P_steered
    log w = log P_steered   if P_plain(x*) > beta max P_plain
            log P_plain     otherwise

Both branches have the prefix; what steers, any recipe, acts in `steered` alone. This is the test of
DIRECTER (Kang and Kim, 2026, arXiv 2603.06745; read in mjk0618/directer), which steers by recipe
`key-scale` and decodes greedily. Before it gives up, DIRECTER tries again with half of the layers,
a quarter and so on, ranked by how much scaling the keys changes the inputs and outputs of attention;
here it is all of the recipe's layers or none.
"""  # noqa: E501

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp.methods.base import (
    Branch,
    LogProbs,
    Method,
    State,
    attribute_prefix,
    check_branches,
)
from lapa2_interp.tasks.task import Task


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Gate(Method):
    """A gate of plausibility around any augmentation of the prefix.

    Args:
        beta: The share of the largest probability without steering above which a token is
            plausible; 0 steers at every step, 1 at none.
        prefixes: "hard", or soft ones: mle, contrastive, or a set's folder.
    """

    name: ClassVar[str] = "gate"
    paper_name: ClassVar[str] = "gate"
    display_name: ClassVar[str] = "Gate"
    equation: ClassVar[str] = (
        "log w = log P_steered if P_plain(argmax P_steered) > beta max P_plain, else log P_plain"
    )
    alpha: ClassVar[float] = 0.5
    in_paper: ClassVar[bool] = False
    beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    prefixes: str = "hard"

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        prefix = attribute_prefix(task, attribute, self.prefixes, self.name)
        return (Branch("steered", prefix), Branch("plain", prefix, steered=False))

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        p = check_branches(log_probs, "steered", "plain")
        steered, plain = p["steered"], p["plain"]
        least = plain.amax(dim=1, keepdim=True).exp() * self.beta
        top = steered.argmax(dim=1, keepdim=True)
        return torch.where(plain.gather(1, top).exp() > least, steered, plain)
