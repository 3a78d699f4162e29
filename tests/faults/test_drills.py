"""Drills: what happens to commands that are killed or stopped, at random moments. `make drills`.

DRILLS=full is the long form. What a drill counted is in its properties (`--junitxml`);
`python tests/drills.py FILE` prints them as a table.
"""

import hashlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from conftest import load, soft_set, start
from drills import FULL, SWEEP, act, contents, furnish, left_over

from lapa2_interp.cli.app import app, main
from lapa2_interp.methods import load_task

pytestmark = [pytest.mark.drill, pytest.mark.alone]
ROOT = Path(__file__).parents[2]
KILLS, STOPS = (20, 6) if FULL else (3, 2)
SOON = 5.0
"""Seconds in which a command that is stopped must end."""
COMMANDS = {
    "sweep": SWEEP,
    "sweep, two workers": "sweep {home}/grid.toml --device cpu --workers 2 --out {out}",
    "generate": "generate --model tiny-gpt2 --attribute positive --length 60 --samples 20 --device cpu --out {out}",
    "score": "score {run} --scorers linear accuracy distinct perplexity=tiny-gpt2 --cache {out}-cache --device cpu --out {out}",
    "propositions": "propositions --model tiny-gpt2 --length 48 --synthetic-length 4000 --device cpu --out {out}",
    "circuits": "circuits planted --tokens 8 --best 2 --device cpu --out {out}",
    "select": "select planted --score cut --heads 2 --tokens 8 --device cpu --file {out}-cuts --out {out}.json",
    "fading": "fading planted --filler 8 32 --tokens 8 --device cpu --file {out}-kept --out {out}",
    "prefix train": "prefix train --model tiny-llama --data {home}/reviews.jsonl --set dtype=float32 --set slots=3 --set batch=4 "
    "--set max_tokens=16 --set check_every=4 --device cpu --out {out}",
    "view": "view {run} --only method=prefix --out {out}.html",
    "report": "report {run} --out {out}.html",
}


def place_of(command, folder):
    """Where a command writes."""
    ending = {"select": ".json", "view": ".html", "report": ".html"}.get(command, "")
    return folder / f"out{ending}"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    furnish(folder)
    soft_set(folder / "set", load("tiny-llama"), load_task("sentiment"))
    (folder / "claims").mkdir()
    shutil.copy(ROOT / "figures/quick/tables/alpha.claims.csv", folder / "claims")
    (folder / "messages.json").write_text('[{"role": "user", "content": "Hello"}]')
    assert (
        main(
            [
                "scorers",
                "sheets",
                str(folder / "run"),
                *f"--n-texts 8 --out {folder}/sheets".split(),
            ]
        )
        == 0
    )
    sheet = pd.read_csv(folder / "sheets" / "sheet.csv")
    rated = sheet.assign(relevance=3, fluency=4, topicality=2, annotator="anna")
    rated.to_csv(folder / "anna.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def undisturbed(home, tmp_path_factory):
    """By command: what it writes when nothing happens, and its seconds."""
    known = {}

    def of(command):
        if command not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            began = time.monotonic()
            process = start(act, line_of(command, home, folder), folder / "log")
            process.join()
            assert process.exitcode == 0, (folder / "log").read_text()
            known[command] = contents(place_of(command, folder)), time.monotonic() - began
        return known[command]

    return of


def line_of(command, home, folder):
    return COMMANDS[command].format(home=home, run=home / "run", out=folder / "out")


def made_once(folder):
    """Nothing in the ledger of a command and those that went on is there twice; its lines."""
    ledger = folder / "ledger"
    lines = ledger.read_text().splitlines() if ledger.exists() else []
    assert len(set(lines)) == len(lines), [each for each in lines if lines.count(each) > 1]
    return len(lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_killed_at_random_moments_it_ends_with_the_same_bytes(
    command, home, undisturbed, tmp_path, record_property
):
    wanted, seconds = undisturbed(command)
    rng, killed, kept = random.Random(command), 0, 0
    for number in range(3 * KILLS):
        if killed == KILLS:
            break
        folder = tmp_path / str(number)
        folder.mkdir()
        line, place = line_of(command, home, folder), place_of(command, folder)
        process = start(act, line, folder / "log")
        process.join(rng.uniform(0.02, 0.9) * seconds)
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            seconds *= 0.9  # the machine was busy when it was timed
            continue
        killed += 1
        process = start(act, line, folder / "log")
        process.join()
        if process.exitcode == 2 and place.exists():  # its work had ended before it was killed
            assert "is finished" in (folder / "log").read_text()
        else:
            assert process.exitcode == 0, (folder / "log").read_text()
        found = contents(place)
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if found[name] != wanted[name]] == []
        assert not left_over(folder)
        kept += made_once(folder)
        shutil.rmtree(folder)
    record_property("command", command)
    record_property("kills", killed)
    record_property("kept, none made again", kept)
    record_property("seconds undisturbed", round(seconds, 1))
    assert killed == KILLS, "it ended before it was killed"


@pytest.mark.parametrize("command", COMMANDS)
def test_stopped_it_ends_soon_and_says_how_to_go_on(
    command, home, undisturbed, tmp_path, record_property
):
    _, seconds = undisturbed(command)
    rng, longest, stopped = random.Random(command), 0.0, 0
    for number in range(3 * STOPS):
        if stopped == STOPS:
            break
        folder = tmp_path / str(number)
        folder.mkdir()
        kind = (signal.SIGTERM, signal.SIGINT)[stopped % 2]
        process = start(act, line_of(command, home, folder), folder / "log")
        while process.is_alive() and not (folder / "log").exists():  # on a busy machine
            time.sleep(0.01)
        process.join(rng.uniform(0.1, 0.8) * seconds)
        if not process.is_alive():
            seconds /= 2  # the machine was busy when it was timed
            continue
        began = time.monotonic()
        os.kill(process.pid, kind)
        process.join(4 * SOON)
        took = time.monotonic() - began
        log = (folder / "log").read_text()
        if process.exitcode == 0:  # it had just ended
            continue
        assert process.exitcode == (143 if kind == signal.SIGTERM else 130), log
        assert took < SOON, log
        assert log.splitlines()[-1].startswith("lapa2: interrupted; the same command "), log
        assert "Traceback" not in log
        assert not left_over(folder)
        longest, stopped = max(longest, took), stopped + 1
    record_property("command", command)
    record_property("stops", stopped)
    record_property("longest, seconds", round(longest, 2))
    assert stopped == STOPS, "it ended before it was stopped"


def test_four_workers_make_the_bytes_of_one(home, tmp_path):
    line = SWEEP.replace("--workers 1", "--workers 4").format(home=home, out=tmp_path / "run")
    process = start(act, line, tmp_path / "log")
    process.join()
    assert process.exitcode == 0, (tmp_path / "log").read_text()
    assert contents(tmp_path / "run") == contents(home / "run")


LINES = {
    **COMMANDS,
    "layout": "layout --model tiny-gpt2 --prefix Very --prompt lake --alpha 0.5 --steps 4",
    "probe": "probe tiny-gpt2",
    "models": "models",
    "tasks": "tasks",
    "methods": "methods",
    "recipes": "recipes",
    "prefixes": "prefixes",
    "scorers list": "scorers list",
    "grids": "grids {home}/grid.toml --set samples=2",
    "runs": "runs {run} --state finished",
    "trace": "trace {run} --only method=prefix --out {out}",
    "word-lists": "word-lists --task sentiment --data {home}/reviews.jsonl --n-words 4 --min-count 1 --min-z 0 --out {out}.json",
    "score a file": "score {home}/reviews.jsonl --scorers distinct --task sentiment --attribute positive --out {out}",
    "scorers check": "scorers check {home}/reviews.jsonl --label label --task sentiment --scorer linear",
    "scorers train": "scorers train --task sentiment --data {home}/reviews.jsonl --out {out}",
    "scorers sheets": "scorers sheets {run} --n-texts 4 --out {out}",
    "scorers answers": "scorers answers {home}/sheets/key.csv {home}/anna.csv --out {out}",
    "prefix recipes": "prefix recipes",
    "prefix evaluate": "prefix evaluate {home}/set --data {home}/reviews.jsonl --limit 4 --max-tokens 8 --device cpu",
    "prefix score": "prefix score {home}/set --samples 1 --length 30 --classifier linear --dtype float32 --device cpu",
    "prefix import": "prefix import {home}/set/positive.safetensors --model tiny-llama --task sentiment --attribute positive --out {out}",
    "power": "power quick/alpha --claims {home}/claims --out {out}.csv",
    "bench": "bench --shape tiny-gpt2 --samples 2 --context 8 --length 4 --dtype float32 --repeats 1 --out {out}",
    "chat": "chat {home}/messages.json --model tiny-gpt2 --length 3 --device cpu",
}
"""One good line of every command, for the fuzz; nothing in it asks for a model that is not tiny."""
REFUSED = ("chat",)
"""No tiny model has a chat template."""


def commands(group=app, before=()):
    """The names of all commands, such as "scorers list"."""
    for name in group:
        if not name.startswith("-"):
            inner = list(commands(group[name], (*before, name)))
            yield from inner or [" ".join((*before, name))]


def test_every_command_is_mangled():
    lines = [f"{line} " for line in LINES.values()]
    assert [
        name for name in commands() if not any(line.startswith(f"{name} ") for line in lines)
    ] == []


VALUES = (
    "", " ", "-1", "0", "1", "3", "nan", "inf", "1e400", "99999999999999999999", "0.5", "true", "none", "all",
    "../../outside", "/nonexistent/place", "{home}/reviews.jsonl", "{run}", "tiny-gpt2", "tiny-llama", "planted", "paper",
    "alpha=2", "samples=0", "=", "a=b=c", "[1,2", '{"a": 1}', "\u202egnp.exe", "é" * 300, "\x1b[31mred", "%s%n", "$(touch x)",
    "--", "-", "--out", "*", "sentiment", "positive", "\ud800",
)  # fmt: skip
OPTIONS = (
    "--samples", "--length", "--seed", "--alpha", "--law", "--profile", "--layers", "--heads", "--span", "--method", "--task",
    "--attribute", "--prompt", "--tokens", "--trace", "--top-k", "--eos", "--device", "--dtype", "--set", "--only", "--force",
    "--json", "--help", "--nonsense", "--steps", "--metric", "--augmentation",
)  # fmt: skip


def mangled(words, rng, places):
    """A command line after one to three accidents."""
    words = list(words)
    for _ in range(rng.randint(1, 3)):
        accident, at = rng.randrange(5), rng.randrange(1, len(words) + 1)
        fill = rng.choice(VALUES)
        fill = fill.format(**places) if fill[:2] in ("{h", "{r") else fill
        kept = {"--model", "--shape"}  # without one, it would be a model that is not tiny
        safe = [i for i in range(1, len(words)) if not kept & {words[i - 1], words[i]}]
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
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*"))


def assert_nothing_else(folder, words):
    """What a command wrote into the working folder is named on its line (such as `--out all`)."""
    named = {Path(word).parts[0] for word in words if Path(word).parts}
    assert {each.name for each in folder.iterdir()} <= named, words
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def test_mangled_command_lines_end_in_a_sentence(
    home, tmp_path, monkeypatch, capsys, record_property
):
    """Exit code 0, 1 or 2; no traceback; no file but under --out."""
    rng, codes, worst = random.Random(3), {}, 0.0
    here, outside = tmp_path / "a" / "here", tmp_path / "outside"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("LAPA2_CACHE", os.environ["LAPA2_CACHE"])
    before = tree(home)
    for number in range(1000 if FULL else 500):
        name = rng.choice(list(LINES))
        out = tmp_path / "outs" / str(number) / "out"
        out.parent.mkdir(parents=True)
        places = {"home": str(home), "run": str(home / "run"), "out": str(out)}
        words = mangled(shlex.split(LINES[name].format(**places)), rng, places)
        if "smollm2-135m" in " ".join(words):
            continue
        began = time.monotonic()
        try:
            code = main(words)
        except SystemExit as stop:
            code = stop.code
        except BaseException as error:
            pytest.fail(f"{words}: {type(error).__name__}: {error}")
        printed = capsys.readouterr()
        assert code in (0, 2), words
        assert "Traceback" not in printed.err, words
        if code == 2:
            assert printed.err.strip(), words
        assert_nothing_else(here, words)
        assert not outside.exists() or "../../outside" in words
        assert tree(home) == before, words
        worst = max(worst, time.monotonic() - began)
        codes[code] = codes.get(code, 0) + 1
        for each in (out.parent, outside):
            shutil.rmtree(each, ignore_errors=True)
        outside.unlink(missing_ok=True)
    record_property("command lines", sum(codes.values()))
    record_property("exit codes", ", ".join(f"{code}: {n}" for code, n in sorted(codes.items())))
    record_property("longest, seconds", round(worst, 1))


@pytest.mark.parametrize("part", range(5))
def test_command_lines_of_a_shell(part, home, tmp_path, record_property):
    """Good ones and mangled ones, each in a process of its own."""
    rng, codes = random.Random(part), {}
    (tmp_path / "here").mkdir()
    names = list(LINES)[part::5]
    before = tree(home)
    for number in range(10):
        name = names[number % len(names)]
        out = tmp_path / str(number) / "out"
        out.parent.mkdir()
        places = {"home": str(home), "run": str(home / "run"), "out": str(out)}
        good = number < len(names)
        words = shlex.split(LINES[name].format(**places))
        if not good:
            words = [each for each in mangled(words, rng, places) if each.isascii()]
        done = subprocess.run(
            [Path(sys.executable).parent / "lapa2", *words],
            cwd=tmp_path / "here", capture_output=True, text=True, errors="replace",
        )  # fmt: skip
        wanted = (2,) if name in REFUSED else (0,)
        assert done.returncode in (wanted if good else (0, 2)), (words, done.stderr)
        assert "Traceback" not in done.stderr, words
        assert done.returncode == 0 or done.stderr.splitlines()[-1].startswith("lapa2: "), words
        assert_nothing_else(tmp_path / "here", words)
        assert tree(home) == before, words
        codes[done.returncode] = codes.get(done.returncode, 0) + 1
    record_property("command lines", sum(codes.values()))
    record_property("exit codes", ", ".join(f"{code}: {n}" for code, n in sorted(codes.items())))


def test_a_killed_conversion_leaves_no_half_made_model(tmp_path, record_property):
    """The default model is converted into the cache by the first command that needs it. What a kill
    left, the next command removes; SIGTERM leaves nothing."""
    command = [Path(sys.executable).parent / "lapa2", "probe", "smollm2-135m", "--device", "cpu"]

    def begin(cache):
        environment = os.environ | {"LAPA2_CACHE": str(cache)}
        return subprocess.Popen(command, env=environment, stdout=-3, stderr=-3)

    def convert(cache, seconds=None):
        process = begin(cache)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    began, rng, killed = time.monotonic(), random.Random(4), 0
    assert convert(tmp_path / "whole") == 0
    seconds = time.monotonic() - began
    wanted = hashes(tmp_path / "whole")
    assert any(name.endswith(".safetensors") for name in wanted)
    for number in range(KILLS):
        cache = tmp_path / str(number)
        killed += convert(cache, rng.uniform(0.3, 0.9) * seconds) == -signal.SIGKILL
        assert convert(cache) == 0
        assert hashes(cache) == wanted
        assert not left_over(cache)
        shutil.rmtree(cache)
    cache = tmp_path / "stopped"
    process = begin(cache)
    while not left_over(cache):
        assert process.poll() is None, "it was not seen to convert"
        time.sleep(0.02)
    process.terminate()
    assert process.wait(SOON) == 143
    assert not left_over(cache)
    record_property("conversions killed", killed)
    record_property("seconds undisturbed", round(seconds, 1))
    assert killed


def hashes(folder):
    return {
        str(each.relative_to(folder)): hashlib.sha256(each.read_bytes()).hexdigest()
        for each in folder.rglob("*")
        if each.is_file() and each.stat().st_size and each.name not in ("machine.json", "seal.json")
    }
