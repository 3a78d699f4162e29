"""What the room refuses: a call, and what its one line says."""

import json
from pathlib import Path

import pytest
import torch

from lapa2_interp.errors import DataError, MethodError, TaskError
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods import registry as methods
from lapa2_interp.methods.registry import load_task
from lapa2_interp.tasks.task import MethodSettings

PARAMETERS = [
    ("prefx", {}, "unknown method 'prefx'; allowed: none, prefix, .*did you mean 'prefix'"),
    ("none", {"omega": 3}, "method 'none': unknown field 'omega'; allowed: pro_aug"),
    ("prefix", {"omega": 3}, "method 'prefix': unknown field 'omega'; allowed: prefixes"),
    ("air-decoding", {"omga": 3}, "unknown field 'omga'; allowed: .*did you mean 'omega'"),
    (
        "air-decoding",
        {"omega": -1},
        "omega: input should be greater than or equal to 0, found -1",
    ),
    ("air-decoding", {"omega": float("inf")}, "omega: input should be a finite number"),
    (
        "air-decoding",
        {"numerics": "half"},
        "numerics: input should be 'log' or 'released', found 'half'",
    ),
    ("preadd", {"lam": float("nan")}, "lam: input should be a finite number"),
    (
        "con-prefix",
        {"form": "hard"},
        "form: input should be 'soft' or 'hard-contrast', found 'hard'",
    ),
]
FORMULAS = {
    "base +": "formula 'base \\+': invalid syntax",
    "base * target": "multiplies two branches; one side of \\* must be a number",
    "1 / base": "divides by a branch; the right side of / must be a number",
    "base ** 2": "'base \\*\\* 2' is not a branch, a number",
    "__import__('os')": "is not a branch, a number",
    "union(base)": "'union\\(base\\)' is not a branch, a number",
    "union(base, x=target)": "is not a branch, a number",
    "base.shape": "is not a branch, a number",
    "True * base": "'True' is not a branch",
    "2 + 3": "names no branch",
    "union": "'union' is not a branch",
    "target - target": "cancels to nothing",
    "base + intersection": "'intersection' is not a branch",
    "base / (1 - 1)": "divides by 0",
    "9e999 * base": "a number must be below 1,000,000",
    "-" * 3000 + "base": "formula '-----",
    "": "formula '': invalid syntax",
    "target - 1.2*opponents": "add up to -0.2, and to divide by that turns",
}
LOG_PROBS = [
    (
        "air-decoding",
        {"base": (1, 4), "targt": (1, 4)},
        "needs the branches base, target and 1 more; found base, targt",
    ),
    (
        "air-decoding",
        {"base": (1, 4), "target": (1, 4)},
        "needs the branches base, target and 1 more",
    ),
    ("con-prefix", {"base": (1, 4)}, "needs the branches target; found base"),
    (
        "preadd",
        {"base": (1, 4), "prefix": (3, 4)},
        r"\[sample, vocab\] of one shape; found .*\(3, 4\)",
    ),
    ("palette", {"main": (1, 4)}, "needs the branches base; found main"),
    ("rose", {"base": (1, 4)}, "needs the branches target and 1 more; found base"),
    ("gedi", {"base": (1, 4), "target": (1, 4)}, "needs the branches base, target and 1 more"),
    ("rsa-control", {"target": (1, 4)}, "needs the branches base, target and 1 more"),
    (
        "dexperts",
        {"base": (1, 4), "target": (1, 4), "b": (2, 4)},
        r"\[sample, vocab\] of one shape",
    ),
    ("arithmetic", {"base": (1, 4)}, "needs the branches target, opponents; found base"),
]


def combined(name, shapes):
    log_probs = {branch: torch.zeros(shape) - 1 for branch, shape in shapes.items()}
    return methods.get(name).combine(log_probs, None)


def branches(name, task, attribute, **parameters):
    return methods.get(name, **parameters).branches(load_task(task), attribute)


def of_one_attribute():
    Path("mood.toml").write_text(
        '[attributes.calm]\nprefix = "Very calm:"\n[prompts]\ntexts = ["The sea"]\n'
    )
    return branches("air-decoding", "mood.toml", "calm")


def with_words(content):
    """FreeCtrl with a word list of this content."""
    Path("w.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return branches("freectrl", "sentiment", "positive", words="w.json")


def with_two_bases():
    texts = {"positive": {"main": "A happy text.", "base": "Another."}}
    settings = {"palette": MethodSettings(texts=texts)}
    task = load_task("sentiment").model_copy(update={"methods": settings})
    return cell_of("tiny-gpt2", method="palette", task=task, attribute="positive")


CALLS = {
    "a task without texts of PALETTE": (
        lambda: branches("palette", "topic", "world"),
        "task 'topic' has no palette text for 'world'",
    ),
    "PREADD away from its own prefix": (
        lambda: branches("preadd", "detox", "toxic"),
        r"lam=-1 moves away from its prefix, and 'Very toxic:' is 'toxic' itself",
    ),
    **{
        f"{name} of an unknown attribute": (
            lambda name=name: branches(name, "topic", "joyful"),
            "unknown attribute 'joyful'",
            TaskError,
        )
        for name in ("air-decoding", "con-prefix", "preadd", "palette", "prefix")
    },
    "a task of one attribute": (
        of_one_attribute,
        "has one attribute, 'calm'; a method with classes needs a second",
        TaskError,
    ),
    "a second raw model": (with_two_bases, "two branches 'base' for 'positive'"),
    "a word list without words": (
        lambda: with_words({"words": {"positive": ["a"], "negative": []}}),
        "the word list has no words for 'negative'; it has positive, negative; make",
    ),
    "a word list of others": (
        lambda: with_words({"words": {"joy": ["a"]}}),
        "no words for 'positive'; it has joy",
    ),
    "half a word list": (lambda: with_words("{"), "is not a word list", DataError),
    "another file": (lambda: with_words('{"word": {}}'), "there is no such field", DataError),
    "no word list": (
        lambda: branches("freectrl", "sentiment", "positive", words="nowhere.json"),
        r"cannot read nowhere.json; `lapa2 word-lists --task sentiment --data CORPUS --out FILE`",
        DataError,
    ),
    "a task without a word list": (
        lambda: branches("freectrl", "detox", "nontoxic"),
        "the package has no words for task 'detox'",
        DataError,
    ),
}


def rows():
    for name, parameters, message in PARAMETERS:
        call = lambda name=name, fields=parameters: methods.get(name, **fields)  # noqa: E731
        yield f"{name} {parameters}", call, message, MethodError
    for text, message in FORMULAS.items():
        call = lambda text=text: methods.get("arithmetic", formula=text)  # noqa: E731
        yield f"formula {text[:20]!r}", call, message, MethodError
    for name, shapes, message in LOG_PROBS:
        call = lambda name=name, shapes=shapes: combined(name, shapes)  # noqa: E731
        yield f"{name} of {shapes}", call, message, MethodError
    for name, row in CALLS.items():
        yield name, *(*row, MethodError)[:3]


@pytest.mark.parametrize(
    ("call", "message", "error"), [pytest.param(*row, id=name) for name, *row in rows()]
)
def test_what_the_room_refuses(call, message, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
