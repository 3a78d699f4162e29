"""Run folders: the only module that reads and writes them. Nothing here generates.

    RUN/run.json                    format, version, and which cells each grid has
    RUN/cells/KEY/cell.json         settings of a cell, resolved
    RUN/cells/KEY/000.parquet       texts of its first batch of rows
    RUN/cells/KEY/000.nc            their trace, unless the cell has none
    RUN/cells/KEY/000.json          facts of the batch and sha256 of its files; written last
    RUN/cells/KEY/failed.json       why the last attempt at the cell raised

A batch exists when its JSON exists, and a cell is finished when all its batches exist.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Collection, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from lapa2_interp._util.parsing import parse_json, parse_object, read_text
from lapa2_interp._util.paths import check_regular_file, looked_for
from lapa2_interp._util.unpacking import check_hdf5, check_parquet
from lapa2_interp._util.values import plain
from lapa2_interp._util.version import __version__
from lapa2_interp.attention.trace import TracedTexts
from lapa2_interp.errors import (
    DamagedError,
    Lapa2Error,
    RunError,
    pluralize,
    validation_message,
)
from lapa2_interp.files import (
    atomic_write,
    is_damage,
    remove_path,
    sha256_of,
    write_json,
    write_netcdf,
)
from lapa2_interp.generation.cell import Cell, Key
from lapa2_interp.runs.manifest import BatchRecord

if TYPE_CHECKING:
    import xarray as xr

LISTING, CELLS, SETTINGS, FAILED = "run.json", "cells", "cell.json", "failed.json"
ID_COLUMNS = ("tokens", "context")
"""Columns of token ids, which tables of scores leave out."""
COLUMNS = ("prompt", "attribute", "sample", "text", "tokens", "n_tokens", "finish")
"""Columns that the texts of a batch have, at least."""
TEXTS = ("prompt", "attribute", "text", "continuation", "finish")
"""Columns that hold texts."""
FINISHES = ("length", "end", "empty")
"""How texts end (`generation.loop`)."""
KEYS = "[0-9a-f]" * 16
"""Pattern of the names of cells' folders."""
FORMAT = 4
"""Version of the form of run folders: raised when texts under a key become others, or files are
read in another way.

A run of another format is neither read nor filled."""
STATES = ("finished", "failed", "partly", "damaged", "missing")
"""States of a cell. Damaged: a record of a batch cannot be read, a file beside it is missing, or
the records do not count the cell's texts; a sweep makes the batch again. Other changes are noticed
when a file is read."""
AGAIN = "the command that made the run makes it again"
"""Remedy for a damaged file of a cell."""
WRITES_AGAIN = "remove it, and `lapa2 sweep` with the run's grids writes it again"
"""Remedy for a damaged run.json."""


@dataclass(frozen=True)
class FinishedBatch(TracedTexts):
    """A batch of rows of a cell, as it was made.

    Attributes:
        record: Facts about it.
    """

    record: BatchRecord


def write_batch(folder: Path, number: int, made: FinishedBatch) -> None:
    """Write a batch into the folder of its cell, the record last."""
    names = _files(number, made.trace is not None)
    with atomic_write(folder / names[0]) as fresh:
        made.texts.to_parquet(fresh, index=False)
    if made.trace is not None:
        with atomic_write(folder / names[1]) as fresh:
            write_netcdf(fresh, made.trace)
    sums = {name: sha256_of(folder / name) for name in names}
    record = made.record.model_copy(update={"sha256": sums})
    write_json(folder / f"{number:03d}.json", record.model_dump_json())


def read_record(folder: Path, number: int, cell: Cell) -> BatchRecord:
    """Facts of a finished batch of a cell.

    Raises:
        DamagedError: The files are missing, cannot be read, are of another cell, or count what the
            cell cannot have.
    """
    file = folder / f"{number:03d}.json"
    try:
        stat = file.stat()
        record = _record(file.resolve(), stat.st_size, stat.st_mtime_ns)
        if record.key != folder.name:
            raise ValueError(f"it belongs to cell {record.key}")
        if record.n_batches > cell.n_texts:
            raise ValueError(
                f"it counts {record.n_batches} batches of {pluralize(cell.n_texts, 'text')}"
            )
        return record
    except (OSError, ValueError) as error:
        if not is_damage(error):
            raise
        raise DamagedError(
            f"{file} is missing or damaged ({validation_message(error)}); {AGAIN}"
        ) from error


@lru_cache(maxsize=8192)
def _record(file: Path, size: int, changed: int) -> BatchRecord:
    return BatchRecord.model_validate_json(read_text(file))


def read_batch(folder: Path, number: int, cell: Cell) -> FinishedBatch:
    """A finished batch of a cell, its files compared with their sha256.

    Raises:
        DamagedError: A file is missing, or not what was written.
    """
    record = read_record(folder, number, cell)
    return FinishedBatch(read_texts(folder, number, cell), read_trace(folder, number, cell), record)


def read_texts(folder: Path, number: int, cell: Cell) -> pd.DataFrame:
    """The texts of a finished batch; errors as `read_batch`."""
    with _checked_file(folder, number, cell, ".parquet") as (file, record):
        check_parquet(file)
        table = pd.read_parquet(file)
        if lacking := [column for column in COLUMNS if column not in table]:
            raise ValueError(f"it has no column {lacking[0]}")
        if len(table) != record.n_texts:
            raise ValueError(f"it has {len(table)} texts, and {number:03d}.json {record.n_texts}")
        _check_texts(table, cell)
        return table


def _check_texts(texts: pd.DataFrame, cell: Cell) -> None:
    """Refuse rows that no text of the cell has, since reading them would fail later, or not.

    Raises:
        ValueError: A value has another type, or is another than the cell decides.
    """

    def check(name: str, right: Iterable[bool], needed: str) -> None:
        for row, fits in enumerate(right):
            if not fits:
                value = repr(plain(texts[name].iloc[row]))[:40]
                raise ValueError(f"{name} of row {row} is {value}, not {needed}")

    for name in texts.columns.intersection(list(TEXTS)):
        check(name, (isinstance(value, str) for value in texts[name]), "a text")
    for name in ("sample", "n_tokens"):
        is_integer = texts[name].dtype.kind == "i"
        check(name, [is_integer] * len(texts), "a whole number")
    ids = (np.asarray(row) for row in texts["tokens"])
    check("tokens", (x.ndim == 1 and (x.dtype.kind == "i" or not x.size) for x in ids), "ids")
    check("prompt", texts["prompt"].isin(cell.prompts), "a prompt of the cell")
    check("attribute", texts["attribute"] == cell.attribute, f"{cell.attribute!r}")
    check("finish", texts["finish"].isin(FINISHES), f"one of {', '.join(FINISHES)}")
    check("sample", texts["sample"].between(0, cell.samples - 1), f"below {cell.samples}")
    check("n_tokens", texts["n_tokens"] == texts["tokens"].map(len), "the number of its tokens")
    names = ["prompt", "sample"]
    if cell.n_turns > 1:
        names.append("turn")
        check("turn", texts["turn"].between(1, cell.n_turns), f"1 to {cell.n_turns}")
    check("sample", ~texts.duplicated(names), "another one of its prompt")


def read_trace(folder: Path, number: int, cell: Cell) -> xr.Dataset | None:
    """The trace of a finished batch, in memory, if its cell has one; errors as `read_batch`."""
    import xarray as xr

    if cell.trace == "none":
        return None
    with _checked_file(folder, number, cell, ".nc") as (file, record):
        check_hdf5(file)
        with xr.open_dataset(file, engine="h5netcdf") as stored:
            trace = stored.load()
        if trace.sizes.get("sample") != record.n_texts:
            raise ValueError(f"it has {trace.sizes.get('sample')} samples, not {record.n_texts}")
        return trace


def check_batch(folder: Path, number: int, cell: Cell) -> BatchRecord:
    """The record of a finished batch whose files have their sha256; errors as `read_batch`."""
    for name in _files(number, cell.trace != "none"):
        with _checked_file(folder, number, cell, Path(name).suffix):
            pass
    return read_record(folder, number, cell)


@contextmanager
def _checked_file(
    folder: Path, number: int, cell: Cell, suffix: str
) -> Iterator[tuple[Path, BatchRecord]]:
    """A file of a batch, compared with its sha256, and the record; whatever reading it raises is
    damage."""
    file, record = folder / f"{number:03d}{suffix}", read_record(folder, number, cell)
    try:
        check_regular_file(file)
        if sha256_of(file) != record.sha256.get(file.name):
            raise ValueError(f"its sha256 is not that in {number:03d}.json")
        yield file, record
    except Exception as error:  # libraries raise all kinds at damaged bytes
        if not is_damage(error):
            raise
        reason = " ".join(str(error).split())[:120]
        raise DamagedError(f"{file} is missing or damaged ({reason}); {AGAIN}") from error


def _files(number: int, traced: bool) -> list[str]:
    """Names of the files beside the record of a batch."""
    return [f"{number:03d}.parquet", *[f"{number:03d}.nc"] * traced]


def batch_numbers(folder: Path) -> list[int]:
    """Numbers of the batches that a cell's folder has records of."""
    return _numbers(_names(folder) or set())


def _names(folder: Path) -> set[str] | None:
    """Names of the files in a folder; None where there is no folder, also where something else is
    in its place."""
    try:
        return {entry.name for entry in folder.iterdir()}
    except OSError as error:
        if not is_damage(error):
            raise
        return None


def _numbers(names: set[str]) -> list[int]:
    stems = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def state_of(folder: Path, cell: Cell) -> str:
    """The state of a cell, one of `STATES`: a listing of its folder and a record."""
    names = _names(folder)
    if names is None:
        return "missing"
    if numbers := _numbers(names):
        if any(not names.issuperset(_files(number, cell.trace != "none")) for number in numbers):
            return "damaged"
        try:
            records = [read_record(folder, number, cell) for number in numbers]
        except DamagedError:
            return "damaged"
        pairs = zip(numbers, records, strict=True)
        counted = [record for number, record in pairs if number < record.n_batches]
        if not agree(counted, cell):
            return "damaged"
        if len(counted) == len(records) == records[0].n_batches:
            return "finished"
    if FAILED in names:
        return "failed"
    return "partly" if numbers else "missing"


def agree(records: Collection[BatchRecord], cell: Cell) -> bool:
    """True if records of a cell's batches count the same batches, and as many texts as the cell has
    once all batches are there."""
    n_batches, n_texts = (
        {record.n_batches for record in records},
        sum(record.n_texts for record in records),
    )
    if len(n_batches) > 1:
        return False
    if n_batches == {len(records)}:
        return n_texts == cell.n_texts
    return n_texts < cell.n_texts


def remove_batches(folder: Path, keep: Container[int] = ()) -> None:
    """Remove the batches of a cell but some, records first."""
    files = [file for file in folder.iterdir() if file.stem.isdecimal()]
    for file in sorted(files, key=lambda file: file.suffix != ".json"):
        if int(file.stem) not in keep:
            remove_path(file)


def write_cell(folder: Path, cell: Cell, keep_label: bool = False) -> None:
    """Write a cell's settings, where they are not there yet, damaged, or have another label.

    Args:
        keep_label: Leave the label that is there, where the cell has none.
    """
    with suppress(DamagedError):
        label = read_cell(folder, cell.key).label
        if label == cell.label or (keep_label and not cell.label):
            return
    write_json(folder / SETTINGS, cell.model_dump_json())


def read_cell(folder: Path, key: str) -> Cell:
    """A cell's settings, which must give its key.

    Args:
        folder: The folder of the cell.

    Raises:
        DamagedError: The files are missing, or others than were written.
    """
    file = folder / SETTINGS
    try:
        cell = Cell.model_validate(parse_json(read_text(file)))
    except FileNotFoundError as error:
        raise DamagedError(f"{file} is missing") from error
    except OSError as error:
        if not is_damage(error):
            raise
        path = next((path for path in (folder.parent, folder) if not path.is_dir()), file)
        kind = "a folder" if path.is_dir() else "a file" if path.is_file() else "a loop of links"
        raise DamagedError(f"{path} is {kind}; remove it") from error
    except (ValueError, Lapa2Error) as error:
        raise DamagedError(
            f"{file} is damaged or of another version: {validation_message(error)}"
        ) from error
    if cell.key != key:
        raise DamagedError(
            f"{file} has changed, or is of another version: its settings give the key {cell.key}"
        )
    return cell


class Failure(BaseModel):
    """failed.json: why the last attempt at a cell raised."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    when: datetime
    """UTC."""
    traceback: str
    """Traceback of the worker; its last line is the error."""

    @field_validator("traceback")
    @classmethod
    def _has_words(cls, traceback: str) -> str:
        if not traceback.strip():
            raise ValueError("traceback is blank")
        return traceback

    @property
    def reason(self) -> str:
        """The last line of the traceback."""
        return self.traceback.strip().splitlines()[-1]


def read_failure(file: Path) -> Failure:
    """A note of why a cell failed; of a damaged note, that it is damaged.

    Raises:
        FileNotFoundError: There is none.
    """
    try:
        return Failure.model_validate(parse_json(read_text(file)))
    except (ValueError, OSError) as error:
        if not is_damage(error):
            raise
        when = datetime.fromtimestamp(file.lstat().st_mtime, UTC)
        return Failure(when=when, traceback=f"unknown: {file} is damaged")


class Listing(BaseModel):
    """run.json."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    format: int = FORMAT
    """As `FORMAT`."""
    lapa2_interp: str = __version__
    """Version of the package that began the run."""
    grids: dict[str, tuple[Key, ...]] = {}
    """Keys of each grid's cells."""

    def with_cell(self, key: str) -> list[str]:
        """Names of the grids that have a cell."""
        return [name for name, keys in self.grids.items() if key in keys]


def lost_listing(folder: Path) -> bool:
    """True if a folder has cells, and no run.json."""
    return not (folder / LISTING).exists() and any((folder / CELLS).glob(f"{KEYS}/{SETTINGS}"))


def earlier_keys(folder: Path, listing: Listing) -> list[str]:
    """Keys of cells in a run's folder that none of its grids has now."""
    listed = {key for keys in listing.grids.values() for key in keys}
    places = (folder / CELLS).glob(KEYS)
    return sorted(
        path.name
        for path in places
        if path.name not in listed and path.is_dir() and not path.is_symlink()
    )


def write_listing(folder: Path, listing: Listing) -> None:
    """Write run.json."""
    write_json(folder / LISTING, listing.model_dump_json())


def is_run(folder: Path) -> bool:
    """True if a folder is a run, also one of another format or with a damaged run.json."""
    if (folder / LISTING).is_file():
        if (folder / CELLS).is_dir():
            return True
        with suppress(ValueError):
            raw = parse_json(read_text(folder / LISTING))
            return isinstance(raw, dict) and "grids" in raw
    return False


def read_listing(folder: Path) -> Listing:
    """A run's run.json.

    Raises:
        RunError: There is none, or it is of another version.
        DamagedError: The file is not what was written, or is lost beside cells.
    """
    file = folder / LISTING
    if not file.is_file():
        made_by = "`lapa2 generate` and `lapa2 sweep GRID --out RUN` make one"
        if not folder.exists():
            raise RunError(f"there is no folder {folder}; {made_by}{looked_for(folder)}")
        if lost_listing(folder):
            raise DamagedError(
                f"{folder} has cells and no {LISTING}; `lapa2 sweep` with its grids writes it again"
            )
        raise RunError(f"{folder} is not a run: it has no {LISTING}; {made_by}")
    try:
        raw: dict[str, Any] = parse_object(read_text(file))
    except ValueError as error:
        raise DamagedError(f"{file} is damaged: {error}; {WRITES_AGAIN}") from error
    try:
        if "grids" not in raw:
            raise DamagedError(
                f"{folder} is not a run: its {LISTING} is something else's; give a run's folder"
            )
        if raw.get("format") != FORMAT:
            raise RunError(
                f"{folder} is a run of format {raw.get('format')} (lapa2_interp"
                f" {raw.get('lapa2_interp')}), and this is lapa2_interp {__version__}, format"
                f" {FORMAT}; read it with that version, or sweep into a new folder"
            )
        return Listing.model_validate(raw)
    except ValidationError as error:
        raise DamagedError(
            f"{file} is damaged or of another version: {validation_message(error)}; if it is"
            f" damaged, {WRITES_AGAIN}"
        ) from error


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn errors of the operating system while a run is written into a `RunError`.

    Raises:
        RunError: The disk is full, or the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(f"cannot write {folder}: {error.strerror or error}") from error
        raise RunError(
            f"the disk of {folder} is full; every finished batch of rows is kept: make room and"
            " repeat the command"
        ) from error


def write_parquet(table: pd.DataFrame, file: Path) -> None:
    """Write a table whose columns may hold values of any types: these become text. Ids of tokens
    stay as they are."""
    words = [str(name) for name in table if table[name].dtype == object and name not in ID_COLUMNS]
    table.assign(**{name: table[name].map(_plain) for name in words}).to_parquet(file, index=False)


def _plain(value: Any) -> str | None:
    """A value of a column as text; None where there is none."""
    if isinstance(value, str):
        return value
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return None
    return json.dumps(value, ensure_ascii=False, default=str)
