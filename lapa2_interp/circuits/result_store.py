"""A file of finished results, from which the same call continues, and checks of such a file."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from filelock import Timeout

from lapa2_interp._util.errors import CircuitError
from lapa2_interp._util.files import acquire_lock, write_text
from lapa2_interp._util.parsing import parse_json, parse_object
from lapa2_interp.models.card import Model, weights_dtype

CONTROL = ""
"""Key of the control itself in a file of units."""
SHA256 = "sha256"
"""The field of a line that holds the sha256 of its other fields."""
RECHECKED = 2
"""Stored results that are computed again and compared: units of largest effect, or texts of
`fading`."""


def check_unchanged(
    file: str | Path | None,
    stored: Mapping[str, np.ndarray],
    now: Mapping[str, np.ndarray],
    without: str = "",
    control: Mapping[str, np.ndarray] | None = None,
    share: float = 1e-2,
) -> None:
    """Refuse a file whose stored values differ from those of this model: custom hooks, and what a
    custom metric computes, are not in the file's key.

    Args:
        without: The unit that was knocked out; "" for the control itself.
        control: The control whose share is the largest difference allowed; by default `stored`.
        share: That share.

    Raises:
        CircuitError: A value differs by more.
    """
    for name, old in stored.items():
        top = np.abs((control or stored)[name]).max()
        if np.abs(old - now[name]).max() > share * top + 1e-6:
            label = f"{name} without {without}" if without else name
            raise CircuitError(
                f"{file} holds results of another model or metric: {label} was {old.mean():.4g},"
                f" and is {now[name].mean():.4g} now; give another file"
            )


def rounding_share(model: Model) -> float:
    """The share of the control by which rounding may move an effect. Norms are in float32 at
    most."""
    eps = max(torch.finfo(each).eps for each in (weights_dtype(model), torch.float32))
    return float(eps**0.5)


class ResultStore:
    """Finished results by name, such as those of units, in memory and, with a file, as its lines.

    Attributes:
        results: By name, arrays by name.

    Args:
        key: A hash of the inputs. `facts`: the inputs by name, for a message.

    Raises:
        CircuitError: The file has results for other inputs, or another process fills it.
    """

    def __init__(
        self, file: str | Path | None, key: str, facts: Mapping[str, str] | None = None
    ) -> None:
        self.results: dict[str, dict[str, np.ndarray]] = {}
        self._held = ExitStack()
        self._file: IO[str] | None = None
        if file is None:
            return
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
        first = json.dumps({"inputs": key, "facts": facts or {}})
        if lines and (other := _difference(lines[0], key, facts or {})):
            self.close()
            raise CircuitError(
                f"{path} holds results for other inputs{other}; give another file, or remove it"
            )
        # The first line holds the inputs, each other line a result.
        intact = []
        for i, line in enumerate(lines[1:], 2):
            try:
                each = parse_object(line)
                if each.pop(SHA256) != _sha256(each):
                    raise ValueError("its contents are not those that were written")
                values = {name: np.array(found) for name, found in each["values"].items()}
                self.results[each["unit"]] = values
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
            lists = {each: array.tolist() for each, array in values.items()}
            self._file.write(result_line({"unit": name, "values": lists}))
            self._file.flush()

    def close(self) -> None:
        """Close and unlock the file."""
        self._held.close()


def result_line(fields: Mapping[str, Any]) -> str:
    """A line of a `ResultStore` with the sha256 of its fields."""
    return json.dumps({**fields, SHA256: _sha256(fields)}) + "\n"


def _sha256(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def _difference(line: str, key: str, facts: Mapping[str, str]) -> str:
    """The difference between the inputs in a file's first line and these, in words; "" if there is
    none."""
    try:
        there = parse_json(line)
        if there["inputs"] == key:
            return ""
        old = there.get("facts", {})
        names = [name for name in {**old, **facts} if old.get(name) != facts.get(name)]
        others = [f"{name} {old.get(name)}, here {facts.get(name)}" for name in names if old]
    except (ValueError, TypeError, KeyError, AttributeError):
        others = []
    return f": {'; '.join(others)}" if others else ", or is damaged"
