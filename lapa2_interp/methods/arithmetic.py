"""Model Arithmetic: a formula over the branches' log-probabilities.

    formula = "target - 0.96 * union(opponents, target)"

1. Every name is a branch's log P(x) with weight 1; the weight of a number is the number itself.
   Sums, differences and multiples of formulas have the sums, differences and multiples of their
   values and weights.
2. union(a, b) is the larger value, intersection(a, b) the smaller; the weight is that of the value
   taken, token by token.
3. log w = log_softmax(value / weight), or the value alone where some weight is 0.

Names: `base`; `target`; the competing attributes, by their names; `opponents`, the mean of the
competitors that the formula does not name itself; and the texts of the task file
([methods.arithmetic.texts.positive] happy = "..."), each on a line above the prompt.
"""

from __future__ import annotations

import ast
from typing import ClassVar

import torch
from jaxtyping import Float
from pydantic import ConfigDict, field_validator
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp.errors import MethodError, parameter, unknown_choice
from lapa2_interp.methods.base import (
    FLOOR,
    Branch,
    LogProbs,
    Method,
    State,
    attribute_prefix,
    check_branches,
)
from lapa2_interp.tasks.task import Task

WeightedValue = tuple[Tensor, Tensor, float]
"""A formula's value, its weight, and the size of the weight without cancellation; plain numbers are
tensors without axes."""
OPERATORS = {"union": torch.ge, "intersection": torch.lt}
"""Comparisons under which the first of two formulas is taken."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Arithmetic(Method):
    """Model Arithmetic.

    Args:
        formula: A formula of base, target, opponents, attributes and texts of the task, with + - *
            / ( ) numbers, union(a, b) and intersection(a, b). "base" alone is the raw model (with
            --alpha 0: there is no prefix to strengthen).
        prefixes: "hard", or soft ones: mle, contrastive, or a set's folder.
        pro_aug: Also strengthen the prompt on the base branch.
    """

    name: ClassVar[str] = "arithmetic"
    paper_name: ClassVar[str] = "Model Arithmetic"
    equation: ClassVar[str] = "log w = log_softmax(formula / its weight)"
    alpha: ClassVar[float] = 0.5
    in_paper: ClassVar[bool] = False
    text_names: ClassVar[tuple[str, ...] | None] = None
    when_empty: ClassVar[str] = (
        "the formula's weights cancel or overflow; see what its weights add up to"
    )
    formula: str = "target - 0.96 * union(opponents, target)"
    prefixes: str = "hard"
    pro_aug: bool = False

    @field_validator("formula")
    @classmethod
    def _parses(cls, formula: str) -> str:
        try:
            _parse_formula(formula)
        except MethodError as error:
            raise ValueError(str(error)) from None
        return formula

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        # The branches that a formula may name.
        task.prefix(attribute)
        names = _branch_names(_parse_formula(self.formula))
        others = [name for name in task.attributes if name != attribute]
        texts = task.texts(self.name, attribute)
        taken = [
            name for name in texts if name in ("base", "target", "opponents", *others, *OPERATORS)
        ]
        if taken:
            raise MethodError(
                f"arithmetic: the text {taken[0]!r} of task {task.name!r} has a branch's name; give"
                " it another"
            )
        known: dict[str, tuple[Branch, ...]] = {
            "base": (Branch("base"),),
            "target": (Branch("target", attribute_prefix(task, attribute, self.prefixes)),),
            **{
                opponent: (Branch(opponent, attribute_prefix(task, opponent, self.prefixes)),)
                for opponent in others
            },
            **{name: (Branch(name, text, "\n"),) for name, text in texts.items()},
        }
        known["opponents"] = tuple(
            branch for opponent in others if opponent not in names for branch in known[opponent]
        )
        # The branches that this formula names.
        chosen: dict[str, Branch] = {}
        for name in names:
            if name not in known:
                # A name such as very-calm would read as a difference.
                usable = [name for name in known if name.isidentifier()]
                raise MethodError(f"arithmetic: formula: {unknown_choice('name', name, usable)}")
            if not known[name]:
                raise MethodError(
                    f"arithmetic: {attribute!r} has no opponents on task {task.name!r} that the"
                    f" formula {self.formula!r} does not name itself; give"
                    f" {parameter('formula', '...', 'set')}, such"
                    " as 'base + 1.5 * (target - base)'"
                )
            chosen |= {branch.name: branch for branch in known[name]}
        return tuple(chosen.values())

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        formula = _parse_formula(self.formula)
        names = _branch_names(formula)
        # The branches, and the mean of the opponents.
        by_branch = {
            name: log_p.clamp(min=FLOOR) for name, log_p in check_branches(log_probs).items()
        }
        opponents = [
            log_p for name, log_p in by_branch.items() if name not in ("base", "target", *names)
        ]
        if opponents:
            by_branch["opponents"] = torch.stack(opponents).mean(dim=0)
        missing = [name for name in names if name not in by_branch]
        if missing:
            raise MethodError(
                f"log_probs needs the branches {', '.join(names)}; found"
                f" {', '.join(log_probs) or 'none'}"
            )
        # The value, divided by the weight where the weight is not 0.
        value, weight, size = _evaluate(formula.body, by_branch)
        nothing = weight.abs() <= 1e-9 * size  # 0.6 + 0.3 - 0.9 is not quite 0
        unweighted = nothing.broadcast_to(value.shape).any(dim=1, keepdim=True)
        return torch.where(unweighted, value, (value / weight).log_softmax(dim=1))


def _parse_formula(formula: str) -> ast.Expression:
    """Parse a formula and check it; no part of it is ever executed.

    Raises:
        MethodError: It is not a formula of names, or is only a number.
    """
    try:
        tree = ast.parse(formula.strip(), mode="eval")
        is_number = _check_node(tree.body, formula)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MethodError(
            f"formula {formula[:60]!r}: {getattr(error, 'msg', error) or type(error).__name__}"
        ) from None
    if is_number:
        raise MethodError(f"formula {formula!r} names no branch; `lapa2 methods` lists them")
    value, weight, size = _evaluate_at_random(tree)
    if (value.abs() <= 1e-9 * size).all():
        raise MethodError(
            f"formula {formula!r} cancels to nothing, and every token would weigh the same"
        )
    if (total := float(weight.max())) < -1e-9 * size:
        raise MethodError(
            f"the weights of formula {formula!r} add up to {total:.3g}, and to divide by that turns"
            " the steering round; add base, or lower what is subtracted"
        )
    return tree


def _evaluate_at_random(tree: ast.Expression) -> WeightedValue:
    """The value of a formula at random branches."""
    names = sorted(_branch_names(tree))
    made = torch.rand(
        len(names), 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).log()
    return _evaluate(tree.body, dict(zip(names, made, strict=True)))


def _check_node(node: ast.expr, formula: str) -> bool:
    """True if a part of a formula is a plain number.

    Raises:
        MethodError: It cannot be part of a formula.
    """
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            if abs(number) < 1e6:
                return True
            raise MethodError(f"formula {formula[:60]!r}: a number must be below 1,000,000")
        case ast.Name(id=name) if name not in OPERATORS:
            return False
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _check_node(operand, formula)
        case ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=right):
            return _check_node(left, formula) & _check_node(right, formula)
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            numbers = _check_node(left, formula), _check_node(right, formula)
            if any(numbers):
                return all(numbers)
            raise MethodError(
                f"formula {formula!r} multiplies two branches; one side of * must be a number"
            )
        case ast.BinOp(op=ast.Div(), left=left, right=right):
            number = _check_node(left, formula)
            if _check_node(right, formula):
                if _evaluate(right, {})[0] == 0:
                    raise MethodError(f"formula {formula!r} divides by 0")
                return number
            raise MethodError(
                f"formula {formula!r} divides by a branch; the right side of / must be a number"
            )
        case ast.Call(func=ast.Name(id=name), args=[_, _, *_] as parts, keywords=[]) if (
            name in OPERATORS
        ):
            return min([_check_node(part, formula) for part in parts])  # every part is checked
    raise MethodError(
        f"formula {formula!r}: {ast.unparse(node)!r} is not a branch, a number, + - * / ( ),"
        " union(a, b) or intersection(a, b)"
    )


def _branch_names(formula: ast.Expression) -> list[str]:
    """The branches a formula names, in order."""
    names = [
        (node.lineno, node.col_offset, node.id)
        for node in ast.walk(formula)
        if isinstance(node, ast.Name) and node.id not in OPERATORS
    ]
    return list(dict.fromkeys(name for *_, name in sorted(names)))


def _evaluate(node: ast.expr, by_branch: LogProbs) -> WeightedValue:
    """Value and weight of a checked formula."""
    match node:
        case ast.Constant(value=int() | float() as number):
            # A float64 tensor without axes: a float32 branch stays float32.
            exact = torch.tensor(number, dtype=torch.float64)
            return exact, exact, float(abs(number))
        case ast.Name(id=name):
            return by_branch[name], torch.tensor(1.0, dtype=torch.float64), 1.0
        case ast.UnaryOp(op=op, operand=operand):
            sign = -1 if isinstance(op, ast.USub) else 1
            value, weight, size = _evaluate(operand, by_branch)
            return sign * value, sign * weight, size
        case ast.BinOp(op=op, left=left, right=right):
            a, weight_a, size_a = _evaluate(left, by_branch)
            b, weight_b, size_b = _evaluate(right, by_branch)
            if isinstance(op, ast.Add):
                return a + b, weight_a + weight_b, size_a + size_b
            if isinstance(op, ast.Sub):
                return a - b, weight_a - weight_b, size_a + size_b
            if isinstance(op, ast.Mult):
                return a * b, weight_a * weight_b, size_a * size_b
            return a / b, weight_a / weight_b, size_a / size_b
        case ast.Call(func=ast.Name(id=name), args=[first, *rest]):
            value, weight, size = _evaluate(first, by_branch)
            for part in rest:
                second, weight_other, size_other = _evaluate(part, by_branch)
                wins = OPERATORS[name](value, second)
                value = torch.where(wins, value, second)
                weight = torch.where(wins, weight, weight_other)
                size = max(size, size_other)
            return value, weight, size
    raise AssertionError(node)
