"""The learned vector of analyses/learned as a method of `lapa2 sweep --allow-code`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pandas as pd
import torch
from jaxtyping import Float
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp.methods.base import MethodContext
from lapa2_interp.methods.prepared import ActivationAddition
from lapa2_interp.tasks.task import Task


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LearnedVector(ActivationAddition):
    """A vector of a file is added behind the first attribute's prefix, and subtracted behind the
    second's.

    Args:
        vector: A table (.csv) with the columns dimension and value.
    """

    name: ClassVar[str] = "learned-vector"
    paper_name: ClassVar[str] = "Learned vector"
    equation: ClassVar[str] = "h_i := h_i + strength v_i, with v_i learned from pairs"
    files: ClassVar[tuple[str, ...]] = ("vector",)
    vector: str = ""

    def vectors(
        self, context: MethodContext, task: Task, attribute: str
    ) -> Mapping[int, Float[Tensor, " d_model"]]:
        values = pd.read_csv(Path(self.vector)).sort_values("dimension")["value"].to_numpy()
        first, _ = task.attributes
        sign = 1.0 if attribute == first else -1.0
        (layer,) = self._layer_numbers(int(self.layers) + 1)
        return {layer: sign * self.strength * torch.tensor(values, dtype=torch.float32)}
