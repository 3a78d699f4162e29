"""Keys and values of the texts that were read last, so that a conversation goes on from them.

A key is computed from what the queries up to it attend to, and so from their bias. A later text
takes up the keys in front of the first query whose bias would be another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lapa2_interp.attention.cache import BridgeRows
from lapa2_interp.attention.cached_heads import SlotLayer
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.layout import Layout


@dataclass(frozen=True)
class KeptText:
    """A text that was read.

    Attributes:
        ids: Its tokens, those that were generated included.
        layout: The layout of its prompt, without padding.
        rules: The bias under which it was read.
        keys, values: [layer, kv_head, token, d_head].
    """

    ids: tuple[int, ...]
    layout: Layout
    rules: tuple[Augmentation, ...]
    keys: Tensor
    values: Tensor

    @property
    def size(self) -> int:
        """Bytes."""
        return self.keys.nbytes + self.values.nbytes

    def n_valid(self, layout: Layout, rules: Sequence[Augmentation]) -> int:
        """The number of its first keys that another text has, too, under that text's bias. At least
        the last token of that text is left to be read.

        Args:
            layout: That of the other text, without padding.
        """
        ids = layout.ids[:-1]
        n = min(len(ids), len(self.ids))
        n = next((i for i in range(n) if ids[i] != self.ids[i]), n)
        queries = np.arange(n)
        before = [self.layout.acts(rule, queries) for rule in self.rules]
        now = [layout.acts(rule, queries) for rule in rules]
        if self._has_bias_of(layout, rules):
            others = [acted != acts for acted, acts in zip(before, now, strict=True)]
        else:
            others = [*before, *now]
        differs = np.logical_or.reduce([np.zeros(n, bool), *others])
        return int(differs.argmax()) if differs.any() else n

    def _has_bias_of(self, layout: Layout, rules: Sequence[Augmentation]) -> bool:
        """True if an equal query has an equal bias, wherever both act."""
        if self.rules != tuple(rules) or self.layout.n_bos != layout.n_bos:
            return False
        return not any(
            self.layout.spans(rule.span) != layout.spans(rule.span)
            or self.layout.n(rule.span) != layout.n(rule.span)
            for rule in rules
        )


class KeptTexts:
    """The texts that were read last, up to a number of bytes.

    Args:
        most: Bytes.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.texts: list[KeptText] = []  # the one that was used last stands last

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(text.size for text in self.texts)

    def find(self, layout: Layout, rules: Sequence[Augmentation]) -> tuple[KeptText | None, int]:
        """The text that has the most of a layout's keys, and how many."""
        counts = [text.n_valid(layout, rules) for text in self.texts]
        if not any(counts):
            return None, 0
        best = int(np.argmax(counts))
        text = self.texts.pop(best)
        self.texts.append(text)
        return text, counts[best]

    def keep(
        self,
        rows: BridgeRows,
        row: int,
        layout: Layout,
        answer: Sequence[int],
        rules: tuple[Augmentation, ...],
    ) -> None:
        """Keep the keys of a row.

        Args:
            layout: Of the row's text, without padding.
            answer: The tokens that the row has read behind it.
        """
        layers, ids = rows.cache.layers, (*layout.ids, *answer)
        if not self.most or not all(isinstance(layer, SlotLayer) for layer in layers):
            return
        first, n = int(rows.mask[row].argmax()), len(ids)
        keys, values = (
            torch.stack([getattr(layer, name)[row, :, first : first + n] for layer in layers])
            for name in ("keys", "values")
        )
        new = KeptText(ids, layout, rules, keys, values)
        if new.size > self.most:
            return
        # It has all keys of the text that it goes on from.
        self.texts = [
            text
            for text in self.texts
            if text.rules != rules or text.ids != new.ids[: len(text.ids)]
        ]
        while self.size + new.size > self.most:
            del self.texts[0]
        self.texts.append(new)


def take_up(
    rows: BridgeRows,
    layouts: Sequence[Layout],
    texts: Sequence[KeptText | None],
    n_cached: Sequence[int],
    capacity: int,
) -> None:
    """Begin rows with the first keys of texts that were read.

    Args:
        layouts: The texts that the rows will read.
        texts: One for each row; None where a row begins with nothing.
        n_cached: The number of keys that each row takes.
        capacity: Slots that the rows have room for.
    """
    any_text = next(text for text in texts if text is not None)
    begun = [(text or any_text, n) for text, n in zip(texts, n_cached, strict=True)]
    keys = [text.keys[:, :, :n] for text, n in begun]
    values = [text.values[:, :, :n] for text, n in begun]
    rows.start_after_keys(layouts, keys, values, capacity)
