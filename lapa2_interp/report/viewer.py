"""The viewer: the attention of every head at every step of one text of a run.

The viewer is one HTML file that loads nothing.

    from lapa2_interp import load_run
    from lapa2_interp.report import view

    shown = view(load_run("results/run"))     # in a notebook this is the viewer itself
    shown.save("view.html")

Page and notebook widget share one ES module, `view.js`, in the form that anywidget takes: `render`
reads a model's `data`, and reads and writes its `head` and `token`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from markupsafe import escape

from lapa2_interp._util.settings import takes
from lapa2_interp.bias.augmentation import active_augmentations
from lapa2_interp.bias.tokens import token_texts
from lapa2_interp.errors import TraceError
from lapa2_interp.files import result_folder, write_text
from lapa2_interp.methods.registry import find_class
from lapa2_interp.page import embedded, template, write_page
from lapa2_interp.report.encoding import FLOOR, Bits, encode_arrays, quantisation_error, quantise
from lapa2_interp.report.settings import ViewSettings
from lapa2_interp.report.viewed_text import (
    HeadValues,
    ViewedText,
    load_head_values,
    recompute_attention,
    select_text,
)
from lapa2_interp.runs.run import Run, load_run

HERE = Path(__file__).parent
MODULE, STYLE = HERE / "view.js", HERE / "view.css"
"""The ES module and its style sheet: `_esm` and `_css` of an anywidget."""
SPACE = """---
title: {title}
emoji: 🔍
colorFrom: blue
colorTo: gray
sdk: static
app_file: index.html
tags:
- attention-steering
- lapa2
---

Where every head attends, at every step of one text, without and with the bias. One page, made with
`lapa2 view`, that loads nothing.
"""
"""README.md of a static Space."""
PAGE_BYTES = 5_000_000
"""Largest page with 16-bit numbers, in bytes; larger pages have 8-bit numbers."""


@dataclass(eq=False)
class View:
    """A text of a run in the viewer. In a notebook the object is shown as the viewer.

    With the extra `widget`, the viewer is a widget: a head and a token that are chosen in it are
    `head` and `token` here, and those set here are shown in it.

    Attributes:
        text: The text and its attention.
        heads: Values of every head from a study, by name.
        bits: Bits of a stored number; by default 16, or 8 if the page would exceed `PAGE_BYTES`.
    """

    text: ViewedText = field(repr=False)
    heads: Mapping[str, HeadValues] = field(default_factory=dict, repr=False)
    bits: Bits | None = None
    _chosen: Any = field(
        default_factory=lambda: SimpleNamespace(head=None, token=0), init=False, repr=False
    )  # or the widget, once it is shown

    @property
    def head(self) -> tuple[int, int] | None:
        """The chosen head as (layer, head), from 0; None is the mean of all heads."""
        return self._chosen.head

    @head.setter
    def head(self, chosen: tuple[int, int] | None) -> None:
        layers, heads = self.text.arms[0].masses.shape[2:]
        if chosen is not None and not (0 <= chosen[0] < layers and 0 <= chosen[1] < heads):
            raise TraceError(
                f"head must be None or (layer, head) below ({layers}, {heads}), found {chosen}"
            )
        self._chosen.head = chosen and (int(chosen[0]), int(chosen[1]))

    @property
    def token(self) -> int:
        """The chosen token of the text, from 0; that number is also the step that predicts it."""
        return self._chosen.token

    @token.setter
    def token(self, chosen: int) -> None:
        steps = max(len(arm.tokens) for arm in self.text.arms)
        if not 0 <= chosen < steps:
            raise TraceError(f"token must be from 0 to {steps - 1}, found {chosen}")
        self._chosen.token = int(chosen)

    @cached_property
    def data(self) -> dict[str, Any]:
        """The module's data as plain JSON: facts, texts, and the encoded arrays."""
        if self.bits is not None:
            return _view_data(self.text, self.heads, self.bits)
        fine = _view_data(self.text, self.heads, 16)
        fits = len(json.dumps(fine)) < 0.98 * PAGE_BYTES
        return fine if fits else _view_data(self.text, self.heads, 8)

    @property
    def html(self) -> str:
        """The page as one string. Equal numbers and choices give equal pages."""
        return template("view.html.j2", HERE).render(
            title=self.data["title"],
            style=STYLE.read_text("utf-8"),
            module=MODULE.read_text("utf-8"),
            values=embedded({"data": self.data, "head": self.head, "token": self.token}),
        )

    def save(self, file: str | Path) -> Path:
        """Write the page, and replace an existing one.

        Raises:
            RunError: The name does not end in .html, or the file cannot be written.
        """
        return write_page(Path(file), lambda: self.html)

    def save_space(self, folder: str | Path) -> Path:
        """Write the page as a static Space of the Hugging Face hub: index.html, and a README.md
        whose front matter the hub reads. HfApi's `upload_folder` with repo_type="space" uploads it.

        Args:
            folder: A new folder.

        Raises:
            RunError: As `files.result_folder`.
        """
        title = json.dumps(str(self.data["title"])[:80])
        with result_folder(Path(folder)) as fresh:
            write_text(fresh / "index.html", self.html)
            write_text(fresh / "README.md", SPACE.format(title=title))
        return Path(folder)

    @property
    def frame(self) -> str:
        """The page as HTML, in a frame that can neither read nor change what is around it. A
        notebook that is only read shows it, as in `IPython.display.HTML(shown.frame)`."""
        return (
            '<div><iframe title="Attention of a text, head by head" sandbox="allow-scripts'
            ' allow-downloads" style="width:100%;height:56rem;border:0"'
            f' srcdoc="{escape(self.html)}"></iframe></div>'
        )

    def _widget(self) -> Any:
        """The viewer as an anywidget, the same at every call; None where anywidget is missing."""
        try:
            import anywidget
            import traitlets
        except ImportError:
            return None
        if not isinstance(self._chosen, anywidget.AnyWidget):

            class Viewer(anywidget.AnyWidget):
                _esm, _css = MODULE, STYLE
                data = traitlets.Dict().tag(sync=True)
                head = traitlets.Tuple(allow_none=True).tag(sync=True)
                token = traitlets.Int().tag(sync=True)

            self._chosen = Viewer(data=self.data, head=self.head, token=self.token)
        return self._chosen

    def summary(self) -> str:
        """How far the pass is from the recorded attention, a line an arm."""
        return "\n".join(
            f"{text.arm}: {len(text.tokens)} tokens read again, "
            + (
                "not recorded"
                if text.off is None
                else f"{text.off:.1e} from the recorded attention"
            )
            for text in self.text.arms
        )

    def _repr_mimebundle_(self, **selected: Any) -> Any:
        """The widget; or the frame."""
        if (widget := self._widget()) is not None:
            return widget._repr_mimebundle_(**selected)
        return {"text/html": self.frame, "text/plain": repr(self)}


@takes(ViewSettings)
def view(settings: ViewSettings) -> View:
    """`lapa2 view` in Python; `ViewSettings` says what it does and takes.

    Raises:
        MethodError: The run's method is code that is not loaded, and not allowed.
        TraceError: There is no such text, cells of several kinds are selected, or the attention
            cannot be computed as in the run.
        CircuitError: The folder is not a study of this model and task.
        RunError: There is no such column or run, or a cell is damaged.
    """
    loaded = settings.run if isinstance(settings.run, Run) else load_run(settings.run)
    selected = select_text(
        loaded,
        settings.only or {},
        settings.attribute,
        settings.prompt,
        settings.sample,
        settings.arm,
    )
    for cell in selected.cells.values():
        find_class(cell.method, settings.allow_code)
    text = recompute_attention(
        loaded,
        selected,
        settings.branch,
        settings.steps,
        settings.same_text,
        settings.model,
        settings.device,
    )
    heads = {} if settings.circuits is None else load_head_values(Path(settings.circuits), text)
    page = View(text, heads, settings.bits)
    if settings.out is not None:
        page.save(settings.out)
    return page


def _view_data(text: ViewedText, heads: Mapping[str, HeadValues], bits: Bits) -> dict[str, Any]:
    """`View.data` with this number of bits."""
    layout, cell = text.layout, next(iter(text.selected.cells.values()))
    # Arrays and facts of each arm.
    arrays, arms = {}, []
    start = [f"soft {i + 1}" for i in range(layout.soft)]
    for i, arm in enumerate(text.arms):
        codes = [quantise(step, bits).ravel() for step in arm.patterns]
        arrays[f"pattern{i}"] = np.concatenate(codes)
        arrays[f"masses{i}"] = arm.masses.astype(np.float32)
        rules = [rule.to_json() for rule in active_augmentations(arm.augmentation)]
        arms.append(
            {
                "name": arm.arm,
                "rule": " + ".join(rules) or "none",
                "keys": [*start, *token_texts(text.tokenizer, "", [*layout.ids, *arm.tokens])],
                "steps": len(arm.tokens),
                "end": arm.end,
                "control": arm.control,
                "off": arm.off,
                "run": arm.of_run,
            }
        )
    # The part of every key, and the page's data.
    parts = ["prefix"] * layout.soft + ["bos"] * layout.n_bos + ["prompt"] * layout.n_before
    parts += ["prefix"] * (0 if layout.soft else layout.l_pre) + ["prompt"] * layout.l_pro
    index, packed = encode_arrays(arrays)
    n_layers, n_heads = text.arms[0].masses.shape[2:]
    prompt, sample = text.selected.prompt, text.selected.sample
    data = {
        "title": f"{cell.model}, {cell.task.name}, {cell.attribute}, {cell.method}: {prompt}",
        "facts": {
            "model": f"{text.card.name} ({text.card.dtype})",
            "weights": text.card.weights,
            "task": f"{cell.task.name}, {cell.attribute}",
            "method": cell.method + (f" ({cell.variant})" if cell.variant else ""),
            "branch": f"{text.branch} (of {', '.join(text.branches)})",
            "prefix": text.prefix or "none",
            "prompt": f"{prompt} (sample {sample}, seed {cell.seed})",
        },
        "same": len({arm.tokens for arm in text.arms}) == 1,
        "layers": n_layers,
        "heads": n_heads,
        "parts": parts,
        "steered": "prefix" if layout.l_pre else "prompt",
        "masses": list(text.masses),
        "arms": arms,
        "differences": text.differences,
        "runSteps": text.steps,
        "noControl": text.no_control,
        "study": {name: vars(head_values) for name, head_values in heads.items()},
    }
    return _plain(data) | {
        "bits": bits,
        "floor": FLOOR,
        "precision": quantisation_error(bits),
        "arrays": index,
        "packed": packed,
    }


def _plain(value: Any) -> Any:
    """Plain JSON: arrays as lists, floats with seven digits; None for floats that are not
    finite."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


__all__ = ["MODULE", "STYLE", "View", "view"]
