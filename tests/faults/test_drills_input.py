"""Drills of command lines that are mangled. `make drills`."""

import os
import random
import shlex
import shutil
from pathlib import Path

import pytest
from drills import LINES, furnish

from lapa2_interp.cli.app import main

pytestmark = pytest.mark.drill
VALUES = (
    "", " ", "-1", "0", "1", "3", "nan", "inf", "1e400", "99999999999999999999", "0.5", "true", "none", "all",
    "../../outside", "/nonexistent/place", "{home}/reviews.jsonl", "{home}/run", "tiny-gpt2", "tiny-llama", "planted", "paper",
    "alpha=2", "samples=0", "=", "a=b=c", "[1,2", '{"a": 1}', "\u202egnp.exe", "é" * 300, "\x1b[31mred", "%s%n", "$(touch x)",
    "--", "-", "--out", "*", "sentiment", "positive", "\ud800",
)  # fmt: skip
OPTIONS = (
    "--samples", "--length", "--seed", "--alpha", "--heads", "--card", "--method", "--task",
    "--attribute", "--prompt", "--tokens", "--trace", "--top-k", "--eos", "--device", "--dtype", "--set", "--only", "--force",
    "--json", "--help", "--nonsense", "--steps", "--metric", "--augmentation",
)  # fmt: skip


def mangled(words, rng, home):
    """A command line after one to three accidents."""
    words = list(words)
    for _ in range(rng.randint(1, 3)):
        accident, at = rng.randrange(5), rng.randrange(1, len(words) + 1)
        fill = rng.choice(VALUES)
        fill = fill.format(home=home) if fill.startswith("{home}") else fill
        needed = {"--model", "--shape"}  # without one, it would be a model that is not tiny
        safe = [i for i in range(1, len(words)) if not needed & {words[i - 1], words[i]}]
        if accident == 0 and safe:
            del words[rng.choice(safe)]
        elif accident == 1 and safe:
            words[rng.choice(safe)] = fill
        elif accident == 2:
            words[at:at] = [rng.choice(OPTIONS), fill]
        elif accident == 3:
            words[at:at] = [rng.choice(OPTIONS)]
        elif len(words) > 2:
            words[at:at] = words[-1:]
    return words


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


BESIDE = ("run/report.html", "run/view.html", "run/scores")
"""Where commands write into a run without --out."""


@pytest.mark.parametrize("part", range(4))
def test_mangled_command_lines(part, tmp_path, monkeypatch, capsys, record_property):
    """Exit code 0 or 2, one line, and no file but those that the line names."""
    record_property("promise", "4")
    rng, codes, home, here = random.Random(part), [], tmp_path / "home", tmp_path / "a" / "here"
    home.mkdir()
    furnish(home)
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("LAPA2_CACHE", os.environ["LAPA2_CACHE"])
    before, outside = tree(home), tmp_path / "outside"
    for number in range(50):
        out = tmp_path / "outs" / str(number) / "out"
        out.parent.mkdir(parents=True)
        good = rng.choice(list(LINES.values())).format(home=home, out=out)
        words = mangled(shlex.split(good), rng, str(home))
        if "smollm2-135m" in " ".join(words):
            continue
        try:
            code = main(words)
        except SystemExit as stop:
            code = stop.code
        said = capsys.readouterr().err
        assert code in (0, 2), words
        assert "Traceback" not in said, words
        assert code == 0 or said.splitlines()[-1].startswith("lapa2: "), words
        named = {Path(word).parts[0] for word in words if Path(word).parts}  # such as `--out all`
        assert {path.name for path in here.iterdir()} <= named, words
        assert not outside.exists() or "../../outside" in words
        new = set(tree(home)) - set(before)
        assert len(new) + len(before) == len(tree(home)), words
        assert all(path.startswith(BESIDE) for path in new), words
        codes.append(code)
        for path in (out.parent, outside, *here.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    record_property("result", f"{codes.count(0)} were good, {codes.count(2)} refused in a line")
