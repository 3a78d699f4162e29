"""Fading: the share of lost control that returns when the attention on the prefix does.

The same tokens are scored right after the prompt (near) and after f more tokens of text (far), so
that only the distance differs. (Near, too, one token stands in between, so that the prompt's last
token, which other heads may use, is never a scored query.) D is the control at the scored tokens:

    fade     = D_near - D_far
    restored = (D_far with a bias - D_far) / fade            does the mass suffice?
    removed  = (D_near - D_near with the far mass) / fade    is the mass needed?

The mass A is a head's attention on the prefix. Four biases act at the scored tokens, on all keys
of the prefix:

    dilution   log[(e_B + m (l_far - n - 1)) / (e_B + m (l_near - n - 1))]    undoes "more keys" alone
    keys       log[(l_far - 1) / (l_near - 1)]           the same if all scores were equal (the paper)
    hold       logit(A_near) - logit(A_far)              gives every head its mass near
    lapa2      alpha log(l / n)                          for comparison

e_B is BOS's weight, exp(score), and m the mean weight of keys that are neither BOS's nor the
prefix's, both at the far query. BOS counts by itself because it is a sink: its weight does not grow
with the text.

`restored` and `removed` differ where heads interact. As a check, holding the mass of heads without
control must restore about nothing.

    found = measure_fading(model, "sentiment", heads={"best": table.best(8)})
    found.frame()                # with 95 % intervals over prompts, and a verdict
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from lapa2_interp._util.settings import helped_by
from lapa2_interp._util.values import Count, Natural, numbers_checked
from lapa2_interp.circuits.contrast_set import ContrastLike, ContrastSet, as_contrast_set
from lapa2_interp.circuits.edits import Heads, items_per_batch
from lapa2_interp.circuits.examples import ContrastExample, batches
from lapa2_interp.circuits.far_passes import (
    CachedForward,
    Rule,
    held,
    lapa2_rule,
    undo_equal_keys,
    undo_keys,
    with_filler,
)
from lapa2_interp.circuits.guard import check_model_class
from lapa2_interp.circuits.metrics import Metric, Predictions, one_metric
from lapa2_interp.circuits.result_store import RECHECKED, ResultStore
from lapa2_interp.circuits.settings import FILLER, FadingSettings
from lapa2_interp.circuits.statistics import share_interval
from lapa2_interp.circuits.units import all_heads, head_mask, make_units
from lapa2_interp.errors import CircuitError
from lapa2_interp.models.card import prepacked_model
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.plots import COLOURS, Drawing, legend_above, new_figure, plain_axes
from lapa2_interp.progress import given_or_new_bar
from lapa2_interp.stats import FEW, bounds
from lapa2_interp.tasks.task import Task

Bias = Literal["dilution", "keys", "hold", "lapa2", "removed"]
BIASES: tuple[Bias, ...] = ("dilution", "keys", "hold", "lapa2", "removed")
CHANGES: dict[Bias, str] = {
    "dilution": "number of keys undone, BOS fixed (ours)",
    "keys": "number of keys undone, equal scores (paper)",
    "hold": "attention held at its near value",
    "lapa2": "LaPA²",
    "removed": "near the prompt, attention lowered to its far value",
}
"""What each bias does, in words, as figures say it."""
ALL = "all heads"
NEAR = 1
"""Tokens between prompt and scored tokens near."""
MARGIN = 0.2
"""A share of the fade below this counts as none, and above 1 minus this as all."""
VERDICTS = {
    "mass mediates": "holding the mass restores four fifths of the fade or more",
    "mass does not": "holding the mass restores a fifth of the fade at most",
    "in part": "holding the mass restores more than a fifth, and less than four fifths",
    "no fade": "there is no fade to explain: less than a fifth of the control near, or none",
    "inconclusive": "the intervals do not decide, or there are fewer than 8 prompts",
}
"""Verdicts on a share of the fade, and their meanings."""


@dataclass(frozen=True)
class Fading:
    """Faded control, and control under each bias.

    Attributes:
        contrast_set: The texts; each is filler and scored tokens.
        tokens: Number of scored tokens.
        metric: The metric of control.
        alpha: Alpha of the bias lapa2.
        sets: By name, the heads whose mass is changed.
        near: Control near by example, its mean over the scored tokens.
        far: By filler length, control after that number of tokens.
        changed: By filler length, set of heads and bias, control under the bias. For "removed" it
            is the control near, with the far mass.
    """

    contrast_set: ContrastSet
    tokens: int
    metric: str
    alpha: float
    sets: Mapping[str, Heads]
    near: Float[np.ndarray, " example"]
    far: Mapping[int, Float[np.ndarray, " example"]]
    changed: Mapping[tuple[int, str, Bias], Float[np.ndarray, " example"]]

    def fades(self) -> pd.DataFrame:
        """A row for every filler length: the control, and its loss.

        Columns: filler, control with its 95 % interval over prompts (low, high), fade with its
        interval, and prompts. The first row is near.
        """
        rows = []
        for filler, values in {NEAR: self.near, **self.far}.items():
            row: dict[str, float] = {"filler": filler}
            for name, mark, numbers in (
                ("control", "", values),
                ("fade", "fade_", self.near - values),
            ):
                by_prompt = self.contrast_set.by_prompt(numbers)
                low, high = bounds(by_prompt)
                row |= {
                    name: by_prompt.mean(),
                    f"{mark}low": float(low),
                    f"{mark}high": float(high),
                }
            rows.append(row | {"prompts": self.contrast_set.n_prompts})
        return pd.DataFrame(rows)

    def by_prompt(self) -> pd.DataFrame:
        """The control behind all shares: a row for every prompt, filler length, set and bias.

        Columns: prompt (its number, from 0), filler, heads, bias ("" for none), control.
        """
        values = [(NEAR, "", "", self.near)]
        values += [(filler, "", "", control) for filler, control in self.far.items()]
        values += [(*key, control) for key, control in self.changed.items()]
        tables = []
        for filler, heads, bias, control in values:
            numbers = self.contrast_set.by_prompt(control)
            table = pd.DataFrame({"prompt": np.arange(len(numbers)), "filler": filler})
            tables.append(table.assign(heads=heads, bias=bias, control=numbers))
        return pd.concat(tables, ignore_index=True)

    def frame(self) -> pd.DataFrame:
        """A row for every filler length, set of heads and bias.

        Columns: filler, heads, n_heads, bias, share (restored, or removed) with its 95 % interval
        over prompts, a ratio of means; verdict (one of `VERDICTS`); prompts. Where the interval of
        the fade does not lie above 0, shares are NaN.
        """
        fades = {row["filler"]: row for row in self.fades().to_dict("records")}
        rows = []
        for (filler, name, bias), values in self.changed.items():
            fade = self.contrast_set.by_prompt(self.near - self.far[filler])
            gain = self.near - values if bias == "removed" else values - self.far[filler]
            share, low, high = share_interval(self.contrast_set.by_prompt(gain)[:, None], fade)
            row = {"filler": filler, "heads": name, "n_heads": len(self.sets[name]), "bias": bias}
            numbers = [float(values[0]) for values in (share, low, high)]
            if not fades[filler]["fade_low"] > 0:
                numbers = [np.nan] * 3
            row |= dict(zip(("share", "low", "high"), numbers, strict=True))
            no_fade = fades[filler]["fade_high"] < MARGIN * fades[NEAR]["control"]
            row["verdict"] = _verdict(numbers[1], numbers[2], bool(no_fade), len(fade))
            rows.append(row | {"prompts": len(fade)})
        return pd.DataFrame(rows)

    @property
    def verdict(self) -> str:
        """The verdict on `hold` in all heads at the longest filler: does mass mediate the fade?"""
        table = self.frame()
        longest = table[(table["heads"] == ALL) & (table["bias"] == "hold")]
        return str(longest.sort_values("filler")["verdict"].iloc[-1])

    def interval(self) -> pd.DataFrame:
        """The share of every bias with its 95 % interval."""
        return self.frame()[["filler", "heads", "bias", "share", "low", "high"]]

    def plot(self) -> Drawing:
        """Control against the filler's length, with each bias in all heads; and the shares that
        sets of heads restore at the longest filler, or remove. Bands and bars are 95 % intervals
        over prompts."""
        names = list(self.sets)
        figure = new_figure(8.4, 2.9 + 0.2 * max(0, len(names) - 3))
        left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.2))
        # Left: control by filler length.
        lengths = [NEAR, *self.far]
        curves = {"no change": (COLOURS[0], [self.near, *self.far.values()])}
        for colour, bias in zip(COLOURS[1:], BIASES, strict=False):
            if bias != "removed":
                values = [self.changed[filler, ALL, bias] for filler in self.far]
                curves[CHANGES[bias]] = (colour, [self.near, *values])
        for name, (colour, values) in curves.items():
            by_prompt = [self.contrast_set.by_prompt(control) for control in values]
            left.plot(lengths, [control.mean() for control in by_prompt], "o-", ms=3, lw=1.2,
                      color=colour, label=name)  # fmt: skip
            low, high = np.transpose([bounds(control) for control in by_prompt])
            left.fill_between(lengths, low, high, color=colour, alpha=0.12, lw=0)
        left.plot([], [], "o-", ms=3, lw=1.2, color=COLOURS[len(BIASES)], label=CHANGES["removed"])
        plain_axes(left, "tokens in between", f"{self.metric}, nats a step")
        # Right: shares at the longest filler, a row for every set and a point for every bias.
        table = self.frame()
        table = table[table["filler"] == max(self.far)]
        for row in table.to_dict("records"):
            number = BIASES.index(row["bias"])
            colour = COLOURS[1 + number]
            height = names.index(row["heads"]) + 0.8 * ((number + 0.5) / len(BIASES) - 0.5)
            right.plot([row["low"], row["high"]], [height] * 2, color=colour, lw=1.4)
            right.plot(row["share"], height, "o", color=colour, ms=3)
        right.set_yticks(range(len(names)), names)
        right.set_ylim(len(names) - 0.4, -0.6)
        for share in (0, 1):
            right.axvline(share, color="0.7", lw=0.6)
        plain_axes(right, f"share of the fade at {max(self.far)} tokens (0: none, 1: all)", "")
        legend_above(figure, 3, left)
        return figure


def _verdict(low: float, high: float, no_fade: bool, prompts: int) -> str:
    """One of `VERDICTS`, by the interval of a share."""
    if prompts < FEW:
        return "inconclusive"
    if no_fade:
        return "no fade"
    if np.isnan(low):
        return "inconclusive"
    if low >= 1 - MARGIN:
        return "mass mediates"
    if high <= MARGIN:
        return "mass does not"
    return "in part" if low > MARGIN and high < 1 - MARGIN else "inconclusive"


@helped_by(FadingSettings)
@numbers_checked
@accepts_model_name
def measure_fading(
    model: Model,
    contrast: ContrastLike,
    *,
    filler: Sequence[int] = FILLER,
    tokens: Count = 32,
    heads: Mapping[str, Heads | str] | None = None,
    random: Natural = 0,
    alpha: float = 0.5,
    metric: str | Metric | Mapping[str, Metric] | None = None,
    seed: int = 1,
    file: str | Path | None = None,
    batch_size: Count | None = None,
    progress: tqdm | None = None,
) -> Fading:
    """Measure the share of faded control that returns when the attention on the prefix does.

    Args:
        model: A TransformerBridge or a `TransformersModel`.
        contrast: A `ContrastSet`, or a task by name or value, or one or more examples. A text must
            have `max(filler) + tokens` tokens: the last ones are scored, after the filler.
        tokens: Number of scored tokens.
        heads: Sets of heads by name, beside all heads: pairs, or a text such as "3.1,4.0-8".
        seed: Seed of the random heads, and of the texts of a task.
        batch_size: Texts in one forward pass; changes nothing but memory and time.
        progress: A bar that counts steps.

    Raises:
        CircuitError: No filler, texts that are too short, texts longer than a sliding window of the
            model, heads the model does not have, a file for other inputs, or as `control_score`.
    """
    check_model_class(model)
    lengths, contrast_set = texts_for_fading(model, contrast, filler, tokens, seed)
    sets = _head_sets(model, contrast_set, heads or {}, random, seed)
    if metric is None:
        metric = "lex" if contrast_set.words else "js"
    name, measure = one_metric(metric)
    refuse_raw([name])
    # The store, with a line for each batch.
    store = ResultStore(
        file,
        model,
        contrast_set,
        fading=lengths,
        tokens=tokens,
        sets=sets,
        alpha=alpha,
        metric=name,
        biases=BIASES,
        seed=seed,
    )
    n = len(contrast_set.examples)
    near, far = np.zeros(n), {length: np.zeros(n) for length in lengths}
    changed: dict[tuple[int, str, Bias], np.ndarray] = {
        (length, heads_name, bias): np.zeros(n)
        for length in lengths
        for heads_name in sets
        for bias in BIASES
    }
    # Batches, and texts of a stored one to compare.
    small = [with_filler(example, NEAR, tokens) for example in contrast_set.examples]
    groups = {
        ",".join(map(str, group)): group
        for group in batches(contrast_set.examples, items_per_batch(model, small, batch_size))
    }
    steps = tokens * (1 + len(lengths) * (1 + len(sets) * len(BIASES)))
    total = steps * sum(len(group) for key, group in groups.items() if key not in store)
    stored = next((key for key in groups if key in store), None)
    again = [] if stored is None else [contrast_set.examples[i] for i in groups[stored][:RECHECKED]]
    total += tokens * (2 + len(BIASES)) * len(again)
    with (
        closing(store),
        torch.no_grad(),
        prepacked_model(model),
        given_or_new_bar(progress, total, "fading", "step") as bar,
    ):
        if stored is not None:
            every = {ALL: sets[ALL]}
            now = _measure_batch(
                model, again, contrast_set, lengths[-1:], tokens, every, alpha, measure, bar
            )
            # The control is near; all else may differ with it.
            near_stored = store[stored]["near"]
            store.check_control(dict.fromkeys(now, near_stored), dict.fromkeys(now, now["near"]))
            store.check(store[stored], now)
        for key, group in groups.items():
            if key not in store:
                examples = [contrast_set.examples[i] for i in group]
                store.add(
                    key,
                    _measure_batch(
                        model, examples, contrast_set, lengths, tokens, sets, alpha, measure, bar
                    ),
                )
            controls = store[key]
            near[group] = controls["near"]
            for length in lengths:
                far[length][group] = controls[f"{length}"]
                for heads_name in sets:
                    for bias in BIASES:
                        changed[length, heads_name, bias][group] = controls[
                            f"{length}, {bias}, {heads_name}"
                        ]
    return Fading(contrast_set, tokens, name, alpha, sets, near, far, changed)


def refuse_raw(metrics: Collection[str]) -> None:
    """Refuse a metric whose reference fades, too.

    Raises:
        CircuitError: It is among these.
    """
    if "from_raw" in metrics:
        raise CircuitError(
            "metric from_raw compares with the raw model, which fades too; use js, lex, llr or kl"
        )


def texts_for_fading(
    model: Model, contrast: ContrastLike, filler: Sequence[int], tokens: int, seed: int
) -> tuple[list[int], ContrastSet]:
    """The lengths of fillers in order, and texts that are long enough for them.

    Raises:
        CircuitError: As `measure_fading`.
    """
    lengths = sorted(set(filler) - {NEAR})
    if not lengths or lengths[0] < NEAR:
        raise CircuitError(
            f"fading needs filler lengths above {NEAR}; found filler {tuple(filler)}"
        )
    n_text = lengths[-1] + tokens
    if isinstance(contrast, str | Task):
        contrast = ContrastSet.of(model, contrast, tokens=n_text, seed=seed)
    contrast_set = as_contrast_set(model, contrast)
    short = next((example for example in contrast_set.examples if example.n_steps < n_text), None)
    if short is not None:
        raise CircuitError(
            f"the text after {short.prompt!r} has {short.n_steps} tokens; filler and scored tokens"
            f" need {lengths[-1]} + {tokens}: give longer texts, or shorter fillers"
        )
    longest = max(len(example.layouts[0]) for example in contrast_set.examples) + n_text - 1
    if (window := facts_of(model).window) is not None and longest > window:
        raise CircuitError(
            f"some layers of this model see {window} keys, and prompt, filler and scored tokens"
            f" have {longest}: keys are hidden there, not only outweighed; ask for shorter fillers"
        )
    return lengths, contrast_set


def _measure_batch(
    model: Model,
    examples: Sequence[ContrastExample],
    contrast_set: ContrastSet,
    lengths: Sequence[int],
    tokens: int,
    sets: Mapping[str, Heads],
    alpha: float,
    measure: Metric,
    bar: tqdm,
) -> dict[str, Float[np.ndarray, " example"]]:
    """Control of a batch by filler and bias: "near", "64" (far), "64, hold, all heads"."""
    text = torch.tensor([example.text[-tokens:] for example in examples], device=model.cfg.device)

    def value(logits: Float[Tensor, "branch example step vocab"]) -> Float[np.ndarray, " example"]:
        control = measure(Predictions(logits, text, None, contrast_set.words))
        bar.update(text.numel())
        return control.double().mean(1).cpu().numpy()

    close = CachedForward(
        model, [with_filler(example, NEAR, tokens) for example in examples], tokens
    )
    controls = {"near": value(close.logits())}
    mass_near = close.log_odds
    for length in lengths:
        away = CachedForward(
            model, [with_filler(example, length, tokens) for example in examples], tokens
        )
        controls[f"{length}"] = value(away.logits())
        biases: dict[Bias, tuple[Rule, CachedForward]] = {
            "dilution": (undo_keys(length - NEAR), away),
            "keys": (undo_equal_keys(length - NEAR), away),
            "hold": (held(mass_near), away),
            "lapa2": (lapa2_rule(alpha), away),
            "removed": (held(away.log_odds), close),
        }
        for heads_name, pairs in sets.items():
            chosen = head_mask(model, pairs)
            for bias, (rule, forward) in biases.items():
                controls[f"{length}, {bias}, {heads_name}"] = value(forward.logits(rule, chosen))
    return controls


def _head_sets(
    model: Model,
    contrast_set: ContrastSet,
    heads: Mapping[str, Heads | str],
    random: int,
    seed: int,
) -> dict[str, Heads]:
    """Sets of heads by name: all heads, the given sets, and random sets."""
    every = all_heads(model)
    if random and not heads:
        raise CircuitError(
            "random sets are as large as the first of `heads`; give heads, too (a selection)"
        )
    drawn = [f"random {i + 1}" for i in range(random)]
    if taken := [name for name in (ALL, *drawn) if name in heads]:
        raise CircuitError(f"{taken[0]!r} is there anyway; give the set another name")
    sets = {ALL: every} | {unit.name: unit.heads for unit in make_units(model, contrast_set, heads)}
    rng = np.random.default_rng(seed)
    for name in drawn:
        size = len(sets[next(iter(heads))])
        picked = sorted(rng.choice(len(every), size, replace=False))
        sets[name] = tuple(every[at] for at in picked)
    return sets
