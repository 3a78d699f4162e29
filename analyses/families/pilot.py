"""How fast the models of analyses/families write: figures/families/pilot.csv.

    python analyses/families/pilot.py smollm2-135m --models FOLDER

64 rows of one prompt each, on one thread, behind a prefix and with a bias in all heads. The time is
that of the processor, so that other work on the machine counts little. Texts of 40 tokens less
texts of 24 tokens give the speed of a step, and the rest is what a batch costs before its first
token. The table's last columns say what an arm of 800 texts of 64 tokens takes from these numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import process_time

import pandas as pd
import torch

from analyses.families.analyse import replace_rows
from analyses.families.grids import MODELS, OUT, path_of
from analyses.lab.scripts import ScriptOptions
from lapa2_interp import generate, load_model

ROWS, SHORT, LONG = 64, 24, 40
ARM_TEXTS, NEW_TOKENS = 800, 50
"""Texts of an arm, and about as many new tokens as each has after its prompt."""


def main() -> None:
    """Time a model, and replace its row."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--models", type=Path, required=True, help="the folder of their folders")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    prompts = Path("steering-prompts.txt").read_text("utf-8").splitlines()[35 : 35 + ROWS]
    model = load_model(
        path_of(options.model, options.models), dtype="bfloat16", model_class="TransformersModel"
    )
    seconds, tokens = {}, {}
    for length in (SHORT, SHORT, LONG):  # the first one warms up
        before = process_time()
        run = generate(
            model, prompts, attribute="positive", alpha=0.5, length=length, eos="block",
            trace="pooled", max_rows=ROWS,
        )  # fmt: skip
        seconds[length] = process_time() - before
        ids = model.tokenizer(list(run.texts()["continuation"]), add_special_tokens=False)
        tokens[length] = sum(map(len, ids.input_ids))
    a_token = (seconds[LONG] - seconds[SHORT]) / (tokens[LONG] - tokens[SHORT])
    a_batch = seconds[SHORT] - tokens[SHORT] * a_token
    arm = ARM_TEXTS * NEW_TOKENS * a_token + ARM_TEXTS / ROWS * a_batch
    row = {"rows": ROWS, "row-tokens a second": 1 / a_token, "seconds a batch": a_batch}
    replace_rows(
        options.out / "pilot.csv", options.model, pd.DataFrame([row | {"minutes an arm": arm / 60}])
    )


if __name__ == "__main__":
    main()
