"""MLP neurons through TransformerLens hook points.

Neurons are set while the model runs, and those that promote a token are found.

A neuron is set at `blocks.{i}.mlp.hook_pre`, before the activation function, or at
`blocks.{i}.mlp.hook_post`, after it. A gated MLP multiplies two projections, and only the product
is a neuron's activation: there a neuron is always set at `hook_post`, the input of the
down-projection.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from lapa2_interp._util.unpacking import check_archive
from lapa2_interp.errors import DeadHookError
from lapa2_interp.files import atomic_write, writing_cache
from lapa2_interp.models.facts import Model
from lapa2_interp.models.hook_names import HOOK_NEURONS
from lapa2_interp.progress import progress_bar

PROBE_VALUE = 50.0
"""The value at which a neuron is held to measure its effect on the next token."""
NEURONS_PER_PASS = 256


def is_gated(model: Model) -> bool:
    """True if a model's MLPs multiply two projections, as Llama's do."""
    return bool(getattr(model.cfg, "gated_mlp", False))


def neuron_hook_name(model: Model, layer: int, at: Literal["pre", "post"] = "pre") -> str:
    """The name of the hook point where a layer's neurons are set."""
    return HOOK_NEURONS["post" if is_gated(model) else at].format(layer)


@contextmanager
def set_neurons(
    model: Model,
    neurons: Mapping[int, Int[Tensor, " neuron"]],
    values: Float[Tensor, " row"],
    at: Literal["pre", "post"] = "pre",
) -> Iterator[None]:
    """Set MLP neurons at every position in the forward passes inside the block.

    Args:
        neurons: Indices of the neurons, by layer.
        values: The value of all these neurons, one per row.
        at: Before the activation function, or after it (always after it in gated MLPs).

    Raises:
        DeadHookError: The model has no such hook point.
    """
    value = rearrange(values, "row -> row 1 1")

    def put(of_layer: Int[Tensor, " neuron"]) -> Any:
        def hook_function(activation: Tensor, hook: Any) -> Tensor:
            activation = activation.clone()
            activation[:, :, of_layer.to(activation.device)] = value.to(activation)
            return activation

        return hook_function

    hooks = [
        (neuron_hook_name(model, layer, at), put(of_layer)) for layer, of_layer in neurons.items()
    ]
    missing = [name for name, _ in hooks if name not in model.hook_dict]
    if missing:
        raise DeadHookError(
            f"the model has no {missing[0]} (as in a mixture of experts), so its neurons cannot be"
            " set; use a model with one MLP per layer, such as GPT-2, GPT-NeoX/Pythia, Llama or"
            " SmolLM2"
        )
    with model.hooks(fwd_hooks=hooks):
        yield


@torch.no_grad()
def assert_neurons_live(model: Model) -> None:
    """Check that setting the last layer's neurons moves the logits.

    Raises:
        DeadHookError: There is no hook point, or the model ignores the hook.
    """
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.cfg.device)
    first_eight = {model.cfg.n_layers - 1: torch.arange(8)}
    plain = model(ids)
    with set_neurons(model, first_eight, torch.full((1,), PROBE_VALUE)):
        moved = model(ids)
    if not (moved - plain).abs().max() > 0:
        raise DeadHookError(
            f"setting neurons at {neuron_hook_name(model, model.cfg.n_layers - 1)} does not move"
            " the logits of this model"
        )


@torch.no_grad()
def promoting_neurons(
    model: Model,
    text: Sequence[int],
    tokens: Sequence[int],
    k: int,
    first_layer: int = 0,
    file: Path | None = None,
) -> tuple[Float[Tensor, "token k"], Int[Tensor, "token k two"]]:
    """The k largest entries of each token in the control table, and their (layer, neuron) pairs.

    An entry is log P(token) after the text, with the neuron held at 50. Each row of a pass holds
    one neuron; layers are searched one after another. Among equal entries the lower layer and
    neuron comes first.

    Args:
        text: The ids of the text.
        first_layer: The lowest layer to search.
        file: The file (.npz) of the growing table, from which an interrupted call resumes.

    Raises:
        DeadHookError: The model's neurons cannot be set.
    """
    # Start with an empty table, or with the stored part of one.
    assert_neurons_live(model)
    n_layers, n_neurons = model.cfg.n_layers, _count_neurons(model, first_layer)
    columns = torch.tensor(list(tokens), device=model.cfg.device)
    best, where, done = (
        torch.empty(len(tokens), 0),
        torch.empty(len(tokens), 0, 2, dtype=torch.long),
        first_layer,
    )
    if file is not None and (stored := _load_table(file)) is not None:
        best, where, done = stored
    ids = torch.tensor([list(text)], device=model.cfg.device)
    total = (n_layers - first_layer) * n_neurons
    if done < n_layers and file is not None:
        print(f"computing the control table once into {file}: {total:,} neurons", file=sys.stderr)
    # Search the layers, and keep the k best neurons of each token.
    with progress_bar(
        total, "control table", "neuron", initial=(done - first_layer) * n_neurons
    ) as bar:
        for layer in range(done, n_layers):
            for first in range(0, n_neurons, NEURONS_PER_PASS):
                neurons = torch.arange(first, min(first + NEURONS_PER_PASS, n_neurons))
                log_probs = _log_probs_by_neuron(model, ids, layer, neurons)[:, columns].T.cpu()
                at = torch.stack([torch.full_like(neurons, layer), neurons], dim=1).expand(
                    len(tokens), -1, -1
                )
                values, places = torch.cat([best, log_probs], dim=1), torch.cat([where, at], dim=1)
                order = values.sort(dim=1, descending=True, stable=True).indices[:, :k]
                best = values.gather(1, order)
                where = places.gather(1, order[:, :, None].expand(-1, -1, 2))
                bar.update(len(neurons))
            if file is not None:
                with writing_cache(file), atomic_write(file) as fresh:
                    np.savez(fresh, best=best.numpy(), where=where.numpy(), layers=layer + 1)
    return best, where


def _load_table(file: Path) -> tuple[Tensor, Tensor, int] | None:
    """The stored part of a table; None if none is stored or its file is damaged."""
    try:
        check_archive(file)
        # Opened here: NumPy would leave a damaged file open.
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
            return (
                torch.from_numpy(stored["best"]),
                torch.from_numpy(stored["where"]),
                int(stored["layers"]),
            )
    except (OSError, ValueError, EOFError, KeyError, BadZipFile):
        return None


def _count_neurons(model: Model, layer: int) -> int:
    """The number of neurons of a layer, counted in a pass: not every configuration states it."""
    widths = []
    with model.hooks(
        fwd_hooks=[
            (
                neuron_hook_name(model, layer),
                lambda activation, hook: widths.append(activation.shape[-1]),
            )
        ]
    ):
        model(torch.zeros((1, 1), dtype=torch.long, device=model.cfg.device))
    return widths[0]


def _log_probs_by_neuron(
    model: Model, ids: Int[Tensor, "row=1 query"], layer: int, neurons: Int[Tensor, " neuron"]
) -> Float[Tensor, "neuron vocab"]:
    """log P of the next token with each of a layer's neurons alone held at 50, at all positions."""
    rows = torch.arange(len(neurons), device=ids.device)

    def put(activation: Tensor, hook: Any) -> Tensor:
        activation = activation.clone()
        activation[rows.to(activation.device), :, neurons.to(activation.device)] = PROBE_VALUE
        return activation

    with model.hooks(fwd_hooks=[(neuron_hook_name(model, layer), put)]):
        logits = model(ids.expand(len(neurons), -1))[:, -1]
    return logits.float().log_softmax(dim=1)
