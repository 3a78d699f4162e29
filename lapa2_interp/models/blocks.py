"""Blocks that change what a model's passes do, and the proof in every pass that they did.

A block is open from `with` to its end. Blocks on one model may be nested and closed in any order,
by an exception or by the garbage collector; all of them belong to one thread, and in it to one task
of asyncio. What could pass a block by without a word is an error: a copy of the model, a compiled
one, a call of an inner module, hooks that were taken away.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from threading import RLock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lapa2_interp._util.errors import DeadHookError, ModelError
from lapa2_interp.models.card import (
    Model,
    check_cache_grew,
    check_no_checkpointing,
    is_bridge,
    network_of,
)

ATTENTION_NAME = "lapa2"
"""Name of our attention function in transformers, and of the argument that its visitors are."""

OTHER_THREAD_ERROR = (
    "a block such as augmented(...) is open on this model in another thread or asyncio task, so"
    " that its change would act here, too; open and leave a model's blocks in the one that runs it"
)
COPY_ERROR = (
    "this model is a copy that was made inside a block such as augmented(...), with the block's"
    " hooks in it; make the copy before or after the block"
)
OUTSIDE_ERROR = (
    "inside a block such as augmented(...) attention was computed outside a pass of the block's"
    " model, where the block does not act: by its forward(), an inner module (model.model) or a"
    " copy; call the model itself"
)
REMOVED_CAUSES = (
    "inside the block the hooks were taken away (reset_hooks), the attention function was changed"
    " (set_attn_implementation), or the model's attention does not come by there; leave both alone"
    " inside a block, and see `lapa2 probe`"
)


@dataclass
class PassState:
    """What a block knows of the pass that runs.

    Attributes:
        seen: The places, layers or hook points, where the block's change was called.
        running: Whether a pass has begun.
        cache: The cache it was given, and the keys that it held.
    """

    seen: set[Hashable] = field(default_factory=set)
    running: bool = False
    cache: tuple[Any, int] = (None, 0)


@dataclass
class _OpenBlocks:
    """The open blocks of a network: their thread and task, their number, and the attention
    functions from before the first of those that change it."""

    runner: tuple[int, Any]
    number: int = 0
    usual: dict[str, Any] | None = None


_open: WeakKeyDictionary[Any, _OpenBlocks] = WeakKeyDictionary()
_eager_stances: list[AbstractContextManager] = []
_lock = RLock()  # a block may be closed by the garbage collector, wherever a thread stands


def arguments_by_name(module: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward pass by name, those given by position too."""
    names = inspect.signature(module.forward).parameters if args else ()
    return dict(zip(names, args, strict=False)) | kwargs


@contextmanager
def open_block(
    network: Any,
    begin: Callable[[dict[str, Any]], None],
    watch: PassState,
    places: Collection[Hashable],
    attention: bool = False,
    starts: Sequence[Any] = (),
    end: Any = None,
) -> Iterator[None]:
    """A block on a network.

    Args:
        network: A transformers model, or a HookedTransformer.
        begin: Called before a pass with the arguments by name, to which it may add.
        watch: What the block's change tells of a pass.
        places: What a pass must have seen at its end.
        attention: Attention is computed by our function inside the block.
        starts: Modules that are called before a pass, the last of them in every whole one; the
            network if none are given.
        end: The module whose call ends one; the network by default.

    Raises:
        ModelError: The model is compiled, or the block or a pass belongs to another thread or to a
            copy; or a pass has dropped its cache.
        DeadHookError: A pass has not seen a place.
    """
    starts, end = starts or (network,), network if end is None else end

    def before(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if not any(module is each for each in starts):
            raise ModelError(COPY_ERROR)
        _check_thread(network)
        check_no_checkpointing(network)
        watch.seen.clear()
        watch.running = module is starts[-1]
        given = arguments_by_name(module, args, kwargs)
        told = dict(given)
        if (cache := given.get("past_key_values")) is not None:
            watch.cache = cache, int(cache.get_seq_length())  # some count in a tensor
        begin(told)
        new = {name: each for name, each in told.items() if given.get(name) is not each}
        # What is given by position, as None, cannot be given by name as well.
        if any(name in given and name not in kwargs for name in new):
            return (), told
        return args, kwargs | new

    def after(module: Any, args: tuple, output: Any) -> None:
        running, watch.running = watch.running, False
        (cache, held), watch.cache = watch.cache, (None, 0)
        if output is None:  # the pass has raised an error
            return
        if running and cache is not None:
            check_cache_grew(network, bool(cache.get_seq_length() > held))
        missing = [each for each in places if each not in watch.seen]
        if running and missing:
            first = f"layer {missing[0]}" if isinstance(missing[0], int) else missing[0]
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise DeadHookError(
                f"the pass did not come by {first}{more}, where the block acts: {REMOVED_CAUSES}"
            )

    with ExitStack() as undo:
        undo.enter_context(_register_block(network, attention))
        for each in starts:
            undo.callback(each.register_forward_pre_hook(before, with_kwargs=True).remove)
        undo.callback(end.register_forward_hook(after, always_call=True).remove)
        yield


def check_no_open_block(model: Model) -> None:
    """Refuse a model in an open block, where what is made is said to be the model's own.

    Raises:
        ModelError: A block is open.
    """
    if network_of(model) in _open:
        raise ModelError(
            "a block such as augmented(...) is open on this model, and would act on texts that a"
            " run says are made without it; leave the block first, or give augmentation=... here"
        )


def _thread_and_task() -> tuple[int, Any]:
    """The thread that runs here, and the task of asyncio; None outside of one."""
    task = None
    with suppress(RuntimeError):  # no loop runs
        task = asyncio.current_task()
    return get_ident(), task


def _check_thread(network: Any) -> None:
    if (blocks := _open.get(network)) is not None and blocks.runner != _thread_and_task():
        raise ModelError(OTHER_THREAD_ERROR)


@contextmanager
def _register_block(network: Any, attention: bool) -> Iterator[None]:
    """One more open block of a network."""
    compiled = (name for name, each in network.named_modules() if each._compiled_call_impl)
    if (name := next(compiled, None)) is not None:
        raise ModelError(
            f"{name or 'the model'} is compiled, and a compiled pass does not see what a block"
            " changes; load the model anew and do not compile it"
        )
    with _lock:
        _check_thread(network)
        blocks = _open.setdefault(network, _OpenBlocks(_thread_and_task()))
        blocks.number += 1
        if not _eager_stances:  # a wrapper that torch.compile made of a model runs the model itself
            _eager_stances.append(torch.compiler.set_stance("force_eager"))
    try:
        if attention and blocks.usual is None:
            config = network.config
            each_part = {name: getattr(config, name) for name in config.sub_configs}
            blocks.usual = {"": config._attn_implementation} | {
                name: part._attn_implementation
                for name, part in each_part.items()
                if part is not None
            }
            network.set_attn_implementation(ATTENTION_NAME)
        yield
    finally:
        with _lock:
            blocks.number -= 1
            last = not blocks.number
            if last:
                _open.pop(network, None)
            if not _open:
                _eager_stances.pop().__exit__(None, None, None)
        if last and blocks.usual is not None:
            network.set_attn_implementation(blocks.usual)


@contextmanager
def attach_hooks(
    model: Model,
    hooks: Sequence[tuple[str, Callable]],
    begin: Callable[[dict[str, Any]], Any] = lambda _given: None,
) -> Iterator[None]:
    """Hooks of a TransformerLens model in a block of their own, which may close in any order.

    Args:
        hooks: Names of hook points, and what is called there with tensor and hook.
        begin: As of `open_block`; before a HookedTransformer embeds, with `tokens` alone.

    Raises:
        DeadHookError: There is no such hook point, or a pass has not come by one.
        ModelError: As `open_block`.
    """
    watch, network, points = PassState(), network_of(model), model.hook_dict
    # A HookedTransformer's `generate` calls its forward(), beside the hooks of the module itself.
    ends = {} if is_bridge(model) else {"starts": (model, model.embed), "end": model.unembed}

    def noted(name: str, function: Callable) -> Callable:
        def call(tensor: torch.Tensor, hook: Any) -> Any:
            _check_thread(network)
            if not watch.running and is_bridge(model):
                raise DeadHookError(OUTSIDE_ERROR)
            found = function(tensor, hook)
            watch.seen.add(name)
            return found

        return call

    with ExitStack() as undo:
        names = [name for name, _ in hooks]
        undo.enter_context(open_block(network, begin, watch, names, **ends))
        for name, function in hooks:
            if (point := points.get(name)) is None:
                raise DeadHookError(f"the model has no hook point {name}")
            point.add_hook(noted(name, function))
            undo.callback(_detach, point, point.fwd_hooks[-1])
        yield


def _detach(point: Any, handle: Any) -> None:
    handle.hook.remove()
    point.fwd_hooks[:] = [each for each in point.fwd_hooks if each is not handle]
