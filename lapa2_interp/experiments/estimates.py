"""How long a grid takes on this machine, and how much it writes, before anything runs.

The unit is the row-token: one token through the model in one branch. A pass reads all weights however few rows it has, and so
costs STEP row-tokens more: cells of 4 texts and of 120 then tell the same rate of this machine. It comes from the last sweep of
the same model and precision where there was one; else, by the number of parameters, from a sweep of a model of like size, or from
a matrix product.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter

from pydantic import TypeAdapter

from lapa2_interp.errors import ModelError
from lapa2_interp.experiments.grids import Cell
from lapa2_interp.models import TINY, cache_folder, keep_file
from lapa2_interp.trace import trace_bytes

STEP = 40
"""Row-tokens that a pass of the model takes beside those of its rows (SmolLM2 in bfloat16 on a CPU core: 42 ms against 1.0)."""
BATCHED = 0.4
"""Share of a large matrix product's speed that decoding reaches where nothing was measured."""
TEXT_BYTES = 5
"""Of a token in samples.parquet: its id and its letters, compressed."""
CELL_BYTES = 40_000
"""Of a cell's three files before the first text."""
ALIKE = 30
"""How many times larger or smaller a model may be than the one whose measured rate tells its own."""


@dataclass(frozen=True)
class Size:
    """A model's size, without its weights."""

    parameters: int
    n_layers: int
    n_heads: int
    n_ctx: int


PAPER_SIZES = {
    "gpt2-medium": Size(354_823_168, 24, 16, 1024),
    "meta-llama/Llama-2-7b-hf": Size(6_738_415_616, 32, 32, 4096),
    "EleutherAI/pythia-12b": Size(11_846_072_320, 36, 40, 2048),
    "meta-llama/Llama-2-13b-hf": Size(13_015_864_320, 40, 40, 4096),
}
"""Of the paper's models, for estimates where the hub is not reached."""


@dataclass(frozen=True)
class Estimate:
    """What cells will take.

    Attributes:
        cells, texts, row_tokens: Counts.
        seconds: With all workers busy.
        disk: Bytes.
        basis: Where the rate comes from.
        needs: Memory of the largest model's weights, bytes.
    """

    cells: int
    texts: int
    row_tokens: int
    seconds: float
    disk: int
    basis: str
    needs: int


@cache
def model_size(name: str) -> Size:
    """A model's size from its configuration.

    Raises:
        ModelError: No configuration is found.
    """
    if name in PAPER_SIZES:
        return PAPER_SIZES[name]
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lapa2_interp.models import _source, _tiny_config, load_tokenizer

    try:
        config = (
            _tiny_config(name, load_tokenizer(name)) if name in TINY else AutoConfig.from_pretrained(str(_source(name)))
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"no configuration of {name!r} is found: {' '.join(str(error).split())[:120]}") from error
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    return Size(parameters, config.num_hidden_layers, config.num_attention_heads, config.max_position_embeddings)


def cost(cell: Cell) -> int:
    """A cell's row-tokens, padding included: every prompt once, and every new token but the last, which nothing reads.

    A method that reads its text anew at every step reads all of it every time.
    """
    method, task = cell.decoder, cell.task
    branches = method.branches(task, cell.attribute)
    prompts = [_tokens(prompt, cell.model) for prompt in task.prompts.texts]
    fronts = [each.prefix + each.join for each in branches if isinstance(each.prefix, str)]
    before = 1 + cell.doubled_bos + max(prompts) + max((_tokens(text, cell.model) for text in fronts), default=0)
    new = max(1, cell.length - (min(prompts) if task.length_counts_prompt else 0))
    steps = (new - 1) * before + new * (new - 1) // 2 if method.reads_anew else new - 1
    return len(branches) * len(prompts) * (before + cell.samples * steps)


def work(cell: Cell) -> int:
    """A cell's row-tokens and what its passes take besides, as row-tokens; by this cells take time."""
    from lapa2_interp.plan import MAX_ROWS

    together = max(1, (cell.max_rows or MAX_ROWS) // len(cell.decoder.branches(cell.task, cell.attribute)))
    passes = math.ceil(len(cell.task.prompts.texts) * cell.samples / together) * cell.length
    return cost(cell) + STEP * passes


def _tokens(text: str, model: str) -> int:
    """About how many tokens a text has, without its model's tokenizer: words and marks, or bytes in the tiny models."""
    return len(text.encode()) if model in TINY else len(re.findall(r"\w+|[^\w\s]", text))


def estimate(cells: Sequence[Cell], workers: int, device: str | None = None) -> Estimate:
    """What these cells take with so many workers.

    Raises:
        ModelError: A model has no configuration.
    """
    import torch

    here = "cuda" if torch.cuda.is_available() else "cpu"
    if device is None or device == "auto" or device.startswith("cuda"):  # of other machines, it may be
        device = here
    rates = {(cell.model, cell.dtype): rate(cell.model, cell.dtype, device) for cell in cells}
    seconds = sum(work(cell) / rates[cell.model, cell.dtype][0] for cell in cells) / max(1, workers)
    disk = 0
    for cell in cells:
        size, texts = model_size(cell.model), len(cell.task.prompts.texts) * cell.samples
        rows = texts * len(cell.decoder.branches(cell.task, cell.attribute))
        trace = trace_bytes(cell.trace, rows, cell.length, size.n_layers, size.n_heads, 0, 0)  # type: ignore[arg-type]
        disk += CELL_BYTES + texts * cell.length * TEXT_BYTES + trace
    widths = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
    return Estimate(
        cells=len(cells),
        texts=sum(len(cell.task.prompts.texts) * cell.samples for cell in cells),
        row_tokens=sum(map(cost, cells)),
        seconds=seconds,
        disk=disk,
        basis="; ".join(dict.fromkeys(basis for _, basis in rates.values())),
        needs=max((model_size(cell.model).parameters * widths[cell.dtype] for cell in cells), default=0),
    )


# --- what this machine does


def rate(model: str, dtype: str, device: str) -> tuple[float, str]:
    """Row-tokens of `work` per second of one worker, and where the number comes from."""
    known = _known()
    kind = device.partition(":")[0]
    found = known.get(f"{model} {dtype} {kind}")
    if found:
        return found, f"{model} {dtype} as measured here"
    parameters = model_size(model).parameters
    others: dict[float, tuple[str, float]] = {}  # by how much larger the other model is
    for name, speed in known.items():
        other, width, where = name.rsplit(" ", 2)
        if where == kind and width == dtype:
            with suppress(ModelError):
                others[model_size(other).parameters / parameters] = (other, speed)
    times = min(others, key=lambda each: max(each, 1 / each), default=float("inf"))
    if 1 / ALIKE <= times <= ALIKE:
        other, speed = others[times]
        return speed * times, f"{model} by its size, from {other}"
    return BATCHED * _flops(dtype, kind) / (2 * parameters), f"{model} by its size, from a matrix product"


def remember_rate(model: str, dtype: str, device: str, speed: float) -> None:
    """Keep a measured rate for the next estimate."""
    known = _known() | {f"{model} {dtype} {device.partition(':')[0]}": round(speed, 2)}
    with suppress(ModelError):  # a cache that cannot be written
        keep_file(_file(), lambda path: path.write_text(json.dumps(known), encoding="utf-8"))


def _file() -> Path:
    return cache_folder() / "rates.json"


def _known() -> dict[str, float]:
    """Measured rates by model, dtype and kind of device; what a damaged file says is passed over."""
    with suppress(OSError, ValueError):
        found = TypeAdapter(dict[str, float]).validate_json(_file().read_bytes())
        return {name: speed for name, speed in found.items() if speed > 0 and name.count(" ") >= 2}
    return {}


@cache
def _flops(dtype: str, device: str) -> float:
    """Operations per second of one thread (or GPU) at a matrix product."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.ones(128, 1024, dtype=getattr(torch, dtype), device=device)
        b = torch.ones(1024, 1024, dtype=getattr(torch, dtype), device=device)
        (a @ b).sum().item()
        began, runs = perf_counter(), 0
        while perf_counter() - began < 0.3:
            (a @ b).sum().item()
            runs += 1
        return 2 * 128 * 1024 * 1024 * runs / (perf_counter() - began)
    finally:
        torch.set_num_threads(before)


def machine_workers() -> int:
    """Workers that this machine has room for: one per GPU, or per CPU core."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else len(os.sched_getaffinity(0))


def machine_memory() -> int:
    """Bytes of memory: of one GPU where there is one."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def shown_time(seconds: float) -> str:
    """Seconds for reading: 40 s, 12 min, 3.4 h, 5.0 days, 7.4 years."""
    for size, name in ((365 * 86400, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {name}" if size > 60 else f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def shown_size(size: int) -> str:
    """Bytes for reading."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
