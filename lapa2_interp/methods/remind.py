"""The prefix is read again every k tokens: what a person would try who has no hooks.

    x_1 .. x_k  prefix  x_{k+1} .. x_{2k}  prefix  ...

The copies are in the model's context, so they count in l; they are in no text, and no scorer sees
them. The method's first copy is the usual prefix in front of the prompt; an augmentation acts on it.
"""  # noqa: E501

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, ClassVar

from jaxtyping import Float
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp.methods.base import (
    Branch,
    LogProbs,
    Method,
    MethodContext,
    Passes,
    Prepared,
    Reminder,
    State,
    check_branches,
)
from lapa2_interp.tasks.task import Task


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Remind(Method):
    """The attribute's hard prefix before the prompt, and again between new tokens.

    Args:
        every: The number of new tokens after which the prefix is read again; 0 for never.
        copies: How often the prefix stands before the prompt.
        before: What stands before the prefix where it is read again.
    """

    name: ClassVar[str] = "remind"
    paper_name: ClassVar[str] = "Reminder"
    equation: ClassVar[str] = "log w = log P_prefix; the prefix is read again every k tokens"
    alpha: ClassVar[float] = 0.0
    in_paper: ClassVar[bool] = False
    changes_network: ClassVar[bool] = True
    every: Annotated[int, Field(ge=0)] = 16
    copies: Annotated[int, Field(ge=1, le=16)] = 1
    before: str = " "

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        return (Branch("prefix", self.before.join([task.prefix(attribute)] * self.copies)),)

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        return check_branches(log_probs, "prefix")["prefix"]

    def prepare(self, context: MethodContext, task: Task, attribute: str, prompt: str) -> Prepared:
        if not self.every:
            return Prepared()
        ids = context.ids(self.before + task.prefix(attribute))
        return Prepared(reminder=Reminder(tuple(ids), self.every))

    def intervene(self, passes: Passes, prepared: Prepared) -> AbstractContextManager[None]:
        if (reminder := prepared.reminder) is None:
            return nullcontext()
        return passes.remind(reminder.ids, reminder.every)
