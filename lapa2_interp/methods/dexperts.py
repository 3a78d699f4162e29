"""DExperts: a raw model, an expert and an anti-expert.

Prefix-conditioned branches stand for the method's fine-tuned models.

    log w = log P_base + strength (log P_target - mean over the competing attributes of log P_c)    on the nucleus of P_base

Tokens outside the smallest set that holds `top_p` of the raw model's probability are removed before
the experts count.
"""  # noqa: E501

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp.methods.base import (
    FLOOR,
    Branch,
    LogProbs,
    Method,
    State,
    check_branches,
    contrast_branches,
    nucleus,
)
from lapa2_interp.tasks.task import Task


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Dexperts(Method):
    """DExperts.

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
        clean = {
            name: log_p.clamp(min=FLOOR) for name, log_p in log_probs.items() if name != "base"
        }
        target = clean.pop("target")
        return base + self.strength * (target - torch.stack(list(clean.values())).mean(dim=0))
