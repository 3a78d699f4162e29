"""Metrics of control: distances between the branches' next-token predictions at each step.

With p+ and p- the next-token distributions after the target's prefix and the opposite one, and x
the text that follows:

    llr = log p+(x) - log p-(x)                          its sum over a text is log P(x|+) - log P(x|-)
    js  = Jensen-Shannon divergence of the branches      in [0, log of their number]
    kl  = KL(p+ || p-)                                   the mean of llr over texts written after +
    lex = lse over W+ - lse over W-, of log p+, minus the same of log p-
    from_raw = mean of js(p+, raw) and js(p-, raw)       0 where no prefix acts

W+ and W- are words of the attributes. js has no sign and needs no words; one rare token cannot
dominate it. lex has a sign, and shares of it add up. Where there are more than two attributes, p-
is the mean of the others' distributions.

A custom metric is any function of `Predictions`.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapa2_interp.errors import CircuitError, pluralize, unknown_choice


@dataclass
class Predictions:
    """Predictions of all branches for a batch of texts.

    Attributes:
        logits: By attribute, the target first.
        text: The tokens that follow.
        raw: Logits without a prefix, where they were requested.
        words: Token ids of the words of each attribute, in the order of `logits`.
    """

    logits: Float[Tensor, "branch item step vocab"]
    text: Int[Tensor, "item step"]
    raw: Float[Tensor, "item step vocab"] | None = None
    words: Sequence[Sequence[int]] = field(default=())

    @cached_property
    def log_probs(self) -> Float[Tensor, "branch item step vocab"]:
        """In at least float32."""
        wide = torch.promote_types(self.logits.dtype, torch.float32)
        return self.logits.to(wide).log_softmax(3)

    @property
    def target(self) -> Float[Tensor, "item step vocab"]:
        """log p+."""
        return self.log_probs[0]

    @cached_property
    def opposite(self) -> Float[Tensor, "item step vocab"]:
        """log p-, the logarithm of the mean of the other attributes' distributions."""
        return _log_mean(list(self.log_probs[1:]))


Metric = Callable[[Predictions], Tensor]
"""A function that gives one number for each text and step, [item step]."""


def llr(predictions: Predictions) -> Float[Tensor, "item step"]:
    """log p+(x) - log p-(x) of the text's tokens."""
    tokens = predictions.text[:, :, None]
    return (predictions.target.gather(2, tokens) - predictions.opposite.gather(2, tokens))[:, :, 0]


def js(predictions: Predictions) -> Float[Tensor, "item step"]:
    """Jensen-Shannon divergence of all branches, each with the same weight."""
    return _divergence(list(predictions.log_probs))


def kl(predictions: Predictions) -> Float[Tensor, "item step"]:
    """KL(p+ || p-)."""
    return (predictions.target.exp() * (predictions.target - predictions.opposite)).sum(2)


def lex(predictions: Predictions) -> Float[Tensor, "item step"]:
    """The prefix's preference for its attribute's words, in nats."""
    if len(predictions.words) < 2:
        raise CircuitError(
            "metric lex needs the words of each attribute, as token ids: words={name: ids} beside"
            " examples; the other metrics do not"
        )
    return favour(predictions.target, predictions.words) - favour(
        predictions.opposite, predictions.words
    )


def favour(
    log_probs: Float[Tensor, "item step vocab"], words: Sequence[Sequence[int]]
) -> Float[Tensor, "item step"]:
    """lse over the first attribute's words minus lse over the others'."""
    plus, minus = list(words[0]), [token for ids in words[1:] for token in ids]
    return log_probs[:, :, plus].logsumexp(2) - log_probs[:, :, minus].logsumexp(2)


def from_raw(predictions: Predictions) -> Float[Tensor, "item step"]:
    """Distance of the branches from the model without a prefix."""
    if predictions.raw is None:
        raise CircuitError(
            "metric from_raw needs the raw branch; the examples have no layout for it"
        )
    raw = predictions.raw.to(predictions.target.dtype).log_softmax(2)
    return (_divergence([predictions.target, raw]) + _divergence([predictions.opposite, raw])) / 2


METRICS: Mapping[str, Metric] = {
    "llr": llr,
    "js": js,
    "kl": kl,
    "lex": lex,
    "from_raw": from_raw,
}
"""Metrics of control by name: llr, js, kl, lex and from_raw, in nats a step."""


def metrics_by_name(
    requested: str | Metric | Sequence[str] | Mapping[str, Metric],
) -> dict[str, Metric]:
    """Metrics by name, from one or more names of `METRICS`, a function, or functions by name.

    Raises:
        CircuitError: Unknown name, or none.
    """
    if isinstance(requested, str):
        requested = [requested]
    elif callable(requested):
        requested = {getattr(requested, "__name__", "metric"): requested}
    if isinstance(requested, Mapping) and requested:
        return dict(requested)
    unknown = [name for name in requested if name not in METRICS]
    if unknown or not requested:
        wrong = unknown[0] if unknown else "none"
        raise CircuitError(
            f"{unknown_choice('metric', wrong, METRICS)}, or a mapping of names to functions"
        )
    return {name: METRICS[name] for name in requested}


def one_metric(requested: str | Metric | Mapping[str, Metric]) -> tuple[str, Metric]:
    """The requested metric and its name.

    Raises:
        CircuitError: Unknown name, or more or fewer than one metric.
    """
    chosen = metrics_by_name(requested)
    if len(chosen) != 1:
        raise CircuitError(
            f"one metric at a time; found {pluralize(len(chosen), 'metric')}: {', '.join(chosen)}"
        )
    return next(iter(chosen.items()))


def _log_mean(log_probs: Sequence[Tensor]) -> Tensor:
    """log of the mean of distributions, exact where they are equal."""
    if len(log_probs) == 1:
        return log_probs[0]
    top = log_probs[0]
    for branch in log_probs[1:]:
        top = torch.maximum(top, branch)
    total = torch.zeros_like(top)
    for branch in log_probs:
        total += (branch - top).exp()
    return top + (total / len(log_probs)).log()


def _divergence(
    log_probs: Sequence[Float[Tensor, "item step vocab"]],
) -> Float[Tensor, "item step"]:
    """Jensen-Shannon divergence of distributions with equal weights, item by item: the numbers of
    one fit in a processor's cache."""

    def of_item(branches: Sequence[Tensor]) -> Tensor:
        mean = _log_mean(branches)
        return torch.stack([(part.exp() * (part - mean)).sum(1) for part in branches]).mean(0)

    return torch.stack([of_item(item) for item in zip(*log_probs, strict=True)])
