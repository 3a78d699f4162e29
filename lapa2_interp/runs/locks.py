"""A run folder while somebody writes in it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lapa2_interp._util.errors import RunError
from lapa2_interp._util.files import refuse_link


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn errors of the operating system while a run is written into a `RunError`.

    Raises:
        RunError: The disk is full, or the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(f"cannot write {folder}: {error.strerror or error}") from error
        raise RunError(
            f"the disk of {folder} is full; every finished cell and group of rows is kept: make"
            " room and repeat the command"
        ) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the run against other processes. The operating system unlocks it when this process ends,
    however it ends."""
    with writing(folder):
        file = open(folder / ".lock", "a+", encoding="utf-8", opener=refuse_link)  # noqa: SIM115
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise RunError(
                f"{folder} is being filled by {file.read().strip() or 'another process'}; wait for"
                " it, or give another --out"
            ) from error
        with writing(folder):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield
