"""What kind of machine this is, and what it computes fast. Speed is measured, never read from the
processor's flags.

Processors without bfloat16 units compute in bfloat16 too, several times slower than in float32.
`dtype = "auto"` means bfloat16 where that is really the faster of the two. What is measured is kept
in the user's cache (machine.json) under the kind of processor, so that machines that share a home
folder, and emulated ones, each have their own numbers.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from lapa2_interp._util.errors import ModelError, unknown_choice
from lapa2_interp._util.files import cache_file, cache_folder, with_checksums, without_checksums
from lapa2_interp._util.parsing import read_text

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
AUTO = "auto"
DtypeOrAuto = Literal["auto", Dtype]
ModelClass = Literal["TransformerBridge", "HookedTransformer", "TransformersModel"]
ISA = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
)
"""Environment variables that decide which instructions the computing libraries use."""
FASTER = 0.9
"""bfloat16 is chosen where its products take less than this share of float32's time."""
SLOWER = 1.25
"""A named dtype is called slow where its products take more than this multiple of float32's time.
"""
ROWS, WIDTH, MATRICES = 24, 1024, 8
"""Rows of the timed products, and the square matrices they go through: 32 MiB in float32, more than
stays near a core."""


def kind_of(device: str = "cpu") -> str:
    """The kind of processor a device is, in one line: model, instruction set in use, and what the
    environment restricts.

    Args:
        device: cpu, cuda, cuda:1, ...
    """
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    if not device.startswith("cpu"):
        return device
    limits = [f"{name}={os.environ[name]}" for name in ISA if os.environ.get(name)]
    return ", ".join([_processor(), torch.backends.cpu.get_cpu_capability(), *limits])


@cache
def _processor() -> str:
    """Name, family, model and stepping: clouds give several processors one name."""
    wanted = ("model name", "cpu family", "model", "stepping")
    fields: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                fields.setdefault(name.strip(), value.strip())
    return (
        " ".join(fields[name] for name in wanted if name in fields)
        or platform.processor()
        or platform.machine()
    )


# --- what was measured


def measured(device: str, name: str) -> tuple[float, ...] | None:
    """Numbers that were measured on this kind of processor; None if they were not, or their file is
    damaged."""
    return _all().get(kind_of(device), {}).get(name)


def remember(device: str, name: str, numbers: tuple[float, ...]) -> tuple[float, ...]:
    """Keep measured numbers for this kind of processor; a cache that cannot be written keeps
    nothing.

    Returns:
        The numbers as they are kept, to four digits.
    """
    known = _all()
    kept = known.setdefault(kind_of(device), {})[name] = tuple(
        float(f"{number:.4g}") for number in numbers
    )
    with suppress(ModelError):
        cache_file(
            _file(),
            lambda path: path.write_text(with_checksums(known), encoding="utf-8"),
        )
    return kept


def _file() -> Path:
    return cache_folder() / "machine.json"


def _all() -> dict[str, dict[str, tuple[float, ...]]]:
    with suppress(OSError, ValueError):
        fields, _ = without_checksums(read_text(_file()))
        found = TypeAdapter(dict[str, dict[str, tuple[float, ...]]]).validate_python(fields)
        positive = {
            kind: {name: ns for name, ns in each.items() if min(ns, default=0) > 0}
            for kind, each in found.items()
        }
        return positive
    return {}


# --- precision


def resolve_dtype(dtype: object, device: str | None = None) -> Dtype:
    """The name of a dtype, given as a name or as torch's; "auto" is bfloat16 where this device
    computes faster in it, else float32.
    faster in it, else float32.

    Args:
        device: Where it will be computed; CUDA when there is one, by default.

    Raises:
        ModelError: Unknown dtype.
    """
    name: Any = str(dtype).removeprefix("torch.")
    if name == AUTO:
        name = faster_dtype(device)
    if name not in get_args(Dtype):
        raise ModelError(unknown_choice("dtype", name, (AUTO, *get_args(Dtype))))
    return name


def faster_dtype(device: str | None = None) -> str:
    """bfloat16 or float32: on a CPU by timing both, on a GPU bfloat16 where it is native."""
    import torch

    device = default_device() if device in (None, AUTO) else str(device)
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    if not device.startswith("cpu"):
        return "float32"
    return "bfloat16" if slowness("bfloat16") < FASTER else "float32"


def slowness(dtype: str) -> float:
    """How many times as long as in float32 a matrix product of 24 rows takes on this CPU in another
    dtype.

    Timed once per kind of processor, in half a second, on one thread.
    """
    name = f"{dtype} / float32"
    return (
        measured("cpu", name) or remember("cpu", name, (_timed_slowness(dtype, kind_of("cpu")),))
    )[0]


@cache
def _timed_slowness(dtype: str, kind: str) -> float:
    return product_seconds(dtype) / product_seconds("float32")


def slow_note(dtype: str, device: str | None = None) -> str | None:
    """One line about a dtype that this CPU emulates; None where there is nothing to say."""
    device = default_device() if device in (None, AUTO) else str(device)
    if not device.startswith("cpu") or dtype not in ("bfloat16", "float16"):
        return None
    times = slowness(dtype)
    if times < SLOWER:
        return None
    return (
        f"{dtype} is slow on this processor: a product takes {times:.1f} times as long as in"
        " float32"
    )


def tell_if_slow(dtype: str, device: str | None = None) -> None:
    """Print `slow_note`, where there is one, on standard error."""
    if note := slow_note(dtype, device):
        print(f"note: {note}", file=sys.stderr)


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_memory(device: str = "cpu") -> int:
    """The most bytes this process has had so far: on its GPUs, or in main memory."""
    if device != "cpu":
        import torch

        return sum(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that main memory, or that of a GPU, is used up."""
    # PyTorch's allocator of main memory raises a plain RuntimeError.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "DefaultCPUAllocator" in str(error)
    )


def default_device() -> str:
    """cuda where there is one, else cpu."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def product_seconds(dtype: str, device: str = "cpu", tries: int = 4) -> float:
    """Seconds of `MATRICES` products [ROWS, WIDTH] x [WIDTH, WIDTH], the least of several tries; on
    a CPU those of one thread."""
    import torch

    with n_threads(1):
        x = torch.full((ROWS, WIDTH), 0.5, dtype=getattr(torch, dtype), device=device)
        weights = [
            torch.full((WIDTH, WIDTH), 1 / WIDTH, dtype=x.dtype, device=device)
            for _ in range(MATRICES)
        ]
        least, clock = float("inf"), clock_of(device)
        for _ in range(1 + tries):  # the first try warms up and is not the fastest
            began, y = clock(), x
            for weight in weights:
                y = torch.nn.functional.linear(y, weight)
            y.sum().item()
            least = min(least, clock() - began)
    return least


@cache
def operations_per_second(dtype: str, device: str) -> float:
    """Additions and multiplications of the timed products."""
    return 2 * ROWS * WIDTH**2 * MATRICES / product_seconds(dtype, device)


def clock_of(device: str) -> Callable[[], float]:
    """A clock in seconds: on a CPU the time this thread computed, whatever else the machine does;
    elsewhere the time that passed."""
    return thread_time if device.startswith("cpu") else perf_counter


@contextmanager
def n_threads(n: int) -> Iterator[None]:
    """Let PyTorch use so many threads in the block. More threads than idle cores wait for each
    other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
