"""What the viewer shows of a run, in numbers: one text in one or two arms.

1. Choose the cells of the arms, and the sample.
2. Read its text again with the cell's model, under the arm's augmentation (teacher forcing), and
   keep the attention of every head on every key: a run keeps sums only.
3. Compare the sums with those that the run recorded, and refuse a reading that differs.
4. Add what is known by head: from the run's traces over all texts, and from a study's folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from lapa2_interp._util.errors import CircuitError, Lapa2Error, TraceError, unknown_choice
from lapa2_interp._util.files import check_file, read_text, without_checksums
from lapa2_interp.attention.recorder import trace_bytes
from lapa2_interp.attention.tables import select_layer_type, traced_layer_types
from lapa2_interp.bias.augmentation import Augmentations
from lapa2_interp.bias.layout import Layout
from lapa2_interp.circuits.question import ContrastSet
from lapa2_interp.circuits.score import control
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.plan import Plan, plan
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.models.card import Model, model_card
from lapa2_interp.models.load import load_model
from lapa2_interp.models.prepacked import usable_memory
from lapa2_interp.runs.method_context import ModelContext
from lapa2_interp.runs.store import ALIKE, FinishedCell, Run, shown_only
from lapa2_interp.runs.worker import check_files
from lapa2_interp.stats import bounds
from lapa2_interp.tasks.task import Task

MASSES = ("prefix", "bos", "prompt", "generated")
SAME = {"float32": 1e-3, "float64": 1e-3}
"""How far attention that is read again may be from what the run recorded, by dtype."""
SAME_IN_HALF = 0.1
COPIES = 3
"""Copies of the attention that exist together: as recorded, stacked, and packed."""


@dataclass(frozen=True)
class Chosen:
    """One text of a run in one or two arms.

    Attributes:
        cells: By arm, the baseline first.
        prompt, sample: Which text.
    """

    cells: Mapping[str, Cell]
    prompt: str
    sample: int

    @property
    def task(self) -> Task:
        """The task of the cells."""
        return next(iter(self.cells.values())).task


@dataclass(frozen=True)
class Reading:
    """What one arm's reading gave.

    Attributes:
        arm: Its name in the run.
        augmentation: What acted: nothing, one, or several.
        tokens: The text that was read.
        end: Why the text ended.
        patterns: By step, attention on every live key, [layer, head, key]; a step more, a key more.
        masses: Attention on each of MASSES, [mass, step, layer, head].
        control: By metric, the control at every step in nats; empty where there is none.
        off: The largest difference from the sums that the run recorded; None where it recorded none
            of this text.
        of_run: Attention on the part that is steered, mean over the first `Found.steps` steps, over
            all texts of the cell: mean, low and high [layer, head]; empty without a full trace.
    """

    arm: str
    augmentation: Augmentations
    tokens: tuple[int, ...]
    end: str
    patterns: tuple[Float[np.ndarray, "layer head _"], ...]
    masses: Float[np.ndarray, "mass step layer head"]
    control: Mapping[str, Sequence[float]]
    off: float | None
    of_run: Mapping[str, Float[np.ndarray, "layer head"]]


@dataclass(frozen=True)
class Found:
    """Everything that is shown.

    Attributes:
        chosen: Which text.
        layout: The keys of the branch up to the end of the prompt, the same in every arm.
        branch: The branch that was read, one of `branches`.
        prefix: What stands in front of the prompt there.
        readings: One for every arm.
        no_control: Why there is no control; "" where there is.
        differences: `Reading.of_run` of the second arm minus the first, paired by prompt.
        steps: Steps that every text of the arms has; texts without tokens are left out.
        model: The card's name, dtype and weights.
    """

    chosen: Chosen
    layout: Layout
    branch: str
    branches: tuple[str, ...]
    prefix: str
    readings: tuple[Reading, ...]
    no_control: str
    differences: Mapping[str, Float[np.ndarray, "layer head"]]
    steps: int
    model: Mapping[str, str]
    tokenizer: Any


def choose(
    run: Run,
    only: Mapping[str, Any],
    attribute: str | None,
    prompt: str | None,
    sample: int,
    arm: str | None,
) -> Chosen:
    """The cells and the text that are asked for.

    Raises:
        TraceError: No finished cell is left, cells of several kinds are, or there is no such
            attribute, arm, prompt or sample.
        RunError: No such column.
    """
    cells = run.cells
    cells = cells[cells["key"].isin(run.select(**only).plan) & (cells["state"] == "finished")]
    if not len(cells):
        told = f" with {shown_only(only)}" if only else ""
        raise TraceError(f"{run.name} has no finished cell{told}; `lapa2 runs` lists its cells")
    for name in (*ALIKE, "seed"):
        values = list(dict.fromkeys(cells[name]))
        if len(values) > 1:
            raise TraceError(
                f"{run.name} has cells of several kinds ({name}: {', '.join(map(str, values))});"
                f" choose one, such as --only {name}={values[0]}"
            )
    attributes = list(dict.fromkeys(cells["attribute"]))
    if attribute is not None and attribute not in attributes:
        raise TraceError(unknown_choice("attribute", attribute, attributes))
    cells = cells[cells["attribute"] == (attribute or attributes[0])]
    by_arm: dict[str, Cell] = {}
    for key in cells["key"]:
        by_arm.setdefault(run.plan[key].arm, run.plan[key])
    others = [name for name in by_arm if name != "baseline"]
    if arm is not None and arm not in others:
        raise TraceError(unknown_choice("arm", arm, others))
    if arm is None and others:
        papers = by_arm[others[0]].usual_arm
        arm = papers if papers in others else others[0]
    shown = {name: by_arm[name] for name in ("baseline", arm) if name in by_arm}
    prompts = list(next(iter(shown.values())).prompts)
    fitting = [each for each in prompts if prompt is None or each.startswith(prompt)]
    if prompt is not None and (prompt in prompts or len(fitting) == 1):
        fitting = [prompt] if prompt in prompts else fitting
    elif prompt is not None:
        told = ", ".join(map(repr, (fitting or prompts)[:8]))
        count = "several prompts begin" if fitting else "no prompt begins"
        raise TraceError(f"{count} with {prompt!r}: {told}")
    fewest = min(cell.samples for cell in shown.values())
    if not 0 <= sample < fewest:
        raise TraceError(f"sample must be from 0 to {fewest - 1}, found {sample}")
    return Chosen(shown, fitting[0], sample)


def read_again(
    run: Run,
    chosen: Chosen,
    *,
    branch: str | None = None,
    steps: int = 64,
    same_text: bool = False,
    model: Model | None = None,
    device: str | None = None,
) -> Found:
    """Read the chosen text in every arm.

    Args:
        branch: Which branch of the method; by default the first with a prefix.
        steps: The first tokens of the text, at most.
        same_text: Read the first arm's text in every arm, so that only the augmentation differs.
        model: The cells' model; loaded where it is not given.
        device: Where it is loaded.

    Raises:
        TraceError: There is no such branch, the method changes the network while it decodes, the
            text is empty, or a reading differs from what the run recorded.
        ModelError, PrefixError, RunError: Model or files are not those of the run.
    """
    if steps < 1:
        raise TraceError(f"steps must be at least 1, found {steps}")
    first = next(iter(chosen.cells.values()))
    if first.decoder.rereads_text:
        raise TraceError(
            f"method {first.method} changes the network while it decodes, so its texts cannot be"
            " read again; choose cells of another method"
        )
    if model is None:
        model = load_model(first.model, first.dtype, device, first.model_class)
    card, plans, texts = model_card(model), [], []
    for cell in chosen.cells.values():
        ours = run.manifest(cell.key).model.weights
        if ours != card.weights:
            raise TraceError(
                f"the run was made with weights {ours}, and here {card.name} has {card.weights}"
            )
        prompts = cell.task.prompts.model_copy(update={"texts": (chosen.prompt,)})
        task = cell.task.model_copy(update={"prompts": prompts})
        one = cell.model_copy(update={"task": task})
        todo = plan(model, one, ModelContext(model))
        check_files(cell, todo)
        plans.append(todo)
        texts.append(_text(run.cell(cell.key), chosen))
    names = plans[0].branches
    number = _branch(plans[0], branch)
    layouts = [todo.layouts[number][0] for todo in plans]
    if any(each.ids != layouts[0].ids or each.soft != layouts[0].soft for each in layouts):
        raise TraceError("the arms have different prefixes; choose one arm with --only arm=NAME")
    rows = [list(tokens[:steps]) for tokens, _, _ in texts]
    if same_text:
        rows = [rows[0]] * len(rows)
    size = (model.cfg.n_layers, model.cfg.n_heads)
    longest = max(map(len, rows))
    need = COPIES * trace_bytes(
        "full", len(rows), longest, *size, math.prod(size), layouts[0].n_live + longest
    )
    if need > 0.9 * (there := usable_memory()):
        raise TraceError(
            f"{longest} steps of all heads need about {need / 1e9:.0f} GB of memory, and here are"
            f" {there / 1e9:.0f} GB; show fewer steps"
        )
    trace = teacher_forced(
        model,
        layouts,
        rows,
        [todo.augmentations[number] for todo in plans],
        prefixes=[todo.prefixes[number] for todo in plans],
        branch=names[number],
        patterns=[(layer, head) for layer in range(size[0]) for head in range(size[1])],
    )
    if not all(np.isfinite(trace[mass].to_numpy()[0, i, : len(tokens)]).all()
               for i, tokens in enumerate(rows) for mass in MASSES):  # fmt: skip
        raise TraceError("attention is not a number here; the model or its dtype overflows")
    lengths = [run.cell(cell.key).samples["tokens"].map(len) for cell in chosen.cells.values()]
    shared_steps = min(int(each[each > 0].min()) for each in lengths)
    readings, gaps, why = [], [], ""
    part = "prefix" if layouts[0].l_pre else "prompt"
    items = zip(chosen.cells.items(), plans, texts, rows, strict=True)
    for i, ((name, cell), todo, (_, end, row), tokens) in enumerate(items):
        patterns = tuple(
            trace["pattern"]
            .to_numpy()[0, i, step, :, : layouts[0].n_live + step]
            .reshape(*size, layouts[0].n_live + step)
            for step in range(len(tokens))
        )
        masses = np.stack([trace[mass].to_numpy()[0, i, : len(tokens)] for mass in MASSES])
        off = None
        made = run.cell(cell.key)
        if made.trace is not None and not (same_text and i):
            off = _off(made.trace, trace, names[number], row, masses)
            if not off <= SAME.get(cell.dtype, SAME_IN_HALF):
                raise TraceError(
                    f"attention that was read again differs from what the run recorded, by up to"
                    f" {off:.2g}; the model or its libraries are not those of the run"
                )
        values, none = _control(model, cell, chosen.prompt, tokens, todo, number)
        why = why or none
        by_prompt = _by_prompt(made, names[number], part, shared_steps)
        gaps.append(by_prompt)
        augmentation, mean = todo.augmentations[number], _interval(by_prompt)
        readings.append(
            Reading(
                name,
                augmentation,
                tuple(tokens),
                "" if same_text and i else end,
                patterns,
                masses,
                values,
                off,
                mean,
            )
        )
    paired: dict[str, np.ndarray] = {}
    if len(gaps) == 2:
        shared = gaps[0].keys() & gaps[1].keys()
        paired = _interval({text: gaps[1][text] - gaps[0][text] for text in sorted(shared)})
    shown = plans[0].prefix_names[names[number]]
    return Found(
        chosen,
        layouts[0],
        names[number],
        names,
        "" if shown is None else str(shown),
        tuple(readings),
        why,
        paired,
        shared_steps,
        {"name": card.name, "dtype": card.dtype, "weights": card.weights},
        model.tokenizer,
    )


def _text(made: FinishedCell, chosen: Chosen) -> tuple[list[int], str, int]:
    """Tokens of the chosen text, why it ended, and its row among the samples."""
    table = made.samples
    rows = np.flatnonzero((table["prompt"] == chosen.prompt) & (table["sample"] == chosen.sample))
    tokens = [int(token) for row in rows[:1] for token in table["tokens"].iloc[row]]
    if not tokens:
        raise TraceError(
            f"sample {chosen.sample} of {chosen.prompt!r} has no tokens; choose another with"
            " --prompt or --sample"
        )
    return tokens, str(table["finish"].iloc[rows[0]]), int(rows[0])


def _branch(todo: Plan, name: str | None) -> int:
    if name is None:
        with_prefix = [i for i, row in enumerate(todo.layouts) if row[0].l_pre]
        return with_prefix[0] if with_prefix else 0
    if name not in todo.branches:
        raise TraceError(unknown_choice("branch", name, todo.branches))
    return todo.branches.index(name)


def _off(
    recorded: Any,
    read: Any,
    branch: str,
    row: int,
    masses: Float[np.ndarray, "mass step layer head"],
) -> float:
    """The largest difference from the sums that a run recorded of this text: of every head, or of
    their mean over the layers of the first type."""
    steps, worst = masses.shape[1], 0.0
    part, of_type = recorded.sel(branch=[branch]), slice(None)
    if "layer_sees" in read.coords:
        of_type = read["layer_sees"].to_numpy() == traced_layer_types(read)[0]
    for name, again in zip(MASSES, masses, strict=True):
        there = select_layer_type(part, name).to_numpy()[0, row, :steps]
        now = again[:, of_type] if there.ndim == 3 else again[:, of_type].mean((1, 2))
        worst = np.maximum(worst, np.abs(there - now).max())  # NaN stays
    return float(worst)


def _control(
    model: Model, cell: Cell, prompt: str, tokens: list[int], todo: Plan, number: int
) -> tuple[dict[str, list[float]], str]:
    """The control of a text at every step, the arm's augmentation acting in every branch; or why
    there is none."""
    if todo.prefixes[number] is not None:
        return {}, "the branch has a soft prefix"
    if not todo.layouts[number][0].l_pre:
        return {}, "the branch has no prefix"
    if cell.doubled_bos:
        return {}, "the run doubles BOS"
    try:
        question = ContrastSet.of(
            model,
            cell.task,
            attribute=cell.attribute,
            prompts=(prompt,),
            texts={prompt: [tokens]},
        )
        if question.cases[0].layouts[0].ids != todo.layouts[number][0].ids:
            return {}, "the branch's prefix is not the task's"
        metrics = [name for name in ("js", "lex") if name in question.metrics]
        score = control(model, question, metrics=metrics, augmentation=todo.augmentations[number])
    except Lapa2Error as error:
        return {}, str(error)
    return {name: score.values[name][0].tolist() for name in metrics}, ""


def _by_prompt(
    made: FinishedCell, branch: str, part: str, steps: int
) -> dict[str, Float[np.ndarray, "layer head"]]:
    """By prompt, a cell's attention on a part, mean over its texts and the first steps; empty
    without a full trace.

    Attention falls with the step, so all texts give the same ones. A text without tokens gives
    none.
    """
    if made.trace is None or "head" not in made.trace[part].dims:
        return {}
    filled = (made.samples["tokens"].map(len) > 0).to_numpy()
    recorded = made.trace.sel(branch=[branch])[part].to_numpy()[0, filled]
    values, prompts = recorded[:, :steps].mean(1), made.samples["prompt"].to_numpy()[filled]
    return {str(text): values[prompts == text].mean(0) for text in dict.fromkeys(prompts)}


def _interval(
    by_prompt: Mapping[str, Float[np.ndarray, "layer head"]],
) -> dict[str, Float[np.ndarray, "layer head"]]:
    """Mean over prompts, and its 95 % interval."""
    if not by_prompt:
        return {}
    values = np.stack(list(by_prompt.values())).astype(np.float64)
    low, high = bounds(values, np.arange(len(values)))
    return {"mean": values.mean(0), "low": low, "high": high}


@dataclass(frozen=True)
class HeadValues:
    """A number for every head, with its 95 % interval over prompts.

    Attributes:
        about: What it is, in words.
        unit: nats or logits.
        values, low, high: [layer, head]; NaN where there is none.
    """

    about: str
    unit: str
    values: Float[np.ndarray, "layer head"]
    low: Float[np.ndarray, "layer head"]
    high: Float[np.ndarray, "layer head"]


def read_study(folder: Path, found: Found) -> dict[str, HeadValues]:
    """What a study's folder knows of every head: effect, write, and effect_lex where it has words.

    Args:
        folder: Written by `lapa2 circuits`.

    Raises:
        CircuitError: The folder is no study, or one of another model or task.
    """
    try:
        settings = without_checksums(read_text(folder / "question.json"))[0]["settings"]
        there, about = settings["model"]["weights"], settings["task"]
        target = settings["attribute"]
        check_file(folder / "head.csv")
        tables = {"head": pd.read_csv(folder / "head.csv")}
        if (folder / "writes.csv").is_file():
            tables["writes"] = pd.read_csv(folder / "writes.csv")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CircuitError(
            f"{folder} is not a finished study ({type(error).__name__}: {error}); `lapa2 circuits"
            " MODEL --out FOLDER` makes one"
        ) from error
    task = found.chosen.task.name
    if there != found.model["weights"] or about != task:
        raise CircuitError(
            f"{folder} is about {settings['model']['name']} and {about}, and the run about"
            f" {found.model['name']} and {task}; give a study of the run's model and task"
        )
    size = found.readings[0].masses.shape[2:]
    wanted = {
        "effect": ("head", "effect", "", "js lost without the head", "nats a step"),
        "effect_lex": ("head", "lex_effect", "lex_", "lex lost without the head", "nats a step"),
        "write": ("writes", "direct", "", "written from the prefix", "logits a step"),
    }
    # Of two attributes, what one gains the other loses; of more, the study is about one of them.
    names = found.chosen.task.attributes
    of = f", {target or next(iter(names))} against the others" if len(names) > 2 else ""
    values = {}
    for name, (table, column, mark, about, unit) in wanted.items():
        if table not in tables or column not in tables[table]:
            continue
        grids = []
        for each in (column, f"{mark}low", f"{mark}high"):
            grid = np.full(size, np.nan)
            rows = tables[table]
            if rows["layer"].max() >= size[0] or rows["head"].max() >= size[1]:
                raise CircuitError(f"{folder}/{table}.csv has heads that the model does not have")
            grid[rows["layer"], rows["head"]] = rows[each]
            grids.append(grid)
        values[name] = HeadValues(about + of, unit, *grids)
    return values
