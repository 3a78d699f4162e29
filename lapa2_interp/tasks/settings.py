"""Settings of the command `word-lists`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import dataclass

from lapa2_interp._util.settings import Settings
from lapa2_interp._util.values import Count

if TYPE_CHECKING:
    from lapa2_interp.tasks.task import Task
else:  # a value beside names and paths, which the function reads
    Task = Any

LEAST_Z = 1.96
"""The least z of a word that is kept. One in forty words that are unrelated to the class reaches
it."""


@dataclass(frozen=True)
class WordListSettings(Settings):
    """Derive FreeCtrl's word lists from labelled texts: the words that tell attributes apart.

    Words are ranked by the z of the log-odds ratio with a Dirichlet prior (Monroe, Colaresi and
    Quinn 2008); function words are left out. For example

        lapa2 word-lists --task sentiment --data sst2 --data imdb --out words.json
        lapa2 generate --method freectrl --set words=words.json \\
            --attribute positive --out results/run
    """

    _: KW_ONLY
    task: str | Path | Task
    """A task of `lapa2 tasks`, or the path of a task file: whose attributes are the labels."""
    data: Sequence[str]
    """A corpus by name (imdb, sst2, agnews) or a file with the fields text and label; repeat the
    option for more."""
    out: str | Path
    """The list, a JSON file."""
    n_words: Count = 400
    """Words per attribute."""
    min_count: Count = 20
    """Occurrences a word must have."""
    min_z: float = LEAST_Z
    """The smallest z of a word; 1.96 is reached by one in forty of the words that tell nothing."""
    force: bool = False
    """Replace the file."""
