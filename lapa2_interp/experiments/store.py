"""A run folder: manifest.json, samples.parquet, trace.nc. It appears when it is complete, or not at all.

A folder is written beside its final place under a temporary name and renamed into place, so an interrupted run leaves no
half file, and a finished one is replaced only when asked.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from lapa2_interp import __version__
from lapa2_interp.augmentation import Augmentation
from lapa2_interp.errors import RunError, first_problem
from lapa2_interp.models import ModelCard

if TYPE_CHECKING:
    import xarray as xr

MANIFEST, SAMPLES, TRACE = "manifest.json", "samples.parquet", "trace.nc"


class Manifest(BaseModel):
    """Everything that decided a run's texts and numbers."""

    model_config = ConfigDict(extra="forbid")

    lapa2_interp: str = __version__
    """Version of this package."""
    created: datetime
    """When the run finished, UTC."""
    commit: str | None
    """Git commit of the package's source, with "+changes" if it was modified; None outside a checkout."""
    versions: dict[str, str]
    """Versions of the libraries that compute."""
    model: ModelCard
    method: str
    """Decoding method."""
    parameters: dict[str, float | bool | str]
    """The method's parameters, defaults included."""
    task: str
    attributes: tuple[str, ...]
    """Attributes steered towards."""
    branches: dict[str, dict[str, str | None]]
    """By attribute, then branch: the text in front of the prompt; None on the raw model."""
    prompts: tuple[str, ...]
    arms: dict[str, Augmentation | None]
    """The augmentations compared; None is the base method. Column `arm` of the samples names one."""
    length: int
    """Tokens of a text, the prompt's included where the task counts them."""
    length_counts_prompt: bool
    samples: int
    """Continuations per prompt."""
    seed: int
    top_k: int
    eos: str
    """EOS policy: keep, stop or block."""
    max_rows: int | None
    """Rows of a batch, which decides who shares one; None is the default rule."""
    trace: str
    """none, pooled or full."""
    patterns: tuple[tuple[int, int], ...] = ()
    """(layer, head) pairs whose whole attention rows were kept."""
    merged: tuple[str, ...] = ()
    """Tokens that cross the seam between a prefix and a prompt."""
    seconds: float
    """Time spent generating."""
    new_tokens: int
    """Tokens generated."""
    problems: tuple[str, ...] = ()
    """Texts that ended because no token was left to draw (`finish` is "empty"), and why."""


@dataclass(frozen=True)
class Run:
    """A finished run, read back."""

    manifest: Manifest
    samples: pd.DataFrame
    trace: xr.Dataset | None


def library_versions() -> dict[str, str]:
    """Versions of the libraries that compute."""
    names = ("torch", "transformers", "transformer-lens", "numpy", "scipy")
    return {name: version(name) for name in names}


def source_commit() -> str | None:
    """The git commit of the package's own source, or None when it is not a checkout."""

    def git(*words: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        if git("ls-files", __file__) == "":
            return None
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError, PackageNotFoundError):
        return None


@contextmanager
def new_folder(out: Path, force: bool = False) -> Iterator[Path]:
    """A folder that becomes `out` when the block ends well, and vanishes when it does not.

    Args:
        out: The run's place.
        force: Replace a finished run there. A folder that is not a run is never replaced.

    Raises:
        RunError: `out` is finished, is not a run, or cannot be written.
    """
    out = out.resolve()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if not (out / MANIFEST).is_file():
            raise RunError(f"{out} exists and is not a run folder; choose another --out")
        if not force:
            raise RunError(f"{out} holds a finished run; --force replaces it, or choose another --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror}; choose another --out") from None
    try:
        yield fresh
        fresh.chmod(0o755)
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}-old-", dir=out.parent))
            out.rename(old / out.name)
            fresh.rename(out)
            shutil.rmtree(old)
        else:
            fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_run(folder: Path, run: Run) -> None:
    """Write a run's three files into a folder from `new_folder`; the trace carries the manifest inside."""
    text = run.manifest.model_dump_json(indent=1)
    run.samples.to_parquet(folder / SAMPLES, index=False)
    if run.trace is not None:
        run.trace.assign_attrs(manifest=text).to_netcdf(folder / TRACE, engine="h5netcdf")
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_run(folder: Path) -> Run:
    """A finished run. Never generates anything.

    Raises:
        RunError: Not a run folder, or its manifest is of another form.
    """
    import xarray as xr

    if not (folder / MANIFEST).is_file():
        raise RunError(f"{folder} is not a run folder: it has no {MANIFEST}; `lapa2 generate --out` makes one")
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_text(encoding="utf-8"))
    except ValidationError as error:
        raise RunError(f"{folder / MANIFEST}: {first_problem(error)}") from None
    trace = None
    if (folder / TRACE).is_file():
        with xr.open_dataset(folder / TRACE, engine="h5netcdf") as stored:
            trace = stored.load()
    return Run(manifest, pd.read_parquet(folder / SAMPLES), trace)
