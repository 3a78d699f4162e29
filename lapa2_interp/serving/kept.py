"""Keys and values of the texts that were read last, so that a conversation goes on from them.

A key is computed from the queries before it. Behind a biased query it is valid for that bias alone.
So a text is kept with its whole bias and the slots of its span: the same bias on the same slots
takes up all its keys, any other bias those in front of the first biased query.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lapa2_interp.attention.cache import BridgeRows
from lapa2_interp.attention.cached_heads import SlotLayer
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.bias.layout import Layout

Bias = tuple[str, ...]


@dataclass(frozen=True)
class KeptText:
    """A text that was read.

    Attributes:
        ids: Its tokens.
        bias: What `bias_of` says of it.
        n_plain: The number of keys in front of the first biased query.
        keys, values: [layer, kv_head, token, d_head].
    """

    ids: tuple[int, ...]
    bias: Bias
    n_plain: int
    keys: Tensor
    values: Tensor

    @property
    def size(self) -> int:
        """Bytes."""
        return self.keys.nbytes + self.values.nbytes


def bias_of(layout: Layout, rules: Sequence[Augmentation]) -> Bias:
    """A text's whole bias, and the slots that it acts on."""
    start, stop = layout.prefix.start, layout.prefix.stop
    return (f"{start - layout.pad}:{stop - layout.pad}", *(rule.to_json() for rule in rules))


def n_plain_keys(layout: Layout, rules: Sequence[Augmentation], n_read: int) -> int:
    """The number of keys in front of a text's first biased query.

    Args:
        n_read: Tokens of the text that were read.
    """
    if not rules:
        return n_read
    firsts = {
        "everywhere": 0,
        "after_span": layout.prefix.stop - layout.pad,
        "last_query": len(layout.ids) - 1,
        "decode": len(layout.ids),
        "predicting_only": n_read,
    }
    return min(n_read, *(firsts[rule.phase] for rule in rules))


class KeptTexts:
    """The texts that were read last, up to a number of bytes.

    Args:
        most: Bytes.
    """

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self.texts: OrderedDict[tuple[tuple[int, ...], Bias], KeptText] = OrderedDict()

    def find(self, layout: Layout, rules: Sequence[Augmentation]) -> tuple[KeptText, int] | None:
        """The text that has the most of a layout's keys, and how many; at least its last token is
        left to be read."""
        bias, best = bias_of(layout, rules), None
        plain_here = n_plain_keys(layout, rules, len(layout.ids))
        for name, text in self.texts.items():
            same = _common(text.ids, layout.ids[:-1])
            if text.bias != bias or any(
                rule.phase != "after_span" or rule.pooled for rule in rules
            ):
                same = min(same, text.n_plain, plain_here)
            if same and (best is None or same > best[1]):
                best = name, same
        if best is None:
            return None
        self.texts.move_to_end(best[0])
        return self.texts[best[0]], best[1]

    def keep(
        self,
        rows: BridgeRows,
        row: int,
        layout: Layout,
        ids: Sequence[int],
        rules: Sequence[Augmentation],
    ) -> None:
        """Keep the keys of a row that has read some tokens.

        Args:
            ids: The tokens that were read, those of the layout first.
        """
        if not self.most:
            return
        first, n = int(rows.mask[row].argmax()), len(ids)
        layers = rows.cache.layers
        if not all(isinstance(layer, SlotLayer) for layer in layers):
            return
        keys, values = (
            torch.stack([getattr(layer, name)[row, :, first : first + n] for layer in layers])
            for name in ("keys", "values")
        )
        bias = bias_of(layout, rules)
        text = KeptText(tuple(ids), bias, n_plain_keys(layout, rules, n), keys, values)
        if text.size > self.most:
            return
        self._forget((text.ids, bias))
        for name, known in list(self.texts.items()):  # what it goes on from
            if known.bias == bias and text.ids[: len(known.ids)] == known.ids:
                self._forget(name)
        while self.size + text.size > self.most:
            self._forget(next(iter(self.texts)))
        self.texts[text.ids, bias] = text
        self.size += text.size

    def _forget(self, name: tuple[tuple[int, ...], Bias]) -> None:
        if name in self.texts:
            self.size -= self.texts.pop(name).size


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of first tokens that two texts share."""
    n = min(len(first), len(second))
    return next((i for i in range(n) if first[i] != second[i]), n)
