"""The commands that make soft prefixes: `lapa2 prefix train | evaluate | import | recipes`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from lapa2_interp._util.values import read_fields
from lapa2_interp.cli.functions import Values, command_of, load_task
from lapa2_interp.cli.texts import settings
from lapa2_interp.commands import command_options
from lapa2_interp.prefixes.settings import (
    PrefixAccuracySettings,
    PrefixEvaluationSettings,
    PrefixImportSettings,
    PrefixTrainingSettings,
)
from lapa2_interp.table_formats import as_text, format_interval, interval_cells

if TYPE_CHECKING:
    import pandas as pd

    from lapa2_interp.prefixes.soft_prefix import SoftPrefix
    from lapa2_interp.stats import Interval


def _read_changes(texts: Sequence[str], values: Values) -> dict[str, Any]:
    from lapa2_interp.prefixes.recipes import TrainingRecipe

    return read_fields(settings(texts), get_type_hints(TrainingRecipe))


def _print_set(table: pd.DataFrame, values: Values) -> None:
    _show(values["out"], table)


def _print_sets(table: pd.DataFrame, values: Values) -> None:
    for folder in values["folders"]:
        _show(folder, table[table["set"] == str(folder)])


def _print_import(prefix: SoftPrefix, values: Values) -> None:
    options = command_options(set={"prefixes": values["out"]})
    print(f"{prefix!r} in {values['out']}; generate with {options}")


train = command_of(
    PrefixTrainingSettings,
    "prefixes.make:make_set",
    read={"changes": _read_changes},
    prepare=load_task,
    show=_print_set,
)
evaluate = command_of(
    PrefixEvaluationSettings, "prefixes.make:measure_sets", prepare=load_task, show=_print_sets
)
score = command_of(
    PrefixAccuracySettings,
    "runs.prefix_accuracy:prefix_accuracy",
    show=lambda table, _: print(as_text(table, ".3f")),
)
import_ = command_of(
    PrefixImportSettings,
    "prefixes.importing:import_into_set",
    prepare=load_task,
    show=_print_import,
)


def recipes() -> None:
    """List the training recipes and every field that --set changes."""
    from lapa2_interp.prefixes.recipes import RECIPES, TrainingRecipe

    for recipe_name, changes in RECIPES.items():
        full = TrainingRecipe.model_validate(changes).model_dump()
        print(
            f"{recipe_name}: "
            + ", ".join(f"{field}={value}" for field, value in full.items())
            + "\n"
        )
    print("fields")
    for name, field in TrainingRecipe.model_fields.items():
        print(f"  {name:<17} {' '.join((field.description or '').split())}".rstrip())


def _show(folder: Path, table: pd.DataFrame) -> None:
    """NLL of each attribute's texts behind each prefix, and how well the prefixes tell the
    attributes apart."""
    from lapa2_interp.prefixes.soft_prefix import cards_in

    cells = table.assign(cell=interval_cells(table, ".3f", ("nll", "low", "high")))
    wide = cells.pivot(index="prefix", columns="label", values="cell").loc[
        list(dict.fromkeys(table["prefix"]))
    ]
    print(
        "NLL per token of the held-out texts of each attribute (columns) behind each prefix (rows)"
    )
    print(
        wide[list(dict.fromkeys(table["label"]))].rename_axis(index=None, columns=None).to_string()
    )
    for card in cards_in(folder):
        held_out = card.held_out
        if held_out is not None:
            print(
                f"likeliest under its own prefix, {card.attribute}: {_percent(held_out.accuracy)}"
            )
    if held_out is not None:
        print(f"likeliest under its own prefix, all: {_percent(held_out.accuracy_of_set)}")
        print(f"the same with hard prefixes, all:    {_percent(held_out.hard_accuracy_of_set)}")
        print(
            f"on {held_out.data}, {held_out.accuracy_of_set.n} texts of at most"
            f" {held_out.max_tokens} tokens"
        )


def _percent(share: Interval) -> str:
    low, high = max(share.low, 0.0), min(share.high, 1.0)
    return format_interval(100 * share.mean, 100 * low, 100 * high, ".1f", " %")
