"""Grids: what an experiment runs, as a small TOML file or a built-in.

A grid is resolved into cells before anything runs.

A grid is one or more blocks; every key of a block is a value or a list of values, and a list is an
axis of the product, also one inside a table (`generation.axes.axes_of_table`). `EXAMPLE` shows
the form. A cell is one point with everything that decides its
texts; its key is a hash of just that, so that equal cells of two grids are one cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lapa2_interp._util.parsing import parse_toml, read_text
from lapa2_interp._util.paths import looked_for
from lapa2_interp._util.values import read_value
from lapa2_interp.errors import GridError, Lapa2Error, parameter, unknown_choice
from lapa2_interp.generation.axes import as_axis, size_of_product
from lapa2_interp.generation.cell import Cell, same_label
from lapa2_interp.generation.resolve import resolve_block
from lapa2_interp.generation.settings import (
    CellSettings,
    unknown_setting,
)
from lapa2_interp.models.machine import AUTO_DTYPE, faster_dtype

EXAMPLE = """description = "does a descriptive prefix hold longer?"
model = "smollm2-135m"           # keys up here hold for every block
dtype = "float32"                # the default; auto: bfloat16 or float32, whichever this machine computes faster
task = "sentiment"               # a name of `lapa2 tasks`, or a task file
samples = 7                      # continuations per prompt
length = 128                     # the longest; shorter texts are the beginnings of these
prompts = 5                      # the task's first 5 (more than it has: with others of this package); or a file's: "prompts.txt" in the folder you are in

[[block]]
method = ["prefix", { name = "air-decoding", omega = 60.0 }]    # a list is an axis: 2 methods x 2 prefixes x 2 arms
prefix = ["task", "A {attribute} text:"]                        # the task's hard prefixes, or all of this form
augmentation = ["none", "paper"]                                # paper: the method's alpha; or { alpha = 1.0, law = "sqrt", label = "gentle" }, or a recipe: "instaboost:M=5"; or { card = "card.json" } of lapa2 select

[[block]]
alpha = [0.25, 0.5]                                             # of each augmentation that leaves it open
augmentation = { layers = ["all", "bottom"] }                   # a list in a table is an axis, too: 4 arms with alpha

[[block]]
method = "none"
"""  # noqa: E501
"""A complete grid file."""

GRIDS = Path(__file__).parent / "grids"
"""Folder of the grids that ship with the package."""


@dataclass(frozen=True)
class Grid:
    """A grid file, resolved.

    Attributes:
        name: The built-in's name, or the file's without its ending.
        cells: In order, each once.
        needs: What is missing before it can run: files of prompts, soft prefixes.
    """

    name: str
    description: str
    cells: tuple[Cell, ...]
    needs: tuple[str, ...] = field(default=())


def built_in() -> list[str]:
    """Names of the grids that ship with the package, such as quick/scaling."""
    return sorted(str(file.relative_to(GRIDS).with_suffix("")) for file in GRIDS.rglob("*.toml"))


DTYPE = CellSettings.model_fields["dtype"].default
MOST_POINTS = 20_000
"""Points of a block's product that are resolved without a word of the user's: each is one cell or
several, and a cell is a folder of files."""
AutoDtype = Callable[[str, str, frozenset[str]], str]
"""The meaning of dtype "auto", given the names of a grid and of a model, and the dtypes that blocks
of the grid name."""


def load_grid(
    name: str,
    changes: Mapping[str, Any] | None = None,
    *,
    check: bool = True,
    auto: AutoDtype | None = None,
    allow_code: bool = False,
    yes: bool = False,
) -> Grid:
    """A built-in grid, or that of a TOML file, with every cell resolved.

    To fill a run folder that may have cells of the grid already, use `sweep.load_grids`.

    Args:
        changes: Values that replace a key in every block, such as {"samples": 1}.
        check: Raise when something is missing; otherwise the grid's `needs` say what.
        auto: What dtype "auto" means; by default what this machine computes faster
            (`models.machine.faster_dtype`).
        allow_code: Import the modules of methods that the grid names as MODULE:CLASS.
        yes: Resolve also more than MOST_POINTS points.

    Raises:
        GridError: Unknown name or key, a malformed value, an impossible combination, or (with
            `check`) something is missing.
    """
    if name in built_in():
        text = read_text(GRIDS / f"{name}.toml")
        title = name
    elif Path(name).suffix.lower() == ".toml":
        try:
            text, title = read_text(Path(name)), Path(name).stem
        except FileNotFoundError:
            raise GridError(
                f"there is no file {name}; `lapa2 grids` ends with an example of one"
                f"{looked_for(name)}"
            ) from None
        except (OSError, ValueError) as error:
            raise GridError(f"cannot read {name} as text: {error}") from None
    else:
        raise GridError(f"{unknown_choice('grid', name, built_in())}; or the path of a .toml file")
    try:
        raw = parse_toml(text)
    except ValueError as error:
        raise GridError(f"grid {name}: {error}; `lapa2 grids` ends with an example") from None
    description = str(raw.pop("description", ""))
    blocks = raw.pop("block", [raw])
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise GridError(f"grid {name}: a block begins with [[block]], in double brackets")
    if {} in blocks:  # what was cut from the file would be defaults
        raise GridError(
            f"grid {name}, block {blocks.index({}) + 1}: it has no keys; give one at least, such as"
            " length = 128, or leave the block out (`lapa2 grids` ends with an example)"
        )
    needs: list[str] = []
    cells: dict[str, Cell] = {}
    fields_of_blocks = [raw | block | dict(changes or {}) for block in blocks]
    dtypes = [dtype for fields in fields_of_blocks for dtype in as_axis(fields.get("dtype", DTYPE))]
    named = frozenset(str(dtype) for dtype in dtypes if dtype != AUTO_DTYPE)

    def meaning(model: str) -> str:
        return faster_dtype() if auto is None else auto(title, model, named)

    for number, fields in enumerate(fields_of_blocks, 1):
        where = f"grid {name}, block {number}"
        try:
            if (points := size_of_product(fields)) > MOST_POINTS and not yes:
                raise GridError(
                    f"{points} points, and {MOST_POINTS} is a large grid; give shorter lists, or"
                    " yes=True (`lapa2 sweep --yes`)"
                )
            if isinstance(fields.get("label"), list):
                raise GridError(
                    "label is one text, not a list; give each arm its own: augmentation = [{ alpha"
                    " = ..., label = ... }, ...]"
                )
            for block in _with_dtype(fields, meaning):
                resolved = resolve_block(block, allow_code=allow_code)
                needs += map(str, resolved.missing)
                for cell in resolved.cells:
                    cells.setdefault(cell.key, cell)
        except Lapa2Error as error:
            raise GridError(f"{where}: {error}") from None
    if not cells:
        raise GridError(f"grid {name} has no block, so no cell; `lapa2 grids` ends with an example")
    for cell, namesake in same_label(cells.values()):
        raise GridError(
            f"grid {name}: the label {namesake.label!r} names two arms ({cell.plain_arm};"
            f" {namesake.plain_arm}); give each its own: {{ alpha = ..., label = ... }}"
        )
    if needs and check:
        raise GridError(f"grid {name} cannot run yet: {'; '.join(dict.fromkeys(needs))}")
    return Grid(title, description, tuple(cells.values()), tuple(dict.fromkeys(needs)))


def _with_dtype(fields: Mapping[str, Any], auto: Callable[[str], str]) -> Iterator[dict[str, Any]]:
    """A block for each of its models, with dtype "auto" replaced."""
    for model in as_axis(fields.get("model", CellSettings.model_fields["model"].default)):
        dtypes = [
            auto(str(model)) if dtype == AUTO_DTYPE else dtype
            for dtype in as_axis(fields.get("dtype", DTYPE))
        ]
        yield {**fields, "model": model, "dtype": list(dict.fromkeys(dtypes))}


def parse_changes(texts: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE options as values of a grid; a value is read as TOML where it is TOML, as text
    otherwise.

    Raises:
        GridError: Not of that form, an unknown key, or one given twice.
    """
    changes: dict[str, Any] = {}
    for text in texts:
        key, mark, value = text.partition("=")
        if not mark:
            raise GridError(
                f"{parameter('set')} {text!r} is not of the form KEY=VALUE, such as samples=2"
            )
        if key not in CellSettings.model_fields:
            raise GridError(f"{parameter('set')}: {unknown_setting(key)}")
        if key in changes:
            raise GridError(
                f"{parameter('set')} gives {key} twice, {changes[key]} and {value}; give it"
                " once, as a list for"
                f" both: {key}=[..., ...]"
            )
        changes[key] = read_value(value)
    return changes
