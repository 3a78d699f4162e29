"""The length-aware bias as a value: how much is added to which attention scores, for which queries,
layers and heads.

LaPA2 (Eq. 7) adds `b(l) = alpha * log(l / n)` to the scores of the prefix keys before the softmax,
with `n` the prefix length and `l` the number of keys. An `Augmentation` states every choice in that
sentence and nothing about a network: this module is pure arithmetic and imports no model code.

Two named conventions fill the fields that are not given:

=========  ========  ===========  ==========  ==============================================
profile    span      length_rule  phase       source
=========  ========  ===========  ==========  ==============================================
paper      prefix    paper        last_query  Algorithm 1
released   released  kv           decode      the released code: keys 0..n-1, which are BOS
                                              and all but the last prefix token; every law
                                              is 0 where l <= n
=========  ========  ===========  ==========  ==============================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Real
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_serializer,
    model_validator,
)

from lapa2_interp.errors import AugmentationError, first_problem

Law = Literal["log", "linear", "sqrt", "constant"]
Profile = Literal["paper", "released"]
LengthRule = Literal["paper", "kv"]
Phase = Literal["decode", "last_query", "all_queries"]
Slots = Annotated[tuple[tuple[int, int], ...], Field(min_length=1)]
SpanRule = Literal["prefix", "prefix+bos", "bos", "released"] | Slots
LayerRule = (
    Literal["all", "bottom", "top", "even", "odd"] | Annotated[tuple[int, ...], Field(min_length=1)]
)
HeadRule = Literal["all"] | Annotated[tuple[tuple[int, int], ...], Field(min_length=1)]

PROFILES: dict[str, dict[str, str]] = {
    "paper": {"span": "prefix", "length_rule": "paper", "phase": "last_query"},
    "released": {"span": "released", "length_rule": "kv", "phase": "decode"},
}

WRITTEN = "length"
"""Name of `length_rule` in JSON, and so in the keys of cells. Both names are read."""
FORMS = {
    "span": "'prefix', 'prefix+bos', 'bos', 'released', or slots ((start, stop), ...)",
    "layers": "'all', 'bottom', 'top', 'even', 'odd', or numbers (layer, ...)",
    "heads": "'all', or pairs ((layer, head), ...)",
}
"""For error messages: the values of fields that take several forms."""


class Augmentation(BaseModel):
    """One bias: a frozen value that round-trips through JSON (`to_json`, `from_json`).

    It belongs to a branch. On a branch without a prefix (the raw language model) the same rules act
    on the prompt: the paper's Contextual Anchor Reinforcement, Eq. 9.

    Args:
        alpha: Strength, >= 0. At 0 nothing is added.
        profile: "paper" (Algorithm 1) or "released" (what the released code computes); fills
            `span`, `length_rule` and `phase` where they are not given.
        law: b(l): "log" alpha*ln(l/n), "linear" alpha*l/n, "sqrt" alpha*sqrt(l/n), "constant"
            alpha*ln(l0/n).
        l0: The fixed length of the constant law (the paper's ablation uses 128); required there,
            refused elsewhere.
        span: Which keys are boosted: "prefix" (its exact tokens), "prefix+bos", "bos", "released"
            (the first n slots, n being what the tokenizer counts for the prefix alone), or explicit
            `((start, stop), ...)` over live slots, 0 being the first key (BOS).
        length_rule: What l counts at a query: "paper" the keys in its softmax without BOS, "kv" all
            of them.
        phase: Which queries: "decode" the generated tokens, "last_query" those and the last prompt
            token (t = T of Algorithm 1), "all_queries" every query after the span, each with its
            own l.
        layers: "all", "bottom" (first half), "top" (second half), "even", "odd" or explicit layer
            numbers.
        heads: "all" or explicit `((layer, head), ...)`; layers and heads intersect.

    Raises:
        AugmentationError: A field is out of range; the message names it, the value and what is
            allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    alpha: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    profile: Profile = "paper"
    law: Law = "log"
    l0: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    span: SpanRule = "prefix"
    length_rule: LengthRule = "paper"
    phase: Phase = "last_query"
    layers: LayerRule = "all"
    heads: HeadRule = "all"

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise AugmentationError(
                f"augmentation {first_problem(error, FORMS, type(self).model_fields)}"
            ) from None

    @model_validator(mode="before")
    @classmethod
    def _fill_from_profile(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        if WRITTEN in fields and "length_rule" not in fields:
            fields = {
                ("length_rule" if name == WRITTEN else name): value
                for name, value in fields.items()
            }
        return PROFILES.get(fields.get("profile", "paper"), {}) | fields

    @model_serializer(mode="wrap")
    def _as_written(self, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {
            (WRITTEN if name == "length_rule" else name): value
            for name, value in write(self).items()
        }

    @model_validator(mode="after")
    def _check(self) -> Augmentation:
        if self.law == "constant" and self.l0 is None:
            raise ValueError(
                "the constant law needs l0, the length its bias is frozen at (the paper uses 128)"
            )
        if self.law != "constant" and self.l0 is not None:
            raise ValueError(f"l0 belongs to the constant law, not to law {self.law!r}")
        if not isinstance(self.span, str):
            for start, stop in self.span:
                if not 0 <= start < stop:
                    raise ValueError(
                        f"span [{start}, {stop}) is empty or negative; give 0 <= start < stop"
                    )
            ordered = sorted(self.span)
            for (_, stop), (start, _) in pairwise(ordered):
                if start < stop:
                    raise ValueError(
                        f"the intervals of span {self.span} overlap at slot {start}; give disjoint"
                        " ones"
                    )
        return self

    def bias(self, l: Real[np.ndarray, "*shape"], n: int) -> Float[np.ndarray, "*shape"]:
        """b(l), the number added to the attention score of every key of the span (Eq. 7; the laws
        of Table "scaling").

        Args:
            l: Lengths, >= 1, any shape.
            n: l_pre of the branch (l_pro on the raw model), >= 1.

        Returns:
            The bias at each length, float64. The log law is 0 where l <= n; under profile
            "released" every law is.
        """
        l = np.asarray(l, dtype=np.float64)
        match self.law:
            case "log":
                b = self.alpha * np.log(np.maximum(l, n) / n)
            case "linear":
                b = self.alpha * l / n
            case "sqrt":
                b = self.alpha * np.sqrt(l / n)
            case "constant":
                assert self.l0 is not None
                b = np.full_like(l, self.alpha * np.log(self.l0 / n))
        return np.where(l > n, b, 0.0) if self.profile == "released" else np.asarray(b)

    def selects(self, n_layers: int, n_heads: int) -> Bool[np.ndarray, "layer head"]:
        """Which heads of which layers the bias reaches in a model of this size.

        Raises:
            AugmentationError: A layer or head the model does not have, or none is left.
        """
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
        selected = np.repeat(chosen[:, None], n_heads, axis=1)
        if self.heads != "all":
            named = np.zeros_like(selected)
            for x, y in self.heads:
                if not (0 <= x < n_layers and 0 <= y < n_heads):
                    raise AugmentationError(
                        f"head ({x}, {y}) does not exist; the model has layers 0-{n_layers - 1},"
                        f" heads 0-{n_heads - 1}"
                    )
                named[x, y] = True
            selected &= named
        if not selected.any():
            raise AugmentationError(
                f"layers {self.layers} and heads {self.heads} have nothing in common in a model of"
                f" {n_layers} layers; they intersect, so name heads of chosen layers"
            )
        return selected

    @property
    def label(self) -> str:
        """Name among the arms of a run: alpha and profile, then every field that differs from the
        profile."""
        usual = PROFILES[self.profile] | {
            WRITTEN: PROFILES[self.profile]["length_rule"],
            "law": "log",
            "layers": "all",
            "heads": "all",
        }
        others = [
            f"{field} {_short(value)}"
            for field, value in self.model_dump(
                exclude={"alpha", "profile"}, exclude_none=True
            ).items()
            if usual.get(field) != value
        ]
        return ", ".join([f"alpha {self.alpha:g} {self.profile}", *others])

    def with_profile_span(self) -> Augmentation:
        """The same augmentation, but the profile's span replaces one of explicit slots.

        Explicit slots fit only the branch that they were given for.
        """
        if isinstance(self.span, str):
            return self
        return self.model_copy(update={"span": PROFILES[self.profile]["span"]})

    def to_json(self) -> str:
        """Every field, resolved, as one JSON object."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> Augmentation:
        """The augmentation that `to_json` wrote.

        Raises:
            AugmentationError: The text is not the JSON of an augmentation.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise AugmentationError(
                f"augmentation {first_problem(error, FORMS, cls.model_fields)}"
            ) from None


def _short(value: Any) -> str:
    """A field's value in a label; long lists by their size and a hash."""
    if isinstance(value, str | float):
        return f"{value:g}" if isinstance(value, float) else value
    text = ",".join(
        ".".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in value
    )
    return (
        text
        if len(text) <= 24
        else f"{len(value)} of {hashlib.sha256(text.encode()).hexdigest()[:6]}"
    )
