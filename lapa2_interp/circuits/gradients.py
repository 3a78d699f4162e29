"""Gradients of the control score: which heads are worth an exact knock-out, from one pass a text.

With D the control, P a head's pattern and P' the pattern without the prefix, renormalised:

    slope   = dD/db                 b a number added to the scores of the prefix, at every query
                                    after it and in every branch: what a bias gains per unit
    cut_hat = - <P' - P, dD/dP>     the knock-out of the head to first order: the softmax is exact,
                                    what comes after it is linear (as in AtP*, arXiv 2403.00745)
    ig      = - integral of dD/db from 0 to b = -inf, along which the knock-out lies

At each query cut_hat is slope / (1 - A), A the head's attention on the prefix. So the two answer
different questions: a head that gives the prefix nearly all its attention has slope 0, and may have
a large cut_hat.

Neither sees what later heads and norms make of a large loss. In the planted model the carrier's
cut_hat is less than half its effect, and the relay's has the wrong sign: a little more of what it
leaves would weaken its reader's attention, by the norm between them, though all of it is needed. So
this is a prefilter, and no effect: `prefiltered` knocks out the heads that it puts first, and
random others, exactly.

    found = attribution(model, "sentiment")
    found.best(24)                          # heads of largest cut_hat
    prefiltered(model, "sentiment").recall  # what the order is worth here

Gradients need the hooks of a TransformerBridge, and float32 or float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm

from lapa2_interp._util.errors import CircuitError, pluralize, unknown_choice
from lapa2_interp._util.plots import Drawing, new_figure, plain_axes
from lapa2_interp._util.progress import given_bar
from lapa2_interp.attention.cache import soft_inputs
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.bias.augmentation import AugmentationLike, Phase, active_augmentations
from lapa2_interp.bias.layout import Span
from lapa2_interp.bias.recipes import resolve_recipes
from lapa2_interp.circuits.cases import ContrastExample, batches
from lapa2_interp.circuits.edits import Heads, one_pass, unprefixed_logits
from lapa2_interp.circuits.knockout import KnockOut, head_pairs, knock_out, units_of
from lapa2_interp.circuits.metrics import Metric, Predictions, one_metric
from lapa2_interp.circuits.question import ContrastLike, ContrastSet, rows_at_once
from lapa2_interp.circuits.statistics import ranks, spearman
from lapa2_interp.models.card import Model, check_not_quantised, is_bridge, plain_network
from lapa2_interp.models.liveness import HOOK_PATTERN, HOOK_SCORES
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.stats import bounds

ESTIMATES = ("cut_hat", "slope")
ROUNDING = 1e-3
"""What a pattern may lack to 1 without a learned sink."""
SHARE = 0.8
"""Nodes of an integral lie as is best for a head that gives this much attention to the prefix."""


@dataclass(frozen=True)
class Attribution:
    """What the gradient says of every head. All numbers are means over steps, as
    `KnockOut.effects`.

    Attributes:
        question: What was asked.
        metric: Its name.
        whole: The control itself, by case.
        slopes: dD/db for every position of the prefix; NaN behind the end of a shorter prefix.
        cut_hats: The estimated effect of a knock-out ("cut", "all_queries").
    """

    question: ContrastSet
    metric: str
    whole: Float[np.ndarray, " case"]
    slopes: Float[np.ndarray, "case layer head position"]
    cut_hats: Float[np.ndarray, "case layer head"]

    def by_prompt(self, by: str = "cut_hat") -> Float[np.ndarray, "prompt layer head"]:
        """An estimate of every head, averaged over the cases of each prompt.

        Args:
            by: "cut_hat", or "slope", the sum over positions.

        Raises:
            CircuitError: Another estimate.
        """
        if by not in ESTIMATES:
            raise CircuitError(unknown_choice("estimate", by, ESTIMATES))
        values = self.cut_hats if by == "cut_hat" else np.nansum(self.slopes, axis=3)
        return self.question.by_prompt(values)

    def map(self, by: str = "cut_hat") -> Float[np.ndarray, "layer head"]:
        """An estimate of every head, as `by_prompt`; the mean over prompts."""
        return self.by_prompt(by).mean(0)

    def best(self, n: int, by: str = "cut_hat", size: bool = False) -> Heads:
        """The n heads of largest estimate, as (layer, head).

        Args:
            by: As `by_prompt`.
            size: Whatever the sign.
        """
        grid = self.map(by)
        order = np.argsort(-(np.abs(grid) if size else grid), axis=None, kind="stable")[:n]
        return head_pairs(zip(*np.unravel_index(order, grid.shape), strict=True))

    def frame(self) -> pd.DataFrame:
        """A row for every head, largest cut_hat first.

        Columns: layer, head; cut_hat and slope, each with its 95 % interval over prompts, its rank
        and the interval of that.
        """
        n_layers, n_heads = self.cut_hats.shape[1:]
        columns: dict[str, Any] = {
            "layer": np.repeat(np.arange(n_layers), n_heads),
            "head": np.tile(np.arange(n_heads), n_layers),
        }
        for by in ESTIMATES:
            values = self.by_prompt(by).reshape(-1, n_layers * n_heads)
            low, high = bounds(values, np.arange(len(values)))
            order = ranks(values)
            columns |= {by: values.mean(0), f"{by}_low": low, f"{by}_high": high}
            columns |= {f"{by}_rank": order.rank}
            columns |= {f"{by}_rank_low": order.low, f"{by}_rank_high": order.high}
        return pd.DataFrame(columns).sort_values("cut_hat_rank", ignore_index=True)

    def interval(self) -> pd.DataFrame:
        """Each head's cut_hat with its 95 % interval over prompts, largest first."""
        return self.frame()[["layer", "head", "cut_hat", "cut_hat_low", "cut_hat_high"]]

    def plot(self) -> Drawing:
        """Maps of both estimates, each with its own scale."""
        n_layers, n_heads = self.cut_hats.shape[1:]
        figure = new_figure(2 * (1.3 + 0.22 * n_heads), 1.0 + 0.13 * n_layers)
        for axes, by, unit in zip(
            figure.subplots(1, 2),
            ESTIMATES,
            ("nats a step", "nats a step and unit of b"),
            strict=True,
        ):
            grid = self.map(by)
            top = float(np.abs(grid).max()) or 1.0
            shown = axes.imshow(grid, cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")
            bar = figure.colorbar(shown, ax=axes, label=f"{by} of {self.metric}, {unit}")
            bar.ax.tick_params(labelsize=7)
            plain_axes(axes, "head", "layer")
            axes.set_xticks(range(0, n_heads, max(1, n_heads // 9)))
        return figure


@accepts_model_name
def attribution(
    model: Model,
    about: ContrastLike,
    *,
    metric: str | Metric | Mapping[str, Metric] = "js",
    augmentation: AugmentationLike = None,
    at_once: int = 1,
    progress: tqdm | None = None,
    **settings: Any,
) -> Attribution:
    """Slope and cut_hat of every head, from one forward and one backward pass a text.

    Args:
        model: A TransformerBridge in float32 or float64, with hooks of one's own if there are any.
        about, settings: As `control`.
        metric: By which control is measured; a mapping of one name to a function of `Predictions`
            for one's own, made of operations that torch can differentiate.
        augmentation: What acts in every branch. The bias b comes on top of it, so that it moves a
            head that is held at a target, too.
        at_once: Texts read together; changes nothing but memory and time.
        progress: A bar to advance by steps read.

    Raises:
        CircuitError: As `control`; the model has no hooks, or is in half precision; the
            augmentation has phase "query"; or the metric has no gradient.
    """
    check_gradients(model)
    name, function = one_metric(metric)
    question = ContrastSet.of(model, about, **settings)
    one_pass(augmentation, question.cases, "gradients are taken through")
    n, n_layers, n_heads = len(question.cases), model.cfg.n_layers, model.cfg.n_heads
    longest = max(case.layouts[0].l_pre for case in question.cases)
    whole = np.zeros(n)
    slopes = np.full((n, n_layers, n_heads, longest), np.nan)
    cut_hats = np.zeros((n, n_layers, n_heads))
    steps = sum(case.n * len(case.names) for case in question.cases)
    with given_bar(progress, steps, "attribution", "step") as bar:
        for group in batches(question.cases, rows_at_once(model, question.cases, at_once)):
            cases = [question.cases[i] for i in group]
            l_pre, n_branches = cases[0].layouts[0].l_pre, len(cases[0].names)
            with recorded_gradients():
                biases = torch.zeros(
                    n_layers, len(cases), n_heads, l_pre,
                    dtype=model.cfg.dtype, device=model.cfg.device, requires_grad=True,
                )  # fmt: skip
                logits, patterns = _read(model, cases, biases, augmentation)
                control = _control(model, question, cases, logits, name, function)
                by_bias, *by_pattern = torch.autograd.grad(control.sum(), [biases, *patterns])
            whole[group] = control.detach().cpu().numpy()
            slopes[group, ..., :l_pre] = by_bias.transpose(0, 1).cpu().numpy()
            span = cases[0].layouts[0].prefix
            for layer, (pattern, gradient) in enumerate(zip(patterns, by_pattern, strict=True)):
                lost = _lost(pattern.detach(), gradient, span)  # row head
                summed = lost.unflatten(0, (n_branches, len(cases))).sum(0)
                cut_hats[group, layer] = summed.cpu().numpy()
            bar.update(sum(case.n * len(case.names) for case in cases))
    return Attribution(question, name, whole, slopes, cut_hats)


@accepts_model_name
def integrated(
    model: Model,
    about: ContrastLike,
    heads: Sequence[Sequence[int]],
    *,
    metric: str | Metric | Mapping[str, Metric] = "js",
    nodes: int = 5,
    augmentation: AugmentationLike = None,
    at_once: int = 8,
    progress: tqdm | None = None,
    **settings: Any,
) -> Float[np.ndarray, "case head"]:
    """The knock-out of single heads as an integral of slopes, from 0 to a full cut.

    It is the mean over steps of what `knock_out(how="cut", phase="all_queries")` finds, up to the
    number of nodes. Each head is cut alone. With y from 0 to 1, and A = `SHARE`,

        exp(b) = y (1 - A) / (1 - A y),     db = dy / (y (1 - A y))

    is the way along which a head that gives A to the prefix gives it A y. Nodes are Gauss and
    Legendre's in y. A = 0 would be even steps of the cut's alpha, which is worse: most heads that
    matter lose their attention in the last of them.

    Args:
        model, about, metric, augmentation, settings: As `attribution`.
        heads: (layer, head) pairs.
        nodes: Passes for each head.
        at_once: Heads and nodes read together; changes nothing but memory and time.

    Raises:
        CircuitError: As `attribution`; unknown heads, none, or no nodes.
    """
    check_gradients(model)
    if nodes < 1:
        raise CircuitError(f"an integral needs at least one node; found nodes={nodes}")
    name, function = one_metric(metric)
    question = ContrastSet.of(model, about, **settings)
    one_pass(augmentation, question.cases, "gradients are taken through")
    (unit,) = units_of(model, question, {"heads": heads})
    if not unit.heads:
        raise CircuitError("an integral needs at least one head; found none")
    roots, widths = np.polynomial.legendre.leggauss(nodes)
    y = (roots + 1) / 2
    b_at, weights = np.log(y * (1 - SHARE) / (1 - SHARE * y)), widths / 2 / (y * (1 - SHARE * y))
    items = [(i, k) for i in range(len(unit.heads)) for k in range(nodes)]
    most = rows_at_once(model, question.cases, at_once)
    found = np.zeros((len(question.cases), len(unit.heads)))
    steps = sum(case.n * len(case.names) for case in question.cases)
    total = steps * len(items)
    with given_bar(progress, total, "integrated gradients", "step") as bar:
        for number, case in enumerate(question.cases):
            for first in range(0, len(items), most):
                part = items[first : first + most]
                chosen = _chosen(model, tuple(unit.heads[i] for i, _ in part))
                cases = [case] * len(part)
                with recorded_gradients():
                    b = torch.tensor(
                        [b_at[k] for _, k in part],
                        dtype=model.cfg.dtype, device=model.cfg.device, requires_grad=True,
                    )  # fmt: skip
                    biases = torch.where(chosen, b[:, None], 0.0)[..., None]
                    biases = biases.expand(*chosen.shape, case.layouts[0].l_pre)
                    logits, _ = _read(model, cases, biases, augmentation)
                    control = _control(model, question, cases, logits, name, function)
                    (slopes,) = torch.autograd.grad(control.sum(), [b])
                for (i, k), slope in zip(part, slopes.tolist(), strict=True):
                    found[number, i] += weights[k] * slope
                bar.update(case.n * len(case.names) * len(part))
    return found


@dataclass(frozen=True)
class Recall:
    """How well the gradient's order of heads agrees with exact knock-outs.

    Attributes:
        heads: How many heads were compared.
        n: How many the prefilter keeps, by the size of cut_hat.
        cut_hat, slope: Spearman correlations with the exact effects over heads; NaN where all are
            equal.
        recall: The share of the n largest exact effects, whatever their sign, that it keeps.
        missed: The head of the largest effect that it does not keep, if it does not keep all.
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
        return (
            f"{pluralize(self.heads, 'head')}: Spearman {self.cut_hat:.2f} (cut_hat),"
            f" {self.slope:.2f} (slope); recall@{self.n} {self.recall:.2f}; {missed}"
        )


def recall(found: Attribution, exact: KnockOut, n: int = 24) -> Recall:
    """How much of an exact sweep the gradient would have found.

    Args:
        found: The gradient.
        exact: Knock-outs of single heads: all of them, or some, and then only these are compared.
        n: How many heads the prefilter keeps.

    Raises:
        CircuitError: The knock-outs are not of single heads, of another model's size, of other
            texts, or of another metric; or n is below 1.
    """
    for unit in exact.units:
        if len(unit.heads) != 1 or unit.positions is not None:
            raise CircuitError(
                f"recall compares single heads; found {unit.name!r}; give knock-outs made with"
                ' over="head"'
            )
    if n < 1:
        raise CircuitError(f"recall needs at least one head to keep; found n={n}")
    if found.metric != exact.metric:
        raise CircuitError(
            f"the attribution is of metric {found.metric!r}, the knock-outs of {exact.metric!r};"
            " use exact.with_metric(...), or ask for the same"
        )
    if found.question != exact.question:
        raise CircuitError(
            "the attribution and the knock-outs are of other texts; pass one Question to both"
        )
    pairs = [unit.heads[0] for unit in exact.units]
    n_layers, n_heads = found.cut_hats.shape[1:]
    for layer, head in pairs:
        if not (layer < n_layers and head < n_heads):
            raise CircuitError(
                f"the knock-outs have head ({layer}, {head}); the attribution has layers"
                f" 0-{n_layers - 1}, heads 0-{n_heads - 1}: they are of different models"
            )
    at = tuple(np.array(pairs).T)
    effects = exact.question.by_prompt(exact.effects).mean(0)
    cut_hats, slopes = (found.map(by)[at] for by in ESTIMATES)
    n = min(n, len(pairs))
    kept, largest = (np.argsort(-np.abs(each), kind="stable") for each in (cut_hats, effects))
    shared = set(kept[:n].tolist()) & set(largest[:n].tolist())
    rest = [i for i in largest.tolist() if i not in set(kept[:n].tolist())]
    return Recall(
        len(pairs),
        n,
        spearman(cut_hats, effects),
        spearman(slopes, effects),
        len(shared) / n,
        pairs[rest[0]] if rest else None,
        float(effects[rest[0]]) if rest else 0.0,
    )


@dataclass(frozen=True)
class Prefiltered:
    """Exact knock-outs of the heads that the gradient puts first, and of random others.

    Attributes:
        exact: The knock-outs.
        attribution: The gradient of all heads.
        n: How many of the units were chosen by the size of cut_hat; the others are random.
    """

    exact: KnockOut
    attribution: Attribution
    n: int

    @cached_property
    def recall(self) -> Recall:
        """Among the heads that were knocked out. The largest effect missed is then that of a random
        other head: what the rest may hide."""
        return recall(self.attribution, self.exact, self.n)

    def frame(self) -> pd.DataFrame:
        """`exact.frame()` with the gradient's columns, and whether a head was chosen by it."""
        chosen = set(self.attribution.best(self.n, size=True))
        table = self.exact.frame().merge(
            self.attribution.frame()[["layer", "head", *ESTIMATES]], on=["layer", "head"]
        )
        heads = zip(table["layer"], table["head"], strict=True)
        return table.assign(chosen=[pair in chosen for pair in heads])


@accepts_model_name
def prefiltered(
    model: Model,
    about: ContrastLike,
    *,
    n: int = 24,
    random: int = 24,
    seed: int = 0,
    metric: str | Metric | Mapping[str, Metric] = "js",
    how: str = "cut",
    phase: Phase = "all_queries",
    also: Sequence[str] | None = None,
    augmentation: AugmentationLike = None,
    file: str | Path | None = None,
    at_once: int | None = None,
    progress: tqdm | None = None,
    **settings: Any,
) -> Prefiltered:
    """Exact knock-outs of the n heads of largest cut_hat, whatever its sign, and of random others.

    The random heads are the check: an effect among them that is as large as those of the chosen
    says that the gradient's order cannot be trusted here. p_max is corrected for the heads that are
    knocked out, and not for their choice among all on the same prompts.

    Args:
        model, about, settings: As `control`; the model as `attribution`.
        n: Heads chosen by cut_hat.
        random: Heads drawn from the others.
        seed: Of the draw.
        metric, how, phase, also, augmentation, file, at_once, progress: As `knock_out`. cut_hat is
            of "cut" and "all_queries", whatever is asked of the exact knock-outs.

    Raises:
        CircuitError: As `attribution` and `knock_out`; or n is below 1.
    """
    if n < 1 or random < 0:
        raise CircuitError(
            f"a prefilter keeps at least one head, and draws 0 or more; found n={n},"
            f" random={random}"
        )
    check_gradients(model)
    question = ContrastSet.of(model, about, **settings)
    found = attribution(
        model, question, metric=metric, augmentation=augmentation, progress=progress
    )
    every = units_of(model, question, "head")
    chosen = set(found.best(n, size=True))
    others = [i for i, unit in enumerate(every) if unit.heads[0] not in chosen]
    drawn = np.random.default_rng(seed).permutation(others)[:random].tolist()
    units = [unit for i, unit in enumerate(every) if unit.heads[0] in chosen or i in drawn]
    exact = knock_out(
        model,
        question,
        units=units,
        how=how,
        phase=phase,
        metric=metric,
        also=also,
        augmentation=augmentation,
        file=file,
        at_once=at_once,
        progress=progress,
    )
    return Prefiltered(exact, found, len(chosen))


def check_gradients(model: Model) -> None:
    """Refuse what has no gradients."""
    if not is_bridge(model) or plain_network(model) is not None:
        raise CircuitError(
            "gradients are read through the hooks of a TransformerBridge, not from a"
            f' {type(model).__name__}; load the model with model_class="TransformerBridge"'
        )
    check_not_quantised(model, "gradients go through")
    if model.cfg.dtype not in (torch.float32, torch.float64):
        name = str(model.cfg.dtype).removeprefix("torch.")
        raise CircuitError(
            f"gradients in {name} are mostly rounding; allowed: float32, float64; load the model"
            ' with dtype="float32"'
        )


@contextmanager
def recorded_gradients() -> Iterator[None]:
    """Gradients are recorded, whatever the caller's mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _read(
    model: Model,
    cases: Sequence[ContrastExample],
    biases: Float[Tensor, "layer item head position"],
    augmentation: AugmentationLike,
) -> tuple[Float[Tensor, "branch item step vocab"], list[Float[Tensor, "row head query key"]]]:
    """Every step of some texts of one shape, in every branch, in one pass that keeps no cache.

    Args:
        biases: Added to the scores of the prefix at all queries after it, on top of everything
            else, in all branches alike.

    Returns:
        Logits; and each layer's pattern, as the values are multiplied by it. Rows are (branch,
        item), stacked.
    """
    n, n_branches = cases[0].n, len(cases[0].names)
    rows = [(case, branch) for branch in range(n_branches) for case in cases]
    layouts = [case.layouts[branch] for case, branch in rows]
    span, patterns = layouts[0].prefix, []

    def on_scores(scores: Tensor, hook: Any, layer: int) -> Tensor:
        n_queries, n_keys = scores.shape[2:]
        before = max(0, span.stop - (n_keys - n_queries))  # queries that are not after the prefix
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
    whole = [
        replace(layout, ids=layout.ids + case.text[:-1])
        for layout, (case, _) in zip(layouts, rows, strict=True)
    ]
    inputs = soft_inputs(model, whole, [case.prefixes[branch] for case, branch in rows])
    with (
        augmented(model, active_augmentations(resolve_recipes(augmentation)), layouts),
        model.hooks(fwd_hooks=hooks),
    ):
        logits = model(**inputs, logits_to_keep=n)[:, -n:]
    return logits.unflatten(0, (n_branches, len(cases))), patterns


def _control(
    model: Model,
    question: ContrastSet,
    cases: Sequence[ContrastExample],
    logits: Float[Tensor, "branch item step vocab"],
    name: str,
    metric: Metric,
) -> Float[Tensor, " item"]:
    """The control of each text, its mean over steps."""
    text = torch.tensor([case.text for case in cases], device=logits.device)
    raw = None
    if name == "from_raw":  # no bias changes it, so there is nothing to differentiate
        with torch.no_grad():
            raw = unprefixed_logits(model, cases)
    control = metric(Predictions(logits, text, raw, question.words)).mean(1)
    if not control.requires_grad:
        raise CircuitError(
            f"metric {name!r} has no gradient with respect to the logits; make it of operations"
            " that torch can differentiate, without detach, argmax or item"
        )
    return control


def _chosen(model: Model, heads: Heads) -> Bool[Tensor, "layer item head"]:
    """Which head each item is about."""
    found = torch.zeros(model.cfg.n_layers, len(heads), model.cfg.n_heads, dtype=torch.bool)
    for item, (layer, head) in enumerate(heads):
        found[layer, item, head] = True
    return found.to(model.cfg.device)


def _lost(
    pattern: Float[Tensor, "row head query key"],
    gradient: Float[Tensor, "row head query key"],
    span: Span,
) -> Float[Tensor, "row head"]:
    """- <P' - P, dD/dP> over the queries after a span that is cut in P'."""
    first = max(0, span.stop - (pattern.shape[3] - pattern.shape[2]))
    pattern, gradient = pattern[:, :, first:], gradient[:, :, first:]
    return ((pattern - without(pattern, span)) * gradient).sum((2, 3))


def without(
    pattern: Float[Tensor, "row head query key"], span: Span
) -> Float[Tensor, "row head query key"]:
    """A pattern with the keys of a span cut and the rest renormalised: the softmax of the scores
    that are left. The share of a learned sink, which is no key, is part of the rest."""
    sink = 1 - pattern.sum(3, keepdim=True)
    rest = pattern.clone()
    rest[..., span.start : span.stop] = 0
    left = rest.sum(3, keepdim=True) + torch.where(sink > ROUNDING, sink, 0.0)
    return rest / left.clamp_min(torch.finfo(pattern.dtype).tiny)
