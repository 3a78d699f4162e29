"""What the drills share, and their figures as a table: `python tests/drills.py results/drills.xml`.

The file is what `pytest --junitxml` wrote of tests/faults/test_drills*.py; a property is a column.
"""

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from conftest import start, warm

from lapa2_interp._util.files import TEMPORARY_PREFIX
from lapa2_interp.cli.app import main
from lapa2_interp.prefixes.optimization import PrefixTraining

FULL = os.environ.get("DRILLS") == "full"
GRID = """
model = "tiny-gpt2"
dtype = "float32"
trace = "pooled"
task = "sentiment"
attribute = "positive"
prompts = 2
samples = 4
length = 32
max_rows = 4
method = ["prefix", "air-decoding"]
augmentation = ["none", "paper"]
"""
SWEEP = "sweep {home}/grid.toml --device cpu --workers 1 --out {out}"
OF_THE_DAY = {"created", "seconds", "commit", "made", "when", "source_commit", "seal"}
"""Keys of JSON files that differ between two runs of one thing."""


def act(line, log):
    """A command, in this process; the ledger beside its log says what it has kept."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    keep_a_ledger(log.with_name("ledger"))
    with log.open("a") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    raise SystemExit(main(shlex.split(line)))


def keep_a_ledger(file):
    """Note what a command keeps for the next one, a line each, once it is kept: groups and cells of
    a sweep, units of a circuit, scores, checkpoints."""
    from lapa2_interp.circuits.result_store import ResultStore
    from lapa2_interp.runs.sweep import _Sweep
    from lapa2_interp.scoring.scorer import ScoreCache

    def noted(owner, name, what):
        real = getattr(owner, name)

        def keep(self, *given):
            given = [list(each) if isinstance(each, Iterator) else each for each in given]
            found = real(self, *given)
            with file.open("a") as ledger:  # one write: a kill leaves whole lines
                ledger.write("".join(f"{each}\n" for each in what(self, *given)))
            return found

        setattr(owner, name, keep)

    noted(_Sweep, "_keep", lambda self, key, group, part: [f"group {key} {group}"])
    noted(_Sweep, "_finish", lambda self, cell: [f"cell {cell.key}"])
    noted(
        ResultStore,
        "add",
        lambda self, name, values: [f"unit {self.file.name} {name}"] if self.file else [],
    )
    noted(ScoreCache, "put", lambda self, scores: [f"score {key}" for key, _ in scores])
    noted(PrefixTraining, "_save", lambda self: [f"checkpoint {self.checkpoint.name} {self.step}"])


def without_day(value):
    if isinstance(value, dict):
        return {name: without_day(each) for name, each in value.items() if name not in OF_THE_DAY}
    return [without_day(each) for each in value] if isinstance(value, list) else value


def contents(place):
    """What a command wrote: bytes by name, JSON without what is of the day."""
    files = (
        [place] if place.is_file() else sorted(each for each in place.rglob("*") if each.is_file())
    )
    found = {}
    for file in files:
        if file.name == ".lock":
            continue
        data = file.read_bytes()
        if file.suffix == ".json":
            data = json.dumps(without_day(json.loads(data)), sort_keys=True).encode()
        if file.suffix == ".html":
            data = re.sub(rb"\b[0-9a-f]{40}(\+changes)?", b"commit", data)
        found[str(file.relative_to(place.parent)).partition("/")[2]] = data
    return found


def left_over(folder):
    return [
        str(each.relative_to(folder))
        for each in folder.rglob("*")
        if each.name.startswith(TEMPORARY_PREFIX)
    ]


def furnish(folder):
    """Put a grid, a run of it, and a corpus into a folder."""
    (folder / "grid.toml").write_text(GRID)
    rows = [
        {"text": f"{word} the film number {i} and its end", "label": label}
        for i in range(12)
        for label, word in (("positive", "I loved"), ("negative", "I hated"))
    ]
    (folder / "reviews.jsonl").write_text("\n".join(map(json.dumps, rows)))
    warm()
    process = start(act, SWEEP.format(home=folder, out=folder / "run"), folder / "log")
    process.join()
    assert process.exitcode == 0, (folder / "log").read_text()


def rows(file):
    """(drill, outcome, properties) of every test, in order."""
    for case in ElementTree.parse(file).iter("testcase"):
        name = case.get("name", "").partition("[")[0].removeprefix("test_").replace("_", " ")
        failed = case.find("failure") is not None or case.find("error") is not None
        skipped = case.find("skipped")
        outcome = "failed" if failed else "passed"
        if skipped is not None:
            outcome = f"skipped: {skipped.get('message', '')}"
        found = {each.get("name"): each.get("value") for each in case.iter("property")}
        yield name, outcome, found


def table(file):
    """Markdown: a heading per drill, a row per case."""
    lines, before, found_in = [], None, list(rows(file))
    first = {}  # two processes take the tests of a drill by turns
    for name, _, found in found_in:
        first.setdefault((name, *found), len(first))
    for name, outcome, found in sorted(found_in, key=lambda row: first[(row[0], *row[2])]):
        columns = [*found, "outcome"]
        if (name, columns) != before:
            lines += [
                "",
                f"**{name}**",
                "",
                f"| {' | '.join(columns)} |",
                "|---" * len(columns) + "|",
            ]
            before = (name, columns)
        lines.append(f"| {' | '.join([*found.values(), outcome])} |")
    return "\n".join(lines).strip()


if __name__ == "__main__":
    print(f"{'Full' if FULL else 'Short'} form.\n\n{table(Path(sys.argv[1]))}")
