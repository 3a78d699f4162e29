"""What the scripts of `analyses/` share: the items, tables, claims and numbers of the paper."""

from pathlib import Path

ANALYSES = Path(__file__).resolve().parents[1]
FIGURES = ANALYSES.parent / "figures"
"""What came out of the analyses, a folder for each of theirs."""
