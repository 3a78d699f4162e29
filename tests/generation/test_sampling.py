"""Draws: distribution, ties, streams, empty distributions."""

import numpy as np
import pytest
import torch

from lapa2_interp.generation.sampling import NOTHING, draw, keep_top_k, uniforms


def test_draw_inverts_the_cumulative_distribution_in_id_order():
    log_weights = torch.tensor([[0.1, 0.4, 0.0, 0.5]]).log().repeat(6, 1)
    uniform = torch.tensor([0.0, 0.0999, 0.1, 0.4999, 0.5001, 0.9999], dtype=torch.float64)
    assert draw(log_weights, uniform, top_k=200).tolist() == [0, 0, 1, 1, 3, 3]


def test_unnormalised_weights_are_normalised_over_the_kept():
    log_weights = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log() + 50
    uniform = torch.tensor(
        [0.57], dtype=torch.float64
    )  # kept: .4 and .3, the first has 4/7 = .5714
    assert draw(log_weights, uniform, top_k=2).tolist() == [1]
    assert draw(log_weights, uniform + 0.01, top_k=2).tolist() == [3]


def test_sampled_frequencies():
    weights = torch.tensor([0.05, 0.2, 0.0, 0.45, 0.3])
    uniform = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shares = draw(weights.log().repeat(20_000, 1), uniform, top_k=5).bincount(minlength=5) / 20_000
    assert torch.allclose(shares, weights, atol=0.012)  # about 3.5 standard errors


def test_ties_at_rank_k_go_to_the_smaller_id():
    log_weights = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0], [0.0] * 6])
    assert keep_top_k(log_weights, 3).tolist() == [[0, 1, 3], [0, 1, 2]]
    assert keep_top_k(log_weights, 99).tolist() == [[0, 1, 2, 3, 4, 5]] * 2


def test_many_ties_are_kept_as_a_stable_sort_keeps_them():
    rng = torch.Generator().manual_seed(5)
    log_weights = (torch.randn(200, 500, generator=rng) * 3).round() / 3
    log_weights[:20, 40:] = -torch.inf  # fewer than k of positive weight: the rest is one tie
    log_weights[20] = torch.arange(500.0)  # no tie
    log_weights[21, ::7] = torch.nan  # ranked first
    expected = (
        log_weights.sort(dim=1, descending=True, stable=True).indices[:, :100].sort(dim=1).values
    )
    assert torch.equal(keep_top_k(log_weights, 100), expected)
    assert torch.equal(keep_top_k(log_weights[20:21], 100), expected[20:21])


def test_a_rank_swap_by_rounding_does_not_move_a_draw():
    rng = torch.Generator().manual_seed(3)
    log_weights = torch.randn(50, 400, generator=rng)
    jitter = log_weights + 1e-7 * torch.randn(50, 400, generator=rng)
    uniform = torch.rand(50, dtype=torch.float64, generator=rng)
    assert torch.equal(draw(log_weights, uniform, top_k=200), draw(jitter, uniform, top_k=200))


def test_certain_token_and_excluded_tokens():
    log_weights = torch.tensor([[-torch.inf, 0.0, -torch.inf, -torch.inf]])
    for u in (0.0, 0.5, 0.999999999):
        assert draw(log_weights, torch.tensor([u], dtype=torch.float64), top_k=3).item() == 1


@pytest.mark.parametrize("value", [-torch.inf, torch.nan, torch.inf])
def test_nothing_is_drawn_from_an_empty_distribution(value):
    log_weights = torch.zeros(3, 4)
    log_weights[1] = value
    uniform = torch.tensor([0.1, 0.1, 0.9], dtype=torch.float64)
    assert draw(log_weights, uniform, top_k=2).tolist() == [0, NOTHING, 1]


def test_streams_are_keyed_by_seed_prompt_and_sample():
    base = uniforms(1, "The lake", 0, 512)
    assert np.array_equal(uniforms(1, "The lake", 0, 64), base[:64]), (
        "a longer stream begins with a shorter one"
    )
    for stream in ((2, "The lake", 0), (1, "The road", 0), (1, "The lake", 1)):
        assert not np.isclose(uniforms(*stream, 64), base[:64]).any()
    assert 0.45 < base.mean() < 0.55
    assert base.min() >= 0
    assert base.max() < 1
