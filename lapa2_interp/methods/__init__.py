"""Decoding methods, one file for each family; `base` defines the interface of a method.

Example:
    >>> from lapa2_interp import methods
    >>> methods.get("air-decoding", omega=60.0).omega
    60.0
"""

from typing import TYPE_CHECKING

from lapa2_interp._util.lazy import lazy_names

if TYPE_CHECKING:
    from lapa2_interp.methods.base import (
        FLOOR,
        BatchStart,
        Branch,
        LogLikelihoods,
        LogProbs,
        Method,
        MethodContext,
        Passes,
        Prepared,
        SoftPrefixKey,
        State,
        attribute_prefix,
        check_branches,
        contrast_branches,
        nucleus,
    )
    from lapa2_interp.methods.registry import (
        assign_augmentations,
        find_class,
        get,
        get_for_task,
        known_methods,
        load_task,
        method_name,
    )

__all__ = [
    "FLOOR",
    "BatchStart",
    "Branch",
    "LogLikelihoods",
    "LogProbs",
    "Method",
    "MethodContext",
    "Passes",
    "Prepared",
    "SoftPrefixKey",
    "State",
    "assign_augmentations",
    "attribute_prefix",
    "check_branches",
    "contrast_branches",
    "find_class",
    "get",
    "get_for_task",
    "known_methods",
    "load_task",
    "method_name",
    "nucleus",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "base": (
            "FLOOR BatchStart Branch LogLikelihoods LogProbs Method MethodContext Passes "
            "Prepared SoftPrefixKey State attribute_prefix check_branches contrast_branches nucleus"
        ),
        "registry": (
            "assign_augmentations find_class get get_for_task known_methods load_task method_name"
        ),
    },
)
