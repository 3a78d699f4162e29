"""A run: cells with their texts, traces and manifests. Nothing here generates.

    RUN/run.json                    format, version, and which cells each grid has
    RUN/plan/KEY.json               a cell's resolved settings
    RUN/cells/KEY/                  a finished cell: manifest.json, samples.parquet, trace.nc
    RUN/parts/KEY/opened.json       an unfinished cell: its groups of rows, and what makes them
    RUN/parts/KEY/N/                a finished group
    RUN/failed/KEY.json             a cell that raised, with its traceback

`lapa2 sweep` and `lapa2 generate` write it, `load_run` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from lapa2_interp._util.errors import (
    DamagedError,
    Lapa2Error,
    RunError,
    validation_message,
)
from lapa2_interp._util.files import (
    is_damage,
    with_checksums,
    without_checksums,
    write_netcdf,
    write_text,
)
from lapa2_interp._util.parsing import check_regular_file, parse_json, read_text
from lapa2_interp._util.version import __version__
from lapa2_interp.generation.cell import CELL, Cell, Key
from lapa2_interp.runs.manifest import (
    MANIFEST,
    OF_THE_DAY,
    SET_BACK,
    Manifest,
    read_manifest,
    write_manifest,
)

if TYPE_CHECKING:
    import xarray as xr

SAMPLES, TRACE, LISTING = "samples.parquet", "trace.nc", "run.json"
COLUMNS = ("prompt", "attribute", "sample", "text", "tokens", "n_tokens", "finish", "arm")
"""Columns that the samples of a cell have, at least."""
FORMAT = 2
"""Version of the form of run folders: raised when texts under a key become others, or files are
read in another way.

A run of another format is neither read nor filled."""
WRITES_AGAIN = "remove it, and `lapa2 sweep` with the run's grids writes it again"
"""Remedy for a damaged run.json."""


@dataclass(frozen=True)
class FinishedCell:
    """The result of a cell.

    Attributes:
        manifest: What decided it.
        samples: One row per text.
        trace: The recorded attention, row i of the samples being sample i; None where there is
            none.
    """

    manifest: Manifest
    samples: pd.DataFrame
    trace: xr.Dataset | None


def write_cell(folder: Path, made: FinishedCell) -> None:
    """Write a finished cell's three files into an empty folder.

    The trace carries the manifest inside, without what differs from day to day, so that equal cells
    have equal bytes.
    """
    made.samples.to_parquet(folder / SAMPLES, index=False)
    if made.trace is not None:
        lasting = made.manifest.model_dump_json(indent=1, exclude=set(OF_THE_DAY))
        write_netcdf(folder / TRACE, made.trace.assign_attrs(manifest=lasting))
    write_manifest(folder, made.manifest)


def read_trace(file: Path) -> xr.Dataset:
    """A trace, in memory."""
    import xarray as xr

    with xr.open_dataset(file, engine="h5netcdf") as stored:
        return stored.load()


def read_cell(folder: Path) -> FinishedCell:
    """A finished cell.

    Raises:
        RunError: Not a cell's folder, or a file in it is missing or damaged.
    """
    manifest = read_manifest(folder)
    trace = None if manifest.cell.trace == "none" else read_file(folder, TRACE)
    return FinishedCell(manifest, read_file(folder, SAMPLES), trace)


def read_file(folder: Path, name: str) -> Any:
    """The samples or the trace of a finished cell.

    Args:
        name: SAMPLES or TRACE.

    Raises:
        RunError: As `read_manifest`.
        DamagedError: The file is missing, or not what was written.
    """
    file = folder / name
    try:
        read_manifest(folder, check=[name])
        check_regular_file(file)
        if name == TRACE:
            return read_trace(file)
        found = pd.read_parquet(file)
        if lacking := [column for column in COLUMNS if column not in found]:
            raise ValueError(f"it has no column {lacking[0]}")
        return found
    except RunError:
        raise
    except Exception as error:  # libraries raise all kinds at damaged bytes
        if not is_damage(error):
            raise
        raise DamagedError(
            f"{file} is missing or damaged ({' '.join(str(error).split())[:120]}); {SET_BACK}"
        ) from error


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


class Failure(BaseModel):
    """failed/KEY.json: why the last attempt at a cell raised."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    when: datetime
    """UTC."""
    traceback: str
    """Traceback of the worker; its last line is the error."""

    @property
    def reason(self) -> str:
        """The last line of the traceback."""
        return self.traceback.strip().splitlines()[-1]


def read_failure(file: Path) -> Failure:
    """A note of why a cell failed; of a damaged note, that it is damaged."""
    try:
        return Failure.model_validate(parse_json(read_text(file)))
    except ValueError:
        when = datetime.fromtimestamp(file.stat().st_mtime, UTC)
        return Failure(when=when, traceback=f"unknown: {file} is damaged")


def write_plan(folder: Path, cell: Cell) -> None:
    """Write a cell's settings, where they are not there yet, damaged, or have another label."""
    with suppress(DamagedError):
        if read_plan(folder, cell.key).label == cell.label or not cell.label:
            return
    write_text(_plan(folder, cell.key), cell.model_dump_json(indent=1) + "\n")


def read_plan(folder: Path, key: str) -> Cell:
    """A cell's settings, which must give its key.

    Raises:
        DamagedError: They are missing, or others than were written.
    """
    file = _plan(folder, key)
    try:
        cell = CELL.validate_python(parse_json(read_text(file)))
    except FileNotFoundError as error:
        raise DamagedError(f"{file} is missing") from error
    except IsADirectoryError as error:
        raise DamagedError(f"{file} is a folder; remove it") from error
    except (ValueError, Lapa2Error) as error:
        reason = validation_message(error) if isinstance(error, ValidationError) else str(error)
        raise DamagedError(f"{file} is damaged or of another version: {reason}") from error
    if cell.key != key:
        raise DamagedError(
            f"{file} has changed, or is of another version: its settings give the key {cell.key}"
        )
    return cell


def _plan(folder: Path, key: str) -> Path:
    return folder / "plan" / f"{key}.json"


def lost_listing(folder: Path) -> bool:
    """True if a folder has plans of cells, and no run.json."""
    return not (folder / LISTING).exists() and any(
        (folder / "plan").glob(f"{'[0-9a-f]' * 16}.json")
    )


def write_listing(folder: Path, listing: Listing) -> None:
    """Write run.json."""
    write_text(folder / LISTING, with_checksums(listing.model_dump_json()))


def is_whole(folder: Path, cell: Cell) -> bool:
    """True if a folder holds a finished cell whose files can be opened."""
    files = [
        folder / name for name in (MANIFEST, SAMPLES, TRACE)[: 2 if cell.trace == "none" else 3]
    ]
    try:
        for each in files:
            check_regular_file(each)
        stamps = tuple((each.stat().st_size, each.stat().st_mtime_ns) for each in files)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return _are_sound(folder.resolve(), cell.key, cell.n_texts, stamps)


@lru_cache(maxsize=8192)
def _are_sound(folder: Path, key: str, texts: int, stamps: tuple[tuple[int, int], ...]) -> bool:
    """True if a cell's files can be opened: a table or trace that was cut short cannot.

    Files are opened again when they have changed (`stamps`).
    """
    import h5py
    import pyarrow.parquet as pq

    try:
        if (
            read_manifest(folder).cell.key != key
            or pq.read_metadata(folder / SAMPLES).num_rows != texts
        ):
            return False
        if len(stamps) > 2:
            h5py.File(folder / TRACE, "r").close()
    except Exception as error:  # libraries raise all kinds at damaged bytes
        if not is_damage(error):
            raise
        return False
    return True


def finished_of(folder: Path, cells: Mapping[str, Cell]) -> dict[str, Cell]:
    """The finished ones among these cells, by key; none where there is no run.

    Raises:
        RunError: What is there is no run, or one of another format.
    """
    if not (folder / LISTING).is_file():
        return {}
    read_listing(folder)
    return {key: cell for key, cell in cells.items() if is_whole(folder / "cells" / key, cell)}


def read_listing(folder: Path) -> Listing:
    """A run's run.json.

    Raises:
        RunError: There is none, or it is of another version.
        DamagedError: It is not what was written, or is lost beside the plans of cells.
    """
    file = folder / LISTING
    if not file.is_file():
        made_by = "`lapa2 generate` and `lapa2 sweep GRID --out RUN` make one"
        if not folder.exists():
            raise RunError(f"there is no folder {folder}; {made_by}")
        if lost_listing(folder):
            raise DamagedError(
                f"{folder} has plans of cells and no {LISTING}; `lapa2 sweep` with its grids"
                " writes it again"
            )
        raise RunError(f"{folder} is not a run: it has no {LISTING}; {made_by}")
    try:
        raw, _ = without_checksums(read_text(file))
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
