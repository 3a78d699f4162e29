"""Activation addition of analyses/messages as a method of `lapa2 sweep --allow-code`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, ClassVar

import pandas as pd
import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from lapa2_interp.errors import MethodError
from lapa2_interp.methods.base import MethodContext, Passes, Prepared
from lapa2_interp.methods.chat import Chat
from lapa2_interp.tasks.task import Task


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class MessageVector(Chat):
    """A chat in which the vector of its message, a chat's first line, is added after a layer.

        h <- h + strength (mean h behind the message - mean h behind a neutral one)

    from the last token before an answer on.

    Args:
        file: A table (.parquet) with the columns message and vector.
        layer: The layer after which it is added.
        strength: The number of times that it is added.
    """

    name: ClassVar[str] = "message-vector"
    paper_name: ClassVar[str] = "Activation addition"
    display_name: ClassVar[str] = "Activation addition"
    equation: ClassVar[str] = "h := h + strength (mean h behind the message - behind a neutral one)"
    files: ClassVar[tuple[str, ...]] = ("file",)
    changes_network: ClassVar[bool] = True
    file: str = ""
    layer: int = 0
    strength: Annotated[float, Field(allow_inf_nan=False)] = 1.0

    @property
    def stored_parameters(self) -> dict[str, float | int | bool | str]:
        own = {"file": self.file, "layer": self.layer, "strength": self.strength}
        return super().stored_parameters | own

    def prepare(self, context: MethodContext, task: Task, attribute: str, prompt: str) -> Prepared:
        vectors = context.cached(
            ("message vectors", self.file),
            lambda: pd.read_parquet(Path(self.file)).set_index("message")["vector"],
        )
        message = prompt.splitlines()[0]
        if message not in vectors:
            raise MethodError(f"{self.file} has no vector of the message {message[:80]!r}")
        return Prepared(self.strength * torch.tensor(vectors[message], dtype=torch.float32))

    def intervene(
        self, passes: Passes, prepared: Sequence[Prepared]
    ) -> AbstractContextManager[None]:
        return passes.shift({self.layer: torch.stack([one.known for one in prepared])})
