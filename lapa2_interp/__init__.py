"""lapa2_interp: the LaPA2 length-aware attention bias on TransformerLens models, applied, recorded and tested.

The names below are the whole everyday surface; each is imported from its module on first use, so `import lapa2_interp`
loads neither torch nor transformers. (`layout` stays in its module of the same name.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Augmentation": "augmentation",
    "Lapa2Error": "errors",
    "augmented": "attention.hooked",
    "generate": "decoding.loop",
    "load_model": "models",
    "load_run": "runs.sweep",
    "load_task": "methods",
    "load_tokenizer": "models",
    "model_card": "models",
    "probe": "attention.liveness",
}
__all__ = [
    "Augmentation",
    "Lapa2Error",
    "__version__",
    "augmented",
    "generate",
    "load_model",
    "load_run",
    "load_task",
    "load_tokenizer",
    "model_card",
    "probe",
]

if TYPE_CHECKING:
    from lapa2_interp.attention.hooked import augmented
    from lapa2_interp.attention.liveness import probe
    from lapa2_interp.augmentation import Augmentation
    from lapa2_interp.decoding.loop import generate
    from lapa2_interp.errors import Lapa2Error
    from lapa2_interp.methods import load_task
    from lapa2_interp.model_card import model_card
    from lapa2_interp.models import load_model, load_tokenizer
    from lapa2_interp.runs.sweep import load_run


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
