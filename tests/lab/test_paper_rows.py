"""Every row of the paper's tables has its counterpart in figures/paper/quick, or its absence is
told in docs/reproducing.md."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "figures" / "paper" / "quick" / "tables"
METHODS = {
    "GPT-2+Prefix": "prefix", "Con-Prefix": "con-prefix", "Air-Decoding": "air-decoding",
    "FreeCtrl": "freectrl", "DATG": "datg", "NegPrompt": "negprompt", "PREADD": "preadd",
    "Palette": "palette",
}  # fmt: skip
ITEMS = {
    "hard_prefix": ("hard_prefix_robustness",),
    "components": ("components", "prefix_preadd_components"),
}
"""Our tables for a table of the paper's, where names differ."""
OF_PREFIXES = [
    ("sentiment", "prefix"), ("sentiment", "con-prefix"), ("sentiment", "air-decoding"),
    ("topic", "prefix"), ("topic", "con-prefix"), ("topic", "air-decoding"),
    ("detox", "negprompt"), ("detox", "preadd"), ("detox", "palette"),
]  # fmt: skip
"""Tasks and methods of Table prefix_types; and topic, whose prefixes are soft."""
ABSENT = {("sentiment", "prefix"): "Pro-Aug for GPT-2+Prefix"}
"""A variant less: what the page says of it."""
HEADING = "## What is not there"


def rows_of(name):
    rows = []
    for item in ITEMS.get(name, (name,)):
        with (TABLES / f"{item}.csv").open(encoding="utf-8", newline="") as opened:
            rows += csv.DictReader(opened)
    return rows


def reported():
    with (ROOT / "analyses" / "lab" / "reported_results.csv").open(encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


@pytest.mark.parametrize("name", sorted({row["table"] for row in reported()}))
def test_every_method_of_a_table_is_there(name):
    """On its task, without and with LaPA2."""
    wanted = {
        (row["task"], METHODS[row["method"]], row["lapa2"] == "True")
        for row in reported()
        if row["table"] == name
    }
    there = {(row["task"], row["method"], row["arm"] != "baseline") for row in rows_of(name)}
    assert wanted - there == set()


@pytest.mark.parametrize("name", ["layers", "scaling", "components", "hard_prefix"])
def test_every_variant_of_a_table_is_there(name):
    """As many arms of a method as the paper has variants."""
    for task, method in {
        (row["task"], row["method"]) for row in reported() if row["table"] == name
    }:
        own = (task, METHODS[method])
        paper = {
            (row["variant"], row["lapa2"])
            for row in reported()
            if row["table"] == name and (row["task"], row["method"]) == (task, method)
        }
        arms = {
            (row["variant"], row["arm"])
            for row in rows_of(name)
            if (row["task"], row["method"]) == own
        }
        assert len(arms) >= len(paper) - (name == "components" and own in ABSENT), own


def test_the_prefixes_of_every_method_are_there():
    there = {(row["task"], row["method"]) for row in rows_of("prefix_types")}
    assert set(OF_PREFIXES) - there == set()


def test_texts_of_every_method_are_there():
    """Tables case_sentiment_topic and case_detox: a text without and one with LaPA2."""
    for task, method in OF_PREFIXES:
        arms = [r["arm"] for r in rows_of("cases") if (r["task"], r["method"]) == (task, method)]
        assert len(arms) == 2, (task, method)
        assert arms[0] == "baseline" != arms[1]


def test_what_is_not_there_is_told():
    """Models and lengths of the paper that no committed table has."""
    page = (ROOT / "docs" / "reproducing.md").read_text("utf-8")
    section = re.search(rf"^{HEADING}$(.*?)(?=^## |\Z)", page, re.M | re.S)[1]
    models = {
        "gpt2-medium": "GPT-2 Medium",
        "llama-2-7b": "LLaMA-2 7B",
        "llama-2-13b": "LLaMA-2 13B",
        "pythia-12b": "Pythia 12B",
    }
    for name in {row["model"] for row in reported()}:
        assert models[name] in section, name
    assert all(words in section for words in ABSENT.values())
    lengths = {int(row["length"]) for row in reported() if row["length"]}
    longest = max(int(row["length"]) for row in rows_of("sent_topic"))
    for length in lengths:
        assert length <= longest or str(length) in section, length
