"""Direct prefix conditioning: P(x_t | x_<t, a) = P_theta_a(x_t | x_<t) (paradigm I, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from lapa2_interp.methods import Branch, LogProbs, Method, State


@dataclass(frozen=True)
class PrefixConditioning(Method):
    """GPT-2+Prefix: the attribute's prefix in front of the prompt, and nothing else."""

    name: ClassVar[str] = "prefix"
    paper_name: ClassVar[str] = "GPT-2+Prefix"
    equation: ClassVar[str] = "P_prefix(x_t | x_<t)"
    alpha: ClassVar[float] = 0.5

    def branches(self, attribute: str) -> tuple[Branch, ...]:
        return (Branch("prefix", attribute),)

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        return log_probs["prefix"]


@dataclass(frozen=True)
class NegPrompt(PrefixConditioning):
    """NegPrompt: the same computation, which the paper runs on large models against toxicity.

    The released code skips the nontoxic attribute and so conditions on the toxic prefix; this uses the prefix of the
    attribute that is asked for.
    """

    name: ClassVar[str] = "negprompt"
    paper_name: ClassVar[str] = "NegPrompt"
    alpha: ClassVar[float] = 1.0
