"""From texts to numbers: scorers, their cache, and tables of scores.

Example:
    >>> from lapa2_interp import scoring
    >>> scorer = scoring.make_scorer("accuracy", "linear", scoring.ScorerOptions(task="sentiment"))
    >>> texts = [scoring.TextItem("The lake is lovely.", "The lake", "positive")]
    >>> bool(scoring.run_scorer(scorer, texts)["positive"].item() > 0.5)
    True
"""

from typing import TYPE_CHECKING

from lapa2_interp._util.lazy import lazy_names

if TYPE_CHECKING:
    from lapa2_interp.scoring.registry import ScorerOptions, make_scorer, score_texts
    from lapa2_interp.scoring.scorer import (
        ScoreCache,
        Scorer,
        SkippedText,
        TextItem,
        expand_scorers,
        run_scorer,
    )
    from lapa2_interp.scoring.tables import score_table

__all__ = [
    "ScoreCache",
    "Scorer",
    "ScorerOptions",
    "SkippedText",
    "TextItem",
    "expand_scorers",
    "make_scorer",
    "run_scorer",
    "score_table",
    "score_texts",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "registry": "ScorerOptions make_scorer score_texts",
        "scorer": "ScoreCache Scorer SkippedText TextItem expand_scorers run_scorer",
        "tables": "score_table",
    },
)
