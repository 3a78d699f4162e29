"""A cell ready to be generated (`BatchPlan`), and the samples of it that are decoded together
(`Batch`).

Axes: branch = one model call of the method; a batch's rows are branch x sample, stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from lapa2_interp.attention.trace import TracedTexts
from lapa2_interp.bias.augmentation import Augmentation, active_augmentations
from lapa2_interp.bias.layout import Layout, left_pad
from lapa2_interp.generation.arrange import Arrangement, chat_stream
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.sampling import uniforms
from lapa2_interp.methods.base import Method, Prepared
from lapa2_interp.models.card import ModelCard
from lapa2_interp.models.facts import Model
from lapa2_interp.prefixes.soft_prefix import SoftPrefix, SoftPrefixName


@dataclass(frozen=True)
class Batch:
    """Samples that are decoded together.

    Attributes:
        pairs: (prompt number, sample number) of each sample.
        layouts: Left-padded, branch by branch one per prompt used.
        prefixes: The soft prefix of each layout, or None.
        owner: Which of the batch's prompts each sample continues.
        steps: New tokens of each sample.
        uniform: The random numbers that tokens are drawn with, [sample, step].
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

    @cached_property
    def expansion(self) -> list[int]:
        """By row of the expanded batch (branch x sample), the row of the prompt pass it copies
        (branch x prompt)."""
        return [
            first_of_branch + prompt
            for first_of_branch in range(0, len(self.layouts), self.n_prompts)
            for prompt in self.owner
        ]

    @cached_property
    def sample_layouts(self) -> list[Layout]:
        """The layouts of the expanded rows."""
        return [self.layouts[row] for row in self.expansion]

    @property
    def capacity(self) -> int:
        """Keys of a row once its last token but one is read, those of reminders included."""
        steps, reminder = max(self.steps), self.prepared[0].reminder
        return len(self.layouts[0]) + steps - 1 + (reminder.n_keys(steps) if reminder else 0)


Driver = Callable[[Model, "BatchPlan", Batch, tqdm], TracedTexts]
"""Decodes a batch, and advances a bar by tokens."""


@dataclass(frozen=True)
class BatchPlan:
    """A cell ready to be generated: every branch's layout per prompt, and who shares a batch.

    Attributes:
        card: The model's, as it was planned.
        driver: What decodes a batch: the loop alone (`loop.decode_samples`), or what wraps it.
        branches: Names of the branches.
        arrangement: Its layouts, augmentations and steps.
        prefixes: By branch, the soft prefix or None.
        prepared: What the method worked out about each prompt.
        batches: The (prompt number, sample number) pairs of each batch.
    """

    cell: Cell
    card: ModelCard
    driver: Driver = field(repr=False)
    branches: tuple[str, ...]
    arrangement: Arrangement
    prefixes: tuple[SoftPrefix | None, ...]
    prepared: tuple[Prepared, ...] = field(repr=False)
    batches: tuple[tuple[tuple[int, int], ...], ...] = field(repr=False)

    @property
    def method(self) -> Method:
        """The method with its parameters."""
        return self.cell.decoding_method

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts that are continued."""
        return self.cell.prompts

    def assemble_batch(self, pairs: Sequence[tuple[int, int]], trial: int = 0) -> Batch:
        """The batch that decodes these samples, for the first time or again."""
        used = sorted({prompt for prompt, _ in pairs})
        return Batch(
            pairs=tuple(pairs),
            layouts=tuple(
                left_pad(
                    [by_prompt[prompt] for by_prompt in self.arrangement.layouts for prompt in used]
                )
            ),
            prefixes=tuple(prefix for prefix in self.prefixes for _ in used),
            owner=tuple(used.index(prompt) for prompt, _ in pairs),
            steps=tuple(self.arrangement.steps[prompt] for prompt, _ in pairs),
            uniform=self._uniform(
                pairs, [self.arrangement.streams[prompt] for prompt, _ in pairs], trial
            ),
            prepared=tuple(self.prepared[prompt] for prompt in used),
        )

    def assemble_turn(self, pairs: Sequence[tuple[int, int]], layouts: Sequence[Layout]) -> Batch:
        """The batch that decodes a later turn of chats, each in the layout of its own, which is
        that of all branches."""
        rows = [layout for _ in self.branches for layout in layouts]
        return Batch(
            pairs=tuple(pairs),
            layouts=tuple(left_pad(rows)),
            prefixes=(None,) * len(rows),
            owner=tuple(range(len(pairs))),
            steps=tuple(self.arrangement.steps[prompt] for prompt, _ in pairs),
            uniform=self._uniform(pairs, list(map(chat_stream, layouts))),
            prepared=tuple(self.prepared[prompt] for prompt, _ in pairs),
        )

    def _uniform(
        self, pairs: Sequence[tuple[int, int]], streams: Sequence[str], trial: int = 0
    ) -> Float[np.ndarray, "sample step"]:
        steps = [self.arrangement.steps[prompt] for prompt, _ in pairs]
        uniform = np.zeros((len(pairs), max(steps)))
        for numbers, (_, sample), stream, n in zip(uniform, pairs, streams, steps, strict=True):
            numbers[:n] = uniforms(self.cell.seed, stream, sample, n, trial)
        return uniform

    @property
    def rules(self) -> list[Augmentation]:
        """The augmentations of all branches that act."""
        return [
            rule
            for branch in self.arrangement.augmentations
            for rule in active_augmentations(branch)
        ]

    @property
    def prefix_names(self) -> dict[str, str | SoftPrefixName | None]:
        """Prefix of the prompt, by branch: a text, a soft prefix, or nothing."""
        by_branch: dict[str, str | SoftPrefixName | None] = {}
        for branch, prefix in zip(self.cell.branches, self.prefixes, strict=True):
            by_branch[branch.name] = prefix.card.name if prefix is not None else branch.prefix  # type: ignore[assignment]
        return by_branch

    @property
    def new_tokens(self) -> int:
        steps = sum(self.arrangement.steps[prompt] for batch in self.batches for prompt, _ in batch)
        return self.cell.n_turns * steps

    @property
    def summaries(self) -> dict[str, dict[str, Any]]:
        """Preparation of the method, by prompt; under "all prompts" if it is the same for all;
        empty if nothing."""
        summaries = [dict(prepared.summary) for prepared in self.prepared]
        first = summaries[0]
        if all(summary == first for summary in summaries):
            return {"all prompts": first} if first else {}
        return dict(zip(self.prompts, summaries, strict=True))

    @property
    def rows(self) -> int:
        """Number of texts of all branches."""
        return len(self.branches) * self.cell.n_texts

    @property
    def merged(self) -> list[str]:
        """Tokens that span the boundary of a prefix and a prompt, in words."""
        return [
            f"in branch {name!r} of {prompt!r} the token {layout.merged!r} spans the boundary of"
            " prefix and prompt and counts as prefix"
            for name, by_prompt in zip(self.branches, self.arrangement.layouts, strict=True)
            for prompt, layout in zip(self.prompts, by_prompt, strict=True)
            if layout.merged is not None
        ]
