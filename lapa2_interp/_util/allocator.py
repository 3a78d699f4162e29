"""How this process keeps memory that it has freed."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Parameters of glibc's mallopt, as its header numbers them."""
MOST = 2**31 - 1
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
"""The same in the environment, with which a user chooses."""


def keep_freed_memory() -> bool:
    """Let glibc keep large blocks that are freed, for the next ones.

    Usually it gives a block of more than 32 MiB back to the system at once, and the system hands
    every new one out page by page. Logits of 64 rows are such blocks where a vocabulary is large.
    Nothing that is computed changes.

    Returns:
        True if it does so from now on; False where the C library is another one, or the user has
        chosen (one of `VARIABLES`).
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in VARIABLES):
        return False
    with suppress(OSError, AttributeError):  # a C library without mallopt
        mallopt = ctypes.CDLL(None).mallopt
        settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, MOST), (M_TOP_PAD, 64 << 20))
        return all(mallopt(name, value) == 1 for name, value in settings)
    return False
