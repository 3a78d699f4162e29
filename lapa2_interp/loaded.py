"""A loaded model of either TransformerLens class, and the card that says what was loaded."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from lapa2_interp.layout import text_markers
from lapa2_interp.packed import Packing, choose_packing, packed

if TYPE_CHECKING:
    from torch import nn
    from transformers import GenerationConfig

Model = Any
"""A TransformerLens model: TransformerBridge, or HookedTransformer under transformer-lens 3.9."""


def is_bridge(model: Model) -> bool:
    """Whether a model is a TransformerBridge (which wraps a transformers model) or a
    HookedTransformer."""
    return hasattr(model, "original_model")


def network_of(model: Model) -> nn.Module:
    """The transformers model inside a TransformerBridge; any other model itself."""
    return model.original_model if is_bridge(model) else model


def packed_model(model: Model) -> AbstractContextManager[None]:
    """`packed` for a model, as its card says."""
    return packed(network_of(model), model_card(model).packing)


class ModelCard(BaseModel):
    """What was loaded, as recorded in every manifest."""

    model_config = ConfigDict(frozen=True)

    name: str
    """The name it was loaded by: a built-in name, a hub id or a folder."""
    weights: str
    """Where the weights come from: a sha256, a hub commit, or the seed of a random model."""
    architecture: str
    """The transformers class."""
    model_class: str
    """The TransformerLens class."""
    dtype: str
    device: str
    n_layers: int
    n_heads: int
    n_ctx: int
    """Positions the model was built for."""
    start_token: str
    """The token that starts plain text (`layout.text_markers`)."""
    end_tokens: tuple[str, ...]
    """Tokens that end a text under the EOS policies stop and block: the tokenizer's and the
    generation config's."""
    packing: Packing = "none"
    """Linear layers that compute with packed weights (`packed`), which may decide last bits."""


def model_card(model: Model) -> ModelCard:
    """The card of a loaded model; for a TransformerLens model made elsewhere, what can be read from
    it."""
    card = getattr(model, "lapa2_card", None)
    return card or make_card(model, model.cfg.model_name, "loaded outside lapa2_interp")


def make_card(
    model: Model,
    name: str,
    weights: str,
    architecture: str | None = None,
    generation: GenerationConfig | None = None,
    packing: Packing | None = None,
) -> ModelCard:
    """The card of a model.

    Args:
        name, weights: As the card has them.
        architecture: The transformers class; by default what the model's configuration says.
        generation: The model's generation configuration, whose end tokens count, too.
        packing: By default as `choose_packing` has it.
    """
    markers = text_markers(model.tokenizer)
    listed = generation.eos_token_id if generation is not None else None
    ends = {*markers.ends, *([listed] if isinstance(listed, int) else listed or [])}
    return ModelCard(
        name=name,
        weights=weights,
        architecture=architecture
        or str(getattr(model.cfg, "architecture", None) or model.cfg.original_architecture),
        model_class=type(model).__name__,
        dtype=str(model.cfg.dtype).removeprefix("torch."),
        device=str(model.cfg.device),
        n_layers=model.cfg.n_layers,
        n_heads=model.cfg.n_heads,
        n_ctx=model.cfg.n_ctx,
        start_token=model.tokenizer.convert_ids_to_tokens(markers.start),
        end_tokens=tuple(model.tokenizer.convert_ids_to_tokens(sorted(ends))),
        packing=choose_packing(network_of(model)) if packing is None else packing,
    )
