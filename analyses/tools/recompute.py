"""Headlines again, from labels of texts or prompts alone: `python analyses/tools/recompute.py`.

Each line says "equal" if mean, interval and p are those of the committed table to five digits, else
what differs; the exit code is then 1. Nothing of the package is used: with prompts of
at least 8, an interval is between two percentiles of means over resampled prompts
(`percentiles`), and p is a share of flipped signs. Where a headline is a repetition of a run
whose texts are gone, the number of the first run follows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations

import numpy as np
import pandas as pd
from scipy.stats import norm, rankdata, t

from analyses.lab import FIGURES

Values = list[float]
"""Mean, low and high, and p where there is one."""


# --- resampling


@cache
def drawn(n: int, resamples: int) -> np.ndarray:
    """How often each of n prompts is drawn in each resample."""
    rng, counts = np.random.default_rng(0), []
    for _ in range(0, resamples, 1000):
        draws = rng.integers(0, n, (1000, n)) + n * np.arange(1000)[:, None]
        counts.append(np.bincount(draws.ravel(), minlength=1000 * n).reshape(1000, n))
    return np.concatenate(counts).astype(np.float32)


def percentiles(values: np.ndarray, n: int) -> Values:
    """The ends of a 95 % interval from values on resamples of n prompts: 2.5 and 97.5 %, moved
    outwards, since Student's t is wider than the normal and resampled means vary too little."""
    low = 100 * norm.cdf(t.ppf(0.025, n - 1) * np.sqrt(n / (n - 1)))
    return [float(end) for end in np.nanpercentile(values, [low, 100 - low])]


def ratio(above: np.ndarray, below: np.ndarray, resamples: int) -> Values:
    """Sum over sum of numbers by prompt, with its interval."""
    weights = drawn(len(above), resamples).astype(float)
    return [
        float(above.sum() / below.sum()),
        *percentiles(weights @ above / (weights @ below), len(above)),
    ]


def mean(texts: pd.DataFrame, metric: str) -> Values:
    """The mean of an arm's texts."""
    by_prompt = texts.groupby("prompt", sort=False)[metric].agg(["sum", "count"]).to_numpy(float)
    return ratio(by_prompt[:, 0], by_prompt[:, 1], 2000)


def difference(texts: pd.DataFrame, metric: str, after: str, before: str) -> Values:
    """The difference of two arms, paired on prompts and attributes, and its p."""
    cells = texts.pivot_table(values=metric, index=["prompt", "attribute"], columns="arm")
    gaps = (cells[after] - cells[before]).groupby("prompt").mean().dropna().to_numpy()
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(4000, len(gaps)))
    extreme = (np.abs(signs @ gaps) >= abs(gaps.sum()) * (1 - 1e-12)).sum()
    return [*ratio(gaps, np.ones(len(gaps)), 4000), float((extreme + 1) / 4001)]


# --- headlines


@dataclass
class Headline:
    """A number of a committed table, and how it is computed from labels.

    Attributes:
        words: What it is.
        file, where, columns: Its row in `figures/`, and the columns of the values.
        compute: The values from labels.
        first: File, row and columns of the first run's number.
    """

    words: str
    file: str
    where: dict[str, object]
    columns: tuple[str, ...]
    compute: Callable[[], Values]
    first: tuple[str, dict[str, object], tuple[str, ...]] | None = field(default=None)


@cache
def table(file: str) -> pd.DataFrame:
    """A table of `figures/`."""
    path = FIGURES / file
    return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)


def rows(file: str, **where: object) -> pd.DataFrame:
    """The rows that have these values; None is an empty field."""
    chosen = table(file)
    for column, value in where.items():
        column = column.replace("_", " ") if column not in chosen else column
        fits = chosen[column].isna() if value is None else chosen[column] == value
        chosen = chosen[fits]
    return chosen


def committed(file: str, where: dict[str, object], columns: tuple[str, ...]) -> Values:
    """The values of a row; there must be one."""
    (row,) = rows(file, **where)[list(columns)].to_numpy(float)
    return row.tolist()


def steering() -> Iterator[Headline]:
    """LaPA2 in all heads and in 24 heads, at 1.25 times the perplexity of no bias."""

    def curve(texts: pd.DataFrame, family: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """ln perplexity and a metric of no bias and of a family's arms: [resample, arm], the data
        itself first."""
        prompts = sorted(texts["prompt"].unique())
        own = texts[texts["family"].isin(["baseline", family])]
        weights = np.concatenate([np.ones((1, len(prompts))), drawn(len(prompts), 40000)])
        numbers = []
        for name in ("nll", metric):
            by_prompt = own.pivot_table(
                values=name, index="prompt", columns="strength", aggfunc=["sum", "count"]
            ).reindex(prompts, fill_value=0).fillna(0)  # fmt: skip
            numbers.append((weights @ by_prompt["sum"]) / (weights @ by_prompt["count"]))
        return numbers[0].to_numpy(), numbers[1].to_numpy()

    def at(texts: pd.DataFrame, family: str, metric: str, ratio: float) -> np.ndarray:
        """The metric where the curve first reaches the perplexity, by resample."""
        x, y = curve(texts, family, metric)
        goal, value = x[:, 0] + np.log(ratio), np.full(len(x), np.nan)
        for arm in range(x.shape[1] - 1, 0, -1):
            inside = (x[:, arm - 1] - goal) * (x[:, arm] - goal) <= 0
            share = (goal - x[:, arm - 1]) / (x[:, arm] - x[:, arm - 1])
            value = np.where(inside, y[:, arm - 1] + share * (y[:, arm] - y[:, arm - 1]), value)
        return value

    @cache
    def values(file: str, attribute: str, family: str, metric: str) -> np.ndarray:
        texts = rows(f"steering/{file}.texts.parquet")
        texts = texts if attribute == "all" else texts[texts["attribute"] == attribute]
        if family == "baseline":
            return curve(texts, "lapa2", metric)[1][:, 0]
        return at(texts, family, metric, 1.25)

    def headline(
        file: str, metric: str, family: str, attribute: str = "all", minus: str = ""
    ) -> Headline:
        task, _, banned = file.partition("-")
        where = {"task": task, "words": "prefix words banned" if banned else "all words"}
        where |= {"attribute": attribute, "family": family, "metric": metric}
        if family == "baseline":
            table, columns = "steering/steering.curves.csv", ("mean", "low", "high")
        else:
            table, where["ratio"] = "steering/steering.equal.csv", 1.25
            start = "difference" if minus else "value"
            columns = (start, *(f"difference_{end}" if minus else end for end in ("low", "high")))
            columns += ("p",) if minus else ()

        def compute() -> Values:
            made = values(file, attribute, family, metric)
            if minus:
                made = made - values(file, attribute, minus, metric)
            values_here = [float(made[0]), *percentiles(made[1:], 575)]
            if not minus:
                return values_here
            rarer = min((made[1:] <= 0).sum(), (made[1:] >= 0).sum())
            share = min((rarer + 1) / len(made), 0.5)
            return [*values_here, 2 * t.cdf(norm.ppf(share) * np.sqrt(574 / 575), 574)]

        words = f"{family}{f' minus {minus}' if minus else ''}, {file}, {attribute}, {metric}"
        return Headline(words, table, where, columns, compute)

    for metric in ("acc", "acc (linear)", "echo %"):
        for task in ("sentiment", "topic"):
            yield headline(task, metric, "baseline")
            yield headline(task, metric, "lapa2")
            yield headline(task, metric, "head-selective")
            yield headline(task, metric, "head-selective", minus="lapa2")
            yield headline(f"{task}-banned", metric, "head-selective", minus="lapa2")
        for attribute in ("positive", "negative"):
            yield headline("sentiment", metric, "head-selective", attribute)
        for attribute in ("world", "sports", "business", "science"):
            yield headline("topic", metric, "head-selective", attribute)


def fade() -> Iterator[Headline]:
    """Shares of the fade of lex, all heads."""

    def share(filler: int, bias: str) -> Values:
        control = table("labels/fading/prompts.csv").fillna("")
        control = control.set_index(["filler", "bias", "heads"])["control"].sort_index(
            kind="stable"
        )
        near, far = control.loc[1, "", ""], control.loc[filler, "", ""]
        near, far, changed = (
            values.reset_index(drop=True)
            for values in (near, far, control.loc[filler, bias, "all heads"])
        )
        gain = near - changed if bias == "removed" else changed - far
        return ratio(gain.to_numpy(), (near - far).to_numpy(), 2000)

    for filler in (64, 128, 256):
        for bias in ("dilution", "keys", "hold", "lapa2", "removed"):
            row = {"filler": filler, "heads": "all heads", "bias": bias}
            columns = ("share", "low", "high")
            first = ("fading/sentiment/fading.csv", row, columns) if bias != "keys" else None
            yield Headline(
                f"fade after {filler} tokens, {bias}",
                "labels/fading/fading.csv",
                row,
                columns,
                lambda filler=filler, bias=bias: share(filler, bias),
                first,
            )


def causes() -> Iterator[Headline]:
    """Shares of the fade of lex by cause: means over all orders of undoing them."""
    factors = ("distance", "keys", "content", "relay")

    def share(filler: int, cause: str) -> Values:
        values = rows(
            "fading/account/prompts.parquet", part="full", measure="lex", filler=filler
        ).pivot(index="prompt", columns="state", values="value")

        def lex(far: tuple[str, ...]) -> np.ndarray:
            name = "+".join(name for name in factors if name in far)
            return values[name or "near"].to_numpy()

        orders = [order[: order.index(cause) + 1] for order in permutations(factors)]
        lost = np.mean([lex(order[:-1]) - lex(order) for order in orders], axis=0)
        return ratio(lost, lex(()) - lex(factors), 2000)

    for filler in (64, 256, 1024):
        for cause in factors:
            yield Headline(
                f"fade after {filler} tokens, {cause}",
                "fading/account/account.csv",
                {"part": "full", "measure": "lex", "filler": filler, "name": cause},
                ("share", "low", "high"),
                lambda filler=filler, cause=cause: share(filler, cause),
            )


def labels(folder: str = "labels") -> Iterator[Headline]:
    """The arms of a folder's texts.parquet."""
    group, first = ["part", "task", "method"], first_runs()
    for row in table(f"{folder}/labels.csv").fillna({"against": ""}).to_dict("records"):
        key = tuple(row[name] for name in (*group, "arm", "metric"))
        where = {name: row[name] for name in (*group, "arm", "metric")}
        where["against"] = row["against"] or None

        def compute(row: dict = row) -> Values:
            texts = rows(f"{folder}/texts.parquet", **{name: row[name] for name in group})
            texts = texts[texts[row["metric"]].notna()]
            if row["against"]:
                values = difference(texts, row["metric"], row["arm"], row["against"])
            else:
                values = mean(texts[texts["arm"] == row["arm"]], row["metric"])
            return [*np.exp(values[:3]), *values[3:]] if row["metric"] == "nll" else values

        minus = f" minus {row['against']}" if row["against"] else ""
        setting = ", ".join((row["part"], row["task"], row["method"]))
        yield Headline(
            f"{setting}: {row['arm']}{minus}, {row['metric']}, {row['texts']} texts",
            f"{folder}/labels.csv",
            where,
            ("mean", "low", "high", "p") if minus else ("mean", "low", "high"),
            compute,
            first.get(key) if minus else None,
        )


def repeated() -> Iterator[Headline]:
    """The prefix alone on all prompts of figures/undecided, soft prefixes, and attention."""
    for name in ("prefix", "soft", "attention"):
        yield from labels(f"labels/{name}")


def order() -> Iterator[Headline]:
    """Rank correlation of changes of accuracy and of lex or js, the mean over attributes."""

    def mean_correlation(by: str) -> Values:
        control = table("lex_and_accuracy/control.csv")
        correlations = []
        for task in ("sentiment", "topic"):
            texts = rows(f"steering/{task}.texts.parquet")
            for attribute, own in texts.groupby("attribute"):
                here = control[(control["task"] == task) & (control["attribute"] == attribute)]
                arms = [
                    part.groupby(["family", "strength"])[column].mean().sort_index()
                    for part, column in ((here, by), (own, "acc"))
                ]
                ranks = [rankdata((arm - arm["baseline", 0.0]).drop("baseline")) for arm in arms]
                correlations.append(np.corrcoef(*ranks)[0, 1])
        n = len(correlations)
        half = t.ppf(0.975, n - 1) * np.std(correlations, ddof=1) / np.sqrt(n)
        middle = float(np.mean(correlations))
        return [middle, max(-1.0, middle - half), min(1.0, middle + half)]

    for by in ("lex", "js"):
        yield Headline(
            f"rank correlation of {by} and accuracy, 12 arms, mean of 6 attributes",
            "lex_and_accuracy/order.csv",
            {"accuracy": "acc", "by": by, "attribute": "all"},
            ("value", "low", "high"),
            lambda by=by: mean_correlation(by),
        )


def chats() -> Iterator[Headline]:
    """Quarters of long answers, means over chats; and what the bias adds in the last one."""

    def value(measure: str, arm: str, steps: str) -> Values:
        texts = rows("chat/texts.csv", measure=measure, steps=steps)
        by_chat = texts.groupby(["arm", "chat"])["value"].mean()
        if not arm.endswith(" adds"):
            chats = by_chat[arm].to_numpy()
            return ratio(chats, np.ones(len(chats)), 2000)
        gain = (by_chat[arm.removesuffix(" adds")] - by_chat["baseline"]).to_numpy()
        return ratio(gain, np.ones(len(gain)), 4000)

    for row in table("chat/chat.csv").to_dict("records"):
        where = {name: row[name] for name in ("measure", "arm", "steps")}
        yield Headline(
            f"chats, {row['arm']}, tokens {row['steps']}, {row['measure']}",
            "chat/chat.csv",
            where,
            ("mean", "low", "high"),
            lambda where=where: value(**where),
        )


def first_runs() -> dict[tuple, tuple[str, dict[str, object], tuple[str, ...]]]:
    """Rows of the first runs, by part, task, method, arm and metric: differences from no bias."""
    rows: dict[tuple, tuple[str, dict[str, object], tuple[str, ...]]] = {}
    change, ends = ("difference", "difference_low", "difference_high"), ("low", "high")
    for arm, method, claim in (
        ("all heads 0.5", "prefix", "log has more acc than none: prefix, sentiment"),
        ("all heads 0.5", "air-decoding", "pre has more acc than none: air-decoding, sentiment"),
        (
            "all heads 0.5, Pro-Aug",
            "air-decoding",
            "log has more acc than none: air-decoding, sentiment",
        ),
    ):
        where = {"claim": claim, "item": "components" if claim[:3] == "pre" else "scaling"}
        key = ("undecided", "sentiment", method, arm)
        rows[*key, "adapter"] = ("undecided/claims.csv", where, ("here", *ends))
        columns = ("second_here", "second_low", "second_high")
        rows[*key, "linear"] = ("undecided/claims.csv", where, columns)
    for task, variant, arms in (
        ("sentiment", "(a), omega 140", {"all heads 0.5": 0.5, "24 heads 0.8": 0.8}),
        ("topic", "(c), omega 60", {"all heads 0.5": 0.5, "24 heads 1": 1}),
    ):
        for arm, alpha in arms.items():
            name = f"{'all' if alpha == 0.5 else 'chosen'} heads {alpha:g}"
            key = ("bases", task, "air-decoding", arm)
            where = {"task": task, "method": "air-decoding", "attribute": "all", "arm": name}
            for metric in ("adapter", "linear"):
                here = where | {"variant": variant, "metric": f"acc ({metric})"}
                rows[*key, metric] = ("bases/bases.csv", here, change)
            folder = f"bases/second_opinion/{task}"
            plain = {"method": "air-decoding", "arm": name, "variant": SECOND[task]}
            if alpha != 0.5:
                where = plain | {"measure": "naive Bayes", "against": "no bias"}
                rows[*key, "naive Bayes"] = (f"{folder}/changes.csv", where, ("difference", *ends))
            where = plain | {"judge": "smollm2-135m"}
            columns = ("ratio", "ratio low", "ratio high")
            rows[*key, "nll"] = (f"{folder}/fluency.csv", where, columns)
    for task, method, length in (
        ("sentiment", "con-prefix", 256),
        ("topic", "prefix", 128),
        ("topic", "con-prefix", 128),
    ):
        claim = f"LaPA2 raises accuracy: {method}, {task}, {length} tokens (paper: 512)"
        key = ("soft", task, method, "all heads 0.5")
        for metric, columns in (
            ("adapter", ("here", *ends)),
            ("linear", ("second_here", "second_low", "second_high")),
        ):
            where = {"claim": claim, "item": "sent_topic", "metric": "acc"}
            rows[*key, metric] = ("paper/quick/tables/verdicts.csv", where, columns)
    for method, alpha in (("negprompt", 1), ("preadd", 2), ("palette", 2)):
        where = {"method": method, "arm": f"alpha {alpha} paper", "length": 128}
        for metric, name in (("adapter", "tox"), ("linear", "tox (linear)")):
            key = ("detox", "detox", method, f"all heads {alpha}", metric)
            rows[key] = ("undecided/detox.csv", where | {"metric": name}, change)
    return rows


SECOND = {
    "sentiment": "pro_aug=False, all prefix words banned",
    "topic": "prefixes=hard, pro_aug=False, all prefix words banned",
}
"""Of a task, the column variant in the tables of analyses/bases/second_opinion.py."""


GROUPS = (steering, fade, causes, labels, repeated, order, chats)


def main() -> int:
    """Print a line for each headline."""
    differing = 0
    for group in GROUPS:
        for headline in group():
            there = committed(headline.file, headline.where, headline.columns)
            here = headline.compute()
            same = np.allclose(here, there, rtol=1e-5, atol=1e-9)
            differing += not same
            words = "equal  " if same else "DIFFERS"
            line = f"{words} {headline.words}: {shown(here)}"
            if not same:
                line += f"; {headline.file} has {shown(there)}"
            if headline.first is not None:
                line += f"; first run {shown(committed(*headline.first))}"
            print(line)
    print(f"{differing} differ")
    return int(differing > 0)


def shown(values: Values) -> str:
    """A mean, its interval and p."""
    text = f"{values[0]:.4g} [{values[1]:.4g}, {values[2]:.4g}]"
    return f"{text}, p {values[3]:.2g}" if len(values) > 3 else text


if __name__ == "__main__":
    sys.exit(main())
