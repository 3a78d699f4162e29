"""What LaPA2 costs: every committed perplexity with the bias, as a multiple of that without it.

    python analyses/paper/perplexity_ratios.py

Reads tables of figures/ and writes figures/paper/perplexity.csv. Columns: study, task, method,
length, place of the bias, judge (the model that reads), of (the whole text, or the continuation
given its prompt), prompts, ratio, low, high. Ratios of continuations are of geometric means, paired
on prompts. Those of whole texts are 1 + the paired difference of means over the mean without the
bias, and so are the ends of their intervals.
"""

from __future__ import annotations

import pandas as pd

from analyses.lab import FIGURES
from lapa2_interp.files import write_text
from lapa2_interp.table_formats import as_csv

WRITER = "smollm2-135m"
WHOLE, CONTINUATION = "whole text", "continuation"
LONGEST = {"sentiment": 256, "topic": 128, "detox": 128}
PLACES = {
    "all heads 0.5": "all heads",
    "chosen heads 0.8": "24 heads",
    "chosen heads 1": "24 heads",
}
TABLES = {"sent_topic": "paper/quick/tables/sent_topic.csv", "detox": "undecided/detox.csv"}
COLUMNS = ["study", "task", "method", "length", "place", "judge", "of", "prompts", "ratio", "low",
           "high"]  # fmt: skip


def of_whole_texts(study: str) -> pd.DataFrame:
    """LaPA2 in all heads against no bias, at the longest length of each task."""
    table = pd.read_csv(FIGURES / TABLES[study])
    table = table[(table["metric"] == "ppl") & table["attribute"].isin(["all", "nontoxic"])]
    table = table[table["length"] == table["task"].map(LONGEST)]
    base = table[table["arm"] == "baseline"].set_index(["task", "method"])["mean"]
    steered = table[table["difference"].notna()].set_index(["task", "method"])
    ratios = pd.DataFrame(
        {
            name: 1 + steered[column] / base.reindex(steered.index)
            for name, column in {
                "ratio": "difference",
                "low": "difference_low",
                "high": "difference_high",
            }.items()
        }
    )
    ratios["length"], ratios["prompts"] = steered["length"], steered["prompts"].astype(int)
    return ratios.reset_index().assign(study=study, place="all heads", judge=WRITER, of=WHOLE)[
        COLUMNS
    ]


def of_second_opinion(task: str) -> pd.DataFrame:
    """Other methods, the bias in all heads and in 24; texts without chat tags."""
    table = pd.read_csv(FIGURES / "bases/second_opinion" / task / "fluency.csv")
    plain = ~table["variant"].str.contains("omega|eos")
    table = table[plain & table["arm"].isin(list(PLACES))]
    table = table.drop(columns=["low", "high"])  # of bits per character
    table = table.rename(columns={"ratio low": "low", "ratio high": "high"})
    return table.assign(
        study="second opinion", length=64, place=table["arm"].map(PLACES), of=CONTINUATION
    )[COLUMNS]


def of_same_prompts() -> pd.DataFrame:
    """Air-Decoding and DExperts on the same prompts, the bias in 24 heads."""
    table = pd.read_csv(FIGURES / "bases/same_prompts.csv")
    table = table[table["scorer"] == "conditional-perplexity"]
    table = table[table["minus"] == table["method"] + ", no bias"]
    table = table[table["arm"] == "24 heads"].rename(columns={"mean": "ratio"})
    return table.assign(
        study="same prompts", length=64, place="24 heads", judge=WRITER, of=CONTINUATION
    )[COLUMNS]


def ratios() -> pd.DataFrame:
    parts = [*map(of_whole_texts, TABLES), *map(of_second_opinion, ("sentiment", "topic"))]
    return pd.concat([*parts, of_same_prompts()], ignore_index=True)


if __name__ == "__main__":
    write_text(FIGURES / "paper" / "perplexity.csv", as_csv(ratios()))
    print(ratios().to_string())
