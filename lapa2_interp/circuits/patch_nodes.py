"""Nodes of activation patching, the units of each node, and three ways to patch them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapa2_interp.bias.places import head_pairs
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.edits import (
    Branches,
    Edit,
    edited_logits,
    text_logits,
)
from lapa2_interp.circuits.examples import ContrastExample
from lapa2_interp.circuits.guard import check_has_hooks
from lapa2_interp.circuits.units import Location, PatchUnit
from lapa2_interp.errors import CircuitError, DeadHookError, unknown_choice
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.hook_names import (
    HOOK_ATTN_OUT,
    HOOK_FINAL_NORM,
    HOOK_MLP_OUT,
    HOOK_PATTERN,
    HOOK_RESID_POST,
    HOOK_RESID_PRE,
    HOOK_Z,
)
from lapa2_interp.models.readable_weights import check_weights_readable

HOOKS: Mapping[str, str] = {
    "z": HOOK_Z,
    "pattern": HOOK_PATTERN,
    "resid_pre": HOOK_RESID_PRE,
    "resid_post": HOOK_RESID_POST,
    "attn_out": HOOK_ATTN_OUT,
    "mlp_out": HOOK_MLP_OUT,
}
PREFIX_NODES = ("prefix_kv", "prefix_to_head")
"""Nodes that need no hooks."""
HEAD_NODES = ("z", "pattern")
NODES = (*PREFIX_NODES, *HOOKS, "head_to_logits")
Slots = Literal["prefix", "bos", "prompt", "last", "generated"]
"""Parts of a text by name. The prompt's last token is also a part of the prompt."""
CACHE_PARTS = ("k", "v", "kv")
RESIDUAL_TOLERANCE = 1e-3
"""Largest distance of the final residual from the sum of what was written into it, relative to its
largest number; or 8 rounding steps, where these are larger."""


def check_node(
    model: Model,
    contrast_set: ContrastSet,
    node: str,
    slots: Sequence[str] | None,
    parts: Sequence[str] | None,
) -> None:
    """Refuse an unknown node, slots or parts that it does not have, and a model without its hooks.

    Raises:
        CircuitError: As `patch`.
    """
    # Node, slots and parts.
    if node not in NODES:
        raise CircuitError(unknown_choice("node", node, NODES))
    if parts is not None and node not in PREFIX_NODES:
        raise CircuitError(
            f"parts are keys and values of the prefix; node {node} has none, take"
            f" {' or '.join(PREFIX_NODES)}"
        )
    if slots is not None and node not in HOOKS:
        raise CircuitError(f"node {node} takes no slots; {', '.join(HOOKS)} do")
    for kind, names, allowed in (("slots", slots, get_args(Slots)), ("part", parts, CACHE_PARTS)):
        if names is not None and (unknown := [name for name in names if name not in allowed]):
            raise CircuitError(unknown_choice(kind, unknown[0], allowed))
        if names is not None and not names:
            raise CircuitError(f"there is nothing to patch: no {kind}; allowed: {allowed}")
    if (
        slots is not None
        and "prefix" in slots
        and any(example.layouts[0].soft for example in contrast_set.examples)
    ):
        raise CircuitError(
            "a soft prefix is keys and values alone: it has no queries to patch; take node"
            " prefix_kv, or other slots"
        )
    # Hooks of the model.
    if node in PREFIX_NODES:
        return
    check_has_hooks(model, f"node {node} is patched", f", or take {' or '.join(PREFIX_NODES)}")
    to_logits = (HOOKS["z"], HOOKS["mlp_out"], HOOKS["resid_pre"], HOOK_FINAL_NORM)
    forms = (HOOKS[node],) if node in HOOKS else to_logits
    names = [form.format(layer) for layer in range(model.cfg.n_layers) for form in forms]
    there = model.hook_dict
    if lacking := [name for name in names if name not in there]:
        raise CircuitError(
            f"node {node} needs hook {lacking[0]}, which this model lacks; take another node"
        )


def make_patch_units(
    model: Model,
    contrast_set: ContrastSet,
    node: str,
    slots: Sequence[str] | None,
    parts: Sequence[str] | None,
    together: Mapping[str, Sequence[Location]] | None,
    keep: Mapping[str, Sequence[Location]] | None = None,
) -> list[PatchUnit]:
    """Units of a node: each location by itself, or sets by name.

    Raises:
        CircuitError: As `patch`.
    """
    # A location is a layer and one of the columns.
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    columns: Sequence[Any] = range(n_heads)
    known: Sequence[Any] = ()
    kind = "head"
    if node == "prefix_kv":
        kind, columns = "kv_head", range(facts_of(model).n_kv_heads)
    elif node in HOOKS and node not in HEAD_NODES:
        soft = any(example.layouts[0].soft for example in contrast_set.examples)
        has_bos = all(example.layouts[0].n_bos for example in contrast_set.examples)
        lacking = {"prefix"} if soft else set()
        lacking |= set() if has_bos else {"bos"}
        first = "bos" if soft else "prefix"
        usual = [name for name in (first, "prompt", "last", "generated") if name not in lacking]
        kind, columns = "slots", usual if slots is None else tuple(slots)
        known = [name for name in get_args(Slots) if name not in lacking]
        if together is not None and slots is not None:
            raise CircuitError(
                f"the sets of together name the parts of the text of node {node} themselves; found"
                f" slots {', '.join(slots)} beside them: leave out slots, or together"
            )
    # Sets by name, with the heads that each keeps.
    sets, kept_heads = (
        {
            name: tuple(pairs) if kind == "slots" else head_pairs(name, pairs, CircuitError)
            for name, pairs in (named_sets or {}).items()
        }
        for named_sets in (together, keep)
    )
    if kept_heads and node not in HEAD_NODES:
        raise CircuitError(f"keep is for nodes {' and '.join(HEAD_NODES)}; found node {node}")
    if unknown := [name for name in kept_heads if name not in sets]:
        raise CircuitError(unknown_choice("set of keep", unknown[0], sets))
    for name, pairs in sets.items():
        own = kept_heads.get(name, ())
        if both := {tuple(pair) for pair in pairs} & {tuple(pair) for pair in own}:
            raise CircuitError(f"set {name!r} patches and keeps {min(both)}; take it from one")
        for i, j in (*pairs, *own):
            if not 0 <= i < n_layers or j not in (known or columns):
                allowed = ", ".join(known) or f"0-{len(columns) - 1}"
                raise CircuitError(
                    f"({i}, {j}) of {name!r} does not exist; node {node} has layers"
                    f" 0-{n_layers - 1}, {kind} {allowed}"
                )
        if not pairs:
            raise CircuitError(f"the set {name!r} is empty; give (layer, {kind})")
    if together is None:
        every = product(range(n_layers), columns)
        units = [PatchUnit({"layer": i, kind: j}, ((i, j),)) for i, j in every]
    else:
        units = [
            PatchUnit({"name": name}, sets[name], kept=kept_heads.get(name, ())) for name in sets
        ]
    if node not in PREFIX_NODES:
        return units
    chosen = parts or (("k", "v") if node == "prefix_kv" else ("kv",))
    return [
        replace(unit, labels={**unit.labels, "part": part}, part=part)
        for part, unit in product(chosen, units)
    ]


PatchedRuns = Callable[[Sequence[ContrastExample], Sequence[PatchUnit], int], Tensor]
"""Takes examples, units, and the branch that is patched (0 or 1); gives logits of the target's run,
the opposite run, and a run for every unit."""


def patched_runs(model: Model, node: str, slots: Sequence[str] | None) -> PatchedRuns:
    """The function that patches a node: through the cache, the final norm, or hooks."""
    if node in PREFIX_NODES:
        group = 1 if node == "prefix_to_head" else model.cfg.n_heads // facts_of(model).n_kv_heads
        return partial(_through_prefix, model, group)
    if node == "head_to_logits":
        check_weights_readable(model, "what heads write into the logits is computed from")
        # The weights are read before they are prepacked.
        layers = [model.blocks[i].attn for i in range(model.cfg.n_layers)]
        return partial(
            _to_logits, model, [(attn.W_O, getattr(attn, "b_O", None)) for attn in layers]
        )
    return partial(_through_hooks, model, node, slots)


def _through_prefix(
    model: Model,
    group: int,
    examples: Sequence[ContrastExample],
    units: Sequence[PatchUnit],
    into: int,
) -> Float[Tensor, "run example step vocab"]:
    """Patch keys and values of the prefix, as query heads see them, by a resampling edit."""
    branches: Branches = "others" if into else "target"
    edits = []
    for unit in units:
        heads = tuple(
            (i, head) for i, j in unit.heads for head in range(j * group, (j + 1) * group)
        )
        edits.append(Edit(heads, "resample", branches=branches, parts=tuple(unit.part)))
    logits = edited_logits(
        model, [(example, edit) for edit in (None, *edits) for example in examples]
    )
    runs = logits.unflatten(1, (1 + len(units), len(examples)))  # branch run example step vocab
    return torch.cat([runs[0, :1], runs[1, :1], runs[into, 1:]])


def _through_hooks(
    model: Model,
    node: str,
    slots: Sequence[str] | None,
    examples: Sequence[ContrastExample],
    units: Sequence[PatchUnit],
    into: int,
) -> Float[Tensor, "run example step vocab"]:
    """Patch at hooks in one forward pass: rows of both branches, and a row for every unit, which
    takes the giving branch's activation in its layer, and what it keeps from its own branch."""
    n = len(examples)
    # Indices of each patch.
    gives, own = (slice(branch * n, (branch + 1) * n) for branch in (1 - into, into))
    taken: dict[int, list[tuple[tuple, tuple]]] = {}  # by layer, (taking, giving) indices
    for i, unit in enumerate(units):
        takes = slice((2 + i) * n, (3 + i) * n)
        for rows, (layer, column) in (
            *product([gives], unit.heads),
            *product([own], unit.kept),
        ):
            names = slots if node in HEAD_NODES else (column,)
            queries = _queries(examples[0], names).tolist()
            index: tuple = (queries,)
            if node in HEAD_NODES:
                index = (queries, column) if node == "z" else (column, queries)
            taken.setdefault(layer, []).append(((takes, *index), (rows, *index)))
    hooks: list[tuple[str, Callable]] = [
        (HOOKS[node].format(layer), lambda x, hook, pairs=pairs: _take(x, pairs))
        for layer, pairs in taken.items()
    ]
    return _hooked_logits(model, examples, (0, 1, *[into] * len(units)), hooks)


def _take(x: Tensor, pairs: Sequence[tuple[tuple, tuple]]) -> Tensor:
    """Copy values to the taking indices from the giving ones."""
    x = x.clone()
    for takes, gives in pairs:
        x[takes] = x[gives]
    return x


def _to_logits(
    model: Model,
    weights: Sequence[tuple[Tensor, Tensor | None]],
    examples: Sequence[ContrastExample],
    units: Sequence[PatchUnit],
    into: int,
) -> Float[Tensor, "run example step vocab"]:
    """Patch heads' outputs in the final norm's input: after the last block, a row for every unit
    has the taking branch's residual with the heads' outputs of the giving branch."""
    n = len(examples)
    gives, takes = slice((1 - into) * n, (2 - into) * n), slice(into * n, (into + 1) * n)
    change: dict[int, Tensor] = {}  # by unit: example query d_model
    total: list[Tensor] = []  # the sum of all outputs so far, to check the residual stream

    def on_z(z: Tensor, hook: Any, layer: int) -> Tensor:
        out, bias = weights[layer]
        total[0] = total[0] + torch.einsum("rqhd,hdm->rqm", z, out).float()
        if bias is not None:
            total[0] = total[0] + bias
        for i, unit in enumerate(units):
            for head in [head for unit_layer, head in unit.heads if unit_layer == layer]:
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
        _check_is_sum(model, x, total[0])
        return torch.cat([x, *(x[takes] + change[i] for i in range(len(units)))])

    hooks: list[tuple[str, Callable]] = [(HOOKS["resid_pre"].format(0), start)]
    for layer in range(model.cfg.n_layers):
        hooks.append((HOOKS["z"].format(layer), partial(on_z, layer=layer)))
        hooks.append((HOOKS["mlp_out"].format(layer), add))
    return _hooked_logits(model, examples, (0, 1), [*hooks, (HOOK_FINAL_NORM, finish)])


def _check_is_sum(model: Model, x: Tensor, expected: Tensor) -> None:
    """Refuse a model whose residual stream is not the sum of the outputs of attention and MLPs."""
    tolerance = max(RESIDUAL_TOLERANCE, 8 * torch.finfo(facts_of(model).dtype).eps)
    if (x - expected).abs().max() > tolerance * x.abs().max():
        raise CircuitError(
            "node head_to_logits needs a residual stream that is the sum of what attention and MLPs"
            f" write; {model.cfg.model_name} has norms or factors in between; take z, attn_out,"
            " resid_pre or resid_post"
        )


def _hooked_logits(
    model: Model,
    examples: Sequence[ContrastExample],
    branches: Sequence[int],
    hooks: Sequence[tuple[str, Callable]],
) -> Float[Tensor, "run example step vocab"]:
    """Logits of the examples' runs in these branches, and of runs that the hooks add.

    Raises:
        DeadHookError: One of the hooks did not run.
    """
    rows = [(example, branch) for branch in branches for example in examples]
    try:
        logits = text_logits(model, rows, hooks)
    except DeadHookError as error:
        raise DeadHookError(f"{error}; or take another node") from error
    return logits.unflatten(0, (-1, len(examples)))


def _queries(example: ContrastExample, slots: Sequence[str] | None) -> Int[np.ndarray, " query"]:
    """Queries of an example that lie in parts of its text; by default all after the prefix."""
    layout = example.layouts[0]
    end = len(layout) + example.n_steps - 1
    spans = {
        "bos": layout.bos,
        "prefix": layout.prefix,
        "prompt": layout.prompt,
        "last": (layout.prompt.stop - 1, layout.prompt.stop),
        "generated": (len(layout), end),
    }
    chosen = [(layout.prefix.stop, end)] if slots is None else [spans[name] for name in slots]
    slots_of_parts = sorted({slot for span in chosen for slot in range(*span)})
    return np.array(slots_of_parts, dtype=int) - layout.soft
