"""Time per token of the rivals, as a multiple of no bias: time.csv of figures/rivals.

    python analyses/rivals/measure_time.py results/rivals --out figures/rivals/time.csv

Every arm of a run of analyses/rivals/run.sh continues the same prompts, of its first round, towards
the first attribute, as one batch, in turns, all on a machine without other work. A method prepares
before the clock starts; as in a sweep, the weights are prepacked where that is faster. time.csv has
a row an arm: the median of its seconds per token over those of no bias in the same turn, with the
least and the largest (low, high). Rows of arms that the run does not have stay.

In figures/rivals/time.csv, measured on one Intel CPU, the arms but the retrying gates continue
prompts of the second round, towards either attribute; both prefixes have three tokens.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analyses.lab.scripts import ScriptOptions, whole_number
from analyses.rivals.analyse import ARM, families
from lapa2_interp.errors import RunError
from lapa2_interp.files import write_text
from lapa2_interp.generation.cell import Cell
from lapa2_interp.models.machine import torch_threads
from lapa2_interp.progress import progress_bar
from lapa2_interp.runs.run import Run, load_run
from lapa2_interp.runs.worker import Worker, make_batch
from lapa2_interp.scoring.equal_perplexity import BASELINE
from lapa2_interp.table_formats import as_csv, as_text


def main() -> None:
    """Time the arms, and write the table."""
    parser = ScriptOptions("Time per token of the rivals")
    parser.add_argument("run", type=Path)
    parser.add_argument("--texts", type=whole_number(), default=20, help="an arm, in one batch")
    parser.add_argument("--turns", type=whole_number(2), default=4, help="the first warms up")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    cells = chosen_cells(load_run(options.run, earlier=True), options.texts)
    with torch_threads(1):  # as a sweep's worker has
        table = as_multiples(timed(cells, options.turns))
    print(as_text(table, ".3g"))
    if options.out.exists():
        earlier = pd.read_csv(options.out)
        both = pd.concat([earlier, table], ignore_index=True)
        table = both.drop_duplicates(ARM, keep="last")
    write_text(options.out, as_csv(table, 6))


def chosen_cells(run: Run, n: int) -> dict[tuple[str, float], Cell]:
    """By arm (family, strength), its cell of the first attribute and round, with n prompts.

    Raises:
        RunError: An arm has no such cell.
    """
    arms, first = families(run), next(iter(run.by_key.values()))
    cells = {
        tuple(arms.loc[key, ARM]): with_prompts(cell, n)
        for key, cell in run.by_key.items()
        if cell.attribute == first.attribute and cell.prompts == first.prompts
    }
    if missing := set(map(tuple, arms[ARM].to_numpy())) - set(cells):
        raise RunError(f"arms without cells of the first prompts: {sorted(missing)}")
    return cells


def with_prompts(cell: Cell, n: int) -> Cell:
    """The cell with its first prompts alone, all in one batch."""
    prompts = cell.task.prompts.model_copy(update={"texts": cell.prompts[:n]})
    task = cell.task.model_copy(update={"prompts": prompts})
    rows = len(cell.prompts[:n]) * len(cell.branches) * cell.samples
    return cell.model_copy(update={"task": task, "max_rows": rows})


def timed(cells: dict[tuple[str, float], Cell], turns: int) -> pd.DataFrame:
    """Seconds per token of each arm (columns) in each turn but the first."""
    worker = Worker()
    plans = {arm: worker.plan(cell) for arm, cell in cells.items()}
    model = worker.model(next(iter(cells.values())))
    rows = []
    with progress_bar(turns * len(plans), "timing", "arm") as bar:
        for _ in range(turns):
            rows.append({})
            for arm, plan in plans.items():
                record = make_batch(model, plan, 0).record
                rows[-1][arm] = record.seconds / record.new_tokens
                bar.update()
    seconds = pd.DataFrame(rows[1:])
    return seconds.set_axis(pd.MultiIndex.from_tuples(seconds.columns, names=ARM), axis=1)


def as_multiples(seconds: pd.DataFrame) -> pd.DataFrame:
    """The seconds of each arm, as multiples of those of no bias in the same turn.

    Args:
        seconds: A column an arm (family, strength), a row a turn.
    """
    ratios = seconds.div(seconds[BASELINE, 0.0], axis=0)
    spread = {"time": ratios.median(), "low": ratios.min(), "high": ratios.max()}
    return pd.DataFrame(spread).reset_index().assign(turns=len(seconds))


if __name__ == "__main__":
    main()
