"""A test that an augmentation reaches a model.

On some architectures the scores hook exists and does nothing.

Two passes over a short sequence, the second with +3 on one key's score in every layer:

1. the scores hook fires in every layer and its rows are not probabilities already;
2. the pattern that follows is the softmax of the *edited* scores, up to the share of a learned
   sink;
3. the logits move.

Then rows of unequal length must get the logits of each alone (`positions.rows_problem`), and tokens
after a cached text those of one pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from lapa2_interp.errors import DeadHookError, ModelError, parameter
from lapa2_interp.models.attention_interface import AttentionHooks, hook_attention
from lapa2_interp.models.blocks import OUTSIDE_ERROR
from lapa2_interp.models.cache_name import cache_name
from lapa2_interp.models.configuration import is_hybrid
from lapa2_interp.models.facts import Model, check_has_tokenizer, facts_of
from lapa2_interp.models.hook_names import HOOK_PATTERN, HOOK_SCORES
from lapa2_interp.models.positions import rows_problem, tolerance

SCORE_EDIT = 3.0
LOGIT_TOLERANCE = {
    torch.float64: 1e-3,
    torch.float32: 1e-3,
    torch.bfloat16: 1.0,
    torch.float16: 0.2,
}
"""Largest difference of logits that are computed in another order; other attention functions differ
by more."""

DROPPED = "its layers do not hand on the arguments of transformers' attention interface"

_IN_BOTH = (
    "Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma 2", "Gemma 3", "Phi", "Phi-3", "GPT-2",
    "GPT-NeoX", "OLMo 2", "OLMo 3", "Cohere 2", "DeepSeek-V3", "gpt-oss", "Qwen3-Next", "Qwen3.5",
    "Granite 4", "Mixtral", "Qwen3-MoE", "SmolLM3", "GLM-4",
)  # fmt: skip
LIVE_FAMILIES = {
    "TransformerBridge": (*_IN_BOTH, "Bloom", "MPT", "Falcon", "StableLM"),
    "TransformersModel": (*_IN_BOTH, "Gemma 4", "Llama 4", "OPT"),
}
"""Families of models that work and are often used, by class: tests/models/test_families.py loads
them and compares them with transformers (docs/models.md)."""


@dataclass(frozen=True)
class Liveness:
    """The result of the probe.

    Attributes:
        logit_shift: Largest change of a logit when the scores are edited.
        problem: The reason why the model cannot be augmented; None on a live model.
    """

    logit_shift: float
    problem: str | None

    @property
    def alive(self) -> bool:
        return self.problem is None


@torch.no_grad()
def probe(model: Model) -> Liveness:
    """Edit the scores of every layer once, and compare patterns and logits; then compare rows of
    unequal length with each alone, and passes after a cached text with one pass.

    Raises:
        ModelError: Its logits are NaN without any edit.
    """
    check_has_tokenizer(model)
    probe = _probe_attention(model)
    if probe.alive and facts_of(model).backend != "hooked":
        problem = rows_problem(model)
        problem = _cache_problem(model) if problem is None else problem
        return Liveness(probe.logit_shift, problem)
    return probe


def _probe_attention(model: Model) -> Liveness:
    """The liveness of a model's attention."""
    layers = facts_of(model).attention_layers
    if not layers:
        return Liveness(0.0, "none of its layers has attention")
    ids = _probe_ids(model)
    scores: dict[int, Tensor] = {}
    patterns: dict[int, Tensor] = {}

    def edit(layer: int, tensor: Tensor, first: int = 0, hook: Any = None) -> Tensor:
        tensor = tensor.clone()
        tensor[..., 1] += SCORE_EDIT
        scores[layer] = tensor[..., -1, :].float()
        return tensor

    def read(layer: int, tensor: Tensor, first: int = 0, hook: Any = None) -> None:
        patterns[layer] = tensor[..., -1, :].float()

    # A pass without an edit.
    plain = model(ids).float()
    if plain.isnan().any():
        raise ModelError(
            "the model's logits are NaN (not a number) before anything is changed: weights are NaN,"
            f" or numbers exceed its dtype; load sound weights, or another {parameter('dtype')}"
        )
    # A pass with an edit, through the attention interface of a plain transformers model.
    if facts_of(model).backend == "plain":
        try:
            with hook_attention(facts_of(model), AttentionHooks(edit, read)):
                edited = model(ids).float()
            with hook_attention(facts_of(model), AttentionHooks()):
                again = model(ids).float()
        except DeadHookError as error:
            return Liveness(0.0, DROPPED if str(error) == OUTSIDE_ERROR else str(error))
        if not torch.allclose(again, plain, atol=LOGIT_TOLERANCE[facts_of(model).dtype], rtol=0):
            return Liveness(
                0.0,
                "its attention is not that of transformers' eager function: logits differ by"
                f" {(again - plain).abs().max():.1g} without any edit",
            )
        return _judge(plain, edited, scores, patterns, layers)
    # A pass with an edit, through the hooks of a TransformerLens model.
    hooks: list[tuple[str, Callable]]
    hooks = [(HOOK_SCORES.format(layer), partial(edit, layer)) for layer in layers]
    hooks += [(HOOK_PATTERN.format(layer), partial(read, layer)) for layer in layers]
    try:
        with warnings.catch_warnings(), model.hooks(fwd_hooks=hooks):
            # The bridge warns of discarded edits; here that becomes the finding.
            warnings.simplefilter("ignore")
            edited = model(ids).float()
    except (AttributeError, KeyError, ValueError) as error:
        return Liveness(
            0.0, f"it has no {HOOK_SCORES.format(layers[0])} ({type(error).__name__}: {error})"
        )
    return _judge(plain, edited, scores, patterns, layers)


def _probe_ids(model: Model) -> Tensor:
    return torch.arange(8, device=model.cfg.device).remainder(model.cfg.d_vocab)[None]


def _cache_problem(model: Model) -> str | None:
    """What is wrong with passes of a bridge or `TransformersModel` after a cached text."""
    network: Any = facts_of(model).network
    ids = _probe_ids(model)
    cache = DynamicCache(config=network.config.get_text_config())
    positions, logits = torch.arange(ids.shape[1], device=ids.device)[None], []
    try:
        for start, stop in ((0, 3), (3, ids.shape[1])):
            there = slice(start, stop)
            logits.append(
                model(
                    ids[:, there],
                    attention_mask=torch.ones_like(ids[:, :stop]),
                    position_ids=positions[:, there],
                    **{cache_name(network): cache},
                ).float()
            )
    except (AttributeError, TypeError, ValueError) as error:
        return f"it takes no cache of transformers ({str(error).partition(chr(10))[0]})"
    wanted, computed = model(ids).float().log_softmax(-1), torch.cat(logits, dim=1).log_softmax(-1)
    off = (computed - wanted).abs().mean()
    if off <= tolerance(network):
        return None
    cause = "its recurrent layers begin anew in" if is_hybrid(network.config) else "it misreads"
    return (
        f"{cause} a pass of several tokens after a cached text: log-probabilities differ by"
        f" {off:.1g} from those of one pass"
    )


def _judge(
    plain: Tensor,
    edited: Tensor,
    scores: dict[int, Tensor],
    patterns: dict[int, Tensor],
    layers: Sequence[int],
) -> Liveness:
    """The result of the two passes; scores and patterns are those of the edited one, by layer."""
    shift = (edited - plain).abs().max().item()

    def follows(layer: int) -> bool:
        if layer not in scores or layer not in patterns:
            return False
        # The tolerance: bfloat16 patterns have 3 digits, and scores of several units differ by far
        # more from their softmax.
        wanted = scores[layer].softmax(-1)
        normalized = patterns[layer] / patterns[layer].sum(-1, keepdim=True)
        return bool((wanted - normalized).abs().max() < 2e-2)

    dead = tuple(layer for layer in layers if not follows(layer))
    already = [layer for layer in scores if _is_distribution(scores[layer])]
    if already:
        return Liveness(shift, "its scores hook fires after the softmax, on probabilities")
    if dead:
        return Liveness(
            shift, f"in layers {list(dead)} the attention pattern ignores edits of the scores"
        )
    if not shift > 0:
        return Liveness(shift, "its logits do not move when the scores are edited")
    return Liveness(shift, None)


def _is_distribution(edited: Tensor) -> bool:
    row = edited.clone()
    row[..., 1] -= SCORE_EDIT
    return bool((row >= -1e-3).all() and ((row.sum(-1) - 1).abs() < 1e-2).all())


def assert_live(model: Model, name: str) -> Liveness:
    """Probe a model, and refuse one whose attention ignores edits.

    Raises:
        DeadHookError: It cannot be augmented.
    """
    hooks = probe(model)
    if not hooks.alive:
        alternative = ""
        if facts_of(model).backend != "hooked" and facts_of(model).backend != "plain":
            takes = model.original_model._can_set_attn_implementation()
            alternative = (
                f", or {parameter('model_class', 'TransformersModel')}, which needs no hooks"
                if takes
                else ""
            )
        class_name = type(model).__name__
        families = LIVE_FAMILIES.get(class_name, LIVE_FAMILIES["TransformerBridge"])
        raise DeadHookError(
            f"{name} cannot be augmented: {hooks.problem}; families that work as {class_name}:"
            f" {', '.join(families)}, and others of docs/models.md{alternative}"
        )
    return hooks
