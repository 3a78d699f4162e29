"""Rows that read a text of their own between the tokens that they are given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapa2_interp.attention.cache import Rows, WrappedRows
from lapa2_interp.attention.recorder import Recorder


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
