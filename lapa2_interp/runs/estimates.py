"""What cells take before anything runs: texts, row-tokens, bytes on disk and in memory.

How long they take is told by the progress of the work, from its first finished batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lapa2_interp._util.terminal import format_bytes
from lapa2_interp.attention.cache import CACHE_BYTES
from lapa2_interp.attention.recorder import trace_bytes
from lapa2_interp.bias.text_start import NO_START
from lapa2_interp.errors import RunError, parameter
from lapa2_interp.generation.cell import Cell
from lapa2_interp.generation.plan import MAX_ROWS
from lapa2_interp.models import machine
from lapa2_interp.models.prepacked import MEMORY_SHARE
from lapa2_interp.models.sizes import DTYPE_BYTES, model_size, weight_bytes
from lapa2_interp.models.tiny import TINY
from lapa2_interp.tasks.segmentation import words_and_signs

MOST_ROW_TOKENS = 10**11
"""Row-tokens that are not begun without a word of the user's: a hundred times the paper's grids,
and years of work of a few cores."""
CELL_BYTES, TOKEN_BYTES, ID_BYTES = 40_000, 5, 2
"""Bytes of a cell's files before the first text, of a token (id and letters, compressed), and of an
id alone."""
LIBRARIES, PACKED, LOGITS = 700_000_000, 1.5, 6
"""Memory: bytes of the libraries; of prepacking, in weights (the prepacked copy, and what is freed
late); and copies of a batch's logits, in float32, that are alive while tokens are drawn."""


@dataclass(frozen=True)
class Estimate:
    """Numbers of texts and row-tokens; bytes on disk, and of the worker that needs most memory."""

    texts: int
    row_tokens: int
    disk: int
    memory: int

    def __str__(self) -> str:
        return (
            f"{self.texts} texts, {self.row_tokens} row-tokens, {format_bytes(self.disk)} on disk,"
            f" {format_bytes(self.memory)} of memory a worker"
        )


def estimate(cells: Sequence[Cell], device: str | None = None) -> Estimate:
    """Estimate of these cells; preparation by methods, such as drafts, is not counted.

    Raises:
        ModelError: A model has no configuration.
    """
    if device is None or device.startswith(("auto", "cuda")):  # of another machine, it may be
        device = machine.default_device()
    disk = 0
    for cell in cells:
        size = model_size(cell.model)
        disk += stored_bytes(cell, size.n_layers, size.n_heads)
    return Estimate(
        texts=sum(cell.n_texts for cell in cells),
        row_tokens=sum(map(row_tokens_of, cells)),
        disk=disk,
        memory=max((memory(cell, device) for cell in cells), default=0),
    )


def check_affordable(texts: int, row_tokens: int, memory: int, yes: bool = False) -> None:
    """Refuse what has more than MOST_ROW_TOKENS, or needs more memory than there is, unless the
    user says yes.

    Raises:
        RunError: Why.
    """
    most = machine.machine_memory()
    if not yes and (row_tokens > MOST_ROW_TOKENS or memory > most):
        room = f"{format_bytes(memory)} of memory, of {format_bytes(most)}"
        tokens = f"{row_tokens:.3g} row-tokens, and {MOST_ROW_TOKENS:.0g} are begun unasked"
        raise RunError(
            f"{texts} texts would take {tokens if row_tokens > MOST_ROW_TOKENS else room};"
            f" ask for fewer or shorter ones, or give {parameter('yes', True)}"
        )


def row_tokens_of(cell: Cell) -> int:
    """A cell's row-tokens, padding included: every prompt once, and every new token but the last,
    which nothing reads; of a chat also later messages, and earlier turns that are read again."""
    before, new = _lengths(cell)
    chats, messages = cell.n_texts // cell.n_turns, _later_messages(cell)
    later = sum(messages)
    if messages and not cell.keeps_turns:
        later += sum(
            before + sum(messages[:turn]) + (turn + 1) * new for turn in range(len(messages))
        )
    read = len(cell.prompts) * before + chats * later
    return len(cell.branches) * (read + cell.n_texts * (new - 1))


def stored_bytes(cell: Cell, n_layers: int, n_heads: int) -> int:
    """Bytes of a cell's texts and trace, by a model with `n_layers` layers of `n_heads` heads."""
    rows = cell.n_texts * len(cell.branches)
    trace = 0
    if cell.trace != "none":
        trace = trace_bytes(cell.trace, rows, cell.length, n_layers, n_heads, 0, 0)
        trace += 4 * rows * cell.length * _prefix_length(cell)  # every prefix token by itself
    context = cell.n_texts * _later_keys(cell) // 2 * ID_BYTES
    return CELL_BYTES + cell.n_texts * cell.length * TOKEN_BYTES + context + trace


def memory(cell: Cell, device: str = "cpu") -> int:
    """Bytes that a worker needs for a cell: weights, the largest batch's keys, values and logits,
    and on a CPU the libraries, and prepacked weights where they fit."""
    weights, (rows, row) = weight_bytes(cell.model, cell.dtype), _batch(cell)
    batch = rows * (row + LOGITS * model_size(cell.model).vocab * 4)
    fits = 2 * weights <= MEMORY_SHARE * machine.usable_memory()
    return weights + batch + (LIBRARIES + int(PACKED * weights * fits) if device == "cpu" else 0)


def _batch(cell: Cell) -> tuple[int, int]:
    """Rows of a cell's largest batch, as `plan_batches` has them, and bytes of a row's keys, values
    and kept logits."""
    size, branches, (before, new) = model_size(cell.model), len(cell.branches), _lengths(cell)
    logits = before * cell.decoding_method.reads_prompt * size.vocab
    keys = 2 * size.n_layers * size.kv_width * (before + new + _later_keys(cell))
    row = (keys + logits) * DTYPE_BYTES[cell.dtype]
    most = cell.max_rows or min(MAX_ROWS, CACHE_BYTES // row)
    return branches * min(max(1, most // branches), cell.n_texts // cell.n_turns), row


def _lengths(cell: Cell) -> tuple[int, int]:
    """Tokens of the longest BOS, prefix and prompt, and new ones of the shortest prompt."""
    prompts = [_tokens(prompt, cell.model) for prompt in cell.prompts]
    front = _prefix_length(cell)
    new = cell.length - min(prompts) * cell.task.length_counts_prompt
    front += (cell.start != NO_START) + cell.doubled_bos
    return max(prompts) + front, max(1, new)


def _later_messages(cell: Cell) -> list[int]:
    """Tokens of each of a chat's later messages."""
    later = () if cell.task.chat is None else cell.task.chat.later
    return [_tokens(message, cell.model) for message in later]


def _later_keys(cell: Cell) -> int:
    """Keys that the later turns of a chat add."""
    messages = _later_messages(cell)
    return sum(messages) + len(messages) * cell.length


def _prefix_length(cell: Cell) -> int:
    """Tokens of the longest hard prefix."""
    texts = [
        branch.prefix + branch.join for branch in cell.branches if isinstance(branch.prefix, str)
    ]
    return max((_tokens(text, cell.model) for text in texts), default=0)


@lru_cache(maxsize=4096)
def _tokens(text: str, model: str) -> int:
    """About how many tokens a text has, without its model's tokenizer: words and marks, or bytes in
    the tiny models."""
    return len(text.encode()) if model in TINY else len(words_and_signs(text))
