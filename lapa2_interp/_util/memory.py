"""A bound on the memory that foreign code may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

ONE_AT_A_TIME = Lock()
"""The bound is one of the process, so that two blocks would restore each other's."""


@contextmanager
def bounded_memory(more: int) -> Iterator[None]:
    """Inside, the process can take this many bytes more, and then gets a MemoryError. The bound
    holds for all threads, so keep the block short. Only Linux has such a bound."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    except (ImportError, OSError):
        yield
        return
    with ONE_AT_A_TIME:
        before, most = resource.getrlimit(resource.RLIMIT_AS)
        bound = pages * resource.getpagesize() + more
        if before != resource.RLIM_INFINITY:
            bound = min(bound, before)
        resource.setrlimit(resource.RLIMIT_AS, (bound, most))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (before, most))
