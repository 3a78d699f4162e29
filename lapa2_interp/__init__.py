"""lapa2_interp: the LaPA2 length-aware attention bias on TransformerLens models, applied, recorded
    and tested.

The names below are the whole everyday surface. Each is imported from its module on first use, so
that `import lapa2_interp` loads neither torch nor transformers.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if "OMP_WAIT_POLICY" not in os.environ:
    # Threads of PyTorch that wait for each other keep their core busy for a while. Beside another
    # process that needs the cores, this makes both many times slower (docs/using.md, "Speed on a
    # CPU"). So they wait for a shorter while. It is read when torch is first imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_HOMES = {
    "Augmentation": "augmentation",
    "Cell": "cell",
    "Lapa2Error": "errors",
    "Layout": "layout",
    "Run": "runs.read",
    "TransformersModel": "loaded",
    "augmented": "attention.hooked",
    "find_prefix": "soft_prefix",
    "generate": "runs.generate",
    "head_table": "trace.tables",
    "load_model": "models",
    "load_run": "runs.read",
    "load_task": "methods",
    "load_tokenizer": "models",
    "local_ratio": "trace.tables",
    "method": "methods",
    "model_card": "loaded",
    "pooled": "trace.tables",
    "prefix_token_table": "trace.tables",
    "probe": "attention.liveness",
    "soft_inputs": "attention.cache",
    "step_table": "trace.tables",
    "teacher_forced": "decoding.teacher_forcing",
    "view": "viewer",
}
_OTHER_NAMES = {"method": "get"}
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
    from lapa2_interp.attention.cache import soft_inputs
    from lapa2_interp.attention.hooked import augmented
    from lapa2_interp.attention.liveness import probe
    from lapa2_interp.augmentation import Augmentation
    from lapa2_interp.cell import Cell
    from lapa2_interp.decoding.teacher_forcing import teacher_forced
    from lapa2_interp.errors import Lapa2Error
    from lapa2_interp.layout import Layout
    from lapa2_interp.loaded import TransformersModel, model_card
    from lapa2_interp.methods import get as method
    from lapa2_interp.methods import load_task
    from lapa2_interp.models import load_model, load_tokenizer
    from lapa2_interp.runs.generate import generate
    from lapa2_interp.runs.read import Run, load_run
    from lapa2_interp.soft_prefix import find_prefix
    from lapa2_interp.trace.tables import (
        head_table,
        local_ratio,
        pooled,
        prefix_token_table,
        step_table,
    )
    from lapa2_interp.viewer import view


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_HOMES[name]}")
    return getattr(module, _OTHER_NAMES.get(name, name))


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
