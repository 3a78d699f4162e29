"""A sweep in one call: resolve the grids, check them, say what they take, fill the run.

sweep(["quick/alpha"], "results/alpha", {"samples": 1})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from lapa2_interp._util.settings import takes
from lapa2_interp._util.terminal import stop_on_sigterm
from lapa2_interp.bias.text_start import describe_start, text_start
from lapa2_interp.errors import (
    DamagedError,
    GridError,
    RunError,
    parameter,
    pluralize,
    unknown_choice,
)
from lapa2_interp.generation.cell import Cell
from lapa2_interp.models.load import shared_tokenizer
from lapa2_interp.models.machine import check_attn, faster_dtype, print_if_slow
from lapa2_interp.runs.checks import check_device, check_grids
from lapa2_interp.runs.engines import InProcess, local_engine
from lapa2_interp.runs.estimates import check_affordable, estimate
from lapa2_interp.runs.fill import Swept, fill_run
from lapa2_interp.runs.grid import Grid, load_grid
from lapa2_interp.runs.ray import RayPool
from lapa2_interp.runs.run import as_list, is_any_of
from lapa2_interp.runs.settings import SweepSettings
from lapa2_interp.runs.store import CELLS, LISTING, read_cell, read_listing, state_of

ENGINES = ("local", "ray")


@takes(SweepSettings)
def sweep(settings: SweepSettings) -> Swept:
    """`lapa2 sweep` in Python; `SweepSettings` says what it does and takes.

    Raises:
        GridError, ModelError: A grid is malformed, or a cell cannot be made.
        RunError: The folder holds something else or cannot be written, or the engine cannot start.
    """
    out = Path(settings.out)
    names = [settings.names] if isinstance(settings.names, str) else settings.names
    if not names:
        raise GridError(
            "name a grid: `lapa2 sweep quick/sent_topic --out RUN` (`lapa2 grids` lists them)"
        )
    if settings.engine not in ENGINES:
        raise RunError(unknown_choice("engine", settings.engine, ENGINES))
    if settings.engine == "local":
        for name, value in (
            ("address", settings.address),
            ("gpus_per_worker", settings.gpus_per_worker),
        ):
            if value is not None:
                raise RunError(
                    f"{parameter(name, value)} belongs to {parameter('engine', 'ray')}, and"
                    " the engine is local; leave it"
                    f" out, or give {parameter('engine', 'ray')}"
                )
        check_device(settings.device)
    grids = load_grids(
        out,
        names,
        settings.changes,
        dtype=settings.dtype,
        device=settings.device,
        allow_code=settings.allow_code,
        yes=settings.yes,
    )
    check_grids(grids)
    for model_class in dict.fromkeys(cell.model_class for grid in grids for cell in grid.cells):
        check_attn(settings.attn, model_class)
    for used in dict.fromkeys(
        cell.dtype for grid in grids for cell in grid.cells if settings.engine == "local"
    ):
        print_if_slow(used, settings.device)
    cells = {cell.key: cell for grid in grids for cell in grid.cells}
    for column, value in (settings.only or {}).items():
        table = pd.DataFrame([cell.columns for cell in cells.values()], index=list(cells))
        if column not in table:
            raise GridError(unknown_choice("column", column, table.columns))
        for choice in as_list(value):
            if not is_any_of(table[column], [choice]).any():
                raise GridError(
                    unknown_choice(column, str(choice), dict.fromkeys(map(str, table[column])))
                )
        cells = {key: cells[key] for key in table.index[is_any_of(table[column], as_list(value))]}
    left = _unfinished(out, cells)
    workers = (settings.workers, settings.device, settings.threads)
    runner = (
        local_engine(*workers, settings.pack, settings.attn)
        if settings.engine == "local"
        else RayPool(
            *workers, settings.address, settings.gpus_per_worker, settings.pack, settings.attn
        )
    )
    try:
        if not isinstance(runner, InProcess):
            _check_methods(left)
        if left:
            left_to_make = estimate(left, settings.device)
            settings.notify(
                f"{len(left)} of {len(cells)} cells to make: {left_to_make}, with"
                f" {pluralize(runner.n_workers, 'worker')}\n{_listed_prefixes(left)}"
                f"\n{_listed_starts(left)}"
            )
            # A cluster's machines may have other memory than this one.
            memory = left_to_make.memory if settings.engine == "local" else 0
            check_affordable(
                left_to_make.texts,
                left_to_make.row_tokens,
                memory,
                settings.yes or settings.dry_run,
            )
        if settings.dry_run:
            return Swept(len(cells) - len(left), 0, (), dry_run=True, folder=out)
        with stop_on_sigterm():
            return fill_run(out, grids, runner, settings.notify, list(cells))
    except (KeyboardInterrupt, SystemExit):
        done = len(cells) - len(_unfinished(out, cells))
        settings.notify(f"\n{done} of {pluralize(len(cells), 'cell')} finished")
        raise
    finally:
        runner.close()


def _listed_prefixes(cells: Sequence[Cell]) -> str:
    """The kinds of prefixes, with the methods of each if there are several: a default may differ by
    method and task."""
    methods: dict[str, dict[str, None]] = {}
    for cell in cells:
        methods.setdefault(" and ".join(cell.prefix_kinds) or "none", {})[cell.method] = None
    listed = [
        kind if len(methods) == 1 else f"{kind} ({', '.join(names)})"
        for kind, names in methods.items()
    ]
    return f"prefixes: {'; '.join(listed)}"


def _listed_starts(cells: Sequence[Cell]) -> str:
    """What plain text starts with in each model, and who says so."""
    listed = []
    for model, start in dict.fromkeys((cell.model, cell.start) for cell in cells):
        tokenizer = shared_tokenizer(model)
        token, source, _ = text_start(tokenizer, start)
        name = "" if token is None else str(tokenizer.convert_ids_to_tokens(token))
        listed.append(f"{model}: {describe_start(name, source)}")
    return f"plain text starts with: {'; '.join(listed)}"


def _check_methods(cells: Sequence[Cell]) -> None:
    """Refuse methods of the script that runs: other processes do not run it."""
    for cell in cells:
        if cell.method.startswith("__main__:"):
            raise GridError(
                f"method {cell.method!r} is in the script that runs, and workers do not run it; put"
                f" its class into a module beside the script, or give {parameter('workers', '1')}"
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
        listing = f"{folder} has cells of {grid} and {model} in {' and '.join(sorted(there))}"
        if dtype is not None and there and dtype not in there:
            raise GridError(
                f"{listing}, which {parameter('dtype', dtype)} would leave behind; leave it"
                " out, or sweep into"
                " a new folder"
            )
        if dtype is None and len(there) > 1:
            raise GridError(
                f"{listing}; say with which to go on:"
                f" {' or '.join(parameter('dtype', name) for name in sorted(there))}"
            )
        others = set().union(
            *(dtypes for (_, listed_model), dtypes in listed.items() if listed_model == model)
        )
        known = there or (others if len(others) == 1 else set())
        return dtype or next(iter(known), None) or faster_dtype(device)

    return [load_grid(name, changes, auto=auto, allow_code=allow_code, yes=yes) for name in names]


def _listed_dtypes(folder: Path) -> dict[tuple[str, str], set[str]]:
    """Dtypes of a run's cells by grid and model; damaged settings are ignored, because the
    sweep writes them again."""
    dtypes: dict[tuple[str, str], set[str]] = {}
    for grid, keys in (read_listing(folder).grids if (folder / LISTING).is_file() else {}).items():
        for key in keys:
            with suppress(DamagedError):
                cell = read_cell(folder / CELLS / key, key)
                dtypes.setdefault((grid, cell.model), set()).add(cell.dtype)
    return dtypes
