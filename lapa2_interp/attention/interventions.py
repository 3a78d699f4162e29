"""What a method does to the network while a batch is decoded (`methods.base.Method.intervene`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapa2_interp.attention.cache import Rows, WrappedRows
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.attention.residual import shifted_residual
from lapa2_interp.models.facts import Model


@dataclass
class BatchPasses:
    """The passes that decode a batch, as a `methods.base.Passes`.

    Attributes:
        rows: What reads the batch; inside a block, with what the block changes.
        last_of_prompt: The slot of the last token of all prompts.
        prompts: By number of rows of a pass, the batch's prompt of each row.
        recorder: The batch's, if it is traced.
    """

    model: Model
    rows: Rows
    last_of_prompt: int
    prompts: Mapping[int, Sequence[int]]
    recorder: Recorder | None

    def shift(self, vectors: Mapping[int, Tensor]) -> AbstractContextManager[None]:
        return shifted_residual(self.model, vectors, self.last_of_prompt, self.prompts)

    @contextmanager
    def remind(self, ids: Sequence[int], every: int) -> Iterator[None]:
        self.rows = RemindedRows(self.rows, ids, every, self.recorder)
        yield


class RemindedRows(WrappedRows):
    """Rows that read the same tokens after every few tokens, in one pass with the last of these.

    Args:
        ids: What they read.
        every: The number of tokens after which they read it.
        recorder: Told that the queries before the last one predict nothing that is drawn.
    """

    def __init__(
        self, rows: Rows, ids: Sequence[int], every: int, recorder: Recorder | None
    ) -> None:
        super().__init__(rows)
        self.ids, self.every, self.recorder = ids, every, recorder
        self.n_read = 0

    def read_tokens(
        self, tokens: Int[Tensor, "row query"], keep: int = 1
    ) -> Float[Tensor, "row last vocab"]:
        self.n_read += tokens.shape[1]
        if self.n_read % self.every == 0:
            if self.recorder is not None:
                self.recorder.skip(len(self.ids))
            reminder = tokens.new_tensor(self.ids).expand(len(tokens), -1)
            tokens = torch.cat([tokens, reminder], dim=1)
        return super().read_tokens(tokens, keep)
