"""Activation addition: a vector is added to the residual stream at every generated token.

    v_i = mean over texts t of h_i(prefix_a + t) - mean over c != a of h_i(prefix_c + t)
    h_i <- h_i + strength v_i   after the layers i, from the last token of the prompt on

h_i is the residual stream after layer i, read at the last token. This is contrastive activation
addition (Rimsky et al., 2024, arXiv 2312.06681) with pairs of texts that differ by their prefix; the
original has pairs of a question with either answer, one layer, and the same tokens to add to.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from lapa2_interp._util.parsing import read_text
from lapa2_interp.bias.places import FORMS, read_place
from lapa2_interp.errors import MethodError
from lapa2_interp.methods.base import (
    Branch,
    LogProbs,
    Method,
    MethodContext,
    Passes,
    Prepared,
    State,
    check_branches,
)
from lapa2_interp.tasks.task import Task, extra_prompts

MOST_TEXTS = 32
"""Texts of a mean, by default."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ActivationAddition(Method):
    """Contrastive activation addition. Choose layers and strength on prompts that are not those of
    a comparison.

    Args:
        strength: The number of times that the vector is added; below 0 it is subtracted. At 0 the
            texts are those of the model alone.
        layers: "middle", the layer in the middle, or numbers such as "5" or "4-6"; each has a
            vector of its own.
        texts: A file of texts, one a line, over which the vector is a mean; by default the first
            32 of the prompts that the package has for a run's need of more (`tasks/more`).
        with_prefix: The prompt stands behind the attribute's hard prefix, on which LaPA2 can act.
    """

    name: ClassVar[str] = "caa"
    paper_name: ClassVar[str] = "CAA"
    equation: ClassVar[str] = (
        "h_i := h_i + strength (mean h_i after prefix a - mean h_i after the others)"
    )
    alpha: ClassVar[float] = 0.0
    in_paper: ClassVar[bool] = False
    files: ClassVar[tuple[str, ...]] = ("texts",)
    changes_network: ClassVar[bool] = True
    when_empty: ClassVar[str] = (
        "strength is so large that the model's numbers overflow; choose one nearer to 0"
    )
    strength: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    layers: str | int = "middle"
    texts: str = ""
    with_prefix: bool = False

    def branches(self, task: Task, attribute: str) -> tuple[Branch, ...]:
        task.others(attribute)
        prefix = task.prefix(attribute)
        return (Branch("prefix", prefix),) if self.with_prefix else (Branch("base"),)

    def combine(self, log_probs: LogProbs, state: State) -> Float[Tensor, "sample vocab"]:
        name = "prefix" if self.with_prefix else "base"
        return check_branches(log_probs, name)[name]

    def prepare(self, context: MethodContext, task: Task, attribute: str, prompt: str) -> Prepared:
        if self.strength == 0:
            return Prepared()
        vectors = context.cached(
            ("activation addition", self, task.model_dump_json(), attribute),
            lambda: self.vectors(context, task, attribute),
        )
        norms = {str(layer): round(float(vector.norm()), 4) for layer, vector in vectors.items()}
        return Prepared(vectors, summary={"norm of the vector, by layer": norms})

    def intervene(self, passes: Passes, prepared: Prepared) -> AbstractContextManager[None]:
        return passes.shift(prepared.known or {})

    def vectors(
        self, context: MethodContext, task: Task, attribute: str
    ) -> Mapping[int, Float[Tensor, " d_model"]]:
        """What is added, by layer.

        Raises:
            MethodError: The model has no such layer, or the file of texts cannot be read.
            TaskError: The task has no other attribute.
        """
        texts = self._read_texts() if self.texts else _default_texts(task)
        mean_of_attribute, *means_of_others = (
            context.mean_residual(task.prefix(name), texts)
            for name in (attribute, *task.others(attribute))
        )
        mean_of_others = torch.stack(means_of_others).mean(dim=0)
        difference = self.strength * (mean_of_attribute - mean_of_others)  # layer d_model
        return {layer: difference[layer] for layer in self._chosen(len(difference))}

    def _chosen(self, n_layers: int) -> tuple[int, ...]:
        text = str(self.layers)
        layers = (n_layers // 2,) if text == "middle" else read_place("layers", text)
        if not isinstance(layers, tuple):
            allowed = f"'middle' or {FORMS['layers']}"
            raise MethodError(f"caa: layers: takes {allowed}; found {text[:80]!r}")
        if max(layers) >= n_layers:
            raise MethodError(
                f"caa: layer {max(layers)} does not exist; the model has layers 0-{n_layers - 1}"
            )
        return tuple(sorted(set(layers)))

    def _read_texts(self) -> tuple[str, ...]:
        try:
            texts = tuple(filter(str.strip, read_text(Path(self.texts)).splitlines()))
        except (OSError, ValueError) as error:
            raise MethodError(f"caa: cannot read the texts in {self.texts}: {error}") from None
        if not texts:
            raise MethodError(f"caa: {self.texts} has no texts; give a file with one a line")
        return texts


def _default_texts(task: Task) -> tuple[str, ...]:
    """The package's prompts, those of a built-in task if it is one: a text then depends on no other
    prompt of its run."""
    return (extra_prompts(task.name) or extra_prompts("sentiment"))[:MOST_TEXTS]
