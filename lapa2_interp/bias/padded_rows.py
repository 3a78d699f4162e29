"""Several layouts as the rows of one batch: ids, mask and positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from lapa2_interp.bias.layout import Layout, left_pad
from lapa2_interp.errors import LayoutError


class PaddedRows(NamedTuple):
    """Left-padded rows of several layouts, as a model reads them in one pass.

    Example:
        >>> from lapa2_interp import Augmentation, Layout, PaddedRows, augmented, load_model
        >>> model = load_model("tiny-gpt2")
        >>> texts = (" The lake", " A book is on the table")
        >>> rows = PaddedRows.of([Layout.of(model, "Very positive:", text) for text in texts])
        >>> with augmented(model, Augmentation(alpha=0.5), rows.layouts):
        ...     logits = model(rows.ids, attention_mask=rows.mask, position_ids=rows.positions)
        >>> tuple(logits.shape[:2]) == tuple(rows.ids.shape)
        True

    Attributes:
        layouts: One for each row, padded so that all end at one slot.
        ids: Token ids, after the slots of the longest soft prefix. Padding has the row's BOS id.
        mask: 1 in live slots, those of soft prefixes among them, and 0 in padding.
        positions: Those that each row has alone; 0 on padding. A HookedTransformer takes none: it
            derives the same from the mask.
    """

    layouts: list[Layout]
    ids: Int[Tensor, "row query"]
    mask: Int[Tensor, "row slot"]
    positions: Int[Tensor, "row query"]

    @classmethod
    def of(
        cls,
        layouts: Sequence[Layout],
        device: Any = None,
        bos_positions: Sequence[int] | None = None,
    ) -> PaddedRows:
        """The rows of layouts, which are padded unless they already end at one slot.

        Args:
            device: Of the tensors; by default the CPU.
            bos_positions: The position of each row's BOS; 0 by default.

        Raises:
            LayoutError: No layout.
        """
        if not layouts:
            raise LayoutError("found no layout; give one for each row, such as [Layout.of(...)]")
        n_soft = max(layout.soft for layout in layouts)
        fits = len({len(layout) for layout in layouts}) == 1 and all(
            layout.bos.start >= n_soft for layout in layouts
        )
        padded = list(layouts) if fits else left_pad(layouts)

        def column(numbers: Sequence[int]) -> Int[Tensor, "row 1"]:
            return torch.tensor(numbers, device=device)[:, None]

        soft = column([row.soft for row in padded])
        bos = column([row.bos.start for row in padded])
        slot = torch.arange(len(padded[0]), device=device)
        ids = [(row.ids[0],) * (row.bos.start - n_soft) + row.ids for row in padded]
        count = slot[n_soft:] - bos  # row query
        return cls(
            layouts=padded,
            ids=torch.tensor(ids, device=device),
            mask=((slot < soft) | (slot >= bos)).long(),
            positions=torch.where(count < 0, 0, count + column(bos_positions or [0] * len(padded))),
        )
