"""The one decode loop. Axes: row = branch x sample, stacked; sample = one continuation of one prompt.

For a group of samples:

1. every branch reads every prompt once (rows: branch x prompt, left-padded);
2. each prompt's keys, values and logits are expanded to its samples (rows: branch x sample);
3. per step: the method combines the branches' log-probabilities, the sampler draws one token per sample, the token is
   appended to all branches of that sample.

Every pass runs under the branch's augmentation (Algorithm 1) and is observed by the trace recorder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from lapa2_interp.attention.cache import open_rows
from lapa2_interp.attention.hooked import Model, augmented
from lapa2_interp.augmentation import Augmentation
from lapa2_interp.errors import EmptyDistributionError, Lapa2Error, LayoutError, TraceError
from lapa2_interp.layout import Layout, layout, left_pad
from lapa2_interp.methods import Branch, Method
from lapa2_interp.models import model_card
from lapa2_interp.sampling import draw, uniforms
from lapa2_interp.tasks import Task
from lapa2_interp.trace import Recorder, TraceKind

if TYPE_CHECKING:
    import xarray as xr

EosPolicy = Literal["keep", "stop", "block"]
TOP_K = 200
MAX_ROWS = 120
CACHE_BYTES = 2 << 30


@dataclass(frozen=True)
class Generation:
    """What a call of `generate` made.

    Attributes:
        samples: One row per sample: prompt, attribute, sample, text (as it is scored), continuation, tokens, n_tokens,
            finish ("length", "end", or "empty" where no token was left to draw).
        trace: The recorded attention, or None; its `sample` axis is the row number of `samples`.
    """

    samples: pd.DataFrame
    trace: xr.Dataset | None


class EmptyGenerationError(EmptyDistributionError):
    """Some texts ended because no token was left to draw; `generation` holds all texts, those up to their last token."""

    def __init__(self, message: str, generation: Generation) -> None:
        super().__init__(message)
        self.generation = generation


@dataclass
class Ending:
    """When and how the samples of a group end; `n_tokens` starts as the steps they were planned to have."""

    n_tokens: list[int]
    finish: list[str]

    @classmethod
    def at(cls, steps: Sequence[int]) -> Ending:
        return cls(list(steps), ["length"] * len(steps))

    def running(self, step: int) -> int:
        """Samples that have this step."""
        return sum(n > step for n in self.n_tokens)

    def stop(self, which: Bool[Tensor, " sample"], at: int, how: str) -> None:
        """End these samples after `at` tokens, if they have not ended before."""
        for i in which.nonzero()[:, 0].tolist():
            if self.n_tokens[i] > at or (self.n_tokens[i] == at and how == "end" and self.finish[i] == "length"):
                self.n_tokens[i], self.finish[i] = at, how


@dataclass(frozen=True)
class Plan:
    """A resolved call of `generate`: every branch's layout per prompt, and who shares a batch.

    Attributes:
        layouts: By branch, then prompt.
        augmentations: By branch.
        steps: New tokens per prompt.
        groups: Batches of (prompt number, sample number).
    """

    prompts: tuple[str, ...]
    branches: tuple[str, ...]
    layouts: tuple[tuple[Layout, ...], ...]
    augmentations: tuple[Augmentation | None, ...]
    steps: tuple[int, ...]
    groups: tuple[tuple[tuple[int, int], ...], ...] = field(repr=False)

    @property
    def new_tokens(self) -> int:
        return sum(self.steps[prompt] for group in self.groups for prompt, _ in group)

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
) -> Plan:
    """Resolve a generation before anything runs.

    Args:
        length: Tokens of the text; with the prompt's where the task says so.
        samples: Continuations per prompt.
        max_rows: Rows of a batch; by default 120, fewer where their cache would exceed 2 GiB.
        doubled_bos: Two BOS tokens, as the released scripts feed LLaMA.

    Raises:
        TaskError: The task lacks the attribute.
        LayoutError: A prefix or prompt tokenises to nothing, a prompt is given twice, or a text exceeds the context.
        AugmentationError: Layers or heads the model does not have.
    """
    if length < 1 or samples < 1:
        raise LayoutError(f"length and samples must be at least 1, found {length} and {samples}")
    twice = [prompt for i, prompt in enumerate(prompts) if prompt in prompts[:i]]
    if twice:
        raise LayoutError(f"the prompt {twice[0]!r} is given twice and would draw the same texts; ask for more samples")
    task.prefix(attribute)
    tokenizer = model.tokenizer
    branches = method.branches(task, attribute)
    layouts = tuple(
        tuple(layout(tokenizer, branch.prefix, branch.join + prompt, doubled_bos=doubled_bos) for prompt in prompts)
        for branch in branches
    )
    counted = [len(tokenizer(prompt, add_special_tokens=False).input_ids) for prompt in prompts]
    steps = tuple(length - n if task.length_counts_prompt else length for n in counted)
    longest = [max(len(row[i]) for row in layouts) for i in range(len(prompts))]
    for i, prompt in enumerate(prompts):
        if steps[i] < 1:
            raise LayoutError(f"length {length} leaves nothing to generate after the {counted[i]} tokens of {prompt!r}")
        if longest[i] + steps[i] > model.cfg.n_ctx:
            raise LayoutError(
                f"{longest[i]} tokens of BOS, prefix and prompt ({prompt[:40]!r}) and {steps[i]} new ones exceed the model's "
                f"context of {model.cfg.n_ctx}; shorten the prompt or the length"
            )
    augmentations = assign(method, branches, augmentation)
    for chosen, row in zip(augmentations, layouts, strict=True):
        if chosen is not None:
            chosen.selects(model.cfg.n_layers, model.cfg.n_heads)
            for found in row:
                found.spans(chosen.span)
    if max_rows is None:
        keys = max(a + b for a, b in zip(longest, steps, strict=True))
        heads = getattr(model.cfg, "n_key_value_heads", None) or model.cfg.n_heads
        row_bytes = 2 * model.cfg.n_layers * heads * model.cfg.d_head * model.cfg.dtype.itemsize * keys
        max_rows = min(MAX_ROWS, CACHE_BYTES // row_bytes)
    pairs = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(samples)]
    groups = _groups(pairs, max(1, max_rows // len(branches)), longest, steps, model.cfg.n_ctx)
    return Plan(
        prompts=tuple(prompts),
        branches=tuple(branch.name for branch in branches),
        layouts=layouts,
        augmentations=augmentations,
        steps=steps,
        groups=groups,
    )


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


@torch.no_grad()
def generate(
    model: Model,
    method: Method,
    task: Task,
    attribute: str,
    prompts: Sequence[str] | None = None,
    *,
    augmentation: Augmentation | None = None,
    length: int = 128,
    samples: int = 1,
    seed: int = 1,
    top_k: int = TOP_K,
    eos: EosPolicy = "keep",
    trace: TraceKind = "full",
    patterns: Sequence[tuple[int, int]] = (),
    max_rows: int | None = None,
    doubled_bos: bool = False,
    progress: tqdm | None = None,
) -> Generation:
    """Continue prompts with a controlled model, and record where the attention went.

    Args:
        model: From `load_model`.
        method: From `methods.get`.
        task, attribute: What to steer towards; the prefixes come from the task.
        prompts: The task's own by default.
        augmentation: LaPA2 on the prefix branches; None for the base method.
        length: Tokens of a text, with the prompt's where the task counts them.
        samples: Continuations per prompt.
        seed: Of the random streams; one stream per (seed, prompt, sample).
        top_k: Tokens kept of the controlled weights before sampling at temperature 1.
        eos: "keep" an end token as any other (the paper), "stop" the text there, or "block" it.
        trace: "none", "pooled" or "full".
        patterns: (layer, head) pairs whose whole attention rows are recorded as well.
        max_rows: Rows of a batch.
        doubled_bos: Two BOS tokens, as the released scripts feed LLaMA.
        progress: A bar to advance; by default one of its own, shown after 2 s.

    Raises:
        Lapa2Error: As `plan`; TraceError for patterns of missing heads; EmptyGenerationError, at the end, if a text
            ran out of tokens.
    """
    if top_k < 1:
        raise Lapa2Error(f"top_k must be at least 1, found {top_k}")
    if patterns and trace == "none":
        raise TraceError("patterns are part of a trace, and trace is 'none'; record it pooled or full")
    prompts = task.prompts.texts if prompts is None else prompts
    todo = plan(model, method, task, attribute, prompts, augmentation, length, samples, max_rows, doubled_bos)
    ends = model.tokenizer.convert_tokens_to_ids(list(model_card(model).end_tokens))
    bar = progress or progress_bar(todo.new_tokens, f"{method.name} {attribute}")
    tables, traces, problems = [], [], []
    try:
        for group in todo.groups:
            used = sorted({prompt for prompt, _ in group})
            layouts = left_pad([todo.layouts[b][p] for b in range(len(todo.branches)) for p in used])
            owner = torch.tensor([used.index(prompt) for prompt, _ in group])
            steps = [todo.steps[prompt] for prompt, _ in group]
            streams = np.zeros((len(group), max(steps)))
            for i, (prompt, sample) in enumerate(group):
                streams[i, : steps[i]] = uniforms(seed, prompts[prompt], sample, steps[i])
            recorder = None if trace == "none" else Recorder(model.cfg.n_layers, model.cfg.n_heads, trace, patterns)
            ending = Ending.at(steps)
            made = _decode(model, method, todo, layouts, owner, ending, streams, top_k, eos, ends, recorder, bar)
            tokens = torch.stack(list(made), dim=1)
            tables.append(_table(model, task, attribute, todo, group, tokens, ending))
            problems += [
                f"{todo.prompts[prompt]!r} sample {sample} at step {ending.n_tokens[i]}"
                for i, (prompt, sample) in enumerate(group)
                if ending.finish[i] == "empty"
            ]
            if recorder is not None:
                rows = [layouts[b * len(used) + i] for b in range(len(todo.branches)) for i in owner.tolist()]
                traces.append(recorder.dataset(rows, todo.branches, ending.n_tokens))
    finally:
        if progress is None:
            bar.close()
    table = pd.concat(tables, ignore_index=True)
    found = Generation(table, join_traces(traces, table) if traces else None)
    if problems:
        raise EmptyGenerationError(
            f"no token has positive weight for {problems[0]}"
            + (f" and {len(problems) - 1} more" if len(problems) > 1 else "")
            + f" ({method.name}: {method.when_empty}); the texts up to there are kept",
            found,
        )
    return found


def progress_bar(new_tokens: int, label: str) -> tqdm:
    """Tokens, tokens/s and time left on stderr, shown after 2 s; a line every 10 s where stderr is not a terminal."""
    every = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(total=new_tokens, unit="tok", desc=label, delay=2, mininterval=every, smoothing=0.1, dynamic_ncols=True)


def _decode(
    model: Model,
    method: Method,
    todo: Plan,
    layouts: Sequence[Layout],
    owner: Int[Tensor, " sample"],
    ending: Ending,
    streams: Float[np.ndarray, "sample step"],
    top_k: int,
    eos: EosPolicy,
    ends: Sequence[int],
    recorder: Recorder | None,
    bar: tqdm,
) -> Iterator[Int[Tensor, " sample"]]:
    """One group, step by step; yields the tokens of each step."""
    n_branches, n_prompts = len(todo.branches), len(layouts) // len(todo.branches)
    expand = torch.cat([branch * n_prompts + owner for branch in range(n_branches)])
    rows = open_rows(model)
    of_prompts = [a for a in todo.augmentations for _ in range(n_prompts)]
    if recorder is not None:
        recorder.begin(layouts, expand)
    with augmented(model, of_prompts, layouts, recorder):
        logits = rows.prompt_pass(layouts)[expand]
    rows.expand(expand.to(logits.device), capacity=len(layouts[0]) + max(ending.n_tokens) - 1)
    of_samples = [layouts[i] for i in expand.tolist()]
    if recorder is not None:
        recorder.begin(of_samples)
    uniform = torch.from_numpy(streams).to(logits.device)
    state: Any = None
    with augmented(model, [of_prompts[i] for i in expand.tolist()], of_samples, recorder):
        for step in range(max(ending.n_tokens)):
            log_probs = _of_branches(logits, todo.branches)
            log_weights = method.combine(log_probs, state)
            if eos == "block":
                log_weights = log_weights.index_fill(1, torch.tensor(ends, device=logits.device), -torch.inf)
            empty = ~log_weights.max(dim=1).values.isfinite()
            ending.stop(empty, step, "empty")
            # An ended sample's row runs on with the others; what it draws is not read.
            tokens = draw(log_weights.masked_fill(empty[:, None], 0.0), uniform[:, step], top_k=top_k)
            state = method.advance(state, log_probs, tokens)
            yield tokens.cpu()
            bar.update(ending.running(step))
            if eos == "stop":
                ending.stop(torch.isin(tokens.cpu(), torch.tensor(ends)), step + 1, "end")
            if not ending.running(step + 1):
                return
            logits = rows.step(tokens.repeat(n_branches))


def _of_branches(logits: Float[Tensor, "row vocab"], branches: Sequence[str]) -> Mapping[str, Tensor]:
    """Log-probabilities by branch, in at least float32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return dict(zip(branches, wide.log_softmax(dim=1).chunk(len(branches)), strict=True))


def _table(
    model: Model,
    task: Task,
    attribute: str,
    todo: Plan,
    group: Sequence[tuple[int, int]],
    tokens: Int[Tensor, "sample step"],
    ending: Ending,
) -> pd.DataFrame:
    rows = []
    for i, (prompt, sample) in enumerate(group):
        made = tokens[i, : ending.n_tokens[i]].tolist()
        text = todo.prompts[prompt]
        # Decoded with the prompt in front: some tokenizers drop the leading space of what they decode alone.
        before = model.tokenizer(text, add_special_tokens=False).input_ids
        head = model.tokenizer.decode(before, clean_up_tokenization_spaces=False)
        whole = model.tokenizer.decode(before + made, clean_up_tokenization_spaces=False)
        continuation = whole[len(head) :]
        rows.append(
            {
                "prompt": text,
                "attribute": attribute,
                "sample": sample,
                "text": text + continuation if task.length_counts_prompt else continuation,
                "continuation": continuation,
                "tokens": made,
                "n_tokens": ending.n_tokens[i],
                "finish": ending.finish[i],
            }
        )
    return pd.DataFrame(rows)


def join_traces(traces: Sequence[xr.Dataset], table: pd.DataFrame) -> xr.Dataset:
    """Traces as one along `sample`, padded with NaN to the longest, samples numbered as the rows of the table."""
    import xarray as xr

    joined = xr.concat(list(traces), dim="sample", join="outer", data_vars="all", coords="different", compat="equals")
    joined = joined.assign_coords(sample=np.arange(len(table)))
    return joined.assign_coords(prompt_text=("sample", table["prompt"].astype(str).to_numpy()))
