"""Filling a run: `fill_run` makes every cell of its grids, and resumes where it stopped.

A run is its finished batches, each of which appears whole or not at all. So a sweep may be stopped
at any point, and resumes with the same command; what it makes is the same as without the stop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

from filelock import Timeout
from tqdm import tqdm

from lapa2_interp._util.same_inputs import check_same_inputs
from lapa2_interp._util.terminal import format_bytes, format_duration
from lapa2_interp.commands import command
from lapa2_interp.errors import DamagedError, GridError, RunError, parameter, pluralize
from lapa2_interp.files import (
    TEMPORARY_PREFIX,
    acquire_lock,
    check_name,
    remove_abandoned,
    remove_path,
    write_json,
)
from lapa2_interp.generation.cell import Cell
from lapa2_interp.models.prepacked import Prepacking
from lapa2_interp.progress import CountingBar, progress_bar
from lapa2_interp.runs.engines import Engine, Outcome, WorkerLost
from lapa2_interp.runs.estimates import row_tokens_of
from lapa2_interp.runs.grid import Grid
from lapa2_interp.runs.manifest import BatchRecord
from lapa2_interp.runs.run import Run, load_run
from lapa2_interp.runs.store import (
    CELLS,
    FAILED,
    LISTING,
    Failure,
    Listing,
    agree,
    batch_numbers,
    check_batch,
    earlier_keys,
    lost_listing,
    read_listing,
    remove_batches,
    write_batch,
    write_cell,
    write_listing,
    writing,
)

ATTEMPTS = 3
"""Number of times a batch is submitted if its workers die, and that a worker is started without
success."""
LOOK = 5.0
"""Seconds after which the sweep looks again for room on a cluster."""
LOCK = ".lock"
"""Name of the lock of a run's listing, and of each of its cells while a sweep makes it."""


@dataclass(frozen=True)
class Swept:
    """Result of a sweep: numbers of cells.

    Attributes:
        before: Finished before.
        made: Finished now.
        failed: Keys of those that failed.
        elsewhere: Being made by another sweep.
        seconds: It took.
        disk: Bytes of the cells made.
        memory: The most bytes that a worker had.
        dry_run: Nothing was to be made.
        folder: The run's.
    """

    before: int
    made: int
    failed: tuple[str, ...]
    elsewhere: int = 0
    seconds: float = 0.0
    disk: int = 0
    memory: int = 0
    dry_run: bool = False
    folder: Path | None = None

    def summary(self) -> str:
        """What was made, in up to three lines."""
        if self.dry_run:
            return f"{pluralize(self.before, 'cell')} there, and none made: {self.folder}"
        lines = [
            f"{pluralize(self.made, 'cell')} made in {format_duration(self.seconds)}, {self.before}"
            f" were there: {self.folder}"
        ]
        if self.made:
            lines.append(
                f"{format_bytes(self.disk)} on disk, at most {format_bytes(self.memory)} of memory"
                " a worker"
            )
        if self.elsewhere:
            lines.append(
                f"{pluralize(self.elsewhere, 'cell')} being made by another sweep of {self.folder}"
            )
        return "\n".join(lines)


def open_run(
    folder: Path, grids: Sequence[Grid], notify: Callable[[str], None] = lambda line: None
) -> Run:
    """Note grids and their cells in a run, which is made when it is not there.

    Args:
        notify: Told about cells that are in no grid now.

    Raises:
        GridError: Two grids have one name.
        RunError: Something else is there, it is of another version, or cannot be written.
    """
    names = [grid.name for grid in grids]
    if twice := [name for name in names if names.count(name) > 1]:
        raise GridError(f"two grids have the name {twice[0]}; rename a file, or use two runs")
    check_name(folder)
    names_of_run = (LISTING, LOCK, CELLS)
    with writing(folder):
        if (
            folder.is_dir()
            and not (folder / LISTING).exists()
            and not lost_listing(folder)
            and any(
                entry.name not in names_of_run and not entry.name.startswith(TEMPORARY_PREFIX)
                for entry in folder.iterdir()
            )
        ):
            raise RunError(f"{folder} exists and is not a run; choose another {parameter('out')}")
        folder.mkdir(parents=True, exist_ok=True)
    for path in (folder / CELLS, *(folder / CELLS / c.key for grid in grids for c in grid.cells)):
        if path.is_symlink():
            raise RunError(f"{path} is a link, which is not followed; put the folder itself there")
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file in the place of a folder; remove it")
    with writing(folder), acquire_lock(folder / LOCK, timeout=-1.0):
        remove_abandoned(folder)
        listing = read_listing(folder) if (folder / LISTING).exists() else Listing()
        # A label that another grid of the run may have given stays.
        labelled_elsewhere = {
            key for name, keys in listing.grids.items() if name not in names for key in keys
        }
        labelled_elsewhere |= {cell.key for grid in grids for cell in grid.cells if cell.label}
        for grid in grids:
            for cell in grid.cells:
                write_cell(
                    folder / CELLS / cell.key, cell, keep_label=cell.key in labelled_elsewhere
                )
            listing.grids[grid.name] = tuple(cell.key for cell in grid.cells)
        write_listing(folder, listing)
    run = load_run(folder, earlier=True)
    if left := [key for key in run.by_key if not listing.with_cell(key)]:
        arms = dict.fromkeys(run.by_key[key].description for key in left)
        some_arms = "; ".join(list(arms)[:2]) + "; ..." * (len(arms) > 2)
        notify(
            f"{pluralize(len(left), 'cell')} of an earlier grid {'is' if len(left) == 1 else 'are'}"
            f" in {folder} too, and in no table or report: {some_arms};"
            f" `{command('runs', folder)}` lists them, and with --remove-earlier removes them"
        )
    return load_run(folder)


def remove_earlier_cells(
    folder: Path, notify: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Remove the cells of a run that no grid of it has now, with their texts and traces.

    Args:
        notify: Told about a cell that is kept, because another sweep makes it.

    Returns:
        Keys of the removed cells.

    Raises:
        RunError: The folder is not a run, or cannot be written.
    """
    removed = []
    with writing(folder), acquire_lock(folder / LOCK, timeout=-1.0):
        for key in earlier_keys(folder, read_listing(folder)):
            cell_folder = folder / CELLS / key
            try:
                with acquire_lock(cell_folder / LOCK):
                    remove_batches(cell_folder)
                    remove_path(cell_folder)
            except Timeout:
                notify(f"{key} is being made by another sweep, and stays")
            else:
                removed.append(key)
    return removed


def fill_run(
    folder: Path,
    grids: Sequence[Grid],
    engine: Engine,
    notify: Callable[[str], None] = print,
    wanted: Sequence[str] | None = None,
) -> Swept:
    """Finish cells of the grids in a run folder.

    Several sweeps may fill one folder: a cell belongs to the sweep that has begun it.

    Args:
        notify: Told about cells that fail, and batches that are made again.
        wanted: Keys of the cells to finish; by default of all. The run notes all as planned.

    Raises:
        RunError: The folder holds something else, or cannot be written (a full disk); what is
            finished stays.
    """
    began = perf_counter()
    run = open_run(folder, grids, notify)
    every = list(dict.fromkeys(cell.key for grid in grids for cell in grid.cells))
    keys = every if wanted is None else wanted
    with writing(folder):
        todo = [
            run.by_key[key]
            for key in keys
            if run.state(key) != "finished" or _missing(_sound_records(run, key))
        ]
    n_finished = len(keys) - len(todo)
    if not todo:
        return Swept(n_finished, 0, (), folder=folder)
    # Cells of one model follow each other, so that a worker seldom loads another.
    todo.sort(key=lambda cell: (cell.model, cell.dtype, cell.model_class, cell.start))
    total = sum(map(row_tokens_of, todo))
    with progress_bar(total, pluralize(len(todo), "cell"), "row-token") as bar, engine:
        progress = _Filling(run, todo, engine, notify, bar)
        progress.all()
    return Swept(
        n_finished + progress.there,
        progress.made,
        tuple(progress.failed),
        progress.elsewhere,
        perf_counter() - began,
        progress.disk,
        progress.memory,
        folder=folder,
    )


def _sound_records(
    run: Run, key: str, notify: Callable[[str], None] = lambda line: None
) -> dict[int, BatchRecord]:
    """Records of a cell's batches whose files are as they were written; a damaged batch is
    reported. What dead processes left beside them is removed. Where the records do not count the
    cell's texts, nobody knows which of them is wrong, and all are made again."""
    records: dict[int, BatchRecord] = {}
    cell = run.by_key[key]
    remove_abandoned(run.cell_folder(key))
    for number in batch_numbers(run.cell_folder(key)):
        try:
            record = check_batch(run.cell_folder(key), number, cell)
            if number < record.n_batches:
                records[number] = record
        except DamagedError as error:
            notify(f"{cell.description} ({key}): batch {number} made again; {error}")
    if records and not agree(records.values(), cell):
        counts = " and ".join(
            str(n) for n in sorted({record.n_batches for record in records.values()})
        )
        n_texts = sum(record.n_texts for record in records.values())
        notify(
            f"{cell.description} ({key}): all batches made again; their records count"
            f" {n_texts} of {pluralize(cell.n_texts, 'text')}, in {counts} batches"
        )
        return {}
    return records


def _missing(records: Mapping[int, BatchRecord]) -> list[int]:
    """The batches that a cell with these records lacks; the first, where none is there to tell."""
    n_batches = next(iter(records.values())).n_batches if records else 1
    return [number for number in range(n_batches) if number not in records]


@dataclass
class _OpenCell:
    """A cell that is being made.

    Attributes:
        lock: Held until the cell is finished, or the sweep ends.
        records: Those of its finished batches, by number.
        begun: True once this sweep has made a batch, which says how the others are made.
    """

    cell: Cell
    lock: ExitStack
    records: dict[int, BatchRecord]
    begun: bool = False
    failed: bool = False
    shown: dict[int, int] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """Row-tokens of its finished batches."""
        return sum(_share(self.cell, record.n_texts) for record in self.records.values())


@dataclass(frozen=True)
class _Job:
    """A batch to be made, and how often it was submitted."""

    open_cell: _OpenCell
    number: int
    prepacking: Prepacking | None
    attempts: int = 1


class _Filling:
    """One loop over futures; the only writer of the cells it has locked."""

    def __init__(
        self,
        run: Run,
        todo: Sequence[Cell],
        engine: Engine,
        notify: Callable[[str], None],
        bar: tqdm,
    ) -> None:
        self.run, self.engine, self.notify, self.bar = run, engine, notify, bar
        self.n_todo, self.waiting = len(todo), deque(todo)
        self.ready: deque[_Job] = deque()
        self.weights: dict[str, str] = {}
        self.failed: list[str] = []
        self.made = self.there = self.elsewhere = self.disk = self.memory = 0
        self.failed_starts = 0
        self.locks = ExitStack()
        self.inode = run.require_folder().stat().st_ino

    def all(self) -> None:
        """Make all cells."""
        under_way: dict[Future[Outcome], _Job] = {}
        with self.locks:
            while self.waiting or self.ready or under_way:
                while len(under_way) < self.engine.slots() and (self.ready or self.waiting):
                    if self.ready:
                        job = self.ready.popleft()
                        under_way[self._submit(job)] = job
                    else:
                        self._begin(self.waiting.popleft())
                for future in wait(under_way, LOOK, return_when=FIRST_COMPLETED).done:
                    with writing(self.run.require_folder()):
                        self._take(under_way.pop(future), future)
                    state = f"{self.made}/{self.n_todo} cells"
                    state += f", {len(self.failed)} failed" * bool(self.failed)
                    self.bar.set_postfix_str(state, refresh=False)

    def _begin(self, cell: Cell) -> None:
        """Lock a cell, and make one of its missing batches ready."""
        folder, lock = self.run.cell_folder(cell.key), self.locks.enter_context(ExitStack())
        with writing(folder):
            try:
                lock.enter_context(acquire_lock(folder / LOCK))
            except Timeout:
                self.elsewhere += 1
                self.bar.total -= row_tokens_of(cell)
                return
            records = _sound_records(self.run, cell.key, self.notify)
            remove_batches(folder, keep=records)
        open_cell = _OpenCell(cell, lock, records)
        self.bar.total -= open_cell.done
        if missing := _missing(records):
            self.ready.append(_Job(open_cell, missing[0], None))
        else:  # another sweep has made it
            self.there += 1
            lock.close()

    def _submit(self, job: _Job) -> Future[Outcome]:
        cell, number = job.open_cell.cell, job.number

        def show(tokens: int) -> None:
            done = row_tokens_of(cell) * tokens // (cell.n_texts * cell.length)
            self.bar.update(done - job.open_cell.shown.get(number, 0))
            job.open_cell.shown[number] = done

        return self.engine.submit(cell, number, job.prepacking, CountingBar(show))

    def _take(self, job: _Job, future: Future[Outcome]) -> None:
        """Write what a worker has made; make ready what follows."""
        if (
            not (self.run.require_folder() / LISTING).is_file()
            or self.run.require_folder().stat().st_ino != self.inode
        ):
            raise RunError(
                f"{self.run.name} is gone: it was moved or removed; bring it back and repeat the"
                " command, which resumes from what is there"
            )
        open_cell, shown_tokens = job.open_cell, job.open_cell.shown.pop(job.number, 0)
        if error := future.exception():  # its worker died
            self.bar.update(-shown_tokens)
            self._again(job, error)
            return
        outcome, self.failed_starts = future.result(), 0
        if isinstance(outcome, Failure):
            self.bar.update(-shown_tokens)
            self._fail(open_cell, outcome)
            return
        cell, record, folder = (
            open_cell.cell,
            outcome.record,
            self.run.cell_folder(open_cell.cell.key),
        )
        self._check_same_weights(cell, record.model.weights)
        if not open_cell.begun and open_cell.records:
            earlier = next(iter(open_cell.records.values()))
            changes = earlier.changes(record)
            if not changes and earlier.n_batches != record.n_batches:
                changes = f"n_batches was {earlier.n_batches} and is {record.n_batches}"
            if changes:
                self.notify(
                    f"{cell.description} ({cell.key}):"
                    f" {pluralize(len(open_cell.records), 'finished batch')} made again; {changes}"
                )
                self.bar.total += open_cell.done
                open_cell.records.clear()
                remove_batches(folder)
        write_batch(folder, job.number, outcome)
        open_cell.records[job.number] = record
        self.memory = max(self.memory, record.memory)
        self.bar.update(_share(cell, record.n_texts) * (not open_cell.failed) - shown_tokens)
        if not open_cell.begun:
            open_cell.begun, prepacking = True, record.model.prepacking
            self.ready.extend(
                _Job(open_cell, number, prepacking) for number in _missing(open_cell.records)
            )
        if not _missing(open_cell.records):
            self._finish(open_cell)

    def _again(self, job: _Job, error: BaseException) -> None:
        """Make a batch ready whose worker died, or fail its cell.

        Raises:
            RunError: The worker had not begun, so that the batch is not the reason, and others
                before it had not.
        """
        if isinstance(error, WorkerLost) and not error.begun:
            self.failed_starts += 1
            if self.failed_starts >= ATTEMPTS:
                raise RunError(
                    f"a worker cannot start, tried {ATTEMPTS} times: {error};"
                    f" {parameter('workers', '1')} makes the"
                    " cells in this process"
                )
            self.ready.appendleft(job)
        elif job.attempts < ATTEMPTS:
            self.ready.appendleft(replace(job, attempts=job.attempts + 1))
        else:
            self._fail(job.open_cell, _worker_lost(error))

    def _finish(self, open_cell: _OpenCell) -> None:
        folder = self.run.cell_folder(open_cell.cell.key)
        remove_path(folder / FAILED)
        self.made += 1
        self.disk += sum(file.stat().st_size for file in folder.iterdir())
        open_cell.lock.close()

    def _fail(self, open_cell: _OpenCell, failure: Failure) -> None:
        """Note that a cell failed, once, and give up its other batches."""
        if open_cell.failed:
            return
        open_cell.failed, cell = True, open_cell.cell
        self.failed.append(cell.key)
        remove_path(self.run.cell_folder(cell.key) / FAILED)
        write_json(self.run.cell_folder(cell.key) / FAILED, failure.model_dump_json())
        self.ready = deque(job for job in self.ready if job.open_cell is not open_cell)
        self.bar.total -= row_tokens_of(cell) - open_cell.done
        self.bar.clear()
        self.notify(f"failed: {cell.description} ({cell.key}): {failure.reason}")

    def _check_same_weights(self, cell: Cell, now: str) -> None:
        """Refuse a model whose weights have changed since other texts of the run were made."""
        if cell.model not in self.weights:
            keys_of_model = (
                key for key, another in self.run.by_key.items() if another.model == cell.model
            )
            records = (
                record for key in keys_of_model for record in _sound_records(self.run, key).values()
            )
            self.weights[cell.model] = next((record.model.weights for record in records), now)
        name = f"{cell.model}'s weights"
        check_same_inputs({name: self.weights[cell.model]}, {name: now}, self.run.require_folder())


def _share(cell: Cell, n_texts: int) -> int:
    """Row-tokens of a batch: its share of those of its cell."""
    return row_tokens_of(cell) * n_texts // cell.n_texts


def _worker_lost(error: BaseException) -> Failure:
    """The outcome of a batch whose workers died."""
    if isinstance(error, WorkerLost):
        last = str(error)
    else:
        said = next(filter(None, reversed(str(error).splitlines())), "").strip()
        last = (
            f"{type(error).__name__}: {said}; where memory ran out, fewer rows share a batch with"
            f" {parameter('max_rows', 'N', 'set')}"
        )
    return Failure(when=datetime.now(UTC), traceback=f"the worker died {ATTEMPTS} times: {last}")
