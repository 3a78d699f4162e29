"""Memory that is freed and taken again: pages that the system has to hand out anew."""

import subprocess
import sys

from lapa2_interp._util.allocator import keep_freed_memory

SCRIPT = """
import resource, sys
import numpy as np
from lapa2_interp._util.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def take():
    return np.ones(10_000_000)
take()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    take()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    run = [sys.executable, "-c", SCRIPT, how]
    return int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)


def test_large_blocks_are_taken_again():
    """Ten blocks of 80 MB are about 200,000 pages of 4 kB, and fewer of huge ones."""
    if sys.platform.startswith("linux"):
        assert faults("kept") < 0.2 * faults("usual")
    else:
        assert not keep_freed_memory()


def test_what_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "65536")
    assert not keep_freed_memory()


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert not keep_freed_memory()
