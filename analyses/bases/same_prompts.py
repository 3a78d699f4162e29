"""DExperts beside Air-Decoding on the same prompts, with no bias and with it in 24 heads.

    make steering-prompts && lapa2 sweep analyses/bases/same_prompts.toml --out results/same
    python analyses/bases/same_prompts.py results/same

Writes same_prompts.csv: the mean of each metric by task, method and arm, and differences of two of
them ("minus"), with 95 % intervals over prompts. Perplexity is that of the continuation given its
prompt: geometric means and ratios, of the first 100 and 50 prompts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from analyses.lab.scripts import ScriptOptions
from lapa2_interp.files import write_text
from lapa2_interp.runs.run import load_run
from lapa2_interp.scoring.registry import ScorerOptions, score_texts
from lapa2_interp.scoring.scorer import ScoreCache
from lapa2_interp.stats import mean_interval, paired_difference
from lapa2_interp.table_formats import as_csv, as_text

PERPLEXITY = "conditional-perplexity"
SCORERS = {"sentiment": ["accuracy=linear", "accuracy=vader"], "topic": ["accuracy=linear"]}
NONE, HEADS = "no bias", "24 heads"
AIR, OTHER = "air-decoding", "dexperts"
PERPLEXITY_PROMPTS = {"sentiment": 100, "topic": 50}
COMPARED = (
    ((AIR, NONE), (AIR, HEADS)),
    ((OTHER, NONE), (OTHER, HEADS)),
    ((AIR, HEADS), (OTHER, HEADS)),
    ((AIR, NONE), (OTHER, NONE)),
)
"""Pairs of (method, arm): what is subtracted, and from what."""


def main() -> None:
    """Score the run's texts, and write the table."""
    parser = ScriptOptions("DExperts beside Air-Decoding on the same prompts")
    parser.add_argument("run", type=Path, help="run folder of analyses/bases/same_prompts.toml")
    options = parser.parse_args()
    texts = load_run(options.run).texts()
    texts["arm"] = texts["arm"].where(texts["arm"] == "baseline", HEADS)
    texts["arm"] = texts["arm"].replace("baseline", NONE)
    with ScoreCache(options.run / "scores") as cache:
        tables = [
            compare(str(task), scorer, of_task, cache)
            for task, of_task in texts.groupby("task")
            for scorer in [*SCORERS[str(task)], "repetition", PERPLEXITY]
        ]
    table = pd.concat(tables, ignore_index=True)
    print(as_text(table, ".3f"))
    write_text(options.run / "tables" / "same_prompts.csv", as_csv(table, 5))


def compare(task: str, scorer: str, texts: pd.DataFrame, cache: ScoreCache) -> pd.DataFrame:
    """The rows of one scorer in one task."""
    geometric = scorer.startswith(PERPLEXITY)
    if geometric:
        first = list(dict.fromkeys(texts["prompt"]))[: PERPLEXITY_PROMPTS[task]]
        texts = texts[texts["prompt"].isin(first)]
    scores = score_texts(texts, [scorer], ScorerOptions(task=task), cache)
    scores["value"] = pd.to_numeric(scores["value"])
    scores = scores[scores["value"].notna()]
    if geometric:
        scores["value"] = np.log(scores["value"])
    arms = {key: (rows["value"], rows["prompt"]) for key, rows in scores.groupby(["method", "arm"])}
    estimates = [(*key, "", mean_interval(*arm)) for key, arm in arms.items()]
    estimates += [
        (*after, ", ".join(before), paired_difference(*arms[before], *arms[after]))
        for before, after in COMPARED
    ]
    rows = pd.DataFrame(
        [
            (
                task,
                scorer,
                method,
                arm,
                minus,
                estimate.mean,
                estimate.low,
                estimate.high,
                texts["prompt"].nunique(),
            )
            for method, arm, minus, estimate in estimates
        ],
        columns=["task", "scorer", "method", "arm", "minus", "mean", "low", "high", "prompts"],
    )
    if geometric:
        rows[["mean", "low", "high"]] = np.exp(rows[["mean", "low", "high"]])
    return rows


if __name__ == "__main__":
    main()
