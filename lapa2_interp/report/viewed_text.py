"""The attention of one text of a run in one or two arms, for the viewer.

1. Select the cells of the arms, and the sample.
2. Run a teacher-forced pass over its text with the cell's model and the arm's augmentation, and
   record the attention of every head on every key: a run stores sums only.
3. Compare the sums with those of the run, and refuse a pass that differs.
4. Add values of every head: from the run's traces over all texts, and from a study's folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from lapa2_interp._util.parsing import parse_object, read_text
from lapa2_interp._util.paths import check_regular_file
from lapa2_interp.attention.recorder import trace_bytes
from lapa2_interp.attention.tables import select_layer_type, traced_layer_types
from lapa2_interp.attention.trace import TracedTexts
from lapa2_interp.bias.augmentation import Augmentations
from lapa2_interp.bias.layout import Layout
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.control import control_score
from lapa2_interp.errors import (
    CircuitError,
    Lapa2Error,
    TraceError,
    parameter,
    unknown_choice,
)
from lapa2_interp.generation.batch import BatchPlan
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.plan import plan_batches
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.models.card import ModelCard, identify
from lapa2_interp.models.facts import Model
from lapa2_interp.models.load import load_model
from lapa2_interp.models.machine import usable_memory
from lapa2_interp.runs.attention import ALIKE
from lapa2_interp.runs.manifest import check_weights
from lapa2_interp.runs.method_context import ModelContext
from lapa2_interp.runs.run import Run, finished_cell, shown_only
from lapa2_interp.runs.worker import check_files
from lapa2_interp.stats import bounds
from lapa2_interp.tasks.task import Prompts, Task

if TYPE_CHECKING:
    import xarray as xr

MASSES = ("prefix", "bos", "prompt", "generated")
MASS_TOLERANCE = {"float32": 1e-3, "float64": 1e-3, "float16": 0.02, "bfloat16": 0.1}
"""Largest allowed difference of recomputed attention from the run's trace, by dtype. Rounding alone
makes up to .007 in float16 and .07 in bfloat16, in single heads of SmolLM2."""
COPIES = 3
"""Copies of the attention in memory at the same time: recorded, stacked, and encoded."""


@dataclass(frozen=True)
class SelectedText:
    """One text of a run in one or two arms.

    Attributes:
        cells: The arms' cells, the baseline first.
        prompt, sample: The text's prompt and sample number.
    """

    cells: Mapping[str, Cell]
    prompt: str
    sample: int

    @property
    def task(self) -> Task:
        """The task of the cells."""
        return next(iter(self.cells.values())).task


@dataclass(frozen=True)
class ArmAttention:
    """The attention of one arm, from its forward pass.

    Attributes:
        arm: The arm's name in the run.
        augmentation: The arm's augmentations: none, one, or several.
        tokens: The text of the pass.
        end: The reason why the text ended.
        patterns: Attention on every live key by step, [layer, head, key]; each step has one more
            key.
        masses: Attention on each of `ViewedText.masses`, [mass, step, layer, head].
        control: Control at every step by metric, in nats; empty if not computed.
        off: The largest difference from the run's trace; None if the run has no trace of this text.
        of_run: Attention on the steered part, mean over the first `ViewedText.steps`
            steps, over all texts of the cell: mean, low and high [layer, head]; empty without a
            full trace.
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
class ViewedText:
    """A text of a run and its attention in every arm.

    Attributes:
        selected: The text.
        layout: The keys of the branch up to the end of the prompt, the same in every arm.
        branch: The branch of the pass, one of `branches`.
        branches: All branches of the method.
        prefix: The branch's prefix.
        arms: The attention of each arm.
        no_control: The reason why control is not computed; "" if it is.
        differences: `ArmAttention.of_run` of the second arm minus the first, paired by prompt.
        steps: Steps that every text of the arms has; texts without tokens do not count.
        card: The model's card.
        tokenizer: The model's tokenizer.
    """

    selected: SelectedText
    layout: Layout
    branch: str
    branches: tuple[str, ...]
    prefix: str
    arms: tuple[ArmAttention, ...]
    no_control: str
    differences: Mapping[str, Float[np.ndarray, "layer head"]]
    steps: int
    card: ModelCard
    tokenizer: Any

    @property
    def masses(self) -> tuple[str, ...]:
        """The parts of the keys, without "bos" where the text starts with nothing."""
        return tuple(name for name in MASSES if name != "bos" or self.layout.n_bos)


def masses_of(trace: xr.Dataset) -> list[str]:
    """`ViewedText.masses` of a recomputed trace."""
    return [name for name in MASSES if name in trace]


def select_text(
    run: Run,
    only: Mapping[str, Any],
    attribute: str | None,
    prompt: str | None,
    sample: int,
    arm: str | None,
) -> SelectedText:
    """Select one text and the cells of its arms.

    Args:
        only: Values of columns that the cells must have.
        attribute, prompt, sample, arm: See `viewer.view`.

    Raises:
        TraceError: No finished cell or cells of several kinds are selected, or there is no such
            attribute, arm, prompt or sample.
        RunError: There is no such column.
    """
    cells = run.cells
    cells = cells[cells["key"].isin(run.select(**only).by_key) & (cells["state"] == "finished")]
    if not len(cells):
        filters = f" with {shown_only(only)}" if only else ""
        raise TraceError(
            f"{run.name} has no finished cell{filters}; {run.cells_from} lists its cells"
        )
    for name in (*ALIKE, "seed"):
        values = list(dict.fromkeys(cells[name]))
        if len(values) > 1:
            raise TraceError(
                f"{run.name} has cells of several kinds ({name}: {', '.join(map(str, values))});"
                f" choose one, such as {parameter(name, values[0], 'only')}"
            )
    attributes = list(dict.fromkeys(cells["attribute"]))
    if attribute is not None and attribute not in attributes:
        raise TraceError(unknown_choice("attribute", attribute, attributes))
    cells = cells[cells["attribute"] == (attribute or attributes[0])]
    # The two arms: the baseline, and the given or the usual one.
    by_arm: dict[str, Cell] = {}
    for key in cells["key"]:
        by_arm.setdefault(run.by_key[key].arm, run.by_key[key])
    others = [name for name in by_arm if name != "baseline"]
    if arm is not None and arm not in others:
        raise TraceError(unknown_choice("arm", arm, others))
    if arm is None and others:
        papers = by_arm[others[0]].usual_arm
        arm = papers if papers in others else others[0]
    arms = {name: by_arm[name] for name in ("baseline", arm) if name in by_arm}
    # The prompt, given whole or by its beginning, and the sample.
    prompts = list(next(iter(arms.values())).prompts)
    fitting = [candidate for candidate in prompts if prompt is None or candidate.startswith(prompt)]
    if prompt in prompts:
        fitting = [prompt]
    elif prompt is not None and len(fitting) != 1:
        listed = ", ".join(map(repr, (fitting or prompts)[:8]))
        count = "several prompts begin" if fitting else "no prompt begins"
        raise TraceError(f"{count} with {prompt!r}: {listed}")
    fewest = min(cell.samples for cell in arms.values())
    if sample >= fewest:
        raise TraceError(f"sample must be from 0 to {fewest - 1}, found {sample}")
    return SelectedText(arms, fitting[0], sample)


def recompute_attention(
    run: Run,
    selected: SelectedText,
    branch: str | None,
    steps: int,
    same_text: bool,
    model: Model | None,
    device: str | None,
) -> ViewedText:
    """Compute the attention of the selected text in every arm, by teacher forcing.

    Args:
        branch, steps, same_text, model, device: See `viewer.view`.

    Raises:
        TraceError: There is no such branch, the method changes the network while it decodes, the
            text is empty, or the attention differs from the run's trace.
        ModelError, PrefixError, RunError: Model or files are not those of the run.
    """
    first = next(iter(selected.cells.values()))
    if first.decoding_method.changes_network:
        raise TraceError(
            f"method {first.method} changes the network while it decodes, so its texts cannot be"
            " read again; choose cells of another method"
        )
    if model is None:
        model = load_model(first.model, first.dtype, device, first.model_class, start=first.start)
    cells = list(selected.cells.values())
    finished = [_first_answers(finished_cell(run, cell.key)) for cell in cells]
    plans = [_plan_prompt(model, run, cell, selected.prompt) for cell in cells]
    # The branch, whose keys must be the same in all arms.
    number = _branch_number(plans[0], branch)
    branch, layouts = (
        plans[0].branches[number],
        [plan.arrangement.layouts[number][0] for plan in plans],
    )
    layout = layouts[0]
    if len({(layout.ids, layout.soft) for layout in layouts}) > 1:
        raise TraceError(
            "the arms have different prefixes; choose one arm with"
            f" {parameter('arm', 'NAME', 'only')}"
        )
    # One teacher-forced pass over the texts of all arms.
    texts = [_selected_tokens(made, selected) for made in finished]
    rows = [tokens[:steps] for tokens, _, _ in texts]
    if same_text:
        rows = [rows[0]] * len(rows)
    trace = _attention_trace(model, plans, number, rows)
    # Each arm's attention, compared with the run's trace; its control; its means over all texts.
    lengths = [made.texts["tokens"].map(len) for made in finished]
    shared_steps = min(int(n_tokens[n_tokens > 0].min()) for n_tokens in lengths)
    part = "prefix" if layout.l_pre else "prompt"
    arms, means_by_prompt, no_control = [], [], ""
    for i, (name, cell) in enumerate(selected.cells.items()):
        own_text, (_, end, row), tokens = not (same_text and i), texts[i], rows[i]
        patterns = tuple(
            trace["pattern"]
            .to_numpy()[0, i, step, :, : layout.n_live + step]
            .reshape(model.cfg.n_layers, model.cfg.n_heads, layout.n_live + step)
            for step in range(len(tokens))
        )
        masses = np.stack(
            [trace[mass].to_numpy()[0, i, : len(tokens)] for mass in masses_of(trace)]
        )
        off, recorded = None, finished[i].trace
        if recorded is not None and own_text:
            off = _largest_difference(recorded, trace, branch, row, masses)
            allowed = MASS_TOLERANCE[cell.dtype]
            if not off <= allowed:
                raise TraceError(
                    f"attention that was read again differs from what the run recorded, by up to"
                    f" {off:.2g}, and {allowed:g} is allowed in {cell.dtype}; the model or"
                    " its libraries are not those of the run"
                )
        values, reason = _step_control(model, cell, selected.prompt, tokens, plans[i], number)
        no_control = no_control or reason
        means_by_prompt.append(_means_by_prompt(finished[i], branch, part, shared_steps))
        arms.append(
            ArmAttention(
                arm=name,
                augmentation=plans[i].arrangement.augmentations[number],
                tokens=tuple(tokens),
                end=end if own_text else "",
                patterns=patterns,
                masses=masses,
                control=values,
                off=off,
                of_run=_mean_interval(means_by_prompt[-1], 0.0),
            )
        )
    differences: dict[str, np.ndarray] = {}
    if len(means_by_prompt) == 2:
        before, after = means_by_prompt
        shared = sorted(before.keys() & after.keys())
        differences = _mean_interval({text: after[text] - before[text] for text in shared}, -1.0)
    prefix = plans[0].prefix_names[branch]
    return ViewedText(
        selected=selected,
        layout=layout,
        branch=branch,
        branches=plans[0].branches,
        prefix="" if prefix is None else str(prefix),
        arms=tuple(arms),
        no_control=no_control,
        differences=differences,
        steps=shared_steps,
        card=identify(model),
        tokenizer=model.tokenizer,
    )


def _plan_prompt(model: Model, run: Run, cell: Cell, prompt: str) -> BatchPlan:
    """The plan of a cell's one prompt.

    Raises:
        TraceError: The model has other weights than the run.
    """
    check_weights(run.manifest(cell.key), model)
    prompts = cell.task.prompts.model_copy(update={"texts": (prompt,)})
    task = cell.task.model_copy(update={"prompts": prompts})
    planned = plan_batches(model, cell.model_copy(update={"task": task}), ModelContext(model))
    check_files(planned)
    return planned


def _attention_trace(
    model: Model, plans: Sequence[BatchPlan], number: int, rows: Sequence[Sequence[int]]
) -> xr.Dataset:
    """The trace of a teacher-forced pass over a text for each plan, with the patterns of all heads.

    Args:
        number: The branch's index.

    Raises:
        TraceError: Memory is too small, or attention is not finite.
    """
    layouts = [plan.arrangement.layouts[number][0] for plan in plans]
    size = (model.cfg.n_layers, model.cfg.n_heads)
    longest = max(map(len, rows))
    need = COPIES * trace_bytes(
        "full", len(rows), longest, *size, math.prod(size), layouts[0].n_live + longest
    )
    if need > 0.9 * (there := usable_memory()):
        raise TraceError(
            f"{longest} steps of all heads need about {need / 1e9:.0f} GB of memory, and"
            f" here are {there / 1e9:.0f} GB; show fewer steps"
        )
    trace = teacher_forced(
        model,
        layouts,
        rows,
        [plan.arrangement.augmentations[number] for plan in plans],
        prefixes=[plan.prefixes[number] for plan in plans],
        branch=plans[0].branches[number],
        patterns=[(layer, head) for layer in range(size[0]) for head in range(size[1])],
    )
    for i, tokens in enumerate(rows):
        if not all(
            np.isfinite(trace[mass][0, i, : len(tokens)]).all() for mass in masses_of(trace)
        ):
            raise TraceError("attention is not a number here; the model or its dtype overflows")
    return trace


def _first_answers(made: TracedTexts) -> TracedTexts:
    """A cell with the first answer of each chat alone."""
    if "turn" not in made.texts:
        return made
    first = made.texts["turn"].to_numpy() == 1
    trace = None if made.trace is None else made.trace.isel(sample=first)
    return replace(made, texts=made.texts[first].reset_index(drop=True), trace=trace)


def _selected_tokens(made: TracedTexts, selected: SelectedText) -> tuple[list[int], str, int]:
    """Tokens of the selected text, the reason why it ended, and its row in the table of texts."""
    table = made.texts
    rows = np.flatnonzero(
        (table["prompt"] == selected.prompt) & (table["sample"] == selected.sample)
    )
    tokens = [int(token) for row in rows[:1] for token in table["tokens"].iloc[row]]
    if not tokens:
        raise TraceError(
            f"sample {selected.sample} of {selected.prompt!r} has no tokens; choose another with"
            f" {parameter('prompt')} or {parameter('sample')}"
        )
    return tokens, str(table["finish"].iloc[rows[0]]), int(rows[0])


def _branch_number(todo: BatchPlan, name: str | None) -> int:
    if name is None:
        with_prefix = [i for i, row in enumerate(todo.arrangement.layouts) if row[0].l_pre]
        return with_prefix[0] if with_prefix else 0
    if name not in todo.branches:
        raise TraceError(unknown_choice("branch", name, todo.branches))
    return todo.branches.index(name)


def _largest_difference(
    recorded: xr.Dataset,
    recomputed: xr.Dataset,
    branch: str,
    row: int,
    masses: Float[np.ndarray, "mass step layer head"],
) -> float:
    """The largest difference from the run's trace of this text: of every head, or, in a pooled
    trace, of the mean over the layers of the first type."""
    steps, largest = masses.shape[1], 0.0
    part, of_type = recorded.sel(branch=[branch]), slice(None)
    if "type_of_layer" in recomputed.coords:
        of_type = recomputed["type_of_layer"].to_numpy() == traced_layer_types(recomputed)[0]
    for name, mass in zip(masses_of(recomputed), masses, strict=True):
        before = select_layer_type(part, name).to_numpy()[0, row, :steps]
        now = mass[:, of_type] if before.ndim == 3 else mass[:, of_type].mean((1, 2))
        largest = np.maximum(largest, np.abs(before - now).max())  # NaN stays
    return float(largest)


def _step_control(
    model: Model, cell: Cell, prompt: str, tokens: list[int], planned: BatchPlan, number: int
) -> tuple[dict[str, list[float]], str]:
    """Control of a text at every step by metric, with the arm's augmentation in every branch; or
    the reason why it cannot be computed."""
    if planned.prefixes[number] is not None:
        return {}, "the branch has a soft prefix"
    if not planned.arrangement.layouts[number][0].l_pre:
        return {}, "the branch has no prefix"
    if cell.doubled_bos:
        return {}, "the run doubles BOS"
    try:
        contrast = ContrastSet.of(
            model,
            cell.task,
            attribute=cell.attribute,
            prompts=Prompts(texts=(prompt,)),
            texts={prompt: [tokens]},
        )
        if contrast.examples[0].layouts[0].ids != planned.arrangement.layouts[number][0].ids:
            return {}, "the branch's prefix is not the task's"
        metrics = [name for name in ("js", "lex") if name in contrast.metrics]
        score = control_score(
            model, contrast, metrics=metrics, augmentation=planned.arrangement.augmentations[number]
        )
    except Lapa2Error as error:
        return {}, str(error)
    return {name: score.values[name][0].tolist() for name in metrics}, ""


def _means_by_prompt(
    made: TracedTexts, branch: str, part: str, steps: int
) -> dict[str, Float[np.ndarray, "layer head"]]:
    """A cell's attention on a part of the keys by prompt, mean over its texts and the first steps;
    empty without a full trace.

    Attention falls with the step, so all texts count with the same steps. A text without tokens
    does not count.
    """
    if made.trace is None or "head" not in made.trace[part].dims:
        return {}
    filled = (made.texts["tokens"].map(len) > 0).to_numpy()
    recorded = made.trace.sel(branch=[branch])[part].to_numpy()[0, filled]
    values, prompts = recorded[:, :steps].mean(1), made.texts["prompt"].to_numpy()[filled]
    return {str(text): values[prompts == text].mean(0) for text in dict.fromkeys(prompts)}


def _mean_interval(
    by_prompt: Mapping[str, Float[np.ndarray, "layer head"]], least: float
) -> dict[str, Float[np.ndarray, "layer head"]]:
    """Mean over prompts of numbers from `least` to 1, and its 95 % interval within these ends."""
    if not by_prompt:
        return {}
    values = np.stack(list(by_prompt.values())).astype(np.float64)
    low, high = bounds(values)
    return {
        "mean": values.mean(0),
        "low": np.maximum(low, least),
        "high": np.minimum(high, 1.0),
    }


@dataclass(frozen=True)
class HeadValues:
    """A number for every head, with its 95 % interval over prompts.

    Attributes:
        about: Description of the number.
        measure: Nats or logits a step.
        mean, low, high: [layer, head]; NaN for heads without a number.
    """

    about: str
    measure: str
    mean: Float[np.ndarray, "layer head"]
    low: Float[np.ndarray, "layer head"]
    high: Float[np.ndarray, "layer head"]


def load_head_values(folder: Path, text: ViewedText) -> dict[str, HeadValues]:
    """Values of every head in a study's folder: effect, write, and effect_lex if it has words.

    Args:
        folder: A folder of `lapa2 circuits`.

    Raises:
        CircuitError: The folder is not a study, or is of another model or task.
    """
    try:
        settings = parse_object(read_text(folder / "contrast_set.json"))["settings"]
        there, about = settings["model"]["weights"], settings["task"]
        target = settings["attribute"]
        check_regular_file(folder / "head.csv")
        tables = {"head": pd.read_csv(folder / "head.csv")}
        if (folder / "writes.csv").is_file():
            tables["writes"] = pd.read_csv(folder / "writes.csv")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CircuitError(
            f"{folder} is not a finished study ({type(error).__name__}: {error}); `lapa2 circuits"
            " MODEL --out FOLDER` makes one"
        ) from error
    task = text.selected.task.name
    if there != text.card.weights or about != task:
        raise CircuitError(
            f"{folder} is about {settings['model']['name']} and {about}, and the run about"
            f" {text.card.name} and {task}; give a study of the run's model and task"
        )
    # Each column as a map of heads, with its interval.
    size = text.arms[0].masses.shape[2:]
    wanted = {
        "effect": ("head", "effect", "", "js lost without the head", "nats a step"),
        "effect_lex": ("head", "lex_effect", "lex_", "lex lost without the head", "nats a step"),
        "write": ("writes", "direct", "", "written from the prefix", "logits a step"),
    }
    # With more than two attributes, a study is about one of them.
    names = text.selected.task.attributes
    of = f", {target or next(iter(names))} against the others" if len(names) > 2 else ""
    values = {}
    for name, (table, column, mark, about, measure) in wanted.items():
        if table not in tables or column not in tables[table]:
            continue
        grids = []
        for field in (column, f"{mark}low", f"{mark}high"):
            grid = np.full(size, np.nan)
            rows = tables[table]
            if rows["layer"].max() >= size[0] or rows["head"].max() >= size[1]:
                raise CircuitError(f"{folder}/{table}.csv has heads that the model does not have")
            grid[rows["layer"], rows["head"]] = rows[field]
            grids.append(grid)
        values[name] = HeadValues(about + of, measure, *grids)
    return values
