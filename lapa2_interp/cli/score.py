"""The commands that score: `lapa2 score`, `lapa2 scorers list | train | sheets | answers`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lapa2_interp.cli.functions import Values, command_of, load_task
from lapa2_interp.runs.settings import ScoreSettings, SheetSettings
from lapa2_interp.scoring.scorer import SCORERS
from lapa2_interp.scoring.settings import RatingSettings, TrainingSettings
from lapa2_interp.table_formats import as_text

if TYPE_CHECKING:
    import pandas as pd

    from lapa2_interp.runs.score import Scored
    from lapa2_interp.scoring.linear import LinearCard
    from lapa2_interp.scoring.task_scorer import ScorerCard


def _into_the_run(values: Values) -> None:
    """Of a run, tables are written into it by default."""
    if Path(values["source"]).is_dir():
        values.setdefault("out", Path(values["source"]) / "scores")


def _print_scores(scored: Scored, values: Values) -> None:
    print(scored.summary())
    if "out" in values:
        print(f"\ntables in {values['out']}")


score = command_of(ScoreSettings, "runs.score:score", prepare=_into_the_run, show=_print_scores)


def list_scorers() -> None:
    """List the scorers, and what the trained ones reach on held-out text, with 95 % intervals."""
    from lapa2_interp.scoring.adapter import ADAPTER_ENDING, AdapterCard
    from lapa2_interp.scoring.linear import LINEAR_ENDING, LinearCard
    from lapa2_interp.scoring.task_scorer import SHIPPED_WEIGHTS, load_card, tasks_in

    for name, what in SCORERS.items():
        print(f"{name:<11} {what}")
    kinds: tuple[tuple[str, type[ScorerCard], str, str], ...] = (
        ("adapter", AdapterCard, ADAPTER_ENDING, "SmolLM2's lower layers with low-rank adapters"),
        ("linear", LinearCard, LINEAR_ENDING, "logistic regression on hashed n-grams"),
    )
    for kind, form, ending, what in kinds:
        if tasks := tasks_in(SHIPPED_WEIGHTS, ending):
            print(f"\n{kind}: {what}, on text it was not trained on")
        for task in tasks:
            card = load_card(form, kind, task, SHIPPED_WEIGHTS, ending)
            size = (SHIPPED_WEIGHTS / f"{task}{ending}").stat().st_size / 1e6
            print(f"  {task}: {', '.join(card.labels)} ({size:.1f} MB)")
            _show_held_out(card, ("all",))


def _show_held_out(card: ScorerCard, lengths: Sequence[str] = ()) -> None:
    """Agreement of a scorer, by length, or at some lengths alone."""
    for row in card.held_out:
        if not lengths or row.length in lengths:
            interval = "" if row.low is None else f" [{row.low:.3f}, {row.high:.3f}]"
            length = "" if row.length == "all" else f", {row.length} words"
            print(f"    {row.value:.3f}{interval:<17} {row.measure}, {row.data}{length}, {row.n}")


def _print_card(card: LinearCard, values: Values) -> None:
    file = values["out"] / f"{card.task}.npz"
    print(*card.data, f"{file}, {file.stat().st_size / 1e6:.2f} MB", sep="\n")
    _show_held_out(card)


train = command_of(
    TrainingSettings, "scoring.training:train_scorer", prepare=load_task, show=_print_card
)


def _print_key(key: pd.DataFrame, values: Values) -> None:
    counts = ", ".join(
        f"{count} {arm}".strip() for arm, count in key["arm"].value_counts(sort=False).items()
    )
    print(
        f"{len(key)} texts ({counts}) in {values['out']}: give sheet.csv and rubric.txt to the"
        " raters and keep key.csv"
    )


def _print_ratings(tables: dict[str, pd.DataFrame], values: Values) -> None:
    for name in ("table", "agreement"):
        print(as_text(tables[name], ".3f") + "\n")
    if "out" in values:
        print(f"tables in {values['out']}")


sheets = command_of(SheetSettings, "runs.score:rating_sheets", show=_print_key)
answers = command_of(RatingSettings, "scoring.human:rating_tables", show=_print_ratings)
