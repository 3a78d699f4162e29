"""Methods with one branch: the raw model, and direct prefix conditioning (paradigm I, section 3.1).

P(x_t | x_<t, a) = P_theta_a(x_t | x_<t)
"""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Float
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp.errors import MethodError
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
class PrefixConditioning(Method):
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

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        return check_branches(log_probs, "prefix")["prefix"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class NegPrompt(Method):
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
        if self.form == "short":
            return (Branch("prefix", task.prefix(attribute)),)
        task.prefix(attribute)
        text = task.texts(self.name, attribute).get("long")
        if text is None:
            raise MethodError(
                f"task {task.name!r} has no long negprompt text for {attribute!r}; use form=short,"
                f" or give it in a task file: [methods.negprompt.texts.{attribute}] long"
            )
        return (Branch("prefix", text, join=" "),)

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        return check_branches(log_probs, "prefix")["prefix"]
