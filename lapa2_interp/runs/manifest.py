"""Records of finished batches, and the manifest of a cell: all that decided texts and numbers."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from lapa2_interp._util.version import __version__
from lapa2_interp.errors import TraceError
from lapa2_interp.generation.batch import BatchPlan
from lapa2_interp.generation.cell import Cell
from lapa2_interp.models.card import ModelCard, identify
from lapa2_interp.models.facts import Model, describe_paths
from lapa2_interp.models.machine import peak_memory, processor_kind
from lapa2_interp.prefixes.soft_prefix import SoftPrefixName

if TYPE_CHECKING:
    import pandas as pd


class Facts(BaseModel):
    """Facts of generated texts: the software, the machine and the model that made them, which with
    the cell are all that decides them; and the work that it was."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    lapa2_interp: str = __version__
    """Version of this package."""
    commit: str | None
    """Git commit of the package's source, with "+changes" if it was modified; None outside a
    checkout."""
    versions: dict[str, str]
    """Versions of the libraries that compute."""
    processor: str
    """Kind of processor, which decides last bits."""
    threads: int | None
    """CPU threads that computed it, which may decide last bits; None on an accelerator."""
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

    created: datetime
    """Time at which the last of them was finished, UTC."""
    seconds: float = Field(ge=0, allow_inf_nan=False)
    """Seconds of preparing and generating."""
    new_tokens: int = Field(ge=0)
    """Number of generated tokens."""
    problems: tuple[str, ...] = ()
    """Texts that ended because no token was left to draw (`finish` is "empty"), and why."""


NO_REASONS = {"commit", "created", "seconds", "new_tokens", "problems"}
"""Facts that decide no text."""


class BatchRecord(Facts):
    """NNN.json: facts of a finished batch."""

    key: str
    """Key of its cell."""
    n_batches: int = Field(ge=1)
    """Number of batches that the cell has."""
    n_texts: int = Field(ge=1)
    """Number of texts in this one."""
    memory: int = Field(0, ge=0)
    """Most bytes that the worker has had so far: of its GPU, or of its process."""
    sha256: dict[str, str] = {}
    """The sha256 of each file of the batch."""

    @classmethod
    def of(cls, model: Model, plan: BatchPlan, texts: pd.DataFrame, seconds: float) -> BatchRecord:
        """The record of texts that this process has made now."""
        import torch

        # Without the number of the GPU: workers with other GPUs make the cell's other batches.
        device = plan.card.device.partition(":")[0]
        decided = {
            "device": device,
            "prepacking": plan.card.prepacking,
            "attn": describe_paths(model),
        }
        return cls(
            commit=source_commit(),
            versions=library_versions(),
            processor=processor_kind(device),
            threads=torch.get_num_threads() if device == "cpu" else None,
            model=identify(model).model_copy(update=decided),
            branches=plan.prefix_names,
            prepared=plan.summaries,
            merged=tuple(plan.merged),
            created=datetime.now(UTC),
            seconds=round(seconds, 3),
            new_tokens=int(texts["n_tokens"].sum()),
            problems=problems_of(plan, texts),
            key=plan.cell.key,
            n_batches=len(plan.batches),
            n_texts=len(texts),
            memory=peak_memory(device),
        )

    def changes(self, now: BatchRecord) -> str:
        """What would make other texts now, in words; empty where nothing would."""
        reasons = set(Facts.model_fields) - NO_REASONS
        recorded, current = (
            _leaves(record.model_dump(mode="json", include=reasons)) for record in (self, now)
        )
        return ", ".join(
            f"{name.rpartition('.')[2]} was {recorded.get(name)} and is {current.get(name)}"
            for name in dict.fromkeys([*recorded, *current])
            if recorded.get(name) != current.get(name)
        )


class Manifest(Facts):
    """The cell, and what else decided its texts and numbers."""

    cell: Cell
    """The settings, resolved."""

    @classmethod
    def joined(cls, cell: Cell, records: Sequence[BatchRecord]) -> Manifest:
        """Manifest of a cell of these batches."""
        shared = {name: getattr(records[0], name) for name in Facts.model_fields}
        joined = {
            "created": max(record.created for record in records),
            "seconds": round(sum(record.seconds for record in records), 3),
            "new_tokens": sum(record.new_tokens for record in records),
            "problems": tuple(problem for record in records for problem in record.problems),
        }
        return cls(**shared | joined, cell=cell)


def check_weights(manifest: Manifest, model: Model) -> None:
    """Refuse another model than the one that made a cell.

    Raises:
        TraceError: The model has other weights.
    """
    card, weights = identify(model), manifest.model.weights
    if weights != card.weights:
        raise TraceError(
            f"the run was made with weights {weights}, and here {card.name} has {card.weights}"
        )


def problems_of(plan: BatchPlan, texts: pd.DataFrame) -> tuple[str, ...]:
    """One sentence if texts of a batch ran out of tokens; usually nothing."""
    ended = [
        f"{row['prompt']!r} sample {row['sample']} at step {row['n_tokens']}"
        for row in texts[texts["finish"] == "empty"].to_dict("records")
    ]
    if not ended:
        return ()
    more = f" and {len(ended) - 1} more" if len(ended) > 1 else ""
    return (
        f"no token has positive weight for {ended[0]}{more} ({plan.method.name}:"
        f" {plan.method.when_empty}); the texts up to there are kept",
    )


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries by their dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    return {
        inner: leaf
        for key, part in value.items()
        for inner, leaf in _leaves(part, f"{name}.{key}".strip(".")).items()
    }


@cache
def library_versions() -> dict[str, str]:
    """Versions of the libraries that compute."""
    names = ("torch", "transformers", "transformer-lens", "numpy", "scipy")
    return {name: version(name) for name in names}


@cache
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
