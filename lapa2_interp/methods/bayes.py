"""Bayes' rule: the raw model, weighted by the probability that the text has the attribute.

    w(x) = P_base(x) P(attribute | text, x)^strength

P(attribute | text, x) comes from branches, one for each class, which the rule turns round:

    P(c | text, x) = P_c(x) prior_c / sum_j P_j(x) prior_j

The methods differ in what stands for P_c, in what the prior remembers of the text, and in how much
of the result counts. Palette writes the same as a law of total probability.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp._util.values import Count, NotNegative, Positive
from lapa2_interp.errors import MethodError
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

EPSILON = 1e-10
STRENGTHS = {"main": 1.0, "anti": -1.0}
"""Palette's signed strengths by branch; every other branch is auxiliary."""


class BayesRule(Method):
    """A method with a branch for the raw model, and one for each class."""

    prefixes: str

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        return (Branch("base"), *contrast_branches(task, attribute, self.prefixes))


def classes_of(by_branch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What belongs to the classes: all branches but that of the raw model."""
    return {name: value for name, value in by_branch.items() if name != "base"}


def posteriors(joint: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """log P(c | ...) of log P(c and ...), by class."""
    total = torch.stack(list(joint.values())).logsumexp(dim=0)
    return {c: log_p - total for c, log_p in joint.items()}


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AirDecoding(BayesRule):
    """Air-Decoding (Eq. 4-5, paradigm III).

    The state holds R_j (log R_j in log space) per competing class, [sample]. Per class c and token
    x, from the class's prefixed model:

        n_c(x)      = -1 / ln P_c(x)                  attribute reconstruction ("plain": n_c = P_c,
                                                      the paper's Eq. 5)
        cond_a(x)   = n_a(x) / sum_j R_j n_j(x)       R_a = 1
        R_j        <- R_j n_j(x_t) / n_a(x_t)         after sampling x_t; 1 before the first step
        w(x)        = P_base(x) cond_a(x)^omega

    omega = 140 takes weights far below what float32 holds, so this is computed on logarithms. Of
    two classes a and b, ln cond_a = -ln(1 + R_b n_b / n_a), and n_b / n_a = ln P_a / ln P_b.
    `numerics="released"` multiplies in float32 as the released code does: weights below about 7e-46
    become 0, and a token of which the target class is certain gets weight 0.

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
        classes = {c: _clamp_log_probs(log_p) for c, log_p in classes_of(log_probs).items()}
        return {
            c: -(-log_p).log() if self.posterior == "reconstructed" else log_p
            for c, log_p in classes.items()
        }

    def _n_released(self, log_probs: LogProbs) -> dict[str, Float[Tensor, "sample vocab"]]:
        """n_c by class in float32, infinite where a class is certain."""
        classes = {c: log_p.float() for c, log_p in classes_of(log_probs).items()}
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


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class RsaControl(BayesRule):
    """RSA-Control: a speaker that models a listener who guesses the attribute.

    The state holds log prior_c by class, [sample]; None is a uniform prior. Prefix-conditioned
    branches are the listener's classes. Per class c (the target and its competitors), with the
    listener's belief prior_c after all tokens so far, the prompt's included:

        L_c(x)   = P_c(x) prior_c / sum_j P_j(x) prior_j      the listener, on hearing x
        S(x)     = P_base(x) L_target(x)^rationality          the speaker
        r        = min(1, [mean of P_base over S's top 5 / over P_base's top 5]
                          / [mean of L_target over the same two sets])
        w(x)     = P_base(x) L_target(x)^(rationality + adjustment r)
        prior_c <- L_c(x_t)                                   after sampling x_t; uniform before the
                                                              first token of the text

    r is the raw model's loss of probability relative to the listener's gain: where control costs
    much, there is less of it.

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

    def begin(self, start: BatchStart) -> State:
        if start.log_likelihood is None:
            return None
        return posteriors(classes_of(start.log_likelihood))

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
        return posteriors(
            {
                c: log_p.clamp(min=FLOOR) + (0.0 if state is None else state[c][:, None])
                for c, log_p in classes_of(log_probs).items()
            }
        )


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
class Gedi(BayesRule):
    """GeDi: the raw model weighted by a generative discriminator.

    The state None, without `begin`, means that there is no text before the first token.
    Prefix-conditioned branches stand for the method's class-conditional model. With H_c the
    log-likelihood of all n - 1 tokens so far under class c, the prompt's included:

        g_c(x)  = logit_scale (H_c + log P_c(x)) / n
        d(x)    = g_target(x) - logsumexp_c g_c(x)         log P(target | text and x)
        z(x)    = log P_base(x) + omega d(x)
        filter    in ascending order of d, drop x while softmax(z) adds up to less than filter_p
                  and d(x) < ln target_p
        log w   = z - max z + 10, divided by `repetition` once for every time x was generated before

    The original learns `logit_scale` with its class-conditional model, and decodes greedily
    (`--top-k 1`) by default. The original shifts z again after each division of the largest value,
    so there the order of repeated tokens has a small effect.

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

    def begin(self, start: BatchStart) -> GediState | None:
        if start.log_likelihood is None:
            return None
        return GediState(classes_of(start.log_likelihood), start.n_prompt)

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        log_probs = check_branches(log_probs, "base", "target", others=1)
        classes = {c: log_p.clamp(min=FLOOR) for c, log_p in classes_of(log_probs).items()}
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
            state = GediState(dict.fromkeys(classes_of(log_probs), zero), torch.zeros_like(tokens))
        written = (
            torch.zeros_like(log_probs["base"]) if state.written is None else state.written.clone()
        )
        return GediState(
            {
                c: so_far + log_probs[c].clamp(min=FLOOR).gather(1, tokens[:, None])[:, 0]
                for c, so_far in state.log_likelihood.items()
            },
            state.n + 1,
            written.scatter_add(1, tokens[:, None], torch.ones_like(written[:, :1])),
        )


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Palette(Method):
    """Palette: several prompt-conditioned distributions by the law of total probability.

    The branches are `main`, optionally `anti` (strength -1), and auxiliaries; their texts are in
    the task file. The form is that of LaPA2's authors. With p_i = softmax of attribute branch i,
    sigma the logistic function, signed strengths s_i (negative: move away):

        c_i  = 1 + 1 / sigma(p_i)          c'_i = 1 + 1 / sigma(1 - p_i)
        main = ln P_base + sum_i s_i c_i ln p_i
        comp = sum_i sign(s_i) s' c'_i ln (1 - p_i)
        M1   = 1 + (2 + 1/e) sum_i |s_i|   M2 = (2 + 1/e) sum_i s'
        log w = main / M1 + t comp / M2

    s' cancels if it is the same for all attributes. Small constants (1e-10) keep the logarithms
    finite. The released code runs Pythia in float16, where those constants are 0 and a certain
    token gets weight 0: `numerics="released"`.

    Args:
        s_aux: Strength of auxiliary attributes; that of `main` is 1. Values below 0 move away, in
            both terms.
        t: Weight of the complementary term.
        s_comp: s', > 0.
        auxiliaries: False keeps `main` (and `anti`) alone: the one text of the paper's table
            instead of the code's three.
        numerics: "float32" (or wider, as the log-probabilities come) or "released" (float16).
    """

    name: ClassVar[str] = "palette"
    paper_name: ClassVar[str] = "Palette"
    equation: ClassVar[str] = (
        "log w = (log P_base + sum_i s_i c_i log P_i) / M1 + t (sum_i +-s' c'_i log(1 - P_i)) / M2"
    )
    alpha: ClassVar[float] = 2.0
    text_names: ClassVar[tuple[str, ...] | None] = None
    s_aux: Annotated[float, Field(allow_inf_nan=False)] = 0.5
    t: Annotated[float, Field(allow_inf_nan=False)] = 0.05
    s_comp: Positive = 0.1
    auxiliaries: bool = True
    numerics: Literal["float32", "released"] = "float32"

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        task.prefix(attribute)
        texts = task.texts(self.name, attribute)
        if "main" not in texts:
            raise MethodError(
                f"task {task.name!r} has no palette text for {attribute!r}; a task file gives"
                " it as "
                f'[methods.palette.texts.{attribute}] main = "..."'
            )
        used = {name: text for name, text in texts.items() if self.auxiliaries or name in STRENGTHS}
        return (Branch("base"), *(Branch(name, text, join=" ") for name, text in used.items()))

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        log_probs = check_branches(log_probs, "base")
        if self.numerics == "released":
            log_probs = {name: log_p.half() for name, log_p in log_probs.items()}
        strengths = {name: STRENGTHS.get(name, self.s_aux) for name in classes_of(log_probs)}
        main = (log_probs["base"].softmax(dim=1) + EPSILON).log()
        comp = torch.zeros_like(main)
        for name, s in strengths.items():
            p = log_probs[name].softmax(dim=1).clamp(EPSILON, 1 - EPSILON)
            main = main + s * (1 + 1 / (p.sigmoid() + EPSILON)) * (p + EPSILON).log()
            c = 1 + 1 / ((1 - p).sigmoid() + EPSILON)
            comp = comp + math.copysign(self.s_comp, s) * c * (1 - p + EPSILON).log()
        m1 = 1 + (2 + math.exp(-1)) * sum(abs(s) for s in strengths.values())
        m2 = (2 + math.exp(-1)) * self.s_comp * len(strengths) or 1.0
        return (main / m1 + self.t * comp / m2).nan_to_num(nan=0.0, posinf=-FLOOR, neginf=FLOOR)
