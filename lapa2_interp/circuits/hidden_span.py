"""What a span does to the tokens after it: predictions with it, and with it out of sight.

Out of sight, no query after the span has it among its keys. All keys stay where they are, so that
positions do not change, and neither do messages that a chat template writes where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lapa2_interp.attention.cache import new_rows
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.attention.tables import pooled
from lapa2_interp.bias.augmentation import Augmentation, AugmentationLike, active_augmentations
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.recipes import resolve_recipes
from lapa2_interp.circuits.metrics import Predictions, js
from lapa2_interp.errors import CircuitError
from lapa2_interp.generation.teacher_forcing import check_text_fits
from lapa2_interp.methods.registry import HIDDEN
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.load import accepts_model_name


class SpanReading(NamedTuple):
    """What a span does to each next token of a text.

    Attributes:
        attention: On the span, of the query that predicts the token; a mean over layers and heads.
        effect: As `span_effect`.
        entropy: Of the prediction, in nats.
    """

    attention: Float[np.ndarray, " step"]
    effect: Float[np.ndarray, " step"]
    entropy: Float[np.ndarray, " step"]


@accepts_model_name
@torch.no_grad()
def read_span(
    model: Model,
    layout: Layout,
    tokens: Sequence[int],
    augmentation: AugmentationLike | str = None,
) -> SpanReading:
    """The attention on a span, its effect, and the entropy of what is predicted, at each next token
    of a given text. Their first values are there before the text is.

    Example:
        >>> from lapa2_interp import Layout, circuits, load_model
        >>> model = load_model("tiny-gpt2")
        >>> layout = Layout.of(model, "Very positive:", " The lake")
        >>> circuits.read_span(model, layout, model.tokenizer(" is calm").input_ids).entropy.shape
        (8,)

    Args and errors are those of `span_effect`.
    """
    if not len(tokens) or not layout.prefix.size:
        lacks = "no token after it" if layout.prefix.size else "an empty span"
        raise CircuitError(
            f"the effect of a span is on tokens after it, found {lacks}; give a layout with a"
            " prefix, and the tokens of a text"
        )
    rules = active_augmentations(resolve_recipes(augmentation))
    size = model.cfg.n_layers, model.cfg.n_heads
    recorder = Recorder(*size, "pooled", layer_types=facts_of(model).layer_types)
    recorder.begin([layout])
    with_span = forced_logits(model, layout, tokens, rules, recorder)
    without = forced_logits(model, layout, tokens, (*rules, HIDDEN))
    text = torch.tensor([list(tokens)], device=with_span.device)
    predictions = Predictions(torch.stack([with_span, without]), text)
    log_probs = predictions.target[0]
    trace = recorder.dataset([layout], ["span"], [len(tokens)])
    return SpanReading(
        pooled(trace, "prefix")[0, 0],
        js(predictions)[0].cpu().numpy(),
        -torch.special.xlogy(log_probs.exp(), log_probs.exp()).sum(-1).cpu().numpy(),
    )


def span_effect(
    model: Model,
    layout: Layout,
    tokens: Sequence[int],
    augmentation: AugmentationLike | str = None,
) -> Float[np.ndarray, " step"]:
    """The effect of a prefix, or of a chat's span, on each next token of a given text.

    It is the Jensen-Shannon divergence of the predictions with the span and with the span hidden
    from every query after it, in nats: 0 (none) to log 2. Rounding gives about 1e-7 nats in
    float32, and 1e-3 in bfloat16, as much as a span that has faded.

    Example:
        >>> from lapa2_interp import Layout, circuits, load_model
        >>> model = load_model("tiny-gpt2")
        >>> layout = Layout.of(model, "Very positive:", " The lake")
        >>> circuits.span_effect(model, layout, model.tokenizer(" is calm").input_ids).shape
        (8,)

    Args:
        model: A model or its name.
        layout: Of a hard prefix (`Layout.of`) or a chat (`Layout.of_chat`).
        tokens: Token ids after the prompt, at least one.
        augmentation: The bias under which both predictions are made.

    Raises:
        CircuitError: No token, or no span.
        LayoutError: As `teacher_forced`.
    """
    return read_span(model, layout, tokens, augmentation).effect


@torch.no_grad()
def forced_logits(
    model: Model,
    layout: Layout,
    tokens: Sequence[int],
    rules: Sequence[Augmentation],
    recorder: Recorder | None = None,
) -> Float[Tensor, "row=1 step vocab"]:
    """Logits that predict each of the tokens after a layout, with a cache as in decoding.

    Args:
        recorder: Observes the passes; it has begun with the layout.

    Raises:
        LayoutError: As `teacher_forced`.
    """
    check_text_fits(model, layout, tokens)
    rows = new_rows(model, rules)
    ids = torch.tensor([list(tokens[:-1])], dtype=torch.long, device=model.cfg.device)
    at_once = 1 if any(rule.pooled for rule in rules) else max(1, len(tokens) - 1)
    with augmented(model, [tuple(rules)], [layout], recorder):
        logits = [rows.prompt_pass([layout])]
        first_row = torch.zeros(1, dtype=torch.long, device=ids.device)
        rows.expand(first_row, capacity=len(layout) + len(tokens) - 1)
        for piece in ids.split(at_once, dim=1) if ids.shape[1] else ():
            logits.append(rows.read_tokens(piece, keep=piece.shape[1]))
    return torch.cat(logits, dim=1)
