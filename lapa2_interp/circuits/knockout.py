"""Knock-out: how much control is lost when a unit cannot see the prefix.

    effect = D - D without the unit          per step; > 0 where the unit carries control

A unit is a layer, a head, a (layer, KV head) cell, a position of the prefix, a head's view of one
position, or any set of heads. What it sees instead is one of four replacements (`edits`). Under
`resample` and `mean` one branch is changed at a time and the two effects are averaged: with both
changed, a lone carrier would count twice.

    table = knock_out(model, "sentiment")
    table.frame()                             # effect, interval, share, family-wise p, rank
    joint_curve(model, table)                 # cut the best n, all but the best n, random n
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from tqdm import tqdm

from lapa2_interp._util.errors import CircuitError, pluralize, unknown_choice
from lapa2_interp._util.files import (
    held,
    parse_json,
    read_text,
    with_checksums,
    without_checksums,
    write_text,
)
from lapa2_interp._util.plots import Drawing, new_figure, plain_axes
from lapa2_interp._util.progress import given_bar
from lapa2_interp.bias.augmentation import AugmentationLike, Phase
from lapa2_interp.circuits.edits import Edit, Heads
from lapa2_interp.circuits.metrics import METRICS, Metric, metrics_by_name
from lapa2_interp.circuits.question import ContrastLike, ContrastSet, evaluate_edits
from lapa2_interp.circuits.statistics import max_t, ranks, share_interval, split_half
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.models.card import Model, kv_heads
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.stats import FEW, bounds

NULL = "nothing"
"""The null unit: nothing is changed, and every head's output is moved by one rounding step."""
AGAIN = 2
"""Units of a file, those of largest effect, that are read again: they must be what they were. Of a
file of `fading`, so many texts."""


@dataclass(frozen=True)
class Unit:
    """What is knocked out together.

    Attributes:
        where: What names it: layer, head, kv_head, position, or name.
        heads: (layer, head) pairs.
        positions: Positions within the prefix; None for all.
    """

    where: Mapping[str, Any]
    heads: Heads
    positions: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return ".".join(str(value) for value in self.where.values())

    @property
    def key(self) -> str:
        """What is knocked out, whatever it is called: by this a file finds it again."""
        return json.dumps([self.heads, self.positions])


@accepts_model_name
def units_of(model: Model, question: ContrastSet, over: str | Mapping[str, Any]) -> list[Unit]:
    """The units of a kind, or sets of heads by name.

    Raises:
        CircuitError: Unknown kind, or heads the model does not have.
    """
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    group = n_heads // kv_heads(model)
    layers, heads = range(n_layers), range(n_heads)
    everything = tuple((layer, head) for layer in layers for head in heads)
    if isinstance(over, Mapping):
        found = [Unit({"name": name}, head_pairs(pairs)) for name, pairs in over.items()]
        for unit in found:
            missing = [pair for pair in unit.heads if pair not in set(everything)]
            if missing:
                raise CircuitError(
                    f"head {missing[0]} of {unit.name!r} does not exist; the model has layers"
                    f" 0-{n_layers - 1}, heads 0-{n_heads - 1}"
                )
        return found
    match over:
        case "layer":
            return [Unit({"layer": i}, tuple((i, head) for head in heads)) for i in layers]
        case "head":
            return [Unit({"layer": i, "head": j}, ((i, j),)) for i, j in everything]
        case "kv":
            return [
                Unit(
                    {"layer": i, "kv_head": j},
                    tuple((i, head) for head in range(j * group, (j + 1) * group)),
                )
                for i in layers
                for j in range(n_heads // group)
            ]
        case "position":
            return [Unit({"position": slot}, everything, (slot,)) for slot in range(question.l_pre)]
        case "head x position":
            return [
                Unit({"layer": i, "head": j, "position": slot}, ((i, j),), (slot,))
                for i, j in everything
                for slot in range(question.l_pre)
            ]
    kinds = ("layer", "head", "kv", "position", "head x position")
    raise CircuitError(f"{unknown_choice('kind of unit', over, kinds)}, or sets of heads by name")


def head_pairs(pairs: Any) -> Heads:
    """[[layer, head], ...] as pairs.

    Raises:
        CircuitError: Something else.
    """
    try:
        found = tuple((layer, head) for layer, head in pairs)
    except (TypeError, ValueError):
        found = ((None, None),)
    if any(isinstance(i, bool) or not isinstance(i, Integral) for pair in found for i in pair):
        raise CircuitError(
            f"heads are pairs of whole numbers, [[layer, head], ...]; found {str(pairs)[:80]}"
        )
    return tuple((int(layer), int(head)) for layer, head in found)


def read_heads(file: str | Path) -> Heads:
    """Heads from a JSON file, [[layer, head], ...].

    Raises:
        CircuitError: The file cannot be read, or holds something else.
    """
    try:
        found = parse_json(read_text(Path(file)))
    except (OSError, ValueError) as error:
        raise CircuitError(f"cannot read heads from {file}: {error}") from error
    return head_pairs(found)


def write_heads(heads: Sequence[Sequence[int]], file: str | Path) -> None:
    """Heads to a JSON file, [[layer, head], ...]."""
    write_text(Path(file), json.dumps([list(pair) for pair in heads]) + "\n")


@dataclass(frozen=True)
class KnockOut:
    """What each unit carries.

    Attributes:
        question: What was asked.
        units: What was knocked out.
        how, phase, metric, augmentation: As asked.
        whole: The control itself, by case: its mean over steps.
        effects: What is lost without each unit, by case: its mean over steps.
        noise: The largest effect of the null unit in a case: effects below it are rounding.
        others: The same in further metrics, by name, as (whole, effects, noise).
    """

    question: ContrastSet
    units: tuple[Unit, ...]
    how: str
    phase: Phase
    metric: str
    whole: Float[np.ndarray, " case"]
    effects: Float[np.ndarray, "case unit"]
    noise: float
    others: Mapping[str, tuple[np.ndarray, np.ndarray, float]] = field(default_factory=dict)
    augmentation: AugmentationLike = None

    @property
    def n_prompts(self) -> int:
        return self.question.n_prompts

    @property
    def split_half(self) -> float:
        """How well halves of the prompts agree on the order of the units (Spearman)."""
        return split_half(self.question.by_prompt(self.effects))

    def with_metric(self, metric: str) -> KnockOut:
        """The same knock-outs by another of the metrics that were computed."""
        if metric == self.metric:
            return self
        if metric not in self.others:
            raise CircuitError(unknown_choice("metric", metric, [self.metric, *self.others]))
        whole, effects, noise = self.others[metric]
        others = dict(self.others) | {self.metric: (self.whole, self.effects, self.noise)}
        del others[metric]
        return replace(
            self, metric=metric, whole=whole, effects=effects, noise=noise, others=others
        )

    def frame(self) -> pd.DataFrame:
        """A row for every unit, largest effect first.

        Columns: what names the unit; effect with its 95 % interval over prompts; share of the whole
        control, with its interval; t, p, p_max (corrected for the number of units) and q; rank with
        its interval; the noise, and whether the effect is below it. With fewer than 8 prompts there
        are no p-values: numbers, no claims.
        """
        effects, whole = self.question.by_prompt(self.effects), self.question.by_prompt(self.whole)
        n = len(effects)
        low, high = bounds(effects, np.arange(n))
        share, share_low, share_high = share_interval(effects, whole)
        order, tests = ranks(effects), max_t(effects)
        few = n < FEW
        table = pd.DataFrame([dict(unit.where) for unit in self.units])
        mean = effects.mean(0)
        columns = {
            "effect": mean,
            "low": low,
            "high": high,
            "share": share,
            "share_low": share_low,
            "share_high": share_high,
            "t": tests.t,
            "p": np.nan if few else tests.p,
            "p_max": np.nan if few else tests.p_max,
            "q": np.nan if few else tests.q,
            "rank": order.rank,
            "rank_low": order.low,
            "rank_high": order.high,
            "noise": self.noise,
            "below_noise": np.abs(mean) <= self.noise,
        }
        return table.assign(**columns).sort_values("rank", ignore_index=True)

    def interval(self) -> pd.DataFrame:
        """Each unit's effect with its 95 % interval over prompts, largest first."""
        return self.frame()[[*self.units[0].where, "effect", "low", "high"]]

    def carriers(self, level: float = 0.05) -> pd.DataFrame:
        """Units that carry control: a positive effect above the noise, family-wise p below `level`.

        Raises:
            CircuitError: Fewer than 8 prompts.
        """
        if self.n_prompts < FEW:
            raise CircuitError(
                f"{self.n_prompts} prompts are too few for a claim; give at least {FEW}"
            )
        table = self.frame()
        return table[(table["p_max"] < level) & (table["effect"] > 0) & ~table["below_noise"]]

    def best(self, n: int) -> Heads:
        """The heads of the n units of largest effect."""
        order = np.argsort(-self.question.by_prompt(self.effects).mean(0), kind="stable")[:n]
        return tuple(dict.fromkeys(pair for i in order for pair in self.units[i].heads))

    def map(self) -> Float[np.ndarray, "layer head"]:
        """Effects of heads (or KV heads) as a grid."""
        names = [name for name in ("head", "kv_head") if name in self.units[0].where]
        if len(self.units[0].where) != 2 or not names:
            raise CircuitError("only heads and KV heads have a map; see frame()")
        mean = self.question.by_prompt(self.effects).mean(0)
        shape = [1 + max(unit.where[name] for unit in self.units) for name in ("layer", names[0])]
        grid = np.full(shape, np.nan)
        for unit, value in zip(self.units, mean, strict=True):
            grid[unit.where["layer"], unit.where[names[0]]] = value
        return grid

    def plot(self) -> Drawing:
        """A map of heads or KV heads; of other units, effects with their intervals."""
        if len(self.units[0].where) == 2 and "layer" in self.units[0].where:
            return _map(self.map(), lost(self.metric))
        table = self.frame().head(40)
        figure = new_figure(5.2, 0.6 + 0.16 * len(table))
        axes = figure.subplots()
        if "position" in self.units[0].where and len(self.units[0].where) == 1:
            table = table.sort_values("position")
        names = [
            ".".join(str(row[name]) for name in self.units[0].where) for _, row in table.iterrows()
        ]
        at = np.arange(len(table))[::-1]
        errors = [table["effect"] - table["low"], table["high"] - table["effect"]]
        axes.errorbar(table["effect"], at, xerr=errors, fmt="o", ms=3, lw=0.8, color="#0072B2")
        axes.axvline(0, color="0.6", lw=0.6)
        axes.set_yticks(at, names)
        plain_axes(axes, lost(self.metric), " x ".join(self.units[0].where))
        return figure


def lost(metric: str) -> str:
    """What an axis of effects is called."""
    return f"lost {metric}, nats a step" if metric in METRICS else f"lost {metric}"


def _map(grid: Float[np.ndarray, "layer head"], label: str) -> Drawing:
    n_layers, n_heads = grid.shape
    figure = new_figure(max(3.2, 1.3 + 0.22 * n_heads), max(2.0, 1.0 + 0.13 * n_layers))
    axes = figure.subplots()
    top = float(np.nanmax(np.abs(grid))) or 1.0
    shown = axes.imshow(grid, cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")
    figure.colorbar(shown, ax=axes, label=label)
    plain_axes(axes, "head", "layer")
    axes.set_xticks(range(0, n_heads, max(1, n_heads // 9)))
    axes.set_yticks(range(0, n_layers, max(1, n_layers // 10)))
    return figure


@accepts_model_name
def knock_out(
    model: Model,
    about: ContrastLike,
    *,
    over: str | Mapping[str, Any] = "head",
    units: Sequence[Unit] | None = None,
    how: str = "cut",
    phase: Phase = "all_queries",
    metric: str | Metric | Mapping[str, Metric] = "js",
    also: Sequence[str] | None = None,
    augmentation: AugmentationLike = None,
    file: str | Path | None = None,
    at_once: int | None = None,
    progress: tqdm | None = None,
    **settings: Any,
) -> KnockOut:
    """How much control is lost without each unit.

    Args:
        model, about, settings: As `control`.
        over: "layer", "head", "kv", "position", "head x position", or sets of heads by name.
        units: Some units, instead of all of a kind.
        how: "cut", "zero", "resample" or "mean" (`edits`).
        phase: "all_queries" (whatever reaches the text, also through the prompt), "last_query",
            "decode", or "query" (what the predicting query reads itself).
        metric: By which control is measured: a name of `METRICS`, or a function of `Predictions`
            (under a name of one's own: {name: function}).
        also: Further metrics, from the same passes; by default lex where there are words.
        augmentation: What acts in every branch besides.
        file: Where finished units are kept, a line each; the same question goes on from there. The
            control itself is read again, and the two kept units of largest effect: they must be
            what is kept but for rounding. What moved the control moves what is measured now.
        at_once: Texts read together; changes nothing but memory and time.

    Raises:
        CircuitError: As `control`; unknown units, or none, or two of one name; or the file is
            another question's.
    """
    question = ContrastSet.of(model, about, **settings)
    chosen = metrics_by_name(metric)
    first = next(iter(chosen))
    more = (("lex",) if question.words else ()) if also is None else also
    if further := [name for name in more if name not in chosen]:
        chosen |= metrics_by_name(further)
    wanted = list(units) if units is not None else units_of(model, question, over)
    if not wanted:
        raise CircuitError("there is no unit to knock out; give at least one")
    edits = [_edits(unit, how, phase) for unit in wanted]
    more_facts = {
        "how": how,
        "phase": phase,
        "metrics": list(chosen),
        "augmentation": str(augmentation),
    }
    names = ["", NULL, *(unit.name for unit in wanted)]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise CircuitError(f"two units are called {twice!r}; give each another name")
    store = ResultStore(
        file, question.key(model, **more_facts), question.facts(model, **more_facts)
    )
    keys = ["", NULL, *(unit.key for unit in wanted)]
    once: dict[str, int] = {}  # the first of the units that knock out the same
    for i, key in enumerate(keys):
        once.setdefault(key, i)
    kept = store.take("")
    again: dict[int, dict[str, np.ndarray]] = {}  # stored units by which the model is known again
    if kept:
        stored = [i for key, i in once.items() if key in store and i > 1]
        stored.sort(key=lambda i: -np.abs(kept[first] - store[keys[i]][first]).max())
        again = {i: store.done.pop(keys[i]) for i in stored[:AGAIN]}
    moved = dict.fromkeys(chosen, np.zeros(1))  # of the control, since the file was begun
    todo: list[Sequence[Edit | None]] = [
        [None],  # first, as all others are told apart from it
        [Edit(units_everything(model), how="null")],
        *edits,
    ]
    steps = sum(case.n * len(case.names) for case in question.cases)
    order = dict.fromkeys((0, *again, *once.values()))
    left = [(i, edit) for i in order if keys[i] not in store for edit in todo[i]]
    total = steps * len(left)
    found: dict[int, dict[str, np.ndarray]] = {}
    awaited = {i: len(question.cases) * len(todo[i]) for i, _ in left}
    asked = [edit for _, edit in left]
    with closing(store), given_bar(progress, total, f"knock-out, {how}", "step") as bar:
        for number, group, values in evaluate_edits(
            model, question, asked, chosen, augmentation, bar, at_once
        ):
            i = left[number][0]
            of_unit = found.setdefault(i, {name: np.zeros(len(question.cases)) for name in chosen})
            for name, each in values.items():
                # One branch after another: their effects are averaged.
                of_unit[name][group] += each.double().mean(1).cpu().numpy() / len(todo[i])
            awaited[i] -= len(group)
            if not awaited[i]:
                done = found.pop(i)
                if keys[i] == "" and kept:
                    check_same(file, kept, done)
                    moved = {name: kept[name] - done[name] for name in chosen}
                    store.done[""] = kept
                elif kept and i in again:
                    now = {name: done[name] + moved[name] for name in chosen}
                    check_same(file, again[i], now, names[i], kept, rounding(model))
                    store.done[keys[i]] = again[i]
                else:
                    store.add(keys[i], {name: done[name] + moved[name] for name in chosen})
    whole = {name: store[""][name] for name in chosen}
    effects = {
        name: np.stack([whole[name] - store[unit.key][name] for unit in wanted], axis=1)
        for name in chosen
    }
    noise = {name: float(np.abs(whole[name] - store[NULL][name]).max()) for name in chosen}
    return KnockOut(
        question,
        tuple(wanted),
        how,
        phase,
        first,
        whole[first],
        effects[first],
        noise[first],
        {name: (whole[name], effects[name], noise[name]) for name in chosen if name != first},
        augmentation,
    )


def check_same(
    file: str | Path | None,
    kept: Mapping[str, np.ndarray],
    now: Mapping[str, np.ndarray],
    without: str = "",
    whole: Mapping[str, np.ndarray] | None = None,
    share: float = 1e-2,
) -> None:
    """Refuse a file whose control, as it is or without a unit, is not what this model has.

    Args:
        whole: The control whose share is allowed as a difference; by default `kept`.
    """
    for name, old in kept.items():
        top = np.abs((whole or kept)[name]).max()
        if np.abs(old - now[name]).max() > share * top + 1e-6:
            what = f"{name} without {without}" if without else name
            raise CircuitError(
                f"{file} holds answers of another model or metric: {what} was {old.mean():.4g},"
                f" and is {now[name].mean():.4g} now; give another file"
            )


def rounding(model: Model) -> float:
    """The share of the control by which rounding may move an effect. Norms are in float32 at
    most."""
    eps = max(torch.finfo(each).eps for each in (model.cfg.dtype, torch.float32))
    return float(eps**0.5)


def units_everything(model: Model) -> Heads:
    """Every head of a model."""
    return tuple((i, j) for i in range(model.cfg.n_layers) for j in range(model.cfg.n_heads))


def _edits(unit: Unit, how: str, phase: Phase) -> list[Edit]:
    edit = Edit(unit.heads, how, phase, unit.positions)
    if how in ("cut", "zero"):
        return [edit]
    return [replace(edit, branches="target"), replace(edit, branches="others")]


class ResultStore:
    """Finished parts of a question, such as units, in memory and, if there is a file, on disk: a
    line each.

    Args:
        key: Of the question. `facts`: what tells it from others, by name, for a message.

    Raises:
        CircuitError: The file is of another question, or another process fills it.
    """

    def __init__(
        self, file: str | Path | None, key: str, facts: Mapping[str, str] | None = None
    ) -> None:
        self.done: dict[str, dict[str, np.ndarray]] = {}
        self.file: IO[str] | None = None
        if file is None:
            return
        path = Path(file)
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "no file"
            raise CircuitError(f"{path} is {kind}; give a file, such as {path / 'cut.jsonl'}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._hold(path)
        # A damaged line is made again, also where it is no text.
        lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
        first = json.dumps({"question": key, "facts": facts or {}})
        if lines and (other := _differs(lines[0], key, facts or {})):
            self.close()
            raise CircuitError(
                f"{path} holds answers to another question{other}; give another file, or remove it"
            )
        whole = []
        for i, line in enumerate(lines[1:], 2):
            try:
                each, _ = without_checksums(line)
                values = {name: np.array(found) for name, found in each["values"].items()}
                self.done[each["unit"]] = values
            except (ValueError, KeyError, AttributeError, TypeError):
                if i < len(lines):  # the last may have been cut short when the program was stopped
                    print(f"{path}: line {i} is damaged and made anew", file=sys.stderr)
                continue
            whole.append(line)
        write_text(path, "\n".join([first, *whole]) + "\n")
        self.close()
        self._hold(path)

    def _hold(self, path: Path) -> None:
        """Open the file, which no other process may fill meanwhile."""
        self.file = path.open("a", encoding="utf-8")
        if not held(self.file):
            self.close()
            raise CircuitError(
                f"{path} is being filled by another process; wait for it, or give another file"
            )

    def __contains__(self, name: str) -> bool:
        return name in self.done

    def __getitem__(self, name: str) -> dict[str, np.ndarray]:
        return self.done[name]

    def take(self, name: str) -> dict[str, np.ndarray] | None:
        """A unit's values, which are then no longer there."""
        return self.done.pop(name, None)

    def add(self, name: str, values: dict[str, np.ndarray]) -> None:
        self.done[name] = values
        if self.file is not None:
            lists = {each: array.tolist() for each, array in values.items()}
            self.file.write(with_checksums({"unit": name, "values": lists}, indent=None))
            self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _differs(line: str, key: str, facts: Mapping[str, str]) -> str:
    """How the question in the first line of a file differs from this one, in words; "" where it
    does not."""
    try:
        there = parse_json(line)
        if there["question"] == key:
            return ""
        told = there.get("facts", {})
        names = [name for name in {**told, **facts} if told.get(name) != facts.get(name)]
        others = [f"{name} {told.get(name)}, here {facts.get(name)}" for name in names if told]
    except (ValueError, TypeError, KeyError, AttributeError):
        others = []
    return f": {'; '.join(others)}" if others else ", or is damaged"


@dataclass(frozen=True)
class JointCurve:
    """How much control is left when several heads are knocked out together.

    Attributes:
        metric: Whose share is left.
        table: A row for every kind and size: left (the share of the control that is left), its 95 %
            interval over prompts, heads, and prompts. Kinds: "without" the best n (what they are
            needed for), "only" the best n (what they suffice for), "random" n, and "mass", the n
            with the largest attention on the prefix.
    """

    metric: str
    table: pd.DataFrame

    def frame(self) -> pd.DataFrame:
        """The table."""
        return self.table

    def interval(self) -> pd.DataFrame:
        """The share that is left with its 95 % interval over prompts, by kind and size."""
        return self.table[["kind", "heads", "left", "low", "high"]]

    def plot(self) -> Drawing:
        """The share of control left against the number of heads."""
        figure = new_figure(4.4, 2.8)
        axes = figure.subplots()
        for colour, (kind, part) in zip(
            ("#D55E00", "#0072B2", "#777777", "#E69F00"),
            self.table.groupby("kind", sort=False),
            strict=False,
        ):
            axes.plot(part["heads"], part["left"], color=colour, marker="o", ms=3, label=kind)
            axes.fill_between(
                part["heads"], part["low"], part["high"], color=colour, alpha=0.12, lw=0
            )
        axes.axhline(1, color="0.7", lw=0.6)
        axes.axhline(0, color="0.7", lw=0.6)
        sizes = sorted(set(self.table["heads"]))
        axes.set_xscale("log", base=2)
        axes.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)  # also where no share is defined
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.legend(fontsize=7, frameon=False)
        plain_axes(axes, "heads", f"share of {self.metric} left")
        return figure


@accepts_model_name
def joint_curve(
    model: Model,
    table: KnockOut,
    *,
    sizes: Sequence[int] = (1, 2, 4, 8, 16, 32),
    how: str | None = None,
    phase: Phase | None = None,
    metric: str | Metric | Mapping[str, Metric] | None = None,
    mass: Float[np.ndarray, "layer head"] | None = None,
    seeds: int = 3,
    file: str | Path | None = None,
    progress: tqdm | None = None,
) -> JointCurve:
    """Control with the best n heads knocked out, with all others knocked out, and with other heads
    knocked out instead.

    Heads are chosen by the effects in one half of the prompts and judged in the other, and the
    other way round, because the effects of chosen heads are too large in the texts they were chosen
    by.

    Args:
        table: Knock-outs of single heads.
        sizes: Numbers of heads; those that the table or the model does not have are left out.
        how, phase, metric: As `knock_out`; by default the table's. Of the metrics lex is preferred,
            because shares of it add up.
        mass: Attention on the prefix by head (`prefix_mass`); without it there is no kind "mass".
        seeds: Random sets of each size, drawn from all heads of the model.
        file: Where finished sets are kept, as `knock_out`; each half has a file of its own, whose
            name ends in -0 or -1.

    Raises:
        CircuitError: The table is not one of heads, or has fewer than 2 prompts; sizes or seeds
            below 1; or as `knock_out`.
    """
    if metric is None:
        metric = "lex" if "lex" in (table.metric, *table.others) else table.metric
        if metric not in METRICS:
            raise CircuitError(
                f"the table's metric {metric!r} is a function of your own; give it again as metric"
            )
    name_of = next(iter(metrics_by_name(metric)))
    single = all(len(unit.heads) == 1 and unit.positions is None for unit in table.units)
    if table.n_prompts < 2 or not single or len({u.heads for u in table.units}) < len(table.units):
        raise CircuitError("a joint curve needs knock-outs of single heads, of 2 prompts or more")
    every = units_everything(model)
    if small := [n for n in sizes if n < 1]:
        raise CircuitError(f"sizes are numbers of heads, at least 1; found {small[0]}")
    if seeds < 1:
        raise CircuitError(
            f"random heads are drawn at least once for each size; found seeds={seeds}, give 1 or"
            " more"
        )
    asked = sizes
    sizes = [n for n in sizes if n <= len(table.units) and n < len(every)]
    if not sizes:
        raise CircuitError(
            f"a joint curve of {pluralize(len(every), 'head')} needs sizes below that; found"
            f" {', '.join(map(str, asked)) or 'none'}"
        )
    prompts = list(dict.fromkeys(table.question.prompts))
    by_prompt = table.question.by_prompt(table.effects)
    names: list[tuple[str, int, int]] = []
    left: dict[tuple[str, int, int], dict[str, float]] = {}
    wholes: dict[str, float] = {}
    for fold in (0, 1):
        held = set(prompts[fold::2])
        chosen_by = [i for i, prompt in enumerate(prompts) if prompt not in held]
        judged = [case for case in table.question.cases if case.prompt in held]
        order = np.argsort(-by_prompt[chosen_by].mean(0), kind="stable")
        best = [table.units[i].heads[0] for i in order]
        rng = np.random.default_rng(fold)
        sets: dict[tuple[str, int, int], Heads] = {}
        for n in sizes:
            sets["without", n, 0] = tuple(best[:n])
            sets["only", n, 0] = tuple(pair for pair in every if pair not in set(best[:n]))
            for seed in range(seeds):
                sets["random", n, seed] = tuple(
                    every[i] for i in sorted(rng.choice(len(every), n, replace=False))
                )
            if mass is not None:
                heavy = np.argsort(-mass.ravel(), kind="stable")[:n]
                sets["mass", n, 0] = tuple(every[i] for i in heavy)
        names = list(sets)
        found = knock_out(
            model,
            replace(table.question, cases=tuple(judged)),
            units=[Unit({"name": str(name)}, heads) for name, heads in sets.items()],
            how=how or table.how,
            phase=phase or table.phase,
            metric=metric,
            also=(),
            augmentation=table.augmentation,
            file=None if file is None else _numbered(Path(file), fold),
            progress=progress,
        )
        rest = found.question.by_prompt(found.whole[:, None] - found.effects)
        for i, prompt in enumerate(dict.fromkeys(case.prompt for case in judged)):
            wholes[prompt] = float(found.question.by_prompt(found.whole)[i])
            for j, name in enumerate(names):
                left.setdefault(name, {})[prompt] = float(rest[i, j])
    whole = np.array([wholes[prompt] for prompt in prompts])
    rows = []
    for kind, n in dict.fromkeys((kind, n) for kind, n, _ in names):
        same = [name for name in names if name[:2] == (kind, n)]
        part = np.mean([[left[name][prompt] for prompt in prompts] for name in same], axis=0)
        share, low, high = share_interval(part[:, None], whole)
        row = {"kind": kind, "heads": n, "left": share[0], "low": low[0], "high": high[0]}
        rows.append(row | {"prompts": len(prompts)})
    frame = pd.DataFrame(rows).sort_values(["kind", "heads"], ignore_index=True)
    return JointCurve(name_of, frame)


def _numbered(file: Path, number: int) -> Path:
    return file.with_name(f"{file.stem}-{number}{file.suffix}")


@accepts_model_name
def prefix_mass(
    model: Model, about: ContrastLike, **settings: Any
) -> Float[np.ndarray, "layer head"]:
    """Attention on the prefix of every head, a share from 0 to 1: the mean over branches, texts and
    steps, by which a ranking by attention would go."""
    question = ContrastSet.of(model, about, **settings)
    found = []
    for case in question.cases:
        layouts = list(case.layouts)
        texts = [case.text] * len(layouts)
        trace = teacher_forced(model, layouts, texts, prefixes=case.prefixes)
        found.append(trace["prefix"].mean(["branch", "sample", "step"]).to_numpy())
    return np.mean(found, axis=0).astype(float)
