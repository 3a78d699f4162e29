"""The command that shows a text of a run, head by head: `lapa2 view`."""

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
