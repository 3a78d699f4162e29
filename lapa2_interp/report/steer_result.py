"""Settings and result of `steer`: parts of the prompts, arms and their cells, and what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lapa2_interp._util.parsing import parse_object, read_text
from lapa2_interp._util.same_inputs import check_same_inputs
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.head_card import HeadCard
from lapa2_interp.circuits.selection import Selection, random_heads
from lapa2_interp.commands import command
from lapa2_interp.errors import RunError, TaskError, parameter, pluralize
from lapa2_interp.files import write_json
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.resolve import cells_of
from lapa2_interp.methods.registry import get_for_task
from lapa2_interp.models.machine import AUTO_DTYPE, resolve_dtype
from lapa2_interp.models.sizes import model_size
from lapa2_interp.scoring.linear import LINEAR_ENDING
from lapa2_interp.scoring.scorer import CLASSIFIERS
from lapa2_interp.scoring.task_scorer import SHIPPED_WEIGHTS
from lapa2_interp.stats import FEW
from lapa2_interp.table_formats import format_interval, format_number
from lapa2_interp.tasks.segmentation import text_key
from lapa2_interp.tasks.task import Prompts, Task

STRENGTHS = (0.5, 1.0, 2.0, 4.0)
"""The alphas that are tried in each place of the bias."""
SHARE = 24 / 270
"""The share of heads that are chosen by default."""
MOST_CHOOSING = 64
"""Prompts that choose heads, and that tune strengths, at most; a quarter of all at most."""
RANDOM_SETS = 5
CHOSEN, ALL, RANDOM, LEARNED, NO_BIAS, PREFIX = (
    "chosen heads",
    "all heads",
    "random heads",
    "learned strengths",
    "no bias",
    "prefix alone",
)
TUNED = (CHOSEN, ALL, RANDOM)
"""Places of the bias; learned strengths may be a fourth one."""
ORDER = (PREFIX, NO_BIAS, ALL, RANDOM, CHOSEN, LEARNED)
"""All arms, as they are shown."""
ENDS = ("mean", "low", "high")
SETTINGS = "steer.json"
"""Name of the settings' file in a result's folder."""
CARD = "card.json"
"""Name of the card's."""
LEARNED_FOLDER = "learned"
"""The folder of learned strengths, with a card of its own."""
Cards = Mapping[str, HeadCard]
"""Cards by the arm that they steer."""


@dataclass(frozen=True)
class SteerPlan:
    """Everything that decides a result.

    Attributes:
        model, dtype, model_class: As `load_model`.
        task: The task.
        prompts: All prompts; each is used in one part only.
        method, parameters: The decoding method.
        budget: The perplexity of continuations that the bias may cost, as a multiple of that of
            the method without bias; above 1.
        heads: The number of heads to choose.
        learn: If one strength a head is learned, too.
        classifiers: Classifiers of the task's attributes (`accuracy=` of `lapa2 score`). The first
            one decides.
        perplexity: The model that measures perplexity.
        length, samples, seed: Of the texts.
    """

    model: str
    dtype: str
    model_class: str
    task: Task
    prompts: tuple[str, ...]
    method: str
    parameters: Mapping[str, Any]
    budget: float
    heads: int
    learn: bool
    classifiers: tuple[str, ...]
    perplexity: str
    length: int
    samples: int
    seed: int

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that are judged; under the method prefix, no bias is the prefix alone."""
        without = {PREFIX: self.method == "prefix", LEARNED: not self.learn}
        return tuple(arm for arm in ORDER if not without.get(arm))

    @property
    def tuned(self) -> tuple[str, ...]:
        """The arms whose strength is tuned."""
        return (*TUNED, LEARNED) if self.learn else TUNED

    @property
    def metrics(self) -> tuple[str, ...]:
        """What is measured of the judged texts; the first decides."""
        names = [f"{name} ({by})" for name in ("masked", "accuracy") for by in self.classifiers]
        return (*names, "echo", "repetition", "perplexity")

    def parts(self) -> dict[str, tuple[str, ...]]:
        """The prompts that choose, tune and judge, in random order."""
        order = np.random.default_rng(self.seed).permutation(len(self.prompts))
        mixed = [self.prompts[i] for i in order]
        n = min(MOST_CHOOSING, len(mixed) // 4)
        return {
            "choose": tuple(mixed[:n]),
            "tune": tuple(mixed[n : 2 * n]),
            "judge": tuple(mixed[2 * n :]),
        }

    def cells(
        self, prompts: Sequence[str], arm: str, augmentation: Augmentation | None = None
    ) -> list[Cell]:
        """The cells of one arm, one for each attribute."""
        alone = arm == PREFIX
        shared = {"length": self.length, "samples": self.samples, "seed": self.seed}
        model = {"model": self.model, "dtype": self.dtype, "model_class": self.model_class}
        method = {"name": "prefix", "prefixes": "hard"} if alone else self.method
        return cells_of(
            {
                **model,
                **shared,
                "task": self.task,
                "prompts": Prompts(texts=tuple(prompts)),
                "method": method,
                "parameters": None if alone else dict(self.parameters),
                "augmentation": "none" if augmentation is None else augmentation,
                "label": "" if augmentation is None else arm,
                "trace": "none",
            }
        )

    def cells_with_bias(
        self, prompts: Sequence[str], arm: str, alpha: float, cards: Cards
    ) -> list[Cell]:
        """The cells of an arm with a bias at one strength, which multiplies learned ones."""
        if arm == ALL:
            return self.cells(prompts, arm, Augmentation(alpha=alpha))
        if arm in cards:
            return self.cells(prompts, arm, cards[arm].augmentation(alpha=alpha))
        size = model_size(self.model)
        every = tuple((i, j) for i in range(size.n_layers) for j in range(size.n_heads))
        cells = []
        for i in range(RANDOM_SETS):
            heads = random_heads(cards[CHOSEN].heads, every, self.seed + i)
            bias = Augmentation(alpha=alpha, heads=heads)
            cells += self.cells(prompts[i::RANDOM_SETS], arm, bias)
        return cells


@dataclass(frozen=True)
class Steered:
    """A result of `steer`.

    Attributes:
        folder: Its files.
        plan: Everything that decided it.
        selection: The card: heads, alpha (None where the budget was not reached), and gain.
        tuning: A row per place and strength: place, alpha, ratio of perplexity with low and high;
            and for each place the interpolated strength, with `tuned` True.
        table: A row per arm, attribute (and "all") and metric: mean, low, high, n, prompts.
        tests: A row for each of the tests, which are three, or four with learned strengths:
            against, difference, low, high, p, p_holm, detectable, prompts (that have scores in
            both; NaN where an arm is not comparable).
        texts: The judged ones.
    """

    folder: Path
    plan: SteerPlan
    selection: Selection
    tuning: pd.DataFrame
    table: pd.DataFrame
    tests: pd.DataFrame
    texts: pd.DataFrame

    def summary(self) -> str:
        """What came out, in a few lines."""
        lines = [
            f"{row['place']}: does not reach {self.plan.budget:g} times the perplexity within"
            f" alpha {STRENGTHS[-1]:g}, so it is not comparable"
            if np.isnan(row["alpha"])
            else f"{row['place']}: alpha {row['alpha']:.2f}, perplexity"
            f" {format_interval(row['ratio'], row['low'], row['high'], '.2f', ' times')} that"
            " without bias where it was tuned"
            for row in self.tuning[self.tuning["tuned"]].to_dict("records")
        ]
        decisive = self.plan.metrics[0]
        part = self.table[(self.table["attribute"] == "all") & (self.table["metric"] == decisive)]
        lines += [
            f"{row['arm']}: {decisive} {format_interval(mean, low, high, '.1f', ' %')}"
            for row, (mean, low, high) in zip(
                part.to_dict("records"), 100 * part[[*ENDS]].to_numpy(float), strict=True
            )
        ]
        return "\n".join([*lines, *map(format_test, self.tests.to_dict("records"))])

    def next_step(
        self, task: str, prompts: Path | Sequence[Path], device: str | None = None
    ) -> str:
        """What to do with the result: a command that steers with the card, or what could decide
        whether to.

        Args:
            task, prompts, device: As the command line gave them.
        """
        if self.selection.alpha is None:
            of_chosen = self.tuning[(self.tuning["place"] == CHOSEN) & ~self.tuning["tuned"]]
            most = float(of_chosen["ratio"].max())
            reader = parameter("perplexity", "MODEL")
            way = (
                f"a smaller {parameter('budget')}"
                if most > 1
                else f"another model that measures it ({reader})"
            )
            return (
                f"the bias in these heads costs at most {most:.3f} times the perplexity; steer with"
                f" {way} or with more {parameter('heads')}, in another {parameter('out')}"
            )
        if verdict(self.tests.to_dict("records")[0]) != "more":
            return "it is not shown that steering with these heads gains; more prompts may decide"
        return f"steer with\n    {self.command(task, prompts, device)}"

    @property
    def card(self) -> Path:
        """The card to steer with: that of learned strengths where they control more than the chosen
        heads, and these more than no bias."""
        said = {row["against"]: verdict(row) for row in self.tests.to_dict("records")}
        better = said[NO_BIAS] == "more" and said.get(LEARNED) == "less"
        return (self.folder / LEARNED_FOLDER if better else self.folder) / CARD

    def command(self, task: str, prompts: Path | Sequence[Path], device: str | None = None) -> str:
        """The command that makes texts as those of the better card were made."""
        plan = self.plan
        return command(
            "generate",
            model=plan.model,
            dtype=plan.dtype,
            model_class=plan.model_class,
            device=device,
            task=task,
            prompts=prompts,
            method=plan.method,
            set=plan.parameters,
            card=self.card,
            length=plan.length,
            samples=plan.samples,
            seed=plan.seed,
            out=self.folder / "steered",
        )


def verdict(test: Mapping[Any, Any]) -> str:
    """What a row of `Steered.tests` says of the chosen heads: "more", "less" or "not decided"; or
    why there is no test."""
    if np.isnan(test["prompts"]):
        return "not comparable at this budget"
    if np.isnan(test["p_holm"]):
        return f"no test with {pluralize(int(test['prompts']), 'prompt')} that both have scores of"
    if test["p_holm"] >= 0.05:
        return "not decided"
    return "more" if test["difference"] > 0 else "less"


def format_test(test: Mapping[Any, Any]) -> str:
    """A row of `Steered.tests` as a sentence."""
    subject = f"chosen heads against {test['against']}: "
    if np.isnan(test["p_holm"]):
        return subject + verdict(test)
    names = ("difference", "low", "high", "detectable")
    mean, low, high, least = (100 * float(test[name]) for name in names)
    prompts = pluralize(int(test["prompts"]), "prompt")
    shown = (
        "all prompts have the same difference"
        if np.isnan(least)
        else f"{prompts} can show {format_number(least, '.1f')} points"
    )
    return (
        f"{subject}{format_interval(mean, low, high, '+.1f', ' points')}, corrected p"
        f" {test['p_holm']:.2g}: {verdict(test)} ({shown})"
    )


def different_prompts(prompts: Sequence[str]) -> tuple[str, ...]:
    """The first prompt of those that are the same text (`text_key`). If another part had the same
    text again, what decides would have been seen by what is decided."""
    first_prompts: dict[str, str] = {}
    for prompt in prompts:
        first_prompts.setdefault(text_key(prompt), prompt)
    return tuple(first_prompts.values())


def method_parameters(
    method: str, task: Task, parameters: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The method's parameters: hard prefixes and no Pro-Aug, unless others are given."""
    known = {parameter.name for parameter in fields(get_for_task(method, task))}  # type: ignore[arg-type]
    usual = {"prefixes": "hard", "pro_aug": False}
    return {name: value for name, value in usual.items() if name in known} | dict(parameters or {})


def shipped_classifiers(task: Task) -> tuple[str, ...]:
    """linear, then adapter, for a task that has them.

    Raises:
        TaskError: The task has none.
    """
    if not (SHIPPED_WEIGHTS / f"{task.name}{LINEAR_ENDING}").is_file():
        raise TaskError(
            f"no classifier of the task {task.name!r} comes with the package; give one:"
            f" {parameter('classifiers', 'FOLDER')}, or train one: `lapa2 scorers train`"
        )
    return tuple(reversed(CLASSIFIERS))


def check_plan(plan: SteerPlan) -> None:
    """Refuse settings that cannot work.

    Raises:
        TaskError: The task has one attribute, or is a chat.
        RunError: Too few prompts, or all heads.
    """
    if plan.task.chat is not None:
        raise TaskError(
            f"steer compares texts by their perplexity behind their prompts, and task"
            f" {plan.task.name!r} is a chat, whose answers continue no text; give a task"
            " without [chat]"
        )
    plan.task.others(next(iter(plan.task.attributes)))  # there is a second attribute
    if (n := len(plan.prompts)) < 4 * FEW:
        raise RunError(
            f"{pluralize(n, 'prompt')} are too few to choose, to tune and to judge with; give at"
            f" least {4 * FEW}, better 250 ({parameter('prompts', 'FILE')})"
        )
    size = model_size(plan.model)
    every = size.n_layers * size.n_heads
    if plan.heads >= every:
        raise RunError(
            f"{parameter('heads')} must be fewer than the {every} heads of {plan.model}; found"
            f" {plan.heads}"
        )


def settled_dtype(folder: Path, dtype: str, device: str | None) -> str:
    """A precision by name. "auto" is that of the texts in a folder, if it has some: another machine
    may go on with them."""
    file = folder / SETTINGS
    if dtype == AUTO_DTYPE and file.is_file():
        return str(_read_settings(file).get("dtype"))
    return resolve_dtype(dtype, device)


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        return parse_object(read_text(file))
    except (OSError, ValueError) as error:
        raise RunError(
            f"cannot read {file} ({error}); choose another {parameter('out')}"
        ) from error


def note_plan(folder: Path, plan: SteerPlan) -> None:
    """Note the settings in a folder; of a folder that has some, these must be the same.

    Raises:
        RunError: They differ, or the folder holds something else.
    """
    known = asdict(plan) | {"task": plan.task.model_dump(mode="json")}
    known = {
        name: list(value) if isinstance(value, tuple) else value for name, value in known.items()
    }
    file = folder / SETTINGS
    if not file.is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(
                f"{folder} exists and is no result of steer; choose another {parameter('out')}"
            )
        write_json(file, known)
        return
    check_same_inputs(_read_settings(file), known, folder)
