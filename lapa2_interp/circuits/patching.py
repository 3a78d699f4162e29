"""Activation patching: one branch's activations, put into the other's run.

The source s is the target's branch, the destination d the opposite one: the same text behind two
prefixes. D is a metric of one run, its mean over steps.

    denoise: a node of s is put into d        recovery = mean(D_patched - D_d) / mean(D_s - D_d)
    noise:   a node of d is put into s        recovery = mean(D_s - D_patched) / mean(D_s - D_d)

Both are shares of the same whole, and a ratio of sums over prompts. Denoising finds what suffices,
noising what is needed. They differ where nodes stand in for one another or need one another.

    found = patch(model, "sentiment")                  # keys and values of the prefix
    found.frame()                                      # recovery, interval, family-wise p, rank
    patch(model, "sentiment", "z", direction="both").plot()

Nodes:

- `prefix_kv`: keys or values of a KV head in the prefix's slots. All of them together are all that
  later queries know of a prefix.
- `prefix_to_head`: the same, as one query head sees it: the edge from the prefix to a head.
- `z` (a head's output), `pattern`, `resid_pre`, `resid_mid`, `resid_post`, `attn_out`, `mlp_out`:
  activations at hooks of a TransformerBridge.
- `head_to_logits`: a head's output in what the final norm reads, all later layers as they were: the
  edge from a head to the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from lapa2_interp._util.errors import CircuitError, DeadHookError, pluralize, unknown_choice
from lapa2_interp._util.plots import Drawing, new_figure, plain_axes
from lapa2_interp._util.progress import given_bar
from lapa2_interp.attention.cache import BridgeRows
from lapa2_interp.circuits.cases import ContrastExample, batches
from lapa2_interp.circuits.edits import Branches, Edit, edited_logits
from lapa2_interp.circuits.question import ContrastLike, ContrastSet, rows_at_once
from lapa2_interp.circuits.statistics import max_t, ranks, share_interval
from lapa2_interp.models.card import Model, is_bridge, kv_heads, plain_network, prepacked_model
from lapa2_interp.models.load import accepts_model_name
from lapa2_interp.stats import FEW, bounds

HOOKS: Mapping[str, str] = {
    "z": "blocks.{}.attn.hook_z",
    "pattern": "blocks.{}.attn.hook_pattern",
    "resid_pre": "blocks.{}.hook_resid_pre",
    "resid_mid": "blocks.{}.hook_resid_mid",
    "resid_post": "blocks.{}.hook_resid_post",
    "attn_out": "blocks.{}.hook_attn_out",
    "mlp_out": "blocks.{}.hook_mlp_out",
}
FINAL = "ln_final.hook_in"
PREFIX_NODES = ("prefix_kv", "prefix_to_head")
"""Nodes that need no hooks."""
HEAD_NODES = ("z", "pattern")
NODES = (*PREFIX_NODES, *HOOKS, "head_to_logits")
Slots = Literal["prefix", "bos", "prompt", "last", "generated"]
"""Parts of a text by name. The prompt's last token is also a part of the prompt."""
Direction = Literal["denoise", "noise"]
PARTS = ("k", "v", "kv")
At = tuple[int, Any]
"""A layer, and a head, a KV head or a part of the text by name."""
RunMetric = Callable[[Tensor, Tensor], Tensor]
"""Takes the log-probabilities of one run [item step vocab] and its text [item step]; gives one
number for each text and step, [item step]."""
RUN_METRICS = ("favour", "log_prob")
TOLERANCE = 1e-3
"""How far the final residual may be from the sum of what was written into it, relative to its
largest number; 8 rounding steps where these are larger."""


@dataclass(frozen=True)
class Place:
    """What is patched together.

    Attributes:
        where: What names it: layer and head, kv_head or slots, part of the cache, or name.
        at: Pairs of a layer and one of its heads, KV heads or parts of the text.
        part: For nodes of the prefix: "k", "v", or "kv" for both.
    """

    where: Mapping[str, Any]
    at: tuple[At, ...]
    part: str = ""


@dataclass(frozen=True)
class Patching:
    """What each place brings back, or takes away.

    Attributes:
        question: What was asked.
        node, metric: As asked.
        places: What was patched.
        source: D_s by case: the mean over steps in the target's branch.
        destination: D_d by case, in the opposite branch.
        effects: By direction and case, what patching each place moves D towards the other run:
            D_patched - D_d, or D_s - D_patched under noise.
    """

    question: ContrastSet
    node: str
    metric: str
    places: tuple[Place, ...]
    source: Float[np.ndarray, " case"]
    destination: Float[np.ndarray, " case"]
    effects: Mapping[str, Float[np.ndarray, "case place"]]

    def frame(self) -> pd.DataFrame:
        """A row for every direction and place, largest recovery first.

        Columns: direction; what names the place; effect, in the metric's units a step; recovery
        with its 95 % interval over prompts; t, p, p_max (corrected for the number of places) and q;
        rank with its interval. With fewer than 8 prompts there are no p-values: numbers, no claims.
        """
        tables = []
        whole = self.question.by_prompt(self.source - self.destination)
        few = len(whole) < FEW
        for direction, effects in self.effects.items():
            values = self.question.by_prompt(effects)
            with np.errstate(divide="ignore", invalid="ignore"):
                recovery, low, high = share_interval(values, whole)
            tests, order = max_t(values), ranks(values * (np.sign(whole.sum()) or 1.0))
            table = pd.DataFrame([dict(place.where) for place in self.places])
            columns = {
                "effect": values.mean(0),
                "recovery": recovery,
                "low": low,
                "high": high,
                "t": tests.t,
                "p": np.nan if few else tests.p,
                "p_max": np.nan if few else tests.p_max,
                "q": np.nan if few else tests.q,
                "rank": order.rank,
                "rank_low": order.low,
                "rank_high": order.high,
            }
            table = table.assign(**columns).sort_values("rank", ignore_index=True)
            table.insert(0, "direction", direction)
            tables.append(table)
        return pd.concat(tables, ignore_index=True)

    def interval(self) -> pd.DataFrame:
        """What each place recovers with its 95 % interval over prompts, largest first."""
        return self.frame()[["direction", *self.places[0].where, "recovery", "low", "high"]]

    def sums(self) -> pd.DataFrame:
        """What the shares are shares of: D_s, D_d and their difference, with 95 % intervals over
        prompts. Where the difference's interval includes 0, recoveries mean nothing."""
        names = self.question.cases[0].names
        runs = {
            "source": (names[0], self.source),
            "destination": (names[1], self.destination),
            "difference": ("", self.source - self.destination),
        }
        rows = []
        for run, (attribute, values) in runs.items():
            means = self.question.by_prompt(values)
            low, high = bounds(means, np.arange(len(means)))
            row = {"run": run, "attribute": attribute, "mean": means.mean()}
            rows.append(row | {"low": float(low), "high": float(high), "prompts": len(means)})
        return pd.DataFrame(rows)

    def map(
        self, direction: str | None = None, part: str | None = None
    ) -> Float[np.ndarray, "layer column"]:
        """Recoveries of heads or KV heads as a grid; of the residual stream, by layer and part of
        the text, in the order asked for.

        Args:
            direction: By default the first that was asked for.
            part: "k", "v" or "kv", where several were asked for.

        Raises:
            CircuitError: Sets by name have no map; or there are several parts, and none was named.
        """
        names = [name for name in ("head", "kv_head", "slots") if name in self.places[0].where]
        if not names:
            raise CircuitError("sets of places have no map; see frame()")
        chosen = next(iter(self.effects)) if direction is None else direction
        if chosen not in self.effects:
            raise CircuitError(unknown_choice("direction", chosen, self.effects))
        parts = list(dict.fromkeys(place.part for place in self.places))
        if part is None and len(parts) > 1:
            raise CircuitError(f"there is a map for each of {', '.join(parts)}; name one: part=")
        wanted = parts[0] if part is None else part
        if wanted not in parts:
            raise CircuitError(unknown_choice("part", wanted, parts))
        layers = sorted({place.where["layer"] for place in self.places})
        columns = list(dict.fromkeys(place.where[names[0]] for place in self.places))
        grid = np.full((layers[-1] + 1, len(columns)), np.nan)
        whole = self.question.by_prompt(self.source - self.destination).mean()
        means = self.question.by_prompt(self.effects[chosen]).mean(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            recovery = means / whole
        for place, value in zip(self.places, recovery, strict=True):
            if place.part == wanted:
                grid[place.where["layer"], columns.index(place.where[names[0]])] = value
        return grid

    def plot(self) -> Drawing:
        """A map for every direction and part of the cache; of sets, recoveries with intervals."""
        if "name" in self.places[0].where:
            return self._plot_sets()
        parts = list(dict.fromkeys(place.part for place in self.places))
        shown = [
            (direction, part, self.map(direction, part))
            for direction, part in product(self.effects, parts)
        ]
        n_layers, n_columns = shown[0][2].shape
        figure = new_figure((1.6 + 0.2 * n_columns) * len(shown), 1.2 + 0.13 * n_layers)
        found = [np.abs(grid[np.isfinite(grid)]).max(initial=0.0) for _, _, grid in shown]
        top = float(max(found)) or 1.0
        kind = list(self.places[0].where)[1]
        for axes, (direction, part, grid) in zip(
            np.atleast_1d(figure.subplots(1, len(shown))), shown, strict=True
        ):
            drawn = axes.imshow(grid, cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")
            axes.set_title(" ".join((direction, self.node, part)).strip(), fontsize=8)
            plain_axes(axes, kind.replace("_", " "), "layer")
            if kind == "slots":
                axes.set_xticks(
                    range(n_columns), list(dict.fromkeys(p.where["slots"] for p in self.places))
                )
        figure.colorbar(drawn, ax=axes, label=f"recovered {self.metric}, share")
        return figure

    def _plot_sets(self) -> Drawing:
        figure = new_figure(5.2, 0.8 + 0.2 * len(self.places) * len(self.effects))
        axes, table = figure.subplots(), self.frame()
        at = np.arange(len(table))[::-1]
        errors = [table["recovery"] - table["low"], table["high"] - table["recovery"]]
        axes.errorbar(table["recovery"], at, xerr=errors, fmt="o", ms=3, lw=0.8, color="#0072B2")
        axes.axvline(0, color="0.6", lw=0.6)
        axes.set_yticks(at, table["direction"] + " " + table["name"])
        plain_axes(axes, f"recovered {self.metric}, share", self.node)
        return figure


@accepts_model_name
def patch(
    model: Model,
    about: ContrastLike,
    node: str = "prefix_kv",
    *,
    metric: str | RunMetric | None = None,
    direction: str = "denoise",
    slots: Sequence[str] | None = None,
    parts: Sequence[str] | None = None,
    together: Mapping[str, Sequence[At]] | None = None,
    at_once: int | None = None,
    progress: tqdm | None = None,
    **settings: Any,
) -> Patching:
    """How much of the difference between two branches each place of a node carries.

    Args:
        model: A TransformerBridge, with hooks of one's own if there are any; for nodes of the
            prefix also a `TransformersModel`.
        about, settings: As `control`, of two attributes.
        node: One of `NODES`.
        metric: "favour" (lse over the target's words minus lse over the opposite's, of the
            log-probabilities), "log_prob" (of the text's tokens), or a `RunMetric`. By default
            favour, and log_prob where there are no words. The target's favour minus the opposite's
            is the metric lex of `control`.
        direction: "denoise", "noise", or "both".
        slots: Parts of the text by name: "prefix", "bos", "prompt", "last" (the prompt's last
            token), "generated". A place of `z` or `pattern` covers all that are named, by default
            every query after the prefix. The residual nodes have a place for each of them, by
            default all; sets by name (`together`) name theirs themselves. Nothing else takes slots.
        parts: For nodes of the prefix: "k", "v", "kv" (both together), a place for each. By default
            k and v for `prefix_kv`, both together for `prefix_to_head`.
        together: Sets by name, patched together, instead of every place by itself: pairs of a layer
            and a head, a KV head (`prefix_kv`) or a part of the text (residual nodes).
        at_once: Patched texts read together; changes nothing but memory and time.
        progress: A bar to advance by steps read.

    Raises:
        CircuitError: Other than two branches, an unknown name, a place or a hook the model does not
            have, or what the node does not take.
        DeadHookError: A hook of the node does not run.
    """
    question = ContrastSet.of(model, about, **settings)
    if len(question.cases[0].names) != 2:
        raise CircuitError(
            f"patching is between two branches; found {', '.join(question.cases[0].names)}; give"
            " cases of two attributes"
        )
    if direction not in (*get_args(Direction), "both"):
        raise CircuitError(unknown_choice("direction", direction, (*get_args(Direction), "both")))
    if metric is None:
        metric = "favour" if question.words else "log_prob"
    measured = _metric(metric, question)
    slots, parts = ((each,) if isinstance(each, str) else each for each in (slots, parts))
    _check_node(model, question, node, slots, parts)
    places = _places(model, question, node, slots, parts, together)
    run = _runner(model, node, slots)
    asked = get_args(Direction) if direction == "both" else (direction,)
    n_cases, n_places = len(question.cases), len(places)
    sums = np.zeros((2, n_cases))
    effects = {each: np.zeros((n_cases, n_places)) for each in asked}
    most = rows_at_once(model, question.cases, at_once)
    total = sum(case.n for case in question.cases) * n_places * len(asked)
    n_together = max(1, most // n_places)  # cases
    size = max(1, most // n_together)  # places
    work = product(asked, list(batches(question.cases, n_together)), range(0, n_places, size))
    with (
        given_bar(progress, total, f"patching {node}", "step") as bar,
        torch.no_grad(),
        prepacked_model(model),
    ):
        for each, group, first in work:
            cases, some = [question.cases[i] for i in group], places[first : first + size]
            into = 1 if each == "denoise" else 0
            logits = run(cases, some, into)
            found = np.stack([_value(measured, run, cases) for run in logits])
            sums[:, group] = found[:2]
            moved = found[2:] - found[into]
            effects[each][group, first : first + size] = (moved if into else -moved).T
            bar.update(sum(case.n for case in cases) * len(some))
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", "metric")
    return Patching(question, node, name, tuple(places), sums[0], sums[1], effects)


def _metric(metric: str | RunMetric, question: ContrastSet) -> RunMetric:
    if not isinstance(metric, str):
        return metric
    if metric == "log_prob":
        return lambda log_probs, text: log_probs.gather(2, text[:, :, None])[:, :, 0]
    if metric != "favour":
        raise CircuitError(f"{unknown_choice('metric', metric, RUN_METRICS)}, or a function")
    if len(question.words) != 2:
        raise CircuitError(
            "metric favour needs the words of each attribute, as token ids: words={name: ids}"
            " beside cases; metric log_prob does not"
        )
    plus, minus = (list(words) for words in question.words)
    return lambda log_probs, text: (
        log_probs[:, :, plus].logsumexp(2) - log_probs[:, :, minus].logsumexp(2)
    )


def _value(
    metric: RunMetric, logits: Float[Tensor, "case step vocab"], cases: Sequence[ContrastExample]
) -> Float[np.ndarray, " case"]:
    """A run's metric, its mean over steps."""
    text = torch.tensor([case.text for case in cases], device=logits.device)
    wide = torch.promote_types(logits.dtype, torch.float32)
    found = metric(logits.to(wide).log_softmax(2), text)
    if found.shape != text.shape:
        raise CircuitError(
            f"the metric gave numbers of shape {list(found.shape)} for"
            f" {pluralize(text.shape[0], 'text')} of {pluralize(text.shape[1], 'step')}; give one"
            " for each text and step"
        )
    return found.double().mean(1).cpu().numpy()


def _check_node(
    model: Model,
    question: ContrastSet,
    node: str,
    slots: Sequence[str] | None,
    parts: Sequence[str] | None,
) -> None:
    """Refuse what a node, or this model, does not have."""
    if node not in NODES:
        raise CircuitError(unknown_choice("node", node, NODES))
    if parts is not None and node not in PREFIX_NODES:
        raise CircuitError(
            f"parts are keys and values of the prefix; node {node} has none, take"
            f" {' or '.join(PREFIX_NODES)}"
        )
    if slots is not None and node not in HOOKS:
        raise CircuitError(f"node {node} takes no slots; {', '.join(HOOKS)} do")
    for kind, given, allowed in (("slots", slots, get_args(Slots)), ("part", parts, PARTS)):
        if given is not None and (unknown := [name for name in given if name not in allowed]):
            raise CircuitError(unknown_choice(kind, unknown[0], allowed))
        if given is not None and not given:
            raise CircuitError(f"there is nothing to patch: no {kind}; allowed: {allowed}")
    if slots is not None and "prefix" in slots and any(c.layouts[0].soft for c in question.cases):
        raise CircuitError(
            "a soft prefix is keys and values alone: it has no queries to patch; take node"
            " prefix_kv, or other slots"
        )
    if node in PREFIX_NODES:
        return
    if not is_bridge(model) or plain_network(model) is not None:
        raise CircuitError(
            f"node {node} is patched through hooks of a TransformerBridge, and this is a"
            f" {type(model).__name__}; load it as TransformerBridge, or take"
            f" {' or '.join(PREFIX_NODES)}"
        )
    for name in _hook_names(node, range(model.cfg.n_layers)):
        if name not in model.hook_dict:
            reason = (
                ": its blocks compute attention and MLP side by side"
                if node == "resid_mid" and getattr(model.cfg, "parallel_attn_mlp", False)
                else ""
            )
            raise CircuitError(
                f"node {node} needs hook {name}, which this model lacks{reason}; take another node"
            )


def _hook_names(node: str, layers: Sequence[int]) -> list[str]:
    """Hooks that a node's patch goes through."""
    by = {"resid_mid": ("resid_pre", "attn_out", "resid_mid"), "head_to_logits": ("z", "mlp_out")}
    names = [HOOKS[each].format(layer) for layer in layers for each in by.get(node, (node,))]
    if node == "head_to_logits":
        names += [HOOKS["resid_pre"].format(0), FINAL]
    return names


def _places(
    model: Model,
    question: ContrastSet,
    node: str,
    slots: Sequence[str] | None,
    parts: Sequence[str] | None,
    together: Mapping[str, Sequence[At]] | None,
) -> list[Place]:
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    columns: Sequence[Any] = range(n_heads)
    known: Sequence[Any] = ()
    kind = "head"
    if node == "prefix_kv":
        kind, columns = "kv_head", range(n_heads // _group(model))
    elif node in HOOKS and node not in HEAD_NODES:
        soft = any(case.layouts[0].soft for case in question.cases)
        usual = ("bos" if soft else "prefix", "prompt", "last", "generated")
        kind, columns = "slots", usual if slots is None else tuple(slots)
        known = [name for name in get_args(Slots) if not (soft and name == "prefix")]
        if together is not None and slots is not None:
            raise CircuitError(
                f"the sets of together name the parts of the text of node {node} themselves; found"
                f" slots {', '.join(slots)} beside them: leave out slots, or together"
            )
    sets: list[tuple[dict[str, Any], tuple[At, ...]]]
    if together is None:
        every = product(range(n_layers), columns)
        sets = [({"layer": i, kind: j}, ((i, j),)) for i, j in every]
    else:
        sets = [({"name": name}, tuple(pairs)) for name, pairs in together.items()]
        for where, pairs in sets:
            for i, j in pairs:
                if not 0 <= i < n_layers or j not in (known or columns):
                    there = ", ".join(known) or f"0-{len(columns) - 1}"
                    raise CircuitError(
                        f"({i}, {j}) of {where['name']!r} does not exist; node {node} has layers"
                        f" 0-{n_layers - 1}, {kind} {there}"
                    )
            if not pairs:
                raise CircuitError(f"the set {where['name']!r} is empty; give (layer, {kind})")
    if node not in PREFIX_NODES:
        return [Place(where, at) for where, at in sets]
    chosen = parts or (("k", "v") if node == "prefix_kv" else ("kv",))
    return [Place(where | {"part": part}, at, part) for part, (where, at) in product(chosen, sets)]


def _group(model: Model) -> int:
    """Query heads of a KV head."""
    return model.cfg.n_heads // kv_heads(model)


# --- three ways to patch; each gives the runs of target, opposite, and every place

_Run = Callable[[Sequence[ContrastExample], Sequence[Place], int], Tensor]


def _runner(model: Model, node: str, slots: Sequence[str] | None) -> _Run:
    if node in PREFIX_NODES:
        return partial(_through_prefix, model, 1 if node == "prefix_to_head" else _group(model))
    if node == "head_to_logits":
        # Before weights are packed.
        layers = [model.blocks[i].attn for i in range(model.cfg.n_layers)]
        return partial(
            _to_logits, model, [(each.W_O, getattr(each, "b_O", None)) for each in layers]
        )
    return partial(_through_hooks, model, node, slots)


def _through_prefix(
    model: Model, group: int, cases: Sequence[ContrastExample], places: Sequence[Place], into: int
) -> Float[Tensor, "run case step vocab"]:
    """Keys and values of the other prefix, as query heads see them."""
    branches: Branches = "others" if into else "target"
    edits = []
    for place in places:
        heads = tuple((i, head) for i, j in place.at for head in range(j * group, (j + 1) * group))
        edits.append(Edit(heads, "resample", branches=branches, parts=tuple(place.part)))
    logits, _ = edited_logits(model, [(case, edit) for edit in (None, *edits) for case in cases])
    runs = logits.unflatten(1, (1 + len(places), len(cases)))  # branch run case step vocab
    return torch.cat([runs[0, :1], runs[1, :1], runs[into, 1:]])


def _through_hooks(
    model: Model,
    node: str,
    slots: Sequence[str] | None,
    cases: Sequence[ContrastExample],
    places: Sequence[Place],
    into: int,
) -> Float[Tensor, "run case step vocab"]:
    """Rows of both branches and a row for every place, which takes the giving branch's activation
    in its layer. Nothing is kept."""
    n = len(cases)
    gives = slice((1 - into) * n, (2 - into) * n)
    taken: dict[int, list[tuple[tuple, tuple]]] = {}  # by layer, (taking, giving) indices
    for i, place in enumerate(places):
        takes = slice((2 + i) * n, (3 + i) * n)
        for layer, what in place.at:
            names = slots if node in HEAD_NODES else (what,)
            queries = _queries(cases[0], names).tolist()
            index: tuple = (queries,)
            if node in HEAD_NODES:
                index = (queries, what) if node == "z" else (what, queries)
            taken.setdefault(layer, []).append(((takes, *index), (gives, *index)))
    hooks: list[tuple[str, Callable]] = []
    for layer, pairs in taken.items():
        hook = HOOKS[node].format(layer)
        if node == "resid_mid":
            hooks += _residual_hooks(model, layer, pairs)
        else:
            hooks.append((hook, lambda x, hook, pairs=pairs: _take(x, pairs)))
    branches = [0] * n + [1] * n + [into] * (n * len(places))
    with _hooked(model, hooks):
        logits = _pass(model, cases, branches)
    return logits.unflatten(0, (2 + len(places), n))


def _take(x: Tensor, pairs: Sequence[tuple[tuple, tuple]]) -> Tensor:
    x = x.clone()
    for takes, gives in pairs:
        x[takes] = x[gives]
    return x


def _residual_hooks(
    model: Model, layer: int, pairs: Sequence[tuple[tuple, tuple]]
) -> list[tuple[str, Callable]]:
    """A patch of the residual stream between attention and MLP.

    The bridge's hook_resid_mid is what the MLP's norm reads, and a change there does not reach the
    stream itself. So attention's output makes up for the difference.
    """
    before: list[Tensor] = []

    def on_pre(x: Tensor, hook: Any) -> Tensor:
        before[:] = [x]
        return x

    def on_attention(x: Tensor, hook: Any) -> Tensor:
        x = x.clone()
        for takes, gives in pairs:
            x[takes] = x[gives] + before[0][gives] - before[0][takes]
        return x

    def on_mid(x: Tensor, hook: Any) -> Tensor:
        before.clear()
        for takes, gives in pairs:
            _check_equal(model, x[takes], x[gives], "resid_mid")
        return _take(x, pairs)

    steps = {"resid_pre": on_pre, "attn_out": on_attention, "resid_mid": on_mid}
    return [(HOOKS[name].format(layer), step) for name, step in steps.items()]


def _to_logits(
    model: Model,
    weights: Sequence[tuple[Tensor, Tensor | None]],
    cases: Sequence[ContrastExample],
    places: Sequence[Place],
    into: int,
) -> Float[Tensor, "run case step vocab"]:
    """Both branches, and behind the last block a row for every place: the taking branch's residual,
    with what the head writes in the giving one instead of what it writes there."""
    n = len(cases)
    gives, takes = slice((1 - into) * n, (2 - into) * n), slice(into * n, (into + 1) * n)
    change: dict[int, Tensor] = {}  # by place: case query d_model
    total: list[Tensor] = []  # what was written so far

    def on_z(z: Tensor, hook: Any, layer: int) -> Tensor:
        out, bias = weights[layer]
        total[0] = total[0] + torch.einsum("rqhd,hdm->rqm", z, out).float()
        if bias is not None:
            total[0] = total[0] + bias
        for i, place in enumerate(places):
            for head in [head for each, head in place.at if each == layer]:
                written = (z[gives, :, head] - z[takes, :, head]) @ out[head]
                change[i] = change[i] + written if i in change else written
        return z

    def start(x: Tensor, hook: Any) -> Tensor:
        total[:] = [x.float()]
        return x

    def add(x: Tensor, hook: Any) -> Tensor:
        total[0] = total[0] + x
        return x

    def finish(x: Tensor, hook: Any) -> Tensor:
        _check_equal(model, x, total[0], "head_to_logits")
        return torch.cat([x, *(x[takes] + change[i] for i in range(len(places)))])

    hooks: list[tuple[str, Callable]] = [(HOOKS["resid_pre"].format(0), start)]
    for layer in range(model.cfg.n_layers):
        hooks.append((HOOKS["z"].format(layer), partial(on_z, layer=layer)))
        hooks.append((HOOKS["mlp_out"].format(layer), add))
    with _hooked(model, [*hooks, (FINAL, finish)]):
        logits = _pass(model, cases, [0] * n + [1] * n)
    return logits.unflatten(0, (2 + len(places), n))


def _check_equal(model: Model, x: Tensor, expected: Tensor, node: str) -> None:
    """Refuse a model whose residual stream is more than a sum of what its parts write."""
    tolerance = max(TOLERANCE, 8 * torch.finfo(model.cfg.dtype).eps)
    if (x - expected).abs().max() > tolerance * x.abs().max():
        raise CircuitError(
            f"node {node} needs a residual stream that is the sum of what attention and MLPs write;"
            f" {model.cfg.model_name} has norms or factors in between; take z, attn_out, resid_pre"
            " or resid_post"
        )


def _pass(
    model: Model, cases: Sequence[ContrastExample], branches: Sequence[int]
) -> Float[Tensor, "row step vocab"]:
    """One pass over prefix, prompt and text; row i is case i modulo their number."""
    rows = [(cases[i % len(cases)], branch) for i, branch in enumerate(branches)]
    layouts = [
        replace(case.layouts[branch], ids=case.layouts[branch].ids + case.text[:-1])
        for case, branch in rows
    ]
    prefixes = [case.prefixes[branch] for case, branch in rows]
    return BridgeRows(model).prompt_pass(layouts, prefixes, keep=cases[0].n)


@contextmanager
def _hooked(model: Model, hooks: Sequence[tuple[str, Callable]]) -> Iterator[None]:
    """Hooks inside the block, each of which must run."""
    ran = set()

    def noted(x: Tensor, hook: Any, number: int) -> Tensor:
        ran.add(number)
        return hooks[number][1](x, hook=hook)

    noting = [(name, partial(noted, number=i)) for i, (name, _) in enumerate(hooks)]
    with model.hooks(fwd_hooks=noting):
        yield
    silent = [name for i, (name, _) in enumerate(hooks) if i not in ran]
    if silent:
        raise DeadHookError(f"hook {silent[0]} does not run in this model; take another node")


def _queries(case: ContrastExample, slots: Sequence[str] | None) -> Int[np.ndarray, " query"]:
    """Queries of a pass over a case that stand in parts of its text; by default all after the
    prefix."""
    layout = case.layouts[0]
    end = len(layout) + case.n - 1
    spans = {
        "bos": layout.bos,
        "prefix": layout.prefix,
        "prompt": layout.prompt,
        "last": (layout.prompt.stop - 1, layout.prompt.stop),
        "generated": (len(layout), end),
    }
    chosen = [(layout.prefix.stop, end)] if slots is None else [spans[name] for name in slots]
    found = sorted({slot for span in chosen for slot in range(*span)})
    return np.array(found, dtype=int) - layout.soft
