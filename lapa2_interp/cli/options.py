"""Options that commands share, and how their texts are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from lapa2_interp.errors import AugmentationError, Lapa2Error, MethodError, ScoringError

if TYPE_CHECKING:
    from lapa2_interp.augmentation import Augmentation

ModelClass = Literal["TransformerBridge", "HookedTransformer", "TransformersModel"]
Several = Parameter(consume_multiple=True)
Unshown = Parameter(show_default=False)
AsJson = Annotated[bool, Parameter(name="--json")]


@Parameter(name="*")
@dataclass(frozen=True)
class AugmentationOptions:
    """Which bias is added, to which keys, for which queries, where."""

    alpha: float | None = None
    """Strength of the bias, >= 0; 0 is the base method. By default the paper's value for the method
    (`layout`: 0.5)."""
    profile: Literal["paper", "released"] = "paper"
    """Convention that fills span, length-rule and phase: the paper's Algorithm 1, or what its
    released code computes."""
    law: Literal["log", "linear", "sqrt", "constant"] = "log"
    """The bias as a function of l: `alpha*ln(l/n)`, `alpha*l/n`, `alpha*sqrt(l/n)`, or
    `alpha*ln(l0/n)`."""
    l0: float | None = None
    """Fixed length of the constant law (the paper uses 128)."""
    span: str | None = None
    """Boosted keys: prefix, prefix+bos, bos, released, or slots such as 1:4 or 0:2,5:6 (0 is BOS).
    """
    length_rule: Literal["paper", "kv"] | None = None
    """What l counts: keys without BOS (paper), or all keys (kv)."""
    phase: Literal["decode", "last_query", "all_queries"] | None = None
    """Augmented queries: generated tokens; those and the last prompt token; or every query after
    the span."""
    layers: str = "all"
    """all, bottom, top, even, odd, or numbers such as 0,1,5."""
    heads: str = "all"
    """all, or layer.head pairs such as 3.1,4.0."""

    def build(self, default_alpha: float) -> Augmentation | None:
        """The augmentation, or None at alpha 0."""
        from lapa2_interp.augmentation import Augmentation

        alpha = default_alpha if self.alpha is None else self.alpha
        fields: dict[str, Any] = {"profile": self.profile, "law": self.law, "l0": self.l0}
        fields |= {"layers": layer_numbers(self.layers), "heads": pairs("heads", self.heads, ".")}
        given = {
            "span": None if self.span is None else pairs("span", self.span, ":"),
            "length_rule": self.length_rule,
            "phase": self.phase,
        }
        found = Augmentation(
            alpha=alpha,
            **fields,
            **{name: value for name, value in given.items() if value is not None},
        )
        return found if found.alpha > 0 else None


def pairs(option: str, text: str, mark: str) -> Any:
    """ "3.1,4.0" as pairs of numbers; words stay as they are, and the augmentation checks them."""
    if not text[:1].isdigit():
        return text
    try:
        return tuple((int(a), int(b)) for a, b in (part.split(mark) for part in text.split(",")))
    except ValueError:
        raise AugmentationError(
            f"--{option} {text!r} is not a list such as 1{mark}4,6{mark}8"
        ) from None


def layer_numbers(text: str) -> Any:
    """ "0,1,5" as numbers; words stay as they are."""
    if not text[:1].isdigit():
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise AugmentationError(f"--layers {text!r} is not a list such as 0,1,5") from None


def settings(texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE options of --set; the types of the fields they set convert and check the
    values."""
    return _assignments(texts, "set", "NAME=VALUE, such as omega=60", MethodError)


def columns(texts: Sequence[str]) -> dict[str, str]:
    """COLUMN=VALUE options of --only."""
    return _assignments(texts, "only", "COLUMN=VALUE, such as task=sentiment", ScoringError)


def _assignments(
    texts: Sequence[str], option: str, form: str, kind: type[Lapa2Error]
) -> dict[str, str]:
    malformed = [text for text in texts if "=" not in text]
    if malformed:
        raise kind(f"--{option} {malformed[0]!r} is not of the form {form}")
    return dict(text.split("=", 1) for text in texts)
