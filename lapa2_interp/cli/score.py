"""The commands that score: `lapa2 score`, and `lapa2 scorers list | train | sheets |
answers`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from lapa2_interp._util.errors import ScoringError
from lapa2_interp._util.table_formats import as_text, format_number, interval_text
from lapa2_interp.cli.options import Several, Unshown, columns
from lapa2_interp.models.machine import Dtype
from lapa2_interp.scoring.scorer import SCORERS

if TYPE_CHECKING:
    import pandas as pd

    from lapa2_interp.scoring.task_scorer import ScorerCard


def score(
    source: Path,
    /,
    *,
    scorers: Annotated[tuple[str, ...], Several] = ("accuracy", "perplexity", "distinct"),
    out: Path | None = None,
    column: str = "text",
    attribute: str | None = None,
    task: str | None = None,
    lengths: Annotated[tuple[int, ...], Several] = (),
    parts: int = 1,
    labels: str = "",
    judge_url: str | None = None,
    judge_prices: tuple[float, float] | None = None,
    judge_temperature: float | Literal["server"] = 0.0,
    max_cost: float | None = None,
    only: Annotated[tuple[str, ...], Several] = (),
    cache: Path | None = None,
    dtype: Dtype = "float32",
    device: str | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
) -> None:
    """Score the texts of a run, or of a file, and print means with 95 % intervals.

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

    Args:
        source: A run folder (of `lapa2 generate` or `lapa2 sweep`), or a .jsonl, .csv or .parquet
            file with a column of texts (and prompt, attribute, arm, if known).
        scorers: accuracy, toxicity, masked, echo, repetition, perplexity, distinct, judge, each
            plain or as NAME=MODEL (`lapa2 scorers list`), or TASK:NAME=MODEL for texts of one task
            alone. A plain accuracy or toxicity is by both classifiers that ship, adapter and
            linear; the word linear or adapter among the scorers takes that one alone. Those of
            `lapa2 scorers train` are accuracy=FILE, its file of weights.
        out: The folder of tables; by default RUN/scores, and of a file none.
        column: The file's column of texts.
        attribute: What the texts of a file without such a column were steered towards.
        task: The task of the classifiers that ship, sentiment, topic or detox, or the path of a
            task file, for the words of prefixes; by default the run's.
        lengths: Score a run's texts as they were at these lengths.
        parts: Score texts in this many equal parts, one by one: 2 gives first and second half.
        labels: Names for a classifier's labels, as LABEL_0=negative,LABEL_1=positive.
        judge_url: Base URL of the judge's endpoint; by default OPENAI_BASE_URL, or OpenAI's.
        judge_prices: US dollars per million input and output tokens, to count the judge's cost.
        judge_temperature: Temperature of the judge, 0 to 2; server leaves it to the server, as some
            models refuse any.
        max_cost: Stop the judge before it has cost more US dollars than this (needs
            --judge-prices). What was paid for is kept; the same command continues with the rest, for
            as much again.
        only: Only texts with these values, as COLUMN=VALUE; a column given twice: either value.
        cache: Folder that keeps every score (default: in the user's cache), so that nothing is
            asked for twice.
        dtype: Precision of the perplexity model: by default float32, whatever wrote the texts.
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        trust_remote_code: Run code that comes with a model.
        force: Replace an earlier folder of tables.
    """  # noqa: E501
    from lapa2_interp.runs.score import score as score_source

    if out is None and source.is_dir():
        out = source / "scores"
    found = score_source(
        source,
        scorers,
        out=out,
        force=force,
        column=column,
        attribute=attribute,
        task=task,
        lengths=lengths,
        parts=parts,
        labels=_labels(labels),
        judge_url=judge_url,
        judge_prices=judge_prices or (None, None),
        judge_temperature=None if judge_temperature == "server" else judge_temperature,
        max_cost=max_cost,
        only=columns(only),
        cache=cache,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        notify=lambda text: print(text, file=sys.stderr),
    )
    _show(found.table, found.differences)
    if out is not None:
        print(f"\ntables in {out}")


def list_scorers() -> None:
    """List the scorers, and what the trained ones reach on held-out text, with 95 % intervals."""
    from lapa2_interp.scoring.adapter import ADAPTER_ENDING, AdapterCard
    from lapa2_interp.scoring.linear import LINEAR_ENDING, LinearCard
    from lapa2_interp.scoring.task_scorer import SHIPPED_WEIGHTS, load_card, tasks_in

    for name, what in SCORERS.items():
        print(f"{name:<11} {what}")
    kinds: tuple[tuple[str, type[ScorerCard], str, str], ...] = (
        ("adapter", AdapterCard, ADAPTER_ENDING, "SmolLM2's lower layers with low-rank adapters"),
        ("linear", LinearCard, LINEAR_ENDING, "logistic regression on hashed n-grams"),
    )
    for kind, form, ending, what in kinds:
        if tasks := tasks_in(SHIPPED_WEIGHTS, ending):
            print(f"\n{kind}: {what}, on text it was not trained on")
        for task in tasks:
            card = load_card(form, kind, task, SHIPPED_WEIGHTS, ending)
            size = (SHIPPED_WEIGHTS / f"{task}{ending}").stat().st_size / 1e6
            print(f"  {task}: {', '.join(card.labels)} ({size:.1f} MB)")
            _show_held_out(card, ("all",))


def _show_held_out(card: ScorerCard, lengths: Sequence[str] = ()) -> None:
    """Agreement of a scorer, by length, or at some lengths alone."""
    for row in card.held_out:
        if not lengths or row.length in lengths:
            interval = "" if row.low is None else f" [{row.low:.3f}, {row.high:.3f}]"
            length = "" if row.length == "all" else f", {row.length} words"
            print(f"    {row.value:.3f}{interval:<17} {row.measure}, {row.data}{length}, {row.n}")


def train(
    *,
    task: str,
    data: Annotated[tuple[str, ...], Unshown],
    test: Annotated[tuple[str, ...], Unshown] = (),
    graded: Annotated[tuple[str, ...], Unshown] = (),
    c: float = 3.0,
    out: Path,
) -> None:
    """Train a classifier for a task: a linear model on hashed n-grams, in minutes.

    `analyses/train_adapters.py` trains adapters on SmolLM2, in hours. For example

        lapa2 scorers train --task sentiment --data imdb --data sst2=3 \\
            --c 1 --test imdb --test sst2 --out results/scorers

    Args:
        task: A task of `lapa2 tasks`, or the path of a task file; its attributes are the labels.
        data: imdb, sst2 or agnews from the hub, or a file (.jsonl, .csv, .parquet, also compressed)
            with fields text and label; repeat the option for more. =WEIGHT after it says how much
            its texts count, such as sst2=3.
        test: The same, for the card's results; of corpora on the hub the test split is read.
        graded: A file of RealToxicityPrompts with Perspective scores (.jsonl, .jsonl.xz), for
            toxicity: four fifths of its rows are learned, the rest tests the correlation. =WEIGHT
            as above.
        c: Inverse strength of the L2 penalty.
        out: Folder of the weights and the card.
    """
    from lapa2_interp.methods.registry import load_task
    from lapa2_interp.scoring.training import read_data, train_linear_scorer

    chosen = load_task(task)
    labels = tuple(chosen.attributes)
    if not 0 < c < math.inf:
        raise ScoringError(f"--c must be a positive number, found {c:g}")
    read = read_data(labels, data, test, graded, out)
    card = train_linear_scorer(chosen.name, labels, read, out, c)
    file = out / f"{chosen.name}.npz"
    print(*card.data, f"{file}, {file.stat().st_size / 1e6:.2f} MB", sep="\n")
    _show_held_out(card)


def sheets(
    source: Path,
    /,
    *,
    out: Path,
    n_texts: int = 100,
    seed: int = 1,
    column: str = "text",
    only: Annotated[tuple[str, ...], Several] = (),
) -> None:
    """Make blinded sheets with the paper's rubric for human raters, as CSV.

    Args:
        source: A run folder, or a file with columns text, prompt, attribute (and arm).
        out: Folder of sheet.csv and rubric.txt, for the raters, and key.csv, which stays with you.
        n_texts: Texts, over all arms together (the paper: 100 per task).
        seed: Seed of the draw and the order.
        column: The file's column of texts.
        only: Only texts with these values, as COLUMN=VALUE: task=sentiment method=prefix
            attribute=positive.
    """
    from lapa2_interp.runs.score import sheet_texts
    from lapa2_interp.scoring.human import make_sheets

    key = make_sheets(sheet_texts(source, column, columns(only)), out, n_texts, seed)
    counts = ", ".join(
        f"{count} {arm}".strip() for arm, count in key["arm"].value_counts(sort=False).items()
    )
    print(
        f"{len(key)} texts ({counts}) in {out}: give sheet.csv and rubric.txt to the raters and"
        " keep key.csv"
    )


def answers(key: Path, /, *files: Path, out: Path | None = None) -> None:
    """Read raters' answers: means per arm with 95 % intervals, and how far the raters agree.

    Args:
        key: The key.csv of `lapa2 scorers sheets`.
        files: The raters' CSV files.
        out: Also write answers.csv, table.csv and agreement.csv into this new folder.
    """
    from lapa2_interp.runs.score import read_answers

    tables = read_answers(key, files, out)
    for name in ("table", "agreement"):
        print(as_text(tables[name], ".3f") + "\n")
    if out is not None:
        print(f"tables in {out}")


def _show(table: pd.DataFrame, differences: pd.DataFrame) -> None:
    """The cells, one block per scorer, and what the arms changed."""
    from lapa2_interp.scoring.tables import CELL_COLUMNS, EXTRA_CELL_COLUMNS, interval_note

    usual = ("attribute", "arm")
    told = (*CELL_COLUMNS, *EXTRA_CELL_COLUMNS)
    keys = [
        key
        for key in told
        if key in table
        and (table[key].nunique() > 1 or (key in usual and (table[key] != "").any()))
    ]
    for scorer, part in table.groupby("scorer", sort=False):
        print(f"\n{scorer}")
        interval = [
            interval_text(low, high, ".4g").strip()
            for low, high in part[["low", "high"]].to_numpy()
        ]
        shown = part.assign(
            mean=[format_number(mean, ".4g") for mean in part["mean"]], interval=interval
        )
        columns = [
            *keys,
            "metric",
            "mean",
            "interval",
            "n",
            "prompts",
            *(["why"] if (part["skipped"] > 0).any() else []),
        ]
        print(shown[columns].rename(columns={"why": "skipped"}).to_string(index=False))
    print(f"\n{interval_note(table, differences)}")
    if len(differences):
        print(
            "\nagainst the baseline, paired on prompts (p: sign-flip permutation; detectable: at 80"
            " % power)"
        )
        drop = [key for key in differences if key in told and key not in keys]
        for scorer, part in differences.groupby("scorer", sort=False):
            shown = part.drop(columns=["scorer", *drop])
            # Without rounding errors, which ".4g" would show.
            shown = shown.assign(difference=shown["difference"].round(12))
            print(f"\n{scorer}\n{as_text(shown, '.4g')}")


def _labels(text: str) -> dict[str, str]:
    pairs = [part.split("=", 1) for part in text.split(",") if part]
    if any(len(pair) != 2 for pair in pairs):
        raise ScoringError(
            f"--labels {text!r} is not a list such as LABEL_0=negative,LABEL_1=positive"
        )
    return dict(pairs)
