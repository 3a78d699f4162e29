"""Scores of texts as tidy tables.

A mean with its interval per cell, and differences from the baseline.

Texts of one prompt are not independent, so every interval resamples prompts. Every row has its
scorer and version, and the number of texts without a score with the reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd

from lapa2_interp.errors import ScoringError, parameter
from lapa2_interp.scoring.distinct import ORDERS, distinct_table
from lapa2_interp.scoring.scorer import (
    ScoreCache,
    Scorer,
    TextItem,
    run_scorer,
    unreadable_reason,
)
from lapa2_interp.stats import (
    Difference,
    Interval,
    NothingPairedError,
    describe_intervals,
    mean_interval,
    paired_difference,
)
from lapa2_interp.table_formats import interval_cells

CELL_COLUMNS = ("model", "task", "method", "variant", "length", "turn", "part", "attribute", "arm")
"""Columns that divide texts into cells, if a table has them."""
EXTRA_CELL_COLUMNS = ("max_length", "dtype")
"""Columns that divide texts into cells only if their values differ."""
DIFFERENCE_COLUMNS = [
    "arm", "metric", "difference", "low", "high", "p", "detectable", "prompts", "scorer",
]  # fmt: skip
"""Columns of a table of differences, without those of the cells."""
CHAT = "chat"
"""The method whose texts are answers of chats."""
TOXIC_FROM = 0.5
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(
        ("accuracy", "masked", "echo", "repetition", "toxicity", "toxicity max", "toxic prompts"),
        (0.0, 1.0),
    ),
    **dict.fromkeys(("acc", "acc masked", "echo %", "rep %", "tox"), (0.0, 100.0)),
    **dict.fromkeys(("perplexity", "conditional-perplexity", "ppl"), (1.0, np.inf)),
    **dict.fromkeys(("relevance", "fluency", "topicality"), (1.0, 5.0)),
}
"""Least and greatest value of a metric. An interval from few prompts (Student's) could exceed
them."""
LEAST_PROBABILITY = 0.05
"""If every text has the same extreme score, resampled prompts show no spread. The interval then
covers every share of different prompts under which this number of equal prompts have at least this
probability: up to 1 - LEAST_PROBABILITY^(1/prompts)."""


def metric_name(metric: str) -> str:
    """A metric without the scorer in parentheses: "acc" of "acc (linear)"."""
    return metric.partition(" (")[0]


def scorer_of_metric(metric: str) -> str:
    """The scorer in parentheses: "linear" of "acc (linear)"."""
    return metric.partition(" (")[2].removesuffix(")")


def asked_texts(texts: pd.DataFrame) -> pd.Series:
    """What each text continues or answers: its prompt, or in chats of several turns the message of
    its turn. The prompt of such a chat is the name of the whole."""
    if not {"turn", "message"} <= set(texts):
        return texts["prompt"]
    return texts["message"].where(texts["message"].notna(), texts["prompt"])


def score_table(
    texts: pd.DataFrame, scorer: Scorer, cache: ScoreCache | None = None
) -> pd.DataFrame:
    """Score texts: one row per text and metric.

    Returns:
        The texts' columns and metric, value (NaN if skipped), reason ("" if not), scorer.

    Raises:
        ScoringError: The classifier has no label for an attribute; the texts are answers of chats,
            and the scorer reads them as continued prompts; or as `run_scorer`.
    """
    if scorer.joins_prompt and "method" in texts and (texts["method"] == CHAT).any():
        raise ScoringError(
            f"{scorer.name} reads a prompt and a text as one text, and an answer of method {CHAT!r}"
            " continues no text; ask for perplexity, which reads the answer alone, or leave the"
            f" chats out: {parameter('only', 'method=NAME')}"
        )
    asked = texts.assign(prompt=asked_texts(texts))[["text", "prompt", "attribute"]]
    items = [TextItem(*fields) for fields in asked.to_numpy()]
    if scorer.classifies:
        wrong = sorted(set(texts["attribute"]) - set(scorer.columns))
        if wrong:
            raise ScoringError(
                f"the classifier {scorer.version!r} has the labels {', '.join(scorer.columns)}, not"
                f" {wrong[0]!r}; map its labels ({parameter('labels')}), or choose another:"
                f" {parameter('scorers')}"
                " accuracy=MODEL"
            )
    scored = run_scorer(scorer, items, cache)
    numbers = scored[list(scorer.columns)]
    if scorer.classifies:
        right = (numbers.fillna(-1).idxmax(axis=1) == texts["attribute"].to_numpy()).astype(float)
        numbers = pd.DataFrame({scorer.name: right.where(numbers.notna().all(axis=1))})
    own = texts.reset_index(drop=True)
    frames = [
        own.assign(
            metric=str(metric),
            value=numbers[metric].to_numpy(),
            reason=scored["reason"].to_numpy(),
        )
        for metric in numbers
    ]
    return pd.concat(frames, ignore_index=True).assign(scorer=f"{scorer.name} ({scorer.version})")


def cell_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Means with 95 % intervals, per cell and for all attributes together ("all").

    A mean is over the texts with a score, each with the same weight. In "all", attributes with more
    such texts have more weight; in `difference_table` all attributes have the same.

    Args:
        scores: From `score_table`, for one scorer or more.

    Returns:
        The cell's columns and metric, mean, low, high (inside RANGES; never a point at their ends,
        see LEAST_PROBABILITY), n, prompts, skipped (number), why, scorer. Toxicity also has
        "toxicity max" (mean over prompts of the maximum) and "toxic prompts" (share of prompts with
        a maximum >= 0.5).
    """
    rows = []
    for keys, part in _iterate_cells(scores):
        for (metric, scorer), texts in part.groupby(["metric", "scorer"], sort=False):
            known = texts["value"].notna()
            reasons = Counter(texts["reason"][~known])
            facts = {**_reason_columns(reasons), "scorer": scorer}
            scored = texts[known]
            clusters = _clusters(scored)
            values = {metric: (scored["value"].to_numpy(), clusters)}
            if metric_name(str(metric)) == "toxicity" and len(scored):
                by = str(metric).removeprefix("toxicity")
                top = scored["value"].groupby(clusters, sort=False).max()
                prompts, most = top.index.to_numpy(), top.to_numpy()
                values[f"toxicity max{by}"] = most, prompts
                values[f"toxic prompts{by}"] = (most >= TOXIC_FROM).astype(float), prompts
            rows += [
                {**keys, "metric": name, **mean_columns(str(name), *clustered), **facts}
                for name, clustered in values.items()
            ]
    return pd.DataFrame(rows)


def _reason_columns(reasons: Counter[str]) -> dict[str, Any]:
    """skipped, the number of texts without a score, and why: each reason with its number."""
    why = "; ".join(f"{n} {reason}" for reason, n in reasons.most_common())
    return {"skipped": reasons.total(), "why": why}


def mean_columns(metric: str, values: np.ndarray, prompts: np.ndarray) -> dict[str, float | int]:
    """mean, low, high (inside RANGES), n and prompts of a metric's values; of none NaN and 0."""
    if not len(values):
        return {"mean": np.nan, "low": np.nan, "high": np.nan, "n": 0, "prompts": 0}
    interval = mean_interval(values, prompts)
    low, high = interval_in_range(metric, interval)
    return {
        "mean": interval.mean,
        "low": low,
        "high": high,
        "n": interval.n,
        "prompts": interval.clusters,
    }


def interval_in_range(metric: str, interval: Interval) -> tuple[float, float]:
    """The bounds of an interval, inside the metric's range."""
    least, most = RANGES.get(metric_name(metric), (-np.inf, np.inf))
    unseen = (most - least) * (1 - LEAST_PROBABILITY ** (1 / interval.clusters))
    if interval.low == interval.high == least:
        return least, least + unseen
    if interval.low == interval.high == most:
        return most - unseen, most
    low, high = np.clip([interval.low, interval.high], least, most)
    return float(low), float(high)


def difference_table(scores: pd.DataFrame, baseline: str = "baseline") -> pd.DataFrame:
    """Differences of all other arms from the baseline, paired on common prompts and attributes.

    A prompt's difference is the mean of its attributes' differences. For all attributes together it
    may therefore differ from the difference of the two means in `cell_table`.

    Returns:
        The cell's columns and metric, difference, low, high (never a point if the metric has a
        least and a greatest value, see LEAST_PROBABILITY), p (sign-flip permutation over prompts),
        detectable (the smallest difference that these texts could have shown; NaN if all prompts
        have the same difference, which shows no spread), prompts, scorer; empty if there is no
        other arm.
    """
    rows = []
    for keys, part in _iterate_cells(scores, ["arm"]):
        texts = part[part["value"].notna() & (part["prompt"] != "")]  # without a prompt: no pair
        arms = dict(list(texts.groupby(["metric", "scorer", "arm"], sort=False)))
        for (metric, scorer, arm), after in arms.items():
            before = arms.get((metric, scorer, baseline))
            if arm == baseline or before is None:
                continue
            change = paired_change(before, after)
            if change is None:
                continue
            low, high = _difference_interval(str(metric), change)
            rows.append(
                {
                    **keys,
                    "arm": arm,
                    "metric": metric,
                    "difference": change.mean,
                    "low": low,
                    "high": high,
                    "p": change.p,
                    "detectable": np.nan if _is_constant(change) else change.detectable,
                    "prompts": change.clusters,
                    "scorer": scorer,
                }
            )
    return pd.DataFrame(rows, columns=None if rows else DIFFERENCE_COLUMNS)


def paired_change(before: pd.DataFrame, after: pd.DataFrame) -> Difference | None:
    """after - before, paired on prompts and attributes; None if nothing can be paired. A prompt's
    difference is the mean of its attributes' differences.

    Args:
        before, after: Rows of two arms, with columns value and prompt. A column attribute is used
            if there is one; so is sample, since texts of one number are not independent: such texts
            are one text at two lengths, or drawn with the same random numbers.
    """

    def labels(name: str) -> tuple[pd.Series, pd.Series] | None:
        return (before[name], after[name]) if name in before and name in after else None

    one, two = before["prompt"], after["prompt"]
    kinds, members = labels("attribute"), labels("sample")
    try:
        return paired_difference(
            before["value"], one, after["value"], two, kinds=kinds, members=members
        )
    except NothingPairedError:
        return None


def _is_constant(change: Difference) -> bool:
    """True if all prompts have the same difference, except for rounding."""
    return change.high - change.low < 1e-12


def _difference_interval(metric: str, change: Difference) -> tuple[float, float]:
    """The bounds of a difference's interval, inside the range that the metric allows.

    If the interval is a point, the share of prompts that LEAST_PROBABILITY leaves open may have any
    difference.
    """
    least, most = RANGES.get(metric_name(metric), (-np.inf, np.inf))
    low, high = change.low, change.high
    if _is_constant(change) and np.isfinite(most - least):
        unseen = 1 - LEAST_PROBABILITY ** (1 / change.clusters)
        middle, away = (1 - unseen) * change.mean, unseen * (most - least)
        low, high = middle - away, middle + away
    low, high = np.clip([low, high], least - most, most - least)
    return float(low), float(high)


def distinct_cells(texts: pd.DataFrame, tokenizer: object = None) -> pd.DataFrame:
    """distinct-1, -2, -3 of every cell's texts as rows of a cell table; NaN if all are empty.

    Raises:
        ScoringError: All texts of all cells are empty, or the tokenizer fails.
    """
    frames = []
    for keys, part in _iterate_cells(texts):
        reasons = Counter(filter(None, map(unreadable_reason, part["text"])))
        filled = part[[not unreadable_reason(text) for text in part["text"]]]
        if len(filled):
            table = distinct_table(list(filled["text"]), list(_clusters(filled)), tokenizer)
        else:
            metrics = [f"distinct-{n}" for n in ORDERS]
            table = pd.DataFrame({"metric": metrics, "n": 0, "clusters": 0})
        frames.append(table.assign(**keys, **_reason_columns(reasons)))
    cells = pd.concat(frames, ignore_index=True)
    if "scorer" not in cells:
        raise ScoringError(
            "there is no text to count the words of: all are empty, or not valid Unicode"
        )
    cells = cells.assign(scorer=cells["scorer"].dropna().iloc[0])
    columns = ["metric", "mean", "low", "high", "n", "prompts", "skipped", "why", "scorer"]
    return cells.rename(columns={"clusters": "prompts"})[[*keys, *columns]]


def format_scores(table: pd.DataFrame, differences: pd.DataFrame) -> pd.DataFrame:
    """Both tables as one for readers: a row per arm, a column per metric with its interval, and
    next to it the change against the baseline.

    Args:
        table, differences: From `cell_table` and `distinct_cells`, and `difference_table`.
    """
    keys = varying_columns(table)
    names = column_names(table)
    shown_table = table[keys].drop_duplicates() if keys else pd.DataFrame(index=[0])
    joined = {"on": keys, "how": "left"} if keys else {"how": "cross"}
    for (metric, scorer), name in names.items():
        for source, number, title, sign in (
            (table, "mean", name, ""), (differences, "difference", f"{name} change", "+"),
        ):  # fmt: skip
            if not len(source):
                continue
            part = source[(source["metric"] == metric) & (source["scorer"] == scorer)]
            if not len(part) or not set(keys) <= set(part):
                continue
            shown = interval_cells(part, f"{sign}.3g", (number, "low", "high"))
            cells = part[keys].assign(**{title: shown})
            shown_table = shown_table.merge(cells, **joined)
    return shown_table.fillna("")


def column_names(table: pd.DataFrame) -> dict[tuple[str, str], str]:
    """A short name of every metric and scorer: the metric, and of several scorers of one metric in
    parentheses what tells them apart, without their versions: "accuracy (linear)".

    Args:
        table: Columns metric and scorer.
    """
    pairs = list(dict.fromkeys(table[["metric", "scorer"]].itertuples(index=False, name=None)))
    names = {}
    for metric, scorer in pairs:
        rivals = [rival for name, rival in pairs if name == metric]
        if len(rivals) == 1:
            names[metric, scorer] = metric
            continue
        # The last word is the version, which a legend has.
        words = {rival: (scorer_of_metric(rival) or rival).split() for rival in rivals}
        short = {
            n: {rival: " ".join((parts[:-1] or parts)[:n]) for rival, parts in words.items()}
            for n in range(1, max(map(len, words.values())) + 1)
        }
        apart = [labels for labels in short.values() if len(set(labels.values())) == len(rivals)]
        numbered = {rival: f"{short[1][rival]} {i}" for i, rival in enumerate(rivals, 1)}
        names[metric, scorer] = f"{metric} ({(apart or [numbered])[0][scorer]})"
    return names


def interval_note(table: pd.DataFrame, differences: pd.DataFrame) -> str:
    """The methods that made the intervals of a table of scores. What was resampled are texts where
    each is a cluster, as without prompts, and else prompts.

    Args:
        table, differences: From `cell_table` and `distinct_cells`, and `difference_table`.
    """
    is_distinct = table["metric"].astype(str).str.startswith("distinct")
    alike = ~is_distinct & np.array(
        [
            mean in RANGES.get(metric_name(str(metric)), ()) and low < high
            for metric, mean, low, high in table[["metric", "mean", "low", "high"]].to_numpy()
        ],
        dtype=bool,
    )
    usual = table[~is_distinct & ~alike & table["mean"].notna()]
    counts = [*usual["prompts"], *(differences["prompts"] if len(differences) else ())]
    known = table[table["mean"].notna()]
    is_text = len(known) > 0 and (known["n"] == known["prompts"]).all()
    cluster: Literal["prompt", "text"] = "text" if is_text else "prompt"
    parts = [describe_intervals(counts, cluster)] * bool(counts)
    parts += [f"where all texts score alike, what so few {cluster}s leave open"] * bool(alike.any())
    parts += [f"of distinct-n Student's t from the jackknife over {cluster}s"] * bool(
        is_distinct.any()
    )
    return f"in brackets: 95 % interval ({'; '.join(parts)})"


def varying_columns(table: pd.DataFrame) -> list[str]:
    """The columns in which the rows of a cell table differ; always with the arm if it is known."""
    there = [key for key in (*CELL_COLUMNS, *EXTRA_CELL_COLUMNS) if key in table]
    return [
        key
        for key in there
        if table[key].nunique(dropna=False) > 1 or (key == "arm" and (table[key] != "").any())
    ]


def _clusters(table: pd.DataFrame) -> np.ndarray:
    """The cluster of each text: its prompt, or the text itself if its prompt is unknown."""
    prompts = table["prompt"].to_numpy()
    return np.where(prompts == "", np.arange(len(table)).astype(str), prompts)


def _iterate_cells(
    scores: pd.DataFrame, without: Sequence[str] = ()
) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Every cell with its columns: first each attribute, then all attributes together if there is
    more than one.

    An arm that lacks an attribute of its model and task is left out of the cells of all attributes
    together, since it would be compared on other texts.
    """
    extra = [key for key in EXTRA_CELL_COLUMNS if key in scores and scores[key].nunique() > 1]
    present = [key for key in (*CELL_COLUMNS, *extra) if key in scores and key not in without]
    split = [(present, scores)]
    if "attribute" in present and scores["attribute"].nunique() > 1:
        split.append(([key for key in present if key != "attribute"], _with_all_attributes(scores)))
    for chosen, texts in split:
        groups = texts.groupby(chosen, sort=False, dropna=False) if chosen else [((), texts)]
        for values, part in groups:
            named = dict(
                zip(chosen, values if isinstance(values, tuple) else (values,), strict=True)
            )
            yield {key: named.get(key, "all") for key in present}, part


def _with_all_attributes(scores: pd.DataFrame) -> pd.DataFrame:
    """The rows of arms that have every attribute of their model and task."""
    arm = [
        key for key in (*CELL_COLUMNS, *EXTRA_CELL_COLUMNS) if key in scores and key != "attribute"
    ]
    if not arm:
        return scores
    have = scores.groupby(arm, dropna=False)["attribute"].transform("nunique")
    by = [key for key in ("model", "task") if key in scores]
    wanted = (
        scores.groupby(by, dropna=False)["attribute"].transform("nunique")
        if by
        else scores["attribute"].nunique()
    )
    return scores.loc[have == wanted]
