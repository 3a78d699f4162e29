"""The bias on attention scores inside a network, and the record of attention."""

from typing import TYPE_CHECKING

from lapa2_interp._util.lazy import lazy_names

if TYPE_CHECKING:
    from lapa2_interp.attention.hooked import augmented
    from lapa2_interp.attention.recorder import Recorder
    from lapa2_interp.attention.soft_arguments import soft_inputs
    from lapa2_interp.attention.tables import (
        fit_table,
        head_table,
        local_ratio,
        pooled,
        prefix_token_table,
        step_table,
    )

__all__ = [
    "Recorder",
    "augmented",
    "fit_table",
    "head_table",
    "local_ratio",
    "pooled",
    "prefix_token_table",
    "soft_inputs",
    "step_table",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "hooked": "augmented",
        "recorder": "Recorder",
        "soft_arguments": "soft_inputs",
        "tables": "fit_table head_table local_ratio pooled prefix_token_table step_table",
    },
)
