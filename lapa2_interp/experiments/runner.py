"""Generate arms that are compared: the same prompts, attributes and random streams under several augmentations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from time import perf_counter
from typing import cast

import pandas as pd
import torch

from lapa2_interp.attention.hooked import Model
from lapa2_interp.augmentation import Augmentation
from lapa2_interp.decoding import (
    TOP_K,
    EmptyGenerationError,
    EosPolicy,
    check_options,
    join_traces,
    run_plan,
)
from lapa2_interp.experiments.estimates import LONG, Pace, pace, plan_seconds, shown_time
from lapa2_interp.experiments.store import Manifest, Run, library_versions, source_commit
from lapa2_interp.kit import ModelKit
from lapa2_interp.methods import Method
from lapa2_interp.models import model_card
from lapa2_interp.plan import Plan, plan
from lapa2_interp.progress import progress_bar
from lapa2_interp.tasks import Task
from lapa2_interp.trace import TraceKind, trace_bytes


def run_arms(
    model: Model,
    method: Method,
    task: Task,
    attributes: Sequence[str],
    prompts: Sequence[str],
    arms: Mapping[str, Augmentation | None],
    *,
    length: int,
    samples: int,
    seed: int,
    top_k: int = TOP_K,
    eos: EosPolicy = "keep",
    trace: TraceKind = "full",
    patterns: Sequence[tuple[int, int]] = (),
    max_rows: int | None = None,
    doubled_bos: bool = False,
    announce: Callable[[Sequence[Plan]], None] | None = None,
) -> Run:
    """Every arm and attribute, as one run whose samples carry columns `arm` and `attribute`.

    Texts that ran out of tokens are kept, with `finish` "empty", and named in the manifest's `problems`.

    Arguments are those of `decoding.generate`; everything is resolved and checked before the first token, and `announce` is
    shown the plans then.

    Raises:
        Lapa2Error: As `decoding.generate`.
    """
    check_options(top_k, eos, trace, patterns)
    kit = ModelKit(model)
    plans = {
        (arm, attribute): plan(
            model, method, task, attribute, prompts, augmentation, length, samples, max_rows, doubled_bos, kit
        )
        for arm, augmentation in arms.items()
        for attribute in attributes
    }
    if announce is not None:
        announce(list(plans.values()))
    total = sum(each.new_tokens for each in plans.values())
    tables, traces, problems = [], [], []
    began = perf_counter()
    with progress_bar(total, f"{method.name} {task.name}") as bar:
        for (arm, attribute), todo in plans.items():
            try:
                made = run_plan(
                    model, todo, seed=seed, top_k=top_k, eos=eos, trace=trace, patterns=patterns, progress=bar
                )
            except EmptyGenerationError as error:
                made = error.generation
                problems.append(f"{arm}, {attribute}: {error}")
            tables.append(made.samples.assign(arm=arm))
            if made.trace is not None:
                traces.append(made.trace)
    table = pd.concat(tables, ignore_index=True)
    manifest = Manifest(
        created=datetime.now(UTC),
        commit=source_commit(),
        versions=library_versions(),
        model=model_card(model),
        method=method.name,
        parameters=asdict(method),  # type: ignore[call-overload]
        task=task.name,
        attributes=tuple(attributes),
        branches={each.attribute: each.prefix_names for each in plans.values()},
        prepared={each.attribute: each.summaries for each in plans.values() if each.summaries},
        prompts=tuple(prompts),
        arms=dict(arms),
        length=length,
        length_counts_prompt=task.length_counts_prompt,
        samples=samples,
        seed=seed,
        top_k=top_k,
        eos=eos,
        doubled_bos=doubled_bos,
        max_rows=max_rows,
        trace=trace,
        patterns=tuple(patterns),
        merged=tuple(dict.fromkeys(note for each in plans.values() for note in each.merged)),
        seconds=round(perf_counter() - began, 3),
        new_tokens=int(table["n_tokens"].sum()),
        problems=tuple(problems),
    )
    return Run(manifest, table, join_traces(traces, table) if traces else None)


def estimate(model: Model, plans: Sequence[Plan], trace: TraceKind, patterns: int = 0) -> str:
    """What these plans will make, in one line: texts, branches, tokens, the size of the trace, and the time if it is long."""
    texts = sum(len(group) for each in plans for group in each.groups)
    line = (
        f"{texts} texts, {sum(each.new_tokens for each in plans)} new tokens, branches {', '.join(plans[0].branches)}"
    )
    if plans[0].method.reads_anew:
        cached, read = (sum(each.tokens_read(anew) for each in plans) for anew in (False, True))
        line += f"; every step reads its text anew: {read} tokens through the model, where a cache would need {cached}"
    line += _time(model, plans)
    if trace == "none":
        return line
    size = sum(
        trace_bytes(
            trace,
            each.rows,
            max(each.steps),
            model.cfg.n_layers,
            model.cfg.n_heads,
            patterns,
            max(len(row[i]) + each.steps[i] for row in each.layouts for i in range(len(each.steps))),
        )
        for each in plans
    )
    return f"{line}; the trace takes {size / 1e6:.1f} MB"


def _time(model: Model, plans: Sequence[Plan]) -> str:
    at = _pace(model, sum(each.tokens_read(each.method.reads_anew) for each in plans))
    told = sum(plan_seconds(each, at) for each in plans)
    return f"; about {shown_time(told)} ({at.basis})" if told > LONG else ""


def reading_seconds(model: Model, tokens: int) -> float:
    """About what it takes to read so many tokens of given texts (`teacher_forced`)."""
    return tokens * _pace(model, tokens).row


def _pace(model: Model, tokens: int) -> Pace:
    """Of a loaded model that so many tokens go through."""
    card, network = model_card(model), cast(torch.nn.Module, getattr(model, "original_model", model))
    operations = 2.0 * tokens * sum(each.numel() for each in network.parameters())
    device = card.device.partition(":")[0]
    threads = torch.get_num_threads() if device == "cpu" else 1
    return pace(card.name, card.dtype, device, card.model_class, threads, operations=operations, loaded=model)
