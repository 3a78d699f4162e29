"""ROSE: subtract the distribution under the opposite prefix.

The name stands for Reverse Prompt Contrastive Decoding; prefixes stand for its chat prompts.

    log w = log P_target - strength * mean over the competing attributes of log P_c

The original decodes greedily (`--top-k 1`) and has one reverse prompt; here the mean over all
competitors stands for it.
"""

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
)
from lapa2_interp.tasks.task import Task


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Rose(Method):
    """ROSE.

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
        log_probs = check_branches(log_probs, "target", others=1)
        target = log_probs.pop("target")
        reverse = torch.stack(
            [log_p.clamp(min=FLOOR) for name, log_p in log_probs.items() if name != "base"]
        ).mean(dim=0)
        return target - self.strength * reverse
