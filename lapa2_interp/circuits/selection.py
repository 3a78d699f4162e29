"""Which heads and tokens to steer: chosen on some prompts, written on a card, used as an
augmentation anywhere.

    chosen = select(model, "sentiment", by="cut", heads=8, prompts=half)
    chosen.augmentation(alpha=0.5)      # a plain Augmentation of these heads and tokens
    chosen.save("selection.json")       # lapa2 generate --selection selection.json

Heads are ordered by one of five scores:

    cut     what is lost when a head cannot see the prefix (`knock_out`)
    slope   what a bias on its scores gains per unit (`attribution`)
    dla     what it writes itself on the logits of the attribute's words (`head_logit_attribution`)
    mass    its attention on the prefix
    random  nothing: a baseline

A head is chosen where the 95 % interval of its score over prompts lies above 0 (by mass and at
random: always). Heads whose interval lies below 0 work against the prefix. They are never chosen,
and `suppressed()` cuts them.

With `pro_aug=METHOD` it is also decided whether this method's raw branch should strengthen the
prompt (`prompt`).

Effects of chosen heads are too large on the prompts that chose them. So what a selection is worth
must be measured on other prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, ValidationError

from lapa2_interp._util.errors import AugmentationError, CircuitError, first_problem, unknown_choice
from lapa2_interp._util.files import read_text, with_checksums, without_checksums, write_text
from lapa2_interp._util.version import __version__
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.circuits.cases import prefix_texts
from lapa2_interp.circuits.direct import head_logit_attribution
from lapa2_interp.circuits.edits import Heads
from lapa2_interp.circuits.gradients import attribution
from lapa2_interp.circuits.knockout import Unit, knock_out, prefix_mass, units_everything
from lapa2_interp.circuits.prompt import PromptSlope, prompt_slope
from lapa2_interp.circuits.question import ContrastLike, ContrastSet
from lapa2_interp.circuits.statistics import share_interval, split_half
from lapa2_interp.methods.base import Method
from lapa2_interp.models.card import Model, model_card
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.stats import FEW, bounds
from lapa2_interp.tasks.task import Task

By = Literal["cut", "slope", "dla", "mass", "random"]
SIGNED = ("cut", "slope", "dla")
"""Scores that tell heads which carry control from those that work against it."""
ENOUGH, AT_LEAST = 0.9, 0.8
"""Tokens are enough if this share of the control is left with them alone, and its lower bound is
at least that."""
MOST_TOKENS = 8
"""Up to this length of the prefix every set of its tokens is tried."""


class Selection(BaseModel):
    """Heads and tokens that were chosen, and how.

    Attributes:
        model, weights: The model they were chosen in, and where its weights come from.
        task: The attributes, the target first, and their prefixes.
        by: The score that ordered the heads.
        metric: By which control was measured; None where nothing was chosen by it.
        heads: Chosen (layer, head) pairs, best first. `suppressors`: those that work against the
            prefix, strongest first.
        scores: Of the chosen heads and then the suppressors: mean, low, high.
        positions: Positions within the prefix; None for all of it.
        prompts: Prompts it was chosen on.
        question: Hash of the texts, the model and the words.
        stability: Spearman correlation of the scores of all heads between halves of the prompts;
            None where it is not defined.
        seed: Of the texts and of random heads.
        prompt: Whether the method that it names should also strengthen the raw branch's prompt
            (Pro-Aug) in these heads; None where that was not asked.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    weights: str
    task: dict[str, str]
    by: By
    metric: str | None
    heads: tuple[tuple[int, int], ...]
    suppressors: tuple[tuple[int, int], ...]
    scores: tuple[tuple[float, float, float], ...]
    positions: tuple[int, ...] | None
    prompts: tuple[str, ...]
    question: str
    stability: float | None
    seed: int
    made: datetime
    version: str = __version__
    prompt: PromptSlope | None = None

    def parameters(self, method: str) -> dict[str, bool]:
        """What was decided about a method: pro_aug, or nothing if another or none was asked about.

        Args:
            method: Its name.
        """
        decided = self.prompt is not None and self.prompt.method == method
        return {"pro_aug": self.prompt.boost} if decided and self.prompt else {}

    def augmentation(self, alpha: float = 0.5, **fields: Any) -> Augmentation:
        """The bias in the chosen heads, on the chosen tokens.

        Args:
            alpha, fields: As `Augmentation` takes them, without heads.

        Raises:
            AugmentationError: Heads are given, or as `Augmentation`.
        """
        if "heads" in fields:
            raise AugmentationError(
                f"a selection gives the heads itself; found heads={fields['heads']!r}: leave them"
                " out, or make an Augmentation of these heads without the selection"
            )
        if self.positions is not None:
            fields = {"span": ("prefix", self.positions)} | fields
        return Augmentation(alpha=alpha, heads=self.heads, **fields)

    def suppressed(self) -> Augmentation | None:
        """What hides the prefix from the heads that work against it; None where there are none."""
        if not self.suppressors:
            return None
        return Augmentation(alpha=1, law="cut", heads=self.suppressors)

    def check(self, model: Model) -> None:
        """Refuse a model that it was not chosen in.

        Raises:
            CircuitError: Other weights.
        """
        card = model_card(model)
        if card.weights != self.weights:
            raise CircuitError(
                f"the selection belongs to {self.model} with {self.weights}; found {card.name} with"
                f" {card.weights}: choose again in this model (lapa2 select)"
            )

    def save(self, file: str | Path) -> None:
        """Write it as JSON."""
        write_text(Path(file), with_checksums(self.model_dump_json()))

    @classmethod
    def load(cls, file: str | Path) -> Selection:
        """What `save` wrote.

        Raises:
            CircuitError: The file cannot be read, or is no selection.
        """
        try:
            fields, _ = without_checksums(read_text(Path(file)))
            return cls.model_validate_json(json.dumps(fields))
        except OSError as error:
            raise CircuitError(f"cannot read {file}: {error.strerror or error}") from error
        except (ValidationError, ValueError) as error:
            reason = first_problem(error) if isinstance(error, ValidationError) else str(error)
            raise CircuitError(
                f"{file} is not a selection ({reason}); `lapa2 select` makes one"
            ) from error


@accepts_model_name
def select(
    model: Model,
    about: ContrastLike,
    *,
    by: By = "cut",
    heads: int = 8,
    positions: Literal["all", "auto"] | Sequence[int] = "all",
    metric: str = "js",
    seed: int = 1,
    file: str | Path | None = None,
    pro_aug: str | Method | None = None,
    **settings: Any,
) -> Selection:
    """Choose heads, and tokens of the prefix, on some prompts.

    Args:
        model: A TransformerBridge; by cut and mass also a `TransformersModel`.
        about: A task by name or value, a case or several, or a `ContrastSet`.
        by: "cut", "slope", "dla", "mass" or "random".
        heads: How many at most; 0 is all heads, which are not ordered then.
        positions: Tokens of the prefix: "all", "auto" (`sufficient_tokens`), or positions within
            it.
        metric: By which control is measured, for cut, slope, positions and Pro-Aug.
        seed: Of the texts and of random heads.
        file: Where finished knock-outs are kept (by cut).
        pro_aug: A method whose Pro-Aug is decided, too, on the same texts and in the chosen heads
            (`prompt_slope`).
        settings: For a task, as `make_examples`.

    Raises:
        CircuitError: Fewer than 8 prompts, no head is left, a file by another score than cut
            or of all heads, Pro-Aug asked about cases of one's own, or as `knock_out` and
            `prompt_slope`.
    """
    if by not in get_args(By):
        raise CircuitError(unknown_choice("score", by, get_args(By)))
    if heads < 0:
        raise CircuitError(f"heads must be at least 1, or 0 for all of them; found {heads}")
    if file is not None and by != "cut":
        raise CircuitError(
            f"a file keeps finished knock-outs, and the score {by} makes none; leave out the file,"
            " or choose by cut"
        )
    if file is not None and not heads:
        raise CircuitError(
            "a file keeps finished knock-outs, and all heads (0) are taken without any; leave out"
            " the file, or give heads=8"
        )
    if isinstance(about, str | Task):
        settings |= {"seed": seed}
    elif pro_aug is not None:
        raise CircuitError(
            "Pro-Aug belongs to a method on a task; give select a task, or leave out pro_aug"
        )
    question = ContrastSet.of(model, about, **settings)
    if question.n_prompts < FEW:
        raise CircuitError(
            f"{question.n_prompts} prompts are too few to choose by; give at least {FEW}, better 32"
        )
    every = units_everything(model)
    chosen: list[int] = list(range(len(every))) if not heads else []
    against: list[int] = []
    scores = np.zeros((question.n_prompts, len(every)))
    if by == "random" and heads:
        rng = np.random.default_rng(seed)
        most = min(heads, len(every))
        chosen = sorted(int(i) for i in rng.choice(len(every), most, replace=False))
    elif heads:
        scores = _scores(model, question, by, metric, file)
        chosen, against = choose(scores, heads, signed=by in SIGNED)
    if not chosen:
        raise CircuitError(
            f"no head has a {by} score whose interval lies above 0 on these"
            f" {question.n_prompts} prompts; give more prompts, or choose by another score"
        )
    low, high = bounds(scores, np.arange(len(scores)))
    kept = _positions(model, question, positions, metric)
    if kept is not None and len(kept) == question.l_pre:
        kept = None
    told = split_half(scores)
    measured = (heads and by in ("cut", "slope")) or positions == "auto" or pro_aug is not None
    card = model_card(model)
    found = tuple(every[i] for i in chosen)
    return Selection(
        model=card.name,
        weights=card.weights,
        task=prefix_texts(model.tokenizer, question.cases[0]),
        by=by,
        metric=metric if measured else None,
        heads=found,
        suppressors=tuple(every[i] for i in against),
        scores=tuple(
            (float(scores[:, i].mean()), float(low[i]), float(high[i])) for i in (*chosen, *against)
        ),
        positions=kept,
        prompts=tuple(dict.fromkeys(question.prompts)),
        question=question.key(model),
        stability=None if np.isnan(told) else told,
        seed=seed,
        made=datetime.now(UTC),
        prompt=None if pro_aug is None else _prompt(model, about, pro_aug, question, found, metric),
    )


def _prompt(
    model: Model,
    about: ContrastLike,
    method: str | Method,
    question: ContrastSet,
    heads: Heads,
    metric: str,
) -> PromptSlope:
    """Whether a method's Pro-Aug helps in these heads, on the texts of a question about a task."""
    assert isinstance(about, str | Task)
    texts: dict[str, list[tuple[int, ...]]] = {}
    for case in question.cases:
        texts.setdefault(case.prompt, []).append(case.text)
    return prompt_slope(
        model,
        about,
        method,
        attribute=question.cases[0].names[0],
        prompts=tuple(texts),
        texts=texts,
        heads=heads,
        metric=metric,
        words=dict(zip(question.cases[0].names, question.words, strict=False)),
    )


def choose(
    scores: Float[np.ndarray, "prompt unit"], most: int, signed: bool = True
) -> tuple[list[int], list[int]]:
    """The units whose score lies above 0, best first, and those whose score lies below 0, strongest
    first; at most so many of each.

    Args:
        signed: Whether the 95 % interval over prompts must lie on that side; else all units are
            chosen from, and none is against.
    """
    order = np.argsort(-scores.mean(0), kind="stable").tolist()
    if not signed:
        return order[:most], []
    low, high = bounds(scores, np.arange(len(scores)))
    return [i for i in order if low[i] > 0][:most], [i for i in order[::-1] if high[i] < 0][:most]


def _scores(
    model: Model, question: ContrastSet, by: By, metric: str, file: str | Path | None
) -> Float[np.ndarray, "prompt head"]:
    """The score of every head in every prompt."""
    if by == "cut":
        found = knock_out(model, question, over="head", metric=metric, also=(), file=file)
        return question.by_prompt(found.effects)
    if by == "slope":
        slopes = attribution(model, question, metric=metric).by_prompt("slope")
        return slopes.reshape(len(slopes), -1)
    if by == "dla":
        return head_logit_attribution(model, question).by_prompt()
    masses = {
        prompt: prefix_mass(model, [case for case in question.cases if case.prompt == prompt])
        for prompt in dict.fromkeys(question.prompts)
    }
    return np.stack([each.ravel() for each in masses.values()])


def _positions(
    model: Model, question: ContrastSet, asked: str | Sequence[int], metric: str
) -> tuple[int, ...] | None:
    if asked == "all":
        return None
    if asked == "auto":
        return sufficient_tokens(model, question, metric)
    if isinstance(asked, str):
        raise CircuitError(
            f"{unknown_choice('choice of positions', asked, ('all', 'auto'))}, or numbers such as"
            " (0, 1)"
        )
    n = question.l_pre
    chosen = tuple(int(each) for each in asked)
    if not chosen or any(not 0 <= each < n for each in chosen):
        raise CircuitError(
            f"positions {chosen} are not within a prefix of {n} tokens; give some of 0-{n - 1},"
            " 'all', or 'auto'"
        )
    return tuple(sorted(set(chosen)))


@accepts_model_name
def sufficient_tokens(
    model: Model, about: ContrastLike, metric: str = "js", **settings: Any
) -> tuple[int, ...]:
    """The smallest set of the prefix's tokens that is enough: with all others cut from every head,
    90 % of the control is left, and at least 80 % by its lower bound.

    Up to 8 tokens every set is tried; in longer prefixes tokens are added in the order of what is
    lost without each.

    Args:
        model, about, settings: As `knock_out`.
        metric: By which control is measured.
    """
    question = ContrastSet.of(model, about, **settings)
    n = question.l_pre
    every = units_everything(model)
    if n <= MOST_TOKENS:
        sizes = [list(combinations(range(n), size)) for size in range(1, n)]
    else:
        alone = knock_out(model, question, over="position", metric=metric, also=())
        order = np.argsort(-question.by_prompt(alone.effects).mean(0), kind="stable").tolist()
        sizes = [[tuple(sorted(order[:size]))] for size in range(1, n)]
    for kept in sizes:
        units = [
            Unit({"name": str(each)}, every, tuple(i for i in range(n) if i not in each))
            for each in kept
        ]
        found = knock_out(model, question, units=units, metric=metric, also=())
        whole = question.by_prompt(found.whole)
        left = whole[:, None] - question.by_prompt(found.effects)
        share, low, _ = share_interval(left, whole)
        enough = (share >= ENOUGH) & (low >= AT_LEAST)
        if enough.any():
            return kept[int(np.argmax(np.where(enough, share, -np.inf)))]
    return tuple(range(n))


__all__ = ["By", "Selection", "select", "sufficient_tokens"]
