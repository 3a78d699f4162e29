"""A run folder: manifest.json, samples.parquet, trace.nc. It appears when it is complete, or not at all.

A folder is written beside its final place under a temporary name and renamed into place, so an interrupted run leaves no
half file, and a finished one is replaced only when asked.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from lapa2_interp import __version__
from lapa2_interp.augmentation import Augmentation
from lapa2_interp.errors import RunError, first_problem
from lapa2_interp.models import ModelCard
from lapa2_interp.prefixes import SoftName

if TYPE_CHECKING:
    import xarray as xr

MANIFEST, SAMPLES, TRACE = "manifest.json", "samples.parquet", "trace.nc"
OF_THE_DAY = ("created", "seconds", "commit")
"""Fields of a manifest that differ between equal runs."""


class Manifest(BaseModel):
    """Everything that decided a run's texts and numbers."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["run", "tables"] = "run"
    """What the folder holds: a run's texts and trace, or tables and figures read off one."""
    lapa2_interp: str = __version__
    """Version of this package."""
    cell: str | None = None
    """Key of the cell of a sweep (`lapa2 sweep`); None for a run by itself."""
    created: datetime
    """When the run finished, UTC."""
    commit: str | None
    """Git commit of the package's source, with "+changes" if it was modified; None outside a checkout."""
    versions: dict[str, str]
    """Versions of the libraries that compute."""
    model: ModelCard
    """The model, its weights, precision and device."""
    method: str
    """Decoding method."""
    parameters: dict[str, float | bool | str]
    """The method's parameters, defaults included."""
    task: str
    """Control task."""
    attributes: tuple[str, ...]
    """Attributes steered towards."""
    branches: dict[str, dict[str, str | SoftName | None]]
    """By attribute, then branch: the text in front of the prompt (a form with {blanks} where each prompt has its own words, see
    `prepared`), or the soft prefix; None on the raw model."""
    prepared: dict[str, dict[str, dict[str, Any]]] = {}
    """By attribute, then prompt ("all prompts" where it is the same): what the method worked out, such as DATG's words."""
    prompts: tuple[str, ...]
    """What is continued."""
    arms: dict[str, Augmentation | None]
    """The augmentations compared; None is the base method. Column `arm` of the samples names one."""
    length: int
    """Tokens of a text, the prompt's included where the task counts them."""
    length_counts_prompt: bool
    """Whether a text begins with its prompt and `length` counts it."""
    samples: int
    """Continuations per prompt."""
    seed: int
    """Of the random streams."""
    top_k: int
    """Tokens kept of the controlled weights."""
    eos: str
    """EOS policy: keep, stop or block."""
    doubled_bos: bool = False
    """Two BOS tokens in front, as the released scripts feed LLaMA."""
    max_rows: int | None
    """Rows of a batch, which decides who shares one; None is the default rule."""
    trace: str
    """none, pooled or full."""
    patterns: tuple[tuple[int, int], ...] = ()
    """(layer, head) pairs whose whole attention rows were kept."""
    merged: tuple[str, ...] = ()
    """Tokens that cross the seam between a prefix and a prompt."""
    threads: int | None = None
    """CPU threads of the worker that made it, which may decide last bits; None on an accelerator and where it was not set."""
    seconds: float
    """Time spent generating; of a cell with its loading and preparing."""
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
    except (OSError, subprocess.CalledProcessError):
        return None


@contextmanager
def new_folder(
    out: Path, force: bool = False, kind: str = "run", finished: Callable[[Path], bool] | None = None
) -> Iterator[Path]:
    """A folder that becomes `out` when the block ends well, and vanishes when it does not.

    Args:
        out: The folder's place.
        force: Replace a finished folder of this kind there. Anything else there is never replaced.
        kind: As the manifest's.
        finished: Tells a finished folder that has no manifest of a run.

    Raises:
        RunError: `out` is finished, is something else, or cannot be written.
    """
    out = out.resolve()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if not (finished(out) if finished else _kind(out) == kind):
            raise RunError(f"{out} exists and is not a folder of this command's making; choose another --out")
        if not force:
            raise RunError(f"{out} is finished; --force replaces it, or choose another --out")
    made = [folder for folder in out.parents if not folder.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror}; choose another --out") from error
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
        if not out.exists():
            for folder in made:
                with suppress(OSError):  # somebody else put something there meanwhile
                    folder.rmdir()


def _kind(folder: Path) -> str | None:
    try:
        return read_manifest(folder).kind
    except RunError:
        return None


def write_run(folder: Path, run: Run) -> None:
    """Write a run's three files into a folder from `new_folder`.

    The trace carries the manifest inside, less what is of the day, so that equal runs have equal bytes.
    """
    text = run.manifest.model_dump_json(indent=1)
    run.samples.to_parquet(folder / SAMPLES, index=False)
    if run.trace is not None:
        lasting = run.manifest.model_dump_json(indent=1, exclude=set(OF_THE_DAY))
        write_trace(folder / TRACE, run.trace.assign_attrs(manifest=lasting))
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def write_trace(file: Path, trace: xr.Dataset) -> None:
    """A trace as netCDF, by way of memory: HDF5 takes the process down when the disk is full."""
    file.write_bytes(trace.to_netcdf(engine="h5netcdf"))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished folder.

    Raises:
        RunError: It has none, or one of another form.
    """
    if not (folder / MANIFEST).is_file():
        hint = "`lapa2 generate --out` makes one"
        if (folder / "run.json").is_file():
            hint = f"it is a sweep's; give a cell of it, {folder / 'cells'}/KEY (`lapa2 runs {folder}` lists them)"
        raise RunError(f"{folder} is not a run folder: it has no {MANIFEST}; {hint}")
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise RunError(f"{folder / MANIFEST} is not a manifest of this version: {reason}") from error


def read_run(folder: Path) -> Run:
    """A finished run. Never generates anything.

    Raises:
        RunError: Not a run folder, or a file in it is missing or damaged.
    """
    import xarray as xr

    manifest = read_manifest(folder)
    if manifest.kind != "run":
        raise RunError(f"{folder} holds tables read off a run, not a run; give the run's own folder")
    file = folder / SAMPLES
    try:
        samples = pd.read_parquet(file)
        if manifest.trace == "none":
            return Run(manifest, samples, None)
        file = folder / TRACE
        with xr.open_dataset(file, engine="h5netcdf") as stored:
            return Run(manifest, samples, stored.load())
    except (OSError, ValueError, KeyError) as error:
        raise RunError(
            f"{file} is missing or damaged ({' '.join(str(error).split())[:120]}); generate the run again"
        ) from error
