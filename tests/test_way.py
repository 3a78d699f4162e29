"""The way of a call through the package: how many of its files and functions one pass, one text and
one further token enter.

A newcomer who follows a call reads these files. So the numbers are limits, and a change that needs
more of them has to say why. `pytest tests/test_way.py -s` prints them.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import lapa2_interp
from lapa2_interp import Augmentation, Layout, augmented, circuits, generate, load_model
from lapa2_interp.models import facts_of
from lapa2_interp.models.fingerprint import network_tensors
from lapa2_interp.runs.score import score

pytestmark = pytest.mark.usefixtures("without_types")  # checks of types enter functions, too
ROOT = f"{Path(lapa2_interp.__file__).parent}/"
IDENTITY = "models/fingerprint.py"
"""The file that reads the weights, once a call; its part is proportional to their number."""


class Way(NamedTuple):
    """The calls of the package's functions, each with its file, in their order."""

    calls: list[tuple[str, str]]

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}

    @property
    def functions(self) -> set[tuple[str, str]]:
        return set(self.calls)

    @property
    def n_of_identity(self) -> int:
        return sum(file == IDENTITY for file, _ in self.calls)

    @property
    def n_others(self) -> int:
        return len(self.calls) - self.n_of_identity

    def __str__(self) -> str:
        return (
            f"{len(self.files)} files, {len(self.functions)} functions, {self.n_others} calls and"
            f" {self.n_of_identity} of identity"
        )


def way_of(call):
    """The way of a call that has been made before, so that nothing is imported or loaded in it.
    Comprehensions, lambdas and the bodies of classes count as part of what they stand in."""
    call()
    calls = []

    def note(frame, event, argument):
        code = frame.f_code
        is_ours = event == "call" and code.co_filename.startswith(ROOT)
        if is_ours and "<" not in code.co_qualname.rpartition(".")[2]:
            calls.append((code.co_filename.removeprefix(ROOT), code.co_qualname))

    outer = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(outer)
    return Way(calls)


@pytest.fixture(scope="module")
def model():
    """A model of its own: weights that another test has edited are hashed again."""
    return load_model("tiny-gpt2", device="cpu")


def text_of(model, n_tokens):
    """A text of this many new tokens, without a trace."""
    n_prompt = len(Layout.of(model, None, "The lake").ids) - 1
    return lambda: generate(
        model, "The lake", attribute="positive", alpha=0.5, length=n_prompt + n_tokens, trace="none"
    )


def test_the_way_of_a_pass(model):
    layout, augmentation = Layout.of(model, "Very positive:", "The lake"), Augmentation(alpha=0.5)
    ids = layout.tensor

    def one_pass():
        with torch.no_grad(), augmented(model, augmentation, layout):
            model(ids)

    way = way_of(one_pass)
    print(f"\na pass: {way}")
    assert len(way.files) <= 10
    assert len(way.functions) <= 60
    assert way.n_of_identity == 0


def test_the_way_of_a_text(model):
    way = way_of(text_of(model, 6))
    print(f"\na text of six tokens: {way}")
    assert len(way.files) <= 41
    assert len(way.functions) <= 250
    assert way.n_others <= 1800
    assert way.n_of_identity <= 6 * len(network_tensors(facts_of(model).network))
    further = (way_of(text_of(model, 16)).n_others - way.n_others) / 10
    print(f"a further token: {further:.0f} calls")
    assert further <= 160


def test_the_way_of_circuits(model):
    def made():
        return circuits.ContrastSet.of(model, "sentiment", prompts=["The lake", "A pie"], tokens=4)

    way = way_of(made)
    print(f"\na contrast set: {way}")
    assert len(way.files) <= 40
    contrast_set = made()
    way = way_of(lambda: circuits.knock_out(model, contrast_set, over="layer"))
    print(f"a knock-out by layer: {way}")
    assert len(way.files) <= 27


def test_the_way_of_a_score(model, tmp_path):
    run = text_of(model, 6)().save(tmp_path / "run")
    options = {"out": tmp_path / "scores", "cache": tmp_path / "cache", "force": True}
    way = way_of(lambda: score(run.folder, "accuracy=linear", **options))
    print(f"\na score: {way}")
    assert len(way.files) <= 25
