"""Trainable parameters of soft prefixes, and the keys and values that they give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.prefixes.recipes import TrainingRecipe
from lapa2_interp.prefixes.soft_prefix import PrefixShape


class PrefixParameters(nn.Module):
    """Trainable parameters of one or more prefixes; `forward` gives their keys and values."""

    def __init__(self, n_prefixes: int, shape: PrefixShape, recipe: TrainingRecipe) -> None:
        super().__init__()
        self.shape, self.recipe, self.n = shape, recipe, n_prefixes
        layers, slots, middle = shape.n_layers, shape.n_slots, recipe.middle
        width = shape.n_kv_heads * shape.d_head

        def table(*size: int) -> nn.Parameter:
            return nn.Parameter(
                torch.zeros(size) if recipe.start == "zero" else 0.02 * torch.randn(size)
            )

        match recipe.parameterisation:
            case "direct":
                self.both = table(n_prefixes, 2, layers, shape.n_kv_heads, slots, shape.d_head)
            case "air":  # per layer and prefix: tables E_K and E_V; W and b serve both
                self.tables = table(n_prefixes, 2, layers, slots, middle)
                self.weight = table(n_prefixes, layers, middle, width)
                self.bias = nn.Parameter(torch.zeros(n_prefixes, layers, width))
            case "mlp":
                self.tables = table(n_prefixes, slots, width)
                self.maps = nn.ModuleList(
                    nn.Sequential(
                        nn.Linear(width, middle), nn.Tanh(), nn.Linear(middle, 2 * layers * width)
                    )
                    for _ in range(n_prefixes)
                )
            case "linear":  # the map is shared by the prefixes
                self.tables = table(n_prefixes, slots, middle)
                self.map = nn.Linear(middle, 2 * layers * width)

    def forward(self) -> Float[Tensor, "two prefix layer kv_head slot d_head"]:
        shape = self.shape
        match self.recipe.parameterisation:
            case "direct":
                return self.both.transpose(0, 1)
            case "air":
                states = (
                    torch.einsum("cklsm,clmd->cklsd", self.tables, self.weight)
                    + self.bias[:, None, :, None]
                )
                states = states.unflatten(
                    -1, (shape.n_kv_heads, shape.d_head)
                )  # prefix two layer slot kv_head d_head
                return states.permute(1, 0, 2, 4, 3, 5)
            case "mlp":
                flat = torch.stack(
                    [linear(table) for linear, table in zip(self.maps, self.tables, strict=True)]
                )
            case "linear":
                flat = self.map(self.tables)
        states = flat.unflatten(-1, (shape.n_layers, 2, shape.n_kv_heads, shape.d_head))
        return states.permute(3, 0, 2, 4, 1, 5)  # from prefix slot layer two kv_head d_head


@torch.no_grad()
def text_keys_and_values(
    network: Any, start: Sequence[int], ids: Sequence[int], slots: int, shifted: bool
) -> Float[Tensor, "two layer kv_head slot d_head"]:
    """Keys and values of a text as a prefix of `slots` slots; a shorter text is repeated.

    BOS stands before the text, but its key is left out: that key is an attention sink, and would
    make the prefix one. For an unshifted prefix, the positions are below 0 where the model takes
    such positions (rotary), so that the slots lie in front of the text.
    """
    ids = (list(ids) * slots)[:slots]
    device = next(network.parameters()).device
    rotary = any(getattr(network.config, name, None) for name in ("rope_parameters", "rope_theta"))
    positions = torch.arange(-1, slots, device=device)
    positions = positions - (0 if shifted else slots) if rotary else positions.clamp(min=0)
    output = network.base_model(
        input_ids=torch.tensor([[*start, *ids]], device=device),
        position_ids=positions[None],
        use_cache=True,
    )
    cache = output[cache_name(network)]
    return torch.stack(
        [
            torch.stack([getattr(layer, name)[0, :, len(start) :] for layer in cache.layers])
            for name in ("keys", "values")
        ]
    )
