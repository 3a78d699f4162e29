"""The items in the order of a report, and where their pages and grids are."""

from __future__ import annotations

from pathlib import Path

from analyses.lab import ANALYSES

ITEM_ORDER = (
    "sent_topic",
    "half",
    "detox",
    "prefix_types",
    "scaling",
    "layers",
    "components",
    "prefix_preadd_components",
    "hard_prefix_robustness",
    "decay",
    "dilution",
    "alpha",
    "augmentation",
    "augmentation_large",
    "local_attn",
    "eval",
    "cases",
)
"""Items of the paper in the order of the page; other items follow by name."""
OURS = {
    "heads": "heads/analyse.py",
    "related": "bases/related.py",
    "frontier": "frontier/analyse.py",
    "steering": "steering/analyse.py",
    "bases": "bases/analyse.py",
    "long": "long/analyse.py",
    "deep": "long/deep.py",
}
"""Items of ours, with their pages in analyses/; one whose grid lacks a file is left out."""


def page_of(item: str) -> Path:
    """The script that makes an item."""
    return ANALYSES / OURS.get(item, f"paper/{item}.py")


def grid_of(item: str) -> str:
    """The grid of an item of its own name: a built-in one, or for items of ours a file."""
    return str(page_of(item).with_name(f"{item}.toml")) if item in OURS else f"quick/{item}"
