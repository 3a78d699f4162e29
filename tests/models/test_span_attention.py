"""Attention without its matrix equals that of the matrix, which is formed here in plain lines."""

import itertools

import pytest
import torch
from torch.nn.functional import pad

from lapa2_interp.models import span_attention
from lapa2_interp.models.span_attention import SpanScores, biased_attention

ROWS, HEADS, KEYS, SCALE = 2, 6, 40, 0.3
PADDED, WINDOW = 5, 9
"""Padded keys of the second row, and keys in sight of a query in a layer with a window."""
SHAPES = [*itertools.product((KEYS, 12, 1), (6, 2), (None, WINDOW), (False, True))]
"""Queries, heads that have keys of their own, window, and a learned sink."""


class Drawn:
    """Random queries, keys, values, padding, and biases on three spans: one overlaps the others,
    and one blocks a key."""

    def __init__(self, queries, kv_heads, window=None, sink=False, dtype=torch.float64, size=3.0):
        torch.manual_seed(queries + kv_heads)

        def draw(heads, n, width):
            return torch.randn(ROWS, heads, n, width, dtype=torch.float64).to(dtype)

        self.query, self.key = draw(HEADS, queries, 12) * 2, draw(kv_heads, KEYS, 12)
        self.value = draw(kv_heads, KEYS, 6)
        self.slots = torch.arange(KEYS - queries, KEYS)
        self.hidden = torch.arange(KEYS) < torch.tensor([[0], [PADDED]])  # row key
        starts = (self.slots - WINDOW + 1).clamp(min=0).expand(ROWS, -1)
        self.first_seen = None if window is None else starts
        self.sinks = torch.randn(HEADS).to(dtype) if sink else None
        wide = torch.promote_types(dtype, torch.float32)
        names = (((1, 4), (6, 9)), ((3, 6), (5, 7)), ((10, 11), (12, 13)))
        self.spans = [
            torch.arange(KEYS) >= torch.tensor([[start] for start, _ in rows]) for rows in names
        ]
        for span, rows in zip(self.spans, names, strict=True):
            span &= torch.arange(KEYS) < torch.tensor([[stop] for _, stop in rows])
        by_query = torch.randn(ROWS, 1, queries, dtype=wide) * size
        by_head = torch.randn(ROWS, HEADS, queries, dtype=wide) * size
        by_head[:, 2] = 0  # a head that is not chosen
        self.biases = [by_query, by_head, torch.full((ROWS, 1, queries), -torch.inf, dtype=wide)]

    def fused(self):
        scores = SpanScores(
            self.query, self.key, self.value, SCALE, self.hidden, self.first_seen, self.sinks
        )
        for span, bias in zip(self.spans, self.biases, strict=True):
            last = int(span.any(0).nonzero().max()) + 1
            scores.add(span[:, :last], bias)
        return scores

    def matrix(self, dtype=torch.float64, bias=True):
        """Scores, pattern and outputs, as eager attention computes them in a dtype."""
        copies = HEADS // self.key.shape[1]
        key, value = (x.to(dtype).repeat_interleave(copies, 1) for x in (self.key, self.value))
        scores = (self.query.to(dtype) @ key.mT) * SCALE
        seen = (torch.arange(KEYS) <= self.slots[:, None]) & ~self.hidden[:, None]
        if self.first_seen is not None:
            seen = seen & (torch.arange(KEYS) >= self.first_seen[..., None])
        scores = scores.to(torch.promote_types(dtype, torch.float32))
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        for span, b in zip(self.spans, self.biases, strict=True):
            inside = span[:, None, None] & torch.tensor(bias)
            scores = scores + torch.where(inside, b[..., None].to(scores.dtype), 0.0)
        sinked = scores
        if self.sinks is not None:
            sinks = self.sinks.to(scores.dtype)[None, :, None, None]
            sinked = torch.cat([scores, sinks.expand(ROWS, -1, len(self.slots), 1)], dim=3)
        pattern = sinked.softmax(3)[..., :KEYS]
        return scores, pattern, pattern.to(dtype) @ value

    @property
    def live(self):
        """The queries that are not padding, [row head query]."""
        return (self.slots >= torch.tensor([[0], [PADDED]]))[:, None].expand(-1, HEADS, -1)


@pytest.mark.parametrize(("queries", "kv_heads", "window", "sink"), SHAPES)
def test_outputs_are_those_of_the_matrix(queries, kv_heads, window, sink):
    """Overlapping spans, a blocked key, a head left out, padding, values narrower than keys."""
    drawn = Drawn(queries, kv_heads, window, sink)
    outputs, wanted = drawn.fused().outputs(), drawn.matrix()[2]
    assert outputs.isfinite().all(), "queries of padding must not spoil later layers"
    torch.testing.assert_close(outputs[drawn.live], wanted[drawn.live], atol=1e-10, rtol=0)


@pytest.mark.parametrize(("queries", "kv_heads", "window", "sink"), SHAPES)
@pytest.mark.parametrize("few", [2, 64])
def test_sums_are_those_of_the_matrix(monkeypatch, queries, kv_heads, window, sink, few):
    """Over a span, and over all other keys; of spans read key by key, and by the kernel."""
    monkeypatch.setattr(span_attention, "FEW", few)
    drawn = Drawn(queries, kv_heads, window, sink)
    scores, span = drawn.fused(), drawn.spans[1]
    wanted = drawn.matrix()[0]
    for outside in (False, True):
        sums = scores.log_sum(span, outside)
        keys = (span != outside)[:, None, None]
        among = wanted.masked_fill(~keys, -torch.inf).logsumexp(3)
        seen = drawn.live & among.isfinite()
        torch.testing.assert_close(sums[seen], among[seen], atol=1e-10, rtol=0)
        assert (sums[drawn.live & ~seen] < -1e5).all(), "no key of the group is seen"
        late = scores.log_sum(span, outside, start=queries // 2)
        torch.testing.assert_close(late[seen[..., queries // 2 :]], among[..., queries // 2 :][
            seen[..., queries // 2 :]
        ], atol=1e-10, rtol=0)  # fmt: skip


@pytest.mark.parametrize(("queries", "kv_heads", "window", "sink"), SHAPES)
def test_attention_on_single_keys_is_that_of_the_matrix(queries, kv_heads, window, sink):
    drawn = Drawn(queries, kv_heads, window, sink)
    scores, pattern = drawn.fused(), drawn.matrix()[1]
    scores.outputs()
    lse, every = scores.lse[..., None], slice(0, queries)
    index = torch.tensor([[0, 3, 7, 20, -1], [6, 5, 12, 39, 38]])
    one_by_one = (scores.scores(index, every) - lse).exp()
    there = pattern.gather(3, index.clamp(min=0)[:, None, None].expand(-1, HEADS, queries, -1))
    there = torch.where((index >= 0)[:, None, None], there, 0.0)
    torch.testing.assert_close(one_by_one[drawn.live], there[drawn.live], atol=1e-10, rtol=0)
    index = (drawn.slots[:, None] - torch.arange(4)).clamp(min=-1).expand(ROWS, -1, -1)
    nearest = (scores.nearest_scores(index, every) - lse).exp()
    there = pattern.gather(3, index.clamp(min=0)[:, None].expand(-1, HEADS, -1, -1))
    there = torch.where((index >= 0)[:, None], there, 0.0)
    torch.testing.assert_close(nearest[drawn.live], there[drawn.live], atol=1e-10, rtol=0)


def test_without_a_span_it_is_causal_attention():
    drawn = Drawn(KEYS, 2)
    none = torch.zeros(ROWS, 1, KEYS, 0, dtype=torch.float64), torch.zeros(ROWS, KEYS, 0).bool()
    outputs, lse = biased_attention(drawn.query, drawn.key, drawn.value, *none)
    key, value = (x.repeat_interleave(3, 1) for x in (drawn.key, drawn.value))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        drawn.query, key, value, is_causal=True
    )
    torch.testing.assert_close(outputs, wanted, atol=1e-10, rtol=0)
    scores = (drawn.query @ key.mT / 12**0.5).masked_fill(
        ~torch.ones(KEYS, KEYS).tril().bool(), -torch.inf
    )
    torch.testing.assert_close(lse, scores.logsumexp(3), atol=1e-10, rtol=0)


@pytest.mark.parametrize("queries", [KEYS, 12])
def test_where_no_kernel_gives_the_sum_it_is_computed_in_blocks(monkeypatch, queries):
    """Off the CPU: public attention, and the log-sum-exp beside it."""
    drawn = Drawn(queries, 2)
    monkeypatch.setattr(span_attention, "LSE_KERNELS", {})
    monkeypatch.setattr(span_attention, "SCORES_AT_ONCE", ROWS * HEADS * KEYS * 7)
    scores = drawn.fused()
    outputs, wanted = scores.outputs(), drawn.matrix()
    torch.testing.assert_close(outputs[drawn.live], wanted[2][drawn.live], atol=1e-10, rtol=0)
    sums = wanted[0].logsumexp(3)
    torch.testing.assert_close(scores.lse[drawn.live], sums[drawn.live], atol=1e-10, rtol=0)


GRID = [*itertools.product((torch.bfloat16, torch.float16), (KEYS, 12), (1.0, 4.0, 9.0))]
"""dtype, queries, size of the biases."""


@pytest.mark.parametrize(("dtype", "queries", "size"), GRID, ids=str)
def test_half_precision_loses_no_more_than_the_matrix(dtype, queries, size):
    """The largest error of outputs, and of the log-odds of attention on a span, over eight draws,
    is at most 1.1 times that of eager attention in this dtype."""
    errors = {"matrix": [0.0, 0.0], "fused": [0.0, 0.0]}
    for seed in range(8):
        drawn = Drawn(queries, 2, dtype=dtype, size=size)
        torch.manual_seed(seed)
        drawn.query = (torch.randn(ROWS, HEADS, queries, 12) * 2).to(dtype)
        span = drawn.spans[1][:, None, None]

        def log_odds(pattern, span=span):
            inside, outside = (pattern.double() * span).sum(3), (pattern.double() * ~span).sum(3)
            return inside.log() - outside.log()

        _, pattern, outputs = drawn.matrix()
        odds = log_odds(pattern)
        counted = drawn.live & (odds.abs() < 12)
        _, half, rounded = drawn.matrix(dtype)
        scores = drawn.fused()
        computed = scores.outputs()
        inside = scores.log_sum(drawn.spans[1])
        ours = (inside - scores.log_sum(drawn.spans[1], outside=True)).double()
        for name, out, logit in (
            ("matrix", rounded, log_odds(half)), ("fused", computed, ours),
        ):  # fmt: skip
            errors[name][0] = max(errors[name][0], float((out - outputs)[drawn.live].abs().max()))
            errors[name][1] = max(errors[name][1], float((logit - odds)[counted].abs().max()))
    assert errors["fused"][0] <= 1.1 * errors["matrix"][0]
    assert errors["fused"][1] <= 1.1 * errors["matrix"][1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("queries", [KEYS, 12])
def test_outputs_and_attention_have_one_bias(queries, dtype):
    """Two spans under biases near 9,000, where float32 has steps of .001, divide the attention as
    in float64: in the outputs, whose values are 1 in a span, and in what is read."""
    drawn = Drawn(queries, 2, dtype=dtype)
    first, second, _ = drawn.spans
    first &= ~second
    drawn.biases[:2] = [9000 + b for b in drawn.biases[:2]]
    drawn.value = torch.stack([first, second], dim=2)[:, None].expand(-1, 2, -1, -1).to(dtype)
    wanted = drawn.matrix()[2][drawn.live]  # shares of both spans
    scores = drawn.fused()
    assert (scores.outputs()[drawn.live] - wanted).abs().max() < 0.01
    shares = [(scores.log_sum(span) - scores.lse).exp()[drawn.live] for span in (first, second)]
    assert (torch.stack(shares, dim=1) - wanted).abs().max() < 0.01
    assert max(share.max() for share in shares) < 1.004
    assert ((wanted > 0.1) & (wanted < 0.9)).any(), "the spans compete"


def test_log_odds_near_one_keep_their_digits():
    """A span that gets all attention but 1e-9: 1 - A would be rounding alone."""
    drawn = Drawn(KEYS, 2, dtype=torch.float32)
    drawn.biases[1] = torch.full((ROWS, HEADS, KEYS), 25.0)
    span, scores = drawn.spans[1], drawn.fused()
    odds = scores.log_sum(span) - scores.log_sum(span, outside=True)
    exact = drawn.matrix()[0]
    inside, outside = (
        exact.masked_fill(~keys[:, None, None], -torch.inf).logsumexp(3) for keys in (span, ~span)
    )
    wanted = inside - outside
    seen = drawn.live & wanted.isfinite()
    assert wanted[seen].max() > 20
    torch.testing.assert_close(odds[seen].double(), wanted[seen], atol=2e-5, rtol=1e-6)


def test_a_kernel_whose_heads_share_no_keys_gets_them_for_each(monkeypatch):
    """As that of torch 2.6, which reads on behind the keys."""
    drawn = Drawn(12, 2)
    asked = (drawn.query, drawn.key, drawn.value)
    bias, span = torch.zeros(ROWS, 1, 12, 0), torch.zeros(ROWS, KEYS, 0, dtype=torch.bool)
    wanted, lse = biased_attention(*asked, bias, span, SCALE)
    kernel = span_attention.LSE_KERNELS["cpu"]

    def older(q, k, v, **settings):
        others = (q.shape[1], *k.shape[2:])
        k, v = (x if x.shape[1] == q.shape[1] else x.as_strided((len(x), *others), x.stride())
                for x in (k, v))  # fmt: skip
        return kernel(q, k, v, **settings)

    monkeypatch.setitem(span_attention.LSE_KERNELS, "cpu", older)
    span_attention.shares_keys.cache_clear()
    try:
        assert not span_attention.shares_keys("cpu")
        out, same = biased_attention(*asked, bias, span, SCALE)
    finally:
        span_attention.shares_keys.cache_clear()
    assert torch.allclose(out, wanted, rtol=0, atol=1e-12)
    assert torch.allclose(same, lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("queries", "kv_heads", "window", "sink", "few"),
    [(*shape, (2, 64)[(i + i // 2 + i // 4) % 2]) for i, shape in enumerate(SHAPES)],
)
def test_gradients_are_those_of_finite_differences(
    monkeypatch, queries, kv_heads, window, sink, few
):
    """Of outputs and of sums, where one alone of queries, keys, values, bias and sinks wants a
    gradient."""
    monkeypatch.setattr(span_attention, "FEW", few)
    for name in ("query", "key", "value", "bias", *["sinks"] * sink):
        drawn = Drawn(queries, kv_heads, window, sink)

        def read(leaf, drawn=drawn, name=name):
            if name == "bias":
                drawn.biases[0] = leaf
            else:
                setattr(drawn, name, leaf)
            scores = drawn.fused()
            outputs, live = scores.outputs(), drawn.live
            sums = (scores.log_sum(drawn.spans[0], outside) for outside in (False, True))
            seen = [some[live & (some.detach() > -1e5)] for some in sums]
            return outputs[live], scores.lse[live], *seen

        leaf = drawn.biases[0] if name == "bias" else getattr(drawn, name)
        assert torch.autograd.gradcheck(read, leaf.requires_grad_(), fast_mode=True), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_in_half_precision(dtype):
    """Of a pass behind a cache, beside those of the same numbers in float64."""
    made = []
    for precision in (torch.float64, dtype):
        drawn = Drawn(12, 2, dtype=dtype, size=1.0)
        wide = torch.promote_types(precision, torch.float32)
        drawn.query, drawn.key, drawn.value, drawn.biases[0] = leaves = [
            leaf.to(kind).requires_grad_()
            for leaf, kind in (
                (drawn.query, precision), (drawn.key, precision), (drawn.value, precision),
                (drawn.biases[0], wide),
            )
        ]  # fmt: skip
        drawn.fused().outputs()[drawn.live].double().square().sum().backward()
        made.append([leaf.grad.double() for leaf in leaves])
    for wanted, ours in zip(*made, strict=True):
        assert (ours - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_memory_is_linear_in_keys():
    """A pass of 4,096 keys holds no tensor as large as one head's matrix of scores."""
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, tuple) else (made,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return made

    n = 4096
    query, key, value = (torch.randn(1, heads, n, 8) for heads in (2, 1, 1))
    with Largest():
        scores = SpanScores(query, key, value, 0.3)
        span = pad(torch.ones(1, 300, dtype=torch.bool), (2, 0))
        scores.add(span, torch.ones(1, 1, n))
        scores.outputs()
        scores.log_sum(span), scores.log_sum(span, outside=True)
    assert largest < 60 * n
