"""The LaPA2 length-aware attention bias on TransformerLens models: applied, recorded and tested.

The names below are what the first day needs, in the order of use. Each is imported when it is first
used, so that `import lapa2_interp` loads neither torch nor transformers. The rest has its room:
`models` (load_tokenizer, facts_of, identify, TransformersModel, probe), `attention` (soft_inputs,
Recorder, tables of a trace), `prefixes` (find_prefix, SoftPrefix), `runs` (make_cells, sweep) and
`report` (view).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lapa2_interp._util.lazy import lazy_names
from lapa2_interp._util.version import __version__ as __version__

if "OMP_WAIT_POLICY" not in os.environ:
    # Threads of PyTorch that wait for each other keep their core busy for a while. Beside another
    # process that needs the cores, this makes both many times slower (docs/your-model.md, "Speed on
    # a CPU"). So they wait for a shorter while. It is read when torch is first imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__all__ = [  # noqa: RUF022 (the order of use)
    "load_model",
    "Layout",
    "PaddedRows",
    "Augmentation",
    "recipe",
    "augmented",
    "generate",
    "teacher_forced",
    "load_run",
    "steer",
    "Selection",
    "Cell",
    "Lapa2Error",
    "methods",
    "circuits",
    "scoring",
    "tasks",
    "recipes",
    "plots",
    "theory",
]

if TYPE_CHECKING:
    from lapa2_interp import circuits, methods, plots, scoring, tasks
    from lapa2_interp.attention.hooked import augmented
    from lapa2_interp.bias import recipes, theory
    from lapa2_interp.bias.augmentation import Augmentation
    from lapa2_interp.bias.layout import Layout
    from lapa2_interp.bias.padded_rows import PaddedRows
    from lapa2_interp.bias.recipes import recipe
    from lapa2_interp.circuits.selection import Selection
    from lapa2_interp.errors import Lapa2Error
    from lapa2_interp.generation.cell import Cell
    from lapa2_interp.generation.teacher_forcing import teacher_forced
    from lapa2_interp.models.load import load_model
    from lapa2_interp.report.steer import steer
    from lapa2_interp.runs.generate import generate
    from lapa2_interp.runs.run import load_run

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "errors": "Lapa2Error",
        "attention.hooked": "augmented",
        "bias.augmentation": "Augmentation",
        "bias.layout": "Layout",
        "bias.padded_rows": "PaddedRows",
        "bias.recipes": "recipe",
        "circuits.selection": "Selection",
        "generation.cell": "Cell",
        "generation.teacher_forcing": "teacher_forced",
        "models.load": "load_model",
        "report.steer": "steer",
        "runs.generate": "generate",
        "runs.run": "load_run",
    },
    modules="circuits methods scoring tasks plots bias.recipes bias.theory",
)
