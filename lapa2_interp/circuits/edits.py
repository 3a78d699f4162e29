"""What is changed in a reading: which heads do not see the prefix as it is, and what they see
instead.

What a query after the prefix knows of it comes through the keys and values in the prefix's slots.
So a head is kept from it in four ways:

- `cut`: the keys are blocked, and the head's attention goes to the others in proportion;
- `zero`: the values are 0: the head attends as before and reads nothing;
- `resample`: keys and values are those of the opposite prefix; with several opposites, their mean;
- `mean`: they are the mean over the attributes' prefixes.

`cut` is an augmentation. The other three are read in two copies of a row, behind the prefix's own
keys and values and behind the others. In every layer, the output of the heads that are changed is
taken from the second copy, for both. So the copies carry the same residual stream and differ only
in what is changed, whatever the architecture does between keys and scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lapa2_interp._util.errors import CircuitError, unknown_choice
from lapa2_interp.attention.cache import BridgeRows
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.bias.augmentation import (
    Augmentation,
    AugmentationLike,
    Phase,
    active_augmentations,
)
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.recipes import resolve_recipes
from lapa2_interp.circuits.cases import ContrastExample
from lapa2_interp.models.attention_interface import AttentionHooks, hook_attention
from lapa2_interp.models.blocks import attach_hooks
from lapa2_interp.models.card import Model, is_bridge, plain_network

How = Literal["cut", "zero", "resample", "mean"]
Branches = Literal["target", "others"]
Heads = tuple[tuple[int, int], ...]
MIX = "blocks.{}.attn.hook_z"


@dataclass(frozen=True)
class Edit:
    """Heads that do not see the prefix as it is.

    Attributes:
        heads: (layer, head) pairs.
        how: What they see instead: "cut", "zero", "resample" or "mean"; or "null", which changes
            nothing but the last bit of every output.
        phase: The queries that are changed: "all_queries" all after the prefix (so also what prompt
            tokens copy), "last_query" the last of the prompt and the text's, "decode" the text's,
            "query" the one that predicts alone.
        positions: Positions within the prefix, 0 its first token; None for all of it.
        branches: Which branches are changed, the target's or (all at once) the others'; None for
            all.
        parts: Whether `resample` and `mean` replace keys, values, or both.
    """

    heads: Heads
    how: str = "cut"
    phase: Phase = "all_queries"
    positions: tuple[int, ...] | None = None
    branches: Branches | None = None
    parts: tuple[str, ...] = ("k", "v")

    def __post_init__(self) -> None:
        if self.how not in (*get_args(How), "null"):
            raise CircuitError(unknown_choice("replacement", self.how, get_args(How)))
        if not self.heads:
            raise CircuitError("an edit needs at least one head")

    def touches(self, branch: int) -> bool:
        return self.branches is None or (self.branches == "target") == (branch == 0)

    @property
    def rule(self) -> Augmentation:
        """The edit as an augmentation, if it is a cut."""
        return Augmentation(
            alpha=1,
            law="cut",
            phase=self.phase,
            heads=self.heads,
            span="prefix" if self.positions is None else ("prefix", self.positions),
        )


def edited_logits(
    model: Model,
    items: Sequence[tuple[ContrastExample, Edit | None]],
    augmentation: AugmentationLike = None,
    raw: bool = False,
) -> tuple[Float[Tensor, "branch item step vocab"], Float[Tensor, "item step vocab"] | None]:
    """Logits of every step of some texts, in every branch, each under its edit.

    Args:
        items: Cases of one shape, each with what is changed in it.
        augmentation: What acts in every branch besides.
        raw: Also read the texts without a prefix.

    Returns:
        Logits by branch, the target first; and those without a prefix, where they are asked for.

    Raises:
        CircuitError: The cases have several shapes; the model is a HookedTransformer; or an
            augmentation acts inside the prefix, or is pooled.
    """
    if not is_bridge(model):
        raise CircuitError(
            "circuits are read from a TransformerBridge or a TransformersModel, not from a"
            f" {type(model).__name__}"
        )
    if len({case.shape for case, _ in items}) > 1:
        raise CircuitError("cases that are read together must have one shape; see `batches`")
    n_branches = len(items[0][0].names)
    rows = [(case, edit, branch) for branch in range(n_branches) for case, edit in items]
    logits = _read_rows(model, rows, augmentation)
    found = logits.unflatten(0, (n_branches, len(items)))
    if not raw:
        return found, None
    return found, unprefixed_logits(model, [case for case, _ in items])


_Row = tuple[ContrastExample, Edit | None, int]
"""A case, its edit, and which of its branches."""


def _read_rows(
    model: Model, rows: Sequence[_Row], augmentation: AugmentationLike
) -> Float[Tensor, "row step vocab"]:
    first = rows[0][0]
    device = model.cfg.device
    swapped = [
        i
        for i, (_, edit, branch) in enumerate(rows)
        if edit is not None and edit.how != "cut" and edit.touches(branch)
    ]
    layouts = [case.layouts[branch] for case, _, branch in rows]
    rules: list[tuple[Augmentation, ...]] = []
    for _, edit, branch in rows:
        cut = edit is not None and edit.how == "cut" and edit.touches(branch)
        cuts = (edit.rule,) if cut and edit is not None else ()
        rules.append((*active_augmentations(resolve_recipes(augmentation)), *cuts))
    for layout, row, (_, edit, branch) in zip(layouts, rules, rows, strict=True):
        other = edit is not None and edit.how != "cut" and edit.touches(branch)
        for rule in (*row, *((edit.rule,) if other and edit is not None else ())):
            _check_rule(rule, layout)
    direct = any(rule.phase == "query" for row in rules for rule in row) or any(
        edit is not None and edit.phase == "query" for _, edit, _ in rows
    )
    own = [*layouts, *(layouts[i] for i in swapped)]  # copies of the swapped rows at the end
    prefixes = [case.prefixes[branch] for case, _, branch in rows]
    # 1. The prefix, by itself.
    state = BridgeRows(model)
    fronts = [front_of(each) for each in layouts]
    if layouts[0].soft:
        state.start_after_prefix(layouts, prefixes)
    else:
        with augmented(model, None, fronts):
            state.prompt_pass(fronts)
    index = torch.tensor([*range(len(rows)), *swapped], device=device)
    width = len(layouts[0]) + first.n - 1
    state.expand(index, capacity=width)
    if swapped:
        _replace(state, rows, swapped, fronts[0])
    # 2. Prompt and text behind it.
    ids = [
        [*each.ids[len(front.ids) :], *case.text[:-1]]
        for (case, _, _), each, front in zip(rows, layouts, fronts, strict=True)
    ]
    tokens = torch.tensor([*ids, *(ids[i] for i in swapped)], device=device)
    mix = _Mix(model, rows, swapped) if swapped else None
    with ExitStack() as stack:
        if mix is not None:
            stack.enter_context(mix.applied())
        acting = [*rules, *(rules[i] for i in swapped)]
        if direct and (n_before := tokens.shape[1] - first.n):
            # Keys of a span may be behind these queries, where a rule acts on none of them.
            slots = np.arange(state.cache.get_seq_length(), len(layouts[0]) - 1)
            early = [
                [rule for rule in row if each.acts(rule, slots).any()]
                for row, each in zip(acting, own, strict=True)
            ]
            with augmented(model, early, own):
                state.read_tokens(tokens[:, :n_before])
            tokens = tokens[:, n_before:]
        stack.enter_context(augmented(model, acting, own))
        logits = (
            _read_directly(state, tokens) if direct else state.read_tokens(tokens, keep=first.n)
        )
    return logits[: len(rows)]


def _check_rule(rule: Augmentation, layout: Layout) -> None:
    """Refuse what cannot act here: the prefix is read by itself and the text in one pass."""
    inside = 0 if layout.soft else layout.prefix.stop
    if rule.phase == "every_query" or layout.acts(rule, np.arange(inside)).any():
        raise CircuitError(
            f"circuits read a prefix by itself before anything acts, and {rule.label} acts on"
            f" queries inside it (phase {rule.phase!r}, span {rule.span!r}); use phase"
            " 'last_query' or 'decode', or phase 'all_queries' with span 'prefix'"
        )
    if rule.pooled:
        raise CircuitError(
            f"{rule.label} reads one attention for all queries of a pass, and circuits read a whole"
            " text in one pass, so a step would depend on what comes after it; leave out `pooled`"
        )


def front_of(layout: Layout) -> Layout:
    """A layout up to the end of its prefix."""
    n = 0 if layout.soft else layout.n_bos + layout.l_pre
    return replace(layout, ids=layout.ids[:n], tokens=layout.tokens[:n], l_pro=0)


def _read_directly(state: BridgeRows, tokens: Tensor) -> Float[Tensor, "row step vocab"]:
    """Every step by itself: the query that predicts is the last of its pass, and it is read again,
    clean, before the next."""
    found = []
    for i in range(tokens.shape[1]):
        found.append(state.read_tokens(tokens[:, max(i - 1, 0) : i + 1]))
        state.crop(1)
    return torch.cat(found, dim=1)


def one_pass(augmentation: AugmentationLike, cases: Sequence[ContrastExample], what: str) -> None:
    """Refuse what one pass of prefix, prompt and text has not, and what `edited_logits` refuses.

    Raises:
        CircuitError: Phase "query", under which every step is a pass of its own; or as
            `edited_logits`.
    """
    for rule in active_augmentations(resolve_recipes(augmentation)):
        if rule.phase == "query":
            raise CircuitError(
                f"under phase {rule.phase!r} prefix and text are not read in one pass, and {what}"
                " such a pass; use phase 'last_query', 'decode' or 'all_queries'"
            )
        for layout in {layout for case in cases for layout in case.layouts}:
            _check_rule(rule, layout)


def unprefixed_logits(
    model: Model, cases: Sequence[ContrastExample]
) -> Float[Tensor, "item step vocab"]:
    """Logits of every step of texts of one shape, without a prefix.

    Raises:
        CircuitError: A case has no raw layout.
    """
    layouts = [case.raw for case in cases]
    if any(each is None for each in layouts):
        raise CircuitError(
            "a case has no raw layout, so its text cannot be read without a prefix; make it with"
            " Case.of, or use a metric other than from_raw"
        )
    state = BridgeRows(model)
    logits = [state.prompt_pass([each for each in layouts if each is not None])]
    n = cases[0].n
    if n > 1:
        index = torch.arange(len(cases), device=model.cfg.device)
        state.expand(index, capacity=len(layouts[0] or ()) + n - 1)
        text = torch.tensor([case.text[:-1] for case in cases], device=model.cfg.device)
        logits.append(state.read_tokens(text, keep=n - 1))
    return torch.cat(logits, dim=1)


def _replace(
    state: BridgeRows, rows: Sequence[_Row], swapped: Sequence[int], front: Layout
) -> None:
    """Put other keys and values into the prefix's slots of the copies."""
    n_items = len(rows) // len(rows[0][0].names)
    slots = np.arange(front.prefix.start, front.prefix.stop)
    for layer in state.cache.layers:
        for copy, row in enumerate(swapped, start=len(rows)):
            _, edit, branch = rows[row]
            assert edit is not None
            where = torch.as_tensor(
                slots if edit.positions is None else slots[list(edit.positions)]
            )
            item = row % n_items
            names = range(len(rows[0][0].names))
            # Rows are (branch, item), stacked.
            others = [each for each in names if each != branch] if edit.how == "resample" else names
            for part, store in (("k", layer.keys), ("v", layer.values)):
                if edit.how == "zero":
                    if part == "v":
                        store[copy][:, where] = 0
                elif edit.how != "null" and part in edit.parts:
                    sources = [store[other * n_items + item][:, where] for other in others]
                    store[copy][:, where] = torch.stack(sources).mean(0)


class _Mix:
    """In every layer, give copies and originals the changed heads' output of the copies."""

    def __init__(self, model: Model, rows: Sequence[_Row], swapped: Sequence[int]) -> None:
        self.model, self.swapped = model, list(swapped)
        self.copies = [len(rows) + i for i in range(len(swapped))]
        n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
        heads = np.zeros((n_layers, len(swapped), n_heads), bool)
        self.edits = []
        for i, row in enumerate(swapped):
            case, edit, branch = rows[row]
            assert edit is not None
            self.edits.append((edit, case.layouts[branch]))
            for layer, head in edit.heads:
                if not (0 <= layer < n_layers and 0 <= head < n_heads):
                    raise CircuitError(
                        f"head ({layer}, {head}) does not exist; the model has layers"
                        f" 0-{n_layers - 1}, heads 0-{n_heads - 1}"
                    )
                heads[layer, i, head] = True
        self.heads = torch.from_numpy(heads)
        null = [[edit.how == "null"] for edit, _ in self.edits]
        self.nudged = torch.tensor(null)[:, :, None, None]  # copy 1 1 1
        self.nudge = 1 + torch.finfo(model.cfg.dtype).eps

    def __call__(
        self, layer: int, z: Float[Tensor, "row query head d_head"], first: int
    ) -> Float[Tensor, "row query head d_head"]:
        slots = np.arange(first, first + z.shape[1])
        acts = np.stack(
            [
                each.acts(edit.rule, slots) & (slots == slots[-1])
                if edit.phase == "query"
                else each.acts(edit.rule, slots)
                for edit, each in self.edits
            ]
        )  # copy query
        # Where no head is changed, the copies still follow the originals.
        heads = self.heads[layer].to(z.device)  # copy head
        where = torch.from_numpy(acts).to(z.device)[:, :, None] & heads[:, None]
        changed = torch.where(self.nudged.to(z.device), z[self.copies] * self.nudge, z[self.copies])
        mixed = torch.where(where[..., None], changed, z[self.swapped])
        z = z.clone()
        z[self.swapped] = mixed
        z[self.copies] = mixed
        return z

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The change, in every pass inside the block."""
        held = 0

        def begin(kwargs: dict[str, Any]) -> int:
            nonlocal held
            held = int(kwargs["past_key_values"].get_seq_length())
            return held

        if (plain := plain_network(self.model)) is not None:
            with hook_attention(plain, AttentionHooks(edit_output=self), begin):
                yield
            return

        def on_z(z: Tensor, hook: Any, layer: int) -> Tensor:
            return self(layer, z, held)

        hooks: list[tuple[str, Callable]] = [
            (MIX.format(layer), lambda z, hook, layer=layer: on_z(z, hook, layer))
            for layer in range(self.model.cfg.n_layers)
        ]
        with attach_hooks(self.model, hooks, begin):
            yield
