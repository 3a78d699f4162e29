"""The loops that `speed` times, and the clocks around their parts."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import isnan, nan
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import Linear
from tqdm import tqdm
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import DynamicCache
from transformers.pytorch_utils import Conv1D

from lapa2_interp.attention.batch_bias import BatchBias
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.generation import loop
from lapa2_interp.generation.plan import BatchPlan
from lapa2_interp.methods.base import Method
from lapa2_interp.models.card import (
    Model,
    model_card,
    network_of,
)
from lapa2_interp.models.liveness import HOOK_SCORES
from lapa2_interp.models.prepacked import (
    can_prepack,
    prepacked,
)

ALPHA = 0.5
PARTS = ("products", "attention", "bias", "trace", "combine", "draw", "rest")
"""Parts of a step in `--breakdown`."""


@dataclass(frozen=True)
class Timing:
    """Seconds until the first token, and per step after it."""

    prompt: float
    step: float
    note: str = ""


@dataclass
class Subject:
    """A model in the forms that contenders need; all share one set of weights.

    Attributes:
        model: The bridge.
        plain: transformers alone.
        direct: The `TransformersModel`.
    """

    model: Model
    plain: Any
    direct: Model

    @property
    def device(self) -> torch.device:
        return self.plain.device


class Clock(tqdm):
    """A progress bar that shows nothing and notes when it is advanced first."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(disable=True)
        self.device, self.first = device, nan

    def now(self) -> float:
        """Seconds, when the device has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()

    def update(self, n: int | float | None = 1) -> None:
        if isnan(self.first):
            self.first = self.now()


def time_run(run: Callable[[Clock], None], device: torch.device, steps: int) -> Timing:
    clock = Clock(device)
    began = clock.now()
    run(clock)
    ended = clock.now()
    return Timing(clock.first - began, (ended - clock.first) / steps)


def prompt_tokens(todo: BatchPlan, device: torch.device) -> list[Int[Tensor, "sample _"]]:
    """By branch, the ids that every sample of the one prompt reads first."""
    return [
        torch.tensor([layouts[0].ids] * todo.cell.samples, device=device)
        for layouts in todo.layouts
    ]


def _one_after_another(
    read: Callable[[int, Tensor, DynamicCache], Any],
    prompts: Sequence[Int[Tensor, "sample _"]],
    length: int,
    clock: Clock,
) -> None:
    """Read given tokens step by step, in every step one branch after another.

    Args:
        read: Given the branch's number, tokens [sample, query] and its cache, makes the last
            position's logits.
    """
    n_ids = int(max(ids.max() for ids in prompts)) + 1
    given = torch.arange(len(prompts[0]) * length, device=prompts[0].device) % n_ids
    tokens = given.view(-1, length)  # sample step
    caches = [DynamicCache() for _ in prompts]
    for i, (ids, cache) in enumerate(zip(prompts, caches, strict=True)):
        read(i, ids, cache)
    clock.update()
    for step in range(length - 1):
        for i, cache in enumerate(caches):
            read(i, tokens[:, step : step + 1], cache)


def with_transformers(subject: Subject, todo: BatchPlan, implementation: str, clock: Clock) -> None:
    network, prompts = subject.plain, prompt_tokens(todo, subject.device)
    network.set_attn_implementation(implementation)
    if len(prompts) > 1:
        _one_after_another(
            lambda _, ids, cache: network(ids, past_key_values=cache, logits_to_keep=1).logits,
            prompts,
            todo.steps[0],
            clock,
        )
        return
    network.generate(
        prompts[0],
        attention_mask=torch.ones_like(prompts[0]),
        do_sample=True,
        top_k=todo.cell.top_k,
        max_new_tokens=todo.steps[0],
        min_new_tokens=todo.steps[0],
        pad_token_id=subject.model.tokenizer.pad_token_id,
        logits_processor=LogitsProcessorList([_Notice(clock)]),
    )


class _Notice(LogitsProcessor):
    """Advances a clock when logits are there."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.clock.update()
        return scores


def with_transformer_lens(subject: Subject, todo: BatchPlan, clock: Clock) -> None:
    model, spans = subject.model, [layouts[0].prefix for layouts in todo.layouts]
    branch = 0

    def boost(scores: Tensor, hook: Any) -> Tensor:
        scores[..., spans[branch].start : spans[branch].stop] += ALPHA
        return scores

    def read(i: int, ids: Tensor, cache: DynamicCache) -> Tensor:
        nonlocal branch
        branch = i
        return model(ids, past_key_values=cache, logits_to_keep=1)

    hooks = [(HOOK_SCORES.format(layer), boost) for layer in range(model.cfg.n_layers)]
    with model.hooks(fwd_hooks=hooks):
        _one_after_another(read, prompt_tokens(todo, subject.device), todo.steps[0], clock)


def with_our_loop(model: Model, todo: BatchPlan, packing: str, clock: Clock) -> None:
    model.lapa2_card = model_card(model).model_copy(update={"prepacking": packing})
    loop.decode_batches(model, todo, progress=clock)


class Products:
    """The matrix products of one step, and how fast they can be.

    Args:
        network: A transformers model; its weights are used as they are.
        rows: Rows of the step.
    """

    def __init__(self, network: Any, rows: int) -> None:
        self.network = copy_sharing_weights(network)
        self.layers: list[Any] = []  # in the order a pass uses them
        marks = [
            layer.register_forward_hook(lambda layer, *_: self.layers.append(layer))
            for layer in self.network.modules()
            if isinstance(layer, (Linear, Conv1D))
        ]
        device = network.device
        self.network(torch.zeros(1, 1, dtype=torch.long, device=device))
        for mark in marks:
            mark.remove()
        self.inputs = {
            n: torch.randn(rows, n, dtype=network.dtype, device=device)
            for n in {_size(layer)[1] for layer in self.layers}
        }  # by width: row in
        self.clock = Clock(device)
        self.least: dict[str, dict[str, float]] = {}

    def time(self) -> Timing:
        """Do the products of a step, in the order of a pass, in each way there is.

        Returns:
            The sum over shapes of the quickest way's least seconds so far.
        """
        self._pass("F.linear", lambda layer, x: layer(x))
        if all(can_prepack(layer.weight) for layer in self.layers):
            self._pass("oneDNN", _onednn)
            with prepacked(self.network, "all"):
                self._pass("packed", lambda layer, x: layer(x))
        won = {
            shape: min(self.least, key=lambda way: self.least[way][shape])
            for shape in next(iter(self.least.values()))
        }
        return Timing(
            nan,
            sum(self.least[way][shape] for shape, way in won.items()),
            ", ".join(f"{shape}: {way}" for shape, way in won.items()),
        )

    def _pass(self, way: str, product: Callable[[Any, Tensor], Tensor]) -> None:
        """Time one way: on a CPU each shape, elsewhere the pass as a whole."""
        on_cpu = self.network.device.type == "cpu"
        for layer in self.layers:  # the first pass packs and warms up
            product(layer, self.inputs[_size(layer)[1]])
        spent: dict[str, float] = defaultdict(float)
        began = self.clock.now()
        for layer in self.layers:
            out, n = _size(layer)
            product(layer, self.inputs[n])
            if on_cpu:
                ended = perf_counter()
                spent[f"{out}x{n}"] += ended - began
                began = ended
        if not on_cpu:
            spent["all shapes"] = self.clock.now() - began
        before = self.least.setdefault(way, {})
        self.least[way] = {k: min(v, before.get(k, v)) for k, v in spent.items()}


def _size(layer: Any) -> tuple[int, int]:
    """(out, in) of a linear layer."""
    out, n = layer.weight.shape[::-1] if isinstance(layer, Conv1D) else layer.weight.shape
    return int(out), int(n)


def _onednn(layer: Any, x: Tensor) -> Tensor:
    """A linear layer by oneDNN, its weight as it lies."""
    weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
    return torch.ops.mkldnn._linear_pointwise(x, weight, layer.bias, "none", [], "")


def copy_sharing_weights(network: Any) -> Any:
    """A copy of a network's modules that shares its weights."""
    return copy.deepcopy(network, memo={id(each): each for each in network.parameters()})


@dataclass
class Ledger:
    """Seconds by part, each without the parts inside it."""

    clock: Clock
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    inside: list[str] = field(default_factory=list)
    since: float = 0.0

    def book(self) -> None:
        """Give the time since the last entry to the innermost part."""
        now = self.clock.now()
        self.spent[self.inside[-1] if self.inside else "rest"] += now - self.since
        self.since = now

    def enter(self, part: str) -> None:
        self.book()
        self.inside.append(part)

    def leave(self) -> None:
        self.book()
        self.inside.pop()


class _StartingClock(Clock):
    """Begins a ledger with the first token."""

    ledger: Ledger

    def update(self, n: int | float | None = 1) -> None:
        if isnan(self.first):
            super().update(n)
            self.ledger.spent.clear()
            self.ledger.since = self.first


def time_parts(subject: Subject, todo: BatchPlan) -> dict[str, float]:
    """Seconds of one step of `prepacked`, by part: clocks stand around linear layers, attention
    modules, `Bias.add`, `Recorder.observe`, the method and `draw`."""
    clock = _StartingClock(subject.device)
    ledger = clock.ledger = Ledger(clock)
    with _watched(subject.model, todo.method, ledger):
        with_our_loop(subject.model, todo, "all", clock)
    ledger.book()
    steps = todo.steps[0] - 1
    return {part: ledger.spent[part] / steps for part in PARTS}


@contextmanager
def _watched(model: Model, method: Method, ledger: Ledger) -> Iterator[None]:
    watched = [
        *((each, "products") for each in network_of(model).modules() if _is_linear(each)),
        *((block.attn, "attention") for block in model.blocks),
    ]
    functions: tuple[tuple[Any, str, str], ...] = (
        (BatchBias, "add", "bias"),
        (Recorder, "observe", "trace"),
        (type(method), "combine", "combine"),
        (type(method), "advance", "combine"),
        (loop, "_of_branches", "combine"),
        (loop, "draw", "draw"),
    )
    with ExitStack() as undo:
        for module, part in watched:
            enter, leave = partial(ledger.enter, part), ledger.leave
            before = module.register_forward_pre_hook(lambda *_, enter=enter: enter())
            after = module.register_forward_hook(lambda *_, leave=leave: leave())
            undo.callback(before.remove)
            undo.callback(after.remove)
        for owner, name, part in functions:
            own, usual = vars(owner).get(name), getattr(owner, name)
            setattr(owner, name, _within(ledger, part, usual))
            undo.callback(*((setattr, owner, name, own) if own else (delattr, owner, name)))
        yield


def _within(ledger: Ledger, part: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        ledger.enter(part)
        try:
            return usual(*args, **kwargs)
        finally:
            ledger.leave()

    return watched


def _is_linear(module: Any) -> bool:
    return isinstance(module, (Linear, Conv1D))
