"""Decoding methods: one file each, pure arithmetic on the branches' log-probabilities.

A method names its branches and combines their next-token distributions. It never sees a model, so a made-up vocabulary can be
pushed through it:

    method = methods.get("preadd", lam=-1.0)
    log_probs = {"base": ..., "prefix": ...}                  # by branch, [sample, vocab], any float dtype
    log_weights = method.combine(log_probs, state=None)       # [sample, vocab], need not be normalised
    state = method.advance(None, log_probs, tokens)           # tokens [sample]; what the next step's combine is given

The sampler then keeps the k largest weights and draws: combine -> top-k -> sample, at temperature 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapa2_interp.errors import MethodError, one_of
from lapa2_interp.tasks import Task

State = Any
LogProbs = Mapping[str, Float[Tensor, "sample vocab"]]
FLOOR = -1e4
"""Log-probability given to impossible tokens where a method subtracts branches, so that no infinities meet."""


@dataclass(frozen=True)
class Soft:
    """A soft prefix by name: which of a model's sets for the task, and whose prefix in it."""

    set: str
    attribute: str

    def __str__(self) -> str:
        return f"<soft {self.set} {self.attribute}>"


@dataclass(frozen=True)
class Branch:
    """One conditional model call.

    Attributes:
        name: "base" for the raw model; prefix branches carry names of their own.
        prefix: The text in front of the prompt, or a soft prefix; None for the raw model.
        join: What stands between text and prompt; it counts as prompt.
    """

    name: str
    prefix: str | Soft | None = None
    join: str = ""


def attribute_prefix(task: Task, attribute: str, prefixes: str, method: str = "") -> str | Soft:
    """An attribute's prefix: under "hard" the method's own text or the task's, else the one in a soft set.

    Args:
        prefixes: "hard", a set that ships with the package (mle, contrastive), or the folder of one.
    """
    text = task.prefix(attribute)
    return task.texts(method, attribute).get("prefix", text) if prefixes == "hard" else Soft(prefixes, attribute)


class Method(ABC):
    """What a decoding method states.

    Attributes:
        name: As on the command line. `paper_name`: as in the paper's tables. `equation`: how it combines its branches.
        alpha: The paper's strength of LaPA2 for it (section 5.1).
        pro_aug: Whether LaPA2 also acts on the prompt of the base branch (Contextual Anchor Reinforcement, Eq. 9).
        text_names: The texts it reads from a task file; None where it takes any.
        when_empty: Why no token may have positive weight, and what to change.
    """

    name: ClassVar[str]
    paper_name: ClassVar[str]
    equation: ClassVar[str]
    alpha: ClassVar[float]
    pro_aug: bool = False
    text_names: ClassVar[tuple[str, ...] | None] = ()
    when_empty: ClassVar[str] = "a branch's own distribution is empty or not a number"

    @abstractmethod
    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        """The model calls that steering to an attribute needs.

        Raises:
            TaskError: The task lacks the attribute.
            MethodError: The task lacks a text this method needs.
        """

    @abstractmethod
    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        """Log-weights of the next token from the branches' log-probabilities; need not be normalised."""

    def advance(self, state: State, log_probs: LogProbs, tokens: Int[Tensor, " sample"]) -> State:
        """The state after these tokens were sampled; the first step's state is None, and so is a stateless method's."""
        return None


def checked(log_probs: LogProbs, *names: str, others: int = 0) -> dict[str, Float[Tensor, "sample vocab"]]:
    """The branches of a step in at least float32.

    Args:
        names: Branches that must be there.
        others: How many more must be there at least.

    Raises:
        MethodError: A branch is missing, or the branches are not [sample, vocab] of one shape.
    """
    missing = [name for name in names if name not in log_probs]
    if missing or len(log_probs) < len(names) + others:
        wanted = ", ".join(names) + (f" and {others} more" if others else "")
        raise MethodError(f"log_probs needs the branches {wanted}; found {', '.join(log_probs) or 'none'}")
    shapes = {name: tuple(each.shape) for name, each in log_probs.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 2 for shape in shapes.values()):
        raise MethodError(f"every branch must be [sample, vocab] of one shape; found {shapes}")
    return {name: each.to(torch.promote_types(each.dtype, torch.float32)) for name, each in log_probs.items()}


def registry() -> dict[str, type[Method]]:
    """Method classes by name, in the paper's order."""
    from lapa2_interp.methods.air_decoding import AirDecoding
    from lapa2_interp.methods.con_prefix import ConPrefix
    from lapa2_interp.methods.palette import Palette
    from lapa2_interp.methods.preadd import Preadd
    from lapa2_interp.methods.prefix import NegPrompt, NoControl, PrefixConditioning

    known = (NoControl, PrefixConditioning, ConPrefix, AirDecoding, NegPrompt, Preadd, Palette)
    return {method.name: method for method in known}


def get(name: str, **parameters: Any) -> Method:
    """A method by name; `lapa2 methods` lists them with their parameters.

    Raises:
        MethodError: Unknown name, a parameter the method does not have, or a value out of range.
    """
    from pydantic import TypeAdapter, ValidationError

    from lapa2_interp.errors import first_problem

    known = registry()
    if name not in known:
        raise MethodError(one_of("method", name, known))
    try:
        return TypeAdapter(known[name]).validate_python(parameters)
    except ValidationError as error:
        names = [field.name for field in fields(known[name])]  # type: ignore[arg-type]
        raise MethodError(f"method {name!r}: {first_problem(error, fields=names)}") from None


def for_task(name: str, task: Task, **parameters: Any) -> Method:
    """A method with the parameters the task's file gives it, such as Air-Decoding's omega, overridden by the caller's.

    Raises:
        MethodError: As `get`.
    """
    return get(name, **(task.parameters(name) | parameters))
