"""The selections that ship with the package, lapa2_interp/circuits/shipped: the first card of heads
of each model, with its tuned strength, and what the test found.

    python analyses/families/ship.py --models FOLDER

It reads made/MODEL/cards/1.json in the current folder, and the tables in figures/families. Where a
model has no such file, the selection that ships is written again with the numbers of the tables.
The heads must be those of heads.csv. FOLDER is that of `make models`, with the GGUF files: the
weights of a selection are those of its file. The prompts stay out, of which cards.csv has the
sha256.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from analyses.families.findings import judges_of
from analyses.families.grids import (
    ADDITION,
    CHOSEN,
    HALF,
    MADE,
    MODELS,
    NO_BIAS,
    OUT,
    cards_of,
    tuned_strengths,
)
from analyses.lab.scripts import ScriptOptions
from lapa2_interp import Selection
from lapa2_interp.circuits.selection import SHIPPED
from lapa2_interp.errors import RunError
from lapa2_interp.models.card import identify
from lapa2_interp.models.gguf_file import gguf_facts, gguf_folder
from lapa2_interp.models.load import load_model
from lapa2_interp.table_formats import format_interval

AGAINST = {
    HALF: "all heads at alpha 1/2",
    ADDITION: "activation addition",
    NO_BIAS: "no bias",
}
JUDGES = {
    "reader": "Qwen2.5-Coder-1.5B as a reader",
    "acc hidden": "the classifier adapter",
    "acc (linear)": "the classifier linear",
}


def main() -> None:
    """Write the selection of every model whose test is finished."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="the folder of `make models`")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the tables")
    options = parser.parse_args()
    differences = pd.read_csv(options.out / "differences.csv")
    arms = pd.read_csv(options.out / "arms.csv").query("stage == 'test' and metric == 'rep'")
    cost = arms.set_index(["model", "arm"])["cost"]
    for model in MODELS:
        file = options.models / f"{model}.gguf"
        own = differences[differences["model"] == model]
        shipped = SHIPPED / f"{model}.sentiment.json"
        chosen_here = MADE / model / "cards" / "1.json"
        if own.empty or not (chosen_here.exists() or shipped.exists()):
            print(f"{model}: not judged, or no card")
            continue
        card = Selection.load(chosen_here if chosen_here.exists() else shipped)
        if set(card.heads) != set(cards_of(model, options.out)[1].chosen):
            raise RunError(f"{chosen_here} has other heads than card 1 of heads.csv")
        if file.exists():
            weights = str(gguf_facts(gguf_folder(file)))
        else:
            weights = identify(load_model(model, model_class="TransformersModel")).weights
        chosen = card.model_copy(
            update={
                "model": model,
                "weights": weights,
                "prompts": (),
                "alpha": round(tuned_strengths(options.out, model)[CHOSEN], 2),
                "gain": gain(model, own, cost[model]),
            }
        )
        SHIPPED.mkdir(exist_ok=True)
        chosen.save(shipped)
        print(f"{model}: {chosen.gain}")


def gain(model: str, differences: pd.DataFrame, cost: pd.Series) -> str:
    """What the test found, in two sentences."""
    of_chosen = differences[differences["arm"] == CHOSEN]
    judge = next(name for name in judges_of(model) if name in set(of_chosen["metric"]))
    own = of_chosen[of_chosen["metric"] == judge]
    rows, parts = own.set_index("against"), []
    for against in (name for name in AGAINST if name in rows.index):
        row, words = rows.loc[against], AGAINST[against]
        number = format_interval(row["difference"], row["low"], row["high"], ".1f")
        parts.append(f"that of {words} is {number} points")
    said = "; ".join(
        f"with {words} it was {cost[name]:.2f}"
        for name, words in AGAINST.items()
        if name in cost and name != NO_BIAS
    )
    return (
        f"On {int(own['prompts'].max())} other prompts, and by {JUDGES[judge]}, accuracy with such"
        f" cards minus {'; minus '.join(parts)}. As a multiple of the perplexity of no bias, theirs"
        f" was {cost[CHOSEN]:.2f}; {said}."
    )


if __name__ == "__main__":
    main()
