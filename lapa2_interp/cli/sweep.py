"""The commands of experiments: `lapa2 grids | sweep | runs`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lapa2_interp._util.terminal import escape_line
from lapa2_interp.cli.functions import Values, command_of
from lapa2_interp.cli.options import AsJson, Changes
from lapa2_interp.commands import command
from lapa2_interp.errors import RunError, pluralize
from lapa2_interp.runs.settings import SweepSettings

if TYPE_CHECKING:
    from lapa2_interp.runs.fill import Swept


def grids(
    *names: str, changes: Changes = (), allow_code: bool = False, as_json: AsJson = False
) -> None:
    """List experiment grids with their cells, and what each takes.

    paper/* are the paper's settings, quick/* the same shapes for the embedded model. With names,
    also every cell of those.

    Args:
        names: Built-in grids, or paths of .toml files.
        changes: KEY=VALUE replaces a key in every block, such as samples=2 or length=64; repeat the
            option for more.
        allow_code: Import the modules of methods that a grid names as MODULE:CLASS.
        as_json: Print JSON, cells in full.
    """
    from lapa2_interp._util.terminal import format_bytes
    from lapa2_interp.models.machine import machine_memory
    from lapa2_interp.models.sizes import model_size
    from lapa2_interp.runs.estimates import estimate
    from lapa2_interp.runs.grid import EXAMPLE, built_in, load_grid, parse_changes

    chosen = [
        load_grid(name, parse_changes(changes), check=False, allow_code=allow_code)
        for name in names or built_in()
    ]
    if as_json:
        listed = [
            {
                "name": grid.name,
                "cells": [cell.model_dump(mode="json") | {"key": cell.key} for cell in grid.cells],
            }
            for grid in chosen
        ]
        print(json.dumps(listed))
        return
    print(f"{'grid':<20} {'cells':>5} {'texts':>7} {'row-tokens':>11}  {'disk':>8}  {'memory':>8}")
    notes = []
    for grid in chosen:
        size = estimate(grid.cells)
        fits = "" if size.memory < 0.9 * machine_memory() else "  not on this machine"
        print(
            f"{grid.name:<20} {len(grid.cells):>5} {size.texts:>7} {size.row_tokens:>11} "
            f" {format_bytes(size.disk):>8}  {format_bytes(size.memory):>8}{fits}\n"
            f"    {grid.description}"
        )
        notes += [f"{grid.name} cannot run yet: {need}" for need in grid.needs]
        for cell in grid.cells:
            if cell.length > (most := model_size(cell.model).n_ctx):
                notes.append(
                    f"{grid.name} cannot run: length {cell.length} exceeds the context of {most} of"
                    f" {cell.model}"
                )
    print(
        "\nrow-tokens: tokens that the model reads, in all branches; cells that grids share are"
        " made once; memory: of a worker. A sweep shows the time that is left, from its first"
        " batch"
    )
    for note in dict.fromkeys(notes):
        print(note)
    if names:
        for grid in chosen:
            for cell in grid.cells:
                print(f"{cell.key}  {cell.description}, {cell.samples} x {cell.length}")
    else:
        print(
            "\na grid of your own: save this as grid.toml, change it, and `lapa2 sweep grid.toml"
            " --out RUN`\n"
        )
        print(EXAMPLE, end="")


def _print_swept(swept: Swept, values: Values) -> None:
    print(swept.summary())
    if swept.failed:
        raise RunError(
            f"{pluralize(len(swept.failed), 'cell')} failed; `{command('runs', values['out'])}`"
            " says why, and the same command tries them again"
        )


def _read_changes(texts: Sequence[str], values: Values) -> dict[str, Any]:
    from lapa2_interp.runs.grid import parse_changes

    return parse_changes(texts)


sweep = command_of(
    SweepSettings, "runs.sweep:sweep", read={"changes": _read_changes}, show=_print_swept
)


def runs(
    run: Path,
    /,
    *,
    state: Literal["all", "finished", "failed", "partly", "damaged", "missing"] = "all",
    traceback: bool = False,
    remove_earlier: bool = False,
    as_json: AsJson = False,
) -> None:
    """Tell what is in a run: which cells are finished, missing or damaged, which failed and why.

    A file that was cut short or is missing shows at once; one that changed shows when it is read.
    Cells of earlier grids, which no table or report shows, come last.

    Args:
        run: The folder of `lapa2 generate` or `lapa2 sweep`.
        state: Only cells in this state.
        traceback: Print the whole traceback of failed cells.
        remove_earlier: Remove the cells that no grid of the run has now, with their texts.
        as_json: Print JSON, one object per cell; the grids of an earlier grid's cell are empty.
    """
    from lapa2_interp.runs.fill import remove_earlier_cells
    from lapa2_interp.runs.run import load_run
    from lapa2_interp.runs.store import STATES

    if as_json and (traceback or remove_earlier):
        option = "--traceback" if traceback else "--remove-earlier"
        raise RunError(f"{option} prints texts, which --json has no place for; give one of them")
    listed = load_run(run, earlier=True)
    if remove_earlier:
        print(
            f"{pluralize(len(remove_earlier_cells(run, print)), 'cell')} of earlier grids removed\n"
        )
        listed = load_run(run, earlier=True)
    table = listed.cells
    shown = table if state == "all" else table[table["state"] == state]
    if as_json:
        print(shown.to_json(orient="records", indent=1))
        return
    earlier = table["key"][table["grids"] == ""].tolist()
    groups: dict[str, Sequence[str]] = dict(listed.listing.grids)
    if earlier:
        groups["earlier grids (in no table or report; --remove-earlier removes them)"] = earlier
    for grid, keys in groups.items():
        states = table[table["key"].isin(keys)]["state"].tolist()
        print(
            f"{grid}: "
            + (
                ", ".join(f"{states.count(name)} {name}" for name in STATES if name in states)
                or "no cells"
            )
        )
    print()
    for row in shown.to_dict("records"):
        made = (
            f"{row['tokens']:.0f} tokens, {row['seconds']:.0f} s"
            if row["state"] == "finished"
            else row["why"]
        )
        where = f"{listed.by_key[row['key']].description}, {row['samples']} x {row['max_length']}"
        where += ", of an earlier grid" * (not row["grids"])
        print(escape_line(f"{row['key']}  {row['state']:<8}  {where}  {made}".rstrip()))
    failures = listed.failures
    if traceback:
        for key in shown["key"]:
            if key in failures:
                print(
                    f"\n{key}, {failures[key].when:%Y-%m-%d %H:%M}"
                    f" UTC\n{failures[key].traceback.rstrip()}"
                )
    elif failures:
        print(
            "\n--traceback shows where; `lapa2 sweep` with the same grids tries failed cells again"
        )
    if (table["state"] == "damaged").any():
        print(
            "\n`lapa2 sweep` with the same grids, or `lapa2 generate` with --force, makes damaged"
            " cells again"
        )
