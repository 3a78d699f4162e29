"""A sweep in one call: resolve the grids, check them, say what they take, fill the run.

launch(["quick/alpha"], "results/alpha", {"samples": 1})
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from lapa2_interp._util.errors import DamagedError, GridError, RunError, pluralize, unknown_choice
from lapa2_interp._util.terminal import format_bytes, format_duration, stop_on_sigterm
from lapa2_interp.generation.cell import Cell
from lapa2_interp.models.machine import faster_dtype, print_if_slow
from lapa2_interp.runs.checks import check_device, check_grids
from lapa2_interp.runs.engines import InProcess, local_engine
from lapa2_interp.runs.estimates import check_affordable, estimate
from lapa2_interp.runs.grid import Grid, load_grid
from lapa2_interp.runs.ray import RayPool
from lapa2_interp.runs.run import as_list, is_any_of
from lapa2_interp.runs.store import CELLS, LISTING, read_cell, read_listing, state_of
from lapa2_interp.runs.sweep import Swept, sweep

ENGINES = ("local", "ray")


def launch(
    names: str | Sequence[str],
    out: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    only: Mapping[str, Any] | None = None,
    engine: str = "local",
    workers: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    threads: int = 1,
    address: str | None = None,
    gpus_per_worker: float | None = None,
    pack: str = "auto",
    allow_code: bool = False,
    dry_run: bool = False,
    yes: bool = False,
    notify: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> Swept:
    """Make every cell of grids in a run folder, going on where an earlier call stopped.

    Args:
        names: Built-in grids, or paths of .toml files; one, or several.
        out: The run folder.
        changes: Values that replace a key in every block, such as {"samples": 1}.
        only: Make only cells with these settings (`Cell.columns`; a list: one of them), such as
            {"task": "topic"}; the grids' other cells stay missing until another call.
        engine: "local": processes on this machine, or "ray": workers on the machines of a cluster.
        workers, device, dtype, threads, address, gpus_per_worker, pack, allow_code, dry_run, yes:
            As the options of `lapa2 sweep`.
        notify: Told what is to be made, and about cells that fail.

    Raises:
        GridError, ModelError: A grid is malformed, or a cell cannot be made.
        RunError: The folder holds something else or cannot be written, or the engine cannot start.
    """
    out, names = Path(out), [names] if isinstance(names, str) else names
    if not names:
        raise GridError(
            "name a grid: `lapa2 sweep quick/sent_topic --out RUN` (`lapa2 grids` lists them)"
        )
    if threads < 1:
        raise RunError(f"--threads must be at least 1, found {threads}")
    if engine not in ENGINES:
        raise RunError(f"unknown engine {engine!r}; allowed: {', '.join(ENGINES)}")
    if engine == "local":
        for option, value in (("address", address), ("gpus-per-worker", gpus_per_worker)):
            if value is not None:
                raise RunError(
                    f"--{option} {value} belongs to --engine ray, and the engine is local; leave it"
                    " out, or give --engine ray"
                )
        check_device(device)
    grids = load_grids(
        out, names, changes, dtype=dtype, device=device, allow_code=allow_code, yes=yes
    )
    check_grids(grids)
    for used in dict.fromkeys(
        cell.dtype for grid in grids for cell in grid.cells if engine == "local"
    ):
        print_if_slow(used, device)
    cells = {cell.key: cell for grid in grids for cell in grid.cells}
    for column, value in (only or {}).items():
        table = pd.DataFrame([cell.columns for cell in cells.values()], index=list(cells))
        if column not in table:
            raise GridError(unknown_choice("column", column, table.columns))
        for each in as_list(value):
            if not is_any_of(table[column], [each]).any():
                raise GridError(
                    unknown_choice(column, str(each), dict.fromkeys(map(str, table[column])))
                )
        cells = {key: cells[key] for key in table.index[is_any_of(table[column], as_list(value))]}
    left = _unfinished(out, cells)
    runner = (
        local_engine(workers, device, threads, pack)
        if engine == "local"
        else RayPool(workers, device, threads, address, gpus_per_worker, pack)
    )
    try:
        if not isinstance(runner, InProcess):
            _check_methods(left)
        if left:
            each = estimate(left, runner.n_workers, device, threads)
            notify(
                f"{len(left)} of {len(cells)} cells to make: {each.texts} texts,"
                f" {each.row_tokens} row-tokens, about {format_duration(each.seconds)} with"
                f" {pluralize(runner.n_workers, 'worker')}, {format_bytes(each.disk)} on disk,"
                f" {format_bytes(each.memory)} of memory a worker ({each.basis})"
            )
            # A cluster's machines may have other memory than this one.
            memory = each.memory if engine == "local" else 0
            check_affordable(each.texts, each.seconds, memory, yes or dry_run)
        if dry_run:
            return Swept(len(cells) - len(left), 0, ())
        with stop_on_sigterm():
            return sweep(out, grids, runner, notify, list(cells))
    except (KeyboardInterrupt, SystemExit):
        done = len(cells) - len(_unfinished(out, cells))
        notify(f"\n{done} of {pluralize(len(cells), 'cell')} finished")
        raise
    finally:
        runner.close()


def _check_methods(cells: Sequence[Cell]) -> None:
    """Refuse methods of the script that runs: other processes do not run it."""
    for cell in cells:
        if cell.method.startswith("__main__:"):
            raise GridError(
                f"method {cell.method!r} is in the script that runs, and workers do not run it; put"
                " its class into a module beside the script, or give --workers 1"
            )


def _unfinished(out: Path, cells: Mapping[str, Cell]) -> list[Cell]:
    """The cells that a run has not finished."""
    return [cell for key, cell in cells.items() if state_of(out / CELLS / key, cell) != "finished"]


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

    A run begun in bfloat16 on one machine continues in bfloat16 on another, so that nothing is made
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
    """Dtypes of a run's cells by grid and model; damaged settings are ignored, because the
    sweep writes them again."""
    found: dict[tuple[str, str], set[str]] = {}
    for grid, keys in (read_listing(folder).grids if (folder / LISTING).is_file() else {}).items():
        for key in keys:
            with suppress(DamagedError):
                cell = read_cell(folder / CELLS / key, key)
                found.setdefault((grid, cell.model), set()).add(cell.dtype)
    return found
