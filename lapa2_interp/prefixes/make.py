"""Train or evaluate sets of soft prefixes in one call, with corpora by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from lapa2_interp._util.errors import PrefixError
from lapa2_interp._util.values import Count, numbers_checked
from lapa2_interp.models.machine import Dtype, print_if_slow
from lapa2_interp.prefixes.evaluation import evaluate_sets
from lapa2_interp.prefixes.recipes import training_recipe
from lapa2_interp.prefixes.soft_prefix import cards_in
from lapa2_interp.prefixes.training import train_set
from lapa2_interp.tasks.corpora import Corpus, read_corpus, split_held_out, without_texts_of
from lapa2_interp.tasks.task import Task, read_task

HELD_OUT = 250
"""Texts per attribute that are held out of the data if no held-out texts are given."""
Report = Callable[[str], None]


@numbers_checked
def make_set(
    *,
    out: str | Path,
    data: Sequence[str],
    held_out: Sequence[str] = (),
    model: str = "smollm2-135m",
    task: str | Path | Task = "sentiment",
    attributes: Sequence[str] = (),
    objective: Literal["mle", "contrastive"] | None = None,
    parameterisation: Literal["direct", "air", "mlp", "linear"] | None = None,
    recipe: str = "small",
    start_from: str | Path | None = None,
    changes: Mapping[str, Any] | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    report: Report = lambda text: None,
) -> pd.DataFrame:
    """Train a task's soft prefixes for a frozen model; the same command resumes.

    Writes one `<attribute>.safetensors` and one card, `<attribute>.json`, per attribute; generate
    with them by `--set prefixes=FOLDER`. For example

        lapa2 prefix train --task sentiment --data imdb --out results/sentiment-mle
        lapa2 prefix train --task sentiment --data reviews.jsonl \\
            --objective contrastive --set lr=0.03 --out results/contrastive

    Args:
        out: The set's folder.
        data: imdb, sst2 or agnews from the hub, or a file (.jsonl, .csv, .parquet, also compressed)
            with fields text and label, whose labels are the task's attributes; repeat the option
            for more.
        held_out: The same, never trained on: the loss of one half decides when to stop, the other
            half gives the cards' numbers. By default 250 texts per attribute are held out of the
            data.
        model: A name of `lapa2 models`, a hub id or a folder.
        task: A task of `lapa2 tasks`, or the path of a task file.
        attributes: Train only these; by default all attributes of the task.
        objective: mle: each prefix alone, likelihood of its texts. contrastive: all together, told
            apart.
        parameterisation: direct, air (Air-Decoding), mlp (Prefix-Tuning) or linear (Con-Prefix).
        recipe: small (two cores), or a paper's: lapa2, air, con-prefix, prefix-tuning.
        start_from: Begin with the prefixes of this set.
        changes: Fields of the recipe, such as lr=0.03 (`lapa2 prefix recipes` lists them).
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        trust_remote_code: Run code that comes with the model.
        report: Called with a line about each corpus.

    Returns:
        As `evaluate_sets`.

    Raises:
        Lapa2Error: As `read_corpus`, `train_set` and `evaluate_sets`.
    """
    named = {
        "objective": objective,
        "parameterisation": parameterisation,
        "start": "set" if start_from else None,
    }
    named = {name: value for name, value in named.items() if value is not None}
    chosen = training_recipe(recipe, **named | dict(changes or {}))
    out, task = Path(out), task if isinstance(task, Task) else read_task(task)
    print_if_slow(chosen.dtype, device)
    names = tuple(attributes) or tuple(task.attributes)
    for name in names:
        task.prefix(name)
    corpora = _read_corpora(data, names, "train", report)
    if held_out:
        checks = without_texts_of(corpora, _read_corpora(held_out, names, "test", report))
    else:
        corpora, checks = _unzip(split_held_out(corpus, HELD_OUT, at_least=2) for corpus in corpora)
        corpora = without_texts_of(
            checks, corpora
        )  # of several corpora, one may have a text of another
    deciding, measured = _unzip(split_held_out(corpus, HELD_OUT, one_in=2) for corpus in checks)
    measured = without_texts_of(deciding, measured)
    train_set(
        model,
        task,
        corpora,
        deciding,
        out,
        chosen,
        attributes=names,
        start_from=None if start_from is None else Path(start_from),
        device=device,
        trust_remote_code=trust_remote_code,
    )
    return evaluate_sets(
        [out],
        task,
        measured,
        limit=100,
        max_tokens=chosen.max_tokens,
        dtype=chosen.dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )


@numbers_checked
def measure_sets(
    folders: Sequence[str | Path],
    *,
    data: Sequence[str],
    task: str | Path | Task | None = None,
    limit: Count = 250,
    max_tokens: Count = 64,
    dtype: Dtype = "float32",
    device: str | None = None,
    trust_remote_code: bool = False,
    report: Report = lambda text: None,
) -> pd.DataFrame:
    """Measure sets of soft prefixes on held-out text, and write the numbers into their cards.

    Args:
        folders: Sets of one task and model: folders of `lapa2 prefix train --out`. Hard prefixes
            are measured once for all.
        data: As in `lapa2 prefix train`; of corpora on the hub the test split is read.
        task: The task; the one the set was trained for, by default.
        limit: Texts per attribute, shared evenly among the data.
        max_tokens: Tokens of each text that are read, from its beginning.
        dtype: Precision of weights and computation.
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        trust_remote_code: Run code that comes with the model.
        report: Called with a line about each corpus.

    Returns:
        As `evaluate_sets`.

    Raises:
        PrefixError: A folder holds no soft prefixes.
        Lapa2Error: As `read_corpus` and `evaluate_sets`.
    """
    if not folders:
        raise PrefixError("name the folder of a set; `lapa2 prefix train --out` makes one")
    places = [Path(folder) for folder in folders]
    set_cards = [card for folder in places for card in cards_in(folder)]
    print_if_slow(dtype, device)
    corpora = _read_corpora(
        data, list(dict.fromkeys(card.attribute for card in set_cards)), "test", report
    )
    return evaluate_sets(
        places,
        task if isinstance(task, Task) else read_task(task or set_cards[0].task),
        corpora,
        limit=limit,
        max_tokens=max_tokens,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )


def _unzip(split: Iterable[tuple[Corpus, Corpus]]) -> tuple[list[Corpus], list[Corpus]]:
    """Lists of the first and of the second parts."""
    first, second = zip(*split, strict=True)
    return list(first), list(second)


def _read_corpora(
    sources: Sequence[str], labels: Sequence[str], split: str, report: Report
) -> list[Corpus]:
    """Read corpora, and report each in a line."""
    corpora = [read_corpus(source, labels, split) for source in sources]
    for corpus in corpora:
        report(corpus.summary)
    return corpora
