"""What the room refuses: a call, and what its one line says. Options of scripts, and tables that they
read: `test_items`."""

import runpy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from test_equal_perplexity import LINE, made
from test_power import GRID, claims
from test_propositions import made_trace

from lapa2_interp import Augmentation
from lapa2_interp.bias.synthetic import draw_means, geometric_lengths
from lapa2_interp.errors import DataError, GridError, RunError, ScoringError, TraceError
from analyses.lab import reported
from lapa2_interp.scoring.equal_perplexity import SteeringCurves
from analyses.lab.power import power_table
from lapa2_interp.propositions.traces import prediction_table, stack_alphas
from lapa2_interp.runs.grid import load_grid

ROOT = Path(__file__).resolve().parents[2]

# --- propositions


def lengths():
    return geometric_lengths(200, 3)


@cache
def trace():
    return made_trace(0.0, steps=10)


def with_prefix(change, rows=slice(None)):
    """A trace of which some texts have prefixes of another length."""
    counts = trace()["l_pre"].copy()
    counts[rows] = change(counts[rows])
    return trace().assign_coords(l_pre=counts)


def ended_early():
    early = trace().copy(deep=True)
    early["prefix"][0, 0, 2:] = np.nan
    return early


OTHERS = "different samples, steps or prefixes"
SHORT = "at least 3 steps, found 2 that all texts have"
TRACES = {
    "no baseline": (lambda: {0.5: trace()}, "the baseline is alpha 0, found only 0.5"),
    "no prefix": (lambda: {0.0: with_prefix(lambda n: n * 0)}, "no prefix"),
    "some prefixes": (lambda: {0.0: with_prefix(lambda n: 0, (0, 0))}, "some texts have no prefix"),
    "two steps": (lambda: {0.0: trace().isel(step=slice(0, 2))}, SHORT),
    "a text of two steps": (lambda: {0.0: ended_early()}, SHORT),
    "other steps": (lambda: {0.0: trace(), 0.5: trace().isel(step=slice(0, 5))}, OTHERS),
    "other prefixes": (lambda: {0.0: trace(), 0.5: with_prefix(lambda n: n + 1)}, OTHERS),
    "pooled heads": (lambda: {0.0: trace().isel(head=0, layer=0)}, "pooled over heads"),
}  # fmt: skip


def predicted():
    traces = stack_alphas({0.0: trace(), 1.0: made_trace(0.0, alpha=1.0, steps=10)})
    prediction_table(traces, {1.0: Augmentation(alpha=1.0, span="bos")})


# --- grids, prompts, tables


def power(table):
    Path("mine.toml").write_text(GRID)
    power_table(load_grid("mine.toml", check=False), table)


def curves(*families):
    texts = made({"lapa2": LINE})
    return SteeringCurves(texts[texts["family"].isin(families)], ["acc"], 5)


@cache
def prompts():
    return runpy.run_path(str(ROOT / "analyses" / "steering_prompts.py"))


def read_other():
    Path("other.jsonl").write_text('{"text": "a"}\n')
    prompts()["read_neutral"](Path("other.jsonl"))


NEUTRAL = [f"Prompt {i} of many" for i in range(2000)]
CALLS = {
    **{
        f"a study of {name}": (lambda make=make: stack_alphas(make()), message)
        for name, (make, message) in TRACES.items()
    },
    "a prediction for another span": (predicted, "not of span 'bos'"),
    "falling lengths": (lambda: geometric_lengths(10, 3), "lengths from 64 to 10 are too few to fit a slope"),
    "a prefix of no keys": (lambda: draw_means(lengths(), 0, (0.0,)), "the prefix must have 1 to 63 keys .* found 0"),
    "no synthetic rows": (lambda: draw_means(lengths(), 3, (0.0,), rows=0), "at least one row, found 0"),
    "claims of other grids": (lambda: power(claims((3.0, 1.5, 0.6)).assign(grids="another")),
     "no claim of an item of mine has a number .*tables/", DataError),
    "claims without an error": (lambda: power(claims((3.0, 1.5, 0.6)).assign(error=np.nan)), "no claim", DataError),
    "claims without spread": (lambda: power(claims((0.0, 0.0, np.nan))), "1 claim without spread", DataError),
    "an unknown family": (lambda: curves("baseline", "lapa2").compare("lapa"),
     "unknown family 'lapa'; .* did you mean 'lapa2'", ScoringError),
    **{
        f"curves of {family} alone": (
            lambda family=family: curves(family),
            f"one other arm; found {family}",
            ScoringError,
        )
        for family in ("baseline", "lapa2")
    },
    "several numbers of the paper": (lambda: reported.paper_number("detox", metric="tox"),
     "numbers of the paper's table detox fit", RunError),
    "a grid without its prompts": (lambda: load_grid("quick/steering"),
     r"no file steering-prompts.txt \(575 prompts: .*make steer", GridError),
    "few prompts of bases": (lambda: prompts()["bases_prompts"](NEUTRAL),
     "besides those of quick/steering; found", DataError),
    "few neutral prompts": (lambda: prompts()["choose_prompts"](["one", "two", "5th", "three", "(four"], 4, 2),
     "needed, and 2 others; found 4 and 1; give a longer", DataError),
    "a file of other prompts": (read_other, "cannot read prompts from .*prompt.*give JSON lines", DataError),
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message", "error"),
    [pytest.param(*(*row, TraceError)[:3], id=name) for name, row in CALLS.items()],
)
def test_what_the_room_refuses(call, message, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
