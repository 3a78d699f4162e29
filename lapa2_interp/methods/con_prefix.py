"""Contrastive Prefixes: prefixes of opposing attributes, trained against each other (section 2.2).

Contrast happens in training (`prefixes.training`, objective "contrastive"); decoding conditions on
the target's soft prefix:

    log w = log P_a                                                         form "soft"

The paper lists hard prefixes for its sentiment rows, but in no code do they give anything other
than direct conditioning. The second form is the contrast at decoding time that those rows suggest;
the form is our proposal and has no source:

    log w = log P_a + lam (log P_a - mean over the other classes of log P_c)   form "hard-contrast"
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

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
    attribute_prefix,
    check_branches,
    contrast_branches,
)
from lapa2_interp.tasks.task import Task


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ConPrefix(Method):
    """Con-Prefix.

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
        clean = {
            name: log_p.clamp(min=FLOOR)
            for name, log_p in check_branches(log_probs, "target", others=1).items()
        }
        target = clean.pop("target")
        return target + self.lam * (target - torch.stack(list(clean.values())).mean(dim=0))
