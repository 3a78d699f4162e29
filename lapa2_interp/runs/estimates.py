"""Time that a grid takes on this machine, and the space it needs, before anything runs.

Decoding is a number of steps, each of which reads one token in every row of a batch. A step costs
the reading of all weights, something for every row, and a little for every key a row has (`Pace`).
A few steps of the real model are timed once on each kind of machine, at 6, 24 and 72 rows, and kept
in the user's cache. A model that is not on this machine is guessed by its number of parameters,
from a matrix product.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from time import perf_counter

import numpy as np

from lapa2_interp._util.errors import RunError
from lapa2_interp._util.progress import CountingBar
from lapa2_interp.attention.recorder import trace_bytes
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.loop import decode_batches
from lapa2_interp.generation.plan import CACHE_BYTES, MAX_ROWS, BatchPlan, plan_batches
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.card import Model, model_short_context
from lapa2_interp.models.load import load_model
from lapa2_interp.models.machine import (
    default_device,
    device_clock,
    n_cores,
    operations_per_second,
    store_measurement,
    stored_measurement,
    torch_threads,
)
from lapa2_interp.models.sizes import DTYPE_BYTES, is_available_offline, model_size, weight_bytes
from lapa2_interp.models.smollm2 import SMOLLM2
from lapa2_interp.models.tiny import TINY
from lapa2_interp.tasks.segmentation import words_and_signs

ROWS = (6, 24, 72)
"""Rows of the timed steps."""
KEYS, MORE_KEYS = 40, 320
"""Keys in front of the timed steps; the middle number of rows is also timed behind MORE_KEYS."""
STEPS = 5
"""Steps timed at each number of rows; the quickest counts."""
START = 10.0
"""Seconds until a worker has imported the libraries and loaded a small model."""
BATCHED = 0.4
"""Share of the timed matrix products' speed that decoding reaches where nothing else was measured.
"""
STEP = 40
"""Where nothing was measured: the number of rows that cost as much as reading the weights."""
ADAPTER = 0.53
"""Operations of an adapter scorer for a token, of those of the whole model: 20 of 30 layers, and no
output layer."""
LONG = 20.0
"""Seconds; longer work is announced with its time."""
TEXT_BYTES = 5
"""Bytes of a token in samples.parquet: its id and its letters, compressed."""
CELL_BYTES = 40_000
"""Bytes of a cell's three files before the first text."""
MOST_SECONDS = 365 * 86400.0
"""Seconds; longer work is not begun without a word of the user's. So is more memory
than there is."""
LIBRARIES = 700_000_000
"""Bytes of a process that has imported the libraries."""
PACKED = 1.5
"""Bytes that packing takes, of those of the weights: the packed copy, and what is freed late."""
LOGITS = 6
"""Copies of a batch's logits, in float32, that are alive while tokens are drawn."""


@dataclass(frozen=True)
class Estimate:
    """Time, disk and memory that cells will take.

    Attributes:
        cells, texts, row_tokens: Counts.
        seconds: With all workers busy.
        disk: Bytes.
        basis: Where the rate comes from.
        needs: Memory of the worker that needs most, bytes.
        packed: What packing its weights would take besides, on a CPU.
    """

    cells: int
    texts: int
    row_tokens: int
    seconds: float
    disk: int
    basis: str
    needs: int
    packed: int


def cost(cell: Cell) -> int:
    """A cell's row-tokens, padding included: every prompt once, and every new token but the last,
    which nothing reads.

    A method that `rereads_text` reads the whole text at every step.
    """
    branches, n_prompts = len(cell.branches), len(cell.prompts)
    before, new = _lengths(cell)
    steps = (
        (new - 1) * before + new * (new - 1) // 2 if cell.decoding_method.rereads_text else new - 1
    )
    return branches * n_prompts * (before + cell.samples * steps)


def seconds(cell: Cell, at: Pace) -> tuple[float, float]:
    """Work of one worker for a cell: its prompts, and the steps of every batch of rows; and for
    the longest of these batches, which workers cannot share."""
    branches, n_prompts = len(cell.branches), len(cell.prompts)
    before, new = _lengths(cell)
    together = max(1, _row_limit(cell)[0] // branches)
    full, rest = divmod(n_prompts * cell.samples, together)
    large, small = (
        at.batch(texts * branches, before, new, cell.decoding_method.rereads_text)
        for texts in (together, rest)
    )
    prompts = branches * n_prompts * before * at.row
    return prompts + full * large + small, large if full else small


def plan_seconds(todo: BatchPlan, at: Pace) -> float:
    """Work of one worker for a plan."""
    branches, found = len(todo.branches), 0.0
    longest = [max(row[i].n_live for row in todo.layouts) for i in range(len(todo.prompts))]
    for group in todo.batches:
        before, new = max(longest[i] for i, _ in group), max(todo.steps[i] for i, _ in group)
        found += at.batch(branches * len(group), before, new, todo.method.rereads_text)
        found += branches * len({i for i, _ in group}) * before * at.row
    return found


def _lengths(cell: Cell) -> tuple[int, int]:
    """Tokens of the longest BOS, prefix and prompt, and new ones of the shortest prompt."""
    prompts = [_tokens(prompt, cell.model) for prompt in cell.prompts]
    fronts = [each.prefix + each.join for each in cell.branches if isinstance(each.prefix, str)]
    before = (
        1
        + cell.doubled_bos
        + max(prompts)
        + max((_tokens(text, cell.model) for text in fronts), default=0)
    )
    return before, max(1, cell.length - (min(prompts) if cell.task.length_counts_prompt else 0))


@lru_cache(maxsize=4096)
def _tokens(text: str, model: str) -> int:
    """About how many tokens a text has, without its model's tokenizer: words and marks, or bytes in
    the tiny models."""
    return len(text.encode()) if model in TINY else len(words_and_signs(text))


def estimate(
    cells: Sequence[Cell], workers: int, device: str | None = None, threads: int = 1
) -> Estimate:
    """Estimate of these cells with so many workers; preparation by methods, such as drafts, is not
    counted.

    Raises:
        ModelError: A model has no configuration.
    """
    if (
        device is None or device == "auto" or device.startswith("cuda")
    ):  # of other machines, it may be
        device = default_device()
    kinds = dict.fromkeys((cell.model, cell.dtype, cell.model_class) for cell in cells)
    paces = {}
    for kind in kinds:
        tokens = sum(
            cost(cell) for cell in cells if (cell.model, cell.dtype, cell.model_class) == kind
        )
        model, dtype, model_class = kind
        operations = 2.0 * tokens * model_size(model).parameters
        paces[kind] = pace(model, dtype, device, model_class, threads, operations=operations)
    took = [seconds(cell, paces[cell.model, cell.dtype, cell.model_class]) for cell in cells]
    busy, longest = sum(each for each, _ in took), max((each for _, each in took), default=0.0)
    disk = 0
    for cell in cells:
        size, texts = model_size(cell.model), cell.n_texts
        rows = texts * len(cell.branches)
        trace = trace_bytes(cell.trace, rows, cell.length, size.n_layers, size.n_heads, 0, 0)
        disk += CELL_BYTES + texts * cell.length * TEXT_BYTES + trace
    return Estimate(
        cells=len(cells),
        texts=sum(cell.n_texts for cell in cells),
        row_tokens=sum(map(cost, cells)),
        seconds=START + max(busy / max(1, workers), longest) if cells else 0.0,
        disk=disk,
        basis="; ".join(dict.fromkeys(each.basis for each in paces.values())),
        needs=max((memory(cell, device) for cell in cells), default=0),
        packed=int(
            max((PACKED * weight_bytes(cell.model, cell.dtype) for cell in cells), default=0)
            if device == "cpu"
            else 0
        ),
    )


def check_affordable(each: Estimate, yes: bool = False) -> None:
    """Refuse what would take a year, or more memory than there is.

    Args:
        yes: The user wants it all the same.

    Raises:
        RunError: Why.
    """
    most = machine_memory()
    for found, allowed, shown in (
        (each.seconds, MOST_SECONDS, f"{each.seconds / MOST_SECONDS:.3g} years of work"),
        (each.needs, most, f"{format_bytes(each.needs)} of memory, of {format_bytes(most)}"),
    ):
        if found > allowed and not yes:
            raise RunError(
                f"{each.texts} texts would take {shown}; ask for fewer or shorter ones, or give"
                " yes=True (--yes)"
            )


def memory(cell: Cell, device: str = "cpu") -> int:
    """Bytes that a worker needs for a cell: weights, the largest batch's keys, values and logits,
    and on a CPU the libraries.

    Packed weights are not counted.
    """
    size, branches = model_size(cell.model), len(cell.branches)
    before, new = _lengths(cell)
    most, row = _row_limit(cell)
    rows = max(branches, min(branches * len(cell.prompts) * cell.samples, most))
    work = LOGITS * rows * size.vocab * 4 + 2 * rows * size.n_heads * (before + new) * 4
    base = LIBRARIES if device == "cpu" else 0
    return base + weight_bytes(cell.model, cell.dtype) + rows * row + work


def _row_limit(cell: Cell) -> tuple[int, int]:
    """The most rows of a batch, as `plan` has them, and the bytes of a row's keys, values and kept
    logits."""
    size, item = model_size(cell.model), DTYPE_BYTES[cell.dtype]
    before, new = _lengths(cell)
    logits = before if cell.decoding_method.reads_prompt else 0
    if cell.decoding_method.rereads_text and cell.model_class == "HookedTransformer":
        logits = before + new
    row = (2 * size.n_layers * size.kv_width * (before + new) + logits * size.vocab) * item
    return cell.max_rows or max(1, min(MAX_ROWS, CACHE_BYTES // row)), row


# --- what this machine does


@dataclass(frozen=True)
class Pace:
    """Seconds of a step of decoding by one worker, which reads one token in every row.

    Attributes:
        rows, seconds: Rows and seconds of the timed steps behind `KEYS` keys, in rising order;
            straight lines
            between and beyond.
        key: Seconds that one key more costs each row.
        basis: Where the numbers come from.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    key: float
    basis: str

    def step(self, rows: int, keys: int | float) -> float:
        """Seconds of a step of so many rows behind so many keys."""
        known = float(np.interp(rows, self.rows, self.seconds))
        more = max(0.0, rows - self.rows[-1]) * self.row
        return known + more + rows * max(0.0, keys - KEYS) * self.key

    @property
    def row(self) -> float:
        """Seconds that one row more costs a large step, and one token more a prompt."""
        return (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])

    def batch(self, rows: int, before: int, new: int, reread: bool) -> float:
        """Seconds of a batch's steps.

        Args:
            before, new: Tokens read before the first step, and steps.
            reread: Every step reads the whole text.
        """
        again = rows * (before + new / 2) * self.row if reread else 0.0
        return (new - 1) * (self.step(rows, before + new / 2) + again) if rows else 0.0


BRIDGE = "TransformerBridge"


def adapter_seconds(tokens: int | float, device: str | None = None) -> float:
    """About how many seconds the adapter scorers take for texts of so many tokens, with all cores.

    Args:
        device: As the scorers take it.
    """
    kind = (device or default_device()).partition(":")[0]
    operations = 2 * ADAPTER * tokens * model_size(SMOLLM2).parameters
    at = pace(SMOLLM2, "float32", kind, operations=operations)
    return ADAPTER * tokens * at.row / (n_cores() if kind == "cpu" else 1)


def pace(
    model: str,
    dtype: str,
    device: str,
    model_class: str = BRIDGE,
    threads: int = 1,
    *,
    operations: float = math.inf,
    loaded: Model | None = None,
) -> Pace:
    """A model's pace on this machine: timed, or guessed from its number of parameters.

    It is timed once on this kind of machine.

    Args:
        threads: CPU threads that it computes with.
        operations: Operations of the work to be estimated. No step is timed for short work, nor
            with a model that is large or not on this machine.
        loaded: The model, if it is loaded already.
    """
    import torch

    name = " ".join(
        [
            model,
            dtype,
            "packed steps",
            *[model_class] * (model_class != BRIDGE),
            *[f"{threads} threads"] * (threads > 1),
        ]
    )
    network = getattr(loaded, "original_model", loaded)
    parameters = (
        model_size(model).parameters
        if network is None
        else sum(each.numel() for each in network.parameters())
    )
    found = stored_measurement(device, name)
    if found is None and operations > LONG * BATCHED * operations_per_second(dtype, device):
        small = parameters * getattr(torch, dtype).itemsize < machine_memory() / 3
        if small and (loaded is not None or is_available_offline(model)):
            with suppress(MemoryError, torch.OutOfMemoryError):
                found = store_measurement(
                    device, name, _timed(model, dtype, device, model_class, threads, loaded)
                )
    if found is not None and len(found) == len(ROWS) + 1:
        *seconds, long = found
        key = max(0.0, (long - seconds[1]) / (ROWS[1] * (MORE_KEYS - KEYS)))
        return Pace(ROWS, tuple(seconds), key, f"{model} {dtype} as timed here")
    speed = BATCHED * operations_per_second(dtype, device) / (2 * parameters)
    return Pace(
        (0, 100), (STEP / speed, (STEP + 100) / speed), 0.0, f"{model} by its size, a rough guess"
    )


def _timed(
    model: str, dtype: str, device: str, model_class: str, threads: int, loaded: Model | None
) -> tuple[float, ...]:
    """Seconds of a step at each of ROWS behind KEYS keys, and of the middle behind MORE_KEYS."""
    import torch

    print(f"timing {model} in {dtype}, once on this kind of machine", file=sys.stderr)
    found = loaded or load_model(model, dtype, device, model_class)
    clock = device_clock(device) if threads == 1 else perf_counter
    with torch_threads(threads):
        steps = (
            *(_step(found, rows, KEYS, clock) for rows in ROWS),
            _step(found, ROWS[1], MORE_KEYS, clock),
        )
    del found
    if device.startswith("cuda"):  # what a worker needs next
        torch.cuda.empty_cache()
    return steps


def _step(model: Model, rows: int, keys: int, seconds: Callable[[], float]) -> float:
    """Seconds of a step of so many rows, everything included: bias, trace, sampling. The least of
    several."""
    times: list[float] = []
    ids = model.tokenizer(" word" * keys, add_special_tokens=False).input_ids
    room = model_short_context(model) or model.cfg.n_ctx
    prompt = model.tokenizer.decode(ids[: min(keys, room // 2)])
    task = load_task("sentiment").model_copy(update={"length_counts_prompt": False})
    cell = cell_of(
        model,
        task=task,
        attribute="positive",
        prompts=[prompt],
        alpha=0.5,
        length=STEPS,
        samples=rows,
        max_rows=rows,
        trace="pooled",
    )
    decode_batches(
        model, plan_batches(model, cell), progress=CountingBar(lambda _: times.append(seconds()))
    )
    return min(after - before for before, after in pairwise(times))


def machine_workers() -> int:
    """Workers that this machine has room for: one per GPU, or per CPU core."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else n_cores()


def machine_memory() -> int:
    """Bytes of memory: of one GPU where there is one."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def format_bytes(size: int) -> str:
    """Bytes for reading."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
