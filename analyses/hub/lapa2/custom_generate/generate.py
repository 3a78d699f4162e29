"""LaPA2 (arXiv 2508.04047) for `model.generate(..., custom_generate=...)`: a bias on the attention
scores of the prefix that grows with the text, at every layer and head, for the query whose logits
give the next token. With l keys in its softmax, BOS not counted, and a prefix of n tokens it is

    b = alpha * log(l / n)                                                              (Eq. 9)

Each pass adds b through a mask of four dimensions, which eager and sdpa attention add to their
scores. Short passes test this once for each model. transformers' own `generate` merges settings
and makes processors and stopping criteria.
"""

import math
from collections import ChainMap
from collections.abc import Mapping
from inspect import signature
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, GenerationConfig

ARGUMENTS = {
    "inputs", "input_ids", "attention_mask", "generation_config", "logits_processor",
    "stopping_criteria", "prefix_allowed_tokens_fn", *vars(GenerationConfig()),
}  # fmt: skip
OTHER_LOOPS = (
    "num_beams", "penalty_alpha", "dola_layers", "constraints", "force_words_ids", "use_mtp",
    "prompt_lookup_num_tokens", "assistant_early_exit", "stop_strings", "token_healing",
    "cache_implementation", "return_dict_in_generate",
)  # fmt: skip
"""Settings that ask for another loop than this one, unless they are zero, empty or `NEUTRAL`."""
NEUTRAL = {"num_beams": [1], "cache_implementation": ["dynamic", "hybrid"]}
FULL, SLIDING = ("full_attention", "attention", "global"), ("sliding_attention", "local")
TOLERANCE = {torch.bfloat16: 0.2, torch.float16: 0.05}
"""Largest mean difference of log-probabilities that are computed in another order; else 1e-3."""
MAX_BIAS = 1e4

_tested = WeakKeyDictionary()


def generate(model, *, prefix_tokens, alpha=0.5, bos_tokens=1, **settings):
    """Continue left-padded rows that begin with `bos_tokens` tokens and then the prefix.

    Args:
        settings: Arguments of transformers' `generate` for greedy texts and samples.

    Returns:
        The ids of inputs and new tokens [row, token]; after its end a row has padding.
    """
    named = {name for name, value in settings.items() if value is not None and value is not False}
    if unknown := sorted(named - ARGUMENTS):
        raise ValueError(f"this decoding has no {', '.join(unknown)}; leave it out")
    own = vars(settings.get("generation_config") or GenerationConfig())
    own = {name: value for name, value in own.items() if value is not None}
    merged = ChainMap(settings, own, vars(model.generation_config))
    for name in OTHER_LOOPS:
        value, neutral = merged.get(name), NEUTRAL.get(name, [None])
        if value and value not in neutral:
            raise ValueError(
                f"this decoding has no {name}={value!r}; leave it out, or give"
                f" {name}={neutral[0]!r} if the model's generation_config has it"
            )
    if merged.get("max_new_tokens") == 0:
        raise ValueError("max_new_tokens=0 leaves no token to make; give 1 or more")
    if merged.get("temperature") == 0:
        settings |= {"do_sample": False, "temperature": 1.0}
    if settings.get("eos_token_id") == []:
        settings["eos_token_id"] = None
    ids = settings.get("inputs") if settings.get("input_ids") is None else settings["input_ids"]
    if settings.get("attention_mask") is None and ids is not None and len(ids) == 1:
        settings["attention_mask"] = torch.ones_like(ids)  # transformers would guess it from ids
    return type(model).generate(
        model, custom_generate=_continue_rows, prefix_tokens=prefix_tokens, alpha=alpha,
        bos_tokens=bos_tokens, **settings,
    )  # fmt: skip


def _continue_rows(
    model,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    prefix_tokens,
    alpha,
    bos_tokens,
    **inputs,
):
    ids, live = input_ids, inputs.get("attention_mask")
    live = torch.ones_like(ids) if live is None else live.to(ids)
    if not live[:, -1].all() or (live.diff(dim=1) < 0).any():
        raise ValueError("rows must be padded on the left, and attention_mask must say where")
    first = live.argmax(1, keepdim=True) + bos_tokens
    are_counts = prefix_tokens % 1 == bos_tokens % 1 == 0 and prefix_tokens >= 1 and bos_tokens >= 0
    if not are_counts or (first + prefix_tokens > ids.shape[1]).any():
        raise ValueError(
            f"prefix_tokens={prefix_tokens} after bos_tokens={bos_tokens} is not a part of every"
            " row"
        )
    lengths = live.sum(1)
    longest = int(lengths.max()) + generation_config.max_length - ids.shape[1] - 1  # are read
    if not 0 <= alpha * math.log(longest / prefix_tokens) <= MAX_BIAS:
        raise ValueError(f"alpha={alpha} gives no bias from 0 to {MAX_BIAS:g}; 0.5 is usual")
    _check_model(model, int(lengths.min()), longest, padded=not live.all())

    cache, unread = _new_cache(model), ids
    running = torch.ones_like(live[:, -1], dtype=torch.bool)
    while running.any():
        # The bias on the prefix, for the last query.
        slots = torch.arange(ids.shape[1], device=ids.device)
        prefix = (slots >= first) & (slots < first + prefix_tokens)  # row key
        length = live.sum(1, keepdim=True) - bos_tokens
        bias = torch.where(prefix, alpha * torch.log(length.double() / prefix_tokens), 0.0)
        logits = _read_rows(model, cache, unread, live, bias)[:, -1]
        scores = logits_processor(ids, logits.to(torch.float32, copy=True))
        if generation_config.do_sample:
            token = scores.softmax(-1).multinomial(1)[:, 0]
        else:
            token = scores.argmax(-1)
        if generation_config._pad_token_tensor is not None:
            token = torch.where(running, token, generation_config._pad_token_tensor)
        unread = token[:, None]
        ids = torch.cat([ids, unread], dim=1)
        live = torch.cat([live, torch.ones_like(unread)], dim=1)
        running = running & ~stopping_criteria(ids, None)
    return ids


def _read_rows(model, cache, unread, live, bias=0.0):
    """Logits of the unread tokens of left-padded rows, with a bias on keys for the last query."""
    # A query sees the live keys up to its own; padding sees itself, so that no row is empty.
    slots = torch.arange(live.shape[1], device=live.device)
    queries = slots[-unread.shape[1] :, None]
    seen = (slots <= queries) & live[:, None].bool() | (slots == queries)  # row query key
    positions = (live.cumsum(1) - 1).clamp(min=0)[:, -unread.shape[1] :]
    return _read(model, cache, unread, seen, positions, bias)


def _read(model, cache, unread, seen, positions, bias=0.0):
    mask = torch.zeros(seen.shape, dtype=model.dtype, device=unread.device)
    mask = mask.masked_fill(~seen, torch.finfo(model.dtype).min)[:, None]
    mask[:, 0, -1] += torch.as_tensor(bias).to(mask)
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    return model(
        unread, attention_mask=mask, position_ids=positions, use_cache=True, **{name: cache}
    ).logits


def _new_cache(model):
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _check_model(model, shortest, longest, padded):
    """Refuse a model that this loop would misread.

    Args:
        shortest, longest: Tokens of the shortest row, and of the longest that is read.
    """
    config = model.config.get_text_config(decoder=True)
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    if config._attn_implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"attention {config._attn_implementation!r} ignores the bias; load the model with"
            ' attn_implementation "eager" or "sdpa"'
        )
    problem = "has an encoder" if model.config.is_encoder_decoder else None
    problem = problem or _layer_problem(config, longest)
    problem = problem or _rotary_problem(config, shortest, longest)
    tested = _tested.setdefault(model, set())
    facts = (config._attn_implementation, model.dtype, padded)
    if not problem and facts not in tested:
        try:
            problem = _pass_problem(model, config, padded)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            problem = f"cannot read this loop's masks, positions and cache ({error})"
    if problem:
        raise ValueError(
            f"{type(model).__name__} {problem}; the package lapa2-interp reads more models"
        )
    tested.add(facts)


def _layer_problem(config, longest):
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    names = ("layer_types", "layers_block_type", "attention_layers")
    kinds = next((kinds for name in names if (kinds := getattr(config, name, None))), None)
    if kinds is None:
        slides = window and getattr(config, "use_sliding_window", None) is not False
        kinds = SLIDING[:1] if slides else FULL[:1]
    sizes = dict.fromkeys(FULL, math.inf) | dict.fromkeys(SLIDING, window)
    sizes["chunked_attention"] = getattr(config, "attention_chunk_size", None)
    for kind in kinds:
        if sizes.get(kind) is None:
            return f"has layers of type {kind!r}, which are not attention alone"
        if longest > sizes[kind]:
            return (
                f"has layers of type {kind!r}, which see {sizes[kind]} keys, and may read a text of"
                f" {longest}, so l is not one number for all layers: make shorter texts"
            )
    return None


def _rotary_problem(config, shortest, longest):
    """Rotary factors that change on the way from the shortest row to the longest text."""
    tables = getattr(config, "rope_parameters", None) or {}
    for table in (tables, *tables.values()):  # of all layers, or by their type
        if not isinstance(table, Mapping):
            continue
        kind = table.get("rope_type") or ""
        limit = getattr(config, "max_position_embeddings", math.inf)
        switches = kind == "longrope" or "long_mscale" in table
        if switches:
            own = getattr(config, "original_max_position_embeddings", None)
            limit = table.get("original_max_position_embeddings") or own or limit
        if (switches and shortest <= limit < longest) or ("dynamic" in kind and longest > limit):
            return (
                f"has other rotary factors ({kind}) beyond {limit} tokens, and may read a text of"
                f" {longest} by keys with the factors of a shorter one: make shorter texts"
            )
    return None


def _pass_problem(model, config, padded):
    # Tokens from the whole vocabulary, without that of padding, which some models do not count.
    ids = torch.linspace(1, config.vocab_size - 2, 6, device=model.device).long()[None]
    pad = getattr(config, "pad_token_id", None)
    ids = ids if pad is None else ids + (ids == pad)
    alone = model(ids, use_cache=False).logits
    # The row alone against the same in this loop, and beside a shorter row.
    rows = torch.cat([ids, torch.cat([ids[:, :2], ids[:, :4]], dim=1)]) if padded else ids
    live = torch.ones_like(rows)
    live[1:, :2] = 0
    cache = _new_cache(model)
    passes = [
        _read_rows(model, cache, rows[:, start:stop], live[:, :stop])
        for start, stop in ((0, 4), (4, 5), (5, 6))
    ]
    looped = torch.cat(passes, dim=1)
    noise = _difference(looped[:1], alone)
    off = max([noise, *([_difference(looped[1:, 2:], alone[:, :4])] if padded else [])])
    tolerance = TOLERANCE.get(model.dtype, 1e-3)
    if not off <= tolerance:
        what = "a padded row of this loop" if noise < off else "a text of this loop"
        return f"computes {what} otherwise than alone: log-probabilities differ by {off:.2g}"
    # A bias of log 16 on a key does what 16 copies of the key do, at the same position.
    bias = math.log(16) * torch.tensor([[0, 1, 0]])
    biased = _read_rows(model, _new_cache(model), ids[:, :3], live[:1, :3], bias)[:, -1]
    order = torch.tensor([0, *[1] * 16, 2], device=model.device)
    seen = torch.ones(18, 18, device=model.device).tril().bool()
    seen[1:17, 1:17] = torch.eye(16, device=model.device).bool()  # a copy sees no other
    copied = _read(model, _new_cache(model), ids[:, order], seen[None], order[None])[:, -1]
    off, effect = _difference(biased, copied), _difference(biased, looped[:1, 2])
    if not off <= max(effect / 2, tolerance):
        return (
            "does not add numbers of a mask to its attention scores: a bias of log 16 on a key is"
            f" not 16 keys in its place, log-probabilities differ by {off:.2g}"
        )
    return None


def _difference(logits, wanted):
    return (logits.float().log_softmax(-1) - wanted.float().log_softmax(-1)).abs().mean().item()
