"""What the figure scripts share: where tables come from, and the files a figure becomes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from lapa2_interp.errors import RunError
from lapa2_interp.paper.scripts import ScriptOptions
from lapa2_interp.plots import Drawing

ANALYSES = Path(__file__).resolve().parent.parent / "analyses"


def render(item: str, draw: Callable[..., Drawing], *further: str) -> None:
    """`python figures/ITEM.py RUN`: draw RUN/tables/ITEM.csv into RUN/figures/ITEM.png and .pdf.

    A table that is not there is made first, by `analyses/ITEM.py`.

    Args:
        draw: Given the table, and the further ones, gives the figure.
        further: More tables of the item: ITEM.NAME.csv.
    """
    parser = ScriptOptions(f"Draw figure {item} from a run's tables.")
    parser.add_argument(
        "run", type=Path, nargs="?", default=Path("results/quick"), help="a run folder of `lapa2 sweep`"
    )
    parser.add_argument("--out", type=Path, help="folder with tables/, where figures/ goes; by default the run's own")
    options = parser.read()
    out = options.out or options.run
    files = [out / "tables" / f"{name}.csv" for name in (item, *(f"{item}.{each}" for each in further))]
    if not all(file.is_file() for file in files):
        made = subprocess.run([sys.executable, ANALYSES / f"{item}.py", options.run, "--out", out], check=False)
        if made.returncode:  # it has said why
            sys.exit(made.returncode)
    tables = [_table(file) for file in files]
    try:
        figure = draw(*tables)
    except KeyError as error:
        raise RunError(f"{files[0]} has no column {error}; delete it, and it is made again") from error
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for ending in ("png", "pdf"):
        place = out / "figures" / f"{item}.{ending}"
        figure.savefig(place, metadata={"CreationDate": None} if ending == "pdf" else None)
        print(place)


def _table(file: Path) -> pd.DataFrame:
    try:
        return pd.read_csv(file)
    except ValueError as error:  # no CSV, or no UTF-8
        raise RunError(f"cannot read {file} ({str(error)[:80]}); delete it, and it is made again") from error
