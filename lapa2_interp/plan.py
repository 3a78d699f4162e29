"""A generation resolved before anything runs: layouts, augmentations, steps, and which samples share a batch.

Axes: branch = one model call of the method; a batch's rows are branch x sample, stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from lapa2_interp.attention.hooked import Model, is_bridge
from lapa2_interp.augmentation import Augmentation
from lapa2_interp.errors import AugmentationError, LayoutError, MethodError
from lapa2_interp.kit import ModelKit
from lapa2_interp.layout import Layout, layout, left_pad
from lapa2_interp.methods import Branch, Kit, Method, Prepared, Soft
from lapa2_interp.prefixes import SoftName, SoftPrefix, find_prefix
from lapa2_interp.progress import progress_bar
from lapa2_interp.sampling import uniforms
from lapa2_interp.tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_ROWS = 120
CACHE_BYTES = 2 << 30


@dataclass(frozen=True)
class Batch:
    """Samples that are decoded together.

    Attributes:
        pairs: (prompt number, sample number) of each sample.
        layouts: Left-padded, branch by branch one per prompt used.
        prefixes: The soft prefix of each, or None.
        owner: Which of the batch's prompts each sample continues.
        steps: New tokens of each sample.
        uniform: Its random numbers, [sample, step].
        prepared: What the method worked out about each of the batch's prompts.
    """

    pairs: tuple[tuple[int, int], ...]
    layouts: tuple[Layout, ...]
    prefixes: tuple[SoftPrefix | None, ...]
    owner: tuple[int, ...]
    steps: tuple[int, ...]
    uniform: Float[np.ndarray, "sample step"]
    prepared: tuple[Prepared, ...]

    @property
    def n_prompts(self) -> int:
        return max(self.owner) + 1

    @property
    def expansion(self) -> list[int]:
        """For each row of the expanded batch (branch x sample) the row of the prompt pass (branch x prompt) it copies."""
        return [first + own for first in range(0, len(self.layouts), self.n_prompts) for own in self.owner]

    @property
    def sample_layouts(self) -> list[Layout]:
        """The layouts of the expanded rows."""
        return [self.layouts[row] for row in self.expansion]


@dataclass(frozen=True)
class Plan:
    """A resolved call of `generate`: every branch's layout per prompt, and who shares a batch.

    Attributes:
        layouts: By branch, then prompt.
        prefixes: By branch, its soft prefix or None.
        augmentations: By branch.
        steps: New tokens per prompt.
        prepared: What the method worked out about each prompt.
        groups: Batches of (prompt number, sample number).
    """

    method: Method
    task: Task
    attribute: str
    prompts: tuple[str, ...]
    branches: tuple[str, ...]
    layouts: tuple[tuple[Layout, ...], ...]
    prefixes: tuple[SoftPrefix | None, ...]
    augmentations: tuple[Augmentation | None, ...]
    steps: tuple[int, ...]
    prepared: tuple[Prepared, ...] = field(repr=False)
    groups: tuple[tuple[tuple[int, int], ...], ...] = field(repr=False)

    def batch(self, group: Sequence[tuple[int, int]], seed: int) -> Batch:
        """What one group needs to run."""
        used = sorted({prompt for prompt, _ in group})
        steps = tuple(self.steps[prompt] for prompt, _ in group)
        uniform = np.zeros((len(group), max(steps)))
        for row, (prompt, sample), n in zip(uniform, group, steps, strict=True):
            row[:n] = uniforms(seed, self.prompts[prompt], sample, n)
        return Batch(
            pairs=tuple(group),
            layouts=tuple(left_pad([row[prompt] for row in self.layouts for prompt in used])),
            prefixes=tuple(prefix for prefix in self.prefixes for _ in used),
            owner=tuple(used.index(prompt) for prompt, _ in group),
            steps=steps,
            uniform=uniform,
            prepared=tuple(self.prepared[prompt] for prompt in used),
        )

    @property
    def prefix_names(self) -> dict[str, str | SoftName | None]:
        """What stands in front of the prompt, by branch: a text, a soft prefix, or nothing."""
        found: dict[str, str | SoftName | None] = {}
        for branch, prefix in zip(self.method.branches(self.task, self.attribute), self.prefixes, strict=True):
            found[branch.name] = prefix.card.name if prefix is not None else branch.prefix  # type: ignore[assignment]
        return found

    @property
    def new_tokens(self) -> int:
        return sum(self.steps[prompt] for group in self.groups for prompt, _ in group)

    @property
    def summaries(self) -> dict[str, dict[str, Any]]:
        """What the method worked out, by prompt, or under "all prompts" where it is the same; empty if nothing."""
        found = [dict(each.summary) for each in self.prepared]
        if all(each == found[0] for each in found):
            return {"all prompts": found[0]} if found[0] else {}
        return dict(zip(self.prompts, found, strict=True))

    def tokens_read(self, anew: bool) -> int:
        """Tokens that go through the model, read once each or with the whole text at every step."""
        total = 0
        for row in self.layouts:
            for group in self.groups:
                for prompt, _ in group:
                    first, new = row[prompt].n_live, self.steps[prompt]
                    total += new * first + new * (new - 1) // 2 if anew else first + new - 1
        return total

    @property
    def rows(self) -> int:
        return len(self.branches) * sum(len(group) for group in self.groups)

    @property
    def merged(self) -> list[str]:
        """Tokens that cross the seam between a prefix and a prompt, in words."""
        found = [
            f"in branch {name!r} of {prompt!r} the token {each.merged!r} crosses the seam and counts as prefix"
            for name, row in zip(self.branches, self.layouts, strict=True)
            for prompt, each in zip(self.prompts, row, strict=True)
            if each.merged is not None
        ]
        return found


def plan(
    model: Model,
    method: Method,
    task: Task,
    attribute: str,
    prompts: Sequence[str],
    augmentation: Augmentation | None,
    length: int,
    samples: int,
    max_rows: int | None = None,
    doubled_bos: bool = False,
    kit: Kit | None = None,
) -> Plan:
    """Resolve a generation before its first token: checks first, then what the method has to prepare.

    Args:
        length: Tokens of the text; with the prompt's where the task says so.
        samples: Continuations per prompt.
        max_rows: Rows of a batch; by default 120, fewer where their cache would exceed 2 GiB.
        doubled_bos: Two BOS tokens, as the released scripts feed LLaMA.
        kit: What `Method.prepare` is given; plans that share one share what it has made.

    Raises:
        TaskError: The task lacks the attribute.
        MethodError: The method cannot prepare for a prompt.
        LayoutError: A prefix or prompt tokenises to nothing, a prompt is given twice, or a text exceeds the context.
        AugmentationError: Layers or heads the model does not have, or nothing for it to act on.
        PrefixError: A soft prefix the method names is not there, or belongs to another model.
    """
    if isinstance(prompts, str) or not prompts:
        raise LayoutError(f"prompts must be a list of at least one text, found {prompts!r}")
    if not isinstance(method, Method):
        raise MethodError(f"method must come from methods.get or methods.for_task, found {method!r}")
    if not (augmentation is None or isinstance(augmentation, Augmentation)):
        raise AugmentationError(f"augmentation must be an Augmentation or None, found {augmentation!r}")
    if length < 1 or samples < 1:
        raise LayoutError(f"length and samples must be at least 1, found {length} and {samples}")
    if max_rows is not None and max_rows < 1:
        raise LayoutError(f"max_rows must be at least 1, found {max_rows}")
    twice = [prompt for i, prompt in enumerate(prompts) if prompt in prompts[:i]]
    if twice:
        raise LayoutError(f"the prompt {twice[0]!r} is given twice and would draw the same texts; ask for more samples")
    task.prefix(attribute)
    tokenizer = model.tokenizer
    branches = method.branches(task, attribute)
    prefixes = tuple(
        find_prefix(model, task.name, branch.prefix.set, branch.prefix.attribute)
        if isinstance(branch.prefix, Soft)
        else None
        for branch in branches
    )
    augmentations = assign(method, branches, augmentation)
    if augmentation is not None and not any(augmentations):
        raise AugmentationError(
            f"{method.name} has no prefix for an augmentation to act on; generate without one (alpha 0)"
        )
    counted = [len(tokenizer(prompt, add_special_tokens=False).input_ids) for prompt in prompts]
    steps = tuple(length - n if task.length_counts_prompt else length for n in counted)
    for prompt, n, new in zip(prompts, counted, steps, strict=True):
        if new < 1:
            raise LayoutError(f"length {length} leaves nothing to generate after the {n} tokens of {prompt!r}")
        _check_context(model, prompt, n, new)
    prepared = _prepare(method, kit or ModelKit(model), task, attribute, prompts)
    layouts = tuple(
        tuple(
            _layout(tokenizer, _for_prompt(branch, known), prefix, prompt, doubled_bos)
            for prompt, known in zip(prompts, prepared, strict=True)
        )
        for branch, prefix in zip(branches, prefixes, strict=True)
    )
    longest = [max(len(row[i]) for row in layouts) for i in range(len(prompts))]
    for prompt, n, new in zip(prompts, longest, steps, strict=True):
        _check_context(model, prompt, n, new)
    for chosen, row in zip(augmentations, layouts, strict=True):
        if chosen is not None:
            chosen.selects(model.cfg.n_layers, model.cfg.n_heads)
            for found in row:
                found.spans(chosen.span)
    if max_rows is None:
        keys = max(a + b for a, b in zip(longest, steps, strict=True))
        heads = getattr(model.cfg, "n_key_value_heads", None) or model.cfg.n_heads
        row_bytes = 2 * model.cfg.n_layers * heads * model.cfg.d_head * model.cfg.dtype.itemsize * keys
        # Logits of more than one position: of the prompt, or of what HookedTransformer gives for every token it reads anew.
        positions = max(counted) + 1 if method.reads_prompt else 0
        positions = keys if method.reads_anew and not is_bridge(model) else positions
        row_bytes += positions * model.cfg.d_vocab * model.cfg.dtype.itemsize
        max_rows = max(1, min(MAX_ROWS, CACHE_BYTES // row_bytes))
    pairs = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(samples)]
    groups = _groups(pairs, max(1, max_rows // len(branches)), longest, steps, model.cfg.n_ctx)
    return Plan(
        method=method,
        task=task,
        attribute=attribute,
        prompts=tuple(prompts),
        branches=tuple(branch.name for branch in branches),
        layouts=layouts,
        prefixes=prefixes,
        augmentations=augmentations,
        steps=steps,
        prepared=prepared,
        groups=groups,
    )


def _prepare(method: Method, kit: Kit, task: Task, attribute: str, prompts: Sequence[str]) -> tuple[Prepared, ...]:
    found = []
    with progress_bar(len(prompts), f"preparing {method.name} {attribute}", "prompt") as bar:
        for prompt in prompts:
            found.append(method.prepare(kit, task, attribute, prompt))
            bar.update()
    return tuple(found)


def _for_prompt(branch: Branch, known: Prepared) -> Branch:
    """A branch with the text that stands in front of this prompt."""
    return replace(branch, prefix=known.prefixes[branch.name]) if branch.name in known.prefixes else branch


def _check_context(model: Model, prompt: str, before: int, new: int) -> None:
    if before + new > model.cfg.n_ctx:
        raise LayoutError(
            f"{before} tokens of BOS, prefix and prompt ({prompt[:40]!r}) and {new} new ones exceed the model's context of "
            f"{model.cfg.n_ctx}; shorten the prompt or the length"
        )


def _layout(
    tokenizer: PreTrainedTokenizerBase, branch: Branch, prefix: SoftPrefix | None, prompt: str, doubled_bos: bool
) -> Layout:
    text = branch.prefix if isinstance(branch.prefix, str) else None
    slots = 0 if prefix is None else len(prefix)
    return layout(tokenizer, text, branch.join + prompt, soft=slots, doubled_bos=doubled_bos)


def _groups(
    pairs: Sequence[tuple[int, int]], size: int, longest: Sequence[int], steps: Sequence[int], n_ctx: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Batches in order: at most `size` samples, whose longest prompt and most steps fit the context together."""
    groups: list[list[tuple[int, int]]] = []
    width = most = 0
    for pair in pairs:
        width, most = max(width, longest[pair[0]]), max(most, steps[pair[0]])
        if not groups or len(groups[-1]) == size or width + most > n_ctx:
            groups.append([])
            width, most = longest[pair[0]], steps[pair[0]]
        groups[-1].append(pair)
    return tuple(map(tuple, groups))


def assign(
    method: Method, branches: Sequence[Branch], augmentation: Augmentation | None
) -> tuple[Augmentation | None, ...]:
    """What each branch gets: Pre-Aug on prefix branches, Pro-Aug on the base branch where the method has it on.

    An explicit span counts the keys of prefix branches, so beside those the base branch gets its profile's span.
    """
    steered = any(branch.prefix is not None for branch in branches)
    on_prompt = augmentation.with_profile_span() if augmentation and steered else augmentation
    return tuple(
        augmentation if branch.prefix is not None else on_prompt if method.pro_aug else None for branch in branches
    )
