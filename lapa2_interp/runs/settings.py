"""Settings of the commands of runs: `score`, `scorers sheets` and `sweep`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lapa2_interp._util.settings import Settings, print_to_stderr, silent
from lapa2_interp._util.values import Count, Natural, NotNegative
from lapa2_interp.models.machine import Attn, Dtype

USUAL = ("accuracy", "perplexity", "distinct")
"""The scorers where none is named."""


@dataclass(frozen=True)
class ScoreSettings(Settings):
    """Score the texts of a run, or of a file, by means with 95 % intervals.

    Writes scores.parquet (one row per text and metric), table.csv, differences.csv (each arm
    against the baseline), and both as table.md and table.tex. `lapa2 report` shows the scores that
    lie in a run. For example

        lapa2 score results/lake
        lapa2 score results/lake --scorers accuracy masked echo linear --out fast
        lapa2 score results/long --scorers accuracy --lengths 64 256 --out long
        lapa2 score texts.jsonl --scorers toxicity perplexity=gpt2-large --out new
        lapa2 score results/quick --only task=sentiment method=prefix \\
            --scorers judge=MODEL --out results/quick/judge

    where the first writes into results/lake/scores.
    """

    source: str | Path
    """A run folder (of `lapa2 generate` or `lapa2 sweep`), or a .jsonl, .csv or .parquet file with
    a column of texts (and prompt, attribute, arm, if known)."""
    scorers: str | Sequence[str] = USUAL
    """accuracy, toxicity, masked, echo, repetition, perplexity, distinct, judge, each plain or as
    NAME=MODEL (`lapa2 scorers list`), or TASK:NAME=MODEL for texts of one task alone. A plain
    accuracy or toxicity is by both classifiers that ship, adapter and linear; the word linear or
    adapter among the scorers takes that one alone. Those of `lapa2 scorers train` are
    accuracy=FILE, its file of weights."""
    _: KW_ONLY
    out: str | Path | None = None
    """The folder of tables; the command writes those of a run into RUN/scores by default."""
    column: str = "text"
    """The file's column of texts."""
    attribute: str | None = None
    """What the texts of a file without such a column were steered towards."""
    task: str | None = None
    """The task of the classifiers that ship, sentiment, topic or detox, or the path of a task file,
    for the words of prefixes; by default the run's."""
    lengths: Sequence[Count] = ()
    """Score a run's texts as they were at these lengths."""
    parts: Count = 1
    """Score texts in this many equal parts, one by one: 2 gives first and second half."""
    labels: Mapping[str, str] | None = None
    """Names for a classifier's labels, such as LABEL_0=negative LABEL_1=positive."""
    judge_url: str | None = None
    """Base URL of the judge's endpoint; by default OPENAI_BASE_URL, or OpenAI's."""
    judge_prices: tuple[NotNegative, NotNegative] | None = None
    """US dollars per million input and output tokens, to count the judge's cost."""
    judge_temperature: Annotated[float, Field(ge=0, le=2)] | Literal["server"] = 0.0
    """Temperature of the judge, 0 to 2; server leaves it to the server, as some models refuse
    any."""
    max_cost: NotNegative | None = None
    """Stop the judge before it has cost more US dollars than this (needs judge_prices). What was
    paid for is kept; the same command continues with the rest, for as much again."""
    only: Mapping[str, Any] | None = None
    """Only texts with these values, as COLUMN=VALUE; a column given twice: either value."""
    cache: str | Path | None = None
    """Folder that keeps every score (default: in the user's cache), so that nothing is asked for
    twice."""
    dtype: Dtype = "float32"
    """Precision of the perplexity model: by default float32, whatever wrote the texts."""
    device: str | None = None
    """cpu, cuda, cuda:1; CUDA when there is one, by default."""
    trust_remote_code: bool = False
    """Run code that comes with a model."""
    force: bool = False
    """Replace an earlier folder of tables."""
    notify: Callable[[str], None] = silent
    """Called with what is scored, and what scorers have to say."""


@dataclass(frozen=True)
class SheetSettings(Settings):
    """Make blinded sheets with the paper's rubric for human raters, as CSV."""

    source: str | Path
    """A run folder, or a file with columns text, prompt, attribute (and arm)."""
    _: KW_ONLY
    out: str | Path
    """A new folder of sheet.csv and rubric.txt, for the raters, and key.csv, which stays with
    you."""
    n_texts: Count = 100
    """Texts, over all arms together (the paper: 100 per task); every arm has as many."""
    seed: Natural = 1
    """Seed of the draw and the order."""
    column: str = "text"
    """The file's column of texts."""
    only: Mapping[str, Any] | None = None
    """Only texts with these values, as COLUMN=VALUE: task=sentiment method=prefix
    attribute=positive."""


@dataclass(frozen=True)
class SweepSettings(Settings):
    """Make every cell of one or more grids in a run folder, going on where an earlier call stopped.

    You may stop it at any time: a finished batch of rows is never made again, and the result is the
    same as without the stop. Several sweeps may fill one run folder. For example

        lapa2 sweep quick/sent_topic quick/scaling --out results/quick
        lapa2 sweep quick/alpha --set samples=1 --set length=48 --out results/try
        lapa2 sweep paper/detox --engine ray --address auto --out results/paper
    """

    names: str | Sequence[str]
    """Built-in grids (`lapa2 grids`), or paths of .toml files."""
    out: str | Path
    """The run folder."""
    changes: Mapping[str, Any] | None = None
    """KEY=VALUE replaces a key in every block, such as samples=2; repeat the option for more."""
    _: KW_ONLY
    only: Mapping[str, Any] | None = None
    """Only cells with these settings, as COLUMN=VALUE, such as task=topic method=prefix (a column
    given twice, or a list: either value); the others stay missing. So a grid is made in parts, also
    on several machines."""
    engine: Literal["local", "ray"] = "local"
    """local, or ray: workers on the machines of a Ray cluster."""
    workers: Count | None = None
    """By default one per GPU, or per CPU core."""
    device: str | None = None
    """cpu, cuda, cuda:1; CUDA when there is one, by default. With ray also auto: a model over all
    GPUs of a worker."""
    dtype: Dtype | None = None
    """What dtype = "auto" means in the grids; by default that of the grid's cells in the run, else
    bfloat16 or float32, whichever this machine computes faster. Grids that name a dtype keep it."""
    threads: Count = 1
    """CPU threads of a worker. Another number may change the last bits of a logit, and so a
    text."""
    address: str | None = None
    """Address of a Ray cluster to join ("auto": the one this machine belongs to); by default one on
    this machine."""
    gpus_per_worker: float | None = None
    """GPUs a Ray worker is given where the cluster has any (default: 1); a model may span
    several."""
    pack: Literal["auto", "on", "off"] = "auto"
    """Compute with prepacked weights, which is faster on a CPU and takes as much memory again: auto
    where it fits, on, or off. Prepacking may change the last bits of a logit, and so a text."""
    attn: Attn = "auto"
    """Of a TransformersModel: fused reads prompts without the matrix of attention scores, matrix
    forms it, auto decides by their size, once a cell."""
    allow_code: bool = False
    """Import the modules of methods that a grid names as MODULE:CLASS. Other files of the grid are
    data, and never run."""
    dry_run: bool = False
    """Only say what is left to make, and what it takes."""
    yes: bool = False
    """Start also what reads over 10^11 tokens, or needs more memory than there is."""
    notify: Callable[[str], None] = print_to_stderr
    """Called with what is to be made, and about cells that fail."""
