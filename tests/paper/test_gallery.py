"""The numbers that docs/results.md and the README quote are those of the committed tables."""

import functools
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "Ten lines to take home": (
        "figures/quick/tables/*.csv",
        "figures/steering/steering.*.csv",
        "figures/fading/*/*.csv",
        "figures/bases/**/*.csv",
        "figures/gemma/*.csv",
        "figures/undecided/*.csv",
    ),
    "Scale quick": (
        "figures/quick/tables/*.csv",
        "figures/steering/steering.curves.csv",
        "figures/propositions/*.csv",
        "figures/undecided/*.csv",
    ),
    "Which heads carry the control?": (
        "figures/circuits/**/*.csv",
        "figures/circuits/*/report.html",
    ),
    "Why does control fade?": ("figures/fading/*/*.csv",),
    "Ways to steer attention, at their defaults": ("figures/frontier/*.csv",),
    "Does other steering control more than LaPA² at equal perplexity?": (
        "figures/steering/steering.*.csv",
    ),
    "Does an instruction hold in a chat?": ("figures/chat.csv",),
    "Do tasks share the heads that steer?": ("figures/shared_heads/transfer.csv",),
    "Does the bias in chosen heads improve other methods?": ("figures/bases/**/*.csv",),
    "Does it hold in a second family?": ("figures/gemma/*.csv",),
    "What does `lapa2 steer` find?": ("figures/steer/*/*.csv",),
}
"""Sections of docs/results.md whose numbers with intervals are checked, and where they come from."""
NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)"
INTERVAL = re.compile(rf"({NUMBER})([^\d\[\]]{{0,60}}?)\[({NUMBER}), ({NUMBER})\]")
SCALES = (1, 100, 1000)
"""Docs say shares in percent, and nats in thousandths."""


def quoted(text):
    """(the words, value, low, high) of every number with an interval; each with its decimals."""
    for match in INTERVAL.finditer(" ".join(text.split())):
        numbers = [
            text_of_number.replace(",", "").rstrip(".") for text_of_number in match.group(1, 3, 4)
        ]
        yield match[0], [(float(number), len(number.partition(".")[2])) for number in numbers]


@functools.cache
def known(section):
    """Every (value, low, high) of a section's sources, [row three]."""
    rows = []
    for pattern in SOURCES[section]:
        for file in sorted(ROOT.glob(pattern)):
            if file.suffix == ".csv":
                table = pd.read_csv(file)
                names = list(table)
                for low in (name for name in names if name.endswith("low")):
                    value = low.removesuffix("_low") if low.endswith("_low") else ""
                    if value not in table or not pd.api.types.is_numeric_dtype(table[value]):
                        value = names[names.index(low) - 1]
                    columns = [value, low, low.removesuffix("low") + "high"]
                    numbers = table[columns].apply(pd.to_numeric, errors="coerce")
                    rows.append(numbers.dropna().to_numpy(float))
            else:
                pairs = quoted(file.read_text("utf-8"))
                rows.append(np.array([[number for number, _ in three] for _, three in pairs]))
    return np.concatenate([part.reshape(-1, 3) for part in rows])


def is_known(numbers, rows):
    """True if a row rounds to these; a decrease may be given without its sign."""
    values = np.array([value for value, _ in numbers])
    half = np.array([0.5 * 10.0**-digits for _, digits in numbers]) * (1 + 1e-6)
    for scale in SCALES:
        for candidate in (rows * scale, -rows[:, [0, 2, 1]] * scale, rows * scale * [-1, 1, 1]):
            if (np.abs(candidate - values) <= half + 1e-9).all(axis=1).any():
                return True
    return False


def section(title):
    text = (ROOT / "docs" / "results.md").read_text("utf-8")
    section = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", text, re.S | re.M)
    assert section, f"docs/results.md has no section {title}"
    return section[1]


@pytest.mark.parametrize("title", SOURCES)
def test_numbers_with_intervals_are_those_of_the_tables(title):
    rows, asked = known(title), list(quoted(section(title)))
    assert asked
    wrong = [words for words, numbers in asked if not is_known(numbers, rows)]
    assert not wrong


def test_the_readmes_numbers_are_those_of_the_tables():
    asked = list(quoted((ROOT / "README.md").read_text("utf-8")))
    assert len(asked) > 5
    rows = known("Ten lines to take home")
    assert not [words for words, numbers in asked if not is_known(numbers, rows)]


def test_a_wrong_number_is_found():
    """Of every third number, moved by five units of its last digit, inside the same interval,
    nearly none is anywhere in the tables."""
    for title in SOURCES:
        asked = [numbers for _, numbers in quoted(section(title))][::3]
        moved = [[(value + 5 * 10.0**-digits, digits), *ends] for (value, digits), *ends in asked]
        assert np.mean([is_known(numbers, known(title)) for numbers in moved]) < 0.2


def test_verdicts_by_kind_are_those_of_the_table():
    """A test that stands in two items counts once."""
    table = pd.read_csv(ROOT / "figures/quick/tables/verdicts.csv", dtype={"compared": str})
    table = table[table["whose"] == "paper"]
    table = table[~table["compared"].duplicated() | table["compared"].isna()]
    metrics = {
        "attention on the prefix": "prefix attention",
        "share of the nearest keys": "local ratio",
        "slope of attention beyond 512 keys": "slope",
        "accuracy": "acc",
        "toxicity": "tox",
        "perplexity": "ppl",
    }
    verdicts = ("as in the paper", "against the paper", "no difference", "inconclusive")
    text = section("Scale quick")
    for kind, metric in metrics.items():
        counted = table.loc[table["metric"] == metric, "verdict"].value_counts()
        counts = " | ".join(str(counted.get(verdict, 0)) for verdict in verdicts)
        assert f"| {kind} | {counts} |" in text
    assert set(table["metric"]) == set(metrics.values())
