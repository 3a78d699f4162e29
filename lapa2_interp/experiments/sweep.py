"""A run: a folder of finished cells. `sweep` fills it, `load_run` reads it and never generates.

    RUN/run.json                    format, version, and which cells each grid has
    RUN/plan/KEY.json               a cell's resolved configuration
    RUN/cells/KEY/                  a finished cell: manifest.json, samples.parquet, trace.nc (a folder as `lapa2 generate` makes)
    RUN/parts/KEY/N/                a finished group of rows of a cell that is not finished
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
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError
from tqdm import tqdm

from lapa2_interp import __version__
from lapa2_interp.decoding import join_traces, progress_bar
from lapa2_interp.errors import RunError, first_problem, one_of
from lapa2_interp.experiments.engines import Engine, Failed, Job, Opened, Part
from lapa2_interp.experiments.grids import CELL, Cell, Grid
from lapa2_interp.experiments.store import SAMPLES, TRACE, Manifest, Run, read_manifest, read_run, write_run

if TYPE_CHECKING:
    import xarray as xr

FORMAT = 1
"""Of run folders. A run of another format is not read: its cells' keys would mean something else."""


class Listing(BaseModel):
    """run.json."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["sweep"] = "sweep"
    format: int = FORMAT
    lapa2_interp: str = __version__
    """Version of the package that began the run."""
    grids: dict[str, tuple[str, ...]] = {}
    """Keys of each grid's cells."""


class Failure(BaseModel):
    """failed/KEY.json."""

    model_config = ConfigDict(extra="forbid")

    when: datetime
    traceback: str

    @property
    def reason(self) -> str:
        """Its last line."""
        return self.traceback.strip().splitlines()[-1]


# --- writing


@contextmanager
def durable_folder(place: Path) -> Iterator[Path]:
    """A folder that is at `place`, whole and on the disk, when the block has ended; nothing is there before."""
    place.parent.mkdir(parents=True, exist_ok=True)
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
    """Write a file that is whole or not there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = place.with_name(f".writing-{place.name}")
    fresh.write_text(text, encoding="utf-8")
    _flush(fresh)
    fresh.replace(place)
    _flush(place.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes off the run; the operating system lets go when this one ends, however it ends."""
    with (folder / ".lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise RunError(
                f"{folder} is being filled by {file.read().strip() or 'another process'}; wait for it, or give another --out"
            ) from error
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
        """Cells that are there."""
        return {key: cell for key, cell in self.plan.items() if (self.place(key) / SAMPLES).is_file()}

    @property
    def failures(self) -> dict[str, Failure]:
        """Why cells that raised did."""
        found = {}
        for key in self.plan:
            file = self.folder / "failed" / f"{key}.json"
            if file.is_file():
                found[key] = Failure.model_validate_json(file.read_text("utf-8"))
        return found

    def place(self, key: str) -> Path:
        """The folder of a finished cell."""
        return self.folder / "cells" / key

    @cached_property
    def cells(self) -> pd.DataFrame:
        """One row per cell: key, grids, its configuration, state (finished, failed, partly, missing), texts, tokens, seconds."""
        failures, finished, rows = self.failures, self.finished, []
        for key, cell in self.plan.items():
            grids = [name for name, keys in self.listing.grids.items() if key in keys]
            if key in finished:
                state, manifest = "finished", read_manifest(self.place(key))
                made = {"tokens": manifest.new_tokens, "seconds": manifest.seconds, "commit": manifest.commit}
            else:
                parts = (self.folder / "parts" / key).is_dir()
                state, made = "failed" if key in failures else "partly" if parts else "missing", {}
            rows.append(
                {
                    "key": key, "state": state, "grids": ", ".join(grids), **_columns(cell), **made,
                    "why": failures[key].reason if key in failures and state == "failed" else "",
                }
            )  # fmt: skip
        return pd.DataFrame(rows)

    def samples(self, cells: Sequence[str] | None = None) -> pd.DataFrame:
        """The texts of finished cells: one row per text, with the cell's columns (key, model, method, task, arm, ...).

        Args:
            cells: Keys; by default all that are finished.
        """
        frames = [
            pd.read_parquet(self.place(key) / SAMPLES).drop(columns="arm").assign(**_columns(self.plan[key]), cell=key)
            for key in (self.finished if cells is None else cells)
        ]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def trace(self, key: str) -> xr.Dataset | None:
        """The trace of one cell; None if it has none."""
        return self.cell(key).trace

    def cell(self, key: str) -> Run:
        """One cell's manifest, samples and trace.

        Raises:
            RunError: It is not finished, or damaged.
        """
        if key not in self.plan:
            raise RunError(f"{self.folder} has no cell {key!r}; `lapa2 runs {self.folder}` lists them")
        return read_run(self.place(key))


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
        RunError: Not one, or of another version.
    """
    folder = Path(folder)
    file = folder / "run.json"
    if not file.is_file():
        raise RunError(
            f"{folder} is not the folder of a sweep: it has no run.json; `lapa2 sweep GRID --out RUN` makes one"
        )
    try:
        raw = json.loads(file.read_text("utf-8"))
        if raw.get("format") != FORMAT:
            raise RunError(
                f"{folder} is a run of format {raw.get('format')} (lapa2_interp {raw.get('lapa2_interp')}), and this is "
                f"lapa2_interp {__version__}, format {FORMAT}; read it with that version, or sweep into a new folder"
            )
        listing = Listing.model_validate(raw)
        keys = dict.fromkeys(key for keys in listing.grids.values() for key in keys)
        plan = {key: CELL.validate_json((folder / "plan" / f"{key}.json").read_text("utf-8")) for key in keys}
    except (OSError, ValueError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise RunError(f"{folder} is damaged or of another version: {reason}") from error
    for key, cell in plan.items():
        if cell.key != key:
            raise RunError(
                f"{folder}: the configuration of cell {key} gives the key {cell.key} here: it was written by another version "
                f"({listing.lapa2_interp}; this is {__version__}), or changed; sweep into a new folder"
            )
    return SweepRun(folder, listing, plan)


# --- filling


def add_grids(folder: Path, grids: Sequence[Grid]) -> SweepRun:
    """Note grids and their cells in a run, which is made when it is not there.

    Raises:
        RunError: Something else is there, it is of another version, or cannot be written.
    """
    if folder.exists() and not (folder / "run.json").exists() and any(p.name != ".lock" for p in folder.iterdir()):
        raise RunError(f"{folder} exists and is not the folder of a sweep; choose another --out")
    listing = load_run(folder).listing if (folder / "run.json").exists() else Listing()
    for grid in grids:
        for cell in grid.cells:
            file = folder / "plan" / f"{cell.key}.json"
            if not file.is_file():
                durable_file(file, cell.model_dump_json(indent=1) + "\n")
        before = listing.grids.get(grid.name, ())
        listing.grids[grid.name] = tuple(dict.fromkeys([*before, *(cell.key for cell in grid.cells)]))
    durable_file(folder / "run.json", listing.model_dump_json(indent=1) + "\n")
    return load_run(folder)


@dataclass(frozen=True)
class Swept:
    """What a sweep did: cells that were there before, made now, and that failed."""

    before: int
    made: int
    failed: tuple[str, ...]
    seconds: float
    row_tokens: int


def sweep(
    folder: Path,
    grids: Sequence[Grid],
    engine: Engine,
    costs: Mapping[str, int] | None = None,
    notify: Callable[[str], None] = print,
) -> Swept:
    """Finish every cell of the grids in a run folder.

    Args:
        costs: By key, row-tokens of a cell: for the progress bar.
        notify: Told about cells that fail.

    Raises:
        RunError: The folder is somebody else's, or cannot be written (a full disk); what is finished stays.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            run = add_grids(folder, grids)
            for left in folder.glob("*/**/.writing-*"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()
            wanted = list(dict.fromkeys(cell.key for grid in grids for cell in grid.cells))
            return _Sweep(run, wanted, engine, costs or {}, notify).all()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(f"cannot write {folder}: {error.strerror or error}") from error
        raise RunError(
            f"the disk of {folder} is full; every finished cell and group of rows is kept: make room and repeat the command"
        ) from error


class _Sweep:
    """The coordinator: keeps the engine busy, and alone writes."""

    def __init__(
        self,
        run: SweepRun,
        wanted: Sequence[str],
        engine: Engine,
        costs: Mapping[str, int],
        notify: Callable[[str], None],
    ) -> None:
        self.run, self.engine, self.costs, self.notify = run, engine, costs, notify
        finished = run.finished
        self.todo = [run.plan[key] for key in wanted if key not in finished]
        self.before = len(wanted) - len(self.todo)
        self.opened: dict[str, Opened] = {}
        self.left: dict[str, set[int]] = {}
        self.failed: list[str] = []
        self.made = self.row_tokens = 0
        # Cells of one model follow each other, so that a worker seldom loads another.
        self.todo.sort(key=lambda cell: (cell.model, cell.dtype, cell.model_class))

    def all(self) -> Swept:
        began = perf_counter()
        if not self.todo:
            return Swept(self.before, 0, (), 0.0, 0)
        waiting, ready, under_way = deque(self.todo), deque[Job](), 0
        with self._bar() as bar, self.engine as engine:
            while waiting or ready or under_way:
                while under_way < engine.slots and (ready or waiting):
                    engine.submit(ready.popleft() if ready else Job(waiting.popleft()))
                    under_way += 1
                for job, outcome in engine.wait():
                    under_way -= 1
                    ready.extend(self._take(job, outcome, bar))
                    if job.cell.key in self.failed:
                        ready = deque(each for each in ready if each.cell.key != job.cell.key)
        return Swept(self.before, self.made, tuple(self.failed), perf_counter() - began, self.row_tokens)

    def _bar(self) -> tqdm:
        total = sum(self.costs.get(cell.key, 1) for cell in self.todo)
        bar = progress_bar(total, f"{len(self.todo)} cells")
        bar.set_postfix_str(f"0/{len(self.todo)} cells", refresh=False)
        return bar

    def _take(self, job: Job, outcome: Opened | Part | Failed, bar: tqdm) -> list[Job]:
        """Keep an outcome; the jobs it gives rise to."""
        key = job.cell.key
        match outcome:
            case _ if key in self.failed:
                return []
            case Failed():
                self.failed.append(key)
                record = Failure(when=datetime.now(UTC), traceback=outcome.traceback)
                durable_file(self.run.folder / "failed" / f"{key}.json", record.model_dump_json(indent=1) + "\n")
                bar.clear()
                self.notify(f"failed: {job.cell.where} ({key}): {record.reason}")
                return []
            case Opened():
                self._check_same_weights(job.cell, outcome)
                self.opened[key] = outcome
                there = {int(part.name) for part in (self.run.folder / "parts" / key).glob("[0-9]*")}
                self.left[key] = set(range(len(outcome.groups))) - there
                done = sum(outcome.groups[i] for i in there)
                bar.update(self.costs.get(key, 1) * done // sum(outcome.groups))
                if not self.left[key]:
                    self._finish(job.cell, bar)
                return [Job(job.cell, i) for i in sorted(self.left.get(key, ()))]
            case Part():
                assert job.group is not None
                self._keep(key, job.group, outcome)
                sizes = self.opened[key].groups
                cost = self.costs.get(key, 1) * sizes[job.group] // sum(sizes)
                self.row_tokens += cost
                bar.update(cost)
                self.left[key].discard(job.group)
                if not self.left[key]:
                    self._finish(job.cell, bar)
                return []

    def _keep(self, key: str, group: int, part: Part) -> None:
        with durable_folder(self.run.folder / "parts" / key / str(group)) as fresh:
            part.samples.to_parquet(fresh / SAMPLES, index=False)
            if part.trace is not None:
                part.trace.to_netcdf(fresh / TRACE, engine="h5netcdf")
            facts = {"seconds": part.seconds, "problems": part.problems}
            (fresh / "part.json").write_text(json.dumps(facts), encoding="utf-8")

    def _finish(self, cell: Cell, bar: tqdm) -> None:
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
                traces.append(stored.load())
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
        with durable_folder(self.run.place(key)) as fresh:
            write_run(fresh, Run(manifest, table, join_traces(traces, table) if traces else None))
        shutil.rmtree(parts)
        (self.run.folder / "failed" / f"{key}.json").unlink(missing_ok=True)
        self.made += 1
        bar.set_postfix_str(f"{self.made}/{len(self.todo)} cells", refresh=False)

    def _check_same_weights(self, cell: Cell, opened: Opened) -> None:
        """A model whose weights changed since other cells of the run were made does not belong to it."""
        known = self.__dict__.setdefault("_weights", {})
        if cell.model not in known:
            others = (key for key, other in self.run.finished.items() if other.model == cell.model)
            known[cell.model] = next((read_manifest(self.run.place(key)).model.weights for key in others), None)
        now = opened.facts["model"].weights
        known[cell.model] = known[cell.model] or now
        if known[cell.model] != now:
            raise RunError(
                f"{self.run.folder} was made with {cell.model} of {known[cell.model]}, and it is now {now}; sweep into a new folder"
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
