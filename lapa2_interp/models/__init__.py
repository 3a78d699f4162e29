"""Models: loaded by name, described, and shown to take edits of their attention scores."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
