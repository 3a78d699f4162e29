"""The commands that make soft prefixes: `lapa2 prefix train | evaluate | import | recipes`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_type_hints

from cyclopts import Parameter

from lapa2_interp._util.commands import command_options
from lapa2_interp._util.table_formats import as_text, format_interval, interval_cells
from lapa2_interp._util.values import read_fields
from lapa2_interp.cli.options import Changes, Unshown, settings
from lapa2_interp.models.machine import Dtype, DtypeOrAuto

if TYPE_CHECKING:
    import pandas as pd

    from lapa2_interp.stats import Interval


def train(
    *,
    out: Path,
    data: Annotated[tuple[str, ...], Unshown],
    held_out: Annotated[tuple[str, ...], Unshown] = (),
    model: str = "smollm2-135m",
    task: str = "sentiment",
    attribute: Annotated[tuple[str, ...], Unshown] = (),
    objective: Literal["mle", "contrastive"] | None = None,
    parameterisation: Literal["direct", "air", "mlp", "linear"] | None = None,
    recipe: str = "small",
    start_from: Annotated[Path | None, Parameter(name="--from")] = None,
    changed: Changes = (),
    device: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Train a task's soft prefixes for a frozen model; the same command resumes.

    Writes one `<attribute>.safetensors` and one card, `<attribute>.json`, per attribute; generate
    with them by `--set prefixes=FOLDER`. For example

        lapa2 prefix train --task sentiment --data imdb --out results/sentiment-mle
        lapa2 prefix train --task sentiment --data reviews.jsonl \\
            --objective contrastive --set lr=0.03 --out results/contrastive

    Args:
        out: The set's folder.
        data: imdb, sst2 or agnews from the hub, or a file (.jsonl, .csv, .parquet, also compressed)
            with fields text and label, whose labels are the task's attributes; repeat the option
            for more.
        held_out: The same, never trained on: the loss of one half decides when to stop, the other
            half gives the cards' numbers. By default 250 texts per attribute are held out of the
            data.
        model: A name of `lapa2 models`, a hub id or a folder.
        task: A task of `lapa2 tasks`, or the path of a task file.
        attribute: Train only this one; repeat for more.
        objective: mle: each prefix alone, likelihood of its texts. contrastive: all together, told
            apart.
        parameterisation: direct, air (Air-Decoding), mlp (Prefix-Tuning) or linear (Con-Prefix).
        recipe: small (two cores), or a paper's: lapa2, air, con-prefix, prefix-tuning.
        start_from: Begin with the prefixes of this set.
        changed: A field of the recipe as NAME=VALUE, such as lr=0.03 (`lapa2 prefix recipes` lists
            them).
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        trust_remote_code: Run code that comes with the model.
    """
    from lapa2_interp.methods.registry import load_task
    from lapa2_interp.prefixes.make import make_set
    from lapa2_interp.prefixes.recipes import TrainingRecipe
    from lapa2_interp.prefixes.recipes import training_recipe as make_recipe

    changes = {
        "objective": objective,
        "parameterisation": parameterisation,
        "start": "set" if start_from else None,
    }
    values = read_fields(settings(changed), get_type_hints(TrainingRecipe))
    chosen = make_recipe(recipe, **({k: v for k, v in changes.items() if v is not None} | values))
    table = make_set(
        model,
        load_task(task),
        out,
        data,
        held_out,
        chosen,
        attributes=attribute,
        start_from=start_from,
        device=device,
        trust_remote_code=trust_remote_code,
        report=_tell,
    )
    _show(out, table)


def evaluate(
    *folders: Path,
    data: Annotated[tuple[str, ...], Unshown],
    task: str | None = None,
    limit: int = 250,
    max_tokens: int = 64,
    dtype: Dtype = "float32",
    device: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Measure sets of soft prefixes on held-out text, and write the numbers into their cards.

    Args:
        folders: Sets of one task and model: folders of `lapa2 prefix train --out`. Hard prefixes
            are measured once for all.
        data: As in `lapa2 prefix train`; of corpora on the hub the test split is read.
        task: The task; the one the set was trained for, by default.
        limit: Texts per attribute, shared evenly among the data.
        max_tokens: Tokens of each text that are read, from its beginning.
        dtype: Precision of weights and computation.
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        trust_remote_code: Run code that comes with the model.
    """
    from lapa2_interp.methods.registry import load_task
    from lapa2_interp.prefixes.make import measure_sets

    table = measure_sets(
        folders,
        data,
        None if task is None else load_task(task),
        limit=limit,
        max_tokens=max_tokens,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        report=_tell,
    )
    for folder in folders:
        _show(folder, table[table["set"] == str(folder)])


def score(
    *folders: Path,
    task: str | None = None,
    samples: int = 4,
    length: int = 64,
    alpha: float = 0.5,
    classifier: str = "both",
    dtype: DtypeOrAuto = "auto",
    device: str | None = None,
    seed: int = 1,
    trust_remote_code: bool = False,
) -> None:
    """Generate behind soft prefixes, without and with LaPA2; put the accuracy into their cards.

    Args:
        folders: Sets: folders of `lapa2 prefix train --out`.
        task: The task; the one a set was trained for, by default.
        samples: Texts per prompt of the task.
        length: Tokens of a text, the prompt's included where the task counts them.
        alpha: Strength of LaPA2.
        classifier: adapter or linear, which ship, both, or a sequence classifier: hub id or
            folder.
        dtype: Precision of weights and computation; auto is bfloat16 or float32, whichever this
            machine computes faster.
        device: cpu, cuda, cuda:1; CUDA when there is one, by default.
        seed: Seed of the random streams.
        trust_remote_code: Run code that comes with a model.
    """
    from lapa2_interp.runs.prefix_accuracy import prefix_accuracy

    table = prefix_accuracy(
        folders,
        task,
        samples=samples,
        length=length,
        alpha=alpha,
        classifier=classifier,
        dtype=dtype,
        device=device,
        seed=seed,
        trust_remote_code=trust_remote_code,
    )
    print(as_text(table, ".3f"))


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


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


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
        found = card.held_out
        if found is not None:
            print(f"likeliest under its own prefix, {card.attribute}: {_percent(found.accuracy)}")
    if found is not None:
        print(f"likeliest under its own prefix, all: {_percent(found.accuracy_of_set)}")
        print(f"the same with hard prefixes, all:    {_percent(found.hard_accuracy_of_set)}")
        print(
            f"on {found.data}, {found.accuracy_of_set.n} texts of at most {found.max_tokens} tokens"
        )


def _percent(found: Interval) -> str:
    low, high = max(found.low, 0.0), min(found.high, 1.0)
    return format_interval(100 * found.mean, 100 * low, 100 * high, ".1f", " %")


def import_(
    source: Path,
    /,
    *,
    out: Path,
    model: str,
    task: str,
    attribute: str,
    set_name: str = "imported",
    number: int | None = None,
    other_base: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Bring a soft prefix that other code trained into a set of this package.

    Reads PEFT's prefix-tuning adapters (a folder with adapter_config.json), checkpoints of
    Air-Decoding and of the released LaPA2 code, and this package's own prefixes (to attach one to
    the same model from another place). For example

        lapa2 prefix import ckpt-2/pytorch_model.bin --model gpt2-medium \\
            --task topic --attribute world --out results/air-topic

    Args:
        source: The adapter's folder, the checkpoint, or a .safetensors of this package.
        out: The set's folder; the prefix is added to it.
        model: The model it was trained for.
        task: The task its attribute belongs to.
        attribute: What it steers towards.
        set_name: What the card calls the set.
        number: Which prefix of an Air-Decoding checkpoint; by default the attribute's (0-7:
            positive, negative, world, sports, business, science, nontoxic, toxic).
        other_base: Accept a prefix whose file names another model than this one, because you know
            that the two are the same. The card records that model.
        trust_remote_code: Run code that comes with the model.
    """
    from lapa2_interp.methods.registry import load_task
    from lapa2_interp.prefixes.importing import import_into_set

    made = import_into_set(
        source,
        out,
        model,
        load_task(task),
        attribute,
        set_name,
        number,
        other_base,
        trust_remote_code,
    )
    print(f"{made!r} in {out}; generate with {command_options(set={'prefixes': out})}")
