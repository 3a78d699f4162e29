"""Circuits: the heads that carry the control.

Distances between the branches' predictions, the control lost when heads cannot see the prefix, and
the heads' direct effects on the logits.

Example:
    >>> from lapa2_interp import circuits, load_model
    >>> model = load_model("planted")
    >>> texts = circuits.ContrastSet.of(model, "sentiment", tokens=4)
    >>> table = circuits.knock_out(model, texts, over="head")
    >>> drawing = table.plot()
    >>> table.best(1)
    ((1, 2),)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
