"""A run: a folder of finished cells. `sweep` fills it, `load_run` reads it and never generates.

    RUN/run.json                    format, version, and which cells each grid has
    RUN/plan/KEY.json               a cell's resolved configuration
    RUN/cells/KEY/                  a finished cell: manifest.json, samples.parquet, trace.nc (a folder as `lapa2 generate` makes)
    RUN/parts/KEY/opened.json       of a cell that is not finished: its groups of rows, and with what they are made
    RUN/parts/KEY/N/                a finished group
    RUN/failed/KEY.json             a cell that raised, with its traceback

Everything appears whole or not at all: files are written aside, flushed to the disk and renamed. So a run may be stopped at any
point, and goes on where it was with the same command; what was made before and after is the same as without the stop.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from tqdm import tqdm

from lapa2_interp import __version__
from lapa2_interp.decoding import join_traces
from lapa2_interp.errors import GridError, RunError, first_problem, one_of
from lapa2_interp.experiments.engines import Engine, Failed, Job, Opened, Outcome, Part
from lapa2_interp.experiments.estimates import cost
from lapa2_interp.experiments.grids import CELL, Cell, Grid, load_grid
from lapa2_interp.experiments.store import (
    MANIFEST,
    SAMPLES,
    TRACE,
    Manifest,
    Run,
    read_manifest,
    read_run,
    write_run,
    write_trace,
)
from lapa2_interp.machine import faster_dtype
from lapa2_interp.progress import progress_bar

if TYPE_CHECKING:
    import xarray as xr

FORMAT = 1
"""Of run folders. A run of another format is not read: its cells' keys would mean something else."""
OURS = ("plan", "cells", "parts", "failed")
STATES = ("finished", "failed", "partly", "damaged", "missing")
"""Of a cell. Damaged: a file of a finished one was taken away or cut short; a sweep makes it anew."""
OPENED = "opened.json"
"""How the groups of an unfinished cell are made."""


class Listing(BaseModel):
    """run.json."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["sweep"] = "sweep"
    format: int = FORMAT
    lapa2_interp: str = __version__
    """Version of the package that began the run."""
    grids: dict[str, tuple[str, ...]] = {}
    """Keys of each grid's cells."""

    def with_cell(self, key: str) -> list[str]:
        """Names of the grids that have a cell."""
        return [name for name, keys in self.grids.items() if key in keys]


class Failure(BaseModel):
    """failed/KEY.json: why the last attempt at a cell raised."""

    model_config = ConfigDict(extra="forbid")

    when: datetime
    """UTC."""
    traceback: str
    """Of the worker; its last line is the error."""

    @property
    def reason(self) -> str:
        """Its last line."""
        return self.traceback.strip().splitlines()[-1]


# --- writing


@contextmanager
def durable_folder(place: Path) -> Iterator[Path]:
    """A folder that is at `place`, whole and on the disk, when the block has ended; nothing is there before."""
    _durable_parents(place)
    fresh = Path(tempfile.mkdtemp(prefix=".writing-", dir=place.parent))
    try:
        yield fresh
        for file in fresh.iterdir():
            _flush(file)
        _flush(fresh)
        fresh.chmod(0o755)
        fresh.rename(place)
        _flush(place.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def durable_file(place: Path, text: str) -> None:
    """Write a file that is whole or not there; one that was there stays until then."""
    _durable_parents(place)
    fresh = place.with_name(f".writing-{place.name}")
    try:
        fresh.write_text(text, encoding="utf-8")
        _flush(fresh)
        fresh.replace(place)
        _flush(place.parent)
    finally:
        fresh.unlink(missing_ok=True)


def _durable_parents(place: Path) -> None:
    for folder in [each for each in reversed(place.parents) if not each.is_dir()]:
        folder.mkdir(exist_ok=True)
        _flush(folder.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not (error.errno == errno.EINVAL and path.is_dir()):  # what some network disks say of folders
            raise
    finally:
        os.close(handle)


def _remove(folder: Path) -> None:
    """Take a folder away whole: a process that dies in the middle leaves none that looks like a whole one."""
    aside = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
    folder.rename(aside / folder.name)
    shutil.rmtree(aside)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Say what an operating system has against writing a run.

    Raises:
        RunError: The disk is full, or the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(f"cannot write {folder}: {error.strerror or error}") from error
        raise RunError(
            f"the disk of {folder} is full; every finished cell and group of rows is kept: make room and repeat the command"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes off the run; the operating system lets go when this one ends, however it ends."""
    with _writing(folder):
        file = (folder / ".lock").open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise RunError(
                f"{folder} is being filled by {file.read().strip() or 'another process'}; wait for it, or give another --out"
            ) from error
        with _writing(folder):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield


# --- reading


@dataclass(frozen=True)
class SweepRun:
    """A run folder, read. Nothing here generates.

    Attributes:
        folder: Where it is.
        listing: run.json.
        plan: Every cell by its key.
    """

    folder: Path
    listing: Listing
    plan: dict[str, Cell]

    @property
    def finished(self) -> dict[str, Cell]:
        """Cells that are there, now."""
        return {key: cell for key, cell in self.plan.items() if _is_whole(self.place(key), cell)}

    @property
    def failures(self) -> dict[str, Failure]:
        """Why cells that are not finished raised when they were last tried."""
        found, finished = {}, self.finished
        for key in self.plan.keys() - finished.keys():
            with suppress(FileNotFoundError):  # never tried, or tried again meanwhile
                text = (self.folder / "failed" / f"{key}.json").read_text("utf-8")
                try:
                    found[key] = Failure.model_validate_json(text)
                except ValidationError as error:
                    raise RunError(f"{self.folder}/failed/{key}.json is damaged: {first_problem(error)}") from error
        return {key: found[key] for key in self.plan if key in found}

    def place(self, key: str) -> Path:
        """The folder of a finished cell."""
        return self.folder / "cells" / key

    @cached_property
    def cells(self) -> pd.DataFrame:
        """One row per cell: key, state (of STATES), grids, its configuration, and of a finished one tokens, seconds and commit,
        of a failed one why. As it is when first asked for."""
        finished, failures, rows = self.finished, self.failures, []
        for key, cell in self.plan.items():
            if key in finished:
                state, manifest = "finished", read_manifest(self.place(key))
                made = {"tokens": manifest.new_tokens, "seconds": manifest.seconds, "commit": manifest.commit}
            else:
                parts, damaged = (self.folder / "parts" / key).is_dir(), self.place(key).is_dir()
                state = "failed" if key in failures else "partly" if parts else "damaged" if damaged else "missing"
                made = {}
            rows.append(
                {
                    "key": key, "state": state, "grids": ", ".join(self.listing.with_cell(key)), **_columns(cell), **made,
                    "why": failures[key].reason if key in failures and state == "failed" else "",
                }
            )  # fmt: skip
        return pd.DataFrame(rows)

    def samples(self, cells: Sequence[str] | None = None) -> pd.DataFrame:
        """The texts of finished cells: one row per text, with its cell's key (`cell`) and columns (model, method, arm, ...).

        Args:
            cells: Keys; by default all that are finished.

        Raises:
            RunError: A cell is not finished, or damaged.
        """
        finished, frames = self.finished, []
        for key in finished if cells is None else cells:
            if key not in finished:
                raise RunError(self._not_there(key))
            try:
                table = pd.read_parquet(self.place(key) / SAMPLES)
            except (OSError, ValueError) as error:
                raise RunError(
                    f"{self.place(key) / SAMPLES} is damaged; remove its folder, and the sweep makes the cell again"
                ) from error
            frames.append(table.drop(columns="arm").assign(**_columns(self.plan[key]), cell=key))
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def trace(self, key: str) -> xr.Dataset | None:
        """The trace of one cell; None if it has none."""
        return self.cell(key).trace

    def cell(self, key: str) -> Run:
        """One cell's manifest, samples and trace.

        Raises:
            RunError: It is not finished, or damaged.
        """
        if key not in self.finished:
            raise RunError(self._not_there(key))
        return read_run(self.place(key))

    def _not_there(self, key: str) -> str:
        if key not in self.plan:
            return f"{self.folder} has no cell {key!r}; `lapa2 runs {self.folder}` lists them"
        return (
            f"{self.folder}: cell {key} ({self.plan[key].where}) is not finished; `lapa2 sweep` with its grid makes it"
        )


def _is_whole(folder: Path, cell: Cell) -> bool:
    files = [folder / name for name in (MANIFEST, SAMPLES, TRACE)[: 2 if cell.trace == "none" else 3]]
    try:
        stamps = tuple((each.st_size, each.st_mtime_ns) for each in map(os.stat, files))
    except OSError:
        return False
    return _are_sound(folder.resolve(), cell.key, cell.samples * len(cell.task.prompts.texts), stamps)


@lru_cache(maxsize=8192)
def _are_sound(folder: Path, key: str, texts: int, stamps: tuple[tuple[int, int], ...]) -> bool:
    """Whether a cell's files can be opened: a table or trace that was cut short cannot. They are looked at again when changed."""
    import h5py
    import pyarrow.parquet as pq

    try:
        if read_manifest(folder).cell != key or pq.read_metadata(folder / SAMPLES).num_rows != texts:
            return False
        if len(stamps) > 2:
            h5py.File(folder / TRACE, "r").close()
    except (RunError, OSError, ValueError):
        return False
    return True


def _columns(cell: Cell) -> dict[str, Any]:
    """A cell's configuration as columns of a tidy table."""
    rule = cell.augmentation
    return {
        "model": cell.model, "dtype": cell.dtype, "task": cell.task.name, "attribute": cell.attribute, "method": cell.method,
        "variant": cell.variant, "arm": cell.arm, "alpha": rule.alpha if rule else 0.0,
        "law": rule.law if rule else "", "layers": str(rule.layers) if rule else "",
        "profile": rule.profile if rule else "", "max_length": cell.length, "samples": cell.samples, "seed": cell.seed,
    }  # fmt: skip


def load_run(folder: str | Path) -> SweepRun:
    """A run folder that `lapa2 sweep` makes, finished or not.

    Raises:
        RunError: Not one, of another version, or damaged.
    """
    folder = Path(folder)
    listing, plan = _listing(folder), {}
    for key in dict.fromkeys(key for keys in listing.grids.values() for key in keys):
        file = folder / "plan" / f"{key}.json"
        try:
            plan[key] = CELL.validate_json(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            again = f"`lapa2 sweep` with the cell's grid ({', '.join(listing.with_cell(key))}) writes it anew"
            if isinstance(error, FileNotFoundError):
                raise RunError(f"{file} is missing; {again}") from error
            reason = first_problem(error) if isinstance(error, ValidationError) else str(error)
            raise RunError(
                f"{file} is damaged or of another version: {reason}; if damaged, remove it and {again}"
            ) from error
    for key, cell in plan.items():
        if cell.key != key:
            raise RunError(
                f"{folder}: the configuration of cell {key} gives the key {cell.key} here: it was written by another version "
                f"({listing.lapa2_interp}; this is {__version__}), or changed; sweep into a new folder"
            )
    return SweepRun(folder, listing, plan)


def finished_of(folder: Path, cells: Mapping[str, Cell]) -> dict[str, Cell]:
    """Those of these cells, by key, that a run has; none where there is no run.

    Raises:
        RunError: What is there is no run, or one of another version.
    """
    if not (folder / "run.json").is_file():
        return {}
    _listing(folder)
    return {key: cell for key, cell in cells.items() if _is_whole(folder / "cells" / key, cell)}


def _listing(folder: Path) -> Listing:
    file = folder / "run.json"
    if not file.is_file():
        if not folder.exists():
            raise RunError(f"there is no folder {folder}; `lapa2 sweep GRID --out RUN` makes one")
        hint = "`lapa2 sweep GRID --out RUN` makes one"
        if (folder / MANIFEST).is_file():
            hint = f"it is a run of `lapa2 generate`: `lapa2 trace {folder}` and `lapa2 score {folder}` read it"
        raise RunError(f"{folder} is not the folder of a sweep: it has no run.json; {hint}")
    try:
        raw = json.loads(file.read_text("utf-8"))
        if not isinstance(raw, dict) or raw.get("kind") != "sweep":
            raise RunError(f"{folder} is not the folder of a sweep: its run.json is something else's")
        if raw.get("format") != FORMAT:
            raise RunError(
                f"{folder} is a run of format {raw.get('format')} (lapa2_interp {raw.get('lapa2_interp')}), and this is "
                f"lapa2_interp {__version__}, format {FORMAT}; read it with that version, or sweep into a new folder"
            )
        return Listing.model_validate(raw)
    except (OSError, ValueError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise RunError(f"{folder} is damaged or of another version: {reason}") from error


# --- filling


def load_grids(
    folder: Path,
    names: Sequence[str],
    changes: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = None,
    device: str | None = None,
) -> list[Grid]:
    """Grids as they go on in a run folder: where they leave the dtype to the machine, it is that of the cells the run has.

    A run begun in bfloat16 on one machine goes on in bfloat16 on another, so that nothing is made twice.

    Args:
        folder: The run, or where it will be.
        names, changes: As `grids.load_grid`.
        dtype: What dtype "auto" means; by default that of the grid's cells of a model in the run, else that of the run's cells
            of the model, else what this machine computes faster.
        device: Where cells will be computed.

    Raises:
        GridError: As `load_grid`; or the run has a grid's cells in two dtypes, or in another than the one asked for.
        RunError: The folder is not a run, or one of another version.
    """
    listed = _listed_dtypes(folder)

    def auto(grid: str, model: str, named: frozenset[str]) -> str:
        there = listed.get((grid, model), set())
        there = there - named or there  # cells whose block names their dtype do not say what auto was
        found = f"{folder} has cells of {grid} and {model} in {' and '.join(sorted(there))}"
        if dtype is not None and there and dtype not in there:
            raise GridError(
                f"{found}, which --dtype {dtype} would leave behind; leave it out, or sweep into a new folder"
            )
        if dtype is None and len(there) > 1:
            raise GridError(f"{found}; say with which to go on: --dtype {' or --dtype '.join(sorted(there))}")
        others = set().union(*(each for (_, other), each in listed.items() if other == model))
        known = there or (others if len(others) == 1 else set())
        return dtype or next(iter(known), None) or faster_dtype(device)

    return [load_grid(name, changes, auto=auto) for name in names]


def _listed_dtypes(folder: Path) -> dict[tuple[str, str], set[str]]:
    """Dtypes of a run's cells by grid and model; a damaged plan is passed over, as the sweep writes it anew."""
    found: dict[tuple[str, str], set[str]] = {}
    for grid, keys in (_listing(folder).grids if (folder / "run.json").is_file() else {}).items():
        for key in keys:
            with suppress(OSError, ValueError):
                cell = CELL.validate_json((folder / "plan" / f"{key}.json").read_text("utf-8"))
                found.setdefault((grid, cell.model), set()).add(cell.dtype)
    return found


def add_grids(folder: Path, grids: Sequence[Grid]) -> SweepRun:
    """Note grids and their cells in a run, which is made when it is not there.

    Raises:
        RunError: Something else is there, it is of another version, or cannot be written.
    """
    there = (folder / "run.json").exists()
    listing = _listing(folder) if there else Listing()
    if there and listing.lapa2_interp != __version__:
        raise RunError(
            f"{folder} was begun by lapa2_interp {listing.lapa2_interp}, and this is {__version__}, which may make other texts; "
            "finish it with that version, or sweep into a new folder"
        )
    for grid in grids:
        for cell in grid.cells:
            file = folder / "plan" / f"{cell.key}.json"
            if not file.is_file():
                durable_file(file, cell.model_dump_json(indent=1) + "\n")
        listing.grids[grid.name] = tuple(cell.key for cell in grid.cells)
    durable_file(folder / "run.json", listing.model_dump_json(indent=1) + "\n")
    return load_run(folder)


@dataclass(frozen=True)
class Swept:
    """What a sweep did: cells that were there before, made now, and that failed."""

    before: int
    made: int
    failed: tuple[str, ...]
    seconds: float


def sweep(folder: Path, grids: Sequence[Grid], engine: Engine, notify: Callable[[str], None] = print) -> Swept:
    """Finish every cell of the grids in a run folder.

    Args:
        notify: Told about cells that fail.

    Raises:
        RunError: The folder is somebody else's, or cannot be written (a full disk); what is finished stays.
    """
    with _writing(folder):
        if folder.is_dir() and not (folder / "run.json").exists() and any(not _ours(each) for each in folder.iterdir()):
            raise RunError(f"{folder} exists and is not the folder of a sweep; choose another --out")
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        with _writing(folder):
            run = add_grids(folder, grids)
            _tidy(run)
        wanted = list(dict.fromkeys(cell.key for grid in grids for cell in grid.cells))
        return _Sweep(run, wanted, engine, notify).all()


def _ours(path: Path) -> bool:
    """What a process that was killed before it wrote run.json leaves."""
    return path.name in (".lock", "plan") or path.name.startswith(".writing-")


def _tidy(run: SweepRun) -> None:
    """Take away what a process that was killed left half done."""
    ours = [run.folder.glob(".writing-*"), *((run.folder / name).rglob(".writing-*") for name in OURS)]
    for left in [each for found in ours for each in found]:
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
    for key, cell in run.plan.items():
        if _is_whole(run.place(key), cell):
            shutil.rmtree(run.folder / "parts" / key, ignore_errors=True)
            (run.folder / "failed" / f"{key}.json").unlink(missing_ok=True)


class _Sweep:
    """The coordinator: keeps the engine busy, and alone writes."""

    def __init__(self, run: SweepRun, wanted: Sequence[str], engine: Engine, notify: Callable[[str], None]) -> None:
        self.run, self.engine, self.notify = run, engine, notify
        finished = run.finished
        self.todo = [run.plan[key] for key in wanted if key not in finished]
        self.before = len(wanted) - len(self.todo)
        self.costs = {cell.key: cost(cell) for cell in self.todo}
        self.ahead = dict(self.costs)
        self.opened: dict[str, Opened] = {}
        self.left: dict[str, set[int]] = {}
        self.failed: list[str] = []
        self.weights: dict[str, str] = {}
        self.made = 0
        # Cells of one model follow each other, so that a worker seldom loads another.
        self.todo.sort(key=lambda cell: (cell.model, cell.dtype, cell.model_class))

    def all(self) -> Swept:
        began = perf_counter()
        if not self.todo:
            return Swept(self.before, 0, (), 0.0)
        waiting, ready, under_way = deque(self.todo), deque[Job](), 0
        with progress_bar(sum(self.ahead.values()), f"{len(self.todo)} cells") as bar, self.engine as engine:
            while waiting or ready or under_way:
                while under_way < engine.slots and (ready or waiting):
                    engine.submit(ready.popleft() if ready else Job(waiting.popleft()))
                    under_way += 1
                for job, outcome in engine.wait():
                    under_way -= 1
                    with _writing(self.run.folder):
                        ready.extend(self._take(job, outcome, bar))
                    if job.cell.key in self.failed:
                        ready = deque(each for each in ready if each.cell.key != job.cell.key)
                    state = f"{self.made}/{len(self.todo)} cells" + f", {len(self.failed)} failed" * bool(self.failed)
                    bar.set_postfix_str(state, refresh=False)
        return Swept(self.before, self.made, tuple(self.failed), perf_counter() - began)

    def _take(self, job: Job, outcome: Outcome, bar: tqdm) -> list[Job]:
        """Keep an outcome; the jobs it gives rise to."""
        key = job.cell.key
        match outcome:
            case _ if key in self.failed:
                return []
            case Failed():
                self.failed.append(key)
                record = Failure(when=datetime.now(UTC), traceback=outcome.traceback)
                durable_file(self.run.folder / "failed" / f"{key}.json", record.model_dump_json(indent=1) + "\n")
                bar.total -= self.ahead.pop(key)
                bar.clear()
                self.notify(f"failed: {job.cell.where} ({key}): {record.reason}")
                return []
            case Opened():
                self._check_same_weights(job.cell, outcome)
                there = self._parts(key, outcome)
                self.opened[key], self.left[key] = outcome, set(range(len(outcome.groups))) - there
                for group in there:
                    bar.total -= self._share(key, group)
                if self.left[key]:
                    return [Job(job.cell, group) for group in sorted(self.left[key])]
                self._finish(job.cell)
            case Part():
                assert job.group is not None
                self._keep(key, job.group, outcome)
                share = self._share(key, job.group)
                bar.update(share)
                self.left[key].discard(job.group)
                if not self.left[key]:
                    self._finish(job.cell)
        return []

    def _share(self, key: str, group: int) -> int:
        """Row-tokens of a group, of which the bar shows no more than its cell has ahead."""
        total, sizes = self.costs[key], self.opened[key].groups
        share = total * sum(sizes[: group + 1]) // sum(sizes) - total * sum(sizes[:group]) // sum(sizes)
        self.ahead[key] -= share
        return share

    def _parts(self, key: str, opened: Opened) -> set[int]:
        """Groups of a cell that are there from an earlier call, if they were made as they would be now."""
        folder = self.run.folder / "parts" / key
        now = {"groups": opened.groups, "facts": opened.facts}
        note = TypeAdapter(dict[str, Any]).dump_json(now, indent=1).decode() + "\n"
        if folder.is_dir():
            if (folder / OPENED).is_file() and (folder / OPENED).read_text("utf-8") == note:
                return {int(each.name) for each in folder.glob("[0-9]*")}
            _remove(folder)
        durable_file(folder / OPENED, note)
        return set()

    def _keep(self, key: str, group: int, part: Part) -> None:
        with durable_folder(self.run.folder / "parts" / key / str(group)) as fresh:
            part.samples.to_parquet(fresh / SAMPLES, index=False)
            if part.trace is not None:
                write_trace(fresh / TRACE, part.trace)
            facts = {"seconds": part.seconds, "problems": part.problems}
            (fresh / "part.json").write_text(json.dumps(facts), encoding="utf-8")

    def _finish(self, cell: Cell) -> None:
        """Join a cell's groups; always from the disk, so that a resumed cell is the same as another."""
        import xarray as xr

        key, opened = cell.key, self.opened.pop(cell.key)
        del self.left[key]
        parts = self.run.folder / "parts" / key
        folders = [parts / str(i) for i in range(len(opened.groups))]
        table = pd.concat([pd.read_parquet(folder / SAMPLES) for folder in folders], ignore_index=True).assign(
            arm=cell.arm
        )
        traces = []
        for folder in folders if cell.trace != "none" else []:
            with xr.open_dataset(folder / TRACE, engine="h5netcdf") as stored:
                # The joined trace may need another type than the part was stored with: NaN is no integer.
                traces.append(stored.load().drop_encoding())
        facts = [json.loads((folder / "part.json").read_text("utf-8")) for folder in folders]
        manifest = Manifest(
            created=datetime.now(UTC),
            cell=key,
            method=cell.method,
            parameters=cell.parameters,
            task=cell.task.name,
            attributes=(cell.attribute,),
            prompts=cell.task.prompts.texts,
            arms={cell.arm: cell.augmentation},
            length=cell.length,
            length_counts_prompt=cell.task.length_counts_prompt,
            samples=cell.samples,
            seed=cell.seed,
            top_k=cell.top_k,
            eos=cell.eos,
            doubled_bos=cell.doubled_bos,
            max_rows=cell.max_rows,
            trace=cell.trace,
            seconds=round(opened.seconds + sum(each["seconds"] for each in facts), 3),
            new_tokens=int(table["n_tokens"].sum()),
            problems=tuple(problem for each in facts for problem in each["problems"]),
            **opened.facts,
        )
        place = self.run.place(key)
        if place.exists():  # a file of it was taken away
            _remove(place)
        with durable_folder(place) as fresh:
            write_run(fresh, Run(manifest, table, join_traces(traces, table) if traces else None))
        shutil.rmtree(parts)
        (self.run.folder / "failed" / f"{key}.json").unlink(missing_ok=True)
        self.made += 1

    def _check_same_weights(self, cell: Cell, opened: Opened) -> None:
        """A model whose weights changed since other cells of the run were made does not belong to it."""
        now = opened.facts["model"].weights
        if cell.model not in self.weights:
            others = (key for key, other in self.run.finished.items() if other.model == cell.model)
            self.weights[cell.model] = next((read_manifest(self.run.place(key)).model.weights for key in others), now)
        if self.weights[cell.model] != now:
            raise RunError(
                f"{self.run.folder} was made with {cell.model} of {self.weights[cell.model]}, and it is now {now}; sweep into a "
                "new folder"
            )


def pick(run: SweepRun, **wanted: Any) -> list[str]:
    """Keys of the cells whose columns have these values (a list: one of them), finished or not.

    Raises:
        RunError: No such column.
    """
    table = run.cells
    chosen = pd.Series(True, index=table.index)
    for column, value in wanted.items():
        if column not in table:
            raise RunError(one_of("column", column, table.columns))
        chosen &= table[column].isin(value if isinstance(value, list | tuple | set) else [value])
    return list(table["key"][chosen])
