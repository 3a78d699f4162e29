"""Ratings stored in a run's folder: a judge model's scores, and people's answers."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from lapa2_interp.errors import DamagedError

CRITERIA = ("relevance", "fluency", "topicality")
COLUMNS = [
    "rater",
    "model",
    "task",
    "method",
    "variant",
    "length",
    "arm",
    "attribute",
    "prompt",
    "criterion",
    "value",
]
ARM_NAME = (
    r"^(?P<task>\S+) (?P<method>\S+) (?P<arm>.*?)(?: \| (?P<variant>.*?))?(?: @ (?P<model>.*))?$"
)
"""Names of a run's arms in `lapa2 scorers sheets`; other arms stay unchanged."""


def stored_ratings(folder: Path) -> pd.DataFrame:
    """One row per rated text, rater and criterion (1 to 5).

    Read from RUN/judge (`lapa2 score`) and RUN/human (`lapa2 scorers answers`).

    Returns:
        Columns rater, model, task, method, variant, length, arm, attribute, prompt, criterion,
        value ("" if not known); empty if nothing is stored.
    """
    frames = [pd.DataFrame(columns=COLUMNS)]
    scores = folder / "judge" / "scores.parquet"
    if scores.is_file():
        try:
            ratings = pd.read_parquet(scores)
        except (OSError, ValueError) as error:
            raise DamagedError(
                f"{scores} is damaged ({' '.join(str(error).split())[:120]}); remove the folder, or"
                " score the run with the judge again"
            ) from error
        ratings = ratings[ratings["metric"].isin(CRITERIA) & ratings["value"].notna()]
        frames.append(
            ratings.assign(rater=ratings["scorer"], criterion=ratings["metric"]).reindex(
                columns=COLUMNS
            )
        )
    answers = folder / "human" / "answers.csv"
    if answers.is_file():
        ratings = pd.read_csv(answers, dtype={"arm": object}).dropna(subset="rating")
        named = ratings["arm"].fillna("").str.extract(ARM_NAME)
        ratings = ratings.assign(**named).assign(arm=named["arm"].fillna(ratings["arm"]))
        ratings = ratings.rename(columns={"metric": "criterion", "rating": "value"})
        frames.append(ratings.assign(rater="people").reindex(columns=COLUMNS))
    filled = [frame for frame in frames if len(frame)]
    ratings = pd.concat(filled, ignore_index=True) if filled else frames[0]
    texts = [name for name in COLUMNS if name != "value"]
    return ratings.assign(**{name: ratings[name].astype(object).fillna("") for name in texts})
