"""Tables of an item (a figure or table of the paper), computed from the item's cells and scores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from analyses.lab.reported import (
    BETTER_SIGN,
    PAPER_METRICS,
    PAPER_MODELS,
    TABLE_OF_ITEM,
    paper_number,
    paper_place,
)
from lapa2_interp.errors import pluralize
from lapa2_interp.methods.registry import known_methods
from lapa2_interp.scoring.tables import (
    EXTRA_CELL_COLUMNS,
    cell_table,
    difference_table,
    distinct_cells,
    metric_name,
    paired_change,
)
from lapa2_interp.stats import describe_intervals
from lapa2_interp.table_formats import (
    format_interval,
    format_number,
    interval_cells,
    interval_text,
    records,
)

PART_NAMES = {0: "whole", 1: "first", 2: "second"}
"""Names of a text's parts, as in the paper's table half."""
ROW_COLUMNS = ["model", "task", "method", "variant", "arm", "length", "part", "attribute"]
ARM_COLUMNS = ["model", "task", "method", "variant", "arm"]
CHANGE_COLUMNS = ["difference", "difference_low", "difference_high", "p", "detectable"]
DECODING_PARTS = r"top-k \d+|eos \w+|BOS doubled|HookedTransformer|TransformersModel"
"""Parts of a variant that do not keep it from a comparison with the paper's numbers."""
PAPER_SCORERS = {
    "acc": "Air-Decoding's RoBERTa",
    "tox": "perspective",
    "ppl": "gpt2-large",
    "dist": "roberta-large",
}
"""Part of the name of the paper's scorer, by metric. Differences from the paper's numbers are shown
only for these scorers and for the paper's models."""


# --- tables


def item_table(
    item: str,
    scores: pd.DataFrame,
    cells: pd.DataFrame,
    variants: Mapping[str, str] | None = None,
    tokenizer: Any = None,
) -> pd.DataFrame:
    """Means with intervals, and differences from the baseline: one row per cell and metric.

    Unfinished cells have a row without numbers.

    Args:
        item: The item, for its numbers in the paper.
        scores: From `data.ItemData.scores`.
        cells: Their rows of `ItemData.cells`.
        variants: Names in the paper's table by our arm or variant, to find the paper's numbers.
        tokenizer: Tokenizer for the n-grams of distinct-n; by default n-grams are of words.

    Returns:
        Columns ROW_COLUMNS, max_length and dtype if only they distinguish rows, metric, mean, low,
        high, n, prompts, skipped, scorer, difference, difference_low, difference_high, p,
        detectable (against the baseline of the same method), best, profile, paper (the paper's
        number), paper_of (its model, and its length if it is another), state.
    """
    keys = [key for key in ROW_COLUMNS if key in scores]
    extra = [
        key for key in EXTRA_CELL_COLUMNS if key in scores and _column_differs(scores, key, keys)
    ]
    frames = [pd.DataFrame(columns=[*ROW_COLUMNS, "metric"])]
    if len(scores):
        means = cell_table(scores)
        changes = difference_table(scores).rename(
            columns={"low": "difference_low", "high": "difference_high"}
        )
        joined = [*keys, *extra, "metric"]
        changes = changes.reindex(columns=[*joined, *CHANGE_COLUMNS])
        frames.append(means.merge(changes, on=joined, how="left") if len(changes) else means)
        frames.append(_distinct_rows(scores, tokenizer))
    numbers = ("mean", "low", "high", "n", "prompts", "skipped", "scorer", *CHANGE_COLUMNS)
    table = pd.concat(frames, ignore_index=True)
    table = table.reindex(columns=[*ROW_COLUMNS, *extra, "metric", *numbers])
    table["state"] = "finished"
    # Unfinished cells.
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
        table = pd.concat([table, rows], ignore_index=True)
    # Facts of the arm, the best arm, and the paper's numbers.
    arms = cells.drop_duplicates(ARM_COLUMNS)[[*ARM_COLUMNS, "profile", "alpha"]]
    table = table.merge(arms, on=ARM_COLUMNS, how="left")
    table["best"] = _best_means(table, scores)
    beside = [_paper_mean(item, row, variants or {}) for row in records(table)]
    table["paper"] = [number for number, _ in beside]
    table["paper_of"] = [source for _, source in beside]
    return _in_grid_order(table.drop(columns="alpha"), cells)


def _column_differs(scores: pd.DataFrame, column: str, keys: list[str]) -> bool:
    """True if cells that are otherwise one row of the table differ in a column."""
    return bool((scores.groupby(keys, dropna=False)[column].nunique() > 1).any())


def _distinct_rows(scores: pd.DataFrame, tokenizer: Any) -> pd.DataFrame:
    first = scores[scores["metric"].isin(["acc", "tox"])]
    if not len(first):
        return pd.DataFrame()
    cells = distinct_cells(first, tokenizer)
    return cells.assign(metric=cells["metric"].map(lambda metric: PAPER_METRICS[metric][0]))


def split_variant(variant: str) -> tuple[str, str]:
    """The two parts of a variant (`Cell.variant`): parameters and wording, and decoding
    settings."""
    parts = variant.split(", ")
    n = next((i for i, part in enumerate(parts) if re.fullmatch(DECODING_PARTS, part)), len(parts))
    return ", ".join(parts[:n]), ", ".join(parts[n:])


def drop_parameter(variant: str, parameter: str) -> str:
    """A variant (`Cell.variant`) without one parameter's value."""
    return ", ".join(part for part in variant.split(", ") if not part.startswith(f"{parameter}="))


def _paper_mean(
    item: str, row: Mapping[str, Any], variants: Mapping[str, str]
) -> tuple[float, str]:
    """The paper's number for a row, and its model and, if it is another, its length; NaN and "" if
    it has none."""
    nothing = (float("nan"), "")
    if row["attribute"] not in ("all", "nontoxic") or pd.isna(row["length"]):
        return nothing
    wording, _ = split_variant(row["variant"])
    named = variants.get(wording) or variants.get(row["arm"], "")
    usual = row["alpha"] in (0.0, known_methods()[row["method"]].alpha) and row["profile"] in (
        "",
        "paper",
    )
    if not usual or (not named and (variants or wording)):
        return nothing
    table = TABLE_OF_ITEM.get(item, item)
    source = paper_place(table, row["task"], row["method"], row["model"], int(row["length"]))
    if source is None:
        return nothing
    model, length = source
    number = paper_number(
        table,
        task=row["task"],
        model=model,
        method=row["method"],
        lapa2=row["arm"] != "baseline",
        length=length,
        metric=row["metric"],
        variant=PART_NAMES.get(part, named) if (part := int(row["part"])) else named,
    )
    if pd.isna(number):
        return nothing
    return number, model if length == row["length"] else f"{model}, {length} tokens"


def format_step_curves(table: pd.DataFrame) -> pd.DataFrame:
    """A table of curves as text: means with intervals at the first and some middle steps and at the
    last step of the longest arm, one row per arm; "" after an arm's end."""
    steps = sorted({0, 16, 64, 128, 256, int(table["step"].max())} & set(table["step"]))
    rows = table[table["step"].isin(steps)]
    keys = [name for name in ARM_COLUMNS if name in ("method", "arm") or rows[name].nunique() > 1]
    formatted = rows.assign(cell=interval_cells(rows, ".3f")).pivot_table(
        index=keys, columns="step", values="cell", aggfunc="first", sort=False
    )
    formatted.columns = [f"step {step}" for step in formatted.columns]
    return formatted.reset_index().fillna("")


def rows_of_all_attributes(table: pd.DataFrame) -> pd.DataFrame:
    """The rows for all attributes together, or for the only attribute."""
    has_all = table.groupby(ARM_COLUMNS, dropna=False)["attribute"].transform(
        lambda column: (column == "all").any()
    )
    return table[(table["attribute"] == "all") | ~has_all]


def _best_means(table: pd.DataFrame, scores: pd.DataFrame) -> list[bool]:
    """True in rows whose mean is significantly the best of their method's arms.

    Significantly: the whole 95 % interval of the difference from the second best arm
    (`paired_change`) is an improvement; for distinct-n, the arms' intervals do not overlap.
    """
    best = pd.Series(False, index=table.index)
    columns = (*ROW_COLUMNS, *EXTRA_CELL_COLUMNS)
    group_of = [key for key in columns if key in table and key not in ("arm", "attribute")]
    group_of += ["metric"]
    named = table[table["mean"].notna()] if "mean" in table else table.iloc[:0]
    if not len(named):
        return list(best)
    scored = scores[scores["value"].notna()]
    texts = dict(list(scored.groupby([*group_of, "arm"], sort=False)))
    for values, group in named.groupby([*group_of, "attribute"], dropna=False, sort=False):
        *where, attribute = values
        metric = str(where[-1])
        better = BETTER_SIGN.get(metric_name(metric))
        if len(group) < 2 or better is None:
            continue
        order = group.sort_values("mean", ascending=better < 0)
        first, second = order.index[:2]
        if metric.startswith("dist"):
            best[first] = bool(table.loc[first, "low"] > table.loc[second, "high"])
            continue
        before, after = (texts[*where, table.loc[i, "arm"]] for i in (second, first))
        if attribute != "all":
            before, after = (
                arm_rows[arm_rows["attribute"] == attribute] for arm_rows in (before, after)
            )
        change = paired_change(before, after)
        if change is not None:
            best[first] = bool((change.low if better > 0 else -change.high) > 0)
    return list(best)


def _in_grid_order(table: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """Rows in the order of the grid."""
    values = {column: list(dict.fromkeys(cells[column])) for column in ARM_COLUMNS}
    values["metric"] = _metric_order(table)
    ranks = {
        column: table[column].map({value: i for i, value in enumerate(of_column)})
        for column, of_column in values.items()
    }
    order = table.assign(**ranks, attribute=table["attribute"] != "all")
    by = ["model", "task", "length", "method", "variant", "arm", "part", "attribute", "metric"]
    return table.loc[order.sort_values(by, kind="stable").index].reset_index(drop=True)


def _metric_order(table: pd.DataFrame) -> list[str]:
    """The metrics of a table in the order of columns; those of several scorers stand together, the
    first scorer's in front."""
    names = [name for name, _ in PAPER_METRICS.values()]
    present = dict.fromkeys(map(str, table["metric"]))
    return sorted(
        present,
        key=lambda metric: (names.index(metric_name(metric)), metric != metric_name(metric)),
    )


def format_item_table(table: pd.DataFrame) -> pd.DataFrame:
    """An item's table as text: one row per arm, one column per metric with intervals.

    A mean that is significantly the best is bold (**). Columns with one value are left out. The
    paper's number, if there is one, follows its metric.
    """
    if not len(table):
        return table
    chosen = rows_of_all_attributes(table)
    columns = ("model", "task", "length", *EXTRA_CELL_COLUMNS, "method", "variant", "arm", "part")
    keys = [
        key
        for key in columns
        if key in chosen and (key in ("method", "arm") or chosen[key].nunique(dropna=False) > 1)
    ]
    # A column per metric, and the paper's number after it.
    wide = chosen[keys].drop_duplicates()
    for metric in _metric_order(chosen):
        part = chosen[chosen["metric"] == metric]
        rows = records(part)
        cells = part[keys].assign(**{metric: list(map(_format_mean, rows))})
        if part["paper"].notna().any():
            cells[f"paper {metric}"] = list(map(_format_paper_number, rows))
        wide = wide.merge(cells, on=keys, how="left")
    # The number of texts, and the change of control against the baseline.
    first = chosen[chosen["metric"].isin(["acc", "tox"])]
    changes = first[[name for name in CHANGE_COLUMNS if name != "p"]]
    cells = first[keys].assign(n=[str(int(n)) if pd.notna(n) else "0" for n in first["n"]])
    cells["change (detectable)"] = [
        "" if np.isnan(d) else f"{format_interval(d, low, high, '+.1f')} ({least:.1f})"
        for d, low, high, least in changes.to_numpy(float)
    ]
    wide = wide.merge(cells, on=keys, how="left")
    if "part" in wide and set(wide["part"]) <= PART_NAMES.keys():
        wide["part"] = wide["part"].map(PART_NAMES)
    return wide.astype(object).fillna("").rename(columns={"arm": "augmentation"})


def _number_format(metric: str) -> str:
    return ".3f" if metric.startswith("dist") else ".1f"


def _format_mean(row: Mapping[str, Any]) -> str:
    """A row's mean with its interval, bold if it is the best; or why there is none."""
    if row["state"] != "finished" or pd.isna(row["mean"]):
        return row["state"] if row["state"] != "finished" else "no number"
    form = _number_format(row["metric"])
    number = f"{row['mean']:{form}}"
    bold = f"**{number}**" if row["best"] else number
    return bold + interval_text(row["low"], row["high"], form)


def _format_paper_number(row: Mapping[str, Any]) -> str:
    """The paper's number for a row, and the difference from it if model and scorer are the
    paper's; "" without one."""
    if pd.isna(row["paper"]):
        return ""
    form = _number_format(row["metric"])
    scorer, gap = PAPER_SCORERS[row["metric"].rstrip("123")], row["mean"] - row["paper"]
    comparable = row["model"] in PAPER_MODELS and scorer in str(row["scorer"])
    difference = f" ({format_number(gap, f'+{form}')})" if comparable and not pd.isna(gap) else ""
    return f"{row['paper']:{form}}{difference}"


def footnotes(table: pd.DataFrame) -> list[str]:
    """The notes under every table: units, intervals, scorers, model, profile."""
    if "scorer" not in table:
        return []
    scorers = "; ".join(sorted(set(table["scorer"].dropna())))
    has_distinct = table["metric"].str.startswith("dist").any()
    diversity = (
        "dist-n: different n-grams of all texts per token, intervals by the jackknife; "
        if has_distinct
        else ""
    )
    first = table.loc[table["metric"].isin(["acc", "tox"]), "scorer"].dropna()
    kinds = dict.fromkeys(str(name).partition(" (")[2].partition(" ")[0] for name in first)
    has_second = bool((table["metric"].map(metric_name) != table["metric"]).any())
    second = f", by {' and '.join(kinds)} where no other scorer is named" * has_second
    echo = (
        "acc masked: with the words of all prefixes hidden; echo: texts that say a word of their"
        " own prefix; "
        if (table["metric"] == "echo %").any()
        else ""
    )
    profiles = (
        ", ".join(sorted({profile for profile in table["profile"].dropna() if profile})) or "none"
    )
    theirs = _describe_paper_numbers(table)
    return [
        (
            f"acc and tox in percent{second}; {echo}{diversity}95 % intervals over prompts"
            f" ({describe_intervals(table['prompts'].dropna())}); n texts"
            " (fewer for ppl); change: against the baseline, paired on prompts, and in parentheses"
            " the smallest difference so many prompts show at 80 % power; bold: better than the"
            " next by an interval without 0."
        ),
        (
            f"Models: {', '.join(dict.fromkeys(table['model']))}. Profile of the augmentation:"
            f" {profiles}. Scorers: {scorers}."
        ),
        *([theirs] if theirs else []),
    ]


def _describe_paper_numbers(table: pd.DataFrame) -> str:
    """A note that names model and length of the paper's numbers; "" if there are none."""
    if "paper_of" not in table or not len(shown := table[table["paper"].notna()]):
        return ""
    of_task = shown.groupby("task", sort=False)["paper_of"].agg(
        lambda column: " or ".join(dict.fromkeys(column))
    )
    listed = "; ".join(f"{task}: {lengths}" for task, lengths in of_task.items())
    return (
        f"paper: the paper's numbers, at the same length unless one is named ({listed}). Its"
        " scorers and prompts are others; with another model, too, compare directions, not sizes."
    )


def gaps_note(table: pd.DataFrame) -> str:
    """A note that counts the unfinished cells by state; "" if there are none."""
    if "state" not in table or (table["state"] == "finished").all():
        return ""
    counts = table[table["state"] != "finished"]["state"].value_counts()
    return (
        "Gaps: " + ", ".join(f"{pluralize(n, 'cell')} {state}" for state, n in counts.items()) + "."
    )
