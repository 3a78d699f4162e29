"""Agreement of scorers with the labels or graded scores of a file, by length of text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd

from lapa2_interp._util.errors import ScoringError, unknown_choice
from lapa2_interp._util.files import cache_folder, holds_only, result_folder
from lapa2_interp._util.plots import calibration_curves
from lapa2_interp._util.values import numbers_checked
from lapa2_interp.bias.tokens import token_texts
from lapa2_interp.models.load import shared_tokenizer
from lapa2_interp.models.smollm2 import SMOLLM2
from lapa2_interp.runs.texts import read_texts
from lapa2_interp.scoring.agreement import agreement, calibration
from lapa2_interp.scoring.registry import ScorerOptions, make_scorer
from lapa2_interp.scoring.scorer import ScoreCache, Scorer, TextItem, run_scorer
from lapa2_interp.scoring.training import read_graded

KINDS = ("linear", "adapter")
"""Scorers whose name, accuracy or toxicity, follows from the file's truth."""
TOXIC, NONTOXIC = "toxic", "nontoxic"


@numbers_checked
def check_scorers(
    file: str | Path,
    scorers: Sequence[str] = ("adapter", "linear"),
    *,
    column: str = "text",
    label: str | None = None,
    score: str | None = None,
    rtp: bool = False,
    first: int | None = None,
    last: int | None = None,
    task: str | None = None,
    out: str | Path | None = None,
    cache: str | Path | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
) -> pd.DataFrame:
    """Compare scorers with the labels or graded scores of a file, by length of text.

    For labels: accuracy, AUC where there are two, and the error of calibration. For graded scores
    in [0, 1]: Spearman's correlation, AUC for scores above 0.5, and the error of calibration.
    Intervals are 95 % bootstrap intervals over texts. For example

        lapa2 scorers check reviews.csv --label label --task sentiment --first 48
        lapa2 scorers check rtp.jsonl --rtp --out results/check

    Args:
        file: A .jsonl, .csv or .parquet file, also compressed.
        scorers: linear, adapter, or NAME=MODEL as in `lapa2 score`; one or several.
        column: The column of texts.
        label: The column of labels.
        score: The column of graded scores.
        rtp: The file has rows of RealToxicityPrompts with Perspective's scores; its test rows are
            read.
        first: Only the first n tokens of every text (SmolLM2's): generations are short.
        last: Only the last n tokens.
        task: The task of linear and adapter on labels: sentiment, topic or detox. Those of
            `lapa2 scorers train` are accuracy=FILE, and need none.
        out: Also write agreement.csv, calibration.csv and calibration.png into this new folder.
        cache: Folder that keeps every score (default: in the user's cache).
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        trust_remote_code: Run code that comes with a model.
        force: Replace an earlier folder of tables.

    Returns:
        A column `scorer`, and those of `agreement.agreement`.

    Raises:
        ScoringError: The file cannot be read, or a scorer does not fit what it says.
        DataError: It is no file of RealToxicityPrompts.
        RunError: `out` cannot be written.
    """
    if not scorers:
        raise ScoringError(
            f"no scorer is named; name one or several of {', '.join(KINDS)}, NAME=MODEL"
        )
    texts, truth = _read(Path(file), column, label, score, rtp)
    texts = _cut(texts, first, last)
    options = ScorerOptions(task=task, device=device, trust_remote_code=trust_remote_code)
    tables, curves = [], []
    with ScoreCache(Path(cache or cache_folder() / "scores")) as store:
        for scorer_name in scorers:
            name, _, model = scorer_name.partition("=")
            if scorer_name in KINDS:
                name, model = ("toxicity" if label is None else "accuracy"), scorer_name
            with closing(make_scorer(name, model, options)) as scorer:
                numbers = run_scorer(scorer, [TextItem(text) for text in texts], store)
                numbers, known = _columns(numbers, scorer, label is not None)
            answers = [value for value, is_known in zip(truth, known, strict=True) if is_known]
            read = [text for text, is_known in zip(texts, known, strict=True) if is_known]
            title = f"{name} ({scorer.version})"
            tables.append(agreement(numbers, answers, read).assign(scorer=title))
            curves.append(calibration(numbers, answers).assign(scorer=title))
    table, curve = (
        pd.concat(parts, ignore_index=True).pipe(
            lambda table: table[["scorer", *table.columns.drop("scorer")]]
        )
        for parts in (tables, curves)
    )
    if out is not None:
        with result_folder(
            Path(out), force, holds_only("agreement.csv", "calibration.*")
        ) as folder:
            table.to_csv(folder / "agreement.csv", index=False)
            curve.to_csv(folder / "calibration.csv", index=False)
            calibration_curves(curve).savefig(folder / "calibration.png")
    return table


def _cut(texts: Sequence[str], first: int | None, last: int | None) -> Sequence[str]:
    """The first or last so many tokens of every text."""
    if first is None and last is None:
        return texts
    if (first is not None and last is not None) or (first or last or 0) < 1:
        raise ScoringError(
            f"give --first or --last, a number of tokens of at least 1; found --first {first},"
            f" --last {last}"
        )
    tokenizer = shared_tokenizer(SMOLLM2)
    rows = tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids
    part = slice(0, first) if first is not None else slice(-(last or 1), None)
    return ["".join(token_texts(tokenizer, "", row)[part]) for row in rows]


def _read(
    file: Path, column: str, label: str | None, score: str | None, rtp: bool
) -> tuple[Sequence[str], Sequence[Any]]:
    """Texts, and their labels or scores."""
    if (label is not None) + (score is not None) + rtp != 1:
        raise ScoringError(
            "say what the texts are compared with, by one of --label COLUMN, --score COLUMN and"
            " --rtp"
        )
    if rtp:
        graded = read_graded(file, test=True)
        return graded.texts, graded.scores
    if file.is_dir():
        raise ScoringError(f"{file} is a folder; give a file with labels or scores")
    ((table, _),) = read_texts(file, column)
    wanted, option = (label, "--label") if label is not None else (score, "--score")
    if wanted not in table:
        raise ScoringError(f"{unknown_choice('column', wanted, table.columns)} ({option})")
    table = table[table[wanted].notna()]
    if label is not None:
        return list(table["text"]), list(table[label].astype(str))
    numbers = pd.to_numeric(table[score], errors="coerce")
    if numbers.isna().any():
        raise ScoringError(
            f"--score {score}: {table[score][numbers.isna()].iloc[0]!r} is not a number; for labels"
            " give --label"
        )
    return list(table["text"]), numbers.astype(float).tolist()


def _columns(
    numbers: pd.DataFrame, scorer: Scorer, labelled: bool
) -> tuple[pd.DataFrame, Sequence[bool]]:
    """A scorer's numbers as they are compared, and which texts have them.

    A toxicity is compared with labels as the probabilities of nontoxic and toxic.
    """
    known = numbers["skipped"] == ""
    values = numbers.loc[known, list(scorer.columns)]
    if labelled and scorer.columns == ("toxicity",):
        toxic = values["toxicity"]
        values = pd.DataFrame({NONTOXIC: 1 - toxic, TOXIC: toxic})
    return values, known.tolist()
