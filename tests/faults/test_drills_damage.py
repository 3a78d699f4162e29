"""Drills of damage: each kind of stored file is cut, changed by a bit, emptied, replaced by a folder,
and removed. `make drills`. Settings and batches of cells: `tests/runs/test_sweep.py` and
`tests/runs/test_engines.py`.

What reads it then ends in one line with exit code 2, and what made it makes it again.
"""

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from drills import (
    LINES,
    SWEEP,
    contents,
    different,
    done,
    finished,
    furnish,
    lapa2_lines,
    left_over,
    photograph,
    start,
)

from lapa2_interp.cli.app import main
from lapa2_interp.files import remove_path
from lapa2_interp.models.gguf_file import _find_damage, _write_seal
from lapa2_interp.models.load import load_transformers

pytestmark = pytest.mark.drill
TRUNCATED, BIT, EMPTY, FOLDER, REMOVED = (
    "truncated", "one bit changed", "empty", "a folder in its place", "removed",
)  # fmt: skip
HARMS = (TRUNCATED, BIT, EMPTY, FOLDER, REMOVED)


def harm(file, how):
    data = file.read_bytes()
    file.unlink()
    if how == FOLDER:
        file.mkdir()
    if how in (REMOVED, FOLDER):
        return
    at = 0 if file.suffix == ".json" else len(data) // 2  # a bit of a JSON file may be a blank
    changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    file.write_bytes({TRUNCATED: data[: len(data) // 2], BIT: changed, EMPTY: b""}[how])


@dataclass(frozen=True)
class Stored:
    """A kind of stored file.

    Attributes:
        file: Its place in a folder, where * stands for any letters.
        read: A command that reads it.
        again: The command that makes it again; None where no command does.
        harms: Those that `read` must refuse.
        mended: Those that `again` mends; after the others the file is removed first.
    """

    file: str
    read: str
    again: str | None = None
    harms: tuple[str, ...] = HARMS
    mended: tuple[str, ...] = HARMS


SWEEPS = SWEEP.replace("{out}", "{home}/run")
TRAINS = LINES["prefix train"].replace("{out}", "{home}/out")
CHECKS = "score {home}/reviews.jsonl --attribute positive --scorers accuracy={home}/scorer/sentiment.npz --cache {home}/cache"
SELECTS = (
    "generate --model planted --attribute positive --alpha 1 --card {home}/card.json "
    "--length 20 --device cpu --out {home}/steered"
)
EVALUATES = LINES["prefix evaluate"]
NOT_GONE = (TRUNCATED, BIT, EMPTY, FOLDER)
NOT_A_BIT = (TRUNCATED, EMPTY, FOLDER, REMOVED)
KINDS = {
    "run.json": Stored("run/run.json", "runs {home}/run", SWEEPS, mended=(REMOVED,)),
    "a soft prefix's card": Stored("set/positive.json", EVALUATES, None, NOT_GONE),
    "a soft prefix": Stored("set/positive.safetensors", EVALUATES, None, (TRUNCATED, BIT, EMPTY)),
    "a scorer's card": Stored("scorer/sentiment.json", CHECKS),
    "a scorer's weights": Stored("scorer/sentiment.npz", CHECKS),
    "a selection": Stored("card.json", SELECTS),
    "a model's config": Stored("model/config.json", "probe {home}/model"),
    "a model's weights": Stored("model/model.safetensors", "probe {home}/model", None, NOT_A_BIT),
    "a training's checkpoint": Stored(
        "**/positive.pt", TRAINS, TRAINS, (TRUNCATED, BIT, EMPTY), ()
    ),
}


@pytest.fixture(scope="module")
def furnished(tmp_path_factory):
    """A folder with one of each kind."""
    folder = furnish(tmp_path_factory.mktemp("home"))
    log, training, shots = folder / "log", folder.with_name("training"), folder.with_name("shots")
    done(f"scorers train --task sentiment --data {folder}/reviews.jsonl --out {folder}/scorer", log)
    done(f"select planted --score mass --heads 2 --tokens 2 --device cpu --out {folder}/card.json", log)  # fmt: skip
    network, tokenizer, _ = load_transformers("tiny-llama")
    for part in (network, tokenizer):
        part.save_pretrained(folder / "model")
    training.mkdir()
    trains = LINES["prefix train"].format(home=folder, out=training / "out")
    start(photograph, trains, training, shots, log).join()
    midway = (shot for shot in sorted(shots.iterdir()) if not left_over(shot))
    shutil.copytree(
        next(shot for shot in midway if list(shot.glob("**/positive.pt"))),
        folder,
        dirs_exist_ok=True,
    )
    return folder


@pytest.fixture
def run(capsys):
    """Runs a command; its exit code and its lines on stderr."""

    def run(line, home):
        capsys.readouterr()
        return main(shlex.split(line.format(home=home))), capsys.readouterr().err.splitlines()

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_damage(kind, furnished, tmp_path, run, record_property):
    record_property("promise", "3")
    stored = KINDS[kind]
    top = Path(stored.file).parts[0].replace("**", "out")
    if stored.again:
        undamaged = shutil.copytree(furnished, tmp_path / "whole")
        assert run(stored.again, undamaged)[0] == 0
        wanted = contents(undamaged / top)
    for how in stored.harms:
        home = shutil.copytree(furnished, tmp_path / "home")
        file = min(home.glob(stored.file))
        harm(file, how)
        code, said = run(stored.read, home)
        assert code == 2, (how, said)
        [line] = lapa2_lines("\n".join(said))
        assert line == said[-1], (how, said)
        assert file.name in line or file.parent.name in line, (how, said)
        if stored.again:
            if how not in stored.mended:
                remove_path(file)
            beside = {line for line in finished(home) if file.stem not in line.split(" ")[0]}
            code, said = run(stored.again, home)
            assert code == 0, (how, said)
            assert different(contents(home / top), wanted) == [], how
            assert beside <= finished(home), how
        shutil.rmtree(home)
    result = "refused in a line" + "; made again, and nothing else" * bool(stored.again)
    record_property("result", f"{len(stored.harms)} kinds of damage {result}")


def test_damaged_lines_of_a_study(furnished, tmp_path, run, record_property):
    """They are made again; a damaged first line, which holds the inputs, is refused."""
    record_property("promise", "3")
    line = LINES["fading"].replace("{out}", str(tmp_path / "out"))
    assert run(line, furnished)[0] == 0
    wanted, file = contents(tmp_path), tmp_path / "out-kept"
    for how in (TRUNCATED, EMPTY, REMOVED):  # a line has no sha256 that would tell a changed digit
        shutil.rmtree(tmp_path / "out")
        harm(file, how)
        code, said = run(line, furnished)
        assert code == 0, (how, said)
        stored = contents(tmp_path)
        assert sorted(stored.pop("out-kept").splitlines()) == sorted(
            wanted["out-kept"].splitlines()
        )
        assert different(stored | {"out-kept": wanted["out-kept"]}, wanted) == [], how
    shutil.rmtree(tmp_path / "out")
    file.write_bytes(b"?" + file.read_bytes())
    code, said = run(line, furnished)
    assert (code, len(lapa2_lines("\n".join(said)))) == (2, 1)
    record_property("result", "3 kinds of damage made again, the first line refused")


@pytest.mark.parametrize("how", HARMS)
def test_damaged_scores(how, furnished, tmp_path, run, record_property):
    """They are refused in a line, or made again; none is another."""
    record_property("promise", "3")
    line = f"score {furnished}/run --scorers linear accuracy --cache {tmp_path}/cache --out {tmp_path}/out"
    assert run(line, furnished)[0] == 0
    wanted, [file] = contents(tmp_path / "out"), (tmp_path / "cache").glob("*.sqlite")
    shutil.rmtree(tmp_path / "out")
    harm(file, how)
    code, said = run(line, furnished)
    if code == 2:
        assert file.name in said[-1]
        remove_path(file)
        assert run(line, furnished)[0] == 0
    assert different(contents(tmp_path / "out"), wanted) == []
    record_property("result", "refused in a line" if code == 2 else "the same scores")


def test_a_damaged_conversion_of_the_default_model(tmp_path, record_property):
    """It is converted again; here small files stand for it."""
    record_property("promise", "3")
    for how in HARMS:
        for name in ("model.safetensors", "config.json"):
            folder = tmp_path / how / name
            folder.mkdir(parents=True)
            for file in ("model.safetensors", "config.json"):
                (folder / file).write_bytes(bytes(range(256)))
            _write_seal(folder)
            assert _find_damage(folder) is None
            harm(folder / name, how)
            assert _find_damage(folder) is not None, (how, name)
    record_property("result", f"{2 * len(HARMS)} seen")
