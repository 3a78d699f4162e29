"""The paper item by item: scores of a run's cells as a table with intervals, beside the paper's
numbers, and its claims judged.

An item is a figure or table of the paper. Its script in `analyses/` opens an `ItemTables` on a run
folder and scores the cells of the item's grid (scores are kept in RUN/scores, so nothing is scored
twice). It writes RUN/tables/ITEM.csv, .md and .tex, and judges the claims the paper makes with the
item (RUN/tables/ITEM.claims.csv). Scripts in `figures/` draw from those tables. Nothing here
generates."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from lapa2_interp._util.errors import RunError
from lapa2_interp.attention.tables import pooled, step_table, traced_layer_types
from lapa2_interp.models.machine import print_if_slow
from lapa2_interp.paper.claims import Findings
from lapa2_interp.paper.data import ItemData
from lapa2_interp.paper.estimates import PERPLEXITY_TEXTS
from lapa2_interp.paper.output import write_item
from lapa2_interp.paper.scripts import USUAL, ScriptOptions, add_scoring
from lapa2_interp.paper.tables import ARM, at_few_steps, item_table, wide
from lapa2_interp.runs.store import Run, load_run
from lapa2_interp.scoring.scorer import chosen_scorers
from lapa2_interp.stats import mean_interval, paired_difference

if TYPE_CHECKING:
    import xarray as xr


class ItemTables(Findings):
    """One item on one run: its data (`data`), tables and files by short names, and the claims
    judged so far.

    Attributes:
        data: Which cells and which scores.
        title: What stands over its table.
        out: Where tables go.
        files: What the script's own options for files were given, by name.
    """

    def __init__(
        self,
        data: ItemData,
        title: str,
        out: Path,
        files: Mapping[str, Sequence[Path]] | None = None,
    ) -> None:
        super().__init__(data.item, data.grids)
        self.files = files or {}
        self.data, self.title, self.out = data, title, out
        self.run: Run = data.run
        self.groups, self.lengths, self.scores = data.groups, data.lengths, data.scores
        self.texts, self.curves, self.steps = data.texts, data.curves, data.steps

    @property
    def cells(self) -> pd.DataFrame:
        """As `ItemData.cells`."""
        return self.data.cells

    def some(self, cells: pd.DataFrame, what: str) -> pd.DataFrame:
        """The cells that an item is made of, of those of its grids.

        Args:
            cells: Rows of `cells`.
            what: Which they are, in words.

        Raises:
            RunError: There are none.
        """
        if cells.empty:
            raise RunError(
                f"no cells of {what} in {' or '.join(map(repr, self.grids))} of {self.run.name};"
                f" {self.item} shows these alone, so give --grids one that has them"
            )
        return cells.copy()

    def table(
        self, scores: pd.DataFrame, cells: pd.DataFrame, variants: Mapping[str, str] | None = None
    ) -> pd.DataFrame:
        """As `tables.item_table`."""
        return item_table(self.item, scores, cells, variants, self.data.tokenizer_of("distinct"))

    def attention(self, cells: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Prefix attention against step of every arm, and the same at a few steps for reading.

        Also judges two claims: is it higher with LaPA2, and is more of the first step's attention
        left at the last step?
        """

        table = self.steps(cells, prefix_curve)
        kept: dict[str, dict[str, tuple[np.ndarray, pd.Series]]] = {}
        words = {tuple(where.values()): text for where, text, _ in self.groups(cells)}
        for arm, trace, samples in self.curves(cells):
            prefix = pooled(trace, "prefix")[0]
            prefix = prefix[:, : int((~np.isnan(prefix).any(axis=0)).sum())]
            place = words[arm["model"], arm["task"], arm["method"], arm["variant"]]
            kept.setdefault(place, {})[arm["arm"]] = (prefix, samples["prompt"])
        for place, arms in kept.items():
            for name in [name for name in arms if name != "baseline"]:
                if "baseline" not in arms:
                    continue
                (before, one), (after, two) = arms["baseline"], arms[name]
                steps = min(before.shape[1], after.shape[1])  # the same steps of both
                before, after, last = before[:, :steps], after[:, :steps], steps - 1
                higher = paired_difference(before.mean(1), one, after.mean(1), two)
                left = paired_difference(
                    before[:, last] / before[:, 0], one, after[:, last] / after[:, 0], two
                )
                self.note(
                    of_arm(f"LaPA2 raises prefix attention, mean over steps: {place}", name, arms),
                    "prefix attention",
                    "more",
                    higher,
                )
                self.note(
                    of_arm(f"with LaPA2 more of it is left at step {last}: {place}", name, arms),
                    "prefix attention",
                    "more",
                    left,
                )
        return table, at_few_steps(table)

    def masses(
        self, cells: pd.DataFrame, scores: pd.DataFrame, shown: Mapping[str, str]
    ) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The item's table with the mean attention on some keys beside each arm's scores, and the
        same for reading.

        Args:
            cells, scores: As `table`; arms may have other names than in the run.
            shown: Kinds of keys (`attention.tables.pooled`), and their columns for reading.
        """
        table = self.table(scores, cells)
        read = wide(table).rename(columns={"augmentation": "arm"})
        arms = cells.set_index("key")["arm"]
        of_run = self.cells[self.cells["key"].isin(arms.index)]
        named = dict(zip(of_run["arm"], of_run["key"].map(arms), strict=True))
        rows = []
        for arm, trace, samples in self.curves(of_run):
            for name in shown:
                means = np.nanmean(pooled(trace, name)[0], axis=1)
                found = mean_interval(means, samples["prompt"].to_numpy())
                numbers = {"mean": found.mean, "low": found.low, "high": found.high, "n": found.n}
                rows.append(arm | {"arm": named[arm["arm"]], "metric": name} | numbers)
        masses = pd.DataFrame(rows, columns=[*ARM, "metric", "mean", "low", "high", "n"])
        beside = masses.assign(
            cell=[
                f"{mean:.3f} [{low:.3f}, {high:.3f}]"
                for mean, low, high in masses[["mean", "low", "high"]].to_numpy()
            ]
        ).pivot_table(
            index=[name for name in ARM if name in read],
            columns="metric",
            values="cell",
            aggfunc="first",
            sort=False,
        )
        read = read.merge(beside.reset_index().rename(columns=dict(shown)), how="left").fillna("")
        both = [table, masses.assign(attribute="all", state="finished")]
        return pd.concat(both, ignore_index=True), read.rename(columns={"arm": "augmentation"})

    def write(
        self, table: pd.DataFrame, notes: Sequence[str] = (), shown: pd.DataFrame | None = None
    ) -> None:
        """Write the item's files (`output.write_item`) and print it."""
        print(write_item(self.out, self.item, self.title, table, self, notes, shown))


def prefix_curve(trace: xr.Dataset, samples: pd.DataFrame) -> pd.DataFrame:
    """Attention on the prefix against step, of one arm (`ItemData.steps`), in layers of the first
    type (`traced_layer_types`)."""
    steps = step_table(trace, samples.assign(arm="one"))
    wanted = (steps["name"] == "prefix") & (steps["layer_type"] == traced_layer_types(trace)[0])
    return steps[wanted].drop(columns=["arm", "layer_type"])


def of_arm(text: str, arm: str, arms: Iterable[str]) -> str:
    """A claim's text, with the arm's name where several are compared with the baseline."""
    return f"{text}, {arm}" if len(set(arms) - {"baseline"}) > 1 else text


def open_item(
    item: str,
    title: str,
    *grids: str,
    scorers: Sequence[str] = USUAL,
    perplexity: int = PERPLEXITY_TEXTS,
    files: Mapping[str, str] | None = None,
) -> ItemTables:
    """The bench of a script, from its command line: `python analyses/ITEM.py RUN`. In a notebook
    RUN is `LAPA2_RUN`.

    Args:
        grids: The grids whose cells it shows, without their folder; by default the item's name.
            --grids replaces them.
        scorers, perplexity: The defaults of --scorers and --perplexity.
        files: Options of the script's own that take files: name and help.

    Raises:
        RunError: RUN is not a run folder, or lacks the item's grid.
    """
    parser = ScriptOptions(title)
    default = Path(os.environ.get("LAPA2_RUN", "results/quick"))
    parser.add_argument(
        "run", type=Path, nargs="?", default=default, help="a run folder of `lapa2 sweep`"
    )
    parser.add_argument("--out", type=Path, help="folder of tables/; by default the run's own")
    parser.add_argument(
        "--grids",
        nargs="+",
        default=grids or (item,),
        help="grids of the run that take the place of the item's, such as that of a file of yours",
    )
    for name, told in (files or {}).items():
        parser.add_argument(f"--{name}", nargs="+", type=Path, default=(), help=told)
    add_scoring(parser, perplexity, scorers)
    options = parser.read()
    print_if_slow(options.dtype, options.device)
    data = ItemData(
        load_run(options.run),
        item,
        tuple(options.grids),
        chosen_scorers(options.scorers, scorers),
        options.perplexity,
        options.device,
        options.dtype,
    )
    given = {name: tuple(getattr(options, name)) for name in files or {}}
    return ItemTables(data, title, options.out or options.run, given)
