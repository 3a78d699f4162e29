"""Task files: the paper's and a user's."""

import json
import lzma

import pytest

from lapa2_interp.methods.registry import load_task
from lapa2_interp.tasks.prompts import read_prompts
from lapa2_interp.tasks.task import (
    EXAMPLE,
    built_in_tasks,
    extra_prompts,
)

GOOD = """
length_counts_prompt = false
[attributes.calm]
prefix = "Very calm:"
[prompts]
texts = ["The sea"]
"""


@pytest.mark.parametrize(
    ("task", "least"), [("sentiment", 225), ("topic", 225), ("detox", 60), ("calm", 0)]
)
def test_more_prompts_are_of_the_tasks_kind(task, least):
    """Each once, on one line, beginning with a letter, none the task's, in one context with 512
    tokens."""
    prompts = extra_prompts(task)
    assert len(prompts) == len(set(prompts)) >= least
    assert all(text == text.strip() and text[0].isalpha() for text in prompts)
    if prompts:
        assert not set(load_task(task).prompts.texts) & set(prompts) - {"The painting"}
        assert max(len(text.split()) for text in prompts) <= 20


def test_the_papers_tasks():
    assert built_in_tasks() == ("detox", "sentiment", "topic")
    sentiment, topic, detox = (load_task(name) for name in ("sentiment", "topic", "detox"))
    assert (len(sentiment.prompts.texts), len(topic.prompts.texts)) == (15, 20)
    assert (sentiment.prefix("positive"), sentiment.prefix("negative")) == (
        "Very positive:",
        "Very negative:",
    )
    assert list(topic.attributes) == ["world", "sports", "business", "science"]
    assert detox.prefix("nontoxic") == "Very nontoxic:"
    assert [task.length_counts_prompt for task in (sentiment, topic, detox)] == [True, True, False]


@pytest.mark.parametrize(
    ("task", "file"), [("sentiment", "pplm_sentiment_15"), ("topic", "pplm_topic_20")]
)
def test_prompts_are_the_papers(data, task, file):
    with lzma.open(data / "prompts" / f"{file}.jsonl.xz", "rt") as lines:
        assert [json.loads(line)["prompt"] for line in lines] == list(load_task(task).prompts.texts)


def test_a_users_task(tmp_path):
    (tmp_path / "mood.toml").write_text(GOOD)
    task = load_task(str(tmp_path / "mood.toml"))
    assert (task.name, task.prefix("calm"), task.prompts.texts) == (
        "mood",
        "Very calm:",
        ("The sea",),
    )


def test_the_example_is_a_task(tmp_path):
    (tmp_path / "mood.toml").write_text(EXAMPLE)
    task = load_task(str(tmp_path / "mood.toml"))
    assert list(task.attributes) == ["calm", "angry"]
    assert task.texts("preadd", "calm") == {"prefix": "The following text is furious.\n\n"}
    assert task.parameters("air-decoding") == {"omega": 100.0}


def test_prompt_files(tmp_path):
    lines, objects = tmp_path / "a.txt", tmp_path / "b.jsonl"
    lines.write_text("The lake\n\n  leading space\n")
    assert read_prompts(lines) == ("The lake", "  leading space")
    objects.write_text('{"prompt": "The lake", "toxicity": 0.1}\n')
    assert read_prompts(objects) == ("The lake",)
    objects.write_text('{"prompt": {"text": "The lake", "toxicity": 0.1}, "continuation": {}}\n')
    assert read_prompts(objects) == ("The lake",)


def test_a_line_of_prompts_ends_where_the_file_says(tmp_path):
    """JSON lets U+2028 stand in a text; editors put a mark in front and carriage returns at the
    ends."""
    file = tmp_path / "p.jsonl"
    file.write_bytes('\ufeff{"prompt": "two\u2028lines"}\r\n{"prompt": "The sea"}\r\n'.encode())
    assert read_prompts(file) == ("two\u2028lines", "The sea")
    file = tmp_path / "p.txt"
    file.write_bytes(b"The lake\rThe sea\r\n\nThe hill")
    assert read_prompts(file) == ("The lake", "The sea", "The hill")
