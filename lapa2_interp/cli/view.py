"""The pages of a run: `lapa2 report | view`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lapa2_interp.cli.functions import Values, command_of
from lapa2_interp.report.settings import ViewSettings

if TYPE_CHECKING:
    from lapa2_interp.report.viewer import View


def _into_the_run(values: Values) -> None:
    values.setdefault("out", Path(values["run"]) / "view.html")


def _print_view(page: View, values: Values) -> None:
    size = values["out"].stat().st_size / 1e6
    print(page.summary())
    print(f"{values['out']} ({size:.1f} MB, {page.data['bits']} bits a number)")


view = command_of(ViewSettings, "report.viewer:view", prepare=_into_the_run, show=_print_view)


def report(run: Path, /, *, out: Path | None = None) -> None:
    """Write a run's page: its texts coloured by their attention, attention by step, and scores.

    One file that loads nothing, to open in a browser or send to somebody. The page shows what is
    there, and lists the cells that are missing; scores are those of `lapa2 score RUN`. Pages of
    `lapa2 view` that lie beside it (view*.html) are linked. For example

        lapa2 report results/mine
        lapa2 report results/mine --out mine.html

    Args:
        run: The folder of `lapa2 generate` or `lapa2 sweep`.
        out: The file; by default RUN/report.html. One that is there is replaced.
    """
    from lapa2_interp.report.run_page import write_report
    from lapa2_interp.runs.run import load_run

    file = write_report(load_run(run), out)
    print(f"{file} ({file.stat().st_size / 1e6:.1f} MB)")
