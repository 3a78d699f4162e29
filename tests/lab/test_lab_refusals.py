"""What the lab refuses: a call, and what its one line says. Options of scripts, and tables that they
read: `test_items`."""

import runpy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from test_power import GRID, claims

from analyses.lab import reported
from analyses.lab.power import power_table
from lapa2_interp.errors import DataError, GridError, RunError
from lapa2_interp.runs.grid import load_grid

ROOT = Path(__file__).resolve().parents[2]


def power(table):
    Path("mine.toml").write_text(GRID)
    power_table(load_grid("mine.toml", check=False), table)


@cache
def prompts():
    return runpy.run_path(str(ROOT / "analyses" / "tools/steering_prompts.py"))


def read_other():
    Path("other.jsonl").write_text('{"text": "a"}\n')
    prompts()["read_neutral"](Path("other.jsonl"))


NEUTRAL = [f"Prompt {i} of many" for i in range(2000)]
CALLS = {
    "claims of other grids": (lambda: power(claims((3.0, 1.5, 0.6)).assign(grids="another")),
     "no claim of an item of mine has a number .*tables/", DataError),
    "claims without an error": (lambda: power(claims((3.0, 1.5, 0.6)).assign(error=np.nan)), "no claim", DataError),
    "claims without spread": (lambda: power(claims((0.0, 0.0, np.nan))), "1 claim without spread", DataError),
    "several numbers of the paper": (lambda: reported.paper_number("detox", metric="tox"),
     "numbers of the paper's table detox fit", RunError),
    "a grid without its prompts": (lambda: load_grid(str(ROOT / "analyses/steering/steering.toml")),
     r"no file steering-prompts.txt \(575 prompts: .*make steer", GridError),
    "few prompts of bases": (lambda: prompts()["bases_prompts"](NEUTRAL),
     "besides those of analyses/steering; found", DataError),
    "few neutral prompts": (lambda: prompts()["choose_prompts"](["one", "two", "5th", "three", "(four"], 4, 2),
     "needed, and 2 others; found 4 and 1; give a longer", DataError),
    "a file of other prompts": (read_other, "cannot read prompts from .*prompt.*give JSON lines", DataError),
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message", "error"),
    [pytest.param(*row, id=name) for name, row in CALLS.items()],
)
def test_what_the_room_refuses(call, message, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
