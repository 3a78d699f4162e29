"""A forward pass that depends on its inputs alone.

Passes before and beside this one, and chance, have no part.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lapa2_interp.errors import ModelError

CHANCE = 1e-4
"""Largest difference between two passes over the same inputs."""

_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()


@contextmanager
def lone_pass(network: Any) -> Iterator[None]:
    """One thread at a time is inside the blocks of a network, and at their end its modules have
    the attributes, parts and buffers that they began with.

    Some networks change themselves in a pass: BigBird, for good, at its first short text. Hooks
    on a network would be called by the passes of other threads, too. Blocks may be nested.
    """
    with _locks_lock:
        lock = _locks.setdefault(network, threading.RLock())
    with lock:
        before = [(facts, dict(facts)) for module in network.modules() for facts in _facts(module)]
        try:
            yield
        finally:
            for facts, values in before:
                for name in [*facts]:
                    if name not in values:
                        del facts[name]
                for name, value in values.items():
                    if name not in facts or facts[name] is not value:
                        facts[name] = value


def _facts(module: Any) -> tuple[dict[str, Any], ...]:
    """The tables of a module that a pass may change."""
    return vars(module), module._modules, module._buffers


def without_chance(network: Any, compute: Callable[[], Tensor]) -> Tensor:
    """What a function computes with a network.

    Raises:
        ModelError: The pass draws random numbers, and with others the result is another.
    """
    before = _random_states()
    result = compute()
    if all(map(torch.equal, before, _random_states())):
        return result
    again = compute()  # another thread may have drawn them
    if not torch.allclose(result, again, rtol=CHANCE, atol=CHANCE, equal_nan=True):
        raise ModelError(
            f"{type(network).__name__} draws random numbers in a forward pass, so a text has"
            " another score each time; give another model"
        )
    return result


def _random_states() -> list[Tensor]:
    return [
        torch.get_rng_state(),
        *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()),
    ]
