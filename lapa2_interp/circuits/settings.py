"""Settings of the commands `circuits`, `select` and `fading`, beside model and texts.

Their functions take a model and texts first, and repeat these parameters in their signatures, which
a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic.dataclasses import dataclass

from lapa2_interp._util.settings import Settings
from lapa2_interp._util.values import Count, Natural, NotNegative, Positive

if TYPE_CHECKING:
    from lapa2_interp.circuits.metrics import Metric
    from lapa2_interp.methods.base import Method
else:  # values beside names, which the functions read
    Method = Metric = Any

HeadScore = Literal["cut", "slope", "dla", "mass", "random"]
BEST = 24
"""Number of the best heads for the other replacements and phases; as many random heads are
added."""
SCREENED = 60
"""Heads that are knocked out by default. On SmolLM2, the 24 of largest estimate hold 92 % of the 24
of largest effect."""
FILLER = (64, 128, 256)
"""Tokens between prompt and scored tokens far."""


@dataclass(frozen=True)
class StudySettings(Settings):
    """How a study is made (`circuits.study.run_study`)."""

    _: KW_ONLY
    best: Count = BEST
    """Number of the best heads that are tested with the other replacements and phases; as many
    random heads are added."""


@dataclass(frozen=True)
class SelectSettings(Settings):
    """How heads are chosen (`circuits.selection.select`)."""

    _: KW_ONLY
    score: HeadScore = "cut"
    """What orders heads: the control lost without their view of the prefix (cut); what a bias gains
    per unit of b (slope, one pass a text); what they write themselves (dla); their attention on the
    prefix (mass); nothing (random)."""
    heads: Natural = 8
    """The largest number of heads; 0 is all, in no order."""
    positions: str | Sequence[int] = "all"
    """Tokens of the prefix: all, auto (the smallest set that keeps 90 % of the control,
    `sufficient_tokens`), or positions within it such as 0,2-4."""
    metric: str = "js"
    """The metric of control: js, lex, llr or kl."""
    screen: Natural = SCREENED
    """The number of heads that are knocked out (by cut): of 15 prompts or more, one half orders all
    heads by the gradient, and the other half decides; 0 is all, on all prompts."""
    file: str | Path | None = None
    """A file for finished knock-outs (by cut), from which the same call continues."""
    pro_aug: str | Method | None = None
    """A method such as air-decoding, of which is also decided whether its raw branch strengthens
    the prompt, on these texts and in the chosen heads."""


@dataclass(frozen=True)
class LearnSettings(Settings):
    """How one strength a head is learned (`circuits.learning.learn`)."""

    _: KW_ONLY
    neutral: str = "This is a text:"
    """A prefix that says nothing, behind which the bias should change nothing."""
    law: Literal["log", "constant"] = "log"
    """log grows with the text, up to the longest text that was trained on; constant has its value
    there at any length."""
    cost: Positive = 1.0
    """Weight of the cost: KL behind the neutral prefix, and rise of the negative log-likelihood of
    fluent text, in nats a token."""
    sparsity: NotNegative = 0.02
    """Share of the learning rate by which every strength comes nearer to 0 in a step."""
    tied: Literal["no", "layer", "all"] = "no"
    """no: a strength for each head; layer: one for the heads of a layer; all: one for all heads."""
    steps: Count = 60
    """Steps of the optimiser; the best of those that were looked at is kept."""
    batch: Count = 8
    """Pairs in a step."""
    rate: Positive = 0.05
    """Learning rate."""
    check: Count = 10
    """Steps between two looks at the held-out prompts."""
    seed: Natural = 1
    """Seed of the order of pairs and of the held-out prompts."""
    file: str | Path | None = None
    """A checkpoint, which is written at every look at the held-out prompts, and from which the same
    call continues."""


@dataclass(frozen=True)
class FadingSettings(Settings):
    """How fading is measured (`circuits.fading.measure_fading`)."""

    _: KW_ONLY
    filler: Sequence[int] = FILLER
    """Numbers of tokens between prompt and scored tokens; near, the number is one."""
    random: Natural = 0
    """Sets of as many random heads as the first of `heads` has."""
    alpha: float = 0.5
    """Alpha of the bias lapa2, for comparison."""
    metric: str | Metric | Mapping[str, Metric] | None = None
    """The metric of control: js, lex, llr or kl; by default lex where there are words, because
    shares of lex add up, and else js."""
    file: str | Path | None = None
    """A file for finished texts, a line for each batch, from which the same call continues. Two
    stored texts are computed again, near and at the longest filler: the new numbers must equal the
    stored values but for rounding."""
