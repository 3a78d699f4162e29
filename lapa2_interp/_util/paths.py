"""Paths among texts: whether a value is a path, and what the ending of a file says.

The rule for values that are a text or the path of a file. A value is a path

- if something of that name exists,
- if it is one line that ends as a file does (`FILE_ENDINGS`), or
- if it is one word that begins with /, ./, ../ or ~/.

A path is read or refused, and never a text. Any other value is a text: "and/or", "The U.S. and
e.g. this", and what has neither letter nor digit, such as "..." and "/". A text that looks like a
path may stand in a file. ~/ is the home folder.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

LARGEST_TEXT = 2**30
"""Size of a text file in bytes, at most."""
COMPRESSIONS = (".gz", ".xz", ".bz2", ".zip")
"""Endings of compressed files."""
FILE_ENDINGS = frozenset(
    """
    .txt .text .md .rst .csv .tsv .json .jsonl .ndjson .parquet .arrow .feather .xls .xlsx .ods
    .toml .yaml .yml .npz .npy .pkl .safetensors .zst
    """.split()  # noqa: SIM905 - a list of strings would be unreadable
).union(COMPRESSIONS)
"""Endings of files that hold texts, tables or settings, in small letters. Those of web addresses
and programs (.com, .pt, .js) also end sentences, and are left out."""
PATH_BEGINNINGS = ("/", "./", "../", "~/")


def is_path(value: str | Path) -> bool:
    """True if a value is a path by the rule of this module."""
    if isinstance(value, Path):
        return True
    if not any(letter.isalnum() for letter in value):
        return False
    with suppress(OSError, ValueError):  # a long text; a NUL
        if with_home(value).exists():
            return True
    words, lines = value.split(), value.strip().splitlines()
    if len(words) == 1 and words[0].startswith(PATH_BEGINNINGS):
        return True
    return len(lines) == 1 and Path(words[-1]).suffix.lower() in FILE_ENDINGS


def with_home(path: str | Path) -> Path:
    """A path whose ~/ is the home folder."""
    return Path(path).expanduser() if str(path).startswith("~/") else Path(path)


def in_one_line(path: str | Path) -> str:
    """A path for a message: as it is, or quoted where it has newlines or control characters."""
    return str(path) if str(path).isprintable() else repr(str(path))


def looked_for(path: str | Path) -> str:
    """The end of a message about a relative path to nothing: where it was looked for."""
    full = with_home(path)
    if full.is_absolute() or full.exists():
        return ""
    return f"; looked for {in_one_line(Path.cwd() / full)}"


def taken_as_path(value: str) -> str:
    """The beginning of a message that refuses a path where only a text is taken."""
    return f"{value!r} is the path of a file or folder, or looks like one"


def kind_of(path: Path) -> str:
    """The ending that tells a file's format, in small letters, without that of a compression:
    ".jsonl" of prompts.JSONL.xz; "" if there is none."""
    name = path.name.lower()
    packed = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    return Path(name.removesuffix(packed)).suffix


def check_regular_file(file: Path) -> None:
    """Refuse a pipe, a socket or a device, since to open a pipe may block for ever.

    Raises:
        OSError: The file does not exist, or is a folder.
        ValueError: The file is a pipe, a socket or a device.
    """
    mode = file.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if not stat.S_ISREG(mode):
        raise ValueError("it is a pipe, a socket or a device; give a file")
