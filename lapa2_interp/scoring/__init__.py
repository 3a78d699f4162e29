"""From texts to numbers: scorers, their cache, and tables of scores."""

from typing import TYPE_CHECKING

from lapa2_interp._util.lazy import lazy_names

if TYPE_CHECKING:
    from lapa2_interp.scoring.named import Options, score_by
    from lapa2_interp.scoring.scorer import Cache, Item, Scorer, Skipped, chosen_scorers, run_scorer
    from lapa2_interp.scoring.tables import score_table

__all__ = [
    "Cache",
    "Item",
    "Options",
    "Scorer",
    "Skipped",
    "chosen_scorers",
    "run_scorer",
    "score_by",
    "score_table",
]
__getattr__, __dir__ = lazy_names(__name__)
