"""Units of a knock-out: layers, heads, positions of the prefix, and sets of heads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from lapa2_interp.bias.places import head_pairs
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.edits import Heads
from lapa2_interp.errors import CircuitError, unknown_choice
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.load import accepts_model_name

Location = tuple[int, Any]
"""A layer, and a head, a KV head or a part of the text by name."""


@dataclass(frozen=True)
class Unit:
    """Heads, and positions of the prefix, that are knocked out together.

    Attributes:
        labels: The unit's names in tables: layer, head, kv_head, position, or name.
        heads: (layer, head) pairs.
        positions: Positions within the prefix; None for all.
    """

    labels: Mapping[str, Any]
    heads: Heads
    positions: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The labels' values, joined by dots."""
        return ".".join(str(value) for value in self.labels.values())

    @property
    def key(self) -> str:
        """An identity without the labels, by which a file finds it again."""
        return json.dumps([self.heads, self.positions])


@dataclass(frozen=True)
class PatchUnit:
    """Locations of a node that are patched together.

    Attributes:
        labels: The unit's names in tables: layer, head, kv_head, slots, part, or name.
        heads: Pairs of a layer and a head, or a KV head, or a part of the text, as the node has.
        part: For nodes of the prefix: "k", "v", or "kv" for both.
        kept: Heads that keep their own output while the others are patched.
    """

    labels: Mapping[str, Any]
    heads: tuple[Location, ...]
    part: str = ""
    kept: tuple[Location, ...] = ()


@accepts_model_name
def make_units(
    model: Model, contrast_set: ContrastSet, over: str | Mapping[str, Any]
) -> list[Unit]:
    """Units of a kind, or of sets of heads by name.

    Args:
        over: "layer", "head", "kv", "position", "head x position", or sets of heads by name.

    Raises:
        CircuitError: Unknown kind, or heads the model does not have.
    """
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    group = n_heads // facts_of(model).n_kv_heads
    layers, heads = range(n_layers), range(n_heads)
    every = all_heads(model)
    if isinstance(over, Mapping):
        units = [
            Unit({"name": name}, head_pairs(name, pairs, CircuitError))
            for name, pairs in over.items()
        ]
        check_heads(model, units)
        return units
    match over:
        case "layer":
            return [Unit({"layer": i}, tuple((i, head) for head in heads)) for i in layers]
        case "head":
            return list(head_units(n_layers, n_heads))
        case "kv":
            return [
                Unit(
                    {"layer": i, "kv_head": j},
                    tuple((i, head) for head in range(j * group, (j + 1) * group)),
                )
                for i in layers
                for j in range(n_heads // group)
            ]
        case "position":
            return [Unit({"position": p}, every, (p,)) for p in range(contrast_set.l_pre)]
        case "head x position":
            return [
                Unit({"layer": i, "head": j, "position": p}, ((i, j),), (p,))
                for i, j in every
                for p in range(contrast_set.l_pre)
            ]
    kinds = ("layer", "head", "kv", "position", "head x position")
    raise CircuitError(f"{unknown_choice('kind of unit', over, kinds)}, or sets of heads by name")


def check_heads(model: Model, units: Sequence[Unit]) -> None:
    """Refuse units with heads that the model does not have."""
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    for unit in units:
        for layer, head in unit.heads:
            if not (0 <= layer < n_layers and 0 <= head < n_heads):
                raise CircuitError(
                    f"head {(layer, head)} of {unit.name!r} does not exist; the model has layers"
                    f" 0-{n_layers - 1}, heads 0-{n_heads - 1}"
                )


def head_units(n_layers: int, n_heads: int) -> tuple[Unit, ...]:
    """A unit of each head, in the order of (layer, head)."""
    every = product(range(n_layers), range(n_heads))
    return tuple(Unit({"layer": i, "head": j}, ((i, j),)) for i, j in every)


def head_mask(model: Model, heads: Heads) -> Bool[Tensor, "layer head"]:
    """True for these heads of a model."""
    mask = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, dtype=torch.bool)
    for layer, head in heads:
        mask[layer, head] = True
    return mask.to(model.cfg.device)


def all_heads(model: Model) -> Heads:
    """Every head of a model."""
    return tuple((i, j) for i in range(model.cfg.n_layers) for j in range(model.cfg.n_heads))
