"""A TransformerBridge reads its cache, by whatever name the installed transformers gives it."""

import warnings

import pytest
import torch
from conftest import load
from families import PLAIN
from transformers import DynamicCache

from lapa2_interp.models.blocks import cache_of
from lapa2_interp.models.cache_name import (
    NEW,
    OLD,
    _to_old_names,
    cache_name,
    let_bridges_read,
)
from lapa2_interp.models.facts import facts_of
from lapa2_interp.models.tiny import TINY

IDS = torch.arange(3, 11)[None]


@pytest.mark.parametrize(("kind", "atol"), [("TransformerBridge", 1e-12), (PLAIN, 1e-5)])
@torch.no_grad()
def test_passes_after_a_cached_text_equal_one_pass(kind, atol):
    """transformers takes cosines in float32, and some processors other last bits for fewer of
    them. An unread cache changes logits by .2 and more."""
    for name in TINY:
        model = load(name, "float64", kind)
        cache, argument = DynamicCache(), cache_name(facts_of(model).network)
        parts = [model(part, **{argument: cache}) for part in IDS.split((4, 3, 1), dim=1)]
        assert cache.get_seq_length() == IDS.shape[1]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(IDS), atol=atol, rtol=0)


@torch.no_grad()
def test_a_bridge_takes_the_old_name_too():
    model, cache = load("tiny-llama", "float64", "TransformerBridge"), DynamicCache()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = [model(part, past_key_values=cache) for part in IDS.split(4, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(IDS), atol=1e-12, rtol=0)


def test_only_bridges_get_hooks_and_only_where_they_need_them():
    counts = []
    for kind in (PLAIN, "TransformerBridge"):
        network = facts_of(load("tiny-gpt2", "float64", kind)).network
        for _ in range(2):
            let_bridges_read(network)
        hooks = [hook for part in network.modules() for hook in part._forward_pre_hooks.values()]
        counts.append(sum(hook is _to_old_names for hook in hooks))
    assert counts == [0, 4 if cache_name(network) == NEW else 0]


def test_the_cache_is_found_by_either_name():
    cache = DynamicCache()
    assert cache_of({NEW: cache}) is cache_of({NEW: None, OLD: cache}) is cache
    assert cache_of({}) is None
