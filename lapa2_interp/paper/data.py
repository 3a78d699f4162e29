"""The cells of an item and what is measured of them: scores of the texts, curves of the attention.

An item is a figure or table of the paper; it is made of the cells of one or more grids of a run.
Scores are kept in RUN/scores, so nothing is scored twice. Nothing here generates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from lapa2_interp._util.errors import NoGridError, RunError, ScoringError
from lapa2_interp.attention.tables import branch_name
from lapa2_interp.generation.loop import join_traces
from lapa2_interp.models.load import shared_tokenizer
from lapa2_interp.paper.estimates import FRACTIONS, PERPLEXITY_TEXTS, samples_read
from lapa2_interp.paper.reported import METRICS
from lapa2_interp.paper.scripts import USUAL
from lapa2_interp.paper.tables import ARM, KEYS
from lapa2_interp.runs.store import Run, each_once
from lapa2_interp.runs.texts import at_lengths, in_parts
from lapa2_interp.scoring.named import Options, make_scorer, score_by
from lapa2_interp.scoring.scorer import Cache, Item, chosen_scorers, run_scorer, split_scorer
from lapa2_interp.scoring.tables import plain

if TYPE_CHECKING:
    import xarray as xr


OF_ACCURACY = ("masked", "echo", "repetition")
"""What stands beside the accuracies of an item, where it was asked for."""


@dataclass(frozen=True)
class ItemData:
    """The data of one item on one run.

    Attributes:
        run: The run folder, read.
        item: The item's name.
        grids: The grids whose cells it shows, without their folder (quick/, paper/).
        scorers: As `scoring.chosen_scorers` gives them.
        perplexity_texts: About how many texts of an arm have their perplexity measured.
        device: Device of scorers that run a model.
        dtype: Precision of the perplexity model. Perplexity is a measurement: float32, whatever
            wrote the texts.
    """

    run: Run
    item: str
    grids: tuple[str, ...]
    scorers: tuple[str, ...] = chosen_scorers((), USUAL)
    perplexity_texts: int = PERPLEXITY_TEXTS
    device: str | None = None
    dtype: str = "float32"

    @property
    def cells(self) -> pd.DataFrame:
        """The cells of the grids that are there, in their order, one row each, finished or not;
        none has a text of another (`each_once`)."""
        names = [name for name in self.run.listing.grids if name.rpartition("/")[2] in self.grids]
        if not names:
            wanted, have = (
                " or ".join(map(repr, self.grids)),
                ", ".join(self.run.listing.grids) or "none",
            )
            raise NoGridError(
                f"{self.run.name} has no grid {wanted}, which {self.item} is made of; it has:"
                f" {have}. `lapa2 sweep quick/{self.grids[0]} --out {self.run.name}` adds it"
            )
        planned = {
            key: self.run.plan[key] for name in names for key in self.run.listing.grids[name]
        }
        keys = each_once(planned)
        found = self.run.cells.set_index("key", drop=False).loc[keys].reset_index(drop=True)
        # Half an arm would be compared with a whole one: it counts when all its attributes are
        # there.
        whole = (
            (found["state"] == "finished").groupby([found[name] for name in ARM]).transform("all")
        )
        return found.assign(
            state=found["state"].where(whole | (found["state"] != "finished"), "incomplete")
        )

    def groups(
        self, cells: pd.DataFrame, *further: str
    ) -> Iterator[tuple[dict[str, Any], str, pd.DataFrame]]:
        """The cells grouped by model, task, method, variant and further columns: the columns'
        values, the values in words, the cells.

        The words name the model and the variant only where there are several.
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
        """The five lengths of the longest of these cells."""
        return tuple(round(int(cells["max_length"].max()) * share) for share in FRACTIONS)

    def scores(
        self,
        cells: pd.DataFrame,
        lengths: Iterable[int] = (),
        parts: int = 1,
        metrics: Sequence[str] | None = None,
    ) -> pd.DataFrame:
        """The texts of finished cells with their numbers: one row per text, length, part and metric
        (in the paper's units).

        Args:
            cells: Rows of `cells`.
            lengths: Cut texts to these as far as they are shorter than a cell's own length, which
                is always among its lengths.
            parts: Score texts in this many equal parts.
            metrics: Any of accuracy, toxicity and perplexity; by default what the task has.

        Of a metric that several scorers give, the first one's rows have its plain name, and the
        others' are named as `METRICS` says.
        """
        frames = []
        with Cache(self.run.home / "scores") as cache:
            finished = cells[cells["state"] == "finished"]
            wordings = finished["key"].map(lambda key: str(self.run.plan[key].task.attributes))
            for (task, *_), group in finished.groupby(["task", wordings, "model"], sort=False):
                samples = self.texts(group, lengths, parts)
                options = self._options(group)
                for name, asked in self._asked(str(task), metrics).items():
                    texts = self._few(samples) if name == "perplexity" else samples
                    if len(texts):
                        found = score_by(texts.drop(columns="tokens"), asked, options, cache)
                        frames.append(found[found["metric"].map(plain) == name])
        if not frames:
            return pd.DataFrame(
                columns=[*KEYS, "cell", "prompt", "metric", "value", "skipped", "scorer"]
            )
        table = pd.concat(frames, ignore_index=True)
        # Tables are cut up many hundred times, which takes Arrow's strings longer than objects.
        words = table.select_dtypes(exclude=["number", "bool"]).columns
        table = table.astype(dict.fromkeys(words, object))
        names = table["metric"].map(plain)
        return table.assign(
            value=table["value"] * names.map(lambda name: METRICS[name][1]),
            metric=[
                METRICS[name][0] + metric.removeprefix(name)
                for name, metric in zip(names, table["metric"], strict=True)
            ],
        )

    def numbers(self, group: pd.DataFrame, samples: pd.DataFrame, metric: str) -> pd.DataFrame:
        """Every number that a metric's first scorer gives texts: `scoring.run_scorer`.

        Args:
            group: The cells of the texts, of one task.
            samples: The texts, with their prompt and attribute.
            metric: accuracy, toxicity or perplexity.
        """
        asked = self._asked(str(group["task"].iloc[0]), (metric,))[metric][0]
        name, _, model = asked.partition("=")
        texts = samples[["text", "prompt", "attribute"]].to_numpy()
        with (
            Cache(self.run.home / "scores") as cache,
            closing(make_scorer(name, model, self._options(group))) as scorer,
        ):
            return run_scorer(scorer, [Item(*each) for each in texts], cache)

    def _asked(self, task: str, metrics: Sequence[str] | None) -> dict[str, list[str]]:
        """The scorers of a task, NAME or NAME=MODEL, by metric."""
        control = "toxicity" if task == "detox" else "accuracy"
        by_name: dict[str, list[str]] = {}
        for each in self.scorers:
            of, name, _ = split_scorer(each)
            if of in ("", task):
                by_name.setdefault(name, []).append(each.removeprefix(f"{of}:"))
        beside = [name for name in OF_ACCURACY if name in by_name and control == "accuracy"]
        names = list(metrics or (control, *beside, "perplexity"))
        if missing := [name for name in names if name not in by_name]:
            raise ScoringError(
                f"{self.item} needs a scorer for {missing[0]} of {task}; give --scorers"
                f" {missing[0]} or {missing[0]}=MODEL"
            )
        return {name: by_name[name] for name in names}

    def texts(self, group: pd.DataFrame, lengths: Iterable[int], parts: int = 1) -> pd.DataFrame:
        """The texts of finished cells of one model and task, cut as `scores` says: `Run.samples`
        with length and part."""
        frames = []
        for longest in dict.fromkeys(group["max_length"].astype(int)):
            keys = list(group["key"][group["max_length"] == longest])
            samples = self.run.samples(keys)
            chosen = sorted({length for length in lengths if length < longest} | {longest})
            frames.append(at_lengths(samples, self.run.manifest(keys[0]), chosen))
        found = pd.concat(frames, ignore_index=True)
        if parts == 1:
            return found.assign(part=0)
        return in_parts(found, parts, shared_tokenizer(str(group["model"].iloc[0])))

    def _few(self, samples: pd.DataFrame) -> pd.DataFrame:
        """The first samples of every prompt, as many as make about `perplexity_texts` an arm."""
        first = (samples["prompt"] + "\0" + samples["attribute"]).astype(object)
        firsts = first.groupby([samples[name] for name in ARM]).transform("nunique")
        kept = {n: samples_read(int(n), self.perplexity_texts) for n in firsts.unique()}
        return samples[samples["sample"] < firsts.map(kept)]

    def _options(self, group: pd.DataFrame) -> Options:
        first = group["key"].iloc[0]
        task, own = self.run.plan[first].task, self.run.manifest(first).model
        return Options(task=task, dtype=self.dtype, device=self.device, generator=own.weights)

    def curves(
        self, cells: pd.DataFrame
    ) -> Iterable[tuple[dict[str, Any], xr.Dataset, pd.DataFrame]]:
        """Traces of finished cells, those of one arm (all its attributes) together: its columns,
        the trace, the samples.

        The trace has only the branch behind the steered attribute's prefix.
        """
        for values, group in cells[cells["state"] == "finished"].groupby(ARM, sort=False):
            runs = [self.run.cell(key) for key in group["key"]]
            found = [run.trace for run in runs if run.trace is not None]
            traces = [
                each.sel(branch=[branch_name(each)]).assign_coords(branch=["steered"])
                for each in found
            ]
            if traces:
                samples = pd.concat([run.samples for run in runs], ignore_index=True)
                yield dict(zip(ARM, values, strict=True)), join_traces(traces, samples), samples

    def steps(
        self, cells: pd.DataFrame, make: Callable[[xr.Dataset, pd.DataFrame], pd.DataFrame]
    ) -> pd.DataFrame:
        """What `make` reads from every arm's trace at the first 16 steps and every fourth after,
        with the arm's columns."""
        frames = []
        for arm, trace, samples in self.curves(cells):
            found = make(trace, samples)
            found = found[(found["step"] < 16) | (found["step"] % 4 == 0)]
            frames.append(found.assign(**arm))
        if not frames:
            raise RunError(
                f"{self.run.name} has no finished cell with a trace for {self.item}; `lapa2 runs`"
                " lists what is missing"
            )
        return pd.concat(frames, ignore_index=True)

    def tokenizer_of(self, scorer: str) -> Any:
        """The tokenizer that a scorer was asked to count with (NAME=TOKENIZER); None where it was
        not."""
        asked = next(
            (each.partition("=")[2] for each in self.scorers if each.startswith(f"{scorer}=")), ""
        )
        return shared_tokenizer(asked) if asked else None
