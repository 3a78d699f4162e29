"""The card that records a loaded model, and its identity, which is read from its weights."""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, ConfigDict

from lapa2_interp.bias.layer_types import LayerType
from lapa2_interp.bias.text_start import text_markers, text_start
from lapa2_interp.errors import ModelError
from lapa2_interp.models.configuration import omit_if_all_full
from lapa2_interp.models.facts import Model, check_has_tokenizer, facts_of
from lapa2_interp.models.fingerprint import (
    adapter_states,
    fingerprint,
    network_tensors,
    plain_tensors,
)
from lapa2_interp.models.fused import check_fused_weights, fused_weights
from lapa2_interp.models.prepacked import (
    Prepacking,
    can_prepack_layers,
    choose_prepacking,
    prepacked,
)
from lapa2_interp.models.weights import listed_ends

if TYPE_CHECKING:
    from transformers import GenerationConfig


class ModelCard(BaseModel):
    """The record of a loaded model, which every manifest holds."""

    model_config = ConfigDict(frozen=True)

    name: str
    """The name it was loaded by: a built-in name, a hub id, a folder or a GGUF file."""
    weights: str
    """The origin of the weights: a sha256, a hub commit, or the seed of a random model."""
    architecture: str
    """The transformers class."""
    model_class: str
    """TransformerBridge, HookedTransformer or TransformersModel."""
    dtype: str
    device: str
    n_layers: int
    n_heads: int
    n_ctx: int
    """Positions the model was built for."""
    short_ctx: int | None = None
    """`ModelFacts.short_context`."""
    start_token: str
    """The token that starts plain text (`bias.text_start`); "" if text starts with nothing."""
    start_source: str = ""
    """The reason why plain text starts so; "" in the cards of older runs."""
    end_ids: tuple[int, ...]
    """Ids that end a text under the EOS policies stop and block: the tokenizer's and the generation
    config's. A tokenizer may have no token for an id that a model can draw."""
    end_tokens: tuple[str, ...]
    """The same for readers: each id's token, or "id 259" where the tokenizer has none."""
    layer_types: tuple[LayerType, ...] = ()
    """The layers' types; empty if every layer sees all keys."""
    prepacking: Prepacking = "none"
    """Linear layers that compute with prepacked weights (`prepacked`), which may decide last bits.
    """
    attn: str = "matrix"
    """Attention of prompts: with the matrix of scores, "fused", or which layers differ."""


def identify(model: Model) -> ModelCard:
    """The card of a loaded model, with the identity of its weights as they are now; for a model
    that was made elsewhere, a card read from it.

    It reads all weights (`fingerprint`), so it is asked at doors: before a run, before its record
    is written, before something that was prepared is used. Weights that were made elsewhere, or
    changed since they were loaded, are identified by a hash of the weights in memory, or where
    accelerate keeps them.

    Raises:
        ModelError: The value is not a loaded model, or has no tokenizer; or a fused weight was
            edited of which a TransformerBridge computes with copies.
    """
    check_has_tokenizer(model)
    facts = facts_of(model)
    card, values = getattr(model, "lapa2_card", None), fingerprint(facts.network)
    if card is None:
        card = make_card(model, model.cfg.model_name, hash_weights(model))
        return attach_card(model, card)
    names: dict[bytes, str] = model.lapa2_weights
    if values not in names:
        model.lapa2_fused = check_fused_weights(facts.network, model.lapa2_fused)
        names[values] = hash_weights(model)
    if card.weights != names[values]:
        # Weights that were cast may have no prepacked form.
        prepacking = card.prepacking if can_prepack_layers(facts.network) else "none"
        dtype = str(facts.dtype).removeprefix("torch.")
        changed = {"weights": names[values], "dtype": dtype, "prepacking": prepacking}
        card = card.model_copy(update=changed)
        model.lapa2_card = card
    return card


def attach_card(model: Model, card: ModelCard) -> ModelCard:
    """Attach a card to a model, whose weights, as they are now, have the card's name."""
    network = facts_of(model).network
    model.lapa2_fused, model.lapa2_card = fused_weights(network), card
    model.lapa2_weights = {fingerprint(network): card.weights}
    return card


def prepacked_model(model: Model) -> AbstractContextManager[None]:
    """`prepacked` with the layers that the model's card names."""
    return prepacked(facts_of(model).network, identify(model).prepacking)


def hash_weights(model: Model) -> str:
    """sha256 over a model's weights, configuration and vocabulary, as they are now.

    Raises:
        ModelError: Some weights are nowhere, or cannot be read.
    """
    facts = facts_of(model)
    network, settings = facts.network, (facts.config or model.cfg).to_dict()
    public = {name: value for name, value in settings.items() if not name.startswith("_")}
    digest = hashlib.sha256(json.dumps(public, sort_keys=True, default=str).encode())
    digest.update(repr(sorted(model.tokenizer.get_vocab().items())).encode())
    if states := adapter_states(network):
        digest.update(repr(states).encode())
    for name, weight in network_tensors(network):
        tensor = weight() if callable(weight) else weight
        if tensor.is_meta:
            raise ModelError(f"the weight {name} is not in memory; load the whole model")
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for part in plain_tensors(tensor):
            digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return f"sha256 {digest.hexdigest()} (of the weights in memory, configuration and vocabulary)"


def weights_id(model: Model) -> str:
    """An identifier of a model's weights, for files that depend on them. Random weights are hashed,
    since they also depend on the version of torch."""
    weights = identify(model).weights
    return weights if weights.startswith(("sha256", "hub commit")) else hash_weights(model)


def make_card(
    model: Model,
    name: str,
    weights: str,
    architecture: str | None = None,
    generation: GenerationConfig | None = None,
    prepacking: Prepacking | None = None,
) -> ModelCard:
    """The card of a model.

    Args:
        name, weights: As in `ModelCard`.
        architecture: The transformers class; by default that of the model's configuration.
        generation: The model's generation configuration, whose end ids are added; by default that
            of the network, if it has one.
        prepacking: By default `choose_prepacking` of the network.

    Raises:
        ModelError: The end ids of the generation configuration are no ids.
    """
    markers, facts = text_markers(model), facts_of(model)
    if generation is None:
        generation = getattr(facts.network, "generation_config", None)
    ends = {*markers.ends, *listed_ends(generation, name)}
    # Configurations and tokenizers also name ends that have no logit, so that none is drawn.
    end_ids = tuple(i for i in sorted(ends) if 0 <= i < model.cfg.d_vocab)
    names = map(model.tokenizer.convert_ids_to_tokens, end_ids)
    return ModelCard(
        name=name,
        weights=weights,
        architecture=architecture
        or str(getattr(model.cfg, "architecture", None) or model.cfg.original_architecture),
        model_class=type(model).__name__,
        dtype=str(facts.dtype).removeprefix("torch."),
        device=str(model.cfg.device),
        n_layers=facts.n_layers,
        n_heads=facts.n_heads,
        n_ctx=model.cfg.n_ctx,
        short_ctx=facts.short_context,
        start_token=""
        if markers.start is None
        else model.tokenizer.convert_ids_to_tokens(markers.start),
        start_source=text_start(model).source,
        end_ids=end_ids,
        end_tokens=tuple(
            f"id {i}" if name is None else name for i, name in zip(end_ids, names, strict=True)
        ),
        layer_types=omit_if_all_full(facts.layer_types),
        prepacking=choose_prepacking(facts.network) if prepacking is None else prepacking,
    )
