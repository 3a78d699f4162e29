"""Tasks: attributes, their prefixes and prompts.

Example:
    >>> from lapa2_interp import tasks
    >>> tasks.read_task("sentiment").prefix("positive")
    'Very positive:'
"""

from typing import TYPE_CHECKING

from lapa2_interp._util.lazy import lazy_names

if TYPE_CHECKING:
    from lapa2_interp.tasks.prompts import as_prompts, read_prompts
    from lapa2_interp.tasks.task import Prompts, Task, extra_prompts, read_task

__all__ = ["Prompts", "Task", "as_prompts", "extra_prompts", "read_prompts", "read_task"]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "prompts": "as_prompts read_prompts",
        "task": "Prompts Task extra_prompts read_task",
    },
)
