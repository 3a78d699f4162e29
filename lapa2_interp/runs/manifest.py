"""The manifest of a cell: everything that decided its texts and numbers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from lapa2_interp._util.errors import DamagedError, RunError, validation_message
from lapa2_interp._util.files import sha256_of, with_checksums, without_checksums
from lapa2_interp._util.parsing import read_text
from lapa2_interp._util.version import __version__
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.plan import BatchPlan
from lapa2_interp.models.card import Model, ModelCard, model_card
from lapa2_interp.prefixes.soft_prefix import SoftPrefixName

MANIFEST = "manifest.json"
SET_BACK = "remove the folder of the cell, and the command that made the run makes it again"
"""Remedy for a damaged file of a cell."""
OF_THE_DAY = ("created", "seconds", "commit")
"""Fields of a manifest that differ between equal cells."""


class Manifest(BaseModel):
    """The cell, and what else decided its texts and numbers."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    cell: Cell
    """The settings, resolved."""
    lapa2_interp: str = __version__
    """Version of this package."""
    created: datetime
    """Time at which the cell was finished, UTC."""
    commit: str | None
    """Git commit of the package's source, with "+changes" if it was modified; None outside a
    checkout."""
    versions: dict[str, str]
    """Versions of the libraries that compute."""
    model: ModelCard
    """The model, its weights, precision and device."""
    branches: dict[str, str | SoftPrefixName | None]
    """By branch: the text in front of the prompt (a form with {blanks} where each prompt has its
    own words, see `prepared`), or the soft prefix; None on the raw model."""
    prepared: dict[str, dict[str, Any]] = {}
    """By prompt ("all prompts" where it is equal for all): the method's preparation, such as DATG's
    words."""
    merged: tuple[str, ...] = ()
    """Tokens that span the boundary between a prefix and a prompt."""
    threads: int | None = None
    """CPU threads that computed it, which may decide last bits; None on an accelerator."""
    seconds: float
    """Seconds spent generating; those of a cell include loading and preparing."""
    new_tokens: int
    """Number of generated tokens."""
    problems: tuple[str, ...] = ()
    """Texts that ended because no token was left to draw (`finish` is "empty"), and why."""

    @classmethod
    def of(
        cls,
        cell: Cell,
        facts: Mapping[str, Any],
        *,
        seconds: float,
        new_tokens: int,
        problems: Sequence[str],
    ) -> Manifest:
        """The manifest of a cell that has just been finished.

        Args:
            facts: From `facts_of`.
        """
        return cls(
            cell=cell,
            created=datetime.now(UTC),
            seconds=round(seconds, 3),
            new_tokens=new_tokens,
            problems=tuple(problems),
            **facts,
        )


def facts_of(model: Model, plan: BatchPlan, threads: int | None) -> dict[str, Any]:
    """Fields of a manifest that are known only to the process that makes the cell.

    Args:
        threads: CPU threads; None on an accelerator.
    """
    card = model_card(model)
    return {
        # Without the number of the GPU: workers with other GPUs make the cell's other groups.
        "model": card.model_copy(update={"device": card.device.partition(":")[0]}),
        "branches": plan.prefix_names,
        "prepared": plan.summaries,
        "merged": tuple(plan.merged),
        "versions": library_versions(),
        "commit": source_commit(),
        "threads": threads,
    }


def library_versions() -> dict[str, str]:
    """Versions of the libraries that compute."""
    names = ("torch", "transformers", "transformer-lens", "numpy", "scipy")
    return {name: version(name) for name in names}


def source_commit() -> str | None:
    """The git commit of the package's own source, or None when it is not a checkout."""

    def git(*words: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(
            ["git", "-C", here, *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if git("ls-files", __file__) == "":
            return None
        return git("rev-parse", "HEAD") + (
            "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest beside a cell's other files, whose sha256 are noted in it."""
    files = sorted(folder.iterdir())
    text = with_checksums(manifest.model_dump_json(), files)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(folder: Path, check: Sequence[str] = ()) -> Manifest:
    """The manifest of a finished cell.

    Args:
        check: Names of files beside it that must have the sha256 noted in it, if one is.

    Raises:
        RunError: It has none, or one of another form.
        DamagedError: It, or a file of `check`, is not what was written.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise RunError(f"{folder} is not the folder of a cell: it has no {MANIFEST}")
    try:
        fields, sums = without_checksums(read_text(file))
    except ValueError as error:
        raise DamagedError(f"{file} is damaged: {error}; {SET_BACK}") from error
    for name in check:
        if name in sums and sums[name] != sha256_of(folder / name):
            raise DamagedError(
                f"{folder / name} is damaged: its sha256 is not that in {MANIFEST}; {SET_BACK}"
            )
    try:
        return Manifest.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        raise RunError(
            f"{file} is not a manifest of this version: {validation_message(error)}"
        ) from error
