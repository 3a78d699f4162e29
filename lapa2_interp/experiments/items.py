"""The paper item by item: scores of a run's cells as a table with intervals, beside the paper's numbers, and its claims judged.

An item is a figure or table of the paper. Its script in `analyses/` opens a `Bench` on a run folder, scores the cells of the
item's grid (scores are kept in RUN/scores, so nothing is scored twice), writes RUN/tables/ITEM.csv, .md and .tex, and judges
the claims the paper makes with it (RUN/tables/ITEM.claims.csv). Scripts in `figures/` draw from those tables. Nothing here
generates.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from lapa2_interp.errors import RunError, ScoringError, counted
from lapa2_interp.experiments.estimates import FRACTIONS, PERPLEXITY_TEXTS
from lapa2_interp.experiments.scripts import ScriptOptions, add_scoring
from lapa2_interp.experiments.sweep import SweepRun, load_run
from lapa2_interp.machine import tell_if_slow
from lapa2_interp.methods import registry
from lapa2_interp.stats import Difference, paired_difference

if TYPE_CHECKING:
    import xarray as xr

PAPER_MODELS = {
    "gpt2-medium": "gpt2-medium",
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "EleutherAI/pythia-12b": "pythia-12b",
    "meta-llama/Llama-2-13b-hf": "llama-2-13b",
}
"""Names of the paper's models as they load, and as its numbers name them."""

SAME_TABLE = {
    "prefix_preadd_components": "components",
    "hard_prefix_robustness": "hard_prefix",
    "decay": "sent_topic",
    "alpha": "scaling",
}
"""Items whose numbers stand in another of the paper's tables."""
METRICS = {
    "accuracy": ("acc", 100.0), "toxicity": ("tox", 100.0), "perplexity": ("ppl", 1.0),
    "distinct-1": ("dist1", 1.0), "distinct-2": ("dist2", 1.0), "distinct-3": ("dist3", 1.0),
}  # fmt: skip
"""Our metrics by the paper's names and units: percent, perplexity, shares."""
BETTER = {"acc": 1, "tox": -1, "ppl": -1, "dist1": 1, "dist2": 1, "dist3": 1}
"""Whether more of a metric is better."""
HALVES = {0: "whole", 1: "first", 2: "second"}
"""Parts of a text in words: of table half."""
KEYS = ["model", "task", "method", "variant", "arm", "length", "part", "attribute"]
ARM = ["model", "task", "method", "variant", "arm"]
PAPER_SCORERS = {"acc": "Air-Decoding's RoBERTa", "tox": "perspective", "ppl": "gpt2-large", "dist": "roberta-large"}
"""What a scorer's name says where it is the paper's; differences from its numbers are told for these alone."""


@cache
def reported() -> pd.DataFrame:
    """Every number of the paper's result tables: table, task, model, method, lapa2, length, variant, metric, value."""
    file = resources.files("lapa2_interp.experiments") / "reported_results.csv"
    return pd.read_csv(Path(str(file)), keep_default_na=False).assign(value=lambda table: table["value"].astype(float))


def paper_number(table: str, **wanted: Any) -> float:
    """One number of the paper; NaN where it has none.

    Args:
        wanted: Columns of `reported` and their values; methods by our names.

    Raises:
        RunError: More than one fits.
    """
    found = reported()
    found = found[found["table"] == table]
    if "method" in wanted:
        wanted["method"] = registry()[wanted["method"]].paper_name
    for column, value in wanted.items():
        found = found[found[column] == value]
    if len(found) > 1:
        raise RunError(f"{len(found)} numbers of the paper's table {table} fit {wanted}; name more columns")
    return float(found["value"].iloc[0]) if len(found) else float("nan")


@dataclass(frozen=True)
class Claim:
    """What the paper says of a comparison, what was found here, and whether the two agree.

    Attributes:
        item, claim: Where it is made, and in words.
        metric, expected: What is compared, and the direction the paper reports: "more", "less" or "same".
        paper: Its difference, in the metric's unit; NaN where it gives none.
        here, low, high: Ours with its 95 % interval. p: sign-flip permutation. detectable: what these texts could have shown.
        verdict: "as in the paper", "against the paper", "inconclusive", or "missing".
        prompts: Independent clusters.
    """

    item: str
    claim: str
    metric: str
    expected: Literal["more", "less", "same"]
    paper: float
    here: float
    low: float
    high: float
    p: float
    detectable: float
    verdict: str
    prompts: int


def judged(expected: str, low: float, high: float, margin: float = 0.0) -> str:
    """The verdict on an interval: does all of it lie where the paper says?

    Args:
        expected: more (than 0), less, or same (inside plus or minus `margin`).
    """
    if np.isnan(low):
        return "inconclusive"
    if expected == "same":
        inside, outside = low > -margin and high < margin, low > margin or high < -margin
    else:
        sign = 1 if expected == "more" else -1
        inside, outside = min(sign * low, sign * high) > 0, max(sign * low, sign * high) < 0
    return "as in the paper" if inside else "against the paper" if outside else "inconclusive"


@dataclass
class Bench:
    """One item on one run.

    Attributes:
        run: The run folder, read.
        item: The item's name.
        grids: The grids whose cells it shows, without their folder (quick/, paper/).
        out: Where tables go.
        scorers: NAME or NAME=MODEL, as `lapa2 score` takes them.
        dtype: Precision of the perplexity model. Perplexity is a measurement: float32, whatever wrote the texts.
    """

    run: SweepRun
    item: str
    grids: tuple[str, ...]
    out: Path
    scorers: tuple[str, ...] = ("accuracy", "toxicity", "perplexity")
    perplexity_texts: int = PERPLEXITY_TEXTS
    device: str | None = None
    dtype: str = "float32"
    claims: list[Claim] = field(default_factory=list)
    title: str = ""

    @property
    def cells(self) -> pd.DataFrame:
        """The cells of the grids that are there, in their order, one row each, finished or not."""
        names = [name for name in self.run.listing.grids if name.rpartition("/")[2] in self.grids]
        if not names:
            wanted, have = " or ".join(map(repr, self.grids)), ", ".join(self.run.listing.grids) or "none"
            raise RunError(
                f"{self.run.folder} has no grid {wanted}, which {self.item} is made of; it has: {have}. "
                f"`lapa2 sweep quick/{self.grids[0]} --out {self.run.folder}` adds it"
            )
        keys = list(dict.fromkeys(key for name in names for key in self.run.listing.grids[name]))
        found = self.run.cells.set_index("key", drop=False).loc[keys].reset_index(drop=True)
        # Half an arm would be compared with a whole one: it counts when all its attributes are there.
        whole = (found["state"] == "finished").groupby([found[name] for name in ARM]).transform("all")
        return found.assign(state=found["state"].where(whole | (found["state"] != "finished"), "incomplete"))

    def groups(self, cells: pd.DataFrame, *further: str) -> Iterator[tuple[dict[str, Any], str, pd.DataFrame]]:
        """The cells by model, task, method and what else is named: the columns' values, these in words, the cells."""
        names = ["model", "task", "method", *further]
        for values, group in cells.groupby(names, sort=False):
            where = dict(zip(names, values, strict=True))
            several = cells["model"].nunique() > 1
            yield where, f"{where['method']}, {where['task']}" + f", {where['model']}" * several, group

    def lengths(self, cells: pd.DataFrame) -> tuple[int, ...]:
        """The five lengths of the longest of these cells."""
        return tuple(round(int(cells["max_length"].max()) * share) for share in FRACTIONS)

    def scores(
        self, cells: pd.DataFrame, lengths: Iterable[int] = (), parts: int = 1, metrics: Sequence[str] | None = None
    ) -> pd.DataFrame:
        """The texts of finished cells with their numbers: one row per text, length, part and metric (in the paper's units).

        Args:
            cells: Rows of `cells`.
            lengths: Cut texts to these, each cell up to its own; by default each cell's longest.
            parts: Score texts in this many equal parts.
            metrics: Of accuracy, toxicity and perplexity; by default what the task has.
        """
        from lapa2_interp.scoring import Cache
        from lapa2_interp.scoring.tables import score_table

        frames = []
        with Cache(self.run.folder / "scores") as cache:
            for (task, model), group in cells[cells["state"] == "finished"].groupby(["task", "model"], sort=False):
                samples = self.texts(group, lengths, parts)
                for name in metrics or (("toxicity" if task == "detox" else "accuracy"), "perplexity"):
                    texts = self._few(samples, group) if name == "perplexity" else samples
                    if not len(texts):
                        continue
                    with closing(self._scorer(name, str(task), str(model), group)) as scorer:
                        found = score_table(texts.drop(columns="tokens"), scorer, cache)
                    frames.append(found[found["metric"] == name])
        if not frames:
            return pd.DataFrame(columns=[*KEYS, "cell", "prompt", "metric", "value", "skipped", "scorer"])
        table = pd.concat(frames, ignore_index=True)
        unit = table["metric"].map(lambda metric: METRICS[metric][1])
        return table.assign(value=table["value"] * unit, metric=table["metric"].map(lambda metric: METRICS[metric][0]))

    def texts(self, group: pd.DataFrame, lengths: Iterable[int], parts: int = 1) -> pd.DataFrame:
        """The texts of finished cells of one model and task, cut as `scores` says: `SweepRun.samples` with length and part."""
        from lapa2_interp.experiments.store import read_manifest
        from lapa2_interp.models import load_tokenizer
        from lapa2_interp.scoring.texts import at_lengths, in_parts

        frames = []
        for longest in dict.fromkeys(group["max_length"].astype(int)):
            keys = list(group["key"][group["max_length"] == longest])
            samples = self.run.samples(keys)
            chosen = [length for length in lengths if length <= longest] or [longest]
            frames.append(at_lengths(samples, read_manifest(self.run.place(keys[0])), chosen))
        found = pd.concat(frames, ignore_index=True)
        if parts == 1:
            return found.assign(part=0)
        return in_parts(found, parts, load_tokenizer(str(group["model"].iloc[0])))

    def _few(self, samples: pd.DataFrame, group: pd.DataFrame) -> pd.DataFrame:
        """The first samples of every prompt, as many as make about `perplexity_texts` an arm."""
        cells = samples[["prompt", "attribute"]].drop_duplicates()
        return samples[samples["sample"] < max(1, -(-self.perplexity_texts // max(1, len(cells))))]

    def _scorer(self, name: str, task: str, model: str, group: pd.DataFrame) -> Any:
        from lapa2_interp.experiments.store import read_manifest
        from lapa2_interp.scoring.named import Options, make_scorer

        asked = next((each for each in self.scorers if each.partition("=")[0] == name), None)
        if asked is None:
            raise ScoringError(f"{self.item} needs a scorer for {name}; give --scorers {name} or {name}=MODEL")
        own = read_manifest(self.run.place(group["key"].iloc[0])).model
        options = Options(task=task, dtype=self.dtype, device=self.device, generator=own.weights)
        return make_scorer(name, asked.partition("=")[2], options)

    def table(
        self, scores: pd.DataFrame, cells: pd.DataFrame, variants: Mapping[str, str] | None = None
    ) -> pd.DataFrame:
        """Means with intervals and what each arm changed: one row per cell of the table and metric.

        Cells that are not finished have a row with no number.

        Args:
            scores: Of `scores`.
            cells: The rows of `cells` they came from.
            variants: Names in the paper's table of our arms (or variants), to put its numbers beside.

        Returns:
            Columns KEYS, metric, mean, low, high, n, prompts, skipped, scorer, difference, difference_low, difference_high, p,
            detectable (against the baseline of the same method), best, profile, paper, state.
        """
        from lapa2_interp.scoring.tables import cell_table, difference_table

        keys = [key for key in KEYS if key in scores]
        frames = [pd.DataFrame(columns=[*KEYS, "metric"])]
        if len(scores):
            means = cell_table(scores)
            changes = difference_table(scores).rename(columns={"low": "difference_low", "high": "difference_high"})
            joined, numbers = [*keys, "metric"], ["difference", "difference_low", "difference_high", "p", "detectable"]
            changes = changes.reindex(columns=[*joined, *numbers])
            frames.append(means.merge(changes, on=joined, how="left") if len(changes) else means)
            frames.append(self._distinct(scores))
        columns = [*KEYS, "metric", "mean", "low", "high", "n", "prompts", "skipped", "scorer", "difference", "difference_low",
                   "difference_high", "p", "detectable"]  # fmt: skip
        found = pd.concat(frames, ignore_index=True).reindex(columns=columns)
        found["state"] = "finished"
        gaps = cells[cells["state"] != "finished"]
        if len(gaps):
            states = gaps.groupby(ARM, sort=False)["state"].agg(lambda column: " and ".join(dict.fromkeys(column)))
            lengths = gaps.groupby(ARM, sort=False)["max_length"].max()
            rows = pd.DataFrame({"state": states, "length": lengths}).reset_index()
            rows = rows.assign(attribute="all", part=0, metric=np.where(rows["task"] == "detox", "tox", "acc"))
            found = pd.concat([found, rows], ignore_index=True)
        arms = cells.drop_duplicates(ARM)[[*ARM, "profile", "alpha"]]
        found = found.merge(arms, on=ARM, how="left")
        found["best"] = _best(found, scores)
        found["paper"] = [self._paper(row, variants or {}) for row in _records(found)]
        return _ordered(found.drop(columns="alpha"), cells)

    def _distinct(self, scores: pd.DataFrame) -> pd.DataFrame:
        from lapa2_interp.models import load_tokenizer
        from lapa2_interp.scoring.tables import distinct_cells

        first = scores[scores["metric"].isin(["acc", "tox"])]
        if not len(first):
            return pd.DataFrame()
        asked = next((each.partition("=")[2] for each in self.scorers if each.startswith("distinct=")), "")
        found = distinct_cells(first, load_tokenizer(asked) if asked else None)
        names = found["metric"].map(lambda metric: METRICS[metric][0])
        return found.assign(metric=names)

    def _paper(self, row: Mapping[str, Any], variants: Mapping[str, str]) -> float:
        if row["attribute"] not in ("all", "nontoxic") or row["model"] not in PAPER_MODELS or pd.isna(row["length"]):
            return float("nan")
        named = variants.get(row["variant"]) or variants.get(row["arm"], "")
        usual = row["alpha"] in (0.0, registry()[row["method"]].alpha) and row["profile"] in ("", "paper")
        if not usual or (not named and (variants or row["variant"])):
            return float("nan")
        variant = HALVES.get(part, named) if (part := int(row["part"])) else named
        return paper_number(
            SAME_TABLE.get(self.item, self.item), task=row["task"], model=PAPER_MODELS[row["model"]], method=row["method"],
            lapa2=row["arm"] != "baseline", length=int(row["length"]), metric=row["metric"], variant=variant,
        )  # fmt: skip

    def compare(
        self, scores: pd.DataFrame, before: Mapping[str, Any], after: Mapping[str, Any], metric: str
    ) -> Difference | None:
        """after - before, paired on prompts; None where one of them has no text."""
        chosen = [_where(scores, {**side, "metric": metric}) for side in (before, after)]
        one, two = (part[part["value"].notna()] for part in chosen)
        if not len(one) or not len(two) or not set(one["prompt"]) & set(two["prompt"]):
            return None
        return paired_difference(
            one["value"].to_numpy(), one["prompt"].to_numpy(), two["value"].to_numpy(), two["prompt"].to_numpy()
        )

    def claim(
        self, text: str, scores: pd.DataFrame, before: Mapping[str, Any], after: Mapping[str, Any], metric: str,
        expected: Literal["more", "less", "same"], paper: float = float("nan"), margin: float = 0.0,
    ) -> None:  # fmt: skip
        """Judge what the paper says of a comparison."""
        found = self.compare(scores, before, after, metric)
        self.note(text, metric, expected, found, paper, margin)

    def as_reported(
        self, text: str, scores: pd.DataFrame, before: Mapping[str, Any], after: Mapping[str, Any], metric: str,
        known: Sequence[float],
    ) -> None:  # fmt: skip
        """Judge a comparison in the direction of the paper's two numbers; where it has none, it claims nothing.

        Args:
            text: With {more} or {raises} for the direction.
            known: The paper's numbers before and after.
        """
        gap = known[1] - known[0]
        if not np.isnan(gap):
            text = text.format(more="more" if gap > 0 else "less", raises="raises" if gap > 0 else "lowers")
            self.claim(text, scores, before, after, metric, "more" if gap > 0 else "less", gap)

    def note(
        self, text: str, metric: str, expected: Literal["more", "less", "same"], found: Difference | None,
        paper: float = float("nan"), margin: float = 0.0,
    ) -> None:  # fmt: skip
        """Judge a claim whose difference was computed elsewhere; None: there was nothing to compare."""
        if found is None:
            none = float("nan")
            found, verdict = Difference(none, none, none, none, none, 0), "missing"
        else:
            verdict = judged(expected, found.low, found.high, margin)
        self.claims.append(
            Claim(
                self.item, text, metric, expected, paper, found.mean, found.low, found.high, found.p, found.detectable, verdict,
                found.clusters,
            )
        )  # fmt: skip

    def curves(self, cells: pd.DataFrame) -> Iterable[tuple[dict[str, Any], xr.Dataset, pd.DataFrame]]:
        """Traces of finished cells, those of one arm (all its attributes) together: its columns, the trace, the samples.

        The trace is that of the branch behind the steered attribute's prefix, alone.
        """
        from lapa2_interp.decoding import join_traces
        from lapa2_interp.trace import branch_name

        for values, group in cells[cells["state"] == "finished"].groupby(ARM, sort=False):
            runs = [self.run.cell(key) for key in group["key"]]
            found = [run.trace for run in runs if run.trace is not None]
            traces = [each.sel(branch=[branch_name(each)]).assign_coords(branch=["steered"]) for each in found]
            if traces:
                samples = pd.concat([run.samples for run in runs], ignore_index=True)
                yield dict(zip(ARM, values, strict=True)), join_traces(traces, samples), samples

    def steps(self, cells: pd.DataFrame, make: Callable[[xr.Dataset, pd.DataFrame], pd.DataFrame]) -> pd.DataFrame:
        """What `make` reads off every arm's trace at the first 16 steps and every fourth after, with the arm's columns."""
        frames = []
        for arm, trace, samples in self.curves(cells):
            found = make(trace, samples)
            found = found[(found["step"] < 16) | (found["step"] % 4 == 0)]
            frames.append(found.assign(**arm))
        if not frames:
            raise RunError(
                f"{self.run.folder} has no finished cell with a trace for {self.item}; `lapa2 runs` lists what is missing"
            )
        return pd.concat(frames, ignore_index=True)

    def attention(self, cells: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Prefix attention against step of every arm, and the same at a few steps for reading.

        Judges on the way: is it higher with LaPA2, and is more of the first step's left at the last one?
        """
        from lapa2_interp.trace import pooled, step_table

        def curve(trace: xr.Dataset, samples: pd.DataFrame) -> pd.DataFrame:
            steps = step_table(trace, samples.assign(arm="one"))
            return steps[steps["name"] == "prefix"].drop(columns="arm")

        table = self.steps(cells, curve)
        kept: dict[str, dict[str, tuple[np.ndarray, pd.Series]]] = {}
        words = {tuple(where.values()): text for where, text, _ in self.groups(cells)}
        for arm, trace, samples in self.curves(cells):
            prefix = pooled(trace, "prefix")[0]
            prefix = prefix[:, : int((~np.isnan(prefix).any(axis=0)).sum())]
            place = words[arm["model"], arm["task"], arm["method"]]
            kept.setdefault(place, {})[arm["arm"]] = (prefix, samples["prompt"])
        for place, arms in kept.items():
            for name in arms.keys() - {"baseline"}:
                if "baseline" not in arms:
                    continue
                (before, one), (after, two) = arms["baseline"], arms[name]
                last = min(before.shape[1], after.shape[1]) - 1
                higher = paired_difference(before.mean(1), one, after.mean(1), two)
                left = paired_difference(before[:, last] / before[:, 0], one, after[:, last] / after[:, 0], two)
                self.note(
                    f"LaPA2 raises prefix attention, mean over steps: {place}", "prefix attention", "more", higher
                )
                self.note(f"with LaPA2 more of it is left at step {last}: {place}", "prefix attention", "more", left)
        return table, at_few_steps(table)

    def write(self, table: pd.DataFrame, notes: Sequence[str] = (), shown: pd.DataFrame | None = None) -> None:
        """Write the item's files and print it.

        Args:
            table: Tidy.
            notes: What stands under it, besides scorers, models and profiles.
            shown: For reading; by default `wide(table)`.
        """
        folder = self.out / "tables"
        folder.mkdir(parents=True, exist_ok=True)
        shown = wide(table) if shown is None else shown
        notes = [*notes, *footnotes(table), *([] if not len(gaps := _gaps(table)) else [gaps])]
        table.to_csv(folder / f"{self.item}.csv", index=False, float_format="%.6g")
        (folder / f"{self.item}.md").write_text(as_markdown(self.title, shown, notes), encoding="utf-8")
        (folder / f"{self.item}.tex").write_text(as_latex(self.title, shown, notes, self.item), encoding="utf-8")
        facts = {"item": self.item, "title": self.title, "notes": notes, "rows": shown.astype(str).to_dict("split")}
        (folder / f"{self.item}.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")
        claims = pd.DataFrame([vars(each) for each in self.claims], columns=list(Claim.__dataclass_fields__))
        claims.to_csv(folder / f"{self.item}.claims.csv", index=False, float_format="%.6g")
        print(f"{self.title}\n\n{shown.to_string(index=False)}\n")
        for line in notes:
            print(line)
        if len(claims):
            print("\n" + shown_claims(claims).to_string(index=False))
        print(f"\n{folder / self.item}.csv, .md, .tex")


def open_bench(item: str, title: str, *grids: str) -> Bench:
    """The bench of a script, from its command line: `python analyses/ITEM.py RUN`. In a notebook RUN is `LAPA2_RUN`.

    Raises:
        RunError: RUN is not a run folder, or lacks the item's grid.
    """
    parser = ScriptOptions(title)
    default = Path(os.environ.get("LAPA2_RUN", "results/quick"))
    parser.add_argument("run", type=Path, nargs="?", default=default, help="a run folder of `lapa2 sweep`")
    parser.add_argument("--out", type=Path, help="folder of tables/; by default the run's own")
    add_scoring(parser, PERPLEXITY_TEXTS)
    options = parser.read()
    tell_if_slow(options.dtype, options.device)
    return Bench(
        load_run(options.run), item, grids or (item,), options.out or options.run, tuple(options.scorers), options.perplexity,
        options.device, options.dtype, title=title,
    )  # fmt: skip


# --- tables


def at_few_steps(table: pd.DataFrame) -> pd.DataFrame:
    """Means with intervals of a table of curves at the first, some middle and the last step, one row per arm."""
    steps = sorted({0, 16, 64, 128, 256, int(table["step"].max())} & set(table["step"]))
    rows = table[table["step"].isin(steps)]
    cell = [f"{m:.3f} [{a:.3f}, {b:.3f}]" for m, a, b in rows[["mean", "low", "high"]].to_numpy(float)]
    keys = [name for name in ARM if name in ("method", "arm") or rows[name].nunique() > 1]
    shown = rows.assign(cell=cell).pivot_table(index=keys, columns="step", values="cell", aggfunc="first", sort=False)
    shown.columns = [f"step {step}" for step in shown.columns]
    return shown.reset_index().fillna("")


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def _where(table: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    chosen = pd.Series(True, index=table.index)
    for column, value in wanted.items():
        chosen &= table[column].isin(value if isinstance(value, list | tuple) else [value])
    return table[chosen]


def overall(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of all attributes together, or of the only one."""
    several = table.groupby(ARM, dropna=False)["attribute"].transform(lambda column: (column == "all").any())
    return table[(table["attribute"] == "all") | ~several]


def _best(table: pd.DataFrame, scores: pd.DataFrame) -> list[bool]:
    """Whether a mean is the best of its method's arms and surely so: better than the runner-up, the whole interval of it."""
    best = pd.Series(False, index=table.index)
    group_of = [
        key for key in ("model", "task", "method", "variant", "length", "part", "attribute", "metric") if key in table
    ]
    named = table[table["mean"].notna()] if "mean" in table else table.iloc[:0]
    for values, group in named.groupby(group_of, dropna=False, sort=False):
        if len(group) < 2:
            continue
        where = dict(zip(group_of, values, strict=True))
        order = group.sort_values("mean", ascending=BETTER[str(where["metric"])] < 0)
        first, second = order.index[:2]
        if str(where["metric"]).startswith("dist"):
            apart = table.loc[first, "low"] > table.loc[second, "high"]
        else:
            texts = _where(
                scores, {key: value for key, value in where.items() if not (key == "attribute" and value == "all")}
            )
            sides = [texts[(texts["arm"] == table.loc[i, "arm"]) & texts["value"].notna()] for i in (second, first)]
            if not all(map(len, sides)) or not set(sides[0]["prompt"]) & set(sides[1]["prompt"]):
                continue
            numbers = [column.to_numpy() for side in sides for column in (side["value"], side["prompt"])]
            found = paired_difference(numbers[0], numbers[1], numbers[2], numbers[3])
            apart = (found.low if BETTER[str(where["metric"])] > 0 else -found.high) > 0
        best[first] = bool(apart)
    return list(best)


def _ordered(table: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """Rows in the order of the grid."""
    ranks = {}
    for column in ("model", "task", "method", "variant", "arm"):
        ranks[column] = {value: i for i, value in enumerate(dict.fromkeys(cells[column]))}
    metric = {name: i for i, (name, _) in enumerate(METRICS.values())}
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


def _number(metric: str, value: float) -> str:
    return f"{value:.3f}" if metric.startswith("dist") else f"{value:.1f}"


def wide(table: pd.DataFrame) -> pd.DataFrame:
    """For reading: one row per arm, one column per metric with the interval in the cell; bold (**) where it is surely the best.

    Columns that are the same everywhere are left out; the paper's number follows its metric where there is one.
    """
    if not len(table):
        return table
    shown = overall(table)
    keys = [key for key in ("model", "task", "length", "method", "variant", "arm", "part") if key in shown]
    keys = [key for key in keys if key in ("method", "arm") or shown[key].nunique(dropna=False) > 1]
    text, counts = [], []
    for row in shown.to_dict("records"):
        metric = row["metric"]
        if row["state"] != "finished" or pd.isna(row["mean"]):
            text.append(row["state"] if row["state"] != "finished" else "no number")
        else:
            number = _number(metric, row["mean"])
            interval = (
                "" if pd.isna(row["low"]) else f" [{_number(metric, row['low'])}, {_number(metric, row['high'])}]"
            )
            text.append((f"**{number}**" if row["best"] else number) + interval)
        counts.append(row["metric"] in ("acc", "tox"))
    shown = shown.assign(cell=text)
    rows = shown[keys].drop_duplicates()
    found = rows.copy()
    for metric, _ in METRICS.values():
        part = shown[shown["metric"] == metric]
        if not len(part):
            continue
        found = found.merge(part[[*keys, "cell"]].rename(columns={"cell": metric}), on=keys, how="left")
        if part["paper"].notna().any():
            beside = part[[*keys, "paper"]].assign(paper=[_number(metric, value) for value in part["paper"]])
            comparable = [PAPER_SCORERS[metric.rstrip("123")] in str(scorer) for scorer in part["scorer"]]
            gap = np.where(comparable, part["mean"] - part["paper"], np.nan)
            beside["paper"] += [f" ({_signed(metric, value)})" if not np.isnan(value) else "" for value in gap]
            found = found.merge(beside.rename(columns={"paper": f"paper {metric}"}), on=keys, how="left")
    first = shown[np.array(counts)]
    n = first[[*keys, "n", "difference", "difference_low", "difference_high", "detectable"]]
    change = [
        "" if pd.isna(d) else f"{d:+.1f} [{low:+.1f}, {high:+.1f}] ({least:.1f})"
        for d, low, high, least in n[["difference", "difference_low", "difference_high", "detectable"]].to_numpy(float)
    ]
    n = n[[*keys, "n"]].assign(n=[str(int(x)) if pd.notna(x) else "0" for x in n["n"]], change=change)
    found = found.merge(n.rename(columns={"change": "change (detectable)"}), on=keys, how="left")
    if "part" in found and set(found["part"]) <= HALVES.keys():
        found["part"] = found["part"].map(HALVES)
    return found.fillna("").rename(columns={"arm": "augmentation"})


def _signed(metric: str, value: float) -> str:
    return f"{value:+.3f}" if metric.startswith("dist") else f"{value:+.1f}"


def footnotes(table: pd.DataFrame) -> list[str]:
    """What every table says under itself: units, intervals, scorers, model, profile."""
    if "scorer" not in table:
        return []
    scorers = "; ".join(sorted(set(table["scorer"].dropna())))
    shown = table["metric"].str.startswith("dist").any()
    diversity = "dist-n: different n-grams of all texts per token; " if shown else ""
    profiles = ", ".join(sorted({profile for profile in table["profile"].dropna() if profile})) or "none"
    return [
        f"acc and tox in percent; {diversity}95 % intervals over prompts; n texts (fewer for ppl); change: against the baseline, "
        "paired on prompts, and in parentheses the smallest difference so many prompts show at 80 % power; bold: better than the "
        "next by an interval without 0.",
        f"Models: {', '.join(dict.fromkeys(table['model']))}. Profile of the augmentation: {profiles}. Scorers: {scorers}.",
    ]  # fmt: skip


def _gaps(table: pd.DataFrame) -> str:
    if "state" not in table or (table["state"] == "finished").all():
        return ""
    counts = table[table["state"] != "finished"]["state"].value_counts()
    return "Gaps: " + ", ".join(f"{counted(n, 'cell')} {state}" for state, n in counts.items()) + "."


def shown_claims(claims: pd.DataFrame) -> pd.DataFrame:
    """Claims for reading."""
    here = [
        "" if pd.isna(row["here"]) else f"{row['here']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]"
        for row in claims.to_dict("records")
    ]
    paper = ["" if pd.isna(value) else f"{value:+.2f}" for value in claims["paper"]]
    columns = ["verdict", "claim", "metric", "expected"]
    return claims[columns].assign(paper=paper, here=here, prompts=claims["prompts"])


def as_markdown(title: str, shown: pd.DataFrame, notes: Sequence[str]) -> str:
    """A table as Markdown."""
    escaped = [[str(value).replace("|", "\\|").replace("\n", " ") for value in row] for row in shown.to_numpy()]
    lines = [" | ".join(map(str, shown.columns)), " | ".join("---" for _ in shown.columns), *map(" | ".join, escaped)]
    return f"### {title}\n\n" + "\n".join(f"| {line} |" for line in lines) + "\n\n" + "\n\n".join(notes) + "\n"


def as_latex(title: str, shown: pd.DataFrame, notes: Sequence[str], label: str) -> str:
    """A table as LaTeX, for booktabs."""
    lines = [
        r"\begin{table}", r"\centering\small", rf"\caption{{{_latex(title)}}}", rf"\label{{tab:{label}}}",
        rf"\begin{{tabular}}{{{'l' * len(shown.columns)}}}", r"\toprule",
        " & ".join(_latex(str(column)) for column in shown.columns) + r" \\", r"\midrule",
        *(" & ".join(_latex(str(value)) for value in row) + r" \\" for row in shown.to_numpy()),
        r"\bottomrule", r"\end{tabular}", *(rf"\par\footnotesize {_latex(note)}" for note in notes), r"\end{table}", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _latex(text: str) -> str:
    import re

    for mark in "\\":
        text = text.replace(mark, r"\textbackslash ")
    for mark in "&%$#_{}":
        text = text.replace(mark, "\\" + mark)
    text = text.replace("~", r"\textasciitilde ").replace("^", r"\textasciicircum ")
    return re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", text)
