"""Does the package work in real models? The laws of tests/test_conformance.py, on their weights.

    python analyses/families/conformance.py smollm2-135m --models FOLDER

The suite checks tiny random models in float64. Here the same functions read a model of the study,
in both classes (`HookedTransformer` in .venv-hooked, with `--hooked`). A law gives what one way
computes and what another way computes. figures/families/conformance.csv has the largest difference
of both, as a share of the largest number, and whether it is rounding: below 1e-6 in float64, and
below 1e-3 in float32, in which the largest model is read, for memory. Further rows:

- *its norms and softmax in float64*: transformers computes both in float32, also in a network of
  float64, which shows in Qwen; here they are computed in float64.
- *find*: a bias on words that are found in a text that transformers' own `generate` continues, and
  the bias of the layout, give the same greedy tokens.
- *knock-outs*: the control that is lost without the prefix in three heads, through hooks and
  without them.
- *slopes*: what these heads, which have the largest slopes, gain by them, and by a small bias.

Speed and memory beside plain transformers: analyses/families/pilot.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from analyses.families.analyse import replace_rows
from analyses.families.grids import (
    LARGE_QWEN,
    MODELS,
    OUT,
    path_of,
    selection_file,
)
from analyses.lab.scripts import ScriptOptions
from lapa2_interp import Augmentation, Layout, augmented
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.control import control_score
from lapa2_interp.circuits.gradients import attribution
from lapa2_interp.circuits.knockout import knock_out
from lapa2_interp.models.facts import facts_of

TESTS = Path(__file__).resolve().parents[2] / "tests"
ROUNDING = {"float64": 1e-6, "float32": 1e-3}
IN_FLOAT32 = (LARGE_QWEN,)
BRIDGE, PLAIN, HOOKED = "TransformerBridge", "TransformersModel", "HookedTransformer"
RECORDED = "recorded_is_the_attention_of_transformers"
EXACT = "its norms and softmax in float64"
LAWS = {
    "alpha_0_is_transformers": (BRIDGE, PLAIN, HOOKED),
    "one_pass_is_the_oracle": (BRIDGE, PLAIN, HOOKED),
    "classes_agree": (BRIDGE, HOOKED),
    "cached_is_one_pass": (BRIDGE, PLAIN, HOOKED),
    "a_batch_is_its_rows_alone": (BRIDGE, PLAIN, HOOKED),
    "kept_turns_are_one_pass": (BRIDGE, PLAIN, HOOKED),
    RECORDED: (BRIDGE, PLAIN),
    "transformers_generate_is_one_pass": (PLAIN,),
    "the_bias_is_that_of_a_float_mask": (PLAIN,),
    "fused_is_the_matrix": (PLAIN,),
    "packed_weights_are_the_usual": (BRIDGE,),
}
"""By law, the classes in which it is checked."""
PREFIX, PROMPT = "Very positive:", " The lake is"
SMALL_BIAS = 0.05
"""A bias by which a slope is checked."""
BY_DIFFERENCE = 0.02
"""How far a slope may be from what a small bias gains: the bias has a curve, too."""


def main() -> None:
    """Check a model, and replace its rows."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--models", type=Path, required=True, help="the folder of `make models`")
    parser.add_argument("--hooked", action="store_true", help="HookedTransformer alone")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    folder = path_of(options.model, options.models)
    dtype = "float32" if options.model in IN_FLOAT32 else "float64"
    rows = [*of_laws(folder, dtype, (HOOKED,) if options.hooked else (BRIDGE, PLAIN))]
    if not options.hooked:
        rows += [*of_uses(folder)]
    file = options.out / f"conformance{'.hooked' * options.hooked}.csv"
    replace_rows(file, options.model, pd.DataFrame(rows))


def compared(
    name: str, kind: str, dtype: str, check: Callable[[], tuple], most: float | None = None
) -> dict:
    """A row of the table; what fails otherwise than by numbers says so.

    Args:
        most: The largest difference; by default that of rounding.
    """
    row = {"check": name, "class": kind, "dtype": dtype, "difference": np.nan, "holds": False}
    try:
        computed, wanted = (
            np.asarray(array.double() if isinstance(array, torch.Tensor) else array, float)
            for array in check()[:2]
        )
    except Exception as error:  # a law may refuse a model in any way, and the table says how
        return row | {"why": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
    row["difference"] = float(np.abs(computed - wanted).max() / np.abs(wanted).max())
    return row | {"holds": row["difference"] < (most or ROUNDING[dtype]), "why": ""}


def of_laws(place: str, dtype: str, kinds: tuple[str, ...]) -> Iterator[dict]:
    """The rows of the laws."""
    sys.path.insert(0, str(TESTS))
    import test_conformance as suite

    in_dtype = suite.network
    suite.network = lambda model, _: in_dtype(model, dtype)  # by default float64, which is large
    if dtype == "float32":  # some laws also compare sums of attention, as tiny models have them
        suite.TRACE = ROUNDING[dtype]
    suite.PACKED_SUMS = ROUNDING["float32"]  # weights are packed in float32 alone
    for kind in kinds:
        for name, classes in LAWS.items():
            if kind not in classes:
                continue
            of_law = "float32" if name == "packed_weights_are_the_usual" else dtype
            case = suite.Case(place, kind, "log", of_law)
            yield compared(name, kind, of_law, partial(check_law, suite, name, case))
            if name == RECORDED and "qwen" in place and of_law == "float64":
                suite.subject.cache_clear()
                with norms_and_softmax_in_float64():
                    check = partial(check_law, suite, name, case)
                    yield compared(f"{name}, {EXACT}", kind, of_law, check)
                suite.subject.cache_clear()
        suite.subject.cache_clear()
        suite.load.cache_clear()


@contextmanager
def norms_and_softmax_in_float64() -> Iterator[None]:
    """Qwen's norms and softmax in the dtype of their input. transformers computes both in float32,
    also in a network of float64."""
    softmax, norm = functional.softmax, Qwen2RMSNorm.forward

    def in_own_dtype(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(scores, dim, dtype=scores.dtype)

    def normalise(self: Qwen2RMSNorm, hidden: Tensor) -> Tensor:
        square = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden * torch.rsqrt(square + self.variance_epsilon)

    functional.softmax, Qwen2RMSNorm.forward = in_own_dtype, normalise
    try:
        yield
    finally:
        functional.softmax, Qwen2RMSNorm.forward = softmax, norm


def check_law(suite: ModuleType, name: str, case: tuple) -> tuple:
    """What a law compares in a case."""
    return suite.LAWS[name].check(suite.subject(case))


def of_uses(place: str) -> Iterator[dict]:
    """The rows of what users call: find, knock-outs, slopes; in float32, as they do."""
    import test_conformance as suite

    plain, bridge = (suite.load(place, kind, "float32", "cpu") for kind in (PLAIN, BRIDGE))
    rule = Augmentation(alpha=0.7, phase="after_span")  # as found spans have it
    layout = Layout.of(plain.tokenizer, PREFIX, PROMPT)

    @torch.no_grad()
    def find() -> tuple:
        network, texts = facts_of(plain).network, []
        for where in ({"find": PREFIX, "tokenizer": plain.tokenizer}, None):
            block = (
                augmented(network, rule, layout)
                if where is None
                else augmented(network, rule, **where)
            )
            with block:
                texts.append(
                    network.generate(
                        layout.tensor,
                        attention_mask=torch.ones_like(layout.tensor),
                        max_new_tokens=12,
                        do_sample=False,
                    )
                )
        return texts[0], texts[1]

    yield compared("find", PLAIN, "float32", find)
    prompts = selection_file(1).read_text("utf-8").splitlines()[:8]
    texts = ContrastSet.of(bridge, "sentiment", prompts=prompts, tokens=8, seed=2)
    table = attribution(bridge, texts).table("slope")
    best = table.best(3, absolute=True)

    def knock_outs() -> tuple:
        sets = {str(head): [head] for head in best}
        tables = [knock_out(one, texts, over=sets).by_prompt for one in (bridge, plain)]
        return tables[0], tables[1]

    yield compared("knock-outs", f"{BRIDGE}, {PLAIN}", "float32", knock_outs)

    def slopes() -> tuple:
        of_head = dict(zip((unit.heads[0] for unit in table.units), table.means, strict=True))
        gained = []
        for head in best:
            score = [
                control_score(
                    bridge,
                    texts,
                    metrics="js",
                    augmentation=Augmentation(
                        law="scale", alpha=alpha, heads=(head,), phase="after_span"
                    ),
                )
                .values["js"]
                .mean()
                for alpha in (-SMALL_BIAS, SMALL_BIAS)
            ]
            gained.append((score[1] - score[0]) / (2 * SMALL_BIAS))
        return [of_head[head] for head in best], gained

    yield compared("slopes", BRIDGE, "float32", slopes, BY_DIFFERENCE)
    suite.load.cache_clear()


if __name__ == "__main__":
    main()
