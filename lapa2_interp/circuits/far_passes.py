"""Passes over scored tokens far from a prefix, with biases that are computed from the scores.

A batch is read once up to the first scored query. Then the scored queries are read again and again
from its cache, each time under another change of their attention scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lapa2_interp.attention.hooked import augmented, edit_scores, refuse_sinks
from lapa2_interp.bias.augmentation import BIAS_CAP, Augmentation
from lapa2_interp.bias.layout import Layout
from lapa2_interp.circuits.edits import read_prefixes
from lapa2_interp.circuits.examples import ContrastExample
from lapa2_interp.methods.registry import HIDDEN
from lapa2_interp.models.attention_interface import read_without_matrix
from lapa2_interp.models.facts import Model, decided_path
from lapa2_interp.models.span_attention import SCORES_AT_ONCE


def with_filler(example: ContrastExample, filler: int, tokens: int) -> ContrastExample:
    """The example with `filler` tokens of its text before the scored ones."""
    return replace(example, text=example.text[-filler - tokens :], raw=None)


@dataclass(frozen=True)
class LayerScores:
    """Sums of a layer's scores, from which a bias is computed.

    Attributes:
        log_odds: logit(A), A being the attention on the prefix.
        sink: Log of BOS's weight.
        rest: Log of the summed weight of the other keys, neither BOS's nor the prefix's.
        n: Tokens of the prefix.
        l: Keys of each query, BOS and its own included.
        others: Number of the other keys.
    """

    log_odds: Float[Tensor, "row head query"]
    sink: Float[Tensor, "row head query"]
    rest: Float[Tensor, "row head query"]
    n: int
    l: Float[Tensor, " query"]
    others: Float[Tensor, " query"]


Rule = Callable[[int, LayerScores], Tensor]
"""A function that gives the bias of each row, head and query of a layer."""


def held(log_odds: Mapping[int, Float[Tensor, "row head query"]]) -> Rule:
    """Give every head the log-odds of another forward pass."""
    return lambda layer, scores: (log_odds[layer] - scores.log_odds).clip(-BIAS_CAP, BIAS_CAP)


def undo_keys(more: int) -> Rule:
    """Undo the weight of `more` keys."""

    def rule(_layer: int, scores: LayerScores) -> Tensor:
        mean = scores.rest - scores.others.log()
        without = torch.logaddexp(scores.sink, mean + (scores.others - more).log())
        return torch.logaddexp(scores.sink, scores.rest) - without

    return rule


def undo_equal_keys(more: int) -> Rule:
    """Undo `more` keys by the paper's ratio of lengths, l / (l - more); l without BOS.

    With n keys of the prefix and equal scores, (l - n) / (l - more - n) would be exact.
    """

    def rule(_layer: int, scores: LayerScores) -> Tensor:
        l = scores.l - 1
        return (l / (l - more)).log().expand_as(scores.log_odds)

    return rule


def lapa2_rule(alpha: float) -> Rule:
    """LaPA2's bias, Eq. 9; l without BOS."""
    law = Augmentation(alpha=alpha)

    def rule(_layer: int, scores: LayerScores) -> Tensor:
        b = torch.from_numpy(law.bias(scores.l.cpu().numpy() - 1, scores.n))
        return b.to(scores.log_odds).expand_as(scores.log_odds)

    return rule


class CachedForward:
    """A batch with its cache up to the first scored query, for many passes over the scored ones.

    Args:
        shift: Added to all positions.
        hidden: What is read with the prefix out of sight: "" nothing, "filler", or "prompt" (and
            the filler).

    Attributes:
        filler: Slots of the filler, without its last token, which is the first scored query.
        log_odds: By layer, logit(A) at the scored queries without a bias; after `logits()`.
    """

    def __init__(
        self,
        model: Model,
        examples: Sequence[ContrastExample],
        tokens: int,
        shift: int = 0,
        hidden: Literal["", "filler", "prompt"] = "",
    ) -> None:
        self.model, self.n = model, len(examples)
        rows = [(example, i) for i in range(len(examples[0].attributes)) for example in examples]
        layouts = [example.layouts[branch] for example, branch in rows]
        first, device = layouts[0], model.cfg.device
        self.prefix, self.bos = first.prefix, first.bos
        self.cached_rows, every = read_prefixes(model, rows, shift)
        # The token before the first scored one is the first scored query.
        self.width = len(first) + examples[0].n_steps - 1
        n_prompt = len(first) - self.cached_rows.cache.get_seq_length()
        self.filler = slice(len(first), self.width - tokens)
        self.cached_rows.expand(torch.arange(len(rows), device=device), capacity=self.width)
        self._read_unscored(every[:, :n_prompt], layouts if hidden == "prompt" else ())
        self._read_unscored(every[:, n_prompt:-tokens], layouts if hidden else ())
        self.tokens = every[:, -tokens:]
        # Keys of each scored query, BOS included.
        self.l = torch.arange(self.width - tokens + 1, self.width + 1, device=device).double()
        self.log_odds: dict[int, Tensor] = {}

    def _read_unscored(self, tokens: Int[Tensor, "row token"], hidden: Sequence[Layout]) -> None:
        """Read tokens, with the prefixes of these layouts out of sight."""
        if not tokens.shape[1]:
            return
        rules = [(HIDDEN,)] * len(hidden)
        cut = augmented(self.model, rules, hidden) if hidden else nullcontext()
        with cut, decided_path(self.model, tokens.shape[1], self.width) as fused:
            size = SCORES_AT_ONCE // (len(tokens) * self.model.cfg.n_heads * self.width)
            with read_without_matrix(self.model) if fused else nullcontext():
                for part in tokens.split(tokens.shape[1] if fused else max(1, size), dim=1):
                    self.cached_rows.read_tokens(part)

    def logits(
        self, rule: Rule | None = None, heads: Bool[Tensor, "layer head"] | None = None
    ) -> Float[Tensor, "branch item step vocab"]:
        """Logits of the scored queries, with a bias in some heads."""

        def change(layer: int, scores: Tensor) -> Tensor:
            sums = self.sum_scores(scores)
            if rule is None or heads is None:
                self.log_odds[layer] = sums.log_odds
                return scores
            chosen = heads[layer].to(scores.device)
            if not chosen.any():
                return scores
            b = torch.where(chosen[:, None], rule(layer, sums).to(torch.float32), 0.0)
            changed = scores.to(torch.promote_types(scores.dtype, torch.float32), copy=True)
            changed[..., self.prefix.start : self.prefix.stop] += b[..., None]
            return changed

        return self.edited_logits(change)

    def edited_logits(
        self, change: Callable[[int, Tensor], Tensor]
    ) -> Float[Tensor, "branch item step vocab"]:
        """Logits of the scored queries, their scores changed by a function, as in `edit_scores`."""
        with edit_scores(self.model, change), refuse_sinks(self.model):
            logits = self.cached_rows.read_tokens(self.tokens, keep=self.tokens.shape[1])
        self.cached_rows.crop(self.tokens.shape[1])
        return logits.unflatten(0, (-1, self.n))

    def sum_scores(self, scores: Float[Tensor, "row head query key"]) -> LayerScores:
        """The sums that a bias is computed from."""
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        inside = slice(self.prefix.start, self.prefix.stop)
        sink = wide[..., self.bos.start : self.bos.stop].logsumexp(3)
        keys = torch.ones(wide.shape[3], dtype=torch.bool, device=wide.device)
        keys[inside] = False
        keys[self.bos.start : self.bos.stop] = False
        rest = wide[..., keys].logsumexp(3)
        log_odds = wide[..., inside].logsumexp(3) - torch.logaddexp(sink, rest)
        n = self.prefix.stop - self.prefix.start
        l = self.l.to(wide)
        return LayerScores(log_odds, sink, rest, n, l, l - n - (self.bos.stop - self.bos.start))
