"""Soft prefixes: values, training, import."""

from typing import TYPE_CHECKING

from lapa2_interp._util.lazy import lazy_names

if TYPE_CHECKING:
    from lapa2_interp.prefixes.soft_prefix import SoftPrefix, find_prefix, load_prefix, save_prefix

__all__ = [
    "SoftPrefix",
    "find_prefix",
    "load_prefix",
    "save_prefix",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "soft_prefix": "SoftPrefix find_prefix load_prefix save_prefix",
    },
)
