"""The user's cache: where it is, and how a file appears there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lapa2_interp.errors import ModelError


def cache_folder() -> Path:
    """Where things are kept that take long to make: `LAPA2_CACHE`, or the platform's folder for caches."""
    from platformdirs import user_cache_dir

    return Path(os.environ.get("LAPA2_CACHE") or user_cache_dir("lapa2_interp"))


def keep_file(file: Path, write: Callable[[Path], Any]) -> None:
    """Put a file into the cache, whole: processes that make the same one do not meet.

    Args:
        write: Given a path of the same ending, writes it.

    Raises:
        ModelError: The cache cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="writing-", dir=file.parent) as folder:
            fresh = Path(folder) / file.name
            write(fresh)
            fresh.replace(file)
    except OSError as error:
        raise ModelError(
            f"cannot write the cache {file.parent}: {error.strerror}; set LAPA2_CACHE to a folder that can"
        ) from error
