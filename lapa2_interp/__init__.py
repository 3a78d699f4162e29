"""lapa2_interp: the LaPA2 length-aware attention bias on TransformerLens models, applied, recorded
    and tested.

The names below are the whole everyday surface. Each is imported from its module on first use, so
that `import lapa2_interp` loads neither torch nor transformers.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lapa2_interp._util.lazy import lazy_names
from lapa2_interp._util.version import __version__ as __version__

if "OMP_WAIT_POLICY" not in os.environ:
    # Threads of PyTorch that wait for each other keep their core busy for a while. Beside another
    # process that needs the cores, this makes both many times slower (docs/using.md, "Speed on a
    # CPU"). So they wait for a shorter while. It is read when torch is first imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__all__ = [
    "Augmentation",
    "Cell",
    "Lapa2Error",
    "Layout",
    "Run",
    "TransformersModel",
    "__version__",
    "augmented",
    "find_prefix",
    "generate",
    "head_table",
    "load_model",
    "load_run",
    "load_task",
    "load_tokenizer",
    "local_ratio",
    "method",
    "model_card",
    "pooled",
    "prefix_token_table",
    "probe",
    "soft_inputs",
    "step_table",
    "teacher_forced",
    "view",
]

if TYPE_CHECKING:
    from lapa2_interp._util.errors import Lapa2Error
    from lapa2_interp.attention.cache import soft_inputs
    from lapa2_interp.attention.hooked import augmented
    from lapa2_interp.attention.tables import (
        head_table,
        local_ratio,
        pooled,
        prefix_token_table,
        step_table,
    )
    from lapa2_interp.bias.augmentation import Augmentation
    from lapa2_interp.bias.layout import Layout
    from lapa2_interp.generation.cell import Cell
    from lapa2_interp.generation.teacher_forcing import teacher_forced
    from lapa2_interp.methods.registry import get as method
    from lapa2_interp.methods.registry import load_task
    from lapa2_interp.models.card import TransformersModel, model_card
    from lapa2_interp.models.liveness import probe
    from lapa2_interp.models.load import load_model, load_tokenizer
    from lapa2_interp.prefixes.soft_prefix import find_prefix
    from lapa2_interp.report.viewer import view
    from lapa2_interp.runs.generate import generate
    from lapa2_interp.runs.run import Run, load_run

__getattr__, __dir__ = lazy_names(__name__)
