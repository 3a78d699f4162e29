"""The one decode loop. Axes: row = branch x sample, stacked; sample = one continuation of one
prompt.

For a batch of samples:

1. every branch reads every prompt once (rows: branch x prompt, left-padded);
2. each prompt's keys, values and logits are expanded to its samples (rows: branch x sample);
3. per step: the method combines the branches' log-probabilities, the sampler draws one token per
   sample, the token is appended to all branches of that sample.

Every pass runs under the branch's augmentation (Algorithm 1) and under the method's interventions,
if it makes any, and is observed by the trace recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from lapa2_interp._util.errors import EmptyDistributionError, ModelError
from lapa2_interp._util.progress import given_or_new_bar, hidden_bar
from lapa2_interp.attention.cache import new_rows, prompt_log_likelihood
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.attention.neurons import set_neurons
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.attention.static_rows import StaticSteps, continued
from lapa2_interp.bias.augmentation import active_augmentations
from lapa2_interp.bias.tokens import decode_continuation
from lapa2_interp.generation.banned_words import BannedWords
from lapa2_interp.generation.plan import Batch, BatchPlan
from lapa2_interp.generation.sampling import NOTHING, draw
from lapa2_interp.methods.base import BatchStart, LogProbs
from lapa2_interp.models.card import Model, layer_types, model_card, prepacked_model
from lapa2_interp.models.load import accepts_model_name

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class Generation:
    """The texts of a plan, made by `decode_batches`.

    Attributes:
        samples: One row per sample: prompt, attribute, sample, text (as it is scored),
            continuation, tokens, n_tokens, finish ("length", "end", or "empty" where no token was
            left to draw).
        trace: The recorded attention, or None; its `sample` axis is the row number of `samples`.
    """

    samples: pd.DataFrame
    trace: xr.Dataset | None


class EmptyGenerationError(EmptyDistributionError):
    """Some texts ended because no token was left to draw.

    `generation` holds all texts, the ended ones up to their last token.
    """

    def __init__(self, message: str, generation: Generation) -> None:
        super().__init__(message)
        self.generation = generation


@dataclass
class Ending:
    """When and how the samples of a batch end; `n_tokens` starts as the steps they were planned to
    have."""

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
            if self.n_tokens[i] > at or (
                self.n_tokens[i] == at and how == "end" and self.finish[i] == "length"
            ):
                self.n_tokens[i], self.finish[i] = at, how


@accepts_model_name
@torch.no_grad()
def decode_batches(
    model: Model,
    plan: BatchPlan,
    batches: Sequence[Sequence[tuple[int, int]]] | None = None,
    progress: tqdm | None = None,
) -> Generation:
    """Decode the batches of a plan.

    Args:
        batches: Some of the plan's batches; all by default.
        progress: A bar to advance, shared by several plans; by default a new one, shown after 2 s.

    Raises:
        TraceError: Patterns are asked of heads that the model does not have.
        ModelError: The model's logits are not numbers.
        EmptyGenerationError: At the end, if a text ran out of tokens.
    """
    tables, traces = [], []
    steps: StaticSteps = {}
    label = f"{plan.method.name} {plan.cell.attribute}"
    with prepacked_model(model), given_or_new_bar(progress, plan.new_tokens, label) as bar:
        for pairs in plan.batches if batches is None else batches:
            table, trace = _decode_batch(model, plan, pairs, steps, bar)
            tables.append(table)
            if trace is not None:
                traces.append(trace)
    table = pd.concat(tables, ignore_index=True)
    generation = Generation(table, join_traces(traces, table) if traces else None)
    problems = [
        f"{row['prompt']!r} sample {row['sample']} at step {row['n_tokens']}"
        for row in table[table["finish"] == "empty"].to_dict("records")
    ]
    if problems:
        raise EmptyGenerationError(
            f"no token has positive weight for {problems[0]}"
            + (f" and {len(problems) - 1} more" if len(problems) > 1 else "")
            + f" ({plan.method.name}: {plan.method.when_empty}); the texts up to there are kept",
            generation,
        )
    return generation


def _decode_batch(
    model: Model, plan: BatchPlan, pairs: Sequence[tuple[int, int]], steps: StaticSteps, bar: tqdm
) -> tuple[pd.DataFrame, xr.Dataset | None]:
    """The texts of a batch and their trace; those that the method does not accept are drawn
    again."""
    size, kind = (model.cfg.n_layers, model.cfg.n_heads), plan.cell.trace
    places = list(range(len(pairs)))
    order, tables, traces = [], [], []
    for trial in range(plan.method.trials):
        # Decode the samples that have no accepted text yet.
        batch = plan.assemble_batch([pairs[place] for place in places], trial)
        ending = Ending.at(batch.steps)
        recorder = None
        if kind != "none":
            recorder = Recorder(*size, kind, plan.cell.patterns, layer_types(model))
        progress = bar if trial == 0 else hidden_bar()
        drawn = _decode_steps(model, plan, batch, ending, recorder, steps, progress)
        tokens = torch.stack(list(drawn), dim=1)  # sample step
        table = _table(model, plan, batch, tokens, ending)
        # Keep what the method accepts; in the last trial, everything.
        stays = np.ones(len(places), dtype=bool)
        if trial + 1 < plan.method.trials:
            texts = table["prompt"] + table["continuation"]
            stays[:] = [
                plan.method.accepts(batch.prepared[own], text, tokens)
                for own, text, tokens in zip(batch.owner, texts, table["tokens"], strict=True)
            ]
        order += [place for place, stay in zip(places, stays, strict=True) if stay]
        places = [place for place, stay in zip(places, stays, strict=True) if not stay]
        tables.append(table[stays])
        if recorder is not None:
            recorded = recorder.dataset(batch.sample_layouts, plan.branches, ending.n_tokens)
            traces.append(recorded if stays.all() else recorded.isel(sample=stays))
        if not places:
            break
    if len(tables) == 1:
        return tables[0], traces[0] if traces else None
    # Restore the order of the samples.
    back = np.argsort(order)
    trace = concat_traces(traces).isel(sample=back) if traces else None
    return pd.concat(tables).iloc[back], trace


def _decode_steps(
    model: Model,
    plan: BatchPlan,
    batch: Batch,
    ending: Ending,
    recorder: Recorder | None,
    steps: StaticSteps,
    bar: tqdm,
) -> Iterator[Int[Tensor, " sample"]]:
    """Decode one batch step by step; yields the tokens of each step and marks how samples end."""
    ends = torch.tensor(model_card(model).end_ids, dtype=torch.long)
    of_prompts = [
        augmentation for augmentation in plan.augmentations for _ in range(batch.n_prompts)
    ]
    expansion = torch.tensor(batch.expansion)  # by branch x sample: a row of branch x prompt
    method, branches = plan.method, plan.branches
    n_prompt = torch.tensor([each.l_pro for each in batch.layouts[: batch.n_prompts]])
    active = [each for of_branch in plan.augmentations for each in active_augmentations(of_branch)]
    reread_last = any(each.phase == "predicting_only" for each in active)
    rows = new_rows(model, recompute=method.rereads_text, reread_last=reread_last)
    if recorder is not None:
        recorder.begin(batch.layouts, expansion)
    # Read the prompts. Here the method has one state a prompt; below it begins again, for samples.
    state: Any = method.begin(BatchStart(batch.prepared, None, n_prompt))
    keep = 1 + max(each.l_pro for each in batch.layouts) if method.reads_prompt else 1
    with (
        augmented(model, of_prompts, batch.layouts, recorder),
        set_neurons(model, method.intervene(state), len(branches)),
    ):
        # row query vocab; row = branch x prompt
        read = rows.prompt_pass(batch.layouts, batch.prefixes, keep)
    # Here prompts are expanded to samples.
    state = method.begin(_start(batch, branches, n_prompt, read if method.reads_prompt else None))
    logits = read[expansion, -1]  # row vocab; from here on row = branch x sample
    del read

    blocked = ends.to(logits.device)
    banned = None
    if words := plan.cell.banned_words:
        banned = BannedWords(
            model.tokenizer, words, [plan.prompts[prompt] for prompt, _ in batch.pairs]
        )

    def mask_forbidden(log_weights: Float[Tensor, "sample vocab"]) -> Float[Tensor, "sample vocab"]:
        """Tokens that are never drawn get the log-weight -inf."""
        if plan.cell.eos == "block":
            log_weights = log_weights.index_fill(1, blocked, -torch.inf)
        return log_weights if banned is None else banned.mask(log_weights)

    # Decode step by step: combine, draw, append.
    uniform = torch.from_numpy(batch.uniform).to(logits.device)  # sample step
    if recorder is not None:
        recorder.begin(batch.sample_layouts)
    with continued(
        model,
        rows,
        expansion.to(logits.device),
        len(batch.layouts[0]) + max(batch.steps) - 1,
        [of_prompts[row] for row in batch.expansion],
        batch.sample_layouts,
        recorder,
        steps,
    ) as rows:
        for step in range(max(batch.steps)):
            log_probs = _of_branches(logits, branches)  # by branch: sample vocab
            masked_log_probs = mask_main_branch(log_probs, mask_forbidden)
            log_weights = mask_forbidden(method.combine(masked_log_probs, state))  # sample vocab
            drawn = draw(log_weights, uniform[:, step], top_k=plan.cell.top_k)  # sample
            # An ended sample's row runs on with the others; what it reads does not matter.
            tokens = drawn.clamp(min=0)
            state = method.advance(state, log_probs, tokens)
            cpu_tokens = drawn.cpu()  # the step's one wait for the device
            if banned is not None:
                banned.advance(cpu_tokens.clamp(min=0).tolist())
            if (nothing := cpu_tokens == NOTHING).any():
                check_numbers(model, logits, step)
            ending.stop(nothing, step, "empty")
            yield cpu_tokens.clamp(min=0)
            bar.update(ending.running(step))
            if plan.cell.eos == "stop":
                ending.stop(torch.isin(cpu_tokens, ends), step + 1, "end")
            if not ending.running(step + 1):
                return
            with set_neurons(model, method.intervene(state), len(branches)):
                # sample -> row 1 -> row vocab
                logits = rows.read_tokens(tokens.repeat(len(branches))[:, None])[:, -1]


def mask_main_branch(log_probs: LogProbs, mask: Callable[[Tensor], Tensor]) -> LogProbs:
    """All branches; in the base branch (or the only one) tokens that are never drawn have -inf.

    A method that keeps the likeliest tokens must not fill up with them.
    """
    kept = next(iter(log_probs)) if len(log_probs) == 1 else "base"
    if kept not in log_probs:
        return log_probs
    return {**log_probs, kept: mask(log_probs[kept])}


def check_numbers(model: Model, logits: Float[Tensor, "row vocab"], step: int) -> None:
    """Refuse a model whose logits are no numbers.

    Raises:
        ModelError: They are NaN.
    """
    if logits.isnan().any():
        card = model_card(model)
        wider = ", or --dtype float32" if card.dtype in ("float16", "bfloat16") else ""
        raise ModelError(
            f"the logits of {card.name} are not numbers (NaN) at step {step}: a weight is NaN, or"
            f" numbers exceed {card.dtype}; load sound weights{wider}"
        )


def _start(
    batch: Batch,
    branches: Sequence[str],
    n_prompt: Int[Tensor, " prompt"],
    read: Float[Tensor, "row query vocab"] | None,
) -> BatchStart:
    """The start of the batch's samples; `read` holds the logits of their prompts, if they
    are needed."""
    owner = torch.tensor(batch.owner)
    log_likelihood = None
    if read is not None:
        # by branch: prompt
        of_prompts = prompt_log_likelihood(read, batch.layouts).chunk(len(branches))
        # by branch: prompt -> sample
        log_likelihood = {
            name: each[owner.to(each.device)]
            for name, each in zip(branches, of_prompts, strict=True)
        }
    device = "cpu" if read is None else read.device
    return BatchStart(
        [batch.prepared[i] for i in batch.owner], log_likelihood, n_prompt[owner].to(device)
    )


def _of_branches(
    logits: Float[Tensor, "row vocab"], branches: Sequence[str]
) -> Mapping[str, Tensor]:
    """Log-probabilities by branch, in at least float32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # row vocab -> by branch: sample vocab
    return dict(zip(branches, wide.log_softmax(dim=1).chunk(len(branches)), strict=True))


def _table(
    model: Model, plan: BatchPlan, batch: Batch, tokens: Int[Tensor, "sample step"], ending: Ending
) -> pd.DataFrame:
    rows = []
    for i, (prompt, sample) in enumerate(batch.pairs):
        new_ids = tokens[i, : ending.n_tokens[i]].tolist()
        text = plan.prompts[prompt]
        new = decode_continuation(model.tokenizer, text, new_ids)
        rows.append(
            {
                "prompt": text,
                "attribute": plan.cell.attribute,
                "sample": sample,
                "text": text + new if plan.cell.task.length_counts_prompt else new,
                "continuation": new,
                "tokens": new_ids,
                "n_tokens": ending.n_tokens[i],
                "finish": ending.finish[i],
            }
        )
    return pd.DataFrame(rows)


def join_traces(traces: Sequence[xr.Dataset], table: pd.DataFrame) -> xr.Dataset:
    """Join traces along `sample`, padded with NaN to the longest.

    Samples are numbered as the rows of the table.
    """
    joined = concat_traces(traces).assign_coords(sample=np.arange(len(table)))
    names = {"prompt": "prompt_text"} | {
        name: name for name in ("task", "attribute", "method", "arm", "cell")
    }
    return joined.assign_coords(
        {
            name: ("sample", table[column].astype(str).to_numpy())
            for column, name in names.items()
            if column in table
        }
    )


def concat_traces(traces: Sequence[xr.Dataset]) -> xr.Dataset:
    """Traces one after another along `sample`, padded with NaN to the longest."""
    import xarray as xr

    return xr.concat(
        traces, dim="sample", join="outer", data_vars="all", coords="different", compat="equals"
    )
