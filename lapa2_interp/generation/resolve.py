"""From settings to cells: names become values, and every default is filled in."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lapa2_interp._util.paths import is_path, taken_as_path
from lapa2_interp.bias.augmentation import (
    Augmentation,
    AugmentationLike,
    active_augmentations,
    normalize_augmentations,
)
from lapa2_interp.bias.head_card import HeadCard
from lapa2_interp.bias.recipes import (
    RECIPES,
    LabeledAugmentations,
    own_strength,
    parse_recipes,
)
from lapa2_interp.bias.text_start import AUTO_START, start_setting
from lapa2_interp.errors import (
    AugmentationError,
    Lapa2Error,
    LayoutError,
    MethodError,
    ModelError,
    PrefixError,
    TaskError,
    parameter,
    unknown_choice,
    validation_message,
)
from lapa2_interp.files import sha256_of
from lapa2_interp.generation.axes import product, size_of_product
from lapa2_interp.generation.cell import Cell, same_label
from lapa2_interp.generation.settings import (
    TASK,
    CellSettings,
    PromptFile,
    python_values,
)
from lapa2_interp.methods.base import Branch, Method, SoftPrefixKey
from lapa2_interp.methods.registry import (
    find_class,
    get_for_task,
    load_task,
    method_name,
)
from lapa2_interp.models.card import identify
from lapa2_interp.models.facts import Model
from lapa2_interp.models.load import expand_name, start_of_named
from lapa2_interp.models.machine import resolve_dtype
from lapa2_interp.prefixes.soft_prefix import read_card, set_folder
from lapa2_interp.tasks.prompts import as_prompts
from lapa2_interp.tasks.task import (
    ALL,
    CUSTOM,
    Attribute,
    MethodSettings,
    Prompts,
    Task,
    extra_prompts,
)

MISSING = "0" * 64
"""Stands for the sha256 of a file that is not there."""


@dataclass(frozen=True)
class Resolved:
    """Cells, and what is missing before they can run.

    Attributes:
        missing: An error about each file that is not there.
    """

    cells: tuple[Cell, ...]
    missing: tuple[Lapa2Error, ...] = ()


def cells_of(fields: Mapping[str, Any], **options: Any) -> list[Cell]:
    """Cells of a block: the product over fields that are lists, each cell once.

    Args:
        fields: Settings by name, each a value or a list of values.
        options: As `resolve`.

    Raises:
        Lapa2Error: As `resolve_block`; or a file is missing.
    """
    resolved = resolve_block(fields, **options)
    if resolved.missing:
        raise resolved.missing[0]
    return list(resolved.cells)


def resolve_block(fields: Mapping[str, Any], **options: Any) -> Resolved:
    """The cells of `cells_of`, also where files are missing.

    Raises:
        Lapa2Error: As `CellSettings.of` and `resolve`; or one label for two arms.
    """
    named = fields.get("augmentation")
    arms = named if isinstance(named, list) else [named]
    if fields.get("alpha") is not None and arms and all(arm == "none" for arm in arms):
        raise AugmentationError(
            f"alpha {fields['alpha']} is for an augmentation, and augmentation is none; leave one"
            " out (alpha 0 is the base method, too)"
        )
    label = {"label": fields.get("label", "")}  # one for all points: a list is refused
    axes = {name: value for name, value in fields.items() if name != "label"}
    points: Iterable[Mapping[str, Any]] = [axes]
    if any(isinstance(value, list | Mapping) for value in fields.values()):
        size_of_product(fields)
        points = product(axes)
    cells: dict[str, Cell] = {}
    missing: list[Lapa2Error] = []
    for point in points:
        resolved = resolve(CellSettings.of({**point, **label}), **options)
        missing += resolved.missing
        for cell in resolved.cells:
            cells.setdefault(cell.key, cell)
    if label["label"] and not any(cell.active_augmentations for cell in cells.values()):
        raise AugmentationError(
            f"label {label['label']!r} is for an augmentation, and there is none; 'baseline' is the"
            " arm without one"
        )
    for one, second in same_label(cells.values()):
        raise AugmentationError(
            f"the label {second.label!r} names two arms ({one.plain_arm}; {second.plain_arm}); give"
            " each its own: { alpha = ..., label = ... }"
        )
    return Resolved(tuple(cells.values()), tuple(missing))


def cell_of(model: str | Path | Model, **fields: Any) -> Cell:
    """The only cell of these settings.

    Raises:
        Lapa2Error: As `cells_of`; or attribute is "all", and the task has several.
    """
    device = fields.pop("device", None)
    cells = cells_of(python_values({"model": model, **fields}), device=device)
    if len(cells) > 1:
        names = ", ".join(cell.description for cell in cells)
        raise Lapa2Error(f"these settings give {len(cells)} cells, and one is asked for: {names}")
    return cells[0]


def resolve(
    settings: CellSettings,
    *,
    device: str | None = None,
    allow_code: bool = True,
) -> Resolved:
    """Cells from settings: one, or one for each attribute.

    Args:
        settings: A loaded model in them decides dtype and model_class.
        device: Device that will make the texts, which decides what dtype "auto" is.
        allow_code: Import the module of a method that is named as MODULE:CLASS. Of a name from a
            file this is for the user to allow.

    Raises:
        Lapa2Error: An unknown name, a value out of range, or values that do not fit together.
    """
    task, no_prompts = _resolve_task(settings)
    missing: list[Lapa2Error] = [no_prompts] if no_prompts is not None else []
    method = _resolve_method(settings, task, allow_code)
    augmentations, label, heads_of = _resolve_augmentations(settings, method)
    model = settings.model
    if isinstance(model, str | Path):
        facts = {
            "model": expand_name(model),
            "dtype": resolve_dtype(settings.dtype, device),
            "model_class": settings.model_class,
            "start": start_of_named(expand_name(model), settings.start),
        }
    else:
        card = identify(model)
        facts = {
            "model": card.name,
            "dtype": card.dtype,
            "model_class": card.model_class,
            "start": _start_of_loaded(model, settings.start),
        }
    attributes = [settings.attribute]
    if settings.attribute == ALL:
        attributes = list(task.attributes)
    cells = []
    for attribute in attributes:
        branches = method.branches(task, attribute)
        names = [branch.name for branch in branches]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise MethodError(
                f"{method.name} has two branches {twice[0]!r} for {attribute!r}; give its text in"
                f" task {task.name!r} another name"
            )
        _check_prefix(settings, task, method, attribute)
        texts = task.methods.get(method.name, MethodSettings()).texts
        files, no_prefixes = _files(facts["model"], task.name, branches, method)
        missing += no_prefixes
        try:
            cell = Cell(
                **facts,
                method=method_name(method),
                parameters=method.stored_parameters,
                task=Task(
                    name=task.name,
                    length_counts_prompt=task.length_counts_prompt,
                    lengths=(),
                    attributes=task.attributes,
                    prompts=Prompts(texts=task.prompts.texts),
                    methods={method.name: MethodSettings(texts=texts)} if texts else {},
                    chat=task.chat if any(branch.chat for branch in branches) else None,
                ),
                attribute=attribute,
                augmentation=normalize_augmentations(augmentations),
                patterns=settings.patterns,
                files=files,
                label=label,
                heads_of=heads_of,
                **{name: getattr(settings, name) for name in _UNCHANGED},
            )
        except ValidationError as error:
            raise Lapa2Error(validation_message(error)) from error
        cell.branch_augmentations  # noqa: B018 - refuses an augmentation without a branch
        cells.append(cell)
    return Resolved(tuple(cells), tuple(missing))


def _start_of_loaded(model: Model, start: str | None) -> str:
    """The start of a loaded model, which a setting may repeat."""
    loaded = start_setting(model, AUTO_START)
    if start != AUTO_START and (wanted := start_setting(model, start)) != loaded:
        raise ModelError(
            f"{parameter('start', wanted)}, and the model was loaded with start {loaded!r}, which"
            f" all that reads it follows; give load_model(..., start={wanted!r})"
        )
    return loaded


_UNCHANGED = (
    "length", "samples", "seed", "top_k", "temperature", "eos", "trace", "max_rows", "doubled_bos",
    "ban_words",
)  # fmt: skip
"""Settings that a cell has as they are given."""


def _resolve_task(settings: CellSettings) -> tuple[Task, LayoutError | None]:
    """The task with the prefix and prompts of the settings, and the error about a file of prompts
    that is missing."""
    if not isinstance(settings.task, str | Path | Task):
        raise TaskError(f"task must be a name, a path or a Task, found {settings.task!r}")
    task = settings.task if isinstance(settings.task, Task) else load_task(settings.task)
    prompts, no_prompts = _resolve_prompts(settings.prompts, task)
    changes: dict[str, Any] = {"prompts": prompts}
    form = settings.prefix
    if form != TASK and not form:
        raise LayoutError("prefix '' is empty; give a text, or method none for no prefix")
    if form != TASK and is_path(form):
        raise LayoutError(f"prefix {taken_as_path(form)}; give the text of a prefix")
    if form != TASK and settings.attribute not in (ALL, *task.attributes):
        unnamed = settings.task == CellSettings.model_fields["task"].default
        default = ", the default," if unnamed else ","
        raise TaskError(
            f"attribute {settings.attribute!r} is none of task {task.name!r}{default} which has"
            f" {', '.join(task.attributes)}; beside a prefix of your own leave"
            f" {parameter('attribute')} out, or give a {parameter('task')} that has it"
        )
    if "{attribute}" in form or "{Attribute}" in form:
        changes["attributes"] = task.with_prefix(form).attributes
    elif form != TASK and settings.attribute == ALL:
        changes |= {"name": CUSTOM, "attributes": {CUSTOM: Attribute(prefix=form)}, "methods": {}}
    elif form != TASK:
        changes["attributes"] = task.attributes | {settings.attribute: Attribute(prefix=form)}
    return task.model_copy(update=changes), no_prompts


def _resolve_prompts(setting: Any, task: Task) -> tuple[Prompts, LayoutError | None]:
    """The prompts that a setting names: of the task, of a file, or as they are given. In place of a
    missing file as many others, and the error."""
    own = task.prompts.texts
    if isinstance(setting, int):
        others = extra_prompts(task.name) if setting > len(own) else ()
        return Prompts(texts=(*own, *(text for text in others if text not in own))[:setting]), None
    if isinstance(setting, PromptFile):
        if not Path(setting.file).exists():
            texts = tuple(
                f"prompt {i} of a file that is not there yet, as long as most"
                for i in range(setting.n)
            )
            return Prompts(texts=texts), LayoutError(
                f"no file {setting.file} ({setting.n} prompts: {setting.what}) in the folder you"
                " are in"
            )
        prompts = as_prompts(Path(setting.file))
        if len(prompts.texts) != setting.n:
            raise LayoutError(
                f"{setting.file} has {len(prompts.texts)} prompts, and not {setting.n}"
            )
        return prompts, None
    return as_prompts(task.prompts if setting == TASK else setting), None


def _resolve_method(settings: CellSettings, task: Task, allow_code: bool) -> Method:
    """The method of the settings, with the task's parameters where they give none."""
    chosen, parameters = settings.method, dict(settings.parameters or {})
    if isinstance(chosen, Mapping):
        name = chosen.get("name")
        if not isinstance(name, str):
            raise MethodError(f"a method is a name or {{ name = ... }}, found {dict(chosen)!r}")
        parameters |= {key: value for key, value in chosen.items() if key != "name"}
        chosen = name
    if isinstance(chosen, str):
        find_class(chosen, allow_code)
        return get_for_task(chosen, task, **parameters)
    if not isinstance(chosen, Method):
        raise MethodError(
            f"method must be a name, or come from methods.get or get_for_task, found {chosen!r}"
        )
    if parameters:
        raise MethodError(
            f"{chosen!r} has its parameters already; give it by name, or without parameters"
        )
    return chosen


def _resolve_augmentations(
    settings: CellSettings, method: Method
) -> tuple[AugmentationLike, str, str]:
    """The augmentations, the label of their arm, and the weights of a card that gives heads."""
    chosen, alpha, label = settings.augmentation, settings.alpha, ""
    card: HeadCard | None = None
    if chosen is None:
        chosen = Augmentation(alpha=method.alpha if alpha is None else alpha)
    if isinstance(chosen, Mapping):
        fields = dict(chosen)
        label = fields.pop("label", "")
        if not isinstance(label, str):
            raise AugmentationError(f"the label of an augmentation is a text, found {label!r}")
        if "card" in fields:
            card = HeadCard.load(str(fields.pop("card")))
        if "recipe" in fields:
            if beside := [name for name in fields if name != "recipe"]:
                raise AugmentationError(
                    "a recipe has its parameters in its text, such as instaboost:M=5; leave out"
                    f" {beside[0]}"
                )
            chosen = str(fields["recipe"])
        else:
            chosen = _with_alpha(fields, alpha, method, card)
    if isinstance(chosen, str):
        if chosen == "none":
            return None, "", ""
        if chosen in ("paper", "released"):
            chosen = _with_alpha({"profile": chosen}, alpha, method, card)
        elif re.split("[+:]", chosen)[0].strip() not in RECIPES:
            allowed = ("none", "paper", "released", *RECIPES)
            raise AugmentationError(
                f"{unknown_choice('augmentation', chosen, allowed)}; or a table of fields"
            )
        else:
            chosen = parse_recipes(chosen, alpha, card.recipe_parameters() if card else {})
    augmentations: AugmentationLike = chosen
    for augmentation in augmentations if isinstance(augmentations, Sequence) else (augmentations,):
        if augmentation is not None and not isinstance(augmentation, Augmentation):
            raise AugmentationError(
                "augmentation must be an Augmentation, several of them, recipes as one text such as"
                f" 'lapa2 + instaboost:M=5', or None; found {augmentations!r}"
            )
    if alpha is not None and augmentations is settings.augmentation:
        labels = [augmentation.label for augmentation in active_augmentations(augmentations)]
        raise own_strength(alpha, repr(" + ".join(labels) or "baseline"))
    if not label and active_augmentations(augmentations):
        label = settings.label
        if not label and isinstance(augmentations, LabeledAugmentations):
            label = augmentations.label
    return augmentations, label, card.weights if card else ""


def _with_alpha(
    fields: dict[str, Any], alpha: float | None, method: Method, card: HeadCard | None
) -> Augmentation:
    """An augmentation from its fields, in a card's heads if there is one; where they name no alpha,
    at the one of the settings, or else the card's or the method's."""
    if alpha is not None and "alpha" in fields:
        raise own_strength(alpha, f"{{ alpha = {fields['alpha']} }}")
    if alpha is None:
        alpha = method.alpha if card is None or card.alpha is None else card.alpha
    make = Augmentation if card is None else card.augmentation
    return make(**({"alpha": alpha} | fields))


def _check_prefix(settings: CellSettings, task: Task, method: Method, attribute: str) -> None:
    """Refuse a prefix that the method does not read: its cells would have other keys and the same
    texts."""
    if settings.prefix == TASK:
        return
    others = {
        name: Attribute(prefix=f"?{attribute_texts.prefix}")
        for name, attribute_texts in task.attributes.items()
    }
    changed_task = task.model_copy(update={"attributes": others})
    if method.branches(task, attribute) == method.branches(changed_task, attribute):
        raise MethodError(
            f"prefix {settings.prefix!r} changes nothing for {method.name}, which puts no prefix of"
            f" {task.name}'s attributes in front; leave it out"
        )


def _files(
    model: str, task: str, branches: Sequence[Branch], method: Method
) -> tuple[dict[str, str], list[PrefixError]]:
    """sha256 of the soft prefixes by branch, and of the files that decide a method's texts; and the
    errors about soft prefixes that are missing."""
    hashes, missing = {}, []
    for branch in branches:
        if isinstance(branch.prefix, SoftPrefixKey):
            try:
                folder = set_folder(model, task, branch.prefix.set)
                hashes[branch.name] = read_card(folder / f"{branch.prefix.attribute}.json").sha256
            except PrefixError as error:
                missing.append(error)
                hashes[branch.name] = MISSING
    return hashes | digests(method), missing


def digests(method: Method) -> dict[str, str]:
    """sha256 of the files that decide a method's texts; of a folder, of the files in it."""
    hashes = {}
    for name, path in method.deciding_files().items():
        if path.is_file():
            hashes[name] = sha256_of(path)
        elif path.is_dir():
            files = sorted(file for file in path.iterdir() if file.is_file())
            listed = json.dumps([[file.name, sha256_of(file)] for file in files])
            hashes[name] = hashlib.sha256(listed.encode()).hexdigest()
    return hashes
