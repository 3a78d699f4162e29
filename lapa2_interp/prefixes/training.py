"""Train soft prefixes for a frozen model.

1. Texts of each attribute, in pieces of at most `max_tokens`, after [slots] BOS; every token of
   the text is scored.
2. "mle" (Air-Decoding's PC-LMs): per attribute on its own, the mean token NLL of its texts.
   "contrastive" (Con-Prefix): the attributes together. With s_c the NLL of a text under prefix c,
   per token or summed,

       L = (1 - w) * mean_b -log softmax_c(-scale s_c[b])[y_b] + w * mean_b s_{y_b}[b] / tokens

3. AdamW, linear warm-up and decay, clipped gradients; the held-out loss decides when to stop and
   which step to keep.
4. The parameterisation is folded into plain keys and values, and saved with a card.

`parameters` has the parameterisations, `optimization` the loss and the steps. This module trains
all prefixes of a set and writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from filelock import Timeout
from jaxtyping import Float
from torch import Tensor

from lapa2_interp._util.parsing import parse_object, read_text
from lapa2_interp._util.same_inputs import check_same_inputs
from lapa2_interp._util.version import __version__
from lapa2_interp.bias.text_start import AUTO_START, start_setting, text_start
from lapa2_interp.errors import DataError, PrefixError, parameter
from lapa2_interp.files import acquire_lock, check_name, temporary_folder, write_json
from lapa2_interp.models.configuration import context_length, short_context
from lapa2_interp.models.load import load_transformers, move_to_device
from lapa2_interp.prefixes.optimization import PrefixTraining, TokenLists, TrainingTexts
from lapa2_interp.prefixes.parameters import text_keys_and_values
from lapa2_interp.prefixes.recipes import TrainingRecipe
from lapa2_interp.prefixes.soft_prefix import (
    PrefixCard,
    PrefixShape,
    SoftPrefix,
    TrainingRecord,
    check_set_place,
    kv_shape_of,
    load_prefix,
    prefix_files,
    save_prefix,
)
from lapa2_interp.progress import progress_bar
from lapa2_interp.tasks.corpora import Corpus, split_pieces
from lapa2_interp.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAN_FILE = ".plan"
"""A file in a finished set: everything that decided the training."""
HELD_OUT_ROWS = 192
"""Rows (texts x prefixes) of each held-out loss."""


def train_set(
    model: str,
    task: Task,
    corpora: Sequence[Corpus],
    held_out: Sequence[Corpus],
    out: Path,
    recipe: TrainingRecipe,
    *,
    attributes: Sequence[str] | None = None,
    start_from: Path | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> list[SoftPrefix]:
    """Train a task's prefixes and write them to a folder, resuming a killed run that is there.

    Args:
        model: As `load_model` takes it.
        corpora: Their labels are the task's attributes.
        held_out: Texts that decide when to stop; never trained on.
        out: The set's folder.
        attributes: Train only these; all of the task by default. A contrastive objective needs two.
        start_from: The set that a recipe with start "set" begins with.

    Raises:
        DataError: An attribute has no text, or the objective needs a second attribute.
        PrefixError: The folder holds other prefixes, or the loss is not a number.
    """
    # Everything that decides the result. Only the same plan resumes a training.
    check_name(out)
    check_set_place(out)
    attributes = _checked_attributes(task, attributes, recipe)
    network, tokenizer, weights = load_transformers(model, recipe.dtype, trust_remote_code)
    network.requires_grad_(False)
    move_to_device(network, device)
    shape = kv_shape_of(network.config, recipe.slots)
    check_context(network, tokenizer, task, attributes, recipe.slots, recipe.max_tokens)
    plan: dict[str, Any] = {
        "model": model,
        "weights": weights,
        "task": task.name,
        "attributes": list(attributes),
        "recipe": recipe.model_dump(mode="json"),
        "data": [corpus.sha256 for corpus in (*corpora, *held_out)],
    }
    if recipe.start == "hard":
        plan["prefixes"] = {name: task.prefix(name) for name in attributes}
    first_set: dict[str, SoftPrefix] = {}
    if recipe.start == "set":
        first_set = _load_first_set(start_from, attributes, model, weights, shape)
        plan["start_from"] = [prefix.card.sha256 for prefix in first_set.values()]
    if _is_finished(out, attributes, plan):
        print(f"{out} is finished", file=sys.stderr)
        return [load_prefix(out, name) for name in attributes]
    with _locked_checkpoints(out, plan) as checkpoints:
        # Texts, and the keys and values to begin with.
        contrastive = recipe.objective == "contrastive"
        groups = [attributes] if contrastive else [(name,) for name in attributes]  # trained as one
        n_checked = max(1, HELD_OUT_ROWS // len(groups[0]) ** 2)
        texts, checks = (
            {
                name: tokenise_pieces(tokenizer, sources, name, recipe.max_tokens, most)
                for name in attributes
            }
            for sources, most in ((corpora, recipe.limit), (held_out, n_checked))
        )
        first_id = text_start(tokenizer).token
        start = () if first_id is None else (first_id,)
        first = _start_values(network, tokenizer, start, task, recipe, texts, first_set)
        # Train each group.
        jobs = [
            PrefixTraining(
                network,
                start,
                shape,
                recipe,
                group,
                TrainingTexts.of([texts[name] for name in group]),
                TrainingTexts.of([checks[name] for name in group]),
                checkpoints / f"{'-'.join(group)}.pt",
                None if first is None else torch.stack([first[name] for name in group], dim=1),
            )
            for group in groups
        ]
        print(_announcement(jobs, recipe), file=sys.stderr)
        if recipe.shared:
            _begin_shared(jobs, task.name, texts, checks, first)
        for job in jobs:
            if all(prefix_files(out, name)[1].is_file() for name in job.attributes):
                continue
            _train_with_bar(job, f"{task.name} {recipe.objective} {' '.join(job.attributes)}")
            for i, name in enumerate(job.attributes):
                card = PrefixCard(
                    attribute=name,
                    task=task.name,
                    set=recipe.objective,
                    model=model,
                    weights=weights,
                    shape=shape,
                    shifted=recipe.shifted,
                    start=start_setting(tokenizer, AUTO_START),
                    origin="trained",
                    training=TrainingRecord(
                        recipe=plan["recipe"],
                        started_from=first_set[name].card.sha256 if first_set else None,
                        data=tuple(corpus.summary for corpus in corpora),
                        data_sha256=tuple(corpus.sha256 for corpus in corpora),
                        texts=len(texts[name]),
                        tokens=job.tokens,
                        steps=job.step,
                        best_step=job.kept_step,
                        losses={step: round(loss, 5) for step, loss in job.losses.items()},
                        seconds=round(job.seconds, 1),
                        lapa2_interp=__version__,
                    ),
                )
                save_prefix(SoftPrefix(job.best[0, i], job.best[1, i], card), out)
        write_json(out / PLAN_FILE, plan)
        with temporary_folder(out) as beside:  # so that they go whole, or not at all
            checkpoints.rename(beside / checkpoints.name)
    return [load_prefix(out, name) for name in attributes]


def _checked_attributes(
    task: Task, attributes: Sequence[str] | None, recipe: TrainingRecipe
) -> tuple[str, ...]:
    """The attributes to train, in the task's order unless some are given."""
    chosen = tuple(dict.fromkeys(attributes or task.attributes))
    for attribute in chosen:
        task.prefix(attribute)
    if recipe.objective == "contrastive" and len(chosen) < 2:
        raise DataError(
            "a contrastive objective needs texts of two attributes at least; found only"
            f" {chosen[0]!r}"
        )
    return chosen


def _load_first_set(
    folder: Path | None, attributes: Sequence[str], model: str, weights: str, shape: PrefixShape
) -> dict[str, SoftPrefix]:
    """The set that a training begins with, which must be of the same model and shape."""
    if folder is None:
        raise PrefixError(
            f"start 'set' needs the folder of a set to begin with ({parameter('from')})"
        )
    prefixes = {name: load_prefix(folder, name) for name in attributes}
    for prefix in prefixes.values():
        if prefix.card.shape != shape or prefix.card.weights != weights:
            raise PrefixError(f"{prefix!r} in {folder} does not fit {model} with {shape}")
    return prefixes


def check_context(
    network: Any,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    attributes: Sequence[str],
    slots: int,
    max_tokens: int,
) -> None:
    """Refuse texts that do not fit after a soft prefix, or after one of the task's hard prefixes,
    with which soft ones are compared.

    Raises:
        PrefixError: With BOS they exceed the model's context, or the length beyond which the model
            has other rotary factors.
    """
    hard = [tokenizer(task.prefix(name), add_special_tokens=False).input_ids for name in attributes]
    longest = max(slots, *map(len, hard))
    n_ctx = short_context(network.config) or context_length(network.config)
    if longest + 1 + max_tokens > n_ctx:
        raise PrefixError(
            f"{longest} slots or tokens of a prefix, BOS and {max_tokens} tokens of a text exceed"
            f" the model's context of {n_ctx}; give at most {n_ctx - longest - 1} tokens"
            " (max_tokens)"
        )


def tokenise_pieces(
    tokenizer: PreTrainedTokenizerBase,
    corpora: Sequence[Corpus],
    attribute: str,
    max_tokens: int,
    limit: int | None,
) -> list[list[int]]:
    """Token ids of an attribute's texts in pieces, the corpora in turn: the first piece of every
    text, then the second piece of longer texts, ...

    Raises:
        DataError: There is no text of the attribute.
    """
    by_corpus = [corpus.texts.get(attribute, ()) for corpus in corpora]
    texts = [text for in_turn in zip_longest(*by_corpus) for text in in_turn if text is not None]
    waiting = [split_pieces(text, tokenizer, max_tokens) for text in texts]
    pieces: list[list[int]] = []
    while waiting:
        unfinished = []
        for stream in waiting:
            if limit is not None and len(pieces) == limit:
                return pieces
            if (ids := next(stream, None)) is not None:
                pieces.append(ids)
                unfinished.append(stream)
        waiting = unfinished
    if not pieces:
        raise DataError(
            f"there is no text of {attribute!r}; give {parameter('data')} with that label"
        )
    return pieces


def _start_values(
    network: Any,
    tokenizer: PreTrainedTokenizerBase,
    start: Sequence[int],
    task: Task,
    recipe: TrainingRecipe,
    texts: Mapping[str, TokenLists],
    first_set: Mapping[str, SoftPrefix],
) -> dict[str, Float[Tensor, "two layer kv_head slot d_head"]] | None:
    """First keys and values by attribute; None where the parameterisation draws random ones."""
    if recipe.start == "set":
        return {
            name: torch.stack([prefix.keys, prefix.values]).float()
            for name, prefix in first_set.items()
        }
    if recipe.start not in ("text", "hard"):
        return None
    ids_of = {
        name: tokenizer(task.prefix(name), add_special_tokens=False).input_ids for name in texts
    }
    if recipe.start == "text":
        ids_of = {
            name: [token for text in of_label[: recipe.slots] for token in text]
            for name, of_label in texts.items()
        }
    return {
        name: text_keys_and_values(network, start, ids, recipe.slots, recipe.shifted).float()
        for name, ids in ids_of.items()
    }


def _begin_shared(
    jobs: Sequence[PrefixTraining],
    task: str,
    texts: Mapping[str, TokenLists],
    checks: Mapping[str, TokenLists],
    first: Mapping[str, Float[Tensor, "two layer kv_head slot d_head"]] | None,
) -> None:
    """Train one prefix on a few texts of all attributes; every prefix then begins with it."""
    job = jobs[0]
    most = -(-job.recipe.shared // len(texts)), HELD_OUT_ROWS // len(texts)
    shared = replace(
        job,
        recipe=job.recipe.model_copy(update={"objective": "mle"}),
        attributes=("shared",),
        train=TrainingTexts.of(
            [[text for of_label in texts.values() for text in of_label[: most[0]]]]
        ),
        held_out=TrainingTexts.of(
            [[text for of_label in checks.values() for text in of_label[: most[1]]]]
        ),
        checkpoint=job.checkpoint.with_name(".shared.pt"),
        first=None if first is None else first[next(iter(texts))][:, None],
    )
    _train_with_bar(shared, f"{task} shared start")
    for job in jobs:
        job.begin(shared.best.expand(-1, len(job.attributes), -1, -1, -1, -1))


def _train_with_bar(job: PrefixTraining, description: str) -> None:
    with progress_bar(job.total, description, "step") as bar:
        job.run(bar)


def _announcement(jobs: Sequence[PrefixTraining], recipe: TrainingRecipe) -> str:
    """A line for the user: the size of the training and its duration, estimated from one forward
    and backward pass that changes nothing."""
    job = jobs[0]
    n_prefixes = len(job.attributes) if recipe.objective == "contrastive" else 1
    texts = [text for job in jobs for text in job.train.texts]
    tokens = sum(map(len, texts)) * recipe.epochs
    shared = round(tokens * recipe.shared / len(texts))
    began = perf_counter()
    loss, n_read = job.loss(
        job.parameters(), job.train, range(min(recipe.batch, len(job.train.texts))), 0
    )
    loss.backward()
    job.optimizer.zero_grad()
    speed = n_read / (perf_counter() - began)
    total = n_prefixes * tokens + shared
    return (
        f"{sum(len(job.attributes) for job in jobs)} prefixes of {recipe.slots} slots"
        f" ({recipe.objective}, {recipe.parameterisation}): {len(texts)} pieces of text,"
        f" {sum(job.total for job in jobs)} steps, {total} tokens at most, about"
        f" {total / speed / 60:.0f} min at {speed:.0f} tokens/s; after a stop the same"
        " command resumes"
    )


def _is_finished(out: Path, attributes: Sequence[str], plan: Mapping[str, Any]) -> bool:
    """True if the folder holds the finished result of this plan."""
    complete = all(prefix_files(out, name)[1].is_file() for name in attributes)
    return complete and not (out / ".training").exists() and _read_plan(out / PLAN_FILE) == plan


def _read_plan(file: Path) -> dict[str, Any]:
    """A stored plan; an empty one if there is none, or it is damaged."""
    with suppress(OSError, ValueError):
        return parse_object(read_text(file))
    return {}


@contextmanager
def _locked_checkpoints(out: Path, plan: Mapping[str, Any]) -> Iterator[Path]:
    """The folder of a set's checkpoints, which other processes stay out of; the same plan resumes,
    another one is refused."""
    folder = out / ".training"
    if not (folder / "plan.json").exists():
        if out.exists() and any(path != folder for path in out.iterdir()):
            raise PrefixError(
                f"{out} is not empty and holds no unfinished training; choose another"
                f" {parameter('out')}"
            )
        write_json(folder / "plan.json", plan)
    else:
        check_same_inputs(_read_plan(folder / "plan.json"), plan, out, PrefixError)
    if folder.is_symlink():
        raise PrefixError(f"{folder} is a link, which is not followed; remove it")
    with ExitStack() as held:
        try:
            held.enter_context(acquire_lock(folder / "lock"))
        except Timeout as error:
            raise PrefixError(
                f"{out} is being trained by another process; wait for it, or choose another"
                f" {parameter('out')}"
            ) from error
        yield folder
