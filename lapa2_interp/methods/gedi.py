"""GeDi: the raw model weighted by a generative discriminator.

Prefix-conditioned branches stand for the method's class-conditional model.

With H_c the log-likelihood of all n - 1 tokens so far under class c, the prompt's included:

    g_c(x)  = logit_scale (H_c + log P_c(x)) / n
    d(x)    = g_target(x) - logsumexp_c g_c(x)                log P(target | text and x)
    z(x)    = log P_base(x) + omega d(x)
    filter    in ascending order of d, drop x while softmax(z) adds up to less than filter_p and d(x) < ln target_p
    log w   = z - max z + 10, divided by `repetition` once for every time x was generated before

The original learns `logit_scale` with its class-conditional model, and decodes greedily (`--top-k
1`) by default. The original shifts z again after each division of the largest value, so there the
order of repeated tokens has a small effect.
"""  # noqa: E501

from __future__ import annotations

import math
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, Int
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp._util.values import NotNegative, Positive
from lapa2_interp.methods.base import (
    FLOOR,
    BatchStart,
    Branch,
    LogLikelihoods,
    LogProbs,
    Method,
    State,
    check_branches,
    contrast_branches,
)
from lapa2_interp.tasks.task import Task


@plain_dataclass(frozen=True)
class GediState:
    """The likelihoods and tokens so far.

    Attributes:
        log_likelihood: H_c by class, [sample].
        n: Number of tokens in it, [sample].
        written: Number of times each token was generated; None before the first.
    """

    log_likelihood: LogLikelihoods
    n: Int[Tensor, " sample"]
    written: Float[Tensor, "sample vocab"] | None = None


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Gedi(Method):
    """GeDi. The state None, without `begin`, means that there is no text before the first token.

    Args:
        omega: Weight of the discriminator, >= 0; the original's 30. 0 is the raw model (with
            filter_p 0 and repetition 1).
        filter_p: Share of the weighted probability that may be dropped, [0, 1].
        target_p: A token that makes the target at least this likely is never dropped, (0, 1].
        repetition: Divisor of the shifted logit of tokens generated before, > 0; 1 turns it off.
        logit_scale: Sharpness of the discriminator, > 0; the original learns it.
        prefixes: "hard", or soft ones: mle, contrastive, or a set's folder.
        pro_aug: Also strengthen the prompt on the base branch.
    """

    name: ClassVar[str] = "gedi"
    paper_name: ClassVar[str] = "GeDi"
    equation: ClassVar[str] = (
        "log w = log P_base + omega log P(target | text, x), filtered, repetitions divided"
    )
    alpha: ClassVar[float] = 0.5
    in_paper: ClassVar[bool] = False
    reads_prompt: ClassVar[bool] = True
    when_empty: ClassVar[str] = "omega is so large that the weights overflow; the original's is 30"
    omega: NotNegative = 30.0
    filter_p: Annotated[float, Field(ge=0, le=1)] = 0.8
    target_p: Annotated[float, Field(gt=0, le=1)] = 0.8
    repetition: Positive = 1.2
    logit_scale: Positive = 1.0
    prefixes: str = "hard"
    pro_aug: bool = False

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        return (Branch("base"), *contrast_branches(task, attribute, self.prefixes))

    def begin(self, start: BatchStart) -> GediState | None:
        if start.log_likelihood is None:
            return None
        classes = {
            name: log_likelihood
            for name, log_likelihood in start.log_likelihood.items()
            if name != "base"
        }
        return GediState(classes, start.n_prompt)

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        log_probs = check_branches(log_probs, "base", "target", others=1)
        classes = {
            name: log_p.clamp(min=FLOOR) for name, log_p in log_probs.items() if name != "base"
        }
        if state is None:
            g = classes
        else:
            g = {
                c: (state.log_likelihood[c][:, None] + log_p) / (state.n[:, None] + 1)
                for c, log_p in classes.items()
            }
        # The discriminator, the weighted log-probabilities, the filter, and repetitions.
        g = {c: self.logit_scale * mean_log_p for c, mean_log_p in g.items()}
        d = g["target"] - torch.stack(list(g.values())).logsumexp(dim=0)
        z = log_probs["base"].clamp(min=FLOOR) + self.omega * d
        ascending, ids = d.sort(dim=1)
        mass = z.softmax(dim=1).gather(1, ids).cumsum(dim=1)
        dropped = (mass < self.filter_p) & (ascending < math.log(self.target_p))
        dropped[:, -1] = False  # mass may end just below filter_p = 1
        z = z.scatter_add(1, ids, FLOOR * dropped.to(z.dtype))
        z = z - z.max(dim=1, keepdim=True).values + 10
        if state is not None and state.written is not None:
            z = z / self.repetition**state.written
        return z

    def advance(
        self, state: State, log_probs: LogProbs, tokens: Int[Tensor, " sample"]
    ) -> GediState:
        log_probs = check_branches(log_probs, "base", "target", others=1)
        if state is None:
            zero = torch.zeros_like(log_probs["target"][:, 0])
            state = GediState(
                {name: zero for name in log_probs if name != "base"}, torch.zeros_like(tokens)
            )
        written = (
            torch.zeros_like(log_probs["base"]) if state.written is None else state.written.clone()
        )
        return GediState(
            {
                c: before + log_probs[c].clamp(min=FLOOR).gather(1, tokens[:, None])[:, 0]
                for c, before in state.log_likelihood.items()
            },
            state.n + 1,
            written.scatter_add(1, tokens[:, None], torch.ones_like(written[:, :1])),
        )
