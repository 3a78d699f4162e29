"""Grids: what an experiment runs, as a small TOML file or a built-in, resolved into cells before
    anything runs.

A grid is one or more blocks; every key of a block is a value or a list of values, and a list is an
axis of the product. `EXAMPLE` shows the form. A cell is one point with everything that decides its
texts; its key is a hash of just that, so that equal cells of two grids are one cell.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lapa2_interp._util.errors import (
    AugmentationError,
    GridError,
    Lapa2Error,
    first_problem,
    unknown_choice,
)
from lapa2_interp._util.files import parse_toml, read_text
from lapa2_interp.bias.augmentation import Augmentation, Augmentations, normalize_augmentations
from lapa2_interp.bias.recipes import RECIPES, parse_recipes
from lapa2_interp.generation.cell import Cell, same_label
from lapa2_interp.methods.base import Method
from lapa2_interp.methods.registry import find_class, get_for_task, load_task
from lapa2_interp.models.card import ModelClass
from lapa2_interp.models.machine import AUTO_DTYPE, DtypeOrAuto, faster_dtype
from lapa2_interp.tasks.task import Attribute, Prompts, Task, more_prompts, read_prompts

EXAMPLE = """description = "does a descriptive prefix hold longer?"
model = "smollm2-135m"           # keys up here hold for every block
dtype = "auto"                   # bfloat16 or float32, whichever this machine computes faster; or a name
task = "sentiment"               # a name of `lapa2 tasks`, or a task file
samples = 7                      # continuations per prompt
length = 128                     # the longest; shorter texts are the beginnings of these
prompts = 5                      # the task's first 5 (more than it has: with others of this package); or a file's: "prompts.txt" in the folder you are in

[[block]]
method = ["prefix", { name = "air-decoding", omega = 60.0 }]    # a list is an axis: 2 methods x 2 wordings x 2 arms
wording = ["task", "A {attribute} text:"]                       # the task's hard prefixes, or all of this form
augmentation = ["none", "paper"]                                # paper: the method's alpha; or { alpha = 1.0, law = "sqrt", label = "gentle" }, or a recipe: "instaboost:M=5"

[[block]]
method = "none"
"""  # noqa: E501
"""A complete grid file."""

GRIDS = Path(__file__).parent / "grids"
"""Folder of the grids that ship with the package."""


class FromFile(BaseModel):
    """Prompts that are in a file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    file: str
    n: Annotated[int, Field(ge=1)]
    """How many there should be."""
    what: str = ""
    """What they are; the file is looked for in the current folder."""


class Block(BaseModel):
    """The keys of a grid file, each one value of its axis; strict, since `prompts = true` is no
    number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str
    dtype: DtypeOrAuto = "float32"
    """auto: that of the run's cells of this grid and model, or what the sweeping machine computes
        faster; never in a cell."""
    model_class: ModelClass = "TransformerBridge"
    method: str | dict[str, Any]
    """A name, or { name = ..., PARAMETER = VALUE }."""
    task: str
    wording: str = "task"
    """The task's hard prefixes ("task"), or a form with {attribute} or {Attribute}."""
    attribute: str = "all"
    prompts: Literal["task"] | Annotated[int, Field(ge=1)] | FromFile | str = "task"
    """The task's; so many at most, of the task's and then of `tasks.more_prompts`; or a file's."""
    augmentation: str | dict[str, Any] = "none"
    """none; a profile (paper, released) at the method's alpha; recipes, as `parse_recipes` takes
    them; or fields of an augmentation, alpha the method's if absent, or { recipe = ... }, either
    with a label."""
    label: str = ""
    """What the block's arms are called, except those with a label of their own; by default a
    recipe's text, or the fields of the augmentation. It decides no text."""
    length: Annotated[int, Field(ge=1)]
    samples: Annotated[int, Field(ge=1)]
    seed: int = 1
    top_k: Annotated[int, Field(ge=1)] = 200
    eos: Literal["keep", "stop", "block"] = "keep"
    trace: Literal["none", "pooled", "full"] = "pooled"
    max_rows: Annotated[int, Field(ge=1)] | None = None
    doubled_bos: bool = False
    bar_prefix_words: bool = False


FORMS = {
    "method": "a name, or { name = ..., PARAMETER = VALUE }",
    "prompts": (
        "task, a number of at least 1, the path of a file with one on each line, or { file = ..., n"
        " = ... }"
    ),
    "augmentation": (
        'none, paper, released, a recipe such as "instaboost:M=5", or { alpha = ..., law = ... }'
        " with a label = ..."
    ),
}
"""For error messages: the values of keys that take several forms."""


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


MOST_POINTS = 20_000
"""Points of a block's product that are resolved without a word of the user's: each is one cell or
several, and a cell is a folder of files."""
AutoDtype = Callable[[str, str, frozenset[str]], str]
"""What dtype "auto" means, given the names of a grid and of a model, and the dtypes that blocks of
the grid name."""


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
    elif Path(name).suffix == ".toml" and Path(name).is_file():
        try:
            text, title = read_text(Path(name)), Path(name).stem
        except (OSError, ValueError) as error:
            raise GridError(f"cannot read {name} as text: {error}") from None
    elif Path(name).suffix == ".toml":
        raise GridError(f"there is no file {name}; `lapa2 grids` ends with an example of one")
    else:
        raise GridError(f"{unknown_choice('grid', name, built_in())}; or the path of a .toml file")
    try:
        raw = parse_toml(text)
    except ValueError as error:
        raise GridError(f"grid {name}: {error}; `lapa2 grids` ends with an example") from None
    description = str(raw.pop("description", ""))
    blocks = raw.pop("block", [{}])
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise GridError(f"grid {name}: a block begins with [[block]], in double brackets")
    needs: list[str] = []
    cells: dict[str, Cell] = {}
    dtypes = [
        _as_list((raw | block | dict(changes or {})).get("dtype", "float32")) for block in blocks
    ]
    named = frozenset(str(each) for values in dtypes for each in values if each != AUTO_DTYPE)

    def meaning(model: str) -> str:
        return (auto or _fastest)(title, model, named)

    for number, block in enumerate(blocks, 1):
        where = f"grid {name}, block {number}"
        keys = raw | block | dict(changes or {})
        _check_keys(keys, where)
        for key, value in keys.items():
            if value == []:
                raise GridError(f"{where}: {key} is an empty list, so the block has no cell")
        if isinstance(keys.get("label"), list):
            raise GridError(
                f"{where}: label is one text, not a list; give each arm its own: augmentation = [{{"
                " alpha = ..., label = ... }, ...]"
            )
        if keys.get("label") and _as_list(keys.get("augmentation", "none")) == ["none"]:
            raise GridError(
                f"{where}: label {keys['label']!r} is for an augmentation, and the block has none"
            )
        axes = [_as_list(value) for value in keys.values()]
        if (points := math.prod(map(len, axes))) > MOST_POINTS and not yes:
            raise GridError(
                f"{where} has {points} points, and {MOST_POINTS} is a large grid; give shorter"
                " lists, or yes=True (`lapa2 sweep --yes`)"
            )
        for point in itertools.product(*axes):
            named_keys = dict(zip(keys, point, strict=True))
            for cell in _resolve(named_keys, where, needs, meaning, allow_code):
                cells.setdefault(cell.key, cell)
    if not cells:
        raise GridError(f"grid {name} has no block, so no cell; `lapa2 grids` ends with an example")
    for one, other in same_label(cells.values()):
        raise GridError(
            f"grid {name}: the label {other.label!r} names two arms ({one.plain_arm};"
            f" {other.plain_arm}); give each its own: {{ alpha = ..., label = ... }}"
        )
    if needs and check:
        raise GridError(f"grid {name} cannot run yet: {'; '.join(dict.fromkeys(needs))}")
    return Grid(title, description, tuple(cells.values()), tuple(dict.fromkeys(needs)))


def _check_keys(keys: Iterable[str], where: str) -> None:
    for key in keys:
        if key not in Block.model_fields:
            raise GridError(f"{where}: {unknown_choice('key', key, Block.model_fields)}")


def _fastest(grid: str, model: str, named: frozenset[str]) -> str:
    return faster_dtype()


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _resolve(
    point: dict[str, Any],
    where: str,
    needs: list[str],
    auto: Callable[[str], str],
    allow_code: bool,
) -> list[Cell]:
    """The cells of one point of a block: one per attribute."""
    try:
        block = Block.model_validate(point)
        if block.dtype == AUTO_DTYPE:
            block = block.model_copy(update={"dtype": auto(block.model)})
    except ValidationError as error:
        raise GridError(f"{where}: {first_problem(error, FORMS, Block.model_fields)}") from None
    try:
        task = _task(block, needs)
        given = {"name": block.method} if isinstance(block.method, str) else dict(block.method)
        if not isinstance(given.get("name"), str):
            raise GridError(f"a method is a name or {{ name = ... }}, found {block.method!r}")
        find_class(name := given.pop("name"), allow_code)
        method = get_for_task(name, load_task(block.task), **given)
        augmentation, label = _augmentation(block.augmentation, method)
        attributes = list(task.attributes) if block.attribute == "all" else [block.attribute]
        _check_wording(block, task, method, attributes)
        return [
            _cell(block, task, attribute, method, augmentation, label or block.label, needs)
            for attribute in attributes
        ]
    except Lapa2Error as error:
        raise GridError(f"{where}: {error}") from None


def _task(block: Block, needs: list[str]) -> Task:
    task = load_task(block.task)
    match block.prompts:
        case "task":
            prompts = task.prompts.texts
        case int(n):
            own = task.prompts.texts
            prompts = (*own, *(text for text in more_prompts(task.name) if text not in own))[:n]
        case FromFile(file=file, n=n, what=what) if not Path(file).is_file():
            needs.append(f"no file {file} ({n} prompts: {what}) in the folder you are in")
            prompts = tuple(
                f"prompt {i} of a file that is not there yet, as long as most" for i in range(n)
            )
        case FromFile(file=file, n=n):
            prompts = read_prompts(Path(file))
            if len(prompts) != n:
                raise GridError(f"{file} has {len(prompts)} prompts, and the grid says {n}")
        case file if not Path(str(file)).is_file():
            raise GridError(f"prompts: takes {FORMS['prompts']}; there is no file {file!r}")
        case file:
            prompts = read_prompts(Path(str(file)))
    attributes = task.attributes
    if block.wording != "task":
        if "{attribute}" not in block.wording and "{Attribute}" not in block.wording:
            raise GridError(
                f'wording {block.wording!r} names no attribute; write it as "Very {{attribute}}:"'
            )
        attributes = {
            name: Attribute(
                prefix=block.wording.replace("{attribute}", name).replace(
                    "{Attribute}", name.capitalize()
                )
            )
            for name in attributes
        }
    return task.model_copy(update={"attributes": attributes, "prompts": Prompts(texts=prompts)})


def _check_wording(block: Block, task: Task, method: Method, attributes: Sequence[str]) -> None:
    """Refuse a wording that the method does not read: its cells would have other keys and the same
    texts."""
    usual = load_task(block.task)
    if task.attributes == usual.attributes:
        return
    for attribute in attributes:
        if method.branches(task, attribute) == method.branches(usual, attribute):
            raise GridError(
                f"wording {block.wording!r} changes nothing for {method.name}, which puts no prefix"
                f" of {task.name}'s attributes in front; give it wording task"
            )


def _augmentation(asked: str | dict[str, Any], method: Method) -> tuple[Augmentations, str]:
    """What acts, and the label it was given."""
    if asked == "none":
        return None, ""
    label = ""
    if isinstance(asked, dict):
        asked, label = {**asked}, asked.get("label", "")
        asked.pop("label", None)
        if not isinstance(label, str):
            raise AugmentationError(f"the label of an augmentation is a text, found {label!r}")
        if "recipe" in asked:
            if beside := [name for name in asked if name != "recipe"]:
                raise AugmentationError(
                    f"a recipe has its parameters in its text, such as instaboost:M=5; leave out"
                    f" {beside[0]}"
                )
            asked = str(asked["recipe"])
    if isinstance(asked, str):
        if asked not in ("paper", "released"):
            if re.split("[+:]", asked)[0].strip() in RECIPES:
                named = parse_recipes(asked)
                return normalize_augmentations(named), label or named.label
            allowed = ("none", "paper", "released", *RECIPES)
            raise AugmentationError(
                f"{unknown_choice('augmentation', asked, allowed)}; or a table of fields"
            )
        asked = {"profile": asked}
    fields = {"alpha": method.alpha} | asked
    return normalize_augmentations(
        Augmentation(**{name: _tuples(value) for name, value in fields.items()})
    ), label


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _cell(
    block: Block,
    task: Task,
    attribute: str,
    method: Method,
    augmentation: Augmentations,
    label: str,
    needs: list[str],
) -> Cell:
    return Cell.of(
        block.model,
        method=method,
        task=task,
        attribute=attribute,
        augmentation=augmentation,
        alpha=0.0 if augmentation is None else None,
        label="" if augmentation is None else label,
        dtype=block.dtype,
        needs=needs,
        **{name: getattr(block, name) for name in _SHARED},
    )


_SHARED = (
    "model_class", "length", "samples", "seed", "top_k", "eos", "trace", "max_rows", "doubled_bos",
    "bar_prefix_words",
)  # fmt: skip


def parse_changes(texts: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE options as values of a grid; a value is read as TOML where it is TOML, as text
    otherwise.

    Raises:
        GridError: Not of that form, an unknown key, or one given twice.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, mark, value = text.partition("=")
        if not mark:
            raise GridError(f"--set {text!r} is not of the form KEY=VALUE, such as samples=2")
        _check_keys([key], "--set")
        if key in found:
            raise GridError(
                f"--set gives {key} twice, {found[key]} and {value}; give it once, as a list for"
                f" both: {key}=[..., ...]"
            )
        try:
            found[key] = parse_toml(f"value = {value}")["value"]
        except ValueError:
            found[key] = value
    return found
