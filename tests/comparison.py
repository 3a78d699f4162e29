"""Whether a change of names and places has changed a result.

    python tests/comparison.py --before COMMIT

makes the same things in a worktree of COMMIT, by that commit's own copy of this file, and here, on
this machine, and compares them: texts and pooled traces of a small cell of every method on a tiny
model and on SmolLM2 (float32), tables of layouts and biases, the study of the planted model, and
the item tables of the stored run. Columns that are renamed on purpose stand in RENAMED.

It leaves with the last step of the redesign.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
MODELS = {"tiny-llama": 40, "smollm2-135m": 24}
"""Models with the length of their texts in tokens."""
RENAMED = {
    "case": "example",
    "all_queries": "after_span",
    "every_query": "everywhere",
    "query": "predicting_only",
}
"""Columns, values and endings of files' names: their names before, and now."""
WITHOUT = ("key", "cell", "compared")
"""Columns that hold keys of cells, or hashes of keys."""


def make_texts(out: Path) -> None:
    from lapa2_interp import load_model
    from lapa2_interp.generation.resolve import cell_of
    from lapa2_interp.methods.registry import known_methods
    from lapa2_interp.runs.generate import make_cells

    for name, length in MODELS.items():
        model = load_model(name, "float32", "cpu")
        parameters = [(method, {}) for method in known_methods()]
        if name == "smollm2-135m":
            parameters += [(each, {"prefixes": "mle"}) for each in ("prefix", "air-decoding")]
        for method, given in parameters:
            label = "-".join([name, method, *given.values()])
            try:
                cell = cell_of(
                    model,
                    method=method,
                    parameters=given,
                    task="sentiment",
                    attribute="negative",
                    prompts=["The lake", "My house is"],
                    alpha=0.0 if method in ("none", "datg", "freectrl") else 0.5,
                    samples=2,
                    length=length,
                    trace="pooled",
                )
                run = make_cells(model, [cell])
            except Exception as error:  # what a method refuses is compared, too
                (out / f"{label}.error").write_text(type(error).__name__)
                print(f"{label}: {error}", file=sys.stderr)
                continue
            run.samples().to_csv(out / f"{label}.csv", index=False)
            trace = run.trace()
            numbers = {
                variable: trace[variable].values
                for variable in map(str, trace.variables)
                if trace[variable].dtype.kind in "fiub"
            }
            np.savez(out / f"{label}.npz", **numbers)


def make_layouts(out: Path) -> None:
    from lapa2_interp import Augmentation, Layout
    from lapa2_interp.bias.layout_table import explain_layout
    from lapa2_interp.models import load_tokenizer

    rules = {
        "base": None,
        "constant": Augmentation(alpha=0.5, law="constant", l0=128.0),
        "target": Augmentation(alpha=0.5, law="target", tau=0.3),
    }
    for law in ("log", "linear", "sqrt", "cut"):
        for profile in ("paper", "released"):
            rules[f"{law}.{profile}"] = Augmentation(alpha=0.5, law=law, profile=profile)
    for name in MODELS:
        tokenizer = load_tokenizer(name)
        for prefix in ("Very positive:", None):
            layout = Layout.of(tokenizer, prefix, " The lake")
            for label, rule in rules.items():
                if prefix or rule is None:
                    facts = explain_layout(layout, rule, 40)
                    for table in ("tokens", "steps"):
                        place = out / f"{name}.{'hard' if prefix else 'raw'}.{label}.{table}.csv"
                        pd.DataFrame(facts[table]).to_csv(place, index=False)


def make_study(out: Path) -> None:
    from lapa2_interp.cli.app import main

    words = ["circuits", "planted", "--out", str(out / "planted"), "--best", "4", "--tokens", "12"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words) == 0


def make_items(out: Path) -> None:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "paper")]
    import test_items  # the stored run, read by the scripts of analyses/ and figures/

    with contextlib.redirect_stdout(io.StringIO()):
        test_items.make_tables(out)


def make(out: Path) -> None:
    for part in (make_layouts, make_texts, make_study, make_items):
        folder = out / part.__name__.removeprefix("make_")
        folder.mkdir(parents=True)
        part(folder)


def differences(before: Path, now: Path) -> list[str]:
    """One line for each file that differs."""
    for each in list(before.rglob("*-*.csv")):
        front, _, last = each.stem.rpartition("-")
        each.rename(each.with_stem(f"{front}-{RENAMED.get(last, last)}"))
    names = {
        each.relative_to(place)
        for place in (before, now)
        for each in place.rglob("*")
        if each.suffix in (".csv", ".npz", ".error")
    }
    found = []
    for name in sorted(names):
        one, other = before / name, now / name
        if not (one.is_file() and other.is_file()):
            found.append(f"{name}: only {'before' if one.is_file() else 'now'}")
        elif name.suffix == ".csv":
            a, b = (pd.read_csv(each, dtype=str, keep_default_na=False) for each in (one, other))
            a = (
                a.rename(columns=RENAMED)
                .replace(RENAMED)
                .drop(columns=list(WITHOUT), errors="ignore")
            )
            b = b.drop(columns=list(WITHOUT), errors="ignore")
            if list(a.columns) != list(b.columns):
                found.append(f"{name}: columns {sorted(set(a) ^ set(b)) or 'in another order'}")
            elif not a.equals(b):
                found.append(f"{name}: {[c for c in a if not a[c].equals(b[c])]}")
        elif name.suffix == ".npz":
            with np.load(one) as a, np.load(other) as b:
                mine = {RENAMED.get(key, key): a[key] for key in a.files}
                if set(mine) != set(b.files):
                    found.append(f"{name}: {sorted(set(mine) ^ set(b.files))}")
                else:
                    found += [
                        f"{name}: {key}"
                        for key in b.files
                        if not np.array_equal(mine[key], b[key], equal_nan=b[key].dtype.kind == "f")
                    ]
        elif one.read_text() != other.read_text():
            found.append(f"{name}: {one.read_text()} before, {other.read_text()} now")
    print(f"{len(names)} files compared")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", metavar="COMMIT", help="compare with this commit")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="what was made before, kept")
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="only make them here")
    given = parser.parse_args()
    if given.make:
        make(given.make)
        return 0
    with tempfile.TemporaryDirectory() as place:
        kept = given.keep or Path(place, "before")
        if not kept.is_dir():
            tree = Path(place, "tree")
            subprocess.run(
                ["git", "-C", ROOT, "worktree", "add", "--detach", tree, given.before], check=True
            )
            try:
                _make_in(tree, kept)
            finally:
                subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree])
        now = Path(place, "now")
        _make_in(ROOT, now)
        found = differences(kept, now)
    print("\n".join(found) or "all equal")
    return bool(found)


def _make_in(tree: Path, out: Path) -> None:
    subprocess.run(
        [sys.executable, tree / "tests" / "comparison.py", "--make", out.resolve()],
        check=True,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"},
    )


if __name__ == "__main__":
    sys.exit(main())
