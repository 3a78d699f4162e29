"""Pro-Aug (Eq. 15): decide by a gradient if a stronger prompt in the raw branch adds control.

The paper switches Pro-Aug on by task. Here a gradient decides, on prompts of selection:

    boost the prompt    if and only if    dD/db > 0 by its 95 % interval over prompts

D is the control of a decoding method: the distance between its next-token distributions for the
attributes. b is a number added to the scores of the raw branch's prompt, at the prompt's last token
and all later ones, as Pro-Aug adds its bias there.

    found = prompt_slope(model, "sentiment", "air-decoding")
    found.boost                                   # a value for the method's pro_aug
    select(model, "sentiment", pro_aug="air-decoding").prompt
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from lapa2_interp._util.values import Count, numbers_checked
from lapa2_interp.attention.hooked import edit_scores
from lapa2_interp.attention.soft_arguments import soft_inputs
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.places import head_pairs
from lapa2_interp.circuits.contrast_set import words_in_order
from lapa2_interp.circuits.edits import Heads, with_text
from lapa2_interp.circuits.examples import RAW, attribute_words, check_request, write_texts
from lapa2_interp.circuits.gradients import recorded_gradients
from lapa2_interp.circuits.guard import check_gradients
from lapa2_interp.circuits.metrics import Metric, Predictions, one_metric
from lapa2_interp.circuits.units import all_heads, head_mask
from lapa2_interp.errors import CircuitError, parameter
from lapa2_interp.generation.loop import prompt_log_likelihood
from lapa2_interp.methods.base import FLOOR, BatchStart, Branch, Method, Prepared, SoftPrefixKey
from lapa2_interp.methods.registry import get_for_task, load_task
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.prefixes.soft_prefix import SoftPrefix, find_prefix
from lapa2_interp.stats import FEW, bounds
from lapa2_interp.tasks.prompts import as_prompts
from lapa2_interp.tasks.task import Prompts, Task

ROUNDING_SHARE = 1e-6
"""A slope below this share of the control is rounding, and counts as 0."""


class PromptSlope(BaseModel):
    """Slope of a method's control in a bias on the raw branch's prompt.

    Attributes:
        method: The method's name.
        metric: The metric of control.
        mean, low, high: dD/db, in units of the metric for each step and unit of b: its mean over
            prompts, and the 95 % interval.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    metric: str
    mean: float
    low: float
    high: float

    @property
    def boost(self) -> bool:
        """True if the prompt should be strengthened: the interval lies above 0."""
        return self.low > 0


@numbers_checked
@accepts_model_name
def prompt_slope(
    model: Model,
    task: str | Task,
    method: str | Method,
    *,
    attribute: str | None = None,
    prompts: str | Path | Sequence[str | Path] | Prompts | None = None,
    texts: Mapping[str, Sequence[Sequence[int]]] | None = None,
    heads: Heads | None = None,
    metric: str | Metric | Mapping[str, Metric] = "js",
    words: Mapping[str, Sequence[int]] | None = None,
    tokens: Count = 32,
    samples: Count = 1,
    seed: int = 1,
) -> PromptSlope:
    """Compute the slope of a method's control in the bias on its raw branch's prompt, at bias 0.

    Distributions are the method's, before the sampler keeps the likeliest tokens. Texts are given,
    so the method's state (such as Air-Decoding's) follows them. A slope does not see jumps: a rule
    for the likeliest tokens alone (RSA-Control) changes by steps.

    Args:
        model: A TransformerBridge in float32 or float64.
        task: A name or a task with two attributes or more.
        method: A name, or a method with its parameters.
        attribute: The target; by default the task's first.
        prompts: At least 8, as `tasks.as_prompts` takes them; by default the task's.
        texts: By prompt, token ids of texts, of one length for each prompt; by default the raw
            model writes them.
        heads: (layer, head) pairs in which the bias acts; None for all.
        metric: A name of `METRICS` but from_raw, or a custom metric as in `attribution`. An equal
            addition to all words of both attributes cancels in lex.
        words: By attribute, the token ids of lex; by default the task's words.
        tokens, samples, seed: As `ContrastSet.of`, for texts that the model writes.

    Raises:
        CircuitError: The method has no raw branch that Pro-Aug reaches, or prepares for its
            prompts; fewer than 8 different prompts; texts of different lengths after one; heads
            that the model does not have; as `attribution`.
    """
    check_gradients(model)
    # Method, branches, prompts, metric, words and heads.
    chosen = load_task(task) if isinstance(task, str) else task
    decoder = get_for_task(method, chosen) if isinstance(method, str) else method
    target = next(iter(chosen.attributes)) if attribute is None else attribute
    names = (target, *chosen.others(target))
    branches = {name: decoder.branches(chosen, name) for name in names}
    _check_method(decoder, branches[target])
    asked = as_prompts(chosen.prompts if prompts is None else prompts)
    requested = tuple(dict.fromkeys(asked.texts))
    check_request(requested, texts)
    if len(requested) < FEW:
        raise CircuitError(
            f"{len(requested)} prompts are too few to decide by; give at least {FEW}, better 32"
        )
    name, measure = one_metric(metric)
    if not words and name == "lex":
        words = attribute_words(model.tokenizer, chosen.name, names)
    ordered_words = words_in_order(words or {}, names)
    if name == "from_raw":
        raise CircuitError(
            "metric from_raw compares with the raw model, which the bias changes; use js, lex, llr"
            " or kl"
        )
    every = all_heads(model)
    chosen_heads = every if heads is None else head_pairs("heads", heads, CircuitError)
    if not chosen_heads or not set(chosen_heads) <= set(every):
        raise CircuitError(
            f"heads {chosen_heads} are none, or not all of this model; give (layer, head) pairs up"
            f" to {every[-1]}, or None for all"
        )
    # Texts and soft prefixes.
    texts_by_prompt = texts or write_texts(
        model, chosen, RAW, requested, tokens=tokens, samples=samples, seed=seed
    )
    if uneven := next(
        (prompt for prompt in requested if len(set(map(len, texts_by_prompt[prompt]))) > 1), None
    ):
        raise CircuitError(
            f"the texts after {uneven!r} have {sorted(set(map(len, texts_by_prompt[uneven])))}"
            " tokens; those of a prompt need one length"
        )
    soft = {
        branch: find_prefix(model, chosen.name, branch.prefix.set, branch.prefix.attribute)
        for of_name in branches.values()
        for branch in of_name
        if isinstance(branch.prefix, SoftPrefixKey)
    }
    # A gradient for every prompt.
    slopes = []
    for prompt in requested:
        rows = torch.tensor(texts_by_prompt[prompt], device=model.cfg.device)
        with recorded_gradients():
            b = torch.zeros((), dtype=facts_of(model).dtype, device=rows.device, requires_grad=True)
            forwards = _BranchForwards(model, prompt, rows, soft, b, chosen_heads)
            logits = torch.stack([forwards.steered(decoder, branches[name]) for name in names])
            control = measure(Predictions(logits, rows, None, ordered_words)).mean()
            (slope,) = torch.autograd.grad(control, [b])
        if not torch.isfinite(slope):
            raise CircuitError(
                f"the slope of {name} is not a number after {prompt!r}: {decoder.name} gives"
                " tokens no weight at all there; use another metric"
            )
        slopes.append(float(slope) if abs(slope) > ROUNDING_SHARE * abs(control) else 0.0)
    low, high = bounds(np.array(slopes))
    return PromptSlope(
        method=decoder.name,
        metric=name,
        mean=float(np.mean(slopes)),
        low=float(low),
        high=float(high),
    )


def _check_method(method: Method, branches: Sequence[Branch]) -> None:
    """Refuse a method whose raw branch Pro-Aug does not reach, or whose steps need more than
    texts."""
    raw = any(branch.prefix is None for branch in branches)
    if not raw or not any(parameter.name == "pro_aug" for parameter in fields(method)):  # type: ignore[arg-type]
        raise CircuitError(
            f"{method.name} has no raw branch with a switch pro_aug, so there is nothing to decide;"
            " such methods are air-decoding, preadd, dexperts, gedi and rsa-control"
        )
    if method.prepares:
        raise CircuitError(
            f"{method.name} prepares for its prompts; choose its pro_aug by hand"
            f" ({parameter('pro_aug', 'true', 'set')})"
        )
    for branch in branches:
        if branch.hidden or branch.chat is not None or branch.layers is not None:
            raise CircuitError(
                f"branch {branch.name!r} of {method.name} hides its prefix, is a chat or lists"
                " layers, which the passes of a slope do not; choose its pro_aug by hand"
                f" ({parameter('pro_aug', 'true', 'set')})"
            )


class _BranchForwards:
    """One forward pass a branch over texts of one prompt; the raw branch has a bias b."""

    def __init__(
        self,
        model: Model,
        prompt: str,
        texts: Tensor,
        soft: Mapping[Branch, SoftPrefix],
        b: Tensor,
        heads: Heads,
    ) -> None:
        self.model, self.prompt, self.texts = model, prompt, texts
        self.soft, self.b, self.chosen = soft, b, head_mask(model, heads).to(b)
        self.cached: dict[Any, tuple[Tensor, Tensor]] = {}

    def steered(
        self, method: Method, branches: Sequence[Branch]
    ) -> Float[Tensor, "item step vocab"]:
        """The method's log-weights at every step."""
        outputs = {branch.name: self.forward(branch) for branch in branches}
        n_texts, n_steps = self.texts.shape
        n_prompt = torch.full((n_texts,), self._layout(Branch("base")).l_pro)
        prompts = {name: prompt for name, (_, prompt) in outputs.items()}
        likelihoods = prompts if method.reads_prompt else None
        state = method.begin(BatchStart((Prepared(),) * n_texts, likelihoods, n_prompt))
        log_weights = []
        for step in range(n_steps):
            log_probs = {name: steps[:, step].clone() for name, (steps, _) in outputs.items()}
            weights = method.combine(log_probs, state)
            log_weights.append(weights.masked_fill(weights == -torch.inf, FLOOR))
            state = method.advance(state, log_probs, self.texts[:, step])
        return torch.stack(log_weights, dim=1)

    def forward(
        self, branch: Branch
    ) -> tuple[Float[Tensor, "item step vocab"], Float[Tensor, " item"]]:
        """Log-probabilities of every step, and the prompt's log-likelihood; a gradient is recorded
        for the raw branch alone."""
        key = branch.prefix, branch.join
        if key in self.cached:
            return self.cached[key]
        layout, n = self._layout(branch), self.texts.shape[1]
        layouts = [with_text(layout, row) for row in self.texts.tolist()]
        inputs = soft_inputs(self.model, layouts, [self.soft.get(branch)] * len(layouts))
        keep = n + layout.l_pro
        raw = branch.prefix is None
        with torch.set_grad_enabled(raw):
            with ExitStack() as stack:
                if raw:
                    stack.enter_context(edit_scores(self.model, partial(self._biased, layout)))
                logits = self.model(**inputs, logits_to_keep=keep)[:, -keep:]
            likely = prompt_log_likelihood(
                logits[:, : layout.l_pro + 1].detach(), [layout] * len(layouts)
            )
            wide = logits[:, -n:].to(torch.promote_types(logits.dtype, torch.float32))
            self.cached[key] = wide.log_softmax(dim=2), likely
        return self.cached[key]

    def _layout(self, branch: Branch) -> Layout:
        prefix = self.soft.get(branch)
        text = branch.prefix if isinstance(branch.prefix, str) else None
        slots = 0 if prefix is None else len(prefix)
        return Layout.of(self.model.tokenizer, text, branch.join + self.prompt, soft=slots)

    def _biased(
        self, layout: Layout, layer: int, scores: Float[Tensor, "row head query key"]
    ) -> Float[Tensor, "row head query key"]:
        """Scores with b on the prompt, for queries from its last token on."""
        mask = torch.zeros_like(scores[0])
        (span,) = layout.spans("prefix")
        mask[:, layout.n_live - 1 :, span.start : span.stop] = 1
        return scores + self.b * self.chosen[layer][:, None, None] * mask
