"""The items of the paper: a table with intervals, and a verdict on each claim.

The table has the scores of a run's cells, beside the paper's numbers.

An item is a figure or table of the paper, or one of ours like it. Its page, a script such as
`analyses/paper/decay.py`, opens an `ItemTables` on a run folder and scores the cells of the item's
grid (scores are stored in RUN/scores, so that no text is scored twice). It writes
RUN/tables/ITEM.csv, .md and .tex, tests the claims that the paper makes with the item
(RUN/tables/ITEM.claims.csv), and draws the figure from the table. Nothing here generates."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from analyses.lab.claims import ItemClaims
from analyses.lab.data import ItemData
from analyses.lab.estimates import PERPLEXITY_TEXTS
from analyses.lab.output import write_item
from analyses.lab.scripts import DEFAULT_SCORERS, ScriptOptions, add_scoring
from analyses.lab.tables import ARM_COLUMNS, format_item_table, format_step_curves, item_table
from lapa2_interp.attention.tables import pooled, step_table, traced_layer_types
from lapa2_interp.errors import RunError, parameter
from lapa2_interp.models.machine import print_if_slow
from lapa2_interp.plots import Drawing
from lapa2_interp.runs.run import Run, load_run
from lapa2_interp.scoring.scorer import expand_scorers
from lapa2_interp.stats import mean_interval, paired_difference
from lapa2_interp.table_formats import interval_cells

if TYPE_CHECKING:
    import xarray as xr


class ItemTables(ItemClaims):
    """One item on one run: its data, its tables and the claims tested so far.

    Attributes:
        data: The item's cells and scores.
        title: The title of its table.
        out: The folder of tables/.
        files: Values of the script's file options, by name.
        draw: Draws the item's figure from the tables that were written; without a figure it does
            nothing.
    """

    def __init__(
        self,
        data: ItemData,
        title: str,
        out: Path,
        files: Mapping[str, Sequence[Path]] | None = None,
        draw: Callable[[], None] = lambda: None,
    ) -> None:
        names = tuple(dict.fromkeys(name.rpartition("/")[2] for name in data.grids))
        super().__init__(data.item, names)
        self.files = files or {}
        self.draw = draw
        self.data, self.title, self.out = data, title, out
        self.run: Run = data.run

    @property
    def cells(self) -> pd.DataFrame:
        """`ItemData.cells`."""
        return self.data.cells

    def require_cells(self, cells: pd.DataFrame, what: str) -> pd.DataFrame:
        """A copy of the selected cells.

        Args:
            cells: Rows of `cells`.
            what: Description of the selection, for the error.

        Raises:
            RunError: No cell is selected.
        """
        if cells.empty:
            raise RunError(
                f"no cells of {what} in {' or '.join(map(repr, self.grids))} of {self.run.name};"
                f" {self.item} shows these alone, so give {parameter('grids')} one that has them"
            )
        return cells.copy()

    def table(
        self, scores: pd.DataFrame, cells: pd.DataFrame, variants: Mapping[str, str] | None = None
    ) -> pd.DataFrame:
        """The item's table (`tables.item_table`)."""
        return item_table(self.item, scores, cells, variants, self.data.tokenizer_of("distinct"))

    def attention_table(self, cells: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Prefix attention against step of every arm, and a few of the steps as text.

        Also adds two claims: prefix attention is higher with LaPA2, and more of the first step's
        attention is left at the last step.
        """

        table = self.data.step_curves(cells, prefix_step_table)
        # Prefix attention [sample step] of each arm, at the steps that all its texts have.
        curves: dict[str, dict[str, tuple[np.ndarray, pd.Series]]] = {}
        labels = {tuple(where.values()): label for where, label, _ in self.data.groups(cells)}
        for arm, trace, texts in self.data.arm_traces(cells):
            prefix = pooled(trace, "prefix")[0]
            prefix = prefix[:, : int((~np.isnan(prefix).any(axis=0)).sum())]
            setting = labels[arm["model"], arm["task"], arm["method"], arm["variant"]]
            curves.setdefault(setting, {})[arm["arm"]] = (prefix, texts["prompt"])
        # Each arm against the baseline, over the steps that both have.
        for setting, arms in curves.items():
            for name in [name for name in arms if name != "baseline" and "baseline" in arms]:
                (before, one), (after, two) = arms["baseline"], arms[name]
                steps = min(before.shape[1], after.shape[1])
                before, after, last = before[:, :steps], after[:, :steps], steps - 1
                higher = paired_difference(before.mean(1), one, after.mean(1), two)
                left = paired_difference(
                    before[:, last] / before[:, 0], one, after[:, last] / after[:, 0], two
                )
                for text, change in (
                    (f"LaPA2 raises prefix attention, mean over steps: {setting}", higher),
                    (f"with LaPA2 more of it is left at step {last}: {setting}", left),
                ):
                    named = claim_for_arm(text, name, arms)
                    self.add_difference(named, "prefix attention", "more", change)
        return table, format_step_curves(table)

    def table_with_attention(
        self, cells: pd.DataFrame, scores: pd.DataFrame, columns: Mapping[str, str]
    ) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The item's table with each arm's mean attention on some keys beside its scores, and the
        same formatted as text.

        Args:
            cells, scores: See `table`; arms may have other names than in the run.
            columns: Kinds of keys (`attention.tables.pooled`), and their columns in the text.
        """
        table = self.table(scores, cells)
        formatted = format_item_table(table).rename(columns={"augmentation": "arm"})
        arms = cells.set_index("key")["arm"]
        # Mean attention of every arm with its interval over prompts, under the arm's given name.
        of_run = self.cells[self.cells["key"].isin(arms.index)]
        named = dict(zip(of_run["arm"], of_run["key"].map(arms), strict=True))
        rows = []
        for arm, trace, answers in self.data.arm_traces(of_run):
            for name in columns:
                means = np.nanmean(pooled(trace, name)[0], axis=1)
                interval = mean_interval(means, answers["prompt"].to_numpy())
                own = {"arm": named[arm["arm"]], "metric": name, "n": interval.n}
                rows.append(arm | own | interval.columns)
        masses = pd.DataFrame(rows, columns=[*ARM_COLUMNS, "metric", "mean", "low", "high", "n"])
        # The same as text, joined to the formatted scores.
        texts = masses.assign(cell=interval_cells(masses, ".3f")).pivot_table(
            index=[name for name in ARM_COLUMNS if name in formatted],
            columns="metric",
            values="cell",
            aggfunc="first",
            sort=False,
        )
        formatted = formatted.merge(
            texts.reset_index().rename(columns=dict(columns)), how="left"
        ).fillna("")
        both = [table, masses.assign(attribute="all", state="finished")]
        return pd.concat(both, ignore_index=True), formatted.rename(columns={"arm": "augmentation"})

    def write(
        self, table: pd.DataFrame, notes: Sequence[str] = (), formatted: pd.DataFrame | None = None
    ) -> None:
        """Write the item's files (`output.write_item`) and print it."""
        print(write_item(self.out, self.item, self.title, table, self, notes, formatted))


def prefix_step_table(
    trace: xr.Dataset, texts: pd.DataFrame, names: Sequence[str] = ("prefix",)
) -> pd.DataFrame:
    """Prefix attention of one arm (or other sums) against step, in layers of the first type
    (`layer_types`); for `ItemData.step_curves`."""
    steps = step_table(trace, texts.assign(arm="one"))
    wanted = steps["name"].isin(names) & (steps["layer_type"] == traced_layer_types(trace)[0])
    return steps[wanted].drop(columns=["arm", "layer_type"])


def claim_for_arm(text: str, arm: str, arms: Iterable[str]) -> str:
    """A claim's text, with the arm's name if several arms are compared with the baseline."""
    return f"{text}, {arm}" if len(set(arms) - {"baseline"}) > 1 else text


def draw_item(
    out: Path, item: str, draw: Callable[..., Drawing], further_tables: Sequence[str]
) -> None:
    """Draw OUT/tables/ITEM.csv into OUT/figures/ITEM.png and .pdf. A table without rows has no
    figure, and an earlier one is removed.

    Args:
        draw: Makes the figure from the table and the further tables.
        further_tables: Names of further tables of the item, ITEM.NAME.csv.

    Raises:
        RunError: A table is not there, cannot be read, or is of another version.
    """
    files = [
        out / "tables" / f"{name}.csv"
        for name in (item, *(f"{item}.{part}" for part in further_tables))
    ]
    tables = []
    for file in files:
        try:
            tables.append(pd.read_csv(file))
        except FileNotFoundError:
            raise RunError(f"{file} is not there; leave out --draw, and it is made") from None
        except ValueError as error:  # no CSV, or no UTF-8
            raise RunError(
                f"cannot read {file} ({str(error)[:80]}); leave out --draw, and it is made again"
            ) from error
    paths = [out / "figures" / f"{item}.{ending}" for ending in ("png", "pdf")]
    if tables[0].empty:
        for path in paths:
            path.unlink(missing_ok=True)
        return
    try:
        figure = draw(*tables)
    except KeyError as error:
        raise RunError(
            f"{files[0]} has no column {error}; leave out --draw, and it is made again"
        ) from error
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for path in paths:
        figure.savefig(path, metadata={"CreationDate": None} if path.suffix == ".pdf" else None)
        print(path)


def open_item(
    item: str,
    title: str,
    *grids: str,
    scorers: Sequence[str] = DEFAULT_SCORERS,
    perplexity: int = PERPLEXITY_TEXTS,
    files: Mapping[str, str] | None = None,
    draw: Callable[..., Drawing] | None = None,
    further_tables: Sequence[str] = (),
) -> ItemTables:
    """Open an item from a script's command line: `python analyses/paper/ITEM.py RUN`. In a
    notebook, RUN is the environment variable `LAPA2_RUN`.

    With --draw, the script ends here: the figure is drawn from the tables that are there.

    Args:
        grids: Names of the item's grids, without their folder; by default the item's name. --grids
            replaces them, by names with their folder or without.
        scorers, perplexity: The defaults of --scorers and --perplexity.
        files: Further options of the script that take files: name and help.
        draw, further_tables: See `draw_item`; `draw` is None if the item has no figure.

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
        help="grids of the run that replace the item's, such as a custom grid",
    )
    for name, text in (files or {}).items():
        parser.add_argument(f"--{name}", nargs="+", type=Path, default=(), help=text)
    if draw is not None:
        parser.add_argument(
            "--draw",
            action="store_true",
            help="only draw the figure, from the tables that are there",
        )
    add_scoring(parser, perplexity, scorers)
    options = parser.parse_args()
    out = options.out or options.run
    make_figure = partial(draw_item, out, item, draw, further_tables) if draw else lambda: None
    if draw is not None and options.draw:
        make_figure()
        sys.exit(0)
    print_if_slow(options.dtype, options.device)
    data = ItemData(
        load_run(options.run),
        item,
        tuple(options.grids),
        expand_scorers(options.scorers, scorers),
        options.perplexity,
        options.device,
        options.dtype,
    )
    paths = {name: tuple(getattr(options, name)) for name in files or {}}
    return ItemTables(data, title, out, paths, make_figure)
