"""Do the two scorers give the same verdicts?

    python analyses/scorers/second_scorer.py

Reads figures/paper/quick/tables/verdicts.csv and writes figures/scorers/second_scorer.csv: the
claims of the paper that two scorers judge, each once. Verdicts of the second scorer are not
corrected, so `raw` is compared with them, and `verdict`, which is Holm-corrected, too. Columns:
claim, metric, raw, verdict, second_verdict; yes or no: raw_differs, verdict_differs, opposite,
no_bias (a claim that compares LaPA2 with no bias).
"""

from __future__ import annotations

import pandas as pd

from analyses.lab import FIGURES
from lapa2_interp.files import write_text
from lapa2_interp.table_formats import as_csv

NO_BIAS = r"than (?:none|0):|than with baseline|LaPA2 (?:raises|lowers)"
SIDES = ("as in the paper", "against the paper")


def agreement() -> pd.DataFrame:
    """The columns above, from verdicts.csv."""
    verdicts = pd.read_csv(FIGURES / "paper/quick/tables/verdicts.csv")
    rows = verdicts[(verdicts["whose"] == "paper") & verdicts["second_verdict"].notna()]
    rows = rows[~(rows["compared"].notna() & rows["compared"].duplicated())]
    differs = {
        f"{name}_differs": rows[name] != rows["second_verdict"] for name in ("raw", "verdict")
    }
    opposite = differs["raw_differs"] & rows["raw"].isin(SIDES) & rows["second_verdict"].isin(SIDES)
    marks = differs | {"opposite": opposite, "no_bias": rows["claim"].str.contains(NO_BIAS)}
    table = rows[["claim", "metric", "raw", "verdict", "second_verdict"]].copy()
    for name, column in marks.items():
        table[name] = column.map({True: "yes", False: "no"})
    return table


if __name__ == "__main__":
    write_text(FIGURES / "scorers" / "second_scorer.csv", as_csv(agreement()))
    print((agreement() == "yes").sum())
