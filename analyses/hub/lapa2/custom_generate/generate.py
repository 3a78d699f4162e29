"""LaPA2 (arXiv 2508.04047) for `model.generate(..., custom_generate=...)`: a bias on the attention
scores of the prefix that grows with the text, at every layer and head, for the query whose logits
give the next token. With l keys in its softmax, BOS not counted, and a prefix of n tokens it is

    b = alpha * log(l / n)                                                              (Eq. 9)

Each pass adds b through a mask of four dimensions, which eager and sdpa attention add to their
scores.
"""

import math
from inspect import signature

import torch
from transformers import DynamicCache


@torch.no_grad()
def generate(
    model,
    inputs=None,
    input_ids=None,
    attention_mask=None,
    *,
    prefix_tokens,
    alpha=0.5,
    bos_tokens=1,
    max_new_tokens=20,
    do_sample=False,
    temperature=1.0,
    top_k=0,
    eos_token_id=None,
    pad_token_id=None,
    **settings,
):
    """Continue left-padded rows that begin with `bos_tokens` tokens and then the prefix.

    Returns:
        The ids of inputs and new tokens [row, token]; after its end a row has padding.
    """
    unknown = sorted(name for name, value in settings.items() if value)
    if unknown:
        raise ValueError(f"this decoding has no {', '.join(unknown)}; leave it out")
    config = model.config.get_text_config()
    attention = model.config._attn_implementation
    if attention not in ("eager", "sdpa"):
        raise ValueError(
            f"attention {attention!r} ignores the bias; load the model with attn_implementation"
            ' "eager" or "sdpa"'
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or getattr(config, "sliding_window", None):
        raise ValueError("a model whose layers do not see every key has masks of its own")
    ids = inputs if input_ids is None else input_ids
    live = torch.ones_like(ids) if attention_mask is None else attention_mask.to(ids)
    if not live[:, -1].all():
        raise ValueError("rows must be padded on the left")
    first = live.argmax(1, keepdim=True) + bos_tokens
    if prefix_tokens < 1 or (first + prefix_tokens > ids.shape[1]).any():
        raise ValueError(f"prefix_tokens={prefix_tokens} is not a part of every row")
    ends = model.generation_config.eos_token_id if eos_token_id is None else eos_token_id
    ends = torch.tensor([ends] if isinstance(ends, int) else ends or [], device=ids.device)
    pad = pad_token_id if pad_token_id is not None else (int(ends[0]) if len(ends) else 0)

    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    cache, unread, running = DynamicCache(config=config), ids, live[:, -1].bool()
    for _ in range(max_new_tokens):
        # A query sees the live keys up to its own; padding sees itself, so that no row is empty.
        slots = torch.arange(ids.shape[1], device=ids.device)
        queries = slots[-unread.shape[1] :]
        seen = (slots <= queries[:, None]) & live[:, None].bool() | (slots == queries[:, None])
        mask = torch.zeros(seen.shape, dtype=model.dtype, device=ids.device)  # row query key
        mask = mask.masked_fill(~seen, torch.finfo(model.dtype).min)[:, None]
        # The bias on the prefix, for the last query.
        length = live.sum(1, keepdim=True) - bos_tokens
        bias = alpha * torch.log(length.double() / prefix_tokens)
        prefix = (slots >= first) & (slots < first + prefix_tokens)  # row key
        mask[:, 0, -1] += torch.where(prefix, bias, 0.0).to(model.dtype)

        positions = (live.cumsum(1) - 1).clamp(min=0)[:, -unread.shape[1] :]
        logits = model(unread, attention_mask=mask, position_ids=positions, **{name: cache}).logits[
            :, -1
        ]
        if do_sample:
            logits = logits / temperature
            if top_k:
                least = logits.topk(min(top_k, logits.shape[1])).values[:, -1:]
                logits = logits.masked_fill(logits < least, -math.inf)
            token = logits.softmax(-1).multinomial(1)[:, 0]
        else:
            token = logits.argmax(-1)
        unread = torch.where(running, token, pad)[:, None]
        ids = torch.cat([ids, unread], dim=1)
        live = torch.cat([live, torch.ones_like(unread)], dim=1)
        running = running & ~torch.isin(token, ends)
        if not running.any():
            break
    return ids
