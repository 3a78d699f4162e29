"""The bias of a batch of rows on the attention scores of a forward pass.

Every row has any number of augmentations. Those whose bias is a function of the length are added
first. A law that reads the scores then sees, in each head and at each query, the log-odds of
attention on its span:

    logit(A) = lse(scores on the span) - lse(all other scores)

and adds `Augmentation.shift(logit(A), l, n)`; a pooled law is given one A for all heads and live
queries of the pass. Several targets of a row that act at one query of one head are solved together,
so that each span gets its share: with the sums over the spans that are steered,

    b_i = alpha_i * (log(tau_i) - log(1 - sum_j tau_j) - (lse_i - lse(keys in none of them)))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from lapa2_interp._util.errors import AugmentationError, LayoutError
from lapa2_interp.bias.augmentation import BIAS_CAP, Augmentation, steps_overlap
from lapa2_interp.bias.layer_types import FULL_ATTENTION, NO_ATTENTION, LayerType, distinct_types
from lapa2_interp.bias.layout import Layout

CapCallback = Callable[[int, Tensor, int], None]
"""Told of a layer, which biases were cut at +-BIAS_CAP [row head query], and the first query's
slot."""


def _selected_heads(
    rule: Augmentation, size: tuple[int, int], attends: Bool[np.ndarray, " layer"]
) -> Bool[np.ndarray, "layer head"]:
    """The heads that an augmentation reaches in a model some of whose layers have no attention.

    Raises:
        AugmentationError: Such a layer is named, or none of the chosen layers has attention.
    """
    chosen = rule.head_mask(*size)
    lost = np.flatnonzero(chosen.any(1) & ~attends)
    named = not isinstance(rule.layers, str) or rule.heads != "all"
    if len(lost) and (named or not chosen[attends].any()):
        raise AugmentationError(
            f"layer {lost[0]} has no attention, so nothing can be augmented there; layers with"
            f" attention: {', '.join(map(str, np.flatnonzero(attends)))}"
        )
    return chosen & attends[:, None]


class _Term:
    """At most one augmentation a row: static masks of keys and heads."""

    def __init__(
        self,
        rules: Sequence[Augmentation | None],
        layouts: Sequence[Layout],
        size: tuple[int, int],
        attends: Bool[np.ndarray, " layer"],
    ) -> None:
        self.rules, self.layouts = list(rules), list(layouts)
        keys = np.zeros((len(layouts), max(len(each) for each in layouts)), bool)  # row key
        heads = np.zeros((size[0], len(layouts), size[1]), bool)  # layer row head
        chosen = {
            rule: _selected_heads(rule, size, attends) for rule in set(rules) if rule is not None
        }
        for row, (rule, each) in enumerate(zip(rules, layouts, strict=True)):
            if rule is not None:
                for span in each.spans(rule.span):
                    keys[row, span.start : span.stop] = True
                heads[:, row] = chosen[rule]  # layer head
        self.stop = int(np.flatnonzero(keys.any(0)).max(initial=-1)) + 1
        self.keys, self.heads = keys[:, : self.stop], heads
        self.layers = [layer for layer in range(size[0]) if heads[layer].any()]
        self.every_head = bool(heads[self.layers].all())
        self.rows_of = {
            rule: [row for row, other in enumerate(rules) if other == rule]
            for rule in set(rules)
            if rule is not None and rule.reads_scores
        }

    def of_queries(self, slots: np.ndarray, seen: LayerType) -> Float[np.ndarray, "row query"]:
        """b of every row and query in layers of one kind; where a law that reads the scores acts,
        NaN."""
        nothing = np.zeros(len(slots))
        of: dict[tuple[int, int], np.ndarray] = {}  # samples of one prompt share its layout
        for rule, each in zip(self.rules, self.layouts, strict=True):
            if (id(rule), id(each)) in of:
                continue
            b = nothing
            if rule is not None:
                b = (
                    np.where(each.acts(rule, slots, seen), np.nan, 0.0)
                    if rule.reads_scores
                    else rule.check_bias(each.bias(rule, slots, seen))  # a law of a user's own, too
                )
                if rule.phase == "query":
                    b = np.where(slots == slots[-1], b, 0.0)
            of[id(rule), id(each)] = b
        return np.stack(
            [of[id(rule), id(each)] for rule, each in zip(self.rules, self.layouts, strict=True)]
        )


@dataclass
class _PassTerm:
    """A term in one forward pass, on the device of the scores.

    Attributes:
        b: The bias of each row and query; of a law that reads the scores, where it acts.
        keys, heads: Which are meant.
    """

    term: _Term
    b: Float[Tensor, "row query"] | Bool[Tensor, "row query"]
    keys: Bool[Tensor, "row key"]
    heads: Bool[Tensor, "layer row head"]

    def on(self, device: torch.device) -> _PassTerm:
        """The same on another device: a model may span several."""
        if self.b.device == device:
            return self
        return replace(
            self, b=self.b.to(device), keys=self.keys.to(device), heads=self.heads.to(device)
        )


class BatchBias:
    """The bias of a batch of rows: static masks and, per forward pass, one number per row and
    query.

    Args:
        rules: The augmentations of each row.
        layouts: One a row.
        size: Layers and heads of the model.
        seen: By layer, which keys its queries see; all keys by default.
        may_repeat: A pass may have several copies of each row behind each other.
        capped: Told of the biases that were cut at +-BIAS_CAP.

    Raises:
        AugmentationError: Layers or heads the model does not have, or augmentations that read the
            scores cannot be joined in a row.
        LayoutError: A span lies outside the sequence, or every key of a query is blocked.
    """

    def __init__(
        self,
        rules: Sequence[tuple[Augmentation, ...]],
        layouts: Sequence[Layout],
        size: tuple[int, int],
        seen: Sequence[LayerType] | None = None,
        may_repeat: bool = False,
        capped: CapCallback | None = None,
    ) -> None:
        self.layouts, self.may_repeat, self.capped = list(layouts), may_repeat, capped
        self.size, self.seen = size, tuple(seen or [FULL_ATTENTION] * size[0])
        attends = np.array([each != NO_ATTENTION for each in self.seen])
        self.n_rows = len(self.layouts)
        fixed = [[rule for rule in row if not rule.reads_scores] for row in rules]
        reading = [[rule for rule in row if rule.reads_scores] for row in rules]
        self.fixed, self.reading = (
            [
                _Term([row[i] if i < len(row) else None for row in kind], layouts, size, attends)
                for i in range(max(map(len, kind)))
            ]
            for kind in (fixed, reading)
        )
        terms = [*self.fixed, *self.reading]
        self.layers = sorted({layer for term in terms for layer in term.layers})
        self.reading_layers = {layer for term in self.reading for layer in term.layers}
        self.last_key = max((term.stop for term in terms), default=0)
        self.of_last_query = [
            (rule, each)
            for row, each in zip(rules, layouts, strict=True)
            for rule in row
            if rule.phase == "query"
        ]
        self.of_pass: tuple[range, int] = (range(0), 0)
        self.terms: dict[LayerType, list[_PassTerm]] = {}
        self.several = [self._meet(row) for row in reading]
        self._check_joint(reading)
        self._check_blocked(fixed)

    def _meet(self, several: Sequence[Augmentation]) -> bool:
        """Whether any two of a row's augmentations can act at one query of one head."""
        return any(
            steps_overlap(one, other)
            and (one.head_mask(*self.size) & other.head_mask(*self.size)).any()
            for one, other in combinations(several, 2)
        )

    def _check_joint(self, reading: Sequence[Sequence[Augmentation]]) -> None:
        for row, several in enumerate(reading):
            if not self.several[row]:
                continue
            if other := next((rule for rule in several if rule.law != "target"), None):
                raise AugmentationError(
                    f"a row has {len(several)} augmentations that read the scores, one of law"
                    f" {other.law!r}; only those of law 'target' can be solved together. Give them"
                    " other steps or heads, where they do not meet"
                )
            spans = [span for rule in several for span in self.layouts[row].spans(rule.span)]
            covered = [slot for span in spans for slot in range(*span)]
            if len(set(covered)) < len(covered):
                raise LayoutError(
                    "the spans of several targets of a row overlap; make them disjoint"
                )
            total = sum(
                rule.tau * term.heads[:, row]  # layer head
                for rule, term in zip(several, self.reading, strict=False)
            )
            if np.max(total) >= 1:
                raise AugmentationError(
                    f"the targets of a row add up to {np.max(total):g} in a head; they must leave"
                    " something to other keys, so give taus with a sum below 1"
                )

    def _check_blocked(self, fixed: Sequence[Sequence[Augmentation]]) -> None:
        checked = set()
        for row, (several, each) in enumerate(zip(fixed, self.layouts, strict=True)):
            cuts = [rule for rule in several if rule.law == "cut" and rule.alpha == 1]
            if not cuts or (*cuts, id(each)) in checked:
                continue
            checked.add((*cuts, id(each)))
            chosen = np.stack([rule.head_mask(*self.size) for rule in cuts])  # cut layer head
            for seen in distinct_types(self.seen):
                here = chosen[:, [kind == seen for kind in self.seen]].reshape(len(cuts), -1)
                # by column: which cuts meet in some head
                self._check_queries(row, each, cuts, np.unique(here, axis=1).T, seen)

    def _check_queries(
        self,
        row: int,
        layout: Layout,
        cuts: Sequence[Augmentation],
        together: Bool[np.ndarray, "set cut"],
        seen: LayerType,
    ) -> None:
        live = np.ones(len(layout), bool)
        live[layout.soft : layout.soft + layout.pad] = False
        for query in range(layout.bos.start, layout.prompt.stop):
            slot = np.array([query])
            acts = np.array([layout.acts(rule, slot, seen)[0] for rule in cuts])
            for here in np.unique(together & acts, axis=0):
                left = live[: query + 1].copy()
                left[: seen.first_seen(slot, layout.pad)[0]] = False
                for rule in np.array(cuts, dtype=object)[here]:
                    for span in layout.spans(rule.span):
                        left[span.start : span.stop] = False
                if left.any() or not here.any():
                    continue
                raise LayoutError(
                    f"row {row}: the query in slot {query} sees no key that is not blocked;"
                    " leave one, such as its own or BOS"
                )

    def acts_on_last(self, slot: int) -> bool:
        """Whether a rule of phase "query" acts on a query in this slot, the last of its pass."""
        return any(each.acts(rule, np.array([slot]))[0] for rule, each in self.of_last_query)

    def _terms(self, seen: LayerType, scores: Tensor) -> list[_PassTerm]:
        """The numbers of this pass in layers of one kind. Terms that add nothing are left out."""
        if seen not in self.terms:
            queries, copies = self.of_pass
            wide = torch.promote_types(scores.dtype, torch.float32)
            self.terms[seen] = []
            for term in [*self.fixed, *self.reading]:
                b = term.of_queries(np.array(queries), seen)
                if b.any():
                    reads = term in self.reading
                    # Several sequences or beams of a prompt lie behind each other in `generate`.
                    self.terms[seen].append(
                        _PassTerm(
                            term,
                            torch.from_numpy(np.isnan(b) if reads else b)
                            .to(scores.device, torch.bool if reads else wide)
                            .repeat_interleave(copies, 0),
                            torch.from_numpy(term.keys)
                            .to(scores.device)
                            .repeat_interleave(copies, 0),
                            torch.from_numpy(term.heads)
                            .to(scores.device)
                            .repeat_interleave(copies, 1),
                        )
                    )
        return self.terms[seen]

    def add(
        self, layer: int, scores: Float[Tensor, "row head query key"], first: int
    ) -> Float[Tensor, "row head query key"]:
        """The scores with the bias on the spans' keys, as a new tensor in at least float32. A pass
        may read the beginning of the layouts; keys that are not there yet get nothing.

        Where these queries get no bias, the given tensor is returned.

        Args:
            first: The slot of the first query.

        Raises:
            LayoutError: The pass has other rows than the layouts.
        """
        n_rows, _, n_queries, _ = scores.shape
        copies, left = divmod(n_rows, self.n_rows)
        if n_rows != self.n_rows and self.n_rows > 1 and (left or not self.may_repeat):
            raise LayoutError(
                f"the forward pass has {n_rows} rows, but {self.n_rows} layouts were given; give"
                " one each"
            )
        queries = range(first, first + n_queries)
        if self.of_pass != (queries, copies):
            self.of_pass, self.terms = (queries, copies), {}
        here = [
            each.on(scores.device)
            for each in self._terms(self.seen[layer], scores)
            if layer in each.term.layers
        ]
        if not here:
            return scores
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32), copy=True)
        reading = [each for each in here if each.b.dtype == torch.bool]
        for each in here:
            if each.b.dtype != torch.bool:
                _add(scores, each, layer, rearrange(each.b, "row query -> row 1 query 1"))
        if reading:
            b = self._read(scores, reading, layer)
            if self.capped is not None:
                self.capped(layer, (b.abs() >= BIAS_CAP).any(0), first)
            for each, of_term in zip(reading, b, strict=True):
                _add(scores, each, layer, rearrange(of_term, "row head query -> row head query 1"))
        return scores

    def _read(
        self,
        scores: Float[Tensor, "row head query key"],
        terms: Sequence[_PassTerm],
        layer: int,
    ) -> Float[Tensor, "term row head query"]:
        """The biases of the laws that read the scores."""
        acting = torch.stack(
            [each.b[:, None] & each.heads[layer][:, :, None] for each in terms]
        )  # term row head query
        # the logarithm of the sum over each span, and over all keys outside them
        sums = torch.stack([_log_sum(scores, each.keys) for each in terms])  # term row head query
        rest = _log_sum(scores, _union([each.keys for each in terms]), outside=True)
        b = torch.zeros_like(sums)
        for i, each in enumerate(terms):
            others = rest if len(terms) == 1 else _log_sum(scores, each.keys, outside=True)
            log_odds = sums[i] - others  # row head query
            for rule, rows in each.term.rows_of.items():
                where = self._copied(rows, len(scores))
                odds = self._pooled(log_odds[where], where) if rule.pooled else log_odds[where]
                # l does not matter here: where the profile compares it with n, `acts` has done so.
                b[i, where] = rule.shift(odds, 1, 0)
        joint = [row for row, several in enumerate(self.several) if several]
        if joint and len(terms) > 1:
            where = self._copied(joint, len(scores))
            rules = [
                [each.term.rules[row] for row in joint for _ in range(len(scores) // self.n_rows)]
                for each in terms
            ]
            b[:, where] = _solve_targets(rules, sums[:, where], rest[where], acting[:, where])
        return torch.where(acting, b, 0.0)

    def _pooled(
        self, log_odds: Float[Tensor, "row head query"], where: Sequence[int]
    ) -> Float[Tensor, "row head query"]:
        """The logit of the mean share of all heads and live queries, for each of the rows."""
        copies = self.of_pass[1]
        pads = [self.layouts[row // copies].soft + self.layouts[row // copies].pad for row in where]
        slots = torch.tensor([*self.of_pass[0]], device=log_odds.device)  # query
        live = slots >= torch.tensor(pads, device=log_odds.device)[:, None]  # row query
        shares = log_odds.sigmoid().mean(1)  # row query
        mean = (shares * live).sum(1) / live.sum(1).clamp(min=1)
        return mean.logit()[:, None, None].expand_as(log_odds)

    def _copied(self, rows: Sequence[int], n_rows: int) -> list[int]:
        """Where these rows stand in a pass of `n_rows`."""
        copies = n_rows // self.n_rows
        return [row * copies + i for row in rows for i in range(copies)]


def _add(
    scores: Float[Tensor, "row head query key"],
    of_pass: _PassTerm,
    layer: int,
    b: Float[Tensor, "row #head query 1"],
) -> None:
    """Add a bias to the keys of a term, in place."""
    keys = rearrange(of_pass.keys[:, : scores.shape[3]], "row key -> row 1 1 key")
    if not of_pass.term.every_head:
        keys = keys & rearrange(of_pass.heads[layer], "row head -> row head 1 1")
    scores[..., : keys.shape[3]] += torch.where(keys, b, 0.0)


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
    rules: Sequence[Sequence[Augmentation | None]],
    sums: Float[Tensor, "term row head query"],
    rest: Float[Tensor, "row head query"],
    acting: Bool[Tensor, "term row head query"],
) -> Float[Tensor, "term row head query"]:
    """The biases of several targets of a row that give every span its share.

    A target with a floor is left alone where its span has enough beside the others; then its keys
    count among the rest.

    Args:
        rules: By term and row.
        sums, rest: Logarithms of sums over each span, and over the keys in none.
        acting: Where each is to act.
    """

    def numbers(read: Callable[[Augmentation], float]) -> Float[Tensor, "term row 1 1"]:
        table = [[0.5 if rule is None else read(rule) for rule in row] for row in rules]
        return torch.tensor(table, dtype=sums.dtype, device=sums.device)[:, :, None, None]

    tau = numbers(lambda rule: rule.tau or 0.0)
    alpha = numbers(lambda rule: rule.alpha)
    active = acting & (numbers(lambda rule: rule.floor) == 0)
    for _ in range(len(rules) + 1):
        left = 1 - torch.where(active, tau, 0.0).sum(0)  # row head query
        base = torch.stack([rest, *torch.where(active, -torch.inf, sums)]).logsumexp(0)
        b = tau.log() - left.log() - (sums - base)
        active = active | (acting & (b > 0))
    return torch.where(active, alpha * b, 0.0).nan_to_num(0.0).clamp(-BIAS_CAP, BIAS_CAP)
