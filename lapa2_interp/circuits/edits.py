"""Edits of a forward pass: heads that see a replacement instead of the prefix.

A query after the prefix sees it through the keys and values in the prefix's slots alone. So there
are four replacements:

- `cut`: the keys are blocked, and the head's attention goes to the others in proportion;
- `zero`: the values are 0: the head attends as before and reads nothing;
- `resample`: keys and values are those of the opposite prefix, or the mean of several opposites;
- `mean`: keys and values are the mean over the attributes' prefixes.

`cut` is an augmentation. The other three use a second row, the copy, and only the copy's cache
holds the replaced keys and values. In each layer the output of the edited heads is taken from the
copy and written into both rows, so that all else is equal in both. This works however a model
computes scores from keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from lapa2_interp.attention.cache import BridgeRows
from lapa2_interp.attention.cached_heads import SlotLayer
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.attention.soft_arguments import soft_inputs
from lapa2_interp.bias.augmentation import (
    Augmentation,
    AugmentationLike,
    Phase,
    active_augmentations,
)
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.recipes import resolve_recipes
from lapa2_interp.circuits.clean_pass import CleanPass, layers_to_keep
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.examples import ContrastExample, batches
from lapa2_interp.circuits.guard import check_model_class, check_rule
from lapa2_interp.circuits.metrics import Metric, Predictions
from lapa2_interp.errors import CircuitError, unknown_choice
from lapa2_interp.models.attention_interface import AttentionHooks, hook_attention
from lapa2_interp.models.blocks import attach_hooks
from lapa2_interp.models.card import prepacked_model
from lapa2_interp.models.facts import Model, facts_of
from lapa2_interp.models.hook_names import HOOK_Z

Replacement = Literal["cut", "zero", "resample", "mean"]
Branches = Literal["target", "others"]
Heads = tuple[tuple[int, int], ...]
LOGIT_BYTES = 2**28
"""Memory for the logits of a batch."""
LEAST_SAVED = 2
"""Passes that edits must save by a clean pass, which takes one itself, to be worth it."""


@dataclass(frozen=True)
class Edit:
    """Heads that see a replacement instead of the prefix.

    Attributes:
        heads: (layer, head) pairs.
        replacement: "cut", "zero", "resample" or "mean"; or "null", which changes the last bit of
            every output and nothing else.
        phase: The edited queries: "after_span" all after the prefix (also the prompt's),
            "last_query" the prompt's last and the text's, "decode" the text's, "predicting_only"
            the predicting one alone.
        positions: Positions within the prefix, 0 its first token; None for all of it.
        branches: The edited branches: "target", "others" (all at once), or None for all.
        parts: The parts that `resample` and `mean` replace: "k", "v", or both.
    """

    heads: Heads
    replacement: str = "cut"
    phase: Phase = "after_span"
    positions: tuple[int, ...] | None = None
    branches: Branches | None = None
    parts: tuple[str, ...] = ("k", "v")

    def __post_init__(self) -> None:
        if self.replacement not in (*get_args(Replacement), "null"):
            raise CircuitError(
                unknown_choice("replacement", self.replacement, get_args(Replacement))
            )
        if not self.heads:
            raise CircuitError("an edit needs at least one head")

    def applies_to(self, branch: int) -> bool:
        """True if a branch is edited."""
        return self.branches is None or (self.branches == "target") == (branch == 0)

    @property
    def augmentation(self) -> Augmentation:
        """The edit as an augmentation that cuts the prefix; of other replacements, its scope."""
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
    clean: CleanPass | None = None,
) -> Float[Tensor, "branch item step vocab"]:
    """Logits of every step of texts, in every branch, each under its edit.

    Args:
        items: Pairs of an example and its edit (None for no edit); the examples have one shape.
        augmentation: One or more augmentations that act in every branch besides.
        clean: A clean pass of a group of examples, where the items are the whole group under one
            edit, then the whole group under the next, and so on.

    Returns:
        Logits by branch, the target first.

    Raises:
        CircuitError: The examples have different shapes; the model is a HookedTransformer; or an
            augmentation acts inside the prefix, or is pooled.
    """
    check_model_class(model)
    if len({example.shape for example, _ in items}) > 1:
        raise CircuitError("examples of a batch must have one shape; see `batches`")
    n_branches = len(items[0][0].attributes)
    rows = [(example, edit, branch) for branch in range(n_branches) for example, edit in items]
    logits = _forward_rows(model, rows, augmentation, clean)
    return logits.unflatten(0, (n_branches, len(items)))


def items_per_batch(
    model: Model, examples: Sequence[ContrastExample], requested: int | None = None
) -> int:
    """The requested number; else as many items as have their logits in `LOGIT_BYTES`, each counted
    as the largest of these examples."""
    if requested is not None:
        return requested
    largest = max(example.n_branch_steps for example in examples)
    return max(1, LOGIT_BYTES // (4 * largest * model.cfg.d_vocab))


def evaluate_edits(
    model: Model,
    contrast_set: ContrastSet,
    edits: Sequence[Edit | None],
    metrics: dict[str, Metric],
    augmentation: AugmentationLike = None,
    progress: tqdm | None = None,
    batch_size: int | None = None,
) -> Iterator[tuple[int, list[int], dict[str, Float[Tensor, "item step"]]]]:
    """Metrics of every example under every edit.

    Args:
        batch_size: Items in one forward pass; changes nothing but memory
            and time.

    Yields:
        The edit's number, the examples' numbers, and the metrics of those examples by name. Edits
        that share a batch come together: all examples of these, then the next edits.
    """
    most = items_per_batch(model, contrast_set.examples, batch_size)
    groups = list(batches(contrast_set.examples, most))
    size = max(1, most // max(map(len, groups)))  # edits in a batch
    with torch.no_grad(), prepacked_model(model):
        clean = _clean_passes(model, contrast_set, groups, edits, augmentation)
        for first in range(0, len(edits), size):
            block = range(first, min(first + size, len(edits)))
            for group, group_pass in zip(groups, clean, strict=True):
                items = [
                    (contrast_set.examples[i], edits[number]) for number in block for i in group
                ]
                examples = [example for example, _ in items]
                logits = edited_logits(model, items, augmentation, group_pass)
                raw = unprefixed_logits(model, examples) if "from_raw" in metrics else None
                text = torch.tensor([example.text for example in examples], device=logits.device)
                predictions = Predictions(logits, text, raw, contrast_set.words)
                values = {
                    name: _metric_values(name, metric, predictions)
                    for name, metric in metrics.items()
                }
                for at, number in enumerate(block):
                    part = slice(at * len(group), (at + 1) * len(group))
                    yield number, group, {name: of_items[part] for name, of_items in values.items()}
                if progress is not None:
                    progress.update(sum(example.n_branch_steps for example in examples))


def _clean_passes(
    model: Model,
    contrast_set: ContrastSet,
    groups: Sequence[Sequence[int]],
    edits: Sequence[Edit | None],
    augmentation: AugmentationLike,
) -> list[CleanPass | None]:
    """A clean pass of each group; None where edits would save too little by it, or nothing."""
    by_step = any(edit is not None and edit.phase == "predicting_only" for edit in edits)
    everywhere = active_augmentations(resolve_recipes(augmentation))
    saved = sum(min(layer for layer, _ in edit.heads) for edit in edits if edit)
    too_little = saved < LEAST_SAVED * model.cfg.n_layers
    if by_step or everywhere or too_little or facts_of(model).backend == "plain":
        return [None] * len(groups)
    after_prefixes = [
        read_prefixes(
            model,
            [
                (contrast_set.examples[i], branch)
                for branch in range(len(contrast_set.attributes))
                for i in group
            ],
        )
        for group in groups
    ]
    layers = after_prefixes[0][0].cache.layers
    if not all(isinstance(layer, SlotLayer) for layer in layers):  # others hold more than own keys
        return [None] * len(groups)
    n_tokens = sum(tokens.numel() for _, tokens in after_prefixes)
    size = torch.finfo(facts_of(model).dtype).bits // 8
    stored_layers = layers_to_keep(model.cfg.n_layers, n_tokens * model.cfg.d_model * size)
    passes = [
        CleanPass.read(model, cached, tokens, stored_layers) for cached, tokens in after_prefixes
    ]
    is_whole = passes[0].is_whole(model)
    return [clean if is_whole else replace(clean, residuals={}) for clean in passes]


def _metric_values(
    name: str, metric: Metric, predictions: Predictions
) -> Float[Tensor, "item step"]:
    """Values of a metric. Another shape is refused, but fewer steps are allowed."""
    value, (n, steps) = metric(predictions), predictions.text.shape
    good = isinstance(value, Tensor) and value.ndim == 2 and len(value) == n
    if not good or not 1 <= value.shape[1] <= steps:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise CircuitError(
            f"metric {name!r} must give a number for each text and step, a tensor of shape"
            f" {(n, steps)} here; found {got}"
        )
    return value


_Row = tuple[ContrastExample, Edit | None, int]
"""What is read in a row of the batch: an example, its edit, and the number of the branch."""


def _forward_rows(
    model: Model,
    rows: Sequence[_Row],
    augmentation: AugmentationLike,
    clean: CleanPass | None,
) -> Float[Tensor, "row step vocab"]:
    """Logits of rows that share a batch: the prefix first, then prompt and text."""
    # Rows that need a copy, and the augmentations of each row.
    n_steps, n_branches = rows[0][0].n_steps, len(rows[0][0].attributes)
    layouts = [example.layouts[branch] for example, _, branch in rows]
    edits = [edit if edit and edit.applies_to(branch) else None for _, edit, branch in rows]
    copied = [i for i, edit in enumerate(edits) if edit and edit.replacement != "cut"]
    always = tuple(active_augmentations(resolve_recipes(augmentation)))
    rules = [
        (*always, edit.augmentation) if edit and edit.replacement == "cut" else always
        for edit in edits
    ]
    for layout, edit in zip(layouts, edits, strict=True):
        for rule in (*always, edit.augmentation) if edit else always:
            check_rule(rule, layout)
    phases = {rule.phase for rule in always} | {edit.phase for _, edit, _ in rows if edit}
    by_step = "predicting_only" in phases
    all_layouts = [*layouts, *(layouts[i] for i in copied)]  # copies stand at the end
    # The prefix has a forward pass of its own; prompt and text follow it.
    index = torch.tensor([*range(len(rows)), *copied], device=model.cfg.device)
    begin = 0
    if clean is None:
        cached_rows, tokens = read_prefixes(
            model, [(example, branch) for example, _, branch in rows]
        )
        cached_rows.expand(index, capacity=len(layouts[0]) + n_steps - 1)
        tokens = tokens[index]
    else:
        items, group = len(rows) // n_branches, len(clean.tokens) // n_branches
        index = index // items * group + index % items % group  # rows of the clean pass
        cached_rows, tokens = clean.rows_again(index), clean.tokens[index]
        lowest = [layer for edit in edits if edit for layer, _ in edit.heads]
        begin = clean.first_layer(min(lowest, default=model.cfg.n_layers))
    if copied:
        _write_replacements(cached_rows, rows, copied)
    with ExitStack() as stack:
        if clean is not None:
            stack.enter_context(clean.skip_below(begin, model, cached_rows, index))
        if copied:
            stack.enter_context(_heads_from_copies(model, rows, copied, begin))
        acting = [*rules, *(rules[i] for i in copied)]
        if by_step and (n_before := tokens.shape[1] - n_steps):
            # A rule that acts on none of these queries may have a span after them.
            slots = np.arange(cached_rows.cache.get_seq_length(), len(layouts[0]) - 1)
            early = [
                [rule for rule in row if layout.acts(rule, slots).any()]
                for row, layout in zip(acting, all_layouts, strict=True)
            ]
            with augmented(model, early, all_layouts):
                cached_rows.read_tokens(tokens[:, :n_before])
            tokens = tokens[:, n_before:]
        stack.enter_context(augmented(model, acting, all_layouts))
        logits = (
            _forward_by_step(cached_rows, tokens)
            if by_step
            else cached_rows.read_tokens(tokens, keep=n_steps)
        )
    return logits[: len(rows)]


def read_prefixes(
    model: Model, rows: Sequence[tuple[ContrastExample, int]], shift: int = 0
) -> tuple[BridgeRows, Int[Tensor, "row token"]]:
    """Read the prefixes of examples' branches, in a pass of their own.

    Args:
        shift: Added to the positions of this pass and of all later ones.

    Returns:
        The rows with the prefix in their cache, and the tokens of prompt and text that follow it.

    Raises:
        CircuitError: A shift with a soft prefix, whose keys stay where they were trained.
    """
    cached_rows, layouts = BridgeRows(model), [example.layouts[branch] for example, branch in rows]
    cached_rows.shift = shift
    if layouts[0].soft:
        if shift:
            raise CircuitError("the keys of a soft prefix have fixed positions; give hard prefixes")
        n = 0
        cached_rows.start_after_prefix(
            layouts, [example.prefixes[branch] for example, branch in rows]
        )
    else:
        n = layouts[0].prefix.stop
        fronts = [
            replace(layout, ids=layout.ids[:n], tokens=layout.tokens[:n], l_pro=0)
            for layout in layouts
        ]
        with augmented(model, None, fronts):
            cached_rows.prompt_pass(fronts)
    ids = [
        with_text(layout, example.text).ids[n:]
        for layout, (example, _) in zip(layouts, rows, strict=True)
    ]
    return cached_rows, torch.tensor(ids, device=model.cfg.device)


def _forward_by_step(cached_rows: BridgeRows, tokens: Tensor) -> Float[Tensor, "row step vocab"]:
    """One forward pass a step: the predicting query is the last of its pass, and the next pass
    reads it again without the edit."""
    logits = []
    for i in range(tokens.shape[1]):
        logits.append(cached_rows.read_tokens(tokens[:, max(i - 1, 0) : i + 1]))
        cached_rows.crop(1)
    return torch.cat(logits, dim=1)


def with_text(layout: Layout, text: Sequence[int]) -> Layout:
    """The layout with a text behind its prompt, without the text's last token, which predicts
    nothing."""
    return replace(layout, ids=(*layout.ids, *text[:-1]))


def text_logits(
    model: Model,
    rows: Sequence[tuple[ContrastExample, int]],
    hooks: Sequence[tuple[str, Callable]],
    augmentation: AugmentationLike = None,
) -> Float[Tensor, "row step vocab"]:
    """Logits of every step, by one pass over prefix, prompt and text.

    Args:
        rows: Examples of one shape, each with the number of its branch.
        hooks: Names of the model's hooks, and functions of an activation and its hook.

    Raises:
        DeadHookError: One of the hooks did not run.
    """
    layouts = [example.layouts[branch] for example, branch in rows]
    inputs = soft_inputs(
        model,
        [
            with_text(layout, example.text)
            for layout, (example, _) in zip(layouts, rows, strict=True)
        ],
        [example.prefixes[branch] for example, branch in rows],
    )
    n = rows[0][0].n_steps
    rules = active_augmentations(resolve_recipes(augmentation))
    with augmented(model, rules, layouts), attach_hooks(model, hooks):
        return model(**inputs, logits_to_keep=n)[:, -n:]


def unprefixed_logits(
    model: Model, examples: Sequence[ContrastExample]
) -> Float[Tensor, "item step vocab"]:
    """Logits of every step of texts of one shape, without a prefix.

    Raises:
        CircuitError: An example has no raw layout.
    """
    layouts = [example.raw for example in examples]
    if any(layout is None for layout in layouts):
        raise CircuitError(
            "an example has no raw layout, so its text cannot be read without a prefix; make it"
            " with ContrastExample.of, or use a metric other than from_raw"
        )
    cached_rows = BridgeRows(model)
    logits = [cached_rows.prompt_pass([layout for layout in layouts if layout is not None])]
    n = examples[0].n_steps
    if n > 1:
        index = torch.arange(len(examples), device=model.cfg.device)
        cached_rows.expand(index, capacity=len(layouts[0] or ()) + n - 1)
        text = torch.tensor([example.text[:-1] for example in examples], device=model.cfg.device)
        logits.append(cached_rows.read_tokens(text, keep=n - 1))
    return torch.cat(logits, dim=1)


def _write_replacements(
    cached_rows: BridgeRows, rows: Sequence[_Row], copied: Sequence[int]
) -> None:
    """Replace keys and values in the prefix's slots of the copies."""
    branches = range(len(rows[0][0].attributes))
    n_items, prefix = len(rows) // len(branches), rows[0][0].layouts[0].prefix
    slots = np.arange(prefix.start, prefix.stop)
    for copy, row in enumerate(copied, start=len(rows)):
        _, edit, branch = rows[row]
        assert edit is not None
        where = torch.as_tensor(slots if edit.positions is None else slots[list(edit.positions)])
        resample = edit.replacement == "resample"
        # Rows are (branch, item), stacked.
        sources = [
            source * n_items + row % n_items
            for source in branches
            if not (resample and source == branch)
        ]
        for layer in cached_rows.cache.layers:
            for part, store in (("k", layer.keys), ("v", layer.values)):
                if edit.replacement == "zero":
                    if part == "v":
                        store[copy][:, where] = 0
                elif edit.replacement != "null" and part in edit.parts:
                    of_sources = [store[source][:, where] for source in sources]
                    store[copy][:, where] = torch.stack(of_sources).mean(0)


@contextmanager
def _heads_from_copies(
    model: Model, rows: Sequence[_Row], copied: Sequence[int], begin: int
) -> Iterator[None]:
    """Inside the block originals and copies take the edited heads' output, in every layer from
    `begin` on, from the copies, and all other output from the originals."""
    originals, copies = list(copied), [len(rows) + i for i in range(len(copied))]
    edits, layouts = [], []
    for example, edit, branch in (rows[row] for row in copied):
        assert edit is not None
        edits.append(edit)
        layouts.append(example.layouts[branch])
    rules = [edit.augmentation for edit in edits]
    size = model.cfg.n_layers, model.cfg.n_heads
    heads = torch.from_numpy(np.stack([rule.head_mask(*size) for rule in rules]))  # copy layer head
    dtype = facts_of(model).dtype
    step = torch.finfo(dtype).eps
    nudge = torch.tensor([1 + step * (edit.replacement == "null") for edit in edits], dtype=dtype)
    first_query = 0

    def note_first(arguments: dict[str, Any], first: int) -> None:
        nonlocal first_query
        first_query = first

    def mix(
        layer: int, z: Float[Tensor, "row query head d_head"], first: int
    ) -> Float[Tensor, "row query head d_head"]:
        slots = np.arange(first, first + z.shape[1])
        acts = np.stack(
            [
                layout.acts(rule, slots)
                & ((rule.phase != "predicting_only") | (slots == slots[-1]))
                for rule, layout in zip(rules, layouts, strict=True)
            ]
        )  # copy query
        where = torch.from_numpy(acts)[:, :, None] & heads[:, layer][:, None]  # copy query head
        changed = z[copies] * nudge[:, None, None, None].to(z)
        mixed = torch.where(where[..., None].to(z.device), changed, z[originals])
        z = z.clone()
        z[originals] = mixed
        z[copies] = mixed
        return z

    if facts_of(model).backend == "plain":
        with hook_attention(facts_of(model), AttentionHooks(edit_output=mix)):
            yield
        return
    hooks: list[tuple[str, Callable]] = [
        (HOOK_Z.format(layer), lambda z, hook, layer=layer: mix(layer, z, first_query))
        for layer in range(begin, size[0])
    ]
    with attach_hooks(model, hooks, note_first):
        yield
