"""Committed tables are computed again from committed labels: `python analyses/tools/recompute.py`.

    python analyses/tools/recompute.py [GROUP ...]    # steering, heads, rivals, ...; by default all

Labels are what is committed of texts or prompts: a row for each, without the text. Nothing of the
package is used. With prompts of at least 8, an interval is between two percentiles of means over
resampled prompts (`percentiles`), and p is a share of flipped signs, or of resamples beyond 0.

A line says "equal" if all numbers of a table, or of a row, are the committed ones up to one unit of
their last digit. A line says "DIFFERS", and what does, if one is not; the exit code is then 1.
Where a row repeats a run whose texts are gone, the number of the first run follows.

Some tables have no committed labels, and have numbers that another table has, too. The group
`copies` compares them, so that a number that is changed in one of them is found. At the end stand
the tables that are computed in part, those whose labels are committed and not read, and those that
cannot be computed, since their labels are not committed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from itertools import combinations, pairwise, permutations, product

import numpy as np
import pandas as pd
from scipy.stats import norm, rankdata, t

from analyses.lab import FIGURES

Values = list[float]
"""Mean, low and high, and p where there is one."""
Means = dict[tuple[str, float], np.ndarray]
"""By family and strength ln perplexity and metrics: [resample, quantity], the data itself first."""
FEW = 8
"""From so many prompts on, prompts are resampled."""
RESAMPLES = 40000
"""Of the comparisons at equal perplexity."""
NOTHING = [np.nan] * 3


# --- resampling


@cache
def drawn(n: int, resamples: int) -> np.ndarray:
    """How often each of n prompts is drawn in each resample."""
    rng, counts = np.random.default_rng(0), []
    for _ in range(0, resamples, 1000):
        draws = rng.integers(0, n, (1000, n)) + n * np.arange(1000)[:, None]
        counts.append(np.bincount(draws.ravel(), minlength=1000 * n).reshape(1000, n))
    return np.concatenate(counts).astype(np.float32)


@cache
def signs(n: int) -> np.ndarray:
    """The signs of n prompts in each flip."""
    return np.random.default_rng(0).choice([-1.0, 1.0], size=(4000, n))


@cache
def tails(n: int) -> list[float]:
    """The percentiles of a 95 % interval from resamples of n prompts: 2.5 and 97.5 %, moved
    outwards, since Student's t is wider than the normal and resampled means vary too little."""
    low = 100 * float(norm.cdf(t.ppf(0.025, n - 1) * np.sqrt(n / (n - 1))))
    return [low, 100 - low]


def percentiles(values: np.ndarray, n: int) -> Values:
    """The ends of a 95 % interval from values on resamples of n prompts."""
    return [float(end) for end in np.nanpercentile(values, tails(n))]


def ends(values: np.ndarray, n: int) -> Values:
    """A value and its interval, from the value on the data and those on resamples; without an
    interval where more than 5 % of the resamples have no value."""
    known = ~np.isnan(values)
    if n < FEW or not known[0] or known[1:].mean() < 0.95:
        return [float(values[0]), *NOTHING[1:]]
    return [float(values[0]), *percentiles(values[1:], n)]


def beyond(values: np.ndarray, n: int, ties: float = 0) -> float:
    """p of "it is 0" from values on resamples of n prompts.

    Args:
        ties: The values up to which the rarer side reaches; 0 but for rounding.
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return np.nan
    rarer = min((known <= ties).sum(), (known >= -ties).sum())
    share = min((rarer + 1) / (len(known) + 1), 0.5)
    return float(2 * t.cdf(norm.ppf(share) * np.sqrt((n - 1) / n), n - 1))


def holm(p: Iterable[float]) -> list[float]:
    """Holm's correction: of k tests the smallest p counts k times, the next k - 1 times, and so on,
    and none less than the one before. A test that could not be made counts as one of p = 1."""
    tests = [1.0 if np.isnan(value) else value for value in p]
    corrected, least = list(tests), 0.0
    for rank, test in enumerate(sorted(range(len(tests)), key=lambda i: tests[i])):
        least = max(least, min(1.0, (len(tests) - rank) * tests[test]))
        corrected[test] = least
    return [
        np.nan if np.isnan(value) else by_holm for value, by_holm in zip(p, corrected, strict=True)
    ]


def ratio(above: np.ndarray, below: np.ndarray, resamples: int) -> Values:
    """Sum over sum of numbers by prompt, with its interval."""
    weights = drawn(len(above), resamples).astype(float)
    return [
        float(above.sum() / below.sum()),
        *percentiles(weights @ above / (weights @ below), len(above)),
    ]


def mean(values: pd.Series, labels: pd.Series) -> Values:
    """The mean of the values that are there, with its interval over what their labels name; below 8
    of these Student's."""
    there = values.notna().to_numpy()
    numbers, (codes, names) = values.to_numpy(float)[there], pd.factorize(labels.to_numpy()[there])
    if len(names) < 2:
        return [float(numbers.mean()), *NOTHING[1:]] if len(numbers) else list(NOTHING)
    sums, sizes, n = np.bincount(codes, numbers), np.bincount(codes).astype(float), len(names)
    if n >= FEW:
        return ratio(sums, sizes, 2000)
    middle = float(numbers.mean())
    error = np.sqrt(n / (n - 1) * ((sums - sizes * middle) ** 2).sum()) / len(numbers)
    half = float(t.ppf(0.975, n - 1) * error)
    return [middle, middle - half, middle + half]


def by_arm(texts: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Means by prompt and attribute, a column an arm."""
    return texts.pivot_table(values=metric, index=["prompt", "attribute"], columns="arm")


def difference(cells: pd.DataFrame, after: str, before: str) -> Values:
    """The difference of two arms (`by_arm`), paired on prompts and attributes, and its p."""
    gaps = (cells[after] - cells[before]).groupby("prompt").mean().dropna().to_numpy()
    extreme = (np.abs(signs(len(gaps)) @ gaps) >= abs(gaps.sum()) * (1 - 1e-12)).sum()
    return [*ratio(gaps, np.ones(len(gaps)), 4000), float((extreme + 1) / 4001)]


# --- ways to steer at equal perplexity


def arm_means(texts: pd.DataFrame, metrics: Sequence[str]) -> Means:
    """The means of every arm on the data and on resampled prompts."""
    names, prompts = ["nll", *metrics], np.sort(texts["prompt"].unique())
    by_prompt = texts.groupby(["prompt", "family", "strength"])[names]
    sums, counts = (
        part.unstack(["family", "strength"]).reindex(prompts).fillna(0)
        for part in (by_prompt.sum(), by_prompt.count())
    )
    weights = np.concatenate([np.ones((1, len(prompts))), drawn(len(prompts), RESAMPLES)])
    with np.errstate(invalid="ignore"):
        means = (weights @ sums.to_numpy(float)) / (weights @ counts.to_numpy(float))
    column = {name: i for i, name in enumerate(sums.columns)}
    arms = sorted({(family, strength) for _, family, strength in column})
    return {arm: means[:, [column[name, *arm] for name in names]] for arm in arms}


def curve(means: Means, family: str) -> list[np.ndarray]:
    """No bias, and a family's arms by strength."""
    return [means["baseline", 0.0], *(of for (name, _), of in means.items() if name == family)]


def at(arms: Sequence[np.ndarray], goal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The metrics where a curve first reaches ln of a perplexity, by resample, and where it does:
    between two arms on the line between them."""
    value = np.full((len(goal), arms[0].shape[1] - 1), np.nan)
    reached = np.zeros(len(goal), bool)
    for before, after in reversed(list(pairwise(arms))):
        x, y = before[:, 0], after[:, 0]
        inside = (x - goal) * (y - goal) <= 0
        share = np.where(x == y, 0, (goal - x) / np.where(x == y, 1, y - x))[:, None]
        line = before[:, 1:] + share * (after[:, 1:] - before[:, 1:])
        value, reached = np.where(inside[:, None], line, value), reached | inside
    return value, reached


def points(means: Means, metrics: Sequence[str], n: int) -> pd.DataFrame:
    """The means of every arm, and its perplexity, with intervals."""
    table = []
    for (family, strength), of in means.items():
        perplexity = named(np.exp(ends(of[:, 0], n)), *PERPLEXITY)
        for i, metric in enumerate(metrics, 1):
            facts = {"family": family, "strength": strength, "metric": metric, "prompts": n}
            table.append(facts | perplexity | named(ends(of[:, i], n), "mean", "low", "high"))
    return pd.DataFrame(table)


def compared(
    means: Means,
    metrics: Sequence[str],
    n: int,
    references: Sequence[str] = ("lapa2",),
    ratios: Sequence[float] = (1.1, 1.25),
    unit: np.ndarray | None = None,
) -> pd.DataFrame:
    """Every family at multiples of the perplexity of no bias, and minus each reference there.

    Args:
        unit: ln of a perplexity of which ratios are multiples, by resample, instead.
    """
    unit = means["baseline", 0.0][:, 0] if unit is None else unit
    families = sorted({family for family, _ in means} - {"baseline"})
    table = []
    for ratio in ratios:
        there = {family: at(curve(means, family), unit + np.log(ratio)) for family in families}
        for family, (i, metric) in product(families, enumerate(metrics)):
            here, reached = there[family]
            value = named(ends(here[:, i], n), "value", "low", "high")
            for reference in references:
                both = reached & there[reference][1]
                change, p = list(NOTHING), np.nan
                if family != reference and both[0] and both[1:].mean() >= 0.95 and n >= FEW:
                    gap = here[:, i] - there[reference][0][:, i]
                    change, p = ends(gap, n), beyond(gap[1:], n)
                table.append(
                    {"ratio": ratio, "family": family, "metric": metric, "reference": reference}
                    | {"perplexity": np.exp(unit[0]) * ratio, "reached": reached[1:].mean()}
                    | {"prompts": n, "p": p} | value | named(change, *CHANGE)
                )  # fmt: skip
    return pd.DataFrame(table)


def judged(table: pd.DataFrame, by: Sequence[str] = ()) -> pd.DataFrame:
    """A comparison with p by Holm, of all tests of a metric, and in words."""
    table = table.assign(p_holm=np.nan, verdict="")
    others = table[table["family"] != table["reference"]]
    for _, part in others.groupby(["metric", *by], dropna=False):
        table.loc[part.index, "p_holm"] = holm(part["p"])
    p, change = table["p_holm"], table["difference"]
    words = np.where(change > 0, "more", "less")
    words = np.where(p.isna(), "not comparable", np.where(p < 0.05, words, "not decided"))
    table.loc[others.index, "verdict"] = words[table.index.isin(others.index)]
    return table


PERPLEXITY = ("perplexity", "perplexity_low", "perplexity_high")
CHANGE = ("difference", "difference_low", "difference_high")


# --- tables and rows


def named(values: Iterable[float], *names: str) -> dict[str, float]:
    """Values by name."""
    return dict(zip(names, values, strict=True))


@cache
def table(file: str) -> pd.DataFrame:
    """A table of `figures/`."""
    path = FIGURES / file
    return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)


def rows(file: str, **where: object) -> pd.DataFrame:
    """The rows that have these values; None is an empty field."""
    every = table(file)
    fits = np.ones(len(every), bool)
    for name, value in where.items():
        column = every[name.replace("_", " ") if name not in every else name]
        fits &= (column.isna() if value is None else column == value).to_numpy(bool)
    return every[fits]


def committed(file: str, where: dict[str, object], columns: tuple[str, ...]) -> Values:
    """The values of a row; there must be one."""
    (row,) = rows(file, **where)[list(columns)].to_numpy(float)
    return row.tolist()


def close(here: np.ndarray, there: np.ndarray, digits: int) -> np.ndarray:
    """Which numbers are equal up to one unit of the last of so many digits; NaN is NaN."""
    size = np.abs(np.where(np.isnan(there) | (there == 0), 1, there))
    unit = 10.0 ** (np.floor(np.log10(size)) - digits + 1)
    unit = np.where(there == 0, 1e-9, unit)
    return (np.isnan(here) & np.isnan(there)) | (np.abs(here - there) <= unit * (1 + 1e-9))


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

    def lines(self) -> Iterator[str]:
        """A line."""
        there, here = committed(self.file, self.where, self.columns), self.compute()
        same = close(np.array(here), np.array(there), 6).all()
        line = f"{'equal  ' if same else 'DIFFERS'} {self.words}: {shown(here)}"
        if not same:
            line += f"; {self.file} has {shown(there)}"
        if self.first is not None:
            line += f"; first run {shown(committed(*self.first))}"
        yield line


@dataclass
class Whole:
    """A committed table, or a part of it, and how all of its rows are computed.

    Attributes:
        file: In `figures/`.
        keys: The columns that say what a row is.
        compute: The rows, with these columns and columns of values.
        digits: Of its numbers.
        where: The rows that are meant; by default all.
        source: Where the numbers come from, if not from labels.
    """

    file: str
    keys: Sequence[str]
    compute: Callable[[], pd.DataFrame]
    digits: int = 6
    where: Mapping[str, object] = field(default_factory=dict)
    source: str = ""

    def lines(self) -> Iterator[str]:
        """A line for each row that differs; if none does, a line for all."""
        there, here = (
            part.set_index(pd.Index(self._names(part))) for part in (self.rows(), self.compute())
        )
        facts = "".join(f", {value}" for value in self.where.values())
        what = f"{self.file}{facts}"
        both = [name for name in there.index if name in here.index]
        wrong = [
            f"{what}: {name} is a row of the {'table' if name in there.index else 'labels'} alone"
            for name in there.index.symmetric_difference(here.index, sort=False)
        ]
        if not (there.index.is_unique and here.index.is_unique):
            wrong.append(f"{what}: two rows are called alike")
            both = []
        there, here = there.loc[both], here.loc[both]
        columns = [name for name in here if name not in self.keys]
        for column in columns:
            made, said = here[column], there[column]
            if pd.api.types.is_numeric_dtype(made) and pd.api.types.is_numeric_dtype(said):
                same = close(made.to_numpy(float), said.to_numpy(float), self.digits)
                made, said = made.map("{:.6g}".format), said.map("{:.6g}".format)
            else:
                made, said = (
                    part.astype(object).where(part.notna(), "").astype(str) for part in (made, said)
                )
                same = (made == said).to_numpy()
            wrong += [
                f"{what}: {name}, {column}: {made[name]}; the table has {said[name]}"
                for name in made.index[~same]
            ]
        yield from (f"DIFFERS {line}" for line in wrong)
        if not wrong:
            source = f", as in {self.source}" if self.source else ""
            said = {*self.keys, *self.where, *columns}
            rest = [name for name in there if name not in said and there[name].nunique() > 1]
            rest = [] if self.source else rest
            others = f"; not compared: {', '.join(rest)}" if rest else ""
            yield f"equal   {what}: {len(both)} rows, {', '.join(columns)}{source}{others}"

    def rows(self) -> pd.DataFrame:
        """The committed rows that are meant."""
        return rows(self.file, **self.where)

    def _names(self, part: pd.DataFrame) -> list[str]:
        fields = [
            [
                "" if pd.isna(value) else value if isinstance(value, str) else f"{value:.3g}"
                for value in part[key]
            ]
            for key in self.keys
        ]
        return [", ".join(filter(None, values)) for values in zip(*fields, strict=True)]


Item = Headline | Whole


# --- studies


METRICS_OF_STEERING = (
    "acc",
    "acc (linear)",
    "acc masked",
    "acc masked (linear)",
    "echo %",
    "rep %",
)
SETTING = ("task", "words", "model", "method")


def steering() -> Iterator[Whole]:
    """Ways to steer at several strengths: all arms, and all ways at equal perplexity."""

    @cache
    def both(file: str, attribute: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        texts = rows(file)
        own = texts if attribute == "all" else texts[texts["attribute"] == attribute]
        means, n = arm_means(own, METRICS_OF_STEERING), own["prompt"].nunique()
        ratios = (1.25,) if "banned" in file else (1.1, 1.25)
        equal = compared(means, METRICS_OF_STEERING, n, ratios=ratios).drop(columns="reference")
        return points(means, METRICS_OF_STEERING, n), equal

    for name in ("sentiment", "sentiment-banned", "topic", "topic-banned"):
        file = f"steering/{name}.texts.parquet"
        if not (FIGURES / file).exists():
            continue
        task, _, banned = name.partition("-")
        words = "prefix words banned" if banned else "all words"
        for attribute in ("all", *sorted(table(file)["attribute"].unique())):
            where = {"task": task, "words": words, "attribute": attribute}
            arm = ["family", "strength", "metric"]
            yield Whole(
                "steering/steering.curves.csv",
                arm,
                lambda file=file, attribute=attribute: both(file, attribute)[0],
                where=where,
            )
            yield Whole(
                "steering/steering.equal.csv",
                ["ratio", "family", "metric"],
                lambda file=file, attribute=attribute: both(file, attribute)[1],
                where=where,
            )

    def verdicts() -> pd.DataFrame:
        """Those of the table's p; with what speaks against a verdict by the first scorer."""
        equal = rows("steering/steering.equal.csv", attribute="all").reset_index(drop=True)
        equal = judged(equal.assign(reference="lapa2"), ["words", "model", "method"])
        keys = [*SETTING, "ratio", "family"]
        by = {metric: part.set_index(keys) for metric, part in equal.groupby("metric")}
        for i, row in equal[equal["verdict"].isin(["more", "less"])].iterrows():
            if row["metric"] != "acc":
                continue
            side, name = 1 if row["verdict"] == "more" else -1, tuple(row[keys])
            masked = by["acc masked"].loc[name]
            against = ["disputed"] * (not by["acc (linear)"].loc[name, "difference"] * side > 0)
            low, high = masked["difference_low"] * side, masked["difference_high"] * side
            against += ["echo"] * (not min(low, high) > 0)
            equal.loc[i, "verdict"] += f" ({', '.join(against)})" * bool(against)
        return equal[[*keys, "metric", "p_holm", "verdict"]]

    yield Whole(
        "steering/steering.equal.csv",
        [*SETTING, "ratio", "family", "metric"],
        verdicts,
        digits=5,
        where={"attribute": "all"},
        source="its p",
    )


def heads() -> Iterator[Whole]:
    """Sets of heads at equal attention: all arms, and all differences."""
    metrics = ("acc hidden", "acc (linear)")

    def arms(file: str) -> pd.DataFrame:
        return pd.DataFrame(
            {"arm": arm, "measure": measure, "texts": len(own)}
            | named(mean(own[measure], own["prompt"]), "mean", "low", "high")
            for arm, own in rows(file).groupby("arm")
            for measure in (*metrics, "attention")
        )

    def differences(file: str) -> pd.DataFrame:
        texts = rows(file)
        names = list(texts["arm"].unique())
        (chosen,) = (
            name for name in names if name.endswith(" heads") and name.split()[0].isdecimal()
        )
        others = [name for name in names if name not in ("no bias", chosen)]
        pairs = [(chosen, name) for name in others]
        pairs += [(name, "no bias") for name in (chosen, *others)]
        made = pd.DataFrame(
            {"metric": metric, "arm": arm, "against": against}
            | named(difference(cells, arm, against), "difference", "low", "high", "p")
            for metric in metrics
            for cells in [by_arm(texts, metric)]
            for arm, against in pairs
        )
        return made.assign(p_holm=[p for _, part in made.groupby("metric", sort=False)
                                   for p in holm(part["p"])])  # fmt: skip

    for folder in ("heads", "heads/wording", "heads/gemma", "heads/soft"):
        if not (FIGURES / folder / "texts.parquet").exists():
            continue
        for name, keys, made in (
            ("arms", ["arm", "measure"], arms),
            ("differences", ["metric", "arm", "against"], differences),
        ):
            yield Whole(
                f"{folder}/{name}.csv",
                keys,
                lambda made=made, folder=folder: made(f"{folder}/texts.parquet"),
                digits=5,
            )


def detoxification() -> Iterator[Whole]:
    """The raw model beside three methods: all arms, and all differences."""

    def arms() -> pd.DataFrame:
        return pd.DataFrame(
            {"method": method, "arm": arm, "scorer": scorer, "texts": len(own)}
            | {"prompts": own["prompt"].nunique()}
            | named(mean(own[scorer], own["prompt"]), "mean", "low", "high")
            for scorer in ("adapter", "linear")
            for (method, arm), own in rows("detoxification/texts.parquet").groupby(
                ["method", "arm"]
            )
        )

    def differences() -> pd.DataFrame:
        texts = rows("detoxification/texts.parquet").assign(attribute="nontoxic")
        texts["arm"] = texts["method"] + ", " + texts["arm"]
        alphas = {"negprompt": "alpha 1", "preadd": "alpha 2", "palette": "alpha 2"}
        pairs = [
            *(("raw", name, arm, "raw model")
              for name, alpha in alphas.items() for arm in ("no bias", alpha)),
            *(("bias", name, alpha, "no bias") for name, alpha in alphas.items()),
            *(("alpha", "negprompt", arm, "alpha 1")
              for arm in ("no bias", "alpha 0.5", "alpha 2")),
        ]  # fmt: skip
        made = pd.DataFrame(
            {"family": family, "method": method, "arm": arm, "scorer": scorer, "against": against}
            | named(
                difference(
                    cells,
                    f"{method}, {arm}",
                    "none, no bias" if against == "raw model" else f"{method}, {against}",
                ),
                "mean",
                "low",
                "high",
                "p",
            )
            for scorer in ("adapter", "linear")
            for cells in [by_arm(texts, scorer)]
            for family, method, arm, against in pairs
        )
        made["p_holm"] = made.groupby(["family", "scorer"])["p"].transform(
            lambda p: holm(p.tolist())
        )
        return made

    yield Whole("detoxification/arms.csv", ["method", "arm", "scorer"], arms)
    yield Whole(
        "detoxification/differences.csv", ["family", "method", "arm", "scorer"], differences
    )


RIVALS = {
    "": "sentiment",
    "again": "sentiment, other prompts",
    "soft": "sentiment, soft prefixes",
    "topic": "topic",
    "topic-soft": "topic, soft prefixes",
    "air-decoding": "Air-Decoding",
    "dexperts": "DExperts",
    "gemma": "Gemma as the writer",
}
"""Folders of figures/rivals, and what they are called in its tables."""
WAYS = {
    "head-selective": "chosen heads",
    "head-selective, opposing down": "chosen heads, opposing down",
    "omega": "the method, stronger",
    "strength": "the method, stronger",
    "caa, layer 13": "activation addition",
    "caa, layer 20": "activation addition",
    "caa, layer 25": "activation addition",
}
"""Families that figures/rivals/settings.csv has, and what they are called there."""


def rivals() -> Iterator[Whole]:
    """Rivals of the bias: all arms, and all ways at equal perplexity."""
    compares, beside = ("acc hidden", "acc (linear)", "rep"), ("bits", "bits (writer)")

    @cache
    def both(folder: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        scored = rows(f"{folder}/texts.parquet")
        parts = {"all": scored}
        if (scored["attribute"] == "world").any():
            world = scored["attribute"] == "world"
            parts |= {"world": scored[world], "others": scored[~world]}
        pairs = rows(f"{folder}/diversity.csv").groupby(["family", "strength"])["distinct-2"].mean()
        arms, equal = [], []
        for name, texts in parts.items():
            means, n = arm_means(texts, [*compares, *beside]), texts["prompt"].nunique()
            table = points(means, [*compares, *beside], n).assign(attributes=name)
            base = table.loc[table["family"] == "baseline", "perplexity"].iloc[0]
            table = table.assign(cost=table["perplexity"] / base)
            arms.append(table.join(pairs, on=["family", "strength"]))
            own = {arm: of[:, : 1 + len(compares)] for arm, of in means.items()}
            there = [name for name in ("lapa2", "head-selective") if name in texts["family"].values]
            equal.append(compared(own, compares, n, there).assign(attributes=name))
        made = judged(pd.concat(equal, ignore_index=True), ["attributes", "reference"])
        return pd.concat(arms), made

    def settings() -> pd.DataFrame:
        """The best ways minus LaPA2 in all heads, of all settings; of activation addition the last
        layer."""
        tables = []
        for name, setting in RIVALS.items():
            equal = rows(f"rivals/{name}/equal.csv", attributes="all", reference="lapa2")
            equal = equal[equal["family"].isin(WAYS) & equal["difference_low"].notna()]
            tables.append(equal.assign(setting=setting, way=equal["family"].map(WAYS)))
        keys = ["setting", "way", "ratio", "metric"]
        made = pd.concat(tables)[[*keys, *CHANGE, "p_holm", "verdict", "prompts"]]
        made = made.rename(columns={"difference_low": "low", "difference_high": "high"})
        return made.drop_duplicates(keys, keep="last")

    def orders() -> pd.DataFrame:
        """Rank correlations of perplexity and bits."""
        made = []
        for name, setting in RIVALS.items():
            for by, metric in (("other model", "bits"), ("writer", "bits (writer)")):
                arms = rows(f"rivals/{name}/arms.csv", attributes="all", metric=metric)
                value = np.corrcoef(rankdata(arms["perplexity"]), rankdata(arms["mean"]))[0, 1]
                facts = {"setting": setting, "by": by, "arms": len(arms)}
                made.append(facts | {"spearman": value})
        return pd.DataFrame(made)

    folders = [f"rivals/{name}".rstrip("/") for name in RIVALS]
    folders = [folder for folder in folders if (FIGURES / folder / "texts.parquet").exists()]
    for folder in folders:
        arm = ["attributes", "family", "strength", "metric"]
        way = ["attributes", "reference", "ratio", "family", "metric"]
        yield Whole(f"{folder}/arms.csv", arm, lambda folder=folder: both(folder)[0])
        yield Whole(f"{folder}/equal.csv", way, lambda folder=folder: both(folder)[1])
    if len(folders) == len(RIVALS):
        way = ["setting", "way", "ratio", "metric"]
        yield Whole("rivals/settings.csv", way, settings, source="equal.csv of all folders")
        by = ["setting", "by"]
        yield Whole("rivals/bits.csv", by, orders, digits=4, source="arms.csv of all folders")


TURNS = (1, 4, 8)
"""Turns whose answers are compared."""


def instructions() -> Iterator[Whole]:
    """Do instructions hold: adherence by arm and turn, all arms minus no bias, all ways at equal
    perplexity; and attention on the message with its effect."""
    arm, wide = ["family", "strength", "top_k"], [f"turn {turn}" for turn in TURNS]
    metrics = (*wide, "fall", "strict", "relevant")
    measures = ("adherence", "chance", "above", "strict", "ln cost", "relevant")

    def interval(values: pd.Series, messages: pd.Series) -> dict[str, float]:
        there = values.notna()
        counts = {"answers": int(there.sum()), "messages": messages[there].nunique()}
        return named(mean(values, messages), "mean", "low", "high") | counts

    @cache
    def answers(folder: str) -> pd.DataFrame:
        """With ln of cost: of first answers without a bias that adhere to a message of the kind."""
        texts = rows(f"{folder}/answers.parquet")
        first = texts[(texts["turn"] == 1) & (texts["family"] == "baseline")]
        plain = first[first["adherence"] >= 1 / 3].groupby("kind")["nll"].mean()
        return texts.assign(**{"ln cost": texts["nll"] - texts["kind"].map(plain)})

    def adhered(folder: str, by: Sequence[str]) -> pd.DataFrame:
        made = []
        for group, of in answers(folder).groupby(list(by), sort=False):
            facts = dict(zip(by, group, strict=True))
            for turn, there in of.groupby("turn"):
                for measure in measures:
                    row = facts | {"turn": str(turn), "measure": measure}
                    made.append(row | interval(there[measure], there["message"]))
            chats = of.pivot_table(index=["message", "first"], columns="turn", values="above")
            fall = (chats[8] - chats[1]).reset_index(name="fall")
            row = facts | {"turn": "1 to 8", "measure": "fall"}
            made.append(row | interval(fall["fall"], fall["message"]))
        return pd.DataFrame(made)

    def arms_of(texts: pd.DataFrame) -> tuple[Means, int]:
        """The means of every arm, of what is compared."""
        texts = texts.drop(columns="nll").rename(columns={"message": "prompt", "ln cost": "nll"})
        for turn in TURNS:
            texts[f"turn {turn}"] = texts["above"].where(texts["turn"] == turn)
        last = texts["turn"] == 8
        texts["strict"] = texts["strict"].where(last)
        chat = ["family", "strength", "top_k", "prompt", "first", "sample"]
        begun = texts[texts["turn"] == 1].set_index(chat)["above"].rename("begun")
        texts = texts.join(begun, on=chat)
        texts["fall"] = (texts["above"] - texts["begun"]).where(last)
        return arm_means(texts, metrics), texts["prompt"].nunique()

    def changes(folder: str) -> pd.DataFrame:
        made, texts = [], answers(folder)
        language = texts["kind"] == "language"
        for name, own in (
            ("all", texts),
            ("languages", texts[language]),
            ("personas", texts[~language]),
        ):
            if not len(own):
                continue
            means, n = arms_of(own)
            for (family, strength), of in means.items():
                if family == "baseline":
                    continue
                gap = of - means["baseline", 0.0]
                for i, metric in enumerate(metrics, 1):
                    made.append(
                        {"family": family, "strength": strength, "metric": metric, "prompts": n}
                        | {"messages": name, "cost": np.exp(gap[0, 0])}
                        | named(ends(gap[:, i], n), "difference", "low", "high")
                        | {"p": beyond(gap[1:, i], n, -1e-12)}
                        | {"tied": beyond(gap[1:, i], n, 1e-12)}
                    )
        # Adherence has few values, so that many resamples are 0 but for rounding, which decides
        # whether they count; then p is anything between.
        table = pd.DataFrame(made)
        keys = ["messages", "family", "step", "metric"]
        there = rows(f"{folder}/arms.csv").rename(columns={"p": "said"})
        for part in (table, there):
            part["step"] = part["strength"].map("{:.5g}".format)
        table = table.join(there.set_index(keys)["said"], on=keys)
        table["p"] = table["said"].clip(table["p"], table["tied"]).fillna(table["p"])
        return table.drop(columns=["said", "tied", "step"])

    def equal(folder: str) -> pd.DataFrame:
        texts = answers(folder)
        means, n = arms_of(texts)
        repeated = "message in every user turn"
        made = compared(means, metrics, n)
        made = made[~made["family"].isin([repeated, "message in the first user turn"])]
        if (repeated, 1.0) in means:
            unit, base = means[repeated, 1.0][:, 0], means["baseline", 0.0][0, 0]
            beside = compared(means, metrics, n, ratios=(1.0,), unit=unit)
            beside = beside[beside["family"].isin(["lapa2", repeated])]
            beside = beside.assign(ratio=beside["perplexity"] / np.exp(base))
            made = pd.concat([made, beside])
        made = judged(made.reset_index(drop=True)).drop(columns="reference")
        if texts["round"].nunique() < 2:
            made = made.assign(p=np.nan, p_holm=np.nan, verdict="")
        return made

    def words(folder: str) -> pd.DataFrame:
        """What the tables say, an arm a row."""
        of_turn = rows(f"{folder}/adherence.csv")
        made = of_turn[["family", "strength"]].drop_duplicates().set_index(["family", "strength"])
        for column, measure, turn in (
            *((f"turn {turn}", "above", str(turn)) for turn in TURNS),
            ("fall", "fall", "1 to 8"),
        ):
            fits = (of_turn["measure"] == measure) & (of_turn["turn"] == turn)
            own = of_turn[fits].set_index(["family", "strength"])
            made[column] = [
                f"{middle:.2f} [{low:.2f}, {high:.2f}]"
                for middle, low, high in own.loc[made.index, ["mean", "low", "high"]].to_numpy()
            ]
        cost = rows(f"{folder}/arms.csv", messages="all", metric="turn 8")
        fits = (of_turn["measure"] == "relevant") & (of_turn["turn"] == "8")
        made["relevant"] = of_turn[fits].set_index(["family", "strength"])["mean"]
        made["cost"] = cost.set_index(["family", "strength"])["cost"]
        equal = rows(f"{folder}/equal.csv", ratio=1.1, metric="turn 8").set_index("family")
        equal = equal[["difference", "p_holm", "verdict"]]
        made = made.reset_index().join(equal, on="family")
        return made.rename(columns={"difference": "way minus all heads"})

    def effects() -> pd.DataFrame:
        keys = ["family", "strength", "turn"]
        return pd.DataFrame(
            dict(zip(keys, group, strict=True))
            | {"measure": measure}
            | interval(of[measure], of["message"])
            for group, of in rows("instructions/effects.parquet").groupby(keys, sort=False)
            for measure in ("attention", "js")
        )

    def effect_changes() -> pd.DataFrame:
        """Later arms minus earlier ones, paired on chats."""
        chat = ["message", "prompt", "turn"]
        wide = rows("instructions/effects.parquet").pivot_table(
            index=chat, columns="family", values=["attention", "js"]
        )
        made = []
        for before, after in combinations(["baseline", "lapa2", "head-selective"], 2):
            for measure in ("attention", "js"):
                gaps = (wide[measure][after] - wide[measure][before]).reset_index(name="gap")
                for turn, of in gaps.groupby("turn"):
                    row = interval(of["gap"], of["message"])
                    facts = {"family": after, "against": before, "turn": turn, "measure": measure}
                    made.append(facts | {"difference": row.pop("mean")} | row)
        return pd.DataFrame(made)

    for folder in ("instructions", "instructions/held-out"):
        if not (FIGURES / folder / "answers.parquet").exists():
            continue
        for name, keys, made in (
            ("adherence", [*arm, "turn", "measure"], lambda folder: adhered(folder, arm)),
            (
                "kinds",
                [*arm, "kind", "turn", "measure"],
                lambda folder: adhered(folder, [*arm, "kind"]),
            ),
            ("arms", ["messages", "family", "strength", "metric"], changes),
            ("equal", ["ratio", "family", "metric"], equal),
        ):
            compute = lambda made=made, folder=folder: made(folder)  # noqa: E731
            yield Whole(f"{folder}/{name}.csv", keys, compute, digits=5)
    yield Whole("instructions/effect.csv", ["family", "strength", "turn", "measure"], effects, 5)
    change = ["family", "against", "turn", "measure"]
    yield Whole("instructions/effect.changes.csv", change, effect_changes, 5)
    yield Whole(
        "instructions/table.csv",
        ["family", "strength"],
        lambda: words("instructions"),
        digits=4,
        source="adherence.csv, arms.csv and equal.csv",
    )


def fade() -> Iterator[Item]:
    """Lex by the tokens in between, and shares of its fade, all heads."""

    def control(filler: int, bias: str | None = None) -> np.ndarray:
        heads = None if bias is None else "all heads"
        made = rows("labels/fading/prompts.csv", filler=filler, bias=bias, heads=heads)
        return made.sort_values("prompt")["control"].to_numpy()

    def share(filler: int, bias: str) -> Values:
        near, far, changed = control(1), control(filler), control(filler, bias)
        return ratio(near - changed if bias == "removed" else changed - far, near - far, 2000)

    def levels() -> pd.DataFrame:
        made, near = [], control(1)
        for filler in (1, 64, 128, 256):
            here, ones = control(filler), np.ones(len(near))
            made.append(
                {"filler": filler, "prompts": len(here)}
                | named(ratio(here, ones, 2000), "control", "low", "high")
                | named(ratio(near - here, ones, 2000), "fade", "fade_low", "fade_high")
            )
        return pd.DataFrame(made)

    yield Whole("labels/fading/control.csv", ["filler"], levels)

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


def causes() -> Iterator[Whole]:
    """Shares of the fade by cause: means over all orders of undoing them; and by other changes."""
    factors = ("distance", "keys", "content", "relay")
    others = ("hold", "weights", "number", "equal", "exchanged")
    ends, file = ("share", "low", "high"), "fading/account/prompts.parquet"
    setting = ["part", "filler", "measure"]

    def values() -> Iterator[tuple[dict[str, object], pd.DataFrame]]:
        for group, of in table(file).groupby(setting):
            states = of.pivot(index="prompt", columns="state", values="value")
            yield dict(zip(setting, group, strict=True)) | {"prompts": len(states)}, states

    def shares() -> pd.DataFrame:
        made = []
        for facts, states in values():

            def at(far: Sequence[str], states: pd.DataFrame = states) -> np.ndarray:
                name = "+".join(factor for factor in factors if factor in far)
                return states[name or "near"].to_numpy()

            fade = at(()) - at(factors)
            for cause in factors:
                orders = [order[: order.index(cause) + 1] for order in permutations(factors)]
                lost = [at(order[:-1]) - at(order) for order in orders]
                parts = [part.sum() / fade.sum() for part in lost]
                first, last = at(()) - at((cause,)), at(set(factors) - {cause}) - at(factors)
                made.append(
                    facts | {"name": cause, "least": min(parts), "most": max(parts)}
                    | {"first": first.sum() / fade.sum(), "last": last.sum() / fade.sum()}
                    | named(ratio(np.mean(lost, axis=0), fade, 2000), *ends)
                )  # fmt: skip
            gains = {name: states[name].to_numpy() - at(factors) for name in others}
            gains["direct"] = (states["direct near"] - states["direct far"]).to_numpy()
            made += [
                facts | {"name": name} | named(ratio(gain, fade, 2000), *ends)
                for name, gain in gains.items()
            ]
        return pd.DataFrame(made)

    def fades(measure: str) -> pd.DataFrame:
        made = []
        for facts, states in values():
            near, far = states["near"].to_numpy(), states["+".join(factors)].to_numpy()
            if facts["measure"] == measure:
                for name, numbers in (("near", near), ("far", far), ("fade", near - far)):
                    of = ratio(numbers, np.ones(len(numbers)), 2000)
                    facts |= named(of, name, f"{name}_low", f"{name}_high")
                made.append(facts)
        return pd.DataFrame(made)

    yield Whole("fading/account/account.csv", [*setting, "name"], shares)
    for measure in ("lex", "js", "attention"):
        yield Whole(
            "fading/account/fades.csv",
            ["part", "filler"],
            lambda measure=measure: fades(measure).drop(columns="measure"),
            where={"measure": measure},
        )


def labels(folder: str = "labels") -> Iterator[Headline]:
    """The arms of a folder's texts.parquet."""
    group, first = ["part", "task", "method"], first_runs()

    @cache
    def texts(*of: str) -> pd.DataFrame:
        return rows(f"{folder}/texts.parquet", **dict(zip(group, of, strict=True)))

    @cache
    def cells(metric: str, *of: str) -> pd.DataFrame:
        return by_arm(texts(*of), metric)

    for row in table(f"{folder}/labels.csv").fillna({"against": ""}).to_dict("records"):
        key = tuple(row[name] for name in (*group, "arm", "metric"))
        where = {name: row[name] for name in (*group, "arm", "metric")}
        where["against"] = row["against"] or None

        def compute(row: dict = row) -> Values:
            of = tuple(row[name] for name in group)
            if row["against"]:
                values = difference(cells(row["metric"], *of), row["arm"], row["against"])
            else:
                own = texts(*of)[texts(*of)["arm"] == row["arm"]]
                values = mean(own[row["metric"]], own["prompt"])
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


# --- tables that hold the same number twice


STATISTICS = {"here": "difference", "low": CHANGE[1], "high": CHANGE[2], "p": "p"}
"""Columns of a table of claims, and of the table of the arms."""
SECONDS = {"second_here": "difference", "second_low": CHANGE[1], "second_high": CHANGE[2]}
CLAIMED = ("undecided/detox", "paper/quick/tables/detox", "paper/quick/tables/sent_topic")
"""Tables of arms that have every difference of their claims."""


def copies() -> Iterator[Whole]:
    """Tables that have the same numbers, of which no labels are committed."""
    claim = ["item", "claim", "metric"]

    def from_arms(name: str) -> pd.DataFrame:
        """Every claim as the table of the arms has it: of all differences of its method and metric
        the one that is nearest."""
        made, arms = [], rows(f"{name}.csv")
        for row in rows(f"{name}.claims.csv").to_dict("records"):
            own = arms[(arms["task"] == row["task"]) & (arms["method"] == row["method"])]
            here = own[(own["metric"] == row["metric"]) & own["difference"].notna()]
            away = sum((here[of] - row[column]).abs() for column, of in STATISTICS.items())
            nearest = here.loc[away.idxmin()]
            facts = {key: row[key] for key in claim}
            facts |= {column: nearest[source] for column, source in STATISTICS.items()}
            second = own[own["metric"] == f"{row['metric']} (linear)"]
            for name in ("arm", "length", "attribute", "variant"):
                same = second[name] == nearest[name]
                second = second[same | second[name].isna() & pd.isna(nearest[name])]
            one = second.iloc[0] if len(second) else {}
            made.append(facts | {name: one.get(of, np.nan) for name, of in SECONDS.items()})
        return pd.DataFrame(made)

    def from_levels(name: str, metric: str) -> pd.DataFrame:
        """Differences from no bias as differences of two means, which have the same prompts."""
        arms, level = rows(f"{name}.csv", metric=metric), ["method", "length"]
        base = arms[arms["arm"] == "baseline"].set_index(level)["mean"].rename("base")
        own = arms.join(base, on=level)
        change = (own["mean"] - own["base"]).where(own["arm"] != "baseline")
        return own[[*level, "arm"]].assign(difference=change)

    def from_verdicts() -> pd.DataFrame:
        """The first run of every claim that was tried again."""
        names = {"here": "here_before", "low": "low_before", "high": "high_before"}
        names |= {"prompts": "prompts_before", "verdict": "verdict_before"}
        there = rows("paper/quick/tables/verdicts.csv").rename(columns=names)
        again = rows("undecided/claims.csv")[claim]
        return again.merge(there[[*claim, *names.values()]], on=claim)

    def from_bases() -> pd.DataFrame:
        """Differences from no bias; of Air-Decoding at the omega of the tests."""
        arms = rows("bases/bases.csv")
        omega = {"(a), omega 140": "(a)", "(c), omega 60": "(c)"}
        part = arms["variant"].where(arms["method"] != "air-decoding", arms["variant"].map(omega))
        arms = arms.assign(part=part)[arms["difference"].notna()]
        names = {"difference_low": "low", "difference_high": "high"}
        keys = ["part", "task", "method", "arm", "metric", "attribute"]
        arms = arms.drop(columns=["low", "high"]).rename(columns=names)
        # Of words that stand in no text of either arm, bases.csv has the interval of a share that
        # is 0, and the tests have none.
        nowhere = (arms["difference"] == 0) & (arms["low"] == -arms["high"])
        arms.loc[nowhere, ["low", "high"]] = 0.0
        tests = rows("bases/bases.tests.csv", against="baseline")[keys]
        values = [*keys, "difference", "low", "high", "p"]
        return tests.merge(arms[values], on=keys)

    def from_items() -> pd.DataFrame:
        """The claims of all tables of the paper."""
        files = sorted((FIGURES / "paper/quick/tables").glob("*.claims.csv"))
        tables = [table(f"paper/quick/tables/{file.name}") for file in files]
        made = pd.concat([part for part in tables if len(part)], ignore_index=True)
        return made

    for name, metric in product(CLAIMED[:2], ("tox", "tox (linear)")):
        yield Whole(
            f"{name}.csv",
            ["method", "length", "arm"],
            lambda name=name, metric=metric: from_levels(name, metric),
            digits=4,
            where={"metric": metric},
            source="its own means",
        )
    for name in CLAIMED:
        yield Whole(
            f"{name}.claims.csv", claim, lambda name=name: from_arms(name), source=f"{name}.csv"
        )
    yield Whole(
        "paper/quick/tables/verdicts.csv", claim, from_items, source="the claims of all tables"
    )
    verdicts = "paper/quick/tables/verdicts.csv"
    yield Whole("undecided/claims.csv", claim, from_verdicts, source=verdicts)
    yield Whole(
        "bases/bases.tests.csv",
        ["part", "task", "method", "arm", "metric", "attribute"],
        from_bases,
        where={"against": "baseline"},
        source="bases/bases.csv",
    )


GROUPS: dict[str, Callable[[], Iterator[Item]]] = {
    group.__name__: group
    for group in (
        steering,
        heads,
        detoxification,
        rivals,
        instructions,
        fade,
        causes,
        labels,
        repeated,
        order,
        chats,
        copies,
    )
}
ARE_LABELS = (
    "bases/texts.csv",
    "chat/texts.csv",
    "circuits/*/control.csv",
    "circuits/criteria/*/controls.csv",
    "instructions/read.csv",
    "instructions/held-out/read.csv",
    "labels/fading/prompts.csv",
    "lex_and_accuracy/control.csv",
    "rivals/read.csv",
    "rivals/*/read.csv",
    "rivals/readers.csv",
)
"""Tables that have a row a text or a prompt."""
UNREAD = {
    "circuits/criteria/*/faithfulness.csv": "controls.csv",
    "lex_and_accuracy/*.csv": "control.csv",
    "rivals/readers.agreement.csv": "readers.csv",
}
"""Tables whose labels are committed, and are not read here."""


def not_computed() -> list[str]:
    """Tables of `figures/` that are computed in part, or not at all, and why."""
    counts: dict[str, int] = {}
    compared_with: dict[str, str] = {}
    for group in GROUPS.values():
        for item in group():
            if isinstance(item, Whole) and group is copies:
                compared_with[item.file] = item.source
            elif isinstance(item, Headline):
                counts[item.file] = counts.get(item.file, 0) + 1
            elif not item.source or item.file not in counts:
                counts[item.file] = counts.get(item.file, 0) + len(item.rows())
    lines = []
    for path in sorted(FIGURES.rglob("*.csv")):
        file = path.relative_to(FIGURES).as_posix()
        if any(fnmatch(file, pattern) for pattern in ARE_LABELS):
            continue
        labels = [source for pattern, source in UNREAD.items() if fnmatch(file, pattern)]
        if file in counts:
            if counts[file] < len(table(file)):
                lines.append(f"in part  {file}: {counts[file]} of {len(table(file))} rows")
        elif labels:
            lines.append(f"not read {file}: {labels[0]} has its labels")
        else:
            beside = f"; compared with {compared_with[file]}" if file in compared_with else ""
            lines.append(f"cannot   {file}: no labels are committed{beside}")
    return lines


def main(*names: str) -> int:
    """Print a line for each table or row of these groups; by default of all."""
    if unknown := sorted(set(names) - set(GROUPS)):
        print(f"no group {unknown[0]!r}; the groups are {', '.join(GROUPS)}", file=sys.stderr)
        return 2
    started = said = time.monotonic()
    differing = 0
    for name in names or GROUPS:
        for item in GROUPS[name]():
            if (now := time.monotonic()) > said + 2:
                said = now
                print(f"{now - started:.0f} s: {name}, {item.file}", file=sys.stderr)
            for line in item.lines():
                differing += line.startswith("DIFFERS")
                print(line)
    lacking = [] if names else not_computed()
    for line in lacking:
        print(line)
    print(f"{differing} differ")
    if lacking:
        cannot = sum(line.startswith("cannot") for line in lacking)
        rest = f"{len(lacking) - cannot} more in part or not read"
        print(f"{cannot} tables cannot be computed, since no labels are committed; {rest}")
    return int(differing > 0)


def shown(values: Values) -> str:
    """A mean, its interval and p."""
    text = f"{values[0]:.4g} [{values[1]:.4g}, {values[2]:.4g}]"
    return f"{text}, p {values[3]:.2g}" if len(values) > 3 else text


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
