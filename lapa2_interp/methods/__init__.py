"""Decoding methods: one file each, pure arithmetic on the branches' log-probabilities.

A method names its branches and combines their next-token distributions. It never sees a model:

    method = methods.get("prefix")
    log_weights = method.combine({"prefix": log_probs}, state=None)   # [sample, vocab], need not be normalised

`advance` is called with the sampled tokens and returns the state of the next step (None for methods without one).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from lapa2_interp.errors import MethodError, one_of

State = Any
LogProbs = Mapping[str, Float[Tensor, "sample vocab"]]


@dataclass(frozen=True)
class Branch:
    """One conditional model call.

    Attributes:
        name: "base" for the raw model; prefix branches carry their own names.
        attribute: The attribute whose prefix stands in front of the prompt; None for the raw model.
    """

    name: str
    attribute: str | None = None


class Method(ABC):
    """What a decoding method states.

    Attributes:
        name: As on the command line. `paper_name`: as in the paper's tables. `equation`: how it combines its branches.
        alpha: The paper's strength of LaPA2 for it (section 5.1).
    """

    name: ClassVar[str]
    paper_name: ClassVar[str]
    equation: ClassVar[str]
    alpha: ClassVar[float]

    @abstractmethod
    def branches(self, attribute: str) -> tuple[Branch, ...]:
        """The model calls that steering to an attribute needs."""

    @abstractmethod
    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        """Log-weights of the next token from the branches' log-probabilities; need not be normalised."""

    def advance(self, state: State, log_probs: LogProbs, tokens: Int[Tensor, " sample"]) -> State:
        """The state after these tokens were sampled; the first step's state is None, and so is a stateless method's."""
        return None


def registry() -> dict[str, type[Method]]:
    """Method classes by name."""
    from lapa2_interp.methods.none import NoControl
    from lapa2_interp.methods.prefix import NegPrompt, PrefixConditioning

    return {method.name: method for method in (NoControl, PrefixConditioning, NegPrompt)}


def get(name: str, **parameters: Any) -> Method:
    """A method by name.

    Raises:
        MethodError: Unknown name, or a parameter the method does not have.
    """
    known = registry()
    if name not in known:
        raise MethodError(one_of("method", name, known))
    try:
        return known[name](**parameters)
    except TypeError as error:
        raise MethodError(f"method {name!r}: {error}") from None
