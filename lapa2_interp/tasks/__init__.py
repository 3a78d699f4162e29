"""Tasks: attributes, their prefixes and prompts.

Example:
    >>> from lapa2_interp import tasks
    >>> tasks.read_task("sentiment").prefix("positive")
    'Very positive:'
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
