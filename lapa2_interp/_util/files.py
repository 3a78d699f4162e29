"""Files and folders that appear whole and on the disk, or not at all; and the user's cache.

Everything is written under a temporary name that begins with `.writing-` in the folder where it
will be, flushed to the disk, and renamed. A process that dies leaves at most such a temporary
folder, which the next one that writes there removes.

A JSON file may carry a seal: the sha256 of its own contents and of files beside it. A disk or a
copy that changes a bit is noticed when the file is read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from zipfile import ZipFile

from lapa2_interp._util.errors import ModelError, RunError
from lapa2_interp._util.parsing import check_regular_file, parse_json

if TYPE_CHECKING:
    import xarray as xr

TEMPORARY_PREFIX = ".writing-"
"""What the names of unfinished files and folders begin with."""
SEAL, OWN = "seal", "this file"
"""The field that holds a JSON file's seal, and the entry of the file itself in it."""
LOCK = "lock"
"""A file in a temporary folder that its process holds a lock on while it lives."""


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder inside a folder, which vanishes after the block; those that killed
    processes left there are removed first."""
    remove_abandoned(folder)
    place = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=folder))
    try:
        with ExitStack() as held:
            with suppress(OSError):  # some network disks hold no locks
                lock = held.enter_context((place / f"{LOCK}.new").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (place / f"{LOCK}.new").rename(place / LOCK)  # whoever sees it finds it held
            yield place
    finally:
        try:
            _discard(place)
        except BaseException:  # SIGTERM in the midst of it
            _discard(place)
            raise


def remove_abandoned(folder: Path) -> None:
    """Remove what killed processes left in a folder, and nothing of those that live.

    A finished folder and the one it was to replace stay, with a line on stderr: somebody may have
    planted such a pair, to have it moved.
    """
    for left in list(folder.glob(f"{TEMPORARY_PREFIX}*")):
        if not _is_abandoned(left):
            continue
        if left.is_symlink():
            left.unlink(missing_ok=True)
        elif (left / "before").exists() and any((left / "new").glob("*")):
            told = "a folder that a killed command had finished (new), and the one that it replaces"
            print(f"{left} holds {told} (before); move the one you want", file=sys.stderr)
        else:
            _discard(left)


def remove_path(place: Path) -> None:
    """Remove a file, a link or a folder, if it is there. A link is removed, and what it points to
    stays; so with links in a folder."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


def _is_abandoned(left: Path) -> bool:
    """Whether the process that made a temporary folder has died. No process makes a link."""
    if left.is_symlink():
        return True
    with suppress(OSError), (left / LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it lives, or this disk cannot tell
        return True
    with suppress(OSError):  # it died before it held the lock, or after all else was removed
        return {each.name for each in left.iterdir()} <= {f"{LOCK}.new"} and _age(left) > 60
    return False


def _age(path: Path) -> float:
    """Seconds since a path was changed."""
    return time.time() - path.stat().st_mtime


def _discard(folder: Path) -> None:
    """Remove a temporary folder, its lock last: one that a kill leaves is known as abandoned."""
    with suppress(OSError):  # another process may remove it, too
        for each in folder.iterdir():
            if each.name != LOCK:
                remove_path(each)
    remove_path(folder)


@contextmanager
def atomic_folder(
    place: Path, is_good: Callable[[Path], bool] = lambda there: False
) -> Iterator[Path]:
    """A folder to fill; it is moved to `place` when the block ends without an error.

    A folder that is there already stays until then, and is replaced.

    Args:
        is_good: Whether a folder at `place`, made by another process meanwhile, can stay. The
            filled folder is then deleted.
    """
    _make_parents(place)
    with temporary_folder(place.parent) as beside:
        fresh = beside / "new" / place.name
        fresh.mkdir(parents=True)
        yield fresh
        for path in [*fresh.rglob("*"), fresh]:
            _flush(path)
        if place.exists() and is_good(place):
            return
        before = beside / "before"
        try:
            if place.exists() or place.is_symlink():
                place.rename(before)
            fresh.rename(place)
        except BaseException:  # also a signal between the two
            if before.exists() and not place.exists():
                before.rename(place)
            raise
        _flush(place.parent)


@contextmanager
def atomic_write(place: Path) -> Iterator[Path]:
    """The path of a file to write, under the same name; it is moved to `place` when the block ends
    without an error.

    A file that is there already stays until then, and is replaced. Processes that write the same
    file at the same time do not disturb each other.
    """
    _make_parents(place)
    with temporary_folder(place.parent) as beside:
        fresh = beside / "new" / place.name
        fresh.parent.mkdir()
        yield fresh
        _flush(fresh)
        fresh.replace(place)
        _flush(place.parent)


def write_text(place: Path, text: str) -> None:
    """Write a text file, whole, as UTF-8."""
    with atomic_write(place) as fresh:
        fresh.write_text(text, encoding="utf-8")


def write_netcdf(place: Path, data: xr.Dataset) -> None:
    """Write a netCDF file by way of memory: HDF5 takes the process down when the disk is full."""
    place.write_bytes(data.to_netcdf(engine="h5netcdf"))


def with_checksums(
    fields: Mapping[str, Any] | str, beside: Iterable[Path] = (), indent: int | None = 1
) -> str:
    """The text of a JSON file with its seal.

    Args:
        fields: A JSON object, or its text.
        beside: Files in the same folder that belong to it, as they will stay.
        indent: None puts everything on one line.
    """
    known = json.loads(fields) if isinstance(fields, str) else fields
    whole = {**known, SEAL: {file.name: sha256_of(file) for file in beside}}
    whole[SEAL] |= {OWN: _fields_sha256(whole)}
    return json.dumps(whole, indent=indent, ensure_ascii=False) + "\n"


def without_checksums(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields of a JSON file, and the sha256 of the files beside it, by name.

    A file without a seal is read as it is.

    Raises:
        ValueError: Not a JSON object, or its contents are not those that were sealed.
    """
    fields = parse_json(text)
    if not isinstance(fields, dict):
        raise ValueError(f"it must hold a JSON object, found {str(fields)[:40]!r}")
    if (seal := fields.pop(SEAL, None)) is None:
        return fields, {}
    own = seal.pop(OWN, None) if isinstance(seal, dict) else None
    if own != _fields_sha256({**fields, SEAL: seal}):
        raise ValueError("its contents are not those that were written (its seal differs)")
    return fields, seal


def _fields_sha256(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def write_checkpoint(place: Path, state: Mapping[str, Any]) -> None:
    """Write tensors and plain values, whole, for `read_checkpoint`.

    `torch.save` writes into memory: on a full disk it ends with an error of its own.
    """
    import torch

    stored = io.BytesIO()
    torch.save(dict(state), stored)
    with atomic_write(place) as fresh:
        fresh.write_bytes(stored.getbuffer())


def read_checkpoint(file: Path, device: Any) -> dict[str, Any]:
    """What `write_checkpoint` wrote, which PyTorch itself reads without asking for its checksums.

    Raises:
        ValueError: It is not what was written.
        OSError: It cannot be read.
    """
    import torch

    try:
        with ZipFile(file) as stored:
            if (bad := stored.testzip()) is not None:
                raise ValueError(f"the checksum of {bad} differs")
        found = torch.load(file, weights_only=True, map_location=device)
    except Exception as error:  # PyTorch raises all kinds
        if not is_damage(error):
            raise
        raise ValueError(" ".join(str(error).split())[:80]) from error
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}")
    return found


def is_damage(error: Exception) -> bool:
    """Whether an error of reading a file says that it is not what was written: it is missing,
    something else, or cannot be understood. Too little memory, a library that cannot take the
    file's name, or a disk that fails or is closed to the user say nothing about the file."""
    if isinstance(error, (MemoryError, UnicodeEncodeError)):
        return False
    if not isinstance(error, OSError) or error.errno is None:  # libraries raise OSError without one
        return True
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


def sha256_of(file: Path) -> str:
    """The sha256 of a file, in hexadecimal digits.

    Raises:
        OSError, ValueError: As `check_regular_file`.
    """
    check_regular_file(file)
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def remove_folder(folder: Path) -> None:
    """Remove a folder; a process that dies in the middle leaves none that looks complete."""
    with temporary_folder(folder.parent) as beside:
        folder.rename(beside / "before")


def remove_temporary(folder: Path) -> None:
    """Remove what killed processes left unfinished at any depth of a folder in which nobody else
    writes."""
    for left in list(folder.rglob(f"{TEMPORARY_PREFIX}*")):
        remove_path(left)


@contextmanager
def result_folder(
    out: Path, force: bool | None = None, finished: Callable[[Path], bool] = lambda folder: False
) -> Iterator[Path]:
    """The folder of a command's results: it becomes `out` when the block ends well, and vanishes
    when it does not.

    Args:
        out: The folder's place.
        force: Replace a finished folder of this kind there. Anything else there is never replaced.
            None: nor is that; the command has no such option.
        finished: Tells whether a folder is a finished one of this kind.

    Raises:
        RunError: `out` is finished, is something else, or cannot be written.
    """
    try:
        out = out.resolve()
    except RuntimeError as error:
        raise RunError(f"{out} is a loop of links; choose another --out") from error
    check_name(out)
    if out.parent.is_dir():
        remove_abandoned(out.parent)
    _check_replaceable(out, force, finished)
    made = [folder for folder in out.parents if not folder.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=out.parent):
            pass
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror}; choose another --out") from error
    try:
        with atomic_folder(out) as fresh:
            yield fresh
            _check_replaceable(
                out, force, finished
            )  # another process may have finished it meanwhile
    finally:
        if not out.exists():
            for folder in made:
                with suppress(OSError):  # somebody else put something there meanwhile
                    folder.rmdir()


def check_name(place: Path) -> None:
    """Refuse a path with letters that are no text: libraries that write tables cannot take it.

    Raises:
        RunError: It is such a path.
    """
    try:
        str(place.absolute()).encode()
    except UnicodeEncodeError as error:
        raise RunError(
            f"{place} has letters that are not UTF-8, which not every library can take; rename the"
            " folder, or choose another"
        ) from error


def holds_only(*names: str) -> Callable[[Path], bool]:
    """For `result_folder`: whether a folder holds the first of these files, and no foreign one.

    Args:
        names: As `refuse_foreign_files`.
    """

    def finished(folder: Path) -> bool:
        if not (folder / names[0]).is_file():
            return False
        refuse_foreign_files(folder, names)
        return True

    return finished


def refuse_foreign_files(folder: Path, names: Iterable[str]) -> None:
    """Refuse to replace a folder that holds something which a command did not write.

    Args:
        names: Of what it writes; * stands for any letters.

    Raises:
        RunError: It holds something else.
    """
    for each in sorted(folder.iterdir()):
        if not any(fnmatchcase(each.name, name) for name in names):
            raise RunError(
                f"{folder} holds {each.name}, which is not of this command's making; move it away,"
                " or choose another --out"
            )


def _check_replaceable(out: Path, force: bool | None, finished: Callable[[Path], bool]) -> None:
    """Raise where `result_folder` may not put a folder."""
    if os.path.ismount(out):
        raise RunError(
            f"{out} is where a disk is mounted, and cannot be replaced; give a folder in it, such"
            f" as {out / 'run'}"
        )
    if Path.cwd().is_relative_to(out):
        raise RunError(
            f"{out} is the folder you are in, and would be replaced under your feet; give a folder"
            f" in it, such as {out / 'run'}"
        )
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not finished(out):
        raise RunError(
            f"{out} exists and is not a folder of this command's making; choose another --out"
        )
    if not force:
        option = "" if force is None else "--force replaces it, or "
        raise RunError(f"{out} is finished; {option}choose another --out")


def refuse_link(path: str, flags: int) -> int:
    """For `open(..., opener=no_link)`: a link is an error, and what it points to is not changed."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def try_lock(file: IO[str]) -> bool:
    """Lock an open file against other processes until it is closed; False where one has it.

    Where the disk cannot hold locks (some network disks), it is not locked, and True.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def is_html(file: Path) -> bool:
    """Whether a page may be written there, and replace what is there: its name says that it is
    one."""
    return file.suffix.lower() in (".html", ".htm")


def cache_folder() -> Path:
    """The folder of things that take long to make: `LAPA2_CACHE`, or the platform's folder for
    caches."""
    from platformdirs import user_cache_dir

    return Path(os.environ.get("LAPA2_CACHE") or user_cache_dir("lapa2_interp"))


def cache_file(file: Path, write: Callable[[Path], Any]) -> None:
    """Put a file into the cache.

    Args:
        write: Given a path of the same name, writes it.

    Raises:
        ModelError: The cache cannot be written.
    """
    try:
        with atomic_write(file) as fresh:
            write(fresh)
    except OSError as error:
        raise ModelError(
            f"cannot write the cache {file.parent}: {error.strerror}; set LAPA2_CACHE to a folder"
            " that can"
        ) from error


@contextmanager
def one_process_at_a_time(file: Path) -> Iterator[None]:
    """A block that one process at a time runs for a file, so that what it makes is made once.

    The others wait. What dies lets go. Where the disk cannot hold locks (some network disks),
    nobody waits, and the work is done more than once. Locks lie in a folder beside the file's,
    empty, and stay: to remove one would let two processes in.
    """
    from filelock import FileLock, Timeout

    place = file.parent.parent / "locks" / f"{file.name}.lock"
    lock = FileLock(place)
    with ExitStack() as held:
        with suppress(OSError, NotImplementedError):
            _make_parents(place)
            try:
                held.enter_context(lock.acquire(timeout=0))
            except Timeout:
                print(f"another process makes {file}; waiting for it", file=sys.stderr)
                held.enter_context(lock.acquire())
        yield


def _make_parents(place: Path) -> None:
    for folder in [each for each in reversed(place.parents) if not each.is_dir()]:
        folder.mkdir(exist_ok=True)
        _flush(folder.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network disks answer EINVAL for folders.
        if not (error.errno == errno.EINVAL and path.is_dir()):
            raise
    finally:
        os.close(handle)
