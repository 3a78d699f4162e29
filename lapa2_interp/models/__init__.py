"""Models: loaded by name, described, and shown to take edits of their attention scores."""

from typing import TYPE_CHECKING

from lapa2_interp._util.lazy import lazy_names

if TYPE_CHECKING:
    from lapa2_interp.models.card import identify
    from lapa2_interp.models.facts import TransformersModel, facts_of
    from lapa2_interp.models.liveness import probe
    from lapa2_interp.models.load import load_model, load_tokenizer

__all__ = [
    "TransformersModel",
    "facts_of",
    "identify",
    "load_model",
    "load_tokenizer",
    "probe",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "card": "identify",
        "facts": "TransformersModel facts_of",
        "liveness": "probe",
        "load": "load_model load_tokenizer",
    },
)
