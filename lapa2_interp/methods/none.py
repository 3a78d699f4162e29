"""No control: the raw language model, P(x_t | x_<t)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from lapa2_interp.methods import Branch, LogProbs, Method, State


@dataclass(frozen=True)
class NoControl(Method):
    """The prompt alone. With an augmentation its prompt is strengthened (Eq. 9)."""

    name: ClassVar[str] = "none"
    paper_name: ClassVar[str] = "raw model"
    equation: ClassVar[str] = "P(x_t | x_<t)"
    alpha: ClassVar[float] = 0.0

    def branches(self, attribute: str) -> tuple[Branch, ...]:
        return (Branch("base"),)

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        return log_probs["base"]
