"""Attention with a bias on spans of keys, in kernels that never form the matrix of its scores.

A kernel such as those of `scaled_dot_product_attention` forms no matrix [query key], so there is no
score to which a bias b could be added, and no attention that could be read. Where b is equal on all
keys of a span S, neither is needed:

1. Columns, for outputs. Let s be 1 on the keys of S and 0 on others. The queries
   q' = [q, b / scale] and the keys k' = [k, s] have

       scale * q' k'^T  =  scale * q k^T + b s^T,

   the biased scores, in any kernel (the idea of FlashBias, arXiv 2505.12044, for biases of low
   rank). Several spans are several columns, and they may overlap. A head that is not chosen has
   b = 0. Padded and blocked keys are spans, too: their b is `HIDDEN`.
2. Log-sum-exp, for attention. A kernel that also gives lse = log sum_j exp(score_j) gives the
   attention on any group G of few keys by one small product:

       A(G)  =  sum_G exp(score_j - lse).

   The same kernel with G hidden gives lse of all other keys, so that
   logit A(G) = lse(G) - lse(others) loses no digits, however near to 1 A is.

Outputs come from columns and not from lse: an output corrected by exp(b) afterwards has lost what a
half-precision kernel has rounded away. Attention comes from lse, in float32 and more: an indicator
column among the values would be rounded in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention

HIDDEN = -1e6
"""The bias that hides a key: exp of it is 0 in every dtype, also beside a hundred of the largest
biases (`MAX_BIAS`). Not -inf, because a query that sees hidden keys alone, one of padding, must not
become NaN."""
FEW = 64
"""Keys of a group up to which its scores are computed one by one."""
SCORES_AT_ONCE = 2**24
"""Attention scores of one layer that are in memory at once; 64 MiB each time they are copied in
float32."""

LSE_KERNELS = {"cpu": torch.ops.aten._scaled_dot_product_flash_attention_for_cpu}
"""By type of device, a kernel that returns outputs and log-sum-exp."""


def biased_attention(
    query: Float[Tensor, "row head query d_head"],
    key: Float[Tensor, "row kv_head key d_head"],
    value: Float[Tensor, "row kv_head key d_value"],
    bias: Float[Tensor, "row #head query span"],
    span: Bool[Tensor, "row key span"],
    scale: float | None = None,
    seen: Bool[Tensor, "#row query key"] | None = None,
) -> tuple[Float[Tensor, "row head query d_value"], Float[Tensor, "row head query"]]:
    """Causal attention with `bias` on the scores of the keys in `span`, and its log-sum-exp.

    Args:
        query, key, value: The queries are those of the last keys. Heads of a group may share keys.
        bias: Finite numbers to be added to the scores of a span's keys, by query and span; there
            may be no span. In half precision give them in float32.
        span: The keys of each span.
        scale: Factor of the scores; by default 1 / sqrt(d_head).
        seen: The keys that each query sees, if not all up to its own: a matrix, so for short
            blocks of queries.

    Returns:
        Outputs, and the log of the sum of exp(score) over the keys, in at least float32.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    # A span's column is a power of two, which is exact in every dtype and keeps b in the range of
    # float16. In half precision two more columns hold what those before have rounded away: the
    # three have the digits of float32, so that the outputs' b is that of `SpanScores.scores`.
    unit = 2.0 ** (4 - math.floor(math.log2(scale)))
    b, columns = (bias / (scale * unit)).expand(*query.shape[:3], -1), []
    for _ in range(1 if query.dtype.itemsize >= 4 else 3):
        columns.append(b.to(query.dtype))
        b = b - columns[-1]
    mark = (span.to(key.dtype) * unit)[:, None].expand(-1, key.shape[1], -1, -1)
    q = torch.cat([query, *columns], dim=3)
    k = torch.cat([key, *[mark for _ in columns]], dim=3)
    # Kernels want one width of q, k and v, and are fast at multiples of 8.
    width = -(-max(q.shape[3], value.shape[3]) // 8) * 8
    q, k, v = (pad(x, (0, width - x.shape[3])) for x in (q, k, value))
    first = k.shape[2] - q.shape[2]
    if seen is not None or not first:
        out, lse = _kernel(q, k, v, scale, seen)
    else:  # the keys before those of the queries, which all queries see, and then their own
        before = _kernel(q, k[:, :, :first], v[:, :, :first], scale, causal=False)
        out, lse = _join(before, _kernel(q, k[:, :, first:], v[:, :, first:], scale))
    return out[..., : value.shape[3]], lse


def _kernel(
    q: Float[Tensor, "row head query width"],
    k: Float[Tensor, "row kv_head key width"],
    v: Float[Tensor, "row kv_head key width"],
    scale: float,
    seen: Bool[Tensor, "#row query key"] | None = None,
    causal: bool = True,
) -> tuple[Float[Tensor, "row head query width"], Float[Tensor, "row head query"]]:
    """Outputs and log-sum-exp of attention without bias."""
    mask = None
    if seen is not None:
        mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min)
        mask = mask[:, None]  # row 1 query key
    causal = causal and seen is None
    if (kernel := LSE_KERNELS.get(q.device.type)) is not None:
        if q.shape[1] != k.shape[1] and not shares_keys(q.device.type):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        out, lse = kernel(q, k, v, is_causal=causal, attn_mask=mask, scale=scale)
    else:
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        lse = _log_sums(q, k, scale, mask, causal)
    return out, _LogSumGradient.apply(lse, q, k, scale, seen, causal)


class _LogSumGradient(torch.autograd.Function):
    """A kernel's log-sum-exp with its gradient, which kernels do not give.

    Its gradient by a score is the attention on that key. So its gradient by the queries is the
    output with the keys as values, and that by the keys is what these values get if the queries
    are the gradient of that output.
    """

    @staticmethod
    def forward(
        lse: Tensor, q: Tensor, k: Tensor, scale: float, seen: Tensor | None, causal: bool
    ) -> Tensor:
        return lse.view_as(lse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, q, k, *ctx.settings = inputs
        ctx.save_for_backward(q, k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Float[Tensor, "row head query"]) -> tuple:
        (q, k), (scale, seen, causal) = ctx.saved_tensors, ctx.settings
        by_score = gradient[..., None] * scale
        with torch.enable_grad():
            values = k.detach().requires_grad_()
            out, _ = _kernel(q.detach(), k.detach(), values, scale, seen, causal)
            (by_keys,) = torch.autograd.grad(out, values, (by_score * q).to(out.dtype))
        return None, (by_score * out.detach()).to(q.dtype), by_keys, None, None, None


@cache
def shares_keys(device: str) -> bool:
    """True if the kernel of `LSE_KERNELS` lets heads of a group share keys.

    A kernel that does not (the CPU's in torch 2.6) reads, for head h, the memory where the keys of
    head h would lie. Here that is memory of our own, with other values.
    """
    query = torch.ones(1, 2, 1, 8, device=device)
    values = torch.arange(2.0, device=device)[None, :, None, None].expand(1, 2, 1, 8).contiguous()
    first = values[:, :1]
    return not bool(LSE_KERNELS[device](query, first, first, is_causal=True)[0].any())


@torch.no_grad()
def _log_sums(
    q: Tensor, k: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> Float[Tensor, "row head query"]:
    """The log-sum-exp of scores where no public kernel returns it, in blocks of queries."""
    wide = torch.promote_types(q.dtype, torch.float32)
    sums = []
    for part in _query_blocks(q.shape[2], q.shape[0] * q.shape[1] * k.shape[2]):
        scores = _products(q[:, :, part].to(wide), k.to(wide)) * scale
        if mask is not None:
            scores = scores + mask[:, :, part]
        if causal:
            own = torch.arange(part.start, part.stop, device=q.device)[:, None]
            scores = scores.masked_fill(torch.arange(k.shape[2], device=q.device) > own, -torch.inf)
        sums.append(scores.logsumexp(3))
    return torch.cat(sums, dim=2)


def _join(
    one: tuple[Tensor, Tensor], another: tuple[Tensor, Tensor]
) -> tuple[Float[Tensor, "row head query d_value"], Float[Tensor, "row head query"]]:
    """The attention on two groups of keys together, from that on each."""
    lse = torch.logaddexp(one[1], another[1])
    shares = [(part - lse).exp()[..., None] for _, part in (one, another)]
    return (one[0] * shares[0] + another[0] * shares[1]).to(one[0].dtype), lse


def _products(
    left: Float[Tensor, "row head query inner"], keys: Float[Tensor, "row kv_head key inner"]
) -> Float[Tensor, "row head query key"]:
    """Products of every head with the keys of its group."""
    grouped = left.reshape(*keys.shape[:2], -1, left.shape[3])
    return (grouped @ keys.transpose(2, 3)).view(*left.shape[:3], keys.shape[2])


def _query_blocks(n_queries: int, scores_of_query: int, start: int = 0) -> Iterator[slice]:
    """Queries from `start` on in blocks of at most `SCORES_AT_ONCE` scores."""
    size = max(1, SCORES_AT_ONCE // max(scores_of_query, 1))
    for first in range(start, n_queries, size):
        yield slice(first, min(first + size, n_queries))


class SpanScores:
    """The attention scores of a layer, which are never formed: biases on spans of keys are added to
    them, and sums over spans are read.

    Args:
        query, key, value: As for `biased_attention`.
        scale: Factor of the scores.
        hidden: The padded keys.
        first_seen: The first slot that each query sees; by default all see slot 0.
        sinks: Scores of a learned sink, which takes a share beside the keys.

    Attributes:
        first: The slot of the first query.
        lse: Log of the sum of exp(score) over all keys and the sink, after `outputs`.
        key_lse: The same without the sink.
    """

    def __init__(
        self,
        query: Float[Tensor, "row head query d_head"],
        key: Float[Tensor, "row kv_head key d_head"],
        value: Float[Tensor, "row kv_head key d_value"],
        scale: float,
        hidden: Bool[Tensor, "row key"] | None = None,
        first_seen: Int[Tensor, "row query"] | None = None,
        sinks: Float[Tensor, " head"] | None = None,
    ) -> None:
        self.query, self.key, self.value, self.scale = query, key, value, scale
        self.first_seen, self.sinks = first_seen, sinks
        self.n_queries, self.n_keys = query.shape[2], key.shape[2]
        self.first = self.n_keys - self.n_queries
        self.wide = torch.promote_types(query.dtype, torch.float32)
        self.slots = torch.arange(self.first, self.n_keys, device=query.device)
        self.spans: list[Tensor] = []  # row key
        self.biases: list[Tensor] = []  # row #head query
        self.lse = self.key_lse = query.new_empty(0)
        if hidden is not None and hidden.any():
            self.add(
                hidden.to(query.device), query.new_full((len(query), 1, 1), HIDDEN, dtype=self.wide)
            )

    def __len__(self) -> int:
        return len(self.query)

    def add(self, keys: Bool[Tensor, "row _"], bias: Float[Tensor, "row #head #query"]) -> None:
        """Add a bias to the scores of a span's keys; -inf hides them."""
        self.spans.append(self._all_keys(keys))
        bias = bias.to(self.wide).clamp(min=HIDDEN)
        self.biases.append(bias.expand(-1, -1, self.n_queries))

    def _all_keys(self, keys: Bool[Tensor, "row _"]) -> Bool[Tensor, "row key"]:
        """A mask of the first keys as one of all keys of this pass."""
        return pad(keys[:, : self.n_keys], (0, max(self.n_keys - keys.shape[1], 0)))

    def outputs(self) -> Float[Tensor, "row head query d_value"]:
        """The heads' outputs, under all biases."""
        out, self.key_lse = self._attend(self.value)
        self.lse = self.key_lse
        if self.sinks is not None:  # a key of value 0
            self.lse = torch.logaddexp(self.key_lse, self.sinks.to(self.wide)[:, None])
            out = (out * (self.key_lse - self.lse).exp()[..., None]).to(out.dtype)
        return out

    def _attend(
        self, value: Tensor, hidden: Bool[Tensor, "row key"] | None = None, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """`biased_attention` of the queries from `start` on, with some more keys hidden."""
        query, spans, biases = self.query[:, :, start:], self.spans, self.biases
        if hidden is not None:
            hiding = query.new_full((len(self), 1, self.n_queries), HIDDEN, dtype=self.wide)
            spans, biases = [*spans, hidden], [*biases, hiding]
        heads = max((b.shape[1] for b in biases), default=1)
        none = query.new_zeros(len(self), heads, query.shape[2], 0, dtype=self.wide)
        biases = [b[:, :, start:, None].expand(-1, heads, -1, -1) for b in biases]
        bias = torch.cat([none, *biases], dim=3)  # row head query span
        spans = [keys[..., None] for keys in spans]
        span = torch.cat([none.new_zeros(len(self), self.n_keys, 0, dtype=torch.bool), *spans], 2)
        if self.first_seen is None:
            return biased_attention(query, self.key, value, bias, span, self.scale)
        # Windows and chunks: a block of queries sees the keys from the first that one of them sees.
        first, parts = self.first_seen[:, start:], []
        keys_of_block = max(int((self.slots - self.first_seen).max()) + 1, 128)
        for begin in range(0, query.shape[2], keys_of_block):
            part = slice(begin, min(begin + keys_of_block, query.shape[2]))
            low, high = int(first[:, part].min()), self.first + start + part.stop
            keys = torch.arange(low, high, device=query.device)
            own = self.slots[start:][part, None]
            seen = (keys <= own) & (keys >= first[:, part, None])  # row query key
            parts.append(
                biased_attention(
                    query[:, :, part], self.key[:, :, low:high], value[:, :, low:high],
                    bias[:, :, part], span[:, low:high], self.scale, seen,
                )
            )  # fmt: skip
        outs, sums = zip(*parts, strict=True)
        return torch.cat(outs, dim=2), torch.cat(sums, dim=2)

    def log_sum(
        self, keys: Bool[Tensor, "row _"], outside: bool = False, start: int = 0
    ) -> Float[Tensor, "row head query"]:
        """log of the sum of exp(score) over a span's keys, or over all other keys, of the queries
        from `start` on; over none, -inf or about `HIDDEN`."""
        keys = self._all_keys(keys)
        if not outside and int(keys.sum(1).max()) <= FEW:
            index = indices(keys)
            scores = self.query_blocks(start, index.shape[1])
            return torch.cat([self.scores(index, part).logsumexp(3) for part in scores], dim=2)
        return self._attend(self.key, keys if outside else ~keys, start)[1]

    def query_blocks(self, start: int, keys: int) -> Iterator[slice]:
        """The queries from `start` on, in blocks whose scores of `keys` keys fit into memory."""
        return _query_blocks(
            self.n_queries, self.query.shape[0] * self.query.shape[1] * keys, start
        )

    def scores(
        self, index: Int[Tensor, "row few"], queries: slice
    ) -> Float[Tensor, "row head query few"]:
        """The biased scores of a few keys of each row; -inf where a query does not see the key, and
        where the index is -1."""
        places = index.clamp(min=0)
        few = self.key.gather(
            2, places[:, None, :, None].expand(-1, self.key.shape[1], -1, self.key.shape[3])
        )
        scores = _products(self.query[:, :, queries].to(self.wide), few.to(self.wide)) * self.scale
        for span, bias in zip(self.spans, self.biases, strict=True):
            inside = span.gather(1, places)[:, None, None]  # row 1 1 few
            scores = scores + torch.where(inside, bias[:, :, queries, None], 0.0)
        return scores.masked_fill(~self._sees(index[:, None], queries)[:, None], -torch.inf)

    def nearest_scores(
        self, index: Int[Tensor, "row query few"], queries: slice
    ) -> Float[Tensor, "row head query few"]:
        """The biased scores of a few keys of each query, as `scores`."""
        rows, heads, places = len(self), self.key.shape[1], index.clamp(min=0)
        near = self.key[torch.arange(rows, device=index.device)[:, None, None], :, places]
        near = near.permute(0, 1, 3, 4, 2).to(self.wide)  # row query kv_head d_head few
        query = self.query[:, :, queries].to(self.wide).unflatten(1, (heads, -1))
        products = query.permute(0, 3, 1, 2, 4) @ near  # row query kv_head head few
        scores = products.permute(0, 2, 3, 1, 4).flatten(1, 2) * self.scale
        for span, bias in zip(self.spans, self.biases, strict=True):
            inside = span.gather(1, places.flatten(1)).view_as(places)[:, None]
            scores = scores + torch.where(inside, bias[:, :, queries, None], 0.0)
        return scores.masked_fill(~self._sees(index, queries)[:, None], -torch.inf)

    def _sees(
        self, index: Int[Tensor, "row #query few"], queries: slice
    ) -> Bool[Tensor, "row query few"]:
        """The queries that see the keys in these slots; slot -1 is no key."""
        sees = (index >= 0) & (index <= self.slots[queries, None])
        return (
            sees if self.first_seen is None else sees & (index >= self.first_seen[:, queries, None])
        )


def indices(keys: Bool[Tensor, "row key"]) -> Int[Tensor, "row most"]:
    """The slots of each row's chosen keys, in order, filled up with -1."""
    most = int(keys.sum(1).max())
    order = torch.argsort(~keys, dim=1, stable=True)[:, :most]
    return order.masked_fill(~keys.gather(1, order), -1)
