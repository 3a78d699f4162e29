"""A card of heads: where a bias acts in one model, and how strongly.

`lapa2 steer`, `select` and `learn` write cards with more facts (`circuits.selection.Selection`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from lapa2_interp._util.parsing import parse_object, read_text
from lapa2_interp._util.paths import looked_for
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.errors import AugmentationError, CircuitError, validation_message

AnyCard = TypeVar("AnyCard", bound="HeadCard")


class HeadCard(BaseModel):
    """Heads of one model, with what a bias there needs.

    Attributes:
        model, weights: The model whose heads they are, and the source of its weights.
        heads: (layer, head) pairs, best first.
        positions: Positions within the prefix; None for all of it.
        alpha: The strength that was tuned; None where none was.
        strengths: Of each of the heads, where they were learned; else none, and every head has 1.
        law, l0: The law of the bias with which strengths were learned, and where it stops.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    model: str
    weights: str
    heads: tuple[tuple[int, int], ...]
    positions: tuple[int, ...] | None
    alpha: float | None = None
    strengths: tuple[float, ...] = ()
    law: Literal["log", "constant"] = "log"
    l0: float | None = None

    def augmentation(self, alpha: float | None = None, **fields: Any) -> Augmentation:
        """The bias in these heads, on these tokens.

        Args:
            alpha: Strength; by default the card's. Where it has none, learned strengths act as they
                were learned (1), and heads get 0.5.
            fields: As `Augmentation` takes them, without heads.

        Raises:
            AugmentationError: Heads are given, or as `Augmentation`.
        """
        for name in ("heads", "strengths"):
            if name in fields:
                raise AugmentationError(
                    f"a card gives the heads itself; found {name}={fields[name]!r}: leave them"
                    " out, or make an Augmentation of these heads without the card"
                )
        if self.positions is not None:
            fields = {"span": ("prefix", self.positions)} | fields
        if alpha is None:
            untuned = 1.0 if self.strengths else 0.5
            alpha = untuned if self.alpha is None else self.alpha
        return Augmentation(alpha=alpha, **self.fields() | fields)

    def fields(self) -> dict[str, Any]:
        """The fields of an `Augmentation` that say where the bias acts, and how strongly beside
        alpha: heads, or strengths with their law."""
        if not self.strengths:
            return {"heads": self.heads}
        strengths = tuple(
            (*head, strength) for head, strength in zip(self.heads, self.strengths, strict=True)
        )
        return {"strengths": strengths, "law": self.law, "l0": self.l0}

    def recipe_parameters(self) -> dict[str, Any]:
        """What it gives every recipe (`parse_recipes`): heads, or strengths and their law; tokens
        if some were chosen; and alpha if it was tuned."""
        chosen = {**self.fields(), "tokens": self.positions, "alpha": self.alpha}
        return {name: value for name, value in chosen.items() if value is not None}

    def check_weights(self, name: str, weights: str) -> None:
        """Refuse another model than the one whose heads these are.

        Args:
            name, weights: Of the other model.

        Raises:
            CircuitError: Other weights.
        """
        if weights != self.weights:
            raise CircuitError(
                f"the card belongs to {self.model} with {self.weights}; found {name} with"
                f" {weights}: choose again in this model (`lapa2 select`)"
            )

    @classmethod
    def load(cls: type[AnyCard], file: str | Path) -> AnyCard:
        """Load a card from JSON.

        Raises:
            CircuitError: The file cannot be read, or is not a card.
        """
        try:
            return cls.model_validate_json(json.dumps(parse_object(read_text(Path(file)))))
        except OSError as error:
            raise CircuitError(
                f"cannot read {file}: {error.strerror or error}{looked_for(file)}"
            ) from error
        except ValueError as error:
            raise CircuitError(
                f"{file} is not a card of heads ({validation_message(error)}); `lapa2 select` makes"
                " one"
            ) from error
