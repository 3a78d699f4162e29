"""Runs: made in memory or by a sweep, stored, read and scored."""

from typing import TYPE_CHECKING

from lapa2_interp._util.lazy import lazy_names

if TYPE_CHECKING:
    from lapa2_interp.runs.generate import make_cells
    from lapa2_interp.runs.grid import load_grid
    from lapa2_interp.runs.logits_processor import MethodProcessor
    from lapa2_interp.runs.run import Run, load_run

__all__ = ["MethodProcessor", "Run", "load_grid", "load_run", "make_cells"]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "generate": "make_cells",
        "grid": "load_grid",
        "logits_processor": "MethodProcessor",
        "run": "Run load_run",
    },
)
