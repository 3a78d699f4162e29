"""Why control fades: how much of the loss comes back when the attention on the prefix does.

The same tokens are scored right behind the prompt (near) and behind f tokens of text (far), so
that only the distance differs. (One token stands in between even near: the prompt's last token,
which other heads may use, is never a scored query.) With D the control at the scored tokens:

    fade     = D_near - D_far
    restored = (D_far with a bias - D_far) / fade       what the bias brings back (sufficiency)
    removed  = (D_near - D_near with the far mass) / fade    what its absence takes (necessity)

Three biases act at the scored tokens, on all keys of the prefix. With A a head's attention on it:

    dilution   log[(e_B + m (l_far - n - 1)) / (e_B + m (l_near - n - 1))]    undoes "more keys" alone
    hold       logit(A_near) - logit(A_far)              gives every head the mass it had near
    lapa2      alpha log(l / n)                          for comparison

e_B is BOS's weight, exp(score), and m the mean weight of the other keys that are not the prefix's,
both at the far query. BOS is apart because it is a sink: it does not grow with the text.

`restored` and `removed` differ where heads interact. A sham holds the mass of heads that carry no
control, and must restore about nothing.

    found = measure_fading(model, "sentiment", heads={"best": table.best(8)})
    found.frame()                # with 95 % intervals over prompts, and a verdict
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm

from lapa2_interp._util.errors import CircuitError
from lapa2_interp._util.plots import COLOURS, Drawing, new_figure, plain_axes
from lapa2_interp._util.progress import given_bar
from lapa2_interp.attention.cache import BridgeRows
from lapa2_interp.attention.hooked import edit_scores, refuse_sinks
from lapa2_interp.bias.augmentation import BIAS_CAP, Augmentation
from lapa2_interp.circuits.cases import ContrastExample, batches
from lapa2_interp.circuits.edits import Heads, front_of
from lapa2_interp.circuits.knockout import (
    AGAIN,
    ResultStore,
    check_same,
    rounding,
    units_everything,
    units_of,
)
from lapa2_interp.circuits.metrics import Metric, Predictions, one_metric
from lapa2_interp.circuits.question import ContrastLike, ContrastSet, rows_at_once
from lapa2_interp.circuits.statistics import share_interval
from lapa2_interp.generation.teacher_forcing import SCORES_AT_ONCE
from lapa2_interp.models.card import Model, is_bridge, prepacked_model, smallest_window
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.stats import FEW, bounds

Bias = Literal["dilution", "hold", "lapa2", "removed"]
BIASES: tuple[Bias, ...] = ("dilution", "hold", "lapa2", "removed")
ALL = "all heads"
NEAR = 1
"""Tokens between prompt and scored tokens in the near reading."""
MARGIN = 0.2
"""Shares of the fade that count as nothing, and as all but everything."""
VERDICTS = {
    "mass mediates": "holding the mass brings back all but a fifth of the fade, or more",
    "mass does not": "it brings back a fifth of the fade at most",
    "in part": "it brings back more than a fifth, and less than four fifths",
    "no fade": "there is no fade to explain: less than a fifth of the control near, or none",
    "inconclusive": "the intervals do not tell, or there are fewer than 8 prompts",
}
"""Verdicts on a share of the fade, and what they mean."""


@dataclass(frozen=True)
class Fading:
    """What brings faded control back.

    Attributes:
        question: What was asked; a case's text is filler and scored tokens.
        tokens: Tokens that are scored.
        metric: By which control is measured.
        alpha: Of the bias lapa2.
        sets: By name, the heads whose mass is changed.
        near: Control near, by case: its mean over the scored tokens.
        far: By filler length, control behind so many tokens.
        changed: By filler length, set of heads and bias, control with it. Of "removed" it is the
            control near, with the far mass.
    """

    question: ContrastSet
    tokens: int
    metric: str
    alpha: float
    sets: Mapping[str, Heads]
    near: Float[np.ndarray, " case"]
    far: Mapping[int, Float[np.ndarray, " case"]]
    changed: Mapping[tuple[int, str, Bias], Float[np.ndarray, " case"]]

    def fades(self) -> pd.DataFrame:
        """A row for every filler length: the control, and how much of it is lost.

        Columns: filler, control with its 95 % interval over prompts (low, high), fade with its
        interval, and prompts. The first row is near.
        """
        rows = []
        for filler, values in {NEAR: self.near, **self.far}.items():
            own, lost = (self.question.by_prompt(each) for each in (values, self.near - values))
            row = {"filler": filler, "control": own.mean()}
            for name, each in (("", own), ("fade_", lost)):
                low, high = bounds(each, np.arange(len(each)))
                row |= {f"{name}low": float(low), f"{name}high": float(high)}
            rows.append(row | {"fade": lost.mean(), "prompts": len(own)})
        table = pd.DataFrame(rows)
        names = ["filler", "control", "low", "high", "fade", "fade_low", "fade_high", "prompts"]
        return table[names]

    def frame(self) -> pd.DataFrame:
        """A row for every filler length, set of heads and bias.

        Columns: filler, heads, n_heads, bias, share (restored, or removed) with its 95 % interval
        over prompts, a ratio of means; verdict (one of `VERDICTS`); prompts. Where the interval of
        the fade does not lie above 0 there is nothing to share: then the numbers are NaN.
        """
        fades = {row["filler"]: row for row in self.fades().to_dict("records")}
        rows = []
        for (filler, name, bias), values in self.changed.items():
            fade = self.question.by_prompt(self.near - self.far[filler])
            before = self.near - values if bias == "removed" else values - self.far[filler]
            share, low, high = share_interval(self.question.by_prompt(before)[:, None], fade)
            row = {"filler": filler, "heads": name, "n_heads": len(self.sets[name]), "bias": bias}
            numbers = [float(each[0]) for each in (share, low, high)]
            if not fades[filler]["fade_low"] > 0:
                numbers = [np.nan] * 3
            row |= dict(zip(("share", "low", "high"), numbers, strict=True))
            none = fades[filler]["fade_high"] < MARGIN * fades[NEAR]["control"]
            row["verdict"] = _verdict(numbers[1], numbers[2], bool(none), len(fade))
            rows.append(row | {"prompts": len(fade)})
        return pd.DataFrame(rows)

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
        sets of heads restore at the longest filler."""
        figure = new_figure(8.4, 3.0)
        left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.2))
        lengths = [NEAR, *self.far]
        curves = {"no bias": [self.near, *self.far.values()]}
        for bias in ("dilution", "hold", "lapa2"):
            there = [self.changed.get((filler, ALL, bias)) for filler in self.far]
            if all(each is not None for each in there):
                curves[bias] = [self.near, *(each for each in there if each is not None)]
        for colour, (name, values) in zip(COLOURS, curves.items(), strict=False):
            by_prompt = [self.question.by_prompt(each) for each in values]
            left.plot(lengths, [each.mean() for each in by_prompt], "o-", ms=3, lw=1.2,
                      color=colour, label=name)  # fmt: skip
            low, high = np.transpose([bounds(each, np.arange(len(each))) for each in by_prompt])
            left.fill_between(lengths, low, high, color=colour, alpha=0.12, lw=0)
        plain_axes(left, "tokens in between", f"{self.metric}, nats a step")
        table = self.frame()
        table = table[table["filler"] == max(self.far)]
        names, biases = list(dict.fromkeys(table["heads"])), list(dict.fromkeys(table["bias"]))
        for row in table.to_dict("records"):
            colour = COLOURS[1 + BIASES.index(row["bias"])]
            place = names.index(row["heads"]) + 0.8 * (
                (biases.index(row["bias"]) + 0.5) / len(biases) - 0.5
            )
            right.plot([row["low"], row["high"]], [place] * 2, color=colour, lw=1.4)
            right.plot(row["share"], place, "o", color=colour, ms=3)
        for colour, bias in zip(COLOURS[1:], BIASES, strict=False):
            if bias == "removed" and bias in biases:
                left.plot([], [], "o-", ms=3, lw=1.2, color=colour, label=bias)
        left.legend(fontsize=7, frameon=False)
        right.set_yticks(range(len(names)), names)
        right.set_ylim(len(names) - 0.4, -0.6)
        for share in (0, 1):
            right.axvline(share, color="0.7", lw=0.6)
        plain_axes(right, f"share of the fade at {max(self.far)} tokens", "")
        return figure


def _verdict(low: float, high: float, none: bool, prompts: int) -> str:
    if prompts < FEW:
        return "inconclusive"
    if none:
        return "no fade"
    if np.isnan(low):
        return "inconclusive"
    if low >= 1 - MARGIN:
        return "mass mediates"
    if high <= MARGIN:
        return "mass does not"
    return "in part" if low > MARGIN and high < 1 - MARGIN else "inconclusive"


@accepts_model_name
def measure_fading(
    model: Model,
    about: ContrastLike,
    *,
    filler: Sequence[int] = (64, 128, 256),
    tokens: int = 32,
    heads: Mapping[str, Heads] | None = None,
    random: int = 0,
    alpha: float = 0.5,
    metric: str | Metric | Mapping[str, Metric] | None = None,
    seed: int = 1,
    file: str | Path | None = None,
    at_once: int | None = None,
    progress: tqdm | None = None,
    **settings: Any,
) -> Fading:
    """How much of faded control comes back when the attention on the prefix does.

    Args:
        model: A TransformerBridge or a `TransformersModel`.
        about: A task by name or value, a case or several, or a `ContrastSet`. A case's text must
            have `max(filler) + tokens` tokens: its last ones are scored, those before them stand in
            between.
        filler: Numbers of tokens between prompt and scored tokens; each case is also read with
            one.
        tokens: Tokens that are scored.
        heads: Sets of heads by name, beside all heads.
        random: Sets of as many random heads as the first of `heads` has.
        alpha: Of the bias lapa2.
        metric: By which control is measured; by default lex where there are words, because shares
            of it add up, and else js.
        seed: Of the texts and the random heads.
        file: Where finished texts' numbers are kept, a line for each group that is read together:
            the same question goes on from there. Two of its texts are read again, near and at the
            longest filler: they must be what is kept but for rounding.
        at_once: Texts read together; changes nothing but memory and time.
        progress: A bar to advance by steps read.
        settings: For a task, as `make_examples`.

    Raises:
        CircuitError: No filler, texts that are too short, texts longer than a sliding window of the
            model, heads the model does not have, a file of another question, or as `control`.
    """
    lengths = sorted(set(filler) - {NEAR})
    if not lengths or lengths[0] < NEAR or tokens < 1:
        raise CircuitError(
            f"fading needs filler lengths above {NEAR}, and at least one scored token; found filler"
            f" {tuple(filler)}, tokens {tokens}"
        )
    if not is_bridge(model):
        raise CircuitError(
            "circuits are read from a TransformerBridge or a TransformersModel, not from a"
            f" {type(model).__name__}"
        )
    whole = lengths[-1] + tokens
    if not isinstance(about, ContrastSet | ContrastExample) and not _are_cases(about):
        settings |= {"tokens": whole, "seed": seed}
    question = ContrastSet.of(model, about, **settings)
    short = next((case for case in question.cases if case.n < whole), None)
    if short is not None:
        raise CircuitError(
            f"the text behind {short.prompt!r} has {short.n} tokens; filler and scored tokens need"
            f" {lengths[-1]} + {tokens}: give longer texts, or shorter fillers"
        )
    longest = max(len(case.layouts[0]) for case in question.cases) + whole - 1
    if (window := smallest_window(model)) is not None and longest > window:
        raise CircuitError(
            f"some layers of this model see {window} keys, and prompt, filler and scored tokens"
            f" have {longest}: keys are hidden there, not only outweighed; ask for shorter fillers"
        )
    sets = _sets(model, question, dict(heads or {}), random, seed)
    if metric is None:
        metric = "lex" if question.words else "js"
    name, measure = one_metric(metric)
    if name == "from_raw":
        raise CircuitError(
            "metric from_raw compares with the raw model, which fades too; use js, lex, llr or kl"
        )
    more_facts = {
        "fading": lengths,
        "tokens": tokens,
        "sets": sets,
        "alpha": alpha,
        "metric": name,
        "seed": seed,
    }
    store = ResultStore(
        file, question.key(model, **more_facts), question.facts(model, **more_facts)
    )
    n = len(question.cases)
    near, far = np.zeros(n), {length: np.zeros(n) for length in lengths}
    changed: dict[tuple[int, str, Bias], np.ndarray] = {
        (length, each, bias): np.zeros(n) for length in lengths for each in sets for bias in BIASES
    }
    small = [_scored(case, NEAR, tokens) for case in question.cases]
    groups = {
        ",".join(map(str, group)): group
        for group in batches(question.cases, rows_at_once(model, small, at_once))
    }
    steps = tokens * (1 + len(lengths) * (1 + len(sets) * len(BIASES)))
    total = steps * sum(len(group) for key, group in groups.items() if key not in store)
    stored = next((key for key in groups if key in store), None)
    again = [] if stored is None else [question.cases[i] for i in groups[stored][:AGAIN]]
    total += tokens * (2 + len(BIASES)) * len(again)
    with (
        closing(store),
        torch.no_grad(),
        prepacked_model(model),
        given_bar(progress, total, "fading", "step") as bar,
    ):
        if stored is not None:
            every = {ALL: sets[ALL]}
            now = _read(model, again, question, lengths[-1:], tokens, every, alpha, measure, bar)
            _check_again(file, store[stored], now, rounding(model))
        for key, group in groups.items():
            if key not in store:
                cases = [question.cases[i] for i in group]
                store.add(
                    key, _read(model, cases, question, lengths, tokens, sets, alpha, measure, bar)
                )
            found = store[key]
            near[group] = found["near"]
            for length in lengths:
                far[length][group] = found[f"{length}"]
                for each in sets:
                    for bias in BIASES:
                        changed[length, each, bias][group] = found[f"{length}, {bias}, {each}"]
    return Fading(question, tokens, name, alpha, sets, near, far, changed)


def _read(
    model: Model,
    cases: Sequence[ContrastExample],
    question: ContrastSet,
    lengths: Sequence[int],
    tokens: int,
    sets: Mapping[str, Heads],
    alpha: float,
    measure: Metric,
    bar: tqdm,
) -> dict[str, Float[np.ndarray, " case"]]:
    """The control of some cases by what was done: "near", "64" (far), "64, hold, all heads"."""
    text = torch.tensor([case.text[-tokens:] for case in cases], device=model.cfg.device)

    def value(logits: Float[Tensor, "branch case step vocab"]) -> Float[np.ndarray, " case"]:
        found = measure(Predictions(logits, text, None, question.words))
        bar.update(text.numel())
        return found.double().mean(1).cpu().numpy()

    close = _CachedForward(model, [_scored(case, NEAR, tokens) for case in cases], tokens)
    found = {"near": value(close.logits())}
    mass_near = close.log_odds
    for length in lengths:
        away = _CachedForward(model, [_scored(case, length, tokens) for case in cases], tokens)
        found[f"{length}"] = value(away.logits())
        ways: dict[Bias, tuple[_Rule, _CachedForward]] = {
            "dilution": (_dilution(length - NEAR), away),
            "hold": (_held(mass_near), away),
            "lapa2": (_lapa2(alpha), away),
            "removed": (_held(away.log_odds), close),
        }
        for each, pairs in sets.items():
            chosen = _mask(model, pairs)
            for bias, (rule, reading) in ways.items():
                found[f"{length}, {bias}, {each}"] = value(reading.logits(rule, chosen))
    return found


def _check_again(
    file: str | Path | None,
    kept: Mapping[str, np.ndarray],
    now: Mapping[str, np.ndarray],
    share: float,
) -> None:
    """Refuse a file whose numbers are not what this model has: control near, and what differs from
    it.

    Args:
        now: Of the first cases of `kept`.
        share: Of the control near, by which rounding may move a difference from it.
    """
    near, n = kept["near"], len(now["near"])
    before = {name: kept[name][:n] for name in now}
    whole = dict.fromkeys(now, near)
    check_same(file, {"near": before["near"]}, now, whole=whole)
    moved = before["near"] - now["near"]
    there = {name: values + moved for name, values in now.items()}
    check_same(file, before, there, whole=whole, share=share)


def _are_cases(about: Any) -> bool:
    return isinstance(about, Sequence) and not isinstance(about, str)


def _sets(
    model: Model, question: ContrastSet, heads: dict[str, Heads], random: int, seed: int
) -> dict[str, Heads]:
    """All heads, those given, and random ones."""
    every = units_everything(model)
    if random < 0:
        raise CircuitError(f"random must be 0 sets or more; found {random}")
    if random and not heads:
        raise CircuitError(
            "random sets are as large as the first of `heads`; give heads, too (a selection)"
        )
    drawn = [f"random {i + 1}" for i in range(random)]
    if taken := [name for name in (ALL, *drawn) if name in heads]:
        raise CircuitError(f"{taken[0]!r} is there anyway; give the set another name")
    found = {ALL: every} | {unit.name: unit.heads for unit in units_of(model, question, heads)}
    rng = np.random.default_rng(seed)
    for name in drawn:
        size = len(next(iter(heads.values())))
        picked = sorted(rng.choice(len(every), size, replace=False))
        found[name] = tuple(every[at] for at in picked)
    return found


def _scored(case: ContrastExample, filler: int, tokens: int) -> ContrastExample:
    """The case with so many tokens of its text between prompt and scored tokens."""
    text = case.text[-filler - tokens :]
    return ContrastExample(
        case.prompt, case.names, case.layouts, text, case.source, None, case.prefixes
    )


def _mask(model: Model, heads: Heads) -> Bool[Tensor, "layer head"]:
    found = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, dtype=torch.bool)
    for layer, head in heads:
        found[layer, head] = True
    return found


# --- reading


@dataclass(frozen=True)
class _Seen:
    """The scores of a layer, as a bias sees them.

    Attributes:
        log_odds: logit(A), A being the attention on the prefix.
        sink: Log of BOS's weight. `rest`: of the sum over the keys that are neither BOS's nor the
            prefix's.
        n: Tokens of the prefix. `l`: keys of each query, BOS and its own included. `others`: those
            that are neither BOS nor the prefix's.
    """

    log_odds: Float[Tensor, "row head query"]
    sink: Float[Tensor, "row head query"]
    rest: Float[Tensor, "row head query"]
    n: int
    l: Float[Tensor, " query"]
    others: Float[Tensor, " query"]


_Rule = Callable[[int, _Seen], Tensor]
"""Gives the bias of each row, head and query of a layer."""


def _held(log_odds: Mapping[int, Float[Tensor, "row head query"]]) -> _Rule:
    """Every head gets the log-odds of another reading."""
    return lambda layer, seen: (log_odds[layer] - seen.log_odds).clip(-BIAS_CAP, BIAS_CAP)


def _dilution(more: int) -> _Rule:
    """What undoes so many more keys."""

    def rule(_layer: int, seen: _Seen) -> Tensor:
        mean = seen.rest - seen.others.log()
        without = torch.logaddexp(seen.sink, mean + (seen.others - more).log())
        return torch.logaddexp(seen.sink, seen.rest) - without

    return rule


def _lapa2(alpha: float) -> _Rule:
    """LaPA2's bias, Eq. 7; l without BOS."""
    law = Augmentation(alpha=alpha)

    def rule(_layer: int, seen: _Seen) -> Tensor:
        b = torch.from_numpy(law.bias(seen.l.cpu().numpy() - 1, seen.n))
        return b.to(seen.log_odds).expand_as(seen.log_odds)

    return rule


class _CachedForward:
    """Some cases read up to the first scored query; the scored ones are read as often as wanted.

    Attributes:
        log_odds: By layer, logit(A) at the scored queries without a bias; after `logits()`.
    """

    def __init__(self, model: Model, cases: Sequence[ContrastExample], tokens: int) -> None:
        self.model, self.n = model, len(cases)
        names = range(len(cases[0].names))
        rows = [(case, case.layouts[i], case.prefixes[i]) for i in names for case in cases]
        layouts = [layout for _, layout, _ in rows]
        first, fronts = layouts[0], [front_of(layout) for layout in layouts]
        self.prefix, self.bos = first.prefix, first.bos
        self.state = BridgeRows(model)
        if first.soft:
            self.state.start_after_prefix(layouts, [prefix for *_, prefix in rows])
        else:
            self.state.prompt_pass(fronts)
        # The first scored query is that of the token before the first scored one.
        ids = [
            [*layout.ids[len(front.ids) :], *case.text[:-1]]
            for (case, layout, _), front in zip(rows, fronts, strict=True)
        ]
        device = model.cfg.device
        every = torch.tensor(ids, device=device)
        self.width = len(first) + cases[0].n - 1
        self.state.expand(torch.arange(len(rows), device=device), capacity=self.width)
        size = max(1, SCORES_AT_ONCE // (len(rows) * model.cfg.n_heads * self.width))
        for part in every[:, :-tokens].split(size, dim=1):
            if part.shape[1]:
                self.state.read_tokens(part)
        self.tokens = every[:, -tokens:]
        # Keys that each scored query has, BOS included.
        self.l = torch.arange(self.width - tokens + 1, self.width + 1, device=device).double()
        self.log_odds: dict[int, Tensor] = {}

    def logits(
        self, rule: _Rule | None = None, heads: Bool[Tensor, "layer head"] | None = None
    ) -> Float[Tensor, "branch item step vocab"]:
        """Of the scored queries, with a bias in some heads."""

        def change(layer: int, scores: Tensor) -> Tensor:
            seen = self._see(scores)
            if rule is None or heads is None:
                self.log_odds[layer] = seen.log_odds
                return scores
            chosen = heads[layer].to(scores.device)
            if not chosen.any():
                return scores
            b = torch.where(chosen[:, None], rule(layer, seen).to(torch.float32), 0.0)
            changed = scores.to(torch.promote_types(scores.dtype, torch.float32), copy=True)
            changed[..., self.prefix.start : self.prefix.stop] += b[..., None]
            return changed

        with edit_scores(self.model, change), refuse_sinks(self.model):
            found = self.state.read_tokens(self.tokens, keep=self.tokens.shape[1])
        self.state.crop(self.tokens.shape[1])
        return found.unflatten(0, (-1, self.n))

    def _see(self, scores: Float[Tensor, "row head query key"]) -> _Seen:
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        inside = slice(self.prefix.start, self.prefix.stop)
        sink = wide[..., self.bos.start : self.bos.stop].logsumexp(3)
        keys = torch.ones(wide.shape[3], dtype=torch.bool, device=wide.device)
        keys[inside] = False
        keys[self.bos.start : self.bos.stop] = False
        rest = wide[..., keys].logsumexp(3)
        log_odds = wide[..., inside].logsumexp(3) - torch.logaddexp(sink, rest)
        n = self.prefix.stop - self.prefix.start
        l = self.l.to(wide)
        return _Seen(log_odds, sink, rest, n, l, l - n - (self.bos.stop - self.bos.start))
