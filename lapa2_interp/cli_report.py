"""The command that shows a run: `lapa2 report`."""

from __future__ import annotations

from pathlib import Path

from lapa2_interp.errors import Lapa2Error, RunError


def report(run: Path, /, *, tables: Path | None = None, out: Path | None = None) -> None:
    """Write a run's page: tables and figures, the paper's claims judged, texts side by side with tokens coloured by attention.

    One file that loads nothing, to open in a browser or send to somebody. It shows what is there, and lists the cells that are
    missing. Tables and claims are those of the paper's items (`python analyses/ITEM.py RUN`); a run of grids of one's own has its
    texts and cells, and its scores from `lapa2 score RUN`. For example

        lapa2 report results/quick
        lapa2 report results/quick --tables /tmp/again/tables --out /tmp/again/report.html

    Args:
        run: The folder of `lapa2 sweep`.
        tables: The folder of the items' tables, with figures/ beside it; by default RUN/tables.
        out: The file; by default RUN/report.html. One that is there is replaced.
    """
    from lapa2_interp.experiments.sweep import durable_file, load_run
    from lapa2_interp.report import run_report

    found = load_run(run)
    folder = run / "tables" if tables is None else tables
    if tables is not None and not any(folder.glob("*.json")):
        raise RunError(
            f"--tables {folder} has no tables (ITEM.json); `python analyses/ITEM.py {run}` makes those of an item"
        )
    file = run / "report.html" if out is None else out
    if file.is_dir():
        raise RunError(f"--out {file} is a folder; give a file, such as {file / 'report.html'}")
    html = run_report(found, folder, folder.parent / "figures")
    try:
        durable_file(file, html)
    except OSError as error:
        raise RunError(f"cannot write {file}: {error.strerror or error}; choose another --out") from error
    print(f"{file} ({len(html.encode()) / 1e6:.1f} MB)")


__all__ = ["Lapa2Error", "report"]
