"""Growth of time and memory with keys, rows, traced heads and the cells of a run, on this machine.

    python analyses/speed/growth.py --model tiny-gpt2 --most 4 --out results/growth  # a first look
    python analyses/speed/growth.py --out results/growth
    python analyses/speed/growth.py --what "prompt, matrix" "prompt, fused" --out results/prompts

One of these is varied, and the others stay small:

- keys: tokens of the prompt, with one row;
- rows: texts that are decoded together, behind 64 keys;
- heads: heads whose whole attention rows are kept, with four rows behind 64 keys;
- cells: cells of a run folder that is opened and asked for the state of each;
- prompt: tokens of a prompt that a plain transformers model reads under a bias, with the matrix of
  attention scores and without.

The time of a step is the median of 16, in the processor's time of one thread, so that other
processes matter little. Memory is the most that a process had, less what it had with the model
alone; each point has a process of its own. The exponent is the slope of a line through the
logarithms of the upper half of the points: 1 is linear, below 1 a constant part is still large.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pandas as pd
import torch

from analyses.lab.scripts import ScriptOptions, whole_number
from lapa2_interp import plots
from lapa2_interp.files import result_folder
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.loop import decode_batch
from lapa2_interp.generation.plan import plan_batches
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.load import load_model
from lapa2_interp.models.machine import processor_kind
from lapa2_interp.progress import CountingBar, progress_bar
from lapa2_interp.runs.generate import generate
from lapa2_interp.runs.run import load_run
from lapa2_interp.runs.store import (
    CELLS,
    Listing,
    read_batch,
    write_batch,
    write_cell,
    write_listing,
)
from lapa2_interp.table_formats import as_text

POINTS = {
    "keys": (64, 128, 256, 512, 1024, 2048, 4096),
    "rows": (1, 2, 4, 8, 16, 32, 64, 128),
    "heads": (1, 4, 16, 64, 256),
    "cells": (8, 32, 128, 512),
    "prompt, matrix": (512, 1024, 2048, 4096),
    "prompt, fused": (512, 1024, 2048, 4096),
}
LABELS = {
    "keys": "keys in front of a step",
    "rows": "rows decoded together",
    "heads": "heads with whole attention rows",
    "cells": "cells of a run",
    "prompt": "tokens of a prompt",
}
TIMES = {"cells": ("opening, s", 1), "prompt": ("reading, s", 1)}
"""Label and factor of a panel's seconds; of the others a step is shown, in ms."""
STEPS, REPEATS = 16, 3


def main() -> None:
    """Measure all points, each in a process; print exponents, and write table and figure."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--most", type=whole_number(2), help="points of each curve; default all")
    parser.add_argument("--what", nargs="+", choices=[*POINTS], default=[*POINTS], help="curves")
    parser.add_argument("--out", type=Path, required=True, help="a new folder: growth.csv, .png")
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)  # of a child
    options = parser.parse_args()
    if options.point is not None:
        torch.set_num_threads(1)
        what, n = options.point
        print(json.dumps(measure(options.model, what, int(n))))
        return
    points = [(what, n) for what in options.what for n in POINTS[what][: options.most]]
    rows = []
    with result_folder(options.out) as folder, progress_bar(len(points), "growth", "point") as bar:
        for what, n in points:
            words = [sys.executable, __file__, *sys.argv[1:], "--point", what, str(n)]
            made = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
            rows.append({"what": what, "n": n} | json.loads(made.stdout.splitlines()[-1]))
            bar.update()
        table = pd.DataFrame(rows)
        fits = exponents(table)
        print(as_text(fits, ".2f"))
        machine = f"{processor_kind('cpu')}; one thread; torch {version('torch')}"
        table.assign(model=options.model, machine=machine).to_csv(
            folder / "growth.csv", index=False, float_format="%.6g"
        )
        draw(table, fits).savefig(folder / "growth.png")


def measure(model: str, what: str, n: int) -> dict[str, float]:
    """Seconds and bytes of one point."""
    if what == "cells":
        return measure_run(n)
    what, _, attn = what.partition(", ")
    loaded = (
        load_model(model, model_class="TransformersModel", attn=attn)
        if attn
        else (load_model(model))
    )
    every = [(i, j) for i in range(loaded.cfg.n_layers) for j in range(loaded.cfg.n_heads)]
    rows = {"rows": n, "heads": 4}.get(what, 1)
    ids = loaded.tokenizer(" word" * 2 * n, add_special_tokens=False).input_ids
    prompt = loaded.tokenizer.decode(ids[: n if what in ("keys", "prompt") else 64])
    task = load_task("sentiment").model_copy(update={"length_counts_prompt": False})
    planned = partial(
        cell_of,
        loaded,
        task=task,
        attribute="positive",
        prompts=[prompt],
        alpha=0.5,
        samples=rows,
        max_rows=rows,
        trace="pooled",
        patterns=every[:n] if what == "heads" else (),
    )
    before, times = peak(), list[float]()
    bar = CountingBar(lambda _: times.append(process_time()))
    plan = plan_batches(loaded, planned(length=1 if attn else STEPS + 1))
    begun = process_time()
    decode_batch(loaded, plan, plan.batches[0], bar)
    if attn:
        return {"seconds": times[0] - begun, "bytes": peak() - before}
    return {"seconds": float(np.median(np.diff(times))), "bytes": peak() - before}


def measure_run(n: int) -> dict[str, float]:
    """Seconds and bytes of opening a run of `n` cells, and of the state of each."""
    made = generate("tiny-gpt2", "The lake", attribute="positive", length=16)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made.save(folder / "one")
        (first,) = load_run(folder / "one").by_key.values()
        batch = read_batch(folder / "one" / CELLS / first.key, 0, first)
        keys = []
        for seed in range(n):
            cell = Cell.model_validate(first.model_dump(mode="json") | {"seed": seed})
            (cell_folder := folder / "many" / CELLS / cell.key).mkdir(parents=True)
            write_cell(cell_folder, cell)
            record = batch.record.model_copy(update={"key": cell.key})
            write_batch(cell_folder, 0, replace(batch, record=record))
            keys.append(cell.key)
        write_listing(folder / "many", Listing(grids={"many": tuple(keys)}))
        before, least = peak(), np.inf
        for _ in range(REPEATS):
            begun = process_time()
            assert len(load_run(folder / "many").finished) == n
            least = min(least, process_time() - begun)
        return {"seconds": least, "bytes": peak() - before}


def peak() -> int:
    """The most bytes that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def exponents(table: pd.DataFrame) -> pd.DataFrame:
    """Slopes of time and memory on logarithmic axes, through the upper half of each curve."""
    rows: list[dict[str, Any]] = []
    for what, part in table.groupby("what", sort=False):
        upper = part.tail(max(2, (len(part) + 1) // 2))
        slopes = {
            name: np.polyfit(np.log(upper["n"]), np.log(upper[name].clip(lower=1e-9)), 1)[0]
            for name in ("seconds", "bytes")
        }
        rows.append({"what": what, **slopes})
    return pd.DataFrame(rows)


def draw(table: pd.DataFrame, fits: pd.DataFrame) -> plots.Drawing:
    """Time above, memory below, on axes from 0; the exponents over each panel."""
    panel_of = table["what"].str.partition(", ")[0]
    whats = panel_of.unique()
    figure = plots.new_figure(2.3 * len(whats), 4)
    panels = figure.subplots(2, len(whats), squeeze=False)
    for column, what in enumerate(whats):
        curves = table[panel_of == what].groupby("what", sort=False)
        asked, scale = TIMES.get(what, ("a step, ms", 1e3))
        for row, (name, label, factor) in enumerate(
            (("seconds", asked, scale), ("bytes", "memory, MB", 1e-6))
        ):
            axes, slopes = panels[row, column], fits.set_index("what")[name]
            for colour, (curve, part) in zip(plots.COLOURS[1:], curves, strict=False):
                axes.plot(
                    part["n"],
                    part[name] * factor,
                    "o-",
                    ms=3,
                    lw=1,
                    color=colour,
                    label=curve.removeprefix(f"{what}, "),
                )
            axes.set_ylim(bottom=0)
            shown = ", ".join(f"{slopes[curve]:.2f}" for curve in curves.groups)
            axes.set_title(f"exponent {shown}", fontsize=8)
            if len(curves) > 1:
                axes.legend(fontsize=7, frameon=False)
            plots.plain_axes(axes, LABELS[what] if row else "", label)
    return figure


if __name__ == "__main__":
    main()
