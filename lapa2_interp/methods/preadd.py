"""PREADD: move away from (or beyond) a prefixed distribution (Eq. 3, paradigm II).

    log w = log P_base + lam (log P_prefix - log P_base)

The sign of lam: 0 is the raw model, 1 is exactly direct conditioning on the prefix, above 1
exaggerates it, and below 0 moves away from it. Against toxicity the prefix is the *toxic* sentence
and lam = -1, as in the released scripts and in PREADD's own paper. The paper's text says 1.0, which
would condition on the toxic sentence.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from jaxtyping import Float
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp.errors import MethodError
from lapa2_interp.methods.base import FLOOR, Branch, LogProbs, Method, State, check_branches
from lapa2_interp.tasks.task import Task


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Preadd(Method):
    """PREADD.

    Args:
        lam: lambda of Eq. 3.
        pro_aug: Also strengthen the prompt on the base branch (the released --boost_base).
    """

    name: ClassVar[str] = "preadd"
    paper_name: ClassVar[str] = "PREADD"
    equation: ClassVar[str] = "log w = log P_base + lam (log P_prefix - log P_base)"
    alpha: ClassVar[float] = 2.0
    text_names: ClassVar[tuple[str, ...] | None] = ("prefix",)
    when_empty: ClassVar[str] = (
        "lam is so large that the difference overflows; |lam| up to 2.5 is usual"
    )
    lam: Annotated[float, Field(allow_inf_nan=False)] = -1.0
    pro_aug: bool = False

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        own = task.prefix(attribute)
        text = task.texts(self.name, attribute).get("prefix", own)
        if self.lam < 0 and text == own:
            raise MethodError(
                f"preadd with lam={self.lam:g} moves away from its prefix, and {own!r} is"
                f" {attribute!r} itself; give lam > 0 (the method's lam=2), or a text of the"
                f" opposite in the task file: [methods.preadd.texts.{attribute}] prefix"
            )
        return (Branch("base"), Branch("prefix", text))

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        log_probs = check_branches(log_probs, "base", "prefix")
        base, prefix = (log_probs[name].clamp(min=FLOOR) for name in ("base", "prefix"))
        return base + self.lam * (prefix - base)
