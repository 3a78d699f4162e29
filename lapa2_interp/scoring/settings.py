"""Settings of the commands `scorers train` and `scorers answers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import dataclass

from lapa2_interp._util.settings import Settings
from lapa2_interp._util.values import Positive

if TYPE_CHECKING:
    from lapa2_interp.tasks.task import Task
else:  # a value beside names and paths, which the function reads
    Task = Any


@dataclass(frozen=True)
class TrainingSettings(Settings):
    """Train a classifier for a task: a linear model on hashed n-grams, in minutes.

    `analyses/scorers/train_adapters.py` trains adapters on SmolLM2, in hours. For example

        lapa2 scorers train --task sentiment --data imdb --data sst2=3 \\
            --c 1 --test imdb --test sst2 --out results/scorers
    """

    _: KW_ONLY
    task: str | Path | Task
    """A task of `lapa2 tasks`, or the path of a task file; its attributes are the labels."""
    data: Sequence[str]
    """imdb, sst2 or agnews from the hub, or a file (.jsonl, .csv, .parquet, also compressed) with
    fields text and label; repeat the option for more. =WEIGHT after it says how much its texts
    count, such as sst2=3."""
    test: Sequence[str] = ()
    """The same, for the card's results; of corpora on the hub the test split is read."""
    graded: Sequence[str] = ()
    """A file of RealToxicityPrompts with Perspective scores (.jsonl, .jsonl.xz), for toxicity: four
    fifths of its rows are learned, the rest tests the correlation. =WEIGHT as above."""
    c: Positive = 3.0
    """Inverse strength of the L2 penalty."""
    out: str | Path
    """Folder of the weights and the card."""


@dataclass(frozen=True)
class RatingSettings(Settings):
    """Read raters' answers: means per arm with 95 % intervals, and how far the raters agree."""

    files: Sequence[str | Path]
    """The raters' filled sheets, CSV files with comma, semicolon or tab."""
    _: KW_ONLY
    key: str | Path
    """The key.csv of `lapa2 scorers sheets`."""
    out: str | Path | None = None
    """Also write answers.csv, table.csv and agreement.csv into this new folder."""
