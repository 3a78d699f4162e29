"""What the room refuses: a call, and what its one line says."""

from pathlib import Path

import pytest
from test_tasks import GOOD

from lapa2_interp.errors import DataError, TaskError
from lapa2_interp.generation.banned_words import BannedWords
from lapa2_interp.methods.chat import chat_task
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models import load_tokenizer
from lapa2_interp.tasks.prompts import read_prompts
from lapa2_interp.tasks.task import RESERVED_ATTRIBUTES, RESERVED_TASKS, Attribute, Task
from lapa2_interp.tasks.word_lists import derive_words

TEXTS = [
    (GOOD.replace("[prompts]", "oops\n[prompts]"), "at line 5"),
    (GOOD.replace("texts", "lines"), "line 6: unknown field 'prompts.lines'; allowed: texts, source"),
    (GOOD.replace('"Very calm:"', '""'), "line 4: attributes.calm.prefix: string should have at least 1 character"),
    (GOOD.replace('["The sea"]', "[]"), "prompts.texts: .*at least 1 item"),
    ("speed = 3\n" + GOOD, "line 1: unknown field 'speed'; allowed: name, description"),
    (GOOD + "[methods.preaddd]\n", "methods: unknown method 'preaddd'; .*did you mean 'preadd'"),
    (GOOD + '[methods.preadd.texts.calm]\nprefx = "a"', "methods.preadd.texts.calm: unknown text 'prefx'; allowed: prefix"),
    (GOOD + '[methods.preadd.texts.clam]\nprefix = "a"', "methods.preadd.texts: unknown attribute 'clam'"),
    ("[prompts]\ntexts = ['a']", "attributes: field required"),
    (GOOD.replace("[attributes.calm]", "[attributes.all]"), "an attribute may not be"),
    (GOOD + 'source = 3\n[attributes."wi ld"] # calm\nprefix = ""', "line 9: attributes.wi ld.prefix"),
    (GOOD + '[attributes]\nwild.prefix = ""', "line 8: attributes.wild.prefix"),
    ("\udcff = 1", "line 1: .* not UTF-8"),
    *(
        (GOOD.replace("calm]", f"'{name}']"), rf"may not be called '{name}', which names .*; give another")
        for name in (*RESERVED_ATTRIBUTES, "hard calm")
    ),
]  # fmt: skip
"""Contents of a task file."""
EXPECTED = "line 1: expected"
PROMPTS = [
    ("p.jsonl", b'{"prompt": "ok"}\n{"prompt": 3}\n', r'p\.jsonl line 2: expected a text as "prompt" .*, found 3$'),
    ("p.jsonl", b'{"prompt": "The lake"}\n{"text": "x"}\n', r'p\.jsonl line 2: expected a JSON object with a text in "prompt"'),
    ("p.jsonl", b'["The lake"]', r"line 1: expected a JSON object with a text"),
    ("p.jsonl", b"3", EXPECTED),
    ("p.jsonl", b'{"prompt": null}', EXPECTED),
    ("p.jsonl", b'{"prompt": " "}', EXPECTED),
    ("p.jsonl", b'{"prompt": {"text": 4}}', EXPECTED),
    ("p.jsonl", b"[" * 100_000, r"line 1: expected .*\[\['\.\.\.$"),
    ("p.txt", b"The lake\n\xff\xfe\n", r"p\.txt line 2: the bytes b'\\xff\\xfe\\n' are not UTF-8"),
    ("p.txt", b"\n \n", "has no prompts"),
    ("p.txt", None, "cannot read prompts from .*No such file"),
    # A comma without quotes would cut a prompt.
    *(
        ("p.csv", f'id,prompt\n0,"The hut, and more"\n{row}\n'.encode(), "row 2: expected 2 fields and a prompt, found")
        for row in ("1,The lake, and the sea", "1", "1, ")
    ),
    ("p.csv", b"id,text\n1,The lake\n", "needs one column named prompt; found id, text"),
    ("p.csv", b"prompt,prompt\na,b\n", "needs one column named prompt; found prompt, prompt"),
    ("p.csv", b"id,prompt\n1\n", "row 1: expected 2 fields and a prompt"),
    ("p.csv", b"id,prompt\n1,\n", "row 1: expected 2 fields and a prompt"),
    ("p.csv", b"prompt\n", "has no prompts"),
    ("p.csv", b"", "is not CSV"),
    ("p.csv", b'prompt\n"a\n', "is not CSV"),
    *(
        (name, b"The lake\n", message)
        for name, message in (
            ("p.md", r"it is no file of prompts: give a file that ends in \.txt, "),
            ("p.xlsx", "it is no file of prompts"),
            ("prompts", "it is no file of prompts"),
            ("p.csv ", "it is no file of prompts"),
            ("p.tar.gz", "it is no file of prompts"),
            ("p.json", "cannot read prompts from .*p.json: "),
            ("p.json.xz", r"it is not compressed as \.xz says, or damaged"),
            ("p.JSONL.GZ", r"it is not compressed as \.GZ says, or damaged"),
            ("p.txt.zip", r"it is not compressed as \.zip says, or damaged"),
            ("p.txt.bz2", r"it is not compressed as \.bz2 says, or damaged"),
            ("p.tsv", "it needs one column named prompt; found The lake"),
            ("P.PARQUET", "it is not Parquet"),
        )
    ),
]  # fmt: skip
"""Name and content of a file of prompts."""
NOWHERE = "there is no such file"
NAMES = {
    "sentimnt": "unknown task 'sentimnt'",
    "missing.toml": NOWHERE,
    "./gone": NOWHERE,
    "~/gone": NOWHERE,
    "gone.txt": NOWHERE,
    "./folder": "it is no .toml file",
    ".": "unknown",
}
"""Names of tasks that are not there."""


def of_file(text, name="bad"):
    """The error names the file."""
    Path(f"{name}.toml").write_text(text, "utf-8", errors="surrogateescape")
    with pytest.raises(TaskError, match=rf"{name}\.toml") as caught:
        load_task(f"{name}.toml")
    raise caught.value


def prompts(name, data):
    if data is not None:
        Path(name).write_bytes(data)
    read_prompts(name)


def in_folder(read):
    Path("p.txt").mkdir()
    read("p.txt")


def task_by(name):
    Path("folder").mkdir()
    load_task(name)


def with_attribute(name):
    Task(name="t", attributes={name: Attribute(prefix="a")}, prompts={"texts": ["b"]})


def misspelt():
    Path("mood.toml").write_text(GOOD)
    load_task("mood.toml").prefix("clam")


def barred(word):
    BannedWords(load_tokenizer("smollm2-135m"), (word,), ["a"])


CALLS = {
    **{
        f"words of the span {span}": (
            lambda span=span: chat_task([{"role": "system", "content": "{prompt}"}], span, prompts=["Hi."]).words("custom"),
            f"the prefix '{span}' of task 'custom' names a span of its chat .* give the text: as phrase:TEXT",
        )
        for span in ("system", "phrase:{prompt}")
    },
    "one prefix for all": (
        lambda: load_task("sentiment").with_prefix("Very good:"),
        "prefix 'Very good:' is the same for all attributes; write {attribute}",
    ),
    "a misspelt attribute": (misspelt, "task 'mood': unknown attribute 'clam'; allowed: calm; did you mean 'calm'"),
    **{
        f"a task called {name}": (lambda name=name: of_file(GOOD, name), f"a task may not be called '{name}'")
        for name in RESERVED_TASKS
    },
    **{
        f"a task {name}": (
            lambda name=name: task_by(name),
            rf"{message}.*allowed: detox, sentiment, topic.*path of a \.toml file",
        )
        for name, message in NAMES.items()
    },
    "prompts in a folder": (lambda: in_folder(read_prompts), "cannot read prompts from .*Is a directory"),
    **{
        f"an attribute {name!r}": (
            lambda name=name: with_attribute(name),
            "an attribute's name has letters and no NUL",
            ValueError,
        )
        for name in ("", " ", "a\0b")
    },
    **{
        f"an attribute {name!r}": (lambda name=name: with_attribute(name), "may not be called", ValueError)
        for name in (*RESERVED_ATTRIBUTES, "hard calm")
    },
    **{
        f"barring {word}": (lambda word=word: barred(word), f"'{word}' cannot be banned.*ban_words")
        for word in ("积极", "अच्छा")
    },
    "words of one class": (lambda: derive_words({"positive": ["great"]}, 5),
     "give texts of two at least; found positive", DataError),
    "a class without words": (lambda: derive_words({"positive": ["great"], "negative": ["1 2 3"]}, 5),
     "no words for negative", DataError),
    **{
        f"{read.__name__} of {name!r}": (lambda read=read, name=name: read(name), r"^[\x20-\x7e]+$")
        for name in ("gone\n.txt", "a\x1b.txt\n", "p.txt\n")
        for read in (read_prompts, load_task)
    },
    **{
        f"a task of {name!r}": (lambda name=name: load_task(f"{name}.toml"), r"^[\x20-\x7e]+$")
        for name in ("gone\n.txt", "a\x1b.txt\n", "p.txt\n")
    },
}  # fmt: skip


def rows():
    for text, message in TEXTS:
        yield message, lambda text=text: of_file(text), message, TaskError
    for name, data, message in PROMPTS:
        call = lambda name=name, data=data: prompts(name, data)  # noqa: E731
        yield f"{name} of {str(data)[:20]}", call, message, TaskError
    for name, row in CALLS.items():
        yield name, *(*row, TaskError)[:3]


@pytest.mark.parametrize(
    ("call", "message", "error"), [pytest.param(*row, id=ascii(name)[:60]) for name, *row in rows()]
)
def test_what_the_room_refuses(call, message, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as caught:
        call()
    if isinstance(caught.value, TaskError):
        assert "\n" not in str(caught.value)
