"""What decided the numbers of a folder of tables: one manifest over all cells of each run they were
read from. Grids may be run apart, on other days and machines."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from lapa2_interp._util.errors import RunError, first_problem, pluralize
from lapa2_interp._util.files import parse_json, read_text
from lapa2_interp._util.version import __version__
from lapa2_interp.models.machine import n_cores, processor_kind
from lapa2_interp.runs.manifest import library_versions, source_commit
from lapa2_interp.runs.store import Run


class Results(BaseModel):
    """Everything that decided the numbers of a run's tables and figures."""

    model_config = ConfigDict(extra="forbid")

    lapa2_interp: str = __version__
    """Version of this package."""
    analysed_at: str | None
    """Git commit of the package that scored and analysed; None outside a checkout."""
    analysed_when: datetime
    """UTC."""
    analysed_on: str
    """The machine that scored and analysed: the kind of its processor, and cores."""
    analysed_with: dict[str, str]
    """Versions of the libraries it used."""
    grids: dict[str, dict[str, int]]
    """By grid: how many cells are finished, failed, partly made, missing."""
    commits: tuple[str, ...]
    """Git commits of the package that generated; cells of a run that was resumed may have several.
    """
    versions: dict[str, tuple[str, ...]]
    """Versions of the libraries that generated."""
    weights: dict[str, tuple[str, ...]]
    """By model: where its weights come from."""
    dtypes: tuple[str, ...]
    """Precisions of the models that generated."""
    devices: tuple[str, ...]
    """Devices those models ran on."""
    threads: tuple[int, ...]
    """CPU threads of a worker."""
    seeds: tuple[int, ...]
    """Seeds of the random streams."""
    prefixes: dict[str, str]
    """sha256 of the soft prefixes' files, by what they are."""
    scorers: tuple[str, ...]
    """Names and versions of scorers; the version of one that reads weights names them."""
    texts: int
    """Generated texts."""
    tokens: int
    """Generated tokens."""
    seconds: float
    """Seconds of generating, summed over workers."""


class Gallery(BaseModel):
    """results.json: what decided the numbers, one entry for each run that tables come from."""

    model_config = ConfigDict(extra="forbid")

    runs: tuple[Results, ...]

    def besides(self, newer: Results) -> Gallery:
        """These runs and a newer one, whose grids take the place of theirs."""
        kept = [
            each.model_copy(
                update={
                    "grids": {
                        name: states
                        for name, states in each.grids.items()
                        if name not in newer.grids
                    }
                }
            )
            for each in self.runs
        ]
        return Gallery(runs=(newer, *(each for each in kept if each.grids)))


def read_gallery(folder: Path) -> Gallery:
    """The results.json of a folder of results; empty where there is none.

    Raises:
        RunError: It is damaged, or of another version.
    """
    file = folder / "results.json"
    if not file.is_file():
        return Gallery(runs=())
    try:
        return Gallery.model_validate(parse_json(read_text(file)))
    except ValueError as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise RunError(f"{file} cannot be read: {reason}; `make gallery` writes it anew") from error


def results_of(run: Run, tables: Path, items: Collection[str]) -> Results:
    """The manifest of the tables read from a run.

    Args:
        tables: The folder of its items' CSV files, whose column `scorer` names scorers.
        items: The items that the run has made.
    """
    found = [run.manifest(key) for key in run.finished]
    prefixes = {
        str(prefix): prefix.sha256
        for manifest in found
        for branches in manifest.branches.values()
        for prefix in branches.values()
        if prefix is not None and not isinstance(prefix, str)
    }
    states = run.cells.set_index("key")["state"]
    columns = [
        pd.read_csv(file, usecols=lambda name: name == "scorer")
        for file in sorted(tables.glob("*.csv"))
        if file.name.partition(".")[0] in items
    ]
    scorers = {
        str(name) for table in columns if "scorer" in table for name in table["scorer"].dropna()
    }
    return Results(
        analysed_at=source_commit(),
        analysed_when=datetime.now(UTC).replace(microsecond=0),
        analysed_on=f"{processor_kind()}, {pluralize(n_cores(), 'core')}",
        analysed_with=library_versions(),
        grids={
            grid: {str(state): int(n) for state, n in states[list(keys)].value_counts().items()}
            for grid, keys in run.listing.grids.items()
        },
        commits=_all(manifest.commit or "not a checkout" for manifest in found),
        versions={
            name: _all(manifest.versions[name] for manifest in found)
            for name in (found[0].versions if found else {})
        },
        weights={
            model: _all(each.model.weights for each in found if each.model.name == model)
            for model in _all(each.model.name for each in found)
        },
        dtypes=_all(manifest.model.dtype for manifest in found),
        devices=_all(manifest.model.device for manifest in found),
        threads=tuple(sorted({manifest.threads for manifest in found if manifest.threads})),
        seeds=tuple(sorted({manifest.seed for manifest in found})),
        prefixes=prefixes,
        scorers=tuple(sorted(scorers)),
        texts=int(sum(len(manifest.prompts) * manifest.samples for manifest in found)),
        tokens=sum(manifest.new_tokens for manifest in found),
        seconds=round(sum(manifest.seconds for manifest in found), 1),
    )


def _all(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
