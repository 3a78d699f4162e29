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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float

from lapa2_interp._util.errors import ScoringError
from lapa2_interp._util.files import atomic_write
from lapa2_interp._util.parsing import read_text
from lapa2_interp.scoring.tables import mean_columns
from lapa2_interp.stats import FEW, resampled_means, tails


@dataclass(frozen=True)
class RatingQuestion:
    """A question to annotators about every text.

    Attributes:
        metric: Its column in a sheet.
        title: Its title on the sheet.
        levels: Descriptions of 5, 4, 3, 2 and 1, in this order.
    """

    metric: str
    title: str
    levels: tuple[str, str, str, str, str]


HUMAN_TASK = (
    "Rate the generated text on three dimensions, each on a scale from 1 (very poor) to 5 (very"
    " good)."
)
HUMAN_RUBRIC = (
    RatingQuestion(
        "relevance",
        "Attribute Relevance",
        (
            "Perfectly aligned with the desired attribute.",
            "Very related to the desired attribute.",
            "Moderately related to the desired attribute.",
            "Relatively weak consistency with the desired attribute.",
            "No correlation; may even contradict the attribute.",
        ),
    ),
    RatingQuestion(
        "fluency",
        "Fluency",
        (
            "Grammatically correct, fluent, and easy to understand.",
            "Grammatically correct but slightly less smooth.",
            "A few grammar errors that do not hinder understanding.",
            "Some grammar errors; not very easy to understand.",
            "Numerous grammar errors; difficult to understand.",
        ),
    ),
    RatingQuestion(
        "topicality",
        "Topicality",
        (
            "Strongly correlated with the input prompt throughout.",
            "Relatively strong correlation with the input prompt.",
            "Average correlation with the input prompt.",
            "Relatively weak correlation with the input prompt.",
            "Poor correlation; incoherent with the input prompt.",
        ),
    ),
)
"""The paper's rubric, word for word."""
METRICS = tuple(question.metric for question in HUMAN_RUBRIC)
LEVELS = (1, 2, 3, 4, 5)
SHEET_COLUMNS = ("id", "attribute", "prompt", "text")
KEY_COLUMNS = ("id", "arm", "prompt", "attribute")
COLUMNS = (*SHEET_COLUMNS, *METRICS, "annotator")
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
    table = _check_samples(samples)
    rng = np.random.default_rng(seed)
    drawn = _draw_texts(table, n, rng)
    shuffled = drawn.iloc[rng.permutation(len(drawn))].reset_index(drop=True)
    # Ids depend on the texts, too, so that answers to one sheet do not fit the key of another.
    digest = hashlib.sha256("\0".join(shuffled["text"]).encode("utf-8", "replace")).hexdigest()
    shuffled.insert(0, "id", _random_ids(n, np.random.default_rng([seed, int(digest, 16)])))
    key = shuffled[[*KEY_COLUMNS]].join(shuffled.drop(columns=[*KEY_COLUMNS, "unit"]))
    sheet = key[list(SHEET_COLUMNS)].assign(**dict.fromkeys([*METRICS, "annotator"], ""))
    files = {
        "sheet.csv": _csv_bytes(sheet),
        "key.csv": _csv_bytes(key),
        "rubric.txt": _rubric_text().encode(),
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


def _check_samples(samples: pd.DataFrame) -> pd.DataFrame:
    """The samples with a column arm, and with `unit`: the number of their (prompt, attribute,
    sample)."""
    table = (samples if "arm" in samples else samples.assign(arm="run")).reset_index(drop=True)
    if table.empty:
        raise ScoringError("there are no samples to rate; give at least one row per arm")
    missing = [name for name in ("prompt", "attribute", "text") if name not in table]
    if missing:
        raise ScoringError(
            f"the samples have no column {missing[0]!r}; found {', '.join(map(str, samples))}"
        )
    taken = [name for name in ("id", "unit") if name in table]
    if taken:
        raise ScoringError(
            f"the samples have a column {taken[0]!r}, a name the sheets need for themselves;"
            " rename it"
        )
    for name in ("prompt", "attribute", "text", "arm"):
        wrong = [(i, value) for i, value in enumerate(table[name]) if not isinstance(value, str)]
        if wrong:
            raise ScoringError(
                f"row {wrong[0][0]} of the samples: {name} must be text, found {wrong[0][1]!r}"
            )
    place = ["prompt", "attribute"]
    number = table["sample"] if "sample" in table else table.groupby(["arm", *place]).cumcount()
    unit = (
        table.assign(sample=number).groupby([*place, "sample"], sort=False, dropna=False).ngroup()
    )
    table = table.assign(unit=unit)
    if (repeated := table.duplicated(["arm", "unit"])).any():
        row = table[repeated].iloc[0]
        raise ScoringError(
            f"two texts of arm {row['arm']!r} continue prompt {row['prompt']!r} for"
            f" {row['attribute']!r} as sample {row['sample']}; name what differs in the column arm,"
            " or number the samples through"
        )
    return table


def _draw_texts(table: pd.DataFrame, n: int, rng: np.random.Generator) -> pd.DataFrame:
    """n rows with equal numbers of the arms (or one more), from units that most arms have."""
    sizes = table["arm"].value_counts(sort=False)
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
    arms_of = np.bincount(table["unit"])
    order = np.lexsort((rng.permutation(len(arms_of)), -arms_of))
    ranked = table.iloc[np.argsort(np.argsort(order)[table["unit"]], kind="stable")]
    return pd.concat(
        [
            ranked[ranked["arm"] == arm].head(count)
            for arm, count in zip(sizes.index, counts, strict=True)
        ]
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
    writer = csv.writer(out)
    writer.writerow([_guarded_cell(name) for name in table.columns])
    writer.writerows(
        [_guarded_cell(value) for value in row] for row in table.itertuples(index=False, name=None)
    )
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


def _rubric_text() -> str:
    """The questions with their levels, for annotators."""
    lines = [HUMAN_TASK]
    for question in HUMAN_RUBRIC:
        levels = zip(reversed(LEVELS), question.levels, strict=True)
        lines += ["", f"{question.title} (column {question.metric})"]
        lines += [f"  {level}  {description}" for level, description in levels]
    return "\n".join([*lines, "", "Write your name, or any word for it, into annotator."]) + "\n"


def read_answers(key: Path, files: Sequence[Path]) -> pd.DataFrame:
    """Ratings of several annotators, joined with the key.

    Args:
        key: The key.csv that `make_sheets` wrote.
        files: Filled sheets in UTF-8: sheet.csv from a spreadsheet (comma, semicolon or
            tab).

    Returns:
        One row per annotator, text and metric: id, arm, prompt, attribute, annotator, metric,
        rating (1.0 to 5.0; NaN if the annotator did not answer, or if the text is not in their
        file).

    Raises:
        ScoringError: A file cannot be read or has no rating; an id is unknown; a rating is not 1,
            2, 3, 4 or 5; an answered row names no annotator; an annotator answers a question twice.
    """
    texts = {row["id"]: row for _, row in _csv_rows(key, KEY_COLUMNS)}
    # (annotator, id, metric): rating, and its file and line.
    answered: dict[tuple[str, str, str], tuple[float, str]] = {}
    for file in files:
        before = len(answered)
        for line, row in _csv_rows(file, ("id", *METRICS, "annotator")):
            place = f"{file} line {line}"
            text, annotator = row["id"].strip(), row["annotator"].strip()
            if text not in texts:
                raise ScoringError(
                    f"{place}: unknown id {text!r}; {key} has {len(texts)} others; give this"
                    " sheet's key"
                )
            for metric in METRICS:
                if not (cell := row[metric].strip()):
                    continue
                what = f"{place}: {metric} of id {text} is {cell!r}"
                if not re.fullmatch(r"[1-5](\.0+)?", cell, re.ASCII):
                    raise ScoringError(f"{what}; allowed: 1, 2, 3, 4, 5, or nothing; correct it")
                if not annotator:
                    raise ScoringError(
                        f"{what} and annotator is ''; write a name on every answered row"
                    )
                if (answer := (annotator, text, metric)) in answered:
                    old, where = answered[answer]
                    raise ScoringError(
                        f"{what}, but {annotator!r} has answered {old:g} in {where}; keep one, or"
                        " tell two people of one name apart"
                    )
                answered[answer] = float(cell), place
        if len(answered) == before:
            raise ScoringError(
                f"{file} has no rating; expected 1 to 5 in {', '.join(METRICS)}; fill it in or"
                " leave it out"
            )
    if not answered:
        raise ScoringError("no files of answers were given; give at least one filled sheet")
    # One row for every annotator, text and metric, answered or not.
    rows = [
        {
            **{name: row[name] for name in KEY_COLUMNS},
            "annotator": annotator,
            "metric": metric,
            "rating": answered.get((annotator, text, metric), (np.nan, ""))[0],
        }
        for annotator in dict.fromkeys(name for name, _, _ in answered)
        for text, row in texts.items()
        for metric in METRICS
    ]
    return pd.DataFrame(rows)


def _csv_rows(path: Path, needed: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a CSV by column, each with the number of its first line. Empty rows are left out.

    Raises:
        ScoringError: The file is missing, not UTF-8, not a CSV, or lacks a needed column.
    """
    try:
        content = read_text(path, may_hold_nul=True)  # texts of models may
    except OSError as error:
        raise ScoringError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ScoringError(f"cannot read {path}: {error}") from error
    head = content.partition("\n")[0]
    reader = csv.reader(
        io.StringIO(content, newline=""), delimiter=max(",;\t", key=head.count), strict=True
    )
    columns: list[str] = []
    line = 1
    try:
        columns = [_unguarded_cell(name.strip()) for name in next(reader, [])]
        missing = [name for name in needed if name not in columns]
        if missing:
            raise ScoringError(
                f"{path} line 1: no column {missing[0]!r}; found {', '.join(columns)}"
            )
        line = reader.line_num + 1
        for cells in reader:
            if any(cell.strip() for cell in cells):
                if any(cell.strip() for cell in cells[len(columns) :]):
                    raise ScoringError(
                        f"{path} line {line}: {len(cells)} cells under {len(columns)} columns, the"
                        f" last {cells[-1]!r}; quote texts that hold the separator"
                    )
                padded = cells + [""] * (len(columns) - len(cells))
                yield line, dict(zip(columns, map(_unguarded_cell, padded), strict=False))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ScoringError(
            f"{path} line {line} is not CSV: {error}; save the sheet as CSV again"
        ) from error


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
            given = asked[asked["rating"].notna()]
            given = given.assign(prompt=given["prompt"].where(given["prompt"] != "", given["id"]))
            rows.append(
                {
                    "arm": arm,
                    "metric": metric,
                    **mean_columns(metric, given["rating"].to_numpy(), given["prompt"].to_numpy()),
                    "texts": given["id"].nunique(),
                    "annotators": given["annotator"].nunique(),
                    "unanswered": len(asked) - len(given),
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
