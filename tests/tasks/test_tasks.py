"""Task files: the paper's, a user's, and malformed ones."""

import json
import lzma

import pytest
from pydantic import ValidationError

from lapa2_interp._util.errors import TaskError
from lapa2_interp.methods.registry import load_task
from lapa2_interp.tasks.prompts import read_prompts
from lapa2_interp.tasks.task import (
    EXAMPLE,
    RESERVED_ATTRIBUTES,
    RESERVED_TASKS,
    Attribute,
    Prompts,
    Task,
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
    with pytest.raises(
        TaskError, match="task 'mood': unknown attribute 'clam'; allowed: calm; did you mean 'calm'"
    ):
        task.prefix("clam")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("[prompts]", "oops\n[prompts]"), "at line 5"),
        (
            GOOD.replace("texts", "lines"),
            "line 6: unknown field 'prompts.lines'; allowed: texts, source",
        ),
        (
            GOOD.replace('"Very calm:"', '""'),
            "line 4: attributes.calm.prefix: string should have at least 1 character",
        ),
        (GOOD.replace('["The sea"]', "[]"), "prompts.texts: .*at least 1 item"),
        ("speed = 3\n" + GOOD, "line 1: unknown field 'speed'; allowed: name, description"),
        (
            GOOD + "[methods.preaddd]\n",
            "methods: unknown method 'preaddd'; .*did you mean 'preadd'",
        ),
        (
            GOOD + '[methods.preadd.texts.calm]\nprefx = "a"',
            "methods.preadd.texts.calm: unknown text 'prefx'; allowed: prefix",
        ),
        (
            GOOD + '[methods.preadd.texts.clam]\nprefix = "a"',
            "methods.preadd.texts: unknown attribute 'clam'",
        ),
        ("[prompts]\ntexts = ['a']", "bad.toml: attributes: field required"),
        (
            GOOD.replace("[attributes.calm]", "[attributes.all]"),
            r"bad.toml: an attribute may not be",
        ),
        (
            GOOD + 'source = 3\n[attributes."wi ld"] # calm\nprefix = ""',
            "line 9: attributes.wi ld.prefix",
        ),
        (GOOD + '[attributes]\nwild.prefix = ""', "line 8: attributes.wild.prefix"),
    ],
)
def test_malformed_task_files(tmp_path, text, message):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(TaskError, match=message) as caught:
        load_task(str(tmp_path / "bad.toml"))
    assert "bad.toml" in str(caught.value)


def test_the_example_is_a_task(tmp_path):
    (tmp_path / "mood.toml").write_text(EXAMPLE)
    task = load_task(str(tmp_path / "mood.toml"))
    assert list(task.attributes) == ["calm", "angry"]
    assert task.texts("preadd", "calm") == {"prefix": "The following text is furious.\n\n"}
    assert task.parameters("air-decoding") == {"omega": 100.0}


def test_a_task_file_that_is_no_text(tmp_path):
    (tmp_path / "bad.toml").write_bytes(b"\xff = 1")
    with pytest.raises(
        TaskError, match=r"cannot read the task file .*bad\.toml: line 1: .* not UTF-8"
    ):
        load_task(str(tmp_path / "bad.toml"))


@pytest.mark.parametrize("name", [*RESERVED_ATTRIBUTES, "hard calm"])
def test_a_word_that_means_something_else_is_no_attributes_name(name, tmp_path):
    """ "all" would be every attribute in a setting and in tables, "raw" the texts without a
    prefix."""
    (tmp_path / "mood.toml").write_text(GOOD.replace("calm]", f"'{name}']"))
    with pytest.raises(
        TaskError, match=rf"may not be called '{name}', which names .*; give another"
    ):
        load_task(tmp_path / "mood.toml")
    with pytest.raises(ValidationError, match="may not be called"):
        Task(name="mood", attributes={name: Attribute(prefix="a")}, prompts=Prompts(texts=("a",)))


def test_a_word_that_means_something_else_is_no_tasks_name(tmp_path):
    for name in RESERVED_TASKS:
        (tmp_path / f"{name}.toml").write_text(GOOD)
        with pytest.raises(TaskError, match=f"a task may not be called '{name}'"):
            load_task(tmp_path / f"{name}.toml")


def test_unknown_tasks(tmp_path):
    missing, wrong_kind = "there is no such file", "it is no .toml file"
    for name, message in {
        "sentimnt": "unknown task 'sentimnt'", str(tmp_path / "missing.toml"): missing,
        "./gone": missing, "~/gone": missing, "gone.txt": missing, str(tmp_path): wrong_kind, ".": "unknown",
    }.items():  # fmt: skip
        with pytest.raises(
            TaskError, match=rf"{message}.*allowed: detox, sentiment, topic.*path of a \.toml file"
        ):
            load_task(name)


def test_prompt_files(tmp_path):
    lines, objects = tmp_path / "a.txt", tmp_path / "b.jsonl"
    lines.write_text("The lake\n\n  leading space\n")
    assert read_prompts(lines) == ("The lake", "  leading space")
    objects.write_text('{"prompt": "The lake", "toxicity": 0.1}\n')
    assert read_prompts(objects) == ("The lake",)
    objects.write_text('{"prompt": {"text": "The lake", "toxicity": 0.1}, "continuation": {}}\n')
    assert read_prompts(objects) == ("The lake",)
    objects.write_text('{"prompt": "The lake"}\n{"text": "x"}\n')
    with pytest.raises(
        TaskError, match=r'b\.jsonl line 2: expected a JSON object with a text in "prompt"'
    ):
        read_prompts(objects)
    lines.write_text("\n")
    with pytest.raises(TaskError, match="has no prompts"):
        read_prompts(lines)
    with pytest.raises(TaskError, match="cannot read prompts"):
        read_prompts(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("name", "written", "message"),
    [
        (
            "p.jsonl",
            b'{"prompt": "ok"}\n{"prompt": 3}\n',
            r'p\.jsonl line 2: expected a text as "prompt" .*, found 3$',
        ),
        ("p.jsonl", b'["The lake"]', r"line 1: expected a JSON object with a text"),
        ("p.jsonl", b"3", "line 1: expected"),
        ("p.jsonl", b'{"prompt": null}', "line 1: expected"),
        ("p.jsonl", b'{"prompt": " "}', "line 1: expected"),
        ("p.jsonl", b'{"prompt": {"text": 4}}', "line 1: expected"),
        ("p.jsonl", b"[" * 100_000, r"line 1: expected .*\[\['\.\.\.$"),
        (
            "p.txt",
            b"The lake\n\xff\xfe\n",
            r"p\.txt line 2: the bytes b'\\xff\\xfe\\n' are not UTF-8",
        ),
        ("p.txt", b"\n \n", "has no prompts"),
        ("p.txt", None, "cannot read prompts from .*Is a directory"),
    ],
)
def test_a_bad_file_of_prompts_names_line_and_value(tmp_path, name, written, message):
    file = tmp_path / name
    file.mkdir() if written is None else file.write_bytes(written)
    with pytest.raises(TaskError, match=message) as caught:
        read_prompts(file)
    assert "\n" not in str(caught.value)


def test_a_line_of_prompts_ends_where_the_file_says(tmp_path):
    """JSON lets U+2028 stand in a text; editors put a mark in front and carriage returns at the
    ends."""
    file = tmp_path / "p.jsonl"
    file.write_bytes('\ufeff{"prompt": "two\u2028lines"}\r\n{"prompt": "The sea"}\r\n'.encode())
    assert read_prompts(file) == ("two\u2028lines", "The sea")
    file = tmp_path / "p.txt"
    file.write_bytes(b"The lake\rThe sea\r\n\nThe hill")
    assert read_prompts(file) == ("The lake", "The sea", "The hill")
