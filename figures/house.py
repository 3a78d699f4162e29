"""Shared by the figure scripts: reading tables, and the style and files of figures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lapa2_interp.errors import RunError
from lapa2_interp.methods.registry import known_methods
from analyses.lab.scripts import ScriptOptions
from lapa2_interp.plots import COLOURS, Drawing, new_figure

ANALYSES = Path(__file__).resolve().parent.parent / "analyses"


def render(item: str, draw: Callable[..., Drawing], *further: str) -> None:
    """`python figures/ITEM.py RUN`: draw RUN/tables/ITEM.csv into RUN/figures/ITEM.png and .pdf.

    A table that is not there is made first, by `analyses/ITEM.py`.

    Args:
        draw: Makes the figure from the table and the further tables.
        further: Names of further tables of the item, ITEM.NAME.csv.
    """
    parser = ScriptOptions(f"Draw figure {item} from a run's tables.")
    parser.add_argument(
        "run",
        type=Path,
        nargs="?",
        default=Path("results/quick"),
        help="a run folder of `lapa2 sweep`",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder with tables/, where figures/ goes; by default the run's own",
    )
    options = parser.parse_args()
    out = options.out or options.run
    files = [
        out / "tables" / f"{name}.csv" for name in (item, *(f"{item}.{part}" for part in further))
    ]
    if not all(file.is_file() for file in files):
        made = subprocess.run(
            [sys.executable, ANALYSES / f"{item}.py", options.run, "--out", out], check=False
        )
        if made.returncode:  # it has said why
            sys.exit(made.returncode)
    tables = [_table(file) for file in files]
    try:
        figure = draw(*tables)
    except KeyError as error:
        raise RunError(
            f"{files[0]} has no column {error}; delete it, and it is made again"
        ) from error
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for ending in ("png", "pdf"):
        path = out / "figures" / f"{item}.{ending}"
        figure.savefig(path, metadata={"CreationDate": None} if ending == "pdf" else None)
        print(path)


def _table(file: Path) -> pd.DataFrame:
    try:
        return pd.read_csv(file)
    except ValueError as error:  # no CSV, or no UTF-8
        raise RunError(
            f"cannot read {file} ({str(error)[:80]}); delete it, and it is made again"
        ) from error


# --- style

METHOD_STYLES = {
    "prefix": (COLOURS[1], "o"),
    "con-prefix": (COLOURS[3], "s"),
    "air-decoding": (COLOURS[2], "^"),
    "negprompt": (COLOURS[4], "D"),
    "preadd": (COLOURS[5], "v"),
    "palette": (COLOURS[6], "P"),
    "freectrl": (COLOURS[0], "X"),
    "datg": (COLOURS[0], "X"),
    "gedi": (COLOURS[4], "<"),
    "dexperts": (COLOURS[5], ">"),
    "arithmetic": (COLOURS[6], "*"),
}
"""A method keeps its colour and marker in every figure."""
METRIC_LABELS = {"acc": "attribute accuracy (%)", "tox": "toxicity (%)", "ppl": "perplexity"}
COLUMN = 3.4
"""Width of a paper's column, inches."""


def display_name(method: str) -> str:
    """A method's name in figures."""
    return known_methods()[method].display_name if method in known_methods() else method


def style_of(method: str) -> tuple[str, str]:
    """A method's colour and marker."""
    return METHOD_STYLES.get(method, ("#777777", "."))


Panels = list[tuple[str, Axes, pd.DataFrame]]
"""Task, axes and rows of each panel."""


def by_task(
    table: pd.DataFrame, width: float = COLUMN, height: float = 2.4
) -> tuple[Drawing, Panels]:
    """One panel per task (and model, where there are several), side by side."""
    several = table["model"].nunique() > 1
    groups = [
        (f"{task}, {str(model).rpartition('/')[2]}" if several else str(task), part)
        for (model, task), part in table.groupby(["model", "task"], sort=False)
    ]
    figure = new_figure(width * max(1, len(groups)), height)
    panels = np.atleast_1d(figure.subplots(1, max(1, len(groups))))
    return figure, [
        (title, panel, part) for panel, (title, part) in zip(panels, groups, strict=False)
    ]


def legend_below(figure: Drawing, panels: Panels, columns: int = 3) -> None:
    """One legend under all panels, in fewer columns where they do not fit."""
    named: dict[str, Any] = {}
    for _, panel, _ in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    for fewer in range(columns, 0, -1):
        legend = figure.legend(
            list(named.values()),
            list(named),
            loc="outside lower center",
            frameon=False,
            fontsize=7,
            ncols=fewer,
        )
        if fewer == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()
