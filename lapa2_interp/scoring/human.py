"""Human evaluation of texts, with the paper's rubric.

(Paper, Figure "Human evaluation rubric" and section "Human and GPT-4o Evaluation".)

1. `make_sheets` draws texts, hides their arm, and writes the annotators' sheet (sheet.csv), the
   questions (rubric.txt) and the experimenter's key (key.csv).
2. Annotators rate every text on three questions from 1 to 5 and send a CSV back.
3. `rating_tables` joins the ratings with the key, and gives means and the annotators' agreement.

The paper: 100 random samples per task, three annotators, mean of 300 ratings per metric.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float

from lapa2_interp._util.parsing import read_text
from lapa2_interp._util.settings import takes
from lapa2_interp._util.values import Count, Natural, numbers_checked
from lapa2_interp.errors import ScoringError
from lapa2_interp.files import holds_only, result_folder, write_text
from lapa2_interp.scoring.settings import RatingSettings
from lapa2_interp.scoring.tables import asked_texts, mean_columns
from lapa2_interp.stats import FEW, resampled_means, tails
from lapa2_interp.table_formats import as_csv
from lapa2_interp.tasks.corpora import read_csv

METRICS = ("relevance", "fluency", "topicality")
LEVELS = (1, 2, 3, 4, 5)
RUBRIC = (resources.files(__package__) / "rubric.txt").read_text("utf-8")
"""The paper's rubric, word for word, and how to answer it."""
KEY_COLUMNS = ["id", "arm", "prompt", "attribute"]
ANSWER_COLUMNS = ["id", *METRICS, "annotator"]
COLUMNS = ["id", "attribute", "prompt", "text", *METRICS, "annotator"]
"""Columns of sheet.csv."""
ID_LETTERS = np.array(list("bcdfghjkmnpqrstvwxz"))
"""Without vowels and digits, no id is a word, or a date or number in a spreadsheet."""
FORMULA_CELL = r"^'*([ \t\r\n]*[=+\-@＝＋－＠]|[\t\r\n])"
"""Cells that a spreadsheet may run as a formula, with or without apostrophes before them. They are
written with one more apostrophe."""


@numbers_checked
def make_sheets(
    texts: pd.DataFrame, folder: Path, n_texts: Count = 100, seed: Natural = 1
) -> pd.DataFrame:
    """Draw texts and write sheet.csv and rubric.txt for the annotators, and key.csv for the
    experimenter, into a new folder. In later turns of a chat the sheet has the turn's message in
    the place of the prompt.

    Every arm has the same number of texts, of the same (prompt, attribute, sample), of chats also
    the same turn. Order and ids do not depend on the arm. The same texts and seed give the same
    files.

    Args:
        texts: One row per text, with columns prompt, attribute, text and arm. `sample` numbers
            the texts of a prompt; without it they are numbered in their order. All columns go into
            the key.
        n_texts: Texts on the sheet, over all arms; what the arms cannot share is left out.
        seed: Seed of the draw, the order and the ids.

    Returns:
        The key, in the sheet's order: id, arm, prompt, attribute, and every other column of the
        texts.

    Raises:
        ScoringError: A text is repeated, or too few texts.
        RunError: The folder exists, or cannot be written.
    """
    rng = np.random.default_rng(seed)
    taken = {name: f"{name} of the text" for name in ANSWER_COLUMNS}
    table = texts.rename(columns=taken).reset_index(drop=True)
    asked = ["prompt", "attribute", *["turn"] * ("turn" in table)]
    if "sample" not in table:
        table["sample"] = table.groupby(["arm", *asked]).cumcount()
    if (repeated := table.duplicated(["arm", *asked, "sample"])).any():
        row = table[repeated].iloc[0]
        raise ScoringError(
            f"two texts of arm {row['arm']!r} continue prompt {row['prompt']!r} for"
            f" {row['attribute']!r} as sample {row['sample']}; name what differs in the column arm,"
            " or number the samples through"
        )
    # Draw from what all arms have continued, and mix.
    arms = table["arm"].nunique()
    number = table.groupby([*asked, "sample"], sort=False, dropna=False).ngroup()
    common = np.flatnonzero(np.bincount(number) == arms)
    if not 1 <= (n_common := n_texts // arms if arms else 0) <= len(common):
        raise ScoringError(
            f"{n_texts} texts are {n_common} of each of {arms} arms, which have {len(common)} of"
            f" the same prompt, attribute and sample; give {arms} to {arms * len(common)}, or more"
            " samples"
        )
    drawn = table[number.isin(rng.choice(common, n_common, replace=False))]
    shuffled = drawn.iloc[rng.permutation(len(drawn))].reset_index(drop=True)
    # Ids depend on the texts, too, so that answers to one sheet do not fit the key of another.
    digest = hashlib.sha256("\0".join(shuffled["text"]).encode("utf-8", "replace")).hexdigest()
    shape = (len(ID_LETTERS),) * 5
    words = np.random.default_rng([seed, int(digest, 16)]).choice(
        np.prod(shape), len(shuffled), replace=False
    )
    ids = ID_LETTERS[np.stack(np.unravel_index(words, shape), axis=1)]
    key = shuffled.assign(id=["".join(letters) for letters in ids])
    key = key[[*KEY_COLUMNS, *key.columns.drop(KEY_COLUMNS)]]
    with result_folder(folder) as fresh:
        sheet = key.assign(prompt=asked_texts(key)).reindex(columns=COLUMNS)
        (fresh / "sheet.csv").write_bytes(_csv_bytes(sheet))
        (fresh / "key.csv").write_bytes(_csv_bytes(key))
        (fresh / "rubric.txt").write_text(RUBRIC, "utf-8")
    return key


def _csv_bytes(table: pd.DataFrame) -> bytes:
    """A table as CSV for spreadsheets: UTF-8 with a byte-order mark, formulas made harmless."""

    def guarded(cell: object) -> object:
        return f"'{cell}" if isinstance(cell, str) and re.match(FORMULA_CELL, cell) else cell

    cells = table.rename(columns=guarded).astype(object).map(guarded)
    return cells.to_csv(index=False, lineterminator="\r\n").encode("utf-8-sig", "replace")


def _read_csv(path: Path, needed: Sequence[str]) -> pd.DataFrame:
    """The cells of a CSV as text, without the apostrophes of `_csv_bytes`.

    Raises:
        ScoringError: The file is missing, not UTF-8, not a CSV, or lacks a needed column.
    """
    try:
        head = read_text(path, may_hold_nul=True).partition("\n")[0]  # texts of models may
        separator = max(",;\t", key=head.count)
        table = read_csv(path, sep=separator, dtype=str, na_filter=False, encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ScoringError(
            f"cannot read {path}: {error}; save the sheet as CSV in UTF-8, texts that hold the"
            " separator in quotes"
        ) from error

    def unguarded(cell: str) -> str:
        return cell[1:] if cell.startswith("'") and re.match(FORMULA_CELL, cell) else cell

    table = table.rename(columns=lambda name: unguarded(name.strip())).map(unguarded)
    if missing := [name for name in needed if name not in table]:
        raise ScoringError(f"{path} has no column {missing[0]!r}; found {', '.join(table.columns)}")
    return table


@takes(RatingSettings)
def rating_tables(settings: RatingSettings) -> dict[str, pd.DataFrame]:
    """`lapa2 scorers answers` in Python; `RatingSettings` says what it does and takes.

    Returns:
        answers, as from `read_answers`; table, from `human_table`; agreement, from
        `annotator_agreement`.

    Raises:
        ScoringError: As `read_answers`.
        RunError: `out` exists, or cannot be written.
    """
    answers = read_answers(Path(settings.key), [Path(file) for file in settings.files])
    tables = {
        "answers": answers,
        "table": human_table(answers),
        "agreement": annotator_agreement(answers),
    }
    if settings.out is not None:
        with result_folder(
            Path(settings.out), finished=holds_only("answers.csv", "*.csv")
        ) as folder:
            for name, table in tables.items():
                write_text(folder / f"{name}.csv", as_csv(table))
    return tables


def read_answers(key: Path, files: Sequence[Path]) -> pd.DataFrame:
    """Ratings of several annotators, joined with the key.

    Returns:
        One row per annotator, text and metric: id, arm, prompt, attribute, annotator, metric,
        rating (1.0 to 5.0; NaN if the annotator did not answer, or if the text is not in their
        file).

    Raises:
        ScoringError: A file cannot be read or has no rating; an id is unknown; a rating is not 1,
            2, 3, 4 or 5; an answered row names no annotator; an annotator answers a question twice.
    """
    texts = _read_csv(key, KEY_COLUMNS)[KEY_COLUMNS]
    if not files:
        raise ScoringError("give the raters' files, such as anna.csv ben.csv")
    sheets = [
        _read_csv(file, ANSWER_COLUMNS)[ANSWER_COLUMNS].assign(file=str(file)) for file in files
    ]
    cells = pd.concat(sheets).melt(["id", "annotator", "file"], METRICS, "metric", "cell")
    cells = cells.assign(**{name: cells[name].str.strip() for name in ("id", "annotator", "cell")})
    answer, answers = ["annotator", "id", "metric"], cells[cells["cell"] != ""]
    if unused := [file for file in files if not (answers["file"] == str(file)).any()]:
        raise ScoringError(
            f"{unused[0]} has no rating; expected 1 to 5 in {', '.join(METRICS)}; fill it in or"
            " leave it out"
        )
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
        [answers["annotator"].unique(), texts["id"], METRICS], names=answer
    )
    ratings = answers.set_index(answer)["cell"].astype(float).reindex(index).rename("rating")
    joined = ratings.reset_index().merge(texts, on="id", how="left")
    return joined[[*KEY_COLUMNS, "annotator", "metric", "rating"]]


def human_table(answers: pd.DataFrame) -> pd.DataFrame:
    """Mean rating per arm and metric.

    Whole prompts are resampled, as in every table of texts: neither the ratings of one text nor the
    texts of one prompt are independent. A text without a prompt counts as a prompt. The annotators
    are fixed: the interval says nothing about other annotators.

    Returns:
        Columns arm, metric, mean, low, high (95 %; NaN for one prompt), n (ratings), prompts,
        unanswered (missing ratings, if every annotator had rated every text).
    """
    rows = []
    for arm, of_arm in answers.groupby("arm"):
        for metric in METRICS:
            asked = of_arm[of_arm["metric"] == metric]
            rated = asked[asked["rating"].notna()]
            prompts = rated["prompt"].where(rated["prompt"] != "", rated["id"])
            means = mean_columns(metric, rated["rating"].to_numpy(), prompts.to_numpy())
            unanswered = len(asked) - len(rated)
            rows.append({"arm": arm, "metric": metric, **means, "unanswered": unanswered})
    return pd.DataFrame(rows)


def annotator_agreement(answers: pd.DataFrame) -> pd.DataFrame:
    """Agreement of the annotators, per metric, over the texts of all arms.

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
        pairs = rating_pairs(compared.to_numpy(dtype=np.float64))
        n, equal = pairs.sum(), pairs.trace(axis1=1, axis2=2).sum()
        low = high = np.nan
        if len(pairs) >= FEW:
            alphas = krippendorff_alpha(len(pairs) * resampled_means(pairs, np.arange(len(pairs))))
            if np.isfinite(alphas).any():
                low, high = np.percentile(alphas[np.isfinite(alphas)], tails(len(pairs)))
        row = {"metric": metric, "alpha": float(krippendorff_alpha(pairs.sum(axis=0)))}
        row |= {"low": low, "high": high, "exact": equal / n if n else np.nan, "n": round(n)}
        row |= {"texts": len(compared), "annotators": int(compared.notna().any().sum())}
        rows.append(row)
    return pd.DataFrame(rows)


def rating_pairs(
    ratings: Float[np.ndarray, "text annotator"],
) -> Float[np.ndarray, "text level level"]:
    """o_ck of every text: its pairs of ratings c and k that different annotators give, over the
    text's ratings (1 to 5, NaN if missing) less one; 0 for a text with fewer than two ratings."""
    counts = np.stack([(ratings == level).sum(axis=1) for level in LEVELS], axis=1).astype(
        np.float64
    )
    pairs = counts[:, :, None] * counts[:, None, :] - counts[:, :, None] * np.eye(len(LEVELS))
    return pairs / np.maximum(counts.sum(axis=1) - 1, 1)[:, None, None]


def krippendorff_alpha(
    pairs: Float[np.ndarray, "*rest level level"],
) -> Float[np.ndarray, "*rest"]:
    """Krippendorff's alpha for ordinal ratings: 1 is perfect agreement, 0 is chance.

    With o_ck the pairs of ratings of all texts (`rating_pairs`), n_c = sum_k o_ck, n = sum_c n_c:

        delta_ck = (n_c/2 + n_(c+1) + ... + n_(k-1) + n_k/2)^2
        alpha    = 1 - (n - 1) * sum_ck o_ck delta_ck / sum_ck n_c n_k delta_ck

    NaN if all ratings are equal or none can be compared.

    Source: Krippendorff, Computing Krippendorff's Alpha-Reliability (2011), section E.
    """
    n_c = pairs.sum(axis=-1)
    # delta is the squared distance of the levels' middle ranks.
    middle = n_c.cumsum(axis=-1) - n_c / 2
    delta = (middle[..., :, None] - middle[..., None, :]) ** 2
    observed = (pairs * delta).sum(axis=(-2, -1)) * (n_c.sum(axis=-1) - 1)
    expected = (n_c[..., :, None] * n_c[..., None, :] * delta).sum(axis=(-2, -1))
    nothing = np.full(np.shape(expected), np.nan)
    return np.asarray(1 - np.divide(observed, expected, out=nothing, where=expected > 0))
