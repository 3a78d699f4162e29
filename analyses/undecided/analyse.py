"""Claims that quick/* left undecided, judged on the new prompts of analyses/undecided/run.sh.

    python analyses/undecided/analyse.py results/undecided/* --before figures/paper/quick \\
        --out figures/undecided

Reads the claims that the items' scripts wrote in each run. Those on perplexity are left out, and
verdicts are corrected again over an item's other claims in all runs. Writes claims.csv and
verdicts.md, with the difference and the verdict of the first prompts beside.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analyses.lab.claims import (
    ClaimResult,
    ItemClaims,
    count_verdicts,
    format_claims,
    read_claims,
    unique_comparisons,
)
from analyses.lab.scripts import ScriptOptions
from lapa2_interp.files import write_text
from lapa2_interp.table_formats import as_csv, as_markdown, format_interval, records

TITLE = "Claims on new prompts"


def main() -> None:
    """Join the claims of the runs, and write them."""
    parser = ScriptOptions(TITLE)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders with tables/")
    parser.add_argument("--before", type=Path, required=True, help="folder of tables/verdicts.csv")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    claims = judge_again([run / "tables" for run in options.runs])
    names = ["item", "claim", "here", "low", "high", "prompts", "verdict"]
    before = read_claims(options.before / "tables" / "verdicts.csv")[names]
    claims = claims.merge(before, how="left", on=["item", "claim"], suffixes=("", "_before"))
    write_text(options.out / "claims.csv", as_csv(claims, 6))
    once = unique_comparisons(claims)
    shown = format_claims(once)
    shown.insert(1, "item", once["item"])
    shown.insert(2, "before", once["verdict_before"])
    shown.insert(
        list(shown).index("here"),
        "here before",
        [
            format_interval(row.here_before, row.low_before, row.high_before, "+.2f")
            + f" ({row.prompts_before:.0f} prompts)"
            for row in once.itertuples()
        ],
    )
    note = (
        f"{count_verdicts(once)}. 95 % intervals, paired on prompts. Verdicts hold after Holm's"
        " correction over an item's claims that are not on perplexity."
    )
    write_text(options.out / "verdicts.md", as_markdown(TITLE, shown, [note]))
    print(f"{note}\n{options.out}: claims.csv, verdicts.md")


def judge_again(folders: list[Path]) -> pd.DataFrame:
    """The claims of these folders of tables, each once, corrected over all of an item's claims that
    were made and are not on perplexity."""
    results: dict[str, dict[str, ClaimResult]] = {}
    for file in sorted(file for folder in folders for file in folder.glob("*.claims.csv")):
        claims = read_claims(file)
        claims = claims[(claims["verdict"] != "missing") & (claims["metric"] != "ppl")]
        for result in (ClaimResult(**row) for row in records(claims)):
            results.setdefault(result.item, {}).setdefault(result.claim, result)
    items = [ItemClaims(item, rows=[*rows.values()]).frame() for item, rows in results.items()]
    return pd.concat(items, ignore_index=True)


if __name__ == "__main__":
    main()
