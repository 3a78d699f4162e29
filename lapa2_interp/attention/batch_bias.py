"""The bias of a batch of rows on the attention scores of a forward pass.

Every row has any number of augmentations. Those that multiply scores act first. Those whose bias
is a function of the length are added next. A law that reads the scores then computes, in each head
and at each query, the log-odds of attention on its span:

    logit(A) = lse(scores on the span) - lse(all other scores)

and adds `Augmentation.shift(logit(A), l, n)`; a pooled law uses one A for all heads and live
queries of the pass. If several targets of a row act at one query of one head, they are solved
together, so that each span gets its share: with the sums over their spans,

    b_i = alpha_i * (log(tau_i) - log(1 - sum_j tau_j) - (lse_i - lse(keys in none of them)))

The first augmentations of all rows make a *term*, the second ones another, so that a term has at
most one of each row: `Term` has what no pass changes. In a pass it becomes a `_LengthPassTerm`,
with its b, a `_FactorPassTerm`, with its factor less 1, or a `_ScorePassTerm`, with the queries at
which it acts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn.functional import pad

from lapa2_interp.attention.terms import Term
from lapa2_interp.bias.augmentation import (
    BIAS_CAP,
    LAWS_BY_STRENGTH,
    Augmentation,
    steps_overlap,
)
from lapa2_interp.bias.layer_types import FULL_ATTENTION, NO_ATTENTION, LayerType, distinct_types
from lapa2_interp.bias.layout import Layout
from lapa2_interp.errors import AugmentationError, LayoutError
from lapa2_interp.models.span_attention import SpanScores

CapCallback = Callable[[int, Tensor, int], None]
"""Called with a layer, the mask of biases that were cut at +-BIAS_CAP [row head query], and the
slot of the first query."""


@dataclass
class _PassTerm:
    """A term in one forward pass, on the device of the scores.

    Attributes:
        term: The term, as for every pass.
        keys, heads: Masks of its keys and heads.
        strengths: What multiplies b in each head; None where it is 1 in all heads of the mask.
        learned: What multiplies b in each head of every row, with gradients; None elsewhere.
    """

    term: Term
    keys: Bool[Tensor, "row _"]
    heads: Bool[Tensor, "layer row head"]
    strengths: Float[Tensor, "layer row head"] | None
    learned: Float[Tensor, "layer head"] | None

    def in_heads(
        self, layer: int, b: Float[Tensor, "row #head query *key"]
    ) -> Float[Tensor, "row #head query *key"]:
        """A bias in the term's heads of a layer, times their strengths, and 0 in all others."""
        last = [1] * (b.ndim - 2)
        if self.learned is not None:
            b = b * self.learned[layer].to(b).view(1, -1, *last)
        if self.term.every_head:
            return b
        shape = len(b), -1, *last
        if self.strengths is not None:
            b = b * self.strengths[layer].view(shape)
        return torch.where(self.heads[layer].view(shape), b, 0.0)  # a cut's -inf times 0 is nan

    def to_device(self, device: torch.device) -> _PassTerm:
        """A copy on another device."""
        tensors: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


@dataclass
class _LengthPassTerm(_PassTerm):
    """The bias `b` depends on the length, and each head gets it times its strength."""

    b: Float[Tensor, "row 1 query"]
    b_keys: Float[Tensor, "row 1 query key"] | None = None

    def in_layer(self, layer: int, n_keys: int) -> Float[Tensor, "row #head query key"]:
        """`b` on the term's keys in its heads of a layer."""
        if self.b_keys is None:  # it is the same in all layers of a pass
            self.b_keys = _on_keys(self.keys, self.b, n_keys)
        return self.in_heads(layer, self.b_keys)


@dataclass
class _FactorPassTerm(_LengthPassTerm):
    """It multiplies the scores of its keys by 1 + `b`; in rows of `beyond` also those of keys after
    its layouts."""

    beyond: Bool[Tensor, "row 1 1 1"] | None = None

    def multiply(
        self, layer: int, scores: Float[Tensor, "row head query key"], lowest: float
    ) -> Float[Tensor, "row head query key"]:
        """The scores times the factor; those that a mask hides, at most `lowest`, as they are."""
        assert self.beyond is not None
        later = torch.arange(scores.shape[3], device=scores.device) >= self.keys.shape[1]
        b_keys = _on_keys(self.keys, self.b, scores.shape[3])
        b_keys = torch.where(self.beyond & later, self.b[..., None], b_keys)
        return torch.where(scores > lowest, scores * (1 + self.in_heads(layer, b_keys)), scores)


@dataclass
class _ScorePassTerm(_PassTerm):
    """The bias depends on the scores: `acts` is the mask of the queries at which it acts."""

    acts: Bool[Tensor, "row query"]


class BatchBias:
    """The bias of a batch of rows: static masks and, per forward pass, one number per row and
    query.

    Args:
        augmentations: The augmentations of each row.
        layouts: One for each row.
        size: Layers and heads of the model.
        layer_types: By layer; "full" for all by default.
        may_repeat: Allow passes with several copies of each row, one after another.
        capped: Called with the biases that were cut at +-BIAS_CAP.
        learned: By layer and head, strengths that multiply b, through which gradients flow.

    Raises:
        AugmentationError: Layers or heads the model does not have, augmentations that read the
            scores cannot be joined in a row, or learned strengths of another shape, or of a law
            whose b is no multiple of alpha.
        LayoutError: A span lies outside the sequence, or every key of a query is blocked.
    """

    def __init__(
        self,
        augmentations: Sequence[tuple[Augmentation, ...]],
        layouts: Sequence[Layout],
        size: tuple[int, int],
        layer_types: Sequence[LayerType] | None = None,
        may_repeat: bool = False,
        capped: CapCallback | None = None,
        learned: Float[Tensor, "layer head"] | None = None,
    ) -> None:
        self.layouts, self.may_repeat, self.capped = list(layouts), may_repeat, capped
        self.learned = learned
        if learned is not None:
            self._check_learned(learned, augmentations, size)
        self.size, self.layer_types = size, tuple(layer_types or [FULL_ATTENTION] * size[0])
        attends = np.array([layer_type != NO_ATTENTION for layer_type in self.layer_types])
        self.n_rows = len(self.layouts)
        length_rules, score_rules, factor_rules = (
            [
                [rule for rule in row if (rule.reads_scores, rule.multiplies) == kind]
                for row in augmentations
            ]
            for kind in ((False, False), (True, False), (False, True))
        )
        self.length_terms, self.score_terms, self.factor_terms = (
            [
                Term([row[i] if i < len(row) else None for row in kind], layouts, size, attends)
                for i in range(max(map(len, kind)))
            ]
            for kind in (length_rules, score_rules, factor_rules)
        )
        terms = [*self.factor_terms, *self.length_terms, *self.score_terms]
        self.layers = sorted({layer for term in terms for layer in term.layers})
        self.score_law_layers = {layer for term in self.score_terms for layer in term.layers}
        self.factor_layers = {layer for term in self.factor_terms for layer in term.layers}
        self.last_key = max((term.stop for term in terms), default=0)
        self.query_phase_rules = [
            (augmentation, layout)
            for row, layout in zip(augmentations, layouts, strict=True)
            for augmentation in row
            if augmentation.phase == "predicting_only"
        ]
        # Queries, keys, rows and precision: terms keep biases of this shape for all layers.
        self.current_pass: tuple[range, int, int, torch.dtype] | None = None
        self.copies = 1  # of each row in the current pass
        self.terms_by_layer: dict[int, list[_PassTerm]] = {}
        # Only several that read the scores can meet, and only cuts of all weight block a key.
        self.has_joint_targets = [len(row) > 1 and self._can_meet(row) for row in score_rules]
        if any(self.has_joint_targets):
            self._check_joint(score_rules)
        if any(rule.law == "cut" for row in length_rules for rule in row):
            self._check_blocked(length_rules)

    @staticmethod
    def _check_learned(
        learned: Tensor, augmentations: Sequence[tuple[Augmentation, ...]], size: tuple[int, int]
    ) -> None:
        """Refuse learned strengths that cannot multiply the biases of all rows."""
        if tuple(learned.shape) != size:
            raise AugmentationError(
                f"strengths have shape {tuple(learned.shape)}, and the model has {size[0]} layers"
                f" of {size[1]} heads; give one number for each"
            )
        laws = {rule.law for row in augmentations for rule in row}
        if unfit := sorted(laws - {*LAWS_BY_STRENGTH}):
            raise AugmentationError(
                f"strengths belong to the laws {', '.join(LAWS_BY_STRENGTH)}, not to law"
                f" {unfit[0]!r}, whose bias is no multiple of alpha"
            )

    def _can_meet(self, augmentations: Sequence[Augmentation]) -> bool:
        """True if any two of a row's augmentations can act at one query of one head."""
        return any(
            steps_overlap(one, second)
            and (one.head_mask(*self.size) & second.head_mask(*self.size)).any()
            for one, second in combinations(augmentations, 2)
        )

    def _check_joint(self, score_rules: Sequence[Sequence[Augmentation]]) -> None:
        """Refuse rows whose laws that read the scores cannot be solved together."""
        for row, together in enumerate(score_rules):
            if not self.has_joint_targets[row]:
                continue
            if clash := next(
                (augmentation for augmentation in together if augmentation.law != "target"), None
            ):
                raise AugmentationError(
                    f"a row has {len(together)} augmentations that read the scores, one of law"
                    f" {clash.law!r}; only those of law 'target' can be solved together. Give them"
                    " other steps or heads, where they do not meet"
                )
            spans = [
                span
                for augmentation in together
                for span in self.layouts[row].spans(augmentation.span)
            ]
            covered = [slot for span in spans for slot in range(*span)]
            if len(set(covered)) < len(covered):
                raise LayoutError(
                    "the spans of several targets of a row overlap; make them disjoint"
                )
            total = sum(
                augmentation.tau * term.heads[:, row]  # layer head
                for augmentation, term in zip(together, self.score_terms, strict=False)
            )
            if np.max(total) >= 1:
                raise AugmentationError(
                    f"the targets of a row add up to {np.max(total):g} in a head; they must leave"
                    " something to other keys, so give taus with a sum below 1"
                )

    def _check_blocked(self, length_rules: Sequence[Sequence[Augmentation]]) -> None:
        """Refuse rows in which every key of a query is blocked by knock-outs."""
        checked = set()
        for row, (rules, layout) in enumerate(zip(length_rules, self.layouts, strict=True)):
            cuts = [
                augmentation
                for augmentation in rules
                if augmentation.law == "cut" and augmentation.alpha == 1
            ]
            if not cuts or (*cuts, id(layout)) in checked:
                continue
            checked.add((*cuts, id(layout)))
            cut_heads = np.stack([rule.head_mask(*self.size) for rule in cuts])  # cut layer head
            for layer_type in distinct_types(self.layer_types):
                of_type = [kind == layer_type for kind in self.layer_types]
                # Each column is a set of cuts that act in one head.
                by_head = cut_heads[:, of_type].reshape(len(cuts), -1)
                self._check_queries(row, layout, cuts, np.unique(by_head, axis=1).T, layer_type)

    def _check_queries(
        self,
        row: int,
        layout: Layout,
        cuts: Sequence[Augmentation],
        together: Bool[np.ndarray, "set cut"],
        layer_type: LayerType,
    ) -> None:
        """Refuse a query at which the cuts that act together leave no live key."""
        live = np.ones(len(layout), bool)
        live[layout.soft : layout.soft + layout.pad] = False
        cut_keys = np.zeros((len(cuts), len(layout)), bool)  # cut key
        for cut, augmentation in zip(cut_keys, cuts, strict=True):
            for span in layout.spans(augmentation.span):
                cut[span.start : span.stop] = True
        slots = np.arange(layout.bos.start, layout.prompt.stop)
        first = layer_type.first_seen(slots, layout.pad)
        acts = np.stack([layout.acts(augmentation, slots, layer_type) for augmentation in cuts])
        active = (together[:, :, None] & acts).swapaxes(1, 2)  # set query cut
        for acting in np.unique(active.reshape(-1, len(cuts)), axis=0):
            # Keys before a slot that stay in sight under these cuts: a difference counts a range.
            n_left = np.append(0, (live & ~cut_keys[acting].any(0)).cumsum())
            reached = (active == acting).all(2).any(0) & acting.any()  # query
            if (shut := reached & (n_left[slots + 1] == n_left[first])).any():
                raise LayoutError(
                    f"row {row}: the query in slot {slots[shut][0]} sees no key that is not"
                    " blocked; leave one, such as its own or BOS"
                )

    def add(
        self, layer: int, scores: Float[Tensor, "row head query key"], first: int
    ) -> Float[Tensor, "row head query key"]:
        """The scores with the bias on the spans' keys, as a new tensor in at least float32.

        A pass may read only the beginning of the layouts; later keys get nothing. If these queries
        get no bias, the tensor itself is returned.

        Args:
            first: The slot of the first query.

        Raises:
            LayoutError: The pass has other rows than the layouts.
        """
        wide = torch.promote_types(scores.dtype, torch.float32)
        queries = range(first, first + scores.shape[2])
        this_pass = (queries, scores.shape[3], len(scores), wide)
        if self.current_pass != this_pass:
            self._begin_pass(*this_pass, scores.device)
        terms = self.terms_by_layer[layer]
        if not terms:
            return scores
        if terms[0].keys.device != scores.device:  # a model may span several
            terms = [term.to_device(scores.device) for term in terms]
        # Multiply; add the biases that depend on the length (Algorithm 1, lines 7 and 15), then
        # those that depend on the scores.
        lowest = torch.finfo(scores.dtype).min / 2
        scores = scores.to(wide)
        for term in terms:
            if isinstance(term, _FactorPassTerm):
                scores = term.multiply(layer, scores, lowest)
            elif isinstance(term, _LengthPassTerm):
                scores = scores + term.in_layer(layer, scores.shape[3])
        score_terms = [term for term in terms if isinstance(term, _ScorePassTerm)]
        if score_terms:
            b = self._score_biases(partial(_log_sum, scores), score_terms, layer)
            if self.capped is not None:
                self.capped(layer, (b.abs() >= BIAS_CAP).any(0), first)
            for term, b_term in zip(score_terms, b, strict=True):
                b_keys = _on_keys(term.keys, b_term, scores.shape[3])
                scores = scores + term.in_heads(layer, b_keys)
        return scores

    def add_to_spans(self, layer: int, scores: SpanScores) -> None:
        """`add`, to scores that are never formed, and so not multiplied (`factor_layers`).

        Raises:
            LayoutError: As `add`.
        """
        queries = range(scores.first, scores.n_keys)
        device = scores.query.device
        this_pass = (queries, scores.n_keys, len(scores), scores.wide)
        if self.current_pass != this_pass:
            self._begin_pass(*this_pass, device)
        terms = self.terms_by_layer[layer]
        if terms and terms[0].keys.device != device:
            terms = [term.to_device(device) for term in terms]
        for term in terms:
            if isinstance(term, _LengthPassTerm):
                scores.add(term.keys, term.in_heads(layer, term.b))
        score_terms = [term for term in terms if isinstance(term, _ScorePassTerm)]
        if not score_terms:
            return
        # Sums are needed from the first query at which a law acts; a pooled law reads all queries.
        acting = torch.stack([term.acts.any(0) for term in score_terms]).any(0)
        pooled = any(rule.pooled for term in score_terms for rule in term.term.rows_by_rule)
        start = 0 if pooled else int(acting.nonzero()[0])
        log_sum = partial(scores.log_sum, start=start)
        b = self._score_biases(log_sum, score_terms, layer, start)
        b = pad(b, (start, 0))
        if self.capped is not None:
            self.capped(layer, (b.abs() >= BIAS_CAP).any(0), scores.first)
        for term, b_term in zip(score_terms, b, strict=True):
            scores.add(term.keys, term.in_heads(layer, b_term))

    def _begin_pass(
        self, queries: range, n_keys: int, n_rows: int, wide: torch.dtype, device: torch.device
    ) -> None:
        """Make the terms of a pass, for all its layers, without those that add nothing.

        Raises:
            LayoutError: The pass has other rows than the layouts.
        """
        copies, left = divmod(n_rows, self.n_rows)
        if n_rows != self.n_rows and self.n_rows > 1 and (left or not self.may_repeat):
            raise LayoutError(
                f"the forward pass has {n_rows} rows, but {self.n_rows} layouts were given; give"
                " one each"
            )
        self.current_pass, self.copies = (queries, n_keys, n_rows, wide), copies
        self.terms_by_layer = {layer: [] for layer in range(self.size[0])}
        slots = np.array(queries)
        for term in (*self.factor_terms, *self.length_terms, *self.score_terms):
            made: dict[LayerType, _PassTerm | None] = {}  # all layers of a type have the same
            for layer in term.layers:
                layer_type = self.layer_types[layer]
                if layer_type not in made:
                    b = term.by_query(slots, layer_type)
                    made[layer_type] = self._pass_term(term, b, device, wide) if b.any() else None
                if (pass_term := made[layer_type]) is not None:
                    self.terms_by_layer[layer].append(pass_term)

    def _pass_term(
        self,
        term: Term,
        b: Shaped[np.ndarray, "row query"],
        device: torch.device,
        wide: torch.dtype,
    ) -> _PassTerm:
        """A term in this pass, whose `by_query` is `b`."""
        # In `generate`, copies of a row (sequences or beams) follow each other.
        keys, b_rows, beyond = (
            torch.from_numpy(values)
            .to(device, dtype, non_blocking=True)
            .repeat_interleave(self.copies, 0)
            for values, dtype in (
                (term.keys, torch.bool),
                (b, torch.bool if term.reads_scores else wide),
                (term.of_all_keys, torch.bool),
            )
        )
        heads = torch.from_numpy(term.heads).to(device, non_blocking=True)
        heads, strengths = heads.repeat_interleave(self.copies, 1), None
        if term.strengths is not None:
            strengths = torch.from_numpy(term.strengths).to(device, wide, non_blocking=True)
            strengths = strengths.repeat_interleave(self.copies, 1)
        if term.reads_scores:
            return _ScorePassTerm(term, keys, heads, strengths, None, b_rows)
        if term in self.factor_terms:
            beyond = beyond[:, None, None, None]
            return _FactorPassTerm(
                term, keys, heads, strengths, None, b_rows[:, None], beyond=beyond
            )
        return _LengthPassTerm(term, keys, heads, strengths, self.learned, b_rows[:, None])

    def _score_biases(
        self,
        log_sum: Callable[..., Float[Tensor, "row head query"]],
        terms: Sequence[_ScorePassTerm],
        layer: int,
        start: int = 0,
    ) -> Float[Tensor, "term row head query"]:
        """The biases of the laws that read the scores, at the queries from `start` on.

        Args:
            log_sum: log of the sum over keys, or over those outside them (`outside=True`).
        """
        acting = torch.stack(
            [term.acts[:, None, start:] & term.heads[layer][:, :, None] for term in terms]
        )  # term row head query
        # log of the sum over each span, and over all keys outside the spans
        sums = torch.stack([log_sum(term.keys) for term in terms])  # term row head query
        outside_all = log_sum(_union([term.keys for term in terms]), outside=True)
        b = torch.zeros_like(sums)
        for i, term in enumerate(terms):
            outside_term = outside_all if len(terms) == 1 else log_sum(term.keys, outside=True)
            log_odds = sums[i] - outside_term  # row head query
            for augmentation, rows in term.term.rows_by_rule.items():
                pass_rows = self._pass_rows(rows)
                odds = log_odds[pass_rows]
                if augmentation.pooled:
                    odds = self._pool_log_odds(odds, pass_rows)
                # l does not matter: `acts` has already compared it with n where the profile does.
                b[i, pass_rows] = augmentation.shift(odds, 1, 0)
        # Solve the targets of a row that can act together.
        joint = [row for row, is_joint in enumerate(self.has_joint_targets) if is_joint]
        if joint and len(terms) > 1:
            pass_rows = self._pass_rows(joint)
            augmentations = [
                [term.term.augmentations[row // self.copies] for row in pass_rows] for term in terms
            ]
            b[:, pass_rows] = _solve_targets(
                augmentations, sums[:, pass_rows], outside_all[pass_rows], acting[:, pass_rows]
            )
        return torch.where(acting, b, 0.0)

    def _pool_log_odds(
        self, log_odds: Float[Tensor, "row head query"], pass_rows: Sequence[int]
    ) -> Float[Tensor, "row head query"]:
        """The logit of the mean share of all heads and live queries, for each of these rows."""
        layouts = [self.layouts[row // self.copies] for row in pass_rows]
        pads = [layout.soft + layout.pad for layout in layouts]
        assert self.current_pass is not None
        slots = torch.tensor([*self.current_pass[0]], device=log_odds.device)  # query
        live = slots >= torch.tensor(pads, device=log_odds.device)[:, None]  # row query
        shares = torch.where(live, log_odds.sigmoid().mean(1), 0.0)  # row query
        mean = shares.sum(1) / live.sum(1).clamp(min=1)
        return mean.logit()[:, None, None].expand_as(log_odds)

    def _pass_rows(self, rows: Sequence[int]) -> list[int]:
        """The numbers of these rows' copies in the pass."""
        return [row * self.copies + i for row in rows for i in range(self.copies)]


def _on_keys(
    keys: Bool[Tensor, "row _"], b: Float[Tensor, "row head query"], n_keys: int
) -> Float[Tensor, "row head query key"]:
    """A bias on some keys, and 0 on all others."""
    return torch.where(pad(keys, (0, n_keys - keys.shape[1]))[:, None, None], b[..., None], 0.0)


def _union(masks: Sequence[Bool[Tensor, "row _"]]) -> Bool[Tensor, "row key"]:
    width = max(mask.shape[1] for mask in masks)
    return torch.stack([pad(mask, (0, width - mask.shape[1])) for mask in masks]).any(0)


def _log_sum(
    scores: Float[Tensor, "row head query key"], keys: Bool[Tensor, "row _"], outside: bool = False
) -> Float[Tensor, "row head query"]:
    """log of the sum of exp(score) over some keys, or over all others; -inf over none."""
    keys = pad(keys, (0, scores.shape[3] - keys.shape[1])) != outside
    return scores.masked_fill(~keys[:, None, None], -torch.inf).logsumexp(3)


def _solve_targets(
    augmentations: Sequence[Sequence[Augmentation | None]],
    sums: Float[Tensor, "term row head query"],
    outside_all: Float[Tensor, "row head query"],
    acting: Bool[Tensor, "term row head query"],
) -> Float[Tensor, "term row head query"]:
    """The biases of a row's targets that together give every span its share.

    A target with a floor is not applied where its span already has enough beside the others; then
    its keys count among the rest.

    Args:
        augmentations: The augmentations, by term and row.
        sums, outside_all: log of the sum over each span, and over the keys outside all spans.
        acting: Mask of the places at which each is to act.
    """

    def numbers(read: Callable[[Augmentation], float]) -> Float[Tensor, "term row 1 1"]:
        table = [
            [0.5 if augmentation is None else read(augmentation) for augmentation in row]
            for row in augmentations
        ]
        return torch.tensor(table, dtype=sums.dtype, device=sums.device)[:, :, None, None]

    tau = numbers(lambda augmentation: augmentation.tau or 0.0)
    alpha = numbers(lambda augmentation: augmentation.alpha)
    active = acting & (numbers(lambda augmentation: augmentation.floor) == 0)
    for _ in range(len(augmentations) + 1):
        left = 1 - torch.where(active, tau, 0.0).sum(0)  # row head query
        base = torch.stack([outside_all, *torch.where(active, -torch.inf, sums)]).logsumexp(0)
        b = tau.log() - left.log() - (sums - base)
        active = active | (acting & (b > 0))
    return torch.where(active, alpha * b, 0.0).nan_to_num(0.0).clamp(-BIAS_CAP, BIAS_CAP)
