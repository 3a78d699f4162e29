"""Commands that the package prints: those that hold a value are quoted, and all of them parse."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from cyclopts import CycloptsError, MissingArgumentError

import lapa2_interp
from lapa2_interp.cli.app import app, main
from lapa2_interp.commands import command, command_options
from lapa2_interp.runs.run import load_run

pytestmark = pytest.mark.usefixtures("shared_models")

PACKAGE = Path(lapa2_interp.__file__).parent
FILES = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "analyses").rglob("*.py")]
TREES = {file: ast.parse(file.read_text("utf-8")) for file in FILES}
HOLE = "\0"
"""In the place of a value in a text."""
ODD = "a b's folder/-x"
VALUES = {
    "length": 32, "samples": 2, "seed": 1, "long_length": 64, "long_texts": 2, "dtype": "float32",
    "model_class": "TransformerBridge", "device": "cpu", "traceback": True, "objective": "mle",
    "set": {"prefixes": "hard", "pro_aug": False, "words": ODD},
}  # fmt: skip
"""Values of options for which any text will not do."""


def texts(tree):
    """Every text of a file: (line, text), with `HOLE` for what is put in."""
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [
                piece.value if isinstance(piece, ast.Constant) else HOLE for piece in node.values
            ]
            yield node.lineno, "".join(parts)
        elif id(node) not in inside and isinstance(getattr(node, "value", None), str):
            yield node.lineno, node.value


def printed():
    """Commands in backticks, and on lines of their own: (place, words after lapa2)."""
    for file, tree in TREES.items():
        for number, text in texts(tree):
            joined = re.sub(r"\\\n\s*", " ", text)
            spans = re.findall(r"`(lapa2\s[^`]*)`", joined)
            spans += re.findall(r"^\s{2,}(lapa2 \S.*)$", joined, re.MULTILINE)
            for span in spans:
                yield f"{file.name}:{number}", " ".join(span.split()).removeprefix("lapa2 ")


def calls():
    """Calls of `command` in the package: (place, positional nodes, keyword nodes)."""
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "command":
                yield f"{file.name}:{node.lineno}", node.args, node.keywords


def parse(words):
    app.parse_args(words, exit_on_error=False, print_error=False)


def test_a_command_that_holds_a_value_is_made_by_command():
    commands = list(printed())
    assert len(commands) > 60
    assert not [source for source, words in commands if HOLE in words]


def test_options_and_scripts_that_hold_a_value_are_quoted():
    wrong = [
        f"{file.name}:{number}"
        for file, tree in TREES.items()
        for number, text in texts(tree)
        if re.search(f"--(only|set) [^ ]*={HOLE}|`python [^`]*{HOLE}", " ".join(text.split()))
    ]
    assert not wrong
    assert command_options(only={"arm": "my arm"}, seed=1) == "--only 'arm=my arm' --seed 1"


def test_the_commands_that_are_named_exist_with_their_options():
    wrong = []
    for source, text in printed():
        if "|" in text or HOLE in text:  # a list of commands
            continue
        words = shlex.split(text, comments=True)
        names, _, rest = app.parse_commands(words)
        if not names and not words[0].startswith("-"):
            wrong.append(f"{source}: {text}: no such command")
            continue
        if rest and rest[-1].startswith("--"):  # an option is named without its value
            words = [*words, "1"]
        try:
            parse(words)
        except MissingArgumentError:
            pass
        except CycloptsError as error:
            wrong.append(f"{source}: {text}: {error}")
    assert not wrong


@pytest.mark.parametrize(
    ("source", "args", "keywords"), list(calls()), ids=lambda argument: str(argument)[:24]
)
def test_commands_that_are_made_parse_whatever_the_names_are(source, args, keywords):
    def value(node, usual):
        return node.value if isinstance(node, ast.Constant) else usual

    words = [value(node, f"{ODD}{i}") for i, node in enumerate(args)]
    options = {
        keyword.arg: value(keyword.value, VALUES.get(keyword.arg, ODD)) for keyword in keywords
    }
    name, *rest = shlex.split(command(*words, **options))
    assert name == "lapa2"
    assert [word for word in rest if word.startswith(ODD)] == [
        word for word in words if str(word).startswith(ODD)
    ] + [word for word in options.values() if word == ODD]
    parse(rest)


@pytest.mark.parametrize(
    ("words", "options", "written"),
    [
        (("runs", Path("my run")), {}, "lapa2 runs 'my run'"),
        (("runs", "a"), {"state": None, "traceback": False}, "lapa2 runs a"),
        (("runs", "a"), {"traceback": True}, "lapa2 runs a --traceback"),
        (
            ("sweep", "g.toml"),
            {"set": {"samples": 2, "pro_aug": True}, "gpus_per_worker": 0.5},
            "lapa2 sweep g.toml --set samples=2 --set pro_aug=true --gpus-per-worker 0.5",
        ),
        (("generate",), {"prompt": ["-a", "b $c"]}, "lapa2 generate --prompt=-a --prompt 'b $c'"),
    ],
)
def test_how_a_command_is_written(words, options, written):
    assert command(*words, **options) == written


def test_what_generate_prints_runs(tmp_path, capsys):
    out = tmp_path / "my 'first' run"
    asked = ["--model", "tiny-gpt2", "--attribute", "positive", "--prompt", "The lake"]
    assert main(["generate", *asked, "--length", "12", "--out", str(out)]) == 0
    (said,) = re.findall(r"`lapa2 (.*)`", capsys.readouterr().out)
    assert main(shlex.split(said)) == 0
    assert "mean over layers and heads" in capsys.readouterr().out


def test_what_errors_print_runs(tmp_path, capsys):
    out = tmp_path / "a run"
    asked = ["--model", "tiny-gpt2", "--attribute", "positive", "--prompt", "The lake"]
    assert main(["generate", *asked, "--length", "12", "--out", str(out)]) == 0
    with pytest.raises(Exception, match="has no cell 'abc'") as caught:
        load_run(out).manifest("abc")
    (said,) = re.findall(r"`lapa2 (.*)`", str(caught.value))
    assert main(shlex.split(said)) == 0
    assert "finished" in capsys.readouterr().out
