"""Air-Decoding: reweight the raw model by the probability of the attribute (Eq. 4-5, paradigm III).

Per class c and token x, from the class's prefixed model:

    n_c(x)      = -1 / ln P_c(x)                         attribute reconstruction ("plain": n_c = P_c, the paper's Eq. 5)
    cond_a(x)   = n_a(x) / sum_j R_j n_j(x)              R_a = 1
    R_j        <- R_j n_j(x_t) / n_a(x_t)                after sampling x_t; 1 before the first step
    w(x)        = P_base(x) cond_a(x)^omega

omega = 140 takes weights far below what float32 holds, so this is computed on logarithms. Of two
classes a and b, ln cond_a = -ln(1 + R_b n_b / n_a), and n_b / n_a = ln P_a / ln P_b.
`numerics="released"` multiplies in float32 as the released code does: weights below about 7e-46
become 0, and a token of which the target class is certain gets weight 0.
"""  # noqa: E501

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp._util.values import NotNegative
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
class AirDecoding(Method):
    """Air-Decoding. The state holds R_j (log R_j in log space) per competing class, [sample].

    Args:
        omega: Control strength, >= 0; the task files have the paper's 140, 60 and 120 for
            sentiment, topic and detox.
        posterior: "reconstructed" (released code and Air-Decoding's paper) or "plain" (the LaPA2
            paper's Eq. 5).
        numerics: "log" or "released".
        prefixes: "hard", or soft ones: mle, contrastive, or a set's folder. The paper's tasks
            choose in their files: hard for sentiment, mle for topic and detox.
        pro_aug: Also strengthen the prompt on the base branch; the paper's default for sentiment
            and topic, off for detox.
    """

    name: ClassVar[str] = "air-decoding"
    paper_name: ClassVar[str] = "Air-Decoding"
    equation: ClassVar[str] = "w = P_base (n_target / sum_j R_j n_j)^omega, n = -1 / ln P"
    alpha: ClassVar[float] = 0.5
    when_empty: ClassVar[str] = (
        "omega takes every weight below float32; lower omega or set numerics=log"
    )
    omega: NotNegative = 140.0
    posterior: Literal["reconstructed", "plain"] = "reconstructed"
    numerics: Literal["log", "released"] = "log"
    prefixes: str = "hard"
    pro_aug: bool = True

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        return (Branch("base"), *contrast_branches(task, attribute, self.prefixes))

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        log_probs = check_branches(log_probs, "base", "target", others=1)
        if self.numerics == "released":
            return self._combine_released(log_probs, state)
        # The short form for two classes, where its numbers are finite.
        short = fits = None
        if len(log_probs) == 3 and self.posterior == "reconstructed":
            log_cond = self._log_cond_of_two(log_probs, state)
            fits = log_cond.amin(dim=1, keepdim=True).isfinite()  # sample 1; all are <= 0, or NaN
            short = log_cond.mul_(self.omega).add_(log_probs["base"])
            if fits.all():
                return short
        # The general form.
        log_n = self._log_n(log_probs)
        with_ratio = [
            log_n_c if state is None or c == "target" else log_n_c + state[c][:, None]
            for c, log_n_c in log_n.items()
        ]
        log_cond = log_n["target"] - torch.stack(with_ratio).logsumexp(dim=0)
        log_weights = log_probs["base"] + self.omega * log_cond
        return (
            log_weights if short is None or fits is None else torch.where(fits, short, log_weights)
        )

    def advance(self, state: State, log_probs: LogProbs, tokens: Int[Tensor, " sample"]) -> State:
        log_probs = check_branches(log_probs, "base", "target", others=1)
        released = self.numerics == "released"
        # by branch: sample 1
        sampled_log_probs = {c: log_p.gather(1, tokens[:, None]) for c, log_p in log_probs.items()}
        n = self._n_released(sampled_log_probs) if released else self._log_n(sampled_log_probs)
        sampled = {c: n_c[:, 0] for c, n_c in n.items()}
        target = sampled.pop("target")
        if released:
            return {
                c: (1.0 if state is None else state[c]) * n_c / target for c, n_c in sampled.items()
            }
        return {
            c: (0.0 if state is None else state[c]) + log_n_c - target
            for c, log_n_c in sampled.items()
        }

    def _log_cond_of_two(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        """ln cond of the target against one other class; -inf where n_b / n_a exceeds the
        precision's range."""
        (opponent,) = log_probs.keys() - {"base", "target"}
        a, b = (_clamp_log_probs(log_probs[c]) for c in ("target", opponent))
        ratio = a.div_(b)  # n_b / n_a
        if state is not None:
            ratio *= state[opponent].exp()[:, None]
        return ratio.log1p_().neg_()

    def _log_n(self, log_probs: LogProbs) -> dict[str, Float[Tensor, "sample vocab"]]:
        """ln n_c by class."""
        classes = {c: _clamp_log_probs(log_p) for c, log_p in log_probs.items() if c != "base"}
        return {
            c: -(-log_p).log() if self.posterior == "reconstructed" else log_p
            for c, log_p in classes.items()
        }

    def _n_released(self, log_probs: LogProbs) -> dict[str, Float[Tensor, "sample vocab"]]:
        """n_c by class in float32, infinite where a class is certain."""
        classes = {c: log_p.float() for c, log_p in log_probs.items() if c != "base"}
        return {
            c: -1 / log_p if self.posterior == "reconstructed" else log_p.exp()
            for c, log_p in classes.items()
        }

    def _combine_released(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        n = self._n_released(log_probs)
        total = sum(
            n_c if state is None or c == "target" else n_c * state[c][:, None]
            for c, n_c in n.items()
        )
        cond = (n["target"] / total).nan_to_num(nan=0.0)
        return (log_probs["base"].float().exp() * cond**self.omega).log()


def _clamp_log_probs(log_probs: Float[Tensor, "sample vocab"]) -> Float[Tensor, "sample vocab"]:
    """ln P, below 0 for a certain token and above -inf for an impossible one."""
    return log_probs.clamp(FLOOR, -torch.finfo(log_probs.dtype).tiny)
