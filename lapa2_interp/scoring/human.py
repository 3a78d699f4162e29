"""Human evaluation (paper, Figure "Human evaluation rubric" and section "Human and GPT-4o
Evaluation").

1. `make_sheets` draws texts and hides their arm. It writes the annotators' sheet (sheet.csv), the
   questions (rubric.txt) and the experimenter's key (key.csv).
2. Annotators rate every text on three questions from 1 to 5 and send a CSV back.
3. `read_answers` joins the ratings with the key; `human_table` and `annotator_agreement` summarize
   them.

The paper: 100 random samples per task, three annotators, mean of 300 ratings per metric.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from lapa2_interp._util.errors import ScoringError
from lapa2_interp._util.files import atomic_write
from lapa2_interp._util.parsing import read_text
from lapa2_interp.scoring.tables import mean_columns
from lapa2_interp.stats import FEW, resampled_means, tails
from lapa2_interp.tasks.corpora import read_csv

METRICS = ("relevance", "fluency", "topicality")
LEVELS = (1, 2, 3, 4, 5)
RUBRIC = """\
Rate the generated text on three dimensions, each on a scale from 1 (very poor) to 5 (very good).

Attribute Relevance (column relevance)
  5  Perfectly aligned with the desired attribute.
  4  Very related to the desired attribute.
  3  Moderately related to the desired attribute.
  2  Relatively weak consistency with the desired attribute.
  1  No correlation; may even contradict the attribute.

Fluency (column fluency)
  5  Grammatically correct, fluent, and easy to understand.
  4  Grammatically correct but slightly less smooth.
  3  A few grammar errors that do not hinder understanding.
  2  Some grammar errors; not very easy to understand.
  1  Numerous grammar errors; difficult to understand.

Topicality (column topicality)
  5  Strongly correlated with the input prompt throughout.
  4  Relatively strong correlation with the input prompt.
  3  Average correlation with the input prompt.
  2  Relatively weak correlation with the input prompt.
  1  Poor correlation; incoherent with the input prompt.

Write your name, or any word for it, into annotator.
"""
"""The paper's rubric, word for word, and how to answer it."""
KEY_COLUMNS = ("id", "arm", "prompt", "attribute")
COLUMNS = ("id", "attribute", "prompt", "text", *METRICS, "annotator")
"""Columns of sheet.csv and of the answers."""
TABLE_COLUMNS = [
    "arm", "metric", "mean", "low", "high", "n", "texts", "prompts", "annotators", "unanswered",
]  # fmt: skip

ID_LETTERS = "bcdfghjkmnpqrstvwxz"
"""Without vowels and digits, no id is a word, or a date or number in a spreadsheet."""
FORMULA_CELL = r"^'*([ \t\r\n]*[=+\-@＝＋－＠]|[\t\r\n])"
"""Cells that a spreadsheet may run as a formula, with or without apostrophes before them. They are
written with one more apostrophe."""


def make_sheets(samples: pd.DataFrame, folder: Path, n: int = 100, seed: int = 1) -> pd.DataFrame:
    """Draw texts and write sheet.csv and rubric.txt for the annotators, and key.csv for the
    experimenter.

    Every arm has the same number of texts (or one more, if n is not divisible). As far as possible,
    the arms' texts have the same prompt, attribute and sample. Order and ids do not depend on the
    arm.

    Args:
        samples: One row per text, with columns prompt, attribute, text and, if systems are
            compared, arm. `sample` pairs the texts of a prompt across arms; without it they are
            paired in their order. Other columns go into the key.
        folder: It is created if missing.
        n: Texts on the sheet, over all arms.
        seed: Seed of the draw, the order and the ids, 0 or more. The same samples and seed give the
            same files.

    Returns:
        The key, in the sheet's order: id, arm, prompt, attribute, and every other column of the
        samples.

    Raises:
        ScoringError: A column or value is missing, a text is repeated, there are too few texts, the
            seed is negative, or the folder holds sheets of another draw.
    """
    if seed < 0:
        raise ScoringError(f"the seed is {seed}; give 0 or more")
    table = (samples if "arm" in samples else samples.assign(arm="run")).reset_index(drop=True)
    units, rng = _units(table), np.random.default_rng(seed)
    drawn = _draw_texts(table["arm"], units, n, rng)
    shuffled = table.iloc[drawn[rng.permutation(n)]].reset_index(drop=True)
    # Ids depend on the texts, too, so that answers to one sheet do not fit the key of another.
    digest = hashlib.sha256("\0".join(shuffled["text"]).encode("utf-8", "replace")).hexdigest()
    shuffled.insert(0, "id", _random_ids(n, np.random.default_rng([seed, int(digest, 16)])))
    key = shuffled[[*KEY_COLUMNS, *shuffled.columns.drop([*KEY_COLUMNS])]]
    files = {
        "sheet.csv": _csv_bytes(key.reindex(columns=[*COLUMNS])),
        "key.csv": _csv_bytes(key),
        "rubric.txt": RUBRIC.encode(),
    }
    try:
        for name in ("sheet.csv", "key.csv"):
            if (folder / name).exists() and (folder / name).read_bytes() != files[name]:
                raise ScoringError(
                    f"{folder / name} belongs to another draw, or is filled in; choose another"
                    " folder"
                )
        for name, content in files.items():
            with atomic_write(folder / name) as fresh:
                fresh.write_bytes(content)
    except OSError as error:
        raise ScoringError(
            f"cannot write sheets to {folder}: {error.strerror}; choose another folder"
        ) from error
    return key


def _units(table: pd.DataFrame) -> Int[np.ndarray, " text"]:
    """The number of the (prompt, attribute, sample) of each text, of chats also its turn, in the
    order in which they begin."""
    if table.empty:
        raise ScoringError("there are no samples to rate; give at least one row per arm")
    for name in ("prompt", "attribute", "text", "arm"):
        if name not in table:
            raise ScoringError(
                f"the samples have no column {name!r}; found {', '.join(map(str, table))}"
            )
        if wrong := [value for value in table[name] if not isinstance(value, str)]:
            raise ScoringError(f"{name} of every sample must be text, found {wrong[0]!r}")
    if {"id", *METRICS, "annotator"} & set(table):
        raise ScoringError(
            "the samples have a column of the sheets' own (id,"
            f" {', '.join(METRICS)}, annotator); rename it"
        )
    asked = ["prompt", "attribute", *["turn"] * ("turn" in table)]
    number = table["sample"] if "sample" in table else table.groupby(["arm", *asked]).cumcount()
    numbered = table.assign(sample=number)
    if (repeated := numbered.duplicated(["arm", *asked, "sample"])).any():
        row = numbered[repeated].iloc[0]
        raise ScoringError(
            f"two texts of arm {row['arm']!r} continue prompt {row['prompt']!r} for"
            f" {row['attribute']!r} as sample {row['sample']}; name what differs in the column arm,"
            " or number the samples through"
        )
    groups = numbered.groupby([*asked, "sample"], sort=False, dropna=False)
    return groups.ngroup().to_numpy()


def _draw_texts(
    arms: pd.Series, units: Int[np.ndarray, " text"], n: int, rng: np.random.Generator
) -> Int[np.ndarray, " drawn"]:
    """n rows with equal numbers of the arms (or one more), from units that most arms have."""
    sizes = arms.value_counts(sort=False)
    if n < len(sizes):
        raise ScoringError(
            f"n = {n} texts cannot be shared by {len(sizes)} arms; give at least one for each"
        )
    counts = np.full(len(sizes), n // len(sizes))
    counts[rng.permutation(len(sizes))[: n % len(sizes)]] += 1
    for arm, size, count in zip(sizes.index, sizes, counts, strict=True):
        if size < count:
            raise ScoringError(
                f"arm {arm!r} has {size} texts and n = {n} asks {count} of it; give n up to "
                f"{len(sizes) * sizes.min()}, or more samples"
            )
    arms_of = np.bincount(units)
    order = np.lexsort((rng.permutation(len(arms_of)), -arms_of))
    ranked = np.argsort(np.argsort(order)[units], kind="stable")
    ranked_arms = arms.to_numpy()[ranked]
    return np.concatenate(
        [ranked[ranked_arms == arm][:count] for arm, count in zip(sizes.index, counts, strict=True)]
    )


def _random_ids(n: int, rng: np.random.Generator) -> list[str]:
    """n different random words of five letters."""
    ids: dict[str, None] = {}
    while len(ids) < n:
        ids["".join(rng.choice(list(ID_LETTERS), 5))] = None
    return list(ids)


def _csv_bytes(table: pd.DataFrame) -> bytes:
    """A table as CSV for spreadsheets: UTF-8 with a byte-order mark, formulas made harmless."""
    out = io.StringIO(newline="")
    rows = [list(table.columns), *table.to_numpy(dtype=object).tolist()]
    csv.writer(out).writerows([_guarded_cell(value) for value in row] for row in rows)
    return out.getvalue().encode("utf-8-sig", "replace")


def _guarded_cell(value: object) -> str:
    if isinstance(value, str):
        return f"'{value}" if re.match(FORMULA_CELL, value) else value
    if isinstance(value, np.ndarray):
        return str(value.tolist())
    return "" if value is None or value is pd.NA or value != value else str(value)


def _unguarded_cell(cell: str) -> str:
    """The original text of a guarded cell."""
    return cell[1:] if cell.startswith("'") and re.match(FORMULA_CELL, cell) else cell


def read_answers(key: Path, files: Sequence[Path]) -> pd.DataFrame:
    """Ratings of several annotators, joined with the key.

    Args:
        key: The key.csv that `make_sheets` wrote.
        files: Filled sheets in UTF-8: sheet.csv from a spreadsheet (comma, semicolon or tab).

    Returns:
        One row per annotator, text and metric: id, arm, prompt, attribute, annotator, metric,
        rating (1.0 to 5.0; NaN if the annotator did not answer, or if the text is not in their
        file).

    Raises:
        ScoringError: A file cannot be read or has no rating; an id is unknown; a rating is not 1,
            2, 3, 4 or 5; an answered row names no annotator; an annotator answers a question twice.
    """
    if not files:
        raise ScoringError("no files of answers were given; give at least one filled sheet")
    texts = _read_csv(key, KEY_COLUMNS)
    sheets = []
    for file in files:
        sheet = _read_csv(file, ("id", *METRICS, "annotator")).assign(file=str(file))
        fields = ["id", *METRICS, "annotator"]
        sheet[fields] = sheet[fields].apply(lambda column: column.str.strip())
        sheet = sheet[(sheet[[*METRICS]] != "").any(axis=1)]
        if sheet.empty:
            raise ScoringError(
                f"{file} has no rating; expected 1 to 5 in {', '.join(METRICS)}; fill it in or"
                " leave it out"
            )
        sheets.append(sheet)
    together = pd.concat(sheets)
    answer = ["annotator", "id", "metric"]
    answers = together.melt(["id", "annotator", "file"], [*METRICS], "metric", "cell")
    answers = answers[answers["cell"] != ""]
    for refused, reason in (
        (~answers["id"].isin(texts["id"]), f"{key} has no such id; give this sheet's key"),
        (~answers["cell"].str.fullmatch(r"[1-5](\.0+)?"), "allowed: 1, 2, 3, 4, 5, or nothing"),
        (answers["annotator"] == "", "its annotator is ''; write a name on every answered row"),
        (answers.duplicated(answer), "its annotator has answered it before; keep one answer, or"
         " tell two people of one name apart"),
    ):  # fmt: skip
        if refused.any():
            row = answers[refused].iloc[0]
            raise ScoringError(
                f"{row['file']}: {row['metric']} of id {row['id']} is {row['cell']!r}; {reason}"
            )
    # One row for every annotator, text and metric, answered or not.
    index = pd.MultiIndex.from_product(
        [together["annotator"].unique(), texts["id"], METRICS], names=answer
    )
    ratings = answers.set_index(answer)["cell"].astype(float).reindex(index).rename("rating")
    joined = ratings.reset_index().merge(texts[[*KEY_COLUMNS]], on="id", how="left")
    return joined[[*KEY_COLUMNS, "annotator", "metric", "rating"]]


def _read_csv(path: Path, needed: Sequence[str]) -> pd.DataFrame:
    """The cells of a CSV as text, as they were before `_guarded_cell`.

    Raises:
        ScoringError: The file is missing, not UTF-8, not a CSV, or lacks a needed column.
    """
    try:
        head = read_text(path, may_hold_nul=True).partition("\n")[0]  # texts of models may
        table = read_csv(
            path,
            sep=max(",;\t", key=head.count),
            dtype=str,
            na_values=[],
            na_filter=False,
            encoding="utf-8-sig",
        )
    except OSError as error:
        raise ScoringError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ScoringError(
            f"cannot read {path}: {error}; save the sheet as CSV in UTF-8, texts that hold the"
            " separator in quotes"
        ) from error
    table = table.rename(columns=lambda name: _unguarded_cell(name.strip())).map(_unguarded_cell)
    if missing := [name for name in needed if name not in table]:
        raise ScoringError(f"{path} has no column {missing[0]!r}; found {', '.join(table.columns)}")
    return table


def human_table(answers: pd.DataFrame) -> pd.DataFrame:
    """Mean rating per arm and metric.

    Whole prompts are resampled, as in every table of texts: neither the ratings of one text nor the
    texts of one prompt are independent. A text without a prompt counts as a prompt. The annotators
    are fixed: the interval says nothing about other annotators.

    Args:
        answers: From `read_answers`.

    Returns:
        Columns arm, metric, mean, low, high (95 %; NaN for one prompt), n (ratings), texts,
        prompts, annotators (of the n ratings), unanswered (missing ratings, if every annotator had
        rated every text).
    """
    rows = []
    for arm, of_arm in answers.groupby("arm"):
        for metric in METRICS:
            asked = of_arm[of_arm["metric"] == metric]
            rated = asked[asked["rating"].notna()]
            prompts = rated["prompt"].where(rated["prompt"] != "", rated["id"])
            rows.append(
                {
                    "arm": arm,
                    "metric": metric,
                    **mean_columns(metric, rated["rating"].to_numpy(), prompts.to_numpy()),
                    "texts": rated["id"].nunique(),
                    "annotators": rated["annotator"].nunique(),
                    "unanswered": len(asked) - len(rated),
                }
            )
    return pd.DataFrame(rows, columns=TABLE_COLUMNS)


def annotator_agreement(answers: pd.DataFrame) -> pd.DataFrame:
    """Agreement of the annotators, per metric, over the texts of all arms.

    Args:
        answers: From `read_answers`.

    Returns:
        Columns metric, alpha (Krippendorff's, ordinal), low, high (95 % from resampled texts, NaN
        below `stats.FEW` of them; resamples with equal ratings only have no alpha and are left
        out), exact (share of pairs of ratings of one text that are equal), n (ratings of texts with
        two ratings or more), texts (such texts), annotators. NaN if nothing can be compared.
    """
    rows = []
    for metric in METRICS:
        ratings = answers[answers["metric"] == metric].pivot(
            index="id", columns="annotator", values="rating"
        )
        compared = ratings[ratings.notna().sum(axis=1) > 1]
        pairs = _coincidences(compared.to_numpy(dtype=np.float64))
        n, equal = pairs.sum(), pairs.trace(axis1=1, axis2=2).sum()
        low = high = np.nan
        if len(pairs) >= FEW:
            alphas = _alpha(len(pairs) * resampled_means(pairs, np.arange(len(pairs))))
            if np.isfinite(alphas).any():
                low, high = np.percentile(alphas[np.isfinite(alphas)], tails(len(pairs)))
        rows.append(
            {
                "metric": metric,
                "alpha": krippendorff_alpha(compared.to_numpy(dtype=np.float64)),
                "low": low,
                "high": high,
                "exact": equal / n if n else np.nan,
                "n": round(n),
                "texts": len(compared),
                "annotators": int(compared.notna().any().sum()),
            }
        )
    return pd.DataFrame(rows)


def krippendorff_alpha(ratings: Float[np.ndarray, "text annotator"]) -> float:
    """Krippendorff's alpha for ordinal ratings: 1 is perfect agreement, 0 is chance.

    With o_ck the pairs of ratings c and k that different annotators give a text, each over the
    text's ratings less one, n_c = sum_k o_ck and n = sum_c n_c:

        delta_ck = (n_c/2 + n_(c+1) + ... + n_(k-1) + n_k/2)^2
        alpha    = 1 - (n - 1) * sum_ck o_ck delta_ck / sum_ck n_c n_k delta_ck

    Args:
        ratings: 1 to 5, NaN if missing. Texts with fewer than two ratings are left out.

    Returns:
        Alpha; NaN if all ratings are equal or none can be compared.

    Source: Krippendorff, Computing Krippendorff's Alpha-Reliability (2011), section E.
    """
    return float(_alpha(_coincidences(ratings).sum(axis=0)))


def _coincidences(
    ratings: Float[np.ndarray, "text annotator"],
) -> Float[np.ndarray, "text level level"]:
    """o_ck of every text; zero for a text with fewer than two ratings."""
    counts = np.stack([(ratings == level).sum(axis=1) for level in LEVELS], axis=1).astype(
        np.float64
    )
    pairs = counts[:, :, None] * counts[:, None, :] - counts[:, :, None] * np.eye(len(LEVELS))
    return pairs / np.maximum(counts.sum(axis=1) - 1, 1)[:, None, None]


def _alpha(pairs: Float[np.ndarray, "*rest level level"]) -> Float[np.ndarray, "*rest"]:
    """Alpha of coincidence matrices."""
    n_c = pairs.sum(axis=-1)
    # delta is the squared distance of the levels' middle ranks.
    middle = n_c.cumsum(axis=-1) - n_c / 2
    delta = (middle[..., :, None] - middle[..., None, :]) ** 2
    observed = (pairs * delta).sum(axis=(-2, -1)) * (n_c.sum(axis=-1) - 1)
    expected = (n_c[..., :, None] * n_c[..., None, :] * delta).sum(axis=(-2, -1))
    nothing = np.full(np.shape(expected), np.nan)
    return np.asarray(1 - np.divide(observed, expected, out=nothing, where=expected > 0))
