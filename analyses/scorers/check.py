"""Compare scorers with the labels or graded scores of a file, by length of text.

    python analyses/scorers/check.py reviews.csv --label label --task sentiment --first 48
    python analyses/scorers/check.py rtp.jsonl --rtp --out results/check

For labels: accuracy, AUC where there are two, and the error of calibration. For graded scores in
[0, 1]: Spearman's correlation, AUC for scores above 0.5, and the error of calibration. Intervals
are 95 % bootstrap intervals over texts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyses.lab.scripts import ScriptOptions, whole_number
from lapa2_interp.bias.tokens import token_texts
from lapa2_interp.errors import ScoringError, unknown_choice
from lapa2_interp.files import cache_folder, holds_only, result_folder
from lapa2_interp.models.load import shared_tokenizer
from lapa2_interp.models.smollm2 import SMOLLM2
from lapa2_interp.plots import Drawing, legend_above, new_figure, plain_axes, styles
from lapa2_interp.runs.texts import read_texts
from lapa2_interp.scoring.agreement import BINS, agreement
from lapa2_interp.scoring.registry import ScorerOptions, make_scorer
from lapa2_interp.scoring.scorer import CLASSIFIERS, ScoreCache, Scorer, TextItem, run_scorer
from lapa2_interp.scoring.training import read_graded
from lapa2_interp.table_formats import interval_text

TOXIC, NONTOXIC = "toxic", "nontoxic"


def read_truth(options: argparse.Namespace) -> tuple[Sequence[str], Sequence[Any]]:
    """Texts, and their labels or graded scores."""
    file, label, score = options.file, options.label, options.score
    if (label is not None) + (score is not None) + options.rtp != 1:
        raise ScoringError(
            "say what the texts are compared with, by one of --label COLUMN, --score COLUMN and"
            " --rtp"
        )
    if options.rtp:
        graded = read_graded(file, test=True)
        return graded.texts, graded.scores
    if file.is_dir():
        raise ScoringError(f"{file} is a folder; give a file with labels or scores")
    ((table, _),) = read_texts(file, options.column)
    column, option = (label, "--label") if label is not None else (score, "--score")
    if column not in table:
        raise ScoringError(f"{unknown_choice('column', column, table.columns)} ({option})")
    table = table[table[column].notna()]
    if label is not None:
        return list(table["text"]), list(table[label].astype(str))
    scores = pd.to_numeric(table[score], errors="coerce")
    if scores.isna().any():
        raise ScoringError(
            f"--score {score}: {table[score][scores.isna()].iloc[0]!r} is not a number; for labels"
            " give --label"
        )
    return list(table["text"]), scores.astype(float).tolist()


def cut(texts: Sequence[str], first: int | None, last: int | None) -> Sequence[str]:
    """The first or the last tokens of every text, as many as are asked for."""
    if first is None and last is None:
        return texts
    if first is not None and last is not None:
        raise ScoringError("give --first or --last, not both")
    tokenizer = shared_tokenizer(SMOLLM2)
    rows = tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids
    part = slice(0, first) if first is not None else slice(-(last or 1), None)
    return ["".join(token_texts(tokenizer, "", row)[part]) for row in rows]


def compared_numbers(
    numbers: pd.DataFrame, scorer: Scorer, labelled: bool
) -> tuple[pd.DataFrame, Sequence[bool]]:
    """A scorer's numbers as they are compared, and which texts have them.

    A toxicity is compared with labels as the probabilities of nontoxic and toxic.
    """
    known = numbers["reason"] == ""
    scores = numbers.loc[known, list(scorer.columns)]
    if labelled and scorer.columns == ("toxicity",):
        scores = pd.DataFrame({NONTOXIC: 1 - scores["toxicity"], TOXIC: scores["toxicity"]})
    return scores, known.tolist()


def calibration(numbers: pd.DataFrame, truth: Sequence[Any]) -> pd.DataFrame:
    """The calibration curve of numbers that `agreement` accepts: one row per bin that has texts,
    with from, to, prediction (mean), truth (mean score, or share of right labels) and n."""
    predicted, true = numbers.to_numpy(float).max(axis=1), np.asarray(truth)
    if true.dtype.kind != "f":
        true = (numbers.idxmax(axis=1).to_numpy() == true).astype(float)
    bins = np.minimum((predicted * BINS).astype(int), BINS - 1)
    rows = [
        (b / BINS, (b + 1) / BINS, predicted[bins == b].mean(), true[bins == b].mean(),
         (bins == b).sum())
        for b in np.unique(bins)
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["from", "to", "prediction", "truth", "n"])


def draw(curves: pd.DataFrame) -> Drawing:
    """The curves of all scorers. Larger marks have more texts."""
    figure = new_figure(3.6, 3.6)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="#999999", lw=0.8, ls=":")
    by_scorer = curves.groupby("scorer", sort=False)
    for (colour, dash), (scorer, curve) in zip(styles(), by_scorer, strict=False):
        axes.plot(curve["prediction"], curve["truth"], color=colour, ls=dash, lw=1.2, label=scorer)
        size = 4 + 60 * curve["n"] / curve["n"].sum()
        axes.scatter(curve["prediction"], curve["truth"], s=size, color=colour, lw=0)
    plain_axes(axes, "mean prediction", "mean truth")
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    legend_above(figure, 1)
    return figure


def check(options: argparse.Namespace) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Agreement and calibration curves of all scorers, with a column `scorer`."""
    texts, truth = read_truth(options)
    texts = cut(texts, options.first, options.last)
    labelled = options.label is not None
    settings = ScorerOptions(
        task=options.task,
        device=options.device,
        trust_remote_code=options.trust_remote_code,
    )
    tables: list[pd.DataFrame] = []
    curves: list[pd.DataFrame] = []
    with ScoreCache(options.cache or cache_folder() / "scores") as cache:
        for asked in options.scorers:
            name, _, model = asked.partition("=")
            if asked in CLASSIFIERS:
                name, model = ("accuracy" if labelled else "toxicity"), asked
            with closing(make_scorer(name, model, settings)) as scorer:
                numbers = run_scorer(scorer, [TextItem(text) for text in texts], cache)
                numbers, known = compared_numbers(numbers, scorer, labelled)
            true = [value for value, is_known in zip(truth, known, strict=True) if is_known]
            scored = [text for text, is_known in zip(texts, known, strict=True) if is_known]
            table, curve = agreement(numbers, true, scored), calibration(numbers, true)
            for parts, part in ((tables, table), (curves, curve)):
                part.insert(0, "scorer", f"{name} ({scorer.version})")
                parts.append(part)
    return pd.concat(tables, ignore_index=True), pd.concat(curves, ignore_index=True)


def main() -> None:
    """Compare, print, and write the tables."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a .jsonl, .csv or .parquet file, also compressed")
    parser.add_argument(
        "--scorers",
        nargs="+",
        default=CLASSIFIERS,
        help="linear, adapter, or NAME=MODEL as in `lapa2 score`",
    )
    parser.add_argument("--column", default="text", help="of texts")
    parser.add_argument("--label", help="the column of labels")
    parser.add_argument("--score", help="the column of graded scores in [0, 1]")
    parser.add_argument(
        "--rtp",
        action="store_true",
        help="rows of RealToxicityPrompts with Perspective's scores; the test rows are read",
    )
    parser.add_argument("--first", type=whole_number(), help="tokens (SmolLM2's) of every text")
    parser.add_argument("--last", type=whole_number(), help="the same, from its end")
    parser.add_argument("--task", help="of linear and adapter on labels: sentiment, topic or detox")
    parser.add_argument(
        "--out", type=Path, help="new folder of agreement.csv, calibration.csv and calibration.png"
    )
    parser.add_argument("--cache", type=Path, help="folder of scores (default: the user's cache)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1")
    parser.add_argument("--trust-remote-code", action="store_true", help="of a model")
    parser.add_argument("--force", action="store_true", help="replace an earlier folder of tables")
    options = parser.parse_args()

    table, curve = check(options)
    if options.out is not None:
        ours = holds_only("agreement.csv", "calibration.*")
        with result_folder(options.out, options.force, ours) as folder:
            table.to_csv(folder / "agreement.csv", index=False)
            curve.to_csv(folder / "calibration.csv", index=False)
            draw(curve).savefig(folder / "calibration.png")
    for (measure, length), part in table.groupby(["measure", "length"], sort=False):
        print(f"{measure}, {length} words (n {part['n'].iloc[0]})")
        for scorer, value, low, high in part[["scorer", "value", "low", "high"]].itertuples(
            index=False
        ):
            print(f"  {value:.3f}{interval_text(low, high, '.3f'):<17} {scorer}")
    if options.out is not None:
        print(f"tables in {options.out}")


if __name__ == "__main__":
    main()
