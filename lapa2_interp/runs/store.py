"""A run: cells with their texts, traces and manifests. Nothing here generates.

    RUN/run.json                    format, version, and which cells each grid has
    RUN/plan/KEY.json               a cell's resolved settings
    RUN/cells/KEY/                  a finished cell: manifest.json, samples.parquet, trace.nc
    RUN/parts/KEY/opened.json       an unfinished cell: its groups of rows, and what makes them
    RUN/parts/KEY/N/                a finished group
    RUN/failed/KEY.json             a cell that raised, with its traceback

`lapa2 sweep` and `lapa2 generate` write it, `load_run` reads it. A folder that holds one cell by
itself (manifest.json without run.json, as `lapa2 generate` wrote before) is read as a run, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from lapa2_interp._util.errors import (
    DamagedError,
    Lapa2Error,
    RunError,
    TraceError,
    pluralize,
    unknown_choice,
    validation_message,
)
from lapa2_interp._util.files import (
    TEMPORARY_PREFIX,
    atomic_folder,
    check_name,
    is_damage,
    refuse_foreign_files,
    result_folder,
    with_checksums,
    without_checksums,
    write_netcdf,
    write_text,
)
from lapa2_interp._util.parsing import check_regular_file, parse_json, read_text
from lapa2_interp._util.version import __version__
from lapa2_interp.attention.tables import step_table
from lapa2_interp.attention.trace import TraceKind
from lapa2_interp.generation.cell import BUILT_IN_TASKS, CELL, Cell, Key, same_label
from lapa2_interp.generation.loop import join_traces
from lapa2_interp.methods.registry import load_task
from lapa2_interp.runs.locks import locked
from lapa2_interp.runs.manifest import (
    MANIFEST,
    OF_THE_DAY,
    SET_BACK,
    Manifest,
    read_manifest,
    write_manifest,
)
from lapa2_interp.tasks.task import Attribute, Prompts, Task

if TYPE_CHECKING:
    import xarray as xr

SAMPLES, TRACE, LISTING = "samples.parquet", "trace.nc", "run.json"
COLUMNS = ("prompt", "attribute", "sample", "text", "tokens", "n_tokens", "finish", "arm")
"""What the samples of a cell have, at least."""
FORMAT = 1
"""Version of the form of run folders: raised when texts under a key become others, or files are
read in another way.

A run of another format is neither read nor filled."""
STATES = ("finished", "failed", "partly", "damaged", "missing")
"""States of a cell. Damaged: a file of a finished cell was removed or cut short, or its manifest
changed; a sweep makes the cell again. Other changes are noticed when a file is read."""
WRITES_ANEW = "remove it, and `lapa2 sweep` with the run's grids writes it anew"
"""What to do about a damaged run.json."""
ALIKE = ("model", "task", "method", "variant", "max_length", "dtype")
"""What arms that are shown side by side have in common."""


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
    if manifest.kind != "run":
        raise RunError(
            f"{folder} holds tables read off a run, not a run; give the run's own folder"
        )
    trace = None if manifest.trace == "none" else read_file(folder, TRACE)
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

    kind: Literal["sweep"] = "sweep"
    """What the file is; the word is older than runs of `lapa2 generate`."""
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


def _failure(file: Path) -> Failure:
    """A note of why a cell failed; of a damaged note, that it is damaged."""
    try:
        return Failure.model_validate(parse_json(read_text(file)))
    except ValueError:
        when = datetime.fromtimestamp(file.stat().st_mtime, UTC)
        return Failure(when=when, traceback=f"unknown: {file} is damaged")


@dataclass(frozen=True)
class Run:
    """Cells, and what was made of them, in a folder or in memory.

    Attributes:
        folder: Its folder; None for a run that is in memory only.
        listing: Which cells belong to which grid.
        plan: Every cell by its key.
        held: The finished cells that are in memory, by key.
    """

    folder: Path | None
    listing: Listing
    plan: dict[str, Cell]
    held: dict[str, FinishedCell] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """Its folder, for messages."""
        return "the run" if self.folder is None else str(self.folder)

    @property
    def home(self) -> Path:
        """Its folder.

        Raises:
            RunError: It is in memory only.
        """
        if self.folder is None:
            raise RunError("the run is in memory only; run.save(FOLDER) gives it a folder")
        return self.folder

    @property
    def finished(self) -> dict[str, Cell]:
        """Cells that are finished now, by key."""
        return {
            key: cell
            for key, cell in self.plan.items()
            if key in self.held or (self.folder is not None and is_whole(self.place(key), cell))
        }

    @property
    def failures(self) -> dict[str, Failure]:
        """Why cells that are not finished raised when they were last tried."""
        found, finished = {}, self.finished
        for key in self.plan.keys() - finished.keys() if self.folder is not None else ():
            with suppress(FileNotFoundError):  # never tried, or tried again meanwhile
                found[key] = _failure(self.home / "failed" / f"{key}.json")
        return {key: found[key] for key in self.plan if key in found}

    def place(self, key: str) -> Path:
        """The folder of a finished cell.

        Raises:
            RunError: The run is in memory only.
        """
        if key in self.held:
            raise RunError(f"{self.name} has no folder for cell {key}; run.save(FOLDER) makes one")
        return self.home / "cells" / key

    @cached_property
    def cells(self) -> pd.DataFrame:
        """One row per cell: key, state (of STATES), grids, its settings, and of a finished one
        tokens, seconds and commit, of a failed one why. The table is made once, when it is first
        asked for."""
        finished, failures, rows = self.finished, self.failures, []
        for key, cell in self.plan.items():
            made: dict[str, Any] = {}
            if key in finished:
                state, manifest = "finished", self.manifest(key)
                made = {
                    "tokens": manifest.new_tokens,
                    "seconds": manifest.seconds,
                    "commit": manifest.commit,
                }
            else:
                state = "failed" if key in failures else self._unfinished(key)
            rows.append(
                {
                    "key": key,
                    "state": state,
                    "grids": ", ".join(self.listing.with_cell(key)),
                    **cell.columns,
                    **made,
                    "why": failures[key].reason if key in failures and state == "failed" else "",
                }
            )
        return pd.DataFrame(rows, columns=None if rows else ["key", "state", "grids", "why"])

    def _unfinished(self, key: str) -> str:
        if self.folder is None:
            return "missing"
        if (self.folder / "parts" / key).is_dir():
            return "partly"
        return "damaged" if self.place(key).is_dir() else "missing"

    def samples(self, cells: str | Sequence[str] | None = None, **wanted: Any) -> pd.DataFrame:
        """The texts of finished cells: one row per text, with its cell's key (`cell`) and columns
        (model, method, arm, ...).

        Args:
            cells: A key, or several; by default all that are finished.
            wanted: Or values of columns, as `select` takes them.

        Raises:
            RunError: A cell is not finished, or damaged; as `select`.
        """
        frames = []
        for key in self._keys(cells, wanted):
            if key in self.held:
                table = self.held[key].samples
            else:
                table = read_file(self.place(key), SAMPLES)
            frames.append(table.drop(columns="arm").assign(**self.plan[key].columns, cell=key))
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def trace(self, cells: str | Sequence[str] | None = None, **wanted: Any) -> xr.Dataset | None:
        """The traces of finished cells as one: sample i is row i of `samples` of the same cells.

        Coordinates of a sample are its prompt_text, task, attribute, method, arm, and its cell's
        key (`cell`). What a cell lacks of the others (branches of another method, steps of a longer
        text) is NaN.

        Args:
            cells, wanted: As in `samples`.

        Returns:
            None where no cell has a trace.

        Raises:
            RunError: As `samples`; none is finished; or the traces do not fit together: of other
                models, pooled beside full, or none.
        """
        keys = self._keys(cells, wanted)
        if not keys:
            first = next(iter(self.plan), None)
            raise RunError(f"{self.name} has no cell" if first is None else self._not_there(first))
        found = {key: self.cell(key).trace for key in keys}
        traces = {key: each for key, each in found.items() if each is not None}
        if not traces:
            return None
        shapes = {
            key: each and {name: each["prefix"].sizes.get(name) for name in ("layer", "head")}
            for key, each in found.items()
        }
        first = keys[0]
        if other := [key for key in keys if shapes[key] != shapes[first]]:
            mine, others = (self.plan[key].columns for key in (first, other[0]))
            apart = [f"{name}={mine[name]!r}" for name in mine if mine[name] != others[name]]
            raise RunError(
                f"the traces of cells {first} ({self._traced(first)}) and {other[0]}"
                f" ({self._traced(other[0])}) do not fit together; choose cells alike, such as"
                f" {apart[0] if apart else f'the key {first!r}'}"
            )
        joined = join_traces(list(traces.values()), self.samples(keys))
        return joined if len(keys) == 1 else joined.drop_attrs(deep=False)  # each has a manifest

    def _traced(self, key: str) -> str:
        return f"{self.plan[key].model}, trace {self.plan[key].trace}"

    def steps(self, branch: str | None = None, **wanted: Any) -> pd.DataFrame:
        """Attention against step as a tidy table: mean and 95 % interval by arm.

        Args:
            branch: Which branch; by default the first of each method with a prefix.
            wanted: As in `samples`.

        Returns:
            Columns of `step_table` (arm, step, name, mean, low, high, n, prompts) behind those of
            `ALIKE` (model, task, method, ...), whose arms are compared; attributes are taken
            together. Texts that ended before a first token are left out.

        Raises:
            RunError: As `trace`.
            TraceError: No cell has a trace, or no such branch.
        """
        keys = [key for key in self._keys(None, wanted) if self.plan[key].trace != "none"]
        if not keys:
            raise TraceError(f"{self.name} has no finished cell with a trace")
        cells, frames = self.cells[self.cells["key"].isin(keys)], []
        for values, group in cells.groupby([*ALIKE], sort=False):
            chosen = list(group["key"])
            joined = self.trace(chosen)
            assert joined is not None  # these cells have traces
            samples, trace = begun(self.samples(chosen), joined)
            if len(samples):
                steps = step_table(trace, samples, branch)
                alike: dict[str, Any] = dict(zip(ALIKE, values, strict=True))
                frames.append(steps.assign(**alike)[[*ALIKE, *steps]])
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def manifest(self, key: str | None = None) -> Manifest:
        """The manifest of one cell, without texts and trace; arguments and errors as `trace`."""
        key = self._only(key)
        return self.held[key].manifest if key in self.held else read_manifest(self.place(key))

    def cell(self, key: str | None = None) -> FinishedCell:
        """One cell's manifest, samples and trace.

        Args:
            key: By default that of the only cell.

        Raises:
            RunError: It is not finished, or damaged; or no key is given and there are several
                cells.
        """
        key = self._only(key)
        if key in self.held:
            return self.held[key]
        if key not in self.finished:
            raise RunError(self._not_there(key))
        return read_cell(self.place(key))

    def select(self, **wanted: Any) -> Run:
        """The cells whose columns have these values (a list: one of them), finished or not: a run
        like this one.

        Raises:
            RunError: No such column, a value that no cell has, or values that no cell has together.
        """
        table = self.cells
        chosen = pd.Series(True, index=table.index)
        wanted = {column: as_list(value) for column, value in wanted.items()}
        for column, values in wanted.items():
            if column not in table:
                raise RunError(unknown_choice("column", column, table.columns))
            if not values:
                raise RunError(f"{column} is an empty list; give a value, or leave {column} out")
            for each in values:
                if not is_any_of(table[column], [each]).any():
                    there = ", ".join(map(str, dict.fromkeys(table[column])))
                    raise RunError(
                        f"{self.name} has no cell with {column}={each}; {column} may be"
                        f" {there or 'nothing: there is no cell'}"
                    )
            chosen &= is_any_of(table[column], values)
        if wanted and not chosen.any():
            raise RunError(f"{self.name} has no cell with {shown_only(wanted)} together")
        keys = set(table["key"][chosen]) if len(table) else set()
        grids = {
            name: tuple(key for key in of_grid if key in keys)
            for name, of_grid in self.listing.grids.items()
        }
        grids = {name: of_grid for name, of_grid in grids.items() if of_grid}
        return Run(
            self.folder,
            self.listing.model_copy(update={"grids": grids}),
            {key: cell for key, cell in self.plan.items() if key in keys},
            {key: made for key, made in self.held.items() if key in keys},
        )

    def _keys(self, cells: str | Sequence[str] | None, wanted: Mapping[str, Any]) -> list[str]:
        """Keys of the finished cells that are asked for."""
        finished = self.finished
        if cells is None:
            chosen = [key for key in self.select(**wanted).plan if key in finished]
            if wanted and not chosen:
                raise RunError(f"no cell of {self.name} with {shown_only(wanted)} is finished")
            return chosen
        if wanted:
            raise RunError(f"give keys, or values ({shown_only(wanted)}), not both")
        if isinstance(cells, Run):
            raise RunError("a run is not a key; ask the run itself: run.select(...).samples()")
        keys: list[Any] = list(dict.fromkeys(as_list(cells)))
        if missing := [key for key in keys if key not in finished]:
            raise RunError(self._not_there(missing[0]))
        return keys

    def save(self, folder: str | Path, force: bool = False) -> Run:
        """Write the run to a new folder, which appears whole or not at all; the run as read back.

        Cells that are not finished are planned there too: a sweep of their grid goes on with them.

        Args:
            force: Replace a finished run that is there.

        Raises:
            RunError: The folder is finished, is something else, or cannot be written.
        """
        with result_folder(Path(folder), force, is_finished_run) as fresh:
            write_run(fresh, self)
        return load_run(folder)

    def _only(self, key: str | None) -> str:
        if key is None and len(self.plan) != 1:
            raise RunError(
                f"{self.name} has {len(self.plan)} cells; give the key of one (run.cells, or `lapa2"
                " runs`, lists them)"
            )
        return next(iter(self.plan)) if key is None else key

    def _not_there(self, key: str) -> str:
        if key not in self.plan:
            return f"{self.name} has no cell {key!r}; `lapa2 runs {self.name}` lists them"
        where = f"{self.name}: cell {key} ({self.plan[key].description})"
        if self.folder is not None and self.place(key).is_dir():
            return (
                f"{where} is damaged: a file of it is missing or cut short; make it again with the"
                " command that made it"
            )
        return f"{where} is not finished; `lapa2 sweep` with its grid makes it"


def begun(samples: pd.DataFrame, trace: xr.Dataset) -> tuple[pd.DataFrame, xr.Dataset]:
    """Without the texts that ended before a first token, which have no attention."""
    has = samples["n_tokens"].to_numpy() > 0
    numbers = range(int(has.sum()))
    return samples[has].reset_index(drop=True), trace.isel(sample=has).assign_coords(sample=numbers)


def each_once(cells: Mapping[str, Cell]) -> list[str]:
    """Keys of cells that have no text in common: of cells that draw the same texts, and differ in
    samples, prompts, batches or trace alone, the one with the most; of equal ones, with the fullest
    trace."""
    kinds = get_args(TraceKind)
    kept: dict[str, Cell] = {}
    taken: set[tuple[str, str]] = set()
    for key, cell in sorted(
        cells.items(), key=lambda one: (-one[1].n_texts, -kinds.index(one[1].trace))
    ):
        own = {(cell.sampling_key, prompt) for prompt in cell.prompts}
        if not own & taken:
            taken |= own
            kept[key] = cell
    return [key for key in cells if key in kept]


def as_list(value: Any) -> list[Any]:
    """What a column may have: one value, or one of several (a list, an array, a column)."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def shown_only(only: Mapping[str, Any] | None) -> str:
    """A choice of rows or cells in words."""
    return " and ".join(
        f"{column}={' or '.join(map(str, as_list(value)))}"
        for column, value in (only or {}).items()
    )


def is_any_of(column: pd.Series, values: Iterable[Any]) -> pd.Series:
    """Which rows of a column have one of these values, as numbers or as text: "0.50" is 0.5."""
    wanted = list(values)
    same = column.astype(str).isin([str(value) for value in wanted])
    if not pd.api.types.is_numeric_dtype(column):
        return same
    numbers = pd.to_numeric(pd.Series(wanted, dtype=object), errors="coerce").dropna()
    return same | column.isin(numbers)


def write_run(folder: Path, run: Run) -> None:
    """Write a run's plan and finished cells into a folder that is not yet in its place."""
    for cell in run.plan.values():
        write_plan(folder, cell)
    for key in run.finished:
        with atomic_folder(folder / "cells" / key) as place:
            write_cell(place, run.cell(key))
    write_listing(folder, run.listing)


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
    """Whether a folder has plans of cells, and no run.json."""
    return not (folder / LISTING).exists() and any(
        (folder / "plan").glob(f"{'[0-9a-f]' * 16}.json")
    )


def write_listing(folder: Path, listing: Listing) -> None:
    """Write run.json."""
    write_text(folder / LISTING, with_checksums(listing.model_dump_json()))


def is_whole(folder: Path, cell: Cell) -> bool:
    """Whether a folder holds a finished cell whose files can be opened."""
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
    """Whether a cell's files can be opened: a table or trace that was cut short cannot.

    Files are opened again when they have changed (`stamps`).
    """
    import h5py
    import pyarrow.parquet as pq

    try:
        if (
            read_manifest(folder).cell != key
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


OWN = (
    LISTING, "plan", "cells", "parts", "failed", ".lock", f"{TEMPORARY_PREFIX}*", "view.html",
    "report.html", "scores",
    MANIFEST, SAMPLES, TRACE,
)  # fmt: skip
"""What is in the folder of a run."""


def is_finished_run(folder: Path) -> bool:
    """Whether a folder is a run that a command may replace when it is told to
    (`files.result_folder`).

    Raises:
        RunError: It is a run that a sweep has not finished, or is filling; or it holds something
            else.
    """
    if not is_run(folder):
        return False
    refuse_foreign_files(folder, OWN)
    if (folder / LISTING).is_file():
        with locked(folder):
            pass
    try:
        states = load_run(folder).cells["state"]
    except RunError:  # damaged, or of another version
        return True
    if left := int((~states.isin(["finished", "damaged"])).sum()):
        raise RunError(
            f"{folder} is a run with {left} of {pluralize(len(states), 'cell')} not finished"
            f" (`lapa2 runs {folder}`); choose another --out"
        )
    return True


def is_run(folder: Path) -> bool:
    """Whether a folder is a run, also one of another format or with a damaged run.json."""
    if (folder / LISTING).is_file():
        if (folder / "plan").is_dir() and (folder / "cells").is_dir():
            return True
        with suppress(ValueError):
            raw = parse_json(read_text(folder / LISTING))
            return isinstance(raw, dict) and raw.get("kind") == "sweep"
        return False
    try:
        read_manifest(folder)
    except RunError:
        return False
    return True


def load_run(folder: str | Path) -> Run:
    """A run's folder, finished or not; also that of one cell by itself.

    Raises:
        RunError: Not one, of another format, or damaged.
    """
    folder = Path(folder)
    check_name(folder)
    if (folder / MANIFEST).is_file() and not (folder / LISTING).is_file():
        return _lone(folder)
    listing, plan = read_listing(folder), {}
    for key in dict.fromkeys(key for keys in listing.grids.values() for key in keys):
        try:
            plan[key] = read_plan(folder, key)
        except DamagedError as error:
            raise DamagedError(
                f"{error}; the run is of lapa2_interp {listing.lapa2_interp}, this is"
                f" {__version__}; `lapa2 sweep` with the cell's grid"
                f" ({', '.join(listing.with_cell(key))}) writes it anew"
            ) from error
    for _, cell in same_label(plan.values()):
        told = f"{cell.label or cell.arm} ({cell.plain_arm})"
        plan[cell.key] = cell.model_copy(update={"label": told})
    return Run(folder, listing, plan)


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
                " writes it anew"
            )
        raise RunError(f"{folder} is not a run: it has no {LISTING}; {made_by}")
    try:
        raw, _ = without_checksums(read_text(file))
    except ValueError as error:
        raise DamagedError(f"{file} is damaged: {error}; {WRITES_ANEW}") from error
    try:
        if raw.get("kind") != "sweep":
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
            f" damaged, {WRITES_ANEW}"
        ) from error


# --- one cell by itself, and what `lapa2 generate` wrote before its runs had cells


def _lone(folder: Path) -> Run:
    """The run of a folder with a manifest and no run.json.

    One manifest may be about several arms and attributes: each becomes a cell.
    """
    whole = read_cell(folder)
    manifest, plan, held = whole.manifest, {}, {}
    table = whole.samples.reset_index(drop=True)
    for (arm, attribute), rows in table.groupby(["arm", "attribute"], sort=False):
        try:
            cell = _cell_of(manifest, str(arm), str(attribute))
            cell.variant  # noqa: B018
        except (Lapa2Error, ValidationError, KeyError) as error:
            reason = validation_message(error) if isinstance(error, ValidationError) else str(error)
            raise RunError(f"{folder / MANIFEST}: {reason}") from error
        key = manifest.cell or cell.key
        trace = None
        if whole.trace is not None:
            trace = whole.trace.isel(sample=rows.index.to_numpy()).assign_coords(
                sample=range(len(rows))
            )
        own = manifest.model_copy(
            update={
                "cell": key,
                "attributes": (attribute,),
                "arms": {arm: cell.augmentation},
                "branches": {attribute: manifest.branches[str(attribute)]},
                "new_tokens": int(rows["n_tokens"].sum()),
            }
        )
        plan[key], held[key] = cell, FinishedCell(own, rows.reset_index(drop=True), trace)
    return Run(
        folder,
        Listing(lapa2_interp=manifest.lapa2_interp, grids={folder.name: tuple(plan)}),
        plan,
        held,
    )


def _cell_of(manifest: Manifest, arm: str, attribute: str) -> Cell:
    """The settings that a manifest states for one of its arms and attributes; the wording of other
    attributes is the task's."""
    names = {name: Attribute(prefix=name) for name in manifest.attributes}
    if manifest.task in BUILT_IN_TASKS:
        names = load_task(manifest.task).attributes | {}
    task = Task(
        name=manifest.task,
        length_counts_prompt=manifest.length_counts_prompt,
        lengths=(),
        attributes=names,
        prompts=Prompts(texts=manifest.prompts),
    )
    found = Cell.model_construct(
        model=manifest.model.name,
        dtype=manifest.model.dtype,  # type: ignore[arg-type]
        model_class=manifest.model.model_class,
        method=manifest.method,
        parameters=manifest.parameters,
        task=task,
        attribute=attribute,
        augmentation=manifest.arms[arm],
        length=manifest.length,
        samples=manifest.samples,
        seed=manifest.seed,
        top_k=manifest.top_k,
        eos=manifest.eos,
        trace=manifest.trace,
        max_rows=manifest.max_rows,
        doubled_bos=manifest.doubled_bos,
        bar_prefix_words=manifest.bar_prefix_words,
        patterns=manifest.patterns,
        files={},
    )
    return found if arm == found.plain_arm else found.model_copy(update={"label": arm})
