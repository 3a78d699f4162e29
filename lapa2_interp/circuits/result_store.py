"""A file of finished results, from which the same call continues, and checks of such a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from filelock import Timeout

from lapa2_interp._util.parsing import parse_object
from lapa2_interp._util.same_inputs import check_same_inputs
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.errors import CircuitError
from lapa2_interp.files import acquire_lock, write_text
from lapa2_interp.models.facts import Model, facts_of

CONTROL = ""
"""Key, and name, of the control itself in a file of units: nothing is knocked out."""
CONTROL_SHARE = 1e-2
"""The share of the control by which a stored control may differ from the one of now."""
RECHECKED = 2
"""Stored results that are computed again and compared: units of largest effect, or texts of
`fading`."""


class ResultStore:
    """Finished results by name, such as those of units, in memory and, with a file, as its lines,
    from which the same call resumes.

    Custom hooks, and what a custom metric computes, are not among the inputs. So a call that
    resumes computes the control and some results again, and compares (`check_control`, `check`).

    Args:
        file: The file; None for memory alone.
        model, contrast_set: The inputs of all results.
        inputs: Further inputs by name.

    Attributes:
        results: By name, arrays by name.
        shift: By name of an array, the stored control less the control that was computed now.

    Raises:
        CircuitError: The file has results for other inputs, or another process fills it.
    """

    def __init__(
        self, file: str | Path | None, model: Model, contrast_set: ContrastSet, **inputs: Any
    ) -> None:
        self.results: dict[str, dict[str, np.ndarray]] = {}
        self.shift: dict[str, np.ndarray] = {}
        self._control: dict[str, np.ndarray] = {}
        self._rounding = _rounding_share(model)
        self._held = ExitStack()
        self._path = file
        self._file: IO[str] | None = None
        if file is None:
            return
        key, facts = contrast_set.key(model, **inputs), contrast_set.facts(model, **inputs)
        path = Path(file)
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "no file"
            raise CircuitError(f"{path} is {kind}; give a file, such as {path / 'cut.jsonl'}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._held.enter_context(acquire_lock(path.with_name(f".{path.name}.lock")))
        except Timeout as error:
            raise CircuitError(
                f"{path} is being filled by another process; wait for it, or give another file"
            ) from error
        # A damaged line is left out, even if it is not UTF-8; its result is computed again.
        lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
        first = json.dumps({"inputs": key, "facts": facts})
        if lines:
            try:
                _check_inputs(path, lines[0], key, facts)
            except CircuitError:
                self.close()
                raise
        # The first line holds the inputs, each other line a result.
        intact = []
        for i, line in enumerate(lines[1:], 2):
            try:
                fields = parse_object(line)
                values = {name: np.array(numbers) for name, numbers in fields["values"].items()}
                self.results[fields["unit"]] = values
            except (ValueError, KeyError, AttributeError, TypeError):
                if i < len(lines):  # an interrupted program may have left half of the last line
                    print(f"{path}: line {i} is damaged and made again", file=sys.stderr)
                continue
            intact.append(line)
        write_text(path, "\n".join([first, *intact]) + "\n")
        self._file = self._held.enter_context(path.open("a", encoding="utf-8"))

    def __contains__(self, name: str) -> bool:
        return name in self.results

    def __getitem__(self, name: str) -> dict[str, np.ndarray]:
        return self.results[name]

    def add(self, name: str, values: dict[str, np.ndarray]) -> None:
        """Store a result, and append it to the file."""
        self.results[name] = values
        if self._file is not None:
            lists = {metric: array.tolist() for metric, array in values.items()}
            self._file.write(json.dumps({"unit": name, "values": lists}) + "\n")
            self._file.flush()

    def check_control(self, stored: dict[str, np.ndarray], now: Mapping[str, np.ndarray]) -> None:
        """Compare the control with the stored one, and note what rounding changes (`shift`).

        Args:
            stored: The stored control.
            now: The control of its first texts, or of all.

        Raises:
            CircuitError: They differ by more than a hundredth of the control.
        """
        self._compare(stored, now, stored, CONTROL_SHARE)
        self._control = stored
        self.shift = {name: stored[name][: len(values)] - values for name, values in now.items()}

    def check(
        self, stored: Mapping[str, np.ndarray], now: Mapping[str, np.ndarray], without: str = ""
    ) -> None:
        """Compare values, shifted with the control, with stored ones.

        Args:
            without: The unit that was knocked out.

        Raises:
            CircuitError: They differ by more than rounding.
        """
        shifted = {name: values + self.shift[name] for name, values in now.items()}
        self._compare(stored, shifted, self._control, self._rounding, without)

    def _compare(
        self,
        stored: Mapping[str, np.ndarray],
        now: Mapping[str, np.ndarray],
        control: Mapping[str, np.ndarray],
        share: float,
        without: str = "",
    ) -> None:
        """Refuse values that differ by more than a share of the control."""
        for name, values in now.items():
            before = stored[name][: len(values)]
            if np.abs(before - values).max() > share * np.abs(control[name]).max() + 1e-6:
                subject = f"{name} without {without}" if without else name
                raise CircuitError(
                    f"{self._path} holds results of another model or metric: {subject} was"
                    f" {before.mean():.4g}, and is {values.mean():.4g} now; give another file"
                )

    def close(self) -> None:
        """Close and unlock the file."""
        self._held.close()


def _rounding_share(model: Model) -> float:
    """The share of the control by which rounding may move an effect. Norms are in float32 at
    most."""
    eps = max(torch.finfo(dtype).eps for dtype in (facts_of(model).dtype, torch.float32))
    return float(eps**0.5)


def _check_inputs(path: Path, line: str, key: str, facts: Mapping[str, str]) -> None:
    """Refuse a file whose first line has other inputs."""
    try:
        stored = parse_object(line)
        before, inputs = dict(stored["facts"]), {"inputs": stored["inputs"]}
    except (ValueError, KeyError, TypeError) as error:
        raise CircuitError(
            f"{path} is no file of results, or its first line is damaged; give another file, or"
            " remove it"
        ) from error
    check_same_inputs(before, facts, path, CircuitError)
    check_same_inputs(inputs, {"inputs": key}, path, CircuitError)
