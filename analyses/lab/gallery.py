"""results.json: the models, settings and versions behind a folder of tables.

The file has one entry for each run that the tables come from. Grids may be run on different days
and machines.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
from pydantic import BaseModel, ConfigDict

from lapa2_interp import __version__
from lapa2_interp.errors import RunError, pluralize, validation_message
from lapa2_interp.models.machine import n_cores, processor_kind
from lapa2_interp.runs.manifest import library_versions, source_commit
from lapa2_interp.runs.run import Run


class GalleryRun(BaseModel):
    """The models, settings and versions behind the tables and figures of one run."""

    model_config = ConfigDict(extra="forbid")

    lapa2_interp: str = __version__
    """Version of this package."""
    analysed_at: str | None
    """Git commit of the package that scored and analysed; None outside a checkout."""
    analysed_when: datetime
    """UTC."""
    analysed_on: str
    """The machine that scored and analysed: kind of processor and number of cores."""
    analysed_with: dict[str, str]
    """Versions of the libraries that scored and analysed."""
    grids: dict[str, dict[str, int]]
    """By grid: the numbers of finished, failed, partly made and missing cells."""
    commits: tuple[str, ...]
    """Git commits of the package that generated; cells of a run that was resumed may have several.
    """
    versions: dict[str, tuple[str, ...]]
    """Versions of the libraries that generated."""
    weights: dict[str, tuple[str, ...]]
    """Origin of the weights, by model."""
    dtypes: tuple[str, ...]
    """Precisions of the models that generated."""
    devices: tuple[str, ...]
    """Devices those models ran on."""
    threads: tuple[int, ...]
    """CPU threads of a worker."""
    seeds: tuple[int, ...]
    """Seeds of the random streams."""
    prefixes: dict[str, str]
    """sha256 of the soft prefixes' files, by prefix."""
    scorers: tuple[str, ...]
    """Names and versions of scorers; the version of a scorer with weights names the weights."""
    texts: int
    """Generated texts."""
    tokens: int
    """Generated tokens."""
    seconds: float
    """Seconds of generation, summed over workers."""


class Gallery(BaseModel):
    """The content of results.json."""

    model_config = ConfigDict(extra="forbid")

    runs: tuple[GalleryRun, ...]

    def with_run(self, newer: GalleryRun) -> Gallery:
        """These runs and a newer one, which replaces the grids that it has. A grid keeps its last
        name when it moves to another folder."""
        replaced = {Path(name).name for name in newer.grids}
        older = []
        for older_run in self.runs:
            left = {
                name: states
                for name, states in older_run.grids.items()
                if Path(name).name not in replaced
            }
            if left:
                older.append(older_run.model_copy(update={"grids": left}))
        return Gallery(runs=(newer, *older))


def read_gallery(folder: Path) -> Gallery:
    """Read the results.json of a folder of results; empty if there is none.

    Raises:
        RunError: The file is damaged, or of another version.
    """
    file = folder / "results.json"
    if not file.is_file():
        return Gallery(runs=())
    try:
        return Gallery.model_validate(json.loads(file.read_text("utf-8")))
    except ValueError as error:
        raise RunError(
            f"{file} cannot be read: {validation_message(error)}; `make gallery` writes it again"
        ) from error


def gallery_run(run: Run, tables: Path, items: Collection[str]) -> GalleryRun:
    """The entry of a run in results.json.

    Args:
        tables: Folder of its items' CSV files, whose column `scorer` names scorers.
        items: Names of the items made from this run.
    """
    # What the manifests, the cells and the tables say.
    manifests = [run.manifest(key) for key in run.finished]
    prefixes = {
        str(prefix): prefix.sha256
        for manifest in manifests
        for prefix in manifest.branches.values()
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
    # Distinct values of each, in order.
    return GalleryRun(
        analysed_at=source_commit(),
        analysed_when=datetime.now(UTC).replace(microsecond=0),
        analysed_on=f"{processor_kind()}, {pluralize(n_cores(), 'core')}",
        analysed_with=library_versions(),
        grids={
            grid: {str(state): int(n) for state, n in states[list(keys)].value_counts().items()}
            for grid, keys in run.listing.grids.items()
        },
        commits=_unique(manifest.commit or "not a checkout" for manifest in manifests),
        versions={
            name: _unique(manifest.versions[name] for manifest in manifests)
            for name in (manifests[0].versions if manifests else {})
        },
        weights={
            model: _unique(
                manifest.model.weights for manifest in manifests if manifest.model.name == model
            )
            for model in _unique(manifest.model.name for manifest in manifests)
        },
        dtypes=_unique(manifest.model.dtype for manifest in manifests),
        devices=_unique(manifest.model.device for manifest in manifests),
        threads=tuple(sorted({manifest.threads for manifest in manifests if manifest.threads})),
        seeds=tuple(sorted({manifest.cell.seed for manifest in manifests})),
        prefixes=prefixes,
        scorers=tuple(sorted(scorers)),
        texts=int(sum(manifest.cell.n_texts for manifest in manifests)),
        tokens=sum(manifest.new_tokens for manifest in manifests),
        seconds=round(sum(manifest.seconds for manifest in manifests), 1),
    )


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
