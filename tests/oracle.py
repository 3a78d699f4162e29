"""An independent statement of the augmentation, in plain loops, to check the package against.

It knows nothing of the package's layouts beyond the numbers of tokens, works on one unpadded row
without a cache, and reads the rules from the method description: which keys, what n, what l, which
queries, which law.
"""

from __future__ import annotations

import math

import torch

from lapa2_interp.models.cache_name import cache_name


def oracle_bias(
    *, n_bos, l_pre, l_pro, counted, total, alpha, law="log", l0=None, span="prefix", length="paper", phase="last_query",
    released=False,
    soft=False,
):  # fmt: skip
    """bias[query][key] over `total` keys of one row: soft prefix, or BOS and hard prefix; (BOS,)
    prompt, generated."""
    first_bos = l_pre if soft else 0
    first_prefix = 0 if soft else n_bos
    target = range(first_prefix, first_prefix + l_pre) if l_pre else range(n_bos, n_bos + l_pro)
    if span == "prefix":
        keys, n = set(target), len(target)
    elif span == "prefix+bos":
        keys, n = set(range(first_bos, first_bos + n_bos)) | set(target), len(target)
    elif span == "bos":
        keys, n = set(range(first_bos, first_bos + n_bos)), len(target)
    elif span == "released":
        keys, n = set(range(counted)), counted
    else:
        keys = {key for start, stop in span for key in range(start, stop)}
        n = len(keys)
    prompt_end = n_bos + l_pre + l_pro
    first_query = {
        "decode": prompt_end,
        "last_query": prompt_end - 1,
        "after_span": max(target if l_pre and keys <= set(target) else keys) + 1,
    }[phase]
    bias = [[0.0] * total for _ in range(total)]
    for query in range(first_query, total):
        seen_bos = min(max(query + 1 - first_bos, 0), n_bos)
        l = max(query + 1 - (seen_bos if length == "paper" else 0), 1)
        if law == "log":
            b = alpha * math.log(l / n) if l > n else 0.0
        elif law == "linear":
            b = alpha * l / n
        elif law == "sqrt":
            b = alpha * (l / n) ** 0.5
        else:
            b = alpha * math.log(l0 / n)
        if released and l <= n:
            b = 0.0
        for key in keys:
            bias[query][key] = b
    return bias


def _before_rotation(attention, keys):
    """The keys [1 slot kv_head d_head] that a HookedTransformer turns into these in each pass."""
    if attention.cfg.positional_embedding_type != "rotary":
        return keys
    _, slots, _, d_head = keys.shape
    axes = torch.eye(d_head, dtype=torch.float64)[:, None, None].expand(-1, slots, 1, -1)
    turned_axes = attention.apply_rotary(axes)[:, :, 0].permute(1, 2, 0).double()
    back = torch.linalg.solve(turned_axes, keys[0].double().transpose(1, 2))
    return back.transpose(1, 2)[None].to(keys.dtype)


def _behind(model, prefix, n):
    """What a forward pass needs to read n tokens behind a soft prefix."""
    from transformers import DynamicCache

    if not hasattr(model, "original_model"):
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 1)
        for layer, entry in enumerate(cache.entries):
            keys, entry.past_values = (
                array[layer].transpose(0, 1)[None].to(model.cfg.dtype)
                for array in (prefix.keys, prefix.values)
            )
            entry.past_keys = _before_rotation(model.blocks[layer].attn, keys)
        cache.previous_attention_mask = torch.ones(1, len(prefix), dtype=torch.long)
        return {"past_kv_cache": cache}
    cache = DynamicCache()
    for layer in range(model.cfg.n_layers):
        cache.update(
            prefix.keys[layer][None].to(model.cfg.dtype),
            prefix.values[layer][None].to(model.cfg.dtype),
            layer,
        )
    first = len(prefix) if prefix.card.shifted else 0
    return {
        cache_name(model.original_model): cache,
        "position_ids": torch.arange(first, first + n)[None],
        "attention_mask": torch.ones(1, len(prefix) + n, dtype=torch.long),
    }


def oracle_logits(model, layout, tokens, augmentation=None, heads=None, prefix=None):
    """Logits after each generated token, and every layer's pattern, from one full pass without
    decoding or padding.

    `heads`: the (layer, head) pairs the bias reaches, or a strength by pair; all by default.
    `prefix`: a soft prefix in front.
    """
    ids = torch.tensor([[*layout.ids, *tokens]])
    slots = 0 if prefix is None else len(prefix)
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    pairs = [(i, j) for i in range(n_layers) for j in range(n_heads)] if heads is None else heads
    reach = pairs if isinstance(pairs, dict) else dict.fromkeys(pairs, 1.0)
    patterns, bias = {}, None
    if augmentation is not None:
        bias = torch.tensor(
            oracle_bias(
                n_bos=layout.n_bos,
                l_pre=layout.l_pre,
                l_pro=layout.l_pro,
                counted=layout.counted,
                total=slots + ids.shape[1],
                alpha=augmentation.alpha,
                law=augmentation.law,
                l0=augmentation.l0,
                span=augmentation.span,
                length=augmentation.length_rule,
                phase=augmentation.phase,
                released=augmentation.profile == "released",
                soft=prefix is not None,
            ),
            dtype=torch.float64,
        )[slots:]

    def edit(scores, hook, layer):
        scores = scores.clone()
        for head in range(n_heads):
            if bias is not None and (layer, head) in reach:
                scores[0, head] += reach[layer, head] * bias.to(scores.dtype)
        return scores

    def keep(pattern, hook, layer):
        patterns[layer] = pattern[0].clone()

    hooks = [
        (f"blocks.{i}.attn.hook_attn_scores", lambda s, hook, i=i: edit(s, hook, i))
        for i in range(n_layers)
    ]
    hooks += [
        (f"blocks.{i}.attn.hook_pattern", lambda p, hook, i=i: keep(p, hook, i))
        for i in range(n_layers)
    ]
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        logits = model(ids, **({} if prefix is None else _behind(model, prefix, ids.shape[1])))[0]
    return logits[len(layout.ids) - 1 :], patterns
