"""The cells of an item and their measurements: scores of texts, and attention traces.

An item is a figure or table of the paper. Its data are the cells of one or more grids of a run.
Scores are stored in RUN/scores, so that no text is scored twice. Nothing here generates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from analyses.lab.estimates import FRACTIONS, PERPLEXITY_TEXTS, perplexity_samples
from analyses.lab.pages import grid_of
from analyses.lab.reported import PAPER_METRICS
from analyses.lab.scripts import DEFAULT_SCORERS
from analyses.lab.tables import ARM_COLUMNS, ROW_COLUMNS
from lapa2_interp.attention.tables import branch_name
from lapa2_interp.attention.trace import join_traces
from lapa2_interp.commands import command
from lapa2_interp.errors import NoGridError, RunError, ScoringError, parameter
from lapa2_interp.models.load import shared_tokenizer
from lapa2_interp.runs.run import Run, finished_cell
from lapa2_interp.runs.texts import at_lengths, each_once, in_parts
from lapa2_interp.scoring.registry import ScorerOptions, check_scorers, make_scorer, score_texts
from lapa2_interp.scoring.scorer import (
    ScoreCache,
    TextItem,
    expand_scorers,
    parse_scorer,
    run_scorer,
)
from lapa2_interp.scoring.tables import metric_name

if TYPE_CHECKING:
    import xarray as xr


BESIDE_ACCURACY = ("masked", "echo", "repetition")
"""Scorers beside accuracy; an item has their columns if they were requested."""


@dataclass(frozen=True)
class ItemData:
    """The data of one item on one run.

    Attributes:
        run: The loaded run folder.
        item: The item's name.
        grids: Names of its grids, with their folder (quick/, paper/) or without.
        scorers: The scorers, from `scoring.scorer.expand_scorers`.
        perplexity_texts: Texts of an arm whose perplexity is measured, approximately.
        device: Device of scorers that run a model.
        dtype: Precision of the perplexity model: float32, whatever precision generated the texts.
    """

    run: Run
    item: str
    grids: tuple[str, ...]
    scorers: tuple[str, ...] = expand_scorers((), DEFAULT_SCORERS)
    perplexity_texts: int = PERPLEXITY_TEXTS
    device: str | None = None
    dtype: str = "float32"

    @property
    def cells(self) -> pd.DataFrame:
        """One row per cell of the grids that the run has, in their order, finished or not; no two
        cells share a text (`each_once`).

        Raises:
            NoGridError: The run has none of the grids.
        """
        wanted = set(self.grids)  # with their folder, or without
        names = [
            name for name in self.run.listing.grids if {name, name.rpartition("/")[2]} & wanted
        ]
        if not names:
            asked = " or ".join(map(repr, self.grids))
            usual = self.grids[0] if "/" in self.grids[0] else grid_of(self.grids[0])
            have = ", ".join(self.run.listing.grids) or "none"
            raise NoGridError(
                f"{self.run.name} has no grid {asked}, which {self.item} is made of; it has:"
                f" {have}. Read one of these ({parameter('grids', 'NAME')}), or add it:"
                f" `{command('sweep', usual, out=self.run.name)}`"
            )
        planned = {
            key: self.run.by_key[key] for name in names for key in self.run.listing.grids[name]
        }
        keys = each_once(planned)
        cells = self.run.cells.set_index("key", drop=False).loc[keys].reset_index(drop=True)
        # An arm without all its attributes must not be compared with a complete one.
        complete = (
            (cells["state"] == "finished")
            .groupby([cells[name] for name in ARM_COLUMNS])
            .transform("all")
        )
        return cells.assign(
            state=cells["state"].where(complete | (cells["state"] != "finished"), "incomplete")
        )

    def groups(
        self, cells: pd.DataFrame, *further: str
    ) -> Iterator[tuple[dict[str, Any], str, pd.DataFrame]]:
        """Cells grouped by model, task, method, variant and further columns: the columns' values, a
        label, the cells.

        The label names the model and the variant only if there are several.
        """
        names = ["model", "task", "method", "variant", *further]
        variants = cells.groupby(names[:3])["variant"].transform("nunique")
        for values, group in cells.groupby(names, sort=False):
            where: dict[str, Any] = dict(zip(names, values, strict=True))
            words = f"{where['method']}, {where['task']}"
            if cells["model"].nunique() > 1:
                words += f", {where['model']}"
            if variants[group.index[0]] > 1 and where["variant"]:
                words += f", {where['variant']}"
            yield where, words, group

    def lengths(self, cells: pd.DataFrame) -> tuple[int, ...]:
        """The five lengths at which texts are scored, from the longest of these cells, in
        tokens."""
        return tuple(round(int(cells["max_length"].max()) * share) for share in FRACTIONS)

    def scores(
        self,
        cells: pd.DataFrame,
        lengths: Iterable[int] = (),
        parts: int = 1,
        metrics: Sequence[str] | None = None,
    ) -> pd.DataFrame:
        """Scores of the texts of finished cells, in the paper's units: one row per text, length,
        part and metric.

        Args:
            cells: Rows of `cells`.
            lengths: Also cut texts to those of these lengths that are shorter than the cell's.
            parts: Score texts in this many equal parts.
            metrics: Any of accuracy, toxicity and perplexity; by default those of the task.

        If several scorers give a metric, the first one's rows have the plain name, and the others'
        have the scorer in parentheses (`PAPER_METRICS`).
        """
        frames = []
        with ScoreCache(self.run.require_folder() / "scores") as cache:
            finished = cells[cells["state"] == "finished"]
            wordings = finished["key"].map(lambda key: str(self.run.by_key[key].task.attributes))
            groups = [
                (group, self._scorer_options(group), self._scorers_by_metric(str(task), metrics))
                for (task, *_), group in finished.groupby(["task", wordings, "model"], sort=False)
            ]
            check_scorers(
                (*parse_scorer(one)[1:], options)
                for _, options, by_metric in groups
                for asked in by_metric.values()
                for one in asked
            )
            for group, options, by_metric in groups:
                texts = self.texts(group, lengths, parts)
                for name, asked in by_metric.items():
                    scored = self._perplexity_rows(texts) if name == "perplexity" else texts
                    if len(scored):
                        scores = score_texts(scored.drop(columns="tokens"), asked, options, cache)
                        frames.append(scores[scores["metric"].map(metric_name) == name])
        if not frames:
            return pd.DataFrame(
                columns=[*ROW_COLUMNS, "cell", "prompt", "metric", "value", "reason", "scorer"]
            )
        table = pd.concat(frames, ignore_index=True)
        names = table["metric"].map(metric_name)
        table = table.assign(
            value=table["value"] * names.map(lambda name: PAPER_METRICS[name][1]),
            metric=[
                PAPER_METRICS[name][0] + metric.removeprefix(name)
                for name, metric in zip(names, table["metric"], strict=True)
            ],
        )
        # Tables are filtered and grouped many times: slower on Arrow strings than on objects.
        words = table.select_dtypes(exclude=["number", "bool"]).columns
        return table.astype(dict.fromkeys(words, object))

    def scorer_numbers(self, group: pd.DataFrame, texts: pd.DataFrame, metric: str) -> pd.DataFrame:
        """All columns of a metric's first scorer on texts (`scoring.run_scorer`).

        Args:
            group: The cells of the texts, of one task.
            texts: With prompt and attribute.
            metric: accuracy, toxicity or perplexity.
        """
        asked = self._scorers_by_metric(str(group["task"].iloc[0]), (metric,))[metric][0]
        name, _, model = asked.partition("=")
        triples = texts[["text", "prompt", "attribute"]].to_numpy()
        with (
            ScoreCache(self.run.require_folder() / "scores") as cache,
            closing(make_scorer(name, model, self._scorer_options(group))) as scorer,
        ):
            return run_scorer(scorer, [TextItem(*fields) for fields in triples], cache)

    def _scorers_by_metric(self, task: str, metrics: Sequence[str] | None) -> dict[str, list[str]]:
        """The scorers of a task, NAME or NAME=MODEL, by metric.

        Raises:
            ScoringError: A metric has no scorer.
        """
        control = "toxicity" if task == "detox" else "accuracy"
        by_name: dict[str, list[str]] = {}
        for request in self.scorers:
            of, name, _ = parse_scorer(request)
            if of in ("", task):
                by_name.setdefault(name, []).append(request.removeprefix(f"{of}:"))
        beside = [name for name in BESIDE_ACCURACY if name in by_name and control == "accuracy"]
        names = list(metrics or (control, *beside, "perplexity"))
        if missing := [name for name in names if name not in by_name]:
            raise ScoringError(
                f"{self.item} needs a scorer for {missing[0]} of {task}; give"
                f" {parameter('scorers')}"
                f" {missing[0]} or {missing[0]}=MODEL"
            )
        return {name: by_name[name] for name in names}

    def texts(self, group: pd.DataFrame, lengths: Iterable[int], parts: int = 1) -> pd.DataFrame:
        """Texts of finished cells of one model and task, cut as in `scores`: `Run.texts` with
        columns length and part."""
        frames = []
        for longest in dict.fromkeys(group["max_length"].astype(int)):
            keys = list(group["key"][group["max_length"] == longest])
            texts = self.run.texts(keys)
            chosen = sorted({length for length in lengths if length < longest} | {longest})
            frames.append(at_lengths(texts, self.run.manifest(keys[0]), chosen))
        texts = pd.concat(frames, ignore_index=True)
        if parts == 1:
            return texts.assign(part=0)
        return in_parts(texts, parts, shared_tokenizer(str(group["model"].iloc[0])))

    def _perplexity_rows(self, texts: pd.DataFrame) -> pd.DataFrame:
        """The first texts of every prompt, so that each arm has about `perplexity_texts`
        texts."""
        first = (texts["prompt"] + "\0" + texts["attribute"]).astype(object)
        firsts = first.groupby([texts[name] for name in ARM_COLUMNS]).transform("nunique")
        per_prompt = {n: perplexity_samples(int(n), self.perplexity_texts) for n in firsts.unique()}
        return texts[texts["sample"] < firsts.map(per_prompt)]

    def _scorer_options(self, group: pd.DataFrame) -> ScorerOptions:
        first = group["key"].iloc[0]
        task, own = self.run.by_key[first].task, self.run.manifest(first).model
        return ScorerOptions(task=task, dtype=self.dtype, device=self.device, generator=own.weights)

    def arm_traces(
        self, cells: pd.DataFrame
    ) -> Iterable[tuple[dict[str, Any], xr.Dataset, pd.DataFrame]]:
        """The trace of each arm (all its attributes together) over its finished cells: the arm's
        columns, the trace, the texts.

        The trace has only the branch with the steered attribute's prefix.
        """
        for values, group in cells[cells["state"] == "finished"].groupby(ARM_COLUMNS, sort=False):
            runs = [finished_cell(self.run, key) for key in group["key"]]
            traces = [run.trace for run in runs if run.trace is not None]
            traces = [
                trace.sel(branch=[branch_name(trace)]).assign_coords(branch=["steered"])
                for trace in traces
            ]
            if traces:
                texts = pd.concat([run.texts for run in runs], ignore_index=True)
                yield (
                    dict(zip(ARM_COLUMNS, values, strict=True)),
                    join_traces(traces, texts),
                    texts,
                )

    def step_curves(
        self, cells: pd.DataFrame, make: Callable[[xr.Dataset, pd.DataFrame], pd.DataFrame]
    ) -> pd.DataFrame:
        """Tables that `make` gives for every arm's trace, with the arm's columns, at the first 16
        steps and every fourth step after them.

        Raises:
            RunError: No finished cell has a trace.
        """
        frames = []
        for arm, trace, texts in self.arm_traces(cells):
            table = make(trace, texts)
            table = table[(table["step"] < 16) | (table["step"] % 4 == 0)]
            frames.append(table.assign(**arm))
        if not frames:
            raise RunError(
                f"{self.run.name} has no finished cell with a trace for {self.item};"
                f" {self.run.cells_from} lists what is missing"
            )
        return pd.concat(frames, ignore_index=True)

    def tokenizer_of(self, scorer: str) -> Any:
        """The tokenizer that a scorer was given (NAME=TOKENIZER); None if it was given none."""
        models = [
            request.partition("=")[2]
            for request in self.scorers
            if request.startswith(f"{scorer}=")
        ]
        return shared_tokenizer(models[0]) if models and models[0] else None
