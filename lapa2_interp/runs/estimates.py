"""Time that a grid takes on this machine, and the space it needs, before anything runs.

The rate is measured: three decoding steps of the real model are timed once on each kind of machine
and kept in the user's cache; others follow from them. A model that is not on this machine is
guessed by its number of parameters, from a matrix product.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from time import perf_counter

import torch

from lapa2_interp._util.errors import RunError
from lapa2_interp._util.progress import CountingBar
from lapa2_interp._util.terminal import format_bytes
from lapa2_interp.attention.recorder import trace_bytes
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.loop import decode_batch
from lapa2_interp.generation.plan import CACHE_BYTES, MAX_ROWS, plan_batches
from lapa2_interp.generation.resolve import cell_of
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models import machine
from lapa2_interp.models.card import Model, model_card
from lapa2_interp.models.load import load_model
from lapa2_interp.models.prepacked import MEMORY_SHARE
from lapa2_interp.models.sizes import DTYPE_BYTES, is_available_offline, model_size, weight_bytes
from lapa2_interp.models.smollm2 import SMOLLM2
from lapa2_interp.models.tiny import TINY
from lapa2_interp.tasks.segmentation import words_and_signs
from lapa2_interp.tasks.task import Prompts

TIMED = ((128, 64), (16, 64), (64, 192))
"""Rows and keys of the timed steps. A step is taken to last a + b rows + c rows x keys: SmolLM2's
steps of 1 to 128 rows and 32 to 1,024 keys were within 10 % of that."""
STEPS = 3
"""Repetitions of a timed step; the quickest counts."""
GUESSED_SPEED, GUESSED_ROWS = 0.4, 40
"""Where nothing was timed: decoding's share of the speed of matrix products, and the number of rows
that cost as much as reading the weights."""
AT_ONCE = 0.5
"""Time of a token that is read at once with others, of that of a token of a step."""
LONG, MOST_SECONDS = 20.0, 365 * 86400.0
"""Seconds; longer work is announced with its time, or not begun without a word of the user's."""
START = 10.0
"""Seconds until a worker has imported the libraries and loaded a small model."""
CELL_BYTES, TOKEN_BYTES = 40_000, 5
"""Bytes of a cell's files before the first text, and of a token: id and letters, compressed."""
LIBRARIES, PACKED, LOGITS = 700_000_000, 1.5, 6
"""Memory: bytes of the libraries; of packing, in weights (the packed copy, and what is freed late);
and copies of a batch's logits, in float32, that are alive while tokens are drawn."""


@dataclass(frozen=True)
class Estimate:
    """Numbers of texts and row-tokens; seconds of all workers together; bytes on disk, and of the
    worker that needs most memory; and where the rate comes from."""

    texts: int
    row_tokens: int
    seconds: float
    disk: int
    basis: str
    memory: int


def estimate(
    cells: Sequence[Cell], workers: int, device: str | None = None, threads: int = 1
) -> Estimate:
    """Estimate of these cells with so many workers; preparation by methods, such as drafts, is not
    counted.

    Raises:
        ModelError: A model has no configuration.
    """
    if device is None or device.startswith(("auto", "cuda")):  # of another machine, it may be
        device = machine.default_device()
    tokens, busy, longest, disk = sum(map(cost, cells)), 0.0, 0.0, 0
    bases: dict[str, None] = {}
    for cell in cells:
        size, (rows, _) = model_size(cell.model), _batch(cell)
        batches = math.ceil(len(cell.branches) * cell.n_texts / rows)
        kind = cell.model, cell.dtype, cell.model_class, device, threads
        each, basis = rate(*kind, step_size(cell, batches), tokens=tokens)
        bases[basis] = None
        seconds = work(cell) * each
        busy, longest = busy + seconds, max(longest, seconds / batches)
        disk += stored_bytes(cell, size.n_layers, size.n_heads)
    return Estimate(
        texts=sum(cell.n_texts for cell in cells),
        row_tokens=tokens,
        seconds=START + max(busy / workers, longest) if cells else 0.0,
        disk=disk,
        basis="; ".join(bases),
        memory=max((memory(cell, device) for cell in cells), default=0),
    )


def check_affordable(texts: int, seconds: float, memory: int, yes: bool = False) -> None:
    """Refuse what would take a year, or more memory than there is, unless the user says yes.

    Raises:
        RunError: Why.
    """
    most, years = machine.machine_memory(), seconds / MOST_SECONDS
    if not yes and (years > 1 or memory > most):
        room = f"{format_bytes(memory)} of memory, of {format_bytes(most)}"
        raise RunError(
            f"{texts} texts would take {f'{years:.3g} years of work' if years > 1 else room};"
            " ask for fewer or shorter ones, or give yes=True (--yes)"
        )


def cost(cell: Cell) -> int:
    """A cell's row-tokens, padding included: every prompt once, and every new token but the last,
    which nothing reads."""
    before, new = _lengths(cell)
    return len(cell.branches) * (len(cell.prompts) * before + cell.n_texts * (new - 1))


def work(cell: Cell) -> float:
    """A cell's row-tokens by the time that they take."""
    at_once = len(cell.branches) * len(cell.prompts) * _lengths(cell)[0]
    return cost(cell) - (1 - AT_ONCE) * at_once


def step_size(cell: Cell, batches: int) -> tuple[int, int]:
    """Rows of a step of a cell of so many batches, and keys in front of it."""
    return len(cell.branches) * cell.n_texts // batches, max(1, cell.length // 2)


def stored_bytes(cell: Cell, n_layers: int, n_heads: int) -> int:
    """Bytes of a cell's texts and trace, by a model with so many layers and heads."""
    rows = cell.n_texts * len(cell.branches)
    trace = trace_bytes(cell.trace, rows, cell.length, n_layers, n_heads, 0, 0)
    if cell.trace != "none":  # every prefix token by itself
        trace += 4 * rows * cell.length * _prefix_length(cell)
    return CELL_BYTES + cell.n_texts * cell.length * TOKEN_BYTES + trace


def memory(cell: Cell, device: str = "cpu") -> int:
    """Bytes that a worker needs for a cell: weights, the largest batch's keys, values and logits,
    and on a CPU the libraries, and packed weights where they fit."""
    weights, (rows, row) = weight_bytes(cell.model, cell.dtype), _batch(cell)
    found = weights + rows * (row + LOGITS * model_size(cell.model).vocab * 4)
    fits = 2 * weights <= MEMORY_SHARE * machine.usable_memory()
    return found + (LIBRARIES + int(PACKED * weights * fits) if device == "cpu" else 0)


def _batch(cell: Cell) -> tuple[int, int]:
    """Rows of a cell's largest batch, as `plan_batches` has them, and bytes of a row's keys, values
    and kept logits."""
    size, branches, (before, new) = model_size(cell.model), len(cell.branches), _lengths(cell)
    logits = before * cell.decoding_method.reads_prompt * size.vocab
    keys = 2 * size.n_layers * size.kv_width * (before + new)
    row = (keys + logits) * DTYPE_BYTES[cell.dtype]
    most = cell.max_rows or min(MAX_ROWS, CACHE_BYTES // row)
    return branches * min(max(1, most // branches), cell.n_texts), row


def _lengths(cell: Cell) -> tuple[int, int]:
    """Tokens of the longest BOS, prefix and prompt, and new ones of the shortest prompt."""
    prompts = [_tokens(prompt, cell.model) for prompt in cell.prompts]
    front = _prefix_length(cell)
    new = cell.length - min(prompts) * cell.task.length_counts_prompt
    return 1 + cell.doubled_bos + max(prompts) + front, max(1, new)


def _prefix_length(cell: Cell) -> int:
    """Tokens of the longest hard prefix."""
    texts = [each.prefix + each.join for each in cell.branches if isinstance(each.prefix, str)]
    return max((_tokens(text, cell.model) for text in texts), default=0)


@lru_cache(maxsize=4096)
def _tokens(text: str, model: str) -> int:
    """About how many tokens a text has, without its model's tokenizer: words and marks, or bytes in
    the tiny models."""
    return len(text.encode()) if model in TINY else len(words_and_signs(text))


def rate(
    model: str,
    dtype: str,
    model_class: str,
    device: str,
    threads: int = 1,
    step: tuple[int, int] = (MAX_ROWS, 64),
    *,
    tokens: int | float = math.inf,
    loaded: Model | None = None,
) -> tuple[float, str]:
    """Seconds of one worker for a row-token, and where the number comes from: a step timed on this
    kind of machine, or a guess.

    Args:
        step: Rows of a step and keys in front of it.
        tokens: Row-tokens of the work. No step is timed for short work, nor with a model that is
            large or not on this machine.
        loaded: The model, if it is loaded already.
    """
    name = f"{model} {dtype} {model_class}, {threads} threads"
    basis = f"{model} {dtype} as timed here"
    if stored := machine.stored_measurement(device, name):
        return _rate_between(stored, *step), basis
    network = getattr(loaded, "original_model", loaded)
    parameters = (
        model_size(model).parameters
        if network is None
        else sum(each.numel() for each in network.parameters())
    )
    speed = GUESSED_SPEED * machine.operations_per_second(dtype, device)
    guess = 2 * parameters * (1 + GUESSED_ROWS / step[0]) / speed
    small = parameters * DTYPE_BYTES[dtype] < machine.machine_memory() / 3
    if tokens * guess > LONG and small and (loaded or is_available_offline(model)):
        print(f"timing {model} in {dtype}, once on this machine", file=sys.stderr)
        with suppress(MemoryError, torch.OutOfMemoryError), machine.torch_threads(threads):
            timed = loaded or load_model(model, dtype, device, model_class)
            seconds = tuple(_step(timed, *each) for each in TIMED)
            torch.cuda.empty_cache()  # what a worker needs next
            return _rate_between(machine.store_measurement(device, name, seconds), *step), basis
    return guess, f"{model} by its size, a rough guess"


def _rate_between(seconds: Sequence[float], rows: int, keys: int) -> float:
    """Seconds of a row-token in a step, from those of the `TIMED` steps."""
    (many, before), (few, _), (third, longer) = TIMED
    row = max(0.0, seconds[0] - seconds[1]) / (many - few)
    weights = max(0.0, seconds[1] - few * row)
    key = max(0.0, seconds[2] - weights - third * row) / (third * (longer - before))
    return weights / rows + max(0.0, row + key * (keys - before))


def _step(model: Model, rows: int, keys: int) -> float:
    """Seconds of a decoding step, everything included: bias, trace, sampling."""
    ids = model.tokenizer(" word" * keys, add_special_tokens=False).input_ids[:keys]
    cell = cell_of(
        model,
        task=load_task("sentiment").model_copy(update={"length_counts_prompt": False}),
        attribute="positive",
        prompts=Prompts(texts=(model.tokenizer.decode(ids),)),
        alpha=0.5,
        length=STEPS + 1,
        samples=rows,
        max_rows=rows,
        trace="pooled",
    )
    one_thread = torch.get_num_threads() == 1
    clock = machine.device_clock(model_card(model).device) if one_thread else perf_counter
    times: list[float] = []
    bar = CountingBar(lambda _: times.append(clock()))
    plan = plan_batches(model, cell)
    decode_batch(model, plan, plan.batches[0], bar)
    return min(after - before for before, after in pairwise(times))


def reading_seconds(tokens: int | float, device: str | None = None) -> float:
    """About how many seconds SmolLM2 takes in float32 to read so many tokens, with all cores: those
    of its matrix products."""
    kind = (device or machine.default_device()).partition(":")[0]
    each = 2 * model_size(SMOLLM2).parameters / machine.operations_per_second("float32", kind)
    return tokens * each / (machine.n_cores() if kind == "cpu" else 1)
