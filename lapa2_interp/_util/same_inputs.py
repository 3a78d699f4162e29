"""Results are resumed with the inputs that made them, or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lapa2_interp.errors import Lapa2Error, RunError

LONGEST_SHOWN = 160
"""Letters of a value that a message shows; of longer ones it gives the name alone."""


def check_same_inputs(
    stored: Mapping[str, Any],
    now: Mapping[str, Any],
    folder: Path,
    error: type[Lapa2Error] = RunError,
) -> None:
    """Refuse to go on in a folder, or with a file, whose results have other inputs.

    Args:
        stored: The inputs that were written beside the results, as read from JSON.
        now: The present inputs, which JSON can hold.
        folder: The folder or file of the results.
        error: The error that is raised.

    Raises:
        Lapa2Error: They differ; the message names the first input that does, and both its values
            if they are short.
    """
    before: Any = dict(stored)
    after: Any = json.loads(json.dumps(dict(now)))
    path: list[str] = []
    while isinstance(before, dict) and isinstance(after, dict):
        differing = [name for name in after | before if before.get(name) != after.get(name)]
        if not differing:
            return
        path.append(differing[0])
        before, after = before.get(path[-1]), after.get(path[-1])
    values = f": {before!r}, not {after!r}" if len(f"{before!r}{after!r}") <= LONGEST_SHOWN else ""
    kind = "file" if folder.is_file() else "folder"
    raise error(
        f"{folder} has results of another {' '.join(path)}{values}; repeat the command that began"
        f" it to go on, or choose another {kind}"
    )
