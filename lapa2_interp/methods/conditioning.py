"""Plain conditioning: what is drawn from is the distribution of one branch (paradigm I, section
3.1).

    log w = log P_prefix,    P(x_t | x_<t, a) = P_theta_a(x_t | x_<t)

The methods differ in what the branch reads. Only `gate` has several branches, and takes one of them
at each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count, takewhile
from typing import Annotated, ClassVar, Literal

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
    Passes,
    Prepared,
    Reminder,
    State,
    attribute_prefix,
    check_branches,
)
from lapa2_interp.tasks.task import Task


class Conditioning(Method):
    """A method that draws from its branch "prefix"."""

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        return check_branches(log_probs, "prefix")["prefix"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class NoControl(Method):
    """The raw model on the prompt alone; an augmentation strengthens the prompt (Eq. 15)."""

    name: ClassVar[str] = "none"
    paper_name: ClassVar[str] = "raw model"
    equation: ClassVar[str] = "log w = log P_base"
    alpha: ClassVar[float] = 0.0
    pro_aug: bool = True

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        return (Branch("base"),)

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        return check_branches(log_probs, "base")["base"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PrefixConditioning(Conditioning):
    """The attribute's prefix before the prompt, and nothing else. The paper: GPT-2+Prefix.

    Args:
        prefixes: "hard", or soft ones: mle, contrastive, or a set's folder. The paper's tasks
            choose in their files: hard for sentiment, mle for topic and detox (the released code:
            mle for all).
    """

    name: ClassVar[str] = "prefix"
    paper_name: ClassVar[str] = "GPT-2+Prefix"
    display_name: ClassVar[str] = "Prefix"
    equation: ClassVar[str] = "log w = log P_prefix"
    alpha: ClassVar[float] = 0.5
    text_names: ClassVar[tuple[str, ...] | None] = ("prefix",)
    prefixes: str = "hard"

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        return (Branch("prefix", attribute_prefix(task, attribute, self.prefixes, self.name)),)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class NegPrompt(Conditioning):
    """NegPrompt: prefix conditioning with hard prefixes, which the paper runs on large models
        against toxicity.

    The released code skips the nontoxic attribute and so conditions on the toxic text (attribute
    "toxic" here); this uses the prefix of the given attribute.

    Args:
        form: "short", the paper's prefix, or "long", the sentence of PREADD's authors, where the
            task file has it.
    """

    name: ClassVar[str] = "negprompt"
    paper_name: ClassVar[str] = "NegPrompt"
    equation: ClassVar[str] = "log w = log P_prefix"
    alpha: ClassVar[float] = 1.0
    text_names: ClassVar[tuple[str, ...] | None] = ("long",)
    form: Literal["short", "long"] = "short"

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        prefix = task.prefix(attribute)
        if self.form == "short":
            return (Branch("prefix", prefix),)
        text = task.texts(self.name, attribute).get("long")
        if text is None:
            raise MethodError(
                f"task {task.name!r} has no long negprompt text for {attribute!r}; use form=short,"
                f" or give it in a task file: [methods.negprompt.texts.{attribute}] long"
            )
        return (Branch("prefix", text, join=" "),)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Remind(Conditioning):
    """The attribute's hard prefix before the prompt, and again between new tokens.

    This is what a person would try who has no hooks:

        x_1 .. x_k  prefix  x_{k+1} .. x_{2k}  prefix  ...

    The copies are in the model's context, so they count in l; they are in no text, and no scorer
    sees them. The method's first copy is the usual prefix in front of the prompt; an augmentation
    acts on it.

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

    def prepare(self, context: MethodContext, task: Task, attribute: str, prompt: str) -> Prepared:
        if not self.every:
            return Prepared()
        ids = context.ids(self.before + task.prefix(attribute))
        return Prepared(reminder=Reminder(tuple(ids), self.every))

    def intervene(
        self, passes: Passes, prepared: Sequence[Prepared]
    ) -> AbstractContextManager[None]:
        if (reminder := prepared[0].reminder) is None:
            return nullcontext()
        return passes.remind(reminder.ids, reminder.every)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Gate(Method):
    """A gate of plausibility around any augmentation of the prefix.

    A step is steered only where the model without steering would allow it:

        x_i = the likeliest token of P_i, steered in fewer layers with each i
        log w = log P_i       of the first i with P_plain(x_i) > beta max P_plain
                log P_plain   if there is none

    All branches have the prefix. What steers, any recipe, acts in all its layers in the first
    branch, in fewer in the next ones and in none in `plain`.

    This is the gate of DIRECTER (Kang and Kim, 2026, arXiv 2603.06745; read in mjk0618/directer,
    src/generator.py), which steers by recipe `key-scale` and decodes greedily. A refused step is
    tried again with the first half of its layers, a quarter and so on, while these are two or more.
    Three things differ:

    - `_rank_layers` orders the layers at the first step of each text; `order` is one for a run.
      Take that of `analyses/tools/layer_order.py`, which ranks in the same way, over prompts that
      the run does not have.
    - All attempts are computed at every step; DIRECTER stops at the first that it accepts.
    - DIRECTER keeps no keys of a steered pass. So it is here with `key-scale`, whose phase is
      `predicting_only`; with other phases each branch reads what it steered before, refused or not.

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
