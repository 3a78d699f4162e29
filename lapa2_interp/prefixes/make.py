"""Train or evaluate sets of soft prefixes in one call, with corpora by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pandas as pd

from lapa2_interp._util.errors import PrefixError
from lapa2_interp.models.machine import print_if_slow
from lapa2_interp.prefixes.evaluation import evaluate_sets
from lapa2_interp.prefixes.recipes import TrainingRecipe
from lapa2_interp.prefixes.soft_prefix import cards_in
from lapa2_interp.prefixes.training import train_set
from lapa2_interp.tasks.corpora import Corpus, read_corpus, split_held_out, without_texts_of
from lapa2_interp.tasks.task import Task, read_task

HELD_OUT = 250
"""Texts per attribute that are held out of the data if no held-out texts are given."""
Report = Callable[[str], None]


def make_set(
    model: str,
    task: Task,
    out: Path,
    data: Sequence[str],
    held_out: Sequence[str],
    recipe: TrainingRecipe,
    *,
    attributes: Sequence[str] = (),
    start_from: Path | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    report: Report = lambda text: None,
) -> pd.DataFrame:
    """Train a task's soft prefixes for a frozen model and evaluate them. The same call resumes an
    interrupted training.

    Args:
        model: A name of `lapa2 models`, a hub id or a folder.
        out: The set's folder.
        data: Corpora, as `corpora.read_corpus` takes them.
        held_out: Corpora that are never trained on; by default HELD_OUT texts per attribute of the
            data. One half decides when to stop, the other gives the cards' numbers.
        attributes: Train only these; by default all attributes of the task.
        start_from: Begin with the prefixes of this set.
        report: Called with a line about each corpus.

    Returns:
        As `evaluate_sets`.

    Raises:
        Lapa2Error: As `read_corpus`, `train_set` and `evaluate_sets`.
    """
    print_if_slow(recipe.dtype, device)
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
        recipe,
        attributes=names,
        start_from=start_from,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    return evaluate_sets(
        [out],
        task,
        measured,
        limit=100,
        max_tokens=recipe.max_tokens,
        dtype=recipe.dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )


def measure_sets(
    folders: Sequence[Path],
    data: Sequence[str],
    task: Task | None = None,
    *,
    limit: int = 250,
    max_tokens: int = 64,
    dtype: str = "float32",
    device: str | None = None,
    trust_remote_code: bool = False,
    report: Report = lambda text: None,
) -> pd.DataFrame:
    """Evaluate sets of soft prefixes on text they were not trained on, and write the numbers into
    their cards.

    Args:
        folders: Sets of one task and model.
        data: Corpora, as `corpora.read_corpus` takes them; of those on the hub the test split is
            read.
        task: By default the task that the sets were trained for.
        limit: Texts per attribute, shared evenly among the data.
        max_tokens: Tokens of each text that are read, from its beginning.
        report: Called with a line about each corpus.

    Returns:
        As `evaluate_sets`.

    Raises:
        PrefixError: A folder holds no soft prefixes.
        Lapa2Error: As `read_corpus` and `evaluate_sets`.
    """
    if not folders:
        raise PrefixError("name the folder of a set; `lapa2 prefix train --out` makes one")
    set_cards = [card for folder in folders for card in cards_in(folder)]
    print_if_slow(dtype, device)
    corpora = _read_corpora(
        data, list(dict.fromkeys(card.attribute for card in set_cards)), "test", report
    )
    return evaluate_sets(
        folders,
        task or read_task(set_cards[0].task),
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
