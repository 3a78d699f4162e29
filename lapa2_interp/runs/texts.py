"""Texts to score: those of a run or of a file.

Texts are whole, cut to shorter lengths, or in parts along their length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd

from lapa2_interp._util.paths import kind_of, looked_for
from lapa2_interp.attention.trace import TraceKind
from lapa2_interp.bias.tokens import decode_answer, decode_continuation, token_texts
from lapa2_interp.commands import command
from lapa2_interp.errors import ScoringError, parameter, unknown_choice
from lapa2_interp.generation.cell import Cell
from lapa2_interp.models.load import shared_tokenizer
from lapa2_interp.runs.manifest import Manifest
from lapa2_interp.runs.run import as_list, is_any_of, load_run
from lapa2_interp.scoring.tables import CELL_COLUMNS, EXTRA_CELL_COLUMNS
from lapa2_interp.tasks.corpora import READERS, read_table
from lapa2_interp.tasks.segmentation import word_spans, words_between


def read_texts(
    source: Path, column: str = "text", only: Mapping[str, Any] | None = None
) -> list[tuple[pd.DataFrame, Manifest | None]]:
    """The texts of a run folder, each once (`each_once`), or the rows of a file, with
    columns text, prompt, attribute and arm.

    Args:
        source: A run, or a .jsonl, .csv or .parquet file.
        column: Where a file has its texts.
        only: Of a run, only cells whose columns have these values; other columns are left alone.

    Returns:
        Tables (missing columns filled with ""). A run has one per model, task, wording of its
        prefixes and length, with its cells' columns and the manifest of the first; a file has one,
        and no manifest.

    Raises:
        ScoringError: Not readable, no such column (names those found), or no rows.
    """
    if source.is_dir():
        run = load_run(source)
        if not run.finished:
            raise ScoringError(
                f"{source} has no finished cell; `{command('runs', source)}` tells why"
            )
        wanted = {name: value for name, value in (only or {}).items() if name in run.cells}
        keys = each_once(run.select(**wanted).finished)
        finished = run.cells[run.cells["key"].isin(keys)]
        wordings = finished["key"].map(lambda key: str(run.by_key[key].task.attributes))
        return [
            (run.texts(list(group["key"])), run.manifest(str(group["key"].iloc[0])))
            for _, group in finished.groupby(["model", "task", wordings, "max_length"], sort=False)
        ]
    if not source.is_file() or kind_of(source) not in READERS:
        raise ScoringError(
            f"{source} is neither a run folder nor a file that ends in {', '.join(READERS)}"
            f"{looked_for(source)}"
        )
    words = dict.fromkeys((column, "prompt", "attribute", "arm"), str)  # a prompt may be 007
    try:
        table = read_table(source, dtype=words)
    except UnicodeDecodeError as error:
        raise ScoringError(
            f"{source} is not UTF-8 ({error.reason} at byte {error.start}); convert it first"
        ) from error
    except Exception as error:  # each compression has errors of its own for a damaged file
        raise ScoringError(f"cannot read {source}: {' '.join(str(error).split())[:160]}") from error
    if not len(table):
        raise ScoringError(f"{source} has no rows")
    if column not in table:
        raise ScoringError(
            f"{source} has no column {column!r}; found {', '.join(map(str, table.columns))}; give"
            f" {parameter('column')}"
        )
    texts = table[column].astype(object).where(table[column].notna(), "")
    for row, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise ScoringError(
                f"{source} row {row} has no text in column {column!r}, found {str(text)[:80]!r};"
                f" give texts there, or {parameter('column')}"
            )
    if not any(text.strip() for text in texts):
        raise ScoringError(f"{source} has no text in column {column!r}; give {parameter('column')}")
    if column != "text":
        table = table.drop(columns=column)
    table = table.assign(text=texts).reset_index(drop=True)
    for name in ("prompt", "attribute", "arm"):
        table[name] = as_words(table[name]) if name in table else ""
    for key in set(table) & {*CELL_COLUMNS, *EXTRA_CELL_COLUMNS}:
        if table[key].map(lambda value: isinstance(value, dict | list | np.ndarray)).any():
            table[key] = as_words(table[key])  # groups are made of what can be hashed
    return [(table, None)]


def each_once(cells: Mapping[str, Cell]) -> list[str]:
    """Keys of cells that have no text in common: of cells that draw the same texts, and differ in
    samples, prompts, batches or trace alone, the one with the most; of equal ones, with the fullest
    trace."""
    kinds = get_args(TraceKind)
    chosen: dict[str, Cell] = {}
    taken: set[tuple[str, str]] = set()
    for key, cell in sorted(
        cells.items(), key=lambda one: (-one[1].n_texts, -kinds.index(one[1].trace))
    ):
        own = {(cell.sampling_key, prompt) for prompt in cell.prompts}
        if not own & taken:
            taken |= own
            chosen[key] = cell
    return [key for key in cells if key in chosen]


def as_words(column: pd.Series) -> pd.Series:
    """A column as texts; "" where it has no value."""
    return column.astype(object).where(column.notna(), "").astype(str)


def at_lengths(
    texts: pd.DataFrame, manifest: Manifest | None, lengths: Sequence[int]
) -> pd.DataFrame:
    """The texts of a run as they were at shorter lengths: one row per text and length, with a
    column `length`.

    A text of 64 tokens is the first 64 of the longer one: both follow one random stream.

    Raises:
        ScoringError: A length the run does not reach; or a shorter one of a chat of several turns.
    """
    if manifest is None:
        raise ScoringError(
            "length slices are cut by the tokens of a run; give a run folder, or cut the file's"
            " texts yourself"
        )
    long = [length for length in lengths if length > manifest.cell.length]
    if long:
        raise ScoringError(
            f"the run's texts have {manifest.cell.length} tokens; {long[0]} is longer"
        )
    short = [length for length in lengths if length < manifest.cell.length]
    if short and manifest.cell.n_turns > 1:
        raise ScoringError(
            f"the run's chats have {manifest.cell.n_turns} turns, and a later answer follows whole"
            f" earlier ones of up to {manifest.cell.length} tokens, so cut to {short[0]} it is not"
            f" that of a chat of length {short[0]}; generate the chats with"
            f" {parameter('length', short[0])}"
        )
    tokenizer = shared_tokenizer(manifest.model.name)
    frames = []
    for length in sorted(set(lengths)):
        cut = []
        for prompt, tokens in zip(texts["prompt"], texts["tokens"], strict=True):
            counted = (
                len(tokenizer(prompt, add_special_tokens=False).input_ids)
                if manifest.cell.task.length_counts_prompt
                else 0
            )
            left = [int(token) for token in tokens[: max(0, length - counted)]]
            if manifest.cell.is_chat:
                cut.append(decode_answer(tokenizer, left))
                continue
            text = decode_continuation(tokenizer, prompt, left)
            cut.append(prompt + text if manifest.cell.task.length_counts_prompt else text)
        frames.append(texts.assign(text=cut, length=length))
    return pd.concat(frames, ignore_index=True)


def in_parts(texts: pd.DataFrame, n_parts: int, tokenizer: Any = None) -> pd.DataFrame:
    """Every text cut into equal parts: one row per text and part, with a column `part` (1, 2, ...).

    Halves (n_parts = 2) are the paper's Table half, whose cutting rule it does not give: here the
    tokens of the whole text, prompt included, are cut evenly.

    Args:
        tokenizer: Cuts by its tokens, and at none of its characters' bytes; by words without one
            (graphemes in scripts without spaces).
    """
    cut = [_cut(text, n_parts, tokenizer) for text in texts["text"]]
    frames = [texts.assign(text=[parts[i] for parts in cut], part=i + 1) for i in range(n_parts)]
    return pd.concat(frames, ignore_index=True)


def _cut(text: str, n_parts: int, tokenizer: Any) -> list[str]:
    units: Sequence[Any] = word_spans(text)
    if tokenizer is not None:
        units = token_texts(tokenizer, "", tokenizer(text, add_special_tokens=False).input_ids)
    edges = np.linspace(0, len(units), n_parts + 1).round().astype(int).tolist()
    return [
        words_between(text, low, high) if tokenizer is None else "".join(units[low:high])
        for low, high in pairwise(edges)
    ]


def only_rows(texts: pd.DataFrame, only: Mapping[str, Any]) -> pd.DataFrame:
    """The rows whose columns have these values (a list: one of them), as numbers or as text.

    Raises:
        ScoringError: No such column.
    """
    for column, value in only.items():
        if column not in texts:
            raise ScoringError(unknown_choice("column", column, texts.columns))
        texts = texts[is_any_of(texts[column], as_list(value))]
    return texts
