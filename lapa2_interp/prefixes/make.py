"""Train or evaluate sets of soft prefixes in one call, with corpora by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pandas as pd

from lapa2_interp._util.settings import takes
from lapa2_interp.errors import PrefixError
from lapa2_interp.models.machine import print_if_slow
from lapa2_interp.prefixes.evaluation import evaluate_sets
from lapa2_interp.prefixes.recipes import training_recipe
from lapa2_interp.prefixes.settings import PrefixEvaluationSettings, PrefixTrainingSettings
from lapa2_interp.prefixes.soft_prefix import cards_in
from lapa2_interp.prefixes.training import train_set
from lapa2_interp.tasks.corpora import Corpus, read_corpus, split_held_out, without_texts_of
from lapa2_interp.tasks.task import Task, read_task

HELD_OUT = 250
"""Texts per attribute that are held out of the data if no held-out texts are given."""
Report = Callable[[str], None]


@takes(PrefixTrainingSettings)
def make_set(settings: PrefixTrainingSettings) -> pd.DataFrame:
    """`lapa2 prefix train` in Python; `PrefixTrainingSettings` says what it does and takes.

    Returns:
        As `evaluate_sets`.

    Raises:
        Lapa2Error: As `read_corpus`, `train_set` and `evaluate_sets`.
    """
    named = {
        "objective": settings.objective,
        "parameterisation": settings.parameterisation,
        "start": "set" if settings.start_from else None,
    }
    named = {name: value for name, value in named.items() if value is not None}
    chosen = training_recipe(settings.recipe, **named | dict(settings.changes or {}))
    out = Path(settings.out)
    task = settings.task if isinstance(settings.task, Task) else read_task(settings.task)
    print_if_slow(chosen.dtype, settings.device)
    names = tuple(settings.attributes) or tuple(task.attributes)
    for name in names:
        task.prefix(name)
    corpora = _read_corpora(settings.data, names, "train", settings.report)
    if settings.held_out:
        checks = without_texts_of(
            corpora, _read_corpora(settings.held_out, names, "test", settings.report)
        )
    else:
        corpora, checks = _unzip(split_held_out(corpus, HELD_OUT, at_least=2) for corpus in corpora)
        corpora = without_texts_of(
            checks, corpora
        )  # of several corpora, one may have a text of another
    deciding, measured = _unzip(split_held_out(corpus, HELD_OUT, one_in=2) for corpus in checks)
    measured = without_texts_of(deciding, measured)
    train_set(
        settings.model,
        task,
        corpora,
        deciding,
        out,
        chosen,
        attributes=names,
        start_from=None if settings.start_from is None else Path(settings.start_from),
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
    )
    return evaluate_sets(
        [out],
        task,
        measured,
        limit=100,
        max_tokens=chosen.max_tokens,
        dtype=chosen.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
    )


@takes(PrefixEvaluationSettings)
def measure_sets(settings: PrefixEvaluationSettings) -> pd.DataFrame:
    """`lapa2 prefix evaluate` in Python; `PrefixEvaluationSettings` says what it does and takes.

    Returns:
        As `evaluate_sets`.

    Raises:
        PrefixError: A folder holds no soft prefixes.
        Lapa2Error: As `read_corpus` and `evaluate_sets`.
    """
    if not settings.folders:
        raise PrefixError("name the folder of a set; `lapa2 prefix train --out` makes one")
    places = [Path(folder) for folder in settings.folders]
    set_cards = [card for folder in places for card in cards_in(folder)]
    print_if_slow(settings.dtype, settings.device)
    corpora = _read_corpora(
        settings.data,
        list(dict.fromkeys(card.attribute for card in set_cards)),
        "test",
        settings.report,
    )
    return evaluate_sets(
        places,
        settings.task
        if isinstance(settings.task, Task)
        else read_task(settings.task or set_cards[0].task),
        corpora,
        limit=settings.limit,
        max_tokens=settings.max_tokens,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
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
