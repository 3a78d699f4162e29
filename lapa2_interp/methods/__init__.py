"""Decoding methods, one file for each family; `base` defines the interface of a method.

Example:
    >>> from lapa2_interp import methods
    >>> methods.get("air-decoding", omega=60.0).omega
    60.0
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
