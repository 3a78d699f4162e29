"""Drills of hostile texts, labels, prompts and names, which go through the commands. `make drills`.

They are shown and do nothing: not in a terminal, not in a page, not in a spreadsheet.
"""

import csv
import json
import pickle
import re
import sys

import pandas as pd
import pytest
from drills import Terminal

from lapa2_interp import load_run
from lapa2_interp.cli.app import main
from lapa2_interp.files import sha256_of

pytestmark = pytest.mark.drill
HTML = "<img src=x onerror=alert(1)></script><script>document.title='x'</script>&amp;"
ESCAPES = "\x1b[31mred\x1b]0;title\x07\x1b[2J\x9b1A\r\x08\nb"
FORMULA = '=cmd|"/c calc"!A1'
TURNED = "\u202egnp.exe\u2066\u200f"
NUL = "before\0after"
LATEX = r"\input{/etc/passwd} $x_1$ \write18{ls} 100% {"
MARKDOWN = "| a | b |\n|---|---|\n# head\n[x](javascript:alert(1)) ```"
LONG = "long " * 200_000
"""A line of 1 MB."""
TEXTS = (HTML, ESCAPES, FORMULA, TURNED, NUL, LATEX, MARKDOWN, LONG)
ACTS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
FORMULA_NAME, HTML_NAME = FORMULA.replace("/", "-"), HTML.replace("/", "|")
"""Names of attributes hold no slash and no line break."""
TASK = f"""
[attributes.{json.dumps(FORMULA_NAME)}]
prefix = {json.dumps("Very " + HTML + ESCAPES + ":")}
[attributes.{json.dumps(HTML_NAME)}]
prefix = {json.dumps(FORMULA + TURNED)}
[prompts]
texts = [{", ".join(map(json.dumps, (ESCAPES, HTML + TURNED, FORMULA, LATEX)))}]
"""
GRID = """
model = "tiny-gpt2"
dtype = "float32"
trace = "pooled"
task = {task}
method = {{ name = "prefix", prefixes = "hard" }}
samples = 2
length = 140
augmentation = ["none", "paper"]
"""


@pytest.fixture(autouse=True)
def promise(record_property):
    record_property("promise", "5")


@pytest.fixture
def on_terminal(monkeypatch):
    """Runs a command on a terminal; what it printed."""

    def run(*words, code=0):
        out, err = Terminal(), Terminal()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        exit_code = main([str(word) for word in words])
        printed = out.getvalue(), err.getvalue()
        assert exit_code == code, printed[1][-500:]
        assert not ACTS.findall(printed[0])
        assert not ACTS.findall(printed[1].replace("\r", ""))  # progress bars begin a line again
        assert "Traceback" not in printed[1]
        return printed

    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose task, labels and prompts are hostile, and whose texts are replaced by such."""
    folder = tmp_path_factory.mktemp("home")
    task = folder / "we<b>ird =1+1.toml"
    task.write_text(TASK)
    (folder / "grid.toml").write_text(GRID.format(task=json.dumps(str(task))))
    run_folder = folder / "run"
    words = [
        "sweep",
        folder / "grid.toml",
        "--device",
        "cpu",
        "--workers",
        "1",
        "--out",
        run_folder,
    ]
    assert main([str(word) for word in words]) == 0
    for file in run_folder.glob("cells/*/*.parquet"):
        texts = pd.read_parquet(file)
        texts["text"] = [TEXTS[row % len(TEXTS)] for row in range(len(texts))]
        texts.to_parquet(file)
        record = file.with_suffix(".json")
        fields = json.loads(record.read_text())
        fields["sha256"][file.name] = sha256_of(file)
        record.write_text(json.dumps(fields))
    return run_folder


def test_a_run_keeps_hostile_texts(run):
    texts = load_run(run).texts()
    assert set(texts["text"]) == set(TEXTS)
    assert set(texts["attribute"]) == {FORMULA_NAME, HTML_NAME}
    assert set(texts["prompt"]) == {ESCAPES, HTML + TURNED, FORMULA, LATEX}


def test_runs_and_trace_show_hostile_labels_and_no_more(run, on_terminal, tmp_path):
    cells = on_terminal("runs", run)[0].split("\n\n")[1]
    assert [line.split()[1] for line in cells.splitlines()] == ["finished"] * 4
    json.loads(on_terminal("runs", run, "--json")[0])
    on_terminal("trace", run, "--only", "arm=baseline", "--out", tmp_path / "trace")


def page_of(file):
    """A page without a foreign element; its data."""
    html = file.read_text(encoding="utf-8")
    assert len(re.findall("<script", html, re.I)) == 2
    assert len(re.findall("</script", html, re.I)) == 2
    assert "<img src=x" not in html
    assert not re.search(r"href=.?javascript:", html)
    assert not re.search(r"\b(src|href)\s*=\s*[\"']?(https?:)?//", html)
    assert "\u202e" not in html
    assert "\\u202egnp" in html
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1]
    return json.dumps(json.loads(data), ensure_ascii=False)


@pytest.mark.parametrize("command", ["report", "view"])
def test_pages_of_a_hostile_run_hold_no_foreign_element(run, on_terminal, tmp_path, command):
    file = tmp_path / f"{TURNED}.html"
    more = ["--only", "arm=baseline"] if command == "view" else []
    on_terminal(command, run, *more, "--out", file)
    assert HTML in page_of(file)


def test_sheets_of_a_hostile_run_are_inert_and_come_back(run, on_terminal, tmp_path):
    """No cell begins a formula; the ids of the answers find their texts again."""
    on_terminal(
        "scorers", "sheets", run, "--out", tmp_path, "--n-texts", "8", "--only", "arm=baseline"
    )
    for name in ("sheet.csv", "key.csv"):
        cells = pd.read_csv(tmp_path / name, dtype=str, keep_default_na=False).to_numpy().ravel()
        assert not [cell for cell in cells if re.match(r"[\s]*[=+\-@]", cell)]
    sheet = pd.read_csv(tmp_path / "sheet.csv", dtype=str, keep_default_na=False)
    answers = tmp_path / "answers.csv"
    sheet.assign(relevance="5", fluency="4", topicality="3", annotator=ESCAPES + "Ann").to_csv(
        answers, index=False, quoting=csv.QUOTE_ALL
    )
    on_terminal(
        *("scorers", "answers", answers, "--key", tmp_path / "key.csv"), "--out", tmp_path / "read"
    )
    answered = pd.read_csv(tmp_path / "read" / "answers.csv", keep_default_na=False)
    assert set(answered["attribute"]) <= {FORMULA_NAME, HTML_NAME}
    assert set(answered["annotator"]) == {ESCAPES + "Ann"}


@pytest.mark.parametrize("text", [*TEXTS[:-1], "\udcff.jsonl", "../../etc\n\nlapa2: all is well"])
def test_an_error_quotes_hostile_words_on_one_line(text, on_terminal, tmp_path):
    for words in (
        ["runs", tmp_path / text],
        ["score", tmp_path / f"{text}.jsonl", "--out", tmp_path / "out"],
        ["layout", "--model", text, "--prefix", "a", "--prompt", "b"],
        ["generate", "--attribute", text, "--out", tmp_path / "out"],
        ["generate", "--attribute", "positive", "--method", text, "--out", tmp_path / "out"],
        ["grids", text],
        [text],
    ):
        _, err = on_terminal(*words, code=2)
        assert err.startswith("lapa2: ")
        assert err.count("\n") == 1


def test_generate_prints_hostile_texts_and_writes_them_as_they_are(on_terminal, run, tmp_path):
    target = tmp_path / f"{ESCAPES}out"
    task = next(run.parent.glob("we*.toml"))
    out, _ = on_terminal(
        "generate", "--model", "tiny-gpt2", "--task", task, "--attribute", FORMULA_NAME,
        "--prompt", ESCAPES, "--length", "60", "--device", "cpu", "--out", target,
    )  # fmt: skip
    assert "\\x1b[2J" in out
    (text,) = load_run(target).texts()["text"]
    assert text.startswith(ESCAPES)


class Runs:
    """A pickle that acts when it is read."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (open, (str(self.file), "w"))


def test_no_pickle_runs_and_no_import_leaves_its_folder(on_terminal, tmp_path):
    acted = tmp_path / "acted"
    for name in (
        "adapter.bin",
        "pytorch_model.bin",
        "prefix.npz",
        "samples.parquet",
        "texts.jsonl",
    ):
        (tmp_path / name).write_bytes(pickle.dumps(Runs(acted)))
    into = ["--model", "tiny-gpt2", "--task", "sentiment", "--attribute", "positive"]
    for name in ("adapter.bin", "prefix.npz", "pytorch_model.bin"):
        on_terminal("prefix", "import", tmp_path / name, *into, "--out", tmp_path / "set", code=2)
    on_terminal("prefix", "import", tmp_path, *into, "--out", tmp_path / "set", code=2)
    on_terminal("score", tmp_path / "samples.parquet", "--out", tmp_path / "out", code=2)
    on_terminal("score", tmp_path / "texts.jsonl", "--out", tmp_path / "out", code=2)
    on_terminal("layout", "--model", tmp_path, "--prefix", "a", "--prompt", "b", code=2)
    assert not acted.exists()
    task = tmp_path / "task.toml"
    task.write_text(
        '[attributes."../../outside"]\nprefix = "a:"\n[attributes.b]\nprefix = "b:"\n'
        '[prompts]\ntexts = ["a"]\n'
    )
    before = sorted(tmp_path.parent.rglob("*"))
    _, err = on_terminal(
        "prefix", "import", tmp_path / "adapter.bin", "--model", "tiny-gpt2", "--task", task,
        "--attribute", "../../outside", "--number", "0", "--out", tmp_path / "a" / "b", code=2,
    )  # fmt: skip
    assert "no NUL, slash or backslash" in err
    assert sorted(tmp_path.parent.rglob("*")) == before
