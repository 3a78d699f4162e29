"""How many of the 24 heads that oppose sentiment most oppose topic most, too: opposing.csv.

    python analyses/shared_heads/opposing.py

Heads *oppose* a prefix if it controls more without them. `by` says how the 24 were found: by
knock-out, those without whose view of the prefix js rises most (figures/circuits); by slope, those
in which a bias lowers control most, as the grids of analyses/rivals name them. *By chance* is the
mean of as many random heads.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pandas as pd

from analyses.lab import FIGURES
from analyses.lab.scripts import ScriptOptions
from lapa2_interp.bias.recipes import parse_recipes
from lapa2_interp.files import write_text
from lapa2_interp.table_formats import as_csv

GRIDS = Path(__file__).resolve().parents[1] / "rivals"
TASKS = ("sentiment", "topic")
HEADS = 24


def by_knock_out(effects: pd.DataFrame) -> set[tuple[int, int]]:
    """The heads whose loss raises js most."""
    most = effects.nsmallest(HEADS, "effect")
    return set(zip(most["layer"], most["head"], strict=True))


def by_slope(grid: Path) -> set[tuple[int, int]]:
    """The heads that have a negative bias in an arm of a grid."""
    blocks = tomllib.loads(grid.read_text("utf-8"))["block"]
    arms = [arm for block in blocks for arm in block.get("augmentation", []) if " + " in arm]
    rules = [rule for arm in arms for rule in parse_recipes(arm) if rule.alpha < 0]
    return {tuple(head) for rule in rules for head in rule.heads}


def main() -> None:
    """Write opposing.csv."""
    parser = ScriptOptions("Heads that oppose two tasks")
    parser.add_argument("--out", type=Path, default=FIGURES / "shared_heads")
    out = parser.parse_args().out
    effects = [pd.read_csv(FIGURES / "circuits" / task / "head.csv") for task in TASKS]
    sets = {
        "knock-out": [by_knock_out(table) for table in effects],
        "slope": [by_slope(GRIDS / f"{task}.toml") for task in TASKS],
    }
    rows = [
        {"by": by, "first": TASKS[0], "second": TASKS[1], "heads": len(first)}
        | {"shared": len(first & second), "by chance": len(first) * len(second) / len(effects[0])}
        | {"which": " ".join(f"{layer}.{head}" for layer, head in sorted(first & second))}
        for by, (first, second) in sets.items()
    ]
    write_text(out / "opposing.csv", as_csv(pd.DataFrame(rows), 5))


if __name__ == "__main__":
    main()
