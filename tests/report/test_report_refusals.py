"""What the room refuses: a call, and what its one line says."""

import dataclasses
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from conftest import load, run_of
from test_steer import GIVEN, PROMPTS
from test_view import planted_run, with_batches

from lapa2_interp import steer
from lapa2_interp.errors import (
    CircuitError,
    Lapa2Error,
    RunError,
    ScoringError,
    TaskError,
    TraceError,
)
from lapa2_interp.methods.chat import chat_task
from lapa2_interp.methods.conditioning import PrefixConditioning
from lapa2_interp.page import embedded
from lapa2_interp.report import view
from lapa2_interp.tasks.task import Attribute, Prompts, Task

ROOT = Path(__file__).resolve().parents[2]

# --- the viewer


def shown(run=None, model="planted", **settings):
    return view(run or planted_run(), model=load(model), **settings)


def with_bos(change):
    """A run that has recorded other attention than its texts have."""

    def changed(made):
        return {"trace": made.trace.assign(bos=change(made.trace["bos"]))}

    return with_batches(planted_run(), changed)


@cache
def of_two_seeds():
    run = planted_run()
    reseeded = run_of(
        load("planted"), "prefix", "sentiment", ["positive"], ["The lake", "The book"],
        length=14, samples=2, seed=4, trace="full", parameters={"prefixes": "hard"},
    )  # fmt: skip
    both = run.by_key | reseeded.by_key
    return dataclasses.replace(run, by_key=both, batches=run.batches | reseeded.batches)


def of_a_changed_network():
    with patch.object(PrefixConditioning, "changes_network", True):
        shown()


def patched(name, value):
    with patch(f"lapa2_interp.report.viewed_text.{name}", value):
        shown()


VIEWS = {
    **{
        f"a view with {settings}": (lambda settings=settings: shown(**settings), message, error)
        for settings, message, error in (
            ({"sample": 2}, "sample must be from 0 to 1", TraceError),
            ({"prompt": "The"}, "several prompts begin with", TraceError),
            ({"prompt": "A"}, "no prompt begins with", TraceError),
            ({"arm": "alpha"}, "unknown arm 'alpha'", TraceError),
            ({"attribute": "neutral"}, "unknown attribute 'neutral'", TraceError),
            ({"branch": "x"}, "unknown branch 'x'", TraceError),
            (
                {"steps": 0},
                "steps: input should be greater than or equal to 1, found 0",
                Lapa2Error,
            ),
            (
                {"only": {"method": "dexperts"}},
                "no cell with method=dexperts; method may be prefix",
                RunError,
            ),
            ({"circuits": Path()}, "is not a finished study", CircuitError),
            (
                {"circuits": ROOT / "figures/circuits/sentiment"},
                "is about smollm2-135m and sentiment",
                CircuitError,
            ),
            ({"model": "tiny-llama"}, "was made with weights", TraceError),
        )
    },
    "a method that changes the network": (of_a_changed_network,
     "changes the network while it decodes", TraceError),
    "more attention than memory": (lambda: patched("usable_memory", lambda: 1000),
     "12 steps of all heads need .* memory.*show fewer steps", TraceError),
    "other attention than recorded": (lambda: shown(with_bos(lambda bos: bos + 0.01)),
     "differs from what the run recorded, by up to 0.01, and 0.001 is allowed in float32", TraceError),
    "recorded attention that is no number": (lambda: shown(with_bos(lambda bos: bos * np.nan)),
     "differs from what the run recorded, by up to nan", TraceError),
    "arms of two seeds": (lambda: shown(of_two_seeds()),
     r"cells of several kinds \(seed: 3, 4\).*seed=3", TraceError),
    "a view saved as a folder": (lambda: shown().save(Path()), "is a folder", RunError),
    "numbers that are not finite": (lambda: embedded({"a": np.inf}), "not JSON compliant", ValueError),
}  # fmt: skip

# --- steer


def steered(prompts=PROMPTS, task="sentiment", out="out", **changed):
    """Nothing is made."""
    before = sorted(Path().rglob("*"))
    try:
        steer("tiny-gpt2", prompts, task, out=Path(out), notify=pytest.fail, **GIVEN | changed)
    finally:
        assert sorted(Path().rglob("*")) == before


def in_folder_of_notes():
    Path("notes.txt").write_text("mine")
    steered(out=".")


OWN = Task(
    name="own",
    length_counts_prompt=True,
    attributes={"formal": Attribute(prefix="Formal:")},
    prompts=Prompts(texts=("The lake",)),
)
STEERED = {
    **{
        f"steer {name}": (lambda changed=changed: steered(**changed), message, error)
        for name, changed, message, error in (
            (
                "in a chat",
                {"task": chat_task([{"role": "system", "content": "Hi."}])},
                "task 'custom' is a chat, whose answers continue no text",
                TaskError,
            ),
            (
                "with few prompts",
                {"prompts": PROMPTS[:31]},
                "31 prompts are too few.*at least 32",
                RunError,
            ),
            (
                "without a budget",
                {"budget": 1.0},
                "budget: input should be greater than 1, found 1",
                Lapa2Error,
            ),
            (
                "without heads",
                {"heads": 0},
                "heads: input should be greater than or equal to 1, found 0",
                Lapa2Error,
            ),
            (
                "with all heads",
                {"heads": 16},
                "heads must be fewer than the 16 heads.*found 16",
                RunError,
            ),
            (
                "by a classifier from nowhere",
                {"classifiers": ["nowhere/at-all"]},
                "nowhere/at-all",
                ScoringError,
            ),
            (
                "by a classifier of another task",
                {"task": "topic", "classifiers": ["vader"]},
                "not 'business'",
                ScoringError,
            ),
            ("to one attribute", {"task": OWN}, "has one attribute, 'formal'", TaskError),
            (
                "without a classifier",
                {"task": OWN, "classifiers": []},
                "no classifier of the task 'own'.*classifiers=FOLDER",
                TaskError,
            ),
        )
    },
    "steer in a folder of notes": (in_folder_of_notes, "exists and is no result of steer", RunError),
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message", "error"),
    [pytest.param(*row, id=name[:60]) for name, row in {**VIEWS, **STEERED}.items()],
)
def test_what_the_room_refuses(call, message, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
