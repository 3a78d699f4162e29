"""The page of a run, its viewer, and how a chat fades."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
