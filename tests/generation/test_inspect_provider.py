"""The provider of Inspect, and the task in analyses/inspect."""

from pathlib import Path

import pytest
from conftest import load
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, get_model
from inspect_ai.solver import generate

from lapa2_interp import Augmentation, Layout, augmented
from lapa2_interp._util.errors import AugmentationError

pytestmark = pytest.mark.filterwarnings(  # Inspect's, about what it uses itself
    "ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
TASK = Path(__file__).parents[2] / "analyses" / "inspect" / "instructions.py"
CHAT = [
    {"role": "system", "content": "You are a sailor."},
    {"role": "user", "content": "Who are you?"},
]
SETTINGS = {"max_tokens": 6, "temperature": 0, "display": "none"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def evaluated(task, tmp_path, model="lapa2/smollm2-135m", settings=SETTINGS, **arguments):
    arguments = {"dtype": "float32"} | arguments
    (log,) = eval(task, model=model, model_args=arguments, log_dir=str(tmp_path), **settings)
    return log


def test_two_samples_of_our_task(tmp_path):
    """Both at once, by the one worker; the last answer follows the first."""
    log = evaluated(
        f"{TASK}@instructions", tmp_path, settings=SETTINGS | {"limit": 2}, alpha=0.5, span="system"
    )
    assert log.status == "success", log.error
    for sample in log.samples:
        said = [message.role for message in sample.messages]
        assert said == ["system", *["user", "assistant"] * 8]
        assert sample.output.usage.output_tokens == 6
        assert sample.messages[2].text == sample.metadata["first"]
    assert {score.name for score in log.results.scores} >= {"last", "first"}
    assert all(0 <= score.metrics["mean"].value <= 1 for score in log.results.scores)


@pytest.mark.parametrize(
    "arguments", [{"alpha": 2.0}, {"augmentation": "lapa2:alpha=2"}, {"alpha": 0.0}]
)
def test_an_answer_is_that_of_the_layout_by_hand(arguments, tmp_path):
    messages = [
        ChatMessageSystem(content=CHAT[0]["content"]),
        ChatMessageUser(content=CHAT[1]["content"]),
    ]
    log = evaluated(Task([Sample(messages)], solver=generate()), tmp_path, **arguments)
    model = load("smollm2-135m", "float32", "TransformersModel")
    layout = Layout.of_chat(model, CHAT)
    with augmented(model, Augmentation(alpha=arguments.get("alpha", 2.0)), layout):
        made = model.original_model.generate(layout.tensor, max_new_tokens=6, do_sample=False)
    wanted = model.tokenizer.decode(made[0, len(layout) :], skip_special_tokens=True)
    assert log.samples[0].output.completion == wanted
    assert log.samples[0].output.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ({}, {"num_choices": 2}, "found num_choices=2"),
        ({"span": "turn:9"}, {}, "there is no turn 9"),
    ],
)
def test_what_it_refuses_is_the_error_of_the_run(arguments, settings, message, tmp_path):
    task = Task([Sample([ChatMessageUser(content="Hello")])], solver=generate())
    log = evaluated(task, tmp_path, settings=SETTINGS | settings, **arguments)
    assert log.status == "error"
    assert message in log.error.message


def test_two_strengths_are_refused():
    arguments = {"alpha": 1.0, "augmentation": "instaboost"}
    with pytest.raises(AugmentationError, match="found alpha 1 beside augmentation 'instaboost'"):
        get_model("lapa2/smollm2-135m", **arguments)
