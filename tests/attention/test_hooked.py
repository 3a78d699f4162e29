"""TransformerBridge == HookedTransformer: forward passes, cached decoding, traces. Collected where
both classes exist."""

import numpy as np
import pytest
import torch
from conftest import MODEL_CLASSES, load
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from lapa2_interp import Augmentation, augmented, teacher_forced
from lapa2_interp.bias.layout import Layout
from lapa2_interp.errors import LayoutError


def test_the_cache_of_a_hooked_transformer_is_read(tiny):
    """Texts longer than a chunk behind prompts of two lengths; and under phase predicting_only its keys are
    not kept."""
    bridge, hooked = (load(tiny, "float32", kind) for kind in MODEL_CLASSES)
    layouts = [Layout.of(hooked.tokenizer, "Good:", prompt) for prompt in ("The lake", "A")]
    asked = (layouts, [list(range(40, 60))] * 2, Augmentation(alpha=0.5))
    trace, wanted = (teacher_forced(model, *asked, chunk=15) for model in (hooked, bridge))
    np.testing.assert_allclose(trace["prefix"], wanted["prefix"], atol=1e-4)
    cache = TransformerLensKeyValueCache.init_cache(hooked.cfg, "cpu", 1)
    with (
        torch.no_grad(),
        augmented(hooked, Augmentation(alpha=1, phase="predicting_only"), layouts[0]),
    ):
        hooked(layouts[0].tensor, past_kv_cache=cache)
        with pytest.raises(LayoutError, match="phase 'predicting_only' a cache must not keep"):
            hooked(torch.tensor([[40]]), past_kv_cache=cache)
