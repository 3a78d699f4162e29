"""A check of a loaded model: edits of its attention scores reach its logits.

The logits are also compared with those of the plain transformers model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lapa2_interp.bias.text_start import (
    AUTO_START,
    NO_START,
    USUAL_START,
    text_start,
    usual_start,
)
from lapa2_interp.models.card import ModelCard, identify
from lapa2_interp.models.facts import TransformersModel, facts_of
from lapa2_interp.models.liveness import Liveness, assert_live, probe
from lapa2_interp.models.load import load_model, load_transformers

PROBE_TEXT = "The length of a text decides how much of its beginning is remembered at its end."
PLAIN_SENTENCES = (
    PROBE_TEXT,
    "The lake is cold in the morning, and the boats lie still until the sun is up.",
    "She opened the letter, read it twice, and put it back into the drawer.",
    "Most of the people in the village work in the fields or in the small factory by the river.",
    "A good teacher asks a question, waits, and listens to what the children say.",
    "When the train was late again, he walked home through the park and made himself some tea.",
)
"""Sentences of which `probe` measures the loss with and without a start token: of our own, so that
no model has read them."""


@dataclass(frozen=True)
class ProbeResult:
    """The result of `probe_model`.

    Attributes:
        card: The model's card.
        liveness: The effect of an edit of the scores on the logits.
        plain: The effect on the plain transformers model, through its attention interface.
        attention_layers: The layers with attention.
        logit_difference: Largest difference from the logits of transformers, over `tokens` tokens.
        start_losses: Nats a token of `PLAIN_SENTENCES`, from their second token on, behind nothing
            ("none") and behind the usual start token, if there is one.
    """

    card: ModelCard
    liveness: Liveness
    plain: Liveness
    attention_layers: list[int]
    logit_difference: float
    tokens: int
    start_losses: dict[str, float]


def probe_model(
    name: str,
    dtype: str = "float32",
    device: str | None = None,
    model_class: str = "TransformerBridge",
    trust_remote_code: bool = False,
    attn: str = "auto",
    start: str | None = AUTO_START,
) -> ProbeResult:
    """Load a model as `load_model` does, and probe it.

    Raises:
        ModelError: It cannot be loaded.
        DeadHookError: Its attention ignores edits of the scores.
    """
    loaded = load_model(name, dtype, device, model_class, trust_remote_code, attn=attn, start=start)
    card = identify(loaded)
    plain, tokenizer, _ = load_transformers(name, dtype, trust_remote_code)
    first = text_start(loaded).token
    text = tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids
    text = text if first is None else [first, *text]
    ids = torch.tensor([text[: loaded.cfg.n_ctx]])
    with torch.no_grad():
        ours = loaded(ids.to(card.device)).float().cpu()
        theirs = plain.to(card.device)(ids.to(card.device)).logits.float().cpu()
    difference = float((ours - theirs).abs().max())
    bare = probe(TransformersModel(plain, tokenizer, name))
    live, layers = assert_live(loaded, name), facts_of(loaded).attention_layers
    losses = measure_starts(plain, tokenizer, loaded.cfg.n_ctx)
    return ProbeResult(card, live, bare, layers, difference, ids.shape[1], losses)


@torch.no_grad()
def measure_starts(network: Any, tokenizer: Any, n_ctx: int) -> dict[str, float]:
    """The loss of plain sentences without and with a start token, in nats a token.

    The first token of a sentence has no loss without a start token, so it counts in neither.

    Args:
        network: A transformers model.
        n_ctx: Tokens that it reads, at most.

    Returns:
        By the setting of `start`, "none" and, where the tokenizer names a token, "usual".
    """
    texts = tokenizer(list(PLAIN_SENTENCES), add_special_tokens=False).input_ids
    texts = [text[: n_ctx - 1] for text in texts]
    usual, losses = usual_start(tokenizer), {}
    for setting, front in {NO_START: [], USUAL_START: [usual]}.items():
        if front == [None]:
            continue
        nll = []
        for text in texts:
            ids = torch.tensor([[*front, *text]], device=network.device)
            log_probs = network(ids, use_cache=False).logits[0, -len(text) : -1].log_softmax(-1)
            nll.append(-log_probs.gather(1, ids[0, -len(text) + 1 :, None])[:, 0])
        losses[setting] = float(torch.cat(nll).double().mean())
    return losses
