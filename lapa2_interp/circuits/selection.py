"""Selection of the heads and tokens to steer.

Heads are chosen on some prompts, saved as a card, and used as an augmentation anywhere.

    chosen = select(model, "sentiment", score="cut", heads=8, prompts=half)
    chosen.augmentation(alpha=0.5)      # a plain Augmentation of these heads and tokens
    chosen.save("card.json")       # lapa2 generate --card card.json

Heads are ordered by one of five scores:

    cut     control lost when the head cannot see the prefix (`knock_out`)
    slope   control gained per unit of bias on the head's scores (`attribution`)
    dla     direct effect on the logits of the attribute's words (`head_logit_attribution`)
    mass    attention on the prefix (`prefix_attention_by_head`)
    random  nothing: a baseline

A head is chosen where the 95 % interval of its score over prompts lies above 0 (by mass and at
random: always). Heads whose interval lies below 0 work against the prefix. Such heads are never
chosen.

With `pro_aug=METHOD` a selection also decides if this method's raw branch should strengthen the
prompt (`prompt_slope`).

Effects of chosen heads are too large on the prompts that chose them. So a selection must be judged
on other prompts.

For some models a selection ships with the package (`shipped_selection`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from jaxtyping import Float
from pydantic import ConfigDict, Field

from lapa2_interp._util.hub import as_yaml, upload
from lapa2_interp._util.settings import helped_by
from lapa2_interp._util.values import Natural, check_value, numbers_checked
from lapa2_interp._util.version import __version__
from lapa2_interp.bias.head_card import HeadCard
from lapa2_interp.bias.places import FORMS, read_place
from lapa2_interp.circuits.contrast_set import ContrastLike, ContrastSet, as_contrast_set
from lapa2_interp.circuits.edits import Heads
from lapa2_interp.circuits.examples import prefix_texts
from lapa2_interp.circuits.gradients import attribution, has_gradients
from lapa2_interp.circuits.knockout import knock_out
from lapa2_interp.circuits.logit_attribution import head_logit_attribution
from lapa2_interp.circuits.prefix_attention import prefix_attention_by_head
from lapa2_interp.circuits.pro_aug import PromptSlope, prompt_slope
from lapa2_interp.circuits.settings import SCREENED, HeadScore, SelectSettings
from lapa2_interp.circuits.statistics import share_interval, split_half
from lapa2_interp.circuits.units import Unit, all_heads, make_units
from lapa2_interp.commands import command
from lapa2_interp.errors import CircuitError, unknown_choice
from lapa2_interp.files import write_json, write_text
from lapa2_interp.methods.base import Method
from lapa2_interp.models.card import identify
from lapa2_interp.models.facts import Model
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.stats import FEW, bounds
from lapa2_interp.tasks.task import Prompts, Task

if TYPE_CHECKING:
    from huggingface_hub import HfApi

SIGNED = ("cut", "slope", "dla")
"""Scores whose sign separates heads that carry control from heads that work against it."""
REQUIRED_SHARE, REQUIRED_BOUND = 0.9, 0.8
"""Tokens suffice if with them alone at least this share of the control is left, and its lower bound
is at least the second number."""
MAX_EXHAUSTIVE = 8
"""The longest prefix for which all sets of its tokens are tried."""
SHIPPED = Path(__file__).parent / "shipped"
"""Folder of the selections that ship with the package, MODEL.TASK.json."""


class Selection(HeadCard):
    """A card of chosen heads and tokens, with the facts of the choice.

    What a bias needs stands in `bias.head_card.HeadCard`.

    Example:
        >>> from lapa2_interp import Selection, circuits, load_model
        >>> model = load_model("planted")
        >>> chosen = circuits.select(model, "sentiment", heads=2)
        >>> path = chosen.save("heads.json")
        >>> Selection.load("heads.json").heads == chosen.heads
        True

    Attributes:
        task: The attributes, the target first, and their prefixes.
        by: The score that ordered the heads.
        metric: The metric of control; None where the choice did not need it.
        suppressors: Heads that work against the prefix, strongest first.
        scores: Mean, low and high of the chosen heads, then of the suppressors.
        prompts: The prompts that chose them; none in a selection that ships with the package.
        inputs: Hash of the texts, the model and the words (`ContrastSet.key`).
        stability: Spearman correlation of the scores, of all heads or of those that were screened,
            between halves of the prompts that decided; None where it is not defined.
        screened: The number of heads that were knocked out, on one half of the prompts, the other
            half having ordered all heads by the gradient; None where there was no such order.
        seed: Seed of the texts and of random heads.
        created, version: Time of the choice, and the package's version.
        prompt: The slope by which Pro-Aug was decided for a method, in these heads; None if it was
            not.
        chosen_by_halves: The number of these heads that both halves of the prompts choose; None
            where heads are taken at random or all.
        chosen_by_wordings: By another wording of the prefixes, the number of these heads that are
            chosen with it, too (`steer`).
        gain: A sentence on what `steer` found; "" where the heads were not judged.
        training: How they were learned: numbers by name.
        license: Under which the card is shared, as the hub writes it; "" where it is not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: dict[str, str]
    by: HeadScore | Literal["learned"]
    metric: str | None
    suppressors: tuple[tuple[int, int], ...]
    scores: tuple[tuple[float, float, float], ...]
    prompts: tuple[str, ...]
    inputs: str
    stability: float | None
    screened: int | None = None
    seed: int
    created: datetime
    version: str = __version__
    prompt: PromptSlope | None = None
    chosen_by_halves: int | None = None
    chosen_by_wordings: dict[str, int] = Field(default_factory=dict)
    gain: str = ""
    training: dict[str, float] = Field(default_factory=dict)
    license: str = ""

    def parameters(self, method: str) -> dict[str, bool]:
        """The decision about a method as its parameter pro_aug; empty if there is none.

        Args:
            method: Its name.
        """
        decided = self.prompt is not None and self.prompt.method == method
        return {"pro_aug": self.prompt.boost} if decided and self.prompt else {}

    def check(self, model: Model, contrast_set: ContrastSet | None = None) -> None:
        """Refuse another model than the one that chose the heads, and texts behind other prefixes.

        Raises:
            CircuitError: Other weights, or other prefixes.
        """
        card = identify(model)
        self.check_weights(card.name, card.weights)
        if contrast_set is None:
            return
        prefixes = prefix_texts(model.tokenizer, contrast_set.examples[0])
        if prefixes != self.task:
            raise CircuitError(
                f"the selection was made behind {', '.join(map(repr, self.task.values()))}; found"
                f" {', '.join(map(repr, prefixes.values()))}: choose again (`lapa2 select`)"
            )

    def save(self, file: str | Path) -> None:
        """Write it as JSON."""
        write_json(Path(file), self.model_dump_json())

    def push_to_hub(
        self, repo_id: str, *, license: str, private: bool = True, api: HfApi | None = None
    ) -> str:
        """Upload it to the Hugging Face hub as card.json, with a page that says how to use it.

        Args:
            repo_id: Such as "me/positive-heads"; it is made if there is none, and files of these
                names are replaced in one that exists.
            license: Under which you share it, as the hub writes it, such as "cc0-1.0". The prompts
                stand in the card, and of a model's path its last part.
            private: Whether a new repository is private.
            api: By default huggingface_hub's HfApi, with the token that you logged in with.

        Returns:
            Its address. `hf download OWNER/NAME card.json` gets the card.

        Raises:
            RunError: The hub refuses it or is not reached.
        """
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            name = Path(self.model).name if Path(self.model).exists() else self.model
            shared = self.model_copy(update={"license": license.lower(), "model": name})
            shared.save(folder / "card.json")
            write_text(folder / "README.md", shared._page(repo_id))
            return upload(
                folder, repo_id, "model", what="card of heads", message="Heads of lapa2_interp",
                private=private, api=api,
            )  # fmt: skip

    def _page(self, repo_id: str) -> str:
        """The page of the repository: what the hub reads in front, then words."""
        what = "strengths for heads" if self.strengths else "heads"
        prefixes = "\n".join(f"- {name}: {prefix!r}" for name, prefix in self.task.items())
        first = next(iter(self.task.values()))
        use = command(
            "generate",
            model=self.model,
            prefix=first,
            prompt="The lake",
            card="card.json",
            out="run",
        )
        return f"""---
license: {as_yaml(self.license)}
tags:
- attention-steering
- lapa2
---

# {len(self.heads)} {what} of {self.model}

A bias in these heads steers the model towards its prefix. The card (card.json) is for the weights
`{self.weights}` alone, and other models are refused.

{self.gain or "The heads were not judged on other prompts."}

{prefixes}

```sh
pip install lapa2_interp
hf download {repo_id} card.json --local-dir .
{use}
```

It was made with lapa2_interp {self.version}.
"""


@helped_by(SelectSettings)
@numbers_checked
@accepts_model_name
def select(
    model: Model,
    contrast: ContrastLike,
    *,
    score: HeadScore = "cut",
    heads: Natural = 8,
    positions: str | Sequence[int] = "all",
    metric: str = "js",
    screen: Natural = SCREENED,
    seed: int = 1,
    file: str | Path | None = None,
    pro_aug: str | Method | None = None,
) -> Selection:
    """Choose heads, and tokens of the prefix, on some prompts.

    By cut, in a model of many heads with gradients, one half of the prompts screens and the other
    decides: knock-outs are made only of the `screen` heads of largest estimate by the gradient. A
    head whose effect the gradient misses is then not chosen.

    Args:
        model: A TransformerBridge; by cut and mass also a `TransformersModel`.
        contrast: A `ContrastSet`, or a task by name or value, or one or more examples.
        seed: Seed of random heads, and of the texts of a task.

    Raises:
        CircuitError: Fewer than 8 prompts, no head is left, a file by another score than cut
            or of all heads, Pro-Aug for texts of no task, or as `knock_out` and
            `prompt_slope`.
    """
    _check_choice(score, heads, screen, file)
    if isinstance(contrast, str | Task):
        contrast = ContrastSet.of(model, contrast, seed=seed)
    contrast_set = as_contrast_set(model, contrast)
    if pro_aug is not None and contrast_set.task is None:
        raise CircuitError(
            "Pro-Aug belongs to a method on a task; give select a task, or leave out pro_aug"
        )
    if pro_aug is not None and contrast_set.examples[0].layouts[0].soft:
        raise CircuitError(
            "Pro-Aug is decided with a method's own prefixes, and these texts stand behind soft"
            " ones; leave out pro_aug, and call circuits.prompt_slope with the method's `prefixes`"
        )
    if contrast_set.n_prompts < FEW:
        raise CircuitError(
            f"{contrast_set.n_prompts} prompts are too few to choose by; give at least {FEW},"
            " better 32"
        )
    # Heads in the order of their scores.
    every: Heads = all_heads(model)
    chosen: list[int] = list(range(len(every))) if not heads else []
    against: list[int] = []
    scores = np.zeros((contrast_set.n_prompts, len(every)))
    if score == "random" and heads:
        rng = np.random.default_rng(seed)
        most = min(heads, len(every))
        chosen = sorted(int(i) for i in rng.choice(len(every), most, replace=False))
    elif heads:
        deciding = contrast_set
        if score == "cut":
            every, deciding = _screened(model, contrast_set, metric, screen)
        scores = _scores(model, deciding, score, every, metric, file)
        chosen, against = choose_units(scores, heads, signed=score in SIGNED)
    if not chosen:
        raise CircuitError(
            f"no head has a {score} score whose interval lies above 0 on these"
            f" {contrast_set.n_prompts} prompts; give more prompts, or choose by another score"
        )
    low, high = bounds(scores)
    # Tokens of the prefix, and the card.
    tokens = _positions(model, contrast_set, positions, metric)
    if tokens is not None and len(tokens) == contrast_set.l_pre:
        tokens = None
    stability = split_half(scores)
    measured = (heads and score in ("cut", "slope")) or positions == "auto" or pro_aug is not None
    card = identify(model)
    chosen_heads = tuple(every[i] for i in chosen)
    return Selection(
        model=card.name,
        weights=card.weights,
        task=prefix_texts(model.tokenizer, contrast_set.examples[0]),
        by=score,
        metric=metric if measured else None,
        heads=chosen_heads,
        suppressors=tuple(every[i] for i in against),
        scores=tuple(
            (float(scores[:, i].mean()), float(low[i]), float(high[i])) for i in (*chosen, *against)
        ),
        positions=tokens,
        prompts=tuple(dict.fromkeys(contrast_set.prompts)),
        inputs=contrast_set.key(model),
        stability=None if np.isnan(stability) else stability,
        screened=None if len(every) == len(all_heads(model)) else len(every),
        chosen_by_halves=_count_in_halves(scores, len(chosen))
        if heads and score != "random"
        else None,
        seed=seed,
        created=datetime.now(UTC),
        prompt=None
        if pro_aug is None
        else _decide_pro_aug(model, contrast_set, pro_aug, chosen_heads, metric),
    )


@accepts_model_name
def shipped_selection(model: Model, task: str = "sentiment") -> Selection:
    """The selection that ships with the package for a model's weights, with a tuned strength.

    Args:
        model: A model or its name.
        task: The name of the task behind whose prefixes the heads were chosen.

    Raises:
        CircuitError: None ships for these weights.

    Example:
        >>> from lapa2_interp import circuits
        >>> chosen = circuits.shipped_selection("smollm2-135m")
        >>> len(chosen.heads)
        24
    """
    card, names = identify(model), []
    for file in sorted(SHIPPED.glob("*.json")):
        shipped, of_task = Selection.load(file), file.suffixes[-2].removeprefix(".")
        if of_task == task and shipped.weights == card.weights:
            return shipped
        names.append(f"{shipped.model}, {of_task} ({shipped.weights})")
    raise CircuitError(
        f"no heads of {card.name} with {card.weights} ship for task {task!r}; there are some of"
        f" {'; '.join(names)}: choose your own (`lapa2 select`)"
    )


def _check_choice(score: str, heads: int, screen: int, file: str | Path | None) -> None:
    """Refuse arguments of `select` that do not go together."""
    if score not in get_args(HeadScore):
        raise CircuitError(unknown_choice("score", score, get_args(HeadScore)))
    if score == "cut" and 0 < screen < heads:
        raise CircuitError(
            f"screen must be at least the {heads} heads to choose, or 0 for all of them; found"
            f" {screen}"
        )
    if file is not None and score != "cut":
        raise CircuitError(
            f"a file keeps finished knock-outs, and the score {score} makes none; leave out the"
            " file, or choose by cut"
        )
    if file is not None and not heads:
        raise CircuitError(
            "a file keeps finished knock-outs, and all heads (0) are taken without any; leave out"
            " the file, or give heads=8"
        )


def _decide_pro_aug(
    model: Model, contrast_set: ContrastSet, method: str | Method, heads: Heads, metric: str
) -> PromptSlope:
    """The slope that decides a method's Pro-Aug in these heads, on the texts of a task."""
    assert contrast_set.task is not None
    texts: dict[str, list[tuple[int, ...]]] = {}
    for example in contrast_set.examples:
        texts.setdefault(example.prompt, []).append(example.text)
    return prompt_slope(
        model,
        contrast_set.task,
        method,
        attribute=contrast_set.attributes[0],
        prompts=Prompts(texts=tuple(texts)),
        texts=texts,
        heads=heads,
        metric=metric,
        words=dict(zip(contrast_set.attributes, contrast_set.words, strict=False)),
    )


def choose_units(
    scores: Float[np.ndarray, "prompt unit"], most: int, signed: bool = True
) -> tuple[list[int], list[int]]:
    """Units whose score lies above 0, best first, and units whose score lies below 0, strongest
    first; at most `most` of each.

    Args:
        signed: Require that the 95 % interval over prompts lies on that side. Otherwise all units
            can be chosen, and none is against.
    """
    order = np.argsort(-scores.mean(0), kind="stable").tolist()
    if not signed:
        return order[:most], []
    low, high = bounds(scores)
    return [i for i in order if low[i] > 0][:most], [i for i in order[::-1] if high[i] < 0][:most]


def random_heads(heads: Heads, every: Heads, seed: int) -> Heads:
    """As many random heads of the same layers, none of them among the given ones.

    A layer with too few other heads gives all of them; other layers give the rest.

    Args:
        heads: The heads to compare with, (layer, head).
        every: All heads of the model (`units.all_heads`).
        seed: Seed of the draw.
    """
    rng = np.random.default_rng(seed)
    drawn: list[tuple[int, int]] = []
    for layer in sorted({layer for layer, _ in heads}):
        others = [head for head in every if head[0] == layer and head not in heads]
        most = min(len(others), sum(head[0] == layer for head in heads))
        drawn += [others[i] for i in rng.choice(len(others), most, replace=False)]
    rest = [head for head in every if head not in (*heads, *drawn)]
    missing = min(len(rest), len(heads) - len(drawn))
    drawn += [rest[i] for i in rng.choice(len(rest), missing, replace=False)]
    return tuple(sorted(drawn))


def _count_in_halves(scores: Float[np.ndarray, "prompt head"], most: int) -> int:
    """The number of heads among the best of each half of the prompts, and of all."""
    best = [set(choose_units(part, most, False)[0]) for part in (scores, scores[::2], scores[1::2])]
    return len(set.intersection(*best))


def _screened(
    model: Model, contrast_set: ContrastSet, metric: str, most: int
) -> tuple[Heads, ContrastSet]:
    """The heads of largest estimate by the gradient, of either sign, on one half of the prompts,
    and the texts of the other half. All heads and texts where that saves nothing, or prompts are
    few, or the model has no gradients."""
    every = all_heads(model)
    clusters = contrast_set.clusters
    names = list(dict.fromkeys(clusters))
    if not 0 < most < len(every) or len(names) < 2 * FEW - 1 or not has_gradients(model):
        return every, contrast_set
    halves = [
        replace(
            contrast_set,
            examples=tuple(
                example
                for example, cluster in zip(contrast_set.examples, clusters, strict=True)
                if cluster in half
            ),
        )
        for half in (names[1::2], names[::2])
    ]
    estimates = attribution(model, halves[0], metric=metric).table()
    screened = set(estimates.best(most, absolute=True))
    return tuple(head for head in every if head in screened), halves[1]


def _scores(
    model: Model,
    contrast_set: ContrastSet,
    score: HeadScore,
    heads: Heads,
    metric: str,
    file: str | Path | None,
) -> Float[np.ndarray, "prompt head"]:
    """The score of the heads in every prompt; only cut leaves heads out."""
    if score == "cut":
        units = [unit for unit in make_units(model, contrast_set, "head") if unit.heads[0] in heads]
        table = knock_out(
            model, contrast_set, units=units, metric=metric, other_metrics=(), file=file
        )
        return table.by_prompt
    if score == "slope":
        return attribution(model, contrast_set, metric=metric).table("slope").by_prompt
    if score == "dla":
        return head_logit_attribution(model, contrast_set).table().by_prompt
    clusters = contrast_set.clusters
    masses = {
        name: prefix_attention_by_head(
            model,
            [
                example
                for example, cluster in zip(contrast_set.examples, clusters, strict=True)
                if cluster == name
            ],
        )
        for name in dict.fromkeys(clusters)
    }
    return np.stack([mass.ravel() for mass in masses.values()])


def _positions(
    model: Model, contrast_set: ContrastSet, positions: str | Sequence[int], metric: str
) -> tuple[int, ...] | None:
    """Chosen positions of the prefix; None for all of it."""
    if positions == "all":
        return None
    if positions == "auto":
        return sufficient_tokens(model, contrast_set, metric)
    chosen = read_place("positions", positions)
    if isinstance(chosen, str):
        raise CircuitError(
            f"positions: takes 'all', 'auto', or {FORMS['positions']}; found {chosen!r}"
        )
    check_value("positions", chosen, tuple[int, ...], CircuitError)
    n = contrast_set.l_pre
    if not chosen or any(not 0 <= position < n for position in chosen):
        raise CircuitError(
            f"positions {chosen} are not within a prefix of {n} tokens; give some of 0-{n - 1},"
            " 'all', or 'auto'"
        )
    return tuple(sorted(set(chosen)))


@accepts_model_name
def sufficient_tokens(model: Model, contrast: ContrastLike, metric: str = "js") -> tuple[int, ...]:
    """Find the smallest set of the prefix's tokens that suffices: with all others cut from every
    head, 90 % of the control is left, and at least 80 % by its lower bound.

    Up to 8 tokens every set is tried; in longer prefixes tokens are added in the order of the
    control that is lost without each.

    Args:
        model, contrast: As `knock_out`.
        metric: The metric of control.
    """
    contrast_set = as_contrast_set(model, contrast)
    n = contrast_set.l_pre
    every = all_heads(model)
    # Candidates by size.
    if n <= MAX_EXHAUSTIVE:
        sizes = [list(combinations(range(n), size)) for size in range(1, n)]
    else:
        alone = knock_out(model, contrast_set, over="position", metric=metric, other_metrics=())
        order = alone.order().tolist()
        sizes = [[tuple(sorted(order[:size]))] for size in range(1, n)]
    # Control with each candidate alone; of one size the best is taken.
    for candidates in sizes:
        units = [
            Unit({"name": str(candidate)}, every, tuple(i for i in range(n) if i not in candidate))
            for candidate in candidates
        ]
        table = knock_out(model, contrast_set, units=units, metric=metric, other_metrics=())
        control = contrast_set.by_prompt(table.total)
        left = control[:, None] - table.by_prompt
        share, low, _ = share_interval(left, control)
        suffices = (share >= REQUIRED_SHARE) & (low >= REQUIRED_BOUND)
        if suffices.any():
            return candidates[int(np.argmax(np.where(suffices, share, -np.inf)))]
    return tuple(range(n))
