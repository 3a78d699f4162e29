"""Model Arithmetic: a formula over the branches' log-probabilities.

    formula = "target - 0.96 * union(opponents, target)"

1. Every name stands for a branch's log P(x) and has weight 1; a number weighs itself. Sums, differences and multiples of
   formulas have the sums, differences and multiples of their values and weights.
2. union(a, b) is the larger value, intersection(a, b) the smaller; the weight is the winner's, token by token.
3. log w = log_softmax(value / weight), or the value alone where some weight is 0.

Names: `base`; `target` and the competing attributes, by their names; `opponents`, the mean of the competitors that the formula
does not name itself; and whatever texts a task file adds ([methods.arithmetic.texts.positive] happy = "..."), a line above the
prompt each.
"""

from __future__ import annotations

import ast
from typing import ClassVar

import torch
from jaxtyping import Float
from pydantic import ConfigDict, field_validator
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp.errors import MethodError, one_of
from lapa2_interp.methods import FLOOR, Branch, LogProbs, Method, State, attribute_prefix, checked
from lapa2_interp.tasks import Task

Weighted = tuple[Tensor, Tensor]
"""A formula's value and weight; plain numbers are tensors of no axes."""
CHOICES = {"union": torch.ge, "intersection": torch.lt}
"""When the first of two formulas is taken."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Arithmetic(Method):
    """Model Arithmetic.

    Args:
        formula: Over base, target, opponents, attributes and texts of the task, with + - * / ( ) numbers, union(a, b) and
            intersection(a, b). "base" alone is the raw model.
        prefixes: "hard", or soft ones: mle, contrastive, or a set's folder.
        pro_aug: Also strengthen the prompt on the base branch.
    """

    name: ClassVar[str] = "arithmetic"
    paper_name: ClassVar[str] = "Model Arithmetic"
    equation: ClassVar[str] = "log w = log_softmax(formula / its weight)"
    alpha: ClassVar[float] = 0.5
    of_paper: ClassVar[bool] = False
    text_names: ClassVar[tuple[str, ...] | None] = None
    when_empty: ClassVar[str] = "the formula's weights cancel or overflow; see what its weights add up to"
    formula: str = "target - 0.96 * union(opponents, target)"
    prefixes: str = "hard"
    pro_aug: bool = False

    @field_validator("formula")
    @classmethod
    def _parses(cls, formula: str) -> str:
        try:
            _tree(formula)
        except MethodError as error:
            raise ValueError(str(error)) from None
        return formula

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        task.prefix(attribute)
        names = _names(self.formula)
        others = [name for name in task.attributes if name != attribute]
        known: dict[str, tuple[Branch, ...]] = {
            "base": (Branch("base"),),
            "target": (Branch("target", attribute_prefix(task, attribute, self.prefixes)),),
            **{other: (Branch(other, attribute_prefix(task, other, self.prefixes)),) for other in others},
            **{name: (Branch(name, text, "\n"),) for name, text in task.texts(self.name, attribute).items()},
        }
        known["opponents"] = tuple(branch for other in others if other not in names for branch in known[other])
        found: dict[str, Branch] = {}
        for name in names:
            if name not in known:
                raise MethodError(f"arithmetic: formula: {one_of('name', name, known)}")
            if not known[name]:
                raise MethodError(
                    f"arithmetic: {attribute!r} has no opponents on task {task.name!r} that the formula {self.formula!r} "
                    "does not name itself; give --set formula=..., such as 'base + 1.5 * (target - base)'"
                )
            found |= {branch.name: branch for branch in known[name]}
        return tuple(found.values())

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        names = _names(self.formula)
        given = {name: each.clamp(min=FLOOR) for name, each in checked(log_probs).items()}
        opponents = [each for name, each in given.items() if name not in ("base", "target", *names)]
        if opponents:
            given["opponents"] = torch.stack(opponents).mean(dim=0)
        missing = [name for name in names if name not in given]
        if missing:
            raise MethodError(
                f"log_probs needs the branches {', '.join(names)}; found {', '.join(log_probs) or 'none'}"
            )
        value, weight = _evaluate(_tree(self.formula).body, given)
        if (weight == 0).any():
            return value
        return (value / weight).log_softmax(dim=1)


def _tree(formula: str) -> ast.Expression:
    """The formula, parsed and checked to be one; nothing of it is ever executed.

    Raises:
        MethodError: It is not a formula over names, or is a number alone.
    """
    try:
        tree = ast.parse(formula.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise MethodError(f"formula {formula!r}: {getattr(error, 'msg', error)}") from None
    if _check(tree.body, formula):
        raise MethodError(f"formula {formula!r} names no branch; `lapa2 methods` lists them")
    return tree


def _check(node: ast.expr, formula: str) -> bool:
    """Whether a part of a formula is a plain number; raises where it is no formula at all."""
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):  # bool is an int too
            return True
        case ast.Name():
            return False
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _check(operand, formula)
        case ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=right):
            return _check(left, formula) & _check(right, formula)
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            numbers = _check(left, formula), _check(right, formula)
            if any(numbers):
                return all(numbers)
            raise MethodError(f"formula {formula!r} multiplies two branches; one side of * must be a number")
        case ast.BinOp(op=ast.Div(), left=left, right=right):
            number = _check(left, formula)
            if _check(right, formula):
                return number
            raise MethodError(f"formula {formula!r} divides by a branch; the right side of / must be a number")
        case ast.Call(func=ast.Name(id=name), args=[_, _, *_] as parts, keywords=[]) if name in CHOICES:
            return min([_check(part, formula) for part in parts])  # every part is checked
    raise MethodError(
        f"formula {formula!r}: {ast.unparse(node)!r} is not a branch, a number, + - * / ( ), union(a, b) or intersection(a, b)"
    )


def _names(formula: str) -> list[str]:
    """The branches a formula names, in order."""
    found = [node for node in ast.walk(_tree(formula)) if isinstance(node, ast.Name) and node.id not in CHOICES]
    return list(dict.fromkeys(node.id for node in sorted(found, key=lambda node: (node.lineno, node.col_offset))))


def _evaluate(node: ast.expr, given: LogProbs) -> Weighted:
    """Value and weight of a checked formula."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return torch.tensor(float(number)), torch.tensor(float(number))
        case ast.Name(id=name):
            return given[name], torch.tensor(1.0)
        case ast.UnaryOp(op=op, operand=operand):
            sign = -1 if isinstance(op, ast.USub) else 1
            value, weight = _evaluate(operand, given)
            return sign * value, sign * weight
        case ast.BinOp(op=op, left=left, right=right):
            (a, of_a), (b, of_b) = _evaluate(left, given), _evaluate(right, given)
            if isinstance(op, ast.Add):
                return a + b, of_a + of_b
            if isinstance(op, ast.Sub):
                return a - b, of_a - of_b
            return (a * b, of_a * of_b) if isinstance(op, ast.Mult) else (a / b, of_a / of_b)
        case ast.Call(func=ast.Name(id=name), args=[first, *rest]):
            value, weight = _evaluate(first, given)
            for part in rest:
                other, of_other = _evaluate(part, given)
                wins = CHOICES[name](value, other)
                value, weight = torch.where(wins, value, other), torch.where(wins, weight, of_other)
            return value, weight
    raise AssertionError(node)
