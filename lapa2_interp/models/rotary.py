"""A check that forward passes do not mix rotary factors.

Some models choose their rotary factors by the largest position of a pass
(`configuration.rotary_limit`), for all its rows together. Keys in a cache are stale once the choice
changes. So every pass is checked before it runs, at the network, and at its base model for callers
of that alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lapa2_interp.errors import LayoutError
from lapa2_interp.models.blocks import arguments_by_name, cache_of
from lapa2_interp.models.configuration import rotary_limit

LONG_ATTRIBUTE = "lapa2_long"
"""Attribute of a cache: True if its keys were computed with the factors of long texts."""

INPUT_NAMES = ("input_ids", "inputs_embeds")


def refuse_mixed_rotary(network: Any) -> None:
    """Refuse, from now on, passes of a transformers model that mix rotary factors.

    In such a pass a row gets other factors than it would alone, or than the keys in its cache have,
    or than the text up to a query whose logits `logits_to_keep` asks for. Such a pass raises
    LayoutError. Models whose factors do not depend on the length of a pass, and HookedTransformers,
    are not changed.
    """
    switch = rotary_limit(network.config) if hasattr(network, "config") else None
    if switch is None:
        return
    check = partial(_check_pass, kind=switch[0], limit=switch[1])
    for part in {network, network.base_model}:
        hooks = part._forward_pre_hooks.values()
        if not any(getattr(hook, "func", None) is _check_pass for hook in hooks):
            part.register_forward_pre_hook(check, with_kwargs=True)


def _check_pass(part: Any, args: tuple, kwargs: dict[str, Any], *, kind: str, limit: int) -> None:
    # The lengths of the pass and of its rows.
    arguments = arguments_by_name(part, args, kwargs)
    cache = cache_of(arguments)
    read = next((arguments[name] for name in INPUT_NAMES if arguments.get(name) is not None), None)
    if read is None:
        return  # transformers says what is missing
    n = read.shape[1]
    held = 0 if cache is None else int(cache.get_seq_length())
    longest, rows = _pass_lengths(arguments, held, n)
    is_long = longest > limit
    if kind == "dynamic":
        if is_long:
            raise LayoutError(
                f"the pass reaches {longest} tokens, and beyond {limit} this model's rotary factors"
                " (dynamic NTK) are others for every length, which its cache and its next passes"
                f" do not follow; read at most {limit} tokens"
            )
        return
    # longrope: rows, queries and cached keys must have the factors of the pass.
    at = f"{limit} tokens (longrope, original_max_position_embeddings)"
    if across := [row for row in rows if row and (row > limit) != is_long]:
        raise LayoutError(
            f"a row of {across[0]} tokens is in one pass with positions up to {longest}, and the"
            f" rotary factors of all its rows change beyond {at}; read rows of both sides in"
            " passes of their own"
        )
    keep = arguments.get("logits_to_keep")
    least = min((row for row in rows if row), default=0)
    if is_long and isinstance(keep, int) and keep and least - keep < limit:
        raise LayoutError(
            f"a pass up to token {longest} is asked for the logits of token {least - keep + 1}, and"
            f" rotary factors change beyond {at}, so they are not what that text alone gives; read"
            " one token at a time there, or texts of one side"
        )
    if cache is None:
        return
    # Keys without the attribute are of short texts, also those of a soft prefix.
    was_long = getattr(cache, LONG_ATTRIBUTE, min(rows) - n > limit) if held else is_long
    if was_long != is_long:
        raise LayoutError(
            f"the pass reaches {longest} tokens, and the {held} keys in its cache have the rotary"
            f" factors of {'long' if was_long else 'short'} texts, which change beyond {at}: they"
            " are stale; stay on one side, or read the text again without a cache"
        )
    setattr(cache, LONG_ATTRIBUTE, is_long)


def _pass_lengths(arguments: dict[str, Any], held: int, n: int) -> tuple[int, list[int]]:
    """Tokens up to the largest position of a pass, padding included; and the tokens that each row
    has read after the pass."""
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    live = None
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= held + n:
        live = mask[:, : held + n] != 0
    if positions is None:
        return held + n, [held + n] if live is None else live.sum(1).tolist()
    count = positions.flatten(0, -2) + 1  # row query
    own = count if live is None else torch.where(live[:, held:], count, 0)
    return int(count.max()), own.amax(1).tolist()
