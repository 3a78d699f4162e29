"""Palette: several prompt-conditioned distributions by the law of total probability.

The form is that of LaPA2's authors.

With p_i = softmax of attribute branch i, sigma the logistic function, signed strengths s_i
(negative: move away):

    c_i  = 1 + 1 / sigma(p_i)          c'_i = 1 + 1 / sigma(1 - p_i)
    main = ln P_base + sum_i s_i c_i ln p_i
    comp = sum_i sign(s_i) s' c'_i ln (1 - p_i)
    M1   = 1 + (2 + 1/e) sum_i |s_i|   M2 = (2 + 1/e) sum_i s'
    log w = main / M1 + t comp / M2

s' cancels if it is the same for all attributes. Small constants (1e-10) keep the logarithms finite.
The released code runs Pythia in float16, where those constants are 0 and a certain token gets
weight 0: `numerics="released"`.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp._util.values import Positive
from lapa2_interp.errors import MethodError
from lapa2_interp.methods.base import FLOOR, Branch, LogProbs, Method, State, check_branches
from lapa2_interp.tasks.task import Task

EPSILON = 1e-10
STRENGTHS = {"main": 1.0, "anti": -1.0}
"""Signed strengths by branch; every other branch is auxiliary."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Palette(Method):
    """Palette. The branches are `main`, optionally `anti` (strength -1), and auxiliaries; their
    texts are in the task file.

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
        strengths = {name: STRENGTHS.get(name, self.s_aux) for name in log_probs if name != "base"}
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
