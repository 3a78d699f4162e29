"""Reading the attention that a run recorded: curves against step, their decay fits, heads, prefix
tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from lapa2_interp._util import plots
from lapa2_interp._util.errors import TraceError
from lapa2_interp._util.files import holds_only, result_folder, write_text
from lapa2_interp._util.table_formats import as_csv
from lapa2_interp.attention.tables import (
    augmented_part,
    branch_name,
    fit_table,
    head_table,
    prefix_token_table,
    step_table,
)
from lapa2_interp.bias.augmentation import Augmentations
from lapa2_interp.generation.loop import join_traces
from lapa2_interp.runs.run import Run, begun, shown_only
from lapa2_interp.runs.tables import ALIKE

if TYPE_CHECKING:
    import xarray as xr

WRITTEN = ("steps.*", "fits.*", "prefix_tokens.*", "head*.*", "cells.csv", "*_attention.png")
"""Names of the tables and figures."""


@dataclass(frozen=True)
class Attention:
    """Recorded attention of the arms of one method on one task.

    Attributes:
        trace: The trace of all their texts; row i of the samples is sample i.
        samples: One row per text.
        branch: The branch that is read, one of `branches`.
        part: What its augmentation acts on: "prefix", or "prompt" on the raw model.
        tables: steps, fits, and where they apply prefix_tokens and heads.
        arms: Augmentations by arm.
        cells: One row per cell, as in `Run.cells`.
        left_out: Texts that ended before a first token, which have no attention.
    """

    trace: xr.Dataset
    samples: pd.DataFrame
    branch: str
    part: str
    tables: dict[str, pd.DataFrame]
    arms: dict[str, Augmentations]
    cells: pd.DataFrame
    left_out: int = 0

    @property
    def branches(self) -> list[str]:
        """The method's branches."""
        return [str(name) for name in self.trace["branch"].to_numpy()]

    def figures(self) -> dict[str, plots.Drawing]:
        """Drawings of the tables, by name."""
        found = {
            f"{self.part}_attention": plots.attention_curves(
                self.tables["steps"], self.tables["fits"], self.part
            )
        }
        if "prefix_tokens" in self.tables:
            found["prefix_tokens"] = plots.prefix_token_bars(self.tables["prefix_tokens"])
        if "heads" in self.tables:
            found["head_maps"] = plots.head_maps(self.tables["heads"], self.part)
        return found

    def save(self, out: Path, force: bool = False) -> None:
        """Write tables (CSV) and figures (PNG) into a new folder.

        Raises:
            RunError: As `files.result_folder`.
        """
        with result_folder(out, force, holds_only("steps.csv", *WRITTEN)) as folder:
            for name, table in {**self.tables, "cells": self.cells}.items():
                write_text(folder / f"{name}.csv", as_csv(table))
            for name, figure in self.figures().items():
                figure.savefig(folder / f"{name}.png")


def read_attention(
    run: Run, only: Mapping[str, Any] | None = None, branch: str | None = None
) -> Attention:
    """Read what the finished cells of a run recorded.

    Args:
        only: Only cells whose columns have these values, such as {"method": "prefix"}.
        branch: Which branch of the method; by default the first with a prefix.

    Raises:
        TraceError: No cell has a trace, or the cells are of several models, tasks or methods.
        RunError: No such column, or a cell is damaged.
    """
    cells = run.cells[run.cells["key"].isin(run.select(**(only or {})).by_key)]
    cells = cells[[run.by_key[key].trace != "none" for key in cells["key"]]]
    if not len(cells):
        raise TraceError(f"{run.name} has no trace; generate it with --trace full or pooled")
    for key in cells["key"][cells["state"] == "damaged"]:
        run.finished_cell(key)  # which refuses it
    cells = cells[cells["state"] == "finished"]
    if not len(cells):
        raise TraceError(
            f"no cell of {run.name}{f' with {shown_only(only)}' if only else ''} is finished;"
            " `lapa2 sweep` with their grid makes them"
        )
    mixed = [name for name in ALIKE if cells[name].nunique() > 1]
    if mixed:
        there = "; ".join(
            f"{name}: {', '.join(map(str, dict.fromkeys(cells[name])))}" for name in mixed
        )
        raise TraceError(
            f"{run.name} has cells of several kinds ({there}); choose one, such as --only"
            f" {mixed[0]}={cells[mixed[0]].iloc[0]}"
        )
    kinds = {run.by_key[key].trace for key in cells["key"]}
    made = [run.finished_cell(key) for key in cells["key"]]
    all_samples = run.samples(list(cells["key"]))
    joined = join_traces([each.trace for each in made if each.trace is not None], all_samples)
    samples, trace = begun(all_samples, joined)
    if not len(samples):
        raise TraceError(f"all texts of {run.name} ended before a first token: nothing was traced")
    steps, part = step_table(trace, samples, branch), augmented_part(trace, branch)
    tables = {"steps": steps, "fits": fit_table(steps, part)}
    if part == "prefix":
        tables["prefix_tokens"] = prefix_token_table(trace, samples, branch)
    if kinds == {"full"}:
        tables["heads"] = head_table(trace, samples, branch)
    arms = {run.by_key[key].arm: run.by_key[key].augmentation for key in cells["key"]}
    left_out = len(all_samples) - len(samples)
    return Attention(
        trace, samples, branch_name(trace, branch), part, tables, arms, cells, left_out
    )
