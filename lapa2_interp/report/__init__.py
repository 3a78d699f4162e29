"""The page of a run, its viewer, and how a chat fades."""

from typing import TYPE_CHECKING

from lapa2_interp._util.lazy import lazy_names

if TYPE_CHECKING:
    from lapa2_interp.report.fading_chat import chat_fade
    from lapa2_interp.report.run_page import write_report
    from lapa2_interp.report.viewer import view

__all__ = [
    "chat_fade",
    "view",
    "write_report",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "fading_chat": "chat_fade",
        "run_page": "write_report",
        "viewer": "view",
    },
)
