"""What it brings that `lapa2` keeps memory which it has freed: figures/speed/freed_memory.csv.

    python analyses/speed/freed_memory.py --processor "Intel AMX"

64 texts behind a prefix, with a bias in all heads and a trace, on one thread, in processes of their
own that take turns: three keep freed memory, and three do not. Texts of 40
tokens less texts of 24 give the milliseconds of a step, in CPU time, so that other work on the
machine counts little. The most memory of the process stands beside.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from time import process_time

import pandas as pd

from analyses.lab import FIGURES
from analyses.lab.scripts import ScriptOptions
from lapa2_interp.files import write_text
from lapa2_interp.table_formats import as_csv, as_text

ROWS, SHORT, LONG, TURNS = 64, 24, 40, 3
WAYS = ("usual", "kept")
KEEPING = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""What the command line tells glibc, as variables of the environment."""


def main() -> None:
    """Measure both ways in turn, and add a row for each to the table."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--processor", help="its name in the table")
    parser.add_argument("--way", choices=WAYS, help="measure in this process, and print")
    parser.add_argument("--out", type=Path, default=FIGURES / "speed" / "freed_memory.csv")
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(measure(options.model, options.dtype)))
        return
    if options.processor is None:
        parser.error("the table needs --processor")
    rows = []
    for _ in range(TURNS):
        for way in WAYS:
            command = [sys.executable, __file__, "--model", options.model, "--way", way]
            command += ["--dtype", options.dtype]
            keeping = KEEPING if way == "kept" else {}
            done = subprocess.run(
                command, check=True, capture_output=True, text=True, env=os.environ | keeping
            )
            rows.append({"freed memory": way, **json.loads(done.stdout.splitlines()[-1])})
            print(rows[-1], file=sys.stderr)
    table = pd.DataFrame(rows).groupby("freed memory", sort=False).median().reset_index()
    table["times faster"] = table["ms a step"][0] / table["ms a step"]
    what = {"processor": options.processor, "model": options.model, "dtype": options.dtype}
    table = table.assign(**what)[[*what, *table.columns]]
    if options.out.exists():
        earlier = pd.read_csv(options.out)
        same = (earlier[[*what]] == pd.Series(what)).all(axis=1)
        table = pd.concat([earlier[~same], table], ignore_index=True)
    write_text(options.out, as_csv(table, 4))
    print(as_text(table, ".3g"))


def measure(name: str, dtype: str) -> dict[str, float]:
    """Milliseconds of a step, and the most memory of this process, in MB."""
    import torch

    from lapa2_interp import generate, load_model

    torch.set_num_threads(1)
    model = load_model(name, dtype=dtype, model_class="TransformersModel")
    prompts = [f" The lake number {i} is" for i in range(ROWS)]

    def seconds(length: int) -> float:
        began = process_time()
        generate(
            model, prompts, attribute="positive", alpha=0.5, length=length, eos="block",
            max_rows=ROWS,
        )  # fmt: skip
        return process_time() - began

    seconds(SHORT)
    step = (seconds(LONG) - seconds(SHORT)) / (LONG - SHORT)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"ms a step": 1000 * step, "memory, MB": memory}


if __name__ == "__main__":
    main()
