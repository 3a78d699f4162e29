"""A check of a loaded model: edits of its attention scores reach its logits.

The logits are also compared with those of the plain transformers model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapa2_interp.bias.layout import text_markers
from lapa2_interp.models.card import ModelCard, TransformersModel, attention_layers, model_card
from lapa2_interp.models.liveness import Liveness, assert_live, probe
from lapa2_interp.models.load import load_model, load_transformers

PROBE_TEXT = "The length of a text decides how much of its beginning is remembered at its end."


@dataclass(frozen=True)
class ProbeResult:
    """The result of `probe_model`.

    Attributes:
        card: The model's card.
        liveness: The effect of an edit of the scores on the logits.
        plain: The effect on the plain transformers model, through its attention interface.
        attention_layers: The layers with attention.
        logit_difference: Largest difference from the logits of transformers, over `tokens` tokens.
    """

    card: ModelCard
    liveness: Liveness
    plain: Liveness
    attention_layers: list[int]
    logit_difference: float
    tokens: int


def probe_model(
    name: str,
    dtype: str = "float32",
    device: str | None = None,
    model_class: str = "TransformerBridge",
    trust_remote_code: bool = False,
    attn: str = "auto",
) -> ProbeResult:
    """Load a model as `load_model` does, and probe it.

    Raises:
        ModelError: It cannot be loaded.
        DeadHookError: Its attention ignores edits of the scores.
    """
    loaded = load_model(name, dtype, device, model_class, trust_remote_code, attn=attn)
    card = model_card(loaded)
    plain, tokenizer, _ = load_transformers(name, dtype, trust_remote_code)
    start = text_markers(tokenizer).start
    text = [start, *tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids]
    ids = torch.tensor([text[: loaded.cfg.n_ctx]])
    with torch.no_grad():
        ours = loaded(ids.to(card.device)).float().cpu()
        theirs = plain.to(card.device)(ids.to(card.device)).logits.float().cpu()
    difference = float((ours - theirs).abs().max())
    bare = probe(TransformersModel(plain, tokenizer, name))
    live, layers = assert_live(loaded, name), attention_layers(loaded)
    return ProbeResult(card, live, bare, layers, difference, ids.shape[1])
