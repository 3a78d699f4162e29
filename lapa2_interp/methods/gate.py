"""A gate of plausibility: a step is steered only where the model without steering would allow it.

    x_i = the likeliest token of P_i, steered in fewer layers with each i
    log w = log P_i       of the first i with P_plain(x_i) > beta max P_plain
            log P_plain   if there is none

All branches have the prefix; what steers, any recipe, acts in all its layers first, and in none in
`plain`. This is the test of DIRECTER (Kang and Kim, 2026, arXiv 2603.06745; read in mjk0618/directer,
src/generator.py), which steers by recipe `key-scale` and decodes greedily. There a refused step is
tried again with the first half of the layers, a quarter and so on, while these are two or more, and
`rank_layers` orders them at the first step of each text. Here `order` is one for a run: take that of
`analyses/layer_order.py`, which ranks as DIRECTER does, over prompts that a run does not have.
Without `order` it is all layers or none.
"""  # noqa: E501

from __future__ import annotations

from itertools import count, takewhile
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp._util.errors import MethodError
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
        order: Layers such as "20/3/11": the augmentation acts in their first half where it is
            refused in all its layers, then in their first quarter, ..., two or more. By default it
            is not tried again.
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
    order: str = ""
    prefixes: str = "hard"

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        prefix = attribute_prefix(task, attribute, self.prefixes, self.name)
        return tuple(Branch(name, prefix, layers=own) for name, own in self.attempts().items())

    def attempts(self) -> dict[str, tuple[int, ...] | None]:
        """By branch, in order, the layers that are steered; None for all of the recipe's.

        Raises:
            MethodError: `order` is not a list of layers, each once.
        """
        layers = self.order.split("/") if self.order else []
        if not all(map(str.isdecimal, layers)) or len(set(map(int, layers))) < len(layers):
            raise MethodError(
                f"gate: order: takes layers, each once, such as '20/3/11'; found"
                f" {self.order[:80]!r}"
            )
        ranked = tuple(map(int, layers))
        sizes = takewhile(lambda n: n > 1, (len(ranked) >> i for i in count(1)))
        return {"steered": None, **{f"{n} layers": ranked[:n] for n in sizes}, "plain": ()}

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        names = tuple(self.attempts())
        p = check_branches(log_probs, *names)
        *attempts, plain = (p[name] for name in names)
        least = plain.amax(dim=1, keepdim=True).exp() * self.beta
        weights = plain
        for steered in reversed(attempts):  # so that the first plausible one stays
            top = steered.argmax(dim=1, keepdim=True)
            weights = torch.where(plain.gather(1, top).exp() > least, steered, weights)
        return weights
