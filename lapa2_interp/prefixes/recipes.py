"""Recipes for the training of soft prefixes.

There is a default for small machines, and those of the literature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lapa2_interp._util.values import Count, Natural, NotNegative, Positive
from lapa2_interp.errors import PrefixError, unknown_choice, validation_message
from lapa2_interp.models.machine import Dtype


class TrainingRecipe(BaseModel):
    """All settings of a training. The defaults are for a small model on a CPU."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    objective: Literal["mle", "contrastive"] = "mle"
    """mle: likelihood of the attribute's texts; contrastive: also distinguish the attributes."""
    parameterisation: Literal["direct", "air", "mlp", "linear"] = "direct"
    """direct: the keys and values themselves; air: a table per layer and one affine map for K and
    V; mlp: one table through Linear-Tanh-Linear for all layers (Prefix-Tuning); linear: one table
    through a linear map for all layers (Con-Prefix)."""
    start: Literal["text", "hard", "set", "random", "zero"] = "text"
    """First values: keys and values of on-attribute text, of the hard prefix, or of the prefixes of
    another set (these three only with direct); normal(0, 0.02); or zero."""
    shared: Natural = 0
    """Pieces of text, of all attributes together, that one prefix learns first (only with direct).
    Each attribute's prefix starts from it, so that the prefixes of a set differ by their attributes
    and not by their starts."""
    slots: Count = 20
    middle: Count = 512
    """Width of the tables of air, mlp (hidden layer) and linear."""
    shifted: bool = False
    """Text positions start after the slots."""
    lr: Positive = 2e-2
    epochs: Count = 1
    batch: Count = 16
    """Texts of a step; a contrastive step reads each text after every prefix."""
    max_tokens: Count = 64
    """Tokens of a text that are read, BOS not counted."""
    limit: Count | None = None
    """Pieces of text per attribute."""
    warmup: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the steps over which the learning rate rises; it falls linearly to 0 after."""
    weight_decay: NotNegative = 0.0
    clip: Positive = 1.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout in the frozen network."""
    gen_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """w of the contrastive loss."""
    sum_loss: bool = True
    """Contrastive: s_c is a text's whole NLL, not its mean per token."""
    logit_scale: Positive = 1.0
    """Contrastive: the softmax is over -logit_scale * s_c. Whole texts differ by several nats for
    reasons other than the attribute. An unscaled softmax is therefore far too certain, and its
    held-out loss rises from the first step."""
    negatives: Literal["all", "one"] = "all"
    """Contrastive: the softmax is over all attributes, or over the text's own and one other
    attribute, drawn at random."""
    check_every: Count = 25
    """Steps between held-out losses; a checkpoint is written at each."""
    patience: Count | None = 6
    """Held-out losses without a new best before training stops; the best step is kept. None trains
        to the end and keeps the last step, as the literature's recipes do."""
    seed: int = 42
    dtype: Dtype = "bfloat16"
    """Precision of the network; the prefix is trained in float32."""

    @model_validator(mode="after")
    def _check(self) -> TrainingRecipe:
        if self.parameterisation != "direct" and (
            self.start in ("text", "hard", "set") or self.shared
        ):
            what = "shared" if self.shared else f"start {self.start!r}"
            raise ValueError(
                f"{what} sets keys and values themselves, which parameterisation"
                f" {self.parameterisation!r} does not hold; use start=random and shared=0, or"
                " parameterisation=direct"
            )
        if self.shared and self.start == "set":
            raise ValueError(
                "start 'set' begins each attribute with a prefix of its own; use shared=0"
            )
        return self


AIR_DECODING: Mapping[str, Any] = {
    "parameterisation": "air",
    "start": "random",
    "batch": 4,
    "max_tokens": 512,
    "weight_decay": 0.01,
    "dropout": 0.1,
    "limit": 5000,
    "patience": None,
    "dtype": "float32",
}
"""Settings of Air-Decoding's released code that LaPA2's has, too."""
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "small": {"shared": 1600, "logit_scale": 0.25},
    "lapa2": {**AIR_DECODING, "lr": 2e-5, "epochs": 50},
    "air": {**AIR_DECODING, "lr": 3e-5, "epochs": 5},
    "con-prefix": {
        "objective": "contrastive",
        "parameterisation": "linear",
        "start": "zero",
        "slots": 10,
        "middle": 800,
        "shifted": True,
        "lr": 5e-5,
        "epochs": 3,
        "batch": 8,
        "max_tokens": 128,
        "warmup": 0.0,
        "dropout": 0.1,
        "gen_weight": 0.0,
        "sum_loss": False,
        "negatives": "one",
        "patience": None,
        "dtype": "float32",
    },
    "prefix-tuning": {
        "parameterisation": "mlp",
        "start": "random",
        "slots": 5,
        "shifted": True,
        "lr": 5e-5,
        "epochs": 5,
        "batch": 10,
        "max_tokens": 512,
        "warmup": 0.0,
        "patience": None,
        "seed": 101,
        "dtype": "float32",
    },
}
"""Named recipes: one for small machines; the released LaPA2 code's and Air-Decoding's (methods
section 4); Con-Prefix's and Prefix-Tuning's. Con-Prefix's own code feeds texts without BOS; here
every text starts with one, as in decoding."""


def training_recipe(name: str = "small", **changes: Any) -> TrainingRecipe:
    """A named recipe with changes.

    Raises:
        PrefixError: Unknown name or field, or a value out of range.
    """
    if name not in RECIPES:
        raise PrefixError(unknown_choice("recipe", name, RECIPES))
    fields = dict(RECIPES[name])
    if changes.get("parameterisation", "direct") != "direct" and "parameterisation" not in fields:
        fields |= {"start": "random", "shared": 0}  # the start of small needs direct
    if changes.get("start") == "set":
        fields["shared"] = 0
    try:
        return TrainingRecipe.model_validate(fields | changes, strict=True)
    except ValidationError as error:
        raise PrefixError(
            f"recipe: {validation_message(error, fields=TrainingRecipe.model_fields)}"
        ) from None
