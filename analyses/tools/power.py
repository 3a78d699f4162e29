"""Say how small a difference each claim of a grid could show, before the grid is run.

    lapa2 sweep quick/scaling --set samples=1 --out results/pilot
    python analyses/paper/scaling.py results/pilot
    python analyses/tools/power.py quick/scaling --claims results/pilot
    python analyses/tools/power.py quick/scaling --claims results/pilot --set samples=20

The spread of each difference comes from an earlier run of the grid's items, or from a pilot.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from analyses.lab.claims import read_claims
from analyses.lab.estimates import PERPLEXITY_TEXTS
from analyses.lab.power import POWER, detectable_differences, power_table, summarize_power
from analyses.lab.scripts import ScriptOptions, whole_number
from lapa2_interp.errors import DataError
from lapa2_interp.files import write_text
from lapa2_interp.runs.grid import load_grid, parse_changes
from lapa2_interp.table_formats import as_csv, as_text


def main() -> None:
    """Print the power of every grid, and write all tables as one."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grids", nargs="+", help="built-in grids, or paths of .toml files")
    parser.add_argument(
        "--claims",
        type=Path,
        required=True,
        help="a run folder whose items have their tables, or a folder of ITEM.claims.csv",
    )
    parser.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace a key in every block, such as samples=2; repeat the option for more",
    )
    parser.add_argument(
        "--perplexity",
        type=whole_number(),
        default=PERPLEXITY_TEXTS,
        help="texts of an arm whose perplexity will be measured, about",
    )
    parser.add_argument("--out", type=Path, help="also write the table as this CSV file")
    options = parser.parse_args()
    folder = options.claims
    folder = folder / "tables" if (folder / "tables").is_dir() else folder
    files = sorted(folder.glob("*.claims.csv"))
    if not files:
        raise DataError(
            f"{folder} has no ITEM.claims.csv; `python analyses/paper/ITEM.py RUN` makes it from a"
            " run"
        )
    known = pd.concat(map(read_claims, files), ignore_index=True)
    tables = []
    for name in options.grids:
        grid = load_grid(name, parse_changes(options.changes), check=False)
        table = power_table(grid, known, options.perplexity)
        tables.append(table.assign(grid=grid.name))
        print(f"{grid.name}\n{as_text(table, '.2f')}")
        print(summarize_power(table))
        if points := detectable_differences(grid):
            print(f"without an earlier run, of independent texts: two arms tell {points} points")
        print()
    print(
        f"detectable: the smallest true difference that is found in {POWER:.0%} of runs;"
        " corrected: after Holm's correction for the item's claims, the paper's and ours apart;"
        " if_zero: how often a true 0 is shown to be smaller than the margin; decided: how often"
        " one or the other, if the truth is as the earlier run says, within its error;"
        f" required_prompts: prompts that would decide the claim in {POWER:.0%} of runs, for any"
        " true difference"
    )
    if options.out is not None:
        write_text(options.out, as_csv(pd.concat(tables, ignore_index=True)))
        print(f"written: {options.out}")


if __name__ == "__main__":
    main()
