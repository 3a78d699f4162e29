"""A sweep in one call: resolve the grids, check them, say what they take, fill the run.

launch(["quick/alpha"], "results/alpha", {"samples": 1})
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from lapa2_interp._util.errors import GridError, RunError, pluralize, unknown_choice
from lapa2_interp._util.progress import format_bytes, format_duration, stop_on_sigterm
from lapa2_interp.models.machine import print_if_slow
from lapa2_interp.runs.checks import check_device, check_grids
from lapa2_interp.runs.estimates import check_affordable, estimate
from lapa2_interp.runs.jobs import Engine
from lapa2_interp.runs.local import local_engine
from lapa2_interp.runs.ray import Cluster
from lapa2_interp.runs.run import as_list, is_any_of
from lapa2_interp.runs.store import finished_of
from lapa2_interp.runs.sweep import Swept, load_grids, sweep

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
    there = finished_of(out, cells)
    left = [cell for key, cell in cells.items() if key not in there]
    runner = _engine(engine, workers, device, threads, address, gpus_per_worker, pack)
    try:
        if left:
            each = estimate(left, runner.slots, device, threads)
            notify(
                f"{len(left)} of {len(cells)} cells to make: {each.texts} texts,"
                f" {each.row_tokens} row-tokens, about {format_duration(each.seconds)} with"
                f" {pluralize(runner.slots, 'worker')}, {format_bytes(each.disk)} on disk,"
                f" {format_bytes(each.memory)} of memory a worker ({each.basis})"
            )
            # A cluster's machines may have other memory than this one.
            each = replace(each, memory=0) if engine == "ray" else each
            check_affordable(each, yes or dry_run)
        if dry_run:
            return Swept(len(there), 0, ())
        with stop_on_sigterm():
            return sweep(out, grids, runner, notify, list(cells))
    except (KeyboardInterrupt, SystemExit):
        done = len(finished_of(out, cells))
        notify(f"\n{done} of {pluralize(len(cells), 'cell')} finished")
        raise
    finally:
        if isinstance(runner, Cluster):
            runner.close()


def _engine(
    name: str,
    workers: int | None,
    device: str | None,
    threads: int,
    address: str | None,
    gpus_per_worker: float | None,
    pack: str,
) -> Engine:
    if name == "ray":
        return Cluster(
            workers,
            device,
            threads,
            address,
            1.0 if gpus_per_worker is None else gpus_per_worker,
            pack,
        )
    if name != "local":
        raise RunError(f"unknown engine {name!r}; allowed: {', '.join(ENGINES)}")
    return local_engine(workers, device, threads, pack)
