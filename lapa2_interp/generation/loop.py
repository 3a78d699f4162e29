"""The one decode loop.

Axes: row = branch x sample, stacked; sample = one continuation of one prompt.

For a batch of samples:

1. every branch reads every prompt once (rows: branch x prompt, left-padded);
2. each prompt's logits, keys and values are expanded to its samples (rows: branch x sample; keys
   and values by `attention.continued_rows`);
3. per step: the method combines the branches' log-probabilities, the sampler draws one token per
   sample, the token is appended to all branches of that sample.

Every pass runs under the branch's augmentation (Algorithm 1) and is observed by the trace recorder.
The plan brings what wraps the loop (`batch.BatchPlan.driver`), and the method what changes the
network meanwhile (`Method.intervene`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from lapa2_interp.attention.cache import Rows, new_rows
from lapa2_interp.attention.continued_rows import continued_rows
from lapa2_interp.attention.hooked import augmented
from lapa2_interp.attention.interventions import BatchPasses
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.attention.trace import TracedTexts, join_traces
from lapa2_interp.bias.layout import Layout
from lapa2_interp.bias.tokens import decode_answer, decode_continuation
from lapa2_interp.errors import MethodError, ModelError, parameter
from lapa2_interp.generation.banned_words import BannedWords
from lapa2_interp.generation.batch import Batch, BatchPlan
from lapa2_interp.generation.sampling import NOTHING, draw
from lapa2_interp.methods.base import BatchStart, LogProbs, Method
from lapa2_interp.models.facts import Model, decided_path, facts_of
from lapa2_interp.models.prepacked import prepacked
from lapa2_interp.progress import hidden_bar


@torch.no_grad()
def decode_batch(
    model: Model,
    plan: BatchPlan,
    pairs: Sequence[tuple[int, int]],
    progress: tqdm | None = None,
) -> TracedTexts:
    """Decode one batch of a plan. A text that ran out of tokens ends there, with `finish` "empty".

    Args:
        pairs: One of the plan's batches: (prompt number, sample number) of each sample.
        progress: A bar to advance by tokens; by default none.

    Raises:
        TraceError: Patterns are asked of heads that the model does not have.
        ModelError: The model's logits are not numbers.
    """
    bar = hidden_bar() if progress is None else progress
    widest = max(len(layout) for layouts in plan.arrangement.layouts for layout in layouts)
    with (
        prepacked(facts_of(model).network, plan.card.prepacking),
        decided_path(model, widest, widest),
    ):
        return plan.driver(model, plan, plan.assemble_batch(pairs), bar)


def decode_samples(
    model: Model, plan: BatchPlan, batch: Batch, bar: tqdm, rows: Rows | None = None
) -> TracedTexts:
    """The texts of a batch and their trace, drawn once.

    Args:
        rows: What reads them; new rows by default.
    """
    kind, recorder = plan.cell.trace, None
    if kind != "none":
        size = model.cfg.n_layers, model.cfg.n_heads
        recorder = Recorder(*size, kind, plan.cell.patterns, facts_of(model).layer_types)
    if rows is None:
        rows = new_rows(model, plan.rules)
    of_rows = (range(len(batch.layouts)), batch.expansion)  # of the prompt pass, and of steps
    prompts = {len(rows_of): [row % batch.n_prompts for row in rows_of] for rows_of in of_rows}
    passes = BatchPasses(model, rows, len(batch.layouts[0]) - 1, prompts, recorder)
    with plan.method.intervene(passes, batch.prepared):
        tokens, n_tokens, finish = _decode_steps(model, plan, batch, passes.rows, recorder, bar)
    texts = []
    for i, (prompt, sample) in enumerate(batch.pairs):
        new_ids = tokens[i, : n_tokens[i]].tolist()
        prompt_text = plan.prompts[prompt]
        if plan.cell.is_chat:
            new = decode_answer(model.tokenizer, new_ids)
        else:
            new = decode_continuation(model.tokenizer, prompt_text, new_ids)
        texts.append(
            {
                "prompt": prompt_text,
                "attribute": plan.cell.attribute,
                "sample": sample,
                "text": prompt_text + new if plan.cell.task.length_counts_prompt else new,
                "continuation": new,
                "tokens": new_ids,
                "n_tokens": n_tokens[i],
                "finish": finish[i],
            }
        )
    table = pd.DataFrame(texts)
    if recorder is None:
        return TracedTexts(table, None)
    trace = recorder.dataset(batch.sample_layouts, plan.branches, n_tokens)
    return TracedTexts(table, join_traces([trace], table))


def _decode_steps(
    model: Model,
    plan: BatchPlan,
    batch: Batch,
    rows: Rows,
    recorder: Recorder | None,
    bar: tqdm,
) -> tuple[Int[Tensor, "sample step"], list[int], list[str]]:
    """Decode one batch step by step: the tokens that are drawn, and of each sample how many of them
    are its text, and how it ends."""
    n_steps = max(batch.steps)
    prompt_rules = [
        augmentation
        for augmentation in plan.arrangement.augmentations
        for _ in range(batch.n_prompts)
    ]
    expansion = torch.tensor(batch.expansion)  # by branch x sample: a row of branch x prompt
    method, branches = plan.method, plan.branches
    if recorder is not None:
        recorder.begin(batch.layouts, expansion)
    # Step 1: every branch reads every prompt; its last query is t = T of Algorithm 1.
    keep = 1 + max(layout.l_pro for layout in batch.layouts) if method.reads_prompt else 1
    with augmented(model, prompt_rules, batch.layouts, recorder):
        # row query vocab; row = branch x prompt
        prompt_logits = rows.prompt_pass(batch.layouts, batch.prefixes, keep)
    state: Any = method.begin(
        batch_start(batch, branches, prompt_logits if method.reads_prompt else None)
    )
    # Step 2: prompts are expanded to samples; their keys and values when `continued_rows` opens.
    logits = prompt_logits[expansion, -1]  # row vocab; from here on row = branch x sample
    del prompt_logits

    blocked = torch.tensor(plan.card.end_ids, dtype=torch.long, device=logits.device)
    banned = None
    if words := plan.cell.banned_words:
        # An answer of a chat begins a word of its own.
        fronts = ["" if plan.cell.is_chat else plan.prompts[prompt] for prompt, _ in batch.pairs]
        banned = BannedWords(model.tokenizer, words, fronts, without_marks=plan.cell.is_chat)

    def mask_forbidden(log_weights: Float[Tensor, "sample vocab"]) -> Float[Tensor, "sample vocab"]:
        """Tokens that are never drawn get the log-weight -inf."""
        if plan.cell.eos == "block":
            log_weights = log_weights.index_fill(1, blocked, -torch.inf)
        return log_weights if banned is None else banned.mask(log_weights)

    # Step 3, token by token (Algorithm 1, line 1): combine and draw (lines 19 to 23), append.
    uniform = torch.from_numpy(batch.uniform).to(logits.device)  # sample step
    tokens, n_tokens, finish = [], list(batch.steps), ["length"] * len(batch.steps)
    if recorder is not None:
        recorder.begin(batch.sample_layouts)
    # `rows.expand` and `augmented`; on a GPU that replays its steps, a graph that does both.
    with continued_rows(
        model,
        rows,
        expansion.to(logits.device),
        batch.capacity,
        [prompt_rules[row] for row in batch.expansion],
        batch.sample_layouts,
        recorder,
    ) as rows:
        for step in range(n_steps):
            log_probs = log_probs_by_branch(logits, branches)  # by branch: sample vocab
            masked_log_probs = mask_main_branch(log_probs, mask_forbidden)
            log_weights = mask_forbidden(method.combine(masked_log_probs, state))  # sample vocab
            if plan.cell.temperature != 1:
                log_weights = log_weights / plan.cell.temperature
            drawn = draw(log_weights, uniform[:, step], top_k=plan.cell.top_k)  # sample
            # An ended sample's row runs on with the others; what it reads does not matter.
            read_next = drawn.clamp(min=0)
            state = method.advance(state, log_probs, read_next)
            cpu_tokens = drawn.cpu()  # the loop's one wait for the device in a step
            tokens.append(cpu_tokens.clamp(min=0))
            if banned is not None:
                banned.advance(tokens[-1].tolist())
            if (cpu_tokens == NOTHING).any():
                check_numbers(plan, logits, step)
            # A sample ends before a token that is none, and behind an end token.
            for i, token in enumerate(cpu_tokens.tolist()):
                if n_tokens[i] > step and token == NOTHING:
                    n_tokens[i], finish[i] = step, "empty"
                elif n_tokens[i] > step and plan.cell.eos == "stop" and token in plan.card.end_ids:
                    n_tokens[i], finish[i] = step + 1, "end"
            bar.update(sum(n > step for n in n_tokens))
            if max(n_tokens) <= step + 1:
                break
            # sample -> row 1 -> row vocab
            logits = rows.read_tokens(read_next.repeat(len(branches))[:, None])[:, -1]
    return torch.stack(tokens, dim=1), n_tokens, finish


def mask_main_branch(log_probs: LogProbs, mask: Callable[[Tensor], Tensor]) -> LogProbs:
    """All branches; in the base branch (or the only one) tokens that are never drawn have -inf.

    A method that keeps the likeliest tokens must not fill up with tokens that are never drawn.
    """
    main = next(iter(log_probs)) if len(log_probs) == 1 else "base"
    if main not in log_probs:
        return log_probs
    return {**log_probs, main: mask(log_probs[main])}


def check_numbers(plan: BatchPlan, logits: Float[Tensor, "row vocab"], step: int) -> None:
    """Refuse logits that are no numbers.

    Raises:
        MethodError: A logit is NaN or infinite, and the method adds its own numbers to the network.
        ModelError: A logit is NaN or infinite.
    """
    if not (logits < torch.inf).all():  # -inf is a token that the model itself rules out
        card, method = plan.card, plan.method
        kind = "NaN" if logits.isnan().any() else "infinite"
        problem = f"the logits of {card.name} are not numbers ({kind}) at step {step}"
        # `load_model` has refused weights that give no numbers by themselves.
        if method.changes_network and method.when_empty != Method.when_empty:
            numbers = ", ".join(
                parameter(name, value, "set")
                for name, value in plan.cell.parameters.items()
                if isinstance(value, float)
            )
            raise MethodError(f"{problem}: {method.name} has {numbers}; {method.when_empty}")
        wider = (
            f", or {parameter('dtype', 'float32')}" if card.dtype in ("float16", "bfloat16") else ""
        )
        raise ModelError(
            f"{problem}: a weight is NaN, or numbers exceed {card.dtype}; load sound weights{wider}"
        )


def batch_start(
    batch: Batch, branches: Sequence[str], prompt_logits: Float[Tensor, "row query vocab"] | None
) -> BatchStart:
    """The start of the batch's samples; the logits of their prompts are given if they are
    needed."""
    n_prompt = torch.tensor([layout.l_pro for layout in batch.layouts[: batch.n_prompts]])
    owner = torch.tensor(batch.owner)
    log_likelihood = None
    if prompt_logits is not None:
        # by branch: prompt
        by_branch = prompt_log_likelihood(prompt_logits, batch.layouts).chunk(len(branches))
        # by branch: prompt -> sample
        log_likelihood = {
            name: prompts[owner.to(prompts.device)]
            for name, prompts in zip(branches, by_branch, strict=True)
        }
    device = "cpu" if prompt_logits is None else prompt_logits.device
    return BatchStart(
        [batch.prepared[i] for i in batch.owner], log_likelihood, n_prompt[owner].to(device)
    )


def prompt_log_likelihood(
    logits: Float[Tensor, "row query vocab"], layouts: Sequence[Layout]
) -> Float[Tensor, " row"]:
    """log P of each row's prompt, from logits that begin at or before the token before it."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_likelihoods = []
    for row, layout in zip(wide, layouts, strict=True):
        tokens = torch.tensor(layout.ids[-layout.l_pro :], device=row.device)
        log_probs = row[-layout.l_pro - 1 : -1].log_softmax(dim=1)
        log_likelihoods.append(log_probs.gather(1, tokens[:, None]).sum())
    return torch.stack(log_likelihoods)


def log_probs_by_branch(
    logits: Float[Tensor, "row vocab"], branches: Sequence[str]
) -> Mapping[str, Tensor]:
    """Log-probabilities by branch, in at least float32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # row vocab -> by branch: sample vocab
    return dict(zip(branches, wide.log_softmax(dim=1).chunk(len(branches)), strict=True))
