"""The residual stream between layers: a mean of it over texts, and vectors that are added to it.

The stream after layer i is what the block returns: `blocks.{i}.hook_resid_post` of a TransformerLens
model, the output of the i-th decoder block of a plain transformers model.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapa2_interp.attention.cache import new_rows
from lapa2_interp.bias.layout import Layout
from lapa2_interp.errors import DeadHookError, ModelError
from lapa2_interp.models.blocks import OUTSIDE_ERROR, PassState, attach_hooks, open_block
from lapa2_interp.models.facts import Model, ModelFacts, facts_of

HOOK_RESIDUAL = "blocks.{}.hook_resid_post"
Edit = Callable[[int, Float[Tensor, "row query d_model"], int], Tensor | None]
"""Takes a layer, the stream after it, and the slot of the first query; returns the stream that the
next layer reads, or None to leave it."""


@contextmanager
def edited_residual(model: Model, edit: Edit, layers: Collection[int]) -> Iterator[None]:
    """Call a function with the residual stream after these layers in every pass inside the block.

    A HookedTransformer is called itself: its `generate` does not say how many keys are cached.

    Raises:
        ModelError: The model's blocks are not found, or as `blocks.open_block`.
        DeadHookError: A pass does not come by a layer.
    """
    facts = facts_of(model)
    if facts.backend != "plain":
        first_query = 0

        def note_first(arguments: dict[str, Any], first: int) -> None:
            nonlocal first_query
            first_query = first

        def on_stream(stream: Tensor, hook: Any, layer: int) -> Tensor | None:
            return edit(layer, stream, first_query)

        hooks = [(HOOK_RESIDUAL.format(layer), partial(on_stream, layer=layer)) for layer in layers]
        with attach_hooks(model, hooks, note_first):
            yield
        return

    state, blocks = PassState(), _decoder_blocks(facts)

    def on_output(module: Any, args: tuple, output: Any, layer: int) -> Any:
        if state.thread is None:
            raise DeadHookError(OUTSIDE_ERROR)
        state.seen.add(layer)
        stream, *others = output if isinstance(output, tuple) else (output,)
        edited = edit(layer, stream, state.first)
        if edited is None:
            return None
        return (edited, *others) if isinstance(output, tuple) else edited

    with ExitStack() as undo:
        undo.enter_context(open_block(facts.network, state, layers))
        for layer in layers:
            handle = blocks[layer].register_forward_hook(partial(on_output, layer=layer))
            undo.callback(handle.remove)
        yield


def _decoder_blocks(facts: ModelFacts) -> nn.ModuleList:
    """The blocks of a transformers model, in order: its one list of as many modules as layers.

    Raises:
        ModelError: It has none, or several.
    """
    lists = [
        module
        for module in facts.network.modules()
        if isinstance(module, nn.ModuleList) and len(module) == facts.n_layers
    ]
    if len(lists) != 1:
        raise ModelError(
            f"{type(facts.network).__name__} has {len(lists)} lists of {facts.n_layers} modules, so"
            " which are its layers is not known; use TransformerBridge, whose hooks name them"
        )
    return lists[0]


@contextmanager
def shifted_residual(
    model: Model,
    vectors: Mapping[int, Float[Tensor, " d_model"] | Float[Tensor, "prompt d_model"]],
    start: int,
    prompts: Mapping[int, Sequence[int]] | None = None,
) -> Iterator[None]:
    """Add vectors to the residual stream after layers, at every query from a slot on.

    Args:
        vectors: By layer, one for all rows, or one of each prompt. Without any, passes are those of
            the model alone.
        start: The slot of the first query that gets them, in all rows.
        prompts: By number of rows of a pass, the prompt of each row, where prompts have their own.

    Raises:
        ModelError, DeadHookError: As `edited_residual`.
    """
    # On the stream's device: a pass may be captured as a graph.
    placed: dict[tuple[int, int], Tensor] = {}

    def add(layer: int, stream: Tensor, first: int) -> Tensor | None:
        begin = max(start - first, 0)
        if begin >= stream.shape[1]:
            return None
        n_rows, vector = len(stream), vectors[layer]
        if (layer, n_rows) not in placed:
            if vector.ndim == 2:
                vector = vector[list((prompts or {})[n_rows]), None]  # row query=1 d_model
            placed[layer, n_rows] = vector.to(stream)
        added = stream[:, begin:] + placed[layer, n_rows]
        return torch.cat([stream[:, :begin], added], dim=1)

    if not vectors:
        yield
        return
    with edited_residual(model, add, list(vectors)):
        yield


@torch.no_grad()
def mean_residual(model: Model, layouts: Sequence[Layout]) -> Float[Tensor, "layer d_model"]:
    """The mean over texts of the residual stream after every layer at the last token, in at least
    float32. Each text is read alone."""
    n_layers, total = facts_of(model).n_layers, torch.zeros(())
    for layout in layouts:
        last: dict[int, Tensor] = {}

        def read(layer: int, stream: Tensor, first: int, last: dict[int, Tensor] = last) -> None:
            last[layer] = stream[0, -1].detach().clone()

        with edited_residual(model, read, range(n_layers)):
            new_rows(model).prompt_pass([layout])
        rows = torch.stack([last[layer].cpu() for layer in range(n_layers)])
        total = total + rows.to(torch.promote_types(rows.dtype, torch.float32))
    return total / len(layouts)
