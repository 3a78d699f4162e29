"""Files that unpack to more than they hold: compressed texts, archives, tables, HDF5.

A few kilobytes can unpack to more than any memory. So every reader of such files bounds what it
unpacks by the size of the file: real data shrinks to a hundredth at most.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from lapa2_interp._util.paths import COMPRESSIONS, LARGEST_TEXT, check_regular_file

ALWAYS = 2**26
"""Bytes that any file may unpack to."""
RATIO = 100
"""Bytes that a byte of a larger file may unpack to."""
DAMAGE = (EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile)
"""Errors of the decompressors at damaged bytes; others are OSErrors without a number."""


def unpacked_limit(file: Path) -> int:
    """Bytes that a file may unpack to.

    Raises:
        OSError, ValueError: As `check_regular_file`.
    """
    check_regular_file(file)
    return max(ALWAYS, RATIO * file.stat().st_size)


def check_unpacked(file: Path, size: int) -> None:
    """Refuse a file that unpacks to more than its size allows.

    Args:
        size: Bytes that it would take.

    Raises:
        ValueError: The bytes are too many.
    """
    if size > (limit := unpacked_limit(file)):
        raise ValueError(
            f"its {file.stat().st_size} bytes unpack to {size} or more, and {limit} are allowed;"
            " if you trust the file, unpack it yourself, or write it again in parts"
        )


class _Bounded(io.RawIOBase):
    """The bytes that a decompressor gives, up to the limit of its file."""

    def __init__(self, stream: io.BufferedIOBase, file: Path) -> None:
        super().__init__()
        self._stream, self._file, self._size = stream, file, 0
        self._limit = min(LARGEST_TEXT, unpacked_limit(file))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            read = self._stream.read(len(buffer))
        except (OSError, *DAMAGE) as error:
            raise _damaged(self._file, error) from error
        self._size += len(read)
        if self._size > self._limit:
            check_unpacked(self._file, self._size)
            raise ValueError(f"it unpacks to more than {LARGEST_TEXT} bytes; give it in parts")
        buffer[: len(read)] = read
        return len(read)


def _damaged(file: Path, error: Exception) -> Exception:
    """What a decompressor's error says; one of the disk is raised as it is."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return ValueError(f"it is not compressed as {file.suffix} says, or damaged ({error})")


@contextmanager
def open_packed(file: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, which may be compressed (`COMPRESSIONS`), by its ending.

    Raises:
        ValueError: The file unpacks to more than its size allows, is damaged, or is an archive of
            other than one file; while it is read.
        OSError: It cannot be read.
    """
    check_regular_file(file)
    with ExitStack() as opened:
        ending = file.suffix.lower()
        if ending not in COMPRESSIONS:
            yield opened.enter_context(file.open("rb"))
            return
        stream: Any
        if ending == ".zip":
            try:
                archive = opened.enter_context(zipfile.ZipFile(file))
                names = archive.namelist()
                if len(names) != 1:
                    raise ValueError(f"it is an archive of {len(names)} files; give one of one")
                stream = archive.open(names[0])
            except (*DAMAGE, NotImplementedError, RuntimeError) as error:
                # zipfile's words for a compression that it lacks, and for a file with a password
                raise _damaged(file, error) from error
        else:
            openers: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
            stream = openers[ending](file, "rb")
        opened.enter_context(stream)
        yield opened.enter_context(io.BufferedReader(_Bounded(stream, file), 2**16))


def check_archive(file: Path) -> None:
    """Refuse a zip file whose members unpack to more than its size allows, or which NumPy's headers
    say are larger than they are.

    Raises:
        ValueError: The file is such a one, or damaged.
        OSError: It cannot be read.
    """
    import numpy as np

    check_regular_file(file)
    try:
        with zipfile.ZipFile(file) as archive:
            check_unpacked(file, sum(member.file_size for member in archive.infolist()))
            for member in archive.infolist():
                if not member.filename.endswith(".npy"):
                    continue
                with archive.open(member) as stream:
                    version = np.lib.format.read_magic(stream)
                    read = np.lib.format.read_array_header_1_0
                    if version > (1, 0):
                        read = np.lib.format.read_array_header_2_0
                    shape, _, dtype = read(stream)
                    size = dtype.itemsize
                    for length in shape:
                        size *= length
                    if not dtype.hasobject and size != member.file_size - stream.tell():
                        raise ValueError(f"{member.filename} is not of the size that it names")
    except DAMAGE as error:
        raise ValueError(f"it is damaged ({error})") from error


def check_parquet(file: Path) -> None:
    """Refuse a Parquet file whose columns take more memory than its size allows: a value that is
    repeated is stored once.

    Raises:
        ValueError: The file is such a one, or damaged.
        OSError: It cannot be read.
    """
    import pyarrow.parquet as pq

    limit = unpacked_limit(file)
    with pq.ParquetFile(file) as stored:
        groups = [stored.metadata.row_group(i) for i in range(stored.metadata.num_row_groups)]
        columns = [group.column(i) for group in groups for i in range(group.num_columns)]
        check_unpacked(file, 8 * sum(column.num_values for column in columns))
        # No value is larger than its column.
        largest = max((column.total_uncompressed_size for column in columns), default=0)
        check_unpacked(file, sum(column.total_uncompressed_size for column in columns))
        if sum(column.num_values * column.total_uncompressed_size for column in columns) <= limit:
            return
        size = 0
        for batch in stored.iter_batches(max(1, ALWAYS // max(1, largest * len(columns)))):
            size += batch.nbytes
            check_unpacked(file, size)


def check_hdf5(file: Path) -> None:
    """Refuse an HDF5 file whose data sets take more memory than its size allows: of one that was
    never written, only the shape is stored.

    Raises:
        ValueError: The file is such a one.
        OSError: It cannot be read.
    """
    import h5py

    sizes: list[int] = []

    def count(_: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            sizes.append(int(item.size or 0) * item.dtype.itemsize)

    with h5py.File(file, "r") as stored:
        stored.visititems(count)
    check_unpacked(file, sum(sizes))
