"""The grids of analyses/learned: what a model writes with what train.py trained.

    python analyses/learned/grids.py tune smollm2-135m --models FOLDER
    python analyses/learned/grids.py test smollm2-135m --models FOLDER

writes made/MODEL/learned-tune.toml in the current folder. *tune* has the dials that are tried, with
the first seed. *test* has both ways with their tuned dials; prompt i takes seed i mod 3. All
else is as in analyses/families/grids.py, whose arms are not written again. A stage that has nothing
left to make writes no grid.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from analyses.families.grids import (
    HEADER,
    MADE,
    MODELS,
    NO_BIAS,
    block,
    chosen_layer,
    next_strengths,
    opening,
    path_of,
)
from analyses.families.grids import OUT as FAMILIES
from analyses.lab.scripts import ScriptOptions
from analyses.learned.train import LAW, OUT, SEEDS, STRENGTHS, VECTOR
from lapa2_interp.errors import RunError
from lapa2_interp.files import write_text

WAYS = (STRENGTHS, VECTOR)
FIRST_DIALS = (1.0, 2.0)
"""Multiples of what was learned that are tried first."""
METHOD = "analyses.learned.vector:LearnedVector"


def main() -> None:
    """Write the grid of a stage."""
    parser = ScriptOptions(str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("tune", "test"))
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--models", type=Path, required=True, help="the folder of `make models`")
    parser.add_argument("--tables", type=Path, default=OUT, help="of the stages before")
    options = parser.parse_args()
    blocks = {"tune": tune_blocks, "test": test_blocks}[options.stage](
        options.model, options.tables
    )
    file = MADE / options.model / f"learned-{options.stage}.toml"
    file.unlink(missing_ok=True)
    if blocks:
        path = path_of(options.model, options.models)
        header = HEADER.format(stage=f"learned strengths, {options.stage}", model=path)
        write_text(file, "\n".join([header, *blocks]))


def tune_blocks(model: str, tables: Path) -> list[str]:
    """The dials that are tried next, with the first seed; none where all ways are tuned."""
    file, tried = "bases/families-tune.txt", dials(tables, model)
    next_ones = {way: next_strengths(FIRST_DIALS, of_way(tried, way)) for way in WAYS}
    if not any(next_ones.values()):
        return []
    blocks = [] if len(tried) else [block(file, 60, {NO_BIAS: "none"})]
    for way, values in next_ones.items():
        if values:
            blocks.append(way_block(model, tables, way, 1, values, file, 60))
    return blocks


def test_blocks(model: str, tables: Path) -> list[str]:
    """Every way with every seed."""
    tuned = dials(tables, model).query("tuned").set_index("way")["dial"]
    if missing := [way for way in WAYS if way not in tuned]:
        raise RunError(f"{', '.join(missing)} of {model} not tuned; run analyse.py tune {model}")
    lines = Path("bases/families.txt").read_text("utf-8").splitlines()
    blocks = []
    for seed in SEEDS:
        taken = [line for i, line in enumerate(lines) if seed_of(i) == seed]
        file = MADE / model / f"learned-prompts-{seed}.txt"
        write_text(file, "".join(f"{line}\n" for line in taken))
        for way in WAYS:
            values = (round(float(tuned[way]), 4),)
            blocks.append(way_block(model, tables, way, seed, values, str(file), len(taken)))
    return blocks


def seed_of(prompt: int) -> int:
    """The seed of a prompt, by its number in the file of test prompts."""
    return SEEDS[prompt % len(SEEDS)]


def dials(tables: Path, model: str) -> pd.DataFrame:
    """The dials of a model that were tried: way, dial, cost, tuned."""
    file = tables / "dials.csv"
    if not file.exists():
        return pd.DataFrame(columns=["way", "dial", "cost", "tuned"]).astype({"tuned": bool})
    table = pd.read_csv(file)
    return table[table["model"] == model]


def of_way(tried: pd.DataFrame, way: str) -> pd.DataFrame:
    """The dials of a way."""
    return tried[tried["way"] == way].rename(columns={"dial": "strength"})


def way_block(
    model: str, tables: Path, way: str, seed: int, values: tuple[float, ...], file: str, n: int
) -> str:
    """A block of one way with some dials."""
    what = pd.read_csv(tables / ("vectors.csv" if way == VECTOR else "strengths.csv"))
    own = what[(what["model"] == model) & (what["seed"] == seed)]
    if way == VECTOR:
        vector = MADE / model / "learned" / f"vector-{seed}.csv"
        write_text(vector, own[["dimension", "value"]].to_csv(index=False))
        layer = chosen_layer(FAMILIES, model)
        rows = [
            f'    {{ name = "{METHOD}", with_prefix = true, vector = "{vector}", layers = {layer},'
            f" strength = {dial} }},"
            for dial in values
        ]
        return "\n".join([*opening(file, n), "method = [", *rows, "]", 'augmentation = "none"', ""])
    own = own[own["way"] == way]
    heads = zip(own["layer"], own["head"], own["strength"], strict=True)
    strengths = ", ".join(f"[{layer}, {head}, {strength:.6g}]" for layer, head, strength in heads)
    l0 = own["l0"].iloc[0]
    arms = [
        f'    {{ alpha = {dial}, law = "{LAW}", l0 = {l0}, strengths = [{strengths}],'
        f' label = "{way} {seed}, {dial:g}" }},'
        for dial in values
    ]
    method = 'method = { name = "prefix", prefixes = "hard" }'
    return "\n".join([*opening(file, n), method, "augmentation = [", *arms, "]", ""])


if __name__ == "__main__":
    main()
