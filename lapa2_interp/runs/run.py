"""A run: cells with their texts, traces and manifests, in a folder or in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from lapa2_interp import plots
from lapa2_interp._util.version import __version__
from lapa2_interp.attention.trace import TracedTexts, join_traces
from lapa2_interp.commands import command
from lapa2_interp.errors import (
    DamagedError,
    RunError,
    TraceError,
    parameter,
    pluralize,
    unknown_choice,
)
from lapa2_interp.files import (
    TEMPORARY_PREFIX,
    check_name,
    refuse_foreign_files,
    result_folder,
)
from lapa2_interp.generation.cell import Cell, same_label
from lapa2_interp.runs.attention import ALIKE, SHOWN, Attention, HeadAttention, traced
from lapa2_interp.runs.hub import SCORES, DataSet
from lapa2_interp.runs.manifest import BatchRecord, Manifest
from lapa2_interp.runs.store import (
    CELLS,
    FAILED,
    LISTING,
    Failure,
    FinishedBatch,
    Listing,
    batch_numbers,
    earlier_keys,
    is_run,
    read_batch,
    read_cell,
    read_failure,
    read_listing,
    read_record,
    read_texts,
    state_of,
    write_batch,
    write_cell,
    write_listing,
)

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True, repr=False)
class Run:
    """Cells, and what was made of them, in a folder or in memory.

    Attributes:
        folder: Where the run is stored; None for one in memory only.
        listing: Which cells belong to which grid.
        by_key: Every cell by its key.
        batches: Batches of the finished cells that are in memory, by key.
    """

    folder: Path | None
    listing: Listing
    by_key: dict[str, Cell]
    batches: dict[str, list[FinishedBatch]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The run's folder, for messages."""
        return "the run" if self.folder is None else str(self.folder)

    @property
    def cells_from(self) -> str:
        """What lists its cells, for messages: a command, or of a run in memory its table."""
        return "run.cells" if self.folder is None else f"`{command('runs', self.folder)}`"

    def require_folder(self) -> Path:
        """The run's folder.

        Raises:
            RunError: The run is in memory only.
        """
        if self.folder is None:
            raise RunError("the run is in memory only; run.save(FOLDER) gives it a folder")
        return self.folder

    @property
    def finished(self) -> dict[str, Cell]:
        """Cells that are finished now, by key."""
        return {key: cell for key, cell in self.by_key.items() if self.state(key) == "finished"}

    def state(self, key: str) -> str:
        """The state of a cell now, one of `store.STATES`."""
        if key in self.batches:
            return "finished"
        cell = self.by_key[key]
        return "missing" if self.folder is None else state_of(self.cell_folder(key), cell)

    @property
    def failures(self) -> dict[str, Failure]:
        """Why cells that are not finished raised when they were last tried."""
        reasons = {key: self._failure(key) for key in self.by_key}
        return {key: failure for key, failure in reasons.items() if failure is not None}

    @property
    def problems(self) -> tuple[str, ...]:
        """Texts of finished cells that ended because no token was left to draw, and why."""
        return tuple(problem for key in self.finished for problem in self.manifest(key).problems)

    def _failure(self, key: str) -> Failure | None:
        if self.state(key) in ("failed", "damaged"):
            with suppress(FileNotFoundError):  # never failed, or tried again meanwhile
                return read_failure(self.cell_folder(key) / FAILED)
        return None

    def cell_folder(self, key: str) -> Path:
        """The folder of a cell.

        Raises:
            RunError: The run is in memory only.
        """
        return self.require_folder() / CELLS / key

    @cached_property
    def cells(self) -> pd.DataFrame:
        """One row per cell: key, state (of STATES), grids, its settings, and of a finished one
        tokens, seconds and commit, of a failed one why. The table is made once, when it is first
        asked for."""
        rows = []
        for key, cell in self.by_key.items():
            state = self.state(key)
            row = {
                "key": key,
                "state": state,
                "grids": ", ".join(self.listing.with_cell(key)),
                **cell.columns,
            }
            if state == "finished":
                manifest = self.manifest(key)
                row |= {
                    "tokens": manifest.new_tokens,
                    "seconds": manifest.seconds,
                    "commit": manifest.commit,
                }
            failure = self._failure(key) if state == "failed" else None
            rows.append(row | {"why": "" if failure is None else failure.reason})
        return pd.DataFrame(rows, columns=None if rows else ["key", "state", "grids", "why"])

    def texts(self, cells: str | Sequence[str] | None = None, **wanted: Any) -> pd.DataFrame:
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
            frames.append(self._texts_of(key).assign(**self.by_key[key].columns, cell=key))
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def trace(self, cells: str | Sequence[str] | None = None, **wanted: Any) -> xr.Dataset | None:
        """The traces of finished cells as one: sample i is row i of `texts` of the same cells.

        Coordinates of a sample are its prompt_text, task, attribute, method, arm, and its cell's
        key (`cell`). What a cell lacks of the others (branches of another method, steps of a longer
        text) is NaN.

        Args:
            cells, wanted: As in `texts`.

        Returns:
            None where no cell has a trace.

        Raises:
            RunError: As `texts`; none is finished; or the traces do not fit together: of other
                models, pooled beside full, or none.
        """
        keys = self._keys(cells, wanted)
        if not keys:
            first = next(iter(self.by_key), None)
            raise RunError(f"{self.name} has no cell" if first is None else self._not_there(first))
        by_cell = {key: finished_cell(self, key).trace for key in keys}
        traces = {key: trace for key, trace in by_cell.items() if trace is not None}
        if not traces:
            return None
        shapes = {
            key: trace and {name: trace["prefix"].sizes.get(name) for name in ("layer", "head")}
            for key, trace in by_cell.items()
        }
        first = keys[0]
        if misfits := [key for key in keys if shapes[key] != shapes[first]]:
            of_first, misfit = (self.by_key[key].columns for key in (first, misfits[0]))
            apart = [
                f"{name}={of_first[name]!r}" for name in of_first if of_first[name] != misfit[name]
            ]
            raise RunError(
                f"the traces of cells {first} ({self._traced(first)}) and {misfits[0]}"
                f" ({self._traced(misfits[0])}) do not fit together; choose cells alike, such as"
                f" {apart[0] if apart else f'the key {first!r}'}"
            )
        return join_traces(list(traces.values()), self.texts(keys))

    def _traced(self, key: str) -> str:
        return f"{self.by_key[key].model}, trace {self.by_key[key].trace}"

    def attention(self, branch: str | None = None, **wanted: Any) -> Attention:
        """The attention that finished cells recorded, read once, with tables and figures.

        Args:
            branch: Branch of the method; by default the first of each method with a prefix.
            wanted: As in `texts`.

        Raises:
            RunError: As `trace`, or a cell is damaged.
            TraceError: No cell has a trace, every text ended before a first token, or no such
                branch.
        """
        if not self.by_key:
            raise TraceError(
                f"{self.name} has no cells, since its {LISTING} has no grids; `lapa2 sweep GRID"
                " --out RUN` gives it some"
            )
        selected = self.select(**wanted)
        cells = selected.cells
        cells = cells[[selected.by_key[key].trace != "none" for key in cells["key"]]]
        if not len(cells):
            raise TraceError(
                f"{self.name} has no cell with a trace; generate it with"
                f" {parameter('trace', 'full')} or pooled"
            )
        for key in cells["key"][cells["state"] == "damaged"]:
            raise DamagedError(self._not_there(key))
        finished = cells[cells["state"] == "finished"]
        if not len(finished):
            raise TraceError(self._not_there(cells["key"].iloc[0]))
        kinds, n = [], 0
        for _, kind in finished.groupby([*ALIKE], sort=False):
            keys = list(kind["key"])
            texts, trace = self.texts(keys), self.trace(keys)
            assert trace is not None  # these cells have traces
            n += len(texts)
            kinds += traced(texts, trace)
        kinds = [(texts, trace) for texts, trace in kinds if len(texts)]
        if not kinds:
            raise TraceError(
                f"all texts of {self.name} ended before a first token: nothing was traced"
            )
        return Attention(kinds, branch, n - sum(len(texts) for texts, _ in kinds))

    def steps(self, branch: str | None = None, **wanted: Any) -> pd.DataFrame:
        """Attention against step as a tidy table: mean and 95 % interval by arm.

        Args:
            branch, wanted: As in `attention`, which says the errors, too.

        Returns:
            Columns of `step_table` (arm, step, name, mean, low, high, n, prompts) after those of
            `ALIKE` (model, task, method, ...), whose arms are compared, the turn of chats of
            several, attribute and cell (its key); attributes are taken together. Texts that ended
            before a first token are left out.
        """
        return self.attention(branch, **wanted).steps()

    def fits(self, branch: str | None = None, **wanted: Any) -> pd.DataFrame:
        """C / (t + D) fitted to the curves of `steps` on the prefix (on the raw model, the prompt),
        by arm, with the same arguments and first columns: C, D and R2; NaN where it does not
        fit."""
        return self.attention(branch, **wanted).fits()

    def prefix_tokens(self, branch: str | None = None, **wanted: Any) -> pd.DataFrame:
        """Attention on BOS and on each prefix token, mean over steps, layers and heads, with 95 %
        intervals: columns of `prefix_token_table`; arguments and errors as `steps`."""
        return self.attention(branch, **wanted).prefix_tokens()

    def heads(self, branch: str | None = None, **wanted: Any) -> HeadAttention:
        """Attention of every head, mean over each text's steps and then over texts; arguments and
        errors as `steps`.

        Raises:
            TraceError: The trace is pooled over heads.
        """
        return self.attention(branch, **wanted).heads()

    def plot(self, branch: str | None = None, **wanted: Any) -> plots.Drawing:
        """Attention on the prefix against step, a curve with its 95 % band for each arm and the
        fitted C / (t + D); arguments and errors as `steps`."""
        return self.attention(branch, **wanted).plot()

    def __repr__(self) -> str:
        return f"<Run of {pluralize(len(self.by_key), 'cell')}: {self.name}>"

    def _repr_html_(self) -> str:
        """The run's cells as a short table, for notebooks."""
        columns = ["model", "task", "attribute", "method", "arm", "max_length", "samples", "state"]
        cells = self.cells.reindex(columns=[*columns, "key"])
        left = f"<p>and {len(cells) - SHOWN} more: <code>run.cells</code></p>"
        table = cells.head(SHOWN).to_html(index=False, border=0)
        return f"<p>{escape(self.name)}: {pluralize(len(cells), 'cell')}</p>{table}" + (
            left if len(cells) > SHOWN else ""
        )

    def manifest(self, key: str | None = None) -> Manifest:
        """The manifest of one cell, without texts and trace; arguments and errors as `trace`."""
        key = self._only(key)
        if key not in self.by_key or self.state(key) != "finished":
            raise RunError(self._not_there(key))
        return Manifest.joined(self.by_key[key], self.records(key))

    def records(self, key: str) -> list[BatchRecord]:
        """Records of a cell's batches that are there, in their order.

        Raises:
            DamagedError: A record cannot be read.
        """
        if key in self.batches:
            return [batch.record for batch in self.batches[key]]
        if self.folder is None:
            return []
        folder = self.cell_folder(key)
        return [read_record(folder, number, self.by_key[key]) for number in batch_numbers(folder)]

    def _batches(self, key: str) -> list[FinishedBatch]:
        """All batches of a finished cell."""
        if key in self.batches:
            return self.batches[key]
        folder = self.cell_folder(key)
        return [read_batch(folder, number, self.by_key[key]) for number in batch_numbers(folder)]

    def _texts_of(self, key: str) -> pd.DataFrame:
        """The texts of a finished cell, without its trace."""
        if key in self.batches:
            tables = [batch.texts for batch in self.batches[key]]
        else:
            folder = self.cell_folder(key)
            cell = self.by_key[key]
            tables = [read_texts(folder, number, cell) for number in batch_numbers(folder)]
        return pd.concat(tables, ignore_index=True)

    def select(self, **wanted: Any) -> Run:
        """The cells whose columns have these values (a list: one of them), finished or not: a run
        like this one.

        Raises:
            RunError: No such column, a value that no cell has, or values that no cell has together.
        """
        table = self.cells
        fits = pd.Series(True, index=table.index)
        wanted = {column: as_list(value) for column, value in wanted.items()}
        for column, values in wanted.items():
            if column not in table:
                raise RunError(unknown_choice("column", column, table.columns))
            if not values:
                raise RunError(f"{column} is an empty list; give a value, or leave {column} out")
            for value in values:
                if not is_any_of(table[column], [value]).any():
                    there = ", ".join(map(str, dict.fromkeys(table[column])))
                    raise RunError(
                        f"{self.name} has no cell with {column}={value}; {column} may be"
                        f" {there or 'nothing: there is no cell'}"
                    )
            fits &= is_any_of(table[column], values)
        if wanted and not fits.any():
            raise RunError(f"{self.name} has no cell with {shown_only(wanted)} together")
        keys = set(table["key"][fits]) if len(table) else set()
        grids = {
            name: tuple(key for key in of_grid if key in keys)
            for name, of_grid in self.listing.grids.items()
        }
        grids = {name: of_grid for name, of_grid in grids.items() if of_grid}
        return Run(
            self.folder,
            self.listing.model_copy(update={"grids": grids}),
            {key: cell for key, cell in self.by_key.items() if key in keys},
            {key: made for key, made in self.batches.items() if key in keys},
        )

    def _keys(self, cells: str | Sequence[str] | None, wanted: Mapping[str, Any]) -> list[str]:
        """Keys of the finished cells that are asked for."""
        if cells is None:
            selected = list(self.select(**wanted).finished)
            if wanted and not selected:
                raise RunError(f"no cell of {self.name} with {shown_only(wanted)} is finished")
            return selected
        if wanted:
            raise RunError(f"give keys, or values ({shown_only(wanted)}), not both")
        if isinstance(cells, Run):
            raise RunError("a run is not a key; ask the run itself: run.select(...).texts()")
        keys: list[Any] = list(dict.fromkeys(as_list(cells)))
        finished = [key for key in keys if key in self.by_key and self.state(key) == "finished"]
        if missing := [key for key in keys if key not in finished]:
            raise RunError(self._not_there(missing[0]))
        return keys

    def save(self, folder: str | Path, force: bool = False) -> Run:
        """Write the run to a new folder, which appears whole or not at all; the run as read back.

        Cells that are not finished are planned there too: a sweep of their grid makes them.

        Args:
            force: Replace a finished run that is there.

        Raises:
            RunError: The folder is finished, is something else, or cannot be written.
        """
        with result_folder(Path(folder), force, is_finished_run) as fresh:
            write_run(fresh, self)
        return load_run(folder)

    def data_set(self, scores: pd.DataFrame | None = None) -> DataSet:
        """The finished cells as a data set of the Hugging Face hub.

        Args:
            scores: `Scored.scores` of this run; by default those that `lapa2 score` left in its
                folder, if there are any.
        """
        file = None if self.folder is None else self.folder / "scores" / SCORES
        if scores is None and file is not None and file.is_file():
            scores = pd.read_parquet(file)
        manifests = {key: self.manifest(key) for key in self.finished}
        return DataSet(self.texts(), manifests, scores)

    def push_to_hub(self, repo_id: str, scores: pd.DataFrame | None = None, **settings: Any) -> str:
        """Upload `data_set` to the Hugging Face hub; arguments, result and errors as
        `hub.DataSet.push`."""
        return self.data_set(scores).push(repo_id, **settings)

    def _only(self, key: str | None) -> str:
        if key is None and len(self.by_key) != 1:
            raise RunError(
                f"{self.name} has {len(self.by_key)} cells; give the key of one"
                f" ({self.cells_from} lists them)"
            )
        return next(iter(self.by_key)) if key is None else key

    def _not_there(self, key: str) -> str:
        if key not in self.by_key:
            return f"{self.name} has no cell {key!r}; {self.cells_from} lists them"
        where = f"{self.name}: cell {key} ({self.by_key[key].description})"
        if self.state(key) == "damaged":
            return (
                f"{where} is damaged: a file of it is missing or cut short; make it again with the"
                " command that made it"
            )
        return f"{where} is not finished; `lapa2 sweep` with its grid makes it"


def finished_cell(run: Run, key: str | None = None) -> TracedTexts:
    """One cell's texts and trace as they are stored, its batches joined.

    Args:
        key: By default that of the only cell.

    Raises:
        RunError: The cell is not finished, or damaged; or no key is given and there are several
            cells.
    """
    key = run._only(key)
    run.manifest(key)  # refuses a cell that is not finished
    batches = run._batches(key)
    table = pd.concat([batch.texts for batch in batches], ignore_index=True)
    table = table.assign(arm=run.by_key[key].arm)
    # The joined trace may need another type than a batch was stored with: NaN is no integer.
    traces = [batch.trace.drop_encoding() for batch in batches if batch.trace is not None]
    return TracedTexts(table, join_traces(traces, table) if traces else None)


def as_list(value: Any) -> list[Any]:
    """Values that a column may have: one value, or one of several (a list, an array, a column)."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def shown_only(only: Mapping[str, Any] | None) -> str:
    """A choice of rows or cells in words."""
    return " and ".join(
        f"{column}={' or '.join(map(str, as_list(value)))}"
        for column, value in (only or {}).items()
    )


def is_any_of(column: pd.Series, values: Iterable[Any]) -> pd.Series:
    """Which rows of a column have one of these values, as numbers or as text: "0.50" is 0.5."""
    choices = list(values)
    same_text = column.astype(str).isin([str(value) for value in choices])
    if not pd.api.types.is_numeric_dtype(column):
        return same_text
    numbers = pd.to_numeric(pd.Series(choices, dtype=object), errors="coerce").dropna()
    return same_text | column.isin(numbers)


def write_run(folder: Path, run: Run) -> None:
    """Write a run's cells and their batches into a folder that is not yet in its place."""
    for key, cell in run.by_key.items():
        write_cell(folder / CELLS / key, cell)
    for key in run.finished:
        for number, batch in enumerate(run._batches(key)):
            write_batch(folder / CELLS / key, number, batch)
    write_listing(folder, run.listing)


OWN = (LISTING, CELLS, ".lock", f"{TEMPORARY_PREFIX}*", "view.html", "report.html", "scores")
"""Names in the folder of a run."""


def is_finished_run(folder: Path) -> bool:
    """True if a folder is a run that a command may replace when it is told to
    (`files.result_folder`).

    Raises:
        RunError: The folder is a run that a sweep has not finished, or is filling; or it holds
            something else.
    """
    if not is_run(folder):
        return False
    refuse_foreign_files(folder, OWN)
    try:
        states = load_run(folder).cells["state"]
    except RunError:  # damaged, or of another version
        return True
    if left := int((~states.isin(["finished", "damaged"])).sum()):
        raise RunError(
            f"{folder} is a run with {left} of {pluralize(len(states), 'cell')} not finished"
            f" (`{command('runs', folder)}`); choose another {parameter('out')}"
        )
    return True


def load_run(folder: str | Path, *, earlier: bool = False) -> Run:
    """A run in its folder, finished or not.

    Example:
        >>> from lapa2_interp import generate, load_run
        >>> made = generate("tiny-gpt2", "The lake", prefix="Very formal:", length=16)
        >>> saved = made.save("lake")
        >>> load_run("lake").texts()["text"].equals(made.texts()["text"])
        True

    Args:
        earlier: Also what was made of cells of earlier grids, which no grid has now
            (`cells["grids"]` is empty).

    Raises:
        RunError: Not one, of another format, or damaged.
    """
    folder = Path(folder)
    check_name(folder)
    listing, cells = read_listing(folder), {}
    for key in dict.fromkeys(key for keys in listing.grids.values() for key in keys):
        try:
            cells[key] = read_cell(folder / CELLS / key, key)
        except DamagedError as error:
            versions = (
                f"; the run is of lapa2_interp {listing.lapa2_interp}, this is {__version__}"
                if listing.lapa2_interp != __version__
                else ""
            )
            raise DamagedError(
                f"{error}{versions}; {LISTING} lists the cell {key}, and `lapa2 sweep` with the"
                f" cell's grid ({', '.join(listing.with_cell(key))}) writes it again"
            ) from error
    for key in earlier_keys(folder, listing) if earlier else ():
        with suppress(DamagedError):
            cell = read_cell(folder / CELLS / key, key)
            if state_of(folder / CELLS / key, cell) != "missing":  # it was only planned
                cells[key] = cell
    for _, cell in same_label(cells.values()):
        label = f"{cell.label or cell.arm} ({cell.plain_arm})"
        cells[cell.key] = cell.model_copy(update={"label": label})
    return Run(folder, listing, cells)
