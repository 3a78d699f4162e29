"""A gate of plausibility: a step is steered only where the model without steering would allow it.

    x_i = the likeliest token of P_i, steered in fewer layers with each i
    log w = log P_i       of the first i with P_plain(x_i) > beta max P_plain
            log P_plain   if there is none

All branches have the prefix. What steers, any recipe, acts in all its layers in the first branch, in
fewer in the next ones and in none in `plain`.

This is the gate of DIRECTER (Kang and Kim, 2026, arXiv 2603.06745; read in mjk0618/directer,
src/generator.py), which steers by recipe `key-scale` and decodes greedily. A refused step is tried
again with the first half of its layers, a quarter and so on, while these are two or more. Three things
differ:

- `_rank_layers` orders the layers at the first step of each text; `order` is one for a run. Take that
  of `analyses/tools/layer_order.py`, which ranks in the same way, over prompts that the run does not have.
- All attempts are computed at every step; DIRECTER stops at the first that it accepts.
- DIRECTER keeps no keys of a steered pass. So it is here with `key-scale`, whose phase is
  `predicting_only`; with other phases each branch reads what it steered before, refused or not.
"""  # noqa: E501

from __future__ import annotations

from itertools import count, takewhile
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from pydantic import ConfigDict, Field, field_validator
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp.errors import MethodError
from lapa2_interp.methods.base import (
    Branch,
    LogProbs,
    Method,
    MethodContext,
    Prepared,
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
        order: All layers of the model, four or more, such as "2/0/3/1": where the augmentation is
            refused, it is tried again in the first half of them, then in the first quarter, ...,
            two or more. In an attempt whose layers have none of its heads nothing is steered. By
            default it is not tried again.
        prefixes: "hard", or soft ones: mle, contrastive, or a set's folder.
    """

    name: ClassVar[str] = "gate"
    paper_name: ClassVar[str] = "gate"
    display_name: ClassVar[str] = "Gate"
    equation: ClassVar[str] = (
        "log w = log P_i of the first i with P_plain(argmax P_i) > beta max P_plain,"
        " log P_plain if there is none"
    )
    alpha: ClassVar[float] = 0.5
    in_paper: ClassVar[bool] = False
    beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    order: str = ""
    prefixes: str = "hard"

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        prefix = attribute_prefix(task, attribute, self.prefixes, self.name)
        return tuple(Branch(name, prefix, layers=own) for name, own in self.attempts().items())

    @field_validator("order")
    @classmethod
    def _all_layers(cls, order: str) -> str:
        layers = order.split("/") if order else []
        if layers and (len(layers) < 4 or set(layers) != set(map(str, range(len(layers))))):
            raise ValueError(
                "order takes all layers of the model, four or more, each once, such as '2/0/3/1';"
                f" found {order[:80]!r}"
            )
        return order

    def prepare(self, context: MethodContext, task: Task, attribute: str, prompt: str) -> Prepared:
        n = self.order.count("/") + 1
        if self.order and n != context.n_layers:
            raise MethodError(
                f"gate: order: has {n} layers, and the model has {context.n_layers}; rank them with"
                " analyses/tools/layer_order.py"
            )
        return Prepared()

    def attempts(self) -> dict[str, tuple[int, ...] | None]:
        """By branch, in order, the layers that are steered; None for all of the recipe's."""
        ranked = tuple(map(int, self.order.split("/") if self.order else ()))
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
