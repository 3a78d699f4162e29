"""The drills' shared parts: a small grid, processes, harm at a chosen moment, and comparisons."""

import io
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

from lapa2_interp.files import TEMPORARY_PREFIX

ROOT = Path(__file__).parents[1]
GRID = """
model = "tiny-gpt2"
dtype = "float32"
trace = "pooled"
task = "sentiment"
attribute = "positive"
prompts = 1
samples = 2
length = 24
max_rows = 1
method = "prefix"
augmentation = ["none", "paper"]
"""
"""Two cells of two batches each."""
SWEEP = "sweep {home}/grid.toml --device cpu --workers 1 --out {out}"
LINES = {
    "sweep": SWEEP,
    "generate": "generate --model tiny-gpt2 --attribute positive --prompt lake --length 40 --samples 4 --device cpu --out {out}",
    "score": "score {home}/run --scorers linear accuracy distinct perplexity=tiny-gpt2 --cache {out}-cache --device cpu --out {out}",
    "score of a file": "score {home}/reviews.jsonl --scorers distinct --task sentiment --attribute positive --out {out}",
    "propositions": "propositions --model tiny-gpt2 --length 40 --synthetic-length 400 --device cpu --out {out}",
    "circuits": "circuits planted --tokens 2 --best 1 --device cpu --out {out}",
    "select": "select planted --score cut --heads 2 --tokens 2 --device cpu --file {out}-kept --out {out}.json",
    "steer": "steer planted --prompts {home}/prompts.txt --method prefix --length 12 --perplexity tiny-llama --budget 1.01 "
    "--workers 1 --device cpu --out {out}",
    "fading": "fading planted --filler 8 --tokens 2 --device cpu --file {out}-kept --out {out}",
    "prefix train": "prefix train --model tiny-llama --data {home}/reviews.jsonl --set dtype=float32 --set slots=2 --set batch=4 "
    "--set max_tokens=8 --set check_every=4 --set limit=8 --device cpu --out {out}",
    "prefix evaluate": "prefix evaluate {home}/set --data {home}/reviews.jsonl --limit 4 --max-tokens 8 --device cpu",
    "prefix score": "prefix score {home}/set --samples 1 --length 40 --classifier linear --dtype float32 --device cpu",
    "prefix import": "prefix import {home}/set/positive.safetensors --model tiny-llama --task sentiment --attribute positive --out {out}",
    "prefix recipes": "prefix recipes",
    "prefixes": "prefixes",
    "view": "view {home}/run --only arm=baseline --out {out}.html",
    "report": "report {home}/run --out {out}.html",
    "trace": "trace {home}/run --only arm=baseline --out {out}",
    "runs": "runs {home}/run --state finished",
    "grids": "grids {home}/grid.toml --set samples=2",
    "layout": "layout --model tiny-gpt2 --prefix Very --prompt lake --alpha 0.5 --steps 4",
    "probe": "probe tiny-gpt2",
    "models": "models",
    "tasks": "tasks",
    "methods": "methods",
    "recipes": "recipes",
    "word-lists": "word-lists --task sentiment --data {home}/reviews.jsonl --n-words 4 --min-count 1 --min-z 0 --out {out}.json",
    "scorers list": "scorers list",
    "scorers train": "scorers train --task sentiment --data {home}/reviews.jsonl --out {out}",
    "scorers sheets": "scorers sheets {home}/run --n-texts 2 --out {out}",
    "scorers answers": "scorers answers {home}/anna.csv --key {home}/sheets/key.csv --out {out}",
    "power": "power quick/alpha --claims {home}/claims --out {out}.csv",
    "chat": "chat {home}/messages.json --model tiny-gpt2 --length 3 --device cpu",
}
"""A good line of every command."""
REFUSED = ("chat",)
"""No tiny model has a chat template."""
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
"""Audit events of Python in which a disk changes, besides opening a file to write."""
OF_THE_DAY = {"created", "seconds", "commit", "made", "when", "source_commit", "memory"}
"""Keys of JSON files that differ between two runs of one thing."""
PRELOAD = [
    "pyarrow.parquet", "h5netcdf", "xarray", "transformer_lens", "transformers.models.gpt2.modeling_gpt2",
    "lapa2_interp.cli.app", "lapa2_interp.models.liveness", "lapa2_interp.generation.loop", "lapa2_interp.runs.fill",
]  # fmt: skip


def start(function, *arguments):
    """Begin a function in a process of its own, which has everything imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


def command(line, log):
    """Run a command; its exit code. Its words are added to a file."""
    from lapa2_interp.cli.app import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("a") as stream:
        before = os.dup(1), os.dup(2)
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        try:
            return main(shlex.split(line))
        except SystemExit as stop:
            return stop.code
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, handle in enumerate(before, 1):
                os.dup2(handle, number)
                os.close(handle)


def act(line, log, environment=None):
    """A command as a process."""
    os.environ.update(environment or {})
    raise SystemExit(command(line, log))


def done(line, log, environment=None):
    """Run a command in a process of its own, which must succeed."""
    process = start(act, line, log, environment)
    process.join()
    assert process.exitcode == 0, log.read_text()


def before_changes(folder, do):
    """Call a function before each change of a folder, from now on in this process."""

    def hook(event, arguments):
        if (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)) or event in CHANGES:
            path = arguments[0]
            if isinstance(path, (str, os.PathLike)):  # shutil removes by relative names
                path = Path(path)
                if not path.is_absolute() or path.is_relative_to(folder):
                    do()

    sys.addaudithook(hook)


def photograph(line, folder, shots, log):
    """A command as a process, which copies its folder before each change of it, and at the end:
    what a kill at that moment leaves."""
    copied = 0

    def copy():
        nonlocal copied
        copied += 1
        shutil.copytree(folder, shots / f"{copied:03d}", symlinks=True)

    before_changes(folder, copy)
    code = command(line, log)
    copy()
    os._exit(code)


def go_on(line, home, shots, log, results):
    """A process that repeats a command in each folder; writes exit codes, and what was finished
    before and is not the same file or line now."""
    outcomes = {}
    for shot in shots:
        before = finished(shot)
        words = line.format(home=home, out=shot / "out")
        outcomes[shot.name] = command(words, log), sorted(before - finished(shot))
    results.write_text(json.dumps(outcomes))


def stop_midway(line, home, folder, results):
    """A process that runs a command in full, and then with Ctrl-C and with SIGTERM when it opens a
    file, or does anything, for the middle time; writes exit codes, seconds from the signal to the
    end, and what was said."""
    opened, middle, kind, sent = 0, 0, None, 0.0

    def hook(event, arguments):
        nonlocal opened, kind, sent
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            return  # the command has not begun
        opened += event == "open" and not str(arguments[0]).endswith((".py", ".pyc"))
        if kind and opened >= middle:
            sent, now, kind = time.monotonic(), kind, None
            os.kill(os.getpid(), now)

    sys.addaudithook(hook)
    stops = {}
    for name in ("undisturbed", "SIGINT", "SIGTERM"):
        while True:
            target, opened, kind = folder / f"{name}-{middle}", 0, getattr(signal, name, None)
            target.mkdir()
            code = command(line.format(home=home, out=target / "out"), target / "log")
            if kind is None or not middle:
                break
            middle //= 2  # a process reads some files once
        stops[name] = code, time.monotonic() - sent, (target / "log").read_text()
        middle = middle or opened // 3
    results.write_text(json.dumps(stops))


def without_day(value):
    if isinstance(value, dict):
        return {name: without_day(inner) for name, inner in value.items() if name not in OF_THE_DAY}
    return [without_day(inner) for inner in value] if isinstance(value, list) else value


def contents(target):
    """Results of a command: bytes by name, JSON and pages without what is of the day."""
    files = [target] if target.is_file() else target.rglob("*")
    stored = {}
    for file in sorted(path for path in files if path.is_file() and path.suffix != ".lock"):
        data = file.read_bytes()
        if file.name == ".lock":
            continue
        if file.suffix == ".json":
            data = json.dumps(without_day(json.loads(data)), sort_keys=True).encode()
        if file.suffix == ".html":
            data = re.sub(rb"\b[0-9a-f]{40}(\+changes)?", b"commit", data)
        stored[str(file.relative_to(target.parent)).partition("/")[2]] = data
    return stored


def different(stored, wanted):
    """Names of files that only one has, or that differ."""
    return sorted(
        name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name)
    )


def left_over(folder):
    return [str(path) for path in folder.rglob(f"{TEMPORARY_PREFIX}*")]


def furnish(folder):
    """Put a grid, a run of it, and what else the commands read into a folder."""
    import pandas as pd
    from conftest import load, soft_set

    from lapa2_interp.methods import load_task

    (folder / "grid.toml").write_text(GRID)
    rows = [
        {"text": f"{word} the film number {i} and its end", "label": label}
        for i in range(12)
        for label, word in (("positive", "I loved"), ("negative", "I hated"))
    ]
    (folder / "reviews.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done(SWEEP.format(home=folder, out=folder / "run"), folder / "log")
    soft_set(folder / "set", load("tiny-llama"), load_task("sentiment"))
    (folder / "claims").mkdir()
    shutil.copy(ROOT / "figures/paper/quick/tables/alpha.claims.csv", folder / "claims")
    prompts = [f"The {number}th of the\n" for number in range(32)]
    (folder / "prompts.txt").write_text("".join(prompts))
    (folder / "messages.json").write_text('[{"role": "user", "content": "Hello"}]')
    sheets = f"scorers sheets {folder}/run --n-texts 2 --out {folder}/sheets"
    done(sheets, folder / "log")
    rated = {"relevance": 3, "fluency": 4, "topicality": 2, "annotator": "anna"}
    pd.read_csv(folder / "sheets/sheet.csv").assign(**rated).to_csv(folder / "anna.csv")
    return folder


def finished(folder):
    """All that a command need not make again: the files of batches of a run, lines of results."""
    entries = set()
    for record in folder.glob("*/cells/*/[0-9]*.json"):
        for file in record.parent.glob(f"{record.stem}.*"):
            about = file.stat()
            entries.add(f"{file.relative_to(folder)} {about.st_ino} {about.st_mtime_ns}")
    for file in folder.glob("out-kept"):
        *lines, _ = file.read_text().split("\n")  # the last may be torn
        entries.update(lines)
    return entries


def lapa2_lines(text):
    """Lines of ours on stderr, such as errors."""
    return [line for line in text.splitlines() if line.startswith("lapa2: ")]


class Terminal(io.StringIO):
    """A terminal that keeps the words it is given."""

    encoding = "utf-8"

    def isatty(self):
        return True
