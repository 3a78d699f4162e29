"""Figure criteria: are the chosen heads a circuit? From folders of analyses/circuits/criteria.py,
by default those of figures/circuits/criteria, whose criteria.csv it writes: every test by prompt,
with Holm's correction over all folders."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analyses.lab import FIGURES
from analyses.lab.scripts import ScriptOptions
from analyses.lab.style import legend_below
from lapa2_interp.circuits.statistics import max_t, share_interval
from lapa2_interp.files import write_text
from lapa2_interp.plots import COLOURS, new_figure, plain_axes
from lapa2_interp.stats import holm
from lapa2_interp.table_formats import as_csv

SETTINGS = {
    "sentiment": "SmolLM2, sentiment",
    "topic": "SmolLM2, topic",
    "gemma": "Gemma 3 270M, sentiment",
}
"""By folder."""
DIFFERENCES = {
    "chosen heads": ("chosen", "all"),
    "the same without greedy K": ("chosen without greedy", "all without greedy"),
    "the same without random K": ("chosen without random", "all without random"),
    "chosen and opposing heads": ("chosen and opposing", "all"),
    "all but opposing heads": ("all without opposing", "all"),
}
"""What is compared with all heads, and the two columns of controls.csv."""
ADDED = "one chosen head"


def criteria(folders: Sequence[Path]) -> pd.DataFrame:
    """A row a test: a difference of control as a share of that of all heads, and what each chosen
    head adds."""
    tables = []
    for folder in folders:
        controls, rows = pd.read_csv(folder / "controls.csv"), []
        for name, (one, two) in DIFFERENCES.items():
            difference = (controls[one] - controls[two]).to_numpy()[:, None]
            share, low, high = share_interval(difference, controls["all"].to_numpy())
            rows.append(
                {"criterion": name, "share": share[0], "low": low[0], "high": high[0]}
                | {"p": max_t(difference).p[0], "prompts": len(controls)}
            )
        added = pd.read_csv(folder / "minimality.csv")
        names = added["layer"].astype(str) + "." + added["head"].astype(str)
        added = added.assign(criterion=ADDED, heads=names).drop(columns=["layer", "head", "K"])
        table = pd.concat([pd.DataFrame(rows).assign(heads=""), added], ignore_index=True)
        tables.append(table.assign(setting=SETTINGS.get(folder.name, folder.name)))
    table = pd.concat(tables, ignore_index=True)
    columns = ["setting", "criterion", "heads", "share", "low", "high", "p"]
    return table[columns].assign(p_holm=holm(table["p"].to_numpy()), prompts=table["prompts"])


def draw(folders: Sequence[Path], table: pd.DataFrame) -> Figure:
    """Left: the share of all heads' control that the best heads give, and random ones (grey).
    Right: differences from all heads, with 95 % intervals."""
    figure = new_figure(7.2, 3.2)
    curves, points = figure.subplots(1, 2)
    for i, folder in enumerate(folders):
        name, steps = (
            SETTINGS.get(folder.name, folder.name),
            pd.read_csv(folder / "faithfulness.csv"),
        )
        for order, rows in steps.groupby("order", sort=False):
            x, colour = 100 * rows["heads"] / rows["heads"].max(), COLOURS[i]
            if order == "random":
                curves.plot(x, rows["share"], color="0.7", lw=0.8, zorder=0)
                continue
            curves.plot(x, rows["share"], color=colour, marker="os^"[i % 3], ms=3, label=name)
            curves.fill_between(x, rows["low"], rows["high"], color=colour, alpha=0.15, lw=0)
        own = table[(table["setting"] == name) & (table["criterion"] != ADDED)]
        at = [row + 0.22 * (i - (len(folders) - 1) / 2) for row in range(len(own))]
        points.plot(own["share"], at, "os^"[i % 3], color=COLOURS[i], ms=4)
        points.hlines(at, own["low"], own["high"], color=COLOURS[i], lw=1.2)
    curves.axhline(1, color="0.7", lw=0.6)
    curves.set_xscale("symlog", base=2, linthresh=1)
    curves.set_xlim(0, 110)
    ticks = [0, 1, 2, 4, 8, 16, 32, 64, 100]
    curves.set_xticks(ticks, [str(tick) for tick in ticks])
    curves.minorticks_off()
    plain_axes(
        curves, "heads that see the prefix, % (random ones grey)", "control, times that of all"
    )
    points.axvline(0, color="0.7", lw=0.6)
    points.set_yticks(range(len(DIFFERENCES)), list(DIFFERENCES))
    points.set_ylim(len(DIFFERENCES) - 0.5, -0.5)
    plain_axes(points, "minus all heads, as a share of their control", "")
    legend_below(figure, [("", curves, table)], 3)
    return figure


if __name__ == "__main__":
    parser = ScriptOptions("Figure criteria")
    home = FIGURES / "circuits" / "criteria"
    parser.add_argument("folders", type=Path, nargs="*", default=[home / name for name in SETTINGS])
    parser.add_argument("--out", type=Path, help="of criteria.csv and .png; else the first folder")
    options = parser.parse_args()
    out = options.out or (home if options.folders[0].parent == home else options.folders[0])
    tests = criteria(options.folders)
    write_text(out / "criteria.csv", as_csv(tests, 6))
    draw(options.folders, tests).savefig(out / "criteria.png", dpi=200)
