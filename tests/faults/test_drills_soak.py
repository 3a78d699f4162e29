"""Soak: sweeps, scores and views in one process, over and over. Nothing may grow.

A minute among the drills; `make soak` is an hour.
"""

import os
import shlex
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import pytest
from drills import SWEEP, furnish, left_over

from lapa2_interp.cli.app import main

pytestmark = pytest.mark.drill
SECONDS = float(os.environ.get("SOAK", "60"))
ROUND = (
    SWEEP,
    "score {out} --scorers linear distinct --out {out}-scores --cache {out}-cache --device cpu",
    "view {out} --only method=prefix --out {out}.html",
    "report {out} --out {out}-report.html",
)
MORE = 0.05
"""Share by which memory may be larger at the end than after the first quarter."""


def entries(folder):
    return sum(1 for _ in Path(folder).iterdir())


def measured():
    """Memory in MB, open files, threads, and entries of the folder for temporary files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "memory, MB": int(status["VmRSS"].split()[0]) / 1024,
        "open files": entries("/proc/self/fd"),
        "threads": int(status["Threads"]),
        "temporary files": entries(tempfile.gettempdir()),
    }


def test_nothing_grows(tmp_path, monkeypatch, capsys, record_property):
    furnish(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    rounds, began = [], time.monotonic()
    while time.monotonic() - began < SECONDS or len(rounds) < 6:
        (tmp_path / "round").mkdir()
        for line in ROUND:
            words = shlex.split(line.format(home=tmp_path, out=tmp_path / "round" / "run"))
            assert main(words) == 0, capsys.readouterr().err
        capsys.readouterr()
        assert not left_over(tmp_path)
        shutil.rmtree(tmp_path / "round")
        rounds.append(measured())
    quarter = len(rounds) // 4
    record_property("rounds", len(rounds))
    for name in rounds[0]:
        early = [each[name] for each in rounds[quarter : 2 * quarter]]
        late = [each[name] for each in rounds[-quarter:]]
        record_property(name, f"{median(early):.0f}, at the end {median(late):.0f}")
        allowed = 1 + MORE if name == "memory, MB" else 1
        assert median(late) <= median(early) * allowed, (name, rounds)
