"""Task files: the paper's, a user's, and malformed ones."""

import json
import lzma

import pytest

from lapa2_interp.errors import TaskError
from lapa2_interp.tasks import EXAMPLE, built_in, load_task, read_prompts

GOOD = """
length_counts_prompt = false
[attributes.calm]
prefix = "Very calm:"
[prompts]
texts = ["The sea"]
"""


def test_the_papers_tasks():
    assert built_in() == ["detox", "sentiment", "topic"]
    sentiment, topic, detox = (load_task(name) for name in ("sentiment", "topic", "detox"))
    assert (len(sentiment.prompts.texts), len(topic.prompts.texts)) == (15, 20)
    assert (sentiment.prefix("positive"), sentiment.prefix("negative")) == ("Very positive:", "Very negative:")
    assert list(topic.attributes) == ["world", "sports", "business", "science"]
    assert detox.prefix("nontoxic") == "Very nontoxic:"
    assert [task.length_counts_prompt for task in (sentiment, topic, detox)] == [True, True, False]


@pytest.mark.parametrize(("task", "file"), [("sentiment", "pplm_sentiment_15"), ("topic", "pplm_topic_20")])
def test_prompts_are_the_papers(data, task, file):
    with lzma.open(data / "prompts" / f"{file}.jsonl.xz", "rt") as lines:
        assert [json.loads(line)["prompt"] for line in lines] == list(load_task(task).prompts.texts)


def test_a_users_task(tmp_path):
    (tmp_path / "mood.toml").write_text(GOOD)
    task = load_task(str(tmp_path / "mood.toml"))
    assert (task.name, task.prefix("calm"), task.prompts.texts) == ("mood", "Very calm:", ("The sea",))
    with pytest.raises(TaskError, match="task 'mood': unknown attribute 'clam'; allowed: calm; did you mean 'calm'"):
        task.prefix("clam")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("[prompts]", "oops\n[prompts]"), "at line 5"),
        (GOOD.replace("texts", "lines"), "line 6: prompts.lines: there is no such field"),
        (GOOD.replace('"Very calm:"', '""'), "line 4: attributes.calm.prefix: string should have at least 1 character"),
        (GOOD.replace('["The sea"]', "[]"), "prompts.texts: .*at least 1 item"),
        ("speed = 3\n" + GOOD, "line 1: speed: there is no such field, found 3"),
        (GOOD + "[methods.preaddd]\n", "methods: unknown method 'preaddd'; .*did you mean 'preadd'"),
        (
            GOOD + '[methods.preadd.texts.calm]\nprefx = "a"',
            "methods.preadd.texts.calm: unknown text 'prefx'; allowed: prefix",
        ),
        (GOOD + '[methods.preadd.texts.clam]\nprefix = "a"', "methods.preadd.texts: unknown attribute 'clam'"),
        ("[prompts]\ntexts = ['a']", "line 2: attributes: field required"),
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


def test_unknown_tasks(tmp_path):
    for name in ("sentimnt", str(tmp_path / "missing.toml")):
        with pytest.raises(TaskError, match=r"unknown task .*allowed: detox, sentiment, topic.*path of a \.toml file"):
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
    with pytest.raises(TaskError, match=r'b\.jsonl line 2: expected a JSON object with a text in "prompt"'):
        read_prompts(objects)
    lines.write_text("\n")
    with pytest.raises(TaskError, match="has no prompts"):
        read_prompts(lines)
    with pytest.raises(TaskError, match="cannot read prompts"):
        read_prompts(tmp_path / "none.txt")
