"""What the shipped classifiers reach on labelled text that they were not trained on.

    python analyses/scorers/analyse.py

Writes figures/scorers/scorers.csv from the cards beside the weights: task, scorer, data, measure,
value with its 95 % interval over texts (low, high), and n, the number of texts.
"""

from __future__ import annotations

import json

import pandas as pd

from analyses.lab import FIGURES
from lapa2_interp.files import write_text
from lapa2_interp.scoring.task_scorer import SHIPPED_WEIGHTS
from lapa2_interp.table_formats import as_csv

OUT = FIGURES / "scorers" / "scorers.csv"


def cards() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "task": card.stem.removesuffix("-adapter"),
            "scorer": "adapter" if card.stem.endswith("-adapter") else "linear",
            **{name: value for name, value in held_out.items() if name != "length"},
        }
        for card in sorted(SHIPPED_WEIGHTS.glob("*.json"))
        for held_out in json.loads(card.read_text("utf-8"))["held_out"]
        if held_out["length"] == "all"
    )


if __name__ == "__main__":
    write_text(OUT, as_csv(cards()))
    print(cards().to_string())
