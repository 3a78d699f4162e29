"""A sweep in one call: resolve the grids, check them, say what they take, fill the run.

sweep(["quick/alpha"], "results/alpha", {"samples": 1})
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from lapa2_interp._util.errors import (
    DamagedError,
    GridError,
    RunError,
    parameter,
    pluralize,
    unknown_choice,
)
from lapa2_interp._util.terminal import stop_on_sigterm
from lapa2_interp._util.values import Count, numbers_checked
from lapa2_interp.bias.text_start import describe_start, text_start
from lapa2_interp.generation.cell import Cell
from lapa2_interp.models.load import shared_tokenizer
from lapa2_interp.models.machine import Attn, Dtype, check_attn, faster_dtype, print_if_slow
from lapa2_interp.runs.checks import check_device, check_grids
from lapa2_interp.runs.engines import InProcess, local_engine
from lapa2_interp.runs.estimates import check_affordable, estimate
from lapa2_interp.runs.fill import Swept, fill_run
from lapa2_interp.runs.grid import Grid, load_grid
from lapa2_interp.runs.ray import RayPool
from lapa2_interp.runs.run import as_list, is_any_of
from lapa2_interp.runs.store import CELLS, LISTING, read_cell, read_listing, state_of

ENGINES = ("local", "ray")


@numbers_checked
def sweep(
    names: str | Sequence[str],
    out: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    only: Mapping[str, Any] | None = None,
    engine: Literal["local", "ray"] = "local",
    workers: Count | None = None,
    device: str | None = None,
    dtype: Dtype | None = None,
    threads: Count = 1,
    address: str | None = None,
    gpus_per_worker: float | None = None,
    pack: Literal["auto", "on", "off"] = "auto",
    attn: Attn = "auto",
    allow_code: bool = False,
    dry_run: bool = False,
    yes: bool = False,
    notify: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> Swept:
    """Make every cell of one or more grids in a run folder, going on where an earlier call stopped.

    You may stop it at any time: a finished batch of rows is never made again, and the result is the
    same as without the stop. Several sweeps may fill one run folder. For example

        lapa2 sweep quick/sent_topic quick/scaling --out results/quick
        lapa2 sweep quick/alpha --set samples=1 --set length=48 --out results/try
        lapa2 sweep paper/detox --engine ray --address auto --out results/paper

    Args:
        names: Built-in grids (`lapa2 grids`), or paths of .toml files.
        out: The run folder.
        changes: KEY=VALUE replaces a key in every block, such as samples=2; repeat the option for
            more.
        only: Only cells with these settings, as COLUMN=VALUE, such as task=topic method=prefix (a
            column given twice, or a list: either value); the others stay missing. So a grid is made
            in parts, also on several machines.
        engine: local, or ray: workers on the machines of a Ray cluster.
        workers: By default one per GPU, or per CPU core.
        device: cpu, cuda, cuda:1; CUDA when there is one, by default. With ray also auto: a model
            over all GPUs of a worker.
        dtype: What dtype = "auto" means in the grids; by default that of the grid's cells in the
            run, else bfloat16 or float32, whichever this machine computes faster. Grids that name a
            dtype keep it.
        threads: CPU threads of a worker. Another number may change the last bits of a logit, and so
            a text.
        address: Address of a Ray cluster to join ("auto": the one this machine belongs to); by
            default one on this machine.
        gpus_per_worker: GPUs a Ray worker is given where the cluster has any (default: 1); a model
            may span several.
        pack: Compute with prepacked weights, which is faster on a CPU and takes as much memory
            again: auto where it fits, on, or off. Prepacking may change the last bits of a logit,
            and so a text.
        attn: Of a TransformersModel: fused reads prompts without the matrix of attention scores,
            matrix forms it, auto decides by their size, once a cell.
        allow_code: Import the modules of methods that a grid names as MODULE:CLASS. Other files of
            the grid are data, and never run.
        dry_run: Only say what is left to make, and what it takes.
        yes: Start also what reads over 10^11 tokens, or needs more memory than there is.
        notify: Called with what is to be made, and about cells that fail.

    Raises:
        GridError, ModelError: A grid is malformed, or a cell cannot be made.
        RunError: The folder holds something else or cannot be written, or the engine cannot start.
    """
    out, names = Path(out), [names] if isinstance(names, str) else names
    if not names:
        raise GridError(
            "name a grid: `lapa2 sweep quick/sent_topic --out RUN` (`lapa2 grids` lists them)"
        )
    if engine not in ENGINES:
        raise RunError(unknown_choice("engine", engine, ENGINES))
    if engine == "local":
        for name, value in (("address", address), ("gpus_per_worker", gpus_per_worker)):
            if value is not None:
                raise RunError(
                    f"{parameter(name, value)} belongs to {parameter('engine', 'ray')}, and"
                    " the engine is local; leave it"
                    f" out, or give {parameter('engine', 'ray')}"
                )
        check_device(device)
    grids = load_grids(
        out, names, changes, dtype=dtype, device=device, allow_code=allow_code, yes=yes
    )
    check_grids(grids)
    for model_class in dict.fromkeys(cell.model_class for grid in grids for cell in grid.cells):
        check_attn(attn, model_class)
    for used in dict.fromkeys(
        cell.dtype for grid in grids for cell in grid.cells if engine == "local"
    ):
        print_if_slow(used, device)
    cells = {cell.key: cell for grid in grids for cell in grid.cells}
    for column, value in (only or {}).items():
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
    runner = (
        local_engine(workers, device, threads, pack, attn)
        if engine == "local"
        else RayPool(workers, device, threads, address, gpus_per_worker, pack, attn)
    )
    try:
        if not isinstance(runner, InProcess):
            _check_methods(left)
        if left:
            left_to_make = estimate(left, device)
            notify(
                f"{len(left)} of {len(cells)} cells to make: {left_to_make}, with"
                f" {pluralize(runner.n_workers, 'worker')}\n{_listed_prefixes(left)}"
                f"\n{_listed_starts(left)}"
            )
            # A cluster's machines may have other memory than this one.
            memory = left_to_make.memory if engine == "local" else 0
            check_affordable(left_to_make.texts, left_to_make.row_tokens, memory, yes or dry_run)
        if dry_run:
            return Swept(len(cells) - len(left), 0, (), dry_run=True, folder=out)
        with stop_on_sigterm():
            return fill_run(out, grids, runner, notify, list(cells))
    except (KeyboardInterrupt, SystemExit):
        done = len(cells) - len(_unfinished(out, cells))
        notify(f"\n{done} of {pluralize(len(cells), 'cell')} finished")
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
