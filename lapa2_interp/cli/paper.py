"""The commands of the paper: `lapa2 propositions | report`."""

from __future__ import annotations

from pathlib import Path

from lapa2_interp.cli.functions import command_of
from lapa2_interp.paper.settings import PropositionSettings

propositions = command_of(PropositionSettings, "paper.proposition_study:run_proposition_study")


def report(run: Path, /, *, tables: Path | None = None, out: Path | None = None) -> None:
    """Write a run's page: tables, figures, claims, and texts coloured by their attention.

    One file that loads nothing, to open in a browser or send to somebody. The page shows what is
    there, and lists the cells that are missing. Tables and claims are those of the paper's items
    (`python analyses/ITEM.py RUN`); a run of your own grids has its texts and cells, and its scores
    from `lapa2 score RUN`. Pages of `lapa2 view` that lie beside it (view*.html) are linked. For
    example

        lapa2 report results/quick
        lapa2 report results/quick --tables again/tables --out again/report.html

    Args:
        run: The folder of `lapa2 sweep`.
        tables: The folder of the items' tables, with figures/ beside it; by default RUN/tables.
        out: The file; by default RUN/report.html. One that is there is replaced.
    """
    from lapa2_interp.report.run_page import write_report
    from lapa2_interp.runs.run import load_run

    file = write_report(load_run(run), tables, out)
    print(f"{file} ({file.stat().st_size / 1e6:.1f} MB)")
