"""Tables of an item (a figure or table of the paper), computed from the item's cells and scores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from lapa2_interp._util.errors import pluralize
from lapa2_interp.methods.registry import registry
from lapa2_interp.paper.claims import compare_arms, select_rows
from lapa2_interp.paper.reported import (
    BETTER_SIGN,
    PAPER_METRICS,
    PAPER_MODELS,
    TABLE_OF_ITEM,
    paper_number,
)
from lapa2_interp.scoring.tables import APART, cell_table, difference_table, distinct_cells, plain

PART_NAMES = {0: "whole", 1: "first", 2: "second"}
"""Parts of a text in words, as in the paper's table half."""
ROW_COLUMNS = ["model", "task", "method", "variant", "arm", "length", "part", "attribute"]
ARM_COLUMNS = ["model", "task", "method", "variant", "arm"]
DECODING_PARTS = r"top-k \d+|eos \w+|BOS doubled|HookedTransformer|TransformersModel"
"""Parts of a variant that leave it comparable with the paper's numbers."""
PAPER_SCORERS = {
    "acc": "Air-Decoding's RoBERTa",
    "tox": "perspective",
    "ppl": "gpt2-large",
    "dist": "roberta-large",
}
"""By metric, the name that a scorer contains if it is the one of the paper. Differences from the
paper's numbers are shown only for these scorers."""


# --- tables


def item_table(
    item: str,
    scores: pd.DataFrame,
    cells: pd.DataFrame,
    variants: Mapping[str, str] | None = None,
    tokenizer: Any = None,
) -> pd.DataFrame:
    """Means with intervals and what each arm changed: one row per cell of the table and metric.

    Cells that are not finished have a row with no number.

    Args:
        item: The item, for its numbers in the paper.
        scores: From `paper.data.ItemData.scores`.
        cells: The rows of `ItemData.cells` they came from.
        variants: By our arm (or variant), its name in the paper's table, to find the paper's
            numbers.
        tokenizer: Tokens that distinct-n counts; words by default.

    Returns:
        Columns KEYS, max_length and dtype where they alone tell rows apart, metric, mean, low,
        high, n, prompts, skipped, scorer, difference, difference_low, difference_high, p,
        detectable (against the baseline of the same method), best, profile, paper, state.
    """
    keys = [key for key in ROW_COLUMNS if key in scores]
    keys += [key for key in APART if key in scores and _differs(scores, key, keys)]
    frames = [pd.DataFrame(columns=[*ROW_COLUMNS, "metric"])]
    if len(scores):
        means = cell_table(scores)
        changes = difference_table(scores).rename(
            columns={"low": "difference_low", "high": "difference_high"}
        )
        joined, numbers = (
            [*keys, "metric"],
            ["difference", "difference_low", "difference_high", "p", "detectable"],
        )
        changes = changes.reindex(columns=[*joined, *numbers])
        frames.append(means.merge(changes, on=joined, how="left") if len(changes) else means)
        frames.append(_distinct(scores, tokenizer))
    columns = [
        *ROW_COLUMNS,
        *(key for key in keys if key in APART),
        "metric",
        "mean",
        "low",
        "high",
        "n",
        "prompts",
        "skipped",
        "scorer",
        "difference",
        "difference_low",
        "difference_high",
        "p",
        "detectable",
    ]
    found = pd.concat(frames, ignore_index=True).reindex(columns=columns)
    found["state"] = "finished"
    gaps = cells[cells["state"] != "finished"]
    if len(gaps):
        states = gaps.groupby(ARM_COLUMNS, sort=False)["state"].agg(
            lambda column: " and ".join(dict.fromkeys(column))
        )
        lengths = gaps.groupby(ARM_COLUMNS, sort=False)["max_length"].max()
        rows = pd.DataFrame({"state": states, "length": lengths}).reset_index()
        rows = rows.assign(
            attribute="all", part=0, metric=np.where(rows["task"] == "detox", "tox", "acc")
        )
        found = pd.concat([found, rows], ignore_index=True)
    arms = cells.drop_duplicates(ARM_COLUMNS)[[*ARM_COLUMNS, "profile", "alpha"]]
    found = found.merge(arms, on=ARM_COLUMNS, how="left")
    found["best"] = _best(found, scores)
    found["paper"] = [_paper_cell(item, row, variants or {}) for row in _records(found)]
    return _ordered(found.drop(columns="alpha"), cells)


def _differs(scores: pd.DataFrame, column: str, keys: list[str]) -> bool:
    """Whether cells that are otherwise one row of the table differ in a column."""
    return bool((scores.groupby(keys, dropna=False)[column].nunique() > 1).any())


def _distinct(scores: pd.DataFrame, tokenizer: Any) -> pd.DataFrame:
    first = scores[scores["metric"].isin(["acc", "tox"])]
    if not len(first):
        return pd.DataFrame()
    found = distinct_cells(first, tokenizer)
    return found.assign(metric=found["metric"].map(lambda metric: PAPER_METRICS[metric][0]))


def split_variant(variant: str) -> tuple[str, str]:
    """The parts of a variant (`Cell.variant`): parameters and wording, and how its texts were
    generated."""
    parts = variant.split(", ")
    n = next((i for i, part in enumerate(parts) if re.fullmatch(DECODING_PARTS, part)), len(parts))
    return ", ".join(parts[:n]), ", ".join(parts[n:])


def drop_parameter(variant: str, parameter: str) -> str:
    """A variant (`Cell.variant`) without the part that says one parameter's value."""
    return ", ".join(part for part in variant.split(", ") if not part.startswith(f"{parameter}="))


def _paper_cell(item: str, row: Mapping[str, Any], variants: Mapping[str, str]) -> float:
    if (
        row["attribute"] not in ("all", "nontoxic")
        or row["model"] not in PAPER_MODELS
        or pd.isna(row["length"])
    ):
        return float("nan")
    wording, _ = split_variant(row["variant"])
    named = variants.get(wording) or variants.get(row["arm"], "")
    usual = row["alpha"] in (0.0, registry()[row["method"]].alpha) and row["profile"] in (
        "",
        "paper",
    )
    if not usual or (not named and (variants or wording)):
        return float("nan")
    variant = PART_NAMES.get(part, named) if (part := int(row["part"])) else named
    return paper_number(
        TABLE_OF_ITEM.get(item, item),
        task=row["task"],
        model=PAPER_MODELS[row["model"]],
        method=row["method"],
        lapa2=row["arm"] != "baseline",
        length=int(row["length"]),
        metric=row["metric"],
        variant=variant,
    )


def format_step_curves(table: pd.DataFrame) -> pd.DataFrame:
    """Means with intervals of a table of curves at the first and some middle steps, and at the last
    step of its longest arm, one row per arm; empty where an arm has ended."""
    steps = sorted({0, 16, 64, 128, 256, int(table["step"].max())} & set(table["step"]))
    rows = table[table["step"].isin(steps)]
    cell = [
        f"{m:.3f} [{a:.3f}, {b:.3f}]" for m, a, b in rows[["mean", "low", "high"]].to_numpy(float)
    ]
    keys = [name for name in ARM_COLUMNS if name in ("method", "arm") or rows[name].nunique() > 1]
    shown = rows.assign(cell=cell).pivot_table(
        index=keys, columns="step", values="cell", aggfunc="first", sort=False
    )
    shown.columns = [f"step {step}" for step in shown.columns]
    return shown.reset_index().fillna("")


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def rows_of_all_attributes(table: pd.DataFrame) -> pd.DataFrame:
    """The rows for all attributes together, or for the only attribute."""
    several = table.groupby(ARM_COLUMNS, dropna=False)["attribute"].transform(
        lambda column: (column == "all").any()
    )
    return table[(table["attribute"] == "all") | ~several]


def _best(table: pd.DataFrame, scores: pd.DataFrame) -> list[bool]:
    """By row, whether its mean is surely the best of its method's arms.

    Surely: the whole 95 % interval of the difference from the second best arm, as in claims
    (`compare`), is an improvement; for distinct-n, the two arms' intervals do not overlap.
    """
    best = pd.Series(False, index=table.index)
    group_of = [key for key in (*ROW_COLUMNS, *APART, "metric") if key in table and key != "arm"]
    named = table[table["mean"].notna()] if "mean" in table else table.iloc[:0]
    for values, group in named.groupby(group_of, dropna=False, sort=False):
        where = dict(zip(group_of, values, strict=True))
        better = BETTER_SIGN.get(plain(str(where["metric"])))
        if len(group) < 2 or better is None:
            continue
        order = group.sort_values("mean", ascending=better < 0)
        first, second = order.index[:2]
        if str(where["metric"]).startswith("dist"):
            apart = table.loc[first, "low"] > table.loc[second, "high"]
        else:
            texts = select_rows(
                scores,
                {
                    key: value
                    for key, value in where.items()
                    if not (key == "attribute" and value == "all")
                },
            )
            before, after = ({"arm": table.loc[i, "arm"]} for i in (second, first))
            found = compare_arms(texts, before, after, str(where["metric"]))
            if found is None:
                continue
            apart = (found.low if better > 0 else -found.high) > 0
        best[first] = bool(apart)
    return list(best)


def _ordered(table: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """Rows in the order of the grid."""
    ranks = {}
    for column in ("model", "task", "method", "variant", "arm"):
        ranks[column] = {value: i for i, value in enumerate(dict.fromkeys(cells[column]))}
    metric = {name: i for i, name in enumerate(_shown_metrics(table))}
    order = pd.DataFrame(
        {
            **{column: table[column].map(ranks[column]) for column in ranks},
            "length": table["length"],
            "part": table["part"],
            "attribute": (table["attribute"] != "all").astype(int),
            "metric": table["metric"].map(metric),
        }
    )
    by = ["model", "task", "length", "method", "variant", "arm", "part", "attribute", "metric"]
    return table.loc[order.sort_values(by, kind="stable").index].reset_index(drop=True)


def _shown_metrics(table: pd.DataFrame) -> list[str]:
    """The metrics of a table as they stand beside each other: those of several scorers together,
    the first scorer's in front."""
    names = [name for name, _ in PAPER_METRICS.values()]
    there = dict.fromkeys(map(str, table["metric"]))
    return sorted(there, key=lambda metric: (names.index(plain(metric)), metric != plain(metric)))


def _number(metric: str, value: float) -> str:
    return f"{value:.3f}" if metric.startswith("dist") else f"{value:.1f}"


def format_item_table(table: pd.DataFrame) -> pd.DataFrame:
    """The table for reading: one row per arm, one column per metric with the interval in the cell.

    A mean that is surely the best is bold (**).

    Columns that are the same everywhere are left out; the paper's number follows its metric where
    there is one.
    """
    if not len(table):
        return table
    shown = rows_of_all_attributes(table)
    keys = [
        key
        for key in ("model", "task", "length", *APART, "method", "variant", "arm", "part")
        if key in shown
    ]
    keys = [key for key in keys if key in ("method", "arm") or shown[key].nunique(dropna=False) > 1]
    text, counts = [], []
    for row in shown.to_dict("records"):
        metric = row["metric"]
        if row["state"] != "finished" or pd.isna(row["mean"]):
            text.append(row["state"] if row["state"] != "finished" else "no number")
        else:
            number = _number(metric, row["mean"])
            interval = (
                ""
                if pd.isna(row["low"])
                else f" [{_number(metric, row['low'])}, {_number(metric, row['high'])}]"
            )
            text.append((f"**{number}**" if row["best"] else number) + interval)
        counts.append(row["metric"] in ("acc", "tox"))
    shown = shown.assign(cell=text)
    rows = shown[keys].drop_duplicates()
    found = rows.copy()
    for metric in _shown_metrics(shown):
        part = shown[shown["metric"] == metric]
        found = found.merge(
            part[[*keys, "cell"]].rename(columns={"cell": metric}), on=keys, how="left"
        )
        if part["paper"].notna().any():
            beside = part[[*keys, "paper"]].assign(
                paper=[_number(metric, value) for value in part["paper"]]
            )
            comparable = [
                PAPER_SCORERS[metric.rstrip("123")] in str(scorer) for scorer in part["scorer"]
            ]
            gap = np.where(comparable, part["mean"] - part["paper"], np.nan)
            beside["paper"] += [
                f" ({_signed(metric, value)})" if not np.isnan(value) else "" for value in gap
            ]
            found = found.merge(
                beside.rename(columns={"paper": f"paper {metric}"}), on=keys, how="left"
            )
    first = shown[np.array(counts)]
    n = first[[*keys, "n", "difference", "difference_low", "difference_high", "detectable"]]
    change = [
        "" if pd.isna(d) else f"{d:+.1f} [{low:+.1f}, {high:+.1f}] ({least:.1f})"
        for d, low, high, least in n[
            ["difference", "difference_low", "difference_high", "detectable"]
        ].to_numpy(float)
    ]
    n = n[[*keys, "n"]].assign(
        n=[str(int(x)) if pd.notna(x) else "0" for x in n["n"]], change=change
    )
    found = found.merge(n.rename(columns={"change": "change (detectable)"}), on=keys, how="left")
    if "part" in found and set(found["part"]) <= PART_NAMES.keys():
        found["part"] = found["part"].map(PART_NAMES)
    return found.fillna("").rename(columns={"arm": "augmentation"})


def _signed(metric: str, value: float) -> str:
    return f"{value:+.3f}" if metric.startswith("dist") else f"{value:+.1f}"


def footnotes(table: pd.DataFrame) -> list[str]:
    """The notes under every table: units, intervals, scorers, model, profile."""
    if "scorer" not in table:
        return []
    scorers = "; ".join(sorted(set(table["scorer"].dropna())))
    shown = table["metric"].str.startswith("dist").any()
    diversity = "dist-n: different n-grams of all texts per token; " if shown else ""
    first = table.loc[table["metric"].isin(["acc", "tox"]), "scorer"].dropna()
    kinds = dict.fromkeys(str(name).partition(" (")[2].partition(" ")[0] for name in first)
    several = bool((table["metric"].map(plain) != table["metric"]).any())
    second = f", by {' and '.join(kinds)} where no other scorer is named" * several
    echo = (
        "acc masked: with the words of all prefixes hidden; echo: texts that say a word of their"
        " own prefix; "
        if (table["metric"] == "echo %").any()
        else ""
    )
    profiles = (
        ", ".join(sorted({profile for profile in table["profile"].dropna() if profile})) or "none"
    )
    return [
        (
            f"acc and tox in percent{second}; {echo}{diversity}95 % intervals over prompts; n texts"
            " (fewer for ppl); change: against the baseline, paired on prompts, and in parentheses"
            " the smallest difference so many prompts show at 80 % power; bold: better than the"
            " next by an interval without 0."
        ),
        (
            f"Models: {', '.join(dict.fromkeys(table['model']))}. Profile of the augmentation:"
            f" {profiles}. Scorers: {scorers}."
        ),
    ]


def gaps_note(table: pd.DataFrame) -> str:
    if "state" not in table or (table["state"] == "finished").all():
        return ""
    counts = table[table["state"] != "finished"]["state"].value_counts()
    return (
        "Gaps: " + ", ".join(f"{pluralize(n, 'cell')} {state}" for state, n in counts.items()) + "."
    )
