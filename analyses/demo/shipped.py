"""The demo's stored texts: long texts for it to read, and an example text of every method. Run it
again after adding a method.

lapa2 generate --attribute positive --prompt ... --alpha 0 --length 400 --dtype float32 \\
    --trace none --out results/long-positive
python analyses/demo/shipped.py texts results/long-positive results/long-negative  # texts.json
lapa2 sweep analyses/demo/examples.toml --out results/examples
python analyses/demo/shipped.py examples results/examples  # examples.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analyses.demo.panels import machine
from analyses.lab.scripts import ScriptOptions, whole_number
from lapa2_interp.errors import RunError
from lapa2_interp.runs.manifest import Manifest
from lapa2_interp.runs.run import finished_cell, load_run

HERE = Path(__file__).resolve().parent
TOKENS = 392
"""Tokens of each stored text after its prompt."""


def _stamp(manifest: Manifest, command: str) -> dict[str, Any]:
    model = manifest.model
    return {
        "model": model.name, "weights": model.weights, "dtype": model.dtype, "machine": machine(),
        "commit": manifest.commit or "",
        "versions": manifest.versions, "seed": manifest.cell.seed, "command": command,
    }  # fmt: skip


def texts(runs: Sequence[Path], n: int) -> Mapping[str, Any]:
    """The first n texts of runs, in turns."""
    by_run = []
    for folder in runs:
        run = finished_cell(load_run(folder))
        texts = run.texts.to_dict("records")
        by_run.append(
            [
                {
                    "prompt": row["prompt"],
                    "attribute": row["attribute"],
                    "tokens": [int(t) for t in row["tokens"]][:TOKENS],
                    "text": row["text"],
                }
                for row in texts
            ]
        )
    turns = [text for group in zip(*by_run, strict=False) for text in group]
    manifest = load_run(runs[0]).manifest()
    command = (
        "lapa2 generate --attribute ATTRIBUTE --prompt PROMPT --alpha 0 --length"
        f" {manifest.cell.length} --dtype {manifest.model.dtype} --seed {manifest.cell.seed}"
    )
    return _stamp(manifest, command) | {"texts": turns[:n]}


def examples(folder: Path) -> Mapping[str, Any]:
    """The text of every cell, by method."""
    run = load_run(folder)
    made: dict[str, Any] = {}
    for key, cell in run.finished.items():
        text = str(run.texts([key])["text"].iloc[0])
        if cell.augmentation is None:
            made.setdefault(cell.method, {})["base"] = text
        else:
            made.setdefault(cell.method, {})["with LaPA2"] = {
                "alpha": cell.augmentation.alpha,
                "text": text,
            }
    if len(run.finished) < len(run.by_key):
        raise RunError(
            f"{len(run.by_key) - len(run.finished)} cells of {folder} are not finished; sweep it"
            " again"
        )
    first = next(iter(run.by_key.values()))
    stamp = _stamp(run.manifest(first.key), "lapa2 sweep analyses/demo/examples.toml")
    return stamp | {
        "attribute": first.attribute,
        "prompt": first.task.prompts.texts[0],
        "methods": made,
    }


def main() -> None:
    """Write texts.json or examples.json."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("texts", "examples"))
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--n", type=whole_number(), default=4, help="how many texts to store")
    options = parser.parse_args()
    data = texts(options.runs, options.n) if options.what == "texts" else examples(options.runs[0])
    file = HERE / f"{options.what}.json"
    file.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(file)


if __name__ == "__main__":
    main()
