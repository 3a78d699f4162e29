"""What the command line shows, where it depends on no machine and no time, is a file in golden/.

`python tests/cli/test_golden.py` writes the files; read their difference before a commit.
"""

import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from lapa2_interp.cli.app import main

FOLDER = Path(__file__).with_name("golden")
LINES = {
    "help": "--help",
    "generate": "generate --help",
    "steer": "steer --help",
    "score": "score --help",
    "sweep": "sweep --help",
    "view": "view --help",
    "circuits": "circuits --help",
    "prefix_train": "prefix train --help",
    "layout": (
        "layout --model tiny-gpt2 --prefix 'Very positive:' --prompt 'The lake' --steps 3"
        " --augmentation 'lapa2:law=sqrt,span=\"prefix+bos\" + instaboost:tokens=1'"
    ),
    "recipes": "recipes",
    "methods": "methods air-decoding preadd",
    "tasks": "tasks",
}
"""Commands by the names of their files."""


def output(line):
    with redirect_stdout(StringIO()) as printed:
        assert main(shlex.split(line)) == 0
    return "".join(f"{row.rstrip()}\n" for row in printed.getvalue().splitlines())


@pytest.mark.parametrize("name", LINES)
def test_the_output_is_that_of_the_file(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert output(LINES[name]) == (FOLDER / f"{name}.txt").read_text("utf-8")


def test_every_file_is_compared():
    assert {file.stem for file in FOLDER.iterdir()} == set(LINES)


if __name__ == "__main__":
    import os

    os.environ["COLUMNS"] = "80"
    for name, line in LINES.items():
        (FOLDER / f"{name}.txt").write_text(output(line), "utf-8")
