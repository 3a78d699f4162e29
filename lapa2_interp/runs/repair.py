"""Setting back what is damaged in a run, so that the next sweep makes it again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lapa2_interp.cell import Cell
from lapa2_interp.errors import DamagedError, RunError
from lapa2_interp.files import remove_folder
from lapa2_interp.runs.locks import locked, writing
from lapa2_interp.runs.manifest import read_manifest
from lapa2_interp.runs.read import (
    SAMPLES,
    TRACE,
    Failure,
    Listing,
    is_whole,
    load_run,
    read_file,
    read_listing,
    read_plan,
    write_listing,
)
from lapa2_interp.runs.sweep import read_part

AGAIN = "the next sweep makes the cell again"
FOUND = "found"
"""Name of the list of cells in a run.json that was written anew."""


def repair(folder: Path) -> list[str]:
    """Read every file of a run, and remove those that are damaged. Whole files stay.

    A sweep of the run's grids then makes what is missing.

    Returns:
        One line for each thing that was found and done.

    Raises:
        RunError: The folder is no run, of another version, in use, or cannot be written.
    """
    if not (folder / "plan").is_dir():
        load_run(folder)  # says what is wrong, if it is no run
        raise RunError(f"{folder} is one cell by itself, which no sweep fills; make it again")
    with locked(folder), writing(folder):
        done = _listing(folder)
        run = load_run(folder)
        for key, cell in run.plan.items():
            done += _cell(run.place(key), cell)
            done += _leftovers(folder, key)
    return done


def _listing(folder: Path) -> list[str]:
    """Make run.json and the plans of its cells such that they can be read."""
    done = []
    try:
        listing = read_listing(folder)
    except DamagedError as error:
        keys = [file.stem for file in sorted((folder / "plan").glob("*.json"))]
        listing = Listing(grids={FOUND: tuple(keys)})
        done.append(
            f"{_reason(error)}: written anew with its {len(keys)} cells under the name {FOUND!r};"
            " a sweep of each grid lists its cells under the grid's name again"
        )
    lost = set()
    for key in dict.fromkeys(key for keys in listing.grids.values() for key in keys):
        try:
            read_plan(folder, key)
        except DamagedError as error:
            lost.add(key)
            plan = folder / "plan" / f"{key}.json"
            remove_folder(plan) if plan.is_dir() else plan.unlink(missing_ok=True)
            done.append(
                f"{_reason(error)}: removed, and its cell taken out of the run; a sweep of"
                f" {', '.join(listing.with_cell(key))} brings it back with what was made of it"
            )
    if done:
        for name, its in listing.grids.items():
            listing.grids[name] = tuple(key for key in its if key not in lost)
        write_listing(folder, listing)
    return done


def _cell(place: Path, cell: Cell) -> list[str]:
    """Remove damaged files of a finished cell that do not show from outside."""
    if not place.is_dir():
        return []
    if not is_whole(place, cell):
        reason = _problem(read_manifest, place) or f"{place} is not whole"
        return [f"{reason}: {AGAIN}"]
    done = []
    for name in (SAMPLES, TRACE) if cell.trace != "none" else (SAMPLES,):
        if reason := _problem(read_file, place, name):
            (place / name).unlink()
            done.append(f"{reason}: removed, and {AGAIN}")
    return done


def _leftovers(folder: Path, key: str) -> list[str]:
    """Remove damaged groups of an unfinished cell, and a damaged note of why it failed."""
    done = []
    for part in sorted((folder / "parts" / key).glob("[0-9]*")):
        if reason := _problem(read_part, part):
            remove_folder(part)
            done.append(f"{reason}: removed, and the next sweep makes the group again")
    note = folder / "failed" / f"{key}.json"
    with suppress(FileNotFoundError):
        try:
            Failure.model_validate_json(note.read_text("utf-8"))
        except ValueError:
            note.unlink()
            done.append(f"{note} is damaged: removed; why the cell failed is not known any more")
    return done


def _problem(read: Callable[..., Any], *place: Any) -> str:
    """What is wrong with something, "" where nothing is."""
    try:
        read(*place)
    except RunError as error:
        return _reason(error)
    return ""


def _reason(error: RunError) -> str:
    return str(error).partition(";")[0]
