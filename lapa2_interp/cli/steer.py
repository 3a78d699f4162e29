"""The command `lapa2 steer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lapa2_interp.cli.functions import Values, command_of
from lapa2_interp.cli.texts import method_parameters
from lapa2_interp.report.settings import SteerSettings

if TYPE_CHECKING:
    from lapa2_interp.report.steer_result import Steered


def _read_parameters(texts: Sequence[str], values: Values) -> dict[str, Any]:
    return method_parameters(values.get("method", SteerSettings.method), texts)


def _print_steered(steered: Steered, values: Values) -> None:
    print(f"\n{steered.summary()}\n{steered.selection.gain}")
    inputs = values.get("task", SteerSettings.task), values["prompts"], values.get("device")
    print(f"\nwritten: {steered.folder / 'report.html'}; {steered.next_step(*inputs)}")


steer = command_of(
    SteerSettings, "report.steer:steer", read={"parameters": _read_parameters}, show=_print_steered
)
