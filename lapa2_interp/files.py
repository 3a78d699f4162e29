"""Files and folders that are written whole or not at all, locks, and the user's cache.

A file or folder is written in a temporary folder beside its final place, flushed to the disk, and
renamed. The temporary folder's name, `.writing-HOST-PID-...`, tells whose it is. If a process dies,
the next process that writes to the same place removes its temporary folder.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

from lapa2_interp._util.paths import check_regular_file
from lapa2_interp._util.unpacking import check_archive
from lapa2_interp.errors import ModelError, RunError, parameter

if TYPE_CHECKING:
    import xarray as xr

TEMPORARY_PREFIX = ".writing-"
"""The names of temporary folders begin with this."""
TEMPORARY_NAME = re.compile(r"\.writing-(?P<host>.+)-(?P<pid>\d{1,9})-\w{8}")
HOST = socket.gethostname().replace("/", "_")
"""This machine, in the names of temporary folders."""
DAY = 86400
"""Seconds after which a temporary folder of another machine is abandoned."""


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder inside a folder, which is removed after the block. Temporary folders of
    dead processes are removed first."""
    remove_abandoned(folder)
    temporary = Path(
        tempfile.mkdtemp(prefix=f"{TEMPORARY_PREFIX}{HOST}-{os.getpid()}-", dir=folder)
    )
    try:
        yield temporary
    finally:
        try:
            remove_path(temporary)
        except BaseException:  # a signal meanwhile
            remove_path(temporary)
            raise


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary folders of dead processes from a folder, and no others."""
    for left in list(folder.glob(f"{TEMPORARY_PREFIX}*")):
        if _is_abandoned(left):
            remove_path(left)


def remove_path(path: Path) -> None:
    """Remove a file, a link or a folder, if it exists. The targets of links stay."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_abandoned(left: Path) -> bool:
    """True if the process that made a temporary folder is gone, or is on another machine and made
    it more than a day ago. No process makes a link."""
    made = TEMPORARY_NAME.fullmatch(left.name)
    if made is None or left.is_symlink():
        return left.is_symlink()
    with suppress(PermissionError, FileNotFoundError):  # another user's process; gone meanwhile
        if made["host"] != HOST or os.name == "nt":  # Windows cannot ask after a process so
            return time.time() - left.stat().st_mtime > DAY
        try:
            os.kill(int(made["pid"]), 0)
        except ProcessLookupError:
            return True
    return False


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A new folder to write into; the folder is moved to `target` when the block ends without an
    error. An existing folder there stays until then, and is replaced."""
    _make_parents(target)
    with temporary_folder(target.parent) as beside:
        fresh = beside / "new" / target.name
        fresh.mkdir(parents=True)
        yield fresh
        for path in [*fresh.rglob("*"), fresh]:
            _flush(path)
        before = beside / "before"
        try:
            if target.exists() or target.is_symlink():
                target.rename(before)
            fresh.rename(target)
        except BaseException:  # also a signal between the two
            if before.exists() and not target.exists():
                before.rename(target)
            raise
        _flush(target.parent)


@contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """The path of a temporary file of the same name; the file is moved to `target` when the block
    ends without an error. An existing file there stays until then, and is replaced. Two processes
    may write the same file at the same time."""
    _make_parents(target)
    with temporary_folder(target.parent) as beside:
        fresh = beside / target.name
        yield fresh
        _flush(fresh)
        fresh.replace(target)
        _flush(target.parent)


def write_text(file: Path, text: str) -> None:
    """Write a text file in UTF-8 with `atomic_write`."""
    with atomic_write(file) as fresh:
        fresh.write_text(text, encoding="utf-8")


def write_json(file: Path, fields: Mapping[str, Any] | str) -> None:
    """Write a JSON file with `atomic_write`.

    Args:
        fields: A JSON object, or its text.
    """
    known = json.loads(fields) if isinstance(fields, str) else fields
    write_text(file, json.dumps(known, indent=1, ensure_ascii=False) + "\n")


def write_netcdf(file: Path, data: xr.Dataset) -> None:
    """Write a netCDF file from memory, since HDF5 kills the process when the disk is full."""
    file.write_bytes(data.to_netcdf(engine="h5netcdf"))


def write_checkpoint(file: Path, state: Mapping[str, Any]) -> None:
    """Write tensors and plain values with `atomic_write`.

    `torch.save` writes to memory first: on a full disk it raises an error of another type.
    """
    import torch

    stored = io.BytesIO()
    torch.save(dict(state), stored)
    with atomic_write(file) as fresh:
        fresh.write_bytes(stored.getbuffer())


def read_checkpoint(file: Path, device: Any) -> dict[str, Any]:
    """Read a checkpoint of `write_checkpoint`, and check its checksums, which PyTorch ignores.

    Raises:
        ValueError: The file is damaged.
        OSError: It cannot be read.
    """
    import torch

    try:
        check_archive(file)
        with ZipFile(file) as stored:
            if (bad := stored.testzip()) is not None:
                raise ValueError(f"the checksum of {bad} differs")
        state = torch.load(file, weights_only=True, map_location=device)
    except Exception as error:  # PyTorch raises errors of many types
        if not is_damage(error):
            raise
        raise ValueError(" ".join(str(error).split())[:80]) from error
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}")
    return state


def is_damage(error: Exception) -> bool:
    """True if an error in reading a file means that the file is damaged or missing, or something
    else is in its place. Too little
    memory, a library that cannot take the file's name, a disk that fails, and a missing permission
    say nothing about the file."""
    if isinstance(error, (MemoryError, UnicodeEncodeError)):
        return False
    if not isinstance(error, OSError) or error.errno is None:  # libraries raise OSError without one
        return True
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


def sha256_of(file: Path) -> str:
    """The sha256 of a file, in hexadecimal digits.

    Raises:
        OSError, ValueError: As `check_regular_file`.
    """
    check_regular_file(file)
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def result_folder(
    out: Path, force: bool | None = None, finished: Callable[[Path], bool] = lambda folder: False
) -> Iterator[Path]:
    """A new folder for a command's results. The folder is moved to `out` when the block ends
    without an error, and else removed.

    Args:
        out: Place of the results.
        force: Replace a finished folder of this kind. Nothing else is ever replaced. None: the
            command has no such option, and replaces nothing.
        finished: Returns True if a folder is a finished one of this kind.

    Raises:
        RunError: `out` is finished, is something else, or cannot be written.
    """
    try:
        out = out.resolve()
    except RuntimeError as error:
        raise RunError(f"{out} is a loop of links; choose another {parameter('out')}") from error
    check_name(out)
    _check_replaceable(out, force, finished)
    new_parents = [folder for folder in out.parents if not folder.exists()]
    try:
        with ExitStack() as held:
            try:
                fresh = held.enter_context(atomic_folder(out))
            except OSError as error:
                reason = f"{error.strerror}; choose another {parameter('out')}"
                raise RunError(f"cannot write {out}: {reason}") from error
            yield fresh
            _check_replaceable(out, force, finished)  # another process may have finished it
    finally:
        if not out.exists():
            for folder in new_parents:
                with suppress(OSError):  # another process has written to it meanwhile
                    folder.rmdir()


def check_name(path: Path) -> None:
    """Refuse a path that is not UTF-8, since some libraries that write tables cannot take it.

    Raises:
        RunError: The path is such a one.
    """
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise RunError(
            f"{path} has letters that are not UTF-8, which not every library can take; rename the"
            " folder, or choose another"
        ) from error


def holds_only(*names: str) -> Callable[[Path], bool]:
    """A function for `result_folder` that returns True if a folder holds the first of these files,
    and raises if it holds a foreign file.

    Args:
        names: As for `refuse_foreign_files`.
    """

    def finished(folder: Path) -> bool:
        if is_finished := (folder / names[0]).is_file():
            refuse_foreign_files(folder, names)
        return is_finished

    return finished


def refuse_foreign_files(folder: Path, names: Iterable[str]) -> None:
    """Refuse to replace a folder that holds a file which the command did not write.

    Args:
        names: Names of the command's files; * stands for any letters.

    Raises:
        RunError: The folder holds another file.
    """
    for entry in sorted(folder.iterdir()):
        if not any(fnmatchcase(entry.name, name) for name in names):
            raise RunError(
                f"{folder} holds {entry.name}, which is not of this command's making; move it away,"
                f" or choose another {parameter('out')}"
            )


def _check_replaceable(out: Path, force: bool | None, finished: Callable[[Path], bool]) -> None:
    """Raise RunError if `result_folder` may not replace `out`."""
    mounted = os.path.ismount(out)
    if mounted or Path.cwd().is_relative_to(out):
        kind = "where a disk is mounted" if mounted else "the folder you are in"
        raise RunError(
            f"{out} is {kind}, and cannot be replaced; give a folder in it, such as {out / 'run'}"
        )
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not finished(out):
        raise RunError(
            f"{out} exists and is not a folder of this command's making; choose another"
            f" {parameter('out')}"
        )
    if not force:
        option = "" if force is None else f"{parameter('force', True)} replaces it, or "
        raise RunError(f"{out} is finished; {option}choose another {parameter('out')}")


@contextmanager
def acquire_lock(file: Path, timeout: float = 0.0) -> Iterator[None]:
    """Hold a lock file inside the block. A process that dies releases it, and the empty file stays:
    without it two processes could enter. On a disk that cannot hold locks (some network disks)
    nothing is locked.

    Args:
        timeout: Seconds to wait for another process; -1 is for ever.

    Raises:
        filelock.Timeout: Another process holds it.
        OSError: The file cannot be opened, or is a link, which is not followed.
    """
    from filelock import FileLock

    with ExitStack() as held:
        try:
            held.enter_context(FileLock(file).acquire(timeout))
        except NotImplementedError:  # filelock's word for a disk that cannot hold locks
            pass
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                raise
        yield


def cache_folder() -> Path:
    """The folder for results that are kept between runs: `LAPA2_CACHE`, or the platform's folder
    for caches."""
    from platformdirs import user_cache_dir

    return Path(os.environ.get("LAPA2_CACHE") or user_cache_dir("lapa2_interp"))


@contextmanager
def writing_cache(target: Path) -> Iterator[None]:
    """Turn errors of the operating system while a place in the cache is written into a
    `ModelError`.

    Raises:
        ModelError: The cache cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"cannot write the cache {target.parent}: {error.strerror}; set LAPA2_CACHE to a folder"
            " that can"
        ) from error


@contextmanager
def one_process_at_a_time(file: Path) -> Iterator[None]:
    """A block that only one process at a time runs for a file or folder of the cache, so that it
    is made once. Other processes wait, unless the cache cannot be written."""
    from filelock import Timeout

    lock_file = cache_folder() / "locks" / f"{file.name}.lock"
    with ExitStack() as held:
        with suppress(OSError):
            _make_parents(lock_file)
            try:
                held.enter_context(acquire_lock(lock_file, timeout=1.0))
            except Timeout:
                print(f"another process makes {file}; waiting for it", file=sys.stderr)
                held.enter_context(acquire_lock(lock_file, timeout=-1.0))
        yield


def _make_parents(path: Path) -> None:
    for folder in [parent for parent in reversed(path.parents) if not parent.is_dir()]:
        folder.mkdir(exist_ok=True)
        _flush(folder.parent)


def _flush(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network disks' answer
            raise
    finally:
        os.close(handle)
