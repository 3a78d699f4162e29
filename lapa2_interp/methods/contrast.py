"""Contrast: a difference of two log-probabilities is added, so many times as a strength says.

    log w = log P_start + strength (log P_toward - log P_away)

The methods differ in what the three are: the raw model, the prefix, the prefix hidden, or the mean
over the competing attributes. Subtracted log-probabilities are at least `FLOOR`, so that there is
no difference of infinities.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp.errors import MethodError
from lapa2_interp.methods.base import (
    FLOOR,
    Branch,
    LogProbs,
    Method,
    State,
    attribute_prefix,
    check_branches,
    contrast_branches,
    nucleus,
)
from lapa2_interp.tasks.task import Task


def floored(
    log_probs: LogProbs, *names: str, others: int = 0
) -> tuple[Float[Tensor, "sample vocab"], ...]:
    """The branches of these names, checked by `check_branches` and at least `FLOOR`."""
    checked = check_branches(log_probs, *names, others=others)
    return tuple(checked[name].clamp(min=FLOOR) for name in names)


def mean_of_competitors(log_probs: LogProbs) -> Float[Tensor, "sample vocab"]:
    """The mean over the competing attributes of log P_c."""
    competitors = [
        log_p.clamp(min=FLOOR)
        for name, log_p in check_branches(log_probs).items()
        if name not in ("base", "target")
    ]
    return torch.stack(competitors).mean(dim=0)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Preadd(Method):
    """PREADD: move away from (or beyond) a prefixed distribution (Eq. 3, paradigm II).

        log w = log P_base + lam (log P_prefix - log P_base)

    The sign of lam: 0 is the raw model, 1 is exactly direct conditioning on the prefix, above 1
    exaggerates it, and below 0 moves away from it. Against toxicity the prefix is the *toxic*
    sentence and lam = -1, as in the released scripts and in PREADD's own paper. The paper's text
    says 1.0, which would condition on the toxic sentence.

    Args:
        lam: lambda of Eq. 3.
        pro_aug: Also strengthen the prompt on the base branch (the released --boost_base).
    """

    name: ClassVar[str] = "preadd"
    paper_name: ClassVar[str] = "PREADD"
    equation: ClassVar[str] = "log w = log P_base + lam (log P_prefix - log P_base)"
    alpha: ClassVar[float] = 2.0
    text_names: ClassVar[tuple[str, ...] | None] = ("prefix",)
    when_empty: ClassVar[str] = (
        "lam is so large that the difference overflows; |lam| up to 2.5 is usual"
    )
    lam: Annotated[float, Field(allow_inf_nan=False)] = -1.0
    pro_aug: bool = False

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        prefix = task.prefix(attribute)
        text = task.texts(self.name, attribute).get("prefix", prefix)
        if self.lam < 0 and text == prefix:
            raise MethodError(
                f"preadd with lam={self.lam:g} moves away from its prefix, and {prefix!r} is"
                f" {attribute!r} itself; give lam > 0 (the method's lam=2), or a text of the"
                f" opposite in the task file: [methods.preadd.texts.{attribute}] prefix"
            )
        return (Branch("base"), Branch("prefix", text))

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        base, prefix = floored(log_probs, "base", "prefix")
        return base + self.lam * (prefix - base)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Spa(Method):
    """Selective Prompt Anchoring: contrast the prefix with itself, hidden, at the same positions.

        log w = omega log P_prefix + (1 - omega) log P_masked

    In the branch "masked" no query after the prefix sees it, and the prompt keeps its position.
    omega 1 is direct conditioning on the prefix, 0 ignores it, and above 1 exaggerates it. So SPA
    is PREADD whose base has the positions of the prefix branch. The original steers parts of
    instructions for code, and chooses omega for each model.

    Args:
        omega: Anchoring strength; the original package's default is 1.4.
        prefixes: "hard", or soft ones: mle, contrastive, or a set's folder.
    """

    name: ClassVar[str] = "spa"
    paper_name: ClassVar[str] = "SPA"
    equation: ClassVar[str] = "log w = omega log P_prefix + (1 - omega) log P_masked"
    alpha: ClassVar[float] = 0.5
    in_paper: ClassVar[bool] = False
    when_empty: ClassVar[str] = "omega is so large that the contrast overflows; 1.4 is usual"
    omega: Annotated[float, Field(allow_inf_nan=False)] = 1.4
    prefixes: str = "hard"

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        prefix = attribute_prefix(task, attribute, self.prefixes, self.name)
        return (Branch("prefix", prefix), Branch("masked", prefix, hidden=True))

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        prefix, masked = floored(log_probs, "prefix", "masked")
        return masked + self.omega * (prefix - masked)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ConPrefix(Method):
    """Contrastive Prefixes, trained for opposing attributes against each other (section 2.2).

    Contrast happens in training (`prefixes.training`, objective "contrastive"); decoding conditions
    on the target's soft prefix:

        log w = log P_a                                       form "soft"

    The paper lists hard prefixes for its sentiment rows, but in no code do they give anything other
    than direct conditioning. The second form is the contrast at decoding time that those rows
    suggest; the form is our proposal and has no source:

        log w = log P_a + lam (log P_a - mean_c log P_c)      form "hard-contrast"

    Args:
        form: "soft", or "hard-contrast" with the task's hard prefixes.
        prefixes: The set for form "soft": contrastive, mle, or a set's folder.
        lam: Strength of the contrast in form "hard-contrast"; 0 is direct conditioning.
    """

    name: ClassVar[str] = "con-prefix"
    paper_name: ClassVar[str] = "Con-Prefix"
    equation: ClassVar[str] = (
        "soft: log w = log P_target; hard-contrast: log P_target + lam (log P_target - mean_c log"
        " P_c)"
    )
    alpha: ClassVar[float] = 0.5
    when_empty: ClassVar[str] = "lam is so large that the contrast overflows; lower |lam|"
    form: Literal["soft", "hard-contrast"] = "soft"
    prefixes: str = "contrastive"
    lam: Annotated[float, Field(allow_inf_nan=False)] = 1.0

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        if self.form == "soft":
            return (Branch("target", attribute_prefix(task, attribute, self.prefixes)),)
        return contrast_branches(task, attribute, "hard")

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        if self.form == "soft":
            return check_branches(log_probs, "target")["target"]
        (target,) = floored(log_probs, "target", others=1)
        return target + self.lam * (target - mean_of_competitors(log_probs))


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Rose(Method):
    """ROSE: subtract the distribution under the opposite prefix.

        log w = log P_target - strength * mean over the competing attributes of log P_c

    The name stands for Reverse Prompt Contrastive Decoding; prefixes stand for its chat prompts.
    The original decodes greedily (`--top-k 1`) and has one reverse prompt; here the mean over all
    competitors stands for it.

    Args:
        strength: Weight of the reverse branch, the original's alpha; 0 is direct conditioning.
        prefixes: "hard", or soft ones: mle, contrastive, or a set's folder.
    """

    name: ClassVar[str] = "rose"
    paper_name: ClassVar[str] = "ROSE"
    equation: ClassVar[str] = "log w = log P_target - strength mean_c log P_c"
    alpha: ClassVar[float] = 0.5
    in_paper: ClassVar[bool] = False
    when_empty: ClassVar[str] = (
        "strength is so large that the contrast overflows; the original's is 0.5"
    )
    strength: Annotated[float, Field(allow_inf_nan=False)] = 0.5
    prefixes: str = "hard"

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        return contrast_branches(task, attribute, self.prefixes)

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        target = check_branches(log_probs, "target", others=1)["target"]
        return target - self.strength * mean_of_competitors(log_probs)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Dexperts(Method):
    """DExperts: a raw model, an expert and an anti-expert.

        log w = log P_base + strength (log P_target - mean over the competing attributes of log P_c)
                on the nucleus of P_base

    Prefix-conditioned branches stand for the method's fine-tuned models. Tokens outside the
    smallest set that holds `top_p` of the raw model's probability are removed before the experts
    count.

    Args:
        strength: The original's alpha: 2.0 against toxicity, 3.2 for sentiment (in the task file).
            0 is the raw model's nucleus.
        top_p: Probability of the raw model's candidates, in (0, 1]; 1 keeps every token.
        prefixes: "hard", or soft ones: mle, contrastive, or a set's folder.
        pro_aug: Also strengthen the prompt on the base branch.
    """

    name: ClassVar[str] = "dexperts"
    paper_name: ClassVar[str] = "DExperts"
    equation: ClassVar[str] = (
        "log w = log P_base + strength (log P_target - mean_c log P_c) where P_base is top-p"
    )
    alpha: ClassVar[float] = 0.5
    in_paper: ClassVar[bool] = False
    when_empty: ClassVar[str] = (
        "strength is so large that the difference overflows; the original's is 2 to 3.2"
    )
    strength: Annotated[float, Field(allow_inf_nan=False)] = 2.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.9
    prefixes: str = "hard"
    pro_aug: bool = False

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        return (Branch("base"), *contrast_branches(task, attribute, self.prefixes))

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        log_probs = check_branches(log_probs, "base", "target", others=1)
        base = nucleus(log_probs["base"], self.top_p) if self.top_p < 1 else log_probs["base"]
        target = log_probs["target"].clamp(min=FLOOR)
        return base + self.strength * (target - mean_of_competitors(log_probs))
