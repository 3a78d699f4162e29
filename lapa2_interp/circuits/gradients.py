"""Gradients of the control score: heads worth an exact knock-out, from one pass a text.

With D the control, P a head's pattern and P' the pattern without the prefix, renormalised:

    slope   = dD/db                 b a number added to the scores of the prefix, at every query
                                    after it and in every branch: the gain per unit of bias
    cut_hat = - <P' - P, dD/dP>     the knock-out of the head to first order: exact in the softmax,
                                    linear after it (as in AtP*, arXiv 2403.00745)

At each query cut_hat is slope / (1 - A), A the head's attention on the prefix. So the two
differ: a head that gives the prefix nearly all its attention has slope 0, and may have a large
cut_hat.

Neither includes the effect of a large loss on later heads and norms. In the planted model the
carrier's cut_hat is less than half its effect. The relay's has the wrong sign: the reader needs its
whole output, but a little more output would weaken the reader's attention, by the norm between
them. So these are no effects, but a prefilter: knock out the best heads exactly.

    asked = ContrastSet.of(model, "sentiment")
    found = attribution(model, asked)
    best = found.table().best(24)                              # heads of largest cut_hat
    exact = knock_out(model, asked, over={str(head): [head] for head in best})
    print(prefilter_recall(found, exact, n=8))                 # how far both orders agree

Gradients need the hooks of a TransformerBridge, and float32 or float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm

from lapa2_interp._util.values import Count, numbers_checked
from lapa2_interp.bias.augmentation import AugmentationLike
from lapa2_interp.bias.layout import Span
from lapa2_interp.circuits.contrast_set import ContrastLike, ContrastSet, as_contrast_set
from lapa2_interp.circuits.edits import (
    items_per_batch,
    text_logits,
    unprefixed_logits,
)
from lapa2_interp.circuits.examples import ContrastExample, batches
from lapa2_interp.circuits.guard import check_gradients, check_one_pass
from lapa2_interp.circuits.knockout import KnockOut
from lapa2_interp.circuits.metrics import Metric, Predictions, one_metric
from lapa2_interp.circuits.statistics import spearman
from lapa2_interp.circuits.unit_table import UnitTable, draw_tables
from lapa2_interp.circuits.units import head_units
from lapa2_interp.errors import CircuitError, pluralize, unknown_choice
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.hook_names import HOOK_PATTERN, HOOK_SCORES
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.plots import Drawing
from lapa2_interp.progress import given_or_new_bar
from lapa2_interp.table_formats import format_number

ESTIMATES = ("cut_hat", "slope")
SINK_TOLERANCE = 1e-3
"""Rounding of a pattern's sum over keys; a larger gap to 1 is a learned sink."""


@dataclass(frozen=True)
class Attribution:
    """Estimates of every head from the gradient. All numbers are means over steps, as
    the values of a `KnockOut`.

    Attributes:
        contrast_set: The texts.
        metric: The name of the metric.
        control: The control itself, by example.
        slopes: dD/db for every position of the prefix; NaN after the end of a shorter prefix.
        cut_hats: The estimated effect of a knock-out ("cut", "after_span").
    """

    contrast_set: ContrastSet
    metric: str
    control: Float[np.ndarray, " example"]
    slopes: Float[np.ndarray, "example layer head position"]
    cut_hats: Float[np.ndarray, "example layer head"]

    def table(self, estimate: str = "cut_hat") -> UnitTable:
        """The table of an estimate: "cut_hat", or "slope", the sum over positions.

        Raises:
            CircuitError: Unknown estimate.

        Example:
            >>> from lapa2_interp import circuits, load_model
            >>> found = circuits.attribution(load_model("planted"), "sentiment")
            >>> found.table("slope").best(1)
            ((1, 2),)
        """
        if estimate not in ESTIMATES:
            raise CircuitError(unknown_choice("estimate", estimate, ESTIMATES))
        cut = estimate == "cut_hat"
        values = self.cut_hats if cut else np.nansum(self.slopes, axis=3)
        n, n_layers, n_heads = values.shape
        return UnitTable(
            self.contrast_set,
            head_units(n_layers, n_heads),
            values.reshape(n, -1),
            self.control if cut else None,
            name=estimate,
            label=f"{estimate} of {self.metric}, nats a step{'' if cut else ' and unit of b'}",
        )

    def frame(self) -> pd.DataFrame:
        """A row for every head, largest cut_hat first.

        Columns: layer, head; cut_hat and slope, each with its 95 % interval over prompts, its rank
        and the rank's interval.
        """
        frames = []
        for name in ESTIMATES:
            table = self.table(name).frame().set_index(["layer", "head"])
            others = ("low", "high", "rank", "rank_low", "rank_high")
            shown = table[[name, *others]]
            frames.append(shown.rename(columns={column: f"{name}_{column}" for column in others}))
        return frames[0].join(frames[1]).reset_index()

    def plot(self) -> Drawing:
        """Maps of both estimates, each with its own scale."""
        return draw_tables({name: self.table(name) for name in ESTIMATES})


@numbers_checked
@accepts_model_name
def attribution(
    model: Model,
    contrast: ContrastLike,
    *,
    metric: str | Metric | Mapping[str, Metric] = "js",
    augmentation: AugmentationLike = None,
    batch_size: Count = 1,
    progress: tqdm | None = None,
) -> Attribution:
    """Compute slope and cut_hat of every head, from one forward and one backward pass a text.

    Args:
        model: A TransformerBridge in float32 or float64, with custom hooks if it has any.
        contrast: A `ContrastSet`, or a task by name or value, or one or more examples.
        metric: A name of `METRICS`, or {name: function of `Predictions`} made of operations that
            torch can differentiate.
        augmentation: One or more augmentations that act in every branch. The bias b comes on top,
            so that it also moves a head that is held at a target.
        batch_size: Texts in one forward pass; changes nothing but memory and time.
        progress: A bar that counts steps.

    Raises:
        CircuitError: As `control_score`; the model has no hooks, or is in half precision; the
            augmentation has phase "predicting_only"; or the metric has no gradient.
    """
    check_gradients(model)
    name, function = one_metric(metric)
    contrast_set = as_contrast_set(model, contrast)
    check_one_pass(augmentation, contrast_set.examples, "gradients are taken through")
    n, n_layers, n_heads = len(contrast_set.examples), model.cfg.n_layers, model.cfg.n_heads
    longest = max(example.layouts[0].l_pre for example in contrast_set.examples)
    control = np.zeros(n)
    slopes = np.full((n, n_layers, n_heads, longest), np.nan)
    cut_hats = np.zeros((n, n_layers, n_heads))
    most = items_per_batch(model, contrast_set.examples, batch_size)
    with given_or_new_bar(progress, contrast_set.n_branch_steps, "attribution", "step") as bar:
        for group in batches(contrast_set.examples, most):
            examples = [contrast_set.examples[i] for i in group]
            l_pre, n_branches = examples[0].layouts[0].l_pre, len(examples[0].attributes)
            # One forward pass with a bias of 0, and its gradients.
            with recorded_gradients():
                biases = torch.zeros(
                    n_layers, len(examples), n_heads, l_pre,
                    dtype=facts_of(model).dtype, device=model.cfg.device, requires_grad=True,
                )  # fmt: skip
                logits, patterns = _forward_with_biases(model, examples, biases, augmentation)
                value = _text_control(model, contrast_set, examples, logits, name, function)
                by_bias, *by_pattern = torch.autograd.grad(value.sum(), [biases, *patterns])
            control[group] = value.detach().cpu().numpy()
            slopes[group, ..., :l_pre] = by_bias.transpose(0, 1).cpu().numpy()
            span = examples[0].layouts[0].prefix
            for layer, (pattern, gradient) in enumerate(zip(patterns, by_pattern, strict=True)):
                lost = _first_order_loss(pattern.detach(), gradient, span)  # row head
                summed = lost.unflatten(0, (n_branches, len(examples))).sum(0)
                cut_hats[group, layer] = summed.cpu().numpy()
            bar.update(sum(example.n_branch_steps for example in examples))
    return Attribution(contrast_set, name, control, slopes, cut_hats)


def has_gradients(model: Model) -> bool:
    """True if `check_gradients` lets a model pass."""
    try:
        check_gradients(model)
    except CircuitError:
        return False
    return True


@contextmanager
def recorded_gradients() -> Iterator[None]:
    """Record gradients, also inside `no_grad` or `inference_mode`."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _forward_with_biases(
    model: Model,
    examples: Sequence[ContrastExample],
    biases: Float[Tensor, "layer item head position"],
    augmentation: AugmentationLike,
) -> tuple[Float[Tensor, "branch item step vocab"], list[Float[Tensor, "row head query key"]]]:
    """Logits of every step of texts of one shape, in every branch, by one pass without a cache.

    Args:
        biases: Numbers added to the scores of the prefix at all queries after it, on top of
            everything else, equal in all branches.

    Returns:
        Logits; and each layer's pattern, by which the values are multiplied. Rows are (branch,
        item), stacked.
    """
    n_branches = len(examples[0].attributes)
    rows = [(example, branch) for branch in range(n_branches) for example in examples]
    span, patterns = examples[0].layouts[0].prefix, []

    def on_scores(scores: Tensor, hook: Any, layer: int) -> Tensor:
        n_queries, n_keys = scores.shape[2:]
        before = max(0, span.stop - (n_keys - n_queries))  # queries inside the prefix
        bias = biases[layer].to(scores.device).repeat(n_branches, 1, 1)[:, :, None]
        bias = bias.expand(-1, -1, n_queries - before, -1)
        return scores + pad(bias, (span.start, n_keys - span.stop, before, 0))

    def on_pattern(pattern: Tensor, hook: Any) -> Tensor:
        patterns.append(pattern)
        return pattern

    hooks: list[tuple[str, Any]] = []
    for i in range(model.cfg.n_layers):
        scores = HOOK_SCORES.format(i), lambda scores, hook, i=i: on_scores(scores, hook, i)
        hooks += [scores, (HOOK_PATTERN.format(i), on_pattern)]
    logits = text_logits(model, rows, hooks, augmentation)
    return logits.unflatten(0, (n_branches, len(examples))), patterns


def _text_control(
    model: Model,
    contrast_set: ContrastSet,
    examples: Sequence[ContrastExample],
    logits: Float[Tensor, "branch item step vocab"],
    name: str,
    metric: Metric,
) -> Float[Tensor, " item"]:
    """The control of each text, its mean over steps, with a gradient."""
    text = torch.tensor([example.text for example in examples], device=logits.device)
    raw = None
    if name == "from_raw":  # the raw branch has no prefix, so no bias changes it
        with torch.no_grad():
            raw = unprefixed_logits(model, examples)
    control = metric(Predictions(logits, text, raw, contrast_set.words)).mean(1)
    if not control.requires_grad:
        raise CircuitError(
            f"metric {name!r} has no gradient with respect to the logits; make it of operations"
            " that torch can differentiate, without detach, argmax or item"
        )
    return control


def _first_order_loss(
    pattern: Float[Tensor, "row head query key"],
    gradient: Float[Tensor, "row head query key"],
    span: Span,
) -> Float[Tensor, "row head"]:
    """- <P' - P, dD/dP> over the queries after a span, which is cut in P'."""
    first = max(0, span.stop - (pattern.shape[3] - pattern.shape[2]))
    pattern, gradient = pattern[:, :, first:], gradient[:, :, first:]
    return ((pattern - cut_pattern(pattern, span)) * gradient).sum((2, 3))


def cut_pattern(
    pattern: Float[Tensor, "row head query key"], span: Span
) -> Float[Tensor, "row head query key"]:
    """A pattern with the keys of a span cut and the rest renormalised: the softmax of the remaining
    scores. The share of a learned sink, which is no key, is part of the rest."""
    sink = 1 - pattern.sum(3, keepdim=True)
    rest = pattern.clone()
    rest[..., span.start : span.stop] = 0
    left = rest.sum(3, keepdim=True) + torch.where(sink > SINK_TOLERANCE, sink, 0.0)
    return rest / left.clamp_min(torch.finfo(pattern.dtype).tiny)


@dataclass(frozen=True)
class PrefilterRecall:
    """Agreement of the gradient's order of heads with exact knock-outs.

    Attributes:
        heads: Number of heads that were compared.
        n: Number of heads that the prefilter keeps, by the size of cut_hat.
        cut_hat, slope: Spearman correlations with the exact effects over heads; NaN where all are
            equal.
        recall: The share of the n largest exact effects, of either sign, that it keeps.
        missed: The head of the largest effect that it does not keep; None if it keeps all.
        largest_missed: That effect, in nats a step; 0 where nothing is missed.
    """

    heads: int
    n: int
    cut_hat: float
    slope: float
    recall: float
    missed: tuple[int, int] | None
    largest_missed: float

    def __str__(self) -> str:
        missed = "none missed"
        if self.missed is not None:
            layer, head = self.missed
            missed = f"largest effect missed {self.largest_missed:.3g} ({layer}.{head})"
        cut_hat, slope = (format_number(rank, ".2f") for rank in (self.cut_hat, self.slope))
        return (
            f"{pluralize(self.heads, 'head')}: Spearman {cut_hat} (cut_hat), {slope} (slope);"
            f" recall@{self.n} {self.recall:.2f}; {missed}"
        )


@numbers_checked
def prefilter_recall(gradient: Attribution, exact: KnockOut, n: Count = 24) -> PrefilterRecall:
    """Compare the gradient's order of heads with exact knock-outs.

    Args:
        gradient: The estimates.
        exact: Knock-outs of single heads; heads without a knock-out are left out.
        n: Number of heads that the prefilter keeps.

    Raises:
        CircuitError: The knock-outs are not of single heads, of another model's size, of other
            texts, or of another metric.
    """
    for unit in exact.units:
        if len(unit.heads) != 1 or unit.positions is not None:
            raise CircuitError(
                f"recall compares single heads; found {unit.name!r}; give knock-outs made with"
                ' over="head"'
            )
    if gradient.metric != exact.metric:
        raise CircuitError(
            f"the attribution is of metric {gradient.metric!r}, the knock-outs of {exact.metric!r};"
            " use exact.with_metric(...), or give both the same metric"
        )
    if gradient.contrast_set != exact.contrast_set:
        raise CircuitError(
            "the attribution and the knock-outs are of other texts; pass one ContrastSet to both"
        )
    pairs = [unit.heads[0] for unit in exact.units]
    n_layers, n_heads = gradient.cut_hats.shape[1:]
    for layer, head in pairs:
        if not (layer < n_layers and head < n_heads):
            raise CircuitError(
                f"the knock-outs have head ({layer}, {head}); the attribution has layers"
                f" 0-{n_layers - 1}, heads 0-{n_heads - 1}: they are of different models"
            )
    # The order of both, and the heads of largest effect that the prefilter keeps.
    at = tuple(np.array(pairs).T)
    effects = exact.means
    cut_hats, slopes = (gradient.table(name).map()[at] for name in ESTIMATES)
    n = min(n, len(pairs))
    by_gradient, largest = (
        np.argsort(-np.abs(scores), kind="stable").tolist() for scores in (cut_hats, effects)
    )
    prefiltered = set(by_gradient[:n])
    missed = [i for i in largest if i not in prefiltered]
    return PrefilterRecall(
        heads=len(pairs),
        n=n,
        cut_hat=spearman(cut_hats, effects),
        slope=spearman(slopes, effects),
        recall=len(prefiltered & set(largest[:n])) / n,
        missed=pairs[missed[0]] if missed else None,
        largest_missed=float(effects[missed[0]]) if missed else 0.0,
    )
