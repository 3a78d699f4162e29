"""A full account of the fade: which cause takes how much of the control, whatever the order.

The same tokens are scored near the prompt and after f more tokens, the filler, as in `fading`. Four
factors differ between near and far, and each is undone alone or on top of others at the scored
queries, in all heads:

    distance    how far BOS, prefix and prompt are from these queries: undone, their keys have the
                rotary angles of near (they are read again, f - 1 positions later)
    keys        the weight that the filler takes from the prefix: undone,
                A = P / (P + R), with it A = P / (P + R + F)
    content     what the filler says, and the weight that it takes from BOS and prompt: undone, the
                filler gets no weight, and the rest's 1 - A goes to the other keys in proportion
    relay       what the filler read of the prefix: undone, it was read with the prefix hidden (it
                still reads the prompt, which has read the prefix)

P, R and F are the summed weights, exp(score), of the keys of the prefix, of all others, and of the
filler. With none of the factors the scored queries see exactly what they see near; with all of them
what they see far. So v(near) - v(far) is the sum of the four Shapley shares:

    share of i = sum over S without i of
                 |S|! (3 - |S|)! / 4!  (v(S) - v(S + i)) / (v(near) - v(far))

v is the control by a metric, or the attention on the prefix (mean over layers, heads and steps).
Where layers differ in type, there is also the mean over those of each type, such as "attention
(sliding 512)".
Relay counts nothing where neither the filler's weight nor its words are there.

Beside the shares, changes of the far reading by itself:

    hold        A of every head as near; the weights within the prefix stay
    weights     the weight of every token of the prefix as near
    number      more keys undone, BOS fixed (`fading`: dilution)
    equal       more keys undone by ln(l far / l near), the paper's for equal scores
    exchanged   the filler's keys and values are those of the next branch

and the control near and far where prompt and filler are read with the prefix out of sight (direct).

    account = account_for_fading(model, "sentiment", filler=(64, 256))
    account.frame()              # shares with 95 % intervals over prompts
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from lapa2_interp._util.values import Count, numbers_checked
from lapa2_interp.attention.cached_heads import SlotLayer
from lapa2_interp.bias.layer_types import distinct_types
from lapa2_interp.circuits.contrast_set import ContrastLike, ContrastSet
from lapa2_interp.circuits.edits import items_per_batch
from lapa2_interp.circuits.examples import ContrastExample, batches
from lapa2_interp.circuits.fading import NEAR, refuse_raw, texts_for_fading
from lapa2_interp.circuits.far_passes import (
    CachedForward,
    Rule,
    held,
    undo_equal_keys,
    undo_keys,
    with_filler,
)
from lapa2_interp.circuits.guard import check_model_class
from lapa2_interp.circuits.metrics import Metric, Predictions, metrics_by_name
from lapa2_interp.circuits.result_store import RECHECKED, ResultStore
from lapa2_interp.circuits.settings import FILLER
from lapa2_interp.circuits.statistics import share_interval
from lapa2_interp.errors import CircuitError
from lapa2_interp.models.card import prepacked_model
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.models.positions import LOG_PROB_TOLERANCE
from lapa2_interp.plots import COLOURS, Drawing, legend_above, new_figure, plain_axes
from lapa2_interp.progress import given_or_new_bar
from lapa2_interp.stats import bounds

FACTORS = ("distance", "keys", "content", "relay")
WORDS = {
    "distance": "distance to prefix and prompt",
    "keys": "weight taken from the prefix",
    "content": "what the filler says and displaces",
    "relay": "what the filler read of the prefix",
}
"""The factors in words, as figures say them."""
EXTRAS = ("hold", "weights", "number", "equal", "exchanged", "direct near", "direct far")
ATTENTION = "attention"
"""The measure that is the attention on the prefix. Measures of one type of layer begin with it."""


KeysAndValues = list[tuple[Tensor, Tensor]]
"""Those of some slots, by layer."""


def state(*factors: str) -> str:
    """The name of a reading that has these factors of far."""
    return "+".join(name for name in FACTORS if name in factors) or "near"


FAR = state(*FACTORS)
STATES = tuple(state(*chosen) for n in range(5) for chosen in combinations(FACTORS, n))


@dataclass(frozen=True)
class FadeAccount:
    """Control and attention in every state between near and far.

    Attributes:
        contrast_set: The texts; each is filler and scored tokens.
        tokens: Number of scored tokens.
        values: By filler length, measure and state (or one of `EXTRAS`), a value for each example,
            its mean over the scored tokens.
    """

    contrast_set: ContrastSet
    tokens: int
    values: Mapping[tuple[int, str, str], Float[np.ndarray, " example"]]

    @property
    def groups(self) -> list[tuple[int, str]]:
        """Filler lengths and measures."""
        return list(dict.fromkeys((filler, measure) for filler, measure, _ in self.values))

    def by_prompt(self) -> pd.DataFrame:
        """Columns: prompt (its number, from 0), filler, measure, state, value."""
        tables = []
        for (filler, measure, name), values in self.values.items():
            numbers = self.contrast_set.by_prompt(values)
            table = pd.DataFrame({"prompt": np.arange(len(numbers)), "filler": filler})
            tables.append(table.assign(measure=measure, state=name, value=numbers))
        return pd.concat(tables, ignore_index=True)

    def frame(self) -> pd.DataFrame:
        """A row for every filler length, measure and factor or change.

        Columns: filler, measure, name (a factor or one of `EXTRAS`), share of the fade with its
        95 % interval over prompts (low, high), first and last (the share of a factor that is added
        to near, or taken from far), least and most over all orders, and prompts. The share of an
        extra is what it brings back; of "direct", the fade of that reading over the fade.
        """
        rows = []
        for filler, measure in self.groups:
            by_state = {
                name: self.contrast_set.by_prompt(values)
                for (length, metric, name), values in self.values.items()
                if (length, metric) == (filler, measure)
            }
            for row in shares(by_state):
                rows.append({"filler": filler, "measure": measure} | row)
        return pd.DataFrame(rows)

    def fades(self) -> pd.DataFrame:
        """Values near and far, and the fade, by filler length and measure, with 95 % intervals."""
        rows = []
        for filler, measure in self.groups:
            near, far = (
                self.contrast_set.by_prompt(self.values[filler, measure, name])
                for name in (STATES[0], FAR)
            )
            row: dict[str, object] = {"filler": filler, "measure": measure}
            for name, numbers in (("near", near), ("far", far), ("fade", near - far)):
                low, high = bounds(numbers)
                row |= {name: numbers.mean(), f"{name}_low": low, f"{name}_high": high}
            rows.append(row | {"prompts": len(near)})
        return pd.DataFrame(rows)

    def plot(self) -> Drawing:
        """A panel for each measure: the shares of the factors by filler length, with 95 % intervals
        over prompts; thin lines are the range over all orders."""
        table = self.frame()
        measures = list(dict.fromkeys(table["measure"]))
        lengths = sorted(table["filler"].unique())
        figure = new_figure(2.9 * len(measures) + 1.2, 3.0)
        panels = np.atleast_1d(figure.subplots(1, len(measures), sharey=True))
        for axes, measure in zip(panels, measures, strict=True):
            for number, factor in enumerate(FACTORS):
                rows = table[(table["measure"] == measure) & (table["name"] == factor)]
                rows = rows.sort_values("filler")
                at = np.arange(len(lengths)) + 0.2 * (number - 1.5)
                colour = COLOURS[number + 1]  # the first is black, as the intervals are
                axes.bar(at, rows["share"], 0.18, color=colour, label=WORDS[factor])
                axes.vlines(at, rows["low"], rows["high"], color="0.15", lw=1.4)
                axes.vlines(at, rows["least"], rows["most"], color="0.15", lw=0.5)
            axes.axhline(0, color="0.4", lw=0.6)
            axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
            plain_axes(axes, "tokens in between", "share of the fade" if axes is panels[0] else "")
            axes.set_title(measure.replace(ATTENTION, "attention on the prefix"), size=9)
        legend_above(figure, 2, panels[0])
        return figure


def shares(by_state: Mapping[str, Float[np.ndarray, " prompt"]]) -> list[dict[str, object]]:
    """Shapley shares of the factors, and shares of the extras, from values of every state."""
    fade = by_state["near"] - by_state[FAR]
    rows = []
    for factor in FACTORS:
        rest = [name for name in FACTORS if name != factor]
        marginal, weights = [], []
        for n in range(4):
            for chosen in combinations(rest, n):
                marginal.append(by_state[state(*chosen)] - by_state[state(*chosen, factor)])
                weights.append(math.factorial(n) * math.factorial(3 - n) / math.factorial(4))
        parts = np.stack([np.average(marginal, axis=0, weights=weights), *marginal], axis=1)
        share, low, high = share_interval(parts, fade)
        row = {"name": factor, "share": share[0], "low": low[0], "high": high[0]}
        row |= {"first": share[1], "last": share[-1]}
        rows.append(row | {"least": share[1:].min(), "most": share[1:].max(), "prompts": len(fade)})
    gains = {
        name: by_state[name] - by_state[FAR]
        for name in EXTRAS
        if name in by_state and "direct" not in name
    }
    if "direct near" in by_state:
        gains["direct"] = by_state["direct near"] - by_state["direct far"]
    for name, gain in gains.items():
        share, low, high = (numbers[0] for numbers in share_interval(gain[:, None], fade))
        row = {"name": name, "share": share, "low": low, "high": high}
        rows.append(row | {"prompts": len(fade)})
    return rows


@numbers_checked
@accepts_model_name
def account_for_fading(
    model: Model,
    contrast: ContrastLike,
    *,
    filler: Sequence[int] = FILLER,
    tokens: Count = 32,
    metric: str | Metric | Sequence[str] | Mapping[str, Metric] | None = None,
    seed: int = 1,
    file: str | Path | None = None,
    batch_size: Count | None = None,
    progress: tqdm | None = None,
) -> FadeAccount:
    """Measure how much of the fade each factor takes.

    Args:
        model: A TransformerBridge or a `TransformersModel` with rotary positions.
        contrast: As in `measure_fading`.
        filler: Numbers of tokens between prompt and scored tokens, two or more.
        tokens: Number of scored tokens.
        metric: Metrics of control; by default js, and lex where there are words.
        seed: Seed of the texts of a task.
        file: A file for finished texts, a line for each batch, from which the same call continues.
            Two stored texts are computed again at the longest filler.
        batch_size: Texts in one forward pass; changes nothing but memory and time.
        progress: A bar that counts steps.

    Raises:
        CircuitError: Positions that no shift of the keys moves, layers without own keys, or as
            `measure_fading`.
    """
    check_model_class(model)
    lengths, contrast_set = texts_for_fading(model, contrast, filler, tokens, seed)
    if metric is None:
        metric = ["lex", "js"] if contrast_set.words else ["js"]
    metrics = metrics_by_name(metric)
    refuse_raw(metrics)
    measures = [*metrics, *attention_measures(model)]
    store = ResultStore(
        file, model, contrast_set, account=lengths, tokens=tokens, metric=list(metrics), seed=seed
    )
    largest = [with_filler(example, NEAR, tokens) for example in contrast_set.examples]
    groups = {
        ",".join(map(str, group)): group
        for group in batches(contrast_set.examples, items_per_batch(model, largest, batch_size))
    }
    todo = sum(len(group) for key, group in groups.items() if key not in store)

    def values_of(examples: Sequence[ContrastExample], length: int) -> dict[str, np.ndarray]:
        passes = _FarStates(model, examples, contrast_set, length, tokens, metrics)
        return {
            f"{length}, {measure}, {name}": of_examples
            for name, numbers in passes.measure().items()
            for measure, of_examples in zip(measures, numbers, strict=True)
        }

    stored = next((key for key in groups if key in store), None)
    values: dict[tuple[int, str, str], np.ndarray] = {}
    with (
        closing(store),
        torch.no_grad(),
        prepacked_model(model),
        given_or_new_bar(progress, todo * len(lengths), "account", "text") as bar,
    ):
        if stored is not None:
            again = [contrast_set.examples[i] for i in groups[stored][:RECHECKED]]
            now = values_of(again, lengths[-1])
            near = {name: f"{name.rpartition(', ')[0]}, near" for name in now}
            store.check_control(
                {name: store[stored][near[name]] for name in now},
                {name: now[near[name]] for name in now},
            )
            store.check(store[stored], now)
        for key, group in groups.items():
            if key not in store:
                examples = [contrast_set.examples[i] for i in group]
                measured: dict[str, np.ndarray] = {}
                for length in lengths:
                    measured |= values_of(examples, length)
                    bar.update(len(group))
                store.add(key, measured)
            for label, of_examples in store[key].items():
                length_text, measure, name = label.split(", ")
                at = int(length_text), measure, name
                values.setdefault(at, np.zeros(len(contrast_set.examples)))[group] = of_examples
    return FadeAccount(contrast_set, tokens, values)


def attention_measures(model: Model) -> dict[str, list[int]]:
    """The layers over which attention is averaged, by measure: all, and where layers differ in
    type, those of each type."""
    types = facts_of(model).layer_types
    measures = {ATTENTION: list(range(model.cfg.n_layers))}
    for kind in distinct_types(types):
        layers = [layer for layer, of_layer in enumerate(types) if of_layer == kind]
        if len(layers) < len(types):
            measures[f"{ATTENTION} ({kind})"] = layers
    return measures


class _FarStates:
    """Passes over the scored tokens of a batch in every state."""

    def __init__(
        self,
        model: Model,
        examples: Sequence[ContrastExample],
        contrast_set: ContrastSet,
        length: int,
        tokens: int,
        metrics: Mapping[str, Metric],
    ) -> None:
        self.model, self.words, self.metrics = model, contrast_set.words, metrics
        self.more = length - NEAR
        self.text = torch.tensor(
            [example.text[-tokens:] for example in examples], device=model.cfg.device
        )
        far = [with_filler(example, length, tokens) for example in examples]
        near = [with_filler(example, NEAR, tokens) for example in examples]
        self.far = CachedForward(model, far, tokens)
        self.front = slice(0, self.far.filler.start)
        shifted = CachedForward(model, near, tokens, shift=self.more)
        self.close = CachedForward(model, near, tokens)
        _check_relative(model, self.close, shifted)
        cut = CachedForward(model, far, tokens, hidden="filler")
        direct = CachedForward(model, far, tokens, hidden="prompt")
        moved = CachedForward(model, near, tokens, shift=self.more, hidden="prompt")
        # Keys and values before the filler, by distance, and of the filler, by what it knows.
        self.fronts: dict[str, KeysAndValues] = {
            "far": _slots(self.far, self.front),
            "near": _slots(shifted, self.front),
            "direct far": _slots(direct, self.front),
            "direct near": _slots(moved, self.front),
        }
        natural = _slots(self.far, self.far.filler)
        self.fillers: dict[str, KeysAndValues] = {
            "relay": natural,
            "cut": _slots(cut, self.far.filler),
            "direct": _slots(direct, self.far.filler),
            "exchanged": [
                (keys.roll(len(examples), 0), values.roll(len(examples), 0))
                for keys, values in natural
            ],
        }

    def measure(self) -> dict[str, list[Float[np.ndarray, " example"]]]:
        """By state or extra, the values of all measures."""
        measured: dict[str, list[np.ndarray]] = {}
        for name in STATES:
            factors = name.split("+")
            if "relay" in factors and not {"keys", "content"} & set(factors):
                measured[name] = measured[state(*(set(factors) - {"relay"}))]
                continue
            self._write(
                "far" if "distance" in factors else "near",
                "relay" if "relay" in factors else "cut",
            )
            measured[name] = self._values(self._state("keys" in factors, "content" in factors))
        for extra, front, filler, far in (
            ("exchanged", "far", "exchanged", True),
            ("direct near", "direct near", "direct", False),
            ("direct far", "direct far", "direct", True),
        ):
            self._write(front, filler)
            measured[extra] = self._values(self._state(far, far))
        # Changes of the far reading.
        self._write("far", "relay")
        near: dict[int, Tensor] = {}
        odds: dict[int, Tensor] = {}

        def note(layer: int, scores: Tensor) -> Tensor:
            wide, prefix, rest, _ = self._parts(self.close, scores)
            near[layer] = wide[..., self._prefix] - rest[..., None]
            odds[layer] = prefix - rest
            return scores

        self.close.edited_logits(note)
        rules = {
            "hold": held(odds),
            "number": undo_keys(self.more),
            "equal": undo_equal_keys(self.more),
        }
        for name, rule in rules.items():

            def biased(layer: int, scores: Tensor, rule: Rule = rule) -> Tensor:
                wide, *_ = self._parts(self.far, scores)
                wide[..., self._prefix] += rule(layer, self.far.sum_scores(scores))[..., None]
                return wide

            measured[name] = self._values(biased)

        def as_near(layer: int, scores: Tensor) -> Tensor:
            wide, _, rest, _ = self._parts(self.far, scores)
            wide[..., self._prefix] = near[layer] + rest[..., None]
            return wide

        measured["weights"] = self._values(as_near)
        return measured

    @property
    def _prefix(self) -> slice:
        return slice(self.far.prefix.start, self.far.prefix.stop)

    def _state(self, keys: bool, content: bool) -> Callable[[int, Tensor], Tensor]:
        """The change of scores in a state."""

        def change(_layer: int, scores: Tensor) -> Tensor:
            wide, _, rest, others = self._parts(self.far, scores)
            if keys != content:
                wide[..., self._prefix] += ((rest - others) * (1 if content else -1))[..., None]
            if not content:
                wide[..., self.far.filler] = -math.inf
            return wide

        return change

    def _parts(
        self, forward: CachedForward, scores: Float[Tensor, "row head query key"]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A copy of the scores, and the log of the weights P, R + F and R of each query."""
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32), copy=True)
        outside = torch.ones(wide.shape[3], dtype=torch.bool, device=wide.device)
        outside[self._prefix] = False
        rest = wide[..., outside].logsumexp(3)
        outside[forward.filler] = False
        return wide, wide[..., self._prefix].logsumexp(3), rest, wide[..., outside].logsumexp(3)

    def _values(
        self, change: Callable[[int, Tensor], Tensor]
    ) -> list[Float[np.ndarray, " example"]]:
        """Metrics and attention of the far rows under a change of their scores."""
        attention: list[Tensor] = []

        def watched(layer: int, scores: Tensor) -> Tensor:
            changed = change(layer, scores)
            share = changed.softmax(3)[..., self._prefix].sum(3).mean((1, 2))
            attention.append(share.unflatten(0, (-1, self.far.n)).mean(0))
            return changed

        predictions = Predictions(self.far.edited_logits(watched), self.text, None, self.words)
        values = [metric(predictions).double().mean(1) for metric in self.metrics.values()]
        by_layer = torch.stack(attention).double()  # layer example
        values += [by_layer[layers].mean(0) for layers in attention_measures(self.model).values()]
        return [numbers.cpu().numpy() for numbers in values]

    def _write(self, front: str, filler: str) -> None:
        """Put keys and values before the filler, and the filler's, into the far rows' cache."""
        for slots, parts in (
            (self.front, self.fronts[front]),
            (self.far.filler, self.fillers[filler]),
        ):
            for layer, (keys, values) in zip(_layers(self.far), parts, strict=True):
                layer.keys[:, :, slots], layer.values[:, :, slots] = keys, values


def _layers(forward: CachedForward) -> list:
    """The cache's layers.

    Raises:
        CircuitError: Some have no keys of their own.
    """
    layers = forward.cached_rows.cache.layers
    if foreign := [layer for layer in layers if not isinstance(layer, SlotLayer)]:
        raise CircuitError(
            f"an account exchanges keys and values of every layer, and this model has layers with"
            f" a {type(foreign[0]).__name__}; use measure_fading"
        )
    return layers


def _slots(forward: CachedForward, slots: slice) -> KeysAndValues:
    """Copies of keys and values in these slots, by layer."""
    return [
        (layer.keys[:, :, slots].clone(), layer.values[:, :, slots].clone())
        for layer in _layers(forward)
    ]


def _check_relative(model: Model, close: CachedForward, shifted: CachedForward) -> None:
    """Refuse a model whose predictions depend on where a text begins, or whose keys do not.

    Raises:
        CircuitError: It is such a model.
    """
    unshifted, moved = (
        forward.edited_logits(lambda _, scores: scores).log_softmax(-1)
        for forward in (close, shifted)
    )
    off = (unshifted - moved).abs().mean()
    dtype = str(facts_of(model).dtype).removeprefix("torch.")
    front = slice(0, close.filler.start)
    still = all(
        torch.equal(a[0], b[0])
        for a, b in zip(_slots(close, front), _slots(shifted, front), strict=True)
    )
    if still or off > LOG_PROB_TOLERANCE[dtype]:
        reason = "do not reach its keys" if still else "are counted from the start of a text"
        raise CircuitError(
            f"an account undoes the distance to the prefix by rotary positions, and those of"
            f" {type(model).__name__} {model.cfg.model_name} {reason}; use measure_fading"
        )
