"""Decoding methods, one file each; `base` says what a method states and may ask."""

from typing import TYPE_CHECKING

from lapa2_interp._util.lazy import lazy_names

if TYPE_CHECKING:
    from lapa2_interp.methods.base import (
        FLOOR,
        Branch,
        Intervention,
        LogLikelihoods,
        LogProbs,
        Method,
        MethodContext,
        Prepared,
        Soft,
        Start,
        State,
        attribute_prefix,
        checked,
        contrast,
        nucleus,
    )
    from lapa2_interp.methods.registry import (
        assign,
        find,
        for_task,
        get,
        load_task,
        name_of,
        registry,
    )

__all__ = [
    "FLOOR",
    "Branch",
    "Intervention",
    "LogLikelihoods",
    "LogProbs",
    "Method",
    "MethodContext",
    "Prepared",
    "Soft",
    "Start",
    "State",
    "assign",
    "attribute_prefix",
    "checked",
    "contrast",
    "find",
    "for_task",
    "get",
    "load_task",
    "name_of",
    "nucleus",
    "registry",
]
__getattr__, __dir__ = lazy_names(__name__)
