"""The numbers of the paper's result tables, and its names of models, metrics and items."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from lapa2_interp.errors import RunError
from lapa2_interp.methods.registry import known_methods

PAPER_MODELS = {
    "gpt2-medium": "gpt2-medium",
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "EleutherAI/pythia-12b": "pythia-12b",
    "meta-llama/Llama-2-13b-hf": "llama-2-13b",
}
"""Names of the paper's models: for loading, and in its numbers."""

TABLE_OF_ITEM = {
    "prefix_preadd_components": "components",
    "hard_prefix_robustness": "hard_prefix",
    "decay": "sent_topic",
    "alpha": "scaling",
}
"""Tables of the paper with the numbers of items of another name."""
PAPER_METRICS = {
    "accuracy": ("acc", 100.0), "toxicity": ("tox", 100.0), "masked": ("acc masked", 100.0),
    "echo": ("echo %", 100.0), "perplexity": ("ppl", 1.0), "repetition": ("rep %", 100.0),
    "distinct-1": ("dist1", 1.0), "distinct-2": ("dist2", 1.0), "distinct-3": ("dist3", 1.0),
}  # fmt: skip
"""The paper's names of our metrics, and factors to its units: percent, perplexity, shares. If
several scorers give a metric, all but the first are in parentheses: "acc (linear)"."""
BETTER_SIGN = {
    "acc": 1, "tox": -1, "acc masked": 1, "ppl": -1, "rep %": -1,
    "dist1": 1, "dist2": 1, "dist3": 1,
}  # fmt: skip
"""1 if more of a metric is better, -1 if less is; echo is neither."""


@cache
def reported_numbers() -> pd.DataFrame:
    """Every number of the paper's result tables: table, task, model, method, lapa2, length,
    variant, metric, value."""
    file = Path(__file__).parent / "reported_results.csv"
    return pd.read_csv(file, keep_default_na=False).assign(
        value=lambda table: table["value"].astype(float)
    )


@cache
def _rows(table: str) -> list[dict[Hashable, Any]]:
    numbers = reported_numbers()
    return numbers[numbers["table"] == table].to_dict("records")


def paper_number(table: str, **wanted: Any) -> float:
    """One number of the paper; NaN if it has none.

    Args:
        wanted: Columns of `reported_numbers` and their values; methods by our names.

    Raises:
        RunError: Several numbers fit.
    """
    if "method" in wanted:
        wanted["method"] = known_methods()[wanted["method"]].paper_name
    rows = [
        row for row in _rows(table) if all(row[name] == value for name, value in wanted.items())
    ]
    if len(rows) > 1:
        raise RunError(
            f"{len(rows)} numbers of the paper's table {table} fit {wanted}; name more columns"
        )
    return float(rows[0]["value"]) if rows else float("nan")


def paper_place(
    table: str, task: str, method: str, model: str, length: int
) -> tuple[str, int] | None:
    """The paper's model and length to show beside a result: the result's own model, or the first
    of the paper's table; the result's length, or the table's only one. None if there is none."""
    rows = reported_numbers()
    theirs = known_methods()[method].paper_name
    rows = rows[(rows["table"] == table) & (rows["task"] == task) & (rows["method"] == theirs)]
    if not len(rows):
        return None
    named = PAPER_MODELS.get(model, "")
    models, lengths = set(rows["model"]), set(rows["length"].astype(int))
    if length not in lengths and len(lengths) > 1:
        return None
    return (
        named if named in models else str(rows["model"].iloc[0]),
        length if length in lengths else lengths.pop(),
    )
