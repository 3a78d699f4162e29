"""RSA-Control: a speaker that models a listener who guesses the attribute.

Prefix-conditioned branches are the listener's classes.

Per class c (the target and its competitors), with the listener's belief prior_c after all tokens so
far, the prompt's included:

    L_c(x)   = P_c(x) prior_c / sum_j P_j(x) prior_j           the listener, on hearing x
    S(x)     = P_base(x) L_target(x)^rationality               the speaker
    r        = min(1, [mean of P_base over S's top 5 / over P_base's top 5] / [mean of L_target over the same two sets])
    w(x)     = P_base(x) L_target(x)^(rationality + adjustment r)
    prior_c <- L_c(x_t)                                        after sampling x_t; uniform before the first token of the text

r is the raw model's loss of probability relative to the listener's gain: where control costs much,
there is less of it.
"""  # noqa: E501

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp._util.values import Count, NotNegative
from lapa2_interp.methods.base import (
    FLOOR,
    BatchStart,
    Branch,
    LogProbs,
    Method,
    State,
    check_branches,
    contrast_branches,
)
from lapa2_interp.tasks.task import Task


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class RsaControl(Method):
    """RSA-Control. The state holds log prior_c by class, [sample]; None is a uniform prior.

    Args:
        rationality: The original's alpha, >= 0; 0 (with adjustment 0) is the raw model.
        adjustment: The original's beta, >= 0; 0 turns the adjustment off.
        top: Number of the likeliest tokens that the adjustment compares.
        prefixes: "hard", or soft ones: mle, contrastive, or a set's folder.
        pro_aug: Also strengthen the prompt on the base branch.
    """

    name: ClassVar[str] = "rsa-control"
    paper_name: ClassVar[str] = "RSA-Control"
    equation: ClassVar[str] = (
        "w = P_base L_target^(rationality + adjustment r), L_c = P_c prior_c / sum_j P_j prior_j"
    )
    alpha: ClassVar[float] = 0.5
    in_paper: ClassVar[bool] = False
    reads_prompt: ClassVar[bool] = True
    when_empty: ClassVar[str] = (
        "rationality is so large that the weights overflow; the original's is 10"
    )
    rationality: NotNegative = 10.0
    adjustment: NotNegative = 10.0
    top: Count = 5
    prefixes: str = "hard"
    pro_aug: bool = False

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        return (Branch("base"), *contrast_branches(task, attribute, self.prefixes))

    def begin(self, start: BatchStart) -> State:
        if start.log_likelihood is None:
            return None
        classes = {
            name: log_likelihood
            for name, log_likelihood in start.log_likelihood.items()
            if name != "base"
        }
        total = torch.stack(list(classes.values())).logsumexp(dim=0)
        return {c: log_likelihood - total for c, log_likelihood in classes.items()}

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        log_probs = check_branches(log_probs, "base", "target", others=1)
        base = log_probs["base"].clamp(min=FLOOR)
        listener = self._listener(log_probs, state)["target"]
        exponent: float | Tensor = self.rationality
        if self.adjustment > 0:
            k = min(self.top, base.shape[1])
            speaker_top = (base + self.rationality * listener).topk(k, dim=1).indices
            base_top = base.topk(k, dim=1).indices

            def gain(log_p: Tensor) -> Tensor:
                """log of the mean over the speaker's candidates, minus that over the raw
                model's."""
                return log_p.gather(1, speaker_top).logsumexp(dim=1) - log_p.gather(
                    1, base_top
                ).logsumexp(dim=1)

            r = (gain(base) - gain(listener)).exp().clamp(max=1)
            exponent = self.rationality + self.adjustment * r[:, None]
        return log_probs["base"] + exponent * listener

    def advance(self, state: State, log_probs: LogProbs, tokens: Int[Tensor, " sample"]) -> State:
        listener = self._listener(check_branches(log_probs, "base", "target", others=1), state)
        return {c: log_p.gather(1, tokens[:, None])[:, 0] for c, log_p in listener.items()}

    def _listener(
        self, log_probs: LogProbs, state: State
    ) -> dict[str, Float[Tensor, "sample vocab"]]:
        """log L_c by class."""
        joint = {
            c: log_p.clamp(min=FLOOR) + (0.0 if state is None else state[c][:, None])
            for c, log_p in log_probs.items()
            if c != "base"
        }
        total = torch.stack(list(joint.values())).logsumexp(dim=0)
        return {c: log_p - total for c, log_p in joint.items()}
