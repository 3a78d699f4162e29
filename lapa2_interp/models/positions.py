"""A check that a model reads rows as the package gives them.

Rows are left-padded beside longer ones, with explicit positions that begin at 0.

Some networks count positions from another number, some take none, and some read padding. None of
them raises an error: their rows depend on the rows beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import Parameter, signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapa2_interp.errors import DeadHookError
from lapa2_interp.models.attention_interface import AttentionHooks, hook_attention
from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.models.configuration import context_length, rotary_limit
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.offloaded import device_of

LOG_PROB_TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}
"""Largest mean difference of one model's log-probabilities, computed in another order."""
LENGTHS = (5, 3)
"""Tokens of the two rows."""

_problems: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()


def rows_problem(model: Model) -> str | None:
    """The reason why rows of unequal length cannot be read together; None if they can. A network is
    tried once.

    Args:
        model: A TransformerBridge, a TransformersModel or a bare transformers model.
    """
    network = facts_of(model).network
    if network not in _problems:
        _problems[network] = _try_rows(model)
    return _problems[network]


@torch.no_grad()
def _try_rows(model: Model) -> str | None:
    network = facts_of(model).network
    lengths = [min(length, _longest(network)) for length in LENGTHS]
    ids = _sample_ids(network, lengths[0])
    with _eval_mode(network):
        alone = [_log_probs(model, ids[:, :length]) for length in lengths]
        if (shift := _position_problem(network, model, ids, alone[0])) is not None:
            return shift
        pad = lengths[0] - lengths[1]
        rows = torch.cat([ids, torch.cat([ids[:, :1].expand(1, pad), ids[:, : lengths[1]]], 1)])
        slot = torch.arange(lengths[0], device=ids.device)
        first = torch.tensor([[0], [pad]], device=ids.device)
        settings: dict[str, Any] = {"attention_mask": (slot >= first).long()}
        if facts_of(model).backend != "plain" or _swallows_positions(network):
            settings["position_ids"] = (slot - first).clamp(min=0)
        # In float64 the eager function of many families makes NaN of padding, and ours does not.
        ours: AbstractContextManager[None] = nullcontext()
        if facts_of(model).backend == "plain":
            ours = hook_attention(facts_of(model), AttentionHooks())
        try:
            with ours:
                together = _log_probs(model, rows, **settings)
        except DeadHookError:
            return None  # the block that needs the interface says so
    off = max(
        _difference(together[row, -length:], alone[row][0]) for row, length in enumerate(lengths)
    )
    if off <= tolerance(network):
        return None
    if not _takes_positions(network):
        return (
            f"{type(network).__name__} takes no positions, so rows of unequal length cannot be read"
            " together"
        )
    return (
        f"{type(network).__name__} gives a padded row beside a longer one other log-probabilities"
        f" than alone, by {off:.2g}, so rows of unequal length cannot be read together"
    )


@torch.no_grad()
def position_problem(network: Any) -> str | None:
    """The reason why positions cannot be given to a bare transformers model as numbers from 0; None
    if they can, or if it takes none."""
    ids = _sample_ids(network, min(LENGTHS[0], _longest(network)))
    with _eval_mode(network):
        return _position_problem(network, network, ids, _log_probs(network, ids))


def _position_problem(
    network: Any, model: Model, ids: Int[Tensor, "1 query"], alone: Float[Tensor, "1 query vocab"]
) -> str | None:
    if not _takes_positions(network):
        return None
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    off = _difference(_log_probs(model, ids, position_ids=positions), alone)
    if off <= tolerance(network):
        return None
    return (
        f"the positions of {type(network).__name__} do not begin at 0: with positions from 0"
        f" log-probabilities differ by {off:.2g} from those that transformers computes"
    )


def tolerance(network: Any) -> float:
    """Largest mean difference of a network's log-probabilities, computed in another order."""
    return LOG_PROB_TOLERANCE[str(facts_of(network).dtype).removeprefix("torch.")]


def _difference(logits: Tensor, wanted: Tensor) -> float:
    off = float((logits - wanted).abs().mean())
    return off if off == off else float("inf")


def _log_probs(model: Model, ids: Tensor, **settings: Any) -> Float[Tensor, "row query vocab"]:
    network = facts_of(model).network
    if facts_of(model).backend == "plain" and cache_name(network) in _parameters(network):
        settings["use_cache"] = False
    output = model(ids, **settings)
    return getattr(output, "logits", output).float().log_softmax(-1)


def _takes_positions(network: Any) -> bool:
    return "position_ids" in _parameters(network)


def _swallows_positions(network: Any) -> bool:
    """True if positions may be given, whether they are read or not."""
    return _takes_positions(network) or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in _parameters(network).values()
    )


def _parameters(network: Any) -> Mapping[str, Parameter]:
    return signature(network.forward).parameters


def _longest(network: Any) -> int:
    limit = rotary_limit(network.config)
    return min(context_length(network.config.get_text_config()), *(limit[1:] if limit else (8,)))


def _sample_ids(network: Any, n: int) -> Int[Tensor, "1 query"]:
    """Ids from the whole vocabulary, without that of padding, which some networks do not count."""
    config = network.config.get_text_config()
    ids = torch.linspace(0, config.vocab_size - 1, n + 2)[1:-1].long()
    ids = torch.where(ids == (getattr(config, "pad_token_id", None) or 0), ids + 1, ids)
    return ids.remainder(config.vocab_size)[None].to(device_of(network))


@contextmanager
def _eval_mode(network: Any) -> Iterator[None]:
    training = [part for part in network.modules() if part.training]
    network.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
