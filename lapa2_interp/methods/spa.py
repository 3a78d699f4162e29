"""Selective Prompt Anchoring: contrast the prefix with itself, hidden, at the same positions.

    log w = omega log P_prefix + (1 - omega) log P_masked

In the branch "masked" no query after the prefix sees it, and the prompt keeps its position. omega 1
is direct conditioning on the prefix, 0 ignores it, and above 1 exaggerates it. So SPA is PREADD
whose base has the positions of the prefix branch. The original steers parts of instructions for
code, and chooses omega for each model.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

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
    attribute_prefix,
    check_branches,
)
from lapa2_interp.tasks.task import Task


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Spa(Method):
    """Selective Prompt Anchoring.

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
        log_probs = check_branches(log_probs, "prefix", "masked")
        prefix, masked = (log_probs[name].clamp(min=FLOOR) for name in ("prefix", "masked"))
        return masked + self.omega * (prefix - masked)
