"""How fast the models of analyses/families write: figures/families/pilot.csv.

    python analyses/families/pilot.py smollm2-135m --models FOLDER

64 rows of one prompt each, in bfloat16 on one thread, behind a prefix and with a bias in all heads.
The time is that of the processor, so that other work on the machine counts little. Texts of 40
tokens less texts of 24 tokens give the speed of a step, and the rest is what a batch costs before
its first token. *minutes an arm* is what 800 texts of 64 tokens take by these numbers.

In the same process plain transformers samples as many tokens for the same rows before, without bias
and trace. *of transformers* is our speed of a step as a multiple of its speed, and *memory of
transformers* the most memory of the process after our texts as a multiple of that before them. Ours
has a second, prepacked copy of the weights where it fits.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable
from pathlib import Path
from time import process_time

import pandas as pd
import torch

from analyses.families.analyse import replace_rows
from analyses.families.grids import MODELS, OUT, path_of
from analyses.lab.scripts import ScriptOptions
from analyses.speed.bench import sharing_weights
from lapa2_interp import Layout, PaddedRows, generate, load_model
from lapa2_interp.models.facts import facts_of

ROWS, SHORT, LONG = 64, 24, 40
ARM_TEXTS, NEW_TOKENS = 800, 50
"""Texts of an arm, and about as many new tokens as each has after its prompt."""


def main() -> None:
    """Time a model, and replace its row."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--models", type=Path, required=True, help="the folder of `make models`")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    prompts = Path("steering-prompts.txt").read_text("utf-8").splitlines()[35 : 35 + ROWS]
    model = load_model(
        path_of(options.model, options.models), dtype="bfloat16", model_class="TransformersModel"
    )
    plain = sharing_weights(facts_of(model).network)
    plain.set_attn_implementation("sdpa")
    layouts = [Layout.of(model.tokenizer, "Very positive:", prompt) for prompt in prompts]
    rows = PaddedRows.of(layouts)

    def with_transformers(length: int) -> int:
        new = length - 12  # about as many as ours writes after its prompts
        plain.generate(
            rows.ids, attention_mask=rows.mask, do_sample=True, top_k=200, pad_token_id=0,
            max_new_tokens=new, min_new_tokens=new,
        )  # fmt: skip
        return new * ROWS

    def with_ours(length: int) -> int:
        run = generate(
            model, prompts, attribute="positive", alpha=0.5, length=length, eos="block",
            trace="pooled", max_rows=ROWS,
        )  # fmt: skip
        ids = model.tokenizer(list(run.texts()["continuation"]), add_special_tokens=False)
        return sum(map(len, ids.input_ids))

    (of_plain, _), memory = speed(with_transformers), peak_memory()
    (of_ours, a_batch), more_memory = speed(with_ours), peak_memory()
    arm = ARM_TEXTS * NEW_TOKENS / of_ours + ARM_TEXTS / ROWS * a_batch
    row = {"rows": ROWS, "row-tokens a second": of_ours, "seconds a batch": a_batch}
    row |= {"minutes an arm": arm / 60, "of transformers": of_ours / of_plain}
    row |= {"memory of transformers": more_memory / memory}
    replace_rows(options.out / "pilot.csv", options.model, pd.DataFrame([row]))


def peak_memory() -> int:
    """The most memory that the process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def speed(make: Callable[[int], int]) -> tuple[float, float]:
    """Row-tokens of a step a second, and seconds of a batch besides its steps.

    Args:
        make: Makes texts of a length, and tells how many new tokens they have.
    """
    seconds, tokens = {}, {}
    for length in (SHORT, SHORT, LONG):  # the first one warms up
        before = process_time()
        tokens[length] = make(length)
        seconds[length] = process_time() - before
    a_token = (seconds[LONG] - seconds[SHORT]) / (tokens[LONG] - tokens[SHORT])
    return 1 / a_token, seconds[SHORT] - tokens[SHORT] * a_token


if __name__ == "__main__":
    main()
