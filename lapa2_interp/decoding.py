"""The one decode loop. Axes: row = branch x sample, stacked; sample = one continuation of one prompt.

For a group of samples:

1. every branch reads every prompt once (rows: branch x prompt, left-padded);
2. each prompt's keys, values and logits are expanded to its samples (rows: branch x sample);
3. per step: the method combines the branches' log-probabilities, the sampler draws one token per sample, the token is
   appended to all branches of that sample.

Every pass runs under the branch's augmentation (Algorithm 1) and under the method's interventions, if it makes any, and is
observed by the trace recorder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from lapa2_interp.attention.cache import open_rows, prompt_log_likelihood
from lapa2_interp.attention.hooked import Model, augmented
from lapa2_interp.attention.neurons import setting
from lapa2_interp.augmentation import Augmentation
from lapa2_interp.errors import EmptyDistributionError, Lapa2Error, TraceError, one_of
from lapa2_interp.methods import Method, Start
from lapa2_interp.models import model_card
from lapa2_interp.plan import Batch, Plan, plan
from lapa2_interp.progress import progress_bar
from lapa2_interp.sampling import draw
from lapa2_interp.tasks import Task
from lapa2_interp.trace import Recorder, TraceKind

if TYPE_CHECKING:
    import xarray as xr

EosPolicy = Literal["keep", "stop", "block"]
TOP_K = 200


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
) -> Generation:
    """Continue prompts with a controlled model, and record where the attention went.

    Args:
        model: From `load_model`.
        method: From `methods.for_task` (with the task's parameters) or `methods.get`.
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

    Raises:
        Lapa2Error: As `plan`; TraceError for patterns of missing heads; EmptyGenerationError, at the end, if a text
            ran out of tokens.
    """
    check_options(top_k, eos, trace, patterns)
    prompts = task.prompts.texts if prompts is None else prompts
    todo = plan(model, method, task, attribute, prompts, augmentation, length, samples, max_rows, doubled_bos)
    return run_plan(model, todo, seed=seed, top_k=top_k, eos=eos, trace=trace, patterns=patterns)


@torch.no_grad()
def run_plan(
    model: Model,
    todo: Plan,
    *,
    seed: int = 1,
    top_k: int = TOP_K,
    eos: EosPolicy = "keep",
    trace: TraceKind = "full",
    patterns: Sequence[tuple[int, int]] = (),
    progress: tqdm | None = None,
) -> Generation:
    """Carry out a plan; arguments and errors are those of `generate`.

    Args:
        progress: A bar to advance, shared by several plans; by default one of its own, shown after 2 s.
    """
    check_options(top_k, eos, trace, patterns)
    bar = progress if progress is not None else progress_bar(todo.new_tokens, f"{todo.method.name} {todo.attribute}")
    tables, traces, problems = [], [], []
    try:
        for group in todo.groups:
            batch = todo.batch(group, seed)
            ending = Ending.at(batch.steps)
            recorder = None if trace == "none" else Recorder(model.cfg.n_layers, model.cfg.n_heads, trace, patterns)
            steps = _decode(model, todo, batch, ending, top_k, eos, recorder, bar)
            tokens = torch.stack(list(steps), dim=1)
            tables.append(_table(model, todo, batch, tokens, ending))
            problems += [
                f"{todo.prompts[prompt]!r} sample {sample} at step {at}"
                for (prompt, sample), at, how in zip(group, ending.n_tokens, ending.finish, strict=True)
                if how == "empty"
            ]
            if recorder is not None:
                traces.append(recorder.dataset(batch.sample_layouts, todo.branches, ending.n_tokens))
    finally:
        if progress is None:
            bar.close()
    table = pd.concat(tables, ignore_index=True)
    made = Generation(table, join_traces(traces, table) if traces else None)
    if problems:
        raise EmptyGenerationError(
            f"no token has positive weight for {problems[0]}"
            + (f" and {len(problems) - 1} more" if len(problems) > 1 else "")
            + f" ({todo.method.name}: {todo.method.when_empty}); the texts up to there are kept",
            made,
        )
    return made


def check_options(top_k: int, eos: str, trace: str, patterns: Sequence[tuple[int, int]]) -> None:
    """What can be refused before anything is prepared.

    Raises:
        Lapa2Error: An option out of range, or patterns without a trace.
    """
    if top_k < 1:
        raise Lapa2Error(f"top_k must be at least 1, found {top_k}")
    for kind, found, allowed in (("eos policy", eos, get_args(EosPolicy)), ("trace", trace, get_args(TraceKind))):
        if found not in allowed:
            raise Lapa2Error(one_of(kind, found, allowed))
    if patterns and trace == "none":
        raise TraceError("patterns are part of a trace, and trace is 'none'; record it pooled or full")


def _decode(
    model: Model,
    todo: Plan,
    batch: Batch,
    ending: Ending,
    top_k: int,
    eos: EosPolicy,
    recorder: Recorder | None,
    bar: tqdm,
) -> Iterator[Int[Tensor, " sample"]]:
    """One batch, step by step; yields the tokens of each step and marks how samples end."""
    ends = torch.tensor(model.tokenizer.convert_tokens_to_ids(list(model_card(model).end_tokens)))
    of_prompts = [augmentation for augmentation in todo.augmentations for _ in range(batch.n_prompts)]
    expansion = torch.tensor(batch.expansion)
    method, branches = todo.method, todo.branches
    n_prompt = torch.tensor([each.l_pro for each in batch.layouts[: batch.n_prompts]])
    rows = open_rows(model, anew=method.reads_anew)
    if recorder is not None:
        recorder.begin(batch.layouts, expansion)
    state: Any = method.begin(Start(batch.prepared, None, n_prompt))
    keep = 1 + max(each.l_pro for each in batch.layouts) if method.reads_prompt else 1
    with augmented(model, of_prompts, batch.layouts, recorder), setting(model, method.intervene(state), len(branches)):
        read = rows.prompt_pass(batch.layouts, batch.prefixes, keep)
    rows.expand(expansion.to(read.device), capacity=len(batch.layouts[0]) + max(batch.steps) - 1)
    state = method.begin(_start(batch, branches, n_prompt, read if method.reads_prompt else None))
    logits = read[expansion, -1]
    del read

    uniform = torch.from_numpy(batch.uniform).to(logits.device)
    if recorder is not None:
        recorder.begin(batch.sample_layouts)
    with augmented(model, [of_prompts[row] for row in batch.expansion], batch.sample_layouts, recorder):
        for step in range(max(batch.steps)):
            log_probs = _of_branches(logits, branches)
            log_weights = method.combine(log_probs, state)
            if eos == "block":
                log_weights = log_weights.index_fill(1, ends.to(logits.device), -torch.inf)
            empty = ~log_weights.max(dim=1).values.isfinite()
            ending.stop(empty, step, "empty")
            # An ended sample's row runs on with the others; what it draws is not read.
            tokens = draw(log_weights.masked_fill(empty[:, None], 0.0), uniform[:, step], top_k=top_k)
            state = method.advance(state, log_probs, tokens)
            yield tokens.cpu()
            bar.update(ending.running(step))
            if eos == "stop":
                ending.stop(torch.isin(tokens.cpu(), ends), step + 1, "end")
            if not ending.running(step + 1):
                return
            with setting(model, method.intervene(state), len(branches)):
                logits = rows.read(tokens.repeat(len(branches))[:, None])


def _start(
    batch: Batch,
    branches: Sequence[str],
    n_prompt: Int[Tensor, " prompt"],
    read: Float[Tensor, "row query vocab"] | None,
) -> Start:
    """What the batch's samples set out from, their prompts having been read."""
    owner = torch.tensor(batch.owner)
    found = None
    if read is not None:
        of_prompts = prompt_log_likelihood(read, batch.layouts).chunk(len(branches))
        found = {name: each[owner.to(each.device)] for name, each in zip(branches, of_prompts, strict=True)}
    device = "cpu" if read is None else read.device
    return Start([batch.prepared[i] for i in batch.owner], found, n_prompt[owner].to(device))


def _of_branches(logits: Float[Tensor, "row vocab"], branches: Sequence[str]) -> Mapping[str, Tensor]:
    """Log-probabilities by branch, in at least float32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return dict(zip(branches, wide.log_softmax(dim=1).chunk(len(branches)), strict=True))


def _table(model: Model, todo: Plan, batch: Batch, tokens: Int[Tensor, "sample step"], ending: Ending) -> pd.DataFrame:
    rows = []
    for i, (prompt, sample) in enumerate(batch.pairs):
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
                "attribute": todo.attribute,
                "sample": sample,
                "text": text + continuation if todo.task.length_counts_prompt else continuation,
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
    names = {"prompt": "prompt_text", "attribute": "attribute", "arm": "arm"}
    return joined.assign_coords(
        {name: ("sample", table[column].astype(str).to_numpy()) for column, name in names.items() if column in table}
    )
