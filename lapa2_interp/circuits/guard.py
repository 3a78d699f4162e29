"""The guard of circuits: the models, heads and augmentations that the studies of heads refuse.

What one study refuses beside these (a score of `select`, a node of `patch`) is in its own file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from lapa2_interp.bias.augmentation import Augmentation, AugmentationLike, active_augmentations
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.recipes import resolve_recipes
from lapa2_interp.errors import CircuitError
from lapa2_interp.models.facts import Model, check_not_quantised, facts_of

if TYPE_CHECKING:
    from lapa2_interp.circuits.examples import ContrastExample


def check_attention(model: Model) -> None:
    """Refuse a model without attention in every layer, or without hooks by head."""
    facts = facts_of(model)
    if len(attending := facts.attention_layers) < facts.n_layers:
        raise CircuitError(
            "circuits are read from models with attention in every layer, and this one has it"
            f" in layers {', '.join(map(str, attending))}; take texts and traces instead"
        )
    if facts.backend != "plain" and any(key != value for _, key, value in facts.kv_shapes):
        model_type = facts.config.get_text_config().model_type
        raise CircuitError(
            f"hook_z of a {model_type} model is not by head, as its keys and values differ in size;"
            " load it as TransformersModel, for methods without hooks"
        )


def check_model_class(model: Model) -> None:
    """Refuse a model that is neither a TransformerBridge nor a TransformersModel."""
    if facts_of(model).backend == "hooked":
        raise CircuitError(
            "circuits are read from a TransformerBridge or a TransformersModel, not from a"
            f" {type(model).__name__}"
        )


def check_has_hooks(model: Model, purpose: str, instead: str = "") -> None:
    """Refuse a model that is not a TransformerBridge: `purpose` through hooks, or `instead`."""
    if facts_of(model).backend != "bridge":
        raise CircuitError(
            f"{purpose} through hooks of a TransformerBridge, and this is a"
            f' {type(model).__name__}; load it with model_class="TransformerBridge"{instead}'
        )


def check_gradients(model: Model) -> None:
    """Refuse a model without gradients."""
    check_has_hooks(model, "gradients are read")
    check_not_quantised(model, "gradients go through")
    if facts_of(model).dtype not in (torch.float32, torch.float64):
        name = str(facts_of(model).dtype).removeprefix("torch.")
        raise CircuitError(
            f"gradients in {name} are mostly rounding; allowed: float32, float64; load the model"
            ' with dtype="float32"'
        )


def check_rule(rule: Augmentation, layout: Layout) -> None:
    """Refuse an augmentation inside the prefix, or a pooled one: the prefix has its own forward
    pass, and prompt and text have one."""
    inside = 0 if layout.soft else layout.prefix.stop
    if rule.phase == "everywhere" or layout.acts(rule, np.arange(inside)).any():
        raise CircuitError(
            f"circuits read a prefix by itself before anything acts, and {rule.label} acts on"
            f" queries inside it (phase {rule.phase!r}, span {rule.span!r}); use phase"
            " 'last_query' or 'decode', or phase 'after_span' with span 'prefix'"
        )
    if rule.pooled:
        raise CircuitError(
            f"{rule.label} reads one attention for all queries of a pass, and circuits read a whole"
            " text in one pass, so a step would depend on what comes after it; leave out `pooled`"
        )


def check_one_pass(
    augmentation: AugmentationLike, examples: Sequence[ContrastExample], purpose: str
) -> None:
    """Refuse augmentations under which prefix, prompt and text are not one forward pass.

    Args:
        purpose: The sentence's end before "such a pass" in the message.

    Raises:
        CircuitError: Phase "predicting_only", under which every step has its own forward pass; or
            as `edited_logits`.
    """
    for rule in active_augmentations(resolve_recipes(augmentation)):
        if rule.phase == "predicting_only":
            raise CircuitError(
                f"under phase {rule.phase!r} prefix and text are not read in one pass, and"
                f" {purpose} such a pass; use phase 'last_query', 'decode' or 'after_span'"
            )
        for layout in {layout for example in examples for layout in example.layouts}:
            check_rule(rule, layout)
