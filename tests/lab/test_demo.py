"""The demo on a tiny model: its panels, its numbers, going on after a kill, what it says, and that
it loads nothing."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from lapa2_interp.cli.app import app as lapa2

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "analyses" / "demo/demo.py"
WAIT = 300
pytestmark = pytest.mark.long


def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """The script, as a shell would call it."""
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=WAIT, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )  # fmt: skip


def here(*arguments: str) -> int:
    """The script's exit status, in this process, where libraries are loaded already."""
    try:
        return runpy.run_path(str(SCRIPT))["main"](arguments)
    except SystemExit as ended:
        return ended.code


def tiny(out: Path) -> tuple[str, ...]:
    return ("--model", "tiny-llama", "--threads", "1", "--length", "24", "--out", str(out))


@pytest.fixture(scope="module")
def proxy() -> Iterator[socket.socket]:
    """What would answer every request of `made`."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.settimeout(0.0)
        yield listening


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str, dict[Path, int]]:
    """A run that Ctrl-C stops after its first cell: the folder, exit status, what was printed, and
    when its files were written."""
    out = tmp_path_factory.mktemp("demo") / "run"
    # What runs in the background of a script ignores SIGINT, and so would its children.
    program = (
        "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", program, SCRIPT, *tiny(out)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    until = time.monotonic() + WAIT
    while (
        time.monotonic() < until
        and started.poll() is None
        and not list(out.glob("cells/*/*0.json"))
    ):
        time.sleep(0.02)
    started.send_signal(signal.SIGINT)
    _, printed = started.communicate(timeout=WAIT)
    early = {file: file.stat().st_mtime_ns for file in out.glob("cells/*/*.parquet")}
    return out, started.returncode, printed, early


@pytest.fixture(scope="module")
def made(stopped, proxy: socket.socket) -> tuple[Path, str]:
    """The same command again, to the end."""
    out = stopped[0]
    address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
    done = call(*tiny(out), http_proxy=address, https_proxy=address, HF_HUB_OFFLINE="0")
    assert done.returncode == 0, done.stderr
    return out, done.stderr


class Page(HTMLParser):
    """Headings, table rows, links and sources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.rows: list[list[str]] = []
        self.commands: list[str] = []
        self.places: list[str] = []
        self._into: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.places += [value for name, value in attributes if name in ("src", "href") and value]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        if tag == "h2":
            self.headings.append("")
        if tag == "code":
            self.commands.append("")
        self._into = {"h2": self.headings, "td": self.rows[-1] if self.rows else None,
                      "th": self.rows[-1] if self.rows else None, "code": self.commands}.get(tag, self._into)  # fmt: skip

    def handle_endtag(self, tag: str) -> None:
        if tag in ("h2", "td", "th", "code"):
            self._into = None

    def handle_data(self, data: str) -> None:
        if self._into:
            self._into[-1] += data


def test_it_says_first_what_it_takes_and_shows_and_ends_with_what_to_try(made):
    out, printed = made
    first, last = printed.index("It takes"), printed.index("Try next")
    assert (
        first
        < printed.index("[1/5]")
        < printed.index("[5/5]")
        < printed.index("report.html", first + 200)
        < last
    )
    assert len(re.findall(r"^  (lapa2|make) ", printed[last:], re.M)) == 3
    assert str(out / "report.html") in printed


def test_panels_are_in_order_and_each_has_a_command(made):
    out, _ = made
    page = Page((out / "report.html").read_text("utf-8"))
    expected = [
        "against length",
        "layers and heads",
        "side by side",
        "cannot tell",
        "verdicts",
        "method",
    ]
    assert len(page.headings) == len(expected) + 1
    for number, (heading, words) in enumerate(zip(page.headings, expected, strict=False), 1):
        assert heading.startswith(f"{number} ")
        assert words in heading
    assert len(page.commands) == len(expected)
    for command in page.commands:
        for part in command.split(" && "):
            name, *words = shlex.split(part)
            assert name == "lapa2"
            lapa2.parse_args(words, exit_on_error=False, print_error=False)


def test_the_page_loads_nothing_and_escapes_what_models_write(made):
    text = (made[0] / "report.html").read_text("utf-8")
    assert all(link.startswith(("#", "data:image/svg+xml;base64,")) for link in Page(text).places)
    assert not re.search(r"url\(|@import", text[: text.index("</style>")])
    assert "default-src 'none'" in text
    assert "<|" not in text
    assert "Here is one text of each, steered towards" in text


def test_numbers_are_those_of_the_run_folder(made):
    """Attention and accuracy, from the stored files alone."""
    from lapa2_interp.runs.run import finished_cell, load_run
    from lapa2_interp.scoring.adapter import AdapterScorer
    from lapa2_interp.scoring.linear import LinearScorer
    from lapa2_interp.scoring.scorer import TextItem

    out, _ = made
    text = (out / "report.html").read_text("utf-8")
    rows = Page(text).rows
    run = load_run(out)
    scorers = {2: LinearScorer("sentiment"), 1: AdapterScorer("sentiment")}
    names = {0.0: "without LaPA2", 0.5: "alpha 1/2", 1.0: "alpha 1"}
    for alpha, cells in run.cells.groupby("alpha"):
        name = names[alpha]
        right, masses, echoes = {kind: [] for kind in scorers}, [], []
        for key, attribute in cells[["key", "attribute"]].to_numpy():
            cell = finished_cell(run, key)
            for kind, scorer in scorers.items():
                scores = scorer.score([TextItem(text) for text in cell.texts["text"]])
                right[kind] += [
                    scorer.columns[int(np.argmax(score))] == attribute for score in scores
                ]
            echoes += [attribute in text.lower().split() for text in cell.texts["text"]]
            masses += [  # shorter prompts have more steps
                float(np.nanmean(step)) for step in cell.trace["prefix"].to_numpy()[0]
            ]
        mine = [row for row in rows if row and row[0] == name]
        scored = next(row for row in mine if len(row) == 9 and row[-1] == "24")
        for kind, is_right in right.items():
            assert scored[kind].split(" ")[0] == f"{100 * np.mean(is_right):.0f}"
        assert float(scored[3].split(" ")[0]) >= np.floor(100 * np.mean(echoes))
        assert f"{100 * np.mean(masses):.1f} % {'at ' * (alpha > 0)}{name}" in text


def test_curves_are_those_of_the_stored_traces(made):
    import xarray as xr

    out, _ = made
    files = sorted((out / "reading").glob("*.nc"))
    stored = json.loads((SCRIPT.parent / "texts.json").read_text("utf-8"))["texts"]
    assert len(files) == len(stored)
    first = []
    for file in files:
        with xr.open_dataset(file, engine="h5netcdf") as trace:
            assert list(trace["alpha"].to_numpy()) == [0.0, 0.5, 1.0]
            first.append(trace["prefix"].to_numpy()[:, 0, 0].mean((1, 2)))
    text = (out / "report.html").read_text("utf-8")
    for name, value in zip(
        ("without LaPA2", "alpha 1/2", "alpha 1"), np.mean(first, axis=0), strict=True
    ):
        assert f"{name} from {100 * value:.1f} %" in text


def test_repeated_it_makes_only_the_page(made):
    out, _ = made
    times = {
        file: file.stat().st_mtime_ns
        for file in out.rglob("*")
        if file.is_file() and file.parent != out
    }
    assert here(*tiny(out)) == 0
    assert {file: file.stat().st_mtime_ns for file in times} == times


def test_interrupted_it_says_that_it_goes_on_and_does(stopped, made):
    out, status, printed, early = stopped
    assert status == 130
    assert (
        printed.rstrip().splitlines()[-1]
        == "stopped; what is finished is kept: run the same command again to resume"
    )
    assert "Traceback" not in printed
    assert early
    assert all(file.stat().st_mtime_ns == when for file, when in early.items())
    assert len(early) < len(list(out.glob("cells/*/*.parquet")))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ot", "x"), "did you mean '--out'"),
        (("--length", "3"), "argument --length: "),
        (("--model", "tiny-lama"), "did you mean 'tiny-llama'"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, arguments, said):
    out = () if "--ot" in arguments else ("--out", str(tmp_path / "run"))
    assert here("--threads", "1", *arguments, *out) == 2
    *before, last = capsys.readouterr().err.rstrip().splitlines()
    assert said in last
    assert "--model" in arguments or not before, "options are read before anything is said"


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert here("--model", "tiny-llama", "--threads", "1", "--out", str(tmp_path)) == 2
    printed = capsys.readouterr().err
    assert "is not a run" in printed
    assert "Traceback" not in printed
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_the_arms_of_the_default_model_name_heads_that_it_has(tmp_path):
    from lapa2_interp.runs.sweep import load_grids

    (grid,) = load_grids(tmp_path, [str(SCRIPT.parent / "demo.toml")])
    biases = [augmentation for cell in grid.cells for augmentation in cell.active_augmentations]
    assert len(grid.cells) == 6
    assert sorted(augmentation.head_mask(30, 9).sum() for augmentation in biases) == [
        24,
        24,
        270,
        270,
    ]


def test_every_method_has_a_shipped_example_with_its_origin():
    """A chat needs a task."""
    from lapa2_interp.methods.registry import known_methods

    stored = json.loads((SCRIPT.parent / "examples.json").read_text("utf-8"))
    assert set(stored["methods"]) == set(known_methods()) - {"chat"}
    assert all(method["base"].startswith(stored["prompt"]) for method in stored["methods"].values())
    texts = json.loads((SCRIPT.parent / "texts.json").read_text("utf-8"))
    for panel in (stored, texts):
        assert re.fullmatch(r"[0-9a-f]{40}", panel["commit"]), "of a clean checkout"
        assert {"model", "weights", "machine", "command", "dtype"} <= set(panel)


def test_it_asks_the_network_for_nothing(made, proxy):
    with pytest.raises(BlockingIOError):
        proxy.accept()
    with socket.create_connection(proxy.getsockname()):  # a request would have been seen
        proxy.accept()[0].close()
