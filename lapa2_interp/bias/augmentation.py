"""The bias as a value: how much is added to which attention scores.

Also for which queries, layers and heads.

LaPA2 (Eq. 9) adds `b(l) = alpha * log(l / n)` to the scores of the prefix keys before the softmax,
with `n` the prefix length and `l` the number of keys. An `Augmentation` states every choice in that
sentence and nothing about a network: this module is pure arithmetic and imports no model code.

Every way of steering attention that this package compares is one number `b` of that kind. Only its
law differs. With A the attention on the span and n, l as above:

=========  =====================================  =================================================
law        b                                      source
=========  =====================================  =================================================
log        alpha * log(l / n); l at most l0       LaPA2, Eq. 9, which has no l0
linear     alpha * l / n                          LaPA2, Table "scaling"
sqrt       alpha * sqrt(l / n)                    LaPA2, Table "scaling"
constant   alpha * log(l0 / n)                    LaPA2, Table "scaling"
scale      alpha                                  InstABoost (arXiv 2506.13734: log M) and PASTA
                                                  (arXiv 2311.02262: log 0.01 elsewhere)
cut        log(1 - alpha)                         a knock-out: alpha 1 blocks the span
target     alpha * (logit(tau) - logit(A))        here: alpha 1 sets A to tau exactly
ratio      alpha * max(0, log(tau / A))           Spotlight (arXiv 2505.12025), per head and query;
                                                  `pooled`: one A for each pass, as released
power      logit(A^k) - logit(A),                 split-softmax (arXiv 2402.10962)
           k = 1 / (1 + alpha)
multiply   none: scores times 1 + alpha, or       DIRECTER (arXiv 2603.06745) on the span; on all
           1 + alpha * (log(l) / log(l0) - 1)     keys log-n, SSMax (arXiv 2501.19399: ln(l0) = 1/s)
=========  =====================================  =================================================

`target`, `ratio` and `power` read the scores of the forward pass. A bias b on a span adds b to
logit(A), whatever the scores are (`bias.theory.shifted_share`), so all of them are functions of
logit(A): `shift`. What `multiply` does depends on every score.

Two profiles fill the fields that are not given:

=========  ========  ===========  ==========  ==============================================
profile    span      length_rule  phase       source
=========  ========  ===========  ==========  ==============================================
paper      prefix    paper        last_query  Algorithm 1
released   released  kv           decode      the released code: keys 0..n-1, BOS and, with
                                              GPT-2, all but the last prefix token; every
                                              law is 0 where l <= n
=========  ========  ===========  ==========  ==============================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, cast

import numpy as np
from jaxtyping import Bool, Float, Int, Real
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from lapa2_interp._util.values import Natural, Positive, plain
from lapa2_interp.bias.labels import shorten_value
from lapa2_interp.bias.places import FORMS, READERS, read_place
from lapa2_interp.errors import AugmentationError, validation_message

Law = Literal[
    "log", "linear", "sqrt", "constant", "scale", "cut", "target", "ratio", "power", "multiply"
]
PAPER_LAWS = ("log", "linear", "sqrt", "constant")
Profile = Literal["paper", "released"]
LengthRule = Literal["paper", "kv"]
Phase = Literal["decode", "last_query", "after_span", "everywhere", "predicting_only"]
Slots = Annotated[tuple[tuple[int, int], ...], Field(min_length=1)]
Positions = tuple[Literal["prefix"], Annotated[tuple[Natural, ...], Field(min_length=1)]]
"""Positions within the prefix, 0 being its first token: ("prefix", (1, 2))."""
SpanRule = Literal["prefix", "prefix+bos", "bos", "input", "released", "all"] | Positions | Slots
LayerRule = (
    Literal["all", "bottom", "top", "even", "odd"]
    | Annotated[tuple[Natural, ...], Field(min_length=1)]
)
HeadRule = Literal["all"] | Annotated[tuple[tuple[Natural, Natural], ...], Field(min_length=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Strengths = Annotated[tuple[tuple[Natural, Natural, Finite], ...], Field(min_length=1)]
"""(layer, head, strength) of single heads."""

PROFILES: dict[str, dict[str, str]] = {
    "paper": {"span": "prefix", "length_rule": "paper", "phase": "last_query"},
    "released": {"span": "released", "length_rule": "kv", "phase": "decode"},
}

SCORE_LAWS = ("target", "ratio", "power")
"""Laws whose bias depends on the scores of the forward pass."""
LAWS_BY_STRENGTH = ("log", "linear", "sqrt", "constant", "scale")
"""Laws whose bias is alpha times a number, so that heads may have multiples of it."""
ALPHA_BOUNDS = {
    "scale": (-math.inf, math.inf),
    "cut": (0.0, 1.0),
    "target": (0.0, 1.0),
    "ratio": (0.0, 1.0),
    "multiply": (-1.0, math.inf),
}
"""Allowed alphas; [0, inf) for the other laws."""
BIAS_CAP = 20.0
"""Largest |b| of `SCORE_LAWS`. Without it even a head that gives the span nothing would be forced.
"""
MAX_BIAS = 1e4
"""Largest |b| of the other laws, a knock-out excepted. Beside a larger one, float32 scores (and so
the shares within a span) keep less than three digits."""
MAX_LOG_ODDS = 80.0
"""Log-odds are clipped to +-MAX_LOG_ODDS: float32 cannot hold a more extreme share."""
FIELD_FORMS = {
    "span": "'prefix', 'prefix+bos', 'bos', 'input', 'released', 'all', slots ((start, stop), ...)"
    " or a text such as '1:4,6:8', or positions within the prefix ('prefix', (position, ...)) or"
    " 'prefix:0,2'",
    "steps": FORMS["steps"],
    "layers": f"'all', 'bottom', 'top', 'even', 'odd', or {FORMS['layers']}",
    "heads": f"'all', or {FORMS['heads']}",
    "strengths": FORMS["strengths"],
}
"""What is allowed, for error messages."""


class Augmentation(BaseModel):
    """One bias: a frozen value. `to_json` writes it, `Augmentation(**json.loads(text))` reads it.

    An augmentation belongs to a branch. On a branch without a prefix (the raw language model) it
    acts on the prompt: the paper's Contextual Anchor Reinforcement, Eq. 15.

    Example:
        >>> from lapa2_interp import Augmentation
        >>> augmentation = Augmentation(alpha=0.5)
        >>> round(float(augmentation.bias(l=100, n=4)), 3)  # 0.5 * ln(100 / 4)
        1.609

    Args:
        alpha: Strength: >= 0; of law "scale" any number, of "multiply" from -1, and of "cut",
            "target" and "ratio" at most 1. At 0 nothing is added.
        profile: "paper" (Algorithm 1) or "released" (what the released code computes); fills
            `span`, `length_rule` and `phase` where they are not given.
        law: The bias as a function of l, or of the attention on the span
            (docs/methods.md has the table).
        l0: The fixed length of the constant law (the paper's ablation uses 128), which needs it;
            of law "log" the length above which b stays as it is there, by default none; of law
            "multiply" the length, above 1, at which its factor is 1. Refused elsewhere.
        tau: The attention on the span that the laws "target" and "ratio" aim at, in (0, 1);
            required there, refused elsewhere.
        floor: True if law "target" only raises the attention and never lowers it.
        pooled: True if law "ratio" takes one A for all heads and queries of a pass: their mean in
            each layer and row. Then the bias depends on how a text is divided into passes: decoding
            with a cache (the prompt in one pass, then one token in each) differs from one pass over
            the whole text.
        span: The keys that are boosted: "prefix" (its exact tokens), "prefix+bos", "bos", "input"
            (all keys up to the end of the prompt), "all" (every key; law "multiply" only),
            "released" (the first n slots, n being what the
            tokenizer counts for the prefix alone), explicit `((start, stop), ...)` over live slots,
            0 being the first key (BOS), or `("prefix", (position, ...))`, tokens of the prefix, 0
            being its first.
        length_rule: The keys that l counts at a query: "paper" those in its softmax without BOS,
            "kv" all of them.
        phase: The queries that are augmented, each with its own l:

            ================= =============== =============== ================= ==========
            phase             span and before prompt after it last prompt token generated
            ================= =============== =============== ================= ==========
            "decode"          no              no              no                yes
            "last_query"      no              no              yes               yes
            "after_span"      no              yes             yes               yes
            "everywhere"      yes             yes             yes               yes
            "predicting_only" no              no              predicting        predicting
            ================= =============== =============== ================= ==========

            "last_query" is t >= T of Algorithm 1. Under "predicting_only" a token is augmented only
            in the pass that predicts the next one, so the cached keys and values are those of a
            model without the augmentation. Of a span inside the prefix, and of "all", "after_span"
            begins after the prefix.
        steps: `(a, b)`: only the queries that predict the generated tokens a, ..., b - 1; 0 is the
            first.
        layers: "all", "bottom" (first half), "top" (second half), "even", "odd" or explicit layer
            numbers from 0.
        heads: "all" or explicit `((layer, head), ...)` from 0; layers and heads intersect.
        strengths: In place of heads, `((layer, head, strength), ...)`: in such a head b is
            multiplied by its strength, a number of either sign, and other heads get nothing. Only
            of laws by which b is proportional to alpha: log, linear, sqrt, constant, scale.

    Slots, positions, steps, layers, heads and strengths may also be text, as on the command line:
    "1:4", "prefix:0,2", "0:16", "0,5,10-20" (a range has both its ends), "3.1,4.0-8", "3.1:0.5"
    (`bias.places`). Layers, heads and strengths are kept in order, each once, and a strength of 0
    is left out.

    Raises:
        AugmentationError: A field is out of range; the message names it, the value and what is
            allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    alpha: Annotated[float, Field(allow_inf_nan=False)]
    profile: Profile = "paper"
    law: Law = "log"
    l0: Positive | None = None
    tau: Annotated[float, Field(gt=0, lt=1)] | None = None
    floor: bool = False
    pooled: bool = False
    span: SpanRule = "prefix"
    length_rule: LengthRule = "paper"
    phase: Phase = "last_query"
    steps: tuple[Natural, int] | None = None
    layers: LayerRule = "all"
    heads: HeadRule = "all"
    strengths: Strengths | None = None

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
            # `model_fields_set` has no fields that the profile fills.
            object.__setattr__(self, "__pydantic_fields_set__", {*fields})
        except ValidationError as error:
            raise AugmentationError(
                f"augmentation {validation_message(error, FIELD_FORMS, type(self).model_fields)}"
            ) from None

    @model_validator(mode="before")
    @classmethod
    def _fill_from_profile(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        # A text of places has a number in it: "prefix" and "top" stay as they are.
        read = {
            name: read_place(name, value)
            if name in READERS and isinstance(value, str) and not value.isalpha()
            else plain(value)
            for name, value in fields.items()
        }
        return PROFILES.get(str(read.get("profile", "paper")), {}) | read

    @field_validator("layers", "heads")
    @classmethod
    def _in_order(cls, chosen: Any) -> Any:
        """Each once and in order, so that equal biases are equal values."""
        return tuple(sorted(set(chosen))) if isinstance(chosen, tuple) else chosen

    @field_validator("strengths")
    @classmethod
    def _each_once(cls, strengths: Strengths | None) -> Strengths | None:
        """In order, without heads that get nothing."""
        if strengths is None:
            return None
        pairs = [(layer, head) for layer, head, _ in strengths]
        if twice := next((pair for pair in pairs if pairs.count(pair) > 1), None):
            raise ValueError(f"head {twice[0]}.{twice[1]} has two strengths; give it one")
        if not (acting := tuple(sorted(entry for entry in strengths if entry[2]))):
            raise ValueError("all strengths are 0; leave the augmentation out, or give one head 1")
        return acting

    @model_serializer(mode="wrap")
    def _without_unused_strengths(self, dump: Callable) -> dict[str, Any]:
        """Strengths only where there are some, so that keys of cells without them stay as they
        were before there was such a field."""
        fields = dump(self)
        return {name: fields[name] for name in fields if fields[name] or name != "strengths"}

    @model_validator(mode="after")
    def _check(self) -> Augmentation:
        # Each law has bounds of alpha and its own fields.
        low, high = ALPHA_BOUNDS.get(self.law, (0.0, math.inf))
        if not low <= self.alpha <= high:
            above = f"greater than or equal to {low:g}"
            allowed = f"from 0 to {high:g}" if high < math.inf else above
            raise ValueError(f"alpha of law {self.law!r} should be {allowed}, found {self.alpha:g}")
        if self.law == "constant" and self.l0 is None:
            raise ValueError(
                "the constant law needs l0, the length its bias is frozen at (the paper uses 128)"
            )
        if self.law not in ("log", "constant", "multiply") and self.l0 is not None:
            raise ValueError(
                f"l0 belongs to the laws log, constant and multiply, not to {self.law!r}"
            )
        if self.law == "multiply" and self.l0 is not None and self.l0 <= 1:
            raise ValueError(f"l0 of law 'multiply' should be above 1, found {self.l0:g}")
        if self.span == "all" and self.law != "multiply":
            raise ValueError(
                f"a bias on all keys changes nothing; span 'all' is for law 'multiply', not for law"
                f" {self.law!r}"
            )
        if self.law in ("target", "ratio") and self.tau is None:
            raise ValueError(f"law {self.law!r} needs tau, the attention it aims at, such as 0.3")
        if self.law not in ("target", "ratio") and self.tau is not None:
            raise ValueError(f"tau belongs to the laws target and ratio, not to law {self.law!r}")
        if self.floor and self.law != "target":
            raise ValueError(f"floor belongs to law target, not to law {self.law!r}")
        if self.pooled and self.law != "ratio":
            raise ValueError(f"pooled belongs to law ratio, not to law {self.law!r}")
        if self.strengths is not None and self.heads != "all":
            raise ValueError("strengths name their heads; leave heads out")
        if self.strengths is not None and self.law not in LAWS_BY_STRENGTH:
            laws = ", ".join(LAWS_BY_STRENGTH)
            raise ValueError(f"strengths belong to the laws {laws}, not to law {self.law!r}")
        # Steps and spans are not empty, and do not overlap.
        if self.steps is not None and self.steps[1] <= self.steps[0]:
            raise ValueError(f"steps {self.steps} are none; give (first, stop) with first < stop")
        if self.positions is not None:
            if len(set(self.positions)) < len(self.positions):
                raise ValueError(f"positions {self.positions} of the span are not distinct")
        elif not isinstance(self.span, str):
            slots = cast("Slots", self.span)
            for start, stop in slots:
                if not 0 <= start < stop:
                    raise ValueError(
                        f"span [{start}, {stop}) is empty or negative; give 0 <= start < stop"
                    )
            ordered = sorted(slots)
            for (_, stop), (start, _) in pairwise(ordered):
                if start < stop:
                    raise ValueError(
                        f"the intervals of span {self.span} overlap at slot {start}; give disjoint"
                        " ones"
                    )
        return self

    @property
    def is_active(self) -> bool:
        """True if it adds anything: alpha is not 0."""
        return self.alpha != 0

    @property
    def reads_scores(self) -> bool:
        """True if its bias depends on the scores of the forward pass."""
        return self.law in SCORE_LAWS

    @property
    def multiplies(self) -> bool:
        """True if it multiplies scores, and adds nothing."""
        return self.law == "multiply"

    @property
    def follows_released_code(self) -> bool:
        """True if it follows the released code, whose span is the first slots of the cache."""
        return "released" in (self.profile, self.span)

    @property
    def positions(self) -> tuple[int, ...] | None:
        """The positions of a span within the prefix; None for other spans."""
        if not isinstance(self.span, str) and self.span[0] == "prefix":
            return self.span[1]
        return None

    @np.errstate(over="ignore")  # `check_bias` refuses an overflow where it would act
    def bias(
        self, l: Real[np.ndarray, "*shape"], n: int | Int[np.ndarray, "*shape"]
    ) -> Float[np.ndarray, "*shape"]:
        """b(l), the number added to the attention score of every key of the span (Eq. 9; the laws
        of Table "scaling"); in a head with a strength it is multiplied by that.

        Args:
            l: Lengths, >= 1, any shape.
            n: l_pre of the branch (l_pro on the raw model), >= 1; in layers with a sliding window
                one for each l.

        Returns:
            The bias at each length, float64; of law "multiply" the factor less 1. The log law is 0
            where l <= n; under profile "released" every law is. -inf where the span is blocked.

        Raises:
            AugmentationError: The law reads the scores, so that l does not decide b; see `shift`.
        """
        l = np.asarray(l, dtype=np.float64)
        match self.law:
            case "log":
                counted = l if self.l0 is None else np.minimum(l, self.l0)
                b = self.alpha * np.log(np.maximum(counted, n) / n)
            case "linear":
                b = self.alpha * l / n
            case "sqrt":
                b = self.alpha * np.sqrt(l / n)
            case "constant":
                assert self.l0 is not None
                b = np.full_like(l, self.alpha * np.log(self.l0 / n))
            case "scale":
                b = np.full_like(l, self.alpha)
            case "cut":
                b = np.full_like(l, math.log1p(-self.alpha) if self.alpha < 1 else -math.inf)
            case "multiply":
                over = np.ones_like(l) if self.l0 is None else np.log(l) / math.log(self.l0) - 1
                b = self.alpha * over
            case _:
                raise AugmentationError(
                    f"the bias of law {self.law!r} depends on the attention on the span, not on l"
                    " alone; use shift(log_odds, l, n)"
                )
        return np.where(l > n, b, 0.0) if self.profile == "released" else np.asarray(b)

    def check_bias(self, b: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """Return the biases unchanged if all of them are usable.

        Raises:
            AugmentationError: One is not a number, or exceeds `MAX_BIAS`.
        """
        off = ~(np.abs(b) <= MAX_BIAS) & ~((self.law == "cut") & np.isneginf(b))
        if off.any():
            raise AugmentationError(
                f"alpha {self.alpha:g} of law {self.law!r} makes a bias of {b[off].flat[0]:g};"
                f" allowed: -{MAX_BIAS:g} to {MAX_BIAS:g}, where float32 still tells scores apart."
                " A bias of 20 gives a span nearly all attention, so choose a smaller alpha"
            )
        return b

    def shift(self, log_odds: Any, l: Any, n: Any) -> Any:
        """b at a query, under any law: the change of the log-odds of attention on the span.

        Args:
            log_odds: logit(A) without the bias, A being the attention on the span: a NumPy array or
                a tensor, any shape.
            l, n: As in `bias`; broadcast against `log_odds`.

        Returns:
            The bias, an array of the type and shape of `log_odds`. Under `SCORE_LAWS` it lies in
            [-BIAS_CAP, BIAS_CAP].

        Raises:
            AugmentationError: The law multiplies scores: log-odds do not decide what it does.
        """
        if self.multiplies:
            raise AugmentationError(
                "law 'multiply' changes every score by another number, so that the attention on the"
                " span does not decide its effect; record a trace instead"
            )
        if isinstance(log_odds, np.ndarray):
            xp: Any = np
        else:
            import torch as xp
        if not self.reads_scores:
            b = self.bias(np.asarray(l), n)
            return xp.zeros_like(log_odds) + (b if xp is np else xp.as_tensor(b))
        odds = xp.nan_to_num(log_odds, nan=0.0).clip(-MAX_LOG_ODDS, MAX_LOG_ODDS)
        log_share = -xp.log1p(xp.exp(-odds))  # log A
        if self.law == "target":
            assert self.tau is not None
            b = self.alpha * (math.log(self.tau / (1 - self.tau)) - odds)
            b = b.clip(0, None) if self.floor else b
        elif self.law == "ratio":
            assert self.tau is not None
            b = self.alpha * (math.log(self.tau) - log_share).clip(0, None)
        else:
            log_power = log_share / (1 + self.alpha)  # log A^k
            b = log_power - xp.log(-xp.expm1(log_power)) - odds
        b = b.clip(-BIAS_CAP, BIAS_CAP)
        if self.profile == "released":
            longer = np.greater(l, n)
            b = b * (longer if xp is np else xp.as_tensor(longer, device=b.device))
        return b

    def head_mask(self, n_layers: int, n_heads: int) -> Bool[np.ndarray, "layer head"]:
        """The heads that the bias reaches in a model of this size, as a mask.

        Raises:
            AugmentationError: As `head_strengths`.
        """
        return self.head_strengths(n_layers, n_heads) != 0

    def head_strengths(self, n_layers: int, n_heads: int) -> Float[np.ndarray, "layer head"]:
        """The strength of every head of a model of this size: 1 where b acts as it is, and 0 where
        it does not act.

        Raises:
            AugmentationError: A layer or head the model does not have, or none is left.
        """
        # The layers.
        layer = np.arange(n_layers)
        match self.layers:
            case "all":
                chosen = np.ones(n_layers, bool)
            case "bottom":
                chosen = layer < n_layers // 2
            case "top":
                chosen = layer >= n_layers // 2
            case "even":
                chosen = layer % 2 == 0
            case "odd":
                chosen = layer % 2 == 1
            case _:
                missing = [x for x in self.layers if not 0 <= x < n_layers]
                if missing:
                    raise AugmentationError(
                        f"layer {missing[0]} does not exist; the model has layers 0-{n_layers - 1}"
                    )
                chosen = np.isin(layer, self.layers)
        # The heads among them.
        selected = np.repeat(chosen[:, None], n_heads, axis=1).astype(float)
        of_pairs = [] if self.heads == "all" else [(*pair, 1.0) for pair in self.heads]
        if named_heads := self.strengths or of_pairs:
            named = np.zeros_like(selected)
            for x, y, strength in named_heads:
                if not (0 <= x < n_layers and 0 <= y < n_heads):
                    raise AugmentationError(
                        f"head ({x}, {y}) does not exist; the model has layers 0-{n_layers - 1},"
                        f" heads 0-{n_heads - 1}"
                    )
                named[x, y] = strength
            selected *= named
        if not selected.any():
            heads = [(x, y) for x, y, _ in named_heads]
            raise AugmentationError(
                f"layers {self.layers} and heads {heads} have nothing in common in a model of"
                f" {n_layers} layers; they intersect, so name heads of chosen layers"
            )
        return selected

    @property
    def label(self) -> str:
        """Name among the arms of a run: alpha and profile, then every field that differs from the
        profile."""
        fields = type(self).model_fields
        usual = {name: field.default for name, field in fields.items()} | PROFILES[self.profile]
        others = [
            shorten_value(value, name=field)
            for field, value in self.model_dump(
                exclude={"alpha", "profile"}, exclude_none=True
            ).items()
            if usual[field] != value
        ]
        return ", ".join([f"alpha {self.alpha:g} {self.profile}", *others])

    def with_default_span(self) -> Augmentation:
        """A copy with the profile's span in place of explicit slots or positions in the prefix.

        These fit only the branches they were given for.
        """
        if isinstance(self.span, str):
            return self
        return self.model_copy(update={"span": PROFILES[self.profile]["span"]})

    def within(self, layers: Collection[int]) -> Augmentation | None:
        """A copy that acts in these layers alone; None if it has no head there.

        Raises:
            AugmentationError: Its own layers are a word, such as "top".
        """
        if isinstance(self.layers, str) and self.layers != "all":
            raise AugmentationError(
                f"layers {self.layers!r} cannot be narrowed to some layers; name them by number"
            )
        own = tuple(sorted(x for x in layers if self.layers == "all" or x in self.layers))
        named = self.strengths or self.heads
        reached = own if isinstance(named, str) else {head[0] for head in named} & {*own}
        return self.model_copy(update={"layers": own}) if reached else None

    def to_json(self) -> str:
        """Every field, resolved, as one JSON object."""
        return self.model_dump_json()


AugmentationLike = Augmentation | Sequence[Augmentation | None] | None
"""Augmentations of one row as a user gives them: none, one, or several that act together."""
Augmentations = Augmentation | tuple[Augmentation, ...] | None
"""Augmentations of one row as cells store them: a tuple has at least two."""


def broadcast_to_rows(
    augmentations: AugmentationLike | Sequence[AugmentationLike], n_rows: int
) -> list[AugmentationLike]:
    """The augmentations of each row. A list holds those of each row; anything else, also a tuple of
    several augmentations, acts on every row."""
    every = not isinstance(augmentations, Sequence) or isinstance(augmentations, tuple)
    return [augmentations] * n_rows if every else list(augmentations)  # type: ignore[arg-type, list-item]


def active_augmentations(augmentations: AugmentationLike) -> tuple[Augmentation, ...]:
    """The augmentations of a row that add something."""
    rules = augmentations if isinstance(augmentations, Sequence) else (augmentations,)
    return tuple(
        augmentation
        for augmentation in rules
        if augmentation is not None and augmentation.is_active
    )


def steps_overlap(one: Augmentation, another: Augmentation) -> bool:
    """True if two augmentations can act at the same step; without `steps` one acts at all steps."""
    if one.steps is None or another.steps is None:
        return True
    return max(one.steps[0], another.steps[0]) < min(one.steps[1], another.steps[1])


def normalize_augmentations(augmentations: AugmentationLike) -> Augmentations:
    """The active augmentations of a row as one value: None, the only one, or a tuple."""
    active = active_augmentations(augmentations)
    return active if len(active) > 1 else active[0] if active else None


def within(augmentations: AugmentationLike, layers: Collection[int] | None) -> Augmentations:
    """The augmentations of a row in these layers alone; None for their own layers."""
    active = active_augmentations(augmentations)
    if layers is not None:
        active = tuple(filter(None, (rule.within(layers) for rule in active if layers)))
    return normalize_augmentations(active)
