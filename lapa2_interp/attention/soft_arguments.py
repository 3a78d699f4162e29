"""The arguments with which a TransformerBridge reads layouts after soft prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import Cache, DynamicLayer

from lapa2_interp.attention.cache import (
    bos_positions,
    check_readable,
    check_window,
    soft_keys_and_values,
)
from lapa2_interp.attention.cached_heads import new_cache_layers
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.padded_rows import PaddedRows
from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.models.facts import Model, check_has_tokenizer, facts_of
from lapa2_interp.prefixes.soft_prefix import SoftPrefix


def soft_inputs(
    model: Model, layouts: Sequence[Layout], prefixes: Sequence[SoftPrefix | None]
) -> dict[str, Any]:
    """Arguments with which a TransformerBridge reads left-padded layouts after soft prefixes in one
    pass.

        model.run_with_cache(**soft_inputs(model, [branch], [prefix]))

    Returns:
        input, attention_mask, position_ids and the cache, by its name (`models.cache_name`).
    """
    check_has_tokenizer(model)
    check_readable(model, layouts)
    rows = PaddedRows.of(layouts, model.cfg.device, bos_positions(layouts, prefixes))
    check_window(facts_of(model).window, layouts, len(layouts[0]))
    cache = Cache(layers=new_cache_layers(model, DynamicLayer))
    soft = soft_keys_and_values(model, layouts, prefixes)
    if soft is not None:
        for layer, (keys, values) in enumerate(zip(*soft, strict=True)):
            cache.update(keys, values, layer)
    return {
        "input": rows.ids,
        "attention_mask": rows.mask,
        "position_ids": rows.positions,
        cache_name(facts_of(model).network): cache,
    }
