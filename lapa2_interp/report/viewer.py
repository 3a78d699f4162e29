"""One text of a run to look into: where every head attends at every step, as one HTML file that
loads nothing.

    from lapa2_interp import load_run, view

    shown = view(load_run("results/run"))     # in a notebook this is the viewer itself
    shown.save("view.html")

The page is plain canvas and one ES module, `view.js`. The module has the form that anywidget takes
(`export default { render }`), its trait is `data`: `View.data`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lapa2_interp._util.errors import RunError
from lapa2_interp._util.files import is_page, write_text
from lapa2_interp._util.page import embedded, template
from lapa2_interp.bias.augmentation import active_augmentations
from lapa2_interp.bias.tokens import token_texts
from lapa2_interp.methods.registry import find_class
from lapa2_interp.models.card import Model
from lapa2_interp.report.packing import FLOOR, Bits, pack, precision, quantised
from lapa2_interp.report.reading import MASSES, Found, HeadValues, choose, read_again, read_study
from lapa2_interp.runs.store import Run, load_run

HERE = Path(__file__).parent
MODULE, STYLE = HERE / "view.js", HERE / "view.css"
"""The ES module and its style sheet: `_esm` and `_css` of an anywidget."""
SIZE = 5_000_000
"""Bytes that a page with 16-bit numbers may have; above it, numbers have 8 bits."""


@dataclass(frozen=True)
class View:
    """A text of a run as the viewer shows it. In a notebook it shows itself.

    Attributes:
        found: The numbers.
        heads: What a study knows of every head, by name.
        bits: Of a stored number; by default 16, and 8 where the page would exceed `SIZE`.
    """

    found: Found = field(repr=False)
    heads: Mapping[str, HeadValues] = field(default_factory=dict, repr=False)
    bits: Bits | None = None

    @cached_property
    def data(self) -> dict[str, Any]:
        """Everything the module needs, as plain JSON: facts, texts, and the packed arrays."""
        if self.bits is not None:
            return _data(self.found, self.heads, self.bits)
        fine = _data(self.found, self.heads, 16)
        return fine if len(json.dumps(fine)) < 0.98 * SIZE else _data(self.found, self.heads, 8)

    @cached_property
    def html(self) -> str:
        """The page as one string. Equal numbers give equal pages."""
        return template("view.html.j2", HERE).render(
            title=self.data["title"],
            style=STYLE.read_text("utf-8"),
            module=MODULE.read_text("utf-8"),
            data=embedded(self.data),
        )

    def save(self, file: str | Path) -> Path:
        """Write the page; one that is there is replaced.

        Raises:
            RunError: The file cannot be written.
        """
        place = Path(file)
        if place.is_dir():
            raise RunError(f"{place} is a folder; give a file, such as {place / 'view.html'}")
        if not is_page(place):
            raise RunError(
                f"the name of a page ends in .html; found {place.name}, give"
                f" {place.with_suffix('.html').name}"
            )
        try:
            write_text(place, self.html)
        except OSError as error:
            raise RunError(
                f"cannot write {place}: {error.strerror or error}; choose another file"
            ) from error
        return place

    def _repr_html_(self) -> str:
        """The page in a frame of its own, which can neither read nor change the notebook."""
        from markupsafe import escape

        return (
            '<iframe title="Attention of a text, head by head" sandbox="allow-scripts'
            ' allow-downloads" style="width:100%;height:56rem;border:0"'
            f' srcdoc="{escape(self.html)}"></iframe>'
        )


def view(
    run: Run | str | Path,
    *,
    only: Mapping[str, Any] | None = None,
    attribute: str | None = None,
    prompt: str | None = None,
    sample: int = 0,
    arm: str | None = None,
    branch: str | None = None,
    steps: int = 64,
    same_text: bool = False,
    circuits: str | Path | None = None,
    bits: Bits | None = None,
    model: Model | None = None,
    device: str | None = None,
    allow_code: bool = False,
) -> View:
    """One text of a run, the baseline beside an augmentation.

    The text is read again with the run's model, because a run does not keep the attention on every
    key. Where the run has a trace of the text, the reading is compared with it.

    Args:
        run: A run or its folder.
        only: Only cells whose columns have these values, such as {"method": "prefix"}.
        attribute: By default the run's first.
        prompt: The prompt, or its beginning; by default the first.
        sample: Which of its texts, from 0.
        arm: The augmentation beside the baseline, by its name in `run.cells`; by default the
            paper's.
        branch: Which branch of the method; by default the first with a prefix.
        steps: Tokens of the text that are shown, at least 1.
        same_text: Read the baseline's text in both arms, so that only the augmentation differs.
        circuits: The folder of a study (`lapa2 circuits`) of the same model and task: effects of
            heads and what they write, with intervals.
        bits: Of a stored number, 8 or 16; by default 16 while the page stays below `SIZE`.
        model: The run's model, where it is loaded already.
        device: Where it is loaded otherwise.
        allow_code: Import the module of a method MODULE:CLASS that the run names.

    Raises:
        MethodError: The run's method is code that is not loaded, and not allowed.
        TraceError: There is no such text, several kinds of cells are left, or the text cannot be
            read again as it was written.
        CircuitError: The folder is no study of this model and task.
        RunError: No such column or run, or a cell is damaged.
    """
    there = run if isinstance(run, Run) else load_run(run)
    chosen = choose(there, only or {}, attribute, prompt, sample, arm)
    for cell in chosen.cells.values():
        find_class(cell.method, allow_code)
    found = read_again(
        there,
        chosen,
        branch=branch,
        steps=steps,
        same_text=same_text,
        model=model,
        device=device,
    )
    heads = {} if circuits is None else read_study(Path(circuits), found)
    return View(found, heads, bits)


def _data(found: Found, heads: Mapping[str, HeadValues], bits: Bits) -> dict[str, Any]:
    """What `View.data` is, at so many bits."""
    layout, cell = found.layout, next(iter(found.chosen.cells.values()))
    arrays, arms = {}, []
    start = [f"soft {i + 1}" for i in range(layout.soft)]
    for i, each in enumerate(found.readings):
        keys = token_texts(found.tokenizer, "", [*layout.ids, *each.tokens])
        arrays[f"pattern{i}"] = np.concatenate(
            [quantised(step, bits).ravel() for step in each.patterns]
        )
        arrays[f"masses{i}"] = each.masses.astype(np.float32)
        arms.append(
            {
                "name": each.arm,
                "rule": " + ".join(
                    rule.to_json() for rule in active_augmentations(each.augmentation)
                )
                or "none",
                "keys": [*start, *keys],
                "steps": len(each.tokens),
                "end": each.end,
                "control": {name: _plain(np.array(v)) for name, v in each.control.items()},
                "off": each.off,
                "run": {name: _plain(grid) for name, grid in each.of_run.items()},
            }
        )
    parts = ["prefix"] * layout.soft + ["bos"] * layout.n_bos
    parts += ["prefix"] * (0 if layout.soft else layout.l_pre) + ["prompt"] * layout.l_pro
    packed = pack(arrays)
    n_layers, n_heads = found.readings[0].masses.shape[2:]
    named = f"{cell.model}, {cell.task.name}, {cell.attribute}, {cell.method}"
    return {
        "title": f"{named}: {found.chosen.prompt}",
        "facts": {
            "model": f"{found.model['name']} ({found.model['dtype']})",
            "weights": found.model["weights"],
            "task": f"{cell.task.name}, {cell.attribute}",
            "method": cell.method + (f" ({cell.variant})" if cell.variant else ""),
            "branch": f"{found.branch} (of {', '.join(found.branches)})",
            "prefix": found.prefix or "none",
            "prompt": f"{found.chosen.prompt} (sample {found.chosen.sample}, seed {cell.seed})",
        },
        "same": len({each.tokens for each in found.readings}) == 1,
        "layers": n_layers,
        "heads": n_heads,
        "parts": parts,
        "steered": "prefix" if layout.l_pre else "prompt",
        "masses": list(MASSES),
        "arms": arms,
        "differences": {name: _plain(grid) for name, grid in found.differences.items()},
        "runSteps": found.steps,
        "noControl": found.no_control,
        "study": {
            name: {
                "about": each.about,
                "unit": each.unit,
                "mean": _plain(each.values),
                "low": _plain(each.low),
                "high": _plain(each.high),
            }
            for name, each in heads.items()
        },
        "bits": bits,
        "floor": FLOOR,
        "precision": precision(bits),
        "arrays": packed.index,
        "packed": packed.data,
    }


def _plain(values: np.ndarray) -> Any:
    """An array as lists with seven digits; None where there is no finite number."""

    def number(value: float) -> float | None:
        return float(f"{value:.7g}") if math.isfinite(value) else None

    if values.ndim == 1:
        return [number(float(value)) for value in values]
    return [_plain(row) for row in values]


__all__ = ["MODULE", "STYLE", "View", "view"]
