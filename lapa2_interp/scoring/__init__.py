"""From texts to numbers: scorers, their cache, and tables of scores.

Example:
    >>> from lapa2_interp import scoring
    >>> scorer = scoring.make_scorer("accuracy", "linear", scoring.ScorerOptions(task="sentiment"))
    >>> texts = [scoring.TextItem("The lake is lovely.", "The lake", "positive")]
    >>> bool(scoring.run_scorer(scorer, texts)["positive"].item() > 0.5)
    True
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
