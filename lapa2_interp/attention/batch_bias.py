"""The bias of a batch of rows on the attention scores of a forward pass.

Every row has any number of augmentations. Augmentations whose bias is a function of the length are
added first. A law that reads the scores then computes, in each head and at each query, the log-odds
of attention on its span:

    logit(A) = lse(scores on the span) - lse(all other scores)

and adds `Augmentation.shift(logit(A), l, n)`; a pooled law uses one A for all heads and live
queries of the pass. If several targets of a row act at one query of one head, they are solved
together, so that each span gets its share: with the sums over their spans,

    b_i = alpha_i * (log(tau_i) - log(1 - sum_j tau_j) - (lse_i - lse(keys in none of them)))

The first augmentations of all rows make a *term*, the second ones another, so that a term has at
most one of each row: `_Term` has what no pass changes. In a pass it becomes a `_LengthPassTerm`,
with its b, or a `_ScorePassTerm`, with the queries at which it acts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from lapa2_interp._util.errors import AugmentationError, LayoutError
from lapa2_interp.bias.augmentation import BIAS_CAP, Augmentation, steps_overlap
from lapa2_interp.bias.layer_types import FULL_ATTENTION, NO_ATTENTION, LayerType, distinct_types
from lapa2_interp.bias.layout import Layout
from lapa2_interp.models.span_attention import SpanScores

CapCallback = Callable[[int, Tensor, int], None]
"""Called with a layer, the mask of biases that were cut at +-BIAS_CAP [row head query], and the
slot of the first query."""


def _selected_heads(
    augmentation: Augmentation, size: tuple[int, int], attends: Bool[np.ndarray, " layer"]
) -> Bool[np.ndarray, "layer head"]:
    """The heads that an augmentation reaches in a model with layers without attention.

    Raises:
        AugmentationError: Such a layer is named, or none of the chosen layers has attention.
    """
    chosen = augmentation.head_mask(*size)
    lost = np.flatnonzero(chosen.any(1) & ~attends)
    named = not isinstance(augmentation.layers, str) or augmentation.heads != "all"
    if len(lost) and (named or not chosen[attends].any()):
        raise AugmentationError(
            f"layer {lost[0]} has no attention, so nothing can be augmented there; layers with"
            f" attention: {', '.join(map(str, np.flatnonzero(attends)))}"
        )
    return chosen & attends[:, None]


class _Term:
    """At most one augmentation for each row, with static masks of keys and heads."""

    def __init__(
        self,
        augmentations: Sequence[Augmentation | None],
        layouts: Sequence[Layout],
        size: tuple[int, int],
        attends: Bool[np.ndarray, " layer"],
    ) -> None:
        # The keys and heads of each row.
        self.augmentations, self.layouts = list(augmentations), list(layouts)
        keys = np.zeros((len(layouts), max(len(layout) for layout in layouts)), bool)  # row key
        heads = np.zeros((size[0], len(layouts), size[1]), bool)  # layer row head
        chosen = {
            augmentation: _selected_heads(augmentation, size, attends)
            for augmentation in set(augmentations)
            if augmentation is not None
        }
        for row, (augmentation, layout) in enumerate(zip(augmentations, layouts, strict=True)):
            if augmentation is not None:
                for span in layout.spans(augmentation.span):
                    keys[row, span.start : span.stop] = True
                heads[:, row] = chosen[augmentation]  # layer head
        # The last key, the layers, and the rows of each law that reads the scores.
        self.stop = int(np.flatnonzero(keys.any(0)).max(initial=-1)) + 1
        self.keys, self.heads = keys[:, : self.stop], heads
        self.layers = [layer for layer in range(size[0]) if heads[layer].any()]
        biased = [augmentation is not None for augmentation in augmentations]
        self.every_head = bool(heads[self.layers][:, biased].all())
        self.rows_by_rule = {
            augmentation: [
                row for row, row_rule in enumerate(augmentations) if row_rule == augmentation
            ]
            for augmentation in set(augmentations)
            if augmentation is not None and augmentation.reads_scores
        }

    def length_biases(
        self, slots: Int[np.ndarray, " query"], layer_type: LayerType
    ) -> Float[np.ndarray, "row query"]:
        """b of every row and query in layers of one type, for laws that depend on the length."""
        return self._by_row(
            slots,
            # `check_bias` also checks a user's custom law.
            lambda augmentation, layout: augmentation.check_bias(
                layout.bias(augmentation, slots, layer_type)
            ),
            np.zeros(len(slots)),
        )

    def acting_queries(
        self, slots: Int[np.ndarray, " query"], layer_type: LayerType
    ) -> Bool[np.ndarray, "row query"]:
        """The queries at which laws that read the scores act, in layers of one type."""
        return self._by_row(
            slots,
            lambda augmentation, layout: layout.acts(augmentation, slots, layer_type),
            np.zeros(len(slots), bool),
        )

    def _by_row(
        self,
        slots: Int[np.ndarray, " query"],
        read: Callable[[Augmentation, Layout], np.ndarray],
        nothing: np.ndarray,
    ) -> np.ndarray:
        """A value of every row and query, read once for samples that share a prompt's layout."""
        values: dict[tuple[int, int], np.ndarray] = {}
        for augmentation, layout in zip(self.augmentations, self.layouts, strict=True):
            if (id(augmentation), id(layout)) in values:
                continue
            value = nothing if augmentation is None else read(augmentation, layout)
            if augmentation is not None and augmentation.phase == "predicting_only":
                value = np.where(slots == slots[-1], value, nothing)
            values[id(augmentation), id(layout)] = value
        return np.stack(
            [
                values[id(augmentation), id(layout)]
                for augmentation, layout in zip(self.augmentations, self.layouts, strict=True)
            ]
        )


@dataclass
class _PassTerm:
    """A term in one forward pass, on the device of the scores.

    Attributes:
        static: The term, as for every pass.
        keys, heads: Masks of its keys and heads.
    """

    static: _Term
    keys: Bool[Tensor, "row _"]
    heads: Bool[Tensor, "layer row head"]

    def of_heads(
        self, layer: int, b: Float[Tensor, "row #head query *key"]
    ) -> Float[Tensor, "row #head query *key"]:
        """A bias in the term's heads of a layer, and 0 in all others."""
        if self.static.every_head:
            return b
        heads = self.heads[layer].view(len(b), -1, *[1] * (b.ndim - 2))
        return torch.where(heads, b, 0.0)

    def to_device(self, device: torch.device) -> _PassTerm:
        """A copy on another device: a model may span several."""
        if self.keys.device == device:
            return self
        tensors: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


@dataclass
class _LengthPassTerm(_PassTerm):
    """The bias `b` depends on the length, and is equal in all heads."""

    b: Float[Tensor, "row 1 query"]
    b_keys: Float[Tensor, "row 1 query key"] | None = None

    def on_keys(self, n_keys: int) -> Float[Tensor, "row 1 query key"]:
        """`b` on the term's keys, made once for the layers of a pass."""
        if self.b_keys is None:
            self.b_keys = _on_keys(self.keys, self.b, n_keys)
        return self.b_keys


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

    Raises:
        AugmentationError: Layers or heads the model does not have, or augmentations that read the
            scores cannot be joined in a row.
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
    ) -> None:
        self.layouts, self.may_repeat, self.capped = list(layouts), may_repeat, capped
        self.size, self.layer_types = size, tuple(layer_types or [FULL_ATTENTION] * size[0])
        attends = np.array([layer_type != NO_ATTENTION for layer_type in self.layer_types])
        self.n_rows = len(self.layouts)
        length_rules, score_rules = (
            [[rule for rule in row if rule.reads_scores == reads] for row in augmentations]
            for reads in (False, True)
        )
        self.length_terms, self.score_terms = (
            [
                _Term([row[i] if i < len(row) else None for row in kind], layouts, size, attends)
                for i in range(max(map(len, kind)))
            ]
            for kind in (length_rules, score_rules)
        )
        terms = [*self.length_terms, *self.score_terms]
        self.layers = sorted({layer for term in terms for layer in term.layers})
        self.score_law_layers = {layer for term in self.score_terms for layer in term.layers}
        self.last_key = max((term.stop for term in terms), default=0)
        self.query_phase_rules = [
            (augmentation, layout)
            for row, layout in zip(augmentations, layouts, strict=True)
            for augmentation in row
            if augmentation.phase == "predicting_only"
        ]
        self.current_pass: tuple[range, int] = (range(0), 0)
        self.terms: dict[LayerType, list[_PassTerm]] = {}
        self.has_joint_targets = [self._can_meet(row) for row in score_rules]
        self._check_joint(score_rules)
        self._check_blocked(length_rules)

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
            chosen = np.stack(
                [augmentation.head_mask(*self.size) for augmentation in cuts]
            )  # cut layer head
            for layer_type in distinct_types(self.layer_types):
                acting = chosen[:, [kind == layer_type for kind in self.layer_types]].reshape(
                    len(cuts), -1
                )
                # Each column of `acting` is a set of cuts that act in one head.
                self._check_queries(row, layout, cuts, np.unique(acting, axis=1).T, layer_type)

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
            left = np.append(0, (live & ~cut_keys[acting].any(0)).cumsum())
            where = (active == acting).all(2).any(0) & acting.any()
            if (shut := where & (left[slots + 1] == left[first])).any():
                raise LayoutError(
                    f"row {row}: the query in slot {slots[shut][0]} sees no key that is not"
                    " blocked; leave one, such as its own or BOS"
                )

    def query_phase_acts_on(self, slot: int) -> bool:
        """True if an augmentation of phase "predicting_only" acts on a query in this slot, the last
        of its pass."""
        return any(
            layout.acts(augmentation, np.array([slot]))[0]
            for augmentation, layout in self.query_phase_rules
        )

    def _terms(
        self, layer_type: LayerType, device: torch.device, wide: torch.dtype
    ) -> list[_PassTerm]:
        """The terms of this pass in layers of one type, without those that add nothing."""
        if layer_type not in self.terms:
            queries, copies = self.current_pass
            slots = np.array(queries)

            def copy_rows(
                values: np.ndarray, axis: int = 0, dtype: torch.dtype = torch.bool
            ) -> Tensor:
                """In `generate`, copies of a row (sequences or beams) follow each other."""
                there = torch.from_numpy(values).to(device, dtype, non_blocking=True)
                return there.repeat_interleave(copies, axis)

            terms: list[_PassTerm] = []
            for term in self.length_terms:
                b = term.length_biases(slots, layer_type)
                if b.any():
                    keys, heads = copy_rows(term.keys), copy_rows(term.heads, 1)
                    b_rows = copy_rows(b, dtype=wide)[:, None]  # row 1 query
                    terms.append(_LengthPassTerm(term, keys, heads, b_rows))
            for term in self.score_terms:
                acts = term.acting_queries(slots, layer_type)
                if acts.any():
                    keys, heads = copy_rows(term.keys), copy_rows(term.heads, 1)
                    terms.append(_ScorePassTerm(term, keys, heads, copy_rows(acts)))
            self.terms[layer_type] = terms
        return self.terms[layer_type]

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
        terms = self._acting_terms(layer, len(scores), queries, scores.device, wide)
        if not terms:
            return scores
        # Add the biases that depend on the length (Algorithm 1, lines 7 and 15), then those that
        # depend on the scores.
        scores = scores.to(wide)
        for term in terms:
            if isinstance(term, _LengthPassTerm):
                scores = scores + term.of_heads(layer, term.on_keys(scores.shape[3]))
        score_terms = [term for term in terms if isinstance(term, _ScorePassTerm)]
        if score_terms:
            b = self._score_biases(partial(_log_sum, scores), len(scores), score_terms, layer)
            if self.capped is not None:
                self.capped(layer, (b.abs() >= BIAS_CAP).any(0), first)
            for term, b_term in zip(score_terms, b, strict=True):
                b_keys = _on_keys(term.keys, b_term, scores.shape[3])
                scores = scores + term.of_heads(layer, b_keys)
        return scores

    def add_to_spans(self, layer: int, scores: SpanScores) -> None:
        """`add`, to scores that are never formed.

        Raises:
            LayoutError: As `add`.
        """
        queries = range(scores.first, scores.n_keys)
        device = scores.query.device
        terms = self._acting_terms(layer, len(scores), queries, device, scores.wide)
        for term in terms:
            if isinstance(term, _LengthPassTerm):
                scores.add(term.keys, term.of_heads(layer, term.b))
        score_terms = [term for term in terms if isinstance(term, _ScorePassTerm)]
        if not score_terms:
            return
        # Sums are needed from the first query at which a law acts; a pooled law reads all queries.
        acting = torch.stack([term.acts.any(0) for term in score_terms]).any(0)
        pooled = any(rule.pooled for term in score_terms for rule in term.static.rows_by_rule)
        start = 0 if pooled else int(acting.nonzero()[0])
        log_sum = partial(scores.log_sum, start=start)
        b = self._score_biases(log_sum, len(scores), score_terms, layer, start)
        b = pad(b, (start, 0))
        if self.capped is not None:
            self.capped(layer, (b.abs() >= BIAS_CAP).any(0), scores.first)
        for term, b_term in zip(score_terms, b, strict=True):
            scores.add(term.keys, term.of_heads(layer, b_term))

    def _acting_terms(
        self, layer: int, n_rows: int, queries: range, device: torch.device, wide: torch.dtype
    ) -> list[_PassTerm]:
        """The terms that act in a layer at the queries of a pass.

        Raises:
            LayoutError: The pass has other rows than the layouts.
        """
        copies, left = divmod(n_rows, self.n_rows)
        if n_rows != self.n_rows and self.n_rows > 1 and (left or not self.may_repeat):
            raise LayoutError(
                f"the forward pass has {n_rows} rows, but {self.n_rows} layouts were given; give"
                " one each"
            )
        if self.current_pass != (queries, copies):
            self.current_pass, self.terms = (queries, copies), {}
        return [
            term.to_device(device)
            for term in self._terms(self.layer_types[layer], device, wide)
            if layer in term.static.layers
        ]

    def _score_biases(
        self,
        log_sum: Callable[..., Float[Tensor, "row head query"]],
        n_rows: int,
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
        rest = log_sum(_union([term.keys for term in terms]), outside=True)
        b = torch.zeros_like(sums)
        for i, term in enumerate(terms):
            others = rest if len(terms) == 1 else log_sum(term.keys, outside=True)
            log_odds = sums[i] - others  # row head query
            for augmentation, rows in term.static.rows_by_rule.items():
                where = self._pass_rows(rows, n_rows)
                odds = (
                    self._pool_log_odds(log_odds[where], where)
                    if augmentation.pooled
                    else log_odds[where]
                )
                # l does not matter: `acts` has already compared it with n where the profile does.
                b[i, where] = augmentation.shift(odds, 1, 0)
        # Solve the targets of a row that can act together.
        joint = [row for row, is_joint in enumerate(self.has_joint_targets) if is_joint]
        if joint and len(terms) > 1:
            where = self._pass_rows(joint, n_rows)
            augmentations = [
                [
                    term.static.augmentations[row]
                    for row in joint
                    for _ in range(n_rows // self.n_rows)
                ]
                for term in terms
            ]
            b[:, where] = _solve_targets(
                augmentations, sums[:, where], rest[where], acting[:, where]
            )
        return torch.where(acting, b, 0.0)

    def _pool_log_odds(
        self, log_odds: Float[Tensor, "row head query"], where: Sequence[int]
    ) -> Float[Tensor, "row head query"]:
        """The logit of the mean share of all heads and live queries, for each row."""
        copies = self.current_pass[1]
        pads = [self.layouts[row // copies].soft + self.layouts[row // copies].pad for row in where]
        slots = torch.tensor([*self.current_pass[0]], device=log_odds.device)  # query
        live = slots >= torch.tensor(pads, device=log_odds.device)[:, None]  # row query
        shares = torch.where(live, log_odds.sigmoid().mean(1), 0.0)  # row query
        mean = shares.sum(1) / live.sum(1).clamp(min=1)
        return mean.logit()[:, None, None].expand_as(log_odds)

    def _pass_rows(self, rows: Sequence[int], n_rows: int) -> list[int]:
        """The indices of these rows' copies in a pass of `n_rows`."""
        copies = n_rows // self.n_rows
        return [row * copies + i for row in rows for i in range(copies)]


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
    rest: Float[Tensor, "row head query"],
    acting: Bool[Tensor, "term row head query"],
) -> Float[Tensor, "term row head query"]:
    """The biases of a row's targets that together give every span its share.

    A target with a floor is not applied where its span already has enough beside the others; then
    its keys count among the rest.

    Args:
        augmentations: The augmentations, by term and row.
        sums, rest: log of the sum over each span, and over the keys outside all spans.
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
        base = torch.stack([rest, *torch.where(active, -torch.inf, sums)]).logsumexp(0)
        b = tau.log() - left.log() - (sums - base)
        active = active | (acting & (b > 0))
    return torch.where(active, alpha * b, 0.0).nan_to_num(0.0).clamp(-BIAS_CAP, BIAS_CAP)
