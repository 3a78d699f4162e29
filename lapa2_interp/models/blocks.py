"""`with` blocks that change the forward passes of a model, and check in every pass that they did.

Blocks on one model may be nested and closed in any order, by an exception or by the garbage
collector. All of them belong to one thread, and in it to one asyncio task. A pass in which a block
could silently not act is an error: that of a copy of the model, of a compiled model or of an inner
module, or one after hooks were removed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import RLock, get_ident, local
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lapa2_interp.errors import DeadHookError, ModelError
from lapa2_interp.models.cache_name import NEW, OLD
from lapa2_interp.models.facts import Model, facts_of

ATTENTION_NAME = "lapa2"
"""Name of our attention function in transformers, and of the argument that carries its hooks."""

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


Begin = Callable[[dict[str, Any], int], None]
"""Called before a pass with its arguments by name, to which it may add, and the slot of its first
query."""


def change_nothing(arguments: dict[str, Any], first: int) -> None:
    """The `Begin` of blocks that need nothing of a pass's arguments."""


@dataclass
class PassState:
    """The state of a block in the current forward pass.

    Attributes:
        seen: The places (layers or names of hook points) where the block's hooks were called.
        thread: The number of the thread that runs the pass; None between passes.
        first: The slot of its first query, which is the number of keys in its cache. A
            HookedTransformer whose `forward` is called does not say it.
        cache: The cache that transformers' pass was given.
    """

    seen: set[Hashable] = field(default_factory=set)
    thread: int | None = None
    first: int = 0
    cache: Any = None


@dataclass
class _OpenBlocks:
    """The open blocks of a network.

    Attributes:
        runner: The mark of their thread, and their asyncio task.
        number: Their number.
        usual: The attention functions before the first block that changed them.
    """

    runner: tuple[object, Any]
    number: int = 0
    usual: dict[str, Any] | None = None


_open: WeakKeyDictionary[Any, _OpenBlocks] = WeakKeyDictionary()
_eager_stances: list[AbstractContextManager] = []
_threads = local()
_lock = RLock()  # the garbage collector may close a block at any point of a thread


def arguments_by_name(module: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward pass by name, also those given by position."""
    names = inspect.signature(module.forward).parameters if args else ()
    return dict(zip(names, args, strict=False)) | kwargs


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """The cache that a pass of a transformers model is given, by the new name of this argument or
    the old one (`cache_name`); None without one."""
    cache = arguments.get(NEW)
    return arguments.get(OLD) if cache is None else cache


def check_no_checkpointing(network: Any) -> None:
    """Refuse gradient checkpointing in training mode, which drops caches and recomputes layers.

    Raises:
        ModelError: The network would do so.
    """
    if network.training and any(
        getattr(module, "gradient_checkpointing", False) for module in network.modules()
    ):
        raise ModelError(
            "the model is in training mode with gradient checkpointing, which drops the cache of a"
            " pass and reads its layers again later; call model.eval() first, or"
            " switch gradient checkpointing off"
        )


def dropped_cache(network: Any) -> ModelError:
    """The error about a pass whose cache has not grown by the keys of the pass."""
    return ModelError(
        f"{type(network).__name__} has dropped the cache of a pass, so that the next would read"
        " another text; a model must keep the keys that it reads in the cache that it is given"
    )


@contextmanager
def open_block(
    network: Any,
    state: PassState,
    places: Collection[Hashable],
    begin: Begin = change_nothing,
    attention: bool = False,
    starts: Sequence[Any] = (),
    end: Any = None,
) -> Iterator[None]:
    """Open a block on a network.

    Args:
        network: A transformers model, or a HookedTransformer.
        state: The state of the current pass, which the block's hooks update.
        places: The places that `state.seen` must hold at the end of a pass.
        begin: As `Begin`.
        attention: Compute attention by our function inside the block.
        starts: Modules whose call begins a pass; the last of them is called in every complete pass.
            By default the network.
        end: The module whose call ends a pass; by default the network.

    Raises:
        ModelError: The model is compiled, or the block or a pass belongs to another thread or to a
            copy; or a pass has dropped its cache.
        DeadHookError: A pass did not call the block's hooks at a place.
    """
    starts, end = starts or (network,), network if end is None else end

    def before(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if not any(module is start for start in starts):
            raise ModelError(COPY_ERROR)
        _check_thread(network)
        if network.training:
            check_no_checkpointing(network)
        state.seen.clear()
        state.thread = get_ident() if module is starts[-1] else None
        arguments = arguments_by_name(module, args, kwargs)
        if "tokens" not in arguments:  # the embedding of a HookedTransformer gets ids alone
            state.cache, hooked_cache = cache_of(arguments), arguments.get("past_kv_cache")
            state.first = 0
            if state.cache is not None:
                # A copy as a number: some caches count in a tensor, which changes in the pass.
                state.first = int(state.cache.get_seq_length())
            elif hooked_cache is not None:
                state.first = hooked_cache.previous_attention_mask.shape[1]
        added = dict(arguments)
        begin(added, state.first)
        new = {name: value for name, value in added.items() if arguments.get(name) is not value}
        # An argument that is given by position, as None, cannot be given by name as well.
        if any(name in arguments and name not in kwargs for name in new):
            return (), added
        return args, kwargs | new

    def after(module: Any, args: tuple, output: Any) -> None:
        was_running, state.thread = state.thread is not None, None
        cache, state.cache = state.cache, None
        if output is None or not was_running:  # without an output the pass has raised an error
            return
        if cache is not None and not cache.get_seq_length() > state.first:
            raise dropped_cache(network)
        if missing := [hook_place for hook_place in places if hook_place not in state.seen]:
            first = f"layer {missing[0]}" if isinstance(missing[0], int) else missing[0]
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise DeadHookError(
                f"the pass did not come by {first}{more}, where the block acts: {REMOVED_CAUSES}"
            )

    with ExitStack() as undo:
        undo.enter_context(_register_block(network, attention))
        for start in starts:
            undo.callback(start.register_forward_pre_hook(before, with_kwargs=True).remove)
        undo.callback(end.register_forward_hook(after, always_call=True).remove)
        yield


def has_open_block(model: Model) -> bool:
    """True inside a block on the model, in any thread."""
    return facts_of(model).network in _open


def check_no_open_block(model: Model) -> None:
    """Refuse a model with an open block, whose numbers would not be those of the model alone.

    Raises:
        ModelError: A block is open.
    """
    if has_open_block(model):
        raise ModelError(
            "a block such as augmented(...) is open on this model, and would act here, where the"
            " result says that it does not; leave the block first, or give augmentation=... here"
        )


def _check_thread(network: Any) -> tuple[object, Any]:
    """A mark of the current thread and its asyncio task (None outside of one), to which all blocks
    of a network belong.

    Raises:
        ModelError: Another thread or task has a block open on the network.
    """
    # The number of an ended thread may be that of a new one. An object that a block keeps may not.
    if not hasattr(_threads, "mark"):
        _threads.mark = object()
    task = None
    with suppress(RuntimeError):  # no loop runs
        task = asyncio.current_task()
    runner = _threads.mark, task
    if (blocks := _open.get(network)) is not None and blocks.runner != runner:
        raise ModelError(OTHER_THREAD_ERROR)
    return runner


@contextmanager
def _register_block(network: Any, attention: bool) -> Iterator[None]:
    """Count one more open block of a network, until the `with` block ends."""
    # A compiled pass would not call the hooks.
    compiled = (name for name, module in network.named_modules() if module._compiled_call_impl)
    if (name := next(compiled, None)) is not None:
        raise ModelError(
            f"{name or 'the model'} is compiled, and a compiled pass does not see what a block"
            " changes; load the model again and do not compile it"
        )
    with _lock:
        blocks = _open.setdefault(network, _OpenBlocks(_check_thread(network)))
        blocks.number += 1
        if not _eager_stances:  # a model's torch.compile wrapper must run the model itself
            _eager_stances.append(torch.compiler.set_stance("force_eager"))
    try:
        # Switch to our attention function; the last block switches back.
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
    begin: Begin = change_nothing,
    ahead: Sequence[tuple[str, Callable]] = (),
) -> Iterator[None]:
    """Attach hooks to a TransformerLens model in a block, which may close in any order.

    Args:
        hooks: Names of hook points, and the functions that are called there with tensor and hook.
        begin: As `Begin`; before a HookedTransformer embeds, with `tokens` alone.
        ahead: Hooks that are called before all others at their points, also those of other blocks.

    Raises:
        DeadHookError: There is no such hook point, or a pass has not called one.
        ModelError: As `open_block`.
    """
    state, facts, points = PassState(), facts_of(model), model.hook_dict
    network, ends = facts.network, dict[str, Any]()
    if facts.backend == "hooked":  # its `generate` calls forward(), and so no hooks of the module
        ends = {"starts": (model, model.embed), "end": model.unembed}

    def call(tensor: torch.Tensor, hook: Any, function: Callable, point: str | None) -> Any:
        if state.thread != get_ident():  # no pass runs in this thread
            _check_thread(network)
            if facts.backend == "bridge":
                raise DeadHookError(OUTSIDE_ERROR)
        edited = function(tensor, hook)
        if point is not None:
            state.seen.add(point)
        return edited

    attached: list[tuple[Any, Any]] = []
    with open_block(network, state, [name for name, _ in hooks], begin, **ends):
        try:
            for group, is_ahead in ((ahead, True), (hooks, False)):
                for name, function in group:
                    if (point := points.get(name)) is None:
                        raise DeadHookError(f"the model has no hook point {name}")
                    guarded = partial(call, function=function, point=None if is_ahead else name)
                    point.add_hook(guarded, prepend=is_ahead)
                    attached.append((point, point.fwd_hooks[0 if is_ahead else -1]))
            yield
        finally:
            for point, handle in attached:
                handle.hook.remove()
                if handle in point.fwd_hooks:  # `reset_hooks` may have taken it away
                    point.fwd_hooks.remove(handle)
