"""Filling a run: `sweep` makes every cell of its grids, and goes on where it stopped.

Everything appears whole or not at all (`files`). So a run may be stopped at any point, and goes on
where it was with the same command; what was made before and after is the same as without the stop.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd
from pydantic import TypeAdapter
from tqdm import tqdm

from lapa2_interp._util.errors import DamagedError, GridError, RunError, pluralize
from lapa2_interp._util.files import (
    TEMPORARY_PREFIX,
    atomic_folder,
    check_name,
    is_damage,
    remove_abandoned,
    remove_folder,
    remove_path,
    remove_temporary,
    sha256_of,
    with_checksums,
    without_checksums,
    write_netcdf,
    write_text,
)
from lapa2_interp._util.parsing import check_regular_file, parse_json, read_text
from lapa2_interp._util.progress import progress_bar
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.loop import join_traces
from lapa2_interp.models.machine import faster_dtype
from lapa2_interp.runs.estimates import cost
from lapa2_interp.runs.grid import Grid, load_grid
from lapa2_interp.runs.jobs import Engine, Failed, Job, Opened, Outcome, Part
from lapa2_interp.runs.locks import locked, writing
from lapa2_interp.runs.manifest import Manifest
from lapa2_interp.runs.run import Run, is_run, load_run
from lapa2_interp.runs.store import (
    LISTING,
    SAMPLES,
    TRACE,
    Failure,
    FinishedCell,
    Listing,
    is_whole,
    lost_listing,
    read_listing,
    read_plan,
    read_trace,
    write_cell,
    write_listing,
    write_plan,
)

OURS = ("plan", "cells", "parts", "failed")
PART = "part.json"
OPENED = "opened.json"
"""Name of the file that says how the groups of an unfinished cell are made."""


def load_grids(
    folder: Path,
    names: Sequence[str],
    changes: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = None,
    device: str | None = None,
    allow_code: bool = False,
    yes: bool = False,
) -> list[Grid]:
    """Load grids for a run folder: a grid that leaves the dtype to the machine gets that of the
    run's cells.

    A run begun in bfloat16 on one machine goes on in bfloat16 on another, so that nothing is made
    twice.

    Args:
        folder: The run, or where it will be.
        names, changes, allow_code, yes: As `runs.grid.load_grid`.
        dtype: What dtype "auto" means; by default that of the grid's cells of a model in the run,
            else that of the run's cells of the model, else what this machine computes faster.
        device: Where cells will be computed.

    Raises:
        GridError: As `load_grid`; or the run has a grid's cells in two dtypes, or in another than
            the one asked for.
        RunError: The folder is not a run, or one of another version.
    """
    listed = _listed_dtypes(folder)

    def auto(grid: str, model: str, named: frozenset[str]) -> str:
        there = listed.get((grid, model), set())
        there = (
            there - named or there
        )  # cells whose block names their dtype do not say what auto was
        found = f"{folder} has cells of {grid} and {model} in {' and '.join(sorted(there))}"
        if dtype is not None and there and dtype not in there:
            raise GridError(
                f"{found}, which --dtype {dtype} would leave behind; leave it out, or sweep into a"
                " new folder"
            )
        if dtype is None and len(there) > 1:
            raise GridError(
                f"{found}; say with which to go on: --dtype {' or --dtype '.join(sorted(there))}"
            )
        others = set().union(*(each for (_, other), each in listed.items() if other == model))
        known = there or (others if len(others) == 1 else set())
        return dtype or next(iter(known), None) or faster_dtype(device)

    return [load_grid(name, changes, auto=auto, allow_code=allow_code, yes=yes) for name in names]


def _listed_dtypes(folder: Path) -> dict[tuple[str, str], set[str]]:
    """Dtypes of a run's cells by grid and model; a damaged plan is ignored, because the sweep
    writes it again."""
    found: dict[tuple[str, str], set[str]] = {}
    for grid, keys in (
        read_listing(folder).grids if (folder / "run.json").is_file() else {}
    ).items():
        for key in keys:
            with suppress(DamagedError):
                cell = read_plan(folder, key)
                found.setdefault((grid, cell.model), set()).add(cell.dtype)
    return found


def add_grids(
    folder: Path, grids: Sequence[Grid], notify: Callable[[str], None] = lambda line: None
) -> Run:
    """Note grids and their cells in a run, which is made when it is not there.

    Args:
        notify: Told about cells that are no longer in a grid.

    Raises:
        GridError: Two grids have one name.
        RunError: Something else is there, it is of another version, or cannot be written.
    """
    names = [grid.name for grid in grids]
    if twice := [name for name in names if names.count(name) > 1]:
        raise GridError(f"two grids have the name {twice[0]}; rename a file, or use two runs")
    there = (folder / "run.json").exists()
    listing = read_listing(folder) if there else Listing()
    before = {key for keys in listing.grids.values() for key in keys}
    for grid in grids:
        for cell in grid.cells:
            write_plan(folder, cell)
        listing.grids[grid.name] = tuple(cell.key for cell in grid.cells)
    write_listing(folder, listing)
    gone = before - {key for keys in listing.grids.values() for key in keys}
    if left := [key for key in gone if (folder / "cells" / key).is_dir()]:
        notify(
            f"{pluralize(len(left), 'finished cell')} of {folder} no longer in a grid, as"
            f" {', '.join(names)} has other cells now: no table or report shows them"
        )
    return load_run(folder)


@dataclass(frozen=True)
class Swept:
    """Result of a sweep: cells that were there before, made now, and that failed.

    Attributes:
        seconds: It took.
        disk: Bytes of the cells made.
        memory: The most bytes that a worker had.
    """

    before: int
    made: int
    failed: tuple[str, ...]
    seconds: float = 0.0
    disk: int = 0
    memory: int = 0


def sweep(
    folder: Path,
    grids: Sequence[Grid],
    engine: Engine,
    notify: Callable[[str], None] = print,
    wanted: Sequence[str] | None = None,
) -> Swept:
    """Finish cells of the grids in a run folder.

    Args:
        notify: Told about cells that fail.
        wanted: Keys of the cells to finish; by default of all. The run notes all as planned.

    Raises:
        RunError: The folder holds something else, or cannot be written (a full disk); what is
            finished stays.
    """
    check_name(folder)
    with writing(folder):
        if (
            folder.is_dir()
            and not (folder / "run.json").exists()
            and not lost_listing(folder)
            and any(not _ours(each) for each in folder.iterdir())
        ):
            kind = (
                "is a run of one cell as earlier versions wrote it, which is read and not filled"
                if is_run(folder)
                else "exists and is not a run"
            )
            raise RunError(f"{folder} {kind}; choose another --out")
        folder.mkdir(parents=True, exist_ok=True)
        if links := [name for name in OURS if (folder / name).is_symlink()]:
            raise RunError(
                f"{folder / links[0]} is a link, which is not followed; put the folder itself there"
            )
    with locked(folder):
        with writing(folder):
            run = add_grids(folder, grids, notify)
            _tidy(run)
        every = list(dict.fromkeys(cell.key for grid in grids for cell in grid.cells))
        return _Sweep(run, every if wanted is None else wanted, engine, notify).all()


def _ours(path: Path) -> bool:
    """True if a path was left by a process that was killed before it wrote run.json."""
    return path.name in (".lock", "plan") or path.name.startswith(TEMPORARY_PREFIX)


def _tidy(run: Run) -> None:
    """Remove what a killed process left unfinished."""
    remove_abandoned(run.home)  # another command may be writing there: scores, a report
    for name in OURS:
        remove_temporary(run.home / name)
    for key, cell in run.plan.items():
        if is_whole(run.place(key), cell):
            remove_path(run.home / "parts" / key)
            (run.home / "failed" / f"{key}.json").unlink(missing_ok=True)


class _Sweep:
    """The coordinator: keeps the engine busy, and is the only one that writes."""

    def __init__(
        self, run: Run, wanted: Sequence[str], engine: Engine, notify: Callable[[str], None]
    ) -> None:
        self.run, self.engine, self.notify = run, engine, notify
        finished = run.finished
        self.todo = [run.plan[key] for key in wanted if key not in finished]
        self.before = len(wanted) - len(self.todo)
        self.costs = {cell.key: cost(cell) for cell in self.todo}
        self.ahead = dict(self.costs)
        self.opened: dict[str, Opened] = {}
        self.left: dict[str, set[int]] = {}
        self.shown: dict[tuple[str, int], int] = {}  # row-tokens of groups under way
        self.failed: list[str] = []
        self.weights: dict[str, str] = {}
        self.made = self.disk = self.memory = 0
        self.inode = run.home.stat().st_ino
        # Cells of one model follow each other, so that a worker seldom loads another.
        self.todo.sort(key=lambda cell: (cell.model, cell.dtype, cell.model_class))

    def all(self) -> Swept:
        began = perf_counter()
        if not self.todo:
            return Swept(self.before, 0, ())
        waiting, ready, under_way = deque(self.todo), deque[Job](), 0
        with (
            progress_bar(sum(self.ahead.values()), f"{len(self.todo)} cells") as bar,
            self.engine as engine,
        ):
            while waiting or ready or under_way:
                while under_way < engine.slots and (ready or waiting):
                    engine.submit(ready.popleft() if ready else Job(waiting.popleft()))
                    under_way += 1
                for job, outcome in engine.wait(partial(self._show, bar)):
                    under_way -= 1
                    with writing(self.run.home):
                        ready.extend(self._take(job, outcome, bar))
                    if job.cell.key in self.failed:
                        ready = deque(each for each in ready if each.cell.key != job.cell.key)
                    state = (
                        f"{self.made}/{len(self.todo)} cells"
                        + f", {len(self.failed)} failed" * bool(self.failed)
                    )
                    bar.set_postfix_str(state, refresh=False)
        seconds = perf_counter() - began
        return Swept(self.before, self.made, tuple(self.failed), seconds, self.disk, self.memory)

    def _show(self, bar: tqdm, job: Job, share: float) -> None:
        """Advance the bar inside a group."""
        if job.group is not None:
            group = job.cell.key, job.group
            now = int(share * self._size(*group))
            bar.update(now - self.shown.get(group, 0))  # less than 0 where its worker has died
            self.shown[group] = now

    def _take(self, job: Job, outcome: Outcome, bar: tqdm) -> list[Job]:
        """Keep an outcome; returns the jobs that follow from it."""
        key = job.cell.key
        home = self.run.home
        shown = 0 if job.group is None else self.shown.pop((key, job.group), 0)
        if not (home / LISTING).is_file() or home.stat().st_ino != self.inode:
            raise RunError(
                f"{home} is gone: it was moved or removed; bring it back and repeat the command,"
                " which goes on from what is there"
            )
        match outcome:
            case _ if key in self.failed:
                bar.update(-shown)
                return []
            case Failed():
                bar.update(-shown)
                self.failed.append(key)
                record = Failure(when=datetime.now(UTC), traceback=outcome.traceback)
                write_text(
                    self.run.home / "failed" / f"{key}.json",
                    record.model_dump_json(indent=1) + "\n",
                )
                bar.total -= self.ahead.pop(key)
                bar.clear()
                self.notify(f"failed: {job.cell.description} ({key}): {record.reason}")
                return []
            case Opened():
                self._check_same_weights(job.cell, outcome.facts["model"].weights)
                there = self._parts(job.cell, outcome)
                self.opened[key], self.left[key] = outcome, set(range(len(outcome.groups))) - there
                for group in there:
                    bar.total -= self._share(key, group)
                if self.left[key]:
                    packing = outcome.facts["model"].prepacking
                    return [Job(job.cell, group, packing) for group in sorted(self.left[key])]
                self._finish(job.cell)
            case Part():
                assert job.group is not None
                self._check_same_weights(job.cell, outcome.weights)
                self._keep(key, job.group, outcome)
                self.memory = max(self.memory, outcome.memory)
                bar.update(self._share(key, job.group) - shown)
                self.left[key].discard(job.group)
                if not self.left[key]:
                    self._finish(job.cell)
        return []

    def _share(self, key: str, group: int) -> int:
        """Row-tokens of a group, which its cell has no longer ahead."""
        share = self._size(key, group)
        self.ahead[key] -= share
        return share

    def _size(self, key: str, group: int) -> int:
        """A group's row-tokens: its share of the cost of its cell."""
        total, sizes = self.costs[key], self.opened[key].groups
        first, last = sum(sizes[:group]), sum(sizes[: group + 1])
        return total * last // sum(sizes) - total * first // sum(sizes)

    def _parts(self, cell: Cell, opened: Opened) -> set[int]:
        """Groups of a cell that are there from an earlier call, if they were made as they would be
        now."""
        folder = self.run.home / "parts" / cell.key
        now = {"groups": opened.groups, "facts": opened.facts, "maker": opened.maker}
        note = TypeAdapter(dict[str, Any]).dump_json(now, indent=1).decode() + "\n"
        if folder.is_symlink():
            folder.unlink()
        if folder.is_dir():
            if _text(folder / OPENED) == note:
                found = sorted(each for each in folder.iterdir() if each.name.isdecimal())
                return {int(each.name) for each in found if self._sound(cell, each)}
            if there := len(list(folder.glob("[0-9]*"))):
                self.notify(
                    f"{cell.description} ({cell.key}): {pluralize(there, 'finished group')} of"
                    f" rows made again; {_changes(folder / OPENED, note)}"
                )
            remove_folder(folder)
        write_text(folder / OPENED, note)
        return set()

    def _sound(self, cell: Cell, folder: Path) -> bool:
        """True if a finished group is as it was written; a damaged one is removed and reported."""
        try:
            read_part(folder)
        except DamagedError as error:
            self.notify(f"{cell.description} ({cell.key}): a group of rows made again; {error}")
            remove_folder(folder)
            return False
        return True

    def _keep(self, key: str, group: int, part: Part) -> None:
        with atomic_folder(self.run.home / "parts" / key / str(group)) as fresh:
            part.samples.to_parquet(fresh / SAMPLES, index=False)
            if part.trace is not None:
                write_netcdf(fresh / TRACE, part.trace)
            facts = {"seconds": part.seconds, "problems": part.problems}
            files = sorted(fresh.iterdir())
            (fresh / PART).write_text(with_checksums(facts, files), encoding="utf-8")

    def _finish(self, cell: Cell) -> None:
        """Join a cell's groups; always from the disk, so that a resumed cell is the same as
        another."""
        key, opened = cell.key, self.opened.pop(cell.key)
        del self.left[key]
        parts = self.run.home / "parts" / key
        groups = [read_part(parts / str(i)) for i in range(len(opened.groups))]
        table = pd.concat([group.samples for group in groups], ignore_index=True)
        table = table.assign(arm=cell.arm)
        # The joined trace may need another type than the part was stored with: NaN is no integer.
        traces = [group.trace.drop_encoding() for group in groups if group.trace is not None]
        manifest = Manifest.of(
            cell,
            opened.facts,
            seconds=opened.seconds + sum(group.seconds for group in groups),
            new_tokens=int(table["n_tokens"].sum()),
            problems=[problem for group in groups for problem in group.problems],
        )
        # Where one of its files was removed, the folder is replaced.
        with atomic_folder(self.run.place(key)) as fresh:
            write_cell(
                fresh, FinishedCell(manifest, table, join_traces(traces, table) if traces else None)
            )
        remove_path(parts)
        (self.run.home / "failed" / f"{key}.json").unlink(missing_ok=True)
        self.made += 1
        self.disk += sum(file.stat().st_size for file in self.run.place(key).iterdir())

    def _check_same_weights(self, cell: Cell, now: str) -> None:
        """Refuse a model whose weights have changed since other texts of the run were made."""
        if cell.model not in self.weights:
            others = (key for key, other in self.run.finished.items() if other.model == cell.model)
            self.weights[cell.model] = next(
                (self.run.manifest(key).model.weights for key in others), now
            )
        if self.weights[cell.model] != now:
            raise RunError(
                f"{self.run.home} was made with {cell.model} of {self.weights[cell.model]}, and it"
                f" is now {now}; sweep into a new folder"
            )


def read_part(folder: Path) -> Part:
    """A finished group of rows.

    Raises:
        DamagedError: A file of it is not what was written.
    """
    try:
        facts, sums = without_checksums(read_text(folder / PART))
        for name in {SAMPLES, TRACE} & sums.keys():
            if sha256_of(folder / name) != sums[name]:
                raise ValueError(f"{name} has another sha256")
        check_regular_file(folder / SAMPLES)
        samples = pd.read_parquet(folder / SAMPLES)
        trace = read_trace(folder / TRACE) if (folder / TRACE).is_file() else None
        return Part(samples, trace, tuple(facts["problems"]), facts["seconds"])
    except (OSError, ValueError, KeyError) as error:
        if not is_damage(error):
            raise
        raise DamagedError(
            f"{folder} is damaged: {error}; the same command makes it again"
        ) from error


def _text(file: Path) -> str | None:
    """A text file; None where there is none."""
    try:
        return read_text(file)
    except (OSError, ValueError):
        return None


def _changes(file: Path, note: str) -> str:
    """Differences between the note of an earlier call and that of this one."""
    try:
        before = _flat(parse_json(read_text(file)))
    except (OSError, ValueError):
        return "nothing says any more how they were made"
    now = _flat(json.loads(note))
    return ", ".join(
        f"{name.rpartition('.')[2]} was {before.get(name)} and is {now.get(name)}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    )


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries by their dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    return {
        inner: leaf
        for key, each in value.items()
        for inner, leaf in _flat(each, f"{name}.{key}".strip(".")).items()
    }
